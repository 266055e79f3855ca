"""Confusion matrix of a client's classes: counts, rounds, picture, and unchanged training."""

import logging

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib import colormaps
from matplotlib.axes import Axes
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer, Federation
from lightning_fed.algorithms import FedPer
from lightning_fed.callbacks import Confusion, OwnClassConfusion, SampledSoftmax, class_confusion, pictures
from lightning_fed.callbacks.class_confusion import confusion_counts, confusion_picture
from lightning_fed.modules import SampledSoftmaxHead
from tests import models
from tests import references_retrieval as references
from tests.algorithms.fedmargin.test_prototype_plots import Stop, StopAt, examples, train
from tests.callbacks.test_segmentation_images import logged
from tests.conftest import QUIET
from tests.recorders import Recorder, SpoilsFiles

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CLASSES = {"a": [0, 1, 4], "b": [2, 4], "c": [1, 2, 3], "d": [3]}
TAG = OwnClassConfusion.tag


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 5))


def clients():
    return {name: examples(labels, seed) for seed, (name, labels) in enumerate(CLASSES.items())}


def federate(callbacks, rounds=1, module=None, data=None, logger=False, ckpt_path=None, **options):
    options = {**QUIET, "batch_norm": "average", "seed": 3, "logger": logger, **options}
    trainer = FederatedTrainer(**options, max_rounds=rounds, callbacks=callbacks)
    module = module or models.Module(net(), models.momentum)
    data = FederatedDataModule(data or clients(), batch_size=8)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer, module


def assert_counts(confusion, module, data, state=None):
    """Compares with reference counts on the client's data, for the current state or another state."""
    if state is not None:
        before = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(state)
    module.eval()
    inputs, labels = data.tensors
    with torch.no_grad():
        classes, counts = references.own_confusion_reference(module(inputs), labels)
    if state is not None:
        module.load_state_dict(before)
    assert confusion.classes.tolist() == classes
    assert confusion.counts.tolist() == counts
    assert confusion.accuracy == pytest.approx(np.trace(counts) / np.sum(counts))


def test_the_largest_logit_among_some_classes():
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([3, 5, 9, 5, 3, 9, 9, 3] * 5)
    logits = torch.randn(40, 12, generator=generator)
    logits[:, 0] += 100  # a class without examples
    classes, counts = references.own_confusion_reference(logits, labels)
    result = confusion_counts(logits, labels, torch.tensor(classes))
    assert (result.dtype, result.tolist()) == (torch.int64, counts)
    assert (result > 0).all()
    some = labels.clone()
    some[::2] = -100
    halved = references.own_confusion_reference(logits[1::2], labels[1::2])[1]
    assert confusion_counts(logits, some, torch.tensor(classes)).tolist() == halved
    for wrong in (logits[:, :9], logits[:39], torch.zeros(40, 12, 3), (logits,)):
        with pytest.raises(ValueError, match=r"logits of shape \(40, num_classes\) with at least 10 classes, but got"):
            confusion_counts(wrong, labels, torch.tensor(classes))


def test_every_client_sees_the_rounds_global_model():
    confusion = OwnClassConfusion()
    federate([confusion], rounds=3, batch_norm="recalibrate")
    assert list(confusion.latest) == list(CLASSES)
    assert confusion.state_dict() == {"last_epoch": 0}
    recalibrated = OwnClassConfusion(every_n_epochs=1)
    _, module = federate([recalibrated], rounds=3, batch_norm="recalibrate")
    for name, data in clients().items():
        assert recalibrated.latest[name].classes.tolist() == CLASSES[name]
        assert_counts(recalibrated.latest[name], module, data)
    assert any((matrix.counts - matrix.counts.diag().diag()).any() for matrix in recalibrated.latest.values())
    assert confusion.latest["a"].counts.tolist() != recalibrated.latest["a"].counts.tolist()


def test_chosen_clients():
    for clients, expected in ((2, ["a", "b"]), (["d", "b"], ["d", "b"]), (9, [*"abcd"])):
        confusion = OwnClassConfusion(clients)
        federate([confusion])
        assert list(confusion.latest) == expected
    with pytest.raises(ValueError, match=r"`clients` to be clients of the federation, but got \['e'\]"):
        federate([OwnClassConfusion(["a", "e"])])


def test_personal_entries_are_the_clients_own():
    confusion, data = OwnClassConfusion(every_n_epochs=1), clients()
    federation = Federation(FedPer(), batch_norm="average")
    trainer = FederatedTrainer(**QUIET, federation=federation, max_rounds=4, callbacks=[confusion])
    module = models.Module(net(), models.momentum)
    trainer.fit(module, datamodule=FederatedDataModule(data, batch_size=8))
    for name, dataset in data.items():
        assert_counts(confusion.latest[name], module, dataset, federation.client_state(name))
    assert torch.equal(module.net[4].weight, net()[4].weight)  # the initial weights
    with pytest.raises(AssertionError):
        assert_counts(confusion.latest["a"], module, data["a"])


class Named(models.Module):
    """Batches are dictionaries, labels are floats, and some examples have no label."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["pixels"]), batch["kind"].long(), ignore_index=-1)


class NamedData(Dataset):
    def __init__(self, data):
        self.inputs, self.labels = data.tensors

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixels": self.inputs[index], "kind": self.labels[index].float() if index % 3 else torch.tensor(-1.0)}


def test_batches_of_any_kind():
    confusion = OwnClassConfusion(1, target="kind", inputs=lambda batch: batch["pixels"])
    module = Named(net())
    federate([confusion], module=module, data={name: NamedData(data) for name, data in clients().items()})
    inputs, labels = clients()["a"].tensors
    kept = torch.arange(len(labels)) % 3 > 0
    assert_counts(confusion.latest["a"], module, TensorDataset(inputs[kept], labels[kept]))


def test_a_head_of_which_clients_hold_some_classes():
    """The pass uses all classes; the order of callbacks does not matter."""
    for position in (0, 1):
        torch.manual_seed(0)
        module = models.Module(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), SampledSoftmaxHead(8, num_classes=50)))
        confusion = OwnClassConfusion(every_n_epochs=1)
        callbacks = [SampledSoftmax(num_negatives=3)]
        callbacks.insert(position, confusion)
        federate(callbacks, rounds=2, module=module)
        for name, data in clients().items():
            assert_counts(confusion.latest[name], module, data)


class Failing(Dataset):
    def __init__(self, data):
        self.data, self.is_broken = data, False

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if self.is_broken:
            raise OSError("the disk is gone")
        return self.data[index]


def test_a_client_whose_data_fail_is_left_out(caplog):
    data = {**clients(), "b": Failing(clients()["b"])}

    class Break(Recorder):
        def on_server_aggregate(self, trainer, module, state):
            data["b"].is_broken = True

    confusion = OwnClassConfusion()
    _, module = federate([confusion, Break()], data=data)
    assert list(confusion.latest) == ["a", "c", "d"]
    assert (
        "Client 'b' is excluded from the confusion pictures: the client's data raised OSError: the disk is gone."
        in caplog.text
    )
    assert_counts(confusion.latest["c"], module, data["c"])


def test_a_client_whose_files_are_spoiled_is_left_out(tmp_path, caplog):
    confusion = OwnClassConfusion()
    federate([confusion, SpoilsFiles(tmp_path, "b")], method=FedPer(), store=tmp_path)
    assert list(confusion.latest) == ["a", "c", "d"]
    assert "Client 'b' is excluded from the confusion pictures: the client's stored state cannot be read" in caplog.text


def test_a_fault_of_the_module_ends_the_fit():
    class Faulty(models.Module):
        def forward(self, inputs):
            if not self.training:
                raise RuntimeError("no evaluation")
            return super().forward(inputs)

    with pytest.raises(RuntimeError, match="no evaluation"):
        federate([OwnClassConfusion()], module=Faulty(net()))


# --- Pictures ---------------------------------------------------------------------------------------------------------


def test_the_bare_picture(tmp_path, monkeypatch):
    """Every cell has 16 by 16 pixels, coloured by the share in the row."""
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    confusion, logger = OwnClassConfusion(["a", "c"]), TensorBoardLogger(tmp_path)
    federate([confusion], logger=logger)
    for client in ("a", "c"):
        ((step, picture),) = logged(logger, f"{TAG}/{client}")
        counts = confusion.latest[client].counts.double().numpy()
        shares = counts / counts.sum(1, keepdims=True)
        expected = (255 * colormaps["viridis"](shares)[..., :3]).repeat(16, 0).repeat(16, 1).transpose(2, 0, 1)
        assert step == 0
        assert picture.shape == expected.shape
        assert np.abs(picture - expected).max() <= 10  # our colours are within 7 of matplotlib's
    large = Confusion(torch.arange(1200), torch.ones(1200, 1200, dtype=torch.int64))
    assert confusion_picture(large).shape == (3, 1200, 1200)


def test_the_picture_with_axes(monkeypatch):
    labels, titles = [], []
    for name in ("set_xticks", "set_yticks"):
        plain = getattr(Axes, name)
        monkeypatch.setattr(
            Axes, name, lambda axes, *args, plain=plain, **kwargs: labels.append(args) or plain(axes, *args, **kwargs)
        )
    set_title = Axes.set_title
    monkeypatch.setattr(Axes, "set_title", lambda axes, text: titles.append(text) or set_title(axes, text))
    confusion = Confusion(torch.tensor([1, 4, 7]), torch.tensor([[3, 1, 0], [0, 4, 0], [4, 0, 0]]))
    picture = confusion_picture(confusion, ["zero", "one", "two"], "Round 3, client a")
    assert titles == ["Round 3, client a: 58% correct among 3 classes"]
    assert labels[:2] == [([0, 1, 2], ["one", "4", "7"])] * 2
    # The darkest and brightest cells of three rows are at their places in the frame.
    is_black = (picture < 60).all(0).numpy()
    rows, columns = (np.nonzero(is_black.sum(axis) > 0.5 * is_black.sum(axis).max())[0] for axis in (1, 0))
    top, bottom, left = rows.min(), rows.max(), columns.min()
    right = left + bottom - top  # cells are squares
    expected = 255 * colormaps["viridis"](np.array([[0.75, 0.25, 0], [0, 1, 0], [1, 0, 0]]))[..., :3]
    for row in range(3):
        for column in range(3):
            y = round(top + (bottom - top) * (row + 0.5) / 3)
            x = round(left + (right - left) * (column + 0.5) / 3)
            assert np.abs(picture[:, y, x].numpy() - expected[row, column]).max() <= 10
    labels.clear()
    confusion_picture(Confusion(torch.arange(60), torch.eye(60, dtype=torch.int64)))
    assert labels[0][0] == list(range(0, 60, 2))


@pytest.mark.parametrize(("given", "expected"), [((), "from the module"), (["from the callback"], "from the callback")])
def test_names_of_classes(given, expected, tmp_path, monkeypatch):
    seen = []

    def draw(confusion, names, title):
        seen.append(names)
        return torch.zeros(3, 4, 4, dtype=torch.uint8)

    monkeypatch.setattr(class_confusion, "confusion_picture", draw)
    module = models.Module(net(), models.momentum)
    module.class_names = ["from the module"] * net()[4].out_features
    federate([OwnClassConfusion(class_names=given)], module=module, logger=TensorBoardLogger(tmp_path))
    assert {names[0] for names in seen} == {expected}


def test_rounds_with_pictures_and_other_loggers(tmp_path, caplog):
    boards = [TensorBoardLogger(tmp_path, name=name) for name in "ab"]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        federate([OwnClassConfusion(2, every_n_epochs=2)], rounds=3, logger=[*boards, CSVLogger(tmp_path)])
    for board in boards:
        for client in ("a", "b"):
            assert [step for step, _ in logged(board, f"{TAG}/{client}")] == [0, 2]
        assert not logged(board, f"{TAG}/c")
    assert [record.message for record in caplog.records if "sends images only" in record.message] == [
        "OwnClassConfusion sends images only to TensorBoard, so these loggers receive none: CSVLogger."
    ]


# --- Unchanged training -----------------------------------------------------------------------------------------------


def test_a_fit_ends_as_one_without():
    ends = []
    for callbacks in ([], [OwnClassConfusion(every_n_epochs=1)]):
        recorder = Recorder()
        torch.manual_seed(7)
        trainer, module = federate([*callbacks, recorder], rounds=3)
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        ends.append((module.state_dict(), torch.rand(1).item(), values, recorder.aggregates))
        assert module.training
    assert all(torch.equal(value, ends[1][0][name]) for name, value in ends[0][0].items())
    assert ends[0][1:3] == ends[1][1:3]
    assert len(ends[0][3]) == 3


@pytest.mark.slow
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path):
    def run(name, folder, stop=(), ckpt_path=None):
        logger = TensorBoardLogger(tmp_path, name=name)
        checkpoint = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
        callbacks = [OwnClassConfusion(1, every_n_epochs=2), checkpoint, *stop]
        try:
            federate(callbacks, 6, logger=logger, ckpt_path=ckpt_path, enable_checkpointing=True)
        except Stop:
            assert stop
        return logged(logger, f"{TAG}/a")

    last = tmp_path / "parts" / "last.ckpt"
    whole = run("whole", tmp_path / "all")
    first = run("first", last.parent, [StopAt(3, 1)])
    assert torch.load(last, weights_only=True)["callbacks"]["OwnClassConfusion"] == {"last_epoch": 2}
    second = run("second", last.parent, ckpt_path=last)
    assert [step for step, _ in whole] == [step for step, _ in (*first, *second)] == [0, 2, 4]
    for (_, picture), (_, again) in zip(whole, (*first, *second), strict=True):
        assert np.array_equal(picture, again)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="`every_n_epochs` to be at least 1, but got 0"):
        OwnClassConfusion(every_n_epochs=0)
    for clients in (0, []):
        with pytest.raises(ValueError, match="`clients` to contain at least one client, but got"):
            OwnClassConfusion(clients)
    with pytest.raises(MisconfigurationException, match="with a `Federation` callback, but got none"):
        train([OwnClassConfusion()], False, 1)


class ThirdTensor(models.Module):
    """Ignores a label, and trains on the third tensor of a batch."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[2], ignore_index=4)


def test_labels_are_those_in_the_loss():
    data = {
        name: TensorDataset(each[:][0], torch.zeros(len(each), dtype=torch.int64), each[:][1])
        for name, each in clients().items()
    }
    callback = OwnClassConfusion()
    _, module = federate([callback], module=ThirdTensor(net(), models.momentum), data=data)
    for name, each in data.items():
        inputs, _, labels = each.tensors
        if set(CLASSES[name]) - {4}:
            known = labels != 4
            assert_counts(callback.latest[name], module, TensorDataset(inputs[known], labels[known]))


def test_unproven_labels_need_a_target():
    """The loss has other labels than the batch."""

    class Changed(models.Module):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), 4 - batch[1])

    with pytest.raises(MisconfigurationException, match=r"labels in the loss .* give `OwnClassConfusion` a `target`"):
        federate([OwnClassConfusion()], module=Changed(net(), models.momentum))
    callback = OwnClassConfusion(target=lambda batch: 4 - batch[1])
    federate([callback], module=Changed(net(), models.momentum))
    assert {name: confusion.classes.tolist() for name, confusion in callback.latest.items()} == {
        name: sorted(4 - label for label in labels) for name, labels in CLASSES.items()
    }
