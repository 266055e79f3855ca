"""FedSS's last layer for very many classes.

While a client trains, the layer has weight rows and logits for only some classes, and a label is a position among these
classes. The cross-entropy with the training logits equals FedSS's loss, so ``training_step`` needs no changes.
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
from lightning_fed.features.layers import LogitsLayer
from lightning_fed.numerics.chunks import CHUNK_ELEMENTS
from lightning_fed.numerics.precision import at_least_float32

_SCALE = 20.0  # from section A.2 of the paper


class _Batch(NamedTuple):
    held: SampledClasses
    columns: Tensor | None = None  # positions among the held classes; None for all
    target: Tensor | None = None


class SampledSoftmaxHead(LogitsLayer):
    r"""Last layer of a classifier with very many classes.

    .. math:: o_j = s \left\langle \frac{f}{\lVert f \rVert}, \frac{w_j}{\lVert w_j \rVert} \right\rangle + b_j
        \text{ (cosine)} \qquad o_j = \langle f, w_j \rangle + b_j \text{ (linear)}

    Features :math:`f` have shape ``(*, in_features)``, and logits :math:`o` shape ``(*, num_classes)``. Class j has the
    weight row :math:`w_j` and the bias :math:`b_j`. While a client trains, the weight may have rows for only some
    classes (:meth:`hold`). Training logits then have columns for only these classes. At other times, this layer is an
    ordinary layer. Do not place a ReLU directly before cosine logits, because zero features give very large gradients.

    Args:
        in_features: Size of a feature vector.
        num_classes: Total number of classes.
        scale: Factor :math:`s` for cosine logits.
        normalize: Whether to compute cosine logits, instead of linear logits as in `torch.nn.Linear`.
        bias: Whether to add a bias. The paper has no bias.
        margin: Margin for cosine logits in training, see :func:`~lightning_fed.algorithms.fedss.with_margin`. The
            ArcFace paper uses an angle of 0.5 radians and scale 64. The CosFace paper uses a cosine difference of 0.35.
        margin_of: Quantity changed by the margin: ``"angle"`` (ArcFace) or ``"cosine"`` (CosFace).

    Raises:
        ValueError: If an argument is invalid, or linear logits are combined with a scale or margin.

    Example:
        >>> head = SampledSoftmaxHead(in_features=2, num_classes=1000)
        >>> held = SampledClasses(torch.tensor([7, 8, 500]), torch.tensor([True, True, False]))
        >>> head.weight.data = head.weight.data[held.classes]  # the client receives these rows
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
            raise ValueError(
                f"Expected no `scale` with `normalize=False`, because linear logits have no scale, but got {scale}."
            )
        check_option("margin_of", margin_of, MarginOf)
        limit = math.pi if margin_of == "angle" else 2.0
        if not 0 <= margin < limit:
            raise ValueError(f"Expected `margin` to be at least 0 and below {limit:.4g}, but got {margin}.")
        if margin and not normalize:
            raise ValueError(
                f"Expected no `margin` with `normalize=False`, because margins apply to cosines, but got {margin}."
            )
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
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        kind = f"scale={self.scale}" if self.normalize else "normalize=False"
        kind += f", margin={self.margin} for the {self.margin_of}" if self.margin else ""
        return f"in_features={self.in_features}, num_classes={self.num_classes}, {kind}, bias={self.bias is not None}"

    # --- the client's classes -----------------------------------------------------------------------------------------

    @property
    def held(self) -> SampledClasses | None:
        """Classes with a row in the layer's weight; ``None`` if all classes have a row."""
        return self._held

    def hold(self, held: SampledClasses) -> None:
        """Sets the classes for which the layer's parameters have rows.

        First reduce the parameters' data to these classes' rows. Later restore all rows and call :meth:`release`.
        """
        held.check_among(self.num_classes)
        self._held, self._batch = held, _Batch(held)

    def release(self) -> None:
        self._held = self._batch = None

    def begin_batch(self, target: Tensor, columns: Tensor | None = None) -> Tensor:
        """Sets the labels of a training batch. Returns the labels as column indices of the logits.

        Args:
            target: The batch's class labels, integers. Negative labels do not change.
            columns: Indices of the weight rows for this batch's logits, increasing, by default all. Rows for the
                client's own classes must be included.
        """
        if self._held is None:
            raise RuntimeError(
                "Expected the head to hold only some classes, but the head holds all: call `hold` before `begin_batch`."
            )
        held = self._held if columns is None else self._held.subset(columns)
        held.check_among(self.num_classes)
        local = held.relabel(target)
        self._batch = _Batch(held, columns, local)
        return local

    def relabel(self, target: Tensor) -> Tensor:
        """Converts class labels to column indices of the training logits, int64. Negative labels do not change."""
        return target if self._batch is None else self._batch.held.relabel(target)

    # --- logits -------------------------------------------------------------------------------------------------------

    def forward(self, features: Tensor) -> Tensor:
        """Computes logits, corrected in training so that the cross-entropy is the FedSS loss."""
        if self._batch is None and self.training and self.margin:
            raise ValueError(
                f"Expected labels in training, because `margin={self.margin}` depends on the labels: call "
                "`head.loss(features, target)` for the loss, also outside of a federation."
            )
        if self._batch is None or not self.training:
            return self._logits(features, self.weight, self.bias)
        return self._sampled(features, self._batch)

    def loss(self, features: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Computes FedSS's loss while a client trains, and otherwise the ordinary softmax loss.

        The result equals ``F.cross_entropy(head(features), target)``. With a margin or the "negonly" objective, logits
        in training depend on labels. Then ``head`` needs labels from :meth:`begin_batch`; this method uses ``target``.

        Args:
            features: Features, shape ``(*, in_features)``.
            target: Labels, shape ``(*)``; -100 for no label. While a client trains, use labels from :meth:`relabel`.
            reduction: Mean or sum over labelled examples, or one value per example.
        """
        check_option("reduction", reduction, Reduction)
        labels = target.reshape(-1)
        if self._batch is not None and self.training:
            logits = self._sampled(features, self._batch._replace(target=labels))
        elif self.margin and self.training:
            logits = self._logits(features, self.weight, self.bias, labels)
        else:
            logits = self(features)
        value = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, reduction=reduction)
        return value.reshape(target.shape) if reduction == "none" else value

    @torch.no_grad()
    def topk(self, features: Tensor, k: int, chunk_size: int | None = None) -> tuple[Tensor, Tensor]:
        """Computes the k largest logits and the corresponding classes, both with shape ``(*, k)``.

        Args:
            features: Features, shape ``(*, in_features)``.
            k: Number of logits.
            chunk_size: Number of classes computed at once, by default for 16 MiB of logits.

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
                    f"Expected a label for each of {count} examples, because {need} needs labels, but got "
                    f"{0 if batch.target is None else batch.target.numel()} labels from `begin_batch`: pass "
                    "the labels to `begin_batch`, or features and labels to `loss`."
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
                f"Expected `weight` to have {len(self._held.classes)} rows, one per held class, but got "
                f"{len(self.weight)}."
            )


def find_sampled_softmax_head(module: nn.Module) -> str:
    """Returns the name of a module's only :class:`SampledSoftmaxHead`.

    Raises:
        ValueError: If the module has no head or several heads.

    Example:
        >>> find_sampled_softmax_head(nn.Sequential(nn.Linear(8, 2), SampledSoftmaxHead(2, 1000)))
        '1'
    """
    names: list[str] = [name for name, layer in module.named_modules() if isinstance(layer, SampledSoftmaxHead)]
    if len(names) != 1:
        raise ValueError(
            f"Expected {type(module).__name__} to have one SampledSoftmaxHead, but got {names or 'none'}: make the "
            "head the model's last layer, or see `to_sampled_softmax`."
        )
    return names[0]


def _directions(vectors: Tensor) -> Tensor:
    return F.normalize(at_least_float32(vectors), dim=-1, eps=1e-12)
