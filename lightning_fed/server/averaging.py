"""Base class for aggregation rules that average client states, with one weight per update."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning_fed.argument_checks import check_option
from lightning_fed.messages import Broadcast, ClientUpdate, Request, State
from lightning_fed.numerics.row_sums import RowWeighting
from lightning_fed.numerics.weighted_mean import WeightedMean
from lightning_fed.rule import Aggregator, RoundInfo


class AveragingAggregator(Aggregator):
    """Weighted mean of client states, with the memory of one state. Subclasses implement :meth:`weight`.

    Args:
        row_weighting: Divisor for a row's summed change in sliced entries: the total weight of all clients
            (``"global"``, as in the FedSS paper, so a row trained by few clients changes little), or of the clients
            with the row (``"per_row"``).
    """

    def __init__(self, row_weighting: RowWeighting = "global") -> None:
        check_option("row_weighting", row_weighting, ("global", "per_row"))
        self.row_weighting: RowWeighting = row_weighting
        self._info = RoundInfo(-1)
        self._state: State = {}
        self.running = WeightedMean()

    @abstractmethod
    def weight(self, update: ClientUpdate) -> float:
        """Returns the weight of a client's update in the mean."""

    def start(self, info: RoundInfo, state: State) -> None:
        self._info, self._state, self.running = info, state, WeightedMean()

    def broadcast(self, request: Request) -> Broadcast:
        return Broadcast(self._info.round, dict(self._state))

    def receive(self, update: ClientUpdate) -> None:
        self.add_to(self.running, update, self.weight(update))

    def add_to(self, running: WeightedMean, update: ClientUpdate, weight: float) -> None:
        """Adds an update to a running mean, except unsent (unchanged) entries."""
        moved = {
            name: value
            for name, value in update.state.items()
            if value is not self._state.get(name) or not value.is_floating_point()
        }
        running.add(moved, weight, update.num_samples, update.rows)

    def merge(self, other: Any) -> None:
        self.running.merge(other.running)

    def aggregate(self) -> State:
        means = self.running.mean(self._state, self.row_weighting)
        unmoved = {name: value.clone() for name, value in self._state.items() if name not in means}
        return {name: (means if name in means else unmoved)[name] for name in self._state} if unmoved else means
