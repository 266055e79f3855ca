"""Denoising diffusion with model and noise schedule from diffusers."""

import lightning as L
import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional as F
from torch.utils.data import DataLoader


def make_images(count):
    images = -torch.ones(count, 1, 8, 8)
    for index in range(count):
        images[index, 0, index % 6 : index % 6 + 3] = 1
    return [{"images": image} for image in images]


class DiffusionModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
        )  # fmt: skip
        self.scheduler = DDPMScheduler(num_train_timesteps=50)

    def training_step(self, batch, batch_idx):
        images = batch["images"]
        noise = torch.randn_like(images)
        steps = torch.randint(self.scheduler.config.num_train_timesteps, (images.size(0),), device=self.device)
        residual = self.model(self.scheduler.add_noise(images, noise, steps), steps).sample
        loss = F.mse_loss(residual, noise)
        self.log("train_loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
        return [optimizer], [scheduler]

    def train_dataloader(self):
        return DataLoader(make_images(160), batch_size=16, shuffle=True)


def main(callbacks, **options):
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(DiffusionModel())
    return trainer
