"""Backends: client visits in other processes or on other machines, with the same results as in one process."""
