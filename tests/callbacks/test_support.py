"""Examples per class come from a metric with all examples, or are missing."""

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MinMaxMetric

from lightning_fed.callbacks.evaluation.data_pass import evaluate_data
from tests import models


def accuracy(**options):
    return MulticlassAccuracy(models.CLASSES, **options)


def log_object(module, scores, targets):
    module.score.update(scores, targets)
    module.log("score", module.score)


def log_step(module, scores, targets):
    module.log("score", module.score(scores, targets), batch_size=len(targets))


def log_mean(module, scores, targets):
    module.log("share", (scores.argmax(1) == targets).float().mean(), batch_size=len(targets))


def update(module, scores, targets):
    module.score.update(scores, targets)


def log_all(module):
    module.log_dict(module.score.compute())


def log_trace(module):
    module.log("trace", module.score.compute().trace().float())


CASES = {
    "an object": (accuracy, log_object, None, True),
    "a value of a step": (accuracy, log_step, None, True),
    "a value from a confusion": (lambda: MulticlassConfusionMatrix(models.CLASSES), update, log_trace, True),
    "a value per class": (lambda: ClasswiseWrapper(accuracy(average=None)), update, log_all, True),
    "a best value": (lambda: MinMaxMetric(accuracy()), update, log_all, True),
    "a collection": (
        lambda: MetricCollection([MulticlassAUROC(models.CLASSES), MulticlassF1Score(models.CLASSES)]), update, log_all,
        True,
    ),
    "drawn examples": (lambda: BootStrapper(accuracy(), num_bootstraps=2), update, log_all, False),
    "no metric": (accuracy, log_mean, None, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_examples_per_class(kind, plain_trainer):
    """The module has another metric, with one example of a batch."""
    make, step, end, is_known = CASES[kind]

    class Measured(models.Module):
        def __init__(self):
            super().__init__(models.mlp())
            self.first, self.score = accuracy(), make()

        def validation_step(self, batch, batch_idx):
            scores = self(batch[0]).softmax(1)
            self.first.update(scores[:1], batch[1][:1])
            step(self, scores, batch[1])

        def on_validation_epoch_end(self):
            if end is not None:
                end(self)

    data, trainer, module = models.as_datasets(models.vectors())["bob"], plain_trainer(), Measured()
    trainer.validate(module, DataLoader(data, 8), verbose=False)
    support = evaluate_data(trainer, module, DataLoader(data, 8)).support
    expected = torch.bincount(data.tensors[1], minlength=models.CLASSES) if is_known else None
    assert (support is None) if expected is None else torch.equal(support, expected.double())
