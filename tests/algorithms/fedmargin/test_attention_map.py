"""Heat map of attention: every client's colour in every round, with and without axes."""

import math

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib import colormaps
from matplotlib.axes import Axes
from torch.utils.data import DataLoader

from lightning_fed import FederatedCallback, FederatedTrainer
from lightning_fed.algorithms import FedMargin
from lightning_fed.algorithms.fedmargin.attention_map import attention_picture, attention_table
from lightning_fed.callbacks import AttentionMap, pictures
from tests import models
from tests.algorithms.fedmargin.test_prototype_plots import Notes, clients, examples, federate, net, train
from tests.callbacks.test_segmentation_images import GREY, logged
from tests.conftest import QUIET

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

TAG = AttentionMap.tag


def table(attention):
    names = sorted({name for row in attention for name in row})
    return names, np.array([[row.get(name, math.nan) for row in attention] for name in names])


def cells(values):
    """Colours from matplotlib, shape (rows, columns, 3), grey for missing values."""
    painted = (255 * colormaps["viridis"](values / np.nanmax(values))[..., :3]).round()
    painted[np.isnan(values)] = GREY
    return painted


def test_rows_are_clients_and_columns_rounds():
    names, values = attention_table({3: {10: 0.25, "b": 0.75}, 1: {9: 1.0, "a": 0.0}})
    assert names == [9, 10, "a", "b"]
    nan = math.nan
    expected = [[nan, 1, nan, nan], [nan, nan, nan, 0.25], [nan, 0, nan, nan], [nan, nan, nan, 0.75]]
    np.testing.assert_array_equal(values.numpy(), np.array(expected, dtype=np.float32))


@pytest.fixture
def run(tmp_path):
    """Five rounds with two clients each; returns the pictures and FedMargin's attention."""

    def make(*callbacks, clients_per_round=2):
        notes, logger = Notes(), TensorBoardLogger(tmp_path)
        federate([AttentionMap(2), notes, *callbacks], logger, 5, clients_per_round=clients_per_round)
        drawn = logged(logger, TAG)
        assert [step for step, _ in drawn] == [0, 2, 4]
        return [picture for _, picture in drawn], notes.attention

    return make


def test_the_bare_map(run, monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    drawn, attention = run()
    for number, picture in zip((0, 2, 4), drawn, strict=True):
        _, values = table(attention[: number + 1])
        expected = cells(values).repeat(16, 0).repeat(16, 1).transpose(2, 0, 1)
        assert picture.shape == expected.shape
        assert np.abs(picture - expected).max() <= 10  # our colours are within 7 of matplotlib's
        assert (picture == np.array(GREY)[:, None, None]).all(0).any() == np.isnan(values).any()
    assert np.isnan(values).sum() == 5  # each round lacks one of three clients


def test_the_map_with_axes(run):
    """A regular grid, first round left, first client on top, with a colour scale."""
    drawn, attention = run()
    names, values = table(attention)
    assert names == ["a", "b", "c"]
    picture = drawn[-1]
    expected = cells(values)
    # the frame: the longest nearly black lines
    is_black = (picture < 60).all(0)
    rows, columns = (np.nonzero(is_black.sum(axis) > 0.5 * is_black.sum(axis).max())[0] for axis in (1, 0))
    top, bottom, left = rows.min(), rows.max(), columns.min()
    right = columns[columns < 0.9 * picture.shape[2]].max()
    assert right - left > 0.5 * picture.shape[2]
    for row in range(3):
        for column in range(5):
            y = round(top + (bottom - top) * (row + 0.5) / 3)
            for part in (0.2, 0.5, 0.8):
                x = round(left + (right - left) * (column + part) / 5)
                assert np.abs(picture[:, y, x] - expected[row, column]).max() <= 10
    scale = picture[:, top + 3 : bottom - 2, round(0.5 * (columns[columns > right + 5].min() + columns.max()))]
    heights = 1 - np.arange(3, bottom - top - 2) / (bottom - top)
    assert np.abs(scale.T - 255 * colormaps["viridis"](heights)[:, :3]).max() <= 12


@pytest.mark.slow
def test_labels(monkeypatch, tmp_path):
    """Every client's name if the labels fit, otherwise every n-th; rounds are integers."""
    given = []
    set_yticks = Axes.set_yticks
    monkeypatch.setattr(
        Axes, "set_yticks", lambda axes, *args, **kwargs: given.append(args) or set_yticks(axes, *args, **kwargs)
    )
    federate([AttentionMap(1)], TensorBoardLogger(tmp_path), 1)
    assert [args for args in given if len(args) == 2] == [([0, 1, 2], ["a", "b", "c"])]
    given.clear()
    many = {number: examples([0, 1], number) for number in range(60)}
    federate([AttentionMap(1)], TensorBoardLogger(tmp_path), 1, many)
    (((positions, labels),)) = [args for args in given if len(args) == 2]
    assert positions == list(range(0, 60, 2))
    assert labels == [str(position) for position in positions]


def test_who_is_left_out_is_grey(run, monkeypatch):
    """A client with an invalid update, and a failed round."""
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)

    class Spoil(FederatedCallback):
        def on_server_receive(self, trainer, module, update):
            if trainer.current_epoch == 1 or (trainer.current_epoch, update.client) == (2, "b"):
                update.num_samples = 0

    drawn, attention = run(Spoil(), clients_per_round=3)
    given = [attention[0], {}, *attention[1:]]  # no aggregate in round 1
    assert set(given[2]) == {"a", "c"}
    _, values = table(given)
    expected = cells(values).repeat(16, 0).repeat(16, 1).transpose(2, 0, 1)
    assert np.abs(drawn[-1] - expected).max() <= 10
    assert (drawn[-1][:, :, 16:32] == np.array(GREY)[:, None, None]).all()


def test_the_same_trainer_goes_on_with_its_map(tmp_path):
    """Raising `max_epochs` after the fit keeps earlier rounds. A new fit starts an empty map."""
    callback, logger = AttentionMap(1), TensorBoardLogger(tmp_path)
    data = {name: DataLoader(part, 8) for name, part in clients().items()}
    trainer = FederatedTrainer(**{**QUIET, "logger": logger}, method=FedMargin(), max_rounds=2, callbacks=[callback])
    module = models.Module(net())
    trainer.fit(module, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    assert sorted(callback.state_dict()["attention"]) == [0, 1, 2]
    assert [step for step, _ in logged(logger, TAG)] == [0, 1, 2]
    federate([callback], TensorBoardLogger(tmp_path), 1)
    assert sorted(callback.state_dict()["attention"]) == [0]


def test_the_state_is_a_copy(tmp_path):
    callback = AttentionMap(1)
    federate([callback], False, 2)
    state = callback.state_dict()
    resumed = AttentionMap()
    resumed.load_state_dict(state)
    state["attention"][0].clear()
    assert len(callback.state_dict()["attention"][0]) == len(resumed.state_dict()["attention"][0]) == 3
    assert state["last_epoch"] is None  # without TensorBoard no picture is drawn, but the rounds are recorded


def test_it_needs_fedmargin(tmp_path):
    with pytest.raises(MisconfigurationException, match="needs a federation with FedMargin"):
        federate([AttentionMap()], False, 1, method="fedavg")
    with pytest.raises(MisconfigurationException, match="with a `Federation` callback, but got none"):
        train([AttentionMap()], False, 1)


def test_huge_maps_have_small_cells(monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    assert attention_picture([0, 1], torch.rand(2, 300)).shape == (3, 6, 900)
    assert attention_picture([0, 1], torch.rand(2, 3000)).shape == (3, 2, 3000)
