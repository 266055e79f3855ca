"""Parallel clients: a round's visits shared out to processes."""

from lightning_fed.backends.client_parallel.strategy import ClientParallelStrategy as ClientParallelStrategy

__all__ = [
    "ClientParallelStrategy",
]
