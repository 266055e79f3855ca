"""Metric learning with ArcFace in the style of pytorch-metric-learning: the loss contains the class weights."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class ArcFaceLoss(nn.Module):
    def __init__(self, num_classes, embedding_size, margin=28.6, scale=64):
        super().__init__()
        self.margin, self.scale = torch.deg2rad(torch.tensor(margin)).item(), scale
        self.W = nn.Parameter(torch.empty(embedding_size, num_classes))
        nn.init.normal_(self.W)

    def forward(self, embeddings, labels):
        cosine = F.normalize(embeddings) @ F.normalize(self.W, dim=0)
        angles = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()
        target = F.one_hot(labels, cosine.shape[1]).bool()
        return F.cross_entropy(self.scale * torch.where(target, (angles + self.margin).cos(), cosine), labels)


class Retrieval(L.LightningModule):
    def __init__(self, num_classes=6):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.loss_func = ArcFaceLoss(num_classes, 8, margin=11.5, scale=8)

    def training_step(self, batch, batch_idx):
        data, labels = batch
        loss = self.loss_func(self.trunk(data), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        data, labels = batch
        self.log("val_loss", self.loss_func(self.trunk(data), labels))

    def configure_optimizers(self):
        trunk = torch.optim.Adam(self.trunk.parameters(), lr=0.01)
        trunk.add_param_group({"params": self.loss_func.parameters(), "lr": 0.03})
        return trunk


def main(callbacks, **options):
    L.seed_everything(4)
    labels = torch.arange(240) % 6
    data = 2 * torch.randn(6, 12)[labels] + torch.randn(240, 12)
    train = DataLoader(TensorDataset(data[:192], labels[:192]), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(data[192:], labels[192:]), batch_size=48)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(Retrieval(), train, val)
    return trainer
