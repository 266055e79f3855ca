"""FedNova: the paper's closed forms, a plain loop, and equality with FedAvg."""

import itertools

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedNova
from lightning_fed.algorithms.channels import ChannelCallback
from lightning_fed.callbacks import FederatedCallback, ProximalTerm
from lightning_fed.errors import BadUpdate
from lightning_fed.messages import ClientUpdate
from lightning_fed.rule import RoundInfo
from lightning_fed.server.schedule import Availability
from lightning_fed.server.server import Server
from lightning_fed.steps import UniformWeights
from tests import models
from tests.algorithms.test_scaffold import overflowing
from tests.breadth import quick, slow
from tests.chains import chain_of
from tests.recorders import Recorder, assert_same, state_of
from tests.references_correction import (
    Visits,
    fednova_reference,
    normalised_average_reference,
    step_length_reference,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


class Lengths(FederatedCallback):
    """Records the number of batches and the normalising lengths of each message."""

    def __init__(self):
        self.sent = []

    def on_server_receive(self, trainer, module, update):
        values = {name.removeprefix("length:"): float(value) for name, value in update.extras.items()}
        self.sent.append((trainer.federation.current_visit.num_batches, values))


def rate(**options):
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.05, **options})


@pytest.mark.parametrize(
    ("optimizer", "mu", "expected"),
    [
        (rate(), 0.0, lambda steps: step_length_reference(steps)),
        (rate(momentum=0.9, weight_decay=1e-3), 0.0, lambda steps: step_length_reference(steps, momentum=0.9)),
        (rate(), 2.0, lambda steps: step_length_reference(steps, rate=0.05, mu=2.0)),
        # v_k = 0.9 v + g, step g + 0.9 v: the coefficient of g_k is 1 + 0.9 + ... over the remaining steps, plus one
        # term.
        (
            rate(momentum=0.9, nesterov=True),
            0.0,
            lambda steps: sum(sum(0.9**power for power in range(left + 1)) for left in range(1, steps + 1)),
        ),
    ],
    ids=["sgd", "momentum", "proximal", "nesterov"],
)
def test_lengths_are_the_papers(optimizer, mu, expected, federated_trainer):
    lengths = Lengths()
    method = FedNova(mu)
    trainer = federated_trainer(max_rounds=2, method=method, callbacks=[lengths], local_epochs=2)
    data = FederatedDataModule(models.as_datasets(models.vectors(SIZES)), batch_size=16)
    trainer.fit(models.Module(models.mlp(), optimizer), datamodule=data)
    assert len(lengths.sent) == 10
    for steps, values in lengths.sent:
        assert len(values) == 4
        assert list(values.values()) == pytest.approx([0.05 * expected(steps)] * 4, rel=1e-12)


def test_lengths_are_the_response_to_gradients_of_one(federated_trainer):
    """Learning rate and momentum per optimizer, a step schedule, dampening: equal to plain SGD on unit gradients."""

    def make(parameters):
        first, *others = list(parameters)
        groups = [{"params": [first], "lr": 0.3}, {"params": others, "momentum": 0.8, "dampening": 0.3}]
        return torch.optim.SGD(groups, lr=0.05)

    def schedule(optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"scheduler": scheduler, "interval": "step"}

    lengths, module = Lengths(), models.Module(models.mlp(), make, schedule)
    trainer = federated_trainer(max_rounds=1, method="fednova", callbacks=[lengths])
    trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
    for steps, values in lengths.sent:
        net = models.mlp().double()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        optimizer = make(net.parameters())
        scheduler = schedule(optimizer)["scheduler"]
        for _ in range(steps):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()
        for name, value in net.named_parameters():
            moved = before[name] - value.detach()
            assert torch.allclose(moved, torch.full_like(moved, values[f"net.{name}"]), rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "mu"), [slow(({}, 0.0)), ({"momentum": 0.9}, 0.0), ({}, 1.0)], ids=["sgd", "momentum", "proximal"]
)
def test_a_fit_against_a_plain_loop(options, mu, either_trainer):
    clients, recorder = models.vectors(SIZES), Recorder()
    visits = Visits(clients, rounds=2, cohort_size=3, seed=4, batch_size=16, epochs=2)
    history = fednova_reference(
        models.mlp(), visits, cross_entropy, rate(**options), options.get("momentum", 0.0), 0.05, mu
    )
    trainer = either_trainer(
        max_rounds=2, clients_per_round=3, local_epochs=2, method=FedNova(mu), seed=4, callbacks=[recorder]
    )
    data = FederatedDataModule(models.as_datasets(clients), batch_size=16)
    trainer.fit(models.Module(models.mlp(), rate(**options)), datamodule=data)
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("mu", [slow(0.0), 0.5])
def test_with_equal_steps_it_is_fedavg(mu, federated_trainer):
    """Clients with unequal sizes, BatchNorm, momentum: bit for bit."""
    states = []
    for method in (f"fedprox:mu={mu}", f"fednova:mu={mu}"):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(max_rounds=2, clients_per_round=4, local_steps=3, method=method)
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert_same(*states)


def test_with_unequal_steps_it_is_not(federated_trainer):
    states = []
    for method in ("fedavg", "fednova"):
        module = models.Module(models.mlp(), models.momentum)
        federated_trainer(max_rounds=1, method=method).fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert not torch.allclose(states[0]["net.0.weight"], states[1]["net.0.weight"])


def test_a_users_proximal_term_counts(federated_trainer):
    """The method's term and a callback in the Trainer give equal lengths."""
    sent = []
    for method, callbacks in ((FedNova(0.5), []), (FedNova(), [ProximalTerm(0.5)])):
        lengths = Lengths()
        trainer = federated_trainer(max_rounds=1, method=method, callbacks=[lengths, *callbacks])
        trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(SIZES)))
        sent.append(lengths.sent)
    assert sent[0] == sent[1]


def test_steps_that_are_left_out_do_not_count(federated_trainer):
    lengths = Lengths()
    clients = {"a": TensorDataset(torch.full((1, 1), 3.0))}
    trainer = federated_trainer(
        max_rounds=1, local_steps=3, method="fednova", plugins=overflowing(), callbacks=[lengths]
    )
    trainer.fit(models.Quadratic(size=1, lr=0.1), clients)
    assert lengths.sent == [(3, {"w": pytest.approx(0.2)})]


def messages(count=5):
    generator = torch.Generator().manual_seed(0)
    for client in range(count):
        state = {"w": torch.randn(7, generator=generator), "running_mean": torch.randn(2, generator=generator)}
        yield ClientUpdate(client, client + 2, state | {"steps": torch.tensor(client)}), float(1 + client % 3)


def test_messages_whole_and_in_parts():
    start = {"w": torch.ones(7), "running_mean": torch.zeros(2), "steps": torch.tensor(0)}
    received = list(messages())
    expected = normalised_average_reference(
        start, [u.state for u, _ in received], [u.num_samples for u, _ in received], [a for _, a in received], ["w"]
    )
    whole, parts = FedNova(), [FedNova() for _ in range(3)]
    for rule in (whole, *parts):
        rule.trainable = frozenset({"w"})
        rule.start(RoundInfo(0), start)
    for place, (update, length) in enumerate(received):
        update.extras["length:w"] = torch.tensor(length, dtype=torch.float64)
        whole.receive(update)
        parts[place % 2].receive(update)
    parts[2].merge(parts[1])
    parts[2].merge(parts[0])
    for state in (whole.aggregate(), parts[2].aggregate()):
        for name, value in expected.items():
            assert torch.allclose(state[name].double(), value.double(), rtol=1e-6), name


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({}, "the client sent no 'length'"),
        ({"length:w": torch.tensor(0.0)}, "all step lengths are 0"),
        ({"length:w": torch.tensor(-1.0)}, "the client sent an invalid 'length' for the entry 'w'"),
        ({"length:v": torch.tensor(1.0)}, "the client sent an invalid 'length' for the entry 'v'"),
        ({"length:w": torch.ones(3)}, "the client sent an invalid 'length' for the entry 'w'"),
    ],
)
def test_bad_updates(extras, reason):
    rule = FedNova()
    rule.start(RoundInfo(0), {"w": torch.zeros(3)})
    with pytest.raises(BadUpdate, match=reason):
        rule.receive(ClientUpdate("a", 1, {"w": torch.ones(3)}, extras))


@pytest.mark.parametrize("module", [lambda: models.Module(models.mlp(), models.adam), models.TwoOptimizers])
def test_other_optimizers_are_refused(module, federated_trainer):
    with pytest.raises(MisconfigurationException, match=r"Expected `torch\.optim\.SGD` .*, but got Adam"):
        federated_trainer(max_rounds=1, method="fednova").fit(module(), models.as_datasets(models.vectors(SIZES)))


def test_momentum_that_clients_keep_is_refused(federated_trainer):
    """The update would include gradients of earlier visits, but the length only counts the current visit."""
    trainer = federated_trainer(max_rounds=1, method="fednova", optimizer_state="keep")
    with pytest.raises(MisconfigurationException, match="momentum adds gradients from earlier visits"):
        trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(models.vectors(SIZES)))


def test_kept_optimizers_without_momentum_have_nothing_to_keep(federated_trainer):
    states = []
    for mode in ("reset", "keep"):
        module = models.Module(models.mlp(), rate(weight_decay=1e-3))
        trainer = federated_trainer(max_rounds=3, method="fednova", optimizer_state=mode)
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert_same(*states)


def test_by_hand(federated_trainer):
    """Two backward passes per step, one step per batch."""
    lengths = Lengths()
    trainer = federated_trainer(max_rounds=1, method="fednova", callbacks=[lengths])
    trainer.fit(models.ManualModule(models.mlp(), rate()), models.as_datasets(models.vectors(SIZES)))
    for steps, values in lengths.sent:
        assert list(values.values()) == pytest.approx([0.05 * steps] * 4)


@pytest.mark.parametrize("mu", [-1.0, float("inf")])
def test_strengths_that_cannot_be(mu):
    with pytest.raises(ValueError, match="`mu` to be at least 0 and finite, but got"):
        FedNova(mu)


def moved_by(lengths, sizes=None, step=-0.005):
    """Server and new weight after one round; each client moves the weight from 0 by `step`."""
    server = Server(chain_of(FedNova()))
    server.start_round(RoundInfo(0, [*range(len(lengths))], frozenset("w")), {"w": torch.zeros(1)})
    for client, length in enumerate(lengths):
        server.sent(client, server.prepare(client))
        extras = {"length:w": torch.tensor(length, dtype=torch.float64)}
        size = 10 if sizes is None else sizes[client]
        update = ClientUpdate(client, size, {"w": torch.full((1,), step)}, extras)
        assert server.count(update)
        server.accept(update)
    return server, float(server.finish_round()["w"])


@pytest.mark.parametrize("claimed", [1e-9, 1e-3, 1e6, 1e9, 5e-324])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_length_far_from_the_median_excludes_the_client(claimed, place):
    """Without the check a length of 1e-9 turned five steps of 0.005 into a step of 800,000."""
    honest = [1.0, 1.0, 2.0, 2.0]
    server, value = moved_by([*honest[:place], claimed, *honest[place:]])
    assert set(server.report.failed) == {place}
    assert "far from the round's median" in server.report.failed[place]
    assert value == moved_by(honest)[1]


def test_lengths_of_small_clients_are_good():
    """500 times fewer examples give 500 times fewer steps: the work per example is equal."""
    server, _ = moved_by([1.0, 500.0, 500.0, 600.0], sizes=[1, 500, 500, 600])
    assert server.report.failed == {}


class Shortened(FederatedCallback):
    """The client `ann` reports other lengths than its optimizer made."""

    def __init__(self, factor):
        self.factor = factor

    def on_server_send(self, trainer, module, client, broadcast):
        (own,) = (callback for callback in trainer.callbacks if isinstance(callback, ChannelCallback))
        if own in trainer.callbacks[trainer.callbacks.index(self) :]:  # the lie must follow the report
            trainer.callbacks.remove(self)
            trainer.callbacks.append(self)

    def on_client_end(self, trainer, module, client, update):
        if client == "ann":
            update.extras |= {name: value * self.factor for name, value in update.extras.items()}


PLANS = {
    "steps": (30, {"local_steps": 5}, rate(momentum=0.9)),
    "epochs": (200, {"local_epochs": 2}, rate()),
    "stragglers": (200, {"local_epochs": 6, "availability": Availability(stragglers=0.6), "seed": 2}, rate()),
    "part of an epoch": (200, {"availability": Availability(stragglers=0.6), "seed": 2}, rate()),
    "equal weights": (200, {"local_epochs": 2, "steps": [UniformWeights()]}, rate()),
}


@pytest.mark.parametrize(
    ("plan", "sign"),
    quick(
        itertools.product(PLANS, [-1, 0, 1]),
        [*((plan, (-1, 1)[place % 2]) for place, plan in enumerate(PLANS)), ("steps", 0), ("part of an epoch", 0)],
    ),
)
def test_the_plan_bounds_the_lengths(plan, sign, federated_trainer):
    """A length of a 30th would give a client the weight of 30; honest clients differ by 60 times in work."""
    most, options, optimizer = PLANS[plan]
    factor = float(most) ** sign
    sizes = {"ann": 48, "bob": 64, "cid": 48, "dan": 300, "eve": 5}
    callback = Shortened(factor)
    trainer = federated_trainer(max_rounds=1, method="fednova", callbacks=[callback], **options)
    data = FederatedDataModule(models.as_datasets(models.vectors(sizes)), batch_size=8)
    trainer.fit(models.Module(models.mlp(), optimizer), datamodule=data)
    failed = trainer.federation.server.report.failed
    assert failed.keys() == (set() if factor == 1.0 else {"ann"})
    assert all("far from the round's median" in reason for reason in failed.values())


def test_batch_sizes_may_differ(federated_trainer):
    """Equal examples with batches of 64 and 2: one step against 32."""
    sizes = {"ann": 64, "bob": 2, "cid": 2}
    data = models.as_datasets(models.vectors(dict.fromkeys(sizes, 64)))
    loaders = {name: DataLoader(data[name], size, shuffle=True) for name, size in sizes.items()}
    trainer = federated_trainer(max_rounds=1, method="fednova")
    trainer.fit(models.Module(models.mlp(), rate()), loaders)
    assert trainer.federation.server.report.failed == {}


def test_the_order_of_clients_does_not_matter():
    lengths = [1.0, 1e-9, 3.0, 40.0, 2.0]
    results = {moved_by(order)[1] for order in (lengths, lengths[::-1], sorted(lengths))}
    assert max(results) - min(results) <= 1e-9
