"""Distillation: a student learns from a teacher without gradients; the module has no `forward`."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def network(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 4))


class Distiller(L.LightningModule):
    def __init__(self, temperature=2.0):
        super().__init__()
        self.student, self.teacher = network(8), network(32)  # the teacher's parameters still have `requires_grad`
        self.temperature = temperature

    def loss_of(self, batch):
        inputs, labels = batch
        with torch.no_grad():
            taught = self.teacher(inputs)
        logits = self.student(inputs)
        parts = (values / self.temperature for values in (logits, taught))
        soft = F.kl_div(*(F.log_softmax(values, 1) for values in parts), reduction="batchmean", log_target=True)
        return F.cross_entropy(logits, labels) + self.temperature**2 * soft

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=0.01)


def main(callbacks, **options):
    L.seed_everything(2)
    inputs = torch.randn(240, 10)
    labels = inputs[:, :4].argmax(1)
    train = DataLoader(TensorDataset(inputs[:180], labels[:180]), batch_size=12, shuffle=True)
    val = DataLoader(TensorDataset(inputs[180:], labels[180:]), batch_size=30)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(Distiller(), train, val)
    return trainer
