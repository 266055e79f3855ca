"""Backends: train clients in other processes or on other machines, with the same results as in one process."""
