"""Adapters to Lightning's internals, also usable without federated training."""
