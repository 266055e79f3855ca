"""Class prototypes (feature means by class), averaged over clients and rounds.

Prototypes are tensors over *all* classes. A class without examples has count 0 and a row of zeros. Label maps are
resized to the feature maps, as in SDR's code (Michieli and Zanuttigh, CVPR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_option
from lightning_fed.features.label_maps import VoidLabel, class_indices, resize_labels
from lightning_fed.numerics.chunks import chunk_steps
from lightning_fed.numerics.precision import float64_device

PrototypeWeighting = Literal["class_count", "num_samples", "uniform"]
PrototypeMemory = Literal["ema", "cumulative"]

_DECAY = 0.1  # weight of the previous value in the moving average


class Prototypes(NamedTuple):
    """Mean and number of feature vectors for each class.

    Attributes:
        means: Mean features, shape ``(C, d)``; zeros for absent classes.
        counts: Numbers of feature vectors, shape ``(C,)``, integers; 0 for absent classes.

    Example:
        >>> Prototypes(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([3, 0])).present
        tensor([ True, False])
    """

    means: Tensor
    counts: Tensor

    @property
    def present(self) -> Tensor:
        """Mask of the classes with at least one feature vector, shape ``(C,)``, boolean."""
        return self.counts > 0


@torch.no_grad()
def class_sums(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    ignore_index: VoidLabel = "auto",
    exclude_classes: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Computes sums and counts of feature vectors by class.

    Args:
        features: Feature vectors, shape ``(N, d)``, or feature maps, shape ``(N, d, *size)``.
        labels: Classes, integers, shape ``(N,)`` or ``(N, *label_size)``. Label maps are resized to the feature maps.
        num_classes: Number of classes :math:`C`.
        ignore_index: Label for void pixels, or ``None``. The default is 255, unless 255 is a class.
        exclude_classes: Classes to exclude, such as a background.

    Returns:
        Sums, shape ``(C, d)``, float64, and counts, shape ``(C,)``, int64. Both can be added over batches.

    Raises:
        ValueError: If shapes or dtypes do not match, or a label or option is invalid.

    Example:
        >>> sums, counts = class_sums(torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]]), torch.tensor([1, 1, 255]), 3)
        >>> sums.tolist(), counts.tolist()
        ([[0.0, 0.0], [4.0, 4.0], [0.0, 0.0]], [0, 2, 0])
    """
    if features.ndim < 2 or labels.ndim != features.ndim - 1 or labels.shape[0] != features.shape[0]:
        raise ValueError(
            "Expected `features` of shape (N, d) with `labels` of shape (N,), or features of shape (N, d, *size) "
            f"with labels that have the same number of spatial dimensions, but got {tuple(features.shape)} and "
            f"{tuple(labels.shape)}."
        )
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"Expected `labels` to be integers, but got {labels.dtype}.")
    indices = class_indices(resize_labels(labels, features.shape[2:]), num_classes, ignore_index, exclude_classes)
    indices = indices.flatten(1) if indices.ndim > 1 else indices[:, None]
    features = features.flatten(2) if features.ndim > 2 else features[..., None]
    count, width, positions = features.shape
    # An extra row collects excluded features, so non-finite values cannot reach the classes.
    device = float64_device(features.device)
    sums = torch.zeros(num_classes + 1, width, dtype=torch.float64, device=device)
    images, pixels = chunk_steps(count, width, positions)
    for image_features, image_indices in zip(torch.split(features, images), torch.split(indices, images), strict=True):
        for pixel_features, pixel_indices in zip(
            torch.split(image_features, pixels, 2), torch.split(image_indices, pixels, 1), strict=True
        ):
            vectors = (
                pixel_features.to(device)
                .transpose(1, 2)
                .to(torch.float64, memory_format=torch.contiguous_format)
                .reshape(-1, width)
            )
            sums.index_add_(0, pixel_indices.flatten().to(device), vectors)
    return sums[:-1], torch.bincount(indices.flatten(), minlength=num_classes + 1)[:-1].to(device)


def class_prototypes(sums: Tensor, counts: Tensor, *, dtype: torch.dtype = torch.float32) -> Prototypes:
    """Computes prototypes from sums and counts.

    Args:
        sums: Sums of feature vectors for each class, shape ``(C, d)``, see :func:`class_sums`.
        counts: Number of feature vectors in each class, shape ``(C,)``.
        dtype: The means' dtype.

    Example:
        >>> class_prototypes(torch.tensor([[2.0, 4.0], [5.0, 5.0]]), torch.tensor([2, 0]))
        Prototypes(means=tensor([[1., 2.],
                [0., 0.]]), counts=tensor([2, 0]))
    """
    means = sums / counts.clamp(min=1).unsqueeze(1)
    return Prototypes(means.where(counts.unsqueeze(1) > 0, 0).to(dtype), counts)


@torch.no_grad()
def aggregate_prototypes(
    clients: Sequence[Prototypes],
    weighting: PrototypeWeighting = "class_count",
    num_samples: Sequence[int] | None = None,
) -> Prototypes:
    r"""Averages the clients' prototypes of one round.

    .. math:: P_t[c] = \frac{\sum_{k: c \in C_k} \omega_{k,c}\, p_k[c]}{\sum_{k: c \in C_k} \omega_{k,c}}

    Here :math:`P_t[c]` is the mean for class :math:`c` in round :math:`t`, and :math:`p_k[c]` a prototype of client
    :math:`k` with classes :math:`C_k`. The paper states only a "weighted average". Counts are summed.

    Args:
        clients: Client prototypes, at least one.
        weighting: Kind of weights :math:`\omega_{k,c}`: number of feature vectors, number of examples, or 1.
        num_samples: Number of examples for each client, for ``weighting="num_samples"``.

    Raises:
        ValueError: If ``clients`` is empty, ``weighting`` is unknown or ``num_samples`` is invalid.

    Example:
        >>> ann = Prototypes(torch.tensor([[0.0], [1.0]]), torch.tensor([1, 5]))
        >>> bob = Prototypes(torch.tensor([[4.0], [0.0]]), torch.tensor([3, 0]))
        >>> aggregate_prototypes([ann, bob]).means.tolist()
        [[3.0], [1.0]]
    """
    check_option("weighting", weighting, PrototypeWeighting)
    if not clients:
        raise ValueError("Expected `clients` to contain the prototypes of at least one client, but got none.")
    check_same_shape(*clients)
    counts = torch.stack([client.counts for client in clients])
    present = (counts > 0).to(torch.float64)
    if weighting == "class_count":
        weights = counts.to(torch.float64)
    elif weighting == "num_samples":
        weights = present * _sizes(num_samples, len(clients), counts.device)[:, None]
    else:
        weights = present
    sums = torch.zeros(clients[0].means.shape, dtype=torch.float64, device=counts.device)
    for client, weight in zip(clients, weights, strict=True):
        sums += client.means.to(torch.float64).where(client.present[:, None], 0) * weight[:, None]
    total = weights.sum(0)
    means = sums / total.where(total > 0, 1).unsqueeze(1)
    return Prototypes(means.to(clients[0].means.dtype), counts.sum(0).where(total > 0, 0))


@torch.no_grad()
def update_prototypes(previous: Prototypes | None, current: Prototypes, memory: PrototypeMemory = "ema") -> Prototypes:
    r"""Updates the mean prototypes over all rounds with a new round's prototypes.

    .. math:: \bar P_t[c] = \begin{cases}
        \beta \bar P_{t-1}[c] + (1 - \beta) P_t[c] & \text{if } c \text{ was known and is seen now} \\
        P_t[c] & \text{if } c \text{ is seen for the first time} \\
        \bar P_{t-1}[c] & \text{if } c \text{ is not seen now} \end{cases}

    The FedMargin paper has no equation, so this one is a reconstruction. The value :math:`\beta = 0.1` is from the code
    for FedSpace (Shenaj et al., CVPR Workshops 2023). Counts are added.

    Args:
        previous: Mean prototypes :math:`\bar P_{t-1}` before round :math:`t`; ``None`` in the first round.
        current: The round's prototypes :math:`P_t`, see :func:`aggregate_prototypes`.
        memory: ``"ema"`` for this moving average, ``"cumulative"`` for the mean weighted by counts, as in the code for
            SDR (Michieli and Zanuttigh, CVPR 2021).

    Raises:
        ValueError: If ``memory`` is unknown or shapes differ.

    Example:
        >>> old = Prototypes(torch.tensor([[0.0], [5.0]]), torch.tensor([1, 1]))
        >>> new = Prototypes(torch.tensor([[1.0], [0.0]]), torch.tensor([1, 0]))
        >>> update_prototypes(old, new).means
        tensor([[0.9000],
                [5.0000]])
    """
    check_option("memory", memory, PrototypeMemory)
    if previous is None:
        return current
    check_same_shape(previous, current)
    counts = previous.counts + current.counts
    if memory == "ema":
        share = torch.full(counts.shape, _DECAY, dtype=torch.float64, device=counts.device)
    else:
        share = previous.counts / counts.clamp(min=1).to(torch.float64)
    share = torch.where(previous.present, share.where(current.present, 1.0), 0.0).unsqueeze(1)
    old, new = (
        prototypes.means.to(torch.float64).where(prototypes.present.unsqueeze(1), 0)
        for prototypes in (previous, current)
    )
    return Prototypes((share * old + (1 - share) * new).to(current.means.dtype), counts)


def reference_prototypes(previous: Prototypes | None, current: Prototypes) -> Prototypes:
    r"""Returns the prototypes compared with client prototypes in the aggregate prototype margin (APM).

    The result has the ``previous`` prototype of each class, a mean over earlier rounds. A new class has the
    ``current`` prototype, from this round. We reconstructed this definition from the FedMargin paper.

    Raises:
        ValueError: If shapes differ.

    Example:
        >>> old = Prototypes(torch.tensor([[0.0], [0.0]]), torch.tensor([1, 0]))
        >>> new = Prototypes(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1]))
        >>> reference_prototypes(old, new).means.tolist()
        [[0.0], [2.0]]
    """
    if previous is None:
        return current
    check_same_shape(previous, current)
    return Prototypes(
        torch.where(previous.present.unsqueeze(1), previous.means, current.means),
        torch.where(previous.present, previous.counts, current.counts),
    )


def check_same_shape(*prototypes: Prototypes) -> None:
    """Refuses two sets of class prototypes with different numbers of classes or features."""
    shape = prototypes[0].means.shape
    for means, counts in prototypes:
        if means.shape != shape or counts.shape != shape[:1]:
            raise ValueError(
                f"Expected prototypes with equal shapes, but got a set with means {tuple(means.shape)} and"
                f" counts {tuple(counts.shape)}, and the first set has means {tuple(shape)}."
            )


def _sizes(num_samples: Sequence[int] | None, count: int, device: torch.device) -> Tensor:
    if num_samples is None or len(num_samples) != count or min(num_samples) < 0:
        raise ValueError(
            f"Expected `num_samples` to contain {count} non-negative numbers of examples, one per client, but got "
            f"{num_samples}."
        )
    return torch.tensor(list(num_samples), dtype=torch.float64, device=device)
