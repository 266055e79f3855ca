"""Base of the metrics that keep all samples of an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class PooledSamples(Metric):
    """Metric over all vectors and labels that were added, in the metric's type; processes gather them.

    They are kept flat, and labels as floats: a process without data then has an empty state of the same type and
    dimensions.

    Args:
        vectors: Names of the states that hold vectors of one length.
        labels: Names of the states that hold labels.
        **kwargs: Arguments of ``torchmetrics.Metric``.

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
        """Makes sure that vectors are as long as those before them, or as ``width``.

        Raises:
            ValueError: If they are not.

        """
        width = int(self.num_features) or width
        if values.ndim != 2 or values.shape[1] != width:
            raise ValueError(f"Expected `{name}` of shape (n, {width}), but got {tuple(values.shape)}.")

    def append(self, **values: Tensor) -> None:
        """Adds vectors, shape ``(n, d)``, and labels, shape ``(n,)``, by the names of their states."""
        for name, value in values.items():
            getattr(self, name).append(value.detach().to(self.dtype).flatten())
            if value.ndim == 2:
                self.num_features = torch.full_like(self.num_features, value.shape[1])

    def gathered(self, name: str) -> Tensor:
        """All values of a state, one after another."""
        return dim_zero_cat(getattr(self, name))
