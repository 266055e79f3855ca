"""SCAFFOLD: closed forms, plain loops, messages, and numerical edge cases."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import SCAFFOLD, ServerOptimizer
from lightning_fed.algorithms.channels import ChannelCallback
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.errors import BadUpdate
from lightning_fed.messages import ClientUpdate, Request
from lightning_fed.rule import RoundInfo
from lightning_fed.steps import UniformWeights
from tests import models
from tests.breadth import quick
from tests.chains import chain_of
from tests.recorders import Recorder, assert_same, bytes_of, state_of
from tests.references_correction import Visits, scaffold_reference
from tests.test_invariants import held_bytes

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def close(expected, state, rtol=1e-4, atol=1e-5):
    """Tolerates a different order of sums in float32."""
    for name, value in expected.items():
        assert torch.allclose(state[f"net.{name}"], value, rtol=rtol, atol=atol), name


RATES = [(models.sgd, 0.1), (models.sgd, None), (models.momentum, None), (models.adam, None)]


@pytest.mark.parametrize(
    ("optimizer", "rate", "weighting"),
    quick(
        [(*pair, weighting) for pair in RATES for weighting in ("uniform", "examples")],
        [(*RATES[0], "uniform"), (*RATES[3], "examples")],
    ),
)
def test_a_fit_against_a_plain_loop(optimizer, rate, weighting, either_trainer):
    """Unequal clients, three of five per round; with plain SGD the mean gradient is option II of the paper."""
    clients, recorder = models.vectors(SIZES), Recorder()
    visits = Visits(clients, rounds=3, cohort_size=3, seed=4, batch_size=16, epochs=2)
    history, control = scaffold_reference(
        models.mlp(), visits, cross_entropy, optimizer, rate, equal=weighting == "uniform"
    )
    trainer = either_trainer(
        max_rounds=3, clients_per_round=3, local_epochs=2, method=SCAFFOLD(weighting), seed=4, callbacks=[recorder]
    )
    data = FederatedDataModule(models.as_datasets(clients), batch_size=16)
    trainer.fit(models.Module(models.mlp(), optimizer), datamodule=data)
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        close(expected, aggregate)
    federation = next(callback for callback in trainer.callbacks if hasattr(callback, "server"))
    close(control, federation.server.rule.state_dict()["control"])


class NoControls(FederatedCallback):
    """Sets both control variates to zero."""

    def on_server_send(self, trainer, module, client, broadcast):
        broadcast.extras.clear()

    def on_client_request(self, trainer, module, client, request):
        trainer.federation.client_memory.clear()


def test_without_controls_it_is_averaging(federated_trainer):
    states = []
    options = {"max_rounds": 3, "clients_per_round": 3, "steps": [UniformWeights()]}
    for method, callbacks in (("fedavg", []), ("scaffold", [NoControls()])):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(method=method, callbacks=callbacks, **options)
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert_same(*states)


def test_what_travels(federated_trainer):
    recorder, module = Recorder(), models.Module(models.BaseAndHead(), models.momentum)
    trainer = federated_trainer(
        max_rounds=3, method="scaffold", personal=["net.head.*"], batch_norm="average", callbacks=[recorder]
    )
    trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
    state = recorder.aggregates[0]
    parameters = {name: state[name] for name, _ in module.named_parameters() if name in state}
    model, vector = 5 * bytes_of(state), 5 * bytes_of(parameters)
    assert recorder.down_bytes == [model, model + vector, model + vector]
    assert recorder.up_bytes == [model + vector] * 3
    for client in SIZES:
        kept = trainer.federation.store.get(client)
        assert {name for name in kept if name.startswith("memory:")} == {f"memory:control:{n}" for n in parameters}


def test_two_optimizers_by_hand(federated_trainer):
    """Each optimizer is corrected by the gradients of this optimizer; the server averages the changes."""

    class Sent(FederatedCallback):
        def on_server_receive(self, trainer, module, update):
            sent[update.client] = {name: value.clone() for name, value in update.extras.items()}

    sent = {}
    trainer = federated_trainer(max_rounds=2, method="scaffold", callbacks=[Sent()])
    module = models.TwoOptimizers()
    trainer.fit(module, models.as_datasets(models.vectors({"a": 20, "b": 40})))
    control = trainer.federation.server.rule.state_dict()["control"]
    assert set(control) == {name for name, _ in module.named_parameters()}
    for name, value in control.items():
        kept = [trainer.federation.store.get(client)[f"memory:control:{name}"] for client in "ab"]
        assert torch.allclose(value, sum(kept) / 2, rtol=1e-5, atol=1e-7), name
        assert value.any()


def test_a_step_of_the_server(federated_trainer):
    """The paper's global step size equals a server optimizer: a rate of 0.5 moves half way."""
    recorders = []
    for steps in ([], [ServerOptimizer("SGD", lr=0.5)]):
        recorders.append(Recorder())
        trainer = federated_trainer(max_rounds=1, method="scaffold", steps=steps, callbacks=[recorders[-1]])
        trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(SIZES)))
    start = recorders[0].visits[0].broadcast
    for name, value in recorders[1].aggregates[0].items():
        half = (start[name] + recorders[0].aggregates[0][name]) / 2
        assert torch.allclose(value, half, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({}, "the client sent no 'control'"),
        ({"control:w": torch.zeros(2)}, "for the entry 'w'"),
        ({"control:v": torch.zeros(3)}, "for the entry 'v'"),
        ({"control:w": torch.zeros(3, dtype=torch.float64)}, "for the entry 'w'"),
    ],
)
def test_bad_updates(extras, reason):
    rule = SCAFFOLD()
    rule.start(RoundInfo(0), {"w": torch.zeros(3)})
    with pytest.raises(BadUpdate, match=reason):
        rule.receive(ClientUpdate("a", 1, {"w": torch.ones(3)}, extras))


def test_weights_are_those_of_averaging():
    """Messages are averaged equally; the control variate moves by the share of the clients."""
    rule, fair, generator = SCAFFOLD(), chain_of("fairavg"), torch.Generator().manual_seed(0)
    state, control = {"w": torch.zeros(5)}, torch.zeros(5)
    for round in range(3):
        info = RoundInfo(round, clients=range(8))
        rule.start(info, state)
        fair.start(info, state)
        assert bool(rule.broadcast(Request("a")).extras) == (round > 0)
        for client in range(4):
            value = torch.randn(5, generator=generator)
            rule.receive(ClientUpdate(client, client + 1, {"w": value}, {"control:w": value}))
            fair.receive(ClientUpdate(client, client + 1, {"w": value}), state)
            control = control + value / 8
        state = rule.aggregate()
        assert_same(fair.aggregate(), state)
        assert torch.allclose(rule.state_dict()["control"]["w"], control, rtol=1e-5)


def overflowing():
    """Mixed precision with an overflow, hence a skipped step, at the start of every visit."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]


def test_steps_that_are_left_out_do_not_count(federated_trainer):
    """From 0 to 3 with lr=0.1: gradients -3 and -2.7 after the skipped step."""
    clients = {"a": TensorDataset(torch.full((1, 1), 3.0))}
    trainer = federated_trainer(max_rounds=1, local_steps=3, method="scaffold", plugins=overflowing())
    trainer.fit(models.Quadratic(size=1, lr=0.1), clients)
    assert trainer.federation.server.report.failed == {}
    assert trainer.federation.store.get("a")["memory:control:w"].item() == pytest.approx(-2.85, rel=1e-3)


def test_controls_of_a_model_of_16_bits(federated_trainer):
    """Controls equal the float32 means of the gradients bit for bit; bf16 would only keep 8 bits."""
    data = {name: torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("ab")}
    recorder = Recorder()
    trainer = federated_trainer(
        max_rounds=3, local_steps=5, method="scaffold", precision="bf16-true", callbacks=[recorder]
    )
    trainer.fit(models.Quadratic(size=3, lr=0.1), {name: TensorDataset(value) for name, value in data.items()})
    control, own = torch.zeros(3), {"a": torch.zeros(3), "b": torch.zeros(3)}
    for round in range(3):
        changes = []
        for visit in recorder.round(round):
            weight, gradients = visit.broadcast["w"].clone().requires_grad_(), []
            optimizer = torch.optim.SGD([weight], lr=0.1)
            for (batch,) in visit.batches:
                optimizer.zero_grad()
                (0.5 * (weight - batch.bfloat16()).square().sum(1).mean()).backward()
                gradients.append(weight.grad.float())
                weight.grad += control - own[visit.client]
                optimizer.step()
            assert torch.equal(visit.update["w"], weight.detach())
            mean = sum(gradients) / 5
            changes.append((mean - own[visit.client]).double())
            own[visit.client] = mean
        control = (control.double() + sum(changes) / 2).float()
    kept = {client: trainer.federation.store.get(client)["memory:control:w"] for client in "ab"}
    assert_same(own, kept)
    assert torch.equal(trainer.federation.server.rule.state_dict()["control"]["w"], control)
    assert not torch.equal(control, control.bfloat16().float())


def test_nothing_is_held_after_a_fit(federated_trainer):
    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("broken")

    clients, callback = models.as_datasets(models.vectors(SIZES)), ChannelCallback(SCAFFOLD())
    federated_trainer(max_rounds=1, method="scaffold", callbacks=[callback]).fit(models.Module(models.mlp()), clients)
    assert held_bytes(callback) == 0
    with pytest.raises(KeyError, match="broken"):
        federated_trainer(max_rounds=1, method="scaffold", callbacks=[callback, Break()]).fit(
            models.Module(models.mlp()), clients
        )
    assert held_bytes(callback) == 0


def test_unknown_weighting():
    with pytest.raises(ValueError, match="`weighting` to be one of"):
        SCAFFOLD("sizes")
