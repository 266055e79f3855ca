"""Tensors of a visit by parameter, stacked where several visits train at once, for methods that correct gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_fed.data.population import PlannedVisit
from lightning_fed.messages import Broadcast


class VisitTensors:
    """Tensors of the visits that are under way, one per parameter, in the form that the parameter has meanwhile.

    A parameter of one visit has its own shape. While several visits train at once (``Vectorized``) it has a leading
    axis of them, and so has what :meth:`of` returns; the row of a visit that has no such tensor is 0.

    Example:
        >>> from lightning_fed.server.schedule import Visit
        >>> visits = [PlannedVisit(Visit(client, 0, 0), 8, 1, position=place) for place, client in enumerate("ab")]
        >>> tensors, weight = VisitTensors(), nn.Parameter(torch.zeros(2))
        >>> tensors.put(visits[0], {weight: torch.ones(2)})
        >>> tensors.put(visits[1], {})
        >>> tensors.of(weight, visits[:1])
        tensor([1., 1.])
        >>> tensors.of(weight, visits)
        tensor([[1., 1.],
                [0., 0.]])

    """

    def __init__(self) -> None:
        self._of_visit: dict[int, Mapping[nn.Parameter, Tensor]] = {}
        self._stacks: dict[nn.Parameter, Tensor] = {}

    def __len__(self) -> int:
        """Number of visits that are under way."""
        return len(self._of_visit)

    def put(self, planned: PlannedVisit, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Begins a visit with its tensors."""
        self._of_visit[planned.position] = tensors

    def of(self, parameter: nn.Parameter, visits: Sequence[PlannedVisit]) -> Tensor | None:
        """The tensor of a parameter, or of several visits the stack; ``None`` where there is none.

        Args:
            parameter: The parameter.
            visits: The visits that train now, in the order of their rows.

        """
        if len(visits) == 1:
            return self._of_visit.get(visits[0].position, {}).get(parameter)
        if parameter not in self._stacks:
            rows = [self._of_visit.get(planned.position, {}).get(parameter) for planned in visits]
            like = next((row for row in rows if row is not None), None)
            if like is None:
                return None
            self._stacks[parameter] = torch.stack([torch.zeros_like(like) if row is None else row for row in rows])
        return self._stacks[parameter]

    def end(self, planned: PlannedVisit) -> None:
        """Ends a visit; the stacks go with the last one."""
        self._of_visit.pop(planned.position, None)
        if not self._of_visit:
            self._stacks = {}


def row_of(planned: PlannedVisit, visits: Sequence[PlannedVisit]) -> int | None:
    """Row of a visit in the stack of those that train at once; ``None`` where it trains alone."""
    if len(visits) == 1:
        return None
    return next(row for row, visit in enumerate(visits) if visit is planned)


def refuse_rows(broadcast: Broadcast, method: str) -> None:
    """Refuses clients that hold some rows of an entry, where a method keeps whole models.

    Args:
        broadcast: The message to a client.
        method: Name of the method, for the error.

    Raises:
        MisconfigurationException: If it holds rows.

    Example:
        >>> refuse_rows(Broadcast(0, {"w": torch.zeros(3)}), "MOON")

    """
    if broadcast.rows:
        raise MisconfigurationException(
            f"{method}'s clients keep whole models, but they hold some rows of {sorted(broadcast.rows)} only: use"
            " 'fedavg', for instance."
        )
