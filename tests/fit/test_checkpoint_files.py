"""A fit's checkpoints: names match the state inside, and users can load the files."""

import logging
from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_fed.matching
import lightning_fed.modules
from lightning_fed.algorithms import FedFusion, FedMA
from tests import models
from tests.breadth import quick
from tests.recorders import assert_same, state_of

CLIENTS = models.as_datasets(models.images({"ann": 12, "bob": 9}))
PART = CLIENTS["ann"]

NAMED = {
    "monitor and step": {"every_n_train_steps": 4, "monitor": "train_loss", "filename": "{step}"},
    "default name": {"every_n_train_steps": 4},
    "epoch alone": {"every_n_train_steps": 4, "filename": "{epoch}"},
    "a value": {"every_n_train_steps": 4, "filename": "{train_loss:.2f}", "save_top_k": -1},
    "monitor alone": {"every_n_train_steps": 4, "filename": "best", "monitor": "train_loss"},
    "by the clock": {"train_time_interval": timedelta(minutes=1)},
    "exception": {"every_n_epochs": 1, "save_on_exception": True},
}


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("count", [1, 2])
def test_a_name_of_another_state_is_refused(kind, count, federated_trainer, tmp_path):
    """Inside a round, a checkpoint contains the state at the start of the round."""
    try:
        saver = ModelCheckpoint(tmp_path, **NAMED[kind])
    except TypeError:
        pytest.skip("save_on_exception is new in Lightning 2.6")
    trainer = federated_trainer(max_rounds=1, callbacks=[saver], enable_checkpointing=True)
    clients = dict(list(CLIENTS.items())[:count])
    with pytest.raises(MisconfigurationException, match=r"the last complete round\. Set `every_n_epochs=1`"):
        trainer.fit(models.Module(models.cnn()), clients, PART)
    assert not list(tmp_path.glob("*.ckpt"))


def test_names_that_hold_are_taken(federated_trainer, tmp_path):

    class Rounds(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            states.append(state_of(pl_module))

    states = []
    savers = [
        ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1),
        ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_top_k=0),
    ]
    trainer = federated_trainer(max_rounds=3, callbacks=[Rounds(), *savers], enable_checkpointing=True)
    trainer.fit(models.Module(models.cnn()), CLIENTS, PART)
    for place, state in enumerate(states):
        assert_same(torch.load(tmp_path / f"epoch={place}.ckpt", weights_only=True)["state_dict"], state)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_plain_trainer_goes_on_from_a_file_of_a_round_under_way(federated_trainer, plain_trainer, tmp_path):
    saver = ModelCheckpoint(tmp_path, "inside", every_n_train_steps=3)
    federated_trainer(max_rounds=2, callbacks=[saver], enable_checkpointing=True).fit(
        models.Module(models.cnn()), {name: DataLoader(part, 4) for name, part in CLIENTS.items()}, PART
    )
    saved = torch.load(tmp_path / "inside.ckpt", weights_only=True)
    module = models.Module(models.cnn())
    trainer = plain_trainer(max_epochs=3)
    loader = DataLoader(torch.utils.data.ConcatDataset(list(CLIENTS.values())), 4)
    trainer.fit(module, loader, DataLoader(PART, 4), ckpt_path=tmp_path / "inside.ckpt")
    assert trainer.current_epoch == 3
    assert trainer.global_step > saved["global_step"]


LOADED = {
    "conv": lambda: FedFusion("conv"),
    "multi": lambda: FedFusion("multi", at="net.3"),
    "grow": lambda: FedMA("grow", score="published", gamma=7.0, max_width=None),
}


@pytest.mark.parametrize("kind", quick(LOADED, ["multi", "grow"]))
def test_the_log_has_the_line_that_loads_a_checkpoint(kind, federated_trainer, tmp_path, caplog):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trainer = federated_trainer(max_rounds=3, method=LOADED[kind](), callbacks=[saver], enable_checkpointing=True)
    trained = models.Module(models.cnn())
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        trainer.fit(trained, CLIENTS, PART)
    line = next(line for line in caplog.text.splitlines() if "Load a checkpoint into a new module: " in line)
    module, path = models.Module(models.cnn()), saver.last_model_path
    names = {"lightning_fed": lightning_fed, "torch": torch, "module": module, "path": path}
    exec(line.partition("a new module: ")[2], names)
    assert_same(state_of(module), state_of(trained))
    assert state_of(module).keys() != state_of(models.Module(models.cnn())).keys() or kind == "grow"
