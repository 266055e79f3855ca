"""BatchNorm statistics to evaluate the global model, if only clients have running statistics."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fed.batch_norm.pooling import InputStatistics
from lightning_fed.batch_norm.unseen_statistics import UnseenStatistics
from lightning_fed.data.federated import copy_loader, split_loaders
from lightning_fed.data.population import seeded_generators
from lightning_fed.features.isolated_pass import isolated_pass, run_step
from lightning_fed.federated_callback import FederatedCallback, RevertingCallback, federated_callbacks
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.messages import Client, State
from lightning_fed.model.entries import batch_norm_layers

_log = logging.getLogger(__name__)


class DataStatistics(UnseenStatistics):
    """Makes BatchNorm layers normalise with statistics of the whole evaluation data.

    ``report`` has these statistics in the format of :meth:`InputStatistics.as_extras`, set by
    :meth:`UnseenData.measure`. While ``report`` is empty, layers use the statistics of each batch.
    """

    def __init__(self, module: nn.Module, layers: Iterable[str] | None = None) -> None:
        super().__init__(module, layers)
        self.report: State = {}

    def statistics(self, name: str, layer: nn.BatchNorm2d, values: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = (self.report.get(f"batch_norm:{name}:{kind}") for kind in ("mean", "var"))
        if mean is None or variance is None:
            return super().statistics(name, layer, values)
        return mean.to(values).unsqueeze(0), variance.to(values).unsqueeze(0)


class UnseenData(RevertingCallback, FederatedCallback):
    """Evaluates with BatchNorm statistics of the evaluation data.

    If each client has separate statistics, the global model has no valid running statistics. BatchNorm layers then
    use the statistics of each batch or of a whole dataloader. Frozen layers keep the running statistics.
    """

    def __init__(self, find_fit: Callable[[], FederatedFit]) -> None:
        self._find_fit = find_fit
        self._adapter: DataStatistics | None = None
        self._is_lent = False  # started for a client's model outside an evaluation

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.revert()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.revert()
        self._start(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx or self._adapter is None or self._find_fit().batch_norm.unseen != "data":
            return
        if trainer.testing:
            stage, loaders, limits = "test", trainer.test_dataloaders, trainer.num_test_batches
        elif trainer.predicting:
            stage, loaders, limits = "predict", trainer.predict_dataloaders, trainer.num_predict_batches
        else:
            stage, loaders, limits = "validation", trainer.val_dataloaders, trainer.num_val_batches
        # Lightning is iterating over the loader at this point.
        loader, limit = copy_loader(split_loaders(loaders)[dataloader_idx]), limits[dataloader_idx]
        batches = itertools.islice(loader, int(limit)) if limit != float("inf") else loader
        self.measure(trainer, pl_module, batches, f"{stage}_step")

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_model_loaded(self, trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
        if client is None and self._is_lent:
            self.revert()  # otherwise the user's module would keep the hooks after a fit
        elif self._adapter is None:  # clients on other machines evaluate outside a Trainer's validation
            self._start(module)
            self._is_lent = client is not None
        if self._adapter is not None:
            self._adapter.report = {}
            self._adapter.is_active = client is None or self._find_fit().batch_norm.served_client != client

    @torch.inference_mode(False)
    def measure(self, trainer: L.Trainer, module: L.LightningModule, batches: Iterable[Any], step: str) -> None:
        """Measures BatchNorm statistics for ``LocalStatistics(unseen="data")``: runs method ``step`` on ``batches``."""
        adapter = self._adapter
        if adapter is None or not adapter.is_active or self._find_fit().batch_norm.unseen != "data":
            return
        adapter.report = {}
        layers = {name: layer for name, layer in batch_norm_layers(module).items() if name in adapter.names}
        statistics = InputStatistics(layers)
        with seeded_generators(), isolated_pass(module), statistics.watching():
            for layer in layers.values():
                layer.train()
            for number, batch in enumerate(batches):
                try:
                    run_step(trainer, module, step, batch, number)
                except ValueError as error:
                    if "more than 1 value per channel" not in str(error):
                        raise
                    if self._find_fit().record_warning("single"):
                        _log.warning(
                            "A batch with a single example is excluded from the BatchNorm statistics: set another "
                            "batch size, or drop_last=True."
                        )
        adapter.report = statistics.as_extras()

    def _start(self, module: L.LightningModule) -> None:
        fit = self._find_fit()
        if fit.batch_norm.has_own:
            self._adapter = DataStatistics(module, fit.batch_norm.norm_layers)

    def revert(self) -> None:
        if self._adapter is not None:
            self._adapter.remove()
        self._adapter, self._is_lent = None, False


def measure_unseen(trainer: L.Trainer, module: L.LightningModule, batches: Iterable[Any], step: str) -> None:
    """Measures BatchNorm statistics for an evaluation on ``batches``, if the option ``unseen`` is ``"data"``.

    ``step`` is the method to run, such as ``"validation_step"``. The evaluation then uses the statistics.
    """
    for callback in federated_callbacks(trainer):
        if isinstance(callback, UnseenData):
            callback.measure(trainer, module, batches, step)
