"""q-FedAvg: a plain loop, equality with FedAvg, messages, and clients without a loss."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import QFFL
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.errors import BadUpdate
from lightning_fed.messages import ClientUpdate
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from tests import models
from tests.breadth import slow
from tests.chains import chain_of
from tests.recorders import Recorder, assert_same, bytes_of, state_of
from tests.references_correction import Visits, qffl_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


@pytest.mark.parametrize(("q", "lipschitz"), [(1.0, None), slow((0.5, None)), (3.0, 2.0)])
def test_a_fit_against_a_plain_loop(q, lipschitz, either_trainer):
    """Unequal clients, three of five per round, dropout, BatchNorm, momentum."""
    clients, recorder = models.vectors(), Recorder()
    visits = Visits(clients, rounds=2, cohort_size=3, seed=4, epochs=2)
    history = qffl_reference(
        models.norm_mlp(), visits, cross_entropy, models.momentum, q, 1 / 0.05 if lipschitz is None else lipschitz
    )
    trainer = either_trainer(
        max_rounds=2, clients_per_round=3, local_epochs=2, method=QFFL(q, lipschitz), seed=4, batch_norm="average",
        callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(
        models.Module(models.norm_mlp(), models.momentum),
        datamodule=FederatedDataModule(models.as_datasets(clients)),
    )
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"].double(), value.double(), rtol=1e-4, atol=1e-5), name


def test_with_q_0_it_is_fedavg(federated_trainer):
    """With dropout, BatchNorm and unequal clients: bit for bit; one more number is sent."""
    runs = []
    for method in ("fedavg", "qffl:q=0"):
        recorder, module = Recorder(), models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(max_rounds=2, clients_per_round=3, method=method, callbacks=[recorder])
        trainer.fit(module, models.as_datasets(models.vectors()))
        runs.append((state_of(module), recorder))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1].down_bytes == runs[1][1].down_bytes
    assert [up - 3 * 8 for up in runs[1][1].up_bytes] == runs[0][1].up_bytes
    assert bytes_of(runs[1][1].aggregates[0])


@pytest.mark.slow
def test_the_larger_q_the_more_alike_are_the_losses(federated_trainer):
    """Two clients with opposite optima; one client has nine times the examples."""
    clients = {"a": TensorDataset(torch.zeros(90, 1)), "b": TensorDataset(torch.ones(10, 1))}
    ends = {}
    for q in (0.0, 5.0):
        module = models.Quadratic(size=1, lr=0.1)
        module.w.data.fill_(0.3)
        trainer = federated_trainer(max_rounds=40, method=QFFL(q))
        trainer.fit(module, datamodule=FederatedDataModule(clients, batch_size=100))
        ends[q] = module.w.item()
    # Optimum of sum p_k F_k^(q+1): 0.9 w^(2q+1) = 0.1 (1 - w)^(2q+1).
    for q, end in ends.items():
        ratio = 9 ** (1 / (2 * q + 1))
        assert end == pytest.approx(1 / (1 + ratio), abs=0.02), q


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({}, "the client sent no 'qffl:loss'"),
        ({"another": torch.tensor(1.0)}, "the client sent no 'qffl:loss'"),
        ({"qffl:loss": torch.tensor(-1.0)}, "the client sent an invalid 'qffl:loss'"),
        ({"qffl:loss": torch.ones(2)}, "the client sent an invalid 'qffl:loss'"),
        ({"qffl:loss": torch.tensor(1e300, dtype=torch.float64)}, "q=2.0 is not finite"),
    ],
)
def test_bad_updates(extras, reason):
    rule = QFFL(2.0)
    rule.start(RoundInfo(0), {"w": torch.zeros(3)})
    with pytest.raises(BadUpdate, match=reason):
        rule.receive(ClientUpdate("a", 1, {"w": torch.ones(3)}, extras))


class Lost(Dataset):
    def __init__(self, tensors, served=0):
        self.tensors, self.served = tensors, served

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        self.served -= 1
        if self.served < 0:
            raise OSError("lost")
        return self.tensors[0][index], self.tensors[1][index]


def test_clients_without_a_loss_are_left_out(federated_trainer):
    """One client loses the data during the loss pass; another has a single example, so BatchNorm fails."""
    vectors = models.vectors({"a": 20, "b": 31, "c": 1})
    clients = models.as_datasets(vectors) | {"b": Lost(vectors["b"], 31 + 16)}
    trainer = federated_trainer(max_rounds=1, method="qffl")
    trainer.fit(models.Module(models.norm_mlp()), clients)
    assert set(trainer.federation.server.report.received) == {"a"}
    assert trainer.federation.server.report.failed["b"] == "the client's data raised OSError: lost"


def test_modules_it_cannot_work_with(federated_trainer):
    clients = models.as_datasets(models.vectors())
    with pytest.raises(
        MisconfigurationException, match=r"q-FedAvg calls `training_step` .* use automatic optimization"
    ):
        federated_trainer(max_rounds=1, method="qffl").fit(models.ManualModule(models.mlp()), clients)

    def two_rates(parameters):
        first, *others = list(parameters)
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1)

    with pytest.raises(MisconfigurationException, match=r"several \(\[0.1, 0.5\]\): set `lipschitz`"):
        federated_trainer(max_rounds=1, method="qffl").fit(models.Module(models.mlp(), two_rates), clients)

    def warm_up(optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
        return {"scheduler": scheduler, "interval": "step"}

    with pytest.raises(MisconfigurationException, match=r"is 0 \(a warm-up\?\): set `lipschitz`"):
        federated_trainer(max_rounds=1, method="qffl").fit(models.Module(models.mlp(), models.sgd, warm_up), clients)
    federated_trainer(max_rounds=1, method="qffl:lipschitz=5").fit(models.Module(models.mlp(), two_rates), clients)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QFFL(-1.0), "`q` to be at least 0 and finite"),
        (lambda: QFFL(1.0, 0.0), "`lipschitz` to be greater than 0 and finite"),
    ],
)
def test_options_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def round_of(losses, q=2.0):
    """Server after a round of clients with these losses; each client moves the weight to 1."""
    server = Server(chain_of(QFFL(q, lipschitz=10.0)))
    server.start_round(RoundInfo(0, [*range(len(losses))], frozenset("w")), {"w": torch.zeros(1)})
    for client, loss in enumerate(losses):
        server.sent(client, server.prepare(client))
        extras = {"qffl:loss": torch.tensor(loss).double()}
        update = ClientUpdate(client, 10, {"w": torch.ones(1)}, extras)
        assert server.count(update)
        server.accept(update)
    return server, float(server.finish_round()["w"])


HONEST = [1.0, 0.5, 2.0]


@pytest.mark.parametrize("loss", [1e6, 1e9])
def test_a_loss_far_from_the_median_excludes_the_client(loss):
    """A huge loss would dominate the average."""
    server, value = round_of([*HONEST, loss])
    assert set(server.report.failed) == {3}
    assert "far from the round's median" in server.report.failed[3]
    assert value == round_of(HONEST)[1]


def test_a_loss_that_overflows_excludes_the_client_alone():
    """`1e9 ** 40.0` raises `OverflowError` in Python, which must not count as a server error."""
    extras = {"qffl:loss": torch.tensor(1e9, dtype=torch.float64)}
    server = Server(chain_of(QFFL(40.0)))
    server.start_round(RoundInfo(0, "ab", frozenset("w")), {"w": torch.zeros(1)})
    server.sent("a", server.prepare("a"))
    update = ClientUpdate("a", 10, {"w": torch.ones(1)}, extras)
    assert server.count(update)
    assert not server.accept(update)
    assert "is not finite" in server.report.failed["a"]
    assert not server.errors


class Claims(FederatedCallback):
    """A client with another learning rate, or with a separate constant."""

    def on_client_start(self, trainer, module, client, broadcast):
        if client == "b":
            trainer.optimizers[0].param_groups[0]["lr"] *= 1e-3

    def on_client_end(self, trainer, module, client, update):
        if client == "b":
            update.extras["qffl:lipschitz"] = torch.tensor(1e9)


def test_the_constant_is_the_servers(federated_trainer):
    """The loss is the only number of a client: another rate or constant must not move the model."""
    moved = {}
    for callbacks in ([], [Claims()]):
        module = models.Quadratic(size=1, lr=0.1)
        trainer = federated_trainer(max_rounds=1, method=QFFL(1.0), callbacks=callbacks)
        clients = {"a": TensorDataset(torch.ones(10, 1)), "b": TensorDataset(torch.zeros(10, 1))}
        trainer.fit(module, datamodule=FederatedDataModule(clients, batch_size=100))
        moved[len(callbacks)] = module.w.item()
        assert not trainer.federation.server.report.failed
    assert moved[1] == pytest.approx(moved[0], rel=1e-3)


@pytest.mark.parametrize("q", [0.1, 0.5, 2.0])
def test_a_loss_of_0_does_not_hold_the_others_back(q):
    """For q < 1 the slope at 0 is steep: 5e4 at q = 0.5 would stop the model."""
    _, without = round_of(HONEST, q)
    server, value = round_of([*HONEST, 0.0], q)
    assert server.report.failed == {}
    assert value > without / 30
