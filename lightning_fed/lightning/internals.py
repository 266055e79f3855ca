"""Uses of undocumented behaviour in Lightning and torch. Each docstring names the behaviour.

Each function has a test in ``tests/lightning/test_internals.py``, which fails after a change in Lightning or torch.
Another such module is :mod:`lightning_fed.backends.client_parallel.strategy`.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.data_connector import (  # noqa: TID251 - no public names
    _process_dataloader,
    _resolve_overfit_batches,
    _worker_check,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

_Callback = TypeVar("_Callback", bound=L.Callback)

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_numbers = itertools.count()  # used to mark ignored warnings


BATCH_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)
"""Callback hooks around a training batch."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of modules and datamodules that move a batch to the device."""


class OverriddenMethod:
    """Replaces an object's method until :meth:`restore`.

    ``original`` is the replaced method. A copy of the object (``copy.deepcopy(module)``) has the original method.
    ``__wrapped__`` is also the original method, so Lightning's ``is_overridden`` ignores the replacement.
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
        return self.replacement(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.owner, self.name)  # the copy's original method

    def restore(self) -> None:
        if self._was_on_instance:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


@contextmanager
def ignored_warning(message: str, module: str = "") -> Iterator[None]:
    """Context manager that ignores a warning.

    ``message`` and ``module`` are regular expressions for the warning's text and the module's name. Other filters added
    in the context stay.
    """
    # With a comment, because otherwise an equal filter of the user or an outer fit would be replaced.
    warnings.filterwarnings("ignore", f"(?#{next(_numbers)}){message}", module=module)
    filters: list[Any] = warnings.filters  # type: ignore[assignment] # a list, unlike the declared type, latest first
    added = filters[0]
    try:
        yield
    finally:
        if added in filters:
            filters.remove(added)


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """Returns the Trainer's own list of callbacks. Changes of the list change the Trainer."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def find_callbacks(trainer: L.Trainer, kind: type[_Callback]) -> list[_Callback]:
    """Returns the Trainer's callbacks with the class ``kind``, in order."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, kind)]


def datamodule_of(trainer: L.Trainer) -> Any:
    """Returns the datamodule passed to ``fit``, an attribute of the Trainer; ``None`` if missing."""
    return getattr(trainer, "datamodule", None)


def handed_data(trainer: L.Trainer) -> tuple[Any, Any]:
    """Returns the training and validation data passed to ``fit``; ``None`` if missing.

    The fit loop and the validation loop store the data in the attribute ``_data_source``.
    """
    sources = (getattr(loop, "_data_source", None) for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop))
    data = [getattr(source, "instance", None) for source in sources]
    train, val = (None if isinstance(value, L.LightningModule | L.LightningDataModule) else value for value in data)
    return train, val


def replace_handed_data(trainer: L.Trainer, datamodule: L.LightningDataModule) -> Callable[[], None]:
    """Replaces the data passed to ``fit`` by a datamodule. Returns a function that undoes this."""
    loops: tuple[Any, Any] = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    pairs = zip(loops, handed_data(trainer), strict=True)
    sources = [(loop._data_source, data) for loop, data in pairs if data is not None]  # noqa: SLF001
    before = datamodule_of(trainer)
    for source, _ in sources:
        source.instance = datamodule
    trainer.datamodule = datamodule  # type: ignore[attr-defined]
    datamodule.trainer = trainer

    def restore() -> None:
        for source, data in sources:
            source.instance = data
        trainer.datamodule = before  # type: ignore[attr-defined]

    return restore


def is_fitting(trainer: L.Trainer) -> bool:
    """True during ``Trainer.fit``, including the validation inside ``fit``."""
    return trainer.state.fn == TrainerFn.FITTING


def show_status(trainer: L.Trainer, text: str) -> None:
    """Shows a text in the package's progress bar between two batches of a fit. Other bars show nothing."""
    show = getattr(trainer.progress_bar_callback, "show_status", None)
    if show is not None and is_fitting(trainer):
        show(text)


def is_validating(trainer: L.Trainer) -> bool:
    """True during ``Trainer.validate``, but not during the validation in a fit."""
    return trainer.state.fn == TrainerFn.VALIDATING


def exchange_stage(trainer: L.Trainer, stage: Any) -> Any:
    """Sets the Trainer's stage. Returns the previous stage.

    ``stage`` is ``"validation"``, ``"test"`` or an earlier return value.
    """
    before = trainer.state.stage
    known = {"validation": RunningStage.VALIDATING, "test": RunningStage.TESTING}
    trainer.state.stage = known.get(stage, stage)
    return before


def exchange_reload_interval(trainer: L.Trainer, epochs: int) -> int:
    """Sets the number of epochs between reloads of the training dataloader. Returns the previous number.

    The Trainer reads ``reload_dataloaders_every_n_epochs`` at the start of every epoch.
    """
    before: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    trainer.reload_dataloaders_every_n_epochs = epochs  # type: ignore[attr-defined]
    return before


def exchange_validation_time(trainer: L.Trainer, seconds: float | None) -> float | None:
    """Sets the time of the last validation, unless ``seconds`` is ``None``. Returns the previous time.

    If ``val_check_interval`` is a duration, Lightning resets this time whenever a dataloader is requested.
    """
    before: float | None = getattr(trainer, "_last_val_time", None)
    if seconds is not None:
        trainer._last_val_time = seconds  # type: ignore[attr-defined] # noqa: SLF001
    return before


def loader_to_overfit(loader: Any) -> Any:
    """Returns training dataloaders without shuffling, as Lightning with ``overfit_batches`` does."""
    is_combined = isinstance(loader, CombinedLoader)
    combined = copy.copy(loader) if is_combined else CombinedLoader(loader)
    _resolve_overfit_batches(combined, RunningStage.TRAINING)
    return combined if is_combined else combined.iterables


def distribute_loader(trainer: L.Trainer, loader: Any) -> Any:
    """Replaces a dataloader's sampler by a distributed sampler, as Lightning does."""
    is_combined = isinstance(loader, CombinedLoader)
    combined = copy.copy(loader) if is_combined else CombinedLoader(loader)
    stage = TrainerFn.FITTING, RunningStage.TRAINING
    combined.flattened = [_process_dataloader(trainer, *stage, part) for part in combined.flattened]
    return combined if is_combined else combined.iterables


def advise_workers(trainer: L.Trainer, loader: Any) -> None:
    """Runs Lightning's warning about dataloaders with few worker processes."""
    for part in (loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader)).flattened:
        _worker_check(trainer, part, "train_dataloader")


def exchange_last_batch(trainer: L.Trainer, is_last: bool) -> bool:
    """Sets ``trainer.is_last_batch``. Returns the previous value.

    ``True`` marks the last batch of a client's epoch. Restore the old value afterwards, or Lightning ends the round.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    before: bool = progress.is_last_batch
    progress.is_last_batch = is_last
    return before


def ends_after_batch(trainer: L.Trainer) -> bool:
    """True if Lightning leaves the epoch loop after this batch, even before the last batch of the epoch.

    Reasons are ``max_steps``, or a stop request after ``min_epochs`` and ``min_steps``.
    """
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    return trainer.should_stop and trainer.fit_loop._can_stop_early  # noqa: SLF001


def exchange_max_steps(trainer: L.Trainer, steps: int) -> int:
    """Sets ``trainer.max_steps``, an attribute of the epoch loop. Returns the previous number."""
    loop = trainer.fit_loop.epoch_loop
    before, loop.max_steps = loop.max_steps, steps
    return before


def forget_length(trainer: L.Trainer) -> None:
    """Sets the length of an epoch to infinity, so that Lightning validates only after the last batch.

    Changes ``fit_loop.max_batches``. With ``val_check_interval=1.0``, also changes ``trainer.val_check_batch``.
    """
    trainer.fit_loop.max_batches = float("inf")
    if trainer.val_check_interval == 1.0 and not isinstance(trainer.val_check_interval, int):
        trainer.val_check_batch = float("inf")


def end_with_batch(trainer: L.Trainer) -> None:
    """Ends the epoch after the current batch, by changing the length of Lightning's data fetcher."""
    fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
    assert fetcher is not None
    fetcher.length = fetcher.fetched + 1


def batches_in_epoch(trainer: L.Trainer) -> int:
    """Number of batches started in the epoch, including batches before a resume."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def fit_progress(trainer: L.Trainer) -> dict[str, Any]:
    """Returns the fit loop's counts of epochs, batches and steps, as in a checkpoint."""
    return trainer.fit_loop.state_dict()


def restart_epoch(checkpoint: dict[str, Any], global_step: int, progress: Mapping[str, Any], window: int) -> None:
    """Resets a checkpoint to the start of an epoch.

    ``global_step`` and ``progress`` (from :func:`fit_progress`) are the values at this start. ``window`` is the number
    of batches per optimizer step.
    """
    checkpoint["global_step"], loop = global_step, copy.deepcopy(progress)
    checkpoint["loops"]["fit_loop"] = loop
    batches = loop["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    if batches["current"]["ready"] == 0:
        _advance(batches, "ready")  # Lightning would treat 0 as the end of an epoch
    if window == 1:  # a resumed Trainer counts this batch again in `log_position`
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def complete_epoch(checkpoint: dict[str, Any], is_counted: bool = True) -> None:
    """Marks the epoch in a checkpoint as complete, so that a resumed Trainer begins the next epoch.

    ``is_counted`` is true if the checkpoint's :func:`log_position` already counts the last batch.
    """
    loop = checkpoint["loops"]["fit_loop"]
    epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    for counts in (epochs["total"], epochs["current"], batches["total"]):
        counts |= dict.fromkeys(counts, counts["ready"])
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += not is_counted


def validates_after_batch(trainer: L.Trainer) -> bool:
    """True if Lightning validates after the current training batch."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type] # noqa: SLF001


def await_validation(checkpoint: dict[str, Any]) -> None:
    """Changes the batch counts in a checkpoint from an epoch's end. A resumed fit then starts with validation."""
    loop = checkpoint["loops"]["fit_loop"]
    _advance(loop["epoch_loop.batch_progress"], "completed")
    for counts in (loop["epoch_loop.val_loop.batch_progress"][part] for part in ("total", "current")):
        counts |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}


def _advance(progress: dict[str, Any], stage: str) -> None:
    for part in ("total", "current"):
        progress[part][stage] += 1


def start_at_epoch(trainer: L.Trainer, epoch: int) -> None:
    """Makes a fit start at ``epoch`` instead of 0, by changing the fit loop's progress."""
    progress = trainer.fit_loop.epoch_progress
    for counts in (progress.total, progress.current):
        counts.load_state_dict(dict.fromkeys(counts.state_dict(), epoch))


def add_optimizer_steps(trainer: L.Trainer, count: int) -> None:
    """Adds ``count`` optimizer steps from other processes to ``trainer.global_step``.

    Changes Lightning's separate counts for automatic and for manual optimization, and also :func:`log_position`.
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
    """Adds values to the Trainer's metrics for callbacks, but not to loggers.

    ``LightningModule.log`` is not used, because every logged value slows each batch.
    """
    trainer.callback_metrics.update(values)
    trainer.logged_metrics.update(values)


def hide_metrics(trainer: L.Trainer, names: Iterable[str]) -> None:
    """Removes values that :func:`show_metrics` added to the Trainer's metrics."""
    for name in names:
        trainer.callback_metrics.pop(name, None)
        trainer.logged_metrics.pop(name, None)


def log_position(trainer: L.Trainer) -> int:
    """Returns the default ``step`` for logged values: the number of batches with an optimizer step.

    Lightning stores the number in a private attribute of the epoch loop, and in checkpoints.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001


def move_log_position(trainer: L.Trainer, count: int) -> None:
    """Adds ``count`` to :func:`log_position`. To subtract batches without training, ``count`` is negative."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += count  # noqa: SLF001


def keep_schedulers(trainer: L.Trainer, configs: Sequence[Any]) -> None:
    """Makes Lightning step only the schedulers ``configs``, by changing the strategy's list."""
    trainer.strategy.lr_scheduler_configs = list(configs)


def loss_scaler(trainer: L.Trainer) -> Any:
    """Returns the precision plugin if it scales losses, otherwise ``None``.

    Only precision plugins with loss scaling have a state.
    """
    return trainer.precision_plugin if trainer.precision_plugin.state_dict() else None


def loss_scaler_key(trainer: L.Trainer) -> str:
    """Returns the checkpoint key of the state of :func:`loss_scaler`: the plugin's class name."""
    return type(trainer.precision_plugin).__qualname__


def gradient_scale(trainer: L.Trainer, optimizer: Optimizer) -> float:
    """Returns the scale of gradients in ``on_before_optimizer_step``.

    Fused optimizers divide by the loss scale only in ``step``, so the loss scale is returned. For other optimizers the
    result is 1.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    return float(scaler.get_scale())


def loss_scale(trainer: L.Trainer) -> float:
    """Returns the factor of the loss in the backward pass; 1 without loss scaling."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def is_step_left_out(trainer: L.Trainer, optimizer: Optimizer) -> bool:
    """True if loss scaling will skip the optimizer's step because gradients have overflowed.

    ``torch.amp.GradScaler`` decides after ``on_before_optimizer_step``.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        return False
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return any(not bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def is_compiled(module: nn.Module) -> bool:
    """True if ``torch.compile`` or ``Module.compile`` has compiled the module or a submodule."""
    return any("_orig_mod" in name or vars(part).get("_compiled_call_impl") for name, part in module.named_modules())


def batch_size_of(batch: Any) -> int:
    """Returns Lightning's estimate of a batch's size, used as a weight for logged values."""
    return extract_batch_size(batch)


@cache
def lightning_attributes() -> frozenset[str]:
    """Names of the attributes that ``LightningModule`` adds to ``torch.nn.Module``."""
    return frozenset(vars(L.LightningModule())) - _MODULE_ATTRIBUTES


def implements(owner: Any, hook: str, base: type) -> bool:
    """True if a module or callback (class or instance) overrides a hook from the class ``base``."""
    return hook in vars(owner) or getattr(type(owner), hook) is not getattr(base, hook)


def callbacks_with_log(trainer: L.Trainer) -> list[L.Callback]:
    """Returns callbacks with an attribute ``log``, which Lightning sets before ``setup``."""
    return [callback for callback in callbacks_of(trainer) if "log" in vars(callback)]


def tensor_version(tensor: Tensor) -> int:
    """Number of in-place writes to a tensor (autograd's private counter); 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def is_vmap_tensor(tensor: Tensor) -> bool:
    """True if a tensor is (or was) a batched tensor inside ``torch.func.vmap``."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))  # noqa: SLF001


def has_gradient_hooks(parameter: Tensor) -> bool:
    """True if a parameter has hooks from ``register_post_accumulate_grad_hook`` (in a private attribute)."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
