"""Assigns the visits of a round to processes, with similar total durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_fed.data.population import PlannedVisit
from lightning_fed.messages import Client

_MOST = 100_000  # remembered clients


class VisitCosts:
    """Seconds per batch in each client's last visit, used to estimate the next visit.

    Example:
        >>> from lightning_fed.server.schedule import Visit
        >>> visits = [PlannedVisit(Visit(client, 0, 0), 8, batches) for client, batches in zip("abc", (2, 2, 6))]
        >>> costs = VisitCosts()
        >>> costs.expected(visits)
        [2.0, 2.0, 6.0]
        >>> costs.note({"a": 0.5, "b": 1.5})
        >>> costs.expected(visits)
        [1.0, 3.0, 6.0]

    """

    def __init__(self) -> None:
        self._seconds: dict[Client, float] = {}

    def note(self, seconds: Mapping[Client, float]) -> None:
        for client, value in seconds.items():
            self._seconds.pop(client, None)  # the most recent clients are stored longest
            self._seconds[client] = value
        while len(self._seconds) > _MOST:
            del self._seconds[next(iter(self._seconds))]

    def expected(self, visits: Sequence[PlannedVisit]) -> list[float]:
        """Estimates the duration of visits. For unknown clients, uses the mean over known clients."""
        clients = [planned.visit.client for planned in visits]
        known = [self._seconds[client] for client in clients if client in self._seconds]
        usual = sum(known) / len(known) if known else 1.0
        return [planned.num_batches * self._seconds.get(planned.visit.client, usual) for planned in visits]


def balance_loads(work: Sequence[float], size: int) -> list[list[int]]:
    """Distributes work greedily, largest item first, to the process with the smallest load.

    Returns increasing positions for each process.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for position in sorted(range(len(work)), key=lambda position: -work[position]):
        least = loads.index(min(loads))
        loads[least] += work[position]
        shares[least].append(position)
    return [sorted(share) for share in shares]
