"""Adapts Lightning's weight averaging to a federation, in which each client averages weights over local steps.

During a fit the averaged weights are additional tensors in the module's state. The server averages these tensors
over the clients like the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn

from lightning_fed.callbacks.federation import find_federation
from lightning_fed.errors import BadUpdate
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import OverriddenMethod, callbacks_of
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.model.entries import live_entries, tied_names
from lightning_fed.rule import AveragingAggregator
from lightning_fed.steps.update_step import UpdateStep
from lightning_fed.steps.weights import WeightStep

_log = logging.getLogger(__name__)

_NAME = "weight_average"  # of the layer with the average's entries
_STEPS, _COUNT, _MODEL = f"{_NAME}.steps", f"{_NAME}.n_averaged", f"{_NAME}.model."

_HOOKS = (
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_train_end",
)

_TRIED_STEPS = (
    range(100_000),
    *(range(2**power, 2**power + 1_000) for power in range(17, 40)),  # for averages with a late start
)
_MOST_STEPS = 1_000_000  # in a visit

_AFTER_ROUNDS = (
    "average the global models after rounds (`EMAWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=0)`, "
    "or a `should_update` that is true for `epoch_idx` only)"
)


class WeightAverages(FederatedCallback):
    """Adapts Lightning's ``WeightAveraging`` callback to a federation.

    A client can average its weights over local steps: ``should_update(step_idx=s)`` is called after each step,
    and ``s`` counts a client's steps over all rounds. The server can average the global models over rounds:
    ``should_update(epoch_idx=r)`` is called after round ``r``. :meth:`restore` removes the adaptation.

    Raises:
        MisconfigurationException: If averages are not possible.
    """

    def __init__(self, fit: FederatedFit, callbacks: list[Any]) -> None:
        self._fit, self._average = fit, callbacks[0]
        self._name = f"`{type(self._average).__name__}`"
        if len(callbacks) > 1:
            raise MisconfigurationException(
                f"Expected one `WeightAveraging` callback, but the Trainer has {len(callbacks)}: keep one."
            )
        if fit.server.rule.resizes:
            raise MisconfigurationException(
                f"{self._name} does not work with {type(fit.server.rule).__name__}, which changes the shapes of "
                "entries between rounds: remove the callback."
            )
        self._module, self._base, self._starts = fit.module, 0, (0, 0)
        self._first_step = 0  # of the visit, as counted by the Trainer
        tensors = self._find_tensors()
        self._fixed: State = {}
        first = self._average.state_dict()["latest_update_step"]
        tried = (first + step for steps in _TRIED_STEPS for step in steps)
        self.has_steps = any(map(self._average.should_update, tried))
        if self.has_steps:
            self._check_steps()
            shared = {name for name, policy in fit.policies.items() if policy == "shared"}
            self._fixed = {name: value.clone() for name, value in tensors.items() if name not in shared}
            self._add_entries({name: value for name, value in tensors.items() if name in shared}, first)
        self._methods = [OverriddenMethod(self._average, "should_update", self._should_update)]
        self._methods += [self._override(hook) for hook in _HOOKS if self.has_steps]

    def _find_tensors(self) -> State:
        # Tensors that share memory with the average, by entry name.
        state = {name: value for name, value in self._module.state_dict().items() if isinstance(value, Tensor)}
        checkpoint: dict[str, Any] = {"state_dict": state}
        self._average.on_save_checkpoint(self._fit.trainer, self._module, checkpoint)
        average, averaging = checkpoint["state_dict"], checkpoint["averaging_state"]
        average = {name: value for name, value in average.items() if isinstance(value, Tensor)}
        if {name: value.shape for name, value in average.items()} != {name: x.shape for name, x in state.items()}:
            raise MisconfigurationException(
                f"Expected {self._name} after `Federation` in the Trainer's `callbacks`, but the callback comes first, "
                "and has copied the module before the federated method has changed the module: put `Federation` first."
            )
        self._count: Tensor = averaging["n_averaged"]
        self._tensors = {name: average[name] for name in live_entries(self._module)}
        return self._tensors

    def _check_steps(self) -> None:
        chain, policies = self._fit.server.chain, set(self._fit.policies.values())
        rule, hooks = chain.rule, ("on_send", "on_client", "on_server", "hold", "form")
        changing = [
            f"`{type(step).__name__}`"
            for step in chain.steps
            if not isinstance(step, WeightStep) and any(is_overridden(hook, step, UpdateStep) for hook in hooks)
        ]
        reasons = {
            f"{type(rule).__name__} is no weighted mean of one model": (
                not isinstance(rule, AveragingAggregator) or rule.has_clusters or rule.has_versions
            ),
            f"{' and '.join(changing)} would treat the average as a second model": bool(changing),
            "personal entries stay on the clients": "personal" in policies,
            "clients hold only some rows of an entry": "sliced" in policies,
        }
        for reason, is_there in reasons.items():
            if is_there:
                raise MisconfigurationException(
                    f"{self._name} averages weights over training steps on each client. The server cannot combine "
                    f"these averages, because {reason}: {_AFTER_ROUNDS}."
                )

    def _add_entries(self, tensors: State, first: int) -> None:
        root = self._root = nn.Module()
        root.register_buffer("steps", torch.tensor(first, device=self._count.device))
        root.register_buffer("n_averaged", self._count)
        root.model = nn.Module()
        for name, value in tensors.items():
            *path, attribute = name.split(".")
            layer = root.model
            for part in path:
                if part not in dict(layer.named_children()):
                    layer.add_module(part, nn.Module())
                layer = layer.get_submodule(part)
            layer.register_buffer(attribute, value)
        self._steps = root.get_buffer("steps")
        self._module.add_module(_NAME, root)
        self._fit.decide_policies(self._fit.trainer, self._module)
        callbacks = callbacks_of(self._fit.trainer)
        callbacks.insert(1, self)  # after the federation
        if self._fit.has_server and self._fit.trainer.is_global_zero:
            _log.info(
                "%s: each client averages the steps of a visit, and sends the model and the average. Messages are "
                "twice as large.",
                self._name,
            )

    def _should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None:
            return bool(self._methods[0].original(epoch_idx=epoch_idx))
        trainer = self._fit.trainer
        if not find_federation(trainer).current_visits:  # steps of other processes, or of a second model
            return False
        if not self.has_steps:
            if self._methods[0].original(step_idx=step_idx):
                raise MisconfigurationException(
                    f"{self._name}.should_update is true for step {step_idx}, but false for all steps tried before the "
                    f"first round (such as the first {len(_TRIED_STEPS[0])} steps): start averaging in these steps, "
                    f"or {_AFTER_ROUNDS}."
                )
            return False
        steps = self._base + trainer.global_step - self._first_step
        self._steps.fill_(steps)
        return bool(self._methods[0].original(step_idx=steps - 1))

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        self._base, self._first_step = int(self._steps), trainer.global_step
        self._set_latest_step(trainer.global_step)

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        for name, value in self._fixed.items():
            self._tensors[name].copy_(value)

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._starts = int(self._steps), int(self._count)

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        for name, start in zip((_STEPS, _COUNT), self._starts, strict=True):
            grown = int(update.state[name]) - start if name in update.state else 0  # the server refuses missing entries
            if not 0 <= grown <= _MOST_STEPS:
                raise BadUpdate(
                    f"the client's step count {name!r} grows by {grown} in a round, but 0 to {_MOST_STEPS} are possible"
                )

    def patch(self, checkpoint: dict[str, Any]) -> None:
        """Moves averaged weights in a checkpoint to the keys that Lightning's ``WeightAveraging`` uses."""
        model = checkpoint.get("current_model_state", checkpoint["state_dict"])
        entries = {name: model.pop(name) for name in list(model) if name.startswith(f"{_NAME}.")}
        if not entries or "current_model_state" not in checkpoint:
            return
        average = checkpoint["state_dict"]
        firsts = tied_names({name: value for name, value in average.items() if isinstance(value, Tensor)})
        values = {name.removeprefix(_MODEL): value for name, value in entries.items()}
        values |= {name: value.clone() for name, value in self._fixed.items()}
        average |= {name: values[first] for name, first in firsts.items() if first in values}
        checkpoint["averaging_state"]["n_averaged"] = entries[_COUNT]
        checkpoint["callbacks"][self._average.state_key]["latest_update_step"] = int(entries[_STEPS])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self._average.on_validation_epoch_start(self._fit.trainer, self._module)
        try:
            with self._hidden():
                yield
        finally:
            self._average.on_validation_epoch_end(self._fit.trainer, self._module)

    def _override(self, hook: str) -> OverriddenMethod:
        # Lightning and torch compare the module with the average, which has no entries for the average.
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._hidden():
                return method.original(*args, **kwargs)

        method = OverriddenMethod(self._average, hook, run)
        return method

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        if self.has_steps:
            delattr(self._module, _NAME)
        try:
            yield
        finally:
            if self.has_steps:
                self._module.add_module(_NAME, self._root)

    def _set_latest_step(self, step: int) -> None:
        self._average.load_state_dict({**self._average.state_dict(), "latest_update_step": step})

    def restore(self) -> None:
        for method in self._methods:
            method.restore()
        if self.has_steps:
            callbacks_of(self._fit.trainer).remove(self)
            self._set_latest_step(int(self._steps))
            delattr(self._module, _NAME)
