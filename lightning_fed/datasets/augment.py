"""Random changes of one training sample, for the `augment` argument of `ArrayDataset`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class FlipAndShift:
    """Mirrors a sample at the vertical axis and shifts it by some pixels, at random; masks follow their image.

    The augmentation draws from torch's global generator, which Lightning seeds in every worker, equally often for
    every sample.

    Args:
        flip_probability: Probability of mirroring left and right.
        max_shift: Largest shift in each direction, in pixels. The uncovered border is 0 in the image and
            `ignore_index` in a mask.
        ignore_index: Mask value of pixels that have no label.

    Raises:
        ValueError: If the probability is outside [0, 1] or the shift is negative.

    Example:
        >>> import torch
        >>> image, label = FlipAndShift(flip_probability=1.0)(torch.tensor([[[1.0, 2.0]]]), torch.tensor(3))
        >>> image.tolist(), label.item()
        ([[[2.0, 1.0]]], 3)
    """

    flip_probability: float = 0.5
    max_shift: int = 0
    ignore_index: int = 255

    def __post_init__(self) -> None:
        if not 0 <= self.flip_probability <= 1:
            raise ValueError(f"Expected `flip_probability` to be in [0, 1], but got {self.flip_probability}.")
        if self.max_shift < 0:
            raise ValueError(f"Expected `max_shift` to be at least 0, but got {self.max_shift}.")

    def __call__(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Augments one sample.

        Args:
            image: Image, shape (C, H, W).
            target: Mask of shape (H, W), or anything of fewer than two dimensions, which is returned unchanged.

        Returns:
            The image and the target, of the same shapes and types.
        """
        is_mask = target.ndim >= 2
        if torch.rand(()) < self.flip_probability:
            image = image.flip(-1)
            target = target.flip(-1) if is_mask else target
        if self.max_shift:
            height, width = image.shape[-2:]
            top, left = torch.randint(0, 2 * self.max_shift + 1, (2,)).tolist()
            window = (..., slice(top, top + height), slice(left, left + width))
            border = (self.max_shift,) * 4
            image = pad(image, border)[window]
            target = pad(target, border, value=self.ignore_index)[window] if is_mask else target
        return image, target
