"""A client has no history over epochs: a value with a history is missing instead of wrong."""

import math

import pytest
import torch
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric

from tests import models


class Accuracy(models.Module):
    """Logs the accuracy and more values at the end of the epoch."""

    def __init__(self, end, **attributes):
        super().__init__(models.mlp())
        self.accuracy, self.end, self.hits, self.count = (
            MulticlassAccuracy(models.CLASSES, average="micro"),
            end,
            0.0,
            0,
        )
        self.best, self.threshold = 0.0, 0.5
        for name, value in attributes.items():
            setattr(self, name, value)

    def validation_step(self, batch, batch_idx):
        scores = self(batch[0])
        self.accuracy.update(scores, batch[1])
        self.hits += float((scores.argmax(1) == batch[1]).sum())
        self.count += len(batch[1])

    def on_validation_epoch_end(self):
        accuracy = self.accuracy.compute()
        self.log("val_acc", accuracy)
        self.end(self, accuracy)
        self.accuracy.reset()
        self.hits, self.count = 0.0, 0


class WithBest(Accuracy):
    """Logs the best accuracy so far."""

    def on_validation_epoch_end(self):
        if self.accuracy.compute() > self.best:
            self.best = self.accuracy.compute()
        self.log("best", self.best)
        super().on_validation_epoch_end()


class WithMaximum(Accuracy):
    def on_validation_epoch_end(self):
        self.best = max(self.best, float(self.accuracy.compute()))
        self.log("best", self.best)
        super().on_validation_epoch_end()


class WithAverage(Accuracy):
    def on_validation_epoch_end(self):
        self.best = 0.9 * self.best + 0.1 * self.accuracy.compute()
        self.log("best", self.best)
        super().on_validation_epoch_end()


def log_metric(self, accuracy):
    self.best_metric.update(accuracy)
    self.log("best", self.best_metric.compute())


def log_gap(self, accuracy):
    self.log("best", self.best_metric(accuracy) * 0 + self.best_metric.compute() - accuracy)


def log_number(self, accuracy):
    self.best_metric.update(accuracy)
    self.log("best", float(self.best_metric.compute()))


def log_reset(self, accuracy):
    self.best_metric.reset()
    log_metric(self, accuracy)


def reset_later(self, accuracy):
    log_metric(self, accuracy)
    self.best_metric.reset()


def log_object(self, accuracy):
    self.best_metric.update(accuracy)
    self.log("best", self.best_metric)


def log_counts(self, accuracy):
    self.log("best", self.hits / max(self.count, 1))


def log_constant(self, accuracy):
    self.log("best", (accuracy > self.threshold).float())


def nothing(self, accuracy):
    pass


HISTORIES = {
    "metric": lambda: Accuracy(log_metric, best_metric=MaxMetric()),
    "mean metric": lambda: Accuracy(log_metric, best_metric=MeanMetric()),
    "called metric": lambda: Accuracy(log_gap, best_metric=MaxMetric()),
    "number of a metric": lambda: Accuracy(log_number, best_metric=MaxMetric()),
    "comparison": lambda: WithBest(nothing),
    "maximum": lambda: WithMaximum(nothing),
    "moving average": lambda: WithAverage(nothing, best=torch.zeros(())),
}
SINGLE = {
    "reset before": lambda: Accuracy(log_reset, best_metric=MaxMetric()),
    "reset after": lambda: Accuracy(reset_later, best_metric=MaxMetric()),
    "logged object": lambda: Accuracy(log_object, best_metric=MaxMetric()),
    "counts": lambda: Accuracy(log_counts),
    "constant": lambda: Accuracy(log_constant),
}


def logged_values(federated_trainer, module):
    trainer = federated_trainer(max_rounds=2)
    clients = models.as_datasets(models.vectors({"ann": 15, "bob": 9}))
    trainer.fit(module, clients, clients)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert values["fed/val_acc/pooled"] == pytest.approx(values["val_acc"])
    return values


@pytest.mark.parametrize("make", HISTORIES.values(), ids=HISTORIES)
def test_a_value_with_a_history_is_missing(make, federated_trainer):
    values = logged_values(federated_trainer, make())
    assert "fed/best/pooled" not in values
    assert all(math.isnan(values[name]) for name in ("client/ann/best", "client/bob/best", "fed/best/mean"))
    assert not math.isnan(values["best"])


@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE)
def test_a_value_without_a_history_has_a_mean(make, federated_trainer):
    values = logged_values(federated_trainer, make())
    parts = [values["client/ann/best"], values["client/bob/best"]]
    assert values["fed/best/mean"] == pytest.approx(sum(parts) / 2)


class Bounds(models.Module):
    def __init__(self):
        super().__init__(models.mlp())
        self.bounds = MinMaxMetric(MulticlassAccuracy(models.CLASSES, average="micro"))

    def validation_step(self, batch, batch_idx):
        self.bounds.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log_dict(self.bounds.compute())
        self.bounds.reset()


def test_bounds_of_a_metric_start_with_the_pass(federated_trainer):
    trainer = federated_trainer(max_rounds=3)
    clients = models.as_datasets(models.vectors({"ann": 15, "bob": 9}))
    trainer.fit(Bounds(), clients, clients)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for client in ("ann", "bob"):
        raw, least, most = (values[f"client/{client}/{name}"] for name in ("raw", "min", "max"))
        assert raw == least == most
