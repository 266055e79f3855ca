"""Features and labels: feature layers of a model, feature vectors, label maps."""
