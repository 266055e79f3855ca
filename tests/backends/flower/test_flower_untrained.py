"""Untrained entries between a server and remote clients."""

import json

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

pytest.importorskip("flwr")

from lightning_fed import Federation
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.transport import from_records, to_records
from lightning_fed.backends.wire.packets import Packet
from tests import models
from tests.backends.flower.halves import OPTIONS, SIZES, clients_of, in_process, on_flower
from tests.breadth import slow
from tests.recorders import Recorder, assert_same, state_of
from tests.rounds.test_untrained_entries import (
    ADAPTERS,
    Adapted,
    FillsThreshold,
    Following,
    Switched,
    WithThreshold,
    bytes_of,
    logged,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Found .* module"),
]

DATA = models.vectors(SIZES)


def federation():
    return Federation(clients_per_round=2, seed=3)


def both(federated_trainer, folder, make_module, rounds, **options):
    here, there = Recorder(), Recorder()
    module, _ = in_process(federated_trainer, make_module, DATA, federation(), rounds, [here])
    remote, _, transport, grid = on_flower(
        folder, make_module, DATA, federation, rounds, server_callbacks=[there], limit=60, **options
    )
    assert_same(state_of(remote), state_of(module))
    assert transport.sent == sum(logged(there, "down")), "the tensors of the packets are what is counted"
    return here, there, grid


@pytest.mark.parametrize("make_module", [slow(Adapted), slow(Following), Switched])
def test_the_same_travels_as_in_one_process(make_module, federated_trainer, tmp_path):
    here, there, _ = both(federated_trainer, tmp_path, make_module, rounds=5)
    assert logged(there, "up") == logged(here, "up")
    assert logged(there, "down") == logged(here, "down")
    if make_module is Adapted:
        assert logged(there, "up") == logged(there, "down") == [2 * bytes_of(Adapted(), *ADAPTERS)] * 5


def asked_again(grid):
    visits = [json.loads(from_records(message.content).text) for _, message in grid.sent]
    rounds = [
        (visit["header"]["visit"]["round"], visit["header"]["visit"]["client"])
        for visit in visits
        if visit["kind"] == "train"
    ]
    return sorted(pair for pair in set(rounds) if rounds.count(pair) > 1)


@pytest.mark.parametrize("keeps_process", [slow(True), False])
def test_a_server_with_other_weights_sends_them_once(keeps_process, federated_trainer, tmp_path):
    """Also to nodes with a new process per message: received entries are stored in the node's folder."""

    class Maker:
        """Gives the server's module other weights than the clients' modules."""

        def __init__(self):
            self.is_server = True

        def __call__(self):
            module = Adapted()
            if self.is_server:
                with torch.no_grad():
                    module.base[0].weight.mul_(2)
            self.is_server = False
            return module

    def pretrained():
        return Maker()()

    grids = []

    def change(node, message, content):
        if not keeps_process:
            fresh = client_app(federation(), Adapted, clients_of(DATA), OPTIONS, store=tmp_path / f"{node}")
            grids[0].apps[node].runner = fresh.runner
        return [content]

    here, there = Recorder(), Recorder()
    module, _ = in_process(federated_trainer, pretrained, DATA, federation(), 3, [here])
    remote, _, transport, grid = on_flower(
        tmp_path, Maker(), DATA, federation, 3, server_callbacks=[there], limit=60, change=change, grids=grids
    )
    assert_same(state_of(remote), state_of(module))
    adapters, base = bytes_of(remote, *ADAPTERS), bytes_of(remote, "base.")
    nodes = {"ann": 11, "cid": 11, "bob": 12}
    had, expected = set(), []
    for number in range(3):
        total = 0
        asked = [visit.client for visit in here.round(number)]
        # all clients are asked before the first answer
        lacking = [client for client in asked if nodes[client] not in had]
        for client in asked:
            total += adapters + (adapters + base if client in lacking else 0)
        had |= {nodes[client] for client in asked}
        expected.append(total)
    assert logged(there, "down") == expected
    assert transport.sent == sum(expected)
    assert logged(there, "up") == [2 * adapters] * 3
    first = {node: number for number in reversed(range(3)) for node in {nodes[v.client] for v in here.round(number)}}
    assert asked_again(grid) == sorted(
        (first[nodes[visit.client]], visit.client) for visit in here.visits if visit.round == first[nodes[visit.client]]
    )


def test_an_update_that_leaves_out_what_it_does_not_say(federated_trainer, tmp_path):

    def change(node, message, content):
        packet = from_records(content)
        said = json.loads(packet.text)
        if said["kind"] == "update" and said["header"]["client"] == "bob":
            said["header"]["unsent"] += 1
        return [to_records(Packet(json.dumps(said), packet.data))]

    _, trainer, _, _ = on_flower(tmp_path, Adapted, DATA, lambda: Federation(seed=3), 1, change=change, limit=60)
    assert trainer.callback_metrics["fed/clients"] == 2
    assert trainer.callback_metrics["fed/failed"] == 1


def test_a_type_that_cannot_be_kept(federated_trainer, tmp_path):
    """A client that cannot store the entry still trains, and receives the entry again."""

    class Complex(Following):
        def __init__(self):
            super().__init__()
            self.register_buffer("phases", torch.ones(2, dtype=torch.complex128))

    both(federated_trainer, tmp_path, Complex, rounds=3)


def test_buffers_that_are_not_finite(federated_trainer, tmp_path):
    """The values stay on their side, even if visits write into the buffers or a node's process lives on."""
    here, there = Recorder(), Recorder()
    module, _ = in_process(federated_trainer, FillsThreshold, DATA, federation(), 4, [here])
    remote, _, _, _ = on_flower(tmp_path, FillsThreshold, DATA, federation, 4, server_callbacks=[there], limit=60)
    finite = state_of(module).keys() - {"threshold", "mask"}
    assert_same(state_of(remote), state_of(module), finite)
    assert remote.threshold.isnan()
    assert logged(there, "up") == logged(here, "up")
    assert [values["fed/clients"] for values in there.logged] == [2] * 4


def test_a_server_that_gives_them_values_is_told(tmp_path):
    """Clients lack these values and would fail in every later round."""
    validation = DataLoader(models.as_datasets(DATA)["ann"], batch_size=8)
    with pytest.raises(MisconfigurationException, match=r"changed \['threshold'\]\. Add these buffers to `personal`"):
        on_flower(tmp_path / "a", WithThreshold, DATA, federation, 3, val=validation, limit=60)

    def personal():
        return Federation(clients_per_round=2, seed=3, personal=["threshold"])

    there = Recorder()
    on_flower(tmp_path / "b", WithThreshold, DATA, personal, 3, val=validation, limit=60, server_callbacks=[there])
    assert [values["fed/clients"] for values in there.logged] == [2] * 3
