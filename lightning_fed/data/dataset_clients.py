"""Clients with map-style data sets, served by one ``DataLoader``."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from lightning_fed.data.population import (
    KnownClasses,
    LazyClients,
    PlannedVisit,
    Population,
    VisitBatch,
    check_class_numbers,
    client_keys,
    interleave,
    seed_everything,
    sequential_groups,
)
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import derive_seed

SampleTransform: TypeAlias = Callable[[Any], Any]


class DatasetClients(Population):
    """Clients with map-style data sets.

    One ``DataLoader`` serves all clients. A last batch with a single example is merged with the previous batch, because
    BatchNorm needs two examples.

    Args:
        source: The clients' examples.
        batch_size: Examples per batch.
        shuffle: Whether to draw a new order for every epoch over a client's data.
        drop_last: Whether to drop an incomplete last batch.
        loader_options: Further arguments for the ``DataLoader``.

    Raises:
        ValueError: If ``batch_size`` is below 1.
    """

    def __init__(
        self,
        source: ClientSource,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        loader_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(source.clients)
        if batch_size < 1:
            raise ValueError(f"Expected `batch_size` to be at least 1, but got {batch_size}.")
        self.source = source
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._loader_options = loader_options or {}
        self._sampler = _Sampler()
        self._loader = self._make_loader()

    @property
    def num_workers(self) -> int:
        return self._loader.num_workers

    def num_samples(self, client: Client) -> int:
        return self.source.num_samples(client)

    def batches_per_epoch(self, client: Client, isolated: bool = False) -> int:
        count = self._count_batches(client, self.drop_last and not isolated)
        return count if isolated else self.batches_to_overfit(count) or 0

    def _count_batches(self, client: Client, drop_last: bool) -> int:
        return count_batches(self.num_samples(client), self.batch_size, drop_last)

    def batches_of_pass(self, planned: PlannedVisit, number: int, isolated: bool) -> Iterator[np.ndarray]:
        if (self.overfit_batches and not isolated) or not self.shuffle:
            order = np.arange(planned.num_samples)
        else:
            order = np.random.default_rng([planned.visit.seed, number]).permutation(planned.num_samples)
        batches = cut_batches(planned.num_samples, self.batch_size, self.drop_last and not isolated)
        for start, end in itertools.islice(batches, planned.epoch_batches):
            yield order[start:end]

    def close(self) -> None:
        self._loader = self._make_loader()

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self.source,
            batch_sampler=self._sampler,  # type: ignore[arg-type] # yields `BatchRequest`, the index type of `source`
            collate_fn=_return_batch,
            generator=torch.Generator().manual_seed(0),  # otherwise the loader would draw from the global generator
            **self._loader_options,
        )

    def stream(
        self, visits: Sequence[PlannedVisit], isolated: bool = False, groups: Sequence[range] = ()
    ) -> Iterator[VisitBatch]:
        loader = self._loader
        # Without workers and pinned memory a loader is equivalent to this `map`.
        is_plain = isolated or (loader.num_workers == 0 and not loader.pin_memory)
        issued = deque[int]()  # the visit's index for each requested batch
        requests = itertools.chain.from_iterable(
            interleave(self._requests(position, visits[position], isolated, issued) for position in group)
            for group in groups or sequential_groups(visits)
        )
        if not is_plain:
            self._sampler.requests = requests
        batches = map(self.source.__getitems__, requests) if is_plain else iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                yield VisitBatch.failed(issued.popleft(), error)
            else:
                yield VisitBatch(issued.popleft(), batch)

    def _requests(
        self, position: int, planned: PlannedVisit, isolated: bool, issued: deque[int]
    ) -> Iterator[BatchRequest]:
        client, seed = planned.visit.client, planned.visit.seed
        batches = self._endless_batches(planned, isolated)
        for number in range(planned.num_batches):
            if planned.fault is not None:
                break
            issued.append(position)
            try:
                positions: np.ndarray | Exception = next(batches)
            except Exception as error:  # not enough memory for the examples' order
                positions = error
            yield BatchRequest(client, positions, derive_seed(seed, number) if self.num_workers else 0)
            if isinstance(positions, Exception):
                break

    def _endless_batches(self, planned: PlannedVisit, isolated: bool) -> Iterator[np.ndarray]:
        visit = planned.visit
        if self.sampling is not None and not isolated:
            for number in itertools.count():
                yield self.sampling.served(visit.client, visit.round, number, planned.num_samples, self.batch_size)
        for epoch in itertools.count():
            yield from self.batches_of_pass(planned, epoch, isolated)


class BatchedDataset(Dataset[Any]):
    """Base class of data sets that return a whole batch at once."""

    def get_batch(self, indices: Any) -> Any:
        """Returns the samples at ``indices`` as a batch, in the format of ``default_collate``."""


class ClientSource(Dataset[Any]):
    """Data set with all clients' examples, indexed by a :class:`BatchRequest`."""

    def __init__(
        self,
        datasets: Mapping[Client, Dataset[Any]],
        collate: Callable[[list[Any]], Any] | None = None,
        class_numbers: KnownClasses | None = None,
    ) -> None:
        self.clients = client_keys(datasets)
        self.datasets = datasets
        self.collate = collate or default_collate
        self._recent: dict[Client, Dataset[Any]] = {}
        self._class_numbers = {} if class_numbers is None else class_numbers

    def num_samples(self, client: Client) -> int:
        return len(self._dataset(client))  # type: ignore[arg-type]

    def __getitems__(self, request: BatchRequest) -> Any:
        try:
            return self._fetch(request)
        except StopIteration as error:  # StopIteration would look like the end of all clients' data
            raise RuntimeError("a data set or `collate_fn` raised StopIteration: raise another exception") from error

    def _fetch(self, request: BatchRequest) -> Any:
        if isinstance(request.positions, Exception):
            raise request.positions
        if get_worker_info() is not None:
            # Random augmentation depends only on the batch, not on the worker.
            seed_everything(request.seed)
        dataset, rows = self._dataset(request.client), request.positions
        if isinstance(dataset, ClientSubset) and dataset.transform is None:
            rows = dataset.indices[rows]
            dataset = dataset.dataset
        batch = _direct_batch(dataset, rows) if self.collate is default_collate else None
        return self.collate(_read_samples(dataset, rows)) if batch is None else batch

    def _dataset(self, client: Client) -> Dataset[Any]:
        if client not in self._recent:
            while len(self._recent) >= 2:
                self._recent.pop(next(iter(self._recent)))
            self._recent[client] = self.datasets[client]
            check_class_numbers(self._class_numbers, client, self._recent[client])
        return self._recent[client]


class ClientSubset(Subset[Any]):
    """A client's part of a data set: the samples at `indices`, with an optional transform."""

    indices: np.ndarray  # type: ignore[assignment]

    def __init__(self, dataset: Dataset[Any], indices: np.ndarray, transform: SampleTransform | None = None) -> None:
        super().__init__(dataset, indices)  # type: ignore[arg-type]
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = _read_samples(self.dataset, self.indices[indices])
        return samples if self.transform is None else [self.transform(sample) for sample in samples]


def client_subsets(
    dataset: Dataset[Any],
    indices: Mapping[Client, np.ndarray],
    transform: Callable[[Client], SampleTransform | None] | None = None,
) -> Mapping[Client, ClientSubset]:
    """Splits a data set into clients, by the indices of each client's samples.

    ``transform(client)`` returns the transform of this client's samples, if any.
    """
    while (
        isinstance(dataset, Subset) and type(dataset) is Subset
    ):  # so batches come directly from the underlying data set
        outer = np.asarray(dataset.indices)
        indices = {client: outer[inner] for client, inner in indices.items()}
        dataset = dataset.dataset
    return LazyClients(client_keys(indices), partial(_client_subset, dataset, indices, transform))


def _client_subset(dataset: Dataset[Any], indices: Any, transform: Any, client: Client) -> ClientSubset:
    return ClientSubset(dataset, indices[client], transform and transform(client))


def _read_samples(dataset: Dataset[Any], indices: np.ndarray) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices.tolist()))
    return [dataset[index] for index in indices.tolist()]


class BatchRequest(NamedTuple):
    """Request to a worker process for one batch of a client.

    ``positions`` are the indices of the examples. ``seed`` is for random augmentation.
    """

    client: Client
    positions: np.ndarray | Exception
    seed: int


def count_batches(num_samples: int, batch_size: int, drop_last: bool = False) -> int:
    """Number of batches in a pass over the examples. A last batch with one example joins the previous batch."""
    full, rest = divmod(num_samples, batch_size)
    return full if drop_last or not rest or (rest == 1 and full) else full + 1


def cut_batches(num_samples: int, batch_size: int, drop_last: bool = False) -> Iterator[tuple[int, int]]:
    """Yields the first index and the end index (exclusive) for each batch in a pass over the examples."""
    count = count_batches(num_samples, batch_size, drop_last)
    for number in range(count):
        start = number * batch_size
        is_last = number == count - 1 and not drop_last
        yield start, num_samples if is_last else start + batch_size


@dataclass
class _Sampler:
    requests: Iterable[BatchRequest] = ()

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.requests)


def _direct_batch(dataset: Dataset[Any], indices: np.ndarray) -> Any:
    if type(dataset) is TensorDataset:
        rows = torch.from_numpy(indices)
        return [tensor.index_select(0, rows) for tensor in dataset.tensors]
    return dataset.get_batch(indices) if isinstance(dataset, BatchedDataset) else None


def _return_batch(batch: Any) -> Any:
    return batch
