"""A progress bar that counts rounds and names the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_fed.callbacks.federation import Federation


class FederatedProgressBar(TQDMProgressBar):
    """Lightning's progress bar, which says ``Round 3/50``, the client that trains and its loss.

    Args:
        refresh_rate: Batches between updates of the bar; the default keeps its cost out of the batch loop.
        options: Further arguments of ``TQDMProgressBar``.

    Example:
        >>> trainer = L.Trainer(callbacks=[Federation(), FederatedProgressBar()], logger=False)

    """

    supports_vectorize = True

    def __init__(self, refresh_rate: int = 20, **options: Any) -> None:
        super().__init__(refresh_rate=refresh_rate, **options)
        self._outputs: Any = None

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Names the round."""
        super().on_train_epoch_start(trainer, *args)
        rounds = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        self.train_progress_bar.set_description(f"Round {trainer.current_epoch + 1}{rounds}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the bar on every ``refresh_rate`` batches."""
        self._outputs = outputs  # read, which waits for the device, only when the bar is drawn
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, int | str | float | Any]:
        """The user's values, the client that trains now and the loss of its last batch."""
        metrics = super().get_metrics(trainer, pl_module)
        if isinstance(self._outputs, Mapping) and "loss" in self._outputs:
            metrics.setdefault("loss", f"{float(self._outputs['loss']):.3f}")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Federation) and callback.current_client is not None:
                metrics["client"] = str(callback.current_client)
        return metrics
