"""Federated callbacks without a Trainer."""

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed import Federation
from lightning_fed.callbacks import ClientEvaluation, ProximalTerm


def set_up(fabric, net, optimizer):
    fabric.setup(net, optimizer)


def set_up_apart(fabric, net, optimizer):
    net, optimizer = fabric.setup_module(net), fabric.setup_optimizers(optimizer)
    fabric.backward(net(torch.ones(1, 2)).sum())
    optimizer.step()


@pytest.mark.parametrize("train", [set_up, set_up_apart])
@pytest.mark.parametrize("make", [Federation, ClientEvaluation, lambda: ProximalTerm(0.1)])
def test_fabric_is_refused(make, train):
    """Without hooks the model would train centrally."""
    fabric = L.Fabric(accelerator="cpu", devices=1, callbacks=[make()])
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(MisconfigurationException, match=r"in the callbacks of a `Trainer`.*FederatedTrainer"):
        train(fabric, net, optimizer)
