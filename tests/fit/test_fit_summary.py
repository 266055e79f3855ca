"""A fit logs a line before training and a table afterwards."""

import logging
import re
import shlex
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_fed import Availability, FederatedDataModule, Federation
from lightning_fed.privacy import CentralDP
from tests import models

CLIENTS = {"a": 40, "b": 16, "c": 16}


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "lightning_fed.callbacks.federation"]


def bytes_of(module, *patterns):
    return sum(
        value.numel() * value.element_size()
        for name, value in module.state_dict().items()
        if not name.startswith(patterns)
    )


def fit(make_trainer, caplog, module, rounds=2, **options):
    data = FederatedDataModule(models.as_datasets(models.vectors(CLIENTS)), batch_size=16)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        make_trainer(max_rounds=rounds, **options).fit(module, datamodule=data)
    return lines(caplog)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_the_line_at_the_start(federated_trainer, caplog):
    module = models.Module(models.norm_mlp())
    first, *_, end = fit(federated_trainer, caplog, module, clients_per_round=2, personal=["net.0.*"])
    size = bytes_of(module, "net.0.")
    assert first.startswith("FedAvg: rounds 1 to 2, 2 of 3 clients per round, one after another.")
    assert f"{size} bytes each way per client" in first
    assert "not sent: 2 personal" in first
    assert "BatchNorm: 'auto', and clients also receive each new model to measure statistics." in first
    assert ", new models sent twice (BatchNorm)" in end


class Teacher(models.Module):
    """The momentum encoder follows the network in every step."""

    def __init__(self):
        super().__init__(models.mlp())
        self.teacher = models.mlp().requires_grad_(False)
        torch.nn.init.zeros_(self.teacher[0].weight)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for followed, value in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                followed.lerp_(value, 0.1)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_what_travels_of_a_momentum_encoder(federated_trainer, caplog):
    """The two sizes in the line add up to the bytes sent back by one client."""
    module = Teacher()
    first, *_, end = fit(federated_trainer, caplog, module, rounds=1, local_epochs=2)
    half = bytes_of(module, "teacher.")
    assert f" {half} bytes each way per client (4 tensors)." in first
    assert f" {half} bytes more (4 tensors without gradient) if the module writes to them" in first
    assert f"sent back         {3 * 2 * half / 1000:.1f} kB" in end


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_the_seed_is_read_when_the_fit_begins(federated_trainer, caplog, monkeypatch):
    federation = Federation()
    monkeypatch.setenv("PL_GLOBAL_SEED", "8")
    assert "Seed 8." in fit(federated_trainer, caplog, models.Module(models.mlp()), federation=federation)[0]
    assert federation.schedule.seed == 8
    monkeypatch.setenv("PL_GLOBAL_SEED", "9")
    caplog.clear()
    given = Federation(seed=3)
    assert "Seed 3." in fit(federated_trainer, caplog, models.Module(models.mlp()), federation=given)[0]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_the_table_at_the_end(federated_trainer, caplog):
    module = models.Module(models.mlp())
    options = {"federation": Federation(availability=Availability(client_dropout=0.4), seed=2)}
    table = fit(federated_trainer, caplog, module, rounds=4, **options)[-1].splitlines()
    rows = dict(line.strip().split("  ", 1) for line in table[1:])
    rows = {name: value.strip() for name, value in rows.items()}
    federation = options["federation"]
    used, dropped = (sum(values) for values in zip(*drawn(federation, 4), strict=True))
    assert table[0] == "FedAvg:"
    assert rows["rounds"].startswith("4, ")
    assert rows["updates used"] == str(used)
    assert rows["clients excluded"] == f"0 failed, {dropped} dropped out"
    assert dropped > 0
    assert rows["sent back"] == f"{used * bytes_of(module) / 1000:.1f} kB"
    assert not any(name.startswith(("fed/", "comm/")) for name in rows)


def drawn(federation, rounds):
    cohorts = [federation.schedule.cohort(round, list(CLIENTS)) for round in range(rounds)]
    return [(len(cohort.visits), len(cohort.dropped)) for cohort in cohorts]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_draw_of_any_number_is_about_so_many(federated_trainer, caplog):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    privacy = CentralDP(clip=1.0, noise_multiplier=1.0, delta=1e-3)
    first = fit(federated_trainer, caplog, models.Module(models.mlp()), clients_per_round=2, steps=[privacy])[0]
    assert "about 2 of 3 clients per round" in first


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("interval", [50, 3])
def test_lightnings_advice_on_the_logging_interval_comes_once(interval, federated_trainer, caplog, tmp_path):
    """Every round builds a loader and some are short; with the smaller interval the first one is long."""
    federation = Federation(clients_per_round=1, seed=14)
    batches = [-(-CLIENTS[federation.schedule.cohort(n, list(CLIENTS)).visits[0].client] // 16) for n in range(4)]
    assert (batches[0] < interval) == (interval == 50)
    assert sum(number < interval for number in batches) > 1
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        logger = CSVLogger(tmp_path)
        module = models.Module(models.mlp())
        fit(federated_trainer, caplog, module, 4, federation=federation, log_every_n_steps=interval, logger=logger)
        warnings.warn("The number of training batches of another fit", stacklevel=1)
    advice = [str(warning.message) for warning in shown if "number of training batches" in str(warning.message)]
    assert len(advice) == 2, advice
    assert "logging interval" in advice[0]
    assert advice[1].endswith("of another fit")


class Stops(models.Module):
    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            raise KeyboardInterrupt


def test_the_end_says_where_the_best_checkpoint_and_the_logs_are(federated_trainer, caplog, tmp_path):
    saver = ModelCheckpoint(tmp_path / "best", monitor="val_loss")
    data = FederatedDataModule(
        models.as_datasets(models.vectors(CLIENTS)), models.as_datasets(models.vectors({"v": 16}))["v"], batch_size=16
    )
    trainer = federated_trainer(
        max_rounds=2, callbacks=[saver], enable_checkpointing=True, logger=CSVLogger(tmp_path, "logs")
    )
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(models.Module(models.mlp()), datamodule=data)
    table = lines(caplog)[-1]
    assert re.search(
        rf"best val_loss +{float(saver.best_model_score):.4g} after round [12], {re.escape(saver.best_model_path)}\n",
        table,
    )
    assert re.search(rf"newest checkpoint +{re.escape(str(tmp_path))}/best/epoch=[01]-", table)
    assert re.search(rf"logs +{re.escape(trainer.log_dir)}$", table)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_an_interrupted_fit_says_from_which_checkpoint_it_goes_on(federated_trainer, caplog, tmp_path):
    saver = ModelCheckpoint(tmp_path, save_top_k=-1)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(federated_trainer, caplog, Stops(models.mlp()), 4, callbacks=[saver], enable_checkpointing=True)
    path = saver.best_model_path
    assert lines(caplog)[-1].endswith(
        f"`fit(..., ckpt_path={path!r})`, or the same command with --ckpt_path {shlex.quote(path)}"
    )
    assert "epoch=1" in saver.best_model_path
