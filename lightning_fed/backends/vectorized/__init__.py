"""Vectorised visits: several small clients trained at once under ``torch.func.vmap``."""

from lightning_fed.backends.vectorized.plan import Vectorized as Vectorized

__all__ = [
    "Vectorized",
]
