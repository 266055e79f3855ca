"""Base classes of the partitions: ways to split a data set over clients."""

from __future__ import annotations

import abc
import inspect
import logging
from collections.abc import Callable
from typing import Any

from lightning_fed.argument_checks import check_count
from lightning_fed.data.labels import MapDataset, length_of
from lightning_fed.data.sample_assignment import IndexArray, PartitionError
from lightning_fed.messages import Client

_log = logging.getLogger(__name__)


class Partition(abc.ABC):
    """A way to split a data set over clients: a pure function of the data set and a seed.

    A partition of your own overrides :meth:`split`.
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
        """The transform of a client's training samples, which also fits its validation and test samples.

        Args:
            client: The client, a key of the result of :meth:`split`.
            seed: The seed that :meth:`split` was called with.

        Returns:
            A picklable function of one sample, or ``None`` for nothing.

        """
        return None

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self)).parameters.values()
        values = [(p, getattr(self, p.name, p.default)) for p in parameters]
        shown = [f"{p.name}={value!r}" for p, value in values if repr(value) != repr(p.default)]
        return f"{type(self).__name__}({', '.join(shown)})"


class NumberedPartition(Partition):
    """A partition into clients ``0`` to ``num_clients - 1`` (abstract: :meth:`assign` is left to its subclasses).

    Args:
        num_clients: Number of clients, at least 1.
        seed: Seed of the split; ``None`` for the federation's.

    Raises:
        ValueError: If an argument is out of its range.

    """

    def __init__(self, num_clients: int, seed: int | None) -> None:
        self.num_clients = check_count("num_clients", num_clients)
        self.seed = None if seed is None else check_count("seed", seed, 0)

    @abc.abstractmethod
    def assign(self, dataset: MapDataset, seed: int) -> list[IndexArray]:
        """The samples of every client; ``seed`` is the partition's own one, or else the federation's."""

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``.

        Raises:
            ValueError: If the data set has too few samples, or labels that cannot be split in this way.

        """
        num_samples = length_of(dataset)
        if self.num_clients > num_samples:
            raise PartitionError(
                f"Expected `num_clients` to be at most the number of samples ({num_samples}), but got"
                f" {self.num_clients}."
            )
        parts = self.assign(dataset, self.seed_of(seed))
        num_unassigned = num_samples - sum(part.size for part in parts)
        num_empty = sum(part.size == 0 for part in parts)
        if num_unassigned:
            _log.info("%r leaves over %d of %d samples.", self, num_unassigned, num_samples)
        if num_empty:
            _log.info("%r leaves %d of %d clients without samples.", self, num_empty, len(parts))
        return dict(enumerate(parts))

    def seed_of(self, federation_seed: int) -> int:
        """The partition's own seed if it has one, else the federation's."""
        return check_count("seed", federation_seed if self.seed is None else self.seed, 0)
