"""Evaluation of the global model where every client has running statistics of its own, and the model has none."""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_fed.client.client_store import ClientStore
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Broadcast, Client
from lightning_fed.model.entries import batch_norm_statistics
from lightning_fed.model.unseen_statistics import UnseenStatistics
from lightning_fed.rounds.batch_norm import layers_in_training


class UnseenData(FederatedCallback):
    """Normalises data of no known client with their batch's statistics.

    It acts from the start of a validation, test or prediction until the next round, whenever the module is the global
    model, or that of a client without statistics, and in evaluation mode: also where callbacks draw or measure then.
    Layers that do not train (a frozen encoder's) keep their own statistics.
    :class:`~lightning_fed.callbacks.Federation` adds it with ``batch_norm=LocalStatistics()``.

    State: ``layers``, the names of the BatchNorm layers that train (a list, or None before the first round).

    Args:
        store: Where the clients keep their statistics.

    """

    supports_vectorize = True

    def __init__(self, store: ClientStore) -> None:
        self._store = store
        self._layers: list[str] | None = None
        self._adapter: UnseenStatistics | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets the layers of an earlier fit."""
        if stage == "fit":
            self._layers = None

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Notes the layers that train."""
        self._layers = list(layers_in_training(module))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives the layers back to training, in which they normalise by batch anyway."""
        self._stop()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Changes the layers."""
        self._stop()
        self._adapter = UnseenStatistics(pl_module, self._layers)

    on_test_start = on_predict_start = on_validation_start

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Leaves the layers alone in a visit, in which a client's model may be evaluated."""
        self._switch(is_active=False)

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Changes the layers again."""
        self._switch(is_active=True)

    def on_model_loaded(self, trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
        """Leaves the layers alone while the module is the model of a client that has statistics."""
        state = None if client is None else self._store.get(client)
        self._switch(is_active=state is None or not state.keys() & batch_norm_statistics(module))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Gives the layers back."""
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Gives the layers back."""
        self._stop()

    def state_dict(self) -> dict[str, Any]:
        """Returns the names of the layers that train."""
        return {"layers": self._layers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the names of the layers over."""
        self._layers = state_dict["layers"]

    def _stop(self) -> None:
        if self._adapter is not None:
            self._adapter.remove()
        self._adapter = None

    def _switch(self, is_active: bool) -> None:
        if self._adapter is not None:
            self._adapter.is_active = is_active
