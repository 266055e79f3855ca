"""Running a user's steps beside the Trainer's own loop without leaving traces in its logs, metrics or modes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_fed.data.population import PlannedVisit, Population, seed_everything
from lightning_fed.schedule import Visit, derive_seed


@contextmanager
def side_pass(
    module: L.LightningModule, log: Callable[..., None] | None = None, gradients: bool = False
) -> Iterator[None]:
    """Evaluation mode, in which logged values and metric updates do not reach the Trainer.

    The module's metrics (``torchmetrics`` objects that are its submodules) are replaced by empty copies meanwhile,
    ``self.log`` by ``log``; modes come back as they were.

    Args:
        module: The user's module.
        log: Called instead of ``module.log``; by default nothing happens.
        gradients: Whether gradients can be asked for.

    """
    modes = [(layer, layer.training) for layer in module.modules()]
    metrics = list(_find_metrics(module))
    vars(module)["log"] = log or _ignore
    try:
        for parent, name, metric in metrics:
            fresh = copy.deepcopy(metric)
            fresh.reset()
            setattr(parent, name, fresh)
        module.eval()
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        for parent, name, metric in metrics:
            setattr(parent, name, metric)
        del vars(module)["log"]
        for layer, mode in modes:
            layer.training = mode


def to_device(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> Any:
    """The batch as a step gets it, with the transfer hooks of the datamodule or else the module."""
    owner: Any = getattr(trainer, "datamodule", None)
    if not is_overridden("on_before_batch_transfer", owner):  # nor if there is none
        owner = module
    batch = owner.on_before_batch_transfer(batch, 0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def prepare_batch(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> Any:
    """The batch as a step gets it: in the Trainer's precision, on its device."""
    return to_device(trainer, module, trainer.precision_plugin.convert_input(batch))


def run_prepared(trainer: L.Trainer, module: L.LightningModule, name: str, batch: Any, batch_idx: int) -> Any:
    """Calls ``module.<name>(batch[, batch_idx])`` with what :func:`prepare_batch` made, in the Trainer's precision."""
    step = getattr(module, name)
    wants_index = len(inspect.signature(step).parameters) > 1
    with trainer.precision_plugin.forward_context():
        return step(batch, batch_idx) if wants_index else step(batch)


def run_step(trainer: L.Trainer, module: L.LightningModule, name: str, batch: Any, batch_idx: int) -> Any:
    """Calls ``module.<name>(batch[, batch_idx])`` with a batch as the loader gave it."""
    with trainer.precision_plugin.forward_context():
        batch = prepare_batch(trainer, module, batch)
    return run_prepared(trainer, module, name, batch, batch_idx)


def forward_step(module: L.LightningModule) -> str | None:
    """The step that runs the module's forward pass without stepping an optimizer; ``None`` if there is none."""
    if module.automatic_optimization:
        return "training_step"
    return "validation_step" if is_overridden("validation_step", module) else None


def one_pass(population: Population, visit: Visit, aside: bool = False) -> Iterator[Any]:
    """One pass over a client's data, in an order of its own that depends on the visit; raises what the data raise.

    Args:
        population: The clients' data.
        visit: The visit whose client's data are asked for.
        aside: Whether a visit is under way, whose batches go on afterwards. The pass is then over all the data where
            their length is known; else over as many batches as a visit has, where visits count steps.

    """
    seed = derive_seed(visit.seed, 1)
    per_epoch = population.batches_per_epoch(visit.client)
    again = Visit(visit.client, visit.round, seed, steps=None if aside and per_epoch else visit.steps)
    planned = PlannedVisit(again, population.num_samples(visit.client), again.num_batches(per_epoch or 1))
    seed_everything(seed)
    for item in population.stream([planned], aside):
        if item.error is not None:
            raise item.error
        if item.batch is not None:
            yield item.batch


def _find_metrics(module: nn.Module) -> Iterator[tuple[nn.Module, str, Metric | MetricCollection]]:
    for name, child in module.named_children():
        if isinstance(child, Metric | MetricCollection):
            yield module, name, child
        else:
            yield from _find_metrics(child)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
