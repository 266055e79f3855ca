"""Land cover in the style of torchgeo: a data set indexed by places, a sampler for places, dictionary batches."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler


class RasterDataset(Dataset):
    """One large scene, indexed by windows (top, left, size)."""

    def __init__(self):
        rows, columns = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
        self.mask = ((rows // 12 + columns // 12) % 3).long()
        self.image = F.one_hot(self.mask, 3).permute(2, 0, 1) + 0.5 * torch.randn(3, 64, 64)

    def __len__(self):
        return 1  # number of files

    def __getitem__(self, window):
        top, left, size = window
        place = slice(top, top + size), slice(left, left + size)
        return {"image": self.image[:, *place], "mask": self.mask[place], "bounds": torch.tensor(window)}


class RandomGeoSampler(Sampler):
    """Windows at random places in a region, from a first row to a last row."""

    def __init__(self, dataset, size, length, rows=(0, 64)):
        self.size, self.length, self.rows = size, length, rows

    def __len__(self):
        return self.length

    def __iter__(self):
        top, bottom = self.rows
        for _ in range(self.length):
            row = int(torch.randint(top, bottom - self.size + 1, ()))
            yield row, int(torch.randint(64 - self.size + 1, ())), self.size


class SemanticSegmentationTask(L.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch["image"]), batch["mask"])
        self.log("train_loss", loss, batch_size=len(batch["image"]), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.model(batch["image"]), batch["mask"]), batch_size=len(batch["image"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def main(callbacks, **options):
    L.seed_everything(0)
    dataset = RasterDataset()
    train = DataLoader(dataset, batch_size=8, sampler=RandomGeoSampler(dataset, 16, 48))
    windows = [(top, left, 16) for top in range(0, 64, 16) for left in range(0, 64, 16)]
    val = DataLoader(dataset, batch_size=16, sampler=windows)
    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(SemanticSegmentationTask(), train, val)
    return trainer
