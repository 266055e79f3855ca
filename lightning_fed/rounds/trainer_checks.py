"""Checks of a Trainer: what cannot be right in a round is refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)

from lightning_fed.rounds.lightning_internals import callbacks_of, datamodule_of, is_overridden
from lightning_fed.rounds.synchronisation import process_group_of

_REFUSED: dict[type[L.Callback], str] = {
    BatchSizeFinder: "it would tune on the first client's batches: tune with a plain `L.Trainer` first",
    LearningRateFinder: "it would tune on the first client's batches: tune with a plain `L.Trainer` first",
    StochasticWeightAveraging: "it edits the training loop and would average clients: use `WeightAveraging`"
    " (from Lightning 2.6 on), which averages the global models here, or a rule of the server",
    ModelPruning: "it renames entries of the module between rounds, which clients would not know: prune the trained"
    " model with `torch.nn.utils.prune`",
    GradientAccumulationScheduler: "its windows would straddle two clients: use a larger batch size",
}


def find_loader_owner(trainer: L.Trainer, module: L.LightningModule) -> L.LightningDataModule | L.LightningModule:
    """The datamodule or module whose ``train_dataloader`` the Trainer will call.

    Raises:
        MisconfigurationException: If there is none.

    """
    datamodule: L.LightningDataModule | None = datamodule_of(trainer)
    if datamodule is not None and is_overridden("train_dataloader", datamodule):
        return datamodule
    if is_overridden("train_dataloader", module):
        return module
    raise MisconfigurationException(
        "Expected training data: loaders or data sets that are handed to `fit`, a datamodule, or the module's own"
        " `train_dataloader`. If loaders were handed to `fit`, `Federation` has not found them in this version of"
        " Lightning: hand over `datamodule=lightning_fed.data.LoaderDataModule(train, val)`."
    )


def add_callbacks(trainer: L.Trainer, callback: L.Callback, needed: Iterable[L.Callback]) -> None:
    """Adds the callbacks of whose kind the Trainer has none, right behind ``callback``."""
    callbacks = callbacks_of(trainer)
    for addition in needed:
        if not any(isinstance(present, type(addition)) for present in callbacks):
            callbacks.insert(callbacks.index(callback) + 1, addition)


def put_first(trainer: L.Trainer, callback: L.Callback, kind: type[L.Callback]) -> None:
    """Moves a callback to the front, so that for all others a visit has begun before its first batch.

    Args:
        trainer: The Trainer, which may be in a loop over its callbacks.
        callback: The callback.
        kind: Its kind.

    Raises:
        MisconfigurationException: If there are more of its kind.

    """
    callbacks = callbacks_of(trainer)
    if sum(isinstance(present, kind) for present in callbacks) > 1:
        raise MisconfigurationException(f"Expected one `{kind.__name__}` callback, but the Trainer has more.")
    callbacks.remove(callback)
    callbacks.insert(0, callback)


def check_trainer(trainer: L.Trainer, local_steps: int | None, stragglers: float) -> None:
    """Refuses what cannot be right when one epoch is one round of several clients.

    Args:
        trainer: The Trainer.
        local_steps: Batches per visit, if that is how work is counted.
        stragglers: Fraction of stragglers.

    Raises:
        MisconfigurationException: With what to do instead.

    """
    if trainer.world_size > 1 and process_group_of(trainer).size == 1:
        raise MisconfigurationException(
            f"`Federation` trains the clients of a round one after another in one process, but the Trainer has"
            f" {trainer.world_size}: use strategy='client_parallel', which shares the clients out to them, or"
            " `devices=1`."
        )
    interval = getattr(trainer, "val_check_interval", None)
    if interval != 1.0 or isinstance(interval, int) or trainer.check_val_every_n_epoch is None:  # 1 is "every batch"
        raise MisconfigurationException(
            "Validation inside a round would validate one client's model: leave `val_check_interval` at 1.0 and use"
            f" `check_val_every_n_epoch` to validate every n rounds, but got"
            f" val_check_interval={interval!r} and"
            f" check_val_every_n_epoch={trainer.check_val_every_n_epoch!r}."
        )
    overfit = trainer.overfit_batches  # type: ignore[attr-defined]
    if overfit:
        raise MisconfigurationException(
            "`overfit_batches` would take other batches in every round, because each has clients, and an order, of its"
            " own. To see whether the model can overfit, give a plain `L.Trainer` a few batches, or `Federation` one"
            " client with few examples; `limit_train_batches` makes the rounds short. Leave `overfit_batches` at 0, but"
            f" got overfit_batches={overfit!r}."
        )
    window = trainer.accumulate_grad_batches
    if window > 1 and (local_steps is None or local_steps % window or stragglers):
        raise MisconfigurationException(
            f"`accumulate_grad_batches={window}` would let a window straddle two clients: set `local_steps` to a"
            f" multiple of {window} (without stragglers), or use a {window} times larger batch size instead."
        )
    for callback in callbacks_of(trainer):
        for refused, reason in _REFUSED.items():
            if isinstance(callback, refused):
                raise MisconfigurationException(f"`{type(callback).__name__}` does not work in a federation: {reason}.")


def check_schedulers(trainer: L.Trainer) -> None:
    """Refuses per-step schedulers that would count batches across clients.

    Raises:
        MisconfigurationException: With what to do instead.

    """
    for config in trainer.lr_scheduler_configs:
        if config.interval != "step":
            continue
        if config.frequency != 1:
            raise MisconfigurationException(
                "A per-step scheduler with a `frequency` counts batches across clients: use frequency=1 (it starts anew"
                f" in every visit) or interval='epoch' (per round), but got frequency={config.frequency}."
            )
        if config.reduce_on_plateau:
            raise MisconfigurationException(
                "`ReduceLROnPlateau` with interval='step' would watch one client's batches: use interval='epoch'."
            )
