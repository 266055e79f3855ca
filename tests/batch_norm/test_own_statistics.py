"""Own BatchNorm statistics belong to one set of weights: averaged weights, checkpoints, failed rounds."""

import logging

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from lightning_fed import FederatedCallback, FederatedDataModule, LocalStatistics
from lightning_fed.batch_norm import measurement
from tests import models
from tests.batch_norm.test_batch_norm_decision import (
    ROUNDS,
    assert_measured,
    decisions,
    fit,
    loaders,
    measured_reference,
    unlike,
)
from tests.recorders import MemoryLogger, loading, state_of
from tests.references_batch_norm import normalised_by_batch

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

PREFIX = "batch_norm:"


def stored_statistics(states):
    return {
        client: {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX + "net")}
        for client, state in states.items()
    }


def in_checkpoint(path):
    store = torch.load(path, weights_only=True)["callbacks"]["Federation"]["store"]
    return stored_statistics(dict(zip(store["clients"], store["states"], strict=True)))


def own_loss(net, weights, statistics, tensors):
    """Loss with given weights; without statistics BatchNorm normalises by batch."""
    net.load_state_dict({name.removeprefix("net."): value for name, value in {**weights, **statistics}.items()})
    inputs, targets = tensors
    with torch.no_grad():
        outputs = net.eval()(inputs) if statistics else normalised_by_batch(net, inputs)
    return F.cross_entropy(outputs, targets).item()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("cohort", [1.0, 3])
def test_averaged_weights_have_their_statistics(cohort, federated_trainer, tmp_path):
    """In the store, in the last validation, and after loading in a new Trainer."""
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    clients = unlike()
    val = loaders(clients, 1000)
    options = {"clients_per_round": cohort, "val": val, "batch_norm": LocalStatistics()}
    averages = [averaging.EMAWeightAveraging(decay=0.6)]
    trainer, module, _ = fit(federated_trainer, clients, callbacks=averages, **options)
    average = state_of(module)
    stored = stored_statistics({client: trainer.federation.store.get(client) for client in clients})
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = federated_trainer(max_rounds=1, batch_norm=LocalStatistics())
    data = FederatedDataModule(models.as_datasets({"other": clients["ann"]}), val)
    elsewhere = models.Module(models.norm_mlp(), models.momentum)
    again.validate(elsewhere, datamodule=data, ckpt_path=tmp_path / "end.ckpt", verbose=False, **loading(True))
    for client, tensors in clients.items():
        assert_measured(stored[client], measured_reference(average, clients, client, ROUNDS - 1))
        expected = own_loss(models.norm_mlp(), average, stored[client], tensors)
        for metrics in (trainer.callback_metrics, again.callback_metrics):
            assert metrics[f"client/{client}/val_loss"].item() == pytest.approx(expected, rel=1e-5)


class SavesAtEnds(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / "end.ckpt")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_stale_statistics_are_not_served(federated_trainer, tmp_path, caplog):
    """The end of the fit measures all visited clients; in other checkpoints a stale client is normalised by batch."""
    clients = unlike()
    options = {"clients_per_round": 2, "callbacks": [SavesAtEnds(tmp_path)], "batch_norm": LocalStatistics()}
    _, module, recorder = fit(federated_trainer, clients, **options)
    current = in_checkpoint(tmp_path / "end.ckpt")
    assert set(current) == {visit.client for visit in recorder.visits}
    for client, statistics in current.items():
        assert_measured(statistics, measured_reference(recorder.aggregates[-1], clients, client, ROUNDS - 1))

    last_round = {visit.client for visit in recorder.round(ROUNDS - 1)}
    stale = set(current) - last_round
    assert stale
    again = federated_trainer(max_rounds=1, batch_norm=LocalStatistics())
    data = FederatedDataModule(models.as_datasets({"other": clients["ann"]}), loaders(clients, 1000))
    path = tmp_path / f"{ROUNDS - 1}.ckpt"
    caplog.clear()
    elsewhere = models.Module(models.norm_mlp(), models.momentum)
    again.validate(elsewhere, datamodule=data, ckpt_path=path, verbose=False, **loading(True))
    for client, tensors in clients.items():
        statistics = current[client] if client in last_round else {}
        expected = own_loss(models.norm_mlp(), state_of(module), statistics, tensors)
        assert again.callback_metrics[f"client/{client}/val_loss"].item() == pytest.approx(expected, rel=1e-5)
    (warned,) = [message for message in caplog.messages if "were measured with other weights" in message]
    assert any(f"client '{client}'" in warned for client in stale)


def test_a_round_that_is_taken_back_decides_and_stores_nothing(federated_trainer, monkeypatch, caplog):
    def poisoned(reports, layer, *tolerated, pool=measurement.pool_statistics):
        mean, variance = pool(reports, layer, *tolerated)
        return mean, variance * (float("inf") if not seen else 1)

    seen = []

    class Watch(FederatedCallback):
        def on_server_round_end(self, trainer, module, is_new):
            federation = trainer.federation
            count = federation.state_dict()["num_measured"]
            seen.append((is_new, federation.batch_norm_decision, count, len(federation.store.clients())))

    monkeypatch.setattr(measurement, "pool_statistics", poisoned)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        fit(federated_trainer, unlike(), max_rounds=2, callbacks=[Watch()])
    assert seen == [(False, "", 0, 0), (True, "own", 1, len(models.SIZES))]
    assert len(decisions(caplog)) == 1


@pytest.mark.parametrize(("treatment", "reports"), [("auto", 1), (LocalStatistics("pooled"), ROUNDS)], ids=str)
def test_own_statistics_need_no_reports_after_the_decision(treatment, reports, federated_trainer):
    """A report sends the model down again and the statistics up."""
    logger = MemoryLogger()
    _, _, recorder = fit(federated_trainer, unlike(), batch_norm=treatment, logger=logger)
    rounds = [values for _, values in logger.lines if "comm/down_bytes" in values]
    assert len(rounds) == ROUNDS
    for number, values in enumerate(rounds):
        is_reported = number < reports
        assert ("fed/batch_norm_shift" in values) == is_reported
        assert (values["comm/down_bytes"] > recorder.down_bytes[number]) == is_reported
        assert (values["comm/up_bytes"] > recorder.up_bytes[number]) == is_reported
