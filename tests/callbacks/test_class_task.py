"""Which layer makes the logits, how many classes there are and which label is void: what one training step proves."""

import lightning as L
import pytest
import segmentation_models_pytorch as smp
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import Federation
from lightning_fed.callbacks import ClassPrototypes
from lightning_fed.callbacks.training_trace import find_class_task
from lightning_fed.data import IID
from lightning_fed.modules import SampledSoftmaxHead
from tests import models
from tests.recorders import assert_same, state_of

C = 3


def numbers(count=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 6, generator=generator)


def labels(count=24):
    return torch.arange(count) % C


def images(count=4, side=32):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def masks(count=4, side=32, classes=C):
    return torch.randint(classes, (count, side, side), generator=torch.Generator().manual_seed(1))


class Base(L.LightningModule):
    """``step`` is the loss of a batch."""

    def __init__(self, step=None, **layers):
        super().__init__()
        self.step = step
        for name, layer in layers.items():
            setattr(self, name, layer)

    def training_step(self, batch, batch_idx):
        return self.step(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def body():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU())


def classifier(loss, width=C, **layers):
    """A body and a head that is not the last layer of the module."""

    def step(self, batch):
        return loss(self.zz_head(self.body(batch[0])), batch[1])

    return Base(step, zz_head=nn.Linear(8, width), body=body(), decoy=nn.Linear(8, 5), **layers)


def gathered(scores, target):
    return -scores.log_softmax(1).gather(1, target[:, None]).mean()


def indexed(scores, target):
    return -F.log_softmax(scores, 1)[torch.arange(len(target)), target].mean()


def one_hot_product(scores, target):
    return -(F.one_hot(target, C) * scores.log_softmax(-1)).sum(1).mean()


def smoothed_by_hand(scores, target):
    soft = F.one_hot(target, C) * 0.9 + 0.1 / C
    return -(soft * scores.log_softmax(-1)).sum(1).mean()


def eye(scores, target):
    return F.binary_cross_entropy_with_logits(scores, torch.eye(C)[target])


def by_logsumexp(scores, target):
    return F.nll_loss(scores - scores.logsumexp(1, keepdim=True), target)


def mixed_up(scores, target):
    return 0.3 * F.cross_entropy(scores, target) + 0.7 * F.cross_entropy(scores, target.flip(0))


def with_temperature(scores, target):
    return F.cross_entropy(scores / 0.5 + torch.zeros(C), target)


def weighted(scores, target):
    return F.cross_entropy(scores, target, weight=torch.ones(C), label_smoothing=0.1)


def void(scores, target):
    return F.cross_entropy(scores, target.where(target != 2, 11), ignore_index=11)


LOSSES = {
    "cross entropy": F.cross_entropy,
    "weights and smoothing": weighted,
    "nll": lambda scores, target: F.nll_loss(scores.log_softmax(1), target),
    "gather": gathered,
    "index": indexed,
    "one hot": one_hot_product,
    "smoothed one hot": smoothed_by_hand,
    "eye": eye,
    "logsumexp": by_logsumexp,
    "mixup": mixed_up,
    "temperature": with_temperature,
    "half labels": lambda scores, target: F.cross_entropy(scores, target.to(torch.uint8).long()),
    "focal": lambda scores, target: smp.losses.FocalLoss("multiclass")(scores[..., None], target[:, None]),
}


def task_of(federated_trainer, module, inputs=None, target=None, federation=None):
    found = []

    class Finder(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            found.append(find_class_task(trainer, pl_module, "name the layer in `layer`"))

    trainer = federated_trainer(max_rounds=1, partition=IID(2), callbacks=[Finder()])
    data = TensorDataset(*(numbers() if inputs is None else inputs,), labels() if target is None else target)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    (task,) = found
    return task


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_classes(federated_trainer, name):
    """The head is neither the last layer nor called so; the labels are those of the batch."""
    task = task_of(federated_trainer, classifier(LOSSES[name]))
    assert (task.layer, task.num_classes, task.ignore_index) == ("zz_head", C, None)
    batch = [object(), labels()]
    assert task.target(batch) is batch[1]
