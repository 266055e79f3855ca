"""Denoising diffusion with averaged weights inside the module."""

import copy

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.time = nn.Embedding(50, channels)
        self.down = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.SiLU())
        self.up = nn.Conv2d(2 * channels, 1, 3, padding=1)

    def forward(self, x, t):
        skip = self.down(x)
        return self.up(torch.cat([self.middle(skip + self.time(t)[:, :, None, None]), skip], dim=1))


class DDPM(L.LightningModule):
    def __init__(self, timesteps=50, ema_decay=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.model = Denoiser()
        self.ema_model = copy.deepcopy(self.model).requires_grad_(False)
        alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.2, timesteps), dim=0)
        self.register_buffer("alphas_cumprod", alphas, persistent=False)

    def add_noise(self, images, noise, t):
        share = self.alphas_cumprod[t][:, None, None, None]
        return share.sqrt() * images + (1 - share).sqrt() * noise

    def training_step(self, batch, batch_idx):
        images = batch[0]
        noise = torch.randn_like(images)
        t = torch.randint(0, self.hparams.timesteps, (len(images),), device=self.device)
        loss = F.mse_loss(self.model(self.add_noise(images, noise, t), t), noise)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for average, parameter in zip(self.ema_model.parameters(), self.model.parameters(), strict=True):
            average.lerp_(parameter, 1 - self.hparams.ema_decay)

    def validation_step(self, batch, batch_idx):
        images = batch[0]
        generator = torch.Generator().manual_seed(batch_idx)
        noise = torch.randn(images.shape, generator=generator).to(self.device)
        t = torch.randint(0, self.hparams.timesteps, (len(images),), generator=generator).to(self.device)
        self.log("val_loss", F.mse_loss(self.ema_model(self.add_noise(images, noise, t), t), noise))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)]


def main(callbacks, **options):
    L.seed_everything(3)
    images = torch.zeros(200, 1, 8, 8)
    for index in range(200):
        images[index, 0, index % 6 : index % 6 + 3] = 1
    dataset = TensorDataset(2 * images - 1)
    trainer = L.Trainer(max_epochs=4, gradient_clip_val=1.0, callbacks=callbacks, **options)
    train, val = DataLoader(dataset, 16, shuffle=True, drop_last=True), DataLoader(dataset, 100)
    trainer.fit(DDPM(), train, val)
    return trainer
