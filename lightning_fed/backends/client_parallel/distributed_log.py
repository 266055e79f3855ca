"""Logging with several processes. At the end of a round, every process logs the values aggregated over all processes.

Lightning aggregates a value only if all processes log the same name, but a process without clients logs no name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.callbacks.logged_values import LogCall, LoggedValue, LoggedValues, intercepted
from lightning_fed.data.federated import ChainedLoaders
from lightning_fed.federated_callback import RevertingCallback
from lightning_fed.lightning.internals import OverriddenMethod, callbacks_with_log, ignored_warning
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup, process_group_of

_IRRELEVANT_WARNINGS = (
    r"It is recommended to use `self\.log\(.*, sync_dist=True",  # values are already aggregated over processes
    "The ``compute`` method of metric",  # `compute` runs before `update` in a process without clients
)


@dataclass
class _Entry:
    """Options and latest value for one name logged with ``LightningModule.log``.

    ``metric`` is a logged metric object's attribute path. ``last`` is from the client at ``position`` in the round.
    """

    options: dict[str, Any]
    metric: str | None = None
    is_per_step: bool = False
    last: Any = None
    position: int = -1


LogPart: TypeAlias = tuple[Mapping[str, _Entry], Mapping[str, LoggedValue]]
"""One process's entries and sums, by name."""


class DistributedLog(RevertingCallback):
    """Replaces ``LightningModule.log`` during batches, for training in several processes.

    Values per step are logged in the first process. Values per epoch are combined over all processes at the end of a
    round or evaluation.
    """

    def __init__(self) -> None:
        self._ranks: ProcessGroup = SINGLE_PROCESS
        self._module: L.LightningModule
        self._hooks: list[OverriddenMethod] = []
        self._ignored = ExitStack()
        self._reset()

    def _reset(self) -> None:
        self._is_on, self._is_training = False, False
        self._position = 0
        self._values = LoggedValues()
        self._entries: dict[str, _Entry] = {}

    # Lightning's hooks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.revert()
        self._reset()
        self._module, self._ranks = pl_module, process_group_of(trainer)
        log = intercepted(self._handle_call)
        owners = [pl_module, *(callback for callback in callbacks_with_log(trainer) if callback is not self)]
        self._hooks = [OverriddenMethod(owner, "log", log) for owner in owners]
        for text in _IRRELEVANT_WARNINGS:
            self._ignored.enter_context(ignored_warning(text))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._values.batch = batch

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loaders = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        self._is_on, self._is_training, self._values.batch = True, False, batch
        self._values.suffix = f"/dataloader_idx_{dataloader_idx}" if len(loaders) > 1 else ""

    on_test_batch_start = on_validation_batch_start

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        parts, first = self._ranks.gather(self.take_entries()), loaders[0] if isinstance(loaders, list) else loaders
        # Chained client data are evaluated completely by every process, other data only in part.
        self.log_all(parts[:1] if isinstance(first, ChainedLoaders) else parts)

    on_test_epoch_end = on_validation_epoch_end

    # A round

    def start_round(self) -> None:
        self._is_on, self._is_training = True, True
        self._values.batch, self._values.suffix = None, ""

    def start_visit(self, position: int) -> None:
        self._position, self._values.batch = position, None

    def take_entries(self) -> LogPart:
        entries, values = self._entries, self._values
        self._entries, self._values, self._is_on = {}, LoggedValues(), False
        for entry in entries.values():
            entry.last = None if entry.last is None else float(entry.last)
        return entries, {name: logged.on_cpu() for name, logged in values.sums.items()}

    def log_all(self, parts: Sequence[LogPart]) -> None:
        joint, values = dict[str, _Entry](), LoggedValues()
        values.pool(sums for _, sums in parts)
        for name, entry in (item for entries, _ in parts for item in entries.items()):
            first = joint.setdefault(name, entry)
            if entry.position > first.position:
                first.last, first.position = entry.last, entry.position
        for name, entry in joint.items():
            self._log_joint(name, entry, values.sums.get(name))

    def _handle_call(self, call: LogCall) -> None:
        reduction, value = call.reduction, call.value
        is_metric = isinstance(value, Metric)
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        # Invalid values go to Lightning for its error message. Evaluated metrics also go to Lightning, because all
        # processes have batches in an evaluation.
        is_pooled = is_number or (is_metric and self._is_training)
        if not self._is_on or self._module.trainer.barebones or reduction is None or not is_pooled:
            self._forward(**vars(call))
            return
        on_step = self._is_training if call.on_step is None else call.on_step
        on_epoch = not self._is_training if call.on_epoch is None else call.on_epoch
        options = {"prog_bar": call.prog_bar, "logger": call.logger}
        entry = self._entries.setdefault(self._values.full_name(call), _Entry(options))
        if on_step:
            entry.is_per_step = True
            name = f"{call.name}_step" if on_epoch else call.name
            self._forward(
                name,
                value,
                on_step=True,
                on_epoch=False,
                add_dataloader_idx=call.add_dataloader_idx,
                batch_size=call.batch_size,
                metric_attribute=call.metric_attribute,
                **options,
            )
        if is_metric:
            entry.metric = (call.metric_attribute or _path_of(value, self._module)) if on_epoch else entry.metric
            return
        entry.last, entry.position = torch.as_tensor(value).detach().reshape(()), self._position
        if on_epoch:
            self._values.take(call)

    def _log_joint(self, name: str, entry: _Entry, logged: LoggedValue | None) -> None:
        def log(name: str, value: Any, **options: Any) -> None:
            options = {"on_step": False, "on_epoch": True, "batch_size": 1, "add_dataloader_idx": False, **options}
            self._forward(name, value, **options)

        nowhere = {"prog_bar": False, "logger": False}
        value: Any = None
        if entry.metric is not None:
            value = self._module.get_submodule(entry.metric)
        elif logged is not None:
            value = logged.value
        if value is None and self._is_training:  # per-step value: lets all processes monitor the last step
            log(name, entry.last, on_step=True, on_epoch=False, **nowhere)
        elif value is not None and entry.is_per_step:  # Lightning has a name per step, per epoch, and for monitors
            log(f"{name}_epoch", value, metric_attribute=entry.metric, **entry.options)
            log(name, value, metric_attribute=entry.metric, **nowhere)
        elif value is not None:
            log(name, value, metric_attribute=entry.metric, **entry.options)

    def _forward(self, *args: Any, **kwargs: Any) -> None:
        self._hooks[0].original(*args, **kwargs)

    def revert(self) -> None:
        for hook in self._hooks:
            hook.restore()
        self._ignored.close()
        self._hooks = []


def _path_of(metric: Metric, module: L.LightningModule) -> str | None:
    return next((name for name, layer in module.named_modules() if layer is metric), None)
