"""The two halves of a federation across machines, whatever the network, and their messages as packets."""

from lightning_fed.backends.wire.bounds import OrderBounds as OrderBounds
from lightning_fed.backends.wire.transport import Deadline as Deadline

__all__ = [
    "Deadline",
    "OrderBounds",
]
