"""Draws segmentations as a grid: images, true classes, predicted classes and heat maps."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fed.callbacks.pictures import GREY, Color, label_grid, paint_numbers

_WHITE = 255
# Class 0 is usually the background. Ignored pixels are grey and borders white, so the palette contains neither. The
# first eight colours are distinct with red-green blindness (Okabe and Ito, 2008).
_COLORS: tuple[Color, ...] = (
    *((0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0)),
    *((204, 121, 167), (145, 30, 180), (210, 245, 60), (250, 190, 212), (70, 240, 240), (170, 110, 40), (128, 0, 0)),
    *((128, 128, 0), (0, 0, 128), (220, 190, 255), (170, 255, 195), (255, 215, 180), (255, 250, 200)),
)


def segmentation_grid(
    images: Tensor | Sequence[Tensor],
    truth: Tensor | Sequence[Tensor],
    prediction: Tensor | Sequence[Tensor],
    class_colors: Sequence[Sequence[int]] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    ignore_index: int | None = 255,
    padding: int = 2,
    maps: Sequence[Tensor | Sequence[Tensor]] = (),
) -> Tensor:
    """Draws images with their true and predicted classes in one picture.

    Each row shows one image, the true classes, the predicted classes and optional heat maps.

    Args:
        images: Images, shape ``(N, C, H, W)``, or a list of N images ``(C, H, W)``. Integers range from 0 to 255.
            Images with three or more channels are drawn in colour, all others in grey.
        truth: True class of each pixel, shape ``(N, H, W)`` or ``(N, 1, H, W)``.
        prediction: Predicted class of each pixel, same shape.
        class_colors: Colour of each class, as red, green and blue from 0 to 255. By default a standard palette.
        mean: Mean that the data pipeline subtracts, one number or one per channel.
        std: Standard deviation by which the data pipeline divides, one number or one per channel. Without ``mean`` and
            ``std``, images with values outside 0 to 1 are rescaled.
        ignore_index: Class index of pixels without a label, drawn in grey.
        padding: White border around each tile, in pixels.
        maps: M heat maps, each of shape ``(N, H, W)`` with values from 0 to 1. Each map adds a column.

    Returns:
        Picture, shape ``(3, N (H + padding) + padding, (3 + M) (W + padding) + padding)``, uint8.

    Raises:
        ValueError: If the numbers of images differ, there are no images, or a class has no colour.

    Example:
        >>> image, truth = torch.zeros(1, 3, 4, 4), torch.tensor([[[0, 1], [1, 255]]]).repeat(1, 2, 2)
        >>> grid = segmentation_grid(image, truth, prediction=torch.ones(1, 4, 4, dtype=torch.long))
        >>> grid.shape
        torch.Size([3, 8, 20])
    """
    from torchvision.utils import make_grid  # slow to import, and needed only for drawing

    if not len(images) == len(truth) == len(prediction) >= 1:
        raise ValueError(
            "Expected `images`, `truth` and `prediction` to hold the same number of images, at least 1, but got "
            f"{len(images)}, {len(truth)} and {len(prediction)}."
        )
    if any(len(column) != len(images) for column in maps):
        raise ValueError(f"Expected `maps` with {len(images)} images each, but got {[len(column) for column in maps]}.")
    truths, predictions = [_indices(mask) for mask in truth], [_indices(mask) for mask in prediction]
    checked = checked_colors(class_colors)
    colors = torch.tensor(checked or default_colors(_num_classes([*truths, *predictions], ignore_index)))
    rows = [
        (
            _to_rgb(image, mean, std),
            *(_paint(mask, colors, ignore_index) for mask in masks),
            *(paint_numbers(column[index]) for column in maps),
        )
        for index, (image, *masks) in enumerate(zip(images, truths, predictions, strict=True))
    ]
    height, width = max(row[0].shape[1] for row in rows), max(row[0].shape[2] for row in rows)
    tiles = [
        functional.pad(tile, (0, width - tile.shape[2], 0, height - tile.shape[1]), value=_WHITE)
        for row in rows
        for tile in row
    ]
    grid: Tensor = make_grid(tiles, nrow=len(rows[0]), padding=padding, pad_value=_WHITE)
    return grid


def titled_grid(
    images: Sequence[Tensor],
    truths: Sequence[Tensor],
    predictions: Sequence[Tensor],
    title: str,
    rows: Sequence[str],
    class_names: Sequence[str],
    class_colors: Sequence[Color],
    void: int | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
    maps: Mapping[str, Sequence[Tensor]],
) -> Tensor:
    """Draws a :func:`segmentation_grid` with a title, names of rows and columns, and a legend for the shown classes."""
    columns = list(maps.values())
    grid = segmentation_grid(images, truths, predictions, class_colors, mean, std, void, maps=columns)
    shown = sorted({int(label) for mask in (*truths, *predictions) for label in torch.unique(mask)})
    names = [*class_names, *map(str, range(len(class_names), len(class_colors)))]
    legend = {names[index]: class_colors[index] for index in shown if index != void}
    legend |= {"no label": GREY} if void in shown else {}
    return label_grid(grid, title, ("image", "truth", "prediction", *maps), rows, legend)


def default_colors(num_classes: int) -> list[Color]:
    """Builds a palette with a different colour for each class. Class 0 is black."""
    more = (colorsys.hsv_to_rgb(0.618033988749895 * i % 1, 0.6, 0.8) for i in range(num_classes - len(_COLORS)))
    extra: list[Color] = [(round(255 * r), round(255 * g), round(255 * b)) for r, g, b in more]
    return [*_COLORS[:num_classes], *extra]


def _indices(mask: Tensor) -> Tensor:
    return (mask[0] if mask.ndim == 3 else mask).detach().cpu().long()


def _num_classes(masks: Sequence[Tensor], ignore_index: int | None) -> int:
    labels = torch.cat([mask.flatten() for mask in masks])
    labels = labels[labels != ignore_index] if ignore_index is not None else labels
    return int(labels.max()) + 1 if labels.numel() else 1


def _paint(mask: Tensor, colors: Tensor, ignore_index: int | None) -> Tensor:
    is_ignored = mask == ignore_index if ignore_index is not None else torch.zeros_like(mask, dtype=torch.bool)
    labels = mask.masked_fill(is_ignored, 0)
    if int(labels.min()) < 0 or int(labels.max()) >= len(colors):
        raise ValueError(
            f"Expected class indices from 0 to {len(colors) - 1}, one per colour, or `ignore_index` {ignore_index}, "
            f"but got {int(labels.min())} to {int(labels.max())}."
        )
    painted = colors[labels]
    painted[is_ignored] = torch.tensor(GREY)
    return painted.permute(2, 0, 1).to(torch.uint8)


def _to_rgb(image: Tensor, mean: float | Sequence[float] | None, std: float | Sequence[float] | None) -> Tensor:
    pixels = image.detach().cpu().float()
    if not image.is_floating_point():
        pixels = pixels / 255
    if std is not None:
        pixels = pixels * torch.as_tensor(std, dtype=torch.float32).reshape(-1, 1, 1)
    if mean is not None:
        pixels = pixels + torch.as_tensor(mean, dtype=torch.float32).reshape(-1, 1, 1)
    pixels = pixels[:3] if len(pixels) >= 3 else pixels[:1].repeat(3, 1, 1)
    low, high = pixels.min(), pixels.max()
    if mean is None and std is None and (low < 0 or high > 1):
        pixels = (pixels - low) / (high - low).clamp_min(1e-12)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def checked_colors(class_colors: Sequence[Sequence[int]] | None) -> list[Color] | None:
    """Converts colours to tuples. Refuses invalid colours and an empty list."""
    if class_colors is None:
        return None
    colors = [tuple(color) for color in class_colors]
    if not colors or not all(len(color) == 3 and all(0 <= value <= 255 for value in color) for color in colors):
        raise ValueError(
            f"Expected `class_colors` to contain a tuple (red, green, blue) per class, with values from 0 to"
            f" 255, but got {class_colors}."
        )
    return [(int(red), int(green), int(blue)) for red, green, blue in colors]
