"""Client evaluation outside a fit, and mappings recognised as clients."""

import logging

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.callbacks import ClientEvaluation, SiteMatrix
from lightning_fed.client.client_store import FolderStore
from lightning_fed.data import IID
from lightning_fed.privacy import CentralDP
from tests import models
from tests.breadth import slow
from tests.recorders import MemoryLogger, assert_same, state_of

CLIENTS = models.vectors({"ann": 40, "bob": 41, "cid": 30})
HELD_OUT = models.vectors({"ann": 11, "bob": 40, "cid": 20})
PERSONAL = ("net.head.*",)

# A checkpoint with a ModelCheckpoint state warns on load.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


class Both(models.Module):
    def __init__(self):
        super().__init__(models.BaseAndHead(), models.momentum)

    def test_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("test_acc", (self(inputs).argmax(1) == targets).float().mean())


def data():
    held_out = models.as_datasets(HELD_OUT)
    return FederatedDataModule(models.as_datasets(CLIENTS), val=held_out, test=held_out)


def of_clients(trainer, name):
    found = {key: float(value) for key, value in trainer.callback_metrics.items() if key.endswith(name)}
    return {key: value for key, value in found.items() if key.startswith("client/")}


@pytest.fixture(params=["memory", "folder"])
def fitted(request, federated_trainer, tmp_path):
    """Three rounds with personal heads: Trainer, folder with the checkpoint, and folder of the client store."""
    store = None if request.param == "memory" else tmp_path / "clients"
    checkpoints = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    trainer = federated_trainer(
        max_rounds=3, personal=PERSONAL, store=store, callbacks=[checkpoints], enable_checkpointing=True
    )
    trainer.fit(Both(), datamodule=data())
    return trainer, tmp_path, store


@pytest.mark.parametrize(("door", "fitted"), [("trainer", "folder"), ("callback", "memory")], indirect=["fitted"])
def test_a_checkpoint_is_evaluated_with_each_clients_own_model(door, fitted, federated_trainer, plain_trainer):
    before, folder, store = fitted
    expected = {name: before.federation.client_state(name) for name in CLIENTS}
    reached = of_clients(before, "val_acc")
    assert len(set(reached.values())) > 1
    options = {"personal": PERSONAL, "store": store}
    if door == "trainer":
        trainer = federated_trainer(**options)
        federation = trainer.federation
    else:
        federation = Federation(**options)
        trainer = plain_trainer(callbacks=[federation, ClientEvaluation()])
    module = Both()
    trainer.validate(module, datamodule=data(), ckpt_path=folder / "epoch=2.ckpt", verbose=False)
    assert of_clients(trainer, "val_acc") == reached
    mean = sum(reached.values()) / 3
    assert float(trainer.callback_metrics["fed/val_acc/mean"]) == pytest.approx(mean)
    for name in CLIENTS:
        assert_same(expected[name], federation.client_state(name))
    with pytest.raises(ValueError, match="Expected one of the federation's clients, but got 'typo'"):
        federation.client_state("typo")
    trainer.test(module, datamodule=data(), ckpt_path=folder / "epoch=2.ckpt", verbose=False)
    tested = of_clients(trainer, "test_acc")
    assert tested == pytest.approx({name.replace("val", "test"): value for name, value in reached.items()})
    assert_same(state_of(module), torch.load(folder / "epoch=2.ckpt", weights_only=True)["state_dict"])
    assert "log" not in vars(module)


def test_after_a_fit_validation_says_the_same(fitted):
    trainer, _, _ = fitted
    reached = of_clients(trainer, "val_acc")
    trainer.callback_metrics.clear()
    trainer.validate(trainer.lightning_module, datamodule=data(), verbose=False)
    assert of_clients(trainer, "val_acc") == reached


@pytest.mark.parametrize("keep_all", [False, True])
def test_what_a_folder_no_longer_has_is_not_evaluated(keep_all, federated_trainer, tmp_path, caplog):
    checkpoints = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    store = FolderStore(tmp_path / "clients", keep_all=keep_all)
    fit = federated_trainer(
        max_rounds=3, personal=PERSONAL, store=store, callbacks=[checkpoints], enable_checkpointing=True
    )
    fit.fit(Both(), datamodule=data())
    trainer = federated_trainer(personal=PERSONAL, store=tmp_path / "clients")
    [values] = trainer.validate(Both(), datamodule=data(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert "val_acc" in values
    assert bool(of_clients(trainer, "val_acc")) == keep_all
    assert ("The clients are not evaluated individually" in caplog.text) != keep_all
    assert ("keep_all=True" in caplog.text) != keep_all


def test_a_plain_checkpoint_is_evaluated_with_what_there_is(plain_trainer, federated_trainer, tmp_path):
    plain = plain_trainer(max_epochs=1)
    plain.fit(Both(), datamodule=data())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    trainer = federated_trainer(personal=PERSONAL)
    trainer.validate(Both(), datamodule=data(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    assert len(of_clients(trainer, "val_acc")) == 3


class Breaks(ClientEvaluation):
    """Evaluates the clients again after the fit, with a failing module."""

    def on_train_end(self, trainer, pl_module):
        pl_module.test_step = pl_module.validation_step = self.fail
        self.evaluate(trainer, pl_module, self.stage)

    def fail(self, batch):
        raise KeyError("no mask")


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_an_error_in_an_evaluation_names_client_and_stage(stage, federated_trainer):
    evaluation = Breaks()
    evaluation.stage = stage
    with pytest.raises(KeyError, match="no mask") as caught:
        federated_trainer(max_rounds=1, callbacks=[evaluation]).fit(Both(), datamodule=data())
    assert caught.value.__notes__[0] == f"Raised in the {stage} of client 'ann'."


class OneFails(Both):
    def fail(self, batch):
        if bool((batch[0] == 9).any()):
            raise KeyError("no mask")

    def validation_step(self, batch, batch_idx):
        self.fail(batch)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.fail(batch)


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_an_error_in_lightnings_own_evaluation_names_the_client(stage, federated_trainer):
    held_out = {name: (inputs.clone(), targets) for name, (inputs, targets) in HELD_OUT.items()}
    held_out["bob"][0][-1] = 9
    parts = models.as_datasets(held_out)
    data = FederatedDataModule(models.as_datasets(CLIENTS), val=parts, test=parts, batch_size=8)
    with pytest.raises(KeyError, match="no mask") as caught:
        getattr(federated_trainer(max_rounds=1), stage)(OneFails(), datamodule=data)
    assert caught.value.__notes__ == ["Raised in the evaluation of client 'bob'."]


# --- Mappings of clients ----------------------------------------------------------------------------------------------


class Several(models.Module):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("sanity", [0, 2])
def test_loaders_by_name_are_lightnings(sanity, federated_trainer):
    inputs, targets = CLIENTS["ann"]
    train = DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)
    parts = models.as_datasets({"easy": HELD_OUT["ann"], "hard": HELD_OUT["bob"]})
    loaders = {"easy": DataLoader(parts["easy"], 8), "hard": parts["hard"]}
    trainer = federated_trainer(max_rounds=1, partition=IID(4), num_sanity_val_steps=sanity)
    trainer.fit(Several(models.mlp()), train, loaders)
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= set(trainer.callback_metrics)
    assert not [name for name in trainer.callback_metrics if name.startswith(("client/", "fed/val"))]
    trainer = federated_trainer(max_rounds=1, partition=IID(4), num_sanity_val_steps=sanity)
    trainer.fit(Several(models.mlp()), train, dict(enumerate(loaders.values())))
    assert {"val_loss", "client/0/val_loss", "client/1/val_loss"} <= set(trainer.callback_metrics)


@pytest.mark.parametrize("personal", [PERSONAL, ()])
def test_clients_that_do_not_train_are_named(personal, federated_trainer, caplog):
    held_out = models.as_datasets({"ann": HELD_OUT["ann"], "bobb": HELD_OUT["bob"]})
    trainer = federated_trainer(max_rounds=2, personal=personal)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(Both(), models.as_datasets(CLIENTS), held_out)
    said = [record for record in caplog.records if "evaluated clients do not train" in record.message]
    assert [record.levelname for record in said] == ["WARNING" if personal else "INFO"]
    assert "'bobb'" in said[0].message
    assert "'ann', 'bob', 'cid'" in said[0].message
    assert "initial values" in said[0].message or not personal
    assert "client/bobb/val_acc" in trainer.callback_metrics


# --- Rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "val_every", "rounds"), [slow((1, 1, [0, 1, 2, 3, 4, 5])), (2, 2, [3]), (3, 1, [2, 5])]
)
def test_clients_are_evaluated_in_every_so_many_rounds_with_a_validation(every, val_every, rounds, federated_trainer):
    held_out = models.as_datasets({"ann": HELD_OUT["ann"]})
    trainer = federated_trainer(
        max_rounds=6, callbacks=[ClientEvaluation(every)], check_val_every_n_epoch=val_every, logger=MemoryLogger()
    )
    trainer.fit(models.Module(models.mlp()), models.as_datasets(CLIENTS), held_out)
    assert [round for round, _ in trainer.logger.curve("client/ann/val_loss")] == rounds


@pytest.mark.parametrize("steps", [[CentralDP(1.0, 1e-3, noise_multiplier=1.0)], []])
@pytest.mark.parametrize("is_of_clients", [True, False])
def test_privacy_says_that_clients_are_not_evaluated(steps, is_of_clients, federated_trainer, caplog):
    held_out = models.as_datasets({"ann": HELD_OUT["ann"]})
    trainer = federated_trainer(max_rounds=1, steps=steps, clients_per_round=0.5)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        val = held_out if is_of_clients else DataLoader(held_out["ann"], 8)
        trainer.fit(models.Module(models.mlp()), models.as_datasets(CLIENTS), val)
    line = "The clients are not evaluated: no noise would protect their scores."
    assert caplog.text.count(line) == (bool(steps) and is_of_clients)
    assert ("client/ann/val_loss" in trainer.callback_metrics) == (not steps and is_of_clients)


@pytest.mark.parametrize("callbacks", [[ClientEvaluation()], [SiteMatrix("val_acc")]])
def test_a_callback_without_data_of_clients_is_refused(callbacks, federated_trainer):
    pooled = DataLoader(models.as_datasets({"all": CLIENTS["ann"]})["all"], 8)
    trainer = federated_trainer(max_rounds=1, partition=IID(2), callbacks=callbacks)
    message = (
        rf"`{type(callbacks[0]).__name__}` has no data to evaluate, .* as a mapping from client to data, split the data"
    )
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(Both(), pooled, pooled)
    federated_trainer(max_rounds=1, partition=IID(2)).fit(Both(), pooled, pooled)
