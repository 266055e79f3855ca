"""Numerics: float64 sums, weighted means, distances, and the division of large inputs into chunks."""
