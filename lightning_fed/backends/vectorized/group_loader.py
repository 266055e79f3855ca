"""Dataloader for simultaneous training of clients."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.batch_structure import batch_structure, batch_tensors, rebuild_batch
from lightning_fed.data.population import (
    PlannedVisit,
    VisitBatch,
    restore_torch_generators,
    seed_everything,
    torch_generator_states,
)
from lightning_fed.data.round_loader import RoundLoader


class GroupLoader(RoundLoader):
    """Dataloader for groups of clients that train simultaneously. Yields lists of :class:`StackedBatch`.

    Args:
        arguments: Positional arguments for :class:`RoundLoader`.
        size: Maximum number of clients per group.
        is_equal: Whether all clients in a group must have the same number of batches.
        draws: Whether training draws random numbers from Python's or NumPy's generators.

    Attributes:
        numbers: Random generators of the clients in training; ``None`` if only one client trains.
    """

    def __init__(self, *arguments: Any, size: int, is_equal: bool, draws: bool) -> None:
        super().__init__(*arguments)
        self.numbers: ClientGenerators | None = None
        self._draws = draws
        plan = self._plan
        plan.visits.sort(key=lambda planned: planned.num_batches, reverse=True)
        plan.groups = []
        for position, planned in enumerate(plan.visits):
            last = plan.groups[-1] if plan.groups else range(0)
            fits = not is_equal or (last and plan.visits[last[0]].num_batches == planned.num_batches)
            if last and fits and len(last) < size:
                plan.groups[-1] = range(last.start, position + 1)
            else:
                plan.groups.append(range(position, position + 1))
        plan.length = max(1, sum(plan.visits[positions[0]].num_batches for positions in plan.groups))

    def seed(self, group: Sequence[PlannedVisit]) -> None:
        self.numbers = None
        if len(group) == 1:
            super().seed(group)
        else:
            self.numbers = ClientGenerators([planned.visit.seed for planned in group], self._draws)
            self.numbers.switch_to(0)

    def open_stream(self) -> Iterator[VisitBatch]:
        if len(self._plan.groups) == len(self.visits):
            return super().open_stream()
        return self.population.stream(self.visits, groups=self._plan.groups)

    def fetch(self, stream: Iterator[VisitBatch], positions: range, batches_left: int) -> tuple[Any, int]:
        if self.numbers is None:
            return super().fetch(stream, positions, batches_left)
        number = self.visits[positions[0]].num_batches - 1 - batches_left
        batches = {}
        for index, position in enumerate(positions):
            planned = self.visits[position]
            if planned.fault is None and number < planned.num_batches:
                self.numbers.switch_to(index)
                batch = self._fetch(stream, position)
                if batch is not None:
                    batches[index] = batch
        return stack_batches(batches) or None, batches_left


class ClientGenerators:
    """Gives each of several clients a separate state of the global random generators.

    Args:
        seeds: One seed per client.
        everywhere: Whether to include Python's and NumPy's generators, in addition to PyTorch's.

    Example:
        >>> numbers = ClientGenerators([1, 2])
        >>> drawn = []
        >>> for client in (0, 1, 0):
        ...     numbers.switch_to(client)
        ...     drawn.append(torch.rand(1))
        >>> generator = torch.Generator().manual_seed(1)
        >>> [torch.equal(torch.rand(1, generator=generator), drawn[visit]) for visit in (0, 2)]
        [True, True]
    """

    def __init__(self, seeds: Sequence[int], everywhere: bool = True) -> None:
        self._seeds = seeds
        self._everywhere = everywhere
        self._states: list[tuple[Any, ...] | None] = [None] * len(seeds)
        self._current: int | None = None

    def switch_to(self, client: int) -> None:
        if client == self._current:
            return
        if self._current is not None:
            self._states[self._current] = self._capture()
        self._current = client
        state = self._states[client]
        if state is None:
            seed_everything(self._seeds[client])
        else:
            self._restore(state)

    def snapshot(self) -> tuple[Any, ...]:
        return list(self._states), self._current, None if self._current is None else self._capture()

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        states, self._current, state = snapshot
        self._states = list(states)
        if state is not None:
            self._restore(state)

    def _capture(self) -> tuple[Any, ...]:
        return torch_generator_states(), _host_states() if self._everywhere else None

    def _restore(self, state: tuple[Any, ...]) -> None:
        states, host_states = state
        restore_torch_generators(states)
        if host_states is not None:
            random.setstate(host_states[0])
            np.random.set_state(host_states[1])  # noqa: NPY002 - the user's data sets may use the global generator


@contextmanager
def detect_draws() -> Iterator[list[bool]]:
    """Context that detects draws from Python's or NumPy's random generator.

    Yields a list. At the end the list contains ``True`` if the code has drawn numbers.

    Example:
        >>> with detect_draws() as has_drawn:
        ...     _ = random.random()
        >>> has_drawn
        [True]
    """
    states_before, has_drawn = _host_states(), list[bool]()
    yield has_drawn
    has_drawn.append(pickle.dumps(states_before) != pickle.dumps(_host_states()))


def _host_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002


class StackedBatch(NamedTuple):
    """Batches of several clients, stacked along the first axis. ``clients`` are the clients' indices."""

    clients: tuple[int, ...]
    batch: Any

    def split(self) -> list[StackedBatch]:
        tensors = batch_tensors(self.batch)
        return [
            StackedBatch((client,), rebuild_batch(self.batch, iter([tensor[row : row + 1] for tensor in tensors])))
            for row, client in enumerate(self.clients)
        ]


def stack_batches(batches: Mapping[int, Any]) -> list[StackedBatch]:
    """Stacks batches with equal structure, shapes and dtypes. ``batches`` maps client indices to batches.

    Example:
        >>> parts = stack_batches({0: [torch.zeros(2, 3)], 1: [torch.zeros(1, 3)], 2: [torch.ones(2, 3)]})
        >>> [(part.clients, part.batch[0].shape) for part in parts]
        [((0, 2), torch.Size([2, 2, 3])), ((1,), torch.Size([1, 1, 3]))]
    """
    structures: dict[Any, dict[int, list[Tensor]]] = {}
    for client, batch in batches.items():
        parts: list[Tensor] = []
        structures.setdefault(batch_structure(batch, parts), {})[client] = parts
    return [
        StackedBatch(
            tuple(group), rebuild_batch(batches[next(iter(group))], map(torch.stack, zip(*group.values(), strict=True)))
        )
        for group in structures.values()
    ]
