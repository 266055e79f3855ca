"""Saves matplotlib figures for HTML pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fed.atomic_files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "0.5"
"""Grey for text and axes, readable on white and on black."""

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of curves, distinct with red-green blindness (Okabe and Ito, 2008)."""


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a matplotlib figure with a transparent background and grey axes, for light and dark pages."""
    from matplotlib.legend import Legend  # requires the extra `demo`
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_color(INK)
    for legend in figure.findobj(Legend):
        legend.set_frame_on(False)
    for axes in figure.axes:
        axes.tick_params(which="both", colors=INK)
        axes.spines[:].set_color(INK)
    with atomic_write(path) as partial:
        figure.savefig(partial, format=path.suffix[1:] or "png", transparent=True)
