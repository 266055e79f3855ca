"""Aggregation rules: interface (from a round's updates to the new global state), and rules for averages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fed.argument_checks import check_option
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.model.entries import is_running_statistic
from lightning_fed.numerics.row_sums import RowWeighting
from lightning_fed.numerics.weighted_mean import WeightedMean


@dataclass
class RoundInfo:
    """Information about a round for the rule and the update steps.

    Args:
        round: Round index, from 0.
        clients: Names for all clients known in this process.
        trainable: Names of the trained entries; ``None`` if unknown.
        untrained: Names of parameters without gradient and of constant buffers, which training rarely changes.
        sliced: Names of entries of which clients receive only some rows.
        seed: The federation's seed. An update step derives random numbers from seed, round and client.
        refused: For clients with an invalid update in this round, the reason for the exclusion.
    """

    round: int
    clients: Sequence[Client] = ()
    trainable: frozenset[str] | None = None
    untrained: frozenset[str] = frozenset()
    sliced: frozenset[str] = frozenset()
    seed: int = 0
    refused: Mapping[Client, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Excludes ``clients`` from pickles, because the list may be long and is known in every process."""
        return {**vars(self), "clients": (), "refused": {}}


def trained_entries(info: RoundInfo, state: State) -> list[str]:
    """Names of the trained entries in ``state``. Only these entries contribute to an update's norm."""
    if info.trainable is not None:
        return [name for name in state if name in info.trainable]
    return [name for name, value in state.items() if value.is_floating_point() and not is_running_statistic(name)]


class RuleCapabilities:
    """Optional capabilities of a rule, declared by attributes and by methods that a rule may override.

    Attributes:
        accepts_rows: An update may contain only some rows of a table (:attr:`ClientUpdate.rows`). Such a rule
            implements :meth:`held_rows`.
        resizes: Shapes of entries differ between clients or rounds. Such a rule implements :meth:`expected`.
        has_clusters: The rule has several global models. Such a rule implements :meth:`model_of`.
        has_versions: Clients of one round start from different versions of the global model.
        always: Clients in every round, in addition to the drawn clients, and never as stragglers or dropouts.
    """

    accepts_rows = resizes = has_clusters = has_versions = False
    always: Sequence[Client] = ()

    def held_rows(self) -> Mapping[str, Tensor]:
        """Maps entry names to the rows aggregated in the last round (int64 indices), if clients receive only some rows.

        An entry is omitted if at least one client trained all rows of the entry.
        """
        return {}

    def draw_cohort(self, round: int, schedule: Any, population: Any) -> Any:
        """Draws a round's clients (:class:`~lightning_fed.server.schedule.Cohort`), in the updates' arrival order.

        ``schedule`` is the federation's :class:`~lightning_fed.server.schedule.Schedule`, and ``population`` a
        :class:`~lightning_fed.data.Population`. The method is also called for future rounds, to estimate the number of
        steps in a fit.
        """
        return schedule.cohort(round, population.clients, always=self.always)

    def expected(self, broadcast: Broadcast) -> State:
        """Returns a state like a valid update to ``broadcast``: only names, shapes and dtypes are meaningful."""
        return broadcast.state

    def model_of(self, client: Client) -> State | None:
        """Returns the shared entries of the client's model, or ``None`` if the client uses the global model.

        Clients with the same model get the same dictionary. The server overwrites BatchNorm statistics in the returned
        dictionary's tensors.
        """
        return None

    def tolerated(self, count: int) -> int:
        """Returns the rule's assumption for the maximum number of malicious clients among ``count`` clients.

        When the server pools BatchNorm statistics, each channel excludes this number of lowest and of highest values.
        """
        return 0


class Aggregator(RuleCapabilities, ABC):
    """Server side of a federated method: prepares broadcasts, receives updates, and aggregates the new global state.

    Between :meth:`start` and :meth:`aggregate`, updates arrive in any order, and :meth:`merge` adds the updates from
    another process. Averaging rules should need only O(model) memory.

    Example:
        >>> import torch
        >>> from lightning_fed.algorithms import FedAvg
        >>> fedavg = FedAvg()
        >>> fedavg.start(RoundInfo(0), {"w": torch.tensor([1.0])})
        >>> fedavg.receive(ClientUpdate("a", 1, {"w": torch.tensor([0.0])}))
        >>> fedavg.receive(ClientUpdate("b", 3, {"w": torch.tensor([3.0])}))
        >>> fedavg.aggregate()
        {'w': tensor([2.2500])}
    """

    @abstractmethod
    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round from the global model's shared entries, and discards all earlier updates.

        With several processes, ``start`` is called before the clients train, and again before :meth:`merge`.
        """

    @abstractmethod
    def broadcast(self, request: Request) -> Broadcast:
        """Returns the broadcast for a client's request, with whole tensors. The server then selects the requested rows.

        The server does not change the returned tensors.
        """

    @abstractmethod
    def receive(self, update: ClientUpdate) -> None:
        """Receives one client's checked update, or a sum created by an update step.

        The rule may overwrite the tensors, except tensors named in ``update.unsent``, which belong to the broadcast.
        For an invalid update, the rule must raise :class:`BadUpdate` and not change.
        """

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Adds the updates that another process's copy of this rule has received."""

    @abstractmethod
    def aggregate(self) -> State | None:
        """Computes the new shared entries from all updates (at least one), or ``None`` to keep the old model.

        If a rule excludes clients after comparing all updates, the rule removes these updates and raises
        :class:`BadUpdates`. The server calls ``aggregate`` again if enough updates remain.
        """

    def metrics(self) -> dict[str, float]:
        """Numbers to log after an aggregation, by name in the log, such as ``fesem/moved``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the rule's state between rounds (such as server momentum): tensors, numbers, texts and containers.

        Only :meth:`aggregate` may change the state, and must create new tensors instead of writing into old tensors,
        because after a failed round the server restores the state from the round's start.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the rule's state from :meth:`state_dict`."""


class AveragingAggregator(Aggregator):
    """Weighted mean of client states, with the memory of one state. Subclasses implement :meth:`weight`.

    Args:
        row_weighting: Divisor for a row's summed change, if clients receive only some rows. ``"global"``: total weight
            of all clients (FedSS paper), so a row trained by few clients changes little. ``"per_row"``: total weight of
            the clients with the row.
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
        """Adds an update to a running mean. Entries that the client did not send count as unchanged."""
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
