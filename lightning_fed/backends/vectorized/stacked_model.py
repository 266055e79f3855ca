"""Models of several clients in one module, stacked along a leading client axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

from lightning_fed.backends.vectorized.client_random import PerClientRandom
from lightning_fed.backends.vectorized.group_loader import ClientGenerators, StackedBatch
from lightning_fed.callbacks.logged_values import LogCall, intercepted
from lightning_fed.data.batch_structure import batch_tensors, rebuild_batch
from lightning_fed.features.isolated_pass import loss_in
from lightning_fed.model.entries import copy_state, tensor_slots, tensors_by_path
from lightning_fed.model.resize import set_tensor_data
from lightning_fed.numerics.precision import at_least_float32


class StackedModel:
    """Stacked parameters and buffers of several clients, for joint training steps.

    :meth:`add_client` copies one client's values from the module into the stack. Between :meth:`enter` and
    :meth:`leave`, the module's parameters contain the stack, and one optimizer step trains all clients. Afterwards
    :meth:`load_row` copies a client's values back into the module.
    """

    def __init__(self, module: L.LightningModule, names: Sequence[str], size: int, draws: bool) -> None:
        self._module, self._draws = module, draws
        self._caller = _Caller(module)
        known = set(names)
        tensors = {path: tensor for path, tensor in tensors_by_path(module).items() if path in known}
        self._parameters: dict[str, Tensor] = {
            path: value for path, value in tensors.items() if isinstance(value, nn.Parameter)
        }
        self._buffers = {path: value for path, value in tensors.items() if path not in self._parameters}
        firsts = {value: path for path, value in tensors.items()}
        # A layer with two names is included once: otherwise `functional_call` would restore the wrong tensors.
        slots = {(slot.layer, slot.attribute): slot for slot in reversed(tensor_slots(module))}.values()
        self._first_names = {f"module.{slot.path}": firsts[slot.tensor] for slot in slots if slot.tensor in firsts}
        self._stack = {
            name: empty_stack(value, size) for name, value in (*self._parameters.items(), *self._buffers.items())
        }
        self._indices = torch.arange(size)
        self._module_data: dict[str, Tensor] = {}
        self._saved_rows: dict[int, dict[str, Tensor]] = {}
        self._step_inputs = self._parameters  # inputs for one step
        self._rows: dict[str, Tensor] = {}  # the stack without unused rows
        self._used_names: dict[tuple[int, ...], set[str]] = {}  # clients in a part to parameters with gradients
        self._count = 0

    @torch.no_grad()
    def add_client(self) -> None:
        for name, entry in self._entries():
            self._stack[name][self._count].copy_(entry)
        self._count += 1

    def enter(self, optimizers: Sequence[Optimizer]) -> None:
        self._rows = {name: value[: self._count] for name, value in self._stack.items()}
        self._module_data = {name: parameter.data for name, parameter in self._parameters.items()}
        stack_parameters(self._parameters.values(), (self._rows[name] for name in self._parameters), optimizers)

    def use_copies(self) -> None:
        # A step that uses the module's tensors directly then has another result.
        copies = copy_state(self._rows)
        self._rows = copies
        self._step_inputs = {
            name: copies[name].requires_grad_(parameter.requires_grad) for name, parameter in self._parameters.items()
        }

    def check_step(self) -> None:
        """Raises ``RuntimeError`` unless the losses of all clients depend on the same parameters."""
        (clients, first), *others = self._used_names.items() if len(self._used_names) > 1 else [((), set[str]())]
        self._used_names = {}
        for other_clients, used in others:
            # An optimizer skips a parameter without gradient. In a stack the gradient is 0, so momentum or weight decay
            # would change the parameter.
            if used != first:
                raise RuntimeError(
                    f"The losses of the clients at positions {list(clients)} and {list(other_clients)} in a group "
                    f"depend on different parameters (for example {min(used ^ first)!r}), so these clients cannot "
                    "train at once: use `visits='auto'`."
                )

    @torch.no_grad()
    def save_row(self, row: int) -> None:
        self._saved_rows[row] = copy_state(self.values_of(row))

    def leave(self) -> None:
        for name, data in self._module_data.items():
            set_tensor_data(self._parameters[name], data)
        self._module_data = {}

    @torch.no_grad()
    def load_row(self, row: int) -> None:
        values = self._saved_rows.get(row) or self.values_of(row)
        for name, entry in self._entries():
            entry.copy_(values[name])

    def values_of(self, row: int) -> dict[str, Tensor]:
        return {name: value[row] for name, value in self._rows.items()}

    def clear(self) -> None:
        self._count, self._saved_rows, self._rows, self._used_names = 0, {}, {}, {}

    def step(
        self, training_step: Callable[..., Any], part: StackedBatch, rest: Sequence[Any], numbers: ClientGenerators
    ) -> Tensor:
        """Runs ``training_step`` on stacked batches of several clients. Returns losses, shape ``(clients,)``.

        ``rest`` are further arguments of ``training_step``, and ``numbers`` the clients' random generators. After an
        error, buffers and generators are restored.
        """
        rows = _rows_of(part.clients, self._count)
        trained = {name: parameter for name, parameter in self._step_inputs.items() if parameter.requires_grad}
        # The step may write untrained parameters (such as a teacher's moving average), so these are treated as buffers.
        parameters, buffers = (
            {name: entry if rows is None else entry[rows] for name, entry in group.items()}
            for group in (trained, {name: value for name, value in self._rows.items() if name not in trained})
        )
        used: set[str] = set()
        if rows is not None:
            for name, parameter in parameters.items():
                parameter.register_hook(partial(_add_name, used, name))  # type: ignore[no-untyped-call]
        tensors = batch_tensors(part.batch)
        calls: list[LogCall] = []

        def run_client(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], tensors: list[Tensor], index: Tensor
        ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
            values: list[Tensor] = []

            def record_call(call: LogCall) -> None:
                calls.append(call)
                values.append(torch.as_tensor(call.value).detach())

            client_entries = parameters | buffers
            # Tied parameters are listed under every name.
            entries = {name: client_entries[first] for name, first in self._first_names.items()}
            batch = rebuild_batch(part.batch, iter(tensors))
            draws = PerClientRandom(numbers.switch_to, part.clients, index) if self._draws else nullcontext()
            with replaced(self._module, "log", intercepted(record_call)), draws:
                output = functional_call(self._caller, entries, (training_step, batch, *rest), tie_weights=False)
            loss = loss_in(output)
            if not isinstance(loss, Tensor):
                raise MisconfigurationException(
                    f"Expected `training_step` to return a loss, but got {loss!r}. To skip batches, train clients "
                    "sequentially: `visits='auto'`."
                )
            return loss.reshape(()), values, {name: entries[f"module.{name}"] for name in buffers}

        indices = self._indices[: len(part.clients)]
        written = {name: buffers[name].clone() for name in self._buffers if name in buffers}
        states = numbers.snapshot() if self._draws else None
        try:
            if len(part.clients) == 1:  # without `vmap`, the error belongs to this client
                row, row_buffers = (
                    {name: entry[0] for name, entry in group.items()} for group in (parameters, buffers)
                )
                loss, values, after = run_client(row, row_buffers, [tensor[0] for tensor in tensors], indices[0])
                losses, values = loss[None], [value[None] for value in values]
            else:
                losses, values, after = vmap(run_client)(parameters, buffers, tensors, indices)
        except Exception:
            for name, value in written.items():
                buffers[name].data.copy_(value)  # `data`: other autograd graphs check the version counter
            if states is not None:
                numbers.restore(states)
            raise
        if rows is not None:
            self._used_names[part.clients] = used
        for name, value in after.items():
            if isinstance(rows, list) or value.data_ptr() != buffers[name].data_ptr():  # never written in place
                self._rows[name][slice(None) if rows is None else rows] = value.detach()
        for call, value in zip(calls, values, strict=True):
            self._log(part, call, value)
        return losses

    def _log(self, part: StackedBatch, call: LogCall, values: Tensor) -> None:
        batch = rebuild_batch(part.batch, iter([tensor[0] for tensor in batch_tensors(part.batch)]))
        weight = call.weight(batch) * len(part.clients)  # equals the total weight of separate log calls
        joint = replace(call, value=reduced(values, call.reduction or "mean"), batch_size=weight)
        self._module.log(**vars(joint))

    def _entries(self) -> list[tuple[str, Tensor]]:
        return [*self._parameters.items(), *self._buffers.items()]


def joint_loss(losses: Sequence[Tensor]) -> Tensor:
    """Returns the mean of the clients' losses, but with the gradient of the sum, as in separate training.

    Example:
        >>> losses = torch.tensor([1.0, 3.0], requires_grad=True)
        >>> loss = joint_loss([losses])
        >>> loss.backward()
        >>> loss.item(), losses.grad
        (2.0, tensor([1., 1.]))
    """
    all_losses = losses[0] if len(losses) == 1 else torch.cat(list(losses))
    total = all_losses.sum()
    return total + (all_losses.mean() - total).detach()


def reduced(values: Tensor, reduction: str) -> Tensor:
    """Reduces the first axis (the clients) of logged values. ``reduction`` is a name such as ``"mean"``."""
    if reduction in ("max", "min"):
        return values.amax(0) if reduction == "max" else values.amin(0)
    return values.sum(0) if reduction == "sum" else at_least_float32(values).mean(0)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which the attribute ``name`` of an object has another value."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(before)


class _Caller(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _rows_of(clients: Sequence[int], count: int) -> slice | list[int] | None:
    # The cheapest index: all rows, a slice without a copy, or a list.
    if len(clients) == count:
        return None
    is_run = clients[-1] - clients[0] + 1 == len(clients)
    return slice(clients[0], clients[-1] + 1) if is_run else list(clients)


def _add_name(names: set[str], name: str, gradient: Tensor) -> None:
    names.add(name)


def empty_stack(value: Tensor, size: int) -> Tensor:
    """Allocates a tensor for stacking ``size`` tensors like ``value`` (shape, dtype) along a new first axis."""
    if value.ndim == 2:  # batched matrix products return transposed gradients
        return value.new_empty(size, *value.shape[::-1]).mT
    return value.new_empty(size, *value.shape)


def stack_parameters(parameters: Iterable[Tensor], values: Iterable[Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Sets parameters to ``values`` of several clients (first axis), to train all at once. Copies optimizer states."""
    for parameter, value in zip(parameters, values, strict=True):
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            for key, entry in state.items():
                if isinstance(entry, Tensor) and entry.shape == parameter.shape:  # one copy per client
                    state[key] = entry.expand(len(value), *entry.shape).clone()
        set_tensor_data(parameter, value)
