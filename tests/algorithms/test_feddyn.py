"""FedDyn: a plain loop, messages, and convergence to the federation's optimum."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedDyn
from lightning_fed.algorithms.channels import ChannelCallback
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.messages import ClientUpdate
from lightning_fed.rule import RoundInfo
from tests import models
from tests.breadth import quick
from tests.recorders import Recorder, bytes_of
from tests.references_correction import Visits, feddyn_reference
from tests.test_invariants import held_bytes

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


@pytest.mark.parametrize("optimizer", quick([models.sgd, models.momentum, models.adam], [models.momentum]))
def test_a_fit_against_a_plain_loop(optimizer, either_trainer):
    clients, recorder = models.vectors({"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}), Recorder()
    visits = Visits(clients, rounds=3, cohort_size=3, seed=4, batch_size=16, epochs=2)
    history = feddyn_reference(models.mlp(), visits, cross_entropy, optimizer, alpha=0.1)
    trainer = either_trainer(
        max_rounds=3, clients_per_round=3, local_epochs=2, method=FedDyn(0.1), seed=4, callbacks=[recorder]
    )
    data = FederatedDataModule(models.as_datasets(clients), batch_size=16)
    trainer.fit(models.Module(models.mlp(), optimizer), datamodule=data)
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"], value, rtol=1e-4, atol=1e-5), name


def test_its_fixed_point_is_the_optimum_of_the_federation(federated_trainer):
    """Quadratics a/2 (w - x)^2 with unequal curvature: FedAvg with many local steps misses the optimum."""

    class Curved(models.Quadratic):
        def training_step(self, batch, batch_idx):
            return 0.5 * (batch[1] * (self.w - batch[0]).square()).mean()

    curvatures, optima = (1.0, 4.0), (0.0, 3.0)
    clients = {
        name: TensorDataset(torch.full((1, 1), x), torch.full((1, 1), a))
        for name, a, x in zip("ab", curvatures, optima, strict=True)
    }
    optimum = sum(a * x for a, x in zip(curvatures, optima, strict=True)) / sum(curvatures)
    ends = {}
    for method, rounds in (("fairavg", 6), ("feddyn:alpha=1.0", 12)):
        module = Curved(size=1, lr=0.1)
        federated_trainer(max_rounds=rounds, local_steps=12, method=method).fit(module, clients)
        ends[method] = module.w.item()
    assert ends["feddyn:alpha=1.0"] == pytest.approx(optimum, abs=0.02)
    assert abs(ends["fairavg"] - optimum) > 0.2


def test_what_travels_and_what_stays(federated_trainer):
    """Only the model is sent; a client stores a regulariser for the shared trained parameters."""
    recorder, module = Recorder(), models.Module(models.BaseAndHead(), models.momentum)
    trainer = federated_trainer(
        max_rounds=2, method="feddyn", personal=["net.head.*"], batch_norm="average", callbacks=[recorder]
    )
    trainer.fit(module, models.as_datasets(models.vectors()))
    model = 5 * bytes_of(recorder.aggregates[0])
    assert recorder.down_bytes == recorder.up_bytes == [model, model]
    parameters = {name for name, _ in module.named_parameters() if name in recorder.aggregates[0]}
    assert set(trainer.federation.server.rule.state_dict()["h"]) == parameters
    for client in models.SIZES:
        kept = trainer.federation.store.get(client)
        assert {name for name in kept if name.startswith("memory:")} == {f"memory:feddyn:{n}" for n in parameters}


def test_messages_alone():
    """Buffers are averaged; a client weighs by the share in the population, not in the cohort."""
    rule, x, h = FedDyn(alpha=0.5), torch.zeros(4), torch.zeros(4)
    generator = torch.Generator().manual_seed(0)
    for round in range(3):
        rule.start(RoundInfo(round, clients="abcdef"), {"w": x, "running_mean": torch.zeros(2)})
        values = [torch.randn(4, generator=generator) for _ in range(3)]
        for client, value in enumerate(values):
            rule.receive(
                ClientUpdate(client, client + 1, {"w": value, "running_mean": torch.full((2,), float(client))})
            )
        h = h - 0.5 / 6 * sum(value - x for value in values)
        state = rule.aggregate()
        x = sum(values) / 3 - h / 0.5
        assert torch.allclose(state["w"], x, rtol=1e-5, atol=1e-6)
        assert state["running_mean"].tolist() == [1, 1]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf")])
def test_strengths_that_cannot_be(alpha):
    with pytest.raises(ValueError, match="`alpha` to be greater than 0 and finite, but got"):
        FedDyn(alpha)


def test_nothing_is_held_after_a_fit(federated_trainer):
    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("broken")

    clients, callback = models.as_datasets(models.vectors()), ChannelCallback(FedDyn(0.1))
    with pytest.raises(KeyError, match="broken"):
        federated_trainer(max_rounds=1, method="feddyn", callbacks=[callback, Break()]).fit(
            models.Module(models.mlp()), clients
        )
    assert held_bytes(callback) == 0
    federated_trainer(max_rounds=1, method="feddyn", callbacks=[callback]).fit(models.Module(models.mlp()), clients)
    assert held_bytes(callback) == 0
