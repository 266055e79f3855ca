"""Clustering without an optimizer: centres are running means of the nearest examples."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class MiniBatchKMeans(L.LightningModule):
    """Sculley, "Web-scale k-means clustering", 2010."""

    def __init__(self, num_clusters=4):
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("centres", torch.randn(num_clusters, 2))
        self.register_buffer("counts", torch.zeros(num_clusters))

    def training_step(self, batch, batch_idx):
        (points,) = batch
        nearest = torch.cdist(points, self.centres).argmin(1)
        for point, cluster in zip(points, nearest.tolist(), strict=True):
            self.counts[cluster] += 1
            self.centres[cluster] += (point - self.centres[cluster]) / self.counts[cluster]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.cdist(batch[0], self.centres).amin(1).mean(), batch_size=len(batch[0]))

    def configure_optimizers(self):
        return None


def main(callbacks, **options):
    L.seed_everything(11)
    corners = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0], [0.0, -4.0]])
    train, val = (TensorDataset(corners.repeat(size, 1) + 0.5 * torch.randn(4 * size, 2)) for size in (45, 15))
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(MiniBatchKMeans(), DataLoader(train, 12, shuffle=True), DataLoader(val, 30))
    return trainer
