"""DP-SGD with remote clients: the steps of one process, and accounts stored at the clients."""

import json
import logging

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("opacus")
pytest.importorskip("dp_accounting")

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed import FederatedCallback, Federation
from lightning_fed.privacy import DPSGD, Budget, SecureSum
from lightning_fed.steps import UniformWeights
from tests import models
from tests.backends.flower.halves import SIZES, in_process, on_flower
from tests.breadth import quick
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
KEY = 0x0123456789ABCDEF0123456789ABCDEF


def module():
    return models.Module(models.mlp(), models.momentum)


def accounts(folder):
    read = [json.loads(path.read_text()) for path in folder.glob("1?/dpsgd/*.json")]
    return {account["account"][0]: account["account"][2] for account in read}  # number of steps by number of examples


# steps per epoch by number of examples; the last batch of 33 examples would have one example
STEPS = {33: 2, 20: 2, 48: 3}


SUMS = [[], [UniformWeights(), SecureSum(5.0)]]


@pytest.mark.parametrize("sums", quick(SUMS, SUMS[1:]), ids=["", "secure sum"])
def test_its_steps_are_those_of_one_process(sums, federated_trainer, tmp_path, caplog):
    """With a known key, bit for bit; the accounts are equal too."""
    data, callbacks = models.vectors(SIZES), lambda: [DPSGD(1.0, 0.5, 1e-3, key_for_tests=KEY)]
    federation = lambda: Federation("fedavg", local_epochs=2, seed=3, steps=sums)  # noqa: E731
    (own,) = callbacks()
    here, trainer = in_process(federated_trainer, module, data, federation(), 2, [own])
    with caplog.at_level(logging.INFO, "lightning_fed"):
        there, server, _, _ = on_flower(tmp_path, module, data, federation, 2, callbacks)
    assert_same(state_of(there), state_of(here))
    assert accounts(tmp_path) == {samples: 2 * 2 * steps for samples, steps in STEPS.items()}
    assert accounts(tmp_path) == {counts[0]: counts[2] for counts in own.state_dict()["accounts"].values()}
    assert "dp/epsilon" in trainer.callback_metrics
    assert "dp/epsilon" not in server.callback_metrics  # unknown to the server
    epsilon = Budget(0.5, 1e-3, SIZES["bob"], 16).epsilon(8)
    assert f"client 'bob' has taken 8 steps so far, with epsilon {epsilon:.4g} at delta 0.001" in caplog.text
    assert float(trainer.callback_metrics["dp/epsilon"]) == pytest.approx(epsilon)


def test_every_visit_has_noise_of_its_own(tmp_path):
    """Repeating a round is a second release, and costs privacy again."""
    data, made = models.vectors(SIZES), lambda: [DPSGD(1.0, 0.5, 1e-3)]
    states = []
    for _ in range(2):
        states.append(state_of(on_flower(tmp_path, module, data, Federation, 1, made)[0]))
        (tmp_path / "server" / "last.ckpt").unlink()
    assert not torch.equal(states[0]["net.0.weight"], states[1]["net.0.weight"])
    assert accounts(tmp_path) == {samples: 2 * steps for samples, steps in STEPS.items()}


def test_a_client_answers_until_its_budget_is_used_up(tmp_path, caplog):
    """The smallest client answers two visits and no third, in this fit or another fit."""
    bound = (Budget(1.0, 1e-3, 20, 16).epsilon(4) + Budget(1.0, 1e-3, 20, 16).epsilon(6)) / 2
    data, made = models.vectors({"ann": 100, "bob": 20}), lambda: [DPSGD(1.0, 1.0, 1e-3, max_epsilon=bound)]
    for fit in range(2):
        caplog.clear()
        on_flower(tmp_path, module, data, Federation, 3 + fit, made)
        assert accounts(tmp_path)[20] == 4
        words = "client 'bob' is excluded: the client's visit of 2 steps would raise epsilon from"
        rounds = [round for round in range(5) if f"Round {round + 1}: {words}" in caplog.text]
        assert rounds == [2 + fit]


class EndsMeanwhile(FederatedCallback):
    """A concurrent visit of the same client with two steps ends during this visit."""

    keeps_privacy = True

    def __init__(self, folder):
        self.folder = folder

    def on_client_end(self, trainer, module, client, update):
        for path in self.folder.glob("1?/dpsgd/*.json"):
            said = json.loads(path.read_text())
            if said["account"][0] == SIZES[client]:
                said["account"][2] += 2
                path.write_text(json.dumps(said))


def test_two_visits_at_once_are_paid_for(tmp_path):
    made = lambda: [DPSGD(1.0, 0.5, 1e-3), EndsMeanwhile(tmp_path)]  # noqa: E731
    on_flower(tmp_path, module, models.vectors(SIZES), Federation, 2, made)
    assert accounts(tmp_path) == {samples: 2 * steps + 2 for samples, steps in STEPS.items()}


def test_a_large_delta_is_told_once(tmp_path, caplog):
    """Not at every visit, although a visit is a separate fit."""
    on_flower(tmp_path, module, models.vectors(SIZES), Federation, 2, lambda: [DPSGD(1.0, 0.5, 0.1)])
    assert caplog.text.count("so an example may be revealed") == 2  # once per node


def test_another_noise_needs_another_account(tmp_path, caplog):
    data = models.vectors(SIZES)
    on_flower(tmp_path, module, data, Federation, 1, lambda: [DPSGD(1.0, 0.5, 1e-3)])
    on_flower(tmp_path, module, data, Federation, 2, lambda: [DPSGD(1.0, 0.6, 1e-3)])
    for client in SIZES:
        words = f"Round 2: client {client!r} is excluded: the client's earlier steps had noise_multiplier=0.5"
        assert words in caplog.text
    assert accounts(tmp_path) == STEPS


def test_the_noise_of_an_epsilon_is_refused(tmp_path):
    """No party knows all clients' numbers of examples."""
    with pytest.raises(
        MisconfigurationException, match=r"`DPSGD` does not work yet .* `lightning_fed\.privacy\.calibrate`"
    ):
        on_flower(tmp_path, module, models.vectors(SIZES), Federation, 1, lambda: [DPSGD(1.0, None, 1e-3, epsilon=4.0)])
