"""Evaluation of the global model where every client has running statistics of its own, and the model has none."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L

from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.messages import Broadcast, Client
from lightning_fed.model.unseen_statistics import UnseenStatistics


class UnseenData(FederatedCallback):
    """Normalises data without a client with the statistics of the batch, where clients have their own statistics.

    The callback acts from the start of a validation, test or prediction until the next round, while the module is the
    global model or the model of a client without statistics. Layers that do not train (a frozen encoder's) keep their
    running statistics. :class:`~lightning_fed.callbacks.Federation` adds the callback with ``batch_norm="auto"`` and
    ``batch_norm=LocalStatistics(unseen="batch")``.

    Args:
        find_fit: Returns the current fit.

    """

    supports_vectorize = True

    def __init__(self, find_fit: Callable[[], FederatedFit]) -> None:
        self._find_fit = find_fit
        self._adapter: UnseenStatistics | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restores the layers for the training."""
        self._stop()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Changes the layers."""
        self._stop()
        self._start(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Pauses in a visit, in which a client's model may be evaluated."""
        self._switch(is_active=False)

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Resumes after a visit."""
        self._switch(is_active=True)

    def on_model_loaded(self, trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
        """Pauses while the module is the model of a client that has statistics."""
        if self._adapter is None:  # clients on other machines evaluate without a validation of the Trainer
            self._start(module)
        self._switch(is_active=client is None or self._find_fit().served_client != client)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restores the layers."""
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restores the layers."""
        self._stop()

    def _start(self, module: L.LightningModule) -> None:
        fit = self._find_fit()
        if fit.has_own_statistics:
            self._adapter = UnseenStatistics(module, fit.norm_layers)

    def _stop(self) -> None:
        if self._adapter is not None:
            self._adapter.remove()
        self._adapter = None

    def _switch(self, is_active: bool) -> None:
        if self._adapter is not None:
            self._adapter.is_active = is_active
