"""Numbers: float64 sums, weighted means, distances, and how large inputs are cut."""
