"""Backends execute visits in other processes or on other machines. Results equal the results from one process."""
