"""Whether the visits of a fit can be trained at once: what is known to forbid it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_fed.backends.vectorized.stacked_model import StackedModel
from lightning_fed.backends.vectorized.vectorisation_check import Obstacle, try_out
from lightning_fed.data.interleave import detect_draws
from lightning_fed.data.population import PlannedVisit, Population, seed_everything, seeded_generators
from lightning_fed.data.round_loader import VisitGroups, describe
from lightning_fed.model.entries import Policy
from lightning_fed.rounds.callback import FederatedCallback
from lightning_fed.server.schedule import Schedule
from lightning_fed.server.server import Aggregator

_BATCH_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)
_MODULE_HOOKS = (
    *(*_BATCH_HOOKS, "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("lr_scheduler_step", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
_DATA_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_VISIT_HOOKS = (
    *(
        "on_client_request",
        "on_server_send",
        "on_client_receive",
        "on_client_start",
        "on_client_batch",
        "on_client_end",
        "on_server_receive",
    ),
    "on_client_visit_end",
)
_log = logging.getLogger(__name__)


def plan_visit_groups(
    size: int,
    trainer: L.Trainer,
    module: L.LightningModule,
    population: Population,
    schedule: Schedule,
    policies: Mapping[str, Policy],
    aggregator: Aggregator,
    optimizer_state: str,
) -> tuple[VisitGroups, StackedModel] | None:
    """What it takes to train visits at once; ``None``, with the reason in the log, where that is not possible.

    Args:
        size: At most how many visits.
        trainer: The Trainer.
        module: The module, which holds the global model.
        population: The clients' data.
        schedule: Who takes part.
        policies: The policy of every entry of the module.
        aggregator: The server's rule.
        optimizer_state: Whether clients start with fresh optimizer state or with their own.

    """
    own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    names = [name for name in own if policies.get(name) != "frozen"]
    try:
        check_vectorizable(trainer, module, policies, aggregator, optimizer_state)
        check_entries(module, names)
        if "groups" not in inspect.signature(population.stream).parameters:
            raise Obstacle(f"`{type(population).__name__}.stream` has no argument `groups`")
        with seeded_generators():
            batch, has_drawn = _first_batch(population, schedule)
            draws = try_out(trainer, module, names, batch)
    except Obstacle as obstacle:
        _log.warning("`vectorize=%d`: the clients train one after another all the same, because %s.", size, obstacle)
        return None
    is_equal = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
    size = min(size, schedule.cohort_size(len(population.clients)))  # a stack has room for as many models
    return VisitGroups(size, is_equal, has_drawn), StackedModel(module, names, size, draws)


def _first_batch(population: Population, schedule: Schedule) -> tuple[Any, bool]:
    """A batch of a client's, and whether its data drew from Python's or NumPy's random numbers."""
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


def check_vectorizable(
    trainer: L.Trainer,
    module: L.LightningModule,
    policies: Mapping[str, Policy],
    aggregator: Aggregator,
    optimizer_state: str,
) -> None:
    """Looks at what the fit consists of.

    Args:
        trainer: The Trainer.
        module: The module.
        policies: The policy of every entry of the module.
        aggregator: The server's rule.
        optimizer_state: Whether clients start with fresh optimizer state or with their own.

    Raises:
        Obstacle: If it is known that visits cannot be trained at once.

    """
    clips = trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value"
    owned = [name for name, policy in policies.items() if policy == "sliced"]
    obstacles = {
        "manual optimization steps one client's model": not module.automatic_optimization,
        "there is not one optimizer": len(trainer.optimizers) != 1,
        "several processes share the clients": trainer.world_size > 1,
        f"{type(trainer.strategy).__name__} is not for one device alone": (
            not isinstance(trainer.strategy, SingleDeviceStrategy)
        ),
        f"the precision {trainer.precision!r} scales the loss of all clients alike": (
            bool(trainer.precision_plugin.state_dict())
        ),
        "clipping by norm would take the norm over all clients (use gradient_clip_algorithm='value')": bool(clips),
        "`optimizer_state='keep'` gives every client another count of steps": optimizer_state == "keep",
        "`max_steps` counts the steps of one client after another": trainer.max_steps != -1,
        "`limit_train_batches` counts the batches of one client after another": trainer.limit_train_batches != 1.0,
        f"{type(aggregator).__name__} gives clients models of other shapes": aggregator.resizes,
        f"clients hold some rows of {owned[:1]} only": bool(owned),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise Obstacle(obstacle)
    _check_hooks(module, _MODULE_HOOKS, L.LightningModule)
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        _check_hooks(datamodule, _DATA_HOOKS, L.LightningDataModule)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if not getattr(callback, "takes_stacks", False):
            _check_hooks(callback, _BATCH_HOOKS, L.Callback)
            if isinstance(callback, FederatedCallback):
                _check_hooks(callback, _VISIT_HOOKS, FederatedCallback)


def check_entries(module: nn.Module, names: Iterable[str]) -> None:
    """Looks at the parameters and buffers that a client may have of its own.

    Raises:
        Obstacle: If it is known that they cannot be stacked.

    """
    known = set(names)
    places: dict[int, str] = {}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if name not in known:
            continue
        if getattr(value, "_post_accumulate_grad_hooks", None):
            raise Obstacle(f"a hook of the parameter {name!r} would see the gradients of all clients")
        if value.numel():
            other = places.setdefault(value.untyped_storage().data_ptr(), name)
            if other != name:
                raise Obstacle(f"{other!r} and {name!r} are two tensors that share their memory, which would be parted")


def _check_hooks(owner: Any, hooks: Iterable[str], base: type) -> None:
    for hook in hooks:
        if not is_overridden(hook, owner, base):
            continue
        first = next((each for each in type(owner).__mro__ if hook in vars(each)), base)
        is_lightnings = (
            first.__module__.startswith("lightning.") and type(owner) is not L.pytorch.callbacks.LambdaCallback
        )
        if not is_lightnings:
            raise Obstacle(f"`{type(owner).__name__}.{hook}` is written for one client's batch or model")
