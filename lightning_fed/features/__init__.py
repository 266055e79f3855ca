"""Features and labels: a model's feature layers, feature vectors, and label maps."""
