"""Parallel clients: several processes train the clients for a round."""

from lightning_fed.backends.client_parallel.strategy import ClientParallelStrategy as ClientParallelStrategy

__all__ = [
    "ClientParallelStrategy",
]
