"""A project in the style of lightning-hydra-template: all objects are instantiated from a configuration."""

from functools import partial
from importlib import import_module
from itertools import pairwise

import lightning as L
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import Accuracy

CONFIG = """
seed: 12345
data:
  _target_: DigitsDataModule
  batch_size: 16
model:
  _target_: DigitsModule
  net: {_target_: torch.nn.Sequential, _args_: [{_target_: DenseNet, sizes: [16, 32, 4]}]}
  optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01, weight_decay: 0.0}
  scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, factor: 0.1, patience: 10}
callbacks:
  early_stopping:
    _target_: lightning.pytorch.callbacks.EarlyStopping
    monitor: val/loss
    patience: 100
trainer:
  _target_: lightning.pytorch.trainer.Trainer
  min_epochs: 1
  max_epochs: 3
"""


def instantiate(config, *args, **kwargs):
    """Instantiates a configuration as ``hydra.utils.instantiate`` does."""
    if isinstance(config, list):
        return [instantiate(value) for value in config]
    if not isinstance(config, dict):
        return config
    values = {name: instantiate(value) for name, value in config.items()}
    if "_target_" not in values:
        return values
    path, _, name = values.pop("_target_").rpartition(".")
    target = getattr(import_module(path), name) if path else globals()[name]
    args = (*values.pop("_args_", ()), *args)
    return (partial if values.pop("_partial_", False) else lambda f, *a, **k: f(*a, **k))(
        target, *args, **values, **kwargs
    )


class DenseNet(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        inner, (last, classes) = sizes[:-1], sizes[-2:]
        layers = [
            layer
            for size, following in pairwise(inner)
            for layer in (nn.Linear(size, following), nn.BatchNorm1d(following), nn.ReLU())
        ]
        self.model = nn.Sequential(*layers, nn.Linear(last, classes))

    def forward(self, x):
        return self.model(x.view(x.size(0), -1))


class DigitsModule(L.LightningModule):
    def __init__(self, net, optimizer, scheduler):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=4)
        self.val_acc = Accuracy(task="multiclass", num_classes=4)
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return self.criterion(logits, y), logits.argmax(dim=1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = self.data_val = None

    def setup(self, stage=None):
        if not self.data_train and not self.data_val:
            labels = torch.arange(280) % 4
            digits = TensorDataset(torch.randn(280, 1, 4, 4) + 2 * torch.eye(4)[labels][:, None, :, None], labels)
            self.data_train, self.data_val = torch.utils.data.random_split(
                digits, [220, 60], generator=torch.Generator().manual_seed(42)
            )

    def train_dataloader(self):
        return DataLoader(self.data_train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data_val, batch_size=self.hparams.batch_size, shuffle=False)


def main(callbacks, **options):
    cfg = yaml.safe_load(CONFIG)
    L.seed_everything(cfg["seed"])
    datamodule = instantiate(cfg["data"])
    model = instantiate(cfg["model"])
    callbacks = [*instantiate(cfg["callbacks"]).values(), *callbacks]
    trainer = instantiate(cfg["trainer"], callbacks=callbacks, **options)
    trainer.fit(model=model, datamodule=datamodule)
    return trainer
