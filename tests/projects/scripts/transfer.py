"""Transfer learning with ``BackboneFinetuning``, after Lightning's computer-vision example."""

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy


class CatsAndDogs(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size
        labels = torch.arange(200) % 2
        images = torch.randn(200, 3, 8, 8)
        images[:, 0] += 2 * labels[:, None, None] - 1
        self.train, self.val = TensorDataset(images[:160], labels[:160]), TensorDataset(images[160:], labels[160:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class TransferLearningModel(L.LightningModule):
    def __init__(self, milestones=(2, 4), lr=3e-2, lr_scheduler_gamma=1e-1):
        super().__init__()
        self.milestones, self.lr, self.lr_scheduler_gamma = milestones, lr, lr_scheduler_gamma
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.feature_extractor = self.backbone
        self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.train_acc, self.valid_acc = Accuracy(task="binary"), Accuracy(task="binary")

    def forward(self, x):
        return self.fc(self.feature_extractor(x))

    def step(self, batch):
        x, y = batch
        y_logits = self(x)
        y_true = y.view((-1, 1)).type_as(x)
        return F.binary_cross_entropy_with_logits(y_logits, y_true), y_logits.sigmoid(), y_true.int()

    def training_step(self, batch, batch_idx):
        loss, scores, y_true = self.step(batch)
        self.log("train_acc", self.train_acc(scores, y_true), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, scores, y_true = self.step(batch)
        self.log("val_loss", loss)
        self.log("val_acc", self.valid_acc(scores, y_true), prog_bar=True)

    def configure_optimizers(self):
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trainable, lr=self.lr)
        return [optimizer], [MultiStepLR(optimizer, milestones=self.milestones, gamma=self.lr_scheduler_gamma)]


def main(callbacks, **options):
    L.seed_everything(1)
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_ratio_lr=0.1, train_bn=False)
    trainer = L.Trainer(max_epochs=4, callbacks=[finetuning, *callbacks], **options)
    trainer.fit(TransferLearningModel(), CatsAndDogs())
    return trainer
