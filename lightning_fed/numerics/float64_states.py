"""Base classes of ``torchmetrics`` metrics with float64 sums on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fed.numerics.precision import float64_device, to_float64


class Float64States(Metric):
    """Base class of metrics with float64 states on any device.

    ``float64_states`` lists the names of these states. On devices without float64 the states are stored on the CPU.
    ``set_dtype`` affects only the result.
    """

    float64_states: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = ()) -> nn.Module:
        # States excluded from the cast are moved here.
        moved = super()._apply(fn, (*exclude_state, *self.float64_states))
        device = float64_device(self.device)
        for name in self.float64_states:
            setattr(self, name, getattr(self, name).to(device))
        return moved


class Float64Mean(Float64States):
    """Base class for the mean over all values from all processes. Subclasses implement ``update``."""

    is_differentiable = False
    full_state_update = False
    float64_states = ("total", "count")

    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        self.total = self.total + to_float64(values).sum()
        self.count = self.count + values.numel()

    def compute(self) -> Tensor:
        return (self.total / self.count).to(self.dtype).to(self.device)
