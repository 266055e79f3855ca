"""Segmentation of pets after the notebook by segmentation_models_pytorch."""

import lightning as L
import segmentation_models_pytorch as smp
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

EPOCHS = 2
T_MAX = 12 * EPOCHS


class Pets(Dataset):
    """Samples as in the notebook: dictionaries with image and mask."""

    def __init__(self, num_samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randint(0, 100, (num_samples, 3, 32, 32), generator=generator)
        self.masks = torch.zeros(num_samples, 1, 32, 32)
        for index in range(num_samples):
            top, left = torch.randint(16, (2,), generator=generator).tolist()
            self.masks[index, 0, top : top + 16, left : left + 16] = 1
        self.images = (self.images + 150 * self.masks).float()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index].numpy(), "mask": self.masks[index].numpy()}


class PetModel(L.LightningModule):
    def __init__(self, arch, encoder_name, in_channels, out_classes, **kwargs):
        super().__init__()
        self.model = smp.create_model(
            arch, encoder_name=encoder_name, in_channels=in_channels, classes=out_classes, **kwargs
        )
        # From `smp.encoders.get_preprocessing_params`, to avoid a download.
        self.register_buffer("std", 255 * torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.register_buffer("mean", 255 * torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.training_step_outputs = []
        self.validation_step_outputs = []

    def forward(self, image):
        return self.model((image - self.mean) / self.std)

    def shared_step(self, batch):
        image, mask = batch["image"], batch["mask"]
        logits_mask = self.forward(image)
        loss = self.loss_fn(logits_mask, mask)
        pred_mask = (logits_mask.sigmoid() > 0.5).float()
        tp, fp, fn, tn = smp.metrics.get_stats(pred_mask.long(), mask.long(), mode="binary")
        return {"loss": loss, "tp": tp, "fp": fp, "fn": fn, "tn": tn}

    def shared_epoch_end(self, outputs, stage):
        tp, fp, fn, tn = (torch.cat([output[name] for output in outputs]) for name in ("tp", "fp", "fn", "tn"))
        metrics = {
            f"{stage}_per_image_iou": smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro-imagewise"),
            f"{stage}_dataset_iou": smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro"),
            f"{stage}_loss": torch.stack([output["loss"] for output in outputs]).mean(),
        }
        self.log_dict(metrics, prog_bar=True)

    def training_step(self, batch, batch_idx):
        output = self.shared_step(batch)
        self.training_step_outputs.append({name: value.detach() for name, value in output.items()})
        return output

    def on_train_epoch_end(self):
        self.shared_epoch_end(self.training_step_outputs, "train")
        self.training_step_outputs.clear()

    def validation_step(self, batch, batch_idx):
        output = self.shared_step(batch)
        self.validation_step_outputs.append(output)
        return output

    def on_validation_epoch_end(self):
        self.shared_epoch_end(self.validation_step_outputs, "valid")
        self.validation_step_outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=4e-3)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=T_MAX, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


def main(callbacks, **options):
    L.seed_everything(1)
    train_dataset, valid_dataset = Pets(48, seed=0), Pets(12, seed=1)
    train_dataloader = DataLoader(train_dataset, batch_size=8, shuffle=True)
    valid_dataloader = DataLoader(valid_dataset, batch_size=8, shuffle=False)
    model = PetModel(
        "Unet", "resnet18", in_channels=3, out_classes=1, encoder_weights=None, encoder_depth=3,
        decoder_channels=(16, 8, 8),
    )  # fmt: skip
    trainer = L.Trainer(max_epochs=EPOCHS, log_every_n_steps=1, callbacks=callbacks, **options)
    trainer.fit(model, train_dataloaders=train_dataloader, val_dataloaders=valid_dataloader)
    return trainer
