"""Interface of update steps, which transform client updates between local training and aggregation.

On the client, an update passes the list ``steps`` from the first to the last step, and on the server in reverse order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from lightning_fed.errors import BadUpdates
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import Aggregator, RoundInfo

# A received update, with the broadcast entries of its client.
Arrived: TypeAlias = tuple[ClientUpdate, State]


class Held(ABC):
    """Stores a round's updates until the round is complete. Objects from several processes can be merged."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __getstate__(self) -> dict[str, Any]:
        # The step exists in all processes.
        return {name: value for name, value in vars(self).items() if name != "_step"}

    @abstractmethod
    def add(self, update: ClientUpdate, sent: State) -> None:
        """Stores a client's update, trained from the state ``sent``. Raises ``BadUpdate`` for an invalid update."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Adds the updates in ``other``, received by another process in the same round."""

    @abstractmethod
    def release(self) -> Sequence[Arrived]:
        """Returns the updates to aggregate, after the last update has arrived."""


class StepCapabilities:
    """Optional capabilities of a step. A step sets these attributes, and may override the methods.

    Attributes:
        reveals: Data visible to the server with this step: single updates (``"update"``), only the sum of updates
            (``"sum"``), or only the new global model (``"model"``). Values from hidden data are not logged.
        refuses: Names of attributes in :class:`~lightning_fed.rule.RuleCapabilities`, such as ``"has_clusters"``. The
            step does not support aggregation rules with one of these attributes.
    """

    reveals: Literal["update", "sum", "model"] = "update"
    refuses: tuple[str, ...] = ()

    def callbacks(self) -> Sequence[Any]:
        """Returns Lightning callbacks required by the step in the Trainer."""
        return ()

    def form(self, state: State) -> State:
        """Returns an example of the step's output for an update ``state``. Only names, shapes and dtypes matter."""
        return state

    def hold(self) -> Held | None:
        """Returns an object to collect a round's updates; ``None`` if the step treats each update separately."""
        return None


class UpdateStep(StepCapabilities):
    """Changes updates or broadcasts of a round, for example by clipping. By default, no message is changed.

    A step may store the arguments of :meth:`start` for the round.

    Example:
        >>> class Half(UpdateStep):
        ...     def on_server(self, update, sent):
        ...         update.state = {name: (value + sent[name]) / 2 for name, value in update.state.items()}
        ...         return update
    """

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Raises ``ValueError`` if this step does not support the aggregation rule or another step in ``steps``."""

    def start(self, info: RoundInfo, state: State) -> None:
        """Called before the training of a round, on the server and on each client, with the global model."""
        self.info, self.state = info, state

    def on_send(self, client: Client, broadcast: Broadcast) -> None:
        """Server side: may add extra tensors to the broadcast for a client.

        Runs after the callbacks' ``on_server_send`` and earlier steps. To omit a tensor already on the client, the step
        adds the name to ``broadcast.unsent``.
        """

    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Client side, before sending: clips, encodes or masks the update.

        The step may change the update's tensors in place, except tensors that are also in ``sent``. ``memory`` is the
        step's state for the client. Changes in ``memory`` are stored if the server accepts the update.

        Raises:
            ClientFault: If the client must be excluded.
        """
        return update

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        """Server side, on receipt: decodes, checks, clips or weights the update.

        If a later step hides single updates from the server, as a secure sum does, the client runs this method.

        Raises:
            BadUpdate: If the update must be excluded.
        """
        return update

    def on_aggregate(self, new: State, start: State) -> State:
        """Server side, after the aggregation: returns a changed global model.

        ``start`` is the global model before the round. The method may change ``new``, the rule's result, in place.
        """
        return new

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        """Returns values to log after a round. ``norms``: each update's norm; empty if the server sees no updates."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the step's state between rounds, for checkpoints: tensors, numbers, texts and containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from :meth:`state_dict`. An empty state resets the step, as before a new fit."""


class CollectingStep(UpdateStep, ABC):
    """Base class of update steps that need all updates of a round. The server stores n models for n clients."""

    @abstractmethod
    def collect(self, updates: Sequence[Arrived]) -> Sequence[Arrived]:
        """Replaces a round's client updates by new updates. Raises ``BadUpdates`` for invalid updates.

        Clients cannot influence the order of ``updates``.
        """

    def hold(self) -> Held:
        return HeldUpdates(self)


class HeldUpdates(Held):
    """All updates of a round, stored for a :class:`CollectingStep`."""

    def __init__(self, step: CollectingStep) -> None:
        super().__init__(step)
        self.updates: dict[Client, Arrived] = {}

    def add(self, update: ClientUpdate, sent: State) -> None:
        self.updates[update.client] = update, sent

    def merge(self, other: HeldUpdates) -> None:
        self.updates |= other.updates

    def release(self) -> Sequence[Arrived]:
        try:
            arrived: Sequence[Arrived] = self._step.collect(
                [self.updates[client] for client in sorted(self.updates, key=client_key)]
            )
        except BadUpdates as error:
            self.updates = {client: update for client, update in self.updates.items() if client not in error.reasons}
            raise
        return arrived
