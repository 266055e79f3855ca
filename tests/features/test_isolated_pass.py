"""Isolated passes over a user's steps restore counters, stored values and logs."""

from collections import Counter, deque

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.features.isolated_pass import find_metrics, isolated_pass
from tests import models
from tests.recorders import MemoryLogger


def accuracy():
    return MulticlassAccuracy(models.CLASSES, average="micro")


class Counting(models.Module):
    """Holds typical state: metrics, also in a dictionary, lists, counters, running means."""

    def __init__(self):
        super().__init__(models.norm_mlp())
        self.accuracy = accuracy()
        self.by_name = {"val_acc": self.accuracy, "more": [accuracy()]}
        self.scores = torchmetrics.MetricCollection(
            {"acc": accuracy(), "recall": MulticlassRecall(models.CLASSES, average="micro")}
        )
        self.smallest = torchmetrics.MinMaxMetric(accuracy())
        self.all = torchmetrics.CatMetric()
        self.tracker = torchmetrics.MetricTracker(accuracy())
        self.tracker.increment()
        self.outputs, self.by_stage = [], {"train": [], "val": []}
        self.recent, self.classes = deque(maxlen=100), Counter()
        self.steps, self.mean, self.total = 0, 0.0, torch.zeros(())

    def count(self, batch):
        inputs, targets = batch
        logits = self(inputs)
        for metric in (*self.by_name["more"], *self.by_name.values(), self.scores, self.smallest, self.tracker):
            if not isinstance(metric, list):
                metric.update(logits, targets)
        loss = self.loss(logits, targets)
        self.all.update(loss.detach())
        for kept in (self.outputs, self.by_stage["train"], self.recent):
            kept.append(loss.detach())
        self.classes.update(targets.tolist())
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.total += loss.detach()
        return loss

    def training_step(self, batch, batch_idx):
        return self.count(batch)

    def kept(self):
        return {
            **{f"metric {place}": metric.compute() for place, metric in enumerate(self.every_metric())},
            "updates": [metric.update_count for metric in self.every_metric() if hasattr(metric, "update_count")],
            "outputs": list(self.outputs),
            "by_stage": {name: list(values) for name, values in self.by_stage.items()},
            "recent": list(self.recent),
            "classes": dict(self.classes),
            "numbers": (self.steps, self.mean, self.total.clone()),
            "tracked": len(self.tracker),
        }

    def every_metric(self):
        return [self.accuracy, *self.by_name["more"], self.scores, self.all, self.smallest, self.tracker]


def a_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(9, 6, generator=generator), torch.randint(models.CLASSES, (9,), generator=generator)


def test_loggers_see_nothing(plain_trainer):
    """Values sent directly to a logger appear once, from training."""
    module, logger = Counting(), MemoryLogger()
    module.trainer = plain_trainer(logger=logger)
    with isolated_pass(module):
        module.logger.log_metrics({"loss": 1.0})
    module.logger.log_metrics({"loss": 2.0})
    assert logger.lines == [(None, {"loss": 2.0})]


def test_metrics_and_plain_attributes_are_put_aside():
    module = Counting().eval()  # BatchNorm does not change
    module.count(a_batch(0))
    objects = [id(value) for value in (module.outputs, module.by_stage, module.accuracy, module.by_name, module.total)]
    before = str(module.kept())
    for _ in range(2):  # each pass starts from the same state
        with isolated_pass(module):
            fresh = Counting().eval()
            fresh.count(a_batch(1))
            module.count(a_batch(1))
            module.tracker.increment()
            for place in range(4):  # other metrics survive `reset` by design
                got, expected = (each.every_metric()[place].compute() for each in (module, fresh))
                assert str(got) == str(expected)
        assert str(module.kept()) == before
    assert objects == [
        id(value) for value in (module.outputs, module.by_stage, module.accuracy, module.by_name, module.total)
    ]
    module.count(a_batch(2))
    twin = Counting().eval()
    for seed in (0, 2):
        twin.count(a_batch(seed))
        expected = str(twin.kept())  # a minimum is updated whenever computed
    assert str(module.kept()) == expected


class Following(models.Module):
    """Writes parameters and buffers, in place and by replacement, also in submodules."""

    def __init__(self):
        super().__init__(models.norm_mlp())
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))
        self.register_buffer("late", None)
        self.teacher = nn.Linear(6, 2)
        self.teacher.calls, self.teacher.seen = 0, []

    def training_step(self, batch, batch_idx):
        inputs, _ = batch
        with torch.no_grad():
            self.centre.lerp_(inputs.mean(0), 0.5)
            self.spread = 0.5 * self.spread + 0.5 * inputs.std(0)
            self.late = inputs.mean(0)
            self.teacher.weight.mul_(0.5)
            self.net[0].weight.div_(self.net[0].weight.norm())
            self.net[1].running_mean.add_(1)
        self.teacher.calls += 1
        self.teacher.seen.append(len(inputs))
        self.first = inputs
        return super().training_step(batch, batch_idx)

    def log(self, *arguments, **options):
        """Without a Trainer logging is not possible."""

    def kept(self):
        entries = {name: value.clone() for name, value in self.state_dict().items()}
        return str((entries, self.teacher.calls, self.teacher.seen, self.late, hasattr(self, "first")))

    def objects(self):
        return [id(value) for value in (*self.parameters(), *self.buffers(), self.teacher.seen)]


def test_what_a_step_writes_is_put_aside():
    module = Following()
    for written in (False, True):
        if written:
            module.training_step(a_batch(0), 0)
        before, objects = module.kept(), module.objects()
        with isolated_pass(module):
            module.training_step(a_batch(1), 0)
            assert module.kept() != before
        assert (module.kept(), module.objects()) == (before, objects)
    with isolated_pass(module, is_reloaded=True):
        module.training_step(a_batch(1), 0)
    assert module.kept() != before  # the caller loads parameters


def test_they_come_back_after_an_error():
    module = Counting()
    module.count(a_batch(0))
    before = str(module.kept())
    with pytest.raises(RuntimeError, match="cannot be multiplied"), isolated_pass(module):
        module.count((a_batch(1)[0][:, :2], a_batch(1)[1]))
    assert str(module.kept()) == before
    assert module.training
    assert torch.is_grad_enabled()
    assert "log" not in vars(module)


def test_metrics_are_found_once_wherever_they_are():
    module = nn.Module()
    module.inner = nn.ModuleDict({"a": accuracy()})
    module.inner.names = {"b": [accuracy()], "a": module.inner["a"]}
    module.inner.names["itself"] = module.inner.names
    found = find_metrics(module)
    assert len(found) == 2
    assert {id(metric) for metric in found} == {id(module.inner["a"]), id(module.inner.names["b"][0])}


class TwiceNamed(models.Module):
    """A metric updated and logged through a dictionary."""

    def __init__(self):
        super().__init__(models.mlp())
        self.accuracy = accuracy()
        self.by_name = {"val_acc": self.accuracy}

    def validation_step(self, batch, batch_idx):
        for name, metric in self.by_name.items():
            metric.update(self(batch[0]), batch[1])
            self.log(name, metric)


def test_a_metric_with_two_names_is_evaluated_client_by_client(federated_trainer):
    clients = models.vectors({"ann": 40, "bob": 41})
    held_out = models.as_datasets(models.vectors({"ann": 11, "bob": 40}))
    values = []
    for every in (0, 1):
        trainer = federated_trainer(max_rounds=3, seed=3, callbacks=[ClientEvaluation(every)])
        trainer.fit(TwiceNamed(), models.as_datasets(clients), held_out)
        values.append(trainer.callback_metrics)
    assert values[0]["val_acc"] == values[1]["val_acc"]
    weighted = (11 * values[1]["client/ann/val_acc"] + 40 * values[1]["client/bob/val_acc"]) / 51
    assert float(values[1]["val_acc"]) == pytest.approx(float(weighted))


def test_a_recalibration_is_not_counted(federated_trainer):
    """One round with BatchNorm: one output per batch, and each example once in the metric."""
    module = Counting()
    trainer = federated_trainer(max_rounds=1)
    clients = models.as_datasets(models.vectors({"ann": 40, "bob": 41}))
    trainer.fit(module, clients, clients["ann"])
    assert len(module.outputs) == module.steps == trainer.global_step == 4
    assert sum(module.classes.values()) == 81
    assert module.accuracy.tp + module.accuracy.fn == 81
