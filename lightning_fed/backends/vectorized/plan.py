"""Decides before the first round of a fit if clients train simultaneously with ``torch.func.vmap``."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lightning_fed.argument_checks import check_count
from lightning_fed.backends.vectorized.group_loader import GroupLoader, detect_draws
from lightning_fed.backends.vectorized.obstacles import Obstacle, check_entries, check_vectorizable
from lightning_fed.backends.vectorized.stacked_model import StackedModel
from lightning_fed.backends.vectorized.stacked_visits import StackedVisits
from lightning_fed.backends.vectorized.vectorisation_check import check_vectorisation
from lightning_fed.batch_norm.measurement import layers_in_training
from lightning_fed.data.population import PlannedVisit, Population, seed_everything, seeded_generators
from lightning_fed.errors import describe
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.fit.options import VisitsAtOnce
from lightning_fed.model.entries import entry_names, tensors_by_path
from lightning_fed.rounds.loop import VisitPlan
from lightning_fed.server.schedule import Schedule

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vectorized(VisitsAtOnce):
    """Trains several clients with small models simultaneously.

    If the module or a setting prevents this, the clients train one after another, and the log states the reason.

    Args:
        clients: Maximum number of clients that train simultaneously.

    Raises:
        ValueError: If ``clients`` is not a positive integer.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation(clients_per_round=16, visits=Vectorized(8))
    """

    clients: int

    def __post_init__(self) -> None:
        check_count("clients", self.clients)

    def plan(self, fit: FederatedFit) -> VisitPlan | None:
        trainer, module, population = fit.trainer, fit.module, fit.population
        entries = entry_names(module)
        paths = tensors_by_path(module).items()
        # A visit changes BatchNorm statistics with every policy.
        statistics = {
            buffer for layer in layers_in_training(module).values() for buffer in layer.buffers(recurse=False)
        }
        names = [
            path
            for path, tensor in paths
            if tensor in statistics or fit.policies.get(entries.get(tensor, "")) != "frozen"
        ]
        try:
            check_vectorizable(fit)
            check_entries(module, names)
            if "groups" not in inspect.signature(population.stream).parameters:
                raise Obstacle(
                    f"`{type(population).__name__}.stream` has no argument `groups`, and cannot return batches of "
                    "several clients in turn"
                )
            with seeded_generators():
                batch, has_drawn = _first_batch(population, fit.schedule)
                draws = check_vectorisation(trainer, module, names, batch)
        except Obstacle as obstacle:
            _log.warning(
                "`visits=Vectorized(%d)` has no effect, and clients train one after another: %s.",
                self.clients,
                obstacle,
            )
            return None
        is_equal = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
        size = min(self.clients, fit.schedule.cohort_size(len(population.clients)))  # number of model copies in memory
        model = StackedModel(module, names, size, draws)
        loader = partial(GroupLoader, size=size, is_equal=is_equal, draws=has_drawn)
        return VisitPlan(partial(StackedVisits, model=model), loader, size)


class _Measured(NamedTuple):
    """Fastest number of clients to train simultaneously, from a benchmark with small models.

    The result is for at most ``most_parameters`` parameters, and at least ``least_cohort`` clients per round.
    ``clients`` is the fastest number. ``gain`` is the speed-up over training one client after another.
    """

    most_parameters: int
    has_convolutions: bool
    least_cohort: int
    clients: int
    gain: float


# Constants, so fits on equal devices and resumed fits use the same number of clients.
_ON_CPU = (
    _Measured(100_000, False, 5, 50, 1.8),
    _Measured(100_000, True, 10, 25, 1.1),
)
_ON_GPU = (_Measured(2_000_000, True, 4, 64, 5.0),)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Fastest(VisitsAtOnce):
    """Trains groups of clients with the fastest size from benchmarks (``visits="fastest"``)."""

    clients = 64

    def plan(self, fit: FederatedFit) -> VisitPlan | None:
        size, gain = fit.fastest = fit.fastest if fit.fastest[0] else _choose(fit)
        _log.info("`visits='fastest'`: %s.", _describe(size, gain) if size > 1 else "one client after another")
        return Vectorized(size).plan(fit) if size > 1 else None


def suggest_fastest(fit: FederatedFit) -> None:
    """Logs the expected speed-up of ``visits="fastest"``, if any."""
    size, gain = _choose(fit)
    if size > 1 and fit.options.faults.visit_timeout is None:
        try:
            check_vectorizable(fit)
            check_entries(fit.module, tensors_by_path(fit.module))
        except Obstacle:
            return
        _log.info("`visits='fastest'` would use %s.", _describe(size, gain))


def _choose(fit: FederatedFit) -> tuple[int, float]:
    cohort = fit.schedule.cohort_size(len(fit.population.clients))
    return choose_clients(fit.module, cohort, fit.trainer.strategy.root_device.type)


def _describe(size: int, gain: float) -> str:
    return f"Vectorized({size}), about {gain:g} times as fast in the measurements, with equal weights up to rounding"


def choose_clients(module: nn.Module, cohort: int, device: str) -> tuple[int, float]:
    """Looks up the best number of clients to train simultaneously, up to ``cohort``, and the speed-up in benchmarks.

    Example:
        >>> choose_clients(nn.Linear(784, 10), 30, "cpu"), choose_clients(nn.Linear(784, 10), 2, "cpu")
        ((30, 1.8), (1, 1.0))
    """
    count = sum(parameter.numel() for parameter in module.parameters())
    has_convolutions = any(isinstance(layer, _CONVOLUTIONS) for layer in module.modules())
    for row in _ON_CPU if device == "cpu" else _ON_GPU:
        if count <= row.most_parameters and cohort >= row.least_cohort and row.has_convolutions >= has_convolutions:
            return min(cohort, row.clients), row.gain
    return 1, 1.0


def _first_batch(population: Population, schedule: Schedule) -> tuple[Any, bool]:
    for visit in schedule.cohort(0, population.clients).visits:
        try:
            planned = PlannedVisit(visit, population.num_samples(visit.client), 1)
            if planned.num_samples < 2:  # BatchNorm needs two examples
                continue
            seed_everything(visit.seed)
            with detect_draws() as has_drawn:
                item = next(population.stream([planned], isolated=True))
        except Exception as error:
            _log.debug("Client %r has no batch for the trial step: %s", visit.client, describe(error))
            continue
        if item.error is None and item.batch is not None:
            return item.batch, has_drawn[0]
    raise Obstacle("no client in the first round has a batch for the trial step")
