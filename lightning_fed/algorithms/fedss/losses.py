"""FedSS's losses for clients whose last layer has rows for only some classes.

"Efficient image representation learning with federated sampled softmax" (FedSS), submission to ICLR 2022, equations 1
to 8. A client uses its own classes P, the positives, and m other classes, the negatives, drawn uniformly from the other
n - |P| classes.

The negatives also represent the classes not drawn. With ln((n - |P|) / m) added to the negatives' logits, the sum of
exponentials is an unbiased estimate of the sum over all classes (Bengio and Senecal, "Adaptive Importance Sampling to
Accelerate Training of a Neural Probabilistic Language Model", IEEE Transactions on Neural Networks 2008). Positives
need no correction (Blanc and Rendle, "Adaptive Sampled Softmax with Kernel Based Sampling", ICML 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.numerics.precision import at_least_float32, to_float64

Objective = Literal["fedss", "negonly", "posonly", "full"]
Reduction = Literal["mean", "sum", "none"]
Norm = Literal["l2", "mean_abs"]
MarginOf = Literal["angle", "cosine"]


def sample_negatives(positives: Tensor, num_classes: int, num_negatives: int, generator: np.random.Generator) -> Tensor:
    r"""Draws classes :math:`N \subset [n] \setminus P`, called negatives. Returns sorted int64 indices on the CPU.

    Args:
        positives: The client's classes :math:`P`, integers, shape ``(classes,)``, in any order.
        num_classes: Number :math:`n` of all classes.
        num_negatives: Number of classes to draw, without replacement. If fewer exist, all are returned.
        generator: The random generator.

    Raises:
        ValueError: If a number is too small, or a positive is outside the range of classes.

    Example:
        >>> sample_negatives(torch.tensor([0, 3]), 6, 4, np.random.default_rng(0))
        tensor([1, 2, 4, 5])
    """
    num_classes = check_count("num_classes", num_classes)
    num_negatives = check_count("num_negatives", num_negatives, lowest=0)
    known = torch.unique(_whole_numbers("positives", positives).cpu())
    if len(known) and (known[0] < 0 or known[-1] >= num_classes):
        raise ValueError(
            f"Expected `positives` to be classes from 0 to {num_classes - 1}, but got {int(known[0])} to "
            f"{int(known[-1])}."
        )
    num_unknown = num_classes - len(known)
    draw = generator.choice(num_unknown, min(num_negatives, num_unknown), replace=False, shuffle=False)
    ranks = torch.from_numpy(np.sort(draw)).to(torch.int64)
    # The negative with rank r follows all positives with at most r negatives before.
    return ranks + torch.searchsorted(known - torch.arange(len(known)), ranks, right=True)


def log_correction(num_positives: int, num_negatives: int, num_classes: int) -> float:
    r"""Computes the correction added to the logits of drawn classes, the negatives (eq. 3).

    .. math:: -\ln(m q), \qquad q = \frac{1}{n - |P|}

    Args:
        num_positives: Number :math:`|P|` of the client's classes.
        num_negatives: Number :math:`m` of drawn classes.
        num_classes: Number :math:`n` of all classes.

    Raises:
        ValueError: If positives and negatives exceed ``num_classes``.

    Example:
        >>> round(log_correction(2, 2, 6), 6), log_correction(2, 4, 6)
        (0.693147, 0.0)
    """
    if num_positives + num_negatives > num_classes:
        raise ValueError(
            f"Expected `num_classes` to be at least the number of positives and negatives"
            f" ({num_positives + num_negatives}), but got {num_classes}."
        )
    if num_negatives == 0:
        return 0.0
    return math.log((num_classes - num_positives) / num_negatives)


def sampled_logits(
    logits: Tensor,
    is_positive: Tensor,
    correction: float,
    target: Tensor | None = None,
    *,
    objective: Objective = "fedss",
) -> Tensor:
    r"""Corrects a client's logits, shape ``(N, S)``, so that the cross-entropy is the FedSS loss.

    The client's own classes are called positives, and drawn other classes negatives. Logits of negatives become
    :math:`o'_j = o_j - \ln(m q)`, with :math:`m` and :math:`q` from :func:`log_correction`. The logits of excluded
    classes become :math:`-\infty`. "posonly" excludes all negatives, "negonly" all positives except the target.

    Args:
        logits: Logits :math:`o` for the client's positives and negatives, shape ``(N, S)``.
        is_positive: Mask for the positives, bool, shape ``(S,)``.
        correction: Result of :func:`log_correction`.
        target: Target column for each row, shape ``(N,)``; negative for no target. Required for "negonly".
        objective: See :func:`sampled_softmax_loss`.

    Raises:
        ValueError: If the objective is unknown, shapes do not match, or a required target is missing.

    Example:
        >>> sampled_logits(torch.zeros(1, 3), torch.tensor([True, True, False]), 0.5)
        tensor([[0.0000, 0.0000, 0.5000]])
        >>> target = torch.tensor([1])
        >>> sampled_logits(torch.zeros(1, 3), torch.tensor([True, True, False]), 0.5, target, objective="negonly")
        tensor([[  -inf, 0.0000, 0.5000]])
    """
    check_option("objective", objective, Objective)
    _check_columns(logits, is_positive)
    logits = at_least_float32(logits)
    if objective == "full":
        return logits
    if objective == "posonly":
        return logits.masked_fill(~is_positive, -torch.inf)
    logits = logits + (~is_positive).to(logits.dtype) * correction
    if objective == "fedss":
        return logits
    if target is None:
        raise ValueError("Expected `target` with objective='negonly', but got None.")
    _check_rows(logits, target)
    is_other = torch.arange(len(is_positive), device=target.device) != target.unsqueeze(1)
    # A fully masked row would have NaN gradients, so a row without a target retains all classes.
    return logits.masked_fill(is_positive & is_other & (target >= 0).unsqueeze(1), -torch.inf)


def with_margin(cosines: Tensor, target: Tensor, margin: float, margin_of: MarginOf) -> Tensor:
    r"""Adds a margin to the target cosines (ArcFace, CosFace).

    .. math:: \cos(\theta_t + m) \text{ (angle, ArcFace)} \qquad \cos\theta_t - m \text{ (cosine, CosFace)}

    Here :math:`\theta_t` is the angle between features and the target's weight row. For angles above :math:`\pi - m`
    ArcFace uses :math:`\cos\theta_t - m \sin m`. References: Deng et al., "ArcFace", CVPR 2019; Wang et al., "CosFace",
    CVPR 2018.

    Args:
        cosines: Cosines :math:`\cos\theta`, shape ``(N, S)``.
        target: Target column for each row, shape ``(N,)``; negative for no target.
        margin: Margin :math:`m`, in radians or as a cosine difference.
        margin_of: Quantity changed by the margin: ``"angle"`` or ``"cosine"``.

    Example:
        >>> with_margin(torch.tensor([[0.5, 0.5]]), torch.tensor([1]), 0.2, "cosine")
        tensor([[0.5000, 0.3000]])
    """
    columns = target.to(cosines.device, torch.int64).clamp(min=0).unsqueeze(1)
    plain = cosines.gather(1, columns)
    if margin_of == "cosine":
        shifted = plain - margin
    else:
        angles = plain.clamp(-1 + 1e-6, 1 - 1e-6).acos()  # clamped to give a finite derivative
        shifted = torch.where(angles <= math.pi - margin, (angles + margin).cos(), plain - margin * math.sin(margin))
    has_class = (target >= 0).unsqueeze(1).to(cosines.device)
    return cosines.scatter(1, columns, torch.where(has_class, shifted, plain))


def sampled_softmax_loss(
    logits: Tensor,
    target: Tensor,
    is_positive: Tensor,
    num_classes: int,
    *,
    objective: Objective = "fedss",
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Computes a client's loss from logits for only some classes (equations 2 and 5 to 8).

    .. math::
        \text{fedss: } \ln\Big(1 + \sum_{j \in P \cup N \setminus t} e^{o'_j - o'_t}\Big) \qquad
        \text{negonly: } \ln\Big(1 + \sum_{j \in N} e^{o'_j - o'_t}\Big)

    .. math::
        \text{posonly: } \ln\Big(1 + \sum_{j \in P \setminus t} e^{o_j - o_t}\Big) \qquad
        \text{full: } \ln\Big(1 + \sum_{j \in [n] \setminus t} e^{o_j - o_t}\Big)

    Here :math:`P` are the client's own classes (positives), :math:`N` the drawn other classes (negatives), and
    :math:`[n]` all classes. The corrected logit :math:`o'_j` is :math:`o_j` for positives, and :math:`o_j` plus
    :func:`log_correction` for negatives. If all other classes are negatives, "fedss" equals "full".

    Args:
        logits: Logits :math:`o` for positives and negatives, shape ``(examples, S)``.
        target: Target columns :math:`t`, all positives, integers, shape ``(examples,)``. -100 excludes an example.
        is_positive: Mask for the positives among the columns, bool, shape ``(S,)``.
        num_classes: Number :math:`n` of all classes.
        objective: One of the losses above. "full" needs logits for all classes.
        reduction: Mean or sum over labelled examples, or one value per example.

    Raises:
        ValueError: If an option or a target is invalid, shapes differ, or "full" lacks some logits.

    Example:
        >>> logits, is_positive = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([True, True, False, False])
        >>> sampled_softmax_loss(logits, torch.tensor([0]), is_positive, num_classes=6)
        tensor(0.5528)
        >>> sampled_softmax_loss(logits, torch.tensor([0]), is_positive, num_classes=6, objective="negonly")
        tensor(0.3150)
    """
    check_option("reduction", reduction, Reduction)
    check_option("objective", objective, Objective)
    _check_columns(logits, is_positive)
    _check_rows(logits, target)
    target = _whole_numbers("target", target)
    if objective == "full" and logits.shape[1] != num_classes:
        raise ValueError(f"Expected {num_classes} columns in `logits` for objective='full', but got {logits.shape[1]}.")
    columns = target[target != -100]
    wrong = torch.unique(columns[~torch.isin(columns, is_positive.nonzero())])
    if len(wrong):
        raise ValueError(
            f"Expected `target` to be -100 or a column of `logits` marked in `is_positive`, but got {wrong.tolist()}."
        )
    num_positives = int(is_positive.sum())
    correction = log_correction(num_positives, len(is_positive) - num_positives, num_classes)
    logits = sampled_logits(logits, is_positive, correction, target, objective=objective)
    return F.cross_entropy(logits, target, reduction=reduction)


@torch.no_grad()
def gradient_noise(change: Iterable[Tensor], reference: Iterable[Tensor], norm: Norm = "l2") -> Tensor:
    r"""Computes the distance between a round's update and the update with the full softmax.

    .. math:: \lVert \bar g - \bar g_{\mathrm{full}} \rVert_2 \quad \text{or} \quad
        \frac{1}{D} \sum_{i=1}^D |\bar g_i - \bar g_{\mathrm{full}, i}|

    Here :math:`D` is the number of elements. The paper reports this distance in figure 9 but does not name the norm.

    Args:
        change: The round's update :math:`\bar g` for some parameters.
        reference: The update with the full softmax, for the same parameters.
        norm: Euclidean norm of the difference, or mean absolute difference.

    Raises:
        ValueError: If ``norm`` is unknown, or the lists are empty or differ in length or shapes.

    Example:
        >>> gradient_noise([torch.tensor([3.0, 1.0]), torch.tensor([4.0])], [torch.tensor([0.0, 1.0]), torch.zeros(1)])
        tensor(5., dtype=torch.float64)
    """
    check_option("norm", norm, Norm)
    changes, references = list(change), list(reference)
    shapes, expected = [tuple(value.shape) for value in changes], [tuple(value.shape) for value in references]
    if not shapes or shapes != expected:
        raise ValueError(f"Expected `change` and `reference` to have the same shapes, but got {shapes} and {expected}.")
    pairs = zip(changes, references, strict=True)
    difference = torch.cat([(to_float64(value) - to_float64(full)).flatten() for value, full in pairs])
    return torch.linalg.vector_norm(difference) if norm == "l2" else difference.abs().mean()


def _whole_numbers(name: str, values: Tensor) -> Tensor:
    if values.ndim != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(
            f"Expected `{name}` to be a 1D tensor of integers, but got {values.dtype} of shape {tuple(values.shape)}."
        )
    return values.to(torch.int64)


def _check_columns(logits: Tensor, is_positive: Tensor) -> None:
    if logits.ndim != 2 or is_positive.shape != logits.shape[1:] or is_positive.dtype != torch.bool:
        raise ValueError(
            "Expected `logits` of shape (N, S) and `is_positive` of type bool and shape (S,), but got"
            f" {tuple(logits.shape)} and {is_positive.dtype} of shape {tuple(is_positive.shape)}."
        )


def _check_rows(logits: Tensor, target: Tensor) -> None:
    if target.shape != logits.shape[:1]:
        raise ValueError(
            f"Expected `target` to have one class for each of the {len(logits)} rows of the logits, but got shape "
            f"{tuple(target.shape)}."
        )
