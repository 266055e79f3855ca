"""Vectorised visits: simultaneous training for several small clients with ``torch.func.vmap``."""

from lightning_fed.backends.vectorized.plan import Vectorized as Vectorized

__all__ = [
    "Vectorized",
]
