"""Few-shot learning in the style of easyfsl and torchmeta: a batch sampler draws episodes."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler


class Glyphs(Dataset):
    def __init__(self, classes):
        patterns = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
        self.labels = torch.tensor(classes).repeat_interleave(20)
        self.images = patterns[self.labels] + 0.7 * torch.randn(len(self.labels), 16)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class EpisodeSampler(Sampler):
    """Batches with `n_way` classes, `n_shot` support examples and `n_query` query examples per class."""

    def __init__(self, labels, n_way, n_shot, n_query, n_tasks):
        self.places = {int(label): (labels == label).nonzero()[:, 0] for label in labels.unique()}
        self.n_way, self.n_items, self.n_tasks = n_way, n_shot + n_query, n_tasks

    def __len__(self):
        return self.n_tasks

    def __iter__(self):
        classes = list(self.places)
        for _ in range(self.n_tasks):
            drawn = [classes[place] for place in torch.randperm(len(classes))[: self.n_way]]
            yield [int(i) for c in drawn for i in self.places[c][torch.randperm(len(self.places[c]))[: self.n_items]]]


class Prototypical(L.LightningModule):
    def __init__(self, n_way=3, n_shot=4):
        super().__init__()
        self.n_way, self.n_shot = n_way, n_shot
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def loss_of(self, batch):
        embeddings = self.backbone(batch[0]).unflatten(0, (self.n_way, -1))
        prototypes, queries = embeddings[:, : self.n_shot].mean(1), embeddings[:, self.n_shot :].flatten(0, 1)
        labels = torch.arange(self.n_way).repeat_interleave(len(queries) // self.n_way)
        return F.cross_entropy(-torch.cdist(queries, prototypes), labels)

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


def episodes(dataset, n_tasks):
    return DataLoader(dataset, batch_sampler=EpisodeSampler(dataset.labels, 3, 4, 4, n_tasks))


def main(callbacks, **options):
    L.seed_everything(6)
    train = episodes(Glyphs(range(8)), 24)
    val = episodes(Glyphs(range(8, 12)), 10)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(Prototypical(), train, val)
    return trainer
