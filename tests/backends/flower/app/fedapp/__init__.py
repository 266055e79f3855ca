"""Federations for test_flower_processes.py."""
