"""Pictures: drawn numbers equal the data, and the palette is safe for red-green blindness."""

import itertools

import numpy as np
import pytest
import torch

from lightning_fed.callbacks import ClientEvaluation, SiteMatrix, pictures
from lightning_fed.callbacks.evaluation.tables import Table
from lightning_fed.callbacks.picture_grid import default_colors
from tests import models

# Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(linear):
    """CIE L*a*b* from linear sRGB, with white point D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("kind", BLINDNESS)
def test_the_first_eight_colors_differ_with_red_green_blindness(kind):
    colors = np.array([*default_colors(8), pictures.GREY]) / 255
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    seen = [lab(np.array(BLINDNESS[kind]) @ color) for color in linear]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 9


@pytest.fixture
def figures(monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, pixels = [], pictures.figure_pixels
    monkeypatch.setattr(pictures, "figure_pixels", lambda figure: drawn.append(figure) or pixels(figure))
    return drawn


def test_a_matrix_has_one_color_scale_for_all_columns(figures, tmp_path):
    values = {("p", "a"): 0.2, ("p", "b"): 2.0, ("q", "a"): 1.0}
    Table("score of", ["p", "q"], ["a", "b"], values).draw(tmp_path / "matrix.png")
    (figure,) = figures
    axes, bar = figure.axes
    expected = pictures.paint_numbers(torch.tensor([[0.0, 1.0], [0.8 / 1.8, torch.nan]])).permute(1, 2, 0)
    assert torch.equal(torch.as_tensor(np.array(axes.get_images()[0].get_array())), expected)
    assert bar.get_ylim() == pytest.approx((0.2, 2))
    assert [text.get_text() for text in axes.texts] == ["0.2", "2", "1", "-"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "score of")


def test_the_site_matrix_has_the_clients_own_models_on_the_diagonal(federated_trainer, tmp_path):
    clients = models.as_datasets(models.vectors({"c": 12, "a": 9, "b": 16}))
    matrix = SiteMatrix("val_acc", folder=tmp_path)
    trainer = federated_trainer(max_rounds=1, callbacks=[matrix, ClientEvaluation()], seed=3)
    trainer.fit(models.Module(models.mlp()), clients, dict(sorted(clients.items())))
    assert list(matrix.table.rows) == ["global", *matrix.table.columns]
    assert (tmp_path / "sites.png").stat().st_size > 1000
