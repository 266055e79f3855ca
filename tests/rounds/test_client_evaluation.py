"""What is known of a value that every client has: whose batch it weighs by, which end of it is good."""

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassHammingDistance

from lightning_fed.rounds.client_evaluation import ClientResults, evaluate_clients, is_score
from tests import models

CLIENTS = {"ann": 20, "bob": 40}


@pytest.mark.parametrize(
    "name", ["val_loss", "rmse", "val/MSE", "valMse", "ece", "brier", "wer", "val_cer", "kl", "hd95", "edit_distance"]
)
def test_names_of_what_is_better_when_low(name):
    assert not is_score(name)


@pytest.mark.parametrize("name", ["val_acc", "iou", "dice", "soccer", "message", "klingon", "recall"])
def test_names_of_what_is_better_when_high(name):
    assert is_score(name)


class Values(models.Module):
    """Logs values of a collection, and some whose names say nothing."""

    def __init__(self):
        super().__init__(models.mlp())
        kind = {"num_classes": models.CLASSES}
        metrics = {"miss": MulticlassHammingDistance(**kind), "hit": MulticlassAccuracy(**kind)}
        self.scores = MetricCollection(metrics, prefix="val_")

    def validation_step(self, batch, batch_idx):
        self.scores.update(self(batch[0]), batch[1])
        for name in ("gap", "width", "height"):
            self.log(name, self(batch[0]).mean())

    def on_validation_epoch_end(self):
        self.log_dict(self.scores.compute())
        self.scores.reset()


def test_metrics_and_callbacks_say_which_end_is_good(federated_trainer, tmp_path):
    results = []

    class Noting(EarlyStopping):
        def on_train_end(self, trainer, module):
            loaders = {"ann": [models.vectors({"ann": 5})["ann"]]}
            results.append(evaluate_clients(trainer, module, loaders, lambda client: None))

    callbacks = [
        Noting("gap", mode="min"),
        ModelCheckpoint(tmp_path, monitor="fed/width/mean", mode="min"),
        ModelCheckpoint(tmp_path, monitor="fed/height/worst10", mode="max"),
    ]
    trainer = federated_trainer(max_rounds=1, callbacks=callbacks, enable_checkpointing=True)
    clients = models.as_datasets(models.vectors(CLIENTS))
    trainer.fit(Values(), clients, clients)
    assert isinstance(results[0], ClientResults)
    expected = {"gap": False, "width": False, "height": True, "val_miss": False, "val_hit": True}
    assert results[0].higher_is_better == expected


class Named(models.Module):
    """Batches are dictionaries whose first entry is a list of names, or hold no tensor at all."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)

    def validation_step(self, batch, batch_idx):
        if "x" in batch:
            loss = self.loss(self(batch["x"]), batch["y"])
            self.log("val_loss", loss, batch_size=len(batch["x"]))
        else:
            self.log("val_names", float(batch["name"][0] == "0"), batch_size=len(batch["name"]))


def test_batches_of_names_and_tensors(federated_trainer):
    def samples(size, keys):
        ((inputs, targets),) = models.vectors({"ann": size}).values()
        rows = enumerate(zip(inputs, targets, strict=True))
        return [{key: {"name": str(i), "x": x, "y": y}[key] for key in keys} for i, (x, y) in rows]

    def loader(size, keys):
        return torch.utils.data.DataLoader(samples(size, keys), batch_size=4)

    train = {name: loader(size, ("name", "x", "y")) for name, size in CLIENTS.items()}
    trainer = federated_trainer(max_rounds=1)
    trainer.fit(Named(models.mlp()), train, {"ann": loader(6, ("name", "x", "y")), "bob": loader(6, ("name",))})
    assert trainer.callback_metrics["client/ann/val_loss"] > 0
    assert trainer.callback_metrics["client/bob/val_names"] == pytest.approx(4 / 6)
