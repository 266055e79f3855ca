"""Backends: ways to execute visits in other processes and on other machines, with the result of one process."""
