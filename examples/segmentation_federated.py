"""Image segmentation with segmentation_models_pytorch and Lightning, on small generated scenes."""

import argparse

import lightning as L
import lightning_fed as fed
import numpy as np
import segmentation_models_pytorch as smp
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex


class Scenes(Dataset):
    """Bright discs (class 1) and dark squares (class 2) on a noisy background (class 0)."""

    def __init__(self, num_scenes: int, size: int, seed: int):
        self.num_scenes, self.size, self.seed = num_scenes, size, seed

    def __len__(self):
        return self.num_scenes

    def __getitem__(self, index):
        rng = np.random.default_rng([self.seed, index])
        image = rng.normal(0.5, 0.1, (3, self.size, self.size)).astype(np.float32)
        mask = np.zeros((self.size, self.size), dtype=np.int64)
        y, x = np.mgrid[: self.size, : self.size]
        favourite = rng.integers(1, 3)  # most objects in a scene have the same class
        for _ in range(rng.integers(2, 5)):
            shape = favourite if rng.random() < 0.8 else 3 - favourite
            (row, column), radius = rng.uniform(0, self.size, 2), rng.uniform(0.1, 0.2) * self.size
            if shape == 1:
                inside = (y - row) ** 2 + (x - column) ** 2 < radius**2
            else:
                inside = np.maximum(abs(y - row), abs(x - column)) < radius
            mask[inside] = shape
            image[:, inside] += 0.25 if shape == 1 else -0.25
        return torch.from_numpy(image), torch.from_numpy(mask)


class Segmenter(L.LightningModule):
    def __init__(self, num_classes: int = 3, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = smp.Unet(
            "tu-resnet18", encoder_depth=3, decoder_channels=(64, 32, 16), encoder_weights=None, classes=num_classes
        )
        self.loss = torch.nn.CrossEntropyLoss()
        self.miou = MulticlassJaccardIndex(num_classes)

    def training_step(self, batch, batch_idx):
        images, masks = batch
        loss = self.loss(self.model(images), masks)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        logits = self.model(images)
        self.miou.update(logits, masks)
        self.log("val_loss", self.loss(logits, masks), prog_bar=True)
        self.log("val_miou", self.miou, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--scenes", type=int, default=240)
    parser.add_argument("--size", type=int, default=40, help="height and width in pixels, a multiple of 8")
    args = parser.parse_args()

    L.seed_everything(1)
    train = DataLoader(Scenes(args.scenes, args.size, seed=1), batch_size=8, shuffle=True)
    val = DataLoader(Scenes(args.scenes // 4, args.size, seed=2), batch_size=32)
    best = ModelCheckpoint(monitor="val_miou", mode="max")
    trainer = fed.FederatedTrainer(
        partition=fed.data.Dirichlet(num_clients=8, alpha=1.0),
        max_epochs=args.epochs,
        callbacks=[best],
    )
    trainer.fit(Segmenter(), train, val)
    print(f"best validation mIoU: {best.best_model_score:.3f}")


if __name__ == "__main__":
    main()
