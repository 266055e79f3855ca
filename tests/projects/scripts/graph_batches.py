"""Graphs in the style of PyTorch Geometric: a loader subclass with a collate object, and batches with `.to`."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Data:
    """Attributes for one graph, or for several graphs."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def to(self, device, non_blocking=False):
        return Data(**{name: value.to(device, non_blocking=non_blocking) for name, value in vars(self).items()})

    @property
    def num_graphs(self):
        return len(self.y)


class Collater:
    def __call__(self, graphs):
        sizes = torch.tensor([len(graph.x) for graph in graphs])
        starts = sizes.cumsum(0) - sizes
        return Data(
            x=torch.cat([graph.x for graph in graphs]),
            edge_index=torch.cat([graph.edge_index + start for graph, start in zip(graphs, starts, strict=True)], 1),
            y=torch.cat([graph.y for graph in graphs]),
            batch=torch.arange(len(graphs)).repeat_interleave(sizes),
        )


class GraphLoader(DataLoader):
    def __init__(self, dataset, batch_size=1, shuffle=False, follow_batch=None, **kwargs):
        kwargs.pop("collate_fn", None)
        self.follow_batch = follow_batch
        super().__init__(dataset, batch_size, shuffle, collate_fn=Collater(), **kwargs)


class Rings(Dataset):
    """Rings, and rings with a chord; the features are degrees with noise."""

    def __init__(self, count):
        self.graphs = []
        for number in range(count):
            size = 5 + number % 4
            nodes = torch.arange(size)
            edges = torch.stack([nodes, nodes.roll(1)])
            if number % 2:
                edges = torch.cat([edges, torch.tensor([[0, 1], [2, 3]])], 1)
            edges = torch.cat([edges, edges.flip(0)], 1)
            degrees = torch.bincount(edges[0], minlength=size).float()[:, None]
            x = torch.cat([degrees + 0.3 * torch.randn(size, 1), torch.randn(size, 2)], 1)
            self.graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([number % 2])))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, index):
        return self.graphs[index]


class Convolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.root, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edge_index):
        source, target = edge_index
        return self.root(x) + torch.zeros_like(self.neighbours(x)).index_add(0, target, self.neighbours(x)[source])


class Network(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = Convolution(3, 16), Convolution(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, data):
        x = F.relu(self.first(data.x, data.edge_index))
        x = F.relu(checkpoint(self.second, x, data.edge_index, use_reentrant=False))
        sums = x.new_zeros(data.num_graphs, 16).index_add(0, data.batch, x)
        return self.head(sums)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch), batch.y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch), batch.y), batch_size=batch.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(callbacks, **options):
    L.seed_everything(15)
    train, val = GraphLoader(Rings(120), 10, shuffle=True), GraphLoader(Rings(40), 20)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(Network(), train, val)
    return trainer
