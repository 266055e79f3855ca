"""Regression with uncertainty from an ensemble, in the style of lightning-uq-box."""

from functools import partial

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection


class NLL(nn.Module):
    """Gaussian negative log-likelihood for (mean, log variance)."""

    def forward(self, preds, target):
        mu, log_sigma_2 = preds[..., :1], preds[..., 1:]
        return 0.5 * (log_sigma_2 + (target - mu) ** 2 / log_sigma_2.exp()).mean()


class DeepEnsemble(L.LightningModule):
    """Members train on the same batches from different initialisations."""

    def __init__(self, models, burnin_epochs, optimizer=torch.optim.Adam, lr_scheduler=None):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.burnin_epochs = burnin_epochs
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.loss_fn = NLL()
        metrics = MetricCollection({"RMSE": MeanSquaredError(squared=False), "MAE": MeanAbsoluteError()})
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train"), metrics.clone(prefix="val")

    def forward(self, x):
        return torch.stack([model(x) for model in self.models])

    def training_step(self, batch, batch_idx, dataloader_idx=0):
        out = self.forward(batch["input"])
        if self.current_epoch < self.burnin_epochs:
            loss = nn.functional.mse_loss(out[..., :1], batch["target"].expand(len(self.models), -1, -1))
        else:
            loss = self.loss_fn(out, batch["target"])
        self.log("train_loss", loss, batch_size=batch["input"].shape[0], on_step=False, on_epoch=True)
        self.train_metrics(out.mean(0)[:, :1], batch["target"])
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        out = self.forward(batch["input"])
        self.log("val_loss", self.loss_fn(out, batch["target"]), batch_size=batch["input"].shape[0])
        self.val_metrics(out.mean(0)[:, :1], batch["target"])

    def on_validation_epoch_end(self):
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def predict_step(self, X, batch_idx=0, dataloader_idx=0):
        out = self.forward(X["input"])
        return {"pred": out[..., 0].mean(0), "epistemic_uct": out[..., 0].std(0), "out": out}

    def configure_optimizers(self):
        return {"optimizer": self.optimizer(self.parameters())}


def collate_fn(batch):
    inputs, targets = (torch.stack(parts) for parts in zip(*batch, strict=True))
    return {"input": inputs, "target": targets}


class ToyHeteroscedastic(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(42)
        x = torch.rand(260, 1, generator=generator) * 2 - 1
        y = 1 + x.sin() + (0.05 + 0.2 * (x > 0)) * torch.randn(260, 1, generator=generator)
        self.train_data, self.val_data = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])

    def train_dataloader(self):
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, collate_fn=collate_fn)

    def val_dataloader(self):
        return DataLoader(self.val_data, batch_size=60, collate_fn=collate_fn)

    def predict_dataloader(self):
        return self.val_dataloader()


def main(callbacks, **options):
    L.seed_everything(0)
    dm = ToyHeteroscedastic()
    members = [nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Dropout(0.05), nn.Linear(20, 2)) for _ in range(3)]
    model = DeepEnsemble(members, burnin_epochs=2, optimizer=partial(torch.optim.Adam, lr=0.01))
    trainer = L.Trainer(max_epochs=5, callbacks=callbacks, **options)
    trainer.fit(model, dm)
    return trainer
