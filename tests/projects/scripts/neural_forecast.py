"""Forecasts in the style of neuralforecast: the model creates a Trainer with `max_steps` and `val_check_interval`."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Series(Dataset):
    """Whole series; the model draws windows in each step."""

    def __init__(self, count, length=48):
        phases = 6.3 * torch.rand(count, 1)
        self.values = torch.sin(phases + 0.5 * torch.arange(length)) + 0.1 * torch.randn(count, length)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {"temporal": self.values[index], "y_idx": 0}


class SeriesModule(L.LightningDataModule):
    def __init__(self, dataset, batch_size):
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def train_dataloader(self):
        return DataLoader(self.dataset, self.batch_size, shuffle=True, drop_last=False)

    def val_dataloader(self):
        return DataLoader(self.dataset, self.batch_size)


class NBeats(L.LightningModule):
    def __init__(self, h=4, input_size=12, max_steps=24, val_check_steps=12, windows_batch_size=32, **trainer_kwargs):
        super().__init__()
        self.save_hyperparameters("h", "input_size", "max_steps")
        self.h, self.input_size, self.windows_batch_size = h, input_size, windows_batch_size
        steps = {"max_steps": max_steps, "val_check_interval": min(val_check_steps, max_steps)}
        self.trainer_kwargs = {**steps, "check_val_every_n_epoch": None, **trainer_kwargs}
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(input_size, 32), nn.ReLU(), nn.Linear(32, input_size + h)) for _ in range(2)
        )
        self.train_trajectories = []

    def forward(self, window):
        forecast = 0.0
        for block in self.blocks:
            outputs = block(window)
            window, forecast = window - outputs[:, : self.input_size], forecast + outputs[:, self.input_size :]
        return forecast

    def windows(self, batch):
        windows = batch["temporal"].unfold(1, self.input_size + self.h, 1).flatten(0, 1)
        return windows[:, : self.input_size], windows[:, self.input_size :]

    def training_step(self, batch, batch_idx):
        inputs, targets = self.windows(batch)
        drawn = torch.randperm(len(inputs))[: self.windows_batch_size]
        loss = (self(inputs[drawn]) - targets[drawn]).abs().mean()
        self.log("train_loss", loss.detach(), batch_size=len(drawn), on_epoch=True, on_step=False)
        self.train_trajectories.append((self.global_step, float(loss.detach())))
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = self.windows(batch)
        self.log("val_loss", (self(inputs) - targets).abs().mean(), batch_size=len(inputs))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def fit(self, dataset, callbacks, **options):
        trainer = L.Trainer(callbacks=callbacks, **self.trainer_kwargs, **options)
        trainer.fit(self, datamodule=SeriesModule(dataset, batch_size=6))
        return trainer


def main(callbacks, **options):
    L.seed_everything(17)
    return NBeats(max_steps=24).fit(Series(36), callbacks, **options)
