"""Mean entropy over all pixels, from class probabilities or features, as a metric."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_option
from lightning_fed.features.label_maps import VoidLabel, resize_labels, void_label
from lightning_fed.metrics.functional.entropy import Activation, feature_entropy, softmax_entropy
from lightning_fed.numerics.float64_states import Float64Mean

Level = Literal["softmax", "feature"]


class MeanEntropy(Float64Mean):
    """Mean entropy over all pixels, computed from class probabilities or features.

    The entropy of class probabilities is low for a confident model. The entropy of features is high with many active
    channels. See :func:`~lightning_fed.metrics.functional.softmax_entropy` and
    :func:`~lightning_fed.metrics.functional.feature_entropy`.

    Args:
        level: Kind of input: ``"softmax"`` for logits, ``"feature"`` for features.
        activation: Function that makes features non-negative.
        normalize: Whether to divide by the logarithm of the number of channels, so that the result is in 0 to 1.
        ignore_index: Label of pixels to skip; ``None`` for no label, ``"auto"`` for 255 unless 255 is a class.
        **kwargs: Arguments for ``torchmetrics.Metric``.

    Raises:
        ValueError: If ``level`` or ``activation`` is unknown.

    Example:
        >>> import torch
        >>> entropy = MeanEntropy(normalize=True)
        >>> entropy.update(torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.5, 0.0]]).log())
        >>> entropy.compute()
        tensor(0.6804)
    """

    higher_is_better = None

    def __init__(
        self,
        level: Level = "softmax",
        *,
        activation: Activation = "relu",
        normalize: bool = False,
        ignore_index: VoidLabel = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_option("level", level, Level)
        check_option("activation", activation, Activation)
        self.level = level
        self.activation = activation
        self.normalize = normalize
        self.ignore_index = ignore_index

    @torch.no_grad()
    def update(self, values: Tensor, labels: Tensor | None = None) -> None:
        """Adds logits or features, shape ``(N, C, *size)``. Labels, ``(N, *label_size)``, only mark void pixels."""
        if self.level == "softmax":
            entropies = softmax_entropy(values, normalize=self.normalize)
        else:
            entropies = feature_entropy(values, activation=self.activation, normalize=self.normalize)
        if labels is not None:
            if labels.ndim != entropies.ndim or labels.shape[0] != entropies.shape[0]:
                raise ValueError(
                    f"Expected `labels` to have the dimensions of {tuple(entropies.shape)}, but got"
                    f" {tuple(labels.shape)}."
                )
            void = void_label(self.ignore_index, values.shape[1] if self.level == "softmax" else 1)
            if void is not None:
                entropies = entropies[resize_labels(labels, entropies.shape[1:]) != void]
        self.add(entropies)
