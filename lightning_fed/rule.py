"""Interface for aggregation rules, and a base class for weighted means."""

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
    """Information about a round for the aggregation rule and the update steps.

    Args:
        round: Round index, from 0.
        clients: Names for all clients known in this process.
        trainable: Names of the trained tensors; ``None`` if unknown.
        untrained: Names of parameters without gradient.
        sliced: Names of tensors from which clients receive only some rows.
        seed: The federation's seed, from which update steps derive random numbers.
        refused: Reasons why updates in this round are invalid, by client.
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
    """Returns the names of the trained tensors in ``state``."""
    if info.trainable is not None:
        return [name for name in state if name in info.trainable]
    return [name for name, value in state.items() if value.is_floating_point() and not is_running_statistic(name)]


class RuleCapabilities:
    """Optional capabilities of an aggregation rule. A rule sets these attributes, and may override the methods.

    Attributes:
        accepts_rows: Whether an update may contain only some rows of a tensor (:attr:`ClientUpdate.rows`). Such a rule
            implements :meth:`held_rows`.
        resizes: Whether tensor shapes differ between clients or rounds. Such a rule implements :meth:`expected`.
        has_clusters: Whether there are several global models. Such a rule implements :meth:`model_of`.
        has_versions: Whether clients in one round start from different versions of the global model.
        always: Clients to add to every round's drawn clients. These clients are never stragglers or dropouts.
    """

    accepts_rows = resizes = has_clusters = has_versions = False
    always: Sequence[Client] = ()

    def held_rows(self) -> Mapping[str, Tensor]:
        """Returns the row indices that were aggregated in the last round, by tensor name.

        A tensor is omitted if at least one client trained all rows.
        """
        return {}

    def draw_cohort(self, round: int, schedule: Any, population: Any) -> Any:
        """Draws a round's clients, in the order in which the rule will receive the updates.

        Returns a :class:`~lightning_fed.server.schedule.Cohort`. ``schedule`` is the federation's
        :class:`~lightning_fed.server.schedule.Schedule`, and ``population`` a :class:`~lightning_fed.data.Population`.
        Also called for future rounds, to estimate a fit's number of steps.
        """
        return schedule.cohort(round, population.clients, always=self.always)

    def expected(self, broadcast: Broadcast) -> State:
        """Returns an example of a valid update. Only names, shapes and dtypes are meaningful."""
        return broadcast.state

    def model_of(self, client: Client) -> State | None:
        """Returns the tensors of the client's model, or ``None`` if the client uses the global model.

        Clients with the same model get the same dictionary. The server may overwrite BatchNorm statistics in the
        tensors.
        """
        return None

    def tolerated(self, count: int) -> int:
        """Returns the number f of malicious clients that the rule tolerates among ``count`` clients.

        For averages of BatchNorm statistics, the server excludes the f lowest and the f highest values.
        """
        return 0


class Aggregator(RuleCapabilities, ABC):
    """Base class for aggregation rules: the server side of a federated method.

    Between :meth:`start` and :meth:`aggregate`, updates arrive in any order. With several processes, :meth:`merge` adds
    the updates from another process.

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
        """Starts a round from the global model's tensors, and discards all earlier updates.

        With several processes, ``start`` is called before the clients train, and again before :meth:`merge`.
        """

    @abstractmethod
    def broadcast(self, request: Request) -> Broadcast:
        """Returns the message with the global model for one client.

        The message contains whole tensors. The server selects the requested rows afterwards.
        """

    @abstractmethod
    def receive(self, update: ClientUpdate) -> None:
        """Receives a client's update, or a sum created by an update step.

        The rule may overwrite the update's tensors, except tensors named in ``update.unsent``. For an invalid update,
        the rule must raise :class:`BadUpdate` and not change.
        """

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Adds the updates that another process's copy of this rule has received."""

    @abstractmethod
    def aggregate(self) -> State | None:
        """Computes the new global tensors from at least one update. Returns ``None`` to keep the old model.

        To exclude clients after comparing all updates, a rule removes these updates and raises :class:`BadUpdates`. The
        server calls ``aggregate`` again if enough updates remain.
        """

    def metrics(self) -> dict[str, float]:
        """Returns values to log after an aggregation, by name in the log, such as ``fesem/moved``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the rule's state between rounds (such as server momentum): tensors, numbers, texts and containers.

        Only :meth:`aggregate` may change the state, and must not write into old tensors. After a failed round the
        server restores the old state.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the rule's state from :meth:`state_dict`."""


class AveragingAggregator(Aggregator):
    """Base class for weighted means over the clients' tensors. Subclasses implement :meth:`weight`.

    Args:
        row_weighting: Used if clients receive only some rows of a tensor. A row's weighted sum of changes is divided by
            the weight of all clients (``"global"``, FedSS paper) or of the clients with this row (``"per_row"``).
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
