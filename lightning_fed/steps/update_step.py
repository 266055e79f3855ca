"""The port of what changes an update: a layer between a client's training and the new global model.

Layers form an onion, the model inside and the wire outside. An update passes them on its client from the inside out,
and on the server from the outside in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from lightning_fed.errors import BadUpdates
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import Aggregator, RoundInfo

Arrived: TypeAlias = tuple[ClientUpdate, State]
"""An update on the server, and the entries that its client was sent."""


class Held(ABC):
    """Updates that a step holds back until all of a round are there; a monoid.

    Args:
        step: The step.

    """

    def __init__(self, step: Any) -> None:
        self._step = step

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the step, which every process has."""
        return {name: value for name, value in vars(self).items() if name != "_step"}

    @abstractmethod
    def add(self, update: ClientUpdate, sent: State) -> None:
        """Takes an update.

        Raises:
            BadUpdate: If it cannot be used.

        """

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Joins what another process holds."""

    @abstractmethod
    def release(self) -> Sequence[Arrived]:
        """The updates that go on inwards: those that were held, or what the step makes of them.

        Raises:
            BadUpdates: If clients do not fit; it has forgotten them, and is asked again if enough others are left.

        """


class UpdateStep:
    """A layer between training and the new model. Everything is optional; as it stands, it changes nothing.

    Steps know neither Trainer nor Lightning: feed them messages. They may keep what :meth:`start` gives them, for the
    round.

    Attributes:
        reveals: What the server sees from this layer inwards: single updates (``"update"``), their sum alone
            (``"sum"``), or a model that tells of no client (``"model"``): then the log does not, either.

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
        """Refuses a rule or other steps beside which it cannot be right, when the chain is built.

        Args:
            rule: The rule.
            steps: All steps of the chain, the innermost first.

        Raises:
            ValueError: With the reason.

        """

    def callbacks(self) -> Sequence[Any]:
        """Lightning callbacks without which the step does not work: what must look at the Trainer before a fit."""
        return ()

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round, on the server and on each client."""
        self.info, self.state = info, state

    def form(self, state: State) -> State:
        """Form of an update outside of the layer, where it has ``state``'s inside: names, shapes and dtypes."""
        return state

    def on_send(self, broadcast: Broadcast) -> None:
        """Server side, from the inside out: may put extras into the message to a client."""

    def on_sent(self, client: Client, broadcast: Broadcast) -> None:
        """Server side, after callbacks: may name entries of the message as ``unsent`` that the client holds."""

    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Client side, before the update is sent: clips, encodes, masks.

        Args:
            update: The update; its tensors are the step's to change, but for those that are ``sent``'s.
            sent: The message that the client trained from.
            memory: What the step remembers of this client, to be changed in place: it is kept in the client's store,
                if the update counts in the end.

        Raises:
            ClientFault: If the client is to be left out.

        """
        return update

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        """Server side, on receipt: decodes, checks, bounds, weighs.

        Inside of a layer that hides single updates (`reveals`) it is done on the client.

        Raises:
            BadUpdate: If the client is to be left out.

        """
        return update

    def hold(self) -> Held | None:
        """Holder of a round's updates; ``None`` where they stream through."""
        return None

    def on_aggregate(self, new: State, start: State) -> State:
        """Server side, after the rule, from the inside out: server optimizers. ``new`` is the step's to change."""
        return new

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        """Numbers of the round that was just aggregated, for the log: full name to value.

        Args:
            norms: Lengths of the clients' steps as they came.

        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State that survives from round to round, as of a rule: tensors and primitives."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it; an empty state is that of a fit that begins."""


class CollectingStep(UpdateStep, ABC):
    """Base of steps that compare the updates of a round: the server holds all of them, n models for n clients."""

    @abstractmethod
    def collect(self, updates: Sequence[Arrived]) -> Sequence[Arrived]:
        """Makes the updates that go on inwards, when all of a round are there.

        Args:
            updates: The updates, in an order that no client can choose.

        Raises:
            BadUpdates: If clients do not fit.

        """

    def hold(self) -> Held:
        """All updates of the round."""
        return HeldUpdates(self)


class HeldUpdates(Held):
    """All updates of a round, for a step that compares them.

    Args:
        step: The step.

    """

    def __init__(self, step: CollectingStep) -> None:
        super().__init__(step)
        self.updates: dict[Client, Arrived] = {}

    def add(self, update: ClientUpdate, sent: State) -> None:
        """Keeps an update."""
        self.updates[update.client] = update, sent

    def merge(self, other: HeldUpdates) -> None:
        """Joins the updates of another process."""
        self.updates |= other.updates

    def release(self) -> Sequence[Arrived]:
        """Gives what the step makes of them."""
        try:
            arrived: Sequence[Arrived] = self._step.collect(
                [self.updates[client] for client in sorted(self.updates, key=client_key)]
            )
        except BadUpdates as error:
            self.updates = {client: update for client, update in self.updates.items() if client not in error.reasons}
            raise
        return arrived
