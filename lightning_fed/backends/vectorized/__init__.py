"""Trains several small clients simultaneously with ``torch.func.vmap`` (vectorised visits)."""

from lightning_fed.backends.vectorized.plan import Vectorized as Vectorized

__all__ = [
    "Vectorized",
]
