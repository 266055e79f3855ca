"""Counts the steps of a learning-rate scheduler in a federated fit."""

from __future__ import annotations

import logging

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.messages import Client
from lightning_fed.server.schedule import count_visit_batches

_log = logging.getLogger(__name__)
_COUNTED_CLIENTS = 1000


def count_scheduler_steps(fit: FederatedFit, rounds: int, window: int) -> int:
    """Returns the highest step that any client's per-step learning-rate scheduler reaches in ``rounds`` rounds.

    A new round continues from the client with the median number of steps. ``window`` is ``accumulate_grad_batches``.
    """
    sizes: dict[Client, int] = {}
    steps = furthest = 0
    for round in range(rounds):
        cohort = fit.server.rule.draw_cohort(round, fit.schedule, fit.population)
        visits = fit.schedule.served(cohort).visits
        for client in {visit.client: None for visit in visits}.keys() - sizes.keys():
            sizes[client] = _batches_per_epoch(fit, client)
        lengths = sorted(
            -(-count_visit_batches(visit, sizes[visit.client]) // window) for visit in visits if sizes[visit.client]
        )
        if lengths:
            furthest = max(furthest, steps + lengths[-1])
            steps += lengths[(len(lengths) - 1) // 2]
    return furthest


def check_estimate(fit: FederatedFit) -> None:
    """Warns if ``trainer.estimated_stepping_batches`` is wrong for a per-step scheduler."""
    trainer = fit.trainer
    is_manual = not fit.module.automatic_optimization
    if not any(is_manual or config.interval == "step" for config in trainer.lr_scheduler_configs):
        return
    estimate = steps = trainer.estimated_stepping_batches
    if len(fit.population.clients) > _COUNTED_CLIENTS:  # requesting the size of every client may take long
        _log.warning(
            "`trainer.estimated_stepping_batches` (%s) counts the steps of all clients, which is more than a "
            "per-step scheduler makes in this fit: pass `lightning_fed.scheduler_steps(trainer)` to the scheduler "
            "instead.",
            estimate,
        )
        return
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        steps = count_scheduler_steps(fit, trainer.max_epochs, trainer.accumulate_grad_batches)
    if estimate != steps:
        _log.warning(
            "`trainer.estimated_stepping_batches` (%s) counts the steps of all clients, but a round advances a "
            "per-step scheduler only by the median number of steps in a client's training, so in this fit the "
            "scheduler makes %s steps: pass `lightning_fed.scheduler_steps(trainer)` to the scheduler instead.",
            estimate,
            steps,
        )


def _batches_per_epoch(fit: FederatedFit, client: Client) -> int:
    try:
        length = fit.population.batches_per_epoch(client)
        return 1 if length is None else length
    except MisconfigurationException:
        raise
    except Exception:  # a round with this client will exclude the client
        return 0
