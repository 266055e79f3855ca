"""Populations: a fixed order, lazily built data, generators seeded as in Lightning."""

import random
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lightning_fed.backends.vectorized.group_loader import ClientGenerators
from lightning_fed.data.dataset_clients import ClientSource, DatasetClients
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.data.loader_clients import LoaderClients
from lightning_fed.data.population import LazyClients, batch_length, client_keys, seed_everything, seeded_generators

DATASET = TensorDataset(torch.zeros(4, 1))


class Built:
    def __init__(self):
        self.clients = []

    def __call__(self, client):
        self.clients.append(client)
        return TensorDataset(torch.full((4, 1), float(client)))


# --- Huge populations -------------------------------------------------------------------------------------------------


def test_a_lazy_mapping_builds_what_is_looked_up_and_nothing_else():
    build = Built()
    clients = LazyClients(range(10**12), build)
    assert len(clients) == 10**12
    assert 10**12 - 1 in clients
    assert 10**12 not in clients
    assert next(iter(clients)) == 0
    assert build.clients == []
    assert clients[10**11][2][0] == 10**11
    assert build.clients == [10**11]


def test_a_lazy_mapping_is_a_mapping():
    clients = LazyClients(("a", "b"), str.upper)
    assert dict(clients) == {"a": "A", "b": "B"}
    assert clients.get("c") is None
    with pytest.raises(KeyError, match="'c'"):
        clients["c"]


def test_the_keys_of_a_lazy_mapping_are_not_listed():
    keys = range(10**12)
    assert client_keys(LazyClients(keys, Built())) is keys


@pytest.mark.parametrize("keys", [["a", "c", "b", "B"], [10, 9, -1], [3, "3", 20, "20", "x"]])
def test_the_order_in_which_clients_are_given_does_not_matter(keys):
    datasets = {key: TensorDataset(torch.zeros(2)) for key in keys}
    turned = dict(reversed(datasets.items()))
    for kind in (LoaderClients, lambda clients: DatasetClients(ClientSource(clients), 2)):
        assert kind(datasets).clients == kind(turned).clients
        assert sorted(kind(datasets).clients, key=repr) == sorted(keys, key=repr)
    for alike in (str, int):
        same = [key for key in kind(datasets).clients if isinstance(key, alike)]
        assert same == sorted(same)


@pytest.mark.parametrize("kind", [LoaderClients, lambda clients: DatasetClients(ClientSource(clients), 2)])
def test_a_population_of_nobody(kind):
    with pytest.raises(ValueError, match="at least one client, but got none"):
        kind({})


# --- Random numbers ---------------------------------------------------------------------------------------------------


def draws():
    return random.random(), np.random.rand(), torch.rand(3).tolist()  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_seeding_is_lightnings(seed):
    L.seed_everything(seed, verbose=False)
    expected = draws()
    seed_everything(seed)
    assert draws() == expected


def test_what_is_drawn_aside_leaves_no_trace():
    seed_everything(3)
    expected = draws()
    seed_everything(3)

    def draw_aside():
        with seeded_generators():
            seed_everything(7)
            assert draws() != expected
            raise KeyError

    with pytest.raises(KeyError):
        draw_aside()
    assert draws() == expected


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_the_generators_of_other_devices(kind, monkeypatch):
    """Simulated, as no test machine has these devices. Seeds, restores and switches generators per client."""
    device = FakeDevice(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", {torch.device(kind): device.module}.get)
    seed_everything(3)
    expected = [device.draw(), device.draw()]
    seed_everything(3)
    with seeded_generators(seed=8):
        of_eight = [device.draw(), device.draw()]
    assert [device.draw(), device.draw()] == expected
    numbers, drawn = ClientGenerators([3, 8]), []
    for client in (0, 1, 0, 1):
        numbers.switch_to(client)
        drawn.append(device.draw())
    assert drawn == [expected[0], of_eight[0], expected[1], of_eight[1]]
    device.is_used = kind == "mps"  # whose module has no `is_used`
    before = device.state
    seed_everything(4)
    assert (device.state == before) == (kind == "xpu")


class FakeDevice:
    """A device with a generator, and functions as in ``torch.mps`` or ``torch.xpu``."""

    def __init__(self, kind):
        self.state, self.is_used = None, True
        if kind == "mps":
            self.module = SimpleNamespace(get_rng_state=self.get, set_rng_state=self.set, manual_seed=self.set)
        else:
            missing = self.set  # only for the current device
            self.module = SimpleNamespace(
                is_initialized=lambda: self.is_used, get_rng_state=missing, set_rng_state=missing, manual_seed=missing,
                get_rng_state_all=lambda: [self.get()], set_rng_state_all=lambda states: self.set(*states),
                manual_seed_all=self.set,
            )  # fmt: skip

    def get(self):
        return self.state

    def set(self, state):
        self.state = state

    def draw(self):
        self.state = (7 * self.state + 1) % 1000
        return self.state


@pytest.mark.filterwarnings("ignore:No seed found")  # warning of some Lightning versions
def test_seeding_leaves_no_seed_for_others(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    seed_everything(3)
    assert L.seed_everything(verbose=False) == 0  # Lightning's default seed


# --- Batch lengths ----------------------------------------------------------------------------------------------------


@dataclass
class Scan:
    names: list
    image: torch.Tensor


class Pair(NamedTuple):
    name: str
    image: torch.Tensor


BATCHES = {
    "tensor": torch.zeros(3, 2),
    "array": np.zeros((3, 2)),
    "images and classes": [torch.zeros(3, 1, 2, 2), torch.zeros(3)],
    "tuple": (torch.zeros(3), torch.zeros(7)),
    "dictionary": {"image": torch.zeros(3, 2), "mask": torch.zeros(3)},
    "nested": [{"image": (torch.zeros(3, 2), torch.zeros(1))}, torch.zeros(5)],
    "names first": {"name": ["a", "b", "c"], "place": 7, "image": torch.zeros(3, 2)},
    "a number first": [torch.tensor(7), torch.zeros(3)],
    "dataclass": Scan([], torch.zeros(3, 2)),
    "named tuple": Pair("a", torch.zeros(3, 2)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_length_of_a_batch_is_that_of_its_first_tensor(batch):
    assert batch_length(batch) == 3


@pytest.mark.parametrize(
    ("batch", "kind"), [("text", "str"), (3, "int"), ([["text"]], "list"), ({"a": []}, "dict"), (None, "NoneType")]
)
def test_a_batch_without_tensors(batch, kind):
    with pytest.raises(
        ValueError,
        match=f"Expected a tensor in the batch, to count examples, but got {kind}",
    ):
        batch_length(batch)


# --- Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [("ann", 1), 1.5, None, b"ann"])
def test_keys_that_no_checkpoint_can_name(key):
    for clients in ({"bob": DATASET, key: DATASET}, LazyClients(["bob", key], lambda client: DATASET)):
        with pytest.raises(TypeError, match="keys of type str or int.*but got " + re.escape(repr(key))):
            FederatedDataModule(clients).population()


def test_numpys_keys_become_pythons():
    keys = client_keys({np.int64(4): 1, np.int32(3): 2, np.str_("a"): 3})
    assert keys == [3, 4, "a"]
    assert [type(key) for key in keys[:2]] == [int, int]


def test_pooled_clients_have_their_own_examples():
    """Clients that are parts of one data set are pooled as parts, so no example repeats."""
    whole = TensorDataset(torch.arange(10))
    parts = {"a": Subset(whole, [0, 1]), "b": Subset(Subset(whole, [2, 5, 7, 9]), [1, 3]), "c": Subset(whole, [4])}
    loader = FederatedDataModule(parts, batch_size=3).train_dataloader()
    assert sorted(int(number) for (batch,) in loader for number in batch) == [0, 1, 4, 5, 9]
