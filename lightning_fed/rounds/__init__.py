"""Federated rounds: start, client visits, aggregation and log."""
