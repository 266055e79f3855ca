"""Matrix with a round's client updates as rows, computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lightning_fed.messages import Client, State
from lightning_fed.numerics.chunks import CHUNK_ELEMENTS
from lightning_fed.numerics.precision import to_float64

_ROUNDING = 1e-12  # tolerance for a sum of weights


class Steps:
    """Client updates as rows of a matrix, computed in chunks.

    A row is a client's model minus the global model. The whole matrix is never stored. :meth:`mean` and
    :meth:`by_coordinate` return a new global model in float64.

    Args:
        start: Global model.
        states: Client models, one per row.
        names: Floating-point or complex tensors to compare.

    Example:
        >>> steps = Steps({"w": torch.tensor([1.0])}, [{"w": torch.tensor([2.0])}, {"w": torch.tensor([4.0])}], ["w"])
        >>> steps.gram
        tensor([[1., 3.],
                [3., 9.]], dtype=torch.float64)
    """

    def __init__(self, start: State, states: Sequence[State], names: Sequence[str]) -> None:
        self.start, self.names, self._states = start, list(names), list(states)

    def __len__(self) -> int:
        return len(self._states)

    @cached_property
    @torch.no_grad()
    def gram(self) -> Tensor:
        """Inner products between all client updates, shape ``(clients, clients)``, float64, on the CPU."""
        gram = torch.zeros(len(self._states), len(self._states), dtype=torch.float64)
        for name in self.names if self._states else ():
            for _, rows, base in self._chunks(name):
                rows -= base
                gram += (rows @ rows.T).cpu()
        return (gram + gram.T) / 2

    @property
    def norms(self) -> Tensor:
        return self.gram.diagonal().sqrt()

    def find_too_long(self, clients: Sequence[Client]) -> dict[Client, str]:
        """Finds clients with an update too large for a finite norm in float64. Returns the reason by client."""
        is_good = self.norms.isfinite().tolist()
        return {
            client: "the client's update has an infinite norm"
            for client, good in zip(clients, is_good, strict=True)
            if not good
        }

    @torch.no_grad()
    def products(self, direction: State) -> Tensor:
        """Inner products of all client updates with ``direction``, shape ``(clients,)``."""
        total = torch.zeros(len(self._states), dtype=torch.float64)
        for name in self.names:
            direction_values = _as_real(direction[name])
            for columns, rows, base in self._chunks(name):
                total += ((rows - base) @ direction_values[columns].to(base.device)).cpu()
        return total

    @torch.no_grad()
    def mean(self, weights: Tensor, plus: tuple[float, State] | None = None) -> State:
        """Returns the global model plus a weighted sum of updates. ``plus`` adds one more weight and update."""
        global_weight = float(_global_weight(weights))

        def combine(name: str, columns: slice, rows: Tensor, base: Tensor) -> Tensor:
            value = weights.to(rows.device) @ rows
            if global_weight:
                value += global_weight * base
            if plus is not None:
                value += plus[0] * _as_real(plus[1][name])[columns].to(value.device)
            return value

        return self._combined(combine)

    @torch.no_grad()
    def by_coordinate(
        self, combine: Callable[[Tensor], tuple[Tensor, Tensor]], chosen: Tensor | None = None
    ) -> tuple[State, Tensor]:
        """Combines the client models at each coordinate.

        Returns the new model, and for each client the fraction of coordinates used.

        Args:
            combine: Function from n client models at k coordinates, shape ``(n, k)``, to the combined model, shape
                ``(k,)``, and each client's number of coordinates used, shape ``(n,)``. Adding a vector to all models
                must add the same vector to the combined model.
            chosen: Indices of the updates to use; by default all.
        """
        indices = torch.arange(len(self)) if chosen is None else chosen
        counts = torch.zeros(len(indices), dtype=torch.float64)
        num_coordinates = 0

        def combine_rows(name: str, columns: slice, rows: Tensor, base: Tensor) -> Tensor:
            nonlocal num_coordinates
            value, num_included = combine(rows if chosen is None else rows[indices.to(rows.device)])
            counts.add_(num_included.cpu())
            num_coordinates += len(value)
            return value

        state = self._combined(combine_rows)
        num_included = torch.zeros(len(self), dtype=torch.float64)
        num_included[indices] = counts / max(num_coordinates, 1)
        return state, num_included

    def _combined(self, combine: Callable[[str, slice, Tensor, Tensor], Tensor]) -> State:
        state = {}
        for name in self.names:
            values = [combine(name, columns, rows, base) for columns, rows, base in self._chunks(name)]
            state[name] = _like(torch.cat(values), self.start[name])
        return state

    def _chunks(self, name: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        start = _as_real(self.start[name])
        values = [_as_real(state[name]) for state in self._states]
        width = max(1, CHUNK_ELEMENTS // max(1, len(values)))
        for first in range(0, max(len(start), 1), width):
            columns = slice(first, first + width)
            yield columns, to_float64(torch.stack([value[columns] for value in values])), to_float64(start[columns])


def step_between(start: State, state: State, names: Sequence[str]) -> State:
    """Returns the difference ``state - start`` for the entries ``names``, in float64."""
    return {name: to_float64(state[name]) - to_float64(start[name]) for name in names}


def _global_weight(weights: Tensor) -> Tensor:
    # weight of the global model in a weighted sum of client models; 0 for a mean
    weight = 1 - weights.sum(-1)
    return torch.where(weight.abs() < _ROUNDING, torch.zeros_like(weight), weight)


def _as_real(value: Tensor) -> Tensor:
    value = value.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)


def _like(values: Tensor, entry: Tensor) -> Tensor:
    if entry.is_complex():
        return torch.view_as_complex(values.reshape(*entry.shape, 2))
    return values.reshape(entry.shape)
