"""Values over all clients equal one process with the pooled data."""

import csv
import logging
import math

import pytest
import torch
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.callbacks.evaluation import EvaluationReport
from lightning_fed.errors import BadUpdate, ClientFault
from lightning_fed.messages import ClientUpdate, tensor_bytes
from tests import evaluations, models
from tests.breadth import quick, slow


def fitted(federated_trainer, case, evaluation, rounds=2, **options):
    make, data, loaders = evaluations.CASES[case]
    held_out = evaluations.held_out(data, loaders)
    trainer = federated_trainer(max_rounds=rounds, callbacks=[evaluation], **options)
    module = make()
    clients = FederatedDataModule(models.as_datasets(data(evaluations.TRAIN)), held_out, batch_size=8)
    trainer.fit(module, datamodule=clients)
    return module, trainer, held_out


@pytest.mark.parametrize("case", quick(evaluations.CASES, ["segmentation", "labels", "loaders"]))
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
    # computed by the client evaluation
    assert {"client/ann/val_dice", "fed/val_jaccard/mean"} <= set(trainer.callback_metrics)
    reason = "the state is a list of predictions or targets, and therefore reveals data."
    assert caplog.text.count(f"The state of metric 'dice' does not leave the clients: {reason}") == 1
    assert (
        caplog.text.count("The state of metric 'jaccard' does not leave the clients: the client withholds the metric.")
        == 1
    )
    assert caplog.text.count("No value over all clients for val_dice, val_jaccard, because the clients' sums") == 1


class Collects(models.Module):
    """Values at the end of the epoch from attributes of the module."""

    def __init__(self):
        super().__init__(models.mlp())
        self.outputs, self.hits, self.count = [], 0.0, 0

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.outputs.append(outputs)
        self.hits += float((outputs.argmax(1) == batch[1]).sum())
        self.count += len(batch[1])

    def on_validation_epoch_end(self):
        self.log("accuracy", self.hits / max(self.count, 1))  # 0 of 0: undefined
        self.log("spread", torch.cat(self.outputs).std())
        self.outputs, self.hits, self.count = [], 0.0, 0


def test_what_is_no_function_of_the_states_is_missing_and_said(federated_trainer, caplog):
    held_out = models.as_datasets(models.vectors(evaluations.HELD_OUT))
    trainer = federated_trainer(max_rounds=1)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(Collects(), models.as_datasets(models.vectors(evaluations.TRAIN)), held_out)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name in ("accuracy", "spread"):
        values = [logged[f"client/{client}/{name}"] for client in evaluations.HELD_OUT]
        assert logged[f"fed/{name}/mean"] == pytest.approx(sum(values) / 3)
        assert f"fed/{name}/pooled" not in logged
    assert caplog.text.count("No value over all clients for accuracy, spread, because the clients' sums") == 1
    assert "monitor the mean over clients, 'fed/accuracy/mean'." in caplog.text
    assert logged["accuracy"] > 0


class AtTheEnd(models.Module):
    """Metric objects logged at the end of the epoch; one has a list state, one has special characters in the name."""

    def __init__(self):
        super().__init__(models.mlp())
        self.auroc = MulticlassAUROC(models.CLASSES)
        self.scores = MetricCollection({"hits@1|all": MulticlassAccuracy(models.CLASSES)})

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.auroc.update(outputs.softmax(1), batch[1])
        self.scores.update(outputs, batch[1])

    def on_validation_epoch_end(self):
        self.log("val_auroc", self.auroc)
        self.log_dict(self.scores)


def test_metrics_that_the_epochs_end_logs_as_objects(federated_trainer):
    held_out = models.as_datasets(models.vectors({"ann": 21, "bob": 15}))
    module, trainer = AtTheEnd(), federated_trainer(max_rounds=1)
    trainer.fit(module, models.as_datasets(models.vectors(evaluations.TRAIN)), held_out)
    logged = trainer.callback_metrics
    assert float(logged["fed/hits@1|all/pooled"]) == pytest.approx(float(logged["hits@1|all"]))
    assert "client/ann/val_auroc" in logged
    assert "fed/val_auroc/pooled" not in logged


def report_of(count, **extras):
    """A report with the classifier's loss and additional entries."""
    loss = torch.tensor([1.0 * count, count], dtype=torch.float64)
    return ClientUpdate("ann", count, {}, {"logged|mean|loss": loss, "value||loss": loss[:1] / count} | extras)


@pytest.mark.parametrize(
    "extras",
    [
        {"updates|acc": torch.tensor(float("inf"))},
        {"logged|mean|other": torch.zeros(2)},
        {"logged|middle|other": torch.ones(2)},
        {"metric|acc|val_acc": torch.zeros(0)},
        {"value||a\nb": torch.zeros(1)},
        {"logged": torch.ones(2)},
        {"weather|fine|x": torch.ones(2)},
        {"support": torch.tensor([-1.0])},
        {f"value||{number}": torch.zeros(1) for number in range(1001)},
    ],
)
def test_reports_that_are_none(extras):
    with pytest.raises(BadUpdate):
        EvaluationReport.of(report_of(4, **extras))
    assert EvaluationReport.of(report_of(4)).logged["loss"].value == 1.0


def test_one_clients_word_changes_nothing_of_the_others(federated_trainer, monkeypatch, caplog):
    """The client withholds a metric, marks values as means, and invents names."""
    original = ClientEvaluation.on_client_question

    def lies(self, trainer, module, client, question):
        update = original(self, trainer, module, client, question)
        if client == "bob":
            names = [name for name in update.extras if "|f1" in name]
            for name in names:
                del update.extras[name]
            update.extras |= {
                "stays|lie\nlie|f1": torch.zeros(0),
                "stays|the client withholds the metric|weather": torch.zeros(0),
            }
            update.extras["value|m|highest"] = update.extras.pop("value||highest")
            update.extras |= {f"value||new{number}": torch.zeros(1, dtype=torch.float64) for number in range(400)}
            update.extras["value||step"] = torch.zeros(1, dtype=torch.float64)
        return update

    monkeypatch.setattr(ClientEvaluation, "on_client_question", lies)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        _, trainer, _ = fitted(federated_trainer, "classifier", ClientEvaluation(), 1)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["fed/highest/pooled"] == pytest.approx(logged["highest"])
    assert 0 < logged["fed/val_f1/pooled"] <= 1
    assert "The state of metric 'f1' does not leave 1 clients ('bob'): the client gave no known reason." in caplog.text
    assert "'weather'" not in caplog.text
    assert len([name for name in logged if name.endswith("/pooled")]) < 20
    assert len([name for name in logged if name.startswith("client/bob/")]) <= 256
    assert "client/bob/step" not in logged


def test_loaders_are_made_once(federated_trainer):
    made = []

    class Data(FederatedDataModule):
        def evaluation_loader(self, dataset):
            made.append(dataset)
            return super().evaluation_loader(dataset)

    held_out = models.as_datasets(models.vectors({f"c{number}": 3 for number in range(6)}))
    trainer = federated_trainer(max_rounds=1)
    module = models.Module(models.mlp())
    trainer.fit(module, datamodule=Data(models.as_datasets(models.vectors(evaluations.TRAIN)), held_out))
    assert len(made) == 12  # Lightning's validation, and the validation by client


@pytest.mark.parametrize("question", [{}, {"stage": "training", "limit": 1.0}, {"stage": "test", "limit": "all"}])
def test_what_is_no_question_is_not_answered(question, plain_trainer):
    with pytest.raises(ClientFault, match="not a valid evaluation"):
        ClientEvaluation().on_client_question(plain_trainer(), models.Module(models.mlp()), "ann", question)


@pytest.mark.parametrize(("clients", "count"), [slow(("all", 3)), ("round", 1), (2, 2), (0.5, 2)])
def test_who_is_evaluated(clients, count, federated_trainer):
    _, trainer, _ = fitted(federated_trainer, "labels", ClientEvaluation(clients=clients), clients_per_round=1)
    assert trainer.callback_metrics["evaluation/clients"] == count
    with pytest.raises(ValueError, match="Expected `clients` to be 'all', 'round'"):
        ClientEvaluation(clients=0)


def test_a_client_with_few_examples_reports_nothing(federated_trainer, caplog):
    module, trainer, _ = fitted(federated_trainer, "labels", ClientEvaluation(min_examples=6), rounds=1)
    values = trainer.callback_metrics
    assert (
        "Client 'bob' does not answer: the client has fewer validation examples than the client's min_examples=6."
        in caplog.text
    )
    assert (values["evaluation/clients"], values["evaluation/failed"]) == (2, 1)
    assert values["evaluation/num_samples"] == evaluations.HELD_OUT["ann"] + evaluations.HELD_OUT["cid"]
    assert values["evaluation/down_bytes"] == 3 * tensor_bytes(module.state_dict())
    assert "client/ann/val_f1" in values
    assert not any(name.startswith("client/bob/val") for name in values)


class OfLastClass(models.Module):
    def __init__(self):
        super().__init__(models.mlp())
        self.accuracy = MeanMetric()

    def validation_step(self, batch, batch_idx):
        is_last = batch[1] == models.CLASSES - 1
        self.accuracy.update((self(batch[0]).argmax(1) == batch[1])[is_last].float())
        self.log("val_acc", self.accuracy)


def test_a_class_that_a_client_lacks_is_missing(federated_trainer, tmp_path):
    clients = models.as_datasets(models.vectors(evaluations.TRAIN))
    held_out = models.vectors(evaluations.HELD_OUT)
    inputs, targets = held_out["ann"]
    held_out["ann"] = [values[targets != models.CLASSES - 1] for values in (inputs, targets)]
    evaluation = ClientEvaluation(folder=tmp_path)
    assert evaluation.table() == ""
    trainer = federated_trainer(max_rounds=2, callbacks=[evaluation])
    trainer.fit(OfLastClass(), datamodule=FederatedDataModule(clients, models.as_datasets(held_out)))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    others = [values["client/bob/val_acc"], values["client/cid/val_acc"]]
    assert math.isnan(values["client/ann/val_acc"])
    assert values["fed/val_acc/mean"] == pytest.approx(sum(others) / 2)
    assert values["fed/val_acc/min"] == min(others)
    assert values["fed/val_acc/pooled"] == pytest.approx(values["val_acc"])
    with (tmp_path / "clients.csv").open() as file:
        cells = {row["client"]: row["val_acc"] for row in csv.DictReader(file)}
    assert [name for name in cells if not cells[name]] == ["ann"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in evaluation.table().splitlines()]
    shown = {row[0]: row[rows[0].index("val_acc")] for row in rows[2:]}
    assert {name: value for name, value in shown.items() if cells[name]} == {
        name: f"{float(cell):.3g}" for name, cell in cells.items() if cell
    }


def test_a_value_that_is_not_finite_is_left_out_by_name(federated_trainer, caplog):
    held_out = models.vectors(evaluations.HELD_OUT)
    held_out["bob"][0].fill_(math.inf)
    trainer = federated_trainer(max_rounds=1)
    clients = models.as_datasets(models.vectors(evaluations.TRAIN))
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(models.Module(models.mlp()), datamodule=FederatedDataModule(clients, models.as_datasets(held_out)))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert math.isnan(values["client/bob/val_loss"])
    counts = {name: evaluations.HELD_OUT[name] for name in ("ann", "cid")}
    expected = sum(values[f"client/{name}/val_loss"] * count for name, count in counts.items()) / sum(counts.values())
    assert values["fed/val_loss/pooled"] == pytest.approx(expected, rel=1e-6)
    assert "'val_loss' over all clients excludes 'bob', because the clients' values are not finite." in caplog.text


class Heavy(models.Module):
    def validation_step(self, batch, batch_idx):
        is_bobs = bool((batch[0] == 9).all())
        self.log("val_score", 7.0 if is_bobs else 1.0, batch_size=10**9 if is_bobs else len(batch[0]))


def test_the_weight_that_a_client_gives_its_value_is_bounded(federated_trainer, caplog):
    """The bound is 100 times the median client's weight per example; the log names the client."""
    held_out = models.vectors(evaluations.HELD_OUT)
    held_out["bob"][0].fill_(9)
    trainer = federated_trainer(max_rounds=1)
    clients = models.as_datasets(models.vectors(evaluations.TRAIN))
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(Heavy(models.mlp()), datamodule=FederatedDataModule(clients, models.as_datasets(held_out)))
    assert "The weight of 'bob' in 'val_score' over all clients is reduced" in caplog.text
    weights = {name: count * (100 if name == "bob" else 1) for name, count in evaluations.HELD_OUT.items()}
    expected = 1 + 6 * weights["bob"] / sum(weights.values())
    assert float(trainer.callback_metrics["fed/val_score/pooled"]) == pytest.approx(expected, rel=1e-6)
