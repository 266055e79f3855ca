"""Helpers for callbacks that log pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from torch import Tensor

from lightning_fed.argument_checks import check_count
from lightning_fed.atomic_files import atomic_write
from lightning_fed.lightning.internals import log_position

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Color = tuple[int, int, int]

GREY: Color = (128, 128, 128)
"""Colour for pixels without a value."""

VIRIDIS: tuple[Color, ...] = (
    *((68, 1, 84), (72, 26, 108), (71, 47, 125), (65, 68, 135), (57, 86, 140), (49, 104, 142), (42, 120, 142)),
    *((35, 136, 142), (31, 152, 139), (34, 168, 132), (53, 183, 121), (84, 197, 104), (122, 209, 81), (165, 219, 54)),
    *((210, 226, 27), (253, 231, 37)),
)
"""Every 17th viridis colour (van der Walt and Smith, 2015): equal steps look equally large."""


class PeriodicPictures(L.Callback):
    """Base class of callbacks that draw pictures every few epochs (rounds)."""

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = check_count("every_n_epochs", every_n_epochs)
        self._last_epoch: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            if trainer.current_epoch == 0:  # false if the fit is resumed
                self.reset()
            report_other_loggers(type(self).__name__, trainer)

    def reset(self) -> None:
        self._last_epoch = None

    def is_due(self, trainer: L.Trainer) -> bool:
        return self._last_epoch is None or trainer.current_epoch - self._last_epoch >= self.every_n_epochs

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_epoch = state_dict["last_epoch"]


def tensorboards(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """Returns the Trainer's TensorBoard loggers. Other loggers receive no pictures."""
    loggers: list[Logger] = trainer.loggers
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


def log_picture(trainer: L.Trainer, tag: str, picture: Tensor, is_epoch_end: bool = False) -> None:
    """Sends a picture to all loggers that support pictures.

    Pass ``is_epoch_end=True`` in the hook ``on_train_epoch_end``.
    """
    for logger in tensorboards(trainer):
        logger.experiment.add_image(tag, picture, global_step=log_position(trainer) - is_epoch_end)


def report_other_loggers(name: str, trainer: L.Trainer) -> None:
    """Logs the names of loggers without support for pictures. ``name`` is the class name of the callback."""
    skipped = [type(logger).__name__ for logger in trainer.loggers if not isinstance(logger, TensorBoardLogger)]
    if skipped:
        rank_zero_info(f"{name} sends images only to TensorBoard, so these loggers receive none: {', '.join(skipped)}.")


def paint_numbers(values: Tensor) -> Tensor:
    """Draws numbers from 0 to 1 in viridis colours, as pixels ``(3, H, W)``, uint8. NaN is grey."""
    colors = torch.tensor(VIRIDIS, dtype=torch.float64)
    positions = values.detach().cpu().double().nan_to_num(0.0).clamp(0, 1) * (len(colors) - 1)
    lower = positions.long().clamp_max(len(colors) - 2)
    painted = torch.lerp(colors[lower], colors[lower + 1], (positions - lower).unsqueeze(-1)).round().to(torch.uint8)
    painted[values.isnan().cpu()] = torch.tensor(GREY, dtype=torch.uint8)
    return painted.permute(2, 0, 1)


def has_matplotlib() -> bool:
    """True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_matrix(
    values: Tensor,
    cell: int,
    size: tuple[float, float],
    label: Callable[[Axes], None],
    largest: float = 1.0,
    lowest: float = 0.0,
) -> Tensor:
    """Draws a matrix ``(H, W)`` as a picture, shape ``(3, H, W)``, uint8.

    Colours range from ``lowest`` to ``largest``. With matplotlib, ``size`` is the figure's size in inches, and
    ``label`` labels the axes. Without matplotlib, each number becomes a square of ``cell`` pixels.
    """
    painted = paint_numbers((values - lowest) / (largest - lowest))
    if not has_matplotlib():
        return painted.repeat_interleave(cell, 1).repeat_interleave(cell, 2)
    from matplotlib.cm import ScalarMappable  # requires the extra `demo`
    from matplotlib.colors import Normalize

    figure = new_figure(size)
    axes = figure.subplots()
    axes.imshow(painted.permute(1, 2, 0).numpy(), interpolation="nearest")
    label(axes)
    figure.colorbar(ScalarMappable(Normalize(lowest, largest), "viridis"), ax=axes)
    return figure_pixels(figure)


def label_grid(
    grid: Tensor, title: str, columns: Sequence[str], rows: Sequence[str], legend: Mapping[str, Color]
) -> Tensor:
    """Adds a title, row and column names, and a legend to a grid of equal tiles, uint8, shape ``(3, H, W)``.

    Without matplotlib, the grid does not change.
    """
    if not has_matplotlib():
        return grid
    from matplotlib.patches import Patch  # requires the extra `demo`

    height, width = grid.shape[1] / len(rows), grid.shape[2] / len(columns)
    size = (1.8 * len(columns) + 0.6, 1.8 * len(rows) * height / width + 0.7 + 0.2 * math.ceil(len(legend) / 4))
    figure = new_figure(size)
    axes = figure.subplots()
    axes.imshow(grid.permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_xticks([width * (place + 0.5) for place in range(len(columns))], columns)
    axes.set_yticks([height * (place + 0.5) for place in range(len(rows))], rows, rotation=90, va="center")
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    figure.suptitle(title)
    patches = [Patch(facecolor=(r / 255, g / 255, b / 255), label=name) for name, (r, g, b) in legend.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure_pixels(figure)


def save_picture(picture: Tensor, path: Path) -> None:
    """Writes a picture, uint8, shape ``(3, H, W)``, as PNG file."""
    with atomic_write(path) as partial:
        Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).save(partial, format="png")


def new_figure(size: tuple[float, float]) -> Figure:
    """Creates an empty matplotlib figure with a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Figures need matplotlib: pip install 'lightning-fed[demo]'.") from error
    return Figure(figsize=size, dpi=100, layout="constrained")


def figure_pixels(figure: Figure) -> Tensor:
    """Renders a matplotlib figure to pixels, shape ``(3, H, W)``, uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # requires the extra `demo`

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.array(canvas.buffer_rgba())[..., :3]).permute(2, 0, 1)
