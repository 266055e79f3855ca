"""Adapter that uses partitioners from Flower's data set package as partitions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, final

import numpy as np
import numpy.typing as npt

from lightning_fed.data.partition import MapDataset, Partition
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client
from lightning_fed.partitions.label_lookup import groups_of, labels_of, length_of
from lightning_fed.partitions.sample_assignment import IndexArray

_INDEX = "__index__"
_LABELS = ("label", "labels")


@final
class FlowerPartition(Partition):
    """Clients from a ``flwr-datasets`` partitioner, for any map-style data set.

    Clients have numbers, or the names of the partitioner's groups. Random splits depend on the partitioner's seed, not
    on the federation's seed. Install the package with ``pip install flwr-datasets``.

    Args:
        partitioner: The partitioner, without an assigned data set.
        columns: Columns for the partitioner: names of data set attributes, or a mapping from column name to one value
            per sample.

    Raises:
        TypeError: If ``partitioner`` is not a partitioner.

    Example:
        >>> from flwr_datasets.partitioner import DirichletPartitioner  # doctest: +SKIP
        >>> partitioner = DirichletPartitioner(num_partitions=10, partition_by="label", alpha=0.5)  # doctest: +SKIP
        >>> partition = FlowerPartition(partitioner, columns=["label"])  # doctest: +SKIP
    """

    def __init__(
        self, partitioner: Any, columns: Sequence[str] | Mapping[str, Sequence[Any] | npt.NDArray[Any]] = ()
    ) -> None:
        if not hasattr(partitioner, "load_partition"):
            raise TypeError(
                "Expected `partitioner` to be an object from `flwr_datasets.partitioner`, such as "
                f"`IidPartitioner(10)`, but got {partitioner!r}."
            )
        self.partitioner = partitioner
        self.columns = columns

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        if self.partitioner.is_dataset_assigned():
            raise OptionError(
                "Expected a partitioner without a data set, because the data set of the training loader is split, "
                f"but {type(self.partitioner).__name__} already has one: create a new partitioner."
            )
        partitioner = copy.deepcopy(self.partitioner)  # a partitioner accepts only one data set
        partitioner.dataset = self._table(dataset)
        parts = {
            number: np.sort(np.asarray(list(partitioner.load_partition(number)[_INDEX]), dtype=np.int64))
            for number in range(partitioner.num_partitions)
        }
        names = getattr(partitioner, "partition_id_to_natural_id", {})
        return {names.get(number, number): indices for number, indices in parts.items()}

    def _table(self, dataset: MapDataset) -> Any:
        try:
            datasets = import_module("datasets")
        except ImportError as error:
            raise ImportError(
                "`FlowerPartition` requires the package `datasets`: pip install flwr-datasets."
            ) from error
        if isinstance(self.columns, Mapping):
            columns = {name: list(values) for name, values in self.columns.items()}
        else:
            columns = {name: _column(dataset, name).tolist() for name in self.columns}
        return datasets.Dataset.from_dict({_INDEX: list(range(length_of(dataset))), **columns})


def _column(dataset: MapDataset, name: str) -> npt.NDArray[Any]:
    try:
        return groups_of(dataset, name)
    except ValueError:
        if name in _LABELS:
            return labels_of(dataset)
        raise
