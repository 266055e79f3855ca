"""FedAvg and FairAvg on the numbers of specs/baselines.md, whole and in parts."""

import itertools

import pytest
import torch

from lightning_fed.algorithms import FairAvg, FedAvg
from lightning_fed.messages import ClientUpdate, Request
from lightning_fed.method import build_aggregator
from lightning_fed.rule import RoundInfo

RULES = {FedAvg: 2.25, FairAvg: 1.5}  # w_t = 1, w_1 = 0 (n = 1), w_2 = 3 (n = 3)


def updates(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [1 + 7 * place % 11 for place in range(count)]
    return [
        ClientUpdate(
            place,
            sizes[place],
            {"w": torch.randn(3, 2, generator=generator), "steps": torch.tensor(sizes[place] * 10)},
        )
        for place in range(count)
    ]


def aggregated(rule, received):
    rule.start(RoundInfo(0), received[0].state)
    for update in received:
        rule.receive(update)
    return rule.aggregate()


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("rule", RULES)
def test_the_example_of_the_spec(rule):
    aggregator = rule()
    aggregator.start(RoundInfo(0), {"w": torch.tensor(1.0)})
    aggregator.receive(ClientUpdate(1, 1, {"w": torch.tensor(0.0)}))
    aggregator.receive(ClientUpdate(2, 3, {"w": torch.tensor(3.0)}))
    assert aggregator.aggregate()["w"].item() == RULES[rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cuts", [(0, 3), (2, 5), (1, 2), (5, 5)])
def test_shards_merge_to_the_whole(rule, cuts):
    received = updates(6)
    whole = aggregated(rule(), received)
    shards = []
    for start, stop in itertools.pairwise((0, *cuts, 6)):
        shard = rule()
        shard.start(RoundInfo(0), received[0].state)
        for update in received[start:stop]:
            shard.receive(update)
        shards.append(shard)
    first, *others = shards
    for other in others:
        first.merge(other)
    assert equal(first.aggregate(), whole)
    nested = rule()
    nested.start(RoundInfo(0), received[0].state)
    nested.merge(first)
    assert equal(nested.aggregate(), whole)


@pytest.mark.parametrize("rule", RULES)
def test_order_does_not_matter(rule):
    received = updates(4)
    whole = aggregated(rule(), received)
    assert all(equal(aggregated(rule(), list(order)), whole) for order in itertools.permutations(received))


@pytest.mark.parametrize("rule", RULES)
def test_identical_clients(rule):
    state = updates(1)[0].state
    received = [ClientUpdate(place, place + 1, {**state}) for place in range(7)]
    assert equal(aggregated(rule(), received), state)


def test_a_round_forgets_the_one_before():
    rule = FedAvg()
    aggregated(rule, updates(3))
    assert equal(aggregated(rule, updates(1, seed=5)), updates(1, seed=5)[0].state)


def test_broadcasts():
    rule = FedAvg()
    state = {"w": torch.ones(2)}
    rule.start(RoundInfo(3), state)
    first, second = rule.broadcast(Request("a")), rule.broadcast(Request("b"))
    assert first.round == 3
    first.state["w"] = torch.zeros(2)  # what a callback does to one client's message
    assert torch.equal(second.state["w"], torch.ones(2))
    assert torch.equal(state["w"], torch.ones(2))


def test_merging_other_kinds():
    fedavg, fairavg = FedAvg(), FairAvg()
    with pytest.raises(TypeError, match="`other` to be a FedAvg, but got FairAvg"):
        fedavg.merge(fairavg)


def test_nothing_received():
    rule = FedAvg()
    rule.start(RoundInfo(0), {"w": torch.ones(1)})
    with pytest.raises(ValueError, match="at least one state"):
        rule.aggregate()


def test_averages_keep_no_state():
    assert FedAvg().state_dict() == {}
    assert FedAvg().required_callbacks() == ()


def test_by_name():
    assert type(build_aggregator("fedavg")) is FedAvg
    assert type(build_aggregator("FairAvg")) is FairAvg
    rule = FedAvg()
    assert build_aggregator(rule) is rule
    with pytest.raises(ValueError, match=r"one of .*'fairavg', 'fedadagrad', 'fedadam'.*, but got 'fedsgd'"):
        build_aggregator("fedsgd")
    with pytest.raises(TypeError, match="a name or an Aggregator"):
        build_aggregator(3)
