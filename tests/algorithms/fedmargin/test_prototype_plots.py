"""Prototype plots: every class's colour at the position computed by numpy and scipy, in the event file."""

import csv
import io
import logging

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from scipy.linalg import orthogonal_procrustes
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedCallback, FederatedTrainer, Federation
from lightning_fed.algorithms import FedMargin
from lightning_fed.callbacks import AttentionMap, ClassPrototypes, PrototypePlots, pictures
from lightning_fed.callbacks.picture_grid import default_colors
from tests import models
from tests.callbacks.test_segmentation_images import logged
from tests.conftest import QUIET
from tests.recorders import assert_same

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

COLORS = [(200, 10, 10), (10, 160, 10), (10, 10, 220), (250, 160, 0), (160, 0, 250)]
TAG = PrototypePlots.tag


# --- Reference without the package ------------------------------------------------------------------------------------


def plane(means, before=None):
    """Centre and leading eigenvectors of the covariance, aligned with another plane."""
    values, vectors = np.linalg.eigh(np.cov(means.T))
    axes = vectors[:, ::-1].T[:2] * (values[::-1][:2, None] > 1e-9)
    largest = [axis[np.abs(axis).argmax()] for axis in axes]
    axes = axes * np.where(np.sign(largest) < 0, -1, 1)[:, None]
    if before is not None:
        axes = (axes.T @ orthogonal_procrustes(axes.T, before[1].T)[0]).T
    return means.mean(0), axes


def planes(history):
    views = []
    for _, means in history:
        views.append(plane(means, views[-1] if views else None))
    return views


def assert_drawn(picture, classes, means, seen_from, colors=COLORS):
    """Colour centres equal the projected points up to scale and shift; no other class is drawn."""
    middles, points = [], (means - seen_from[0]) @ seen_from[1].T
    for label, color in enumerate(colors):
        rows, columns = np.nonzero((picture == np.array(color)[:, None, None]).all(0))
        assert (len(rows) > 20) == (label in classes)
        if label in classes:
            middles.append(((columns.min() + columns.max()) / 2, -(rows.min() + rows.max()) / 2))
    # x = s u + a, y = s v + b
    unknowns = np.concatenate(
        [np.stack([points[:, axis], np.full(len(points), 1 - axis), np.full(len(points), axis)], 1) for axis in (0, 1)]
    )
    solution, *_ = np.linalg.lstsq(unknowns, np.array(middles).T.reshape(-1), rcond=None)
    assert solution[0] > 0
    assert np.abs(unknowns @ solution - np.array(middles).T.reshape(-1)).max() < 1


# --- Runs -------------------------------------------------------------------------------------------------------------


def net(classes=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, classes))


def examples(labels, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor(labels).repeat(8)
    return TensorDataset(torch.randn(len(y), 6, generator=generator) + F.one_hot(y, 6), y)


def clients():
    return {"a": examples([0, 1, 2, 3], 1), "b": examples([0, 1, 2, 3, 4], 2), "c": examples([1, 3], 3)}


class Notes(FederatedCallback):
    def __init__(self):
        self.history, self.attention = [], []

    def on_server_aggregate(self, trainer, module, state):
        aggregator = trainer.federation.server.rule
        classes = aggregator.prototypes.counts.nonzero()[:, 0]
        self.history.append((classes.tolist(), aggregator.prototypes.means[classes].double().numpy().copy()))
        self.attention.append(dict(zip(aggregator.last.clients, aggregator.last.attention, strict=True)))


class Stop(Exception):
    pass


class StopAt(L.Callback):
    def __init__(self, round, batch):
        self.at = round, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            raise Stop


def federate(callbacks, logger, rounds, data=None, ckpt_path=None, **options):
    """Fits a federation, by default with FedMargin; returns the module."""
    arguments = {**QUIET, "logger": logger, "method": FedMargin(proto_memory="cumulative"), "seed": 3, **options}
    trainer = FederatedTrainer(**arguments, max_rounds=rounds, callbacks=callbacks)
    module = models.Module(net(), models.momentum)
    trainer.fit(
        module, {k: DataLoader(v, 8, shuffle=True) for k, v in (data or clients()).items()}, ckpt_path=ckpt_path
    )
    return module


def train(callbacks, logger, epochs, module=None, data=None, **options):
    """Fits in a plain Trainer; returns the module."""
    torch.manual_seed(1)
    module = module or models.Module(net())
    trainer = L.Trainer(**{**QUIET, "logger": logger, **options}, max_epochs=epochs, callbacks=callbacks)
    trainer.fit(module, DataLoader(data or examples([0, 1, 2, 3, 4], 7), 8, shuffle=True))
    return module


# --- Pictures ---------------------------------------------------------------------------------------------------------


def test_pictures_of_a_federation(tmp_path):
    """FedMargin's aggregate prototypes in every second round, and in the projector."""
    notes, logger = Notes(), TensorBoardLogger(tmp_path)
    names = [f"class {index}" for index in range(5)]
    federate([PrototypePlots(2, names, COLORS, projector=True), notes], logger, 3)
    pictures, history = logged(logger, TAG), notes.history[::2]
    assert [step for step, _ in pictures] == [0, 2]
    views = planes(history)
    for (_, picture), (classes, means), seen_from in zip(pictures, history, views, strict=True):
        assert classes == [0, 1, 2, 3, 4]
        assert_drawn(picture, classes, means, seen_from)
    with pytest.raises(AssertionError):  # the plane of another round differs
        assert_drawn(pictures[1][1], *history[1], views[0])
    folder = tmp_path / "lightning_logs" / "version_0"
    config = (folder / "projector_config.pbtxt").read_text()
    for (step, _), (_, means) in zip(pictures, history, strict=True):
        rows = list(csv.reader(io.StringIO((folder / f"{step:05}/prototypes/tensors.tsv").read_text()), delimiter="\t"))
        np.testing.assert_allclose(np.array(rows, dtype=float), means, rtol=1e-6)
        assert (folder / f"{step:05}/prototypes/metadata.tsv").read_text().split("\n")[:-1] == names
        assert f'tensor_path: "{step:05}/prototypes/tensors.tsv"' in config
    assert not (folder / "00001").exists()


@pytest.mark.slow
def test_a_class_that_appears_later(tmp_path):
    """One client per round, with two or three classes each."""
    data = {"a": examples([0, 1], 1), "b": examples([1, 2, 4], 2), "c": examples([0, 3], 3)}
    notes, logger = Notes(), TensorBoardLogger(tmp_path)
    plots = PrototypePlots(1, class_colors=COLORS)
    federate([plots, notes], logger, 8, data, clients_per_round=1)
    seen = [len(classes) for classes, _ in notes.history]
    assert seen[0] < seen[-1] == 5
    assert len(set(seen)) >= 3
    views = planes(notes.history)
    for (_, picture), (classes, means), seen_from in zip(logged(logger, TAG), notes.history, views, strict=True):
        assert_drawn(picture, classes, means, seen_from)


def test_pictures_of_an_aggregator_without_prototypes(tmp_path):
    """With FedAvg the plots show the count-weighted means over the clients of the round."""
    logger, sent = TensorBoardLogger(tmp_path), []

    class Mail(FederatedCallback):
        def on_server_receive(self, trainer, module, update):
            sent[-1].append({name: value.clone() for name, value in update.extras.items()})
            if (trainer.current_epoch, update.client) == (1, "c"):
                update.num_samples = 0  # invalid, hence excluded

        def on_server_round_start(self, trainer, module):
            sent.append([])

    plots = PrototypePlots(1, class_colors=COLORS)
    federate([ClassPrototypes(), plots, Mail()], logger, 2, method="fedavg")
    sent[1].pop()
    history = []
    for extras in sent:
        sums, counts = np.zeros((5, 8)), np.zeros(5)
        for one in extras:
            labels, those = one["prototypes:classes"], one["prototypes:counts"].numpy()
            sums[labels] += those[:, None] * one["prototypes:means"].numpy()
            counts[labels] += those
        history.append(([0, 1, 2, 3, 4], sums / counts[:, None]))
    pictures = logged(logger, TAG)
    for (_, picture), (classes, means), seen_from in zip(pictures, history, planes(history), strict=True):
        assert_drawn(picture, classes, means, seen_from)


def test_prototypes_that_cannot_be_drawn(tmp_path, caplog):
    """The picture omits these clients, and the fit continues as without the callback."""

    class Tampers(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            if client == "a":
                update.extras["prototypes:means"] = update.extras["prototypes:means"][:, :3]
            if client == "c":
                update.extras["prototypes:classes"] += 10**12

    logger = TensorBoardLogger(tmp_path)
    module = federate([ClassPrototypes(), PrototypePlots(1), Tampers()], logger, 1, method="fedavg")
    assert len(logged(logger, TAG)) == 1
    assert_same(module.state_dict(), federate([], False, 1, method="fedavg").state_dict())
    for client, reason in {"a": "have 3 features instead of 8", "c": "include class 1000000000003 instead"}.items():
        assert (
            f"The prototypes of client '{client}' are excluded from the picture: the client's prototypes {reason}"
            in caplog.text
        )


class Inputs(models.Module):
    def __init__(self):
        super().__init__(nn.Linear(6, 5))


def class_means(data):
    x, y = (tensor.numpy() for tensor in data.tensors)
    return np.stack([x[y == label].astype(np.float64).mean(0) for label in range(5)])


def test_pictures_of_a_plain_trainer(tmp_path):
    """Prototypes at the end of the epoch; constant features give constant pictures."""
    data, logger = examples([0, 1, 2, 3, 4], 7), TensorBoardLogger(tmp_path)
    train([ClassPrototypes(), PrototypePlots(2, class_colors=COLORS)], logger, 3, Inputs(), data)
    pictures = logged(logger, TAG)
    assert [step for step, _ in pictures] == [0, 2]
    means = class_means(data)
    for _, picture in pictures:
        assert_drawn(picture, [0, 1, 2, 3, 4], means, plane(means))
    assert np.array_equal(pictures[0][1][:, 100:], pictures[1][1][:, 100:])
    assert not np.array_equal(pictures[0][1][:, :100], pictures[1][1][:, :100])  # the epoch in the title
    assert not list(tmp_path.rglob("*.tsv"))  # the projector is off by default


@pytest.mark.slow
def test_the_title_says_what_share_of_the_spread_is_seen(tmp_path, monkeypatch):
    titles = []
    from matplotlib.axes import Axes

    set_title = Axes.set_title
    monkeypatch.setattr(Axes, "set_title", lambda axes, text: titles.append(text) or set_title(axes, text))
    notes = Notes()
    federate([PrototypePlots(1), notes], TensorBoardLogger(tmp_path), 3)
    shares = []
    for (_, means), (_, axes) in zip(notes.history, planes(notes.history), strict=True):
        away = means - means.mean(0)
        shares.append(((away @ axes.T) ** 2).sum() / (away**2).sum())
    assert titles == [f"Round {number}: {share:.0%} of the spread" for number, share in enumerate(shares, start=1)]
    assert max(shares) < 1


def test_a_single_class_is_not_drawn(tmp_path):
    """The first picture appears with the second class, for any `every_n_epochs`."""
    data = {name: examples([2] if name in "abc" else [2, 3], seed) for seed, name in enumerate("abcd")}
    notes, logger = Notes(), TensorBoardLogger(tmp_path)
    federate([PrototypePlots(100, class_colors=COLORS), notes], logger, 6, data, clients_per_round=1, seed=5)
    first = next(number for number, (classes, _) in enumerate(notes.history) if len(classes) == 2)
    assert first > 0
    ((step, picture),) = logged(logger, TAG)
    assert step == first
    classes, means = notes.history[first]
    assert_drawn(picture, classes, means, plane(means))


def test_classes_without_a_name_or_a_colour(tmp_path):
    """Missing names and colours default to the class index and the palette."""
    logger = TensorBoardLogger(tmp_path)
    plots = PrototypePlots(class_names=["sky", "sea"], class_colors=COLORS[:2], projector=True)
    data = examples([0, 1, 2, 3, 4], 7)
    train([ClassPrototypes(), plots], logger, 1, Inputs(), data)
    ((_, picture),) = logged(logger, TAG)
    palette = [*COLORS[:2], *default_colors(5)[2:]]
    assert_drawn(picture, [0, 1, 2, 3, 4], class_means(data), plane(class_means(data)), palette)
    assert (tmp_path / "lightning_logs/version_0/00000/prototypes/metadata.tsv").read_text() == "sky\nsea\n2\n3\n4\n"


# --- Unchanged training -----------------------------------------------------------------------------------------------


def looking():
    return [PrototypePlots(1, projector=True), AttentionMap(1)]


def test_a_federation_ends_as_one_without(tmp_path, caplog):
    """Every TensorBoard logger gets pictures, and each other logger causes one log line."""
    ends, boards = [], [TensorBoardLogger(tmp_path, name=name) for name in "ab"]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        for callbacks, loggers in (([], False), (looking(), [*boards, CSVLogger(tmp_path)])):
            torch.manual_seed(7)
            module = federate(callbacks, loggers, 2)
            ends.append((module.state_dict(), torch.rand(1).item()))
    assert all(torch.equal(ends[0][0][name], value) for name, value in ends[1][0].items())
    assert ends[0][1] == ends[1][1]
    for tag in (TAG, AttentionMap.tag):
        assert [[step for step, _ in logged(board, tag)] for board in boards] == [[0, 1]] * 2
    lines = [record.message for record in caplog.records if "sends images only" in record.message]
    assert lines == [
        f"{name} sends images only to TensorBoard, so these loggers receive none: CSVLogger."
        for name in ("PrototypePlots", "AttentionMap")
    ]


@pytest.mark.slow
def test_a_plain_fit_ends_as_one_without(tmp_path):
    ends = []
    for name, plots in (("without", []), ("with", [PrototypePlots(1)])):
        logger = TensorBoardLogger(tmp_path, name=name)
        module = train([ClassPrototypes(), *plots], logger, 2)
        ends.append((module.state_dict(), torch.rand(1).item()))
        assert len(logged(logger, TAG)) == 2 * len(plots)
    assert all(torch.equal(ends[0][0][name], value) for name, value in ends[1][0].items())
    assert ends[0][1] == ends[1][1]


@pytest.mark.slow
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path):
    """Interrupted during a round: pictures of prototypes and attention are equal in every pixel."""

    def run(name, folder, stop=(), ckpt_path=None):
        logger = TensorBoardLogger(tmp_path, name=name)
        checkpoint = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
        callbacks = [PrototypePlots(2), AttentionMap(2), checkpoint, *stop]
        options = {"enable_checkpointing": True, "clients_per_round": 2, "ckpt_path": ckpt_path}
        try:
            federate(callbacks, logger, 5, **options)
        except Stop:
            assert stop
        return [logged(logger, tag) for tag in (TAG, AttentionMap.tag)]

    last = tmp_path / "parts" / "last.ckpt"
    whole = run("whole", tmp_path / "all")
    first = run("first", last.parent, [StopAt(3, 1)])
    state = torch.load(last, weights_only=True)["callbacks"]
    view = state["PrototypePlots"]["view"]
    assert state["PrototypePlots"]["last_epoch"] == state["AttentionMap"]["last_epoch"] == 2
    assert [view[name].shape for name in ("center", "axes")] == [(8,), (2, 8)]
    assert list(state["AttentionMap"]["attention"]) == [0, 1, 2]
    second = run("second", last.parent, ckpt_path=last)
    for expected, before, after in zip(whole, first, second, strict=True):
        assert [step for step, _ in expected] == [0, 2, 4]
        assert [step for step, _ in (*before, *after)] == [0, 2, 4]
        for (_, picture), (_, again) in zip(expected, (*before, *after), strict=True):
            assert np.array_equal(picture, again)


def test_a_run_resumed_before_its_first_picture(tmp_path):
    plots = PrototypePlots()
    state = plots.state_dict()
    assert state == {"last_epoch": None, "view": None}
    plots.load_state_dict(state)
    assert plots.state_dict() == state


def test_one_callback_object_serves_two_runs(tmp_path):
    plots = PrototypePlots(100, class_colors=COLORS)
    for seed in (1, 2):
        data, logger = examples([0, 1, 2, 3, 4], seed), TensorBoardLogger(tmp_path, name=str(seed))
        train([ClassPrototypes(), plots], logger, 2, Inputs(), data)
        ((step, picture),) = logged(logger, TAG)
        assert step == 0
        assert_drawn(picture, [0, 1, 2, 3, 4], class_means(data), plane(class_means(data)))


def test_without_tensorboard_nothing_is_drawn(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr("lightning_fed.algorithms.fedmargin.prototype_plots.figure_pixels", fail)
    monkeypatch.setattr("lightning_fed.algorithms.fedmargin.attention_map.draw_matrix", fail)
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        federate(looking(), CSVLogger(tmp_path), 1)
        federate(looking(), False, 1)
    assert len([record for record in caplog.records if "sends images only" in record.message]) == 2


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_refusals(tmp_path):
    for make in (PrototypePlots, AttentionMap):
        with pytest.raises(ValueError, match="`every_n_epochs` to be at least 1, but got 0"):
            make(every_n_epochs=0)
    with pytest.raises(ValueError, match="per class, with values from 0 to 255"):
        PrototypePlots(class_colors=[(0, 0, 256)])


def test_something_has_to_measure_prototypes(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    with pytest.raises(
        MisconfigurationException,
        match="needs a `ClassPrototypes` among the Trainer's callbacks",
    ):
        train([PrototypePlots()], logger, 1)
    with pytest.raises(
        MisconfigurationException,
        match="needs a `ClassPrototypes` among the Trainer's callbacks",
    ):
        federate([PrototypePlots()], logger, 1, method="fedavg")
    with pytest.raises(MisconfigurationException, match="Expected `ClassPrototypes` before `PrototypePlots`"):
        train([PrototypePlots(), ClassPrototypes()], logger, 1)


def test_matplotlib_is_asked_for_by_the_name_of_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"PrototypePlots needs matplotlib: pip install 'lightning-fed\[demo\]'"
    ):
        train([ClassPrototypes(), PrototypePlots()], TensorBoardLogger(tmp_path), 1)


@pytest.mark.slow
def test_the_other_door_draws_the_same(tmp_path):
    """`Federation` in an `L.Trainer`, with the plots first in the list."""
    notes, logger = Notes(), TensorBoardLogger(tmp_path)

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(examples([0, 1, 2, 3, 4], 7), 8, shuffle=True)

    from lightning_fed.data import IID

    federation = Federation(FedMargin(), partition=IID(2))
    notes.on_server_aggregate = lambda trainer, module, state: notes.history.append(federation.server.rule.prototypes)
    callbacks = [PrototypePlots(1, class_colors=COLORS), AttentionMap(1), notes, federation]
    trainer = L.Trainer(**{**QUIET, "logger": logger}, max_epochs=1, callbacks=callbacks)
    trainer.fit(models.Module(net()), datamodule=Data())
    history = [([0, 1, 2, 3, 4], prototypes.means.double().numpy()) for prototypes in notes.history]
    for (_, picture), (classes, means), seen_from in zip(logged(logger, TAG), history, planes(history), strict=True):
        assert_drawn(picture, classes, means, seen_from)
    assert len(logged(logger, AttentionMap.tag)) == 1
