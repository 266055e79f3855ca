"""Parallel clients: several processes share a round's visits."""

from lightning_fed.backends.client_parallel.strategy import ClientParallelStrategy as ClientParallelStrategy

__all__ = [
    "ClientParallelStrategy",
]
