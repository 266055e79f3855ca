"""Checks of a fit: attributes with values from another client's visit."""
