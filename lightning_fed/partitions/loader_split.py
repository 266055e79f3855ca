"""Splits a user's loaders into clients, using a partition."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from lightning_fed.data.dataset_clients import ClientSource, DatasetClients, client_subsets, count_batches, cut_batches
from lightning_fed.data.federated import is_one_client
from lightning_fed.data.loader_clients import LoaderClients, check_client_loader, has_loader
from lightning_fed.data.partition import Partition
from lightning_fed.data.population import LazyClients, Population, client_keys
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client
from lightning_fed.partitions.loader_parts import (
    LOADER_OPTIONS,
    LOADERS_REMEDY,
    batches_of,
    changed_methods,
    check_class,
    is_whole,
)
from lightning_fed.partitions.sampler_stream import SampledClients, SamplerStream

_log = logging.getLogger(__name__)


def split_training_data(data: Any, partition: Partition, seed: int) -> Population:
    """Splits training data from one or several loaders into clients.

    For a partition with one client, the data may have any form supported by a plain Trainer.

    Raises:
        TypeError: If the partition has several clients, and a loader is not a ``DataLoader`` over a map-style data set.
        OptionError: If a loader cannot be split, or several loaders get different clients.
    """
    several = isinstance(data, Mapping | list | tuple)
    is_ordinary = (
        type(data) is DataLoader and not changed_methods(data) and data.batch_size is not None and _is_whole(data)
    )
    if is_one_client(partition) and not is_ordinary:  # one client: no split is needed
        clients = LoaderClients({0: CombinedLoader(data, "max_size_cycle") if several else data}, is_plain=True)
        clients.split_loader = data if isinstance(data, DataLoader) and sized_len(data) is not None else None
        return clients
    if isinstance(data, CombinedLoader) or (several and has_loader(data)):
        return _split_loaders(data, partition, seed)
    if isinstance(data, DataLoader) and data.batch_sampler is None and type(data.sampler) is BatchSampler:
        return _split_loaders(data, partition, seed)
    return split_loader(data, partition, seed)


def split_loader(loader: Any, partition: Partition, seed: int) -> DatasetClients:
    """Splits a user's ``DataLoader`` into one loader per client, with the same batch size, collation and workers.

    ``shuffle=True`` shuffles within each client. A custom sampler draws one order for all clients. Each client's loader
    keeps this order.
    """
    _check_splittable(loader)
    if loader.batch_sampler is None:
        raise OptionError(
            "Expected a DataLoader with a batch size, because batches are formed within clients, but got "
            f"batch_size=None. {LOADERS_REMEDY}"
        )
    indices = partition.split(loader.dataset, seed)
    sampler, batch_size, drop_last = batches_of(loader)
    draws = None if _is_whole(loader) else SamplerStream(loader, indices, seed)
    if draws is None and not isinstance(sampler, RandomSampler):  # a partition may list examples in another order
        indices = {client: np.sort(client_indices) for client, client_indices in indices.items()}
    if batch_size is None:
        _log.warning(
            "Batches from %s are divided among the clients: a step uses only one client's part of a batch, so batches "
            "are smaller. For full batches, give each client a separate loader in a FederatedDataModule.",
            type(sampler).__name__,
        )
    parts = client_subsets(loader.dataset, indices, partial(partition.transform, seed=seed))
    kind = DatasetClients if draws is None else partial(SampledClients, draws)
    clients = kind(
        ClientSource(parts, loader.collate_fn),
        batch_size or 1,
        isinstance(sampler, RandomSampler),
        drop_last,
        {name: getattr(loader, name) for name in (*LOADER_OPTIONS, "persistent_workers")},
    )
    clients.split_loader = loader
    return clients


def _split_loaders(loaders: Any, partition: Partition, seed: int) -> LoaderClients:
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    for loader in combined.flattened:
        _check_splittable(loader)
        if not _is_whole(loader):
            raise OptionError(
                "Expected every one of several loaders to have a batch size and to draw all examples once per pass, but"
                f" got batch_size={batches_of(loader)[1]} and sampler={type(batches_of(loader)[0]).__name__}. Give each"
                " client its own loaders in a FederatedDataModule."
            )
    parts = [(loader, partition.split(loader.dataset, seed)) for loader in combined.flattened]
    clients = [client_keys(indices) for _, indices in parts]
    if any(list(keys) != list(clients[0]) for keys in clients):
        raise OptionError(
            "Expected a partition that splits the data sets of all loaders into the same clients, but got "
            f"{' and '.join(str(len(keys)) for keys in clients)} clients, or different names."
        )
    if partition.transform(clients[0][0], seed) is not None:
        raise OptionError(
            f"{type(partition).__name__} changes samples, which requires a single loader with a batch size, but got "
            "several loaders, or a loader without a batch size: use a single loader with a batch size, or give each "
            "client its own loaders in a FederatedDataModule."
        )

    return LoaderClients(LazyClients(clients[0], partial(_part_of_loaders, combined, parts)))


def _part_of_loaders(combined: CombinedLoader, parts: Sequence[tuple[Any, Any]], client: Client) -> CombinedLoader:
    combined_part = copy.copy(combined)
    combined_part.flattened = [_loader_of(loader, indices[client]) for loader, indices in parts]
    return combined_part


def _check_splittable(loader: Any) -> None:
    check_client_loader(loader)
    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if not isinstance(loader, DataLoader) or is_iterable:
        description = (
            f"one over the iterable data set {type(loader.dataset).__name__}" if is_iterable else type(loader).__name__
        )
        raise TypeError(
            "Expected `train_dataloader` to return a DataLoader over a map-style data set, or several, for a"
            f" `partition` to split, but got {description}. {LOADERS_REMEDY}"
        )
    check_class(loader, "that a `partition` can split")


def _is_whole(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler, batch_size, _ = batches_of(loader)
    return batch_size is not None and is_whole(sampler, loader.dataset)


def _loader_of(loader: DataLoader[Any], indices: np.ndarray) -> DataLoader[Any]:
    part = Subset(loader.dataset, indices.tolist())
    sampler, batch_size, drop_last = batches_of(loader)
    is_shuffled = isinstance(sampler, RandomSampler) and len(part)
    batches = _Batches(RandomSampler(part) if is_shuffled else SequentialSampler(part), batch_size or 1, drop_last)
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    # Without a batch sampler, the data set receives the indices of a whole batch.
    has_batches = loader.batch_sampler is not None
    draws: Any = {"batch_sampler": batches} if has_batches else {"batch_size": None, "sampler": batches}
    return DataLoader(part, collate_fn=loader.collate_fn, **draws, **options)


class _Batches(BatchSampler):
    """Batch sampler that adds a single last example to the previous batch."""

    def __len__(self) -> int:
        return count_batches(len(self.sampler), self.batch_size, self.drop_last)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for start, stop in cut_batches(len(order), self.batch_size, self.drop_last):
            yield order[start:stop]
