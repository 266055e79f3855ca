"""Client evaluation equals Lightning's evaluation; weights of batches and directions of metrics."""

import csv
import functools

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassHammingDistance

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import ClientEvaluation, SiteMatrix
from lightning_fed.callbacks.evaluation.data_pass import evaluate_data
from lightning_fed.callbacks.evaluation.results import ClientResults, is_score
from lightning_fed.callbacks.logged_values import LogCall, LoggedValues
from lightning_fed.compression import Float16, Quantized, TopK
from tests import models
from tests.breadth import slow

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
    """Logs a metric collection, and values with uninformative names."""

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
            results.append(
                ClientResults.of({"ann": evaluate_data(trainer, module, [models.vectors({"ann": 5})["ann"]])})
            )

    callbacks = [
        Noting("gap", mode="min"),
        ModelCheckpoint(tmp_path, monitor="fed/width/mean", mode="min"),
        ModelCheckpoint(tmp_path, monitor="fed/height/worst10", mode="max"),
    ]
    trainer = federated_trainer(max_rounds=1, callbacks=callbacks, enable_checkpointing=True)
    clients = models.as_datasets(models.vectors(CLIENTS))
    trainer.fit(Values(), clients, clients)
    expected = {"gap": False, "width": False, "height": True, "val_miss": False, "val_hit": True}
    assert results[0].higher_is_better == expected


class Named(models.Module):
    """Batches are dictionaries starting with a list of names, or contain no tensor."""

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


# --- Equal to Lightning's evaluation ----------------------------------------------------------------------------------


HOOKS = [
    f"on_{stage}_{hook}"
    for stage in ("validation", "test")
    for hook in ("model_eval", "start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end", "model_train")
]


NOTED = []


class Collecting(models.Module):
    """Collects values in hooks, logs with every reduction, and records hook calls with the number of arguments."""

    def __init__(self):
        super().__init__(models.mlp())
        self.outputs = None
        self.accuracy = MulticlassAccuracy(models.CLASSES, average="micro")
        for hook in HOOKS:
            setattr(self, hook, self.noting(hook, getattr(self, hook)))

    def noting(self, hook, original):
        @functools.wraps(original)
        def call(*args):
            NOTED.append((hook, *(arg for arg in args if isinstance(arg, int))))
            return original(*args)

        return call

    def evaluate(self, batch, batch_idx, dataloader_idx=0):
        inputs, targets = batch
        outputs = self(inputs)
        hits = (outputs.argmax(1) == targets).float()
        self.accuracy(outputs, targets)
        self.log("step", hits.mean(), on_step=True, on_epoch=False)
        self.log("metric", self.accuracy)
        self.log("mean", hits.mean())
        self.log("weighted", hits.mean(), batch_size=1)
        self.log_dict({"errors": (1 - hits).sum()}, reduce_fx="sum")
        self.log("most", outputs.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log("least", outputs.min(), True, None, None, None, min)
        return hits

    validation_step = test_step = evaluate

    def on_validation_start(self):
        self.outputs = []

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.outputs.append(outputs)
        self.log("batch_end", outputs.sum(), reduce_fx="sum")

    def on_validation_epoch_end(self):
        self.log("collected", torch.cat(self.outputs).mean())
        self.log("mean", -1.0, add_dataloader_idx=False)  # from another hook, with Lightning's name

    def on_validation_model_train(self):
        self.train()

    on_test_model_train, on_test_start, on_test_batch_end = (
        on_validation_model_train,
        on_validation_start,
        on_validation_batch_end,
    )
    on_test_epoch_end = on_validation_epoch_end


@pytest.mark.parametrize(("count", "stage"), [slow((1, "validation")), (1, "test"), (2, "validation"), (2, "test")])
def test_a_client_is_evaluated_as_by_lightning(stage, count, federated_trainer, plain_trainer):
    sizes = {"ann": 7, "bob": 9}
    datasets = models.as_datasets(models.vectors(sizes))
    held_out = {
        name: DataLoader(data, 4) if count == 1 else [DataLoader(data, 4), DataLoader(data, 3)]
        for name, data in datasets.items()
    }
    module = Collecting()
    trainer = federated_trainer(max_rounds=1)
    trainer.fit(module, datamodule=FederatedDataModule(datasets, val=held_out, test=held_out))
    NOTED.clear()
    run = trainer.validate if stage == "validation" else trainer.test
    run(module, datamodule=trainer.datamodule, verbose=False)
    hooks = list(NOTED)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert "log" not in vars(module)
    for name, loaders in held_out.items():
        NOTED.clear()
        plain = plain_trainer()
        run = plain.validate if stage == "validation" else plain.test
        run(module, loaders, verbose=False)
        expected = {key: float(value) for key, value in plain.callback_metrics.items()}
        for key in [key for key in expected if key.startswith(("step", "most_"))]:
            del expected[key]  # single steps
        found = {key.removeprefix(f"client/{name}/"): value for key, value in metrics.items()}
        assert {key: found.get(key) for key in expected} == pytest.approx(expected)
        assert not {key for key in metrics if key.startswith(f"client/{name}/step")}
        starts = [index for index, hook in enumerate(hooks) if hook == NOTED[0]]
        assert any(hooks[start : start + len(NOTED)] == NOTED for start in starts)


def test_a_reduction_that_lightning_refuses_is_refused():
    with pytest.raises(MisconfigurationException, match="'middle' to be one of mean, sum, max and min"):
        LoggedValues().take(LogCall("middle", 1.0, reduce_fx=torch.median))


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_no_clients_name_reads_as_another_row(federated_trainer, tmp_path):
    clients = models.as_datasets(models.vectors(dict.fromkeys([1, "1", "'1'", "all", "global"], 20)))
    callbacks = [ClientEvaluation(folder=tmp_path), SiteMatrix("val_acc", tmp_path)]
    federated_trainer(max_rounds=1, callbacks=callbacks).fit(models.Module(models.mlp()), clients, clients)
    names = ["1", "'1'", "\"'1'\"", "'all'", "'global'"]
    for table, corner, rows in (
        ("clients", "client", [*names, "all"]),
        ("sites", "val_acc of the model of", ["global", *names]),
    ):
        with (tmp_path / f"{table}.csv").open() as file:
            assert sorted(row[0] for row in csv.reader(file)) == sorted([corner, *rows])
    assert sorted(callbacks[1].table.columns) == sorted(names)
    assert len(callbacks[1].table.values) == 30


@pytest.mark.parametrize("step", [Quantized(8), Float16(), TopK(0.5)], ids=["8 bits", "float16", "top"])
def test_a_matrix_of_compressed_models_is_refused(step, federated_trainer):
    clients = models.as_datasets(models.vectors(CLIENTS))
    trainer = federated_trainer(max_rounds=1, steps=[step], callbacks=[SiteMatrix("val_acc")])
    with pytest.raises(MisconfigurationException, match="hides the models of single clients"):
        trainer.fit(models.Module(models.mlp()), clients, clients)
