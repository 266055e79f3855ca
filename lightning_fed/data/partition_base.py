"""What a partition is: a way to split a data set over clients."""

from __future__ import annotations

import abc
import inspect
import logging
from collections.abc import Callable
from typing import Any

from lightning_fed.data.labels import MapDataset, length_of
from lightning_fed.functional.partition import IndexArray
from lightning_fed.messages import Client

_log = logging.getLogger(__name__)


class Partition(abc.ABC):
    """A way to split a data set over clients: a pure function of the data set and a seed.

    To write your own, override :meth:`split`.
    """

    @abc.abstractmethod
    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set.

        Args:
            dataset: A data set with ``__len__`` and ``__getitem__``.
            seed: The federation's seed, not negative.

        Returns:
            Client to the indices of its samples; no index occurs twice.

        """

    def transform(self, client: Client, seed: int) -> Callable[[Any], Any] | None:
        """What is done to each of a client's training samples; the same is right for its validation and test samples.

        Args:
            client: The client, a key of what :meth:`split` returns.
            seed: The seed that :meth:`split` was given.

        Returns:
            A picklable function of one sample, or ``None`` for nothing.

        """
        return None

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self)).parameters.values()
        values = [(p, getattr(self, p.name, p.default)) for p in parameters]
        shown = [f"{p.name}={value!r}" for p, value in values if repr(value) != repr(p.default)]
        return f"{type(self).__name__}({', '.join(shown)})"


def numbered(partition: Partition, dataset: MapDataset, parts: list[IndexArray]) -> dict[Client, IndexArray]:
    """Clients under their numbers; says how many samples go to nobody, and how many clients have none."""
    left_over = length_of(dataset) - sum(part.size for part in parts)
    num_empty = sum(part.size == 0 for part in parts)
    if left_over:
        _log.info("%r leaves over %d of %d samples.", partition, left_over, length_of(dataset))
    if num_empty:
        _log.info("%r leaves %d of %d clients without samples.", partition, num_empty, len(parts))
    return dict(enumerate(parts))


def own_seed(own: int | None, federation: int) -> int:
    """A partition's own seed if it has one, else the federation's."""
    return federation if own is None else own


def checked_seed(seed: int | None) -> int | None:
    """A seed that is not negative, or ``None``."""
    return None if seed is None else at_least("seed", seed, 0)


def at_least(name: str, value: int, lowest: int) -> int:
    """The value, if it is not too small."""
    if value < lowest:
        raise ValueError(f"Expected `{name}` to be at least {lowest}, but got {value}.")
    return value


def one_of(name: str, value: str, *allowed: str) -> str:
    """The value, if it is one of those that there are."""
    if value not in allowed:
        raise ValueError(f"Expected `{name}` to be one of {', '.join(map(repr, allowed))}, but got {value!r}.")
    return value
