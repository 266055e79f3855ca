"""Checks FedMA's options and optimizers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping

from lightning_fed.callbacks.federation import Federation
from lightning_fed.client.local_model import LocalModel
from lightning_fed.errors import OptionError
from lightning_fed.lightning.internals import callbacks_of
from lightning_fed.model.entries import layer_prefixes

_log = logging.getLogger(__name__)


def check_options(federation: Federation, local: LocalModel, module: L.LightningModule) -> None:
    """Refuses settings without support in FedMA."""
    prefixes = set(layer_prefixes(module).values())
    unknown = [name for name in local.shared if name.removesuffix(name.rpartition(".")[2]) not in prefixes]
    if unknown:
        raise MisconfigurationException(
            f"Expected entry names `<layer>.<tensor>` for FedMA, but `{type(module).__name__}.state_dict()` has"
            f" {len(unknown)} other names, such as {unknown[0]!r}: keep PyTorch's names."
        )
    if federation.options.optimizer_state == "keep":
        raise MisconfigurationException(
            "Expected optimizer_state='reset' with FedMA, but got 'keep': each stage changes the neurons."
        )
    if local.sliced:
        raise MisconfigurationException(
            f"FedMA needs all rows of {list(local.sliced)}, but clients hold only some rows: remove `SampledSoftmax`."
        )
    if not local.shared:
        raise MisconfigurationException("Expected shared entries, but got none: all entries are personal or frozen.")


def check_optimizers(trainer: L.Trainer, grows: bool) -> None:
    """Refuses optimizers with a state before the first step. With ``grows`` (FedMA adds neurons) also refuses LBFGS."""
    if any(optimizer.state for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            "Expected an optimizer without state before the first step (unlike Adagrad), because FedMA changes widths:"
            " use another optimizer."
        )
    if grows and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            "Expected an optimizer other than LBFGS for FedMA, because LBFGS stores parameter sizes, which change "
            "within a pass: use mode='permute', stages=1, or another optimizer."
        )


def check_growth(
    shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]], growable: Mapping[str, Sequence[int]]
) -> None:
    """Refuses a checkpoint with changed lengths on axes that FedMA cannot extend."""
    for name, (shape, loaded) in shapes.items():
        axes = [axis for axis, (a, b) in enumerate(zip(shape, loaded, strict=False)) if a != b]
        if not set(axes) <= set(growable.get(name, ())):
            raise OptionError(
                f"Expected a checkpoint with the module's shapes, except for neurons that FedMA added, but {name!r} has"
                f" shape {tuple(loaded)} in the checkpoint, and {tuple(shape)} in the module."
            )


def warn_of_rounds(trainer: L.Trainer, length: int) -> None:
    """Warns if a fit may end in the middle of a matching pass. ``length`` is the number of rounds per pass."""
    rounds = trainer.max_epochs or -1
    if rounds > 0 and rounds % length:
        _log.warning(
            "A FedMA pass takes %d rounds: the last %d of %d rounds give no new model.",
            length,
            rounds % length,
            rounds,
        )
    for callback in callbacks_of(trainer):
        if isinstance(callback, EarlyStopping) and callback.patience < length:
            _log.warning(
                "EarlyStopping has a patience of %d, but a new model only appears every %d rounds: set the patience "
                "to at least the length of a pass.",
                callback.patience,
                length,
            )
