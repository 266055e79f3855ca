"""Finds module, callback and optimizer attributes with values left by another client's training."""
