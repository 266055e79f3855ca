"""A value without a denominator is missing, not zero."""

import logging
import math

import pytest
import torch
from torchmetrics import classification as C
from torchmetrics import retrieval as R
from torchmetrics.regression import NormalizedRootMeanSquaredError
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks.evaluation.metric_states import compute_measured
from tests import models

NAN = math.nan
SCORES = torch.tensor([0.2, 0.7, 0.9])
NONE, ALL, SOME = torch.tensor([0, 0, 0]), torch.tensor([1, 1, 1]), torch.tensor([0, 1, 0])
LOW = SCORES / 10
SURE = torch.eye(3)

CASES = [
    (C.BinaryRecall(), SCORES, NONE, NAN),
    (C.BinaryRecall(), LOW, SOME, 0.0),
    (C.BinaryPrecision(), SCORES, NONE, 0.0),
    (C.BinaryPrecision(), LOW, SOME, NAN),
    (C.BinarySpecificity(), SCORES, ALL, NAN),
    (C.BinarySpecificity(), SCORES, NONE, 1 / 3),
    (C.BinaryNegativePredictiveValue(), SCORES + 1, SOME, NAN),
    (C.BinaryF1Score(), SCORES, NONE, 0.0),
    (C.BinaryF1Score(), LOW, NONE, NAN),
    (C.BinaryJaccardIndex(), SCORES, NONE, 0.0),
    (C.BinaryJaccardIndex(), LOW, NONE, NAN),
    (C.BinaryMatthewsCorrCoef(), SCORES, ALL, NAN),
    (C.BinaryMatthewsCorrCoef(), SCORES[1:], ALL[1:], NAN),  # an integer from torchmetrics
    (C.BinaryAccuracy(), LOW, ALL, 0.0),
    (C.MulticlassRecall(3, average=None), SURE, SOME, [0.5, 1.0, NAN]),
    (C.MulticlassRecall(3), SURE, SOME, NAN),
    (C.MulticlassRecall(3), SURE[:2], SOME[:2], 1.0),
    (C.MulticlassRecall(3, average="weighted"), SURE, SOME, 2 / 3),
    (C.MulticlassPrecision(3, average=None), SURE[[0, 0, 1]], SOME, [0.5, 0.0, NAN]),
    (C.MulticlassSpecificity(3, average=None), SURE, NONE, [NAN, 2 / 3, 2 / 3]),
    (C.MulticlassSpecificity(3), SURE, NONE, NAN),
    (C.MulticlassAccuracy(3, average=None), SURE, SOME, [0.5, 1.0, NAN]),
    (C.MulticlassAccuracy(3), SURE, SOME, 0.5),
    (C.MulticlassAccuracy(3, average="micro"), SURE, SOME, 2 / 3),
    (C.MulticlassJaccardIndex(4, average=None), torch.eye(4)[:3], SOME, [0.5, 1.0, 0.0, NAN]),
    (C.MultilabelRecall(3, average=None), SURE, torch.tensor([[1, 0, 0]] * 3), [1 / 3, NAN, NAN]),
]
RETRIEVALS = [
    (R.RetrievalMRR(), SCORES, NONE, NAN),
    (R.RetrievalMAP(empty_target_action="skip"), SCORES, NONE, NAN),
    (R.RetrievalMRR(), SCORES, SOME, 0.5),
    (R.RetrievalFallOut(), SCORES, ALL, NAN),
    (R.RetrievalFallOut(top_k=1), SCORES, NONE, 1 / 3),
]


@pytest.mark.parametrize(("metric", "scores", "targets", "expected"), CASES + RETRIEVALS)
def test_numbers_without_a_denominator(metric, scores, targets, expected):
    arguments = [torch.zeros(len(targets), dtype=torch.long)] if isinstance(metric, R.base.RetrievalMetric) else []
    metric.update(scores, targets, *arguments)
    usual = metric.compute()
    found = compute_measured(metric, metric.compute)
    assert found.tolist() == pytest.approx(expected, nan_ok=True)
    assert torch.equal(metric.compute(), usual)  # after the pass


class Scored(models.Module):
    """Metrics over the sign of the first input."""

    def __init__(self):
        super().__init__(models.mlp())
        self.recall = C.BinaryRecall()
        self.by_class = ClasswiseWrapper(C.MulticlassRecall(2, average=None), labels=["no", "yes"])

    def validation_step(self, batch, batch_idx):
        hits = (batch[0][:, 0] > 0).long()
        self.recall.update(hits, batch[1])
        self.by_class.update(hits, batch[1])
        self.log("recall", self.recall)

    def on_validation_epoch_end(self):
        self.log_dict(self.by_class.compute())
        self.by_class.reset()


def test_the_mean_over_clients_leaves_undefined_values_out(federated_trainer):
    held_out = models.vectors({"ann": 12, "bob": 9})
    held_out["ann"][1].copy_(torch.arange(12) % 2)
    held_out["bob"][1].zero_()
    trainer = federated_trainer(max_rounds=1)
    clients = models.as_datasets(models.vectors({"ann": 8, "bob": 8}))
    trainer.fit(Scored(), datamodule=FederatedDataModule(clients, models.as_datasets(held_out)))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    expected = float((held_out["ann"][0][1::2, 0] > 0).float().mean())
    for name in ("recall", "multiclassrecall_yes"):
        assert math.isnan(values[f"client/bob/{name}"])
        assert [values[f"fed/{name}/{kind}"] for kind in ("mean", "min", "pooled")] == pytest.approx([expected] * 3)
    assert not math.isnan(values["client/bob/multiclassrecall_no"])


class Fragile(models.Module):
    """The first metric raises with states of several clients; the last metric is a sum."""

    def __init__(self):
        super().__init__(models.mlp())
        self.fragile = NormalizedRootMeanSquaredError()
        self.accuracy, self.f1 = C.MulticlassAccuracy(models.CLASSES), C.MulticlassF1Score(models.CLASSES)
        self.total = self.accuracy + self.f1

    def validation_step(self, batch, batch_idx):
        scores = self(batch[0])
        self.fragile.update(scores[:, 0], batch[0][:, 0])
        self.total.update(scores, batch[1])
        self.log("total", self.total)

    def on_validation_epoch_end(self):
        self.log("fragile", self.fragile.compute())
        self.fragile.reset()
        self.log("accuracy", self.accuracy.compute())


def test_a_metric_with_an_exception_leaves_later_values(federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=1)
    clients = models.as_datasets(models.vectors(dict.fromkeys("abcd", 12)))
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(Fragile(), datamodule=FederatedDataModule(clients, clients))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert "fed/fragile/pooled" not in values
    assert values["evaluation/clients"] == 4
    assert values["fed/accuracy/pooled"] == pytest.approx(values["accuracy"])
    assert values["fed/total/pooled"] == pytest.approx(values["total"])
    assert (
        caplog.text.count("Metric 'fragile' raises an exception with the merged states of 4 clients: IndexError") == 1
    )
