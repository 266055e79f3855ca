"""Standard errors of means over clients equal a direct computation from raw scores."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks.evaluation import EvaluationReport
from lightning_fed.errors import BadUpdate
from tests import models

TRAIN, HELD_OUT = {"ann": 13, "bob": 8, "cid": 21}, {"ann": 40, "bob": 7, "cid": 25}


class Scored(models.Module):
    """Values with and without a score for every case."""

    def __init__(self):
        super().__init__(models.mlp())
        self.accuracy, self.macro = MulticlassAccuracy(models.CLASSES, average="micro"), MulticlassAccuracy(3)
        self.ignoring = MulticlassAccuracy(models.CLASSES, average="micro", ignore_index=0)
        self.first = BinaryAccuracy()
        self.register_buffer("last", torch.tensor(0.0), persistent=False)
        self.scores = MetricCollection({"top2": MulticlassAccuracy(3, average="micro", top_k=2)}, prefix="val_")

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        outputs, labels = self(batch[0]), batch[1]
        for name in ("accuracy", "macro", "ignoring"):
            getattr(self, name).update(outputs, labels)
            self.log(name, getattr(self, name))
        self.first.update(outputs.softmax(1)[:, 0], labels == 0)
        self.log("first", self.first)
        self.scores.update(outputs, labels)
        self.last.copy_(F.cross_entropy(outputs, labels))
        self.log("reused", self.last)  # the next step overwrites the tensor
        self.log("wrong_size", outputs.mean(), batch_size=1)  # one value per batch, not per case
        self.log("total", F.cross_entropy(outputs, labels), reduce_fx="sum")

    def on_validation_epoch_end(self):
        self.log_dict(self.scores.compute())
        self.scores.reset()
        self.log("constant", 0.5)


def scores_of(module, inputs, labels):
    """Scores by case, in plain PyTorch."""
    with torch.no_grad():
        outputs = module.net.eval()(inputs)
    hits = outputs.topk(2, dim=1).indices == labels[:, None]
    return {
        "val_loss": F.cross_entropy(outputs, labels, reduction="none"),
        "val_acc": hits[:, 0],
        "reused": F.cross_entropy(outputs, labels, reduction="none"),
        "accuracy": hits[:, 0],
        "first": (outputs.softmax(1)[:, 0] > 0.5) == (labels == 0),
        "val_top2": hits.any(1),
        "wrong_size": outputs.mean(1),
    }


@pytest.mark.parametrize("batch_size", [1, 8])
def test_standard_errors_are_those_of_the_raw_cases(batch_size, federated_trainer):
    """In batches with several cases, only the counts of the accuracies determine a score for every case."""
    raw, module = models.vectors(HELD_OUT), Scored()
    held_out = {client: DataLoader(data, batch_size=batch_size) for client, data in models.as_datasets(raw).items()}
    trainer = federated_trainer(max_rounds=1, seed=3)
    trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(models.vectors(TRAIN)), held_out))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    scores = {client: scores_of(module, *data) for client, data in raw.items()}
    names = [
        "accuracy",
        "first",
        "val_top2",
        *(["val_loss", "val_acc", "reused", "wrong_size"] if batch_size == 1 else []),
    ]
    assert {name for name in logged if name.endswith("_se")} == {f"fed/{name}/mean_se" for name in names}
    for name in names:
        cases = [np.asarray(by_name[name], np.float64) for by_name in scores.values()]
        assert logged[f"fed/{name}/mean"] == pytest.approx(np.mean([one.mean() for one in cases]), rel=1e-5)
        error = np.sqrt(sum(one.var(ddof=1) / len(one) for one in cases)) / len(cases)
        assert logged[f"fed/{name}/mean_se"] == pytest.approx(error, rel=1e-4)
        assert error > 0


def test_a_client_with_one_case_has_no_variance(federated_trainer):
    trainer = federated_trainer(max_rounds=1)
    trainer.fit(
        Scored(), models.as_datasets(models.vectors(TRAIN)), models.as_datasets(models.vectors({"ann": 9, "bob": 1}))
    )
    assert "fed/accuracy/mean" in trainer.callback_metrics
    assert "fed/accuracy/mean_se" not in trainer.callback_metrics


@pytest.mark.parametrize("variance", [-0.1, float("nan"), float("inf")])
def test_invalid_variances_are_refused(variance):
    report = EvaluationReport(num_samples=4, values={"val_acc": 0.5}, variances={"val_acc": variance})
    with pytest.raises(BadUpdate, match="a logged value has the variance"):
        EvaluationReport.of(report.as_update("ann"))
    report.variances = {"val_acc": 0.25}
    assert EvaluationReport.of(report.as_update("ann")).variances == {"val_acc": 0.25}
