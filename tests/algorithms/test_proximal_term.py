"""The proximal term: the paper's numbers, plain loops, and interaction with everything that changes gradients."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F

from lightning_fed.algorithms import FedAtt, FedDANE, FedProx
from lightning_fed.callbacks import FederatedCallback, ProximalTerm
from tests import models
from tests.breadth import quick
from tests.recorders import Recorder, assert_same, state_of
from tests.references_baselines import attention_reference, fedprox_reference
from tests.test_invariants import held_bytes

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def quadratic(lr=0.1, start=1.0):
    module = models.Quadratic(size=1, lr=lr)
    module.w.data.fill_(start)
    return module


def at(value, count=1):
    return torch.utils.data.TensorDataset(torch.full((count, 1), value))


class Steps(FederatedCallback):
    def __init__(self, name="w"):
        self.name = name
        self.values = []

    def on_train_batch_end(self, trainer, module, *args):
        self.values.append(dict(module.named_parameters())[self.name].flatten()[0].item())


# --- Equation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", [FedProx(mu=1.0), "fedavg", "fairavg"])
def test_the_example_of_the_paper(aggregator, federated_trainer):
    """F = (w - 3)^2 / 2, lr=0.1, mu=1, start at 1: 1.2, 1.36. The callback also works without FedProx."""
    steps, module = Steps(), quadratic()
    callbacks = [steps] if isinstance(aggregator, FedProx) else [steps, ProximalTerm(1.0)]
    federated_trainer(max_rounds=1, local_steps=2, method=aggregator, callbacks=callbacks).fit(module, {"a": at(3.0)})
    assert steps.values == pytest.approx([1.2, 1.36])
    assert module.w.item() == pytest.approx(1.36)


def test_the_pull_is_towards_what_this_client_was_sent(federated_trainer):
    """A server callback sends a shifted start to one client."""

    class Shift(FederatedCallback):
        def on_server_send(self, trainer, module, client, broadcast):
            if client == "b":
                broadcast.state["w"] = broadcast.state["w"] + 1

    recorder = Recorder()
    trainer = federated_trainer(max_rounds=1, local_steps=2, callbacks=[Shift(), ProximalTerm(1.0), recorder])
    trainer.fit(quadratic(), {"a": at(3.0), "b": at(3.0)})
    assert [visit.update["w"].item() for visit in recorder.visits] == pytest.approx([1.36, 2.18])


class Words(nn.Module):
    """Means of embeddings, with sparse gradients."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 4, sparse=sparse), nn.Linear(4, 7)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1))


@pytest.mark.parametrize("aggregator", [FedProx(mu=2.0), FedDANE(mu=0.5)])
def test_sparse_gradients(aggregator, federated_trainer):
    """Results equal dense gradients; rows not used by any client do not change."""
    clients = {
        name: torch.utils.data.TensorDataset(tokens, targets[:, -1])
        for name, (tokens, targets) in models.sentences({"a": 30, "b": 41}).items()
    }
    states = []
    for sparse in (False, True):
        module = models.Module(Words(sparse))
        trainer = federated_trainer(max_rounds=2, local_epochs=2, method=copy.deepcopy(aggregator))
        trainer.fit(module, clients)
        states.append(state_of(module))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)
    assert torch.equal(states[1]["net.embedding.weight"][7:], Words(True).embedding.weight[7:])


def test_sparse_adam(federated_trainer):
    """`SparseAdam` only accepts sparse gradients."""

    def adam(parameters):
        return torch.optim.SparseAdam(list(parameters), lr=0.1)

    class Table(models.Module):
        def __init__(self):
            super().__init__(nn.EmbeddingBag(50, 7, sparse=True), adam)

    clients = {
        name: torch.utils.data.TensorDataset(tokens, targets[:, -1])
        for name, (tokens, targets) in models.sentences({"a": 30, "b": 41}).items()
    }
    norms = []
    for mu in (0.0, 10.0):
        recorder = Recorder()
        trainer = federated_trainer(max_rounds=1, local_epochs=4, method=FedProx(mu), callbacks=[recorder])
        trainer.fit(Table(), clients)
        norms.append(trainer.callback_metrics["fed/update_norm"].item())
    assert 0 < norms[1] < norms[0]


@pytest.mark.parametrize(
    ("net", "data", "clip"), [(models.mlp, models.vectors, None), (models.cnn, models.images, 0.5)]
)
def test_a_fit_against_a_plain_loop(net, data, clip, federated_trainer):
    """Unequal clients, momentum, BatchNorm in one network, clipping after the term, three of five per round."""
    clients, recorder = data(), Recorder()
    history = fedprox_reference(
        net(), clients, cross_entropy, models.momentum, mu=0.5, rounds=2, cohort_size=3, seed=4, epochs=3, clip=clip
    )
    trainer = federated_trainer(
        max_rounds=2, clients_per_round=3, local_epochs=3, method=FedProx(mu=0.5), seed=4, batch_norm="average",
        gradient_clip_val=clip, callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(models.Module(net(), models.momentum), models.as_datasets(clients))
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"], value, rtol=1e-4, atol=1e-6), name


def test_with_another_rule_against_a_plain_loop(federated_trainer):
    clients, recorder = models.vectors(), Recorder()
    history = fedprox_reference(
        models.mlp(), clients, cross_entropy, models.momentum, mu=0.2, rounds=2, cohort_size=5, seed=0, epochs=2,
        combine=lambda start, states, sizes: attention_reference(start, states, sizes, 1.2),
    )  # fmt: skip
    trainer = federated_trainer(max_rounds=2, local_epochs=2, method=FedAtt(), callbacks=[recorder, ProximalTerm(0.2)])
    trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(clients))
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("seconds", quick([False, True], [True]))
def test_without_pull_nothing_is_changed(seconds, federated_trainer):
    states = []
    for callbacks in ([], [ProximalTerm(0.0)]):
        module = models.TwoOptimizers() if seconds else models.Module(models.norm_mlp(), models.adam)
        federated_trainer(max_rounds=2, local_epochs=2, callbacks=callbacks).fit(
            module, models.as_datasets(models.vectors())
        )
        states.append(state_of(module))
    assert_same(*states)


# --- Position in the step ---------------------------------------------------------------------------------------------


def test_once_per_optimizer_step(federated_trainer):
    """Accumulates two batches: gradients -2, then -1.8 without mu or -1.8 + 0.2 with mu."""
    steps = Steps()
    trainer = federated_trainer(
        max_rounds=1, local_steps=4, accumulate_grad_batches=2, callbacks=[steps, ProximalTerm(1.0)]
    )
    trainer.fit(quadratic(), {"a": at(3.0)})
    assert steps.values == pytest.approx([1.0, 1.2, 1.2, 1.36])


def test_before_clipping(federated_trainer):
    """The second gradient is -1.6 with the term, clipped to 0.5."""
    steps = Steps()
    trainer = federated_trainer(
        max_rounds=1, local_steps=2, gradient_clip_val=1.7, gradient_clip_algorithm="value",
        callbacks=[steps, ProximalTerm(1.0)],
    )  # fmt: skip
    trainer.fit(quadratic(), {"a": at(3.0)})
    assert steps.values == pytest.approx([1.17, 1.17 + 0.1 * (1.83 - 0.17)])


@pytest.mark.parametrize("fused", [False, True])
def test_after_unscaling(fused, federated_trainer):
    """Loss scaling does not scale the term; a fused optimizer unscales internally."""

    class Scaled(models.Quadratic):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, fused=fused)

    module, steps = Scaled(size=1), Steps()
    module.w.data.fill_(1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer = federated_trainer(
        max_rounds=1, local_steps=2, callbacks=[steps, ProximalTerm(1.0)],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )  # fmt: skip
    trainer.fit(module, {"a": at(3.0)})
    assert steps.values == pytest.approx([1.2, 1.36], rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision, federated_trainer):
    steps = Steps()
    trainer = federated_trainer(max_rounds=1, local_steps=2, precision=precision, callbacks=[steps, ProximalTerm(1.0)])
    trainer.fit(quadratic(), {"a": at(3.0)})
    assert steps.values == pytest.approx([1.2, 1.36], rel=1e-6 if precision == "64-true" else 1e-2)


class Two(L.LightningModule):
    """Two independent quadratics with separate optimizers and manual steps; one optimizer may step twice."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.w = nn.Parameter(torch.ones(1))
        self.v = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer, parameter in ((first, self.w), (second, self.v), (first, self.w)):
            optimizer.zero_grad()
            self.manual_backward(0.5 * (parameter - batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD([self.w, self.unused], lr=0.1), torch.optim.SGD([self.v], lr=0.2)


def test_manual_optimization_with_several_optimizers(federated_trainer):
    """Each step only pulls the parameters of the stepping optimizer."""
    module = Two()
    federated_trainer(max_rounds=1, local_steps=1, callbacks=[ProximalTerm(1.0)]).fit(module, {"a": at(3.0)})
    assert module.w.item() == pytest.approx(1.36)
    assert module.v.item() == pytest.approx(1.4)  # one step with learning rate 0.2
    assert module.unused.item() == 1.0
    module = Two()
    federated_trainer(max_rounds=1, local_steps=2, callbacks=[ProximalTerm(1.0)]).fit(module, {"a": at(3.0)})
    assert module.v.item() == pytest.approx(1.4 - 0.2 * (1.4 - 3 + 0.4))


def test_what_stays_at_home_is_not_pulled(federated_trainer):

    class Three(models.Quadratic):
        def __init__(self):
            super().__init__(size=1, lr=0.1)
            self.personal = nn.Parameter(torch.zeros(1))
            self.frozen = nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_idx):
            values = (self.w, self.personal, self.frozen)
            return sum(0.5 * (value - batch[0]).square().mean() for value in values)

    module = Three()
    trainer = federated_trainer(
        max_rounds=2, local_steps=3, personal=["personal"], frozen=["frozen"], callbacks=[ProximalTerm(5.0)]
    )
    trainer.fit(module, {"a": at(3.0)})
    kept = trainer.federation.store.get("a")
    assert kept["personal"].item() == pytest.approx(3 * (1 - 0.9**6))
    assert module.frozen.item() == 0.0
    assert module.w.item() < 1.2


def test_the_logged_loss_is_without_the_term(federated_trainer):
    class Logs(models.Quadratic):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

    module = Logs(size=1, lr=0.1)
    module.w.data.fill_(1.0)
    trainer = federated_trainer(max_rounds=1, local_steps=2, callbacks=[ProximalTerm(1.0)])
    trainer.fit(module, {"a": at(3.0)})
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx((0.5 * 2**2 + 0.5 * 1.8**2) / 2)


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_it_holds_the_broadcast_and_no_copy(federated_trainer):
    """After a visit the term holds no tensors, even if the visit raised."""
    term = ProximalTerm(1.0)
    held = []

    class Look(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            self.sent = {value.data_ptr() for value in broadcast.state.values()}

        def on_before_optimizer_step(self, trainer, module, optimizer):
            starts = term.tensors
            held.append({value.data_ptr() for value in starts.values()} <= self.sent and len(starts) == 4)

    class Break(FederatedCallback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            raise KeyError("broken")

    class Stop(FederatedCallback):
        def on_train_batch_end(self, trainer, module, *args):
            trainer.should_stop = True

    clients = models.as_datasets(models.vectors())
    federated_trainer(max_rounds=1, callbacks=[term, Look()]).fit(models.Module(models.mlp()), clients)
    assert held
    assert all(held)
    assert held_bytes(term) == 0
    with pytest.raises(KeyError, match="broken"):
        federated_trainer(max_rounds=1, callbacks=[term, Break()]).fit(models.Module(models.mlp()), clients)
    assert held_bytes(term) == 0
    federated_trainer(max_rounds=1, callbacks=[term, Stop()]).fit(models.Module(models.mlp()), clients)
    assert held_bytes(term) == 0


def test_on_a_plain_trainer_it_does_nothing(plain_trainer):
    module = quadratic()
    loader = torch.utils.data.DataLoader(at(3.0), 1)
    plain_trainer(max_epochs=2, callbacks=[ProximalTerm(1.0)]).fit(module, loader)
    assert module.w.item() == pytest.approx(1.38)


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf")])
def test_strengths_that_cannot_be(mu):
    with pytest.raises(ValueError, match="`mu` to be at least 0 and finite, but got"):
        ProximalTerm(mu)
