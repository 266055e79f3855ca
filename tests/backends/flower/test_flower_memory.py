"""Copies of a large model on both sides, during training and afterwards."""

import gc

import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

from lightning_fed import FederatedCallback, Federation
from lightning_fed.backends.wire.packets import Packet
from tests import models
from tests.backends.flower.halves import on_flower

SHAPE = 2**17, 6  # a layer's weights: 3 MiB


def copies():
    """Counts tensors with separate memory, and packets."""
    gc.collect()
    objects = gc.get_objects()  # some torch objects warn on access to the class
    tensors = [found for found in objects if issubclass(type(found), torch.Tensor)]
    tensors = {found.data_ptr() for found in tensors if found.shape == SHAPE}
    packets = {id(found.data) for found in objects if type(found) is Packet and len(found.data) > 2**21}
    return len(tensors), len(packets)


class Counts(FederatedCallback):
    def __init__(self, counts):
        self.counts = counts

    def on_client_end(self, trainer, module, client, update):
        self.counts.append(copies())


def module():
    return models.Module(nn.Sequential(nn.Linear(6, SHAPE[0]), nn.Linear(SHAPE[0], models.CLASSES)))


@pytest.fixture
def no_earlier_objects():
    """Hides all existing objects from the garbage collector: a search takes a third of a second otherwise."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# No step validates.
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.usefixtures("no_earlier_objects")
def test_the_copies_of_a_large_model(tmp_path):
    """Client: module, gradients, message, start of the round, update. Server: module, start, sums."""
    counts, before = [], copies()
    on_flower(
        tmp_path, module, models.vectors({"ann": 4, "bob": 4}), lambda: Federation(seed=1), 2,
        callbacks=lambda: [Counts(counts)],
    )  # fmt: skip
    client, server, sums, module_of_another_node = 5, 2, 1, 1
    expected = [client + server, *[client + server + module_of_another_node] * 3]
    expected[1::2] = [client + server + module_of_another_node + sums] * 2
    assert [tensors - before[0] for tensors, _ in counts] == expected
    assert [packets - before[1] for _, packets in counts] == [1] * 4
