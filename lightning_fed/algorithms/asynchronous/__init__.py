"""Asynchronous rounds: FedBuff and FedAsync, in virtual time or with a recorded order of arrival."""

from lightning_fed.algorithms.asynchronous.arrivals import Durations as Durations
from lightning_fed.algorithms.asynchronous.rules import AsynchronousRule as AsynchronousRule
from lightning_fed.algorithms.asynchronous.rules import FedAsync as FedAsync
from lightning_fed.algorithms.asynchronous.rules import FedBuff as FedBuff

__all__ = [
    "AsynchronousRule",
    "Durations",
    "FedAsync",
    "FedBuff",
]
