"""Federated rounds: start, client training, aggregation and log."""
