"""Unusable checkpoints cause an error or a log line: damaged files, other methods, other clients."""

import os
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.backends.wire.server import run_server
from lightning_fed.fit.checks import check_file, check_option, describe_clients
from lightning_fed.lightning.checkpoints import RoundCheckpoint, SafeCheckpointIO
from tests.conftest import QUIET
from tests.models import Module, as_datasets, mlp, vectors

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

DATA = as_datasets(vectors({"a": 8, "b": 9}))


@pytest.fixture
def fit(federated_trainer):
    def run(path=None, rounds=1, clients=DATA, **options):
        trainer = federated_trainer(max_rounds=rounds, **options)
        trainer.fit(Module(mlp()), clients, ckpt_path=path)
        return trainer

    return run


@pytest.fixture
def checkpoint(fit, tmp_path):
    path = tmp_path / "round.ckpt"
    fit().save_checkpoint(path)
    return path


def flip(path, part):
    """Flips one bit of a tensor in the file."""
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if part in info.filename and info.file_size > 100)
    data = bytearray(path.read_bytes())
    name_length, extra_length = (int.from_bytes(data[info.header_offset + at :][:2], "little") for at in (26, 28))
    data[info.header_offset + 30 + name_length + extra_length + 40] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_noticed(fit, checkpoint):
    flip(checkpoint, "/data/")
    torch.load(checkpoint, weights_only=True)  # loads without an error
    with pytest.raises(ValueError, match=r"is damaged: the bytes of .* have changed"):
        fit(checkpoint, 2)


def test_files_without_checksums_are_taken(tmp_path, monkeypatch):
    check_file(None)
    check_file("s3://bucket/last.ckpt")
    (tmp_path / "notes").write_text("no archive")
    check_file(tmp_path / "notes")
    monkeypatch.setattr(torch.serialization, "get_crc32_options", lambda: False)
    torch.save({"w": torch.ones(100)}, tmp_path / "w.ckpt")
    flip(tmp_path / "w.ckpt", "/data/")
    check_file(tmp_path / "w.ckpt")


def test_a_model_that_nobody_can_train_is_refused(fit, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    next(iter(content["state_dict"].values())).view(-1)[0] = torch.nan
    torch.save(content, tmp_path / "nan.ckpt")
    with pytest.raises(
        MisconfigurationException, match=r"from a model that no client can train: entry 'net.0.weight' has"
    ):
        fit(tmp_path / "nan.ckpt", 2)


@pytest.mark.parametrize("method", ["fedprox", "fedadam", "fedmargin", "fesem", "fedatt"])
def test_the_checkpoint_of_another_method_is_refused(method, fit, checkpoint):
    with pytest.raises(ValueError, match="Expected `method` to be FedAvg, as in the checkpoint, but got"):
        fit(checkpoint, 2, method=method)


def test_a_checkpoint_that_does_not_say_its_method():
    check_option("method", "", "FedAvg")
    check_option("method", "FedAvg", "FedAvg")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"a": 8, "c": 9}, "the checkpoint has 2, but the data have 2 with other names"),
        ({"a": 8, "b": 9, "c": 5}, "the checkpoint has 2, but the data have 3."),
    ],
)
def test_other_clients_are_said(sizes, text, fit, checkpoint, caplog):
    trainer = fit(checkpoint, 2, as_datasets(vectors(sizes)))
    assert text in caplog.text
    assert trainer.current_epoch == 2
    caplog.clear()
    fit(checkpoint, 2)
    assert "The clients differ from" not in caplog.text


def test_clients_are_known_by_their_names():
    assert describe_clients(["a", "\udcff"]) == describe_clients(("a", "\udcff")) != describe_clients(["a"])


def test_a_killed_server_leaves_nothing_behind(fit, tmp_path, monkeypatch):
    """The next start removes Lightning's temporary file next to the checkpoint."""
    written = []
    real = tempfile.mkstemp

    def note(*args, **options):
        handle, name = real(*args, **options)
        written.append(name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", note)
    last, before = tmp_path / "run" / "last.ckpt", tempfile.tempdir
    last.parent.mkdir()
    fit(callbacks=[RoundCheckpoint(last)], enable_checkpointing=True)
    (folder,) = {Path(name).parent for name in written}
    assert folder.parent == last.parent
    folder.mkdir()
    (folder / "tmp-of-a-killed-one").touch()
    fit(callbacks=[RoundCheckpoint(last)], enable_checkpointing=True)
    assert [path.name for path in last.parent.iterdir()] == ["last.ckpt"]
    assert tempfile.tempdir == before
    assert torch.load(last, weights_only=True)["epoch"] == 0


class Payload:
    """An object with a side effect in loading: a new folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def poisoned(checkpoint, tmp_path):
    """A checkpoint with code run by pickle, and the folder created by the code."""
    content = torch.load(checkpoint, weights_only=True)
    content["callbacks"]["Mine"] = {"options": [1, Payload(tmp_path / "executed")]}
    torch.save(content, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt", tmp_path / "executed"


@pytest.mark.parametrize("door", ["fit", "validate", "plain", "server"])
def test_no_door_executes_code_from_a_checkpoint(door, poisoned, federated_trainer, fit):
    """With every version of Lightning. The error names the entry."""
    path, executed = poisoned
    options = {**QUIET, "max_epochs": 2}
    doors = {
        "fit": lambda: fit(path, 2),
        "validate": lambda: federated_trainer(max_rounds=1).validate(
            Module(mlp()), DataLoader(DATA["a"], 8), ckpt_path=path
        ),
        "plain": lambda: L.Trainer(**options, callbacks=[Federation()]).fit(
            Module(mlp()), datamodule=FederatedDataModule(DATA), ckpt_path=path
        ),
        "server": lambda: run_server(
            Federation(), Module(mlp()), None, {**options, "enable_checkpointing": True}, SimpleNamespace(), ["a"],
            path.parent,
        ),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"object of '\w+.mkdir' in 'callbacks.Mine.options'"):
        doors[door]()
    assert not executed.exists()


def test_an_explicit_choice_unpickles_with_a_warning(poisoned, caplog):
    path, executed = poisoned
    SafeCheckpointIO().load_checkpoint(path, weights_only=False)
    assert executed.exists()
    assert "pickled objects can execute code" in caplog.text
