"""Log of several processes that train a round's clients: summed up in each, logged by all alike.

Lightning reduces a logged value over the processes when the epoch ends, if all of them have logged it. Here one may
have had no client in the round, or another client's branch of the step: so every process sums up what its own batches
log, and at the end of the round all log the joint values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.numerics.precision import at_least_float32
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup
from lightning_fed.rounds.lightning_internals import (
    REDUCTIONS,
    IgnoredWarning,
    OverriddenMethod,
    batch_size_of,
    callbacks_with_log,
)
from lightning_fed.rounds.synchronisation import process_group_of

_IRRELEVANT_WARNINGS = (
    r"It is recommended to use `self\.log\(.*, sync_dist=True",  # values are joint already
    "The ``compute`` method of metric",  # called before `update`: a process may have had no client in the round
)


@dataclass
class _Entry:
    """One name of the log.

    Args:
        options: Where it goes: Lightning's ``prog_bar`` and ``logger``.
        reduction: What becomes of the values of several batches.
        total: Their sum (of value times weight), largest or smallest; ``None`` where only steps are logged.
        weight: Sum of the batch sizes.
        metric: Path of the metric that was logged, instead of values.
        is_per_step: Whether single steps are logged as well.
        last: The last step's value.
        position: Position in the round of the visit that it is of.

    """

    options: dict[str, Any]
    reduction: str = "mean"
    total: Any = None
    weight: float = 0.0
    metric: str | None = None
    is_per_step: bool = False
    last: Any = None
    position: int = -1

    def add(self, value: Tensor, weight: float) -> None:
        if self.reduction in ("max", "min"):
            self.total = value if self.total is None else getattr(torch, f"{self.reduction}imum")(self.total, value)
            return
        added = value * weight if self.reduction == "mean" else value
        self.total = added if self.total is None else self.total + added
        self.weight += weight

    def join(self, added: _Entry) -> None:
        """Adds what another process has; both hold numbers by now."""
        if added.total is not None:
            totals = [entry.total for entry in (self, added) if entry.total is not None]
            self.total = {"max": max, "min": min}.get(self.reduction, sum)(totals)
            self.weight += added.weight
        if added.position > self.position:
            self.last, self.position = added.last, added.position

    def as_numbers(self) -> _Entry:
        """The same without tensors."""
        total, last = (None if value is None else float(value) for value in (self.total, self.last))
        return replace(self, total=total, last=last)


class DistributedLog(L.Callback):
    """Stands in for ``LightningModule.log`` while batches are trained on or evaluated.

    What is logged per step goes on to Lightning, in every process for itself: loggers see the first one's. What is
    logged per epoch is summed up here, as Lightning does, and logged by all processes alike: after the last visit of a
    round (:meth:`log_all`), and at the end of an evaluation. A metric of torchmetrics is handed to Lightning then,
    which asks all processes for what they have seen. :class:`~lightning_fed.callbacks.Federation` adds this callback.
    """

    def __init__(self) -> None:
        self._ranks: ProcessGroup = SINGLE_PROCESS
        self._module: L.LightningModule
        self._hooks: list[OverriddenMethod] = []
        self._ignored: list[IgnoredWarning] = []
        self._reset()

    def _reset(self) -> None:
        self._is_on, self._is_training = False, False
        self._batch: Any = None
        self._position = 0
        self._suffix = ""
        self._entries: dict[str, _Entry] = {}

    # Lightning's hooks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Takes the place of the module's ``log``, and of the callbacks'."""
        self._restore()
        self._reset()
        self._module, self._ranks = pl_module, process_group_of(trainer)
        owners = [pl_module, *(callback for callback in callbacks_with_log(trainer) if callback is not self)]
        self._hooks = [OverriddenMethod(owner, "log", self.take) for owner in owners]
        self._ignored = [IgnoredWarning(text) for text in _IRRELEVANT_WARNINGS]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes what values are of."""
        self._batch = batch

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Sums up from here on."""
        self._start_evaluation(batch, dataloader_idx, len(trainer.num_val_batches))

    def on_test_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Sums up from here on."""
        self._start_evaluation(batch, dataloader_idx, len(trainer.num_test_batches))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Logs what all processes have summed up."""
        self.log_all(self._ranks.gather(self.taken()))

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Logs what all processes have summed up."""
        self.log_all(self._ranks.gather(self.taken()))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restores ``log``."""
        self._restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restores ``log``."""
        self._restore()

    # A round

    def start_round(self) -> None:
        """Sums up from here on, until :meth:`taken`."""
        self._is_on, self._is_training, self._batch, self._suffix = True, True, None, ""

    def start_visit(self, position: int) -> None:
        """Values are of this visit from here on."""
        self._position, self._batch = position, None

    def taken(self) -> dict[str, _Entry]:
        """The sums so far, in numbers; from now on everything goes to Lightning."""
        entries, self._entries, self._is_on, self._batch = self._entries, {}, False, None
        return {name: entry.as_numbers() for name, entry in entries.items()}

    def log_all(self, parts: Iterable[Mapping[str, _Entry]]) -> None:
        """Logs the joint values of what all processes have taken.

        Args:
            parts: What :meth:`taken` returned in every process, in the order of the ranks.

        """
        joint: dict[str, _Entry] = {}
        for part in parts:
            for name, entry in part.items():
                if name in joint:
                    joint[name].join(entry)
                else:
                    joint[name] = entry
        for name, entry in joint.items():
            self._log_joint(name, entry)

    def take(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """As ``LightningModule.log``."""
        given = dict(locals())
        reduction = REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
        is_metric = isinstance(value, Metric)
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        # What Lightning would refuse goes to it; and metrics that are evaluated, for which all processes have batches.
        is_pooled = reduction is not None and (is_number or (is_metric and self._is_training))
        if not self._is_on or self._module.trainer.barebones or reduction is None or not is_pooled:
            self._pass_on(**{name: value for name, value in given.items() if name != "self"})
            return
        on_step = self._is_training if on_step is None else on_step
        on_epoch = not self._is_training if on_epoch is None else on_epoch
        options = {"prog_bar": prog_bar, "logger": logger}
        full = f"{name}{self._suffix}" if add_dataloader_idx else name
        entry = self._entries.setdefault(full, _Entry(options, reduction))
        if on_step:
            entry.is_per_step = True
            self._pass_on(
                f"{name}_step" if on_epoch else name,
                value,
                on_step=True,
                on_epoch=False,
                add_dataloader_idx=add_dataloader_idx,
                batch_size=batch_size,
                metric_attribute=metric_attribute,
                **options,
            )
        if is_metric:
            entry.metric = (metric_attribute or _path_of(value, self._module)) if on_epoch else entry.metric
            return
        number = torch.as_tensor(value).detach().reshape(())
        entry.last, entry.position = number, self._position
        if on_epoch:
            size = 1 if self._batch is None or reduction != "mean" else None
            weight = batch_size or size or batch_size_of(self._batch)
            entry.add(at_least_float32(number), weight)

    def _log_joint(self, name: str, entry: _Entry) -> None:
        def log(name: str, value: Any, **options: Any) -> None:
            options = {"on_step": False, "on_epoch": True, "batch_size": 1, "add_dataloader_idx": False, **options}
            self._pass_on(name, value, **options)

        nowhere = {"prog_bar": False, "logger": False}
        value: Any = None
        if entry.metric is not None:
            value = self._module.get_submodule(entry.metric)
        elif entry.total is not None:
            value = entry.total / entry.weight if entry.reduction == "mean" and entry.weight else entry.total
        if value is None and self._is_training:  # it is of single steps; so that all processes can monitor the last one
            log(name, entry.last, on_step=True, on_epoch=False, **nowhere)
        elif value is not None and entry.is_per_step:  # it has two names, and is monitored by a third
            log(f"{name}_epoch", value, metric_attribute=entry.metric, **entry.options)
            log(name, value, metric_attribute=entry.metric, **nowhere)
        elif value is not None:
            log(name, value, metric_attribute=entry.metric, **entry.options)

    def _pass_on(self, *args: Any, **kwargs: Any) -> None:
        self._hooks[0].original(*args, **kwargs)

    def _start_evaluation(self, batch: Any, dataloader_idx: int, loaders: int) -> None:
        self._is_on, self._is_training, self._batch = True, False, batch
        self._suffix = f"/dataloader_idx_{dataloader_idx}" if loaders > 1 else ""

    def _restore(self) -> None:
        for hook in self._hooks:
            hook.restore()
        for warning in self._ignored:
            warning.restore()
        self._hooks, self._ignored = [], []


def _path_of(metric: Metric, module: L.LightningModule) -> str | None:
    return next((name for name, layer in module.named_modules() if layer is metric), None)
