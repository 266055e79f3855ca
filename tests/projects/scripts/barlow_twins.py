"""Self-supervised learning in the style of Lightning's Barlow Twins tutorial; a callback adds a classifier."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class BarlowTwins(L.LightningModule):
    def __init__(self, lambda_coeff=5e-3):
        super().__init__()
        self.lambda_coeff = lambda_coeff
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.projection_head = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))

    def forward(self, x):
        return self.encoder(x)

    def shared_step(self, batch):
        views, _ = batch
        z1, z2 = (self.projection_head(self.encoder(view)) for view in views.unbind(1))
        z1, z2 = ((z - z.mean(0)) / (z.std(0) + 1e-6) for z in (z1, z2))
        cross_corr = z1.T @ z2 / len(z1)
        on_diag = torch.diagonal(cross_corr).add(-1).pow(2).sum()
        return on_diag + self.lambda_coeff * (cross_corr.pow(2).sum() - torch.diagonal(cross_corr).pow(2).sum())

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.shared_step(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / 2))
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]


class OnlineFineTuner(L.Callback):
    def __init__(self, encoder_output_dim, num_classes):
        super().__init__()
        self.encoder_output_dim, self.num_classes = encoder_output_dim, num_classes

    def on_fit_start(self, trainer, pl_module):
        pl_module.online_finetuner = nn.Linear(self.encoder_output_dim, self.num_classes).to(pl_module.device)
        self.optimizer = torch.optim.Adam(pl_module.online_finetuner.parameters(), lr=0.02)

    def shared_step(self, pl_module, batch):
        views, labels = batch
        with torch.no_grad():
            features = pl_module(views[:, 0])
        return F.cross_entropy(pl_module.online_finetuner(features.detach()), labels)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = self.shared_step(pl_module, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        pl_module.log("online_train_loss", loss, on_step=False, on_epoch=True)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("online_val_loss", self.shared_step(pl_module, batch))


def views(count):
    labels = torch.arange(count) % 3
    images = torch.randn(3, 12)[labels] + 0.3 * torch.randn(count, 12)
    return TensorDataset(images[:, None] + 0.3 * torch.randn(count, 2, 12), labels)


def main(callbacks, **options):
    L.seed_everything(13)
    data = views(160)
    train, val = DataLoader(data, 16, shuffle=True, drop_last=True), DataLoader(data, 40)
    callbacks = [OnlineFineTuner(16, 3), *callbacks]
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(BarlowTwins(), train, val)
    return trainer
