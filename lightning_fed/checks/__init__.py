"""Checks for a fit: finds attributes of the user's objects with values left by another client's training."""
