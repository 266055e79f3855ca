"""Forged evaluations: a single client controls neither the best checkpoint nor the end of a fit."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.callbacks.evaluation.bounds import find_outliers
from lightning_fed.callbacks.evaluation.report import EvaluationReport, MetricState
from lightning_fed.steps import MaxSamples
from tests import evaluations, models
from tests.breadth import slow


class Scored(models.Module):
    def __init__(self):
        super().__init__(models.mlp())
        self.acc = MulticlassAccuracy(models.CLASSES)
        self.mean, self.last = MeanMetric(), MeanMetric()

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.acc(outputs, batch[1])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))
        losses = F.cross_entropy(outputs, batch[1], reduction="none")
        self.mean(losses)
        self.last.update(losses)
        self.log("val_acc", self.acc)
        self.log("val_mean", self.mean)

    def on_validation_epoch_end(self):
        self.log("val_last", self.last.compute())
        self.last.reset()


class Forged(ClientEvaluation):
    def __init__(self, forge, round):
        super().__init__()
        self.forge, self.round = forge, round

    def on_client_question(self, trainer, module, client, question):
        update = super().on_client_question(trainer, module, client, question)
        if client == "bob" and trainer.current_epoch == self.round:
            self.forge(update)
        return update


def loss_of(total, weight, value=None):
    def forge(update):
        update.extras["logged|mean|val_loss"] = torch.tensor([total, weight], dtype=torch.float64)
        if value is not None:
            update.extras["value|p|val_loss"] = update.extras["value||val_loss"] = torch.tensor([value])

    return forge


def counts_of(number, **others):
    def forge(update):
        for name, value in {"tp": number, **others}.items():
            update.extras[f"state|acc|{name}"][:] = value
        if others:  # with the value computed from the states
            update.extras["value|h|val_acc"] = torch.tensor([1.0])

    return forge


def examples_of(number):
    def forge(update):
        update.num_samples = number

    return forge


def support_of(update):
    update.extras["support"][:] = 1e9


def weightless(update):
    """A sum of zero, for more examples than all other clients together."""
    update.num_samples = 10**12
    loss_of(0.0, 1e12, 0.0)(update)


def mean_of(number, metric="mean", flags=None):
    """A forged state, without value or marked as independent of states."""

    def forge(update):
        for name in [name for name in update.extras if name.startswith(f"state|{metric}|mean_value")]:
            update.extras[name] = torch.full_like(update.extras[name], number)
        if metric == "mean":
            value = update.extras.pop("value||val_mean")
            if flags is not None:
                update.extras[f"value|{flags}|val_mean"] = value

    return forge


FORGERIES = {
    "many examples with a sum of zero": (
        weightless,
        0,
        "the client has 1000000000000 examples, but the median of 3 clients is",
    ),
    "a state without its value": (mean_of(-1e9), 0, "a logged name, but no value for the name"),
    "a flag that most clients do not send": (mean_of(9.0, flags="m"), 0, "but the sums and states of the client give"),
    "a state that the epoch's end reads": (mean_of(-1e9, "last"), 0, "the client's value of metric 'last' is"),
    "an infinite state": (mean_of(math.inf, "last"), 0, "the client's value of metric 'last' is inf"),
    "a sum that disagrees with its value": (loss_of(-50.0, 1.0), 0, "the sums and states of the client give -50"),
    "a negative loss": (loss_of(-50.0, 1.0, -50.0), 0, "the client's value of 'val_loss' is -50"),
    "a small negative loss": (loss_of(-1.0, 1.0, -1.0), 0, "the client's value of 'val_loss' is -1"),
    "a huge loss": (loss_of(1e9, 1.0, 1e9), 0, "the client's value of 'val_loss' is 1e+09"),
    "counts that disagree with their value": (counts_of(10**9), 0, "the client's value of 'val_acc' is"),
    "more hits than examples": (counts_of(10**9, fp=0, fn=0), 0, "per example, but the median of 3 clients"),
    "negative counts": (counts_of(-1), 0, "has a negative count"),
    "no examples": (examples_of(0), 0, "examples"),
    "other examples than announced": (examples_of(10**6), 1, "in the first evaluation, but now has 1000000"),
    "examples per class": (support_of, 0, "the client's examples per class are"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_evaluation_is_excluded_by_name(name, federated_trainer, caplog):
    forge, round, reason = FORGERIES[name]
    trainer = federated_trainer(max_rounds=round + 1, callbacks=[Forged(forge, round)])
    clients = models.as_datasets(models.vectors(evaluations.TRAIN))
    held_out = models.as_datasets(models.vectors(evaluations.HELD_OUT))
    trainer.fit(Scored(), datamodule=FederatedDataModule(clients, held_out, batch_size=8))
    (line,) = [record.getMessage() for record in caplog.records if "is excluded" in record.getMessage()]
    assert line.startswith("The evaluation of client 'bob' is excluded: ")
    assert reason in line
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (logged["evaluation/clients"], logged["evaluation/failed"]) == (2, 1)
    values = {client: logged[f"client/{client}/val_loss"] for client in ("ann", "cid")}
    sizes = evaluations.HELD_OUT
    mean = sum(sizes[client] * value for client, value in values.items()) / sum(sizes[client] for client in values)
    assert logged["fed/val_loss/pooled"] == pytest.approx(mean)


class Broken(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        raise OSError("scan-17.dcm")


def test_validation_data_that_raise_exclude_their_client(federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=2)
    clients = models.as_datasets(models.vectors(evaluations.TRAIN))
    held_out = {**models.as_datasets(models.vectors(evaluations.HELD_OUT)), "bob": Broken()}
    trainer.fit(Scored(), datamodule=FederatedDataModule(clients, held_out, batch_size=8))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (logged["evaluation/clients"], logged["evaluation/failed"]) == (2, 1)
    assert "the client's data raised OSError" in caplog.text


class Endless(models.Module):
    def __init__(self):
        super().__init__(models.mlp())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", -math.inf)


def test_an_infinite_value_of_all_clients_is_no_value(federated_trainer):
    """An infinite value would stay the best value permanently."""
    trainer = federated_trainer(max_rounds=1)
    clients = models.as_datasets(models.vectors(evaluations.TRAIN))
    held_out = models.as_datasets(models.vectors(evaluations.HELD_OUT))
    trainer.fit(Endless(), datamodule=FederatedDataModule(clients, held_out, batch_size=8))
    assert math.isnan(trainer.callback_metrics.get("fed/val_loss/pooled", math.nan))


@pytest.mark.parametrize(
    "values",
    [
        {"ann": 0.01, "bob": 0.02, "cid": 3.0, "dan": 0.02},  # a client with difficult data
        {"ann": -310.0, "bob": -290.0, "cid": -5.0},  # likelihoods
        {"ann": 0.5, "bob": -30.0},  # with two clients neither is the outlier
        {"ann": 0.04, "bob": 0.02, "cid": -0.01, "dan": 0.03},  # likelihoods around zero
        {"ann": 0.5, "bob": -0.3, "cid": 0.4},
    ],
)
def test_clients_that_differ_are_no_outliers(values):
    reports = {client: EvaluationReport(9, values={"val_loss": value}) for client, value in values.items()}
    assert find_outliers(reports) == {}


@pytest.mark.parametrize(
    ("numbers", "trained", "excluded"),
    [
        ((10, 12, 9000), {}, []),  # one large client
        ((10, 12, 9000), {"ann": 90, "bob": 80, "cid": 70_000}, []),
        ((10, 12, 100), {"ann": 5, "bob": 5, "cid": 5}, []),  # few examples for training
        ((10, 12, 900), {"cid": 40}, ["cid"]),
        ((10, 12, 10**5), {"cid": 10**12}, ["cid"]),
    ],
)
def test_examples_are_bounded_by_training_and_by_the_other_clients(numbers, trained, excluded):
    reports = {client: EvaluationReport(number) for client, number in zip(("ann", "bob", "cid"), numbers, strict=True)}
    assert list(find_outliers(reports, trained)) == excluded


class Inflated(Forged):
    """The client has as many examples in training as in the evaluation, in the client's words."""

    def on_server_receive(self, trainer, module, update):
        if update.client == "bob":
            update.num_samples = 15_000


@pytest.mark.parametrize(("steps", "clients"), [slow(([], 3)), ([MaxSamples(100)], 2)])
def test_the_plan_bounds_a_client_with_two_false_numbers(steps, clients, federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=2, callbacks=[Inflated(examples_of(15_000), 1)], steps=steps)
    train = models.as_datasets(models.vectors(evaluations.TRAIN))
    held_out = models.as_datasets(models.vectors({**evaluations.HELD_OUT, "bob": 8_000}))
    trainer.fit(Scored(), datamodule=FederatedDataModule(train, held_out, batch_size=1000))
    assert trainer.callback_metrics["evaluation/clients"] == clients


def test_a_score_may_be_negative():
    values = {"ann": 0.3, "bob": -0.4, "cid": 0.2}
    reports = {client: EvaluationReport(9, values={"val_r2": value}) for client, value in values.items()}
    assert find_outliers(reports) == {}


@pytest.mark.parametrize("found", [(0, 0, 4), (0, 1, 40)])
def test_rare_events_of_one_client_are_no_outlier(found):
    """Most clients may have no events."""
    states = [{"lesions": MetricState(updates=3, values={"found": torch.tensor(number)})} for number in found]
    reports = {client: EvaluationReport(20, states=state) for client, state in enumerate(states)}
    assert find_outliers(reports) == {}


def test_other_data_in_another_evaluation_exclude_no_client(federated_trainer):
    """Numbers of examples are compared within one fit or evaluation."""
    trainer, module = federated_trainer(max_rounds=1), Scored()
    clients = models.as_datasets(models.vectors(evaluations.TRAIN))
    for factor in (1, 4):
        sizes = {client: factor * size for client, size in evaluations.HELD_OUT.items()}
        data = FederatedDataModule(clients, models.as_datasets(models.vectors(sizes)), batch_size=8)
        trainer.validate(module, datamodule=data, verbose=False)
        assert trainer.callback_metrics["evaluation/failed"] == 0
        assert trainer.callback_metrics["evaluation/num_samples"] == sum(sizes.values())
