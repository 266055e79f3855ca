"""Whether the visits of a fit can be trained at once: what is known to forbid it, and a trial of the rest."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fed.callbacks.federated_callback import FederatedCallback
from lightning_fed.callbacks.side_pass import is_same, noted_attributes, prepare_batch, side_pass
from lightning_fed.callbacks.stack import Stack, joint_loss, many, reduced, reduction_of, stack_parameters
from lightning_fed.data.population import PlannedVisit, Population, own_random_numbers, seed_everything
from lightning_fed.data.rounds import Together, describe
from lightning_fed.data.turns import OwnNumbers, noticing_draws, stack_batches
from lightning_fed.schedule import Schedule
from lightning_fed.server import Aggregator
from lightning_fed.state import Policy, copy_state

_BATCH_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)
_MODULE_HOOKS = (
    *(*_BATCH_HOOKS, "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("lr_scheduler_step", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
_DATA_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_VISIT_HOOKS = (
    *("on_request", "on_broadcast", "on_receive", "on_client_start", "on_client_batch", "on_client_end", "on_update"),
    "on_visit_end",
)
_log = logging.getLogger(__name__)

_SEEDS = (1, 2)  # of the two clients of the trial
_TOLERANCE = 0.01  # of rounding, also of devices that round early; what is wrong is so by more
_LOW_TOLERANCE = 0.1  # likewise in low precision


class Obstacle(Exception):  # noqa: N818 - no error: the visits are then trained one after another
    """Why visits cannot be trained at once, in words."""


def put_together(
    size: int,
    trainer: L.Trainer,
    module: L.LightningModule,
    population: Population,
    schedule: Schedule,
    policies: Mapping[str, Policy],
    aggregator: Aggregator,
    optimizer_state: str,
) -> tuple[Together, Stack] | None:
    """What it takes to train visits at once; ``None``, with the reason in the log, where that is not possible.

    Args:
        size: At most how many visits.
        trainer: The Trainer.
        module: The module, which holds the global model.
        population: The clients' data.
        schedule: Who takes part.
        policies: The policy of every entry of the module.
        aggregator: The server's rule.
        optimizer_state: Whether clients start with fresh optimizer state or with their own.

    """
    own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    names = [name for name in own if policies.get(name) != "frozen"]
    try:
        check_vectorizable(trainer, module, policies, aggregator, optimizer_state)
        if "turns" not in inspect.signature(population.stream).parameters:
            raise Obstacle(f"`{type(population).__name__}.stream` has no argument `turns`")
        with own_random_numbers():
            batch, has_drawn = _first_batch(population, schedule)
            draws = try_out(trainer, module, names, batch)
    except Obstacle as obstacle:
        _log.warning("`vectorize=%d`: the clients train one after another all the same, because %s.", size, obstacle)
        return None
    is_equal = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
    return Together(size, is_equal, has_drawn), Stack(module, names, size, draws)


def _first_batch(population: Population, schedule: Schedule) -> tuple[Any, bool]:
    """A batch of a client's, and whether its data drew from Python's or NumPy's random numbers."""
    for visit in schedule.cohort(0, population.clients).visits:
        try:
            planned = PlannedVisit(visit, population.num_samples(visit.client), 1)
            if planned.num_samples < 2:  # BatchNorm cannot train on it
                continue
            seed_everything(visit.seed)
            with noticing_draws() as has_drawn:
                item = next(population.stream([planned], aside=True))
        except Exception as error:
            _log.debug("Client %r cannot be tried: %s", visit.client, describe(error))
            continue
        if item.error is None and item.batch is not None:
            return item.batch, has_drawn[0]
    raise Obstacle("no client of the first round has data to try it with")


def check_vectorizable(
    trainer: L.Trainer,
    module: L.LightningModule,
    policies: Mapping[str, Policy],
    aggregator: Aggregator,
    optimizer_state: str,
) -> None:
    """Looks at what the fit consists of.

    Args:
        trainer: The Trainer.
        module: The module.
        policies: The policy of every entry of the module.
        aggregator: The server's rule.
        optimizer_state: Whether clients start with fresh optimizer state or with their own.

    Raises:
        Obstacle: If it is known that visits cannot be trained at once.

    """
    clips = trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value"
    owned = [name for name, policy in policies.items() if policy == "sliced"]
    obstacles = {
        "manual optimization steps one client's model": not module.automatic_optimization,
        "there is not one optimizer": len(trainer.optimizers) != 1,
        "several processes share the clients": trainer.world_size > 1,
        f"{type(trainer.strategy).__name__} is not for one device alone": (
            not isinstance(trainer.strategy, SingleDeviceStrategy)
        ),
        f"the precision {trainer.precision!r} scales the loss of all clients alike": (
            bool(trainer.precision_plugin.state_dict())
        ),
        "clipping by norm would take the norm over all clients (use gradient_clip_algorithm='value')": bool(clips),
        "`optimizer_state='keep'` gives every client another count of steps": optimizer_state == "keep",
        "`max_steps` counts the steps of one client after another": trainer.max_steps != -1,
        "`limit_train_batches` counts the batches of one client after another": trainer.limit_train_batches != 1.0,
        f"{type(aggregator).__name__} gives clients models of other shapes": aggregator.resizes,
        f"clients hold some rows of {owned[:1]} only": bool(owned),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise Obstacle(obstacle)
    _check_hooks(module, _MODULE_HOOKS, L.LightningModule)
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        _check_hooks(datamodule, _DATA_HOOKS, L.LightningDataModule)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if not getattr(callback, "takes_stacks", False):
            _check_hooks(callback, _BATCH_HOOKS, L.Callback)
            if isinstance(callback, FederatedCallback):
                _check_hooks(callback, _VISIT_HOOKS, FederatedCallback)


def _check_hooks(owner: Any, hooks: Iterable[str], base: type) -> None:
    for hook in hooks:
        if not is_overridden(hook, owner, base):
            continue
        first = next((each for each in type(owner).__mro__ if hook in vars(each)), base)
        is_lightnings = first.__module__.startswith("lightning.") and type(owner) is not L.pytorch.callbacks.LambdaCallback
        if not is_lightnings:
            raise Obstacle(f"`{type(owner).__name__}.{hook}` is written for one client's batch or model")


def try_out(trainer: L.Trainer, module: L.LightningModule, names: Sequence[str], batch: Any) -> bool:
    """Trains two clients on a batch at once and one after the other, beside the fit, and compares.

    The module's values, metrics and attributes are as before afterwards; random numbers are the caller's to put aside.

    Args:
        trainer: The Trainer.
        module: The module.
        names: Names of the parameters and buffers that a client may have of its own.
        batch: A batch as the loader gives it.

    Returns:
        Whether the training step draws random numbers.

    Raises:
        Obstacle: If the results differ, or cannot be had.

    """
    (optimizer,) = trainer.optimizers
    modes = [(layer, layer.training) for layer in module.modules()]
    trial = _Trial(module, names)
    with side_pass(module, trial.log, gradients=True):
        for layer, mode in modes:
            layer.training = mode
        try:
            with trainer.precision_plugin.forward_context():
                batch = prepare_batch(trainer, module, batch)
                draws = trial.run(batch, trainer.precision in ("32-true", "64-true"))
        except Obstacle:
            raise
        except Exception as error:
            raise Obstacle(f"in a trial `training_step` raised {describe(error)}") from error
    try:
        _try_optimizer(optimizer)
    except Obstacle:
        raise
    except Exception as error:
        raise Obstacle(f"in a trial {type(optimizer).__name__} raised {describe(error)}") from error
    return draws


class _Trial:
    """The training steps of two clients whose models differ, on the same batch."""

    def __init__(self, module: L.LightningModule, names: Sequence[str]) -> None:
        self._module, self._names = module, names
        self._step: Callable[..., Any] = module.training_step
        self._rest = [0] * (len(inspect.signature(self._step).parameters) > 1)
        own = dict[str, Tensor](module.named_parameters()) | dict(module.named_buffers())
        self._own = {name: own[name] for name in names}
        self._start = copy_state(self._own)
        self._trained = [value for value in module.parameters() if value.requires_grad]
        self._logged: list[Tensor] = []
        self._reductions: list[str] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if isinstance(value, Metric):
            raise Obstacle(f"the metric {name!r} would take the clients for examples")
        self._logged.append(torch.as_tensor(value).detach())
        self._reductions.append(reduction_of(options))

    def run(self, batch: Any, is_precise: bool) -> bool:
        first = self._alone(0, batch)
        before = noted_attributes(self._module)
        second = self._alone(1, batch)
        for name, value in noted_attributes(self._module).items():
            if not is_same(before.get(name), value):
                raise Obstacle(f"`training_step` writes the attribute {name!r}, which would be all clients'")
        draws = False
        try:
            together = self._together(batch, draws)
        except Exception:
            draws = True  # the most common reason
            together = self._together(batch, draws)
        tolerance = _TOLERANCE if is_precise else _LOW_TOLERANCE
        for what, one, other, both in zip(("loss", "log", "gradients", "buffers"), first, second, together, strict=True):
            if what == "log":
                values = zip(one, other, self._reductions, strict=False)
                alone = _joined([reduced(torch.stack([left, right]), how) for left, right, how in values])
            else:
                alone = (one + other) / 2 if what == "loss" else torch.cat([one, other])
            if alone.shape != both.shape or not (alone - both).norm() <= tolerance * alone.norm() + 1e-12:
                raise Obstacle(f"in a trial of two clients at once the {what} differed from one after the other")
        return draws

    def _alone(self, client: int, batch: Any) -> tuple[Tensor, ...]:
        self._load(client)
        seed_everything(_SEEDS[client])
        with noticing_draws() as has_drawn:
            output = self._step(batch, *self._rest)
        if has_drawn[0]:
            raise Obstacle("`training_step` draws from Python's or NumPy's random numbers, which would be all clients'")
        loss = output["loss"] if isinstance(output, Mapping) else output
        return self._results(loss, lambda value: [value])

    def _together(self, batch: Any, draws: bool) -> tuple[Tensor, ...]:
        stack = Stack(self._module, self._names, len(_SEEDS), draws)
        self._logged = []
        for client in range(len(_SEEDS)):
            self._load(client)
            stack.take()
        stack.enter([])
        try:
            parts = stack_batches(dict.fromkeys(range(len(_SEEDS)), batch))
            numbers = OwnNumbers(_SEEDS, everywhere=False)
            loss = joint_loss([stack.step(self._step, part, self._rest, numbers) for part in parts])
            rows = {client: stack.row(client) for client in range(len(_SEEDS))}
            results = self._results(loss, lambda value: list(value))
        finally:
            stack.leave()
        buffers = [row[name] for row in rows.values() for name in self._buffer_names()]
        return (*results[:3], _joined(buffers))

    def _results(self, loss: Tensor, rows: Callable[[Tensor], list[Tensor]]) -> tuple[Tensor, ...]:
        """Loss, logged values, gradients and buffers."""
        gradients = torch.autograd.grad(loss, self._trained, allow_unused=True)
        whole = [
            rows(torch.zeros_like(own) if gradient is None else gradient)
            for own, gradient in zip(self._trained, gradients, strict=True)
        ]
        by_client = [each for client in zip(*whole, strict=True) for each in client]
        logged, self._logged = self._logged, []
        buffers = [self._own[name] for name in self._buffer_names()]
        return tuple(map(_joined, ([loss], logged, by_client, buffers)))

    def _buffer_names(self) -> list[str]:
        return [name for name, value in self._own.items() if not isinstance(value, nn.Parameter)]

    @torch.no_grad()
    def _load(self, client: int) -> None:
        """Gives the module the values that it came with, or others."""
        for name, own in self._own.items():
            start = self._start[name]
            own.copy_(start * 0.9 if client and start.is_floating_point() else start)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(each.detach().double().cpu().flatten() for each in tensors)])


def _try_optimizer(optimizer: Optimizer) -> None:
    """Steps twice with two clients' gradients, at once and one after the other."""
    generator = torch.Generator().manual_seed(0)
    shapes = [own.shape for group in optimizer.param_groups for own in group["params"]]
    # Of another size for the second client, as a norm of both would show.
    steps = [
        [torch.randn(2, *shape, generator=generator) * torch.tensor([1.0, 3.0]).view(2, *[1] * len(shape)) for shape in shapes]
        for _ in range(2)
    ]
    alone = [_stepped(optimizer, [[each[client] for each in step] for step in steps], None) for client in range(2)]
    for together, one, other in zip(_stepped(optimizer, steps, 2), *alone, strict=True):
        moved = torch.stack([one, other])
        if not (together - moved).norm() <= 1e-4 * moved.norm():
            raise Obstacle(f"{type(optimizer).__name__} does not treat every number alone: it would mix the clients")


def _stepped(optimizer: Optimizer, steps: Sequence[Sequence[Tensor]], clients: int | None) -> list[Tensor]:
    """How far a copy of the optimizer moves copies of its parameters."""
    twin = object.__new__(type(optimizer))
    # Without what a scheduler has put in the place of `step`, which steps the original.
    vars(twin).update(copy.deepcopy({name: value for name, value in vars(optimizer).items() if name != "step"}))
    parameters = [own for group in twin.param_groups for own in group["params"]]
    for group in twin.param_groups:
        group["lr"] = group.get("lr") or 0.1  # a warm-up may begin with 0
    if clients is not None:
        stack_parameters(parameters, [many(own.detach(), clients).copy_(own.detach()) for own in parameters], [twin])
    start = [own.detach().clone() for own in parameters]
    for gradients in steps:
        for own, gradient in zip(parameters, gradients, strict=True):
            own.grad = gradient.to(own)
        type(twin).step(twin)
    return [own.detach() - before for own, before in zip(parameters, start, strict=True)]
