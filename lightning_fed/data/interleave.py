"""Several clients' batches at once: taken in turns, each with random numbers of its own, and stacked."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.population import seed_everything

Item = TypeVar("Item")


def interleave(streams: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """One item of each stream, another one of each, and so on; streams that have ended are passed over.

    Example:
        >>> list(interleave([iter("abc"), iter("d"), iter("ef")]))
        ['a', 'd', 'e', 'b', 'f', 'c']

    """
    left = list(streams)
    while left:
        for stream in list(left):
            try:
                yield next(stream)
            except StopIteration:
                left.remove(stream)


def sequential_groups(visits: Sequence[Any]) -> list[range]:
    """The places of visits that do not take turns.

    Example:
        >>> sequential_groups("ab")
        [range(0, 1), range(1, 2)]

    """
    return [range(position, position + 1) for position in range(len(visits))]


class ClientGenerators:
    """The global generators as several clients have them, each from a seed of its own on.

    Args:
        seeds: The clients' seeds.
        everywhere: Whether Python's and NumPy's generators are exchanged too; PyTorch's are in any case.

    Example:
        >>> numbers = ClientGenerators([1, 2])
        >>> drawn = []
        >>> for client in (0, 1, 0):
        ...     numbers.switch_to(client)
        ...     drawn.append(torch.rand(1))
        >>> generator = torch.Generator().manual_seed(1)
        >>> [torch.equal(torch.rand(1, generator=generator), drawn[place]) for place in (0, 2)]
        [True, True]

    """

    def __init__(self, seeds: Sequence[int], everywhere: bool = True) -> None:
        self._seeds = seeds
        self._everywhere = everywhere
        self._states: list[tuple[Any, ...] | None] = [None] * len(seeds)
        self._now: int | None = None

    def switch_to(self, client: int) -> None:
        """Makes the generators those of a client, by its index."""
        if client == self._now:
            return
        if self._now is not None:
            self._states[self._now] = self._captured()
        self._now = client
        state = self._states[client]
        if state is None:
            seed_everything(self._seeds[client])
        else:
            self._restore(state)

    def _captured(self) -> tuple[Any, ...]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        others = _others() if self._everywhere else None
        return torch.default_generator.get_state(), cuda, others

    def _restore(self, state: tuple[Any, ...]) -> None:
        cpu, cuda, others = state
        torch.default_generator.set_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])  # noqa: NPY002 - the user's data sets may use the global generator


@contextmanager
def detect_draws() -> Iterator[list[bool]]:
    """Notes whether anything was drawn from Python's or NumPy's global generator meanwhile.

    Example:
        >>> with detect_draws() as has_drawn:
        ...     _ = random.random()
        >>> has_drawn
        [True]

    """
    before, has_drawn = _others(), list[bool]()
    yield has_drawn
    has_drawn.append(pickle.dumps(before) != pickle.dumps(_others()))


def _others() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002


class StackedBatch(NamedTuple):
    """Batches of one form, stacked: every tensor has a leading axis of the clients.

    Args:
        clients: The clients, by their index.
        batch: In the form of the clients' own batches.

    """

    clients: tuple[int, ...]
    batch: Any


def stack_batches(batches: Mapping[int, Any]) -> list[StackedBatch]:
    """Stacks the batches that have the same form: the same containers, shapes and types, equal texts and numbers.

    Args:
        batches: Client's index to batch.

    Example:
        >>> parts = stack_batches({0: [torch.zeros(2, 3)], 1: [torch.zeros(1, 3)], 2: [torch.ones(2, 3)]})
        >>> [(part.clients, part.batch[0].shape) for part in parts]
        [((0, 2), torch.Size([2, 2, 3])), ((1,), torch.Size([1, 1, 3]))]

    """
    forms: dict[Any, dict[int, list[Tensor]]] = {}
    for client, batch in batches.items():
        parts: list[Tensor] = []
        forms.setdefault(_form(batch, parts), {})[client] = parts
    return [
        StackedBatch(
            tuple(group), rebuild_batch(batches[next(iter(group))], map(torch.stack, zip(*group.values(), strict=True)))
        )
        for group in forms.values()
    ]


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors in a batch, as :func:`rebuild_batch` takes them."""
    tensors: list[Tensor] = []
    _form(batch, tensors)
    return tensors


def rebuild_batch(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """A batch of the same form with other tensors in it.

    Example:
        >>> batch = {"image": torch.zeros(1), "name": "a"}
        >>> rebuild_batch(batch, iter([torch.ones(1)]))
        {'image': tensor([1.]), 'name': 'a'}

    """
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Mapping):
        return type(batch)({key: rebuild_batch(value, tensors) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        inside = [rebuild_batch(value, tensors) for value in batch]
        return type(batch)(*inside) if hasattr(batch, "_fields") else type(batch)(inside)
    return batch


def _form(batch: Any, tensors: list[Tensor]) -> Any:
    """What two batches must have in common to be stacked; puts the batch's tensors into the list."""
    if isinstance(batch, Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype, batch.device
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, _form(value, tensors)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), tuple(_form(value, tensors) for value in batch)
    return batch if isinstance(batch, str | bytes | int | float | None) else id(batch)
