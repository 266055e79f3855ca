"""Values over all clients are those of one process on the pooled data."""

import logging

import pytest
import torch

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import ClientEvaluation
from tests import evaluations, models


def fitted(federated_trainer, case, evaluation, rounds=2, **options):
    make, data, loaders = evaluations.CASES[case]
    held_out = evaluations.held_out(data, loaders)
    trainer = federated_trainer(max_rounds=rounds, callbacks=[evaluation], **options)
    module = make()
    clients = FederatedDataModule(models.as_datasets(data(evaluations.TRAIN)), held_out, batch_size=8)
    trainer.fit(module, datamodule=clients)
    return module, trainer, held_out


@pytest.mark.parametrize("case", evaluations.CASES)
def test_merged_values_are_those_of_pooled_data(case, federated_trainer, plain_trainer):
    module, trainer, held_out = fitted(federated_trainer, case, ClientEvaluation(lists=["dice"]))
    expected = evaluations.on_pooled_data(plain_trainer(), module, held_out)
    found = {name: float(trainer.callback_metrics[f"fed/{name}/pooled"]) for name in expected}
    assert len(expected) > 2
    assert found == pytest.approx(expected, rel=2e-5)


def test_predictions_stay_with_their_client(federated_trainer, caplog):
    evaluation = ClientEvaluation(withheld=["jac*"])
    with caplog.at_level(logging.INFO, "lightning_fed"):
        _, trainer, _ = fitted(federated_trainer, "segmentation", evaluation)
    pooled = {name for name in trainer.callback_metrics if name.endswith("/pooled")}
    assert pooled == {"fed/val_iou/pooled", "fed/val_loss/pooled"}
    assert {"client/ann/val_dice", "fed/val_jaccard/mean"} <= set(trainer.callback_metrics)  # which it computed itself
    reason = "its state is a list of predictions or targets, which are data."
    assert caplog.text.count(f"The state of metric 'dice' does not leave the clients: {reason}") == 1
    assert caplog.text.count("The state of metric 'jaccard' does not leave the clients: it is withheld.") == 1
    assert caplog.text.count("There are no values over all clients of val_dice, val_jaccard.") == 1


class Collects(models.Module):
    """Values of the epoch's end from what the module has collected in attributes of its own."""

    def __init__(self):
        super().__init__(models.mlp())
        self.outputs, self.hits, self.count = [], 0.0, 0

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.outputs.append(outputs)
        self.hits += float((outputs.argmax(1) == batch[1]).sum())
        self.count += len(batch[1])

    def on_validation_epoch_end(self):
        self.log("accuracy", self.hits / max(self.count, 1))  # 0 of nothing, which is wrong of all
        self.log("spread", torch.cat(self.outputs).std())
        self.outputs, self.hits, self.count = [], 0.0, 0


def test_what_is_no_function_of_the_states_is_a_mean_and_said(federated_trainer, caplog):
    held_out = models.as_datasets(models.vectors(evaluations.HELD_OUT))
    trainer = federated_trainer(max_rounds=1)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(Collects(), models.as_datasets(models.vectors(evaluations.TRAIN)), held_out)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name in ("accuracy", "spread"):
        sizes = evaluations.HELD_OUT
        mean = sum(size * logged[f"client/{client}/{name}"] for client, size in sizes.items()) / sum(sizes.values())
        assert logged[f"fed/{name}/pooled"] == pytest.approx(mean)
        assert caplog.text.count(f"'{name}' over all clients is the mean of theirs") == 1
    assert logged["fed/accuracy/pooled"] == pytest.approx(logged["accuracy"])
    assert logged["accuracy"] > 0
