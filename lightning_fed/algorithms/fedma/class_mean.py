"""Mean of the clients' output layers, weighted by class counts (FedMA, section 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fed.numerics.precision import cast_back, to_float64


@torch.no_grad()
def class_mean(layers: Sequence[Tensor], counts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    r"""Averages the clients' output layers, with separate client weights for each class.

    .. math:: W_k = \sum_j \frac{n_{jk}}{\sum_{j'} n_{j'k}} W_{jk}

    Here :math:`W_{jk}` is client j's row for class k, and :math:`n_{jk}` the client's number of examples of this class.
    Classes without examples are averaged with ``weights``.

    Args:
        layers: The output layer's weight or bias on each client, shape ``(classes, ...)``.
        counts: Number of examples (or pixels) per class on each client, shape ``(classes,)``.
        weights: One weight per client, greater than 0, for classes without examples.

    Raises:
        ValueError: If lengths or shapes do not match.

    Example:
        >>> biases = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([3.0, 3.0, 3.0])]
        >>> class_mean(biases, [torch.tensor([1, 3, 0]), torch.tensor([1, 0, 0])], [3, 1])
        tensor([2.0000, 1.0000, 1.5000])
    """
    if not len(layers) == len(counts) == len(weights) > 0:
        raise ValueError(
            "Expected `layers`, `counts` and `weights` to have one element per client, at least one, but got "
            f"{len(layers)}, {len(counts)} and {len(weights)}."
        )
    for layer, count in zip(layers, counts, strict=True):
        if layer.shape != layers[0].shape or count.shape != layer.shape[:1]:
            raise ValueError(
                f"Expected layers of shape {tuple(layers[0].shape)} and a count for each class, but got the shapes "
                f"{tuple(layer.shape)} and {tuple(count.shape)}."
            )
    class_counts = torch.stack([to_float64(count.to(layers[0].device)) for count in counts])
    client_weights = to_float64(torch.tensor(list(weights), device=layers[0].device))[:, None].expand_as(class_counts)
    shares = torch.where(class_counts.sum(0) > 0, class_counts, client_weights)
    shares = shares / shares.sum(0)
    total = to_float64(torch.zeros_like(layers[0]))
    for layer, share in zip(layers, shares, strict=True):
        total += to_float64(layer) * share.view(-1, *[1] * (layer.ndim - 1))
    return cast_back(total, layers[0])
