"""Checks for a fit: finds attributes with values left by another client's visit."""
