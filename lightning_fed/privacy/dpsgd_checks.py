"""Checks for :class:`~lightning_fed.privacy.DPSGD`: refuses modules and Trainers without a privacy guarantee."""

from __future__ import annotations

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_fed.callbacks.federation import Federation
from lightning_fed.callbacks.training_trace import optimized_parameters
from lightning_fed.federated_callback import FederatedCallback, federated_callbacks
from lightning_fed.lightning.internals import find_callbacks, is_compiled, is_overridden
from lightning_fed.model.entries import tensor_slots, tensors_by_path
from lightning_fed.privacy.gradients import find_unsupported
from lightning_fed.process_group import process_group_of

_PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_CLIENT_HOOKS = (
    "on_client_request", "on_client_receive", "on_client_start", "on_client_batch", "on_client_end",
)  # fmt: skip


HANDED_LOADER = (
    "Expected training data in a datamodule or in the module's `train_dataloader`, but got a loader in"
    " `L.Trainer.fit(model, train_dataloaders=...)`, which `DPSGD` cannot replace: use a datamodule, for example"
    " `L.LightningDataModule.from_datasets(train_dataset, batch_size=64)`."
)


def check_trainer(trainer: L.Trainer, module: L.LightningModule, ends_early: bool) -> None:
    """Refuses Trainers and modules unsupported by DP-SGD. With ``ends_early`` a privacy budget may end the fit."""
    names = [slot.path for slot in tensor_slots(module) if isinstance(slot.tensor, nn.Parameter)]
    tied = set(names) - tensors_by_path(module).keys()
    parameters = set(map(id, module.parameters()))
    refused = {
        "automatic optimization, because manual steps would have no noise": not module.automatic_optimization,
        f"accumulate_grad_batches=1, but got {trainer.accumulate_grad_batches} or a schedule: use larger batches": (
            trainer.accumulate_grad_batches != 1 or bool(find_callbacks(trainer, GradientAccumulationScheduler))
        ),
        f"no `gradient_clip_val`, but got {trainer.gradient_clip_val}: `max_grad_norm` clips gradients per example": (
            bool(trainer.gradient_clip_val)
        ),
        f"a precision from {list(_PRECISIONS)}, but got {trainer.precision!r}": trainer.precision not in _PRECISIONS,
        "an uncompiled module": is_compiled(module),
        "one process, or strategy='client_parallel'": (trainer.world_size > 1 and process_group_of(trainer).size == 1),
        "no `overfit_batches`, because every step draws its examples": bool(trainer.overfit_batches),  # type: ignore[attr-defined]
        "an optimizer with one loss per step, unlike LBFGS": (
            any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers)
        ),
        "optimizers with only parameters of the module, because other parameters would train without noise": (
            not optimized_parameters(trainer) <= parameters
        ),
        "no `min_epochs` and `min_steps` with `max_epsilon`, because the budget may end the fit earlier": (
            ends_early and bool(trainer.min_epochs or trainer.min_steps)
        ),
        f"no parameters in several layers, but got {sorted(tied)[:1]}": bool(tied),
    }
    for expected, is_refused in refused.items():
        if is_refused:
            raise MisconfigurationException(f"`DPSGD` needs {expected}.")
    unsupported = find_unsupported(module)
    if unsupported:
        raise MisconfigurationException(
            "`DPSGD` needs layers that treat examples independently and have per-example gradients, but got "
            f"{', '.join(unsupported[:5])}. `lightning_fed.modules.to_group_norm` replaces BatchNorm, and "
            "`opacus.layers` replaces LSTM, GRU and attention."
        )


def check_federation(trainer: L.Trainer, federation: Federation, own: FederatedCallback) -> None:
    """Refuses simultaneous training, `CentralDP`, and callbacks able to send values without noise."""
    if federation.options.visits_at_once is not None:
        raise MisconfigurationException(
            f"`DPSGD` needs clients to train one after another, but got visits={federation.options.visits}."
        )
    if federation.server.chain.reveals == "model":
        raise MisconfigurationException(
            "Expected only one of `DPSGD` and `CentralDP`, but got both: `DPSGD` computes epsilon from the "
            "clients' step counts, which `CentralDP` hides."
        )
    for callback in federated_callbacks(trainer):
        if callback is own or getattr(callback, "keeps_privacy", False):
            continue
        for hook in _CLIENT_HOOKS:
            if is_overridden(hook, callback, FederatedCallback):
                raise MisconfigurationException(
                    f"`{type(callback).__name__}.{hook}` may send values computed from a client's examples, or write "
                    "such values into the model, without noise: use a method supported by `DPSGD` ('fedavg', "
                    "'fedprox', 'scaffold', 'fednova', 'feddyn', 'fedper', server optimizers and robust rules). If "
                    "your callback reads models but no examples, set the class attribute `keeps_privacy = True`."
                )
