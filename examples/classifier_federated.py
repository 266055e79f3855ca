"""Image classification with Lightning, on small generated images of digits."""

import argparse

import lightning as L
import lightning_fed as fed
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

SEGMENTS = {  # rows and columns for a digit's seven strokes, in 10 x 6 pixels
    "a": (slice(0, 2), slice(0, 6)), "b": (slice(0, 5), slice(4, 6)), "c": (slice(5, 10), slice(4, 6)),
    "d": (slice(8, 10), slice(0, 6)), "e": (slice(5, 10), slice(0, 2)), "f": (slice(0, 5), slice(0, 2)),
    "g": (slice(4, 6), slice(0, 6)),
}  # fmt: skip
DIGITS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]


class Digits(Dataset):
    """Digits with seven strokes at a random position in a noisy 16 x 16 image; some strokes are pale."""

    def __init__(self, num_samples: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(10, (num_samples,), generator=generator)
        self.images = torch.randn(num_samples, 1, 16, 16, generator=generator) * 0.2
        for image, target in zip(self.images, self.targets, strict=True):
            row, column = torch.randint(2, 6, (2,), generator=generator).tolist()
            digit = torch.zeros(10, 6)
            for stroke in DIGITS[target]:
                digit[SEGMENTS[stroke]] = 0.4 + 0.6 * torch.rand((), generator=generator)
            image[0, row : row + 10, column : column + 6] += digit

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, num_samples: int, batch_size: int = 16):
        super().__init__()
        self.num_samples, self.batch_size = num_samples, batch_size

    def setup(self, stage):
        self.train, self.val = Digits(self.num_samples, seed=1), Digits(self.num_samples // 4, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=256)


class Classifier(L.LightningModule):
    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss = F.cross_entropy(self.model(images), targets)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        logits = self.model(images)
        self.accuracy.update(logits, targets)
        self.log("val_loss", F.cross_entropy(logits, targets), prog_bar=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=2000)
    args = parser.parse_args()

    L.seed_everything(1)
    patience = EarlyStopping("val_loss", patience=5)
    federation = fed.Federation(partition=fed.data.Dirichlet(10, alpha=0.5), clients_per_round=5, local_epochs=2)
    trainer = L.Trainer(max_epochs=args.epochs, callbacks=[patience, federation])
    trainer.fit(Classifier(), datamodule=DigitsDataModule(args.samples))
    print(f"validation accuracy: {float(trainer.callback_metrics['val_acc']):.3f}")


if __name__ == "__main__":
    main()
