"""Saved figures: contrast to light and dark pages."""

import numpy as np
import pytest
from PIL import Image

from lightning_fed.report.figures import save_figure


def test_saved_curves_are_readable_on_white_and_on_black(tmp_path):
    """Each opaque pixel contrasts with both backgrounds by a factor from 3 (WCAG 2.2, criterion 1.4.11)."""
    figure = pytest.importorskip("matplotlib.figure").Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([0.0, 1e6], label="loss")
    axes.set(title="title", xlabel="round", ylabel="loss")
    axes.legend()
    figure.suptitle("above")
    save_figure(figure, tmp_path / "new" / "curve.png")
    pixels = np.asarray(Image.open(tmp_path / "new" / "curve.png").convert("RGBA")) / 255
    assert not pixels[0, 0, 3]
    opaque = pixels[pixels[..., 3] == 1][:, :3]
    linear = np.where(opaque <= 0.04045, opaque / 12.92, ((opaque + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    assert len(np.unique(opaque, axis=0)) > 1
    assert min((luminance.min() + 0.05) / 0.05, 1.05 / (luminance.max() + 0.05)) >= 3
