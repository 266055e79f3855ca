"""Weights & Biases offline: curves and gradient histograms for a fit."""

import lightning as L
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(callbacks, logger=False, **options):
    L.seed_everything(9)
    inputs = torch.randn(160, 3)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    train, val = (DataLoader(part, batch_size=16) for part in torch.utils.data.random_split(data, [120, 40]))
    model, board = Regression(), WandbLogger(project="tries", offline=True, save_dir=options["default_root_dir"])
    board.watch(model, log="gradients", log_freq=4)
    trainer = L.Trainer(max_epochs=4, log_every_n_steps=4, logger=[board, logger], callbacks=callbacks, **options)
    trainer.fit(model, train, val)
    last = dict(board.experiment.summary)
    wandb.finish()
    assert last["epoch"] == 3, last
    assert last["val_loss"] == trainer.callback_metrics["val_loss"], last
    assert any(name.startswith("gradients/") for name in last), last
    return trainer
