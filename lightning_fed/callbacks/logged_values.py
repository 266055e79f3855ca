"""Collects values that a module logs outside the Trainer's loop, and reduces them over batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.lightning.internals import batch_size_of
from lightning_fed.numerics.precision import at_least_float32

_REDUCTIONS: dict[Any, str] = {
    **{torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min", sum: "sum", max: "max", min: "min"},
    **{name: name for name in ("mean", "sum", "max", "min")},
    "avg": "mean",
}


@dataclass
class LogCall:
    """One call to ``LightningModule.log`` with its arguments."""

    name: str
    value: Any
    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: Any = "mean"
    enable_graph: bool = False
    sync_dist: bool = False
    sync_dist_group: Any = None
    add_dataloader_idx: bool = True
    batch_size: int | None = None
    metric_attribute: str | None = None
    rank_zero_only: bool = False

    @property
    def reduction(self) -> str | None:
        reduce_fx = self.reduce_fx.lower() if isinstance(self.reduce_fx, str) else self.reduce_fx
        return _REDUCTIONS.get(reduce_fx)

    def weight(self, batch: Any) -> int:
        if self.batch_size is None and self.reduction == "mean" and batch is not None:
            return batch_size_of(batch)
        return self.batch_size or 1


def intercepted(take: Callable[[LogCall], None]) -> Callable[..., None]:
    """Creates a replacement for ``LightningModule.log`` and ``log_dict`` that passes each call to ``take``."""
    return lambda *args, **options: take(LogCall(*args, **options))


@dataclass
class LoggedValue:
    """Running mean, sum, maximum or minimum of the values logged under one name.

    Args:
        reduce_fx: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        total: Sum, maximum or minimum so far. For a mean, the weighted sum.
        weight: Sum of the weights.
        cases: Values from batches with a single example.
    """

    reduce_fx: str = "mean"
    total: Tensor | None = None
    weight: float = 0.0
    cases: list[Tensor] = field(default_factory=list)

    def add(self, value: Tensor, weight: float) -> None:
        value = at_least_float32(value)
        total = value * weight if self.reduce_fx == "mean" else value
        self.join(LoggedValue(self.reduce_fx, total, weight, [value.reshape(1).clone()] if weight == 1 else []))

    def join(self, added: LoggedValue) -> None:
        if self.total is None or added.total is None:
            self.total = added.total if self.total is None else self.total
        elif self.reduce_fx in ("max", "min"):
            self.total = getattr(torch, f"{self.reduce_fx}imum")(self.total, added.total)
        else:
            self.total = self.total + added.total
        self.weight += added.weight
        self.cases += added.cases

    def limited(self, weight: float) -> LoggedValue:
        """Returns the value with at most this weight in a mean over clients. Sums, maxima and minima are unchanged."""
        if self.total is None or self.reduce_fx != "mean" or self.weight <= weight:
            return self
        return replace(self, total=self.total * (weight / self.weight), weight=weight)

    def on_cpu(self) -> LoggedValue:
        cases = [torch.cat(self.cases).cpu().double()] if self.cases else []
        return replace(self, total=None if self.total is None else self.total.cpu().double(), cases=cases)

    @property
    def is_finite(self) -> bool:
        return self.total is not None and math.isfinite(float(self.total))

    @property
    def value(self) -> float:
        total = math.nan if self.total is None else float(self.total)
        return total / self.weight if self.reduce_fx == "mean" else total


@dataclass
class LoggedValues:
    """Collects the values that an evaluation logs per epoch, by name.

    Attributes:
        batch: The current batch; ``None`` between batches.
        suffix: Lightning's suffix for names with several dataloaders.
        sums: Values logged since the last :meth:`results`, by name.
        metrics: Metrics logged since the last :meth:`results`, by name.
        directions: Whether higher values are better, by metric name.
    """

    batch: Any = None
    suffix: str = ""
    sums: dict[str, LoggedValue] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    directions: dict[str, bool] = field(default_factory=dict)

    def take(self, call: LogCall) -> None:
        """Adds one logged value. Values logged only per step are skipped."""
        if call.on_epoch is False:
            return
        name = self.full_name(call)
        if isinstance(call.value, Metric):
            self.metrics[name] = call.value
            if call.value.higher_is_better is not None:
                self.directions[name] = call.value.higher_is_better
            return
        if call.reduction is None:
            raise MisconfigurationException(
                f"Expected `reduce_fx` of {call.name!r} to be one of mean, sum, max and min, but got "
                f"{call.reduce_fx!r}: log a `torchmetrics.Metric` instead."
            )
        logged = self.sums.setdefault(name, LoggedValue(call.reduction))
        logged.add(torch.as_tensor(call.value).detach().reshape(()), call.weight(self.batch))

    def full_name(self, call: LogCall) -> str:
        return f"{call.name}{self.suffix}" if call.add_dataloader_idx else call.name

    def pool(self, parts: Iterable[Mapping[str, LoggedValue]]) -> None:
        self.sums = {}
        for part in parts:
            for name, logged in part.items():
                self.sums.setdefault(name, LoggedValue(logged.reduce_fx)).join(logged)

    def results(self) -> dict[str, float]:
        values = {name: logged.value for name, logged in self.sums.items()}
        values |= {name: float(metric.compute()) for name, metric in self.metrics.items()}
        self.sums, self.metrics = {}, {}
        return values
