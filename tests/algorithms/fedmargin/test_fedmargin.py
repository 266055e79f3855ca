"""FedMargin by messages, with the numbers of specs/fedmargin.md, section 8; and complete fits against plain loops."""

import copy
import io
import itertools
import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import Faults, FederatedCallback, FederatedDataModule, Federation
from lightning_fed.algorithms import FedAvgM, FedMargin
from lightning_fed.algorithms.fedmargin import (
    Prototypes,
    find_outlying_prototypes,
    local_prototype_margin,
    lpm_key,
    pack_prototypes,
)
from lightning_fed.algorithms.server_optimizer import ServerOptimizer
from lightning_fed.callbacks import ClassPrototypes
from lightning_fed.data import ByGroup
from lightning_fed.errors import BadUpdate, OptionError
from lightning_fed.messages import ClientUpdate, Request
from lightning_fed.method import build_method
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps.chain import Chain
from tests import models
from tests.breadth import quick, slow
from tests.chains import chain_of, one_round
from tests.recorders import MemoryLogger, Recorder, assert_same, bytes_of, state_of
from tests.references import average_reference
from tests.references_margin import AFTER, BEFORE, COUNTS, PREVIOUS, SIZES, WEIGHTS, fedmargin_reference

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SEED = 5
FEW = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}
ALL = {0: (0, 0), 1: (3, 0), 2: (0, 3)}  # the aggregate, completed with the new class


def close(values, expected):
    torch.testing.assert_close(
        torch.as_tensor(values, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0
    )


def prototypes(vectors, counts=None, size=3):
    """From dictionaries with vectors and counts by class."""
    width = len(next(iter(vectors.values())))
    means, numbers = torch.zeros(size, width), torch.zeros(size, dtype=torch.int64)
    for name, vector in vectors.items():
        means[name], numbers[name] = torch.tensor(vector, dtype=torch.float32), (counts or {}).get(name, 1)
    return Prototypes(means, numbers)


def message(client, state, before, after, counts=None, num_samples=10, margin="semantic", reduction="mean", scale=1):
    """A client's update with prototypes and margin."""
    after, before = prototypes(after, counts), prototypes(before)
    after, before = (Prototypes(scale * one.means, one.counts) for one in (after, before))
    lpm = local_prototype_margin(
        after, before, margin=margin, class_reduction=reduction, fallback=prototypes(ALL)
    )  # fmt: skip
    extras = pack_prototypes(after)
    if not lpm.isnan():
        extras[lpm_key(margin, reduction)] = lpm
    return ClientUpdate(client, num_samples, state, extras)


def example(margin="semantic", scale=1, order=(0, 1, 2)):
    return [
        message(
            f"k{index + 1}", {"w": torch.tensor(WEIGHTS[index])}, BEFORE[index], AFTER[index], COUNTS[index],
            SIZES[index], margin, scale=scale,
        )
        for index in order
    ]  # fmt: skip


def started(rule, state=None, scale=1):
    previous = prototypes(PREVIOUS, size=2)
    rule.load_state_dict({"means": scale * previous.means, "counts": previous.counts})
    rule.start(RoundInfo(3), state or {"w": torch.tensor(0.0)})
    return rule


def aggregated(rule, updates, **options):
    started(rule, **options)
    for update in updates:
        rule.receive(copy.deepcopy(update))
    return rule.aggregate()


# --- Example ----------------------------------------------------------------------------------------------------------

STANDARD = {"attention": "softmax"}
EXAMPLES = [  # options, attention, new weight
    ({}, (0.364842, 0.313515, 0.321643), 2.278444),
    ({"combine": "lpm"}, (0.384090, 0.231819, 0.384090), None),
    ({"combine": "apm"}, (0.345594, 0.395210, 0.259196), None),
    ({"combine": "product"}, (0.409802, 0.282847, 0.307351), 2.204901),
    ({"size_weighting": True}, (0.434761, 0.373597, 0.191642), 1.948522),
    ({**STANDARD, "combine": "lpm"}, (0.379752, 0.240496, 0.379752), None),
    ({**STANDARD, "combine": "apm"}, (0.341045, 0.395781, 0.263175), None),
    (STANDARD, (0.360398, 0.318138, 0.321463), 2.282528),
    ({"margin": "hypothesis"}, (0.742652, 0.010369, 0.246979), 1.751306),
    ({"margin": "relative"}, (0.612318, 0.028040, 0.359641), 2.106964),
]


@pytest.mark.parametrize(("options", "attention", "w"), EXAMPLES)
def test_attention_of_the_example(options, attention, w):
    rule = FedMargin(**options)
    result = aggregated(rule, example(options.get("margin", "semantic")))["w"]
    assert rule.last.clients == ["k1", "k2", "k3"]
    if attention is not None:
        close(rule.last.attention, attention)
    if w is not None:
        close(result, w)
    assert sum(rule.last.attention) == pytest.approx(1)


@pytest.mark.parametrize(
    ("margin", "lpm", "apm"),
    [
        ("semantic", (0.5, 0.301777, 0.5), (0.666667, 0.762377, 0.5)),
        ("hypothesis", (1.666667, 0, 0.5), (1.360380, 0.039399, 0.5)),
        ("relative", (0.622222, 0, 0.333333), (0.516022, 0.050463, 0.333333)),
        ("gain", (0.849837, -0.25, math.nan), (1.360380, 0.039399, 0.5)),
    ],
)
def test_margins_of_the_example(margin, lpm, apm):
    rule = FedMargin(margin=margin)
    aggregated(rule, example(margin))
    torch.testing.assert_close(torch.tensor(rule.last.lpm), torch.tensor(lpm), atol=1e-5, rtol=0, equal_nan=True)
    close(rule.last.apm, apm)


@pytest.mark.parametrize(("kind", "expected"), [("pairs", 1.607624), ("nearest", 1.366665)])
def test_prototypes_of_the_example(kind, expected):
    rule = FedMargin(amm=kind)
    aggregated(rule, example())
    close(rule.prototypes.means, ((0.3375, -0.225), (2.775, 0.225), (0, 3)))
    assert rule.last.amm == pytest.approx(expected, abs=1e-5)
    assert rule.metrics()["fedmargin/amm"] == rule.last.amm


def test_prototypes_of_a_first_round():
    rule = FedMargin()
    rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
    for update in example():
        rule.receive(update)
    rule.aggregate()
    close(rule.prototypes.means, ((0.375, -0.25), (2.75, 0.25), (0, 3)))
    assert rule.prototypes.counts.tolist() == [40, 20, 40]
    assert rule.last.amm == pytest.approx(1.597952, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"proto_weighting": "uniform"}, ((0.225, -0.45), (2.775, 0.225), (0, 3))),
        ({"proto_weighting": "num_samples"}, ((0.225, -0.45), (2.775, 0.225), (0, 10 / 3))),
        ({"proto_memory": "cumulative"}, ((15 / 41, -10 / 41), (58 / 21, 5 / 21), (0, 3))),
    ],
)
def test_options_of_the_aggregate_prototypes(options, expected):
    rule = FedMargin(**options)
    aggregated(rule, example())
    close(rule.prototypes.means, expected)


# --- Properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"combine": "product"}, {"size_weighting": True}, STANDARD])
def test_the_order_of_the_clients_does_not_matter(options):
    rule = FedMargin(**options)
    expected, of = aggregated(rule, example()), dict(zip(rule.last.clients, rule.last.attention, strict=True))
    for order in itertools.permutations(range(3)):
        permuted = FedMargin(**options)
        torch.testing.assert_close(aggregated(permuted, example(order=order)), expected)
        assert dict(zip(permuted.last.clients, permuted.last.attention, strict=True)) == pytest.approx(of, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e4])
def test_the_scale_of_the_features_does_not_matter(scale):
    rule, scaled = FedMargin(), FedMargin()
    aggregated(rule, example())
    aggregated(scaled, example(scale=scale), scale=scale)
    assert scaled.last.attention == pytest.approx(rule.last.attention, rel=1e-5)
    assert scaled.last.lpm == pytest.approx([scale * value for value in rule.last.lpm], rel=1e-5)


def states(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        {"w": torch.randn(50, generator=generator).to(dtype), "steps": torch.tensor(10 + index)}
        for index in range(count)
    ]


COMBINATIONS = ["mean", "product", "lpm", "apm"]


@pytest.mark.parametrize(
    ("combine", "attention", "count"),
    quick(
        itertools.product(COMBINATIONS, ["sum", "softmax"], [1, 3, 7]),
        [*itertools.product(COMBINATIONS, ["sum", "softmax"], [3]), ("mean", "sum", 1), ("mean", "softmax", 7)],
    ),
)
def test_clients_that_move_alike_are_fairavg(combine, attention, count):
    """Bit for bit for any models, also in float64; with size weighting the result equals FedAvg."""
    sizes = [10, 30, 7, 8, 9, 100, 1][:count]
    for size_weighting, expected, dtype in ((False, "fairavg", torch.float64), (True, "fedavg", torch.float32)):
        rule = FedMargin(combine=combine, attention=attention, size_weighting=size_weighting)
        received = [
            message(index, state, {0: (0.1, 0.7), 2: (3.3, 0)}, {0: (0.2, 1.1), 2: (3.1, 0.3)}, None, size)
            for index, (state, size) in enumerate(zip(states(count, dtype), sizes, strict=True))
        ]
        start = received[0].state
        average = one_round(chain_of(expected), 0, start, received)
        average["steps"] = one_round(chain_of("fedavg"), 0, start, received)["steps"]  # from the largest client
        assert_same(average, aggregated(rule, received, state=start))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_copies_of_one_client_are_that_client(dtype):
    state = states(1, dtype)[0]
    received = [
        message(index, dict(state), {0: (0, 0)}, {0: (0.1 * index, 0.3)}, None, 1 + index) for index in range(5)
    ]
    rule = FedMargin()
    assert_same(state, aggregated(rule, received, state=state))
    assert len(set(rule.last.attention)) == 5


def test_a_client_that_did_not_move_counts_by_its_distance_alone():
    received = example()
    received[1] = message("k2", {"w": torch.tensor(2.0)}, BEFORE[1], BEFORE[1], COUNTS[1], 40)
    rule = FedMargin(combine="lpm")
    close(aggregated(rule, received)["w"], (1 + 4) / 2)
    assert rule.last.lpm[1] == rule.last.attention[1] == 0
    both = FedMargin()
    aggregated(both, received)
    assert both.last.attention[1] > 0
    nobody = [message(index, state, BEFORE[0], BEFORE[0]) for index, state in enumerate(states(3))]
    aggregated(rule, nobody, state=nobody[0].state)
    assert rule.last.attention == [1 / 3] * 3


def test_a_class_more_changes_nothing_for_clients_that_lack_it():
    rule, more = FedMargin(), FedMargin()
    aggregated(rule, example())
    received = example()
    before, after = ({**one[0], 5: (9, value)} for one, value in ((BEFORE, 9), (AFTER, 8)))
    packed = prototypes(after, {**COUNTS[0], 5: 4}, size=6)
    received[0].extras |= pack_prototypes(packed)
    aggregated(more, received)
    assert more.last.lpm[1:] == rule.last.lpm[1:]
    assert more.last.apm[1:] == rule.last.apm[1:]
    assert more.prototypes.means[5].tolist() == [9, 8]
    assert before[5] == (9, 9)


def test_clients_without_prototypes_count_like_the_mean_of_the_others():
    received = example()
    received.append(ClientUpdate("silent", 10, {"w": torch.tensor(8.0)}))
    rule = FedMargin()
    aggregated(rule, received)
    *known, silent = rule.last.attention
    assert math.isnan(rule.last.lpm[3])
    assert math.isnan(rule.last.apm[3])
    assert silent == pytest.approx(sum(known) / 3)
    assert "fedmargin/lpm/silent" not in rule.metrics()
    assert rule.metrics()["fedmargin/attention/silent"] == silent


def test_the_others_prototypes_do_not_notice_them():
    """A client without prototypes and a client without classes do not change the other weights."""
    rule, more = (FedMargin(proto_weighting="num_samples") for _ in range(2))
    aggregated(rule, example())
    empty = pack_prototypes(Prototypes(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)))
    silent = ClientUpdate("silent", 1000, {"w": torch.tensor(8.0)})
    aggregated(more, [silent, *example(), ClientUpdate("empty", 500, {"w": torch.tensor(8.0)}, empty)])
    assert torch.equal(rule.prototypes.means, more.prototypes.means)
    assert more.last.apm[1:4] == rule.last.apm
    assert math.isnan(more.last.apm[4])


def test_nobody_with_prototypes_is_fairavg():
    received = [ClientUpdate(index, 1 + index, state) for index, state in enumerate(states(3))]
    rule, start = FedMargin(), received[0].state
    assert_same(one_round(chain_of("fairavg"), 0, start, received), one_round(Chain(rule), 0, start, received))
    assert rule.prototypes is None
    assert rule.state_dict() == {}
    assert rule.metrics() == {
        "fedmargin/attention_entropy": pytest.approx(1),
        **{f"fedmargin/attention/{index}": pytest.approx(1 / 3) for index in range(3)},
    }


def test_margins_keep_their_precision():
    rule = FedMargin(combine="lpm")
    rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
    for client, margin in (("a", 0.1), ("b", 0.7)):
        extras = {"prototypes:lpm:semantic:mean": torch.tensor(margin, dtype=torch.float64)}
        rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(1.0)}, extras))
    rule.aggregate()
    assert rule.last.attention == pytest.approx([1 / 8, 7 / 8], rel=1e-14)


# --- Cohorts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(4))
def test_parts_received_apart_and_merged_are_the_whole(cut):
    received = example()
    whole, first, second = FedMargin(), started(FedMargin()), started(FedMargin())
    expected = aggregated(whole, received)
    for index, update in enumerate(received):
        (first if index < cut else second).receive(update)
    first.merge(second)
    assert_same(expected, first.aggregate())
    assert first.last == whole.last


@pytest.mark.parametrize("server_lr", [0.5, 1.0, 1.5])
def test_the_step_of_the_server(server_lr):
    """From the global model towards the weighted mean; integers and running statistics equal FedAvg."""
    names = ("w", "bn.running_var")
    received = [
        ClientUpdate(
            update.client, update.num_samples,
            {**{name: update.state["w"] for name in names}, "steps": torch.tensor(update.num_samples)}, update.extras,
        )
        for update in example()
    ]  # fmt: skip
    start = {**{name: torch.tensor(10.0) for name in names}, "steps": torch.tensor(3)}
    result = aggregated(FedMargin(server_lr=server_lr), received, state=start)
    close(result["w"], 10 + server_lr * (2.278444 - 10))
    close(result["bn.running_var"], 2.278444)
    assert result["steps"] == 40
    assert result["w"].dtype == torch.float32


def test_a_cohort_of_one():
    rule = FedMargin()
    state = states(1)[0]
    result = aggregated(rule, [message("only", dict(state), BEFORE[0], AFTER[0])], state=state)
    assert_same(state, result)
    assert rule.last.attention == [1.0]
    assert "fedmargin/attention_entropy" not in rule.metrics()
    assert rule.metrics()["fedmargin/attention/only"] == 1.0


def test_classes_that_appear_later():
    """The aggregate grows, and known prototypes do not change."""
    rule = FedMargin(proto_memory="cumulative")
    known = []
    for number, after in enumerate(({1: (1, 1)}, {0: (2, 0)}, {4: (0, 8), 1: (3, 3)})):
        rule.start(RoundInfo(number), {"w": torch.tensor(0.0)})
        packed = pack_prototypes(prototypes(after, size=9))
        rule.receive(ClientUpdate("a", 1, {"w": torch.tensor(1.0)}, packed))
        rule.aggregate()
        known.append({c: rule.prototypes.means[c].tolist() for c in rule.prototypes.present.nonzero()[:, 0].tolist()})
    assert known == [{1: [1, 1]}, {0: [2, 0], 1: [1, 1]}, {0: [2, 0], 1: [2, 2], 4: [0, 8]}]
    assert len(rule.prototypes.counts) == 5
    assert math.isnan(FedMargin().last.amm)


def test_a_round_forgets_the_updates_of_the_one_before():
    rule = FedMargin()
    aggregated(rule, example())
    assert rule.updates == []
    started(rule).receive(example()[0])
    rule.start(RoundInfo(4), {"w": torch.tensor(0.0)})
    assert rule.updates == []


def test_state_dict_goes_through_a_checkpoint():
    rule = FedMargin()
    aggregated(rule, example())
    file = io.BytesIO()
    torch.save(rule.state_dict(), file)
    file.seek(0)
    resumed = FedMargin()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for aggregator in (rule, resumed):
        aggregator.start(RoundInfo(4), {"w": torch.tensor(0.0)})
        for update in example():
            aggregator.receive(copy.deepcopy(update))
    assert_same(rule.aggregate(), resumed.aggregate())
    assert rule.last == resumed.last
    resumed.load_state_dict({})
    assert resumed.prototypes is None


@pytest.mark.parametrize("margin", ["semantic", "gain", "hypothesis", "relative"])
def test_broadcasts(margin):
    """A client with a single class receives the aggregate if the margin needs another class."""
    rule = started(FedMargin(margin=margin))
    first, second = rule.broadcast(Request("a")), rule.broadcast(Request("b"))
    assert first.round == 3
    first.state["w"] = torch.tensor(5.0)
    assert second.state["w"] == 0
    if margin in ("semantic", "gain"):
        assert first.extras == {}
    else:
        assert first.extras["prototypes:means"].tolist() == [[0, 0], [3, 0]]
    assert FedMargin(margin=margin).broadcast(Request("a")).extras == {}


def test_margins_measured_in_another_way():
    rule = started(FedMargin(class_reduction="max"))
    with pytest.raises(ValueError, match=r"'prototypes:lpm:semantic:max', but got 'prototypes:lpm:semantic:mean'"):
        rule.receive(example()[0])


BAD = {  # change to the message, and reason
    "class": ({"prototypes:classes": torch.tensor([-1, 1])}, "the invalid class -1"),
    "twice": ({"prototypes:classes": torch.tensor([1, 1])}, "a class twice"),
    "fractions": (
        {"prototypes:classes": torch.tensor([0.0, 1.0])},
        r"counts: torch.float32 of shape \(2,\), torch.float32 of",
    ),
    "integers": (
        {"prototypes:means": torch.ones(2, 2, dtype=torch.int64)},
        r"counts: torch.int64 of shape \(2,\), torch.int64 of",
    ),
    "numbers": ({"prototypes:counts": torch.tensor([5])}, r"of shape \(2, 2\), torch.int64 of shape \(1,\)"),
    "flat": (
        {"prototypes:means": torch.ones(2)},
        r"of shape \(2,\), torch.float32 of shape \(2,\), torch.int64 of shape \(2,\)",
    ),
    "nothing": ({"prototypes:counts": torch.tensor([5, 0])}, "the mean of 0 feature vectors"),
    "too many": ({"prototypes:counts": torch.tensor([5, 2**62])}, f"the mean of {2**62} feature vectors"),
    "no means": ({"prototypes:means": None}, "lack 'prototypes:means'"),
    "margins": ({"prototypes:lpm:semantic:mean": torch.ones(2)}, "margin is not a floating-point scalar"),
}


@pytest.mark.parametrize("known", ["from before", "from the round"])
@pytest.mark.parametrize("name", BAD)
def test_prototypes_that_cannot_be_used(name, known):
    changes, reason = BAD[name]
    rule, without = (started(FedMargin()) if known == "from before" else FedMargin() for _ in range(2))
    bad = ClientUpdate("bad", 10, {"w": torch.tensor(9.0)}, pack_prototypes(prototypes({0: (1, 1), 1: (2, 2)})))
    bad.extras = {key: value for key, value in (bad.extras | changes).items() if value is not None}
    first, *later = example()
    for aggregator in (rule, without):
        aggregator.start(RoundInfo(3), {"w": torch.tensor(0.0)})
        aggregator.receive(copy.deepcopy(first))
    with pytest.raises(BadUpdate, match=reason):
        rule.receive(bad)
    for update in later:
        rule.receive(copy.deepcopy(update))
        without.receive(copy.deepcopy(update))
    assert_same(without.aggregate(), rule.aggregate())
    assert rule.last == without.last


@pytest.mark.parametrize("steps", [[], [ServerOptimizer("SGD", lr=1.0)]])
@pytest.mark.parametrize("first", ["k1", "k2"])
def test_whose_prototypes_have_other_features_is_left_out_by_name(first, steps):
    """The result equals a round without the client, even if the bad message is the first in the first round."""
    rule, without, state = FedMargin(), FedMargin(), {"w": torch.tensor(0.0)}
    server = Server(Chain(rule, steps))
    updates = sorted(example(), key=lambda update: update.client != first)
    server.start_round(RoundInfo(0), state)
    without.start(RoundInfo(0), state)
    for update in updates:
        server.prepare(update.client)
        if update.client == first:
            update.extras["prototypes:means"] = torch.ones(len(update.extras["prototypes:means"]), 7)
        else:
            without.receive(copy.deepcopy(update))
        update.metrics["lpm"] = 1.0
        assert server.count(update)
        assert server.accept(update)
    assert_same(without.aggregate(), server.finish_round())
    assert server.report.failed == {first: "the client's prototypes have 7 features instead of 2"}
    assert first not in server.report.received
    assert first not in server.report.metrics
    assert len(server.report.received) == 2
    assert_same(without.state_dict(), rule.state_dict())


def test_left_out_clients_are_not_counted():
    server = Server(Chain(FedMargin()), min_clients=3)
    server.start_round(RoundInfo(0), {"w": torch.tensor(0.0)})
    for update in example():
        server.prepare(update.client)
        if update.client == "k3":
            update.extras["prototypes:means"] = torch.ones(1, 3)
        assert server.count(update)
        server.accept(update)
    assert server.finish_round() is None
    assert server.rule.prototypes is None


def test_classes_that_are_none():
    """With a known number of classes, the aggregate gets no row for a class out of range."""
    for wrong in (3, 10**12):
        rule = started(FedMargin())
        rule.num_classes = 3
        first, second, third = example()
        first.extras["prototypes:classes"] = torch.tensor([0, 1, wrong])
        with pytest.raises(BadUpdate, match=f"include class {wrong} instead of only 0 to 2"):
            rule.receive(first)
        for update in (second, third):
            rule.receive(update)
        rule.aggregate()
        assert rule.prototypes.means.shape == (3, 2)


def test_a_client_alone_locks_nobody_out(caplog):
    """A single client in a round cannot be compared; the next round resets the prototypes with a warning."""
    server, state = Server(Chain(FedMargin())), {"w": torch.tensor(0.0)}
    for round, widths in enumerate([[3], [2, 2], [5, 2], [4, 4, 2]]):
        server.start_round(RoundInfo(round), state)
        for index, width in enumerate(widths):
            server.prepare(f"k{index}")
            extras = pack_prototypes(prototypes({0: (1,) * width, 1: (0,) * width}))
            update = ClientUpdate(f"k{index}", 1, state, extras)
            assert server.count(update)
            server.accept(update)
        assert server.finish_round() is not None
        most = max(widths, key=lambda width: (widths.count(width), width == 2))
        assert list(server.report.failed) == [f"k{index}" for index, width in enumerate(widths) if width != most]
        assert server.rule.prototypes.means.shape == (2, most)
    assert [record.getMessage() for record in caplog.records if "are reset" in record.getMessage()] == [
        "Round 2: the aggregate prototypes are reset: the clients' prototypes have 2 features, not 3.",
        "Round 4: the aggregate prototypes are reset: the clients' prototypes have 4 features, not 2.",
    ]


class Tampers(FederatedCallback):
    def __init__(self, client, change):
        self.client, self.change = client, change

    def on_client_end(self, trainer, module, client, update):
        if (client, trainer.current_epoch) == (self.client, 0):
            self.change(update.extras)


def narrowed(extras):
    extras["prototypes:means"] = extras["prototypes:means"][:, :3]


def another_class(extras):
    extras["prototypes:classes"] = extras["prototypes:classes"].clone()
    extras["prototypes:classes"][-1] = 5000


@pytest.mark.parametrize(
    ("change", "who", "margin"),
    quick(
        itertools.product([narrowed, another_class], ["all", "one"], ["semantic", "hypothesis"]),
        [
            (narrowed, "all", "semantic"),
            (another_class, "one", "semantic"),
            (narrowed, "one", "hypothesis"),
        ],
    ),
)
def test_a_fit_goes_on_without_one_client(change, who, margin, federated_trainer):
    data, failed, is_alone = models.vectors(FEW), [], who == "one"
    per_round = 1 if is_alone else 1.0
    first = Federation("fedavg", clients_per_round=per_round).schedule.cohort(0, list(data)).visits[0].client

    class Notes(FederatedCallback):
        def on_server_round_end(self, trainer, module, *_):
            failed.append(list(trainer.federation.server.report.failed))

    trainer = federated_trainer(
        max_rounds=3, method=FedMargin(margin), clients_per_round=per_round, callbacks=[Tampers(first, change), Notes()]
    )
    trainer.fit(models.Module(models.mlp()), models.as_datasets(data))
    assert failed == [[] if is_alone and change is narrowed else [first], [], []]
    assert trainer.federation.server.rule.prototypes.means.shape == (3, 8)


def test_the_first_prototypes_may_have_any_features():
    """Even after clients without any class."""
    rule = FedMargin()
    rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
    empty = Prototypes(torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64))
    rule.receive(ClientUpdate("empty", 1, {"w": torch.tensor(1.0)}, pack_prototypes(empty)))
    for update in example():
        rule.receive(update)
    rule.aggregate()
    assert rule.prototypes.means.shape == (3, 2)


@pytest.mark.parametrize("kind", ["fedmargin", slow("with momentum"), "last_local"])
def test_resuming_with_another_layer(kind, federated_trainer, tmp_path):
    """Refused before training if earlier prototypes are needed for comparison."""

    def fit(rounds, layer, kind, path=None):
        prototypes = ClassPrototypes(
            layer=layer, num_classes=3, lpm_before="last_local" if kind == "last_local" else "download"
        )
        methods = {"fedmargin": FedMargin(), "with momentum": FedAvgM(aggregator="fedmargin")}
        method = methods.get(kind, "fedavg")
        trainer = federated_trainer(max_rounds=rounds, method=method, callbacks=[prototypes, recorder])
        trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(FEW)), ckpt_path=path)
        return trainer

    path, recorder = tmp_path / "one.ckpt", Recorder()
    fit(1, "net.0", kind).save_checkpoint(path)
    recorder = Recorder()
    with pytest.raises(
        OptionError, match=r"`layer` .* checkpoint, the output of 'net.0', but got the input of 'net.2'"
    ):
        fit(2, "auto", kind, path)
    assert recorder.visits == []
    fit(2, "net.0", kind, path)
    assert len(recorder.visits) == 5
    path = tmp_path / "other.ckpt"
    fit(1, "net.0", "neither").save_checkpoint(path)
    fit(2, "auto", "neither", path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": "wide"}, r"`margin` .*, but got 'wide'"),
        ({"class_reduction": "median"}, r"`class_reduction` .*, but got 'median'"),
        ({"attention": "all"}, r"`attention` .*, but got 'all'"),
        ({"combine": "max"}, r"`combine` .*, but got 'max'"),
        ({"proto_weighting": "none"}, r"`proto_weighting` .*, but got 'none'"),
        ({"proto_memory": "long"}, r"`proto_memory` .*, but got 'long'"),
        ({"server_lr": None}, "`server_lr` to be a number, but got None"),
        ({"amm": "far"}, r"`amm` .*, but got 'far'"),
        ({"server_lr": 0.0}, "`server_lr` to be greater than 0 and finite, but got 0.0"),
        ({"server_lr": math.inf}, "`server_lr` to be greater than 0 and finite, but got inf"),
    ],
)
def test_options_that_are_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        FedMargin(**options)


def test_by_name():
    assert type(build_method("FedMargin").aggregator) is FedMargin
    (needed,) = build_method(FedMargin(margin="gain", class_reduction="sum")).callbacks
    assert isinstance(needed, ClassPrototypes)
    assert (needed.margin, needed.class_reduction) == ("gain", "sum")


# --- Fits -------------------------------------------------------------------------------------------------------------


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("cohort", "door"),
    quick(itertools.product([5, 3], ["trainer", "callback"]), [(3, "callback")]),
)
def test_fits_are_the_reference(cohort, door, federated_trainer, plain_trainer):
    """Three rounds of a small MLP, with all clients and with some, against a loop written from the spec."""
    clients, net = models.vectors(FEW), models.dropout_mlp()
    expected = fedmargin_reference(
        net, net[:3], clients, cross_entropy, models.momentum,
        rounds=3, cohort_size=cohort, seed=SEED, batch_size=32, epochs=2,
    )  # fmt: skip
    recorder, logger, module = Recorder(), MemoryLogger(), models.Module(models.dropout_mlp(), models.momentum)
    options = {"method": "fedmargin", "clients_per_round": cohort, "local_epochs": 2, "seed": SEED}
    if door == "trainer":
        trainer = federated_trainer(max_rounds=3, callbacks=[recorder], logger=logger, **options)
        trainer.fit(module, models.as_datasets(clients))
    else:
        federation = Federation(partition=ByGroup(models.pooled(clients)[1]), **options)
        trainer = plain_trainer(max_epochs=3, callbacks=[federation, recorder], logger=logger)
        trainer.fit(module, datamodule=models.PooledData(clients))
    for number, (state, report) in enumerate(expected):
        for name, value in state.items():
            torch.testing.assert_close(recorder.aggregates[number][f"net.{name}"], value, rtol=1e-5, atol=1e-6)
        logged = recorder.logged[number]
        assert logged["fedmargin/amm"] == pytest.approx(report["amm"], rel=1e-4)
        for name in ("lpm", "apm", "attention"):
            assert set(report[name]) == {visit.client for visit in recorder.round(number)}
            for client, value in report[name].items():
                assert logged[f"fedmargin/{name}/{client}"] == pytest.approx(value, rel=1e-4)
        shares = report["attention"].values()
        entropy = -sum(share * math.log(share) for share in shares) / math.log(len(shares))
        assert logged["fedmargin/attention_entropy"] == pytest.approx(entropy, rel=1e-5)
        assert logged["clients/lpm"] == pytest.approx(sum(report["lpm"].values()) / cohort, rel=1e-4)
    assert [step for step, _ in logger.curve("fedmargin/amm")] == [0, 1, 2]
    assert len({round(share, 4) for share in expected[-1][1]["attention"].values()}) == cohort


@pytest.mark.slow
def test_a_segmentation_model(federated_trainer):
    """The aggregate is the mean of the updates, weighted by the logged attention."""
    clients = models.scenes({"ann": 5, "bob": 4, "cid": 3})
    recorder, module = Recorder(), models.Module(models.unet(), models.momentum)
    trainer = federated_trainer(
        max_rounds=2, method="fedmargin", callbacks=[recorder], seed=SEED, batch_norm="recalibrate"
    )
    trainer.fit(module, models.as_datasets(clients))
    for number in range(2):
        shares = [recorder.logged[number][f"fedmargin/attention/{client}"] for client in clients]
        visits = recorder.round(number)
        expected = average_reference([visit.update for visit in visits], shares)
        for name, value in expected.items():
            if value.is_floating_point():
                torch.testing.assert_close(recorder.aggregates[number][name], value, rtol=1e-5, atol=1e-7)
        assert len(set(shares)) == 3


def test_clients_that_cannot_be_measured(federated_trainer, caplog):
    """Their updates count with the mean attention of the other clients."""

    class Fails(TensorDataset):
        is_broken = False

        def __getitems__(self, indices):
            if self.is_broken:
                raise OSError("the disk is gone")
            return [self[index] for index in indices]

    class Break(FederatedCallback):
        def __init__(self, is_broken):
            self.is_broken = is_broken

        def on_client_start(self, trainer, module, client, broadcast):
            data["bob"].is_broken = self.is_broken

        def on_client_end(self, trainer, module, client, update):
            data["bob"].is_broken = self.is_broken

    clients = models.vectors(FEW)
    data = models.as_datasets(clients)
    data["bob"] = Fails(*clients["bob"])
    trainer = federated_trainer(
        max_rounds=1, method="fedmargin", callbacks=[Break(True), ClassPrototypes(), Break(False)]
    )
    trainer.fit(models.Module(models.mlp()), FederatedDataModule(data, batch_size=8))
    assert trainer.callback_metrics["fed/clients"] == 5
    assert trainer.callback_metrics["fedmargin/attention/bob"] == pytest.approx(1 / 5)
    assert "fedmargin/lpm/bob" not in trainer.callback_metrics
    assert "The prototypes of client 'bob' are excluded: OSError" in caplog.text


def test_the_callback_is_added_where_there_is_none(federated_trainer, plain_trainer):
    clients = models.as_datasets(models.vectors(FEW))

    def of(trainer):
        return [callback for callback in trainer.callbacks if isinstance(callback, ClassPrototypes)]

    trainer = federated_trainer(max_rounds=1, method=FedMargin(margin="gain"))
    trainer.fit(models.Module(models.mlp()), clients)
    assert [callback.margin for callback in of(trainer)] == ["gain"]
    prototypes = ClassPrototypes(layer="net.0")
    trainer = plain_trainer(max_epochs=1, callbacks=[prototypes, Federation("fedmargin")])
    trainer.fit(models.Module(models.mlp()), datamodule=FederatedDataModule(clients))
    assert of(trainer) == [prototypes]


def test_options_that_contradict_those_of_the_callback(federated_trainer):
    trainer = federated_trainer(
        max_rounds=1, method=FedMargin(margin="hypothesis"), callbacks=[ClassPrototypes(margin="semantic")]
    )
    with pytest.raises(ValueError, match="pass the same `margin`") as caught:
        trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(FEW)))
    assert any("In round 1 all 5 clients failed with this error" in note for note in caught.value.__notes__)


def test_one_client_with_another_margin_is_left_out():
    server = Server(Chain(FedMargin(margin="semantic")))
    server.start_round(RoundInfo(0), {"w": torch.tensor(WEIGHTS[0])})
    for update in example():
        server.prepare(update.client)
        if update.client == "k1":
            update.extras[lpm_key("relative", "min")] = update.extras.pop(lpm_key("semantic", "mean"))
        assert (server.count(update) and server.accept(update)) == (update.client != "k1")
    assert server.finish_round() is not None
    assert "pass the same `margin`" in server.report.failed["k1"]


def claim(client, value, lpm, vectors=AFTER[1]):
    return ClientUpdate(
        client, 1, {"w": torch.tensor(value)},
        pack_prototypes(prototypes(vectors)) | {lpm_key("semantic", "mean"): torch.tensor(lpm)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"lpm": 1e9}, "the client's prototype margin is 1e+09, but the median is 1"),
        ({"lpm": -1.0}, "the client's prototype margin is a negative distance"),
        ({"lpm": 1.0, "vectors": {0: (1e9, 0)}}, "the client's longest prototype has the length 1e+09"),
    ],
)
def test_a_claim_that_cannot_be_is_left_out(bad, reason):
    """Without the check, one of four clients with a claimed margin of 1e9 had 0.69 of the attention."""
    aggregates = []
    for is_there in (False, True):
        rule = FedMargin()
        server = Server(Chain(rule))
        server.start_round(RoundInfo(0), {"w": torch.tensor(0.0)})
        updates = [claim(client, 1.0, lpm) for client, lpm in (("a", 0.5), ("b", 1.0), ("c", 1.5))]
        for update in updates + [claim("bad", 100.0, **bad)] * is_there:
            server.prepare(update.client)
            server.count(update)
            server.accept(update)
        aggregates.append(server.finish_round() | rule.state_dict())
    assert_same(*aggregates)
    assert reason in server.report.failed["bad"]


@pytest.mark.parametrize("margin", ["hypothesis", "relative", "gain"])
def test_margins_with_signs_are_compared_with_the_prototypes_lengths(margin):
    """On Synthetic the median margin was 0.03 in some rounds, and honest clients with a margin of 3 were excluded."""
    packed = pack_prototypes(prototypes({0: (3.0, 4.0), 1: (0.0, 1.0)}))
    margins = {"a": 0.001, "b": -0.001, "c": 0.002, "wide": 4.9, "false": 501.0}
    extras = {client: packed | {lpm_key(margin, "mean"): torch.tensor(value)} for client, value in margins.items()}
    assert find_outlying_prototypes(extras) == {
        "false": "the client's prototype margin is 501, but the median is 0.002"
    }
    semantic = {
        client: packed | {lpm_key("semantic", "mean"): torch.tensor(value)} for client, value in margins.items()
    }
    assert list(find_outlying_prototypes(semantic)) == ["wide", "false"]


def test_margins_of_two_clients_are_not_compared():
    server = Server(Chain(FedMargin()))
    server.start_round(RoundInfo(0), {"w": torch.tensor(0.0)})
    for update in (claim("a", 1.0, 1e-9), claim("b", 1.0, 1.0)):
        server.prepare(update.client)
        assert server.count(update)
        assert server.accept(update)
    assert server.finish_round() is not None
    assert server.report.failed == {}


def test_what_travels_is_counted(federated_trainer):
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=2, method=FedMargin(margin="hypothesis"), callbacks=[recorder])
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(FEW)))
    size = bytes_of(state_of(models.mlp()))
    assert recorder.down_bytes == [5 * size, 5 * (size + 3 * (8 * 4 + 8 + 8))]
    for number, logged in enumerate(recorder.logged):
        assert logged["comm/down_bytes"] == recorder.down_bytes[number]
        assert logged["comm/up_bytes"] == recorder.up_bytes[number]


def test_many_clients_are_not_logged_by_name(federated_trainer):
    clients = models.as_datasets(models.vectors({f"c{index}": 8 for index in range(21)}))
    logged = []
    for count in (20, 21):
        trainer = federated_trainer(max_rounds=1, method="fedmargin", clients_per_round=count)
        trainer.fit(models.Module(models.mlp()), clients)
        logged.append([name for name in trainer.callback_metrics if name.startswith("fedmargin/")])
    assert len(logged[0]) == 2 + 3 * 20
    assert sorted(logged[1]) == ["fedmargin/amm", "fedmargin/attention_entropy"]


def test_a_round_that_comes_to_nothing_is_not_remembered(federated_trainer):
    """With too few valid updates, global model and aggregate prototypes do not change."""

    class Nonsense(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1 and client != "ann":
                update.state["net.0.bias"] = update.state["net.0.bias"] * math.nan

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append((state_of(pl_module), copy.deepcopy(trainer.federation.server.rule.state_dict())))

    seen, faults = [], Faults(min_clients=2)
    trainer = federated_trainer(max_rounds=2, method=FedMargin(), faults=faults, callbacks=[Nonsense(), Look()])
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(FEW)))
    for first, second in zip(*seen, strict=True):
        assert_same(first, second)


def test_a_second_fit_starts_anew(federated_trainer):
    clients = models.as_datasets(models.vectors(FEW))
    federation = Federation("fedmargin", seed=SEED)
    results = []
    for _ in range(2):
        module = models.Module(nn.Sequential(*models.mlp()))
        federated_trainer(max_rounds=2, federation=federation).fit(module, clients)
        results.append(state_of(module))
    assert_same(*results)
