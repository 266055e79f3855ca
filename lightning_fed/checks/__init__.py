"""Checks for attributes with values from another client's training."""
