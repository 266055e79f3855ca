"""An image classifier behind ``LightningCLI``, after Lightning's example."""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy

ARGUMENTS = [
    "--seed_everything=1",
    "--trainer.max_epochs=3",
    "--model.hidden=24",
    "--optimizer=Adam",
    "--optimizer.lr=0.01",
]


class Classifier(L.LightningModule):
    def __init__(self, hidden: int = 128):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3)
        )
        self.val_acc = Accuracy(task="multiclass", num_classes=3)

    def forward(self, images):
        return F.log_softmax(self.model(images), dim=1)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.nll_loss(self(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        scores = self(images)
        self.val_acc(scores, labels)
        self.log("val_loss", F.nll_loss(scores, labels))
        self.log("val_acc", self.val_acc)


class Digits(L.LightningDataModule):
    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        labels = torch.arange(240) % 3
        images = 0.5 * torch.randn(240, 1, 8, 8)
        for label in range(3):
            images[labels == label, 0, 2 * label : 2 * label + 3] += 1
        self.train, self.val = random_split(TensorDataset(images, labels), [200, 40])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)


def main(logger, **options):
    cli = LightningCLI(
        Classifier,
        Digits,
        save_config_callback=None,
        trainer_defaults=options,
        args=ARGUMENTS,
        run=False,
    )
    cli.trainer.logger = logger
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.trainer
