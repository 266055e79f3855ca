"""Chain of update steps, such as clipping or masking, around an aggregation rule."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning_utilities.core.overrides import is_overridden

from lightning_fed.errors import BadUpdate, BadUpdates, ClientFault, OptionError
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.numerics.precision import cast_back
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.steps.update_step import CollectingStep, Held, UpdateStep
from lightning_fed.steps.weights import WeightStep

_log = logging.getLogger(__name__)


class Chain:
    """Computes the new global model from the clients' updates, by update steps and an aggregation rule.

    Each received update is added to a running result, unless a step needs all updates at once.

    Args:
        rule: Aggregation rule.
        steps: Update steps, in order of execution on the client (reversed on the server). The steps are copied.

    Attributes:
        held: Each step's stored updates in this round; ``None`` for steps without storage.

    Raises:
        ValueError: If steps are incompatible with each other or with the rule.

    Example:
        >>> import torch
        >>> from lightning_fed.algorithms import FedAvg
        >>> from lightning_fed.rule import RoundInfo
        >>> from lightning_fed.steps import MaxNorm, UniformWeights
        >>> chain = Chain(FedAvg(), [UniformWeights(), MaxNorm(1.0)])
        >>> start = {"w": torch.tensor(0.0)}
        >>> chain.start(RoundInfo(0), start)
        >>> for client, value in {"a": 0.5, "b": 9.5}.items():
        ...     chain.receive(ClientUpdate(client, 8, {"w": torch.tensor(value)}), start)
        >>> chain.aggregate()
        {'w': tensor(0.7500)}
    """

    def __init__(self, rule: Aggregator, steps: Sequence[UpdateStep] = ()) -> None:
        self.rule, self.steps = rule, [copy.deepcopy(step) for step in steps]
        hiding = [index for index, step in enumerate(self.steps) if step.reveals != "update"]
        self._num_hidden = max(hiding, default=0)  # the server sees no single update within these innermost steps
        changing = [index for index, step in enumerate(self.steps) if type(step).form is not UpdateStep.form]
        self._num_whole = min(changing, default=len(self.steps))  # these innermost steps see whole models
        for step in self.steps[: self._num_hidden]:
            if isinstance(step, CollectingStep):
                raise OptionError(
                    f"Expected no `{type(step).__name__}` before `{type(self.steps[self._num_hidden]).__name__}` in "
                    "`steps`, because the first step compares single updates, but the second hides updates: remove one."
                )
        for step in self.steps:
            if any(getattr(rule, name) for name in step.refuses):
                raise OptionError(
                    f"Expected no `{type(step).__name__}` with {type(rule).__name__}, because not all clients start "
                    "from one model with the same shapes: remove the step, or use another method."
                )
            step.check(rule, self.steps)
        for step in self.steps[self._num_whole + 1 :]:
            if any(is_overridden(hook, step, UpdateStep) for hook in ("on_client", "on_server", "hold")):
                raise OptionError(
                    f"Expected `{type(step).__name__}` before `{type(self.steps[self._num_whole]).__name__}` in "
                    "`steps`, because the first step needs a whole model, and the second encodes the model, but got "
                    "the reverse order: exchange the steps."
                )
        self.held: list[Held | None] = [None] * len(self.steps)
        self._state: State = {}

    def describe(self) -> dict[str, str]:
        return {name: describe_options(step) for name, step in self._named_steps().items()}

    def callbacks(self) -> list[Any]:
        return [callback for step in self.steps for callback in step.callbacks()]

    @property
    def reveals(self) -> Literal["update", "sum", "model"]:
        """Data visible to the server: single updates (``"update"``), their ``"sum"``, or only the new ``"model"``."""
        kinds = {step.reveals for step in self.steps}
        return "model" if "model" in kinds else "sum" if "sum" in kinds else "update"

    @property
    def is_coded(self) -> bool:
        """True if a step encodes updates, so that messages have other names, shapes or dtypes than a model."""
        return self._num_whole < len(self.steps)

    def start(self, info: RoundInfo, state: State) -> None:
        self._state = state
        for step in self.steps:
            step.start(info, state)
        self.held = [step.hold() for step in self.steps]
        self.rule.start(info, state)

    def form(self, broadcast: Broadcast) -> State:
        form = self.rule.expected(broadcast) if self.rule.resizes else broadcast.state
        for step in self.steps:
            form = step.form(form)
        return form

    def counted(self, num_samples: int) -> int:
        return counted_samples(self.steps, num_samples)

    # Client

    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Applies all update steps to a client's update. ``memory`` is the client's stored state, changed in place."""
        for index, (name, step) in enumerate(self._named_steps().items()):
            prefix = f"step:{name}:"
            step_memory = {key.removeprefix(prefix): memory.pop(key) for key in list(memory) if key.startswith(prefix)}
            update = step.on_client(update, sent, step_memory)
            if index < self._num_hidden:
                try:
                    update = step.on_server(update, sent.state)
                except BadUpdate as error:
                    raise ClientFault(str(error)) from error
            memory |= {f"{prefix}{key}": value for key, value in step_memory.items()}
        return update

    # Server

    def on_send(self, client: Client, broadcast: Broadcast) -> None:
        for step in self.steps:
            step.on_send(client, broadcast)

    def receive(
        self,
        update: ClientUpdate,
        sent: State,
        inspect: Callable[[ClientUpdate, State], None] | None = None,
    ) -> None:
        """Decodes a client's update, and passes the result to the aggregation rule.

        If a step needs all updates of a round, the update is stored until :meth:`aggregate`. ``inspect`` is called with
        the decoded update and the broadcast tensors ``sent``. Raises ``BadUpdate`` for an invalid update.
        """
        self._pass(update, sent, len(self.steps), inspect)

    def merge(self, other: Any) -> None:
        kind, other_kind = type(self.part).__name__, type(other).__name__
        if type(other) is not type(self.part):
            raise TypeError(f"Expected the same rule and steps in all processes, but got {other_kind} for {kind}.")
        self.part.merge(other)

    @property
    def part(self) -> Any:
        return next((held for held in reversed(self.held) if held is not None), self.rule)

    def aggregate(self) -> State | None:
        """Passes all stored updates to the aggregation rule, and returns the new global tensors.

        Invalid updates raise ``BadUpdates`` with the clients' names. The caller may exclude these clients and retry.
        """
        faults: dict[Client, str] = {}
        for index in reversed(range(len(self.steps))):
            held = self.held[index]
            if held is None:
                continue
            released = held.release()
            self.held[index] = None
            for update, sent in released:
                try:
                    self._pass(update, sent, index)
                except BadUpdate as error:
                    faults |= dict.fromkeys(update.clients, str(error))
        if faults:
            raise BadUpdates(faults)
        new = self.rule.aggregate()
        if new is None:
            return None
        for step in self.steps:
            new = step.on_aggregate(new, self._state)
        return {
            name: value if value.dtype == self._state[name].dtype else cast_back(value, self._state[name])
            for name, value in new.items()
        }

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        """Returns values to log for the last round. ``norms``: each update's norm, if the server may see updates."""
        metrics = self.rule.metrics()
        for step in self.steps:
            metrics |= step.metrics(norms if self.reveals == "update" else {})
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the aggregation rule and of the update steps, for checkpoints."""
        steps = {name: step.state_dict() for name, step in self._named_steps().items()}
        return {"rule": self.rule.state_dict(), "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps = self._named_steps()
        unused = [name for name, step_state in state["steps"].items() if step_state and name not in steps]
        if unused:
            _log.warning("The checkpoint contains states of update steps missing in this fit: %s.", ", ".join(unused))
        self.rule.load_state_dict(state["rule"])
        for name, step in steps.items():
            step.load_state_dict(state["steps"].get(name, {}))

    def _named_steps(self) -> dict[str, UpdateStep]:
        kinds, named = Counter[str](), dict[str, UpdateStep]()
        for step in self.steps:
            name = type(step).__name__
            named[f"{name}:{kinds[name]}"] = step
            kinds[name] += 1
        return named

    def _pass(
        self,
        update: ClientUpdate,
        sent: State,
        start: int,
        inspect: Callable[[ClientUpdate, State], None] | None = None,
    ) -> None:
        for index in reversed(range(start)):
            if inspect is not None and index + 1 == self._num_whole:
                inspect(update, sent)
            step, held = self.steps[index], self.held[index]
            if index >= self._num_hidden:  # the client has applied the other steps
                update = step.on_server(update, sent)
            if held is not None:
                held.add(update, sent)
                return
        if inspect is not None and self._num_whole == 0:
            inspect(update, sent)
        self.rule.receive(update)


def counted_samples(steps: Sequence[UpdateStep], num_samples: int) -> int:
    """Returns a client's weight in the average: the number of examples, as changed by the update steps."""
    for step in reversed(steps):
        num_samples = step.weight(num_samples) if isinstance(step, WeightStep) else num_samples
    return num_samples


def describe_options(step: object) -> str:
    """Describes an object in the log by class name and constructor arguments."""
    attributes = vars(step)
    arguments = dict.fromkeys(name for kind in type(step).__mro__ for name in inspect.signature(kind).parameters)
    values = {name: attributes[name] for name in arguments if name in attributes}
    texts = {
        name: describe_options(value)
        if isinstance(value, UpdateStep)
        else repr(value)
        if isinstance(value, str | int | float | list | tuple | dict | None)
        else type(value).__name__
        for name, value in values.items()
    }
    return f"{type(step).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"
