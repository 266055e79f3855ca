"""The batch index in `training_step`: position in the client's epoch during a visit, position in the pass otherwise."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks.federation import find_federation

BATCH, SIZES = 4, {"a": 12, "b": 8}


class Noting(L.LightningModule):
    """Records every index, with the visiting client or `None`."""

    def __init__(self, note):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.note = note

    def training_step(self, batch, batch_idx):
        self.note((find_federation(self.trainer).current_client, batch_idx))
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_beside_visits_the_batches_of_a_pass_are_counted(federated_trainer):
    """The pass for BatchNorm statistics after a round must not continue the last visit's index."""
    clients = {client: TensorDataset(torch.rand(size, 2), torch.rand(size, 1)) for client, size in SIZES.items()}
    noted = []
    trainer = federated_trainer(max_rounds=1, batch_norm="recalibrate")
    trainer.fit(Noting(noted.append), datamodule=FederatedDataModule(clients, batch_size=BATCH))
    visits = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    assert noted == [*visits, *((None, index) for _, index in visits)]
