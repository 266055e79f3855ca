"""FedSS: a last layer of very many classes, of which a client holds a few.

"Efficient image representation learning with federated sampled softmax" (FedSS), submission to ICLR 2022; the losses
are in :mod:`lightning_fed.algorithms.fedss.losses`.

In a visit the client's label space is that of its classes: the layer has the rows of these classes only, labels are
their columns, and in training the layer gives the logits whose cross-entropy is the client's loss. So a
``training_step`` with ``F.cross_entropy(self(x), y)`` stays as it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.algorithms.fedss.losses import MarginOf, Reduction, sampled_logits, with_margin
from lightning_fed.algorithms.fedss.sampled_classes import SampledClasses
from lightning_fed.argument_checks import check_count, check_option, check_positive
from lightning_fed.model.features import LogitsLayer
from lightning_fed.numerics.chunks import CHUNK_ELEMENTS
from lightning_fed.numerics.precision import at_least_float32

_SCALE = 20.0  # the paper's, A.2


class _Batch(NamedTuple):
    """Classes and labels of the logits in training."""

    held: SampledClasses
    columns: Tensor | None = None  # positions among the client's classes; None for all
    target: Tensor | None = None


class SampledSoftmaxHead(LogitsLayer):
    r"""The last layer of a classifier with very many classes.

    .. math:: o_j = s \left\langle \frac{f}{\lVert f \rVert}, \frac{w_j}{\lVert w_j \rVert} \right\rangle + b_j
        \text{ (cosine)} \qquad o_j = \langle f, w_j \rangle + b_j \text{ (linear)}

    Outside of a visit it is a layer like any other. In a client's visit it may hold the rows of a few classes. Their
    choice (:meth:`hold`, :meth:`begin_batch`) is no part of its state, and matters in training only.

    The logits are float32 at least, so that the loss is computed in float32 in half precision too, and cosines of half
    weights are. Features of zeros have no direction, and their gradients are huge: do not let a ReLU be the layer
    before cosine logits.

    Args:
        in_features: Size of the features, :math:`d`.
        num_classes: Number of all classes, :math:`n`.
        scale: Factor :math:`s` of cosine logits. Linear logits have none.
        normalize: Whether logits are cosines; else they are those of `torch.nn.Linear`.
        bias: Whether there is a bias. The paper has none.
        margin: Margin of cosine logits in training, see :func:`~lightning_fed.algorithms.fedss.with_margin`:
            ArcFace's, in radians (published: 0.5 with a scale of 64), or CosFace's (0.35).
        margin_of: ``"angle"`` (ArcFace) or ``"cosine"`` (CosFace).

    Shape:
        - Features: ``(*, in_features)``.
        - Logits: ``(*, num_classes)``; ``(*, S)`` while it holds S classes, or as many as the batch has columns.

    Raises:
        ValueError: If a size is not a positive number, ``scale`` is not greater than 0, a margin is out of its range,
            or linear logits are given either.

    Example:
        >>> head = SampledSoftmaxHead(in_features=2, num_classes=1000)
        >>> head(torch.ones(4, 2)).shape
        torch.Size([4, 1000])
        >>> held = SampledClasses(torch.tensor([7, 8, 500]), torch.tensor([True, True, False]))
        >>> head.weight.data = head.weight.data[held.classes]  # what the client is sent
        >>> head.hold(held)
        >>> target = head.begin_batch(torch.tensor([7, 8, 8, 7]))
        >>> target, head(torch.ones(4, 2)).shape
        (tensor([0, 1, 1, 0]), torch.Size([4, 3]))
        >>> loss = F.cross_entropy(head(torch.ones(4, 2)), target)  # FedSS

    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        scale: float = _SCALE,
        normalize: bool = True,
        bias: bool = False,
        margin: float = 0.0,
        margin_of: MarginOf = "angle",
    ) -> None:
        super().__init__()
        self.in_features = check_count("in_features", in_features)
        self.num_classes = check_count("num_classes", num_classes)
        if not normalize and scale != _SCALE:
            raise ValueError(f"Expected no `scale` with `normalize=False`: linear logits have none, but got {scale}.")
        check_option("margin_of", margin_of, MarginOf)
        limit = math.pi if margin_of == "angle" else 2.0
        if not 0 <= margin < limit:
            raise ValueError(f"Expected `margin` to be from 0 to below {limit:.4g}, but got {margin}.")
        if margin and not normalize:
            raise ValueError(f"Expected no `margin` with `normalize=False`: it is one of cosines, but got {margin}.")
        self.scale = check_positive("scale", scale)
        self.normalize = normalize
        self.margin = margin
        self.margin_of = margin_of
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        self.bias = nn.Parameter(torch.empty(num_classes)) if bias else None
        self._held: SampledClasses | None = None
        self._batch: _Batch | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters as `torch.nn.Linear` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        """Text in the printed module."""
        kind = f"scale={self.scale}" if self.normalize else "normalize=False"
        kind += f", margin={self.margin} of the {self.margin_of}" if self.margin else ""
        return f"in_features={self.in_features}, num_classes={self.num_classes}, {kind}, bias={self.bias is not None}"

    # --- the client's classes -----------------------------------------------------------------------------------------

    @property
    def held(self) -> SampledClasses | None:
        """The classes that the layer holds; ``None`` for all, as a layer like any other."""
        return self._held

    def hold(self, held: SampledClasses) -> None:
        """Takes the parameters' rows for those of some classes.

        The caller puts these rows in place, and all rows with :meth:`release`.

        Args:
            held: The classes.

        Raises:
            ValueError: If there are no such classes, or not all of them for the objective "full".

        """
        held.check_among(self.num_classes)
        self._held, self._batch = held, _Batch(held)

    def release(self) -> None:
        """Takes the parameters' rows for those of all classes."""
        self._held = self._batch = None

    def begin_batch(self, target: Tensor, columns: Tensor | None = None) -> Tensor:
        """Starts a batch, which the next forward passes in training are of.

        Args:
            target: The batch's labels among all classes, whole numbers, any shape; negative where there is none.
            columns: Positions of the batch's classes among the held ones, int64, strictly increasing, with all
                positives; ``None`` for all.

        Returns:
            The labels as columns of the logits, int64; negative ones as they are.

        Raises:
            RuntimeError: If the layer holds all classes, see :meth:`hold`.
            ValueError: If the columns are not in order or leave out a positive, or a label is none of the client's own.

        """
        if self._held is None:
            raise RuntimeError("The head holds all classes: call `hold` before `begin_batch`.")
        held = self._held if columns is None else self._held.subset(columns)
        held.check_among(self.num_classes)
        local = held.relabel(target)
        self._batch = _Batch(held, columns, local)
        return local

    def relabel(self, target: Tensor) -> Tensor:
        """Labels among all classes as columns of the logits that the layer gives in training.

        Args:
            target: Labels, whole numbers, any shape; negative where there is none.

        Returns:
            The columns, int64; negative labels as they are. While the layer holds all classes, the labels themselves.

        Raises:
            ValueError: If a label is none of the client's own classes.

        Example:
            >>> head = SampledSoftmaxHead(2, 1000)
            >>> head.hold(SampledClasses(torch.tensor([7, 8, 500]), torch.tensor([True, False, True])))
            >>> head.relabel(torch.tensor([500, -100, 7]))
            tensor([   2, -100,    0])

        """
        return target if self._batch is None else self._batch.held.relabel(target)

    # --- logits -------------------------------------------------------------------------------------------------------

    def forward(self, features: Tensor) -> Tensor:
        """The logits; in training with held classes those whose cross-entropy is the client's loss.

        Args:
            features: Features, shape ``(*, in_features)``.

        Raises:
            ValueError: In training, if the rows are not those of the held classes, or the objective or a margin needs
                every example's label and no batch has begun, or one with another number of them.

        """
        if self._batch is None and self.training and self.margin:
            raise ValueError(
                f"Expected the labels, without which `margin={self.margin}` cannot be applied in training: call"
                " `head.loss(features, target)` for the loss, also outside of a federation."
            )
        if self._batch is None or not self.training:
            return self._logits(features, self.weight, self.bias)
        return self._sampled(features, self._batch)

    def loss(self, features: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The cross-entropy of the logits: the client's loss where some classes are held, else the full softmax's.

        It is ``F.cross_entropy(head(features), target)``, also for other examples than those of the batch that began.

        Args:
            features: Features, shape ``(*, in_features)``.
            target: Labels as the batch has them in the step, shape ``(*)``; -100 where there is none.
            reduction: Mean over the examples that have a class, their sum, or a value for each.

        Returns:
            The loss, a scalar, or shape ``(*)``; float32 for smaller types.

        Raises:
            ValueError: If ``reduction`` is unknown, or the rows are not those of the held classes.

        Example:
            >>> head = SampledSoftmaxHead(2, 5)
            >>> features, target = torch.randn(3, 2), torch.tensor([0, 4, 4])
            >>> torch.equal(head.loss(features, target), F.cross_entropy(head(features), target))
            True

        """
        check_option("reduction", reduction, Reduction)
        labels = target.reshape(-1)
        if self._batch is None or not self.training:
            logits = self._logits(features, self.weight, self.bias, labels if self.training else None)
        else:
            logits = self._sampled(features, self._batch._replace(target=labels))
        value = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, reduction=reduction)
        return value.reshape(target.shape) if reduction == "none" else value

    @torch.no_grad()
    def topk(self, features: Tensor, k: int, chunk_size: int | None = None) -> tuple[Tensor, Tensor]:
        """The largest logits, computed piece by piece: neither corrected nor masked, also in training.

        Args:
            features: Features, shape ``(*, in_features)``.
            k: Number of logits.
            chunk_size: Number of classes whose logits are computed at a time; by default as many as make 16 MiB.

        Returns:
            Logits in descending order, and their numbers among all classes, also while some are held; both of shape
            ``(*, k)``.

        Raises:
            ValueError: If there are no ``k`` classes, ``chunk_size`` is below 1, or the rows are not those of the held
                classes.

        Example:
            >>> head = SampledSoftmaxHead(2, 4, normalize=False)
            >>> head.weight.data = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 9.0]])
            >>> head.topk(torch.tensor([[1.0, 0.0]]), k=2, chunk_size=1)
            (tensor([[3., 2.]]), tensor([[1, 2]]))

        """
        self._check_rows()
        k, count = check_count("k", k), len(self.weight)
        if k > count:
            raise ValueError(f"Expected `k` to be at most the number of classes ({count}), but got {k}.")
        default = max(1, CHUNK_ELEMENTS // max(1, features.shape[:-1].numel()))
        step = default if chunk_size is None else check_count("chunk_size", chunk_size)
        values = features.new_empty((*features.shape[:-1], 0), dtype=at_least_float32(features).dtype)
        classes = torch.empty_like(values, dtype=torch.int64)
        for start in range(0, count, step):
            rows = slice(start, start + step)
            logits = self._logits(features, self.weight[rows], None if self.bias is None else self.bias[rows])
            largest, positions = logits.topk(min(k, logits.shape[-1]))
            values, order = torch.cat([values, largest], -1).topk(min(k, values.shape[-1] + largest.shape[-1]))
            classes = torch.cat([classes, positions + start], -1).gather(-1, order)
        if self._held is not None:
            classes = self._held.classes.to(classes.device)[classes]
        return values, classes

    def _logits(self, features: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None = None) -> Tensor:
        """The logits; with a margin where labels are given."""
        if not self.normalize:
            return at_least_float32(F.linear(features, weight, bias))
        cosines = at_least_float32(F.linear(_directions(features), _directions(weight)))
        if self.margin and target is not None:
            rows = cosines.reshape(-1, cosines.shape[-1])
            cosines = with_margin(rows, target, self.margin, self.margin_of).reshape(cosines.shape)
        logits = self.scale * cosines
        return logits if bias is None else logits + bias

    def _sampled(self, features: Tensor, batch: _Batch) -> Tensor:
        self._check_rows()
        held, target = batch.held, None
        if held.needs_target or self.margin:
            count = features.shape[:-1].numel()
            if batch.target is None or batch.target.numel() != count:
                need = f"objective={held.objective!r}" if held.needs_target else f"margin={self.margin}"
                raise ValueError(
                    f"Expected a label for each of {count} examples with {need}, but got"
                    f" {0 if batch.target is None else batch.target.numel()}: see `begin_batch`, or use `loss` for"
                    " other examples than the batch's."
                )
            target = batch.target.reshape(-1).to(features.device)
        if batch.columns is None:
            logits = self._logits(features, self.weight, self.bias, target)
        else:
            columns = batch.columns.to(self.weight.device)
            bias = None if self.bias is None else self.bias[columns]
            logits = self._logits(features, self.weight[columns], bias, target)
        rows = logits.reshape(-1, logits.shape[-1])
        is_positive, correction = held.is_positive.to(rows.device), held.correction(self.num_classes)
        rows = sampled_logits(rows, is_positive, correction, target, objective=held.objective)
        return rows.reshape(logits.shape)

    def _check_rows(self) -> None:
        if self._held is not None and len(self.weight) != len(self._held.classes):
            raise ValueError(
                f"Expected `weight` to have the rows of the {len(self._held.classes)} held classes, but got"
                f" {len(self.weight)}."
            )


def find_sampled_softmax_head(module: nn.Module) -> str:
    """Name of the only :class:`SampledSoftmaxHead` in a module.

    Args:
        module: The model, or a module that holds it.

    Returns:
        Its name, as in ``named_modules``.

    Raises:
        ValueError: If there is none, or several.

    Example:
        >>> find_sampled_softmax_head(nn.Sequential(nn.Linear(8, 2), SampledSoftmaxHead(2, 1000)))
        '1'

    """
    names: list[str] = [name for name, layer in module.named_modules() if isinstance(layer, SampledSoftmaxHead)]
    if len(names) != 1:
        raise ValueError(
            f"Expected {type(module).__name__} to have one SampledSoftmaxHead, but got {names or 'none'}: make it the"
            " model's last layer, or see `to_sampled_softmax`."
        )
    return names[0]


def _directions(vectors: Tensor) -> Tensor:
    return F.normalize(at_least_float32(vectors), dim=-1, eps=1e-12)
