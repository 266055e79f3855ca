"""Everything that leans on what Lightning and torch do not promise, each a function that says what it leans on.

The strategy (:mod:`lightning_fed.backends.client_parallel.strategy`) is the one other place. Each function has a test
in ``tests/lightning/test_internals.py``, which says what has changed in Lightning or torch when it fails.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.data_connector import (  # noqa: TID251 - have no public names
    _resolve_overfit_batches,
    _worker_check,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


BATCH_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)
"""Hooks of callbacks around a batch that trains."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of modules and datamodules on the way of a batch to the device."""


class OverriddenMethod:
    """A method of a user's object, replaced on the instance until :meth:`restore`.

    A copy of the owner that is made meanwhile (``copy.deepcopy(module)``) has its own method. It leans on Lightning
    looking hooks up on the instance, and through ``__wrapped__`` when it asks whether a hook is overridden.

    Args:
        owner: The object.
        name: The method's name.
        replacement: Called instead of it.

    Attributes:
        original: The method that was replaced.

    """

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self.owner = owner
        self.name = name
        self.replacement = replacement
        self.original: Callable[..., Any] = getattr(owner, name)
        self.__wrapped__ = self.original
        self._was_on_instance = name in vars(owner)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the replacement."""
        return self.replacement(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.owner, self.name)  # of the owner's copy

    def restore(self) -> None:
        """Puts the original back."""
        if self._was_on_instance:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


class IgnoredWarning:
    """A warning that comes on purpose and says nothing to the user, ignored until :meth:`restore`.

    It leans on ``warnings.filters`` being a list whose first entry is the newest filter.

    Args:
        message: Regular expression of how the warning begins.
        module: Regular expression of the module that the warning is about; any by default.

    """

    def __init__(self, message: str, module: str = "") -> None:
        # With a comment, since a filter that is equal to another one, of the user or of an outer fit, would replace it.
        warnings.filterwarnings("ignore", f"(?#{id(self)}){message}", module=module)
        self._filter = warnings.filters[0]

    def restore(self) -> None:
        """Lets the warning be shown again; other filters that were added meanwhile stay."""
        filters: list[Any] = warnings.filters  # type: ignore[assignment] # a list, which the types do not say
        if self._filter in filters:
            filters.remove(self._filter)


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """The Trainer's callbacks: the very list that it calls the hooks from, so that callbacks can be added and moved."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def datamodule_of(trainer: L.Trainer) -> Any:
    """The datamodule that was handed to the Trainer, which it keeps as an attribute; ``None`` without one."""
    return getattr(trainer, "datamodule", None)


def handed_data(trainer: L.Trainer) -> tuple[Any, Any]:
    """The training and validation data that were handed to ``fit``, each ``None`` if it was not.

    The fit loop and the validation loop in it keep what they ask for loaders, or the loaders, in their data source.
    Where they have none, the data are not found, and the error says what to do.
    """
    sources = (getattr(loop, "_data_source", None) for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop))
    data = [getattr(source, "instance", None) for source in sources]
    train, val = (None if isinstance(value, L.LightningModule | L.LightningDataModule) else value for value in data)
    return train, val


class HandedDataModule:
    """A datamodule in the place of the data that were handed to ``fit``, until :meth:`restore`.

    Args:
        trainer: The Trainer, of which :func:`handed_data` finds data.
        datamodule: The datamodule with these data.

    """

    def __init__(self, trainer: L.Trainer, datamodule: L.LightningDataModule) -> None:
        loops: tuple[Any, Any] = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
        self._trainer, self._before = trainer, datamodule_of(trainer)
        self._sources = [
            (loop._data_source, data)  # noqa: SLF001
            for loop, data in zip(loops, handed_data(trainer), strict=True)
            if data is not None
        ]
        for source, _ in self._sources:
            source.instance = datamodule
        trainer.datamodule = datamodule  # type: ignore[attr-defined]
        datamodule.trainer = trainer

    def restore(self) -> None:
        """Puts the data back."""
        for source, data in self._sources:
            source.instance = data
        self._trainer.datamodule = self._before  # type: ignore[attr-defined]


def is_fitting(trainer: L.Trainer) -> bool:
    """True if the Trainer is in ``fit``, also in its validation: ``trainer.state.fn`` says which method was called."""
    return trainer.state.fn == TrainerFn.FITTING


def is_validating(trainer: L.Trainer) -> bool:
    """True if ``trainer.validate`` was called, likewise; ``trainer.validating`` is true in a fit's validation too."""
    return trainer.state.fn == TrainerFn.VALIDATING


def exchange_stage(trainer: L.Trainer, stage: Any) -> Any:
    """Has the Trainer say that it is in a stage (``trainer.validating``, ...), and returns the one before.

    It is the ``stage`` of the Trainer's state.

    Args:
        trainer: The Trainer.
        stage: ``"validation"``, ``"test"``, or what this function has returned.

    """
    before = trainer.state.stage
    known = {"validation": RunningStage.VALIDATING, "test": RunningStage.TESTING}
    trainer.state.stage = known.get(stage, stage)
    return before


def exchange_reload_interval(trainer: L.Trainer, epochs: int) -> int:
    """Has Lightning ask for a new training loader every so many epochs, and returns the number it had before.

    It is an argument of the Trainer, which reads the attribute of this name at the start of every epoch.
    """
    before: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    trainer.reload_dataloaders_every_n_epochs = epochs  # type: ignore[attr-defined]
    return before


def exchange_validation_time(trainer: L.Trainer, seconds: float | None) -> float | None:
    """Sets the time of the last validation, unless it is ``None``, and returns the one before.

    Where ``val_check_interval`` is a duration, Lightning begins to count it anew whenever it asks for a loader.
    """
    before: float | None = getattr(trainer, "_last_val_time", None)
    if seconds is not None:
        trainer._last_val_time = seconds  # type: ignore[attr-defined] # noqa: SLF001
    return before


def loader_to_overfit(loader: Any) -> Any:
    """A training loader, or several, as Lightning takes them with ``overfit_batches``: without shuffling."""
    is_combined = isinstance(loader, CombinedLoader)
    combined = copy.copy(loader) if is_combined else CombinedLoader(loader)
    _resolve_overfit_batches(combined, RunningStage.TRAINING)
    return combined if is_combined else combined.iterables


def advise_workers(trainer: L.Trainer, loader: Any) -> None:
    """Has Lightning say it if training loaders have few workers, as it does of loaders that it trains on itself."""
    for part in (loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader)).flattened:
        _worker_check(trainer, part, "train_dataloader")


def exchange_last_batch(trainer: L.Trainer, is_last: bool) -> bool:
    """Makes ``trainer.is_last_batch`` say ``is_last``, and returns what it said before.

    Lightning reads it from the batch progress of the epoch loop, and does not read it to decide when that loop ends.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    before: bool = progress.is_last_batch
    progress.is_last_batch = is_last
    return before


def ends_after_batch(trainer: L.Trainer) -> bool:
    """True if Lightning leaves its epoch loop after this batch, whether or not it is the epoch's last one.

    It does where ``max_steps`` is reached, or where the Trainer was told to stop and its fit loop says that it may.
    """
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    return trainer.should_stop and trainer.fit_loop._can_stop_early  # noqa: SLF001


def forget_length(trainer: L.Trainer) -> None:
    """Has Lightning take an epoch for one without a length, as of an iterable: it validates after the last batch.

    Its fit loop holds the number of batches, and the Trainer that of those between validations.
    """
    trainer.fit_loop.max_batches = float("inf")
    if trainer.val_check_interval == 1.0 and not isinstance(trainer.val_check_interval, int):
        trainer.val_check_batch = float("inf")


def end_with_batch(trainer: L.Trainer) -> None:
    """Has Lightning take the batch that it fetches for the epoch's last one: the number in its data fetcher says so."""
    fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
    assert fetcher is not None
    fetcher.length = fetcher.fetched + 1


def fit_progress(trainer: L.Trainer) -> dict[str, Any]:
    """Counts of epochs, batches and steps, as checkpoints hold them: the state of the fit loop and of those in it."""
    return trainer.fit_loop.state_dict()


def restart_epoch(checkpoint: dict[str, Any], global_step: int, progress: Mapping[str, Any], window: int) -> None:
    """Makes a checkpoint one of the start of an epoch.

    Lightning goes on after the batches that ``epoch_loop.batch_progress`` counts; where it counts none as ready, it
    takes the checkpoint for one of the end of an epoch.

    Args:
        checkpoint: What Lightning saves.
        global_step: The Trainer's step at the epoch's start.
        progress: What :func:`fit_progress` returned there.
        window: Batches for one step of the optimizer.

    """
    checkpoint["global_step"], loop = global_step, copy.deepcopy(progress)
    checkpoint["loops"]["fit_loop"] = loop
    batches = loop["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    if batches["current"]["ready"] == 0:
        _advance(batches, "ready")  # the first batch is on its way
    if window == 1:  # Lightning counts it on the log's axis once more when it goes on
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def forget_loaders(checkpoint: dict[str, Any]) -> None:
    """Removes training loaders from a checkpoint, because other loaders cannot load their states."""
    checkpoint["loops"]["fit_loop"].get("state_dict", {}).pop("combined_loader", None)


def complete_epoch(checkpoint: dict[str, Any], is_counted: bool = True) -> None:
    """Makes a checkpoint that is taken behind the batch with which an epoch ends one of between two epochs.

    Of an epoch that has ended early, a Trainer that counts steps would train the rest; one that has ``max_steps``
    without a validation would go on inside every epoch.

    Args:
        checkpoint: What Lightning saves.
        is_counted: Whether Lightning has counted the batch on the log's axis, which it does after validation.

    """
    loop = checkpoint["loops"]["fit_loop"]
    epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    for counts in (epochs["total"], epochs["current"], batches["total"]):
        counts |= dict.fromkeys(counts, counts["ready"])
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += not is_counted


def validates_after_batch(trainer: L.Trainer) -> bool:
    """True if Lightning validates after this batch."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type] # noqa: SLF001


def await_validation(checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint that is taken behind an epoch's last batch one of validation's first batch.

    There Lightning goes on with the validation, and with the end of the epoch.

    Args:
        checkpoint: What Lightning saves.

    """
    loop = checkpoint["loops"]["fit_loop"]
    _advance(loop["epoch_loop.batch_progress"], "completed")
    for counts in (loop["epoch_loop.val_loop.batch_progress"][part] for part in ("total", "current")):
        counts |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}


def _advance(progress: dict[str, Any], stage: str) -> None:
    for part in ("total", "current"):
        progress[part][stage] += 1


def start_at_epoch(trainer: L.Trainer, epoch: int) -> None:
    """Has a fit begin with an epoch other than 0.

    The epoch progress of the fit loop takes a state, as from checkpoints.
    """
    progress = trainer.fit_loop.epoch_progress
    for counts in (progress.total, progress.current):
        counts.load_state_dict(dict.fromkeys(counts.state_dict(), epoch))


def add_optimizer_steps(trainer: L.Trainer, count: int) -> None:
    """Adds steps that were done elsewhere to ``trainer.global_step``, by which callbacks go, and to the log's x-axis.

    It is the number of completed steps in the progress of both kinds of optimization, of which one is in use.
    """
    move_log_position(trainer, count)
    loop = trainer.fit_loop.epoch_loop
    for steps in (
        loop.automatic_optimization.optim_progress.optimizer.step.total,
        loop.manual_optimization.optim_step_progress.total,
    ):
        steps.ready += count
        steps.completed += count


def show_metrics(trainer: L.Trainer, values: Mapping[str, Tensor]) -> None:
    """Puts values where callbacks look for what they monitor: dictionaries that Lightning goes on adding to.

    ``LightningModule.log`` would keep every value in a list that Lightning walks at each batch.
    """
    trainer.callback_metrics.update(values)
    trainer.logged_metrics.update(values)


def hide_metrics(trainer: L.Trainer, names: Iterable[str]) -> None:
    """Removes values of :func:`show_metrics`."""
    for name in names:
        trainer.callback_metrics.pop(name, None)
        trainer.logged_metrics.pop(name, None)


def log_position(trainer: L.Trainer) -> int:
    """Position on the x-axis at which Lightning logs now: the batches that an optimizer has stepped with.

    Its logger connector reads an attribute of the epoch loop that has no public name, and that a resumed fit goes on
    from.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001


def move_log_position(trainer: L.Trainer, count: int) -> None:
    """Moves :func:`log_position`: Lightning goes on adding a 1 to it for every batch, also for ``None``."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += count  # noqa: SLF001


def keep_schedulers(trainer: L.Trainer, configs: Sequence[Any]) -> None:
    """Has Lightning step these learning-rate schedulers only: it asks the strategy for them at every step."""
    trainer.strategy.lr_scheduler_configs = list(configs)


def loss_scaler(trainer: L.Trainer) -> Any:
    """Holder of the loss scale, with ``state_dict`` and ``load_state_dict``; ``None`` where losses are not scaled.

    It is the precision plugin: only those that scale losses have a state.
    """
    return trainer.precision_plugin if trainer.precision_plugin.state_dict() else None


def loss_scaler_key(trainer: L.Trainer) -> str:
    """Name under which checkpoints hold the state of :func:`loss_scaler`: that of the plugin's class."""
    return type(trainer.precision_plugin).__qualname__


def gradient_scale(trainer: L.Trainer, optimizer: Optimizer) -> float:
    """Factor on the gradients in ``on_before_optimizer_step``: 1, unless the optimizer unscales them itself.

    Fused optimizers say so with an attribute, which ``torch.amp.GradScaler`` reads; there is no public name for it.

    Args:
        trainer: The Trainer, whose precision may scale the loss.
        optimizer: The optimizer that is about to step.

    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    return float(scaler.get_scale())


def loss_scale(trainer: L.Trainer) -> float:
    """Factor on the loss in a backward pass: 1, unless the precision scales it. It is the plugin's ``scaler``."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def is_step_left_out(trainer: L.Trainer, optimizer: Optimizer) -> bool:
    """True if the loss scale has the optimizer's step left out, because gradients have overflowed.

    ``torch.amp.GradScaler`` leaves out steps of gradients that are not finite, which ``on_before_optimizer_step`` sees
    before it.

    Args:
        trainer: The Trainer, whose precision may scale the loss.
        optimizer: The optimizer that is about to step.

    """
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        return False
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return any(not bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def is_compiled(module: nn.Module) -> bool:
    """True if a module or a part of it was compiled: ``torch.compile`` and ``Module.compile`` leave these names."""
    return any("_orig_mod" in name or vars(part).get("_compiled_call_impl") for name, part in module.named_modules())


def batch_size_of(batch: Any) -> int:
    """Batch size by which Lightning weighs a value that is logged without one."""
    return extract_batch_size(batch)


@cache
def lightning_attributes() -> frozenset[str]:
    """Names of the attributes that every ``LightningModule`` has, and other modules have not: those of an empty one."""
    return frozenset(vars(L.LightningModule())) - _MODULE_ATTRIBUTES


def callbacks_with_log(trainer: L.Trainer) -> list[L.Callback]:
    """The callbacks that can log: Lightning gives them the module's ``log`` as an attribute before ``setup``."""
    return [callback for callback in callbacks_of(trainer) if "log" in vars(callback)]


def tensor_version(tensor: Tensor) -> int:
    """Number of times that a tensor was written in place; autograd's counter, which has no public name."""
    return tensor._version  # noqa: SLF001


def is_vmap_tensor(tensor: Tensor) -> bool:
    """True if a tensor stands for several under ``torch.func.vmap``, also one that is over; has no public name."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))  # noqa: SLF001


def has_gradient_hooks(parameter: Tensor) -> bool:
    """True if ``register_post_accumulate_grad_hook`` was called on a parameter: it keeps the hooks as an attribute."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
