"""Metrics whose sums are kept in float64 wherever the metric is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn
from torchmetrics import Metric

from lightning_fed.numerics.precision import float64_device


class Float64States(Metric):
    """A metric some of whose states keep their type, and are on the CPU where the metric's device has no float64.

    ``set_dtype`` is then about the type of the result.

    Attributes:
        float64_states: Names of these states, which are tensors.

    """

    float64_states: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = ()) -> nn.Module:
        # How torchmetrics lets a metric see to some of its states itself when it is moved or converted.
        moved = super()._apply(fn, (*exclude_state, *self.float64_states))
        device = float64_device(self.device)
        for name in self.float64_states:
            setattr(self, name, getattr(self, name).to(device))
        return moved
