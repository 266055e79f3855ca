"""Visits of several clients that train at once, in one stacked model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_fed.backends.vectorized.obstacles import Obstacle, check_entries, check_vectorizable
from lightning_fed.backends.vectorized.stacked_model import StackedModel, joint_loss
from lightning_fed.backends.vectorized.vectorisation_check import check_vectorisation
from lightning_fed.data.interleave import ClientGenerators, StackedBatch, batch_tensors, detect_draws
from lightning_fed.data.population import PlannedVisit, Population, seed_everything, seeded_generators
from lightning_fed.data.round_loader import VisitGroups
from lightning_fed.errors import describe
from lightning_fed.rounds.client_errors import client_fault
from lightning_fed.rounds.federated_fit import FederatedFit
from lightning_fed.rounds.round import Round
from lightning_fed.rounds.visit_executor import VISIT_EXECUTORS, VisitExecutor
from lightning_fed.server.schedule import Schedule

_log = logging.getLogger(__name__)


class VectorizedVisits(VisitExecutor):
    """Trains the visits of a group at once, under ``torch.func.vmap``.

    Args:
        fit: The fit.
        groups: Rule by which the round's loader puts visits into groups.
        model: Holds the clients' models.

    """

    def __init__(self, fit: FederatedFit, groups: VisitGroups, model: StackedModel) -> None:
        super().__init__(groups)
        self._fit, self._model = fit, model
        self._has_warned = False

    def start(self, round: Round, group: Sequence[PlannedVisit]) -> None:
        """Starts one visit after another, and stacks the clients' models."""
        for planned in group:
            if planned.fault is None:
                round.start_visit(planned)
                round.suspend_visit()
            self._model.take()  # a client that has failed already has a row too, on which nothing is trained
        self._model.enter(self._fit.trainer.optimizers)

    def step(
        self,
        group: Sequence[PlannedVisit],
        training_step: Callable[..., Any],
        parts: Sequence[StackedBatch],
        rest: Sequence[Any],
        numbers: ClientGenerators,
    ) -> Tensor | None:
        """Runs the training step for all clients; those that fail by their own fault are left out."""
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
                        f"In round {group[0].visit.round}, in the visits of clients {clients}, who train at once:"
                        " with `vectorize=1` one trains after another, and a client that fails is left out by name."
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

    def end(self, round: Round, group: Sequence[PlannedVisit]) -> None:
        """Makes the module one client's model after another, and ends the visits."""
        self._model.leave()
        for row, planned in enumerate(group):
            if round.resume_visit(planned):
                self._model.put(row)
            round.end_visit(planned)
        self._model.clear()

    def abandon(self) -> None:
        """Gives the module its own tensors back."""
        self._model.leave()
        self._model.clear()


def plan_vectorized_visits(size: int, fit: FederatedFit) -> VectorizedVisits | None:
    """Decides, before the first round, whether visits can train at once; where not, the log says why.

    Args:
        size: At most how many visits.
        fit: The fit, which knows its clients; its module holds the global model.

    """
    trainer, module, population = fit.trainer, fit.module, fit.population
    entries = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    names = [name for name in entries if fit.policies.get(name) != "frozen"]
    try:
        check_vectorizable(fit)
        check_entries(module, names)
        if "groups" not in inspect.signature(population.stream).parameters:
            raise Obstacle(f"`{type(population).__name__}.stream` has no argument `groups`")
        with seeded_generators():
            batch, has_drawn = _first_batch(population, fit.schedule)
            draws = check_vectorisation(trainer, module, names, batch)
    except Obstacle as obstacle:
        _log.warning("`vectorize=%d`: the clients train one after another all the same, because %s.", size, obstacle)
        return None
    is_equal = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
    size = min(size, fit.schedule.cohort_size(len(population.clients)))  # a stack has room for as many models
    return VectorizedVisits(fit, VisitGroups(size, is_equal, has_drawn), StackedModel(module, names, size, draws))


VISIT_EXECUTORS["vectorized"] = plan_vectorized_visits


def _first_batch(population: Population, schedule: Schedule) -> tuple[Any, bool]:
    """A batch of a client, and whether its data drew from Python's or NumPy's random numbers."""
    for visit in schedule.cohort(0, population.clients).visits:
        try:
            planned = PlannedVisit(visit, population.num_samples(visit.client), 1)
            if planned.num_samples < 2:  # BatchNorm cannot train on it
                continue
            seed_everything(visit.seed)
            with detect_draws() as has_drawn:
                item = next(population.stream([planned], isolated=True))
        except Exception as error:
            _log.debug("Client %r cannot be tried: %s", visit.client, describe(error))
            continue
        if item.error is None and item.batch is not None:
            return item.batch, has_drawn[0]
    raise Obstacle("no client of the first round has data to try it with")


def _warn_of_contents(parts: Sequence[StackedBatch]) -> bool:
    """Warns of batches that could be stacked but for what is in them beside tensors; returns whether it did."""
    shapes = {tuple((tensor.shape, tensor.dtype) for tensor in batch_tensors(part.batch)) for part in parts}
    if len(shapes) == 1:
        _log.warning(
            "`vectorize`: the batches of %d clients have the same shapes, but other texts, numbers or objects in"
            " them (names of files?). Each client's step is run alone, which is slower than with `vectorize=1`:"
            " leave out of the batches what `training_step` does not need.",
            len(parts),
        )
    return len(shapes) == 1
