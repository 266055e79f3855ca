"""Evaluation of the clients' models after local training."""

import copy

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedCallback, FederatedDataModule, MemoryStore
from lightning_fed.callbacks import ClientEvaluation, FeatureFusion, LocalEvaluation
from lightning_fed.data import LazyClients
from lightning_fed.modules import find_fusion
from lightning_fed.privacy import CentralDP, SecureSum
from lightning_fed.steps import UniformWeights
from tests import models
from tests.algorithms.fedfusion.test_fusion import Net
from tests.breadth import slow
from tests.recorders import Recorder, assert_same

TRAIN, VAL = {"ann": 13, "bob": 8, "cid": 21}, {"ann": 40, "cid": 5}


def fit(federated_trainer, callbacks, module=None, **options):
    module = models.Module(Net(), models.momentum) if module is None else module
    trainer = federated_trainer(
        **{"max_rounds": 2, "local_epochs": 2, "seed": 3, "callbacks": callbacks, "batch_norm": "average", **options}
    )
    data = FederatedDataModule(
        models.as_datasets(models.images(TRAIN)), models.as_datasets(models.images(VAL)), batch_size=8
    )
    trainer.fit(module, datamodule=data)
    return module


class Losses(FederatedCallback):
    """Computes the losses by hand with the model at the end of the visit."""

    def __init__(self):
        self.rounds = []

    def on_server_round_start(self, trainer, module):
        self.rounds.append([])

    def on_client_end(self, trainer, module, client, update):
        if client in VAL:
            images, labels = models.images(VAL)[client]
            net = copy.deepcopy(module.net).eval()
            with torch.no_grad():
                parts = [
                    F.cross_entropy(net(x), y) * len(y) for x, y in zip(images.split(32), labels.split(32), strict=True)
                ]
            self.rounds[-1].append(sum(parts).item() / len(labels))


@pytest.mark.parametrize("fused", [False, True])
def test_losses_are_those_of_the_clients_models(fused, federated_trainer):
    """With fusion, the reference extractor is the received extractor."""
    losses, recorder = Losses(), Recorder()
    callbacks = [FeatureFusion(operator="conv")] if fused else []
    module = fit(federated_trainer, [*callbacks, losses, LocalEvaluation(), recorder])
    for means, logged in zip(losses.rounds, recorder.logged, strict=True):
        assert logged["clients/local/val_loss"] == pytest.approx(sum(means) / 2, rel=1e-5)
        assert abs(logged["clients/local/val_loss"] - logged["fed/val_loss/mean"]) > 1e-4
        assert 0 <= logged["clients/local/val_acc"] <= 1
    assert (find_fusion(module) is not None) == fused


class WithMetric(models.Module):
    """A metric in an attribute. `reset` has an override during a round, to detect values from earlier visits."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.accuracy(self(batch[0]), batch[1])
        self.log("val_metric", self.accuracy)


def test_a_metric_object_has_the_same_value(federated_trainer):
    recorder = Recorder()
    module = fit(federated_trainer, [LocalEvaluation(), recorder], WithMetric(Net(), models.momentum))
    for logged in recorder.logged:
        assert logged["clients/local/val_metric"] == pytest.approx(logged["clients/local/val_acc"])
    assert "reset" not in vars(module.accuracy)


class Writes(models.Module):
    """A validation step with random numbers and a write to a buffer."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("count", torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        super().validation_step((batch[0] + torch.randn(()), batch[1]), batch_idx)
        if self.training or not self.trainer.validating:
            self.count += torch.rand(())


@pytest.mark.parametrize("options", [slow({}), {"personal": ["count"], "optimizer_state": "keep"}])
def test_the_training_does_not_notice(options, federated_trainer):
    results = []
    for callbacks in ([], [LocalEvaluation()]):
        recorder, store = Recorder(), MemoryStore()
        module = Writes(Net(), models.momentum)
        callbacks = [*callbacks, recorder, ClientEvaluation(0)]
        fit(federated_trainer, callbacks, module, store=store, **options)
        kept = [state for client in TRAIN if (state := store.get(client))]
        results.append([*recorder.aggregates, *(visit.end for visit in recorder.visits), *kept])
    for expected, result in zip(*results, strict=True):
        assert_same(expected, result)
    assert len(kept) == (len(TRAIN) if options else 0)


def test_some_rounds_alone(federated_trainer):
    recorder = Recorder()
    fit(federated_trainer, [LocalEvaluation(every_n_rounds=2), recorder], max_rounds=4)
    assert ["clients/local/val_loss" in recorder.logged[round] for round in (0, 1)] == [False, True]
    values = [logged.get("clients/local/val_loss") for logged in recorder.logged]
    assert values[1] != values[3]
    with pytest.raises(ValueError, match="Expected `every_n_rounds` to be at least 1"):
        LocalEvaluation(0)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_it_needs_the_clients_own_data(federated_trainer):
    with pytest.raises(MisconfigurationException, match="`LocalEvaluation` has no data to evaluate, because"):
        federated_trainer(max_rounds=1, callbacks=[LocalEvaluation()]).fit(
            models.Module(Net()), models.as_datasets(models.images(TRAIN))
        )


@pytest.mark.parametrize("steps", [[UniformWeights(), SecureSum(5.0)], [CentralDP(1.0, 1e-5, noise_multiplier=1.0)]])
def test_no_score_leaves_under_a_secure_sum_or_central_privacy(steps, federated_trainer):
    with pytest.raises(MisconfigurationException, match=r"`LocalEvaluation.on_client_end` may send more.*: remove"):
        fit(federated_trainer, [LocalEvaluation()], steps=steps)


@pytest.mark.parametrize(
    "callbacks", [[LocalEvaluation(), ClientEvaluation(every_n_rounds=0)], [ClientEvaluation(clients=2)]]
)
def test_only_clients_that_are_evaluated_have_their_data_built(callbacks, federated_trainer):
    built = []

    def build(client):
        built.append(client)
        return held_out[client]

    held_out = models.as_datasets(models.vectors())
    data = FederatedDataModule(held_out, LazyClients(sorted(held_out), build))
    trainer = federated_trainer(max_rounds=1, clients_per_round=2, callbacks=callbacks, limit_val_batches=1)
    trainer.fit(models.Module(models.mlp()), datamodule=data)
    assert len(built) == len(held_out) + 2  # all for the validation of the global model
