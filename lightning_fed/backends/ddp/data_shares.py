"""Splits a client's batches between several processes, as torch's ``DistributedSampler`` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder

from lightning_fed.data.dataset_clients import ClientSource, DatasetClients
from lightning_fed.data.loader_clients import LoaderClients
from lightning_fed.data.population import LazyClients, Population
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client


def share_population(population: Population, rank: int, size: int, seed: int) -> Population:
    """Limits each client's batches to one process's share of the examples.

    ``rank`` is the number of the process among ``size`` processes. All shares have the same number of batches, so some
    examples may occur twice. Shuffling dataloaders use ``seed``.

    Raises:
        OptionError: If a client's dataloader has no map-style data set, or has a custom sampler.
    """
    if isinstance(population, DatasetClients):
        if not isinstance(population.source, SharedSource):
            population.source = SharedSource(population.source, rank, size, population.batch_size)
            population.batch_size *= size
            population.close()  # the next loader reads the share
        return population
    if not isinstance(population, LoaderClients):
        raise OptionError(f"Expected data sets or loaders by client, but got {type(population).__name__}: {_REMEDY}")
    return SharedLoaders(population.loaders, rank, size, seed)


class SharedSource(ClientSource):
    """Data set that reads this process's share of each batch: every n-th example for n processes."""

    def __init__(self, source: ClientSource, rank: int, size: int, batch_size: int) -> None:
        super().__init__(source.datasets, source.collate)
        self._rank, self._size, self._least = rank, size, min(batch_size, 2)

    def __getitems__(self, request: Any) -> Any:
        positions = request.positions
        if not isinstance(positions, Exception):
            request = request._replace(positions=deal(positions, self._rank, self._size, self._least))
        return super().__getitems__(request)


def deal(positions: np.ndarray, rank: int, size: int, least: int = 1) -> np.ndarray:
    """Returns the share of ``positions`` for process ``rank`` among ``size`` processes.

    ``positions`` are indices of examples. All shares have equal length, at least ``least``. If positions are too few,
    the first positions are repeated. BatchNorm needs ``least=2``.

    Example:
        >>> [deal(np.arange(5), rank, 2).tolist() for rank in range(2)]
        [[0, 2, 4], [1, 3, 0]]
    """
    length = max(-(-len(positions) // size), least)
    share: np.ndarray = np.resize(positions, length * size)[rank::size]
    return share


class SharedLoaders(LoaderClients):
    """One dataloader per client. A ``DistributedSampler`` replaces each dataloader's sampler."""

    def __init__(self, loaders: Mapping[Client, Any], rank: int, size: int, seed: int) -> None:
        self._whole = LoaderClients(loaders)
        self._rank, self._size, self._seed = rank, size, seed
        shares = LazyClients(self._whole.clients, self._share)
        super().__init__(shares)

    def num_samples(self, client: Client) -> int:
        return self._whole.num_samples(client)

    def _share(self, client: Client) -> DataLoader[Any]:
        loader: Any = self._whole.loaders[client]
        sampler: Any = getattr(loader, "sampler", None)
        is_known = type(loader) is DataLoader and type(getattr(loader, "batch_sampler", None)) is BatchSampler
        if not is_known or isinstance(loader.dataset, IterableDataset) or type(sampler) not in (RandomSampler, InOrder):
            raise OptionError(
                f"Expected the loader of client {client!r} to be a DataLoader over a map-style data set with "
                f"shuffle=True or shuffle=False, but got {type(loader).__name__} with {type(sampler).__name__}: "
                f"{_REMEDY}"
            )
        shuffles = isinstance(sampler, RandomSampler)
        if shuffles and (sampler.replacement or sampler.num_samples != len(loader.dataset)):
            raise OptionError(
                f"Expected the sampler of client {client!r} to draw every example once, but got replacement="
                f"{sampler.replacement} and num_samples={sampler.num_samples}: {_REMEDY}"
            )
        share: Any = DistributedSampler(loader.dataset, self._size, self._rank, shuffles, self._seed % 2**31)
        return DataLoader(
            loader.dataset,
            loader.batch_size,
            sampler=share,
            drop_last=loader.drop_last,
            **{name: getattr(loader, name) for name in _OPTIONS},
        )


_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
_REMEDY = "several processes divide the examples of a client's data set; otherwise set devices=1."
