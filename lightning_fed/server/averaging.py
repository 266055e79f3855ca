"""Base class of the averaging rules: one running weighted mean; a rule gives the weight of an update."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning_fed.argument_checks import check_option
from lightning_fed.messages import Broadcast, ClientUpdate, Request, State
from lightning_fed.numerics.row_sums import RowWeighting
from lightning_fed.numerics.weighted_mean import WeightedMean
from lightning_fed.rule import Aggregator, RoundInfo


class AveragingAggregator(Aggregator):
    """Weighted mean of the clients' states, in the memory of one state. A rule implements :meth:`weight`.

    Args:
        row_weighting: Divisor of a row's weighted changes, for entries that clients hold in part: the weights of all
            clients of the round (``"global"``, as in the FedSS paper), so that a row which few clients hold moves
            little, or those of the clients that hold the row (``"per_row"``).

    Raises:
        ValueError: If ``row_weighting`` is unknown.

    """

    def __init__(self, row_weighting: RowWeighting = "global") -> None:
        check_option("row_weighting", row_weighting, ("global", "per_row"))
        self.row_weighting: RowWeighting = row_weighting
        self._info = RoundInfo(-1)
        self._state: State = {}
        self.running = WeightedMean()

    @abstractmethod
    def weight(self, update: ClientUpdate) -> float:
        """The weight of one update in the mean."""

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round from ``state``."""
        self._info, self._state, self.running = info, state, WeightedMean()

    def broadcast(self, request: Request) -> Broadcast:
        """The global state, the same for every client."""
        return Broadcast(self._info.round, dict(self._state))

    def receive(self, update: ClientUpdate) -> None:
        """Adds the update to the mean."""
        self.add_to(self.running, update, self.weight(update))

    def add_to(self, running: WeightedMean, update: ClientUpdate, weight: float) -> None:
        """Adds an update to a mean, without the entries that are the round's own: most of a model with adapters."""
        moved = {
            name: value
            for name, value in update.state.items()
            if value is not self._state.get(name) or not value.is_floating_point()
        }
        running.add(moved, weight, update.num_samples, update.rows)

    def merge(self, other: Any) -> None:
        """Joins the mean of another aggregator of the same kind."""
        self.running.merge(other.running)

    def aggregate(self) -> State:
        """The mean of the updates received."""
        means = self.running.mean(self._state, self.row_weighting)
        unmoved = {name: value.clone() for name, value in self._state.items() if name not in means}
        return {name: (means if name in means else unmoved)[name] for name in self._state} if unmoved else means
