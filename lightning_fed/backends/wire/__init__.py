"""Server side, client side and messages for federations across machines, on any network."""

from lightning_fed.backends.wire.bounds import OrderBounds as OrderBounds
from lightning_fed.backends.wire.transport import Deadline as Deadline

__all__ = [
    "Deadline",
    "OrderBounds",
]
