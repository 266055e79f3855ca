"""Graph classification in the style of PyTorch Geometric: objects with ``.y`` and a batching loader."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Data:
    """One graph or a batch: node features, edges, a label for each graph, the graph of each node."""

    def __init__(self, x, edge_index, y, batch=None):
        self.x, self.edge_index, self.y, self.batch = x, edge_index, y, batch

    @property
    def num_graphs(self):
        return len(self.y)

    def to(self, device, non_blocking=False):
        return Data(*(None if value is None else value.to(device) for value in vars(self).values()))


def collate(graphs):
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    offsets = sizes.cumsum(0) - sizes
    return Data(
        torch.cat([graph.x for graph in graphs]),
        torch.cat([graph.edge_index + offset for graph, offset in zip(graphs, offsets, strict=True)], dim=1),
        torch.cat([graph.y for graph in graphs]),
        torch.arange(len(graphs)).repeat_interleave(sizes),
    )


class Loader(torch.utils.data.DataLoader):
    """As ``torch_geometric.loader.DataLoader``, sets a collate function."""

    def __init__(self, dataset, batch_size=1, shuffle=False, **kwargs):
        kwargs.pop("collate_fn", None)
        super().__init__(dataset, batch_size, shuffle, collate_fn=collate, **kwargs)


class Rings(Dataset):
    """Rings with 4 to 9 nodes, some with a chord."""

    def __init__(self, num_graphs):
        self.graphs = []
        for number in range(num_graphs):
            size, label = 4 + number % 6, (number // 6) % 2
            nodes = torch.arange(size)
            edges = torch.stack([nodes, (nodes + 1) % size])
            if label:
                chords = torch.stack([nodes, (nodes + 2) % size])
                edges = torch.cat([edges, chords], dim=1)
            edges = torch.cat([edges, edges.flip(0)], dim=1)
            self.graphs.append(Data(1 + 0.1 * torch.randn(size, 3), edges, torch.tensor([label])))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, index):
        return self.graphs[index]


class Convolution(nn.Module):
    """Sums messages from the neighbours."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.root, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edge_index):
        sums = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return self.root(x) + self.neighbours(sums)


class GraphClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm = Convolution(3, 16), nn.BatchNorm1d(16)
        self.conv2, self.head = Convolution(16, 16), nn.Linear(16, 2)

    def forward(self, data):
        x = F.relu(self.norm(self.conv1(data.x, data.edge_index)))
        x = F.dropout(self.conv2(x, data.edge_index), 0.1, self.training)
        sums = torch.zeros(data.num_graphs, 16, device=x.device).index_add(0, data.batch, x)
        return self.head(sums / torch.bincount(data.batch)[:, None])

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch), batch.y), batch_size=batch.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class LightningDataset(L.LightningDataModule):
    def __init__(self, train_dataset, val_dataset, batch_size):
        super().__init__()
        self.train_dataset, self.val_dataset, self.batch_size = train_dataset, val_dataset, batch_size

    def train_dataloader(self):
        return Loader(self.train_dataset, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return Loader(self.val_dataset, self.batch_size)


def main(callbacks, **options):
    L.seed_everything(12)
    datamodule = LightningDataset(Rings(180), Rings(48), batch_size=12)
    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(GraphClassifier(), datamodule)
    return trainer
