"""Lightning's progress in checkpoints, given that one epoch is one round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L

from lightning_fed.lightning.internals import (
    await_validation,
    complete_epoch,
    fit_progress,
    forget_loaders,
    restart_epoch,
    validates_after_batch,
)


class RoundProgress:
    """Corrects Lightning's progress in checkpoints, so that an incomplete round restarts from its first batch.

    A fit resumed from a checkpoint between the last batch of a round and the validation starts with the validation.
    Without validation, the checkpoint is treated as the end of the epoch.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None  # start of the current round
        self._correct: Callable[[dict[str, Any]], None] | None = None  # correction for the next checkpoint
        self._is_cut = False

    def start_round(self, trainer: L.Trainer) -> None:
        """Records Lightning's progress before the round's first batch."""
        self._first_step = trainer.global_step
        self._correct = partial(
            restart_epoch,
            global_step=trainer.global_step,
            progress=fit_progress(trainer),
            window=trainer.accumulate_grad_batches,
        )

    def steps(self, trainer: L.Trainer) -> int:
        """Number of optimizer steps since the first batch of the round."""
        return 0 if self._first_step is None else trainer.global_step - self._first_step

    def end_round(self, trainer: L.Trainer, is_cut: bool = False) -> None:
        """Marks the round as complete before the epoch's end; ``is_cut`` marks an interruption unknown to Lightning."""
        self._first_step, self._is_cut = None, is_cut

        def correct(checkpoint: dict[str, Any]) -> None:  # a hook at the end of the round may stop the fit
            if not is_cut and validates_after_batch(trainer):
                await_validation(checkpoint)
            else:
                complete_epoch(checkpoint, is_counted=False)

        self._correct = correct

    def validate(self) -> None:
        """Marks the start of the validation."""
        if self._first_step is None:
            self._correct = partial(complete_epoch, is_counted=False) if self._is_cut else None

    def end_epoch(self) -> None:
        """Marks the epoch as complete, also after a failed round."""
        self._first_step, self._correct, self._is_cut = None, complete_epoch, False

    def patch(self, checkpoint: dict[str, Any]) -> None:
        """Corrects a checkpoint."""
        if self._correct is not None:
            self._correct(checkpoint)
        forget_loaders(checkpoint)  # a resumed round starts again
