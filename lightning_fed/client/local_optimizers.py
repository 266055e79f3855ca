"""Resets optimizers, schedulers and loss scale before each client's training in a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.client.packed_optimizers import HYPERPARAMETERS, pack_optimizers, unpack_optimizers
from lightning_fed.messages import State
from lightning_fed.numerics.trees import copy_tree


class LocalOptimizers:
    """Resets optimizers, per-step schedulers and loss scale before each client's training.

    Before a client trains, learning rates, scheduler states and loss scale return to their values at the round's start.
    Optimizer buffers such as momentum start anew. With ``mode="keep"``, the buffers continue from the client's last
    training.

    After the round, per-step schedulers continue from the client with the median number of steps. The new loss scale is
    the median over the clients.

    Args:
        optimizers: The optimizers.
        step_schedulers: Learning-rate schedulers that step after every batch.
        scaler: Gradient scaler with the loss scale.
        mode: ``"reset"`` or ``"keep"``, see above. ``"continue"`` means no reset, for a single client.
        epoch_schedulers: Learning-rate schedulers that step at the end of the round.

    Attributes:
        finals: Scheduler states and loss scale after each client's training, by the client's index in the round.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        step_schedulers: Sequence[Any] = (),
        scaler: Any = None,
        mode: Literal["reset", "keep", "continue"] = "reset",
        epoch_schedulers: Sequence[Any] = (),
    ) -> None:
        self.optimizers = optimizers
        self.step_schedulers = step_schedulers
        stepped = {id(scheduler.optimizer) for scheduler in step_schedulers}
        self.epoch_schedulers = [scheduler for scheduler in epoch_schedulers if id(scheduler.optimizer) in stepped]
        self.scaler = scaler
        self.mode = mode
        self._start = self.capture()
        self.finals: dict[int, dict[str, Any]] = {}

    @property
    def start(self) -> dict[str, Any]:
        return {name: self._start[name] for name in ("groups", "schedulers", "scaler")}

    def steps_of(self, final_state: Mapping[str, Any]) -> list[int] | None:
        pairs = zip(self._start["schedulers"], final_state["schedulers"], strict=True)
        counts = [(_count_steps(before), _count_steps(after)) for before, after in pairs]
        known = [after - before for before, after in counts if before is not None and after is not None]
        return known if len(known) == len(counts) else None

    @property
    def has_lasting_state(self) -> bool:
        return bool(self.step_schedulers) or self.scaler is not None

    def start_visit(
        self, packed: Mapping[str, Tensor] | None = None, rows: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Prepares the optimizers, schedulers and loss scale for one client's training.

        ``packed`` is the optimizer state after the client's last training, if kept. ``rows`` lists parameters of which
        the client has only some rows, with the row indices.
        """
        if self.mode == "continue":
            return
        self._load({**self._start, "buffers": self._sliced(self._start["buffers"], rows)} if rows else self._start)
        if packed:
            unpack_optimizers(self.optimizers, packed)

    def resume(self, snapshot: Mapping[str, Any]) -> None:
        self._load({**snapshot, "groups": self._rates(snapshot["groups"], snapshot["groups"])})
        self._step_again(snapshot["epoch_schedulers"])

    def end_visit(self, position: int = 0) -> State:
        """Stores scheduler states in ``finals[position]`` (client index in the round). Returns the optimizer state."""
        if self.has_lasting_state:
            self.finals[position] = self.capture(buffers=False)
        return pack_optimizers(self.optimizers) if self.mode == "keep" else {}

    def end_round(self, counting: Collection[int]) -> None:
        """Prepares optimizers and schedulers for the next round.

        ``counting`` contains the indices of the clients with valid updates. One of these clients has the median number
        of steps. Per-step schedulers continue from this client. Optimizer buffers such as momentum are reset.
        """
        if self.mode == "continue" and counting:
            return
        finals = {position: self.finals[position] for position in counting if position in self.finals}
        middle = self._median(finals, lambda final: max(self.steps_of(final) or [0]))
        scaler = self._median(finals, lambda final: final["scaler"].get("scale", 0.0))["scaler"]
        groups = self._rates(self._start["groups"], middle["groups"])
        self._load({**self._start, "schedulers": middle["schedulers"], "scaler": scaler, "groups": groups})
        self._step_again(middle["epoch_schedulers"])

    def _rates(self, groups: Sequence[Any], visited: Sequence[Any]) -> list[Any]:
        stepped = {id(scheduler.optimizer) for scheduler in self.step_schedulers}
        sources = [
            in_visit if id(optimizer) in stepped else _hyperparameters(optimizer)
            for optimizer, in_visit in zip(self.optimizers, visited, strict=True)
        ]
        return [
            [
                {**group, **{name: now[name] for name in HYPERPARAMETERS if name in now}}
                for group, now in zip(visit_groups, source, strict=True)
            ]
            for visit_groups, source in zip(groups, sources, strict=True)
        ]

    def _median(self, finals: Mapping[int, dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
        # The lower median for an even number of visits.
        ordered = sorted(finals, key=lambda position: (value(finals[position]), position))
        return finals[ordered[(len(ordered) - 1) // 2]] if ordered else self._start

    def _step_again(self, before: Sequence[Mapping[str, Any]]) -> None:
        # Epoch schedulers may have stepped from the learning rate of another client or model.
        for scheduler, state in zip(self.epoch_schedulers, before, strict=True):
            if state and getattr(scheduler, "last_epoch", None) != state.get("last_epoch"):
                scheduler.load_state_dict(copy_tree(state))
                scheduler.step()

    def checkpoint(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        start = self._start
        return self._optimizer_states(start), copy_tree(start["schedulers"]), copy_tree(start["scaler"])

    def _optimizer_states(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "state": copy_tree(buffers),
                "param_groups": [
                    {**group, **values}
                    for group, values in zip(optimizer.state_dict().get("param_groups", []), groups, strict=True)
                ],
            }
            for optimizer, buffers, groups in zip(self.optimizers, state["buffers"], state["groups"], strict=True)
        ]

    def capture(self, buffers: bool = True) -> dict[str, Any]:
        """Copies hyper-parameters, scheduler states and loss scale, with ``buffers`` also optimizer buffers."""
        state: dict[str, Any] = {
            "groups": [_hyperparameters(optimizer) for optimizer in self.optimizers],
            "schedulers": [copy_tree(scheduler.state_dict()) for scheduler in self.step_schedulers],
            "epoch_schedulers": [copy_tree(scheduler.state_dict()) for scheduler in self.epoch_schedulers],
            "scaler": copy_tree(self.scaler.state_dict()) if self.scaler is not None else {},
        }
        if buffers:
            state["buffers"] = [copy_tree(optimizer.state_dict().get("state", {})) for optimizer in self.optimizers]
        return state

    def _sliced(
        self, buffers: Sequence[Mapping[Any, Any]], rows: Sequence[tuple[Tensor, Tensor]]
    ) -> list[dict[Any, Any]]:
        held, sliced = dict(rows), []
        for optimizer, states in zip(self.optimizers, buffers, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            sliced.append({index: _take_rows(parameters[index], held, states[index]) for index in states})
        return sliced

    def _load(self, state: Mapping[str, Any]) -> None:
        for optimizer, values in zip(self.optimizers, self._optimizer_states(state), strict=True):
            optimizer.load_state_dict(values)
        for scheduler, values in zip(self.step_schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy_tree(values))
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])


def _take_rows(parameter: Tensor, held: Mapping[Tensor, Tensor], buffers: Mapping[str, Any]) -> Mapping[str, Any]:
    if parameter not in held:
        return buffers
    is_table = {
        name: isinstance(value, Tensor) and value.ndim and value.shape[1:] == parameter.shape[1:]
        for name, value in buffers.items()
    }
    rows = held[parameter]
    return {name: value[rows.to(value.device)] if is_table[name] else value for name, value in buffers.items()}


def _count_steps(scheduler_state: Mapping[str, Any]) -> int | None:
    # In a chain of schedulers, the first scheduler counts the steps.
    steps = scheduler_state.get("last_epoch")
    if type(steps) is int:
        return steps
    parts = scheduler_state.get("_schedulers")
    if isinstance(parts, list | tuple) and parts and isinstance(parts[0], Mapping):
        return _count_steps(parts[0])
    return None


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: copy_tree(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
