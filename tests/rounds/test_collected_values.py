"""Modules without a training loss, as in anomaly detection: buffers or lists collect values."""

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.data import IID, LoaderDataModule
from tests import models
from tests.recorders import assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]

CLIENTS = models.vectors({"a": 24, "b": 8, "c": 16})
EXAMPLES = [torch.cat(parts) for parts in zip(*CLIENTS.values(), strict=True)]


def clients():
    return FederatedDataModule({name: DataLoader(TensorDataset(*data), 8) for name, data in CLIENTS.items()})


class Gaussian(L.LightningModule):
    """Frozen extractor, running mean and memory bank."""

    def __init__(self, loss=None, optimizer=False):
        super().__init__()
        torch.manual_seed(0)
        self.extractor = nn.Linear(6, 4).requires_grad_(optimizer)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("bank", torch.empty(0, 4))
        self.loss, self.has_optimizer, self.features = loss, optimizer, []

    def training_step(self, batch, batch_idx):
        self.collect(self.extractor(batch[0]).detach(), batch_idx)
        return None if self.loss is None else torch.tensor(self.loss, requires_grad=True)

    def collect(self, features, batch_idx):
        self.mean += (features.mean(0) - self.mean) / (batch_idx + 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1) if self.has_optimizer else None


class Listed(Gaussian):
    """Fills the bank after the epoch, as PatchCore does."""

    def collect(self, features, batch_idx):
        self.features.append(features)

    def on_train_epoch_end(self):
        self.bank = torch.cat(self.features)
        self.features.clear()


class Growing(Gaussian):
    def collect(self, features, batch_idx):
        self.bank = torch.cat([self.bank, features])


@pytest.mark.parametrize("loss", [None, 0.0])
def test_buffers_are_averaged_by_examples(loss, either_trainer):
    """Means weighted by examples equal the mean over all examples."""
    own = Gaussian(loss)
    trainer = either_trainer(1)
    trainer.fit(own, datamodule=clients())
    assert trainer.callback_metrics["fed/clients"] == 3
    torch.testing.assert_close(own.mean, own.extractor(EXAMPLES[0]).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "loss", "change"),
    [
        (Listed, None, "changes no parameter or buffer"),
        (Listed, 0.0, "changes no parameter or buffer"),
        (Growing, None, "changes the shape of 'bank'"),
    ],
)
def test_values_without_a_mean_are_refused_in_the_first_visit(kind, loss, change, either_trainer):
    """Otherwise all clients would fill one list."""
    own = kind(loss)
    before = state_of(own)
    remedy = rf"{kind.__name__} has no optimizer, .* the training of client 'a' {change}: register .* before `fit`"
    with pytest.raises(MisconfigurationException, match=remedy):
        either_trainer(1).fit(own, datamodule=clients())
    assert_same(before, state_of(own))


def test_a_buffer_may_reach_its_last_value(either_trainer):
    """A maximum grows in the first round only."""

    class Largest(Gaussian):
        def collect(self, features, batch_idx):
            self.mean.copy_(torch.maximum(self.mean, features.amax(0)))

    own, trainer = Largest(), either_trainer(3)
    trainer.fit(own, datamodule=clients())
    assert trainer.callback_metrics["fed/clients"] == 3
    assert bool((own.mean > 0).any())


def test_an_optimizer_needs_a_loss(federated_trainer):
    own = Gaussian(optimizer=True)
    text = r"'a': the client's training step returned no loss in 3 batches \(if training only changes buffers"
    with pytest.raises(RuntimeError, match=text):
        federated_trainer(max_rounds=1).fit(own, datamodule=clients())
    assert_same(state_of(own), state_of(Gaussian()))


@pytest.mark.parametrize("kind", [Gaussian, Listed])
def test_the_only_client_collects_as_in_a_plain_fit(kind, plain_trainer):
    ends = []
    for federation in ([], [Federation(partition=IID(1), optimizer_state="keep")]):
        own, loader = kind(), DataLoader(TensorDataset(*EXAMPLES), 8)
        plain_trainer(max_epochs=2, callbacks=federation).fit(own, datamodule=LoaderDataModule(loader))
        ends.append(state_of(own))
    assert_same(*ends)
    assert len(ends[0]["bank"]) == (len(EXAMPLES[0]) if kind is Listed else 0)
