"""Random metrics: a value over all clients equals the value on pooled data, or is missing.

A seed determines metrics, hooks and data. References only use torchmetrics.
"""

import logging
import math
import random
import warnings

import lightning as L
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassF1Score,
    MulticlassJaccardIndex,
)
from torchmetrics.regression import R2Score, SpearmanCorrCoef
from torchmetrics.wrappers import Running

from lightning_fed import FederatedDataModule, FederatedTrainer
from tests.conftest import QUIET

CLASSES = 3


class Own(Metric):
    full_state_update = True

    def __init__(self, reduction, in_attribute=False):
        super().__init__()
        self.add_state("hits", torch.tensor(0.0), dist_reduce_fx=reduction)
        self.add_state("rows", torch.tensor(0.0), dist_reduce_fx=reduction)
        self.in_attribute, self.count = in_attribute, 0

    def update(self, scores, targets):
        self.hits = self.hits + (scores.argmax(1) == targets).sum()
        self.rows = self.rows + len(targets)
        self.count += len(targets)

    def compute(self):
        return (self.hits / (self.count if self.in_attribute else self.rows)).mean()

    def reset(self):
        super().reset()
        self.count = 0


class BatchMean(Metric):
    """Accuracy with an average as state."""

    full_state_update = True

    def __init__(self):
        super().__init__()
        self.add_state("share", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores, targets):
        rows = self.rows + len(targets)
        self.share = (self.share * self.rows + (scores.argmax(1) == targets).sum()) / rows
        self.rows = rows

    def compute(self):
        return self.share


def labels(make):
    return make, lambda scores, targets: (scores, targets)


def numbers(make):
    return make, lambda scores, targets: (scores[:, 0], targets.float())


def losses(make):
    return make, lambda scores, targets: (scores[:, 1],)


# Metrics with a pooled value, which must not be missing.
DUE = {
    "accuracy": labels(lambda: MulticlassAccuracy(CLASSES)),
    "micro": labels(lambda: MulticlassAccuracy(CLASSES, average="micro")),
    "f1": labels(lambda: MulticlassF1Score(CLASSES)),
    "jaccard": labels(lambda: MulticlassJaccardIndex(CLASSES)),
    "binned": labels(lambda: MulticlassAUROC(CLASSES, thresholds=5)),
    "mse": numbers(MeanSquaredError),
    "r2": numbers(R2Score),
    "mean": losses(MeanMetric),
    "largest": losses(MaxMetric),
    "sum of two": labels(lambda: MulticlassAccuracy(CLASSES) + MulticlassF1Score(CLASSES)),
    "rest": labels(lambda: 1 - MulticlassAccuracy(CLASSES)),
    "own": labels(lambda: Own("sum")),
}
OTHERS = {
    "correlation": numbers(PearsonCorrCoef),
    "auroc": labels(lambda: MulticlassAUROC(CLASSES)),
    "precision": labels(lambda: MulticlassAveragePrecision(CLASSES)),
    "spearman": numbers(SpearmanCorrCoef),
    "batch mean": labels(BatchMean),
    "own mean": labels(lambda: Own("mean")),
    "own without": labels(lambda: Own(None)),
    "own function": labels(lambda: Own(lambda stacked: stacked.sum(0) if len(stacked) < 2 else stacked[0])),
    "own attribute": labels(lambda: Own("sum", in_attribute=True)),
    "running": losses(lambda: Running(MeanMetric(), window=2)),
}
KINDS = DUE | OTHERS
CURVES = {"binned", "auroc", "precision"}
HOOKS = ["object", "end", "end object", "derived", "collection", "batch", "between", "outputs", "constant"]


class Drawn(L.LightningModule):
    """A module with random metrics and hooks; the inputs are the scores.

    Args:
        draws: Name, kind of metric and hook for each value.
    """

    def __init__(self, draws):
        super().__init__()
        self.weight, self.draws, self.outputs = nn.Parameter(torch.zeros(())), draws, []
        self.scores = nn.ModuleDict()
        for name, kind, hook in draws:
            metric = KINDS[kind][0]()
            self.scores[name] = MetricCollection({name: metric}) if hook == "collection" else metric

    def training_step(self, batch, batch_idx):
        return self.weight * batch[0].mean()

    def validation_step(self, batch, batch_idx):
        self.outputs.append(float((batch[0].argmax(1) == batch[1]).float().mean()))
        for name, kind, hook in self.draws:
            metric = self.scores[name]
            arguments = KINDS[kind][1](*batch)
            if hook == "batch":
                self.log(name, metric(*arguments), batch_size=len(batch[1]))
                continue
            (metric[name] if hook == "collection" else metric).update(*arguments)
            if hook == "object":
                self.log(name, metric, on_epoch=True)
            elif hook == "collection":
                self.log_dict(metric)
            elif hook == "between":
                self.log(name, metric.compute(), batch_size=len(batch[1]))

    def on_validation_epoch_end(self):
        for name, _, hook in self.draws:
            if hook in ("end", "derived"):
                value = self.scores[name].compute()
                self.log(name, 1 - value if hook == "derived" else value)
                self.scores[name].reset()
            elif hook == "end object":
                self.log(name, self.scores[name])
            elif hook == "outputs":
                self.log(name, sum(self.outputs) / max(1, len(self.outputs)))
            elif hook == "constant":
                self.log(name, 3.0)
        self.outputs.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def draw_case(seed):
    """Metrics, data by client, and batch size for a seed."""
    draw = random.Random(seed)
    draws = [(f"value {place}", draw.choice(list(KINDS)), draw.choice(HOOKS)) for place in range(draw.randint(1, 5))]
    draws = [(name, kind, "end" if (kind, hook) == ("r2", "batch") else hook) for name, kind, hook in draws]
    generator = torch.Generator().manual_seed(seed)
    clients = {}
    for place in range(draw.randint(2, 4)):
        size = draw.choice([0, 2, 5, 9]) if place else draw.choice([6, 9])
        scores = torch.randn(size, CLASSES, generator=generator).softmax(1)
        targets = torch.randint(draw.choice([1, CLASSES]), (size,), generator=generator)
        clients[draw.choice([f"client {place}", place, str(place)])] = (scores, targets)
    return draws, clients, draw.choice([3, 4])


def by_hand(draw, batches):
    _, kind, hook = draw
    make, arguments = KINDS[kind]
    if hook == "constant":
        return 3.0
    if hook == "outputs":
        return sum(float((scores.argmax(1) == targets).float().mean()) for scores, targets in batches) / len(batches)
    metric, total = make(), 0.0
    for scores, targets in batches:
        if hook == "batch":
            metric.reset()
        metric.update(*arguments(scores, targets))
        if hook in ("batch", "between"):
            total += float(metric.compute()) * len(targets)
    if hook in ("batch", "between"):
        return total / sum(len(targets) for _, targets in batches)
    value = float(metric.compute())
    return 1 - value if hook == "derived" else value


def batches_of(data, size):
    return list(zip(*(tensor.split(size) for tensor in data), strict=True)) if len(data[0]) else []


def is_defined(draw, batches):
    """False for a curve if a class has no positive or no negative example."""
    _, kind, hook = draw
    seen = [targets for _, targets in batches]
    parts = {"between": seen[:1], "batch": seen}.get(hook, [torch.cat(seen)])
    return hook in ("outputs", "constant") or kind not in CURVES or all(len(part.unique()) == CLASSES for part in parts)


def is_due(draw):
    """True if a missing value is an error."""
    _, kind, hook = draw
    return hook == "constant" or (kind in DUE and hook in HOOKS[:6])


def is_same(found, expected):
    return found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)


def check(seed, caplog):
    note(f"seed {seed}")
    draws, clients, batch_size = draw_case(seed)
    data = {name: DataLoader(TensorDataset(*tensors), batch_size) for name, tensors in clients.items()}
    trainer = FederatedTrainer(max_rounds=1, **QUIET)
    caplog.clear()
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "lightning_fed"):
        warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns for absent classes
        trainer.validate(Drawn(draws), datamodule=FederatedDataModule(data, val=data), verbose=False)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        parts = {name: batches_of(tensors, batch_size) for name, tensors in clients.items()}
        pooled = [batch for part in parts.values() for batch in part]
        for draw in draws:
            name, expected = draw[0], by_hand(draw, pooled)
            found = logged.get(f"fed/{name}/pooled", math.nan)
            if draw[2] == "batch" and (math.isnan(expected) or not is_defined(draw, pooled)):
                # The mean excludes clients with undefined values, and the log names these clients.
                assert math.isnan(found) or f"{name!r} over all clients excludes" in caplog.text, draw
                continue
            assert math.isnan(found) or is_same(found, expected), (draw, found, expected)
            if is_due(draw) and is_defined(draw, pooled) and not math.isnan(expected):
                assert not math.isnan(found), draw
            values = [by_hand(draw, part) for part in parts.values() if part and is_defined(draw, part)]
            values = [value for value in values if not math.isnan(value)]
            mean = logged.get(f"fed/{name}/mean", math.nan)
            assert is_same(mean, sum(values) / len(values) if values else math.nan), (draw, mean, values)
            told = [key for key in logged if key.startswith("client/") and key.endswith(f"/{name}")]
            assert len(told) == sum(map(bool, parts.values())), (draw, told)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**31))
def test_drawn_metrics(seed, caplog):
    check(seed, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**31))
def test_many_drawn_metrics(part, seed, caplog):
    check(seed + (part + 1) * 2**32, caplog)
