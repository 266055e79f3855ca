"""Compression: receivers restore sent updates, clients store the errors, and nothing else changes."""

import copy

import numpy as np
import pytest
import torch

from lightning_fed import Federation
from lightning_fed.algorithms import FedAvg
from lightning_fed.attacks import SignFlip
from lightning_fed.compression import Float16, Quantized, TopK
from lightning_fed.messages import Broadcast, ClientUpdate, message_bytes, tensor_bytes
from lightning_fed.privacy import CentralDP, SecureSum
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps import Chain, MaxMedianNorm, MaxNorm, UniformWeights
from tests import models
from tests.backends.flower.halves import SIZES, in_process, on_flower
from tests.breadth import quick, slow
from tests.recorders import assert_same, state_of

STEPS = {"8 bits": Quantized(8), "4 bits": Quantized(4), "top": TopK(0.3), "float16": Float16()}
START = {"w": torch.linspace(-1, 2, 15).reshape(5, 3), "b": torch.tensor([0.5]), "steps": torch.tensor(3)}


def rounds(step, steps, clients=("a",)):
    """Rounds with the next step of every client; sent updates, received updates, and memories."""
    chain = Chain(FedAvg(), [step])
    memories, sent, came = {client: {} for client in clients}, [], []
    for number, moves in enumerate(steps):
        chain.start(RoundInfo(number, seed=1), START)
        for client in clients:
            state = {name: value + moves[name] if name in moves else value + 1 for name, value in START.items()}
            update = chain.on_client(ClientUpdate(client, 4, state), Broadcast(number, dict(START)), memories[client])
            sent.append(copy.deepcopy(update))
            chain.receive(update, START, lambda update, _: came.append(dict(update.state)))
    return sent, came, memories


def moves(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(START[name].shape, generator=generator) for name in ("w", "b")} for _ in range(number)]


@pytest.mark.parametrize("name", STEPS)
def test_what_is_left_out_arrives_later(name):
    """All received steps plus the stored error equal the sum of the client's steps; integers are not compressed."""
    steps = moves(7)
    _, came, memories = rounds(STEPS[name], steps)
    for entry in ("w", "b"):
        arrived = sum((state[entry] - START[entry]).double() for state in came)
        kept = memories["a"][f"step:{type(STEPS[name]).__name__}:0:{entry}"].double()
        torch.testing.assert_close(arrived + kept, sum(step[entry].double() for step in steps), rtol=1e-5, atol=1e-5)
        assert float(kept.abs().max()) > 0 or entry == "b"
    assert all(int(state["steps"]) == 4 for state in came)


@pytest.mark.parametrize("bits", quick([8, 4], [4]))
def test_rounding_is_right_in_the_mean(bits):
    step = moves(1)[0]
    drawn = [rounds(Quantized(bits), [step], clients=(client,))[1][0]["w"] - START["w"] for client in range(500)]
    scale = float(step["w"].abs().max()) / (2 ** (bits - 1) - 1)
    errors = torch.stack(drawn).double() - step["w"].double()
    assert float(errors.abs().max()) <= scale * 1.001
    assert float(errors.mean(0).abs().max()) < 5 * scale / 2 / 500**0.5


def test_the_largest_numbers_are_sent():
    step = moves(1)[0]
    sent, came, _ = rounds(TopK(0.3), [step])
    flat = step["w"].flatten().numpy()
    largest = np.sort(np.argsort(-np.abs(flat))[:5])  # 0.3 of 15, rounded up
    assert sent[0].extras["short:w"].tolist() == largest.tolist()
    expected = np.zeros_like(flat)
    expected[largest] = flat[largest]
    np.testing.assert_allclose((came[0]["w"] - START["w"]).flatten().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("step", "size"),
    [(Quantized(8), 15 + 8 + 1 + 8), (Quantized(4), 8 + 8 + 1 + 8), (Float16(), 30 + 8 + 2 + 8)],
)
def test_bytes_on_the_wire(step, size):
    sent, _, _ = rounds(step, moves(1))
    assert message_bytes(sent[0]) == size + tensor_bytes({"steps": START["steps"]})


WRAPPING = torch.tensor([0, 2**31 - 1, -(2**31), -1, *range(5)], dtype=torch.int32)
"""Positions with positive differences in int32, from 0 to a small number."""

BAD = {
    "no scale": (Quantized(8), lambda update: update.extras.clear(), "the client's compressed update of 'w'"),
    "a scale below 0": (Quantized(8), lambda update: update.extras["short:w"].neg_(), "an invalid scale"),
    "a list of scales": (
        Quantized(4), lambda update: update.extras.update({"short:w": torch.ones(3).double()}), "an invalid scale",
    ),
    "half a scale": (Float16(), lambda update: update.extras["short:w"].neg_(), "an invalid scale"),
    "positions outside": (TopK(0.3), lambda update: update.extras["short:w"].add_(99), "invalid positions"),
    "a position twice": (TopK(0.3), lambda update: update.extras["short:w"].fill_(3), "invalid positions"),
    "positions whose differences wrap around": (
        TopK(0.6), lambda update: update.extras["short:w"].copy_(WRAPPING[: len(update.extras["short:w"])]), "positions"
    ),
    "fewer positions": (
        TopK(0.3), lambda update: update.extras.update({"short:w": torch.zeros(2, dtype=torch.int32)}), "positions",
    ),
    "fewer numbers": (TopK(0.3), lambda update: update.state.update(w=torch.ones(2)), "entry 'w' has shape"),
    "numbers that are none": (TopK(0.3), lambda update: update.state["w"].fill_(torch.nan), "NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize(("step", "spoil", "reason"), BAD.values(), ids=BAD)
def test_what_cannot_be_read_leaves_its_client_out(step, spoil, reason):
    server = Server(Chain(FedAvg(), [step]))
    server.start_round(RoundInfo(0), START)
    for client in ("bad", "good"):
        broadcast = server.prepare(client)
        state = {name: value + 1 for name, value in START.items()}
        update = server.chain.on_client(ClientUpdate(client, 1, state), broadcast, {})
        if client == "bad":
            spoil(update)
        assert server.count(update)
        assert server.accept(update) == (client == "good")
    assert reason in server.report.failed["bad"]
    assert server.finish_round() is not None


@pytest.mark.parametrize(
    ("method", "steps", "reason"),
    [
        ("fedma", [Quantized()], "Expected no `Quantized` with FedMA"),
        ("fedavg", [UniformWeights(), TopK(0.1), SecureSum(1.0)], "Expected no `TopK` with `SecureSum`"),
        ("fedavg", [Quantized(), CentralDP(1.0, 1e-3, 1.0)], "Expected no `Quantized` with `CentralDP`"),
        ("fedavg", [Quantized(4), MaxNorm(0.1)], "Expected `MaxNorm` before `Quantized` in `steps`"),
        ("fedavg", [Float16(), MaxMedianNorm(2.0)], "Expected `MaxMedianNorm` before `Float16`"),
        ("fedavg", [TopK(0.1), Quantized(8)], "Expected `Quantized` before `TopK`"),
        ("fedavg", [Quantized(4), SignFlip(1)], "Expected `SignFlip` before `Quantized`"),
    ],
)
def test_what_does_not_fit_is_refused(method, steps, reason):
    with pytest.raises(ValueError, match=reason):
        Federation(method, steps=steps)


@pytest.mark.parametrize("value", [0.0, 1.1, -1.0])
def test_a_share_out_of_range(value):
    with pytest.raises(ValueError, match="Expected `share` to be in"):
        TopK(value)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize(
    ("method", "steps"),
    [
        slow(("fedavgm", [MaxNorm(0.2), Quantized(8)])),
        slow(("scaffold", [Quantized(4)])),
        ("fedper", [UniformWeights(), TopK(0.2)]),
    ],
)
def test_remote_clients_get_the_same_model(method, steps, federated_trainer, tmp_path):
    """Memories stay with the clients: three rounds in one process and on Flower give equal weights."""

    def module():
        return models.Module(models.mlp(), models.momentum)

    def federation():
        return Federation(method, clients_per_round=2, seed=1, steps=steps)

    data = models.vectors(SIZES)
    here, _ = in_process(federated_trainer, module, data, federation())
    there, _, _, _ = on_flower(tmp_path, module, data, federation)
    assert_same(state_of(there), state_of(here))
    plain, _ = in_process(federated_trainer, module, data, Federation(method, clients_per_round=2, seed=1))
    assert any(not torch.equal(value, state_of(here)[name]) for name, value in state_of(plain).items())
