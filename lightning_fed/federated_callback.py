"""Base classes of callbacks with hooks for federated rounds."""

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
    """Base class of callbacks that work only in a Trainer, not in ``Fabric``."""

    def on_after_setup(self) -> None:
        """Raises an error, because only ``Fabric`` calls this hook."""
        raise MisconfigurationException(
            f"Expected `{type(self).__name__}` in the callbacks of a `Trainer`, but got it in the callbacks of "
            "`Fabric`, which would train without a federation: use `lightning_fed.FederatedTrainer`."
        )

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        # Without `Fabric.setup`, only this hook is called.
        self.on_after_setup()


class RevertingCallback(L.Callback):
    """Base class of callbacks that undo changes after a fit, also after an exception."""

    def revert(self) -> None:
        """Reverts this callback's changes to the user's objects. A second call must change nothing."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.revert()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.revert()


class FederatedCallback(TrainerCallback):
    """A Lightning callback with additional hooks for federated rounds.

    A round starts with :meth:`on_server_round_start`. For each client, the order is :meth:`on_client_request`,
    :meth:`on_server_send`, :meth:`on_client_receive`, :meth:`on_client_start`, :meth:`on_client_batch` for each batch,
    :meth:`on_client_end`, :meth:`on_server_receive`, :meth:`on_client_visit_end`. The round ends with
    :meth:`on_server_aggregate` and :meth:`on_server_round_end`.

    For clipping, masks and noise, see :mod:`lightning_fed.steps`. See also the
    `guide <https://lightning-fed.github.io/lightning-fed/guides/hooks/>`_.

    Example:
        >>> class Drift(FederatedCallback):
        ...     def on_client_start(self, trainer, module, client, broadcast):
        ...         self.start = broadcast.state
        ...     def on_client_end(self, trainer, module, client, update):
        ...         changes = [(update.state[name] - value).abs().max() for name, value in self.start.items()]
        ...         update.metrics["drift"] = float(max(changes))
    """

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Called on the server before clients train. The hook must not change the module (the global model)."""

    def sliced_entries(self, module: L.LightningModule) -> Iterable[str]:
        """Names of the parameters of which clients request only some rows. Called once per fit."""
        return ()

    def on_client_request(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, request: Request
    ) -> None:
        """Called on the client before the broadcast. May request only some rows of parameters.

        The module contains the global model. Tensors added to ``request.extras`` are passed to the aggregation rule's
        :meth:`Aggregator.broadcast <lightning_fed.Aggregator.broadcast>`. Raising :class:`ClientFault` excludes the
        client. Parameters without requested rows are sent completely.
        """

    def on_server_send(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Called on the server before a client receives the broadcast. May replace tensors for this client.

        Several clients share the tensors, so do not change a tensor in place.
        """

    def on_client_receive(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Called on the client before the module loads the broadcast. May decode the tensors.

        After the hook, ``broadcast.state`` must contain all shared tensors. Raising :class:`ClientFault` excludes the
        client.
        """

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Called on the client after the module has loaded the broadcast, before training."""

    def on_client_batch(self, trainer: L.Trainer, module: L.LightningModule, client: Client, batch: Any) -> Any:
        """Called on the client before a training step. Returns the batch for ``training_step``.

        Lightning's hooks receive the unchanged ``batch``. Raising :class:`ClientFault` excludes the client.
        """
        return batch

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> Iterator[None] | None:
        """Called on the client after training. May add tensors and metrics to the update. Must not change the weights.

        Without the attribute ``changes_update``, a changed ``update.state`` raises an error. As a generator, the hook
        can train a second model, and then restore the weights. At each ``yield``, the Trainer runs one training step.
        To reserve batches for these steps, set ``Federation.open_visit.main_batches`` in :meth:`on_client_start`. See
        :class:`~lightning_fed.callbacks.PersonalModel`. Raising :class:`ClientFault` excludes the client.
        """
        return None

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        """Called on the server before the update is checked. May decode tensors."""

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Called on the client after training, also after a failure. May revert changes to the module."""

    def share_round(self, trainer: L.Trainer, module: L.LightningModule) -> Generator[Any, list[Any], None] | None:
        """Exchanges values between processes, before :meth:`on_server_aggregate`.

        A process receives only its own clients' updates in :meth:`on_server_receive`. If :meth:`on_server_aggregate`
        needs data from all clients, implement this hook as a generator. ``values = yield value`` sends this process's
        value, and returns the values of all processes in rank order. A callback without this hook can set
        ``shared_attribute`` to the name of an attribute, a dictionary by client, to merge all processes' dictionaries.

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
        """Called on the server before the module loads the new global model. May change ``state``.

        Changes are lost if the round computes no new model.
        """

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        """Called on the server after the round, even if interrupted. The module contains the global model.

        ``is_new`` is true if the round computed a new model.
        """

    def on_model_loaded(self, trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
        """Called after a client's model is loaded outside training. ``None`` stands for the global model."""


class AskableCallback(FederatedCallback, ABC):
    """Base class of callbacks that compute a client's answers to questions from the server.

    :meth:`Federation.ask <lightning_fed.Federation.ask>` sends a question with a model, for example for an evaluation.
    """

    @abstractmethod
    def on_client_question(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, question: Mapping[str, Any]
    ) -> ClientUpdate:
        """Computes a client's answer to ``question``. The module contains the model for this client.

        The module is restored afterwards. Raise :class:`ClientFault` if the client has no answer.
        """


def federated_callbacks(trainer: L.Trainer) -> list[FederatedCallback]:
    """Returns the Trainer's :class:`FederatedCallback` objects, in order."""
    return find_callbacks(trainer, FederatedCallback)


def notify_model_loaded(trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
    """Calls :meth:`FederatedCallback.on_model_loaded` for all callbacks."""
    for callback in federated_callbacks(trainer):
        callback.on_model_loaded(trainer, module, client)
