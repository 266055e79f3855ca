"""Which process trains which clients of a round, so that all are done at about the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_fed.data.population import PlannedVisit
from lightning_fed.messages import Client

_MOST = 100_000  # clients whose pace is remembered


class VisitCosts:
    """Seconds that a batch of each client took in its last visit: what a visit is expected to take.

    Example:
        >>> from lightning_fed.server.schedule import Visit
        >>> visits = [PlannedVisit(Visit(client, 0, 0), 8, batches) for client, batches in zip("abc", (2, 2, 6))]
        >>> paces = VisitCosts()
        >>> paces.expected(visits)
        [2.0, 2.0, 6.0]
        >>> paces.note({"a": 0.5, "b": 1.5})
        >>> paces.expected(visits)
        [1.0, 3.0, 6.0]

    """

    def __init__(self) -> None:
        self._seconds: dict[Client, float] = {}

    def note(self, seconds: Mapping[Client, float]) -> None:
        """Remembers what a batch of some clients took."""
        for client, value in seconds.items():
            self._seconds.pop(client, None)  # the last ones stay the longest
            self._seconds[client] = value
        while len(self._seconds) > _MOST:
            del self._seconds[next(iter(self._seconds))]

    def expected(self, visits: Sequence[PlannedVisit]) -> list[float]:
        """What the visits are expected to take; clients that are not known take as long per batch as the others."""
        known = [self._seconds[each.visit.client] for each in visits if each.visit.client in self._seconds]
        usual = sum(known) / len(known) if known else 1.0
        return [each.num_batches * self._seconds.get(each.visit.client, usual) for each in visits]


def balance_loads(work: Sequence[float], size: int) -> list[list[int]]:
    """Shares work out greedily: the largest piece first, each to who has the least so far.

    Args:
        work: What every piece is expected to take.
        size: Number of processes.

    Returns:
        For every process the places of its pieces, increasing.

    Example:
        >>> balance_loads([2.0, 3.0, 1.0, 4.0], 2)
        [[2, 3], [0, 1]]

    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for position in sorted(range(len(work)), key=lambda position: -work[position]):
        least = loads.index(min(loads))
        loads[least] += work[position]
        shares[least].append(position)
    return [sorted(share) for share in shares]
