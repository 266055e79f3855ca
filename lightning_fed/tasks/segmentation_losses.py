"""Segmentation losses by name: cross-entropy and `segmentation_models_pytorch` losses, without ignored pixels."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.method import parse_method
from lightning_fed.modules.absent_classes import absent_class_loss

Mode = Literal["multiclass", "binary", "multilabel"]

_REGION = {"dice": "DiceLoss", "jaccard": "JaccardLoss", "tversky": "TverskyLoss"}
_PIXEL = {"lovasz": "LovaszLoss", "focal": "FocalLoss"}
LOSS_NAMES = ("ce", *_REGION, *_PIXEL, "fedseg")


class NamedLoss(nn.Module):
    """Sum of named losses, excluding pixels labelled ``ignore_index``.

    ``"ce"`` is the cross-entropy, after a sigmoid in the modes ``"binary"`` and ``"multilabel"``. ``"dice"``,
    ``"jaccard"``, ``"tversky"``, ``"lovasz"`` and ``"focal"`` come from smp
    (https://smp.readthedocs.io/en/latest/losses.html). ``"fedseg"`` is :func:`~lightning_fed.modules.absent_class_loss`
    in training, and the cross-entropy in evaluation.

    Options follow a name, as in ``"tversky:alpha=0.3:beta=0.7"``. The sign ``+`` adds losses. A batch with only
    ignored pixels has loss 0.

    Example:
        >>> loss = NamedLoss("ce+tversky:alpha=0.3:beta=0.7")
        >>> bool(loss(torch.zeros(1, 2, 1, 2), torch.tensor([[[1, 255]]])) > 0.69)
        True
    """

    def __init__(self, text: str, mode: Mode = "multiclass", ignore_index: int | None = 255) -> None:
        super().__init__()
        self.mode, self.ignore_index = mode, ignore_index
        self.terms: list[tuple[str, Any]] = []
        for part in text.split("+"):
            name, options = parse_method(part)
            if "per_image" in options:  # here smp's losses receive the pixels of all images as one image
                raise ValueError(
                    f"Expected `loss` without `per_image`, but got {text!r}: use the argument `per_image` of "
                    "`SegmentationTask`, which applies to all losses."
                )
            is_ours = name in ("ce", "fedseg")
            if name not in LOSS_NAMES or (is_ours and options):
                raise ValueError(
                    f"Expected `loss` to be a function or a sum of {', '.join(map(repr, LOSS_NAMES))} (with "
                    f"`name:option=value` for options of segmentation_models_pytorch), but got {text!r}."
                )
            if name == "fedseg" and (mode != "multiclass" or ignore_index is None):
                raise ValueError(
                    "Expected mode='multiclass' and an `ignore_index` for pixels without a label with loss='fedseg', "
                    f"but got {mode!r} and {ignore_index}."
                )
            self.terms.append((name, None if is_ours else self._build(name, options)))

    def forward(self, logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Computes the loss for logits ``(N, C, H, W)``, with class weights ``(C,)`` in the cross-entropy."""
        terms = [
            self._term(name, loss, logits, target) if loss is not None else self._ours(name, logits, target, weight)
            for name, loss in self.terms
        ]
        return sum(terms[1:], start=terms[0])

    def _ours(self, name: str, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        if name == "fedseg" and self.training:
            assert self.ignore_index is not None
            return absent_class_loss(logits, target, self.ignore_index)
        return self._cross_entropy(logits, target, weight)

    def _build(self, name: str, options: dict[str, Any]) -> nn.Module:
        import segmentation_models_pytorch as smp

        # Not every smp loss supports `ignore_index` in every version, so only the multiclass Dice loss receives this
        # option.
        ignored = {"ignore_index": self.ignore_index} if name == "dice" and self.mode == "multiclass" else {}
        mode = "binary" if name == "focal" and self.mode == "multilabel" else self.mode
        try:
            loss: nn.Module = getattr(smp.losses, {**_REGION, **_PIXEL}[name])(mode, **ignored, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"Expected options accepted by the loss {name!r}, but got {options}: {error}") from error
        return loss

    def _cross_entropy(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        if self.mode != "multiclass":
            return self._binary_cross_entropy(logits, target, weight)
        # a mean over no pixels, or over zero weights, is NaN; `where` instead of `if` avoids a GPU synchronisation
        counts = self._is_valid(target)
        if weight is not None:
            counts = counts & (weight[target.where(counts, 0)] > 0)
            weight = torch.where(counts.any(), weight, torch.ones_like(weight))
        ignore_index = -100 if self.ignore_index is None else self.ignore_index  # PyTorch's default
        loss = F.cross_entropy(logits, target, weight=weight, ignore_index=ignore_index)
        return torch.where(counts.any(), loss, loss.new_zeros(()))

    def _binary_cross_entropy(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        target = target.reshape(logits.shape)
        is_valid = self._is_valid(target)
        losses = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype) * is_valid, reduction="none")
        if weight is not None:
            losses = losses * weight[:, None, None]
        return (losses * is_valid).sum() / is_valid.sum().clamp_min(1)

    def _term(self, name: str, loss: nn.Module, logits: Tensor, target: Tensor) -> Tensor:
        value: Tensor
        if name == "lovasz":  # smp's loss needs float32
            logits = logits.float()
        if name == "dice" and self.mode == "multiclass":
            value = loss(logits, target)
            return value
        if self.mode == "multiclass":
            is_valid = self._is_valid(target)
            if not bool(is_valid.any()):
                return logits.sum() * 0.0
            value = loss(logits.movedim(1, -1)[is_valid].T[None, :, :, None], target[is_valid][None, :, None])
            return value
        target = target.reshape(logits.shape)
        is_valid = self._is_valid(target)
        if name in _REGION:  # sums over pixels; probability 0 without a true pixel adds nothing
            value = loss(logits.masked_fill(~is_valid, torch.finfo(logits.dtype).min / 2), target * is_valid)
            return value
        if name == "lovasz":
            value = loss(logits[is_valid][None], target[is_valid][None])
            return value
        labels = [label for label in range(logits.shape[1]) if bool(is_valid[:, label].any())]
        values = [loss(logits[:, label][is_valid[:, label]], target[:, label][is_valid[:, label]]) for label in labels]
        return torch.stack(values).mean() if values else logits.sum() * 0.0

    def _is_valid(self, target: Tensor) -> Tensor:
        return torch.ones_like(target, dtype=torch.bool) if self.ignore_index is None else target != self.ignore_index
