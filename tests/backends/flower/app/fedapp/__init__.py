"""The federations of test_flower_processes.py."""
