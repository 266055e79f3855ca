"""Aggregators by name, for recipes and the command line."""

from __future__ import annotations

from lightning_fed.server.server import Aggregator

AGGREGATORS: dict[str, type[Aggregator]] = {}
"""The rules that ``aggregator="name"`` can mean; :mod:`lightning_fed.algorithms` enters them."""


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
