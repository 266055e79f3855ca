"""Trial before simultaneous training of clients: compares simultaneous steps with single steps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fed.backends.vectorized.group_loader import ClientGenerators, detect_draws, stack_batches
from lightning_fed.backends.vectorized.obstacles import Obstacle
from lightning_fed.backends.vectorized.stacked_model import (
    StackedModel,
    empty_stack,
    joint_loss,
    reduced,
    stack_parameters,
)
from lightning_fed.callbacks.logged_values import LogCall, intercepted
from lightning_fed.data.population import seed_everything
from lightning_fed.errors import describe
from lightning_fed.features.isolated_pass import is_same, isolated_pass, loss_in, noted_attributes, prepare_batch
from lightning_fed.lightning.internals import is_vmap_tensor, tensor_version
from lightning_fed.model.entries import copy_state, tensors_by_path
from lightning_fed.numerics.trees import elements

_WRITES = "`training_step` writes the attribute {!r}, which all clients would share"
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_SEEDS = (1, 2)  # values for the two clients
_TOLERANCE = 0.01  # tolerance for rounding, also on devices with low internal precision; real differences are larger
_LOW_TOLERANCE = 0.1  # tolerance for low precision


def check_vectorisation(trainer: L.Trainer, module: L.LightningModule, names: Sequence[str], batch: Any) -> bool:
    """Trains two clients on one batch, together and one by one. Raises ``Obstacle`` if the results differ.

    Returns true if ``training_step`` draws random numbers. The module is restored afterwards, but not the random
    generators.
    """
    (optimizer,) = trainer.optimizers
    check = _TwoClients(module, names)
    with (
        _restored(_helpers_of(module).values()),
        isolated_pass(module, intercepted(check.record_call), True, is_training=True),
    ):
        try:
            with trainer.precision_plugin.forward_context():
                batch = prepare_batch(trainer, module, batch)
                draws = check.run(batch, trainer.precision in ("32-true", "64-true"))
        except Obstacle:
            raise
        except Exception as error:
            raise Obstacle(f"in a trial step `training_step` raised {describe(error)}") from error
    try:
        _try_optimizer(optimizer)
    except Obstacle:
        raise
    except Exception as error:
        raise Obstacle(f"in a trial step {type(optimizer).__name__} raised {describe(error)}") from error
    return draws


class _TwoClients:
    """Runs training steps of two clients with ``vmap`` and one by one, and compares the results."""

    def __init__(self, module: L.LightningModule, names: Sequence[str]) -> None:
        self._module, self._names = module, names
        self._step: Callable[..., Any] = module.training_step
        self._rest = [0] * (len(inspect.signature(self._step).parameters) > 1)
        entries = tensors_by_path(module)
        self._entries = {name: entries[name] for name in names}
        self._start = copy_state(self._entries)
        self._trained = [value for value in module.parameters() if value.requires_grad]
        self._helpers = _helpers_of(module)
        self._logged: list[Tensor] = []
        self._reductions: list[str] = []

    def record_call(self, call: LogCall) -> None:
        if isinstance(call.value, Metric):
            raise Obstacle(f"the metric {call.name!r} would treat clients as examples")
        self._logged.append(torch.as_tensor(call.value).detach())
        self._reductions.append(call.reduction or "mean")

    def run(self, batch: Any, is_precise: bool) -> bool:
        first = self._run_separately(0, batch)
        before = noted_attributes(self._module) | self._helpers_attributes()
        second = self._run_separately(1, batch)
        for name, value in (noted_attributes(self._module) | self._helpers_attributes()).items():
            if not is_same(before.get(name), value):
                raise Obstacle(_WRITES.format(name))
        # A layer in evaluation mode may train later.
        draws = any(isinstance(layer, _DROPOUTS) and layer.p for layer in self._module.modules())
        try:
            together = self._run_at_once(batch, draws)
        except Exception:
            if draws:
                raise
            draws = True  # random numbers are the most common reason
            together = self._run_at_once(batch, draws)
        for name, value in self._all_attributes():
            if _has_escaped(value):
                raise Obstacle(_WRITES.format(name))
        tolerance = _TOLERANCE if is_precise else _LOW_TOLERANCE
        for quantity, one, other, joint in zip(
            ("loss", "log", "gradients", "buffers"), first, second, together, strict=True
        ):
            if quantity == "log":
                values = zip(one, other, self._reductions, strict=False)
                alone = _joined([reduced(torch.stack([left, right]), how) for left, right, how in values])
            else:
                alone = (one + other) / 2 if quantity == "loss" else torch.cat([one, other])
            if alone.shape != joint.shape or not (alone - joint).norm() <= tolerance * alone.norm() + 1e-12:
                raise Obstacle(
                    f"in a trial step with two clients at once, the {quantity} differed from sequential training"
                )
        if not self._run_at_once(batch, draws, is_isolated=True)[0].isfinite().all() and together[0].isfinite().all():
            raise Obstacle(
                "`training_step` uses parameters or buffers that are not attributes of the module (from a list or "
                "the optimizer), which all clients would share"
            )
        return draws

    def _run_separately(self, client: int, batch: Any) -> tuple[Tensor, ...]:
        self._load(client)
        seed_everything(_SEEDS[client])
        versions = [tensor_version(parameter) for parameter in self._trained]
        with detect_draws() as has_drawn:
            output = self._step(batch, *self._rest)
        if versions != [tensor_version(parameter) for parameter in self._trained]:
            raise Obstacle("`training_step` writes parameters that the optimizer trains")
        if has_drawn[0]:
            raise Obstacle("`training_step` draws from Python's or NumPy's generator, which all clients would share")
        loss = loss_in(output)
        return self._results(loss, lambda value: [value])

    def _run_at_once(self, batch: Any, draws: bool, is_isolated: bool = False) -> tuple[Tensor, ...]:
        stack = StackedModel(self._module, self._names, len(_SEEDS), draws)
        self._logged = []
        for client in range(len(_SEEDS)):
            self._load(client)
            stack.add_client()
        stack.enter([])
        try:
            parts = stack_batches(dict.fromkeys(range(len(_SEEDS)), batch))
            numbers = ClientGenerators(_SEEDS, everywhere=False)
            if is_isolated:
                stack.use_copies()
                for entry in self._entries.values():
                    if entry.is_floating_point():
                        entry.data.fill_(torch.nan)
            loss = joint_loss([stack.step(self._step, part, self._rest, numbers) for part in parts])
            if is_isolated:
                self._logged = []
                return (loss.detach(),)
            rows = {client: stack.values_of(client) for client in range(len(_SEEDS))}
            results = self._results(loss, lambda value: list(value))
        finally:
            stack.leave()
        buffers = [row[name] for row in rows.values() for name in self._buffer_names()]
        return (*results[:3], _joined(buffers))

    def _results(self, loss: Tensor, rows: Callable[[Tensor], list[Tensor]]) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(loss, self._trained, allow_unused=True)
        whole = [
            rows(torch.zeros_like(parameter) if gradient is None else gradient)
            for parameter, gradient in zip(self._trained, gradients, strict=True)
        ]
        by_client = [gradient for client in zip(*whole, strict=True) for gradient in client]
        logged, self._logged = self._logged, []
        buffers = [self._entries[name] for name in self._buffer_names()]
        return tuple(map(_joined, ([loss], logged, by_client, buffers)))  # in the order of comparison

    def _buffer_names(self) -> list[str]:
        # A step may also write to parameters that no optimizer has.
        return [name for name, value in self._entries.items() if not value.requires_grad]

    def _all_attributes(self) -> Iterator[tuple[str, Any]]:
        layers = {f"{path}." if path else "": layer for path, layer in self._module.named_modules()}
        for path, owner in (layers | {f"{path}.": helper for path, helper in self._helpers.items()}).items():
            yield from ((f"{path}{name}", value) for name, value in vars(owner).items())

    def _helpers_attributes(self) -> dict[str, Any]:
        return {
            f"{path}.{name}": value.detach().clone() if isinstance(value, Tensor) and not _has_escaped(value) else value
            for path, helper in self._helpers.items()
            for name, value in vars(helper).items()
            if isinstance(value, int | float | Tensor)
        }

    @torch.no_grad()
    def _load(self, client: int) -> None:
        for name, entry in self._entries.items():
            start = self._start[name]  # the second client has a different model
            entry.copy_(start * 0.9 if client and start.is_floating_point() else start)


def _helpers_of(module: L.LightningModule) -> dict[str, Any]:
    lightning_names = vars(L.LightningModule())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in lightning_names
        and not isinstance(value, nn.Module | type | Callable)
        and hasattr(value, "__dict__")
        if not type(value).__module__.startswith(("lightning.", "torch."))
    }


@contextmanager
def _restored(helpers: Iterable[Any]) -> Iterator[None]:
    before = [(helper, dict(vars(helper))) for helper in helpers]
    try:
        yield
    finally:
        for helper, values in before:
            vars(helper).clear()
            vars(helper).update(values)


def _has_escaped(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_vmap_tensor(value)
    return any(map(_has_escaped, elements(value)))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [torch.zeros(0, dtype=torch.float64), *(tensor.detach().double().cpu().flatten() for tensor in tensors)]
    )


def _try_optimizer(optimizer: Optimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    # The second client has larger gradients, to detect optimizers with a joint norm.
    steps = [
        [
            torch.randn(2, *shape, generator=generator) * torch.tensor([1.0, 3.0]).view(2, *[1] * len(shape))
            for shape in shapes
        ]
        for _ in range(2)
    ]
    alone = [
        _stepped(optimizer, [[gradient[client] for gradient in step] for step in steps], None) for client in range(2)
    ]
    for stacked, first, second in zip(_stepped(optimizer, steps, 2), *alone, strict=True):
        moved = torch.stack([first, second])
        if not (stacked - moved).norm() <= 1e-4 * moved.norm():
            raise Obstacle(f"{type(optimizer).__name__} is not elementwise, so its steps would mix the clients")


def _stepped(optimizer: Optimizer, steps: Sequence[Sequence[Tensor]], clients: int | None) -> list[Tensor]:
    twin = object.__new__(type(optimizer))
    # A `step` replaced by a scheduler would step the original optimizer.
    vars(twin).update(copy.deepcopy({name: value for name, value in vars(optimizer).items() if name != "step"}))
    parameters = [parameter for group in twin.param_groups for parameter in group["params"]]
    for group in twin.param_groups:
        group["lr"] = group.get("lr") or 0.1  # a warm-up may begin with learning rate 0
    if clients is not None:
        stack_parameters(
            parameters,
            [empty_stack(parameter.detach(), clients).copy_(parameter.detach()) for parameter in parameters],
            [twin],
        )
    start = [parameter.detach().clone() for parameter in parameters]
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter)
        type(twin).step(twin)
    return [parameter.detach() - before for parameter, before in zip(parameters, start, strict=True)]
