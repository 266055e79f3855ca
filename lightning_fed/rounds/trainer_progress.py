"""Lightning's progress in checkpoints, where one epoch is one round."""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_fed.rounds.lightning_internals import complete_epoch, fit_progress, restart_epoch


class RoundProgress:
    """Takes back the batches of a round that is not complete from a checkpoint: it is trained again from its start.

    Lightning would go on after them, in a round that is shorter by as many. A checkpoint between a round's last batch
    and its validation becomes one of the epoch's end.
    """

    def __init__(self) -> None:
        # Steps and progress before an incomplete round, and the batches for a step.
        self._start: tuple[int, dict[str, Any], int] | None = None
        self._is_before_validation = self._is_cut = False

    def start_round(self, trainer: L.Trainer) -> None:
        """Notes Lightning's progress before the round's first batch."""
        self._start = trainer.global_step, fit_progress(trainer), trainer.accumulate_grad_batches

    def steps(self, trainer: L.Trainer) -> int:
        """Optimizer steps since the round's first batch."""
        return 0 if self._start is None else trainer.global_step - self._start[0]

    def end_round(self, is_cut: bool = False) -> None:
        """The round is complete, and the epoch not yet; of a round that was cut short Lightning does not know it."""
        self._start, self._is_before_validation, self._is_cut = None, True, is_cut

    def validate(self) -> None:
        """Validation has begun."""
        self._is_before_validation = False

    def end_epoch(self) -> None:
        """The epoch is complete, whatever became of the round."""
        self._start, self._is_before_validation, self._is_cut = None, False, False

    def patch(self, checkpoint: dict[str, Any]) -> None:
        """Corrects a checkpoint."""
        if self._start is not None:
            restart_epoch(checkpoint, *self._start)
        elif self._is_before_validation or self._is_cut:
            complete_epoch(checkpoint, is_validated=not self._is_before_validation)
