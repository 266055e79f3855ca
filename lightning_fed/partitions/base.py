"""Base classes for partitions into clients 0, 1, ..., and for partitions with a different transform per client."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from lightning_fed.argument_checks import check_count
from lightning_fed.data.partition import MapDataset, Partition
from lightning_fed.messages import Client
from lightning_fed.numerics.trees import like_sequence
from lightning_fed.partitions.label_lookup import length_of
from lightning_fed.partitions.sample_assignment import IndexArray, PartitionError

_log = logging.getLogger(__name__)


class PartitionOfPartition(Partition):
    """Splits data like ``partition``, and changes each client's samples. Subclasses implement :meth:`change`."""

    def __init__(self, partition: Partition, seed: int | None = None) -> None:
        if not isinstance(partition, Partition):
            raise TypeError(f"Expected `partition` to be a Partition object such as `IID(10)`, but got {partition!r}.")
        self.partition = partition
        self.seed = None if seed is None else check_count("seed", seed, 0)

    @abc.abstractmethod
    def change(self, client: Client, seed: int) -> Callable[[Any], Any]:
        """Returns a picklable transform for the samples of ``client``, such as a permutation of the pixels."""

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        return self.partition.split(dataset, seed)

    def transform(self, client: Client, seed: int) -> Callable[[Any], Any]:
        inner, change = self.partition.transform(client, seed), self.change(client, seed)
        return change if inner is None else partial(_change_twice, inner, change)


def _change_twice(first: Callable[[Any], Any], second: Callable[[Any], Any], sample: Any) -> Any:
    return second(first(sample))


def change_input(sample: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies ``change`` to a sample's input, for example the first element of a tuple."""

    def changed(image: Any) -> Tensor:
        if not isinstance(image, Tensor) or image.ndim == 0:
            raise TypeError(
                f"Expected the input of a sample to be a tensor of shape (..., H, W), but got {type(image).__name__}: "
                "convert images to tensors in the data set's transform."
            )
        return change(image)

    if isinstance(sample, Mapping):
        key = "image" if "image" in sample else next(iter(sample), None)
        return {**sample, key: changed(sample.get(key))}
    if isinstance(sample, tuple | list) and sample:
        return like_sequence(sample, [changed(sample[0]), *sample[1:]])
    return changed(sample)


class NumberedPartition(Partition):
    """Partition into clients ``0`` to ``num_clients - 1``. Subclasses implement :meth:`assign`."""

    num_clients: int

    def __init__(self, num_clients: int, seed: int | None = None) -> None:
        self.num_clients = check_count("num_clients", num_clients)
        self.seed = None if seed is None else check_count("seed", seed, 0)

    @abc.abstractmethod
    def assign(self, dataset: MapDataset, seed: int) -> list[IndexArray]:
        """Returns one array of sample indices per client, starting with client 0. ``seed`` seeds random choices."""

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
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
            _log.info("%r does not assign %d of %d samples.", self, num_unassigned, num_samples)
        if num_empty:
            _log.info("%r leaves %d of %d clients without samples.", self, num_empty, len(parts))
        return dict(enumerate(parts))
