"""Clients with one dataloader per client, read one after another in a round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, WeightedRandomSampler

from lightning_fed.data.batch_structure import batch_tensors
from lightning_fed.data.population import (
    KnownClasses,
    PlannedVisit,
    Population,
    VisitBatch,
    batch_length,
    check_class_numbers,
    client_keys,
    interleave,
    sequential_groups,
)
from lightning_fed.errors import OptionError
from lightning_fed.lightning.internals import loader_to_overfit
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import derive_seed
from lightning_fed.numerics.trees import elements

_END = object()


class LoaderClients(Population):
    """Clients with one ``DataLoader`` each, or another iterable over batches.

    Args:
        loaders: Dataloaders by client. Several dataloaders for a client are combined as in a ``CombinedLoader``.
        is_plain: Whether the federation has a single client. The client's dataloader then needs no length.
        class_numbers: Class numbers by class name. A client with other numbers is refused.
    """

    def __init__(
        self, loaders: Mapping[Client, Iterable[Any]], is_plain: bool = False, class_numbers: KnownClasses | None = None
    ) -> None:
        super().__init__(client_keys(loaders))
        self.loaders, self.is_plain = loaders, is_plain
        self._class_numbers = {} if class_numbers is None else class_numbers
        self._counted: dict[Client, int] = {}  # number of examples in one pass over a client's batches
        self._opened: dict[int, Any] = {}  # loaders with persistent workers, by ``id``
        self._in_order: dict[Client, Any] = {}  # loaders whose shuffling was removed

    def num_samples(self, client: Client) -> int:
        """Number of the client's examples.

        If the loader has a length but no ``dataset``, the examples are counted in one pass over the batches. If the
        length is unknown, the number is ``local_steps`` (batches per round) times the batch size.
        """
        return self._count(client, self._loader(client))

    def _count(self, client: Client, loader: Any) -> int:
        if isinstance(loader, _Streams):
            return self._count(client, loader.streams[loader.leading])
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized):
            return _drawn_samples(loader, len(dataset))
        if hasattr(loader, "__len__") and dataset is None:
            if client not in self._counted:
                self._counted[client] = sum(_checked_length(batch) for batch in loader)
            return self._counted[client]
        batch_size = getattr(loader, "batch_size", None)
        if self.local_steps and batch_size:
            return self.local_steps * int(batch_size)
        raise ValueError(
            f"Expected the loader of client {client!r} to have a data set with a length, because averages are "
            "weighted by the number of examples. Define `__len__` on the data set, or on the loader if the loader has "
            "no data set. Or set `local_steps` and the loader's `batch_size`: the client then counts as `local_steps` "
            "times `batch_size` examples."
        )

    def _loader(self, client: Client) -> Any:
        loader: Any = self.loaders[client]
        check_client_loader(loader)
        check_class_numbers(self._class_numbers, client, loader)
        if elements(loader) and has_loader(loader):
            loader = CombinedLoader(loader, "max_size_cycle")  # like Lightning
        if self.overfit_batches:
            if client not in self._in_order:
                self._in_order[client] = loader_to_overfit(loader)
            loader = self._in_order[client]
        return _Streams(loader) if isinstance(loader, CombinedLoader) else loader

    def close(self) -> None:
        opened, self._opened = self._opened, {}
        for loader in opened.values():
            _end_workers(loader)

    def batches_per_epoch(self, client: Client, isolated: bool = False) -> int | None:
        length = sized_len(self._loader(client))
        return length if isolated else self.batches_to_overfit(length)

    def is_counted(self, client: Client) -> bool:
        if not self.is_plain:
            return False
        loader = self._loader(client)
        leading = loader.streams[loader.leading] if isinstance(loader, _Streams) else loader
        return sized_len(loader) is None or not isinstance(getattr(leading, "dataset", None), Sized)

    def gives_all(self, client: Client) -> bool:
        """True if a pass over the client's dataloader contains every example."""
        return self._gives_all(self._loader(client))

    def _gives_all(self, loader: Any) -> bool:
        if isinstance(loader, _Streams):
            return loader.mode != "min_size" and all(map(self._gives_all, loader.streams))
        batches, sampler = _samplers(loader)
        drops = getattr(loader, "drop_last", False) or getattr(batches, "drop_last", False)
        draws = getattr(sampler, "replacement", False) or isinstance(sampler, WeightedRandomSampler)
        return not (drops or draws)

    def stream(
        self, visits: Sequence[PlannedVisit], isolated: bool = False, groups: Sequence[range] = ()
    ) -> Iterator[VisitBatch]:
        for group in groups or sequential_groups(visits):
            yield from interleave(self._batches(position, visits[position], isolated) for position in group)

    def _batches(self, position: int, planned: PlannedVisit, isolated: bool) -> Iterator[VisitBatch]:
        served = 0
        try:
            loader = self._loader(planned.visit.client)
            self._opened |= {id(part): part for part in _parts(loader) if getattr(part, "persistent_workers", False)}
            with isolated_generators(loader, planned.visit.seed) if isolated else nullcontext():
                batches = self._passes(loader, planned)
                if self.sampling is not None and not isolated:
                    batches = self.sampling.load(loader, planned)
                batches = itertools.islice(batches, planned.num_batches)
                ends = _looking_ahead(batches) if planned.is_stream else ((batch, False) for batch in batches)
                for batch, is_last in ends:
                    yield VisitBatch(position, batch, is_last=is_last)
                    served += 1
        except Exception as error:
            yield VisitBatch.failed(position, error)
            return
        for _ in range(planned.num_batches - served):  # the loader returned fewer batches than its length
            yield VisitBatch(position)

    def _passes(self, loader: Iterable[Any], planned: PlannedVisit) -> Iterator[Any]:
        visit = planned.visit
        in_visit = -(-planned.num_batches // planned.epoch_batches) if planned.epoch_batches else 1
        for number in itertools.count() if visit.steps is not None else range(visit.epochs):
            set_epoch(_epoch_samplers(loader, self.is_plain), visit.round * in_visit + number)
            for generator in () if self.is_plain else own_generators(_owners(loader)):
                generator.manual_seed(derive_seed(visit.seed, number))
            has_batches = False
            for batch in itertools.islice(loader, planned.epoch_batches):
                has_batches = True
                yield batch
            if not has_batches:
                raise ValueError("the client's loader returned no batch")


def _looking_ahead(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    for batch, following in itertools.pairwise(itertools.chain(batches, [_END])):
        yield batch, following is _END


def _epoch_samplers(loader: Any, is_plain: bool) -> list[Any]:
    if not is_plain:
        return [sampler for part in _parts(loader) for sampler in samplers_of(part)]
    holders = [holder for part in _parts(loader) for holder in (part, getattr(part, "batch_sampler", None))]
    samplers = {id(sampler): sampler for holder in holders if (sampler := getattr(holder, "sampler", None))}
    return list(samplers.values())


def _parts(loader: Any) -> list[Any]:
    return loader.streams if isinstance(loader, _Streams) else [loader]


def _owners(loader: Any) -> list[Any]:
    return [owner for part in _parts(loader) for owner in (part, *samplers_of(part))]


def _end_workers(loader: Any) -> None:
    iterator = getattr(loader, "_iterator", None)  # torch has no public name for this iterator
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()  # noqa: SLF001
        loader._iterator = None  # noqa: SLF001


def _samplers(loader: Any) -> tuple[Any, Any]:
    sampler = getattr(loader, "sampler", None)
    batches = sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)
    return batches, getattr(batches, "sampler", sampler)


def _checked_length(batch: Any) -> int:
    lengths = {int(value.shape[0]) for value in batch_tensors(batch) if value.ndim}
    if len(lengths) > 1:
        raise ValueError(
            "Expected the examples of a batch along the first dimension of all tensors, with equal lengths, but got "
            f"lengths {sorted(lengths)}: put the batch dimension first, or give the loader a `dataset` with a length."
        )
    return batch_length(batch)


def _drawn_samples(loader: Any, most: int) -> int:
    batches, sampler = _samplers(loader)
    batch_size = getattr(batches, "batch_size", None)
    if isinstance(batches, Sized) and isinstance(batch_size, int) and not hasattr(batches, "sampler"):
        return len(batches) * batch_size  # batches of locations, as in torchgeo
    # Clients may share a data set, each with a sampler over its part.
    if not isinstance(sampler, Sized):
        return most
    # A custom sampler may draw many examples (such as geographic windows) from few files.
    is_known = type(sampler).__module__.startswith("torch.")
    return min(len(sampler), most) if is_known else len(sampler)


class _Streams:
    """Iterable over the batches of a ``CombinedLoader``. The mode ``"sequential"`` raises an error."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined, self.mode = combined, combined._mode  # noqa: SLF001 - no public name
        if self.mode == "sequential":
            raise OptionError(
                'Lightning\'s `FitLoop` does not support the `CombinedLoader(mode="sequential")`: put the data sets'
                " into one `torch.utils.data.ConcatDataset`, or use another mode."
            )
        self.streams: list[Any] = combined.flattened

    def __len__(self) -> int:
        return len(self.streams[self.leading])

    @property
    def leading(self) -> int:
        """Index of the dataloader that ends a pass: the longest, or in mode ``"min_size"`` the shortest."""
        lengths = [math.inf if (length := sized_len(stream)) is None else length for stream in self.streams]
        return lengths.index(min(lengths) if self.mode == "min_size" else max(lengths))

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in iter(self._combined):
            yield batch


def has_loader(loaders: Any) -> bool:
    """True if nested mappings and sequences contain a dataloader."""
    return isinstance(loaders, DataLoader | CombinedLoader) or any(map(has_loader, elements(loaders)))


def check_client_loader(loader: Any) -> None:
    """Raises ``TypeError`` if a client's data are arrays, a table, or data sets in a list or mapping."""
    arrays = loader if isinstance(loader, tuple | list) else (loader,)
    is_of_arrays = bool(arrays) and all(isinstance(array, Tensor | np.ndarray) for array in arrays)
    # A list may contain batches of equal type and shape.
    kinds = {(str(array.dtype), tuple(array.shape[1:])) for array in arrays} if is_of_arrays else set()
    if is_of_arrays and (not isinstance(loader, list) or len(kinds) > 1):
        raise TypeError(
            f"Expected data to be a data set or a loader, but got a {type(loader).__name__}, which would be read as a "
            "list of batches: use `torch.utils.data.TensorDataset(x, y)`, with examples along the first dimension."
        )
    if hasattr(loader, "column_names") and not isinstance(loader, Dataset):
        raise TypeError(
            f"Expected a client's data to be a torch data set or a loader, but got the table {type(loader).__name__}: "
            "put the table in a `DataLoader`."
        )
    if any(isinstance(value, Dataset) for value in elements(loader)):
        raise TypeError(
            "Expected a client's data to be a data set, a loader or several loaders, but got data sets in a "
            f"{type(loader).__name__}: put each data set in a `DataLoader`, or combine all data sets "
            "(`torch.utils.data.StackDataset` zips them, `ConcatDataset` concatenates them)."
        )


@contextmanager
def isolated_generators(loader: Any, seed: int) -> Iterator[None]:
    """Context that seeds a dataloader's random generators, and restores the earlier states afterwards.

    Raises:
        ValueError: If the dataloader has persistent workers.
    """
    if any(getattr(part, "persistent_workers", False) for part in _parts(loader)):
        raise ValueError(
            "Expected a loader without persistent workers for a pass outside training, because persistent workers "
            "allow only one iterator: set `persistent_workers=False`, or avoid the pass by "
            "`ClassPrototypes(passes='online')` or `SampledSoftmax(classes=...)`"
        )
    with seeded_own_generators(_owners(loader), seed):
        yield


def samplers_of(loader: Any) -> list[Any]:
    """Returns the samplers of a dataloader, including nested samplers."""
    samplers: dict[int, Any] = {}
    waiting = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and id(sampler) not in samplers:
            samplers[id(sampler)] = sampler
            waiting += [value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Sampler)]
    return list(samplers.values())


def set_epoch(samplers: list[Any], epoch: int) -> None:
    """Calls ``set_epoch(epoch)`` on all samplers with this method."""
    for sampler in samplers:
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def own_generators(owners: list[Any]) -> list[torch.Generator]:
    """Returns the random generators of dataloaders and samplers, from the attribute ``generator``."""
    generators = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in generators if isinstance(generator, torch.Generator)]


@contextmanager
def seeded_own_generators(owners: list[Any], seed: int) -> Iterator[None]:
    """Context with seeded generators for dataloaders and samplers. Restores the earlier states afterwards."""
    states = [(generator, generator.get_state()) for generator in own_generators(owners)]
    for generator, _ in states:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
