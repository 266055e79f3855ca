"""Faster replacement for Lightning's loop over training batches (fused visits).

This file depends on private parts of Lightning's loop. ``tests/backends/test_fused_visits.py`` compares both loops.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult  # noqa: TID251 - see above
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import (
    BATCH_HOOKS,
    TRANSFER_HOOKS,
    OverriddenMethod,
    callbacks_of,
    datamodule_of,
    implements,
    is_overridden,
)
from lightning_fed.process_group import ClientSharing

_log = logging.getLogger(__name__)

_MODULE_HOOKS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
)
_PLAIN_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)

KNOWN_VERSIONS = ("2.5.", "2.6.")
"""Versions of Lightning with a known training loop."""


class BatchLoop:
    """Trains on batches faster than Lightning's loop.

    Lightning's loop trains on the first batch, and calls ``on_train_batch_end``. Within this call, the batch loop
    trains on the other batches. Hooks, counters and logged values are the same as in Lightning's loop. For manual
    optimization, gradient accumulation, loss scaling or a module with ``optimizer_step``, the batch loop calls
    Lightning's optimization code.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._trainer, self._module, self._attributes = trainer, module, vars(module)
        self._loop = trainer.fit_loop.epoch_loop
        self._connector = trainer._logger_connector  # noqa: SLF001

    def train_rest(self, loader: RoundLoader, end_batch: Callable[[Any, Any, int], None]) -> None:
        """Trains on the remaining batches, until Lightning must validate or end the fit.

        After each batch, calls ``end_batch(outputs, batch, batch_idx)``.
        """
        if self._is_over:
            return
        self.prepare()
        # Lightning does not know the length of a stream of batches.
        while not (self._is_over or (loader.is_over and loader.current is not None and loader.current.is_stream)):
            self.end_batch()
            end_batch(*self.train())

    @property
    def _is_over(self) -> bool:
        # Lightning's loop must handle the end of this batch, to validate or to end the fit.
        trainer, loop = self._trainer, self._loop
        is_last = loop._num_ready_batches_reached() if loop.max_steps == -1 else loop._is_training_done  # noqa: SLF001
        return is_last or trainer.should_stop or trainer.received_sigterm

    def prepare(self) -> None:
        """Finds the hooks that module and callbacks implement; the batch loop then calls only these hooks."""
        trainer, module, plugin = self._trainer, self._module, self._trainer.precision_plugin
        self._callbacks = {
            hook: [callback for callback in callbacks_of(trainer) if implements(callback, hook, L.Callback)]
            for hook in BATCH_HOOKS
        }
        hooks = self._module_hooks = {hook for hook in _MODULE_HOOKS if implements(module, hook, L.LightningModule)}
        owners = (datamodule_of(trainer), module)
        has_data_hooks = any(
            owner is not None and is_overridden(hook, owner) for owner in owners for hook in TRANSFER_HOOKS
        )
        self._device = None if has_data_hooks else trainer.strategy.root_device
        self._takes_index = "batch_idx" in self._loop._build_kwargs(OrderedDict(), None, 0)  # noqa: SLF001
        kind = type(plugin)
        self._converts = kind.convert_input is not Precision.convert_input
        self._context = None if kind is Precision else plugin.train_step_context
        self._is_plain = (
            module.automatic_optimization
            and trainer.accumulate_grad_batches == 1
            and "optimizer_step" not in hooks
            and kind in _PLAIN_PRECISIONS
            and getattr(plugin, "scaler", None) is None
            and trainer.strategy.model is module
            and not isinstance(trainer.optimizers[0], LightningOptimizer)  # would call the hooks a second time
        )
        self._connector._first_loop_iter = False  # noqa: SLF001 - set by the connector's `on_batch_start`
        self._has_plain_gradients = all(  # manual optimization may have no optimizer
            type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
            for optimizer in trainer.optimizers
        )
        self._clips = bool(trainer.gradient_clip_val) or "configure_gradient_clipping" in hooks

    def end_batch(self) -> None:
        """Updates Lightning's batch counts and writes logged values, after all other hooks of a batch."""
        results = self._loop._results  # noqa: SLF001
        # Not in `on_batch_end`, because `trainer.callback_metrics` computes the same values on request.
        results.batch = None  # frees memory before the next batch
        self._loop.batch_progress.increment_completed()
        if not all(value.has_reset for value in results.values()):
            self._connector.update_train_step_metrics()
        if self._trainer.lr_scheduler_configs:
            self._loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        if self._trainer.accumulate_grad_batches == 1 or not self._loop._should_accumulate():  # noqa: SLF001
            self._loop._batches_that_stepped += 1  # noqa: SLF001

    def train(self) -> tuple[Any, Any, int]:
        """Trains on the next batch and calls all hooks. Returns the step's outputs, the batch and the batch index."""
        trainer, loop, progress = self._trainer, self._loop, self._loop.batch_progress
        fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
        assert fetcher is not None
        batch, _, _ = next(fetcher)
        batch_idx = loop.batch_idx + 1
        progress.is_last_batch = fetcher.done
        batch = self._transfer(batch)
        progress.increment_ready()
        results = loop._results  # noqa: SLF001
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        outputs: Any = None
        if batch is not None:
            self._call("on_train_batch_start", batch, batch_idx)
            progress.increment_started()
            arguments = (batch, batch_idx) if self._takes_index else (batch,)
            if self._is_plain:
                outputs = self._optimize(arguments, batch_idx)
            else:
                kwargs: Any = dict(zip(("batch", "batch_idx"), arguments, strict=False))
                if self._module.automatic_optimization:
                    outputs = loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
                else:
                    outputs = loop.manual_optimization.run(kwargs)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            if batch is not None:  # a failed visit is completed with `None` batches
                loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if loop._num_ready_batches_reached():  # noqa: SLF001
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call("on_train_batch_end", outputs, batch, batch_idx)
        return outputs, batch, batch_idx

    def _transfer(self, batch: Any) -> Any:
        trainer, device = self._trainer, self._device
        if self._converts:
            batch = trainer.precision_plugin.convert_input(batch)
        if device is None:
            batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001
            return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        if type(batch) in (list, tuple) and all(type(part) is Tensor and part.device == device for part in batch):
            return batch
        return move_data_to_device(batch, device)

    def _call(self, hook: str, *arguments: Any) -> None:
        callbacks = self._callbacks[hook]
        if callbacks:
            attributes, before = self._attributes, self._attributes["_current_fx_name"]
            attributes["_current_fx_name"] = hook  # needed for logged values
            for callback in callbacks:
                getattr(callback, hook)(self._trainer, self._module, *arguments)
            attributes["_current_fx_name"] = before

    def _call_all(self, hook: str, *arguments: Any) -> None:
        self._call(hook, *arguments)
        if hook in self._module_hooks:
            self._call_module(hook, *arguments)

    def _call_module(self, hook: str, *arguments: Any, **options: Any) -> Any:
        attributes, before = self._attributes, self._attributes["_current_fx_name"]
        attributes["_current_fx_name"] = hook
        output = getattr(self._module, hook)(*arguments, **options)
        attributes["_current_fx_name"] = before
        return output

    def _optimize(self, arguments: tuple[Any, ...], batch_idx: int) -> dict[str, Any]:
        optimizer, outputs = self._trainer.optimizers[0], dict[str, Any]()
        progress = self._loop.automatic_optimization.optim_progress.optimizer.step

        def closure() -> Tensor | None:
            nonlocal outputs
            with torch.enable_grad():
                outputs = self._compute_gradients(arguments, batch_idx, optimizer)
            return outputs.get("loss")

        progress.increment_ready()
        optimizer.step(closure=closure)  # type: ignore[arg-type] # a step without a loss has none
        progress.increment_completed()
        return outputs

    def _compute_gradients(self, arguments: tuple[Any, ...], batch_idx: int, optimizer: Optimizer) -> dict[str, Any]:
        trainer = self._trainer
        progress = self._loop.automatic_optimization.optim_progress.optimizer.zero_grad
        loss, outputs = self._loss(arguments)
        progress.increment_ready()
        self._call_all("on_before_zero_grad", optimizer)
        progress.increment_started()
        if "optimizer_zero_grad" in self._module_hooks:
            self._call_module("optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)
        elif self._has_plain_gradients:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()
        progress.increment_completed()
        if loss is not None:
            self._call_all("on_before_backward", loss)
            self._module.backward(loss)
            self._call_all("on_after_backward")
        self._call_all("on_before_optimizer_step", optimizer)
        if self._clips:
            self._call_module(
                "configure_gradient_clipping",
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )
        return outputs

    def _loss(self, arguments: tuple[Any, ...]) -> tuple[Tensor | None, dict[str, Any]]:
        if self._context is None:
            output = self._call_module("training_step", *arguments)
        else:
            with self._context():
                output = self._call_module("training_step", *arguments)
        if isinstance(output, Tensor):
            return output, {"loss": output.detach().clone()}
        result = ClosureResult.from_training_step_output(output)
        if result.closure_loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            return None, {}
        return result.closure_loss, result.asdict()


def build_batch_loop(fit: FederatedFit) -> BatchLoop | None:
    """Returns the fast training loop, or ``None`` if only Lightning's loop is possible.

    The log states the reason. With ``visits="fused"``, an error is raised instead.
    """
    trainer = fit.trainer
    obstacle = find_obstacle(trainer, fit.module, fit.has_one_client)
    if obstacle is None:
        fit.changes.callback(shorten_log(trainer).restore)
        return BatchLoop(trainer, fit.module)
    if fit.options.visits_one_by_one == "fused":
        raise MisconfigurationException(
            f"`visits='fused'` cannot replace Lightning's training loop, because {obstacle}. With visits='auto' "
            "Lightning's loop trains the clients, with the same result."
        )
    if trainer.is_global_zero:
        _log.info("Clients train in Lightning's loop, not in the faster loop (visits='fused'), because %s.", obstacle)
    return None


def find_obstacle(trainer: L.Trainer, module: L.LightningModule, has_one_client: bool) -> str | None:
    """Returns the reason why ``visits="fused"`` (a faster training loop) is impossible, or ``None``."""
    strategy, profiler = trainer.strategy, trainer.profiler  # type: ignore[attr-defined]
    interval = getattr(trainer, "val_check_interval", None)  # missing if validation depends on time
    obstacles = {
        f"Lightning {L.__version__} has an unknown loop": not L.__version__.startswith(KNOWN_VERSIONS),
        f"{type(profiler).__name__} measures calls in Lightning's loop": (
            not isinstance(profiler, PassThroughProfiler)
        ),
        f"{type(strategy).__name__} may change how a step is performed": (
            type(strategy) is not SingleDeviceStrategy and not isinstance(strategy, ClientSharing)
        )
        or type(strategy).on_train_batch_start is not Strategy.on_train_batch_start,
        "`val_check_interval` may validate after any batch": (
            has_one_client and (interval != 1.0 or isinstance(interval, int))
        ),
        f"`{type(module).__name__}.on_train_batch_start` may end the epoch": (
            implements(module, "on_train_batch_start", L.LightningModule)
        ),
    }
    return next((obstacle for obstacle, is_there in obstacles.items() if is_there), None)


def shorten_log(trainer: L.Trainer) -> OverriddenMethod:
    """Replaces the module's ``log`` in training batches by a faster method with the same results.

    The returned object restores ``log``.
    """
    results, known = trainer.fit_loop.epoch_loop._results, dict[str, Any]()  # noqa: SLF001

    @torch.compiler.disable  # type: ignore[untyped-decorator] # like Lightning's method
    def log(fx: str, name: str, value: Any, *, batch_size: int | None = None, **options: Any) -> None:
        key = f"{fx}.{name}"
        if known.get(key) == options:
            result = results[key]
            if result.value.device == value.device:  # Lightning moves results to the CPU after an epoch
                size = results._extract_batch_size(result, batch_size, result.meta)  # noqa: SLF001
                results.update_metrics(key, value, size)
                return
        method.original(fx, name, value, batch_size=batch_size, **options)
        known[key] = options

    method = OverriddenMethod(results, "log", log)
    return method
