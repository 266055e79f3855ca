"""Modules with all kinds of metrics, and values from one process with pooled data."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassJaccardIndex,
    MultilabelAveragePrecision,
    MultilabelF1Score,
)
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.segmentation import DiceScore, MeanIoU

from tests import models

TRAIN = {"ann": 33, "bob": 20, "cid": 48}
HELD_OUT = {"ann": 21, "bob": 5, "cid": 40}
"""Unequal sizes with partial last batches of 8."""


class Classifier(models.Module):
    """Metric objects, a collection computed at the end of the epoch, and values with every reduction."""

    def __init__(self):
        super().__init__(models.dropout_mlp())
        kind = {"num_classes": models.CLASSES}
        self.f1 = MulticlassF1Score(average="macro", **kind)
        self.auroc = MulticlassAUROC(thresholds=50, **kind)
        self.margin = PearsonCorrCoef()
        self.scores = MetricCollection(
            {"acc": MulticlassAccuracy(**kind), "f1": MulticlassF1Score(**kind), "iou": MulticlassJaccardIndex(**kind)},
            prefix="all_",
        )
        self.kept = {"confidence": MeanMetric()}

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        self.log("val_loss", F.cross_entropy(outputs, targets), prog_bar=True)
        self.log("examples", float(len(targets)), reduce_fx="sum")
        self.log("highest", outputs.max(), reduce_fx="max")
        self.log("lowest", outputs.min(), reduce_fx=torch.min)
        self.f1(outputs, targets)
        self.auroc.update(outputs.softmax(1), targets)
        self.margin.update(outputs[:, 0], targets.float())
        self.scores.update(outputs, targets)
        self.kept["confidence"].update(outputs.softmax(1).amax(1))
        self.log_dict({"val_f1": self.f1, "val_auroc": self.auroc, "val_margin": self.margin})

    test_step = validation_step

    def on_validation_epoch_end(self):
        self.log_dict(self.scores.compute())
        self.scores.reset()
        self.log("confidence", self.kept["confidence"].compute())
        self.kept["confidence"].reset()

    on_test_epoch_end = on_validation_epoch_end


class Segmenter(models.Module):
    """Images and masks, with torchmetrics' segmentation scores."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, models.CLASSES, 1)))
        kind = {"num_classes": models.CLASSES, "input_format": "index"}
        self.iou, self.dice = MeanIoU(**kind), DiceScore(**kind)
        self.jaccard = MulticlassJaccardIndex(models.CLASSES)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        for metric in (self.iou, self.dice, self.jaccard):
            metric.update(outputs.argmax(1), targets)
        self.log_dict({"val_iou": self.iou, "val_dice": self.dice, "val_jaccard": self.jaccard})
        self.log("val_loss", self.loss(outputs, targets))


class Tagger(models.Module):
    def __init__(self):
        super().__init__(models.mlp(), loss=self.of_labels)
        self.f1 = MultilabelF1Score(models.CLASSES)
        self.precision = MultilabelAveragePrecision(models.CLASSES, thresholds=20)

    @staticmethod
    def labels(targets):
        return torch.stack([targets == 0, targets != 1, targets == 2], dim=1).long()

    def of_labels(self, outputs, targets):
        return F.binary_cross_entropy_with_logits(outputs, self.labels(targets).float())

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        self.f1(outputs, self.labels(targets))
        self.precision(outputs.sigmoid(), self.labels(targets))
        self.log("val_loss", self.loss(outputs, targets))
        self.log_dict({"val_f1": self.f1, "val_precision": self.precision})


class Several(models.Module):
    """Two loaders, and a metric that continues from one loader to the next."""

    def __init__(self):
        super().__init__(models.mlp())
        self.accuracy = MulticlassAccuracy(models.CLASSES)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        inputs, targets = batch
        outputs = self(inputs)
        self.accuracy(outputs, targets)
        self.log("val_loss", self.loss(outputs, targets))
        self.log("val_acc", self.accuracy)
        self.log("both", self.accuracy, add_dataloader_idx=False) if dataloader_idx else None


def masks(sizes):
    made = models.images(sizes)
    return {
        name: (images.repeat(1, 3 // images.shape[1], 1, 1), (images[:, 0] * 3).long() % models.CLASSES)
        for name, (images, _) in made.items()
    }


CASES = {
    "classifier": (Classifier, models.vectors, 1),
    "segmentation": (Segmenter, masks, 1),
    "labels": (Tagger, models.vectors, 1),
    "loaders": (Several, models.vectors, 2),
}


def held_out(make_data, loaders, sizes=None):
    datasets = models.as_datasets(make_data(HELD_OUT if sizes is None else sizes))
    if loaders == 1:
        return {name: DataLoader(data, 8) for name, data in datasets.items()}
    return {name: [DataLoader(data, 8), DataLoader(data, 3)] for name, data in datasets.items()}


def on_pooled_data(trainer, module, loaders, batch_size=17):
    """Lightning's values on the data of all clients, in batches of another size."""
    columns = [loader if isinstance(loader, list) else [loader] for loader in loaders.values()]
    pooled = [
        DataLoader(ConcatDataset([loader.dataset for loader in column]), batch_size)
        for column in zip(*columns, strict=True)
    ]
    trainer.validate(module, pooled if len(pooled) > 1 else pooled[0], verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
