"""Functions to use Lightning's internals, also without federated training."""
