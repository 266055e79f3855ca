"""Point clouds in the style of PointNet projects: feature transforms, class weights, and a warm-up per step."""

import math

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler


class Clouds(Dataset):
    """Noisy spheres, boxes and planes."""

    def __init__(self, count, num_points=24):
        self.labels = torch.arange(count) % 3
        points = torch.randn(count, num_points, 3)
        shapes = [F.normalize(points, dim=-1), points.clamp(-1, 1), points * torch.tensor([1.0, 1.0, 0.0])]
        self.points = torch.stack(shapes)[self.labels, torch.arange(count)] + 0.02 * torch.randn(count, num_points, 3)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"points": self.points[index], "label": self.labels[index]}


def collate(samples):
    """Points come second in convolutions over points."""
    points = torch.stack([sample["points"] for sample in samples]).transpose(1, 2)
    return points, torch.stack([sample["label"] for sample in samples])


class TNet(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k, self.conv, self.fc = k, nn.Conv1d(k, 16, 1), nn.Linear(16, k * k)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        matrix = self.fc(F.relu(self.conv(x)).amax(2)).view(-1, self.k, self.k)
        return matrix + torch.eye(self.k, device=x.device)


class PointNet(L.LightningModule):
    def __init__(self, warmup_steps=4, max_steps=60):
        super().__init__()
        self.save_hyperparameters()
        self.input_transform, self.feature_transform = TNet(3), TNet(16)
        self.conv1, self.norm1 = nn.Conv1d(3, 16, 1), nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv1d(16, 32, 1)
        self.classifier = nn.Linear(32, 3)

    def forward(self, points):
        x = torch.bmm(self.input_transform(points), points)
        x = F.relu(self.norm1(self.conv1(x)))
        transform = self.feature_transform(x)
        features = F.relu(self.conv2(torch.bmm(transform, x))).amax(2)
        return self.classifier(features), transform

    def training_step(self, batch, batch_idx):
        scores, transform = self(batch[0])
        distance = torch.bmm(transform, transform.transpose(1, 2)) - torch.eye(16, device=self.device)
        loss = F.cross_entropy(scores, batch[1]) + 0.001 * distance.square().sum((1, 2)).mean()
        self.log("lr", self.lr_schedulers().get_last_lr()[0])
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0])[0], batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)

        def rate(step):
            if step < self.hparams.warmup_steps:
                return (step + 1) / self.hparams.warmup_steps
            share = (step - self.hparams.warmup_steps) / (self.hparams.max_steps - self.hparams.warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(callbacks, **options):
    L.seed_everything(14)
    clouds = Clouds(150)
    places = torch.randperm(len(clouds)).tolist()
    train = DataLoader(clouds, 10, sampler=SubsetRandomSampler(places[:120]), collate_fn=collate)
    val = DataLoader(clouds, 10, sampler=SubsetRandomSampler(places[120:]), collate_fn=collate)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(PointNet(), train, val)
    return trainer
