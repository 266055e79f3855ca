import errno
import logging
import os
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_fed import FederatedTrainer
from lightning_fed.lightning.checkpoints import RoundCheckpoint
from tests import models
from tests.breadth import quick
from tests.conftest import QUIET
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.mark.parametrize("reason", quick([errno.ENOSPC, errno.EROFS], [errno.ENOSPC]))
def test_a_disk_that_fails_is_named_with_the_file(reason, tmp_path, monkeypatch):
    """The previous round's checkpoint stays, and the next fit resumes from this checkpoint."""

    def fit(rounds, *callbacks):
        options = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer = FederatedTrainer(max_rounds=rounds, seed=1, callbacks=[RoundCheckpoint(path), *callbacks], **options)
        module = models.Module(models.mlp(), models.momentum)
        trainer.fit(module, models.as_datasets(models.vectors()), ckpt_path=path if path.exists() else None)
        return state_of(module)

    def fail(*_):
        raise OSError(reason, os.strerror(reason))

    class FailsInRound2(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                monkeypatch.setattr(os, "fsync", fail)

    path = tmp_path / "last.ckpt"
    whole = fit(4)
    path.unlink()
    with pytest.raises(OSError, match=os.strerror(reason)) as raised:
        fit(4, FailsInRound2())
    monkeypatch.undo()
    assert f"Raised while writing {str(path)!r}" in "".join(raised.value.__notes__)
    assert torch.load(path, weights_only=True)["epoch"] == 1
    assert not list(tmp_path.glob("*.partial"))
    assert_same(fit(4), whole)


def test_checkpoints_are_moved_within_their_folder(tmp_path, monkeypatch):
    """Moves across file systems copy: a full disk during the copy left an empty last checkpoint."""
    moves = []
    move = shutil.move
    monkeypatch.setattr(shutil, "move", lambda source, target: (moves.append((source, target)), move(source, target)))
    last = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=0, save_last=True)
    trainer = FederatedTrainer(max_rounds=1, seed=1, callbacks=[last], **{**QUIET, "enable_checkpointing": True})
    trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(models.vectors()))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    assert [Path(source).parent.parent for source, _ in moves] == [tmp_path / "checkpoints"]


def test_a_rounds_checkpoint_is_written_without_a_line_in_the_log(tmp_path, caplog):
    saving = logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector")
    options = {**QUIET, "enable_checkpointing": True, "callbacks": [RoundCheckpoint(tmp_path / "last.ckpt")]}
    trainer = FederatedTrainer(max_rounds=1, seed=1, **options)
    saving.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, saving.name)
    try:
        trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(models.vectors()))
    finally:
        saving.removeHandler(caplog.handler)
    assert (tmp_path / "last.ckpt").exists()
    assert "weights_only" not in caplog.text


def test_an_error_that_names_no_file_gets_the_folders_of_the_fit(tmp_path):
    """The error of a logger's thread is `No space left on device` without a path."""

    class FullLogger(CSVLogger):
        def log_metrics(self, metrics, step=None):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = {**QUIET, "logger": FullLogger(tmp_path / "logs"), "default_root_dir": tmp_path}
    trainer = FederatedTrainer(max_rounds=1, seed=1, **options)
    with pytest.raises(OSError, match="No space left") as raised:
        trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(models.vectors()))
    assert f"{tmp_path / 'logs'}" in "".join(raised.value.__notes__)
