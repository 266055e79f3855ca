"""Progress bars with round numbers and client names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from time import monotonic
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_fed.callbacks.federation import Federation
from lightning_fed.console import round_number


class _ByRound(ProgressBar):
    supports_vectorize = True

    def __init__(self, interval: float = 0.25, **options: Any) -> None:
        super().__init__(**options)
        self.interval = interval
        self._outputs: Any = None
        self._last_drawn = -math.inf

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = monotonic()
        if now - self._last_drawn < self.interval and batch_idx + 1 < self.total_train_batches:
            return
        self._last_drawn = now
        self._outputs = outputs  # reading the loss waits for the device, so the loss is read only when drawn
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, int | str | float | Any]:
        metrics = super().get_metrics(trainer, pl_module)
        if isinstance(self._outputs, Mapping) and "loss" in self._outputs:
            metrics.setdefault("loss", f"{float(self._outputs['loss']):.3f}")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Federation) and callback.current_client is not None:
                places = {visit.client: place for place, visit in enumerate(callback.cohort.visits, start=1)}
                name = callback.current_client
                metrics = {"client": f"{name} ({places.get(name, 1)} of {max(1, len(places))})", **metrics}
        return metrics

    def _description(self, epoch: int) -> str:
        last = self.trainer.max_epochs
        return f"Round {round_number(epoch)}" + (f"/{last}" if last and last > 0 else "")


class FederatedProgressBar(_ByRound, TQDMProgressBar):
    """Lightning's progress bar with the round (``Round 3/50``), the current client and the loss.

    Args:
        interval: Seconds between updates; updates slow down the batch loop.
        options: Further arguments for ``TQDMProgressBar``.

    Example:
        >>> trainer = L.Trainer(callbacks=[Federation(), FederatedProgressBar()], logger=False)
    """

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        bar, total = self.train_progress_bar, self.total_train_batches
        bar.total, bar.initial = (total if math.isfinite(total) else None), 0
        bar.set_description(self._description(trainer.current_epoch), refresh=False)
        bar.reset()  # draws it


class FederatedRichProgressBar(_ByRound, RichProgressBar):
    """:class:`FederatedProgressBar` drawn with ``rich``.

    Args:
        interval: Seconds between updates.
        options: Further arguments for ``RichProgressBar``.

    Raises:
        ModuleNotFoundError: If ``rich`` is not installed.
    """

    def __init__(self, interval: float = 0.25, **options: Any) -> None:
        super().__init__(
            interval, **{"refresh_rate": 10, **options}
        )  # updates per second; Lightning's default of 100 costs CPU time

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{self._description(current_epoch):{len(self.validation_description)}}"


def default_progress_bar() -> ProgressBar:
    """Creates the default progress bar for rounds, which uses ``rich`` if installed, as in Lightning."""
    return FederatedRichProgressBar() if find_spec("rich") else FederatedProgressBar()
