"""Random changes of one training sample, for the `augment` argument of `ArrayDataset`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad


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


@dataclass(frozen=True)
class CropAndFlip:
    """Cuts out a random part of an image, brings it to the image's size, and mirrors it at random; targets stay.

    As `RandomResizedCrop` and `RandomHorizontalFlip` of torchvision on tensors: the part has a share of the area that
    is uniform in `scale`, and a ratio of width to height between 3/4 and 4/3, uniform in its logarithm; it is resized
    bilinearly, without aliasing. The draws come from torch's global generator, which Lightning seeds in every worker.

    Args:
        scale: Smallest and largest share of the area.
        flip_probability: Probability of mirroring left and right.

    Raises:
        ValueError: If a share or the probability is out of its range.

    Example:
        >>> import torch
        >>> image, label = CropAndFlip()(torch.rand(1, 28, 28), torch.tensor(3))
        >>> image.shape, label.item()
        (torch.Size([1, 28, 28]), 3)
    """

    scale: tuple[float, float] = (0.08, 1.0)
    flip_probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"Expected `scale` to be two rising shares in (0, 1], but got {self.scale}.")
        if not 0 <= self.flip_probability <= 1:
            raise ValueError(f"Expected `flip_probability` to be in [0, 1], but got {self.flip_probability}.")

    def __call__(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Augments one sample.

        Args:
            image: Image, shape (C, H, W), floating point.
            target: Any target of the whole image.

        Returns:
            The image, of the same shape and type, and the target.
        """
        height, width = image.shape[-2:]
        top, left, rows, columns = self._part(height, width)
        part = image[None, :, top : top + rows, left : left + columns]
        image = interpolate(part, (height, width), mode="bilinear", align_corners=False, antialias=True)[0]
        return (image.flip(-1) if torch.rand(()) < self.flip_probability else image), target

    def _part(self, height: int, width: int) -> tuple[int, int, int, int]:
        """First row and column, height and width of a part; the whole image if ten draws do not fit into it."""
        limit = math.log(4 / 3)
        for _ in range(10):
            area = height * width * float(torch.empty(()).uniform_(*self.scale))
            ratio = math.exp(float(torch.empty(()).uniform_(-limit, limit)))
            rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < rows <= height and 0 < columns <= width:
                top, left = (int(torch.randint(0, room + 1, ())) for room in (height - rows, width - columns))
                return top, left, rows, columns
        return 0, 0, height, width
