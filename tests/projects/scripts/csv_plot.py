"""A tutorial's last cell: reads the curves of a fit by epoch from the logger's CSV file."""

import csv
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def curves(folder):
    """Values by epoch, as in `read_csv(...).set_index("epoch").dropna()`."""
    by_name = {}
    for row in csv.DictReader((Path(folder) / "metrics.csv").read_text().splitlines()):
        for name in ("train_loss", "val_loss"):
            if row[name]:
                by_name.setdefault(name, {})[int(row["epoch"])] = float(row[name])
    return by_name


def main(callbacks, logger=False, **options):
    L.seed_everything(9)
    inputs = torch.randn(160, 3)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    train, val = (DataLoader(part, batch_size=16) for part in torch.utils.data.random_split(data, [120, 40]))
    csv_logger = CSVLogger(options["default_root_dir"])
    trainer = L.Trainer(max_epochs=4, logger=[csv_logger, logger], callbacks=callbacks, **options)
    trainer.fit(Regression(), train, val)
    values = curves(csv_logger.log_dir)
    assert all(list(curve) == [0, 1, 2, 3] for curve in values.values()), values
    return trainer
