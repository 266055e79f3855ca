"""Trains several clients with small models simultaneously, with ``torch.func.vmap``."""

from lightning_fed.backends.vectorized.plan import Vectorized as Vectorized

__all__ = [
    "Vectorized",
]
