"""Graph classification with PyTorch Geometric's fake data set and datamodule."""

import lightning as L
import torch
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GCNConv, global_mean_pool
from torch_geometric.utils import barabasi_albert_graph, erdos_renyi_graph


def make_graphs(count):
    graphs = []
    for number in range(count):
        label = number % 2
        edges = barabasi_albert_graph(12, 2) if label else erdos_renyi_graph(12, 0.15)
        degrees = torch.bincount(edges[0], minlength=12).float()[:, None]
        graphs.append(Data(x=torch.cat([degrees, torch.ones(12, 1)], 1), edge_index=edges, y=torch.tensor([label])))
    return graphs


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(2, 32), GCNConv(32, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, data):
        x = self.norm(self.conv1(data.x, data.edge_index)).relu()
        x = F.dropout(self.conv2(x, data.edge_index).relu(), 0.2, self.training)
        return self.head(global_mean_pool(x, data.batch))

    def training_step(self, data, batch_idx):
        loss = F.cross_entropy(self(data), data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, data, batch_idx):
        self.log("val_loss", F.cross_entropy(self(data), data.y), batch_size=data.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(callbacks, **options):
    L.seed_everything(12)
    datamodule = LightningDataset(make_graphs(240), make_graphs(60), batch_size=16, num_workers=0)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(Model(), datamodule)
    return trainer
