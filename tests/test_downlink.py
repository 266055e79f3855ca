"""Compressed downlinks: all clients train the same model, and counted bytes equal sent bytes."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed import FederatedCallback, Federation
from lightning_fed.algorithms import FedAvg, FedSS, ServerOptimizer
from lightning_fed.compression import VERSION, Downlink, Float16, Quantized, TopK
from lightning_fed.messages import ClientUpdate, message_bytes, sent_entries
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps import Chain
from tests import models
from tests.backends.flower.halves import SIZES, head_module, in_process, is_lost, on_flower
from tests.breadth import quick
from tests.recorders import assert_same, state_of
from tests.references_compression import double_squeeze

SIZE = 40
STEPS = {"8 bits": Quantized(8), "4 bits": Quantized(4), "top": TopK(0.1), "float16": Float16()}


def train(server, cohorts, clients, start):
    """Rounds on a server; returns models, and messages by round and client."""
    step = server.chain.steps[-1]
    states, messages = [start], []
    for number, cohort in enumerate(cohorts):
        server.start_round(RoundInfo(number, seed=1), states[-1])
        messages.append({})
        for client in cohort:
            broadcast = server.prepare(client)
            server.sent(client, broadcast)
            messages[-1][client] = broadcast
            trained = {name: clients[client](value) for name, value in broadcast.state.items()}
            update = ClientUpdate(client, 1, trained)
            assert server.count(update)
            assert server.accept(update)
        states.append(server.finish_round())
        step.record_clients(server.report.received)
    return states, messages


def pulls(names, seed=0):
    """Each client moves half way to a client-specific point."""
    generator = torch.Generator().manual_seed(seed)
    points = {name: torch.randn(SIZE, generator=generator, dtype=torch.float64) for name in names}
    return {name: lambda value, point=points[name]: value + 0.5 * (point.to(value) - value) for name in names}


def test_the_model_is_what_the_paper_makes_of_it():
    """Messages contain the codes of all missed rounds while shorter than the model."""
    clients = pulls("abc")
    cohorts = ["ab", "bc", "ab", "a", "a", "a", "a", "ac", "b"]
    server = Server(Chain(FedAvg(), [Downlink(TopK(0.1))]))
    states, messages = train(server, cohorts, clients, {"w": torch.zeros(SIZE, dtype=torch.float64)})
    in_numpy = {name: lambda model, pull=pull: pull(torch.from_numpy(model)).numpy() for name, pull in clients.items()}
    expected, behind = double_squeeze(np.zeros(SIZE), in_numpy, cohorts, 0.1)
    for state, model in zip(states, expected, strict=True):
        np.testing.assert_allclose(state["w"].numpy(), model, rtol=1e-6, atol=1e-7)
    whole, short = SIZE * 8, 4 * (4 + 4)  # float32 numbers, and their positions
    for sent, missed in zip(messages, behind, strict=True):
        for client, broadcast in sent.items():
            is_short = missed[client] is not None and missed[client] * short < whole
            assert message_bytes(broadcast) == 8 + (missed[client] * short if is_short else whole), (client, missed)
    assert behind[-1]["b"] == 6  # more missed rounds than codes
    assert max(missed for sent in behind for missed in sent.values() if missed) * short < whole


@pytest.mark.parametrize("name", STEPS)
def test_a_client_restores_the_model_to_the_bit(name):
    clients, kept = pulls("ab"), {}
    server = Server(Chain(FedAvg(), [Downlink(STEPS[name])]))
    _, messages = train(server, ["ab", "a", "a", "ab"], clients, {"w": torch.linspace(-1, 1, SIZE)})
    step = copy.deepcopy(Chain(FedAvg(), [Downlink(STEPS[name])])).steps[0]  # on another machine
    for sent in messages:
        for client, broadcast in sent.items():
            held = kept.get(client, {})
            state = sent_entries(broadcast) | step.restore(held, broadcast.extras)
            assert torch.equal(state["w"], broadcast.state["w"])
            kept[client] = state | {VERSION: broadcast.extras[VERSION]}
    assert step.restore({}, messages[-1]["b"].extras) == {}
    ahead = {"w": torch.ones(SIZE), VERSION: messages[-1]["b"].extras[VERSION]}
    assert step.restore(ahead, messages[-1]["b"].extras) == {}


@pytest.mark.parametrize(("step", "whole"), [(Quantized(8), {"b"}), (TopK(0.5), {"w", "b"})], ids=["short", "long"])
def test_an_entry_that_something_else_has_changed_travels_as_it_is(step, whole):
    """Every entry is sent uncompressed if the code is not shorter than the model."""
    server = Server(Chain(FedAvg(), [Downlink(step)]))
    start = {name: torch.linspace(-1, 1, SIZE) for name in ("w", "b")}
    states, _ = train(server, ["a"], pulls("a"), start)
    state = states[-1] | {"b": states[-1]["b"] + 1}
    _, (sent,) = train(server, ["ab"], pulls("ab"), state)
    broadcast = sent["a"]
    assert sent_entries(broadcast).keys() == whole
    assert message_bytes(broadcast) == 8 + SIZE * 4 * len(whole) + (SIZE + 8) * (2 - len(whole))


def test_a_round_that_comes_to_nothing_changes_nothing():
    """The step's state is restored, so the next round's messages are correct."""
    chain = Chain(FedAvg(), [Downlink(Quantized(8))])
    server, clients = Server(chain), pulls("ab")
    states, _ = train(server, ["ab", "a"], clients, {"w": torch.linspace(-1, 1, SIZE)})
    before = copy.deepcopy(chain.state_dict())
    server.start_round(RoundInfo(2, seed=1), states[-1])
    server.prepare("a")
    assert server.accept(ClientUpdate("a", 1, {"w": states[-1]["w"] + 1}))
    server.finish_round()
    assert not torch.equal(
        chain.state_dict()["steps"]["Downlink:0"]["errors"]["w"], before["steps"]["Downlink:0"]["errors"]["w"]
    )
    server.abandon_round()
    assert repr(chain.state_dict()) == repr(before)


@pytest.mark.parametrize(
    ("method", "steps", "reason"),
    [
        ("fedma", [Downlink(Quantized())], "Expected no `Downlink` with FedMA"),
        ("fesem", [Downlink(Quantized())], "Expected no `Downlink` with FeSEM"),
        (
            "fedavg",
            [Downlink(Quantized()), ServerOptimizer(torch.optim.SGD)],
            "Expected `Downlink` after `ServerOptimizer`",
        ),
    ],
)
def test_what_does_not_fit_is_refused(method, steps, reason):
    with pytest.raises(ValueError, match=reason):
        Federation(method, steps=steps)


def adapters_module():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 3))
    net[0].requires_grad_(False)
    return models.Module(net, models.momentum)


def plain_module():
    return models.Module(models.mlp(), models.momentum)


FITS = {
    "fedavgm": (plain_module, lambda: ("fedavgm", [Quantized(8)])),
    "scaffold": (plain_module, lambda: ("scaffold", [])),
    "rows": (head_module, lambda: (FedSS(num_negatives=3), [TopK(0.2)])),
    "adapters": (adapters_module, lambda: ("fedavg", [Float16()])),
}


class Replaces(FederatedCallback):
    def on_server_send(self, trainer, module, client, broadcast):
        if client == "bob" and trainer.current_epoch:
            broadcast.state["net.0.weight"] = broadcast.state["net.0.weight"] / 2


def down_bytes(trainer):
    return int(trainer.callback_metrics["comm/total_down_bytes"])


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("name", quick(FITS, FITS.keys() - {"adapters", "scaffold"}))
def test_remote_clients_get_the_same_model_with_the_same_bytes(name, federated_trainer, tmp_path):
    """A node that lost the model receives the whole model in the same round."""
    module, method = FITS[name]

    def federation(*down):
        rule, steps = method()
        return Federation(rule, seed=1, steps=[*steps, *down])

    def short():
        return federation(Downlink(Quantized(8)))

    def lose(node, message, content):
        if is_lost(message, content):
            (held,) = tmp_path.glob(f"lost/{node}/*/held.safetensors")
            held.write_bytes(b"")
        return [content]

    data = models.vectors(SIZES)
    here, trainer = in_process(federated_trainer, module, data, short())
    _, plain = in_process(federated_trainer, module, data, federation())
    there, remote, _, _ = on_flower(tmp_path / "whole", module, data, short)
    assert_same(state_of(there), state_of(here))
    assert down_bytes(trainer) == down_bytes(remote) < down_bytes(plain)
    there, remote, _, _ = on_flower(tmp_path / "lost", module, data, short, change=lose)
    assert_same(state_of(there), state_of(here))
    assert down_bytes(trainer) < down_bytes(remote)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_client_gets_what_callbacks_make_of_its_message(federated_trainer, tmp_path):
    def short():
        return Federation(seed=1, steps=[Downlink(Quantized(8))])

    data = models.vectors(SIZES)
    here, trainer = in_process(federated_trainer, plain_module, data, short(), callbacks=[Replaces()])
    there, remote, _, _ = on_flower(tmp_path, plain_module, data, short, server_callbacks=[Replaces()])
    assert_same(state_of(there), state_of(here))
    assert down_bytes(trainer) == down_bytes(remote)
