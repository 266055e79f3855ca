"""Lightning's progress in checkpoints, where one epoch is one round."""

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
    """Takes back the batches of a round that is not complete from a checkpoint: it is trained again from its start.

    Lightning would go on after them, in a round that is shorter by as many. A fit that goes on from a checkpoint
    between a round's last batch and its validation validates first; where none is due, the checkpoint is one of the
    epoch's end.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None  # of the round that is open
        self._correct: Callable[[dict[str, Any]], None] | None = None  # what a checkpoint needs now
        self._is_cut = False

    def start_round(self, trainer: L.Trainer) -> None:
        """Notes Lightning's progress before the round's first batch."""
        self._first_step = trainer.global_step
        self._correct = partial(
            restart_epoch,
            global_step=trainer.global_step,
            progress=fit_progress(trainer),
            window=trainer.accumulate_grad_batches,
        )

    def steps(self, trainer: L.Trainer) -> int:
        """Optimizer steps since the round's first batch."""
        return 0 if self._first_step is None else trainer.global_step - self._first_step

    def end_round(self, trainer: L.Trainer, is_cut: bool = False) -> None:
        """The round is complete, and the epoch not yet; of a round that was cut short Lightning does not know it."""
        self._first_step, self._is_cut = None, is_cut

        def correct(checkpoint: dict[str, Any]) -> None:  # a hook of the round's end may stop the fit
            if not is_cut and validates_after_batch(trainer):
                await_validation(checkpoint)
            else:
                complete_epoch(checkpoint, is_counted=False)

        self._correct = correct

    def validate(self) -> None:
        """Validation has begun."""
        if self._first_step is None:
            self._correct = partial(complete_epoch, is_counted=False) if self._is_cut else None

    def end_epoch(self) -> None:
        """The epoch is complete, whatever became of the round."""
        self._first_step, self._correct, self._is_cut = None, complete_epoch, False

    def patch(self, checkpoint: dict[str, Any]) -> None:
        """Corrects a checkpoint."""
        if self._correct is not None:
            self._correct(checkpoint)
        forget_loaders(checkpoint)  # a resumed round starts again
