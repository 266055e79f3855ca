"""State of a federated fit: options, entry policies, round log, and checks for Trainer and checkpoint."""
