"""Volume segmentation with MONAI, as in MONAI's spleen tutorial for Lightning."""

import lightning.pytorch as pl
import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, decollate_batch, list_data_collate
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.layers import Norm
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, EnsureChannelFirstd, EnsureType, RandCropByPosNegLabeld, ToTensord


def make_volumes(count, seed):
    generator = np.random.default_rng(seed)
    volumes = []
    for _ in range(count):
        label = np.zeros((24, 24, 24), np.float32)
        corner = generator.integers(2, 10, 3)
        label[tuple(slice(start, start + 10) for start in corner)] = 1
        image = (label + 0.3 * generator.standard_normal(label.shape)).astype(np.float32)
        volumes.append({"image": image, "label": label})
    return volumes


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self._model = UNet(
            spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1,
            norm=Norm.BATCH,
        )  # fmt: skip
        self.loss_function = DiceLoss(to_onehot_y=True, softmax=True)
        self.post_pred = Compose([EnsureType("tensor", device="cpu"), AsDiscrete(argmax=True, to_onehot=2)])
        self.post_label = Compose([EnsureType("tensor", device="cpu"), AsDiscrete(to_onehot=2)])
        self.dice_metric = DiceMetric(include_background=False, reduction="mean", get_not_nans=False)
        self.validation_step_outputs = []

    def forward(self, x):
        return self._model(x)

    def prepare_data(self):
        keys = ["image", "label"]
        first = [EnsureChannelFirstd(keys=keys, channel_dim="no_channel")]
        crop = RandCropByPosNegLabeld(
            keys=keys, label_key="label", spatial_size=(16, 16, 16), pos=1, neg=1, num_samples=2
        )
        self.train_ds = CacheDataset(make_volumes(24, 0), Compose([*first, crop, ToTensord(keys=keys)]), progress=False)
        self.val_ds = CacheDataset(make_volumes(4, 1), Compose([*first, ToTensord(keys=keys)]), progress=False)

    def train_dataloader(self):
        return DataLoader(self.train_ds, batch_size=2, shuffle=True, num_workers=0, collate_fn=list_data_collate)

    def val_dataloader(self):
        return DataLoader(self.val_ds, batch_size=1, num_workers=0)

    def configure_optimizers(self):
        return torch.optim.Adam(self._model.parameters(), 0.01)

    def training_step(self, batch, batch_idx):
        images, labels = batch["image"], batch["label"]
        return {"loss": self.loss_function(self.forward(images), labels)}

    def validation_step(self, batch, batch_idx):
        images, labels = batch["image"], batch["label"]
        outputs = sliding_window_inference(images, (16, 16, 16), 4, self.forward)
        loss = self.loss_function(outputs, labels)
        outputs = [self.post_pred(output) for output in decollate_batch(outputs)]
        labels = [self.post_label(label) for label in decollate_batch(labels)]
        self.dice_metric(y_pred=outputs, y=labels)
        self.validation_step_outputs.append(loss)

    def on_validation_epoch_end(self):
        self.log("val_dice", self.dice_metric.aggregate().item())
        self.log("val_loss", torch.stack(self.validation_step_outputs).mean())
        self.dice_metric.reset()
        self.validation_step_outputs.clear()


def main(callbacks, **options):
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(Net())
    return trainer
