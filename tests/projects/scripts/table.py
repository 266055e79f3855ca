"""A table in memory: the data set takes all rows of a batch at once, from a batch sampler."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler


class Table(Dataset):
    def __init__(self, num_rows):
        self.columns = torch.randn(num_rows, 6)
        self.targets = (self.columns[:, :2].prod(1) > 0).long()

    def __len__(self):
        return len(self.columns)

    def __getitem__(self, rows):
        return self.columns[rows], self.targets[rows]


def batches(table, order):
    return DataLoader(table, batch_size=None, sampler=BatchSampler(order, batch_size=16, drop_last=False))


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        columns, targets = batch
        return F.cross_entropy(self.net(columns), targets)

    def validation_step(self, batch, batch_idx):
        columns, targets = batch
        self.log("val_loss", F.cross_entropy(self.net(columns), targets), batch_size=len(targets))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def main(callbacks, **options):
    L.seed_everything(10)
    train, val = Table(240), Table(80)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(Classifier(), batches(train, RandomSampler(train)), batches(val, SequentialSampler(val)))
    return trainer
