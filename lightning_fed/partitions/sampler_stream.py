"""Gives each sample index drawn by a user's sampler to the sample's client."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from lightning_fed.checks.fingerprints import fingerprint
from lightning_fed.data.dataset_clients import DatasetClients, cut_batches
from lightning_fed.data.loader_clients import samplers_of, seeded_own_generators, set_epoch
from lightning_fed.data.population import PlannedVisit, seeded_generators
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import derive_seed
from lightning_fed.partitions.loader_parts import LOADERS_REMEDY, batches_of
from lightning_fed.server.schedule import Visit

_SAMPLER = 0x5A  # purpose of the seeds
_NUM_CACHED = 4
_MOST_EMPTY = 100
"""Maximum number of consecutive sampler passes without a batch for a client."""


class SamplerStream:
    """Divides the indices drawn by a user's sampler among the clients.

    In each epoch, the sampler draws indices once for all clients. Each client keeps the indices of the client's
    examples. The sampler must draw the same indices for the same seed.

    Example:
        >>> from torch.utils.data import SubsetRandomSampler
        >>> loader = DataLoader(range(6), 2, sampler=SubsetRandomSampler([0, 1, 2, 3]))
        >>> stream = SamplerStream(loader, {"a": np.array([1, 2, 5]), "b": np.array([0, 3, 4])}, seed=0)
        >>> parts = [stream.indices[client][stream.part(client, 0, 0, 0)[0]] for client in ("a", "b")]
        >>> [sorted(part.tolist()) for part in parts]
        [[1, 2], [0, 3]]
    """

    def __init__(self, loader: DataLoader[Any], indices: Mapping[Client, np.ndarray], seed: int) -> None:
        self.indices = indices
        self.sampler, self.batch_size, self.drop_last = batches_of(loader)
        self._length = len(loader.dataset)  # type: ignore[arg-type] # a map-style one
        self._seed, self._skipped = seed, frozenset((id(loader.dataset),))
        self._samplers = samplers_of(loader)
        self._passes: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
        name = type(self.sampler).__name__
        if not callable(getattr(self.sampler, "__len__", None)):
            raise OptionError(
                f"Expected {name} to have a length, because the length ends a pass: define `__len__`. {LOADERS_REMEDY}"
            )
        first, _, again = ((*self._draw(0, number, number), self._state()) for number in (0, 1, 0))
        if not all(map(np.array_equal, first[:2], again[:2])) or first[2] != again[2]:
            raise OptionError(
                f"Expected {name} to draw the same indices for the same seed, but the indices also depend on the "
                "sampler's own state (such as a counter). All clients would share this state. Shuffle only with the "
                "global generators of PyTorch, NumPy or Python (seeded before each pass), with an attribute "
                f"`generator` (a `torch.Generator`), or by the number from `set_epoch(epoch)`. {LOADERS_REMEDY}"
            )

    def part(self, client: Client, round: int, number: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the client's examples in one epoch of the user's sampler.

        The first array contains positions in the client's indices, ``self.indices[client]``. The second array contains
        the batch index of each example for a custom batch sampler, otherwise zeros. ``number`` counts the epochs in the
        round, and ``epoch`` the epochs in the fit.
        """
        key = round, number, epoch
        if key not in self._passes:
            while len(self._passes) >= _NUM_CACHED:
                self._passes.pop(next(iter(self._passes)))
            self._passes[key] = self._draw(*key)
        drawn, batches = self._passes[key]
        client_indices = self.indices[client]
        if not len(client_indices):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        order = np.argsort(client_indices, kind="stable")
        places = np.searchsorted(client_indices, drawn, sorter=order).clip(max=len(client_indices) - 1)
        is_own = client_indices[order[places]] == drawn
        return order[places[is_own]], batches[is_own]

    def _state(self) -> Any:
        return [
            fingerprint(vars(sampler), skipped=self._skipped)
            for sampler in self._samplers
            if hasattr(sampler, "__dict__")
        ]

    def _draw(self, round: int, number: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        seed = derive_seed(self._seed, _SAMPLER, round, number)
        with seeded_generators(seed), seeded_own_generators(self._samplers, seed):
            set_epoch(self._samplers, epoch)
            # Lightning ends an epoch at the loader's length, even if a batch sampler continues.
            drawn = list(itertools.islice(self.sampler, len(self.sampler) + (self.batch_size is not None)))
        name = type(self.sampler).__name__
        if self.batch_size is not None and len(drawn) > len(self.sampler):
            raise OptionError(
                f"Expected {name} to return at most {len(self.sampler)} batches or indices in a pass, as stated by "
                f"`__len__`, but got more: correct `__len__`. {LOADERS_REMEDY}"
            )
        batches = [[index] for index in drawn] if self.batch_size is not None else drawn
        try:
            indices = np.array([operator.index(index) for batch in batches for index in batch], dtype=np.int64)
        except TypeError:
            raise OptionError(
                f"Expected {name} to draw indices of examples, because a partition assigns examples to clients, but got"
                f" {drawn[0]!r}. {LOADERS_REMEDY}"
            ) from None
        outside = (indices < 0) | (indices >= self._length)
        if outside.any():
            raise OptionError(
                f"Expected {name} to draw indices from 0 to {self._length - 1}, but got {indices[outside][0]}."
            )
        numbers = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        return indices, numbers if self.batch_size is None else np.zeros_like(indices)


class SampledClients(DatasetClients):
    """Clients with a common custom sampler. Each client trains on its own examples drawn by the sampler."""

    def __init__(self, draws: SamplerStream, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.draws = draws

    def num_samples(self, client: Client) -> int:
        """Number of the client's examples in the sampler's first pass of the round."""
        return len(self._draw(client, self.round, 0)[0])

    def gives_all(self, client: Client) -> bool:
        return len(set(self._draw(client, self.round, 0)[0])) == self.source.num_samples(client)

    def _count_batches(self, client: Client, drop_last: bool) -> int:
        return sum(1 for _ in self._cut_draws(client, self.round, 0, drop_last))

    def batches_by_pass(self, visit: Visit) -> tuple[int, ...]:
        if self.overfit_batches:
            return ()
        lengths: list[int] = []
        while sum(lengths) < visit.steps if visit.steps is not None else len(lengths) < visit.epochs:
            lengths.append(sum(1 for _ in self._cut_draws(visit.client, visit.round, len(lengths), self.drop_last)))
            if not lengths[0]:
                break  # the round then excludes the client
            if not any(lengths[-_MOST_EMPTY:]):
                raise ValueError(f"the sampler of the client's loader returned no batch in {_MOST_EMPTY} passes")
        return tuple(lengths)

    def batches_of_pass(self, planned: PlannedVisit, number: int, isolated: bool) -> Iterator[np.ndarray]:
        visit = planned.visit
        drawn = self._cut_draws(visit.client, visit.round, number, self.drop_last and not isolated)
        yield from itertools.islice(drawn, planned.epoch_batches if self.overfit_batches else None)

    def _cut_draws(self, client: Client, round: int, number: int, drop_last: bool) -> Iterator[np.ndarray]:
        positions, batches = self._draw(client, round, number)
        if self.draws.batch_size is None:
            yield from np.split(positions, np.flatnonzero(np.diff(batches)) + 1) if len(positions) else ()
        else:
            for start, end in cut_batches(len(positions), self.batch_size, drop_last):
                yield positions[start:end]

    def _draw(self, client: Client, round: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        if self.overfit_batches:
            round = number = 0
        return self.draws.part(client, round, number, round * self.local_epochs + number)
