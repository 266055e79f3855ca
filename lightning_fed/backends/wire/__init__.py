"""Server program and client program for federations across machines, for any network transport."""

from lightning_fed.backends.wire.bounds import OrderBounds as OrderBounds
from lightning_fed.backends.wire.transport import Deadline as Deadline

__all__ = [
    "Deadline",
    "OrderBounds",
]
