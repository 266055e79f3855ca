"""Backends execute visits in other processes or on other machines; results equal a run in one process."""
