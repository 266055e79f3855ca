"""Aggregators by name, for recipes and the command line."""

from __future__ import annotations

from lightning_fed.aggregators.fairavg import FairAvg
from lightning_fed.aggregators.fedatt import FedAtt
from lightning_fed.aggregators.fedavg import FedAvg
from lightning_fed.aggregators.fedavgm import FedAvgM
from lightning_fed.aggregators.feddane import FedDANE
from lightning_fed.aggregators.fedma import FedMA
from lightning_fed.aggregators.fedmargin import FedMargin
from lightning_fed.aggregators.fedopt import FedAdagrad, FedAdam, FedYogi
from lightning_fed.aggregators.fedprox import FedProx
from lightning_fed.aggregators.fesem import FeSEM
from lightning_fed.aggregators.pfnm import PFNM
from lightning_fed.server import Aggregator

AGGREGATORS: dict[str, type[Aggregator]] = {
    "fairavg": FairAvg,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedatt": FedAtt,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "feddane": FedDANE,
    "fedma": FedMA,
    "fedmargin": FedMargin,
    "fedprox": FedProx,
    "fedyogi": FedYogi,
    "fesem": FeSEM,
    "pfnm": PFNM,
}
"""The rules that ``aggregator="name"`` can mean."""


def build_aggregator(aggregator: str | Aggregator) -> Aggregator:
    """The rule by its name (in any case), or the object itself.

    Raises:
        ValueError: If the name is not known.
        TypeError: If it is neither a name nor an aggregator.

    Example:
        >>> type(build_aggregator("FedAvg")).__name__
        'FedAvg'

    """
    if isinstance(aggregator, Aggregator):
        return aggregator
    if not isinstance(aggregator, str):
        raise TypeError(f"Expected `aggregator` to be a name or an Aggregator object, but got {aggregator!r}.")
    if aggregator.lower() not in AGGREGATORS:
        raise ValueError(f"Expected `aggregator` to be one of {sorted(AGGREGATORS)}, but got {aggregator!r}.")
    return AGGREGATORS[aggregator.lower()]()
