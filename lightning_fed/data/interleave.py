"""Batches of several clients in one tensor, and a separate random generator state for each client."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.population import restore_torch_generators, seed_everything, torch_generator_states


class ClientGenerators:
    """Separate states of the global random generators for several clients, switched between training steps.

    Args:
        seeds: The clients' seeds.
        everywhere: Whether to switch Python's and NumPy's generators in addition to PyTorch's.

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
    """Context that yields a list; at the end appends a bool: whether Python's or NumPy's global generator was used.

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
    """Stacked batches of the clients with indices `clients`; the first axis of every tensor is the client."""

    clients: tuple[int, ...]
    batch: Any

    def split(self) -> list[StackedBatch]:
        tensors = batch_tensors(self.batch)
        return [
            StackedBatch((client,), rebuild_batch(self.batch, iter([tensor[row : row + 1] for tensor in tensors])))
            for row, client in enumerate(self.clients)
        ]


def stack_batches(batches: Mapping[int, Any]) -> list[StackedBatch]:
    """Stacks batches (a mapping from client index to batch) in groups with equal structure, shapes and dtypes.

    Example:
        >>> parts = stack_batches({0: [torch.zeros(2, 3)], 1: [torch.zeros(1, 3)], 2: [torch.ones(2, 3)]})
        >>> [(part.clients, part.batch[0].shape) for part in parts]
        [((0, 2), torch.Size([2, 2, 3])), ((1,), torch.Size([1, 1, 3]))]
    """
    structures: dict[Any, dict[int, list[Tensor]]] = {}
    for client, batch in batches.items():
        parts: list[Tensor] = []
        structures.setdefault(_structure(batch, parts), {})[client] = parts
    return [
        StackedBatch(
            tuple(group), rebuild_batch(batches[next(iter(group))], map(torch.stack, zip(*group.values(), strict=True)))
        )
        for group in structures.values()
    ]


def batch_tensors(batch: Any) -> list[Tensor]:
    """Lists the tensors in a batch at any depth, in the order used by :func:`rebuild_batch`."""
    tensors: list[Tensor] = []
    _structure(batch, tensors)
    return tensors


def rebuild_batch(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """Replaces all tensors of ``batch`` by new ``tensors``, in the order of :func:`batch_tensors`.

    Example:
        >>> batch = {"image": torch.zeros(1), "name": "a"}
        >>> rebuild_batch(batch, iter([torch.ones(1)]))
        {'image': tensor([1.]), 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Mapping):
        rebuilt = {key: rebuild_batch(value, tensors) for key, value in batch.items()}
        if isinstance(batch, defaultdict):
            return type(batch)(batch.default_factory, rebuilt)
        return type(batch)(rebuilt)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        elements = [rebuild_batch(value, tensors) for value in batch]
        return type(batch)(*elements) if hasattr(batch, "_fields") else type(batch)(elements)
    return batch


def _structure(batch: Any, tensors: list[Tensor]) -> Any:
    if isinstance(batch, Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype, batch.device
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, _structure(value, tensors)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), tuple(_structure(value, tensors) for value in batch)
    return batch if isinstance(batch, str | bytes | int | float | None) else id(batch)
