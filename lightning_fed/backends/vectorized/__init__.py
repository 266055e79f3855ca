"""Vectorised visits: several small clients train at once with ``torch.func.vmap``."""

from lightning_fed.backends.vectorized.plan import Vectorized as Vectorized

__all__ = [
    "Vectorized",
]
