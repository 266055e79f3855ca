"""Metrics with sums in float64 on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn
from torchmetrics import Metric

from lightning_fed.numerics.precision import float64_device


class Float64States(Metric):
    """Metric with float64 states, which keep their type and lie on the CPU where the metric's device has no float64.

    ``set_dtype`` sets the type of the result only.

    Attributes:
        float64_states: Names of the states that stay in float64; they are tensors.

    """

    float64_states: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = ()) -> nn.Module:
        # torchmetrics leaves the excluded states to the metric when it moves or converts it.
        moved = super()._apply(fn, (*exclude_state, *self.float64_states))
        device = float64_device(self.device)
        for name in self.float64_states:
            setattr(self, name, getattr(self, name).to(device))
        return moved
