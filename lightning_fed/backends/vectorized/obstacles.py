"""Checks if a model and settings allow simultaneous training of several clients with ``torch.func.vmap``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lightning_fed.federated_callback import VISIT_HOOKS, FederatedCallback
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import (
    BATCH_HOOKS,
    TRANSFER_HOOKS,
    callbacks_of,
    datamodule_of,
    has_gradient_hooks,
    is_overridden,
    loss_scaler,
)
from lightning_fed.model.entries import tensors_by_path

_MODULE_HOOKS = (
    *(*BATCH_HOOKS, "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("lr_scheduler_step", *TRANSFER_HOOKS),
)


class Obstacle(Exception):
    """Raised, with the reason, if clients cannot train simultaneously with ``torch.func.vmap``."""


def check_vectorizable(fit: FederatedFit) -> None:
    """Raises ``Obstacle`` if clients cannot train simultaneously with this module, method or setting."""
    trainer, module, rule = fit.trainer, fit.module, fit.server.rule
    clips = trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value"
    sliced = [name for name, policy in fit.policies.items() if policy == "sliced"]
    obstacles = {
        "the module uses manual optimization, which steps only one client's model": not module.automatic_optimization,
        "the module does not have exactly one optimizer": len(trainer.optimizers) != 1,
        "several processes share the clients, and a group of clients must be in one process": trainer.world_size > 1,
        f"the strategy {type(trainer.strategy).__name__} is not a single-device strategy": (
            not isinstance(trainer.strategy, SingleDeviceStrategy)
        ),
        f"with precision {trainer.precision!r} all clients would share one loss scale": (
            loss_scaler(trainer) is not None
        ),
        "clipping by norm would take the norm over all clients (use gradient_clip_algorithm='value')": bool(clips),
        "with `optimizer_state='keep'` the clients have different step counts": fit.options.optimizer_state == "keep",
        "`max_steps` counts steps across sequential clients": trainer.max_steps != -1,
        "`limit_train_batches` counts batches across sequential clients": trainer.limit_train_batches != 1.0,
        f"with {type(rule).__name__} clients can have models of different shapes": rule.resizes,
        f"clients hold only some rows of {sliced[:1]}": bool(sliced),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise Obstacle(obstacle)
    _check_hooks(module, _MODULE_HOOKS, L.LightningModule)
    datamodule = datamodule_of(trainer)
    if datamodule is not None:
        _check_hooks(datamodule, TRANSFER_HOOKS, L.LightningDataModule)
    for callback in callbacks_of(trainer):
        if not getattr(callback, "supports_vectorize", False):
            _check_hooks(callback, BATCH_HOOKS, L.Callback)
            if isinstance(callback, FederatedCallback):
                _check_hooks(callback, VISIT_HOOKS, FederatedCallback)


def check_entries(module: nn.Module, names: Iterable[str]) -> None:
    """Raises ``Obstacle`` if parameters or buffers in ``names`` cannot be stacked over clients."""
    known = set(names)
    names_by_storage: dict[int, str] = {}
    for name, value in tensors_by_path(module).items():
        if name not in known:
            continue
        if has_gradient_hooks(value):
            raise Obstacle(f"a hook on the parameter {name!r} would receive the gradients of all clients")
        if value.numel():
            first_name = names_by_storage.setdefault(value.untyped_storage().data_ptr(), name)
            if first_name != name:
                raise Obstacle(f"{first_name!r} and {name!r} share memory, and stacking would separate the two tensors")


def _check_hooks(owner: Any, hooks: Iterable[str], base: type) -> None:
    for hook in hooks:
        if not is_overridden(hook, owner, base):
            continue
        definer = next((kind for kind in type(owner).__mro__ if hook in vars(kind)), base)
        is_lightnings = (
            definer.__module__.startswith("lightning.") and type(owner) is not L.pytorch.callbacks.LambdaCallback
        )
        if not is_lightnings:
            raise Obstacle(f"`{type(owner).__name__}.{hook}` expects the batch or model of a single client")
