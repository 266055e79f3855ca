"""Checks of the Trainer's settings, and of a checkpoint before a fit resumes."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor
from torch.optim import LBFGS

from lightning_fed.data.population import PlannedVisit
from lightning_fed.lazy_names import load_feature
from lightning_fed.lightning.internals import callbacks_of, datamodule_of, find_callbacks, is_overridden
from lightning_fed.messages import Client
from lightning_fed.model.entries import find_implausible
from lightning_fed.process_group import ClientSharing, process_group_of

_log = logging.getLogger(__name__)

_REFUSED: dict[type[L.Callback], str] = dict.fromkeys(
    (BatchSizeFinder, LearningRateFinder),
    "the search trains some steps without the Trainer's callbacks, and so outside visits: tune with a plain `L.Trainer`"
    " first",
)

_REFUSED_INSIDE: dict[type[L.Callback], str] = {
    **_REFUSED,
    StochasticWeightAveraging: "the callback replaces the schedules of optimizers, which every visit creates "
    "anew, and adds an epoch without training: use `WeightAveraging` (from Lightning 2.6 on) with a `should_update` "
    "that is true for `epoch_idx` from the first averaged round on, and torch's `SWALR` in `configure_optimizers`",
    ModelPruning: "the callback renames entries of the module between rounds, but server and clients identify "
    "entries by name: prune the trained model with `torch.nn.utils.prune`",
}


_NO_DATA = (
    "Expected training data: loaders or data sets passed to `fit`, a datamodule, or the module's `train_dataloader`, "
    "but found none. If loaders were passed to `fit`, `Federation` cannot find them in this version of Lightning: pass "
    "`datamodule=lightning_fed.data.LoaderDataModule(train, val)`."
)


def find_loader_owner(
    trainer: L.Trainer, module: L.LightningModule, reason: str = _NO_DATA
) -> L.LightningDataModule | L.LightningModule:
    """Returns the datamodule or module that has ``train_dataloader``. Otherwise raises an error with ``reason``."""
    for owner in (datamodule_of(trainer), module):
        if owner is not None and is_overridden("train_dataloader", owner):
            return owner
    raise MisconfigurationException(reason)


def add_callbacks(trainer: L.Trainer, callback: L.Callback, needed: Iterable[L.Callback]) -> None:
    """Adds missing callbacks to the Trainer, directly after ``callback``."""
    callbacks = callbacks_of(trainer)
    for addition in needed:
        if not any(isinstance(present, type(addition)) for present in callbacks):
            callbacks.insert(callbacks.index(callback) + 1, addition)


def put_first(trainer: L.Trainer, callback: L.Callback, kind: type[L.Callback]) -> None:
    """Moves ``callback`` before the Trainer's other callbacks. Refuses a second callback of class ``kind``."""
    callbacks = callbacks_of(trainer)
    if sum(isinstance(present, kind) for present in callbacks) > 1:
        raise MisconfigurationException(f"Expected one `{kind.__name__}` callback, but the Trainer has several.")
    # Lightning may be iterating over this list.
    callbacks.remove(callback)
    callbacks.insert(0, callback)


def check_processes(trainer: L.Trainer, is_alone: bool) -> None:
    """Refuses several processes, unless the strategy supports these."""
    if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy if is_alone else ClientSharing):
        raise MisconfigurationException(
            "`Federation` trains the clients of a round one after another in one process, but the Trainer has "
            f"{trainer.world_size} processes: use strategy='client_parallel' (divides the clients), `devices=1`, or, "
            "for a single client (`partition=IID(1)`), strategy='ddp' with averaging, optimizer_state='keep' and "
            "batch_norm='average'."
        )


def check_round(trainer: L.Trainer, visits: Sequence[PlannedVisit], num_clients: int) -> None:
    """Refuses Trainer settings that do not fit the number of batches per client and round.

    For example, this number must be a multiple of ``accumulate_grad_batches``. A single client needs fewer checks.
    """
    if any(planned.epoch_batches is None for planned in visits):
        _check_shares(trainer, "overfit_batches")
    schedules = find_callbacks(trainer, GradientAccumulationScheduler)
    windows = [trainer.accumulate_grad_batches, *(size for rule in schedules for size in rule.scheduling.values())]
    for window in windows:
        for planned in visits:
            lengths = planned.pass_batches or (planned.epoch_batches or 0,)
            for length in lengths if planned.visit.steps is None and planned.num_batches > lengths[0] else ():
                if length % window:
                    _refuse_window(window, f"{length} in an epoch of client {planned.visit.client!r}", "local epochs")
    if num_clients == 1:
        if any(planned.is_stream for planned in visits):
            _check_shares(trainer, "limit_train_batches", "val_check_interval")
        return
    for window in windows:
        for planned in visits[:-1]:
            if planned.num_batches % window:
                visit = f"{planned.num_batches} in a round of client {planned.visit.client!r}"
                _refuse_window(window, visit, "clients")


def _refuse_window(window: int, odd: str, between: str) -> None:
    raise MisconfigurationException(
        f"Expected the number of batches to be a multiple of `accumulate_grad_batches` ({window}), but got {odd}. "
        f"An optimizer step would use batches from two {between}. Without stragglers, set `local_steps` to a multiple "
        f"of {window}. Otherwise use a {window} times larger batch size instead of accumulation."
    )


def _check_shares(trainer: L.Trainer, *names: str) -> None:
    for name in names:
        share = getattr(trainer, name, None)
        if isinstance(share, float) and share not in (0.0, 1.0):
            raise MisconfigurationException(
                f"Expected `{name}` to be 1.0 or a number of batches, because the training data have no known length, "
                f"but got the fraction {share}."
            )


def validate_after_rounds(
    trainer: L.Trainer, visits: Sequence[PlannedVisit], known: dict[float, int], revert: Callable[..., object]
) -> None:
    """Converts ``val_check_interval`` from batches to rounds, to validate only after complete rounds.

    ``visits`` are a round's local trainings. ``known`` caches the number of rounds by interval.
    ``revert(function, *arguments)`` registers a call that restores the Trainer's settings after the fit.
    """
    interval, every = getattr(trainer, "val_check_interval", None), trainer.check_val_every_n_epoch
    if interval is None:
        raise MisconfigurationException(
            "Expected `val_check_interval` to be a number of batches or a share of a round, because validation follows "
            "complete rounds, but got a duration: use `check_val_every_n_epoch` to validate every n rounds."
        )
    if interval == 1.0 and not isinstance(interval, int):
        return
    num_batches = sum(process_group_of(trainer).gather(sum(planned.num_batches for planned in visits)))
    if not num_batches or (every is not None and interval > num_batches):  # Lightning raises an error
        return
    rounds = every or known.setdefault(interval, max(1, interval // num_batches))
    revert(setattr, trainer, "val_check_interval", interval)
    revert(setattr, trainer, "check_val_every_n_epoch", every)
    trainer.val_check_interval, trainer.check_val_every_n_epoch = 1.0, rounds
    if trainer.is_global_zero:
        _log.info(
            "val_check_interval=%r: the number of rounds between validations is %d, because inside a round the module "
            "contains the model of one client.",
            interval,
            rounds,
        )


def check_trainer(trainer: L.Trainer, is_plain: bool, keeps_optimizers: bool) -> None:
    """Refuses Trainer settings and callbacks that do not work in a federated fit.

    ``is_plain`` is true for a federation with one client, which needs fewer checks.
    """
    if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
        raise MisconfigurationException(
            "`training_step(self, dataloader_iter)` fetches batches itself, but a client's visit must begin before "
            "its first batch: use `training_step(self, batch, batch_idx)` instead."
        )
    for callback in callbacks_of(trainer):
        for refused, reason in (_REFUSED if is_plain else _REFUSED_INSIDE).items():
            if isinstance(callback, refused):
                raise MisconfigurationException(f"`{type(callback).__name__}` does not work in a federation: {reason}.")
        if isinstance(callback, ModelCheckpoint) and not is_plain:
            _check_saver(callback)
    if not is_plain:
        _check_optimizers(trainer, keeps_optimizers)


def _check_optimizers(trainer: L.Trainer, keeps_optimizers: bool) -> None:
    if keeps_optimizers and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            "The state of LBFGS contains lists of past steps, which cannot be stored for a client: use "
            "optimizer_state='reset'."
        )
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and (config.frequency != 1 or config.reduce_on_plateau):
            raise MisconfigurationException(
                "Expected a per-step scheduler with frequency=1, other than ReduceLROnPlateau, but got frequency="
                f"{config.frequency} and {type(config.scheduler).__name__}. The scheduler restarts for every client: "
                "use frequency=1 and no ReduceLROnPlateau, or interval='epoch' (one step per round)."
            )


def _check_saver(saver: ModelCheckpoint) -> None:
    is_inside = saver.every_n_epochs == 0 or getattr(saver, "save_on_exception", False)  # new in Lightning 2.6
    if not is_inside or saver.save_top_k == 0:
        return
    name = "{epoch}-{step}" if saver.filename is None else saver.filename
    fault = f"monitor={saver.monitor!r}" if saver.monitor is not None else f"filename={name!r}" if "{" in name else ""
    if fault:
        raise MisconfigurationException(
            f"Expected `ModelCheckpoint` with {fault} to save only after rounds. Inside a round, this value belongs to "
            "the current batch, but the saved model belongs to the last complete round. Set `every_n_epochs=1`. To "
            "save inside rounds, use `ModelCheckpoint(every_n_train_steps=100, save_last=True, save_top_k=0)`. To save "
            "after an exception, use `OnExceptionCheckpoint` instead of `save_on_exception`. Only fits that combine a "
            "single client, averaging and optimizer_state='keep' are exempt."
        )


def _build_client_parallel(**options: Any) -> Any:
    return load_feature("lightning_fed.backends.client_parallel.strategy").ClientParallelStrategy(**options)


StrategyRegistry.register(
    "client_parallel",
    _build_client_parallel,
    description="Federated training with clients in several processes.",
)


# Checkpoints

_LOAD_WEIGHTS = '`model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])`'


def check_file(path: str | os.PathLike[str] | None) -> None:
    """Verifies the checksums in a checkpoint file. A damaged file raises ``ValueError``."""
    # `torch.load` ignores the checksums.
    if path is None or not (zipfile.is_zipfile(path) and torch.serialization.get_crc32_options()):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: {error}. Resume from another checkpoint."
        ) from error
    if damaged is not None:
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: the bytes of {damaged!r} have changed since they were written. "
            "Resume from another checkpoint."
        )


def check_model(state: Mapping[str, Tensor]) -> None:
    """Refuses an initial global model with NaN or infinite values, or with negative variances."""
    fault = find_implausible(state)
    if fault is not None:
        raise MisconfigurationException(
            f"The fit would start from a model that no client can train: {fault}. If the model comes from a "
            "checkpoint, resume from an earlier one. If the tensor is a constant with infinite values, register the "
            "tensor as a buffer (such buffers are not sent to clients), or name the tensor in `frozen`."
        )


def check_option(name: str, then: str, now: str) -> None:
    """Raises an error if an option's value ``now`` differs from the checkpoint's value ``then``."""
    if then and then != now:
        raise ValueError(
            f"Expected `{name}` to be {then}, as in the checkpoint, but got {now}: resume with the same value, or "
            f"start a new fit from the model's weights: {_LOAD_WEIGHTS}."
        )


def warn_of_batch_norm_option(then: str, now: str) -> None:
    """Warns if training used another ``batch_norm`` option (``then``) than this evaluation (``now``)."""
    if then and then != now:
        _log.warning(
            "The checkpoint's scores were measured with batch_norm=%s, but this evaluation uses %s: set "
            "batch_norm=%s to reproduce the scores.",
            then,
            now,
            then,
        )


def check_steps(then: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Refuses to resume a fit with other update steps (compression, noise) or privacy callbacks.

    ``then`` (from the checkpoint) and ``now`` map names of steps and callbacks to options as text. Order and options
    must be equal.
    """
    old = "which the checkpoint does not record" if then is None else ", ".join(then.values()) or "none"
    new = ", ".join(now.values()) or "none"
    if then is None or list(then.items()) != list(now.items()):
        raise ValueError(
            f"Expected the update steps of the checkpoint, {old}, but got {new}. Changed steps would make the fit's "
            "bounds, noise and epsilon invalid. Resume with the same steps, or start a new fit from the model's "
            f"weights (the new epsilon does not include the old rounds): {_LOAD_WEIGHTS}."
        )


def describe_clients(clients: Sequence[Client]) -> str:
    """Returns a text for checkpoints, with the number of clients and a hash of the names."""
    if isinstance(clients, range):
        return f"{len(clients)} clients {clients}"
    if not isinstance(clients, list | tuple):  # a lazy sequence may be too long to read
        return f"{len(clients)} clients"
    hasher = hashlib.sha256()
    for client in clients:
        hasher.update(f"{client!r},".encode(errors="surrogatepass"))
    return f"{len(clients)} clients {hasher.hexdigest()[:16]}"


def count_of(description: Any) -> str:
    """Returns the number of clients in a text from :func:`describe_clients`."""
    return str(description).partition(" ")[0]
