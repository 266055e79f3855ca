"""Self-supervision with a momentum encoder and a queue (MoCo), in the style of lightly's examples."""

import copy

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    """Samples as in lightly's data set: two views, a label, a file name."""

    def __init__(self, num_samples=240):
        self.labels = torch.arange(num_samples) % 4
        self.signals = torch.randn(4, 12)[self.labels] + 0.3 * torch.randn(num_samples, 12)

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        views = [self.signals[index] + 0.1 * torch.randn(12) for _ in range(2)]
        return views, int(self.labels[index]), f"{index:05}.png"


class MoCo(L.LightningModule):
    def __init__(self, queue_size=64):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.projection_head = nn.Linear(24, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone).requires_grad_(False)
        self.projection_head_momentum = copy.deepcopy(self.projection_head).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue_size, 8), dim=1))
        self.register_buffer("queue_position", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return F.normalize(self.projection_head(self.backbone(x)), dim=1)

    @torch.no_grad()
    def forward_momentum(self, x):
        return F.normalize(self.projection_head_momentum(self.backbone_momentum(x)), dim=1)

    @torch.no_grad()
    def update_momentum(self, momentum):
        pairs = ((self.backbone, self.backbone_momentum), (self.projection_head, self.projection_head_momentum))
        for model, slow in pairs:
            for parameter, average in zip(model.parameters(), slow.parameters(), strict=True):
                average.mul_(momentum).add_(parameter, alpha=1 - momentum)

    def training_step(self, batch, batch_idx):
        (x_query, x_key), _, _ = batch
        self.update_momentum(0.9)
        query, key = self(x_query), self.forward_momentum(x_key)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.T.clone()], dim=1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long, device=self.device))
        places = (self.queue_position + torch.arange(len(key), device=self.device)) % len(self.queue)
        self.queue[places] = key
        self.queue_position.copy_((self.queue_position + len(key)) % len(self.queue))
        self.log("train_loss_ssl", loss, on_step=False, on_epoch=True, batch_size=len(query))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


def main(callbacks, **options):
    L.seed_everything(1)
    dataset = Views()
    dataloader = DataLoader(dataset, batch_size=20, shuffle=True, drop_last=True)
    model = MoCo()
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(model=model, train_dataloaders=dataloader)
    return trainer
