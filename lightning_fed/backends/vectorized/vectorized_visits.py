"""Visits of several clients that train at once, in one stacked model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from torch import Tensor

from lightning_fed.backends.vectorized.stacked_model import StackedModel, joint_loss
from lightning_fed.console import round_number
from lightning_fed.data.interleave import ClientGenerators, StackedBatch, batch_tensors
from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.round_loader import VisitGroups
from lightning_fed.rounds.client_errors import client_fault
from lightning_fed.rounds.simultaneous_visits import SimultaneousVisits

_log = logging.getLogger(__name__)


class VectorizedVisits(SimultaneousVisits):
    """Trains the visits of a group at once, under ``torch.func.vmap``.

    Args:
        trainer: The Trainer.
        groups: Rule by which the round's loader puts visits into groups.
        model: Holds the clients' models.

    """

    def __init__(self, trainer: L.Trainer, groups: VisitGroups, model: StackedModel) -> None:
        self.groups = groups
        self._trainer, self._model = trainer, model
        self._has_warned = False

    def take(self) -> None:
        """Takes the module as it is for the next client's model."""
        self._model.take()

    def start(self) -> None:
        """Stacks the clients' models, before their first batch."""
        self._model.enter(self._trainer.optimizers)

    def step(
        self,
        group: Sequence[PlannedVisit],
        training_step: Callable[..., Any],
        parts: Sequence[StackedBatch],
        rest: Sequence[Any],
        numbers: ClientGenerators,
    ) -> Tensor | None:
        """Runs the training step, once for each shape of batches."""
        if not self._has_warned and len(parts) == len(group):
            self._has_warned = _warn_of_contents(parts)
        losses = []
        for part in parts:
            try:
                losses.append(self._model.step(training_step, part, rest, numbers))
            except Exception as error:
                faults = {row: client_fault(error, group[row]) for row in part.clients}
                is_of_all = all(group[row].num_samples == 1 for row in part.clients)  # on which BatchNorm cannot train
                if None in faults.values() or not (is_of_all or len(part.clients) == 1):  # whose it is nobody knows
                    clients = [group[row].visit.client for row in part.clients]
                    error.add_note(
                        f"In round {round_number(group[0].visit.round)}, in the visits of clients {clients}, who"
                        " train at once: with `visits='auto'` one trains after another, and a client that fails is"
                        " left out by name."
                    )
                    raise
                for row, fault in faults.items():
                    group[row].fault, group[row].error = fault, error.with_traceback(None)
        return joint_loss(losses) if losses else None

    def end_batch(self, group: Sequence[PlannedVisit], batches_left: int) -> None:
        """Keeps the models of those clients whose last batch it was, where others go on."""
        if not self._model.is_entered:
            return
        self._model.check_step()
        if not batches_left:
            return
        finished = group[0].num_batches - batches_left
        for row, planned in enumerate(group):
            if planned.num_batches == finished:
                self._model.end(row)

    def leave(self) -> None:
        """Gives the module its own tensors back, after the last batch."""
        self._model.leave()

    def put(self, row: int) -> None:
        """Makes the module one client's model."""
        self._model.put(row)

    def clear(self) -> None:
        """Forgets the clients' models."""
        self._model.clear()


def _warn_of_contents(parts: Sequence[StackedBatch]) -> bool:
    """Warns of batches that could be stacked but for what is in them beside tensors; returns whether it did."""
    shapes = {tuple((tensor.shape, tensor.dtype) for tensor in batch_tensors(part.batch)) for part in parts}
    if len(shapes) == 1:
        _log.warning(
            "`Vectorized`: the batches of %d clients have the same shapes, but other texts, numbers or objects in"
            " them (names of files?). Each client's step is run alone, which is slower than one client after another:"
            " leave out of the batches what `training_step` does not need.",
            len(parts),
        )
    return len(shapes) == 1
