"""Update steps that bound a client's influence, by step length and by weight; invalid updates."""

import copy
import pickle

import pytest
import torch

from lightning_fed import Federation
from lightning_fed.algorithms import FedAvg, FedMA
from lightning_fed.batch_norm.pooling import limit_counts
from lightning_fed.messages import ClientUpdate
from lightning_fed.method import build_method
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import RoundReport, Server
from lightning_fed.steps import MaxMedianNorm, MaxNorm, MaxSamples, UniformWeights
from lightning_fed.steps.chain import Chain
from tests.recorders import assert_same

START = {"w": torch.tensor([[1.0, -1.0], [0.5, 0.0]]), "b": torch.tensor([0.5]), "steps": torch.tensor(3)}
STEPS = {"a": 1.0, "b": 2.0, "c": -3.0, "bad": 100.0}
SAMPLES = {"a": 10, "b": 20, "c": 5, "bad": 1000}
BOUNDS = [MaxNorm(2.5), MaxMedianNorm(1.25)]
RULES = ["fedavg", "fairavg", "fedprox", "fedavgm", "fedadam", "fedatt", "fesem", "fedmargin"]


def moved(step):
    direction = {"w": torch.tensor([[0.5, 0.5], [-0.5, 0.1]]), "b": torch.tensor([-0.4898979])}
    return {name: value + step * direction[name] if name in direction else value + 1 for name, value in START.items()}


def serve(server, steps=STEPS, samples=SAMPLES, trainable=None):
    server.start_round(RoundInfo(0, trainable=trainable), {name: value.clone() for name, value in START.items()})
    for client in steps:
        server.prepare(client)
    for client, step in steps.items():
        update = ClientUpdate(client, samples[client], moved(step))
        assert server.count(update)
        server.accept(update)
    return server.finish_round()


def server_of(method="fedavg", *steps):
    method = build_method(method)
    return Server(Chain(method.aggregator, [*method.steps, *steps]))


def shortened(server):
    return server.chain.metrics(server.report.norms)["fed/shortened"]


def close(state, expected):
    for name, value in expected.items():
        torch.testing.assert_close(state[name].double(), value.double(), rtol=1e-5, atol=1e-6)


# --- Bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", BOUNDS)
def test_a_long_step_is_shortened(limit):
    """The lower median of 1, 2, 3 and 100 is 2."""
    server = server_of("fedavg", limit)
    state = serve(server)
    steps = {client: max(-2.5, min(2.5, step)) for client, step in STEPS.items()}
    total = sum(SAMPLES.values())
    for name in ("w", "b"):
        mean = sum(SAMPLES[client] * moved(step)[name].double() for client, step in steps.items()) / total
        torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-6)
    assert server.report.norms == pytest.approx({client: abs(step) for client, step in STEPS.items()}, rel=1e-5)
    assert shortened(server) == 2


@pytest.mark.parametrize("limit", BOUNDS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_sees_the_shortened_steps(rule, limit):
    """Equals a round in which clients move no further than the bound, for any rule."""
    honest = {client: max(-2.5, min(2.5, step)) for client, step in STEPS.items()}
    limited = serve(server_of(rule, limit))
    close(limited, serve(server_of(rule), honest))
    free = serve(server_of(rule))
    # FedAtt and adaptive optimizers bound or rescale steps themselves; other rules follow the long step.
    if rule not in ("fedadam", "fedatt", "fesem"):
        assert float((free["w"] - limited["w"]).norm()) > 1


def test_without_a_long_step_nothing_changes():
    steps = {"a": 1.0, "b": -2.0, "c": 2.0}
    for limit in (MaxNorm(2.1), MaxMedianNorm(2.0)):
        server = server_of("fedavg", limit)
        assert_same(serve(server, steps), serve(server_of(), steps))
        assert shortened(server) == 0


def test_a_median_of_nothing_limits_nothing():
    steps = {"a": 0.0, "b": 0.0, "c": 2.0}
    assert_same(serve(server_of("fedavg", MaxMedianNorm(2.0)), steps), serve(server_of(), steps))


def test_one_of_two_clients_cannot_raise_the_limit():
    server = server_of("fairavg", MaxMedianNorm(1.0))
    close(serve(server, {"a": 1.0, "bad": 100.0}), {name: moved(1.0)[name] for name in ("w", "b")})
    assert shortened(server) == 1


def test_only_what_trains_is_measured_and_shortened():
    server = server_of("fedavg", MaxNorm(2.0))
    state = serve(server, {"bad": 100.0}, {"bad": 1}, frozenset({"w"}))
    assert state["b"].tolist() == moved(100.0)["b"].tolist()
    assert float((state["w"] - START["w"]).norm()) == pytest.approx(2.0, rel=1e-5)
    running = {"w": torch.ones(2), "1.running_mean": torch.ones(2)}
    server = server_of("fedavg", MaxNorm(1.0))
    server.start_round(RoundInfo(0), running)
    server.prepare("a")
    update = ClientUpdate("a", 1, {name: 11 * value for name, value in running.items()})
    assert server.count(update)
    assert server.accept(update)
    state = server.finish_round()
    assert state["1.running_mean"].tolist() == [11.0, 11.0]  # has separate checks
    assert float((state["w"] - 1).norm()) == pytest.approx(1.0)


def test_the_median_is_that_of_all_processes():
    """Each process has some of the clients; chains merge after all updates."""
    whole = serve(server_of("fedavg", MaxMedianNorm(1.25)))
    servers = [server_of("fedavg", MaxMedianNorm(1.25)) for _ in range(2)]
    for server, share in zip(servers, [("a", "bad"), ("b", "c")], strict=True):
        server.start_round(RoundInfo(0), {name: value.clone() for name, value in START.items()})
        for client in share:
            server.prepare(client)
            update = ClientUpdate(client, SAMPLES[client], moved(STEPS[client]))
            assert server.count(update)
            assert server.accept(update)
    servers[0].chain.merge(pickle.loads(pickle.dumps(servers[1].chain.part)))
    reports = [server.report for server in servers]
    servers[0].report = RoundReport.joined(reports, {client: index for index, client in enumerate(STEPS)})
    close(servers[0].finish_round(), whole)
    assert shortened(servers[0]) == 2


# --- Weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_counts_what_counts(rule):
    steps = {client: step for client, step in STEPS.items() if client != "bad"} | {"bad": 4.0}
    capped = {client: min(samples, 20) for client, samples in SAMPLES.items()}
    server = server_of(rule, MaxSamples(20))
    assert_same(serve(server, steps), serve(server_of(rule), steps, capped))
    assert server.report.received == SAMPLES  # the log contains the reported numbers
    server = server_of(rule, UniformWeights())
    assert_same(serve(server, steps), serve(server_of(rule), steps, dict.fromkeys(SAMPLES, 1)))


def test_uniform_fedavg_is_fairavg():
    assert_same(serve(server_of("fedavg", UniformWeights())), serve(server_of("fairavg")))


def test_counts_of_statistics_follow():
    """Unbounded counts do not change; with bounds, no client dominates the pooled statistics."""
    counts = {"a": 640.0, "b": 1280.0, "c": 1e12}
    reports = [{"batch_norm:0:count": torch.tensor(count)} for count in counts.values()]
    assert [float(report["batch_norm:0:count"]) for report in limit_counts(reports, [10, 20, 30], [10, 20, 20])] == [
        640.0, 1280.0, 1280.0,
    ]  # fmt: skip
    missing = [reports[0], {}]
    assert limit_counts(missing, [10, 20], [1, 1]) == [{"batch_norm:0:count": torch.tensor(640.0)}, {}]
    alike = limit_counts(reports[:2], [10, 20], [1, 1])  # not 64: the pooled variance is not from two examples
    assert [float(report["batch_norm:0:count"]) for report in alike] == [640.0, 640.0]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "3 * median"])
@pytest.mark.parametrize(("step", "argument"), [(MaxNorm, "bound"), (MaxMedianNorm, "multiple"), (MaxSamples, "most")])
def test_bounds_that_make_no_sense(step, argument, value):
    with pytest.raises(ValueError, match=f"Expected `{argument}`"):
        step(value)


@pytest.mark.parametrize("step", BOUNDS, ids=lambda step: type(step).__name__)
def test_models_of_any_shape_have_no_steps(step):
    with pytest.raises(ValueError, match=f"Expected no `{type(step).__name__}` with FedMA"):
        Federation(FedMA(), steps=[step])


# --- Invalid updates --------------------------------------------------------------------------------------------------


BAD = {
    "10**18 examples": ({}, 10**18, "the client reports 1000000000000000000 examples"),
    "half an example": ({}, 0.5, "the client reports 0.5 examples"),
    "a truth of examples": ({}, True, "the client reports True examples"),
    "weights that overflow": (
        {"w": torch.full((2, 2), 3e38)},
        1,
        "the root mean square of all values is inf, but the limit is 1e+10",
    ),
    "weights of no model": ({"w": torch.full((2, 2), 1e12)}, 1, "the root mean square of all values is 7.56e+11"),
    "a step of no training": (
        {"w": torch.full((2, 2), 9e9)},
        1,
        "the client's update has norm 1.8e+10, far above the model's norm 1.58",
    ),
    "a negative variance": ({"n.running_var": torch.tensor([1.0, -1.0])}, 1, "entry 'n.running_var' is negative"),
    "a negative count": ({"n.num_batches_tracked": torch.tensor(-1)}, 1, "'n.num_batches_tracked' is negative"),
}


class Resizing(FedAvg):
    """A rule with models in different shapes."""

    resizes = True


@pytest.mark.parametrize("resizes", [False, True])
@pytest.mark.parametrize(("change", "samples", "reason"), BAD.values(), ids=BAD)
def test_what_no_training_can_make_is_left_out(change, samples, reason, resizes):
    start = START | {"n.running_var": torch.ones(2), "n.num_batches_tracked": torch.tensor(0)}
    server = Server(Chain(Resizing() if resizes else FedAvg()))
    server.start_round(RoundInfo(0), start)
    for client, state, count in (("good", start, 1), ("bad", start | change, samples)):
        server.prepare(client)
        update = ClientUpdate(client, count, {name: value.clone() for name, value in state.items()})
        assert server.count(update)
        assert server.accept(update) == (client == "good")
    assert reason in server.report.failed["bad"]
    assert_same(server.finish_round(), start)


class Careless(FedAvg):
    def receive(self, update):
        update.extras["needed"].item()
        super().receive(update)


def test_an_error_of_the_rule_is_the_clients():
    server = Server(Chain(Careless()))
    server.start_round(RoundInfo(0), START)
    for client in ("good", "bad"):
        server.prepare(client)
        extras = {"needed": torch.tensor(1)} if client == "good" else {}
        update = ClientUpdate(client, 1, copy.deepcopy(START), extras)
        assert server.count(update)
        assert server.accept(update) == (client == "good")
    assert server.report.failed == {"bad": "the client's update raised KeyError: 'needed' on the server"}
    assert isinstance(server.errors["bad"], KeyError)
    assert server.errors["bad"].__traceback__ is None
    assert "in receive" in server.errors["bad"].__notes__[0]
    server.start_round(RoundInfo(1), START)
    assert server.errors == {}


class Inverting(FedAvg):
    """A rule that aggregates negative variances."""

    def aggregate(self):
        return {name: -value for name, value in super().aggregate().items()}


def test_an_aggregate_that_cannot_be_is_taken_back(caplog):
    server = Server(Chain(Inverting()))
    start = {"n.running_var": torch.ones(2)}
    server.start_round(RoundInfo(0), start)
    server.prepare("a")
    update = ClientUpdate("a", 1, {"n.running_var": torch.ones(2)})
    assert server.count(update)
    assert server.accept(update)
    assert server.finish_round() is None
    assert "Round 1: the aggregate is discarded: entry 'n.running_var' is negative." in caplog.text


@pytest.mark.parametrize("rule", ["qffl", "krum", "fedmargin"])
def test_processes_with_different_rules_are_not_merged(rule):
    """The sums of q-FedAvg and FedAvg have equal forms, so merging would give a wrong mean."""
    with pytest.raises(TypeError, match="same rule and steps"):
        Chain(FedAvg()).merge(Chain(build_method(rule).aggregator).part)
