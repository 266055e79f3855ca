"""FedBuff and FedAsync: the specification's numbers, plain loops, synchronous rounds, replays, and resumed fits."""

import json
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F

from lightning_fed import (
    Availability,
    ClientUpdate,
    Faults,
    FederatedCallback,
    FederatedDataModule,
    Federation,
    Method,
    Vectorized,
)
from lightning_fed.algorithms import Durations, FairAvg, FedAsync, FedAvg, FedBuff, ServerOptimizer
from lightning_fed.algorithms.robust.mixtures import Bucketing
from lightning_fed.attacks import ALIE
from lightning_fed.callbacks import GradientCorrection
from lightning_fed.compression import Downlink, Quantized
from lightning_fed.messages import Request
from lightning_fed.privacy import CentralDP, SecureSum
from lightning_fed.rounds.visit_driver import VisitDriver
from lightning_fed.rule import RoundInfo
from lightning_fed.server.schedule import Schedule
from tests import models
from tests.breadth import slow
from tests.recorders import Recorder, assert_same, state_of
from tests.references_asynchronous import (
    asynchronous_reference,
    fedasync_reference,
    fedbuff_reference,
    hinge,
    polynomial,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SECONDS = {"ann": 1.0, "bob": 2.0, "cid": 7.0, "dan": 3.1, "eve": 11.0}


class Given(Durations):
    def seconds(self, seed, client, version, batches):
        return SECONDS[client]


def data(sizes=models.SIZES, dtype=torch.float32, **options):
    clients = {name: (inputs.to(dtype), labels) for name, (inputs, labels) in models.vectors(sizes).items()}
    return FederatedDataModule(models.as_datasets(clients), **{"batch_size": 5, **options})


def fitted(federated_trainer, method, rounds=4, make_net=models.dropout_mlp, ckpt_path=None, **options):
    module = models.Module(make_net(), models.momentum)
    trainer = federated_trainer(max_rounds=rounds, method=method, seed=3, **options)
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return trainer, state_of(module)


# --- Equations --------------------------------------------------------------------------------------------------------


def arrived(rule, tmp_path, round, x, arrivals):
    """The new model of one round; ``arrivals`` are the trained models by start version."""
    lines = [[round, name, version, ""] for name, (version, _) in arrivals.items()]
    (tmp_path / "order").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rule = rule(replay=str(tmp_path / "order"))
    for version in range(round + 1):
        visits = rule.draw_cohort(round, Schedule(), None).visits
        start = x if version == round else [10.0 * version, 5.0]
        rule.start(RoundInfo(version), {"w": torch.tensor(start)})
    for visit, (name, (version, change)) in zip(visits, arrivals.items(), strict=True):
        assert (visit.client, visit.round) == (name, round)
        assert visit.seed == Schedule().visit_of(version, name).seed  # known at the client's start
        broadcast = rule.broadcast(Request(name))
        assert broadcast.round == version
        rule.receive(ClientUpdate(name, 9, {"w": change(broadcast.state["w"])}))
    return rule.aggregate()["w"]


def add(*values):
    return lambda start: start + torch.tensor(values)


def test_fedbuff_on_the_numbers_of_the_specification(tmp_path):
    arrivals = {"a": (2, add(0.5, 0.0)), "b": (0, add(-0.1, 0.4)), "c": (1, add(0.2, 0.2))}
    new = arrived(partial(FedBuff, 3), tmp_path, 2, [1.0, -2.0], arrivals)
    torch.testing.assert_close(new, torch.tensor([1.19456211, -1.87587951]), rtol=1e-6, atol=0)


def test_fedasync_on_the_numbers_of_the_specification(tmp_path):
    new = arrived(FedAsync, tmp_path, 2, [1.0, -2.0], {"a": (2, lambda start: torch.tensor([1.4, -1.8]))})
    torch.testing.assert_close(new, torch.tensor([1.24, -1.88]), rtol=1e-6, atol=0)
    new = arrived(FedAsync, tmp_path, 2, [1.24, -1.88], {"a": (0, lambda start: torch.tensor([0.8, -2.2]))})
    torch.testing.assert_close(new, torch.tensor([1.08757953, -1.99085125]), rtol=1e-6, atol=0)


def test_running_statistics_stay_between_model_and_client(tmp_path):
    """A stale difference would give a negative variance: 0.5 + s (1 - 5)."""
    (tmp_path / "order").write_text('[1, "a", 0, ""]\n')
    rule = FedBuff(1, replay=str(tmp_path / "order"))
    for round, variance in enumerate((5.0, 0.5)):
        rule.draw_cohort(1, Schedule(), None)
        rule.start(RoundInfo(round), {"norm.running_var": torch.tensor(variance)})
    rule.receive(ClientUpdate("a", 9, {"norm.running_var": torch.tensor(1.0)}))
    assert float(rule.aggregate()["norm.running_var"]) == pytest.approx(0.5 + 0.5 / 2**0.5)


@pytest.mark.parametrize(
    ("rule", "reference", "buffer"),
    [
        (FedBuff(2, durations=Given()), partial(fedbuff_reference, weigh=polynomial), 2),
        (FedBuff(3, staleness=0, durations=Given()), partial(fedbuff_reference, weigh=lambda staleness: 1.0), 3),
        slow((FedAsync(durations=Given()), partial(fedasync_reference, weigh=polynomial), 1)),
        (FedAsync(staleness=[2.0, 1.0], durations=Given()), partial(fedasync_reference, weigh=hinge), 1),
    ],
    ids=["fedbuff", "without discount", "fedasync", "hinge"],
)
def test_a_fit_equals_a_plain_loop(rule, reference, buffer, federated_trainer):
    """The loop trains at the start of a visit, the package in the round of arrival."""
    sizes, rounds = dict.fromkeys(SECONDS, 8), 9
    net = models.mlp().double()
    clients = {name: (inputs.double(), labels) for name, (inputs, labels) in models.vectors(sizes).items()}
    expected, log = asynchronous_reference(
        models.mlp().double(), F.cross_entropy, clients, SECONDS, rounds, buffer, reference
    )
    recorder = Recorder()
    trainer = federated_trainer(
        max_rounds=rounds, method=rule, local_epochs=3, callbacks=[recorder], precision="64-true"
    )
    trainer.fit(models.Module(net), data(sizes, torch.float64, batch_size=8, shuffle=False))
    seen = [(visit.client, visit.round) for visit in recorder.visits]
    assert seen == [arrival for _, arrivals in log for arrival in arrivals]
    for aggregate, model in zip(recorder.aggregates, expected[1:], strict=True):
        for name, value in model.items():
            torch.testing.assert_close(aggregate[f"net.{name}"], value, rtol=1e-10, atol=1e-12)
    staleness = [rounds - 1 - version for _, version in log[-1][1]]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["fed/virtual_seconds"] == pytest.approx(log[-1][0])
    assert metrics["fed/staleness/max"] == max(staleness)
    assert metrics["fed/staleness/mean"] == pytest.approx(sum(staleness) / buffer)
    assert metrics["fed/version"] == rounds


# --- Synchronous and sequential rounds --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weighting", "other", "make_net"),
    [("uniform", FairAvg(), models.dropout_mlp), ("examples", FedAvg(), models.norm_mlp)],
)
def test_a_buffer_for_all_clients_is_a_synchronous_round(weighting, other, make_net, federated_trainer):
    """Bit for bit, with BatchNorm, dropout and slow clients."""
    buffered, weights = fitted(federated_trainer, FedBuff(len(models.SIZES), 0, weighting), 2, make_net)
    synchronous, expected = fitted(federated_trainer, other, 2, make_net)
    assert_same(weights, expected)
    for name, value in synchronous.callback_metrics.items():
        if name not in ("train_loss", "fed/update_norm", "fed/drift"):  # depend on the order, and on UniformWeights
            assert buffered.callback_metrics[name] == value, name
    assert buffered.callback_metrics["fed/staleness/max"] == 0


def test_one_client_in_flight_without_mixing_is_sequential_training(federated_trainer):
    """Each visit is a plain fit on the previous visit's weights, bit for bit."""
    recorder = Recorder()
    _, weights = fitted(
        federated_trainer, FedAsync(1.0, 0), 5, models.mlp, clients_per_round=1, callbacks=[recorder], local_epochs=2
    )
    visits = recorder.visits
    assert len({visit.client for visit in visits}) > 1
    module = models.Module(models.mlp(), models.momentum)
    for visit in visits:
        optimizer = module.configure_optimizers()
        for inputs, labels in visit.batches:
            optimizer.zero_grad()
            F.cross_entropy(module(inputs), labels).backward()
            optimizer.step()
    assert_same(weights, state_of(module))


def test_several_clients_at_once_have_their_start_models(federated_trainer):
    _, single = fitted(federated_trainer, FedBuff(3), 4, models.mlp, visits="lightning")
    trainer, several = fitted(federated_trainer, FedBuff(3), 4, models.mlp, visits=Vectorized(3))
    assert trainer.callback_metrics["fed/staleness/max"] > 0
    for name, value in single.items():
        torch.testing.assert_close(several[name], value, rtol=1e-4, atol=1e-5)


def test_a_server_rate_scales_the_mean_change(federated_trainer):
    """x + 0.5 (x' - x), in the first round."""
    _, start = fitted(federated_trainer, FedBuff(2), 0)
    _, whole = fitted(federated_trainer, FedBuff(2), 1)
    _, half = fitted(federated_trainer, Method(FedBuff(2), steps=[ServerOptimizer("SGD", lr=0.5)]), 1)
    for name, value in half.items():
        torch.testing.assert_close(value, (start[name] + whole[name]) / 2, rtol=1e-6, atol=1e-7)


class Models(FederatedCallback):
    """Counts start models between rounds, and the versions in flight."""

    def __init__(self):
        self.counts = []

    def on_train_epoch_end(self, trainer, module):
        rule = trainer.federation.server.rule
        self.counts.append((len(rule.state_dict()["versions"]), len({one.version for one in rule.order.clock.flying})))


def test_a_start_model_lives_until_the_last_answer(federated_trainer):
    counter = Models()
    fitted(federated_trainer, FedBuff(1), 12, models.mlp, callbacks=[counter])
    assert all(stored == in_flight for stored, in_flight in counter.counts)
    assert max(stored for stored, _ in counter.counts) > 2


class Failing(FederatedCallback):
    """All clients of one round fail, so the round has no new model."""

    def on_client_start(self, trainer, module, client, broadcast):
        if trainer.current_epoch == 1:
            trainer.federation.visit.fault = "a test"


def test_a_round_without_a_model_is_a_version(federated_trainer):
    trainer, weights = fitted(federated_trainer, FedBuff(2), 6, models.mlp, callbacks=[Failing()])
    assert trainer.federation.rounds == 6
    assert trainer.callback_metrics["fed/version"] == 6
    assert all(value.isfinite().all() for value in weights.values())


# --- Recorded orders --------------------------------------------------------------------------------------------------


def test_a_recorded_order_replays_to_the_bit(federated_trainer, tmp_path):
    path = str(tmp_path / "orders" / "order.jsonl")
    _, weights = fitted(federated_trainer, FedBuff(2, record=path), clients_per_round=4)
    assert len((tmp_path / "orders" / "order.jsonl").read_text().splitlines()) == 8
    replays = [fitted(federated_trainer, FedBuff(2, replay=path), clients_per_round=4) for _ in range(2)]
    for trainer, replayed in replays:
        assert_same(replayed, weights)
        assert "fed/virtual_seconds" not in trainer.callback_metrics
    assert dict(replays[0][0].callback_metrics) == dict(replays[1][0].callback_metrics)
    with pytest.raises(MisconfigurationException, match="Expected `record` to be a new file"):
        fitted(federated_trainer, FedBuff(2, record=path))
    with pytest.raises(ValueError, match="ends with round 4: train at most 4 rounds"):
        fitted(federated_trainer, FedBuff(2, replay=path), 5)


def test_one_changed_digest_in_an_order_is_named(federated_trainer, tmp_path):
    path = tmp_path / "order.jsonl"
    fitted(federated_trainer, FedBuff(2, record=str(path)), 2, models.mlp)
    lines = path.read_text().splitlines()
    other = lines[3][:-4] + ("0" if lines[3][-4] != "0" else "1") + lines[3][-3:]
    path.write_text("\n".join([*lines[:3], other]) + "\n")
    with pytest.raises(
        MisconfigurationException, match=rf"The replay differs from .* in round 1: expected .*{other[-9:-2]}"
    ):
        fitted(federated_trainer, FedBuff(2, replay=str(path)), 2, models.mlp)


# --- Resumed fits -----------------------------------------------------------------------------------------------------


class Kill(Exception):
    """Simulates a kill."""


def checkpoints(folder):
    return ModelCheckpoint(folder, save_last=True)


def test_a_fit_killed_between_any_two_visits_resumes_exactly(federated_trainer, tmp_path, monkeypatch):
    """FedBuff with momentum, dropout and stale models; the order file is complete after the resume."""
    start, rounds, fit = VisitDriver.start, 3, partial(fitted, federated_trainer, clients_per_round=4)

    def method(name):
        return FedBuff(2, record=str(tmp_path / name))

    _, expected = fit(method("whole"), rounds)
    order = (tmp_path / "whole").read_text()
    for boundary in (2, 5):  # the first and the second visit of a round, after the first checkpoint
        visits = iter(range(2 * rounds))

        def start_or_kill(self, group, boundary=boundary, visits=visits):
            if next(visits) == boundary:
                raise Kill
            start(self, group)

        folder = tmp_path / f"{boundary}"
        options = {"callbacks": [checkpoints(folder)], "enable_checkpointing": True}
        monkeypatch.setattr(VisitDriver, "start", start_or_kill)
        with pytest.raises(Kill):
            fit(method(f"order{boundary}"), rounds, **options)
        monkeypatch.setattr(VisitDriver, "start", start)
        options["callbacks"] = [checkpoints(folder)]
        _, resumed = fit(method(f"order{boundary}"), rounds, ckpt_path=folder / "last.ckpt", **options)
        assert_same(resumed, expected)
        assert (tmp_path / f"order{boundary}").read_text() == order


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Federation(FedBuff(2), steps=[SecureSum(clip=1.0)]), "averaging method for a secure sum"),
        (lambda: Federation(FedBuff(2), steps=[CentralDP(1.0, 1e-5, 1.0)]), "differential privacy"),
        (lambda: Federation(FedBuff(2), steps=[Downlink(Quantized(8))]), "not all clients start from one"),
        (lambda: Federation(FedBuff(2), steps=[Bucketing()]), "not all clients start from one"),
        (lambda: Federation(FedBuff(2), steps=[ALIE(1)]), "not all clients start from one"),
        (lambda: FedBuff(0), "Expected `buffer` to be at least 1"),
        (lambda: FedBuff(2, staleness=-1), "Expected `staleness` to be at least 0"),
        (lambda: FedBuff(2, staleness=[1]), "Expected `staleness` to be a number"),
        (lambda: FedBuff(2, weighting="size"), "Expected `weighting`"),
        (lambda: FedBuff(2, record="a", replay="b"), "only one of `record` and `replay`"),
        (lambda: FedAsync(1.5), "Expected `alpha` to be at most 1"),
    ],
)
def test_steps_and_options_without_a_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"availability": Availability(stragglers=0.5)}, "describe slow clients in `durations`"),
        ({"faults": Faults(min_clients=3)}, "`min_clients` to be at most the buffer size 2"),
        (
            {"method": Method(FedBuff(2), callbacks=[GradientCorrection()])},
            "Expected no `GradientCorrection` with FedBuff",
        ),
        ({"method": FedBuff(6)}, r"`buffer` to be at most the number of clients \(5\)"),
    ],
    ids=["availability", "min_clients", "second exchange", "buffer"],
)
def test_settings_without_a_meaning_are_refused_before_training(options, message, federated_trainer):
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        fitted(federated_trainer, **{"method": FedBuff(2), **options})
