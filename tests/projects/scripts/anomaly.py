"""Anomaly detection by a student of a frozen teacher, in the style of anomalib: batches are data classes."""

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryAUROC


@dataclass
class ImageItem:
    image: torch.Tensor
    gt_label: torch.Tensor
    image_path: str


@dataclass
class ImageBatch:
    image: torch.Tensor
    gt_label: torch.Tensor
    image_path: list

    @classmethod
    def collate(cls, items):
        return cls(
            torch.stack([item.image for item in items]),
            torch.stack([item.gt_label for item in items]),
            [item.image_path for item in items],
        )


class Tiles(Dataset):
    """Images with stripes; anomalous images have a patch without stripes."""

    def __init__(self, num_samples, anomalous=0.0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.images = 0.1 * torch.randn(num_samples, 1, 12, 12, generator=generator)
        self.images[..., ::2] += 1
        self.labels = torch.arange(num_samples) % 4 < 4 * anomalous
        self.images[self.labels, :, 3:9, 3:9] = 0.5

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return ImageItem(self.images[index], self.labels[index], f"{index:03}.png")


def extractor():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


class Stfpm(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.teacher_model = extractor().requires_grad_(False)
        self.student_model = extractor()
        self.auroc = BinaryAUROC()

    def anomaly_map(self, images):
        self.teacher_model.eval()
        teacher, student = F.normalize(self.teacher_model(images)), F.normalize(self.student_model(images))
        return 0.5 * (teacher - student).square().sum(1)

    def training_step(self, batch, *args, **kwargs):
        loss = self.anomaly_map(batch.image).mean()
        self.log("train_loss", loss.item(), on_epoch=True, on_step=False, prog_bar=True, batch_size=len(batch.image))
        return {"loss": loss}

    def validation_step(self, batch, *args, **kwargs):
        self.auroc(self.anomaly_map(batch.image).amax((1, 2)), batch.gt_label)

    def on_validation_epoch_end(self):
        self.log("image_AUROC", self.auroc.compute())
        self.auroc.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(params=self.student_model.parameters(), lr=0.4, momentum=0.9, weight_decay=0.0001)


class Folder(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Tiles(96), batch_size=8, shuffle=True, drop_last=True, collate_fn=ImageBatch.collate)

    def val_dataloader(self):
        return DataLoader(Tiles(40, anomalous=0.5, seed=1), batch_size=8, collate_fn=ImageBatch.collate)


class Engine:
    """As in anomalib, creates the Trainer."""

    def __init__(self, callbacks=None, **kwargs):
        self.trainer = pl.Trainer(callbacks=callbacks, **kwargs)

    def fit(self, model, datamodule):
        self.trainer.fit(model, datamodule=datamodule)


def main(callbacks, **options):
    pl.seed_everything(5)
    checkpoints = [ModelCheckpoint(mode="max", monitor="image_AUROC")] if options.get("enable_checkpointing") else []
    engine = Engine(callbacks=[*checkpoints, *callbacks], max_epochs=3, **options)
    engine.fit(Stfpm(), Folder())
    return engine.trainer
