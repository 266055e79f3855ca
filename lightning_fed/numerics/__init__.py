"""Numerics: float64 sums, weighted means, distances and chunks for large inputs."""
