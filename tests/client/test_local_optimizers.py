"""Copies of third-party schedulers."""

import itertools
import threading
from collections import Counter, OrderedDict, deque

import lightning as L
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, StepLR

from lightning_fed import Federation
from lightning_fed.data import IID, LoaderDataModule
from lightning_fed.numerics.trees import copy_tree
from tests import models
from tests.breadth import quick

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*models.vectors({"a": 40})["a"]), 4)


class Forwards(LRScheduler):
    """Warms up for two steps, and forwards attributes to another scheduler."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def __getattr__(self, name):
        return getattr(self.after, name)

    def get_lr(self):
        if self.last_epoch < 2:
            return [base * (self.last_epoch + 1) / 4 for base in self.base_lrs]
        return self.after.get_last_lr()

    def step(self, epoch=None):
        if self.last_epoch >= 1:
            self.after.step()
        super().step()


class Wraps:
    def __init__(self, optimizer):
        self.optimizer, self.inner = optimizer, ExponentialLR(optimizer, 0.8)
        self.lock, self.circle = threading.Lock(), self

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, *args):
        self.inner.step()

    def state_dict(self):
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state):
        vars(self).update(state)


SCHEDULERS = {
    "warm-up before steps": lambda optimizer: Forwards(optimizer, StepLR(optimizer, 2, 0.5)),
    "warm-up before a cosine": lambda optimizer: Forwards(optimizer, CosineAnnealingLR(optimizer, 9)),
    "warm-up before warm-up": lambda optimizer: Forwards(optimizer, Forwards(optimizer, ExponentialLR(optimizer, 0.9))),
    "wrapper": Wraps,
}


class Watched(models.Module):
    def __init__(self, make, interval):
        super().__init__(models.mlp())
        self.make, self.interval, self.rates = make, interval, []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": self.interval}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def on_train_batch_start(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("kind", "interval"),
    quick(
        itertools.product(SCHEDULERS, ["epoch", "step"]),
        [("warm-up before steps", "epoch"), ("wrapper", "step")],
    ),
)
def test_schedulers_that_forward_attributes(kind, interval, plain_trainer):
    """One client has a plain fit's learning rates. Two clients start each visit from the same rates."""
    rates = {}
    for clients in (0, 1, 2):
        module = Watched(SCHEDULERS[kind], interval)
        callbacks = [Federation(partition=IID(clients))] if clients else []
        plain_trainer(max_epochs=6, callbacks=callbacks).fit(module, datamodule=LoaderDataModule(LOADER))
        rates[clients] = module.rates
    assert rates[1] == rates[0]
    assert len(set(rates[0])) > 2
    for start in range(0, 60, 10):
        assert rates[2][start : start + 5] == rates[2][start + 5 : start + 10]


def test_a_copy_has_separate_values_and_shared_functions():
    def function():
        return None

    class Holder:
        pass

    holder = Holder()
    holder.tensor, holder.itself, holder.function = torch.ones(2), holder, function
    state = {
        "tensor": torch.arange(3.0), "array": np.zeros(2), "nested": OrderedDict(a=[1, (torch.ones(1), {2})]),
        "counter": Counter("aab"), "queue": deque([1.0], maxlen=1), "holder": holder, "module": L.LightningModule(),
        "function": function, "generator": torch.Generator().manual_seed(3),
    }  # fmt: skip
    state["nested"]["same"] = state["tensor"]
    copied = copy_tree(state)
    assert torch.rand(1, generator=copied["generator"]) == torch.rand(1, generator=state["generator"])
    state["tensor"].add_(1)
    state["array"] += 1
    state["nested"]["a"][1][0].add_(1)
    state["counter"]["a"] += 5
    state["queue"].append(2.0)
    holder.tensor.add_(1)
    assert copied["tensor"].tolist() == [0, 1, 2]
    assert copied["nested"]["same"] is copied["tensor"]
    assert copied["array"].tolist() == [0, 0]
    assert copied["nested"]["a"][1] == (torch.ones(1), {2})
    assert copied["counter"] == Counter("aab")
    assert copied["queue"] == deque([1.0])
    assert copied["queue"].maxlen == 1
    assert copied["holder"].tensor.tolist() == [1, 1]
    assert copied["holder"].itself is copied["holder"]
    assert copied["module"] is state["module"]
    assert copied["function"] is copied["holder"].function is function
