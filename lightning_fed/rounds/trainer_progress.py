"""What a checkpoint says of Lightning's progress, where one epoch is one round."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L


class RoundProgress:
    """Takes back the batches of a round that is not complete from a checkpoint: it is trained again from its start.

    Lightning would go on after them, in a round that is shorter by as many. A checkpoint between a round's last batch
    and its validation becomes one of the epoch's end.
    """

    def __init__(self) -> None:
        self._start: tuple[int, dict[str, Any]] | None = None  # the steps and progress before an incomplete round
        self._is_before_validation = False

    def start_round(self, trainer: L.Trainer) -> None:
        """Notes where Lightning stands, before the round's first batch."""
        self._start = trainer.global_step, trainer.fit_loop.state_dict()

    def steps(self, trainer: L.Trainer) -> int:
        """Optimizer steps since the round's first batch."""
        return 0 if self._start is None else trainer.global_step - self._start[0]

    def add_steps(self, trainer: L.Trainer, count: int) -> None:
        """Counts steps that other processes have done: Lightning's callbacks go by ``global_step`` in all of them."""
        loop = trainer.fit_loop.epoch_loop  # there is no public way to count; these are what checkpoints hold
        for steps in (
            loop.automatic_optimization.optim_progress.optimizer.step.total,
            loop.manual_optimization.optim_step_progress.total,
        ):
            steps.ready += count
            steps.completed += count

    def end_round(self) -> None:
        """The round is complete; the epoch is not."""
        self._start, self._is_before_validation = None, True

    def validate(self) -> None:
        """Validation has begun."""
        self._is_before_validation = False

    def end_epoch(self) -> None:
        """The epoch is complete, whatever became of the round."""
        self._start, self._is_before_validation = None, False

    def patch(self, checkpoint: dict[str, Any]) -> None:
        """Corrects a checkpoint."""
        loops = checkpoint["loops"]
        if self._start is not None:
            checkpoint["global_step"], progress = self._start
            loops["fit_loop"] = copy.deepcopy(progress)
            if loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 0:
                _advance(loops["fit_loop"]["epoch_loop.batch_progress"], "ready")  # the first batch is on its way
        elif self._is_before_validation:
            _advance(loops["fit_loop"]["epoch_loop.batch_progress"], "completed")
            _advance(loops["fit_loop"]["epoch_progress"], "processed")


def _advance(progress: dict[str, Any], stage: str) -> None:
    for part in ("total", "current"):
        progress[part][stage] += 1
