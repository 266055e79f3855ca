"""Base class for metrics over all samples in an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class PooledSamples(Metric):
    """Base class for metrics over all vectors and labels in an epoch.

    All values stay in memory until ``compute``, and are gathered over processes.
    """

    is_differentiable = False
    full_state_update = False
    num_features: Tensor

    def __init__(self, vectors: tuple[str, ...], labels: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in (*vectors, *labels):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.add_state("num_features", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def check_vectors(self, name: str, values: Tensor, width: int) -> None:
        width = int(self.num_features) or width
        if values.ndim != 2 or values.shape[1] != width:
            raise ValueError(f"Expected `{name}` of shape (n, {width}), but got {tuple(values.shape)}.")

    def append(self, **values: Tensor) -> None:
        """Appends vectors ``(n, d)`` or labels ``(n,)`` to the metric states with the keywords' names."""
        for name, value in values.items():  # gathering needs an equal dtype and number of axes in all processes
            getattr(self, name).append(value.detach().to(self.dtype).flatten())
            if value.ndim == 2:
                self.num_features = torch.full_like(self.num_features, value.shape[1])

    def gathered(self, name: str) -> Tensor:
        return dim_zero_cat(getattr(self, name))
