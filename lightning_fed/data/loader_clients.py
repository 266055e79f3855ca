"""Clients with loaders of their own, which a round chains."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_fed.data.interleave import interleave, sequential_groups
from lightning_fed.data.poisson import check_poisson_loader, poisson_loader
from lightning_fed.data.population import PlannedVisit, Population, VisitBatch, batch_length, client_keys
from lightning_fed.messages import Client
from lightning_fed.server.schedule import Visit


class LoaderClients(Population):
    """Clients with a ``DataLoader`` or another iterable of batches each; a round chains them.

    Args:
        loaders: Client to loader; may build a client's loader when it is looked up.

    """

    def __init__(self, loaders: Mapping[Client, Iterable[Any]]) -> None:
        super().__init__(client_keys(loaders))
        self.loaders = loaders
        self._counted: dict[Client, int] = {}  # by one pass over a client's batches

    def num_samples(self, client: Client) -> int:
        """Length of the loader's data set or of its sampler, or else the examples in one pass over its batches.

        Raises:
            TypeError: If it is not one loader but several.
            ValueError: If neither has a length.

        """
        loader = self.loaders[client]
        check_client_loader(loader)
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized):
            # Clients may share a data set, each with a sampler of its part.
            sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
            return min(len(sampler), len(dataset)) if isinstance(sampler, Sized) else len(dataset)
        if isinstance(loader, Sized) and dataset is None:
            if client not in self._counted:
                self._counted[client] = sum(batch_length(batch) for batch in loader)
            return self._counted[client]
        raise ValueError(
            f"Expected the loader of client {client!r} to have a data set with a length, because an average weighs"
            " clients by their examples: define `__len__` on the data set."
        )

    def examples_per_batch(self, client: Client) -> int:
        """The batch size of the client's loader.

        Raises:
            OptionError: If its examples cannot be drawn one by one.

        """
        batch_size = check_poisson_loader(self.loaders[client]).batch_size
        assert batch_size is not None
        return batch_size

    def batches_per_epoch(self, client: Client, isolated: bool = False) -> int | None:
        """Length of the client's loader; an isolated pass is no different."""
        loader = self.loaders[client]
        try:
            return len(loader)  # type: ignore[arg-type]
        except TypeError:  # a DataLoader over an IterableDataset has `__len__`, which raises
            return None

    def gives_all(self, client: Client) -> bool:
        """True if a pass over the loader gives every example: not if it may drop or draw examples."""
        loader = self.loaders[client]
        batch_sampler = getattr(loader, "batch_sampler", None)
        sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
        drops = getattr(loader, "drop_last", False) or getattr(batch_sampler, "drop_last", False)
        draws = getattr(sampler, "replacement", False) or isinstance(sampler, WeightedRandomSampler)
        return not (drops or draws)

    def stream(
        self, visits: Sequence[PlannedVisit], isolated: bool = False, groups: Sequence[range] = ()
    ) -> Iterator[VisitBatch]:
        """The batches of all visits in order."""
        for group in groups or sequential_groups(visits):
            yield from interleave(self._batches(position, visits[position], isolated) for position in group)

    def _batches(self, position: int, planned: PlannedVisit, isolated: bool) -> Iterator[VisitBatch]:
        served = 0
        try:
            loader = self.loaders[planned.visit.client]
            with isolated_generators(loader, planned.visit.seed) if isolated else nullcontext():
                is_drawn = self.sampling is not None and not isolated
                batches = self._draws(loader, planned) if is_drawn else self._passes(loader, planned.visit)
                for batch in itertools.islice(batches, planned.num_batches):
                    yield VisitBatch(position, batch)
                    served += 1
        except Exception as error:
            yield VisitBatch.failed(position, error)
            return
        for _ in range(planned.num_batches - served):  # the loader gave fewer batches than its length
            yield VisitBatch(position)

    def _draws(self, loader: Any, planned: PlannedVisit) -> Iterator[Any]:
        sampling, visit, loader = self.sampling, planned.visit, check_poisson_loader(loader)
        assert sampling is not None
        assert loader.batch_size is not None
        batches = (
            sampling.served(visit.client, visit.round, number, planned.num_samples, loader.batch_size)
            for number in range(planned.num_batches)
        )
        yield from poisson_loader(loader, batches, visit.seed)

    def _passes(self, loader: Iterable[Any], visit: Visit) -> Iterator[Any]:
        for _ in itertools.count() if visit.steps is not None else range(visit.epochs):
            has_batches = False
            for batch in loader:
                has_batches = True
                yield batch
            if not has_batches:
                raise ValueError("its loader gave no batch")


def check_client_loader(loader: Any) -> None:
    """Refuses several loaders as the data of one client.

    Args:
        loader: A client's data.

    Raises:
        TypeError: If it is a ``CombinedLoader``, or a mapping or sequence of loaders.

    """
    values = loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, list | tuple) else ()
    if isinstance(loader, CombinedLoader) or any(isinstance(value, DataLoader | CombinedLoader) for value in values):
        raise TypeError(
            f"Expected a client's data to be one loader or data set, but got several in a {type(loader).__name__}:"
            " which of them says how many examples and batches the client has is not known. Zip them into one data set"
            " (`torch.utils.data.StackDataset`), or put their examples together (`ConcatDataset`)."
        )


@contextmanager
def isolated_generators(loader: Any, seed: int) -> Iterator[None]:
    """Context in which a loader's own random generators are seeded; their states are restored afterwards.

    Args:
        loader: The loader that an isolated pass iterates over.
        seed: The seed.

    Raises:
        ValueError: If the loader has persistent workers, which hold the random numbers of training.

    """
    if getattr(loader, "persistent_workers", False):
        raise ValueError(
            "Expected a loader that can be passed over beside training, but its workers are persistent and serve one"
            " pass at a time: set `persistent_workers=False` (or measure prototypes with passes='online', or give"
            " `SampledSoftmax` the clients' `classes`)"
        )
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    states = [(item, item.get_state()) for item in generators if isinstance(item, torch.Generator)]
    for generator, _ in states:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
