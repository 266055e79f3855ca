"""Interface of update steps: layers between local training and the new global model.

The layers surround the model. An update passes the layers from inner to outer on the client, and from outer to inner on
the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from lightning_fed.errors import BadUpdates
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import Aggregator, RoundInfo

# Received update, with the broadcast entries of its client.
Arrived: TypeAlias = tuple[ClientUpdate, State]


class Held(ABC):
    """Updates of a round, kept in an update step until the round is complete. A monoid.

    Args:
        step: Update step.
    """

    def __init__(self, step: Any) -> None:
        self._step = step

    def __getstate__(self) -> dict[str, Any]:
        # All processes have the step.
        return {name: value for name, value in vars(self).items() if name != "_step"}

    @abstractmethod
    def add(self, update: ClientUpdate, sent: State) -> None:
        """Adds an update.

        Raises:
            BadUpdate: If the update is invalid.
        """

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Adds the updates from another process."""

    @abstractmethod
    def release(self) -> Sequence[Arrived]:
        """Returns the updates to pass inwards.

        Raises:
            BadUpdates: If updates are invalid. The invalid updates are dropped; repeat the call if enough clients
                remain.
        """


class UpdateStep:
    """Layer between local training and the new global model. All methods are optional; the base class changes nothing.

    Steps depend on messages only, not on Lightning. Steps may keep the arguments of :meth:`start` for the round.

    Attributes:
        reveals: The server's view inside this layer: single updates (``"update"``), only the sum (``"sum"``), or a
            model without information on single clients (``"model"``). The log reveals no more.

    Example:
        A client's step, half as long:

        >>> from lightning_fed.rule import RoundInfo
        >>> import torch
        >>> class Half(UpdateStep):
        ...     def on_server(self, update, sent):
        ...         update.state = {name: (value + sent[name]) / 2 for name, value in update.state.items()}
        ...         return update
        >>> from lightning_fed.algorithms import FedAvg
        >>> from lightning_fed.steps import Chain
        >>> chain = Chain(FedAvg(), [Half()])
        >>> chain.start(RoundInfo(0), {"w": torch.tensor(1.0)})
        >>> chain.receive(ClientUpdate("a", 1, {"w": torch.tensor(2.0)}), {"w": torch.tensor(1.0)})
        >>> chain.aggregate()
        {'w': tensor(1.5000)}
    """

    reveals: Literal["update", "sum", "model"] = "update"

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Refuses incompatible rules or steps when the chain is built.

        Args:
            rule: Aggregation rule.
            steps: All steps of the chain, the innermost first.

        Raises:
            ValueError: If the rule or a step is incompatible.
        """

    def callbacks(self) -> Sequence[Any]:
        """Lightning callbacks required by the step, for example to check the Trainer before a fit."""
        return ()

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round, on the server and on each client."""
        self.info, self.state = info, state

    def form(self, state: State) -> State:
        """Names, shapes and dtypes outside the layer, for the given form inside."""
        return state

    def on_send(self, broadcast: Broadcast) -> None:
        """Server side, inner to outer: adds extras to the broadcast to a client."""

    def on_sent(self, client: Client, broadcast: Broadcast) -> None:
        """Server side, after all callbacks: marks entries already held by the client as ``unsent``."""

    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Client side, before sending: clips, encodes or masks the update.

        Args:
            update: Trained update. The step may change its tensors in place, except tensors shared with ``sent``.
            sent: Broadcast to the client.
            memory: State of this step for the client, changed in place. The state is saved if the update is accepted.

        Raises:
            ClientFault: If the client has to be excluded.
        """
        return update

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        """Server side, on receipt: decodes, checks, clips or weighs the update.

        Inside a layer with hidden single updates (``reveals``) this method runs on the client.

        Raises:
            BadUpdate: If the update has to be excluded.
        """
        return update

    def hold(self) -> Held | None:
        """Container for the updates of a round, or ``None`` to stream updates."""
        return None

    def on_aggregate(self, new: State, start: State) -> State:
        """Server side, after the rule, inner to outer: server optimizers. The step may change ``new`` in place."""
        return new

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        """Metrics of the last aggregated round: full name to value.

        Args:
            norms: Norms of the received updates.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State across rounds: tensors and primitives."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state. An empty state is the state of a new fit."""


class CollectingStep(UpdateStep, ABC):
    """Base class for update steps with access to all updates of a round. The server holds n models for n clients."""

    @abstractmethod
    def collect(self, updates: Sequence[Arrived]) -> Sequence[Arrived]:
        """Computes the updates to pass inwards once the round is complete.

        Args:
            updates: Updates of the round, in an order beyond the clients' control.

        Raises:
            BadUpdates: If updates are invalid.
        """

    def hold(self) -> Held:
        return HeldUpdates(self)


class HeldUpdates(Held):
    """All updates of a round."""

    def __init__(self, step: CollectingStep) -> None:
        super().__init__(step)
        self.updates: dict[Client, Arrived] = {}

    def add(self, update: ClientUpdate, sent: State) -> None:
        self.updates[update.client] = update, sent

    def merge(self, other: HeldUpdates) -> None:
        self.updates |= other.updates

    def release(self) -> Sequence[Arrived]:
        """Returns the collected updates after :meth:`CollectingStep.collect`."""
        try:
            arrived: Sequence[Arrived] = self._step.collect(
                [self.updates[client] for client in sorted(self.updates, key=client_key)]
            )
        except BadUpdates as error:
            self.updates = {client: update for client, update in self.updates.items() if client not in error.reasons}
            raise
        return arrived
