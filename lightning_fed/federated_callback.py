"""Base class of callbacks in a federation, with hooks on the client side and the server side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.lightning.internals import find_callbacks
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State

VISIT_HOOKS = (
    *("on_client_request", "on_server_send", "on_client_receive", "on_client_start", "on_client_batch"),
    *("on_client_end", "on_server_receive", "on_client_visit_end"),
)
"""Names of the hooks called in a visit, on the client and on the server."""


class TrainerCallback(L.Callback):
    """Base class of callbacks that only work in a Trainer. Refuses ``Fabric``, which never calls the hooks of a fit."""

    def on_after_setup(self) -> None:
        """Refuses Fabric. Only Fabric calls this hook, after its ``setup``."""
        raise MisconfigurationException(
            f"Expected `{type(self).__name__}` in the callbacks of a `Trainer`, but got it in the callbacks of "
            "`Fabric`, which would train without a federation: use `lightning_fed.FederatedTrainer`."
        )

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        # Without `Fabric.setup`, only this hook is called.
        self.on_after_setup()


class RevertingCallback(L.Callback):
    """Base class of callbacks that undo changes (method ``revert``) after the end of a fit and after an exception."""

    def revert(self) -> None:
        """Reverts this callback's changes to the user's objects. A second call must change nothing."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.revert()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.revert()


class FederatedCallback(TrainerCallback):
    """A Lightning callback with additional hooks for rounds and visits (a client's training in a round).

    :class:`~lightning_fed.callbacks.Federation` calls the hooks. Before the first visit: :meth:`on_server_round_start`.
    In a visit: :meth:`on_client_request`, :meth:`on_server_send`, :meth:`on_client_receive`, :meth:`on_client_start`,
    for each batch :meth:`on_client_batch` and Lightning's hooks, :meth:`on_client_end`, :meth:`on_server_receive`,
    :meth:`on_client_visit_end`. After the last visit: :meth:`on_server_aggregate` and :meth:`on_server_round_end`.
    Outside visits: :meth:`on_model_loaded`. Messages include the changes made by hooks.

    Implement clipping, weights, encoding, masks and noise as an update step (:mod:`lightning_fed.steps`). Some features
    read attributes of a callback, see the `guide <https://lightning-fed.github.io/lightning-fed/guides/hooks/>`_.

    Example:
        >>> class Drift(FederatedCallback):
        ...     def on_client_start(self, trainer, module, client, broadcast):
        ...         self.start = broadcast.state
        ...     def on_client_end(self, trainer, module, client, update):
        ...         changes = [(update.state[name] - value).abs().max() for name, value in self.start.items()]
        ...         update.metrics["drift"] = float(max(changes))
    """

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Server side, before clients train. The module contains the global model, which the hook must not change."""

    def sliced_entries(self, module: L.LightningModule) -> Iterable[str]:
        """Names of sliced entries: tables of which clients receive only the requested rows. Called once per fit."""
        return ()

    def on_client_request(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, request: Request
    ) -> None:
        """Client side, before the broadcast: may request only some rows of parameters, and add tensors to the request.

        The module contains the global model. The values that this client's callbacks stored in earlier rounds are
        available. Parameters without requested rows are sent completely. Extra tensors are passed to the rule's
        :meth:`Aggregator.broadcast <lightning_fed.Aggregator.broadcast>`. If the hook raises :class:`ClientFault`, the
        client is excluded from the round.
        """

    def on_server_send(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Server side, before the broadcast to a client is sent: may replace entries for this client.

        All clients' messages share the tensors. Replace a tensor instead of writing into the tensor's memory.
        """

    def on_client_receive(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Client side, before the module loads the broadcast: may decode tensors encoded in :meth:`on_server_send`.

        Afterwards ``broadcast.state`` must contain all shared entries. Raising :class:`ClientFault` excludes the
        client.
        """

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Client side, after the module has loaded the broadcast, before the first training batch in the round."""

    def on_client_batch(self, trainer: L.Trainer, module: L.LightningModule, client: Client, batch: Any) -> Any:
        """Client side, before a training step: returns the batch for ``training_step``.

        Lightning's hooks receive the unchanged ``batch``. Raising :class:`ClientFault`, for example because of invalid
        data, excludes the client.
        """
        return batch

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> Iterator[None] | None:
        """Client side, after the last batch: may add extra tensors and metrics to the update, but not change weights.

        To train a second model on the client's remaining batches, implement the hook as a generator: at every ``yield``
        the Trainer runs one training step (example: :class:`~lightning_fed.callbacks.PersonalModel`).

        Raising :class:`ClientFault` excludes the client.
        """
        return None

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        """Server side, before the update is checked: may decode tensors encoded in :meth:`on_client_end`."""

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Client side, after training (also after a failure): may revert the callback's changes to the module."""

    def share_round(self, trainer: L.Trainer, module: L.LightningModule) -> Generator[Any, list[Any], None] | None:
        """Exchanges values between processes that train different clients, before :meth:`on_server_aggregate`.

        The hook is required if :meth:`on_server_aggregate` uses data collected in :meth:`on_server_receive`, because a
        process receives only the updates from its own clients. If the data are a dictionary by client in one attribute,
        set ``shared_attribute`` to the attribute's name instead. Otherwise implement the hook as a generator:
        ``values = yield value`` sends this process's value (tensors, numbers and plain containers), and returns the
        values of all processes in rank order.

        Example:
            >>> class Sizes(FederatedCallback):
            ...     size = 0
            ...     def on_server_receive(self, trainer, module, update):
            ...         self.size += update.num_samples
            ...     def share_round(self, trainer, module):
            ...         self.size = sum((yield self.size))
        """
        return None

    def on_server_aggregate(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        """Server side, before the module loads the new global values of shared entries: may change the values.

        If the rule computes no new model in this round, the values are copies of the old values, and changes are lost.
        """

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        """Server side, after the round. The module contains the global model.

        ``is_new`` is true if the round computed a new model. The hook is also called after an interrupted round.
        """

    def on_model_loaded(self, trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
        """Called after loading a client's model (if ``None``, the global model), outside local training."""


class AskableCallback(FederatedCallback, ABC):
    """Base class of callbacks that answer the server's questions on each client, outside training.

    :meth:`Federation.ask <lightning_fed.Federation.ask>` sends a question and a model, for example for an evaluation.
    """

    @abstractmethod
    def on_client_question(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, question: Mapping[str, Any]
    ) -> ClientUpdate:
        """Client side: computes a client's answer to ``question``; ``module`` contains the model for this client.

        Afterwards changes to the module are reverted. Raises :class:`ClientFault` if the client has no answer.
        """


def federated_callbacks(trainer: L.Trainer) -> list[FederatedCallback]:
    """Returns the Trainer's :class:`FederatedCallback` objects, in order."""
    return find_callbacks(trainer, FederatedCallback)


def notify_model_loaded(trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
    """Calls :meth:`FederatedCallback.on_model_loaded` for all callbacks."""
    for callback in federated_callbacks(trainer):
        callback.on_model_loaded(trainer, module, client)
