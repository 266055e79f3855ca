"""MoCo with lightly's transforms, data set, heads and loss, as in lightly's example for Lightning."""

import copy

import lightning as L
import numpy as np
import torch
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms.moco_transform import MoCoV2Transform
from lightly.utils.scheduler import cosine_schedule
from PIL import Image
from torch import nn


class Colours(torch.utils.data.Dataset):
    transform = None

    def __init__(self, count=160):
        colours = [(250, 20, 20), (20, 250, 20), (20, 20, 250), (250, 250, 20)]
        self.images = np.full((count, 32, 32, 3), 90, np.uint8)
        for number in range(count):
            top, left = 3 * (number % 5), 2 * (number % 7)
            self.images[number, top : top + 16, left : left + 16] = colours[number % 4]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), index % 4


class MoCo(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.projection_head = MoCoProjectionHead(32, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(64, 16))

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 10, 0.9, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x_query, x_key = batch[0]
        loss = self.criterion(self.forward(x_query), self.forward_momentum(x_key))
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(x_query))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def main(callbacks, **options):
    L.seed_everything(1)
    transform = MoCoV2Transform(input_size=32, gaussian_blur=0.0)
    dataset = LightlyDataset.from_torch_dataset(Colours(), transform=transform)
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True, num_workers=0)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(model=MoCo(), train_dataloaders=dataloader)
    return trainer
