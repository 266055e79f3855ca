"""Progress bars with round numbers and client names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from time import monotonic
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_fed.callbacks.federation import federation_of
from lightning_fed.console import round_number

_INTERVAL = 0.25  # seconds between updates; updates slow down the batch loop


class _ByRound(ProgressBar):
    supports_vectorize = True
    _outputs: Any = None
    _last_drawn = -math.inf

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = monotonic()
        if now - self._last_drawn < _INTERVAL and batch_idx + 1 < self.total_train_batches:
            return
        self._last_drawn = now
        self._outputs = outputs  # reading the loss waits for the device, so the loss is read only when drawn
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, int | str | float | Any]:
        metrics = super().get_metrics(trainer, pl_module)
        if isinstance(self._outputs, Mapping) and "loss" in self._outputs:
            loss = float(self._outputs["loss"])
            shown = [value for name, value in metrics.items() if "loss" in name and isinstance(value, float)]
            if not any(math.isclose(value, loss, rel_tol=1e-6) for value in shown):
                metrics.setdefault("loss", f"{loss:.3f}")
        federation = federation_of(trainer)
        if federation is not None and federation.current_client is not None:
            places = {visit.client: place for place, visit in enumerate(federation.cohort.visits, start=1)}
            name = federation.current_client
            metrics = {"client": f"{name} ({places.get(name, 1)} of {max(1, len(places))})", **metrics}
        return metrics

    def _description(self, epoch: int, status: str = "") -> str:
        last = self.trainer.max_epochs
        return f"Round {round_number(epoch)}" + (f"/{last}" if last and last > 0 else "") + (status and f", {status}")


class FederatedProgressBar(_ByRound, TQDMProgressBar):
    """Progress bar that shows the round, the current client and the loss.

    Args:
        refresh_rate: Batches between two updates. 0 hides the bar.
        process_position: Number of lines above the bar.
        leave: Whether each round's bar stays in the terminal.

    Example:
        >>> from lightning_fed import Federation
        >>> trainer = L.Trainer(callbacks=[Federation(), FederatedProgressBar()], logger=False)
    """

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        bar, total = self.train_progress_bar, self.total_train_batches
        bar.total, bar.initial = (total if math.isfinite(total) else None), 0
        bar.set_description(self._description(trainer.current_epoch), refresh=False)
        bar.reset()  # draws it

    def show_status(self, text: str) -> None:
        self.train_progress_bar.set_description(self._description(self.trainer.current_epoch, text))


class FederatedRichProgressBar(_ByRound, RichProgressBar):
    """:class:`FederatedProgressBar` drawn with ``rich``.

    Args:
        options: Arguments for ``RichProgressBar``.

    Raises:
        ModuleNotFoundError: If ``rich`` is not installed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"refresh_rate": 10, **options})  # per second; Lightning's default of 100 costs CPU time

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{self._description(current_epoch):{len(self.validation_description)}}"

    def show_status(self, text: str) -> None:
        if self.progress is not None and self.train_progress_bar_id is not None:
            text = self._description(self.trainer.current_epoch, text).replace("[", r"\[")  # no markup of rich
            self.progress.update(self.train_progress_bar_id, description=text)


def default_progress_bar() -> ProgressBar:
    """Creates the default progress bar for rounds, with ``rich`` if installed, as in Lightning."""
    return FederatedRichProgressBar() if find_spec("rich") else FederatedProgressBar()
