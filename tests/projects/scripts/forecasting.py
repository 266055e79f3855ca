"""Quantile forecasting after pytorch-forecasting, with similar batches, collation and loader."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TimeSeriesDataSet(Dataset):
    def __init__(self, num_series=12, length=40, encoder_length=12, prediction_length=4, validation=False):
        self.encoder_length, self.prediction_length = encoder_length, prediction_length
        time = torch.arange(length, dtype=torch.float32)
        phases = torch.arange(num_series, dtype=torch.float32)[:, None]
        self.values = torch.sin(0.5 * time + phases) + 0.1 * torch.randn(num_series, length)
        starts = range(length - encoder_length - prediction_length)
        starts = starts[-4:] if validation else starts[:-4]
        self.index = [(series, start) for series in range(num_series) for start in starts]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, position):
        series, start = self.index[position]
        values = self.values[series, start : start + self.encoder_length + self.prediction_length]
        x = {"x_cont": values[: self.encoder_length, None], "groups": torch.tensor([series])}
        return x, (values[self.encoder_length :], None)

    @staticmethod
    def _collate_fn(batches):
        x = {
            "encoder_cont": torch.stack([batch[0]["x_cont"] for batch in batches]),
            "encoder_lengths": torch.tensor([len(batch[0]["x_cont"]) for batch in batches]),
            "groups": torch.stack([batch[0]["groups"] for batch in batches]),
        }
        return x, (torch.stack([batch[1][0] for batch in batches]), None)

    def to_dataloader(self, train, batch_size, **options):
        return DataLoader(self, batch_size, shuffle=train, drop_last=train, collate_fn=self._collate_fn, **options)


class Forecaster(pl.LightningModule):
    def __init__(self, quantiles=(0.1, 0.5, 0.9), prediction_length=4):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(12, 4)
        self.rnn = nn.GRU(5, 16, batch_first=True)
        self.head = nn.Linear(16, prediction_length * len(quantiles))

    def forward(self, x):
        groups = self.embedding(x["groups"]).expand(-1, x["encoder_cont"].shape[1], -1)
        hidden = self.rnn(torch.cat([x["encoder_cont"], groups], dim=2))[0][:, -1]
        return {"prediction": self.head(hidden).unflatten(1, (self.hparams.prediction_length, -1))}

    def step(self, x, y):
        target, weight = y
        errors = target[..., None] - self(x)["prediction"]
        quantiles = torch.tensor(self.hparams.quantiles, device=self.device)
        losses = torch.maximum((quantiles - 1) * errors, quantiles * errors)
        return losses.mean() if weight is None else (losses * weight[..., None]).mean()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.step(x, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(x["groups"]))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.step(x, y), on_epoch=True, prog_bar=True, batch_size=len(x["groups"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch", "strict": False},
        }


def main(callbacks, **options):
    pl.seed_everything(42)
    train_dataloader = TimeSeriesDataSet().to_dataloader(train=True, batch_size=32)
    val_dataloader = TimeSeriesDataSet(validation=True).to_dataloader(train=False, batch_size=32)
    early_stop_callback = EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=10, verbose=False, mode="min")
    extra = [LearningRateMonitor()] if options.get("logger") else []
    trainer = pl.Trainer(
        max_epochs=3,
        gradient_clip_val=0.1,
        callbacks=[*extra, early_stop_callback, *callbacks],
        **options,
    )
    trainer.fit(Forecaster(), train_dataloaders=train_dataloader, val_dataloaders=val_dataloader)
    return trainer
