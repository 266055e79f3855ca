"""Base class of partitions."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lightning_fed.argument_checks import check_count
from lightning_fed.messages import Client

MapDataset = Dataset[Any] | Sequence[Any]
"""A data set with ``__len__`` and ``__getitem__``."""


class Partition(abc.ABC):
    """Base class of partitions. A partition splits a data set over clients.

    Custom partitions override :meth:`split`. If ``seed`` is None, the federation's seed is used.
    """

    seed: int | None = None
    num_clients: int | None = None

    @abc.abstractmethod
    def split(self, dataset: MapDataset, seed: int) -> dict[Client, npt.NDArray[np.int64]]:
        """Returns the indices of each client's samples. Each index occurs at most once."""

    def transform(self, client: Client, seed: int) -> Callable[[Any], Any] | None:
        """Returns a function that transforms each of a client's samples, or ``None``."""
        return None

    def seed_of(self, federation_seed: int) -> int:
        """Returns the partition's seed, or ``federation_seed`` for a partition without a seed."""
        return check_count("seed", federation_seed if self.seed is None else self.seed, 0)

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self)).parameters.values()
        values = [(p, getattr(self, p.name, p.default)) for p in parameters]
        shown = [f"{p.name}={value!r}" for p, value in values if repr(value) != repr(p.default)]
        return f"{type(self).__name__}({', '.join(shown)})"
