"""A GAN with manual optimization and two optimizers, in the style of Lightning's basic example."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self, latent_dim=4, lr=0.01, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 2)
        )
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
        self.validation_z = torch.randn(64, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        (points,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(points.shape[0], self.hparams.latent_dim).type_as(points)
        real, fake = torch.ones(len(points), 1).type_as(points), torch.zeros(len(points), 1).type_as(points)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), real)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(points), real)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch):
        pass

    def on_validation_epoch_end(self):
        z = self.validation_z.type_as(self.generator[0].weight)
        self.log("val/distance", (self(z).mean(0) - torch.tensor([2.0, -1.0]).type_as(z)).norm())

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []


class Points(L.LightningDataModule):
    def setup(self, stage=None):
        self.points = TensorDataset(0.3 * torch.randn(240, 2) + torch.tensor([2.0, -1.0]))

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.points, batch_size=64)


def main(callbacks, **options):
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=6, callbacks=callbacks, **options)
    trainer.fit(GAN(), Points())
    return trainer
