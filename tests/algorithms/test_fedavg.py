"""FedAvg and FairAvg: the numbers of specs/baselines.md, in one part and in several parts."""

import itertools

import pytest
import torch

from lightning_fed.algorithms import FairAvg, FedAvg
from lightning_fed.messages import ClientUpdate, Request
from lightning_fed.method import build_method
from lightning_fed.rule import RoundInfo
from tests.chains import chain_of, one_round, receive

METHODS = {FedAvg: 2.25, FairAvg: 1.5}  # w_t = 1, w_1 = 0 (n = 1), w_2 = 3 (n = 3)


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


def aggregated(method, received):
    return one_round(chain_of(method), 0, received[0].state, received)


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("method", METHODS)
def test_the_example_of_the_spec(method):
    received = [ClientUpdate(1, 1, {"w": torch.tensor(0.0)}), ClientUpdate(2, 3, {"w": torch.tensor(3.0)})]
    assert one_round(chain_of(method()), 0, {"w": torch.tensor(1.0)}, received)["w"].item() == METHODS[method]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cuts", [(0, 3), (2, 5), (1, 2), (5, 5)])
def test_shards_merge_to_the_whole(method, cuts):
    received = updates(6)
    whole = aggregated(method(), received)
    shards = []
    for start, stop in itertools.pairwise((0, *cuts, 6)):
        shard = chain_of(method())
        shard.start(RoundInfo(0), received[0].state)
        receive(shard, received[0].state, received[start:stop])
        shards.append(shard)
    first, *others = shards
    for other in others:
        first.merge(other.part)
    assert equal(first.aggregate(), whole)
    nested = chain_of(method())
    nested.start(RoundInfo(0), received[0].state)
    nested.merge(first.part)
    assert equal(nested.aggregate(), whole)


@pytest.mark.parametrize("method", METHODS)
def test_order_does_not_matter(method):
    received = updates(4)
    whole = aggregated(method(), received)
    assert all(equal(aggregated(method(), list(order)), whole) for order in itertools.permutations(received))


@pytest.mark.parametrize("method", METHODS)
def test_identical_clients(method):
    state = updates(1)[0].state
    received = [ClientUpdate(place, place + 1, {**state}) for place in range(7)]
    assert equal(aggregated(method(), received), state)


def test_a_round_forgets_the_one_before():
    chain, (last,) = chain_of(FedAvg()), updates(1, seed=5)
    one_round(chain, 0, last.state, updates(3))
    assert equal(one_round(chain, 1, last.state, [last]), last.state)


def test_broadcasts():
    rule = FedAvg()
    state = {"w": torch.ones(2)}
    rule.start(RoundInfo(3), state)
    first, second = rule.broadcast(Request("a")), rule.broadcast(Request("b"))
    assert first.round == 3
    first.state["w"] = torch.zeros(2)  # as a callback may change a single message
    assert torch.equal(second.state["w"], torch.ones(2))
    assert torch.equal(state["w"], torch.ones(2))


def test_nothing_received():
    rule = FedAvg()
    rule.start(RoundInfo(0), {"w": torch.ones(1)})
    with pytest.raises(ValueError, match="at least one state"):
        rule.aggregate()


@pytest.mark.parametrize("method", METHODS)
def test_averages_keep_no_state(method):
    chain = chain_of(method())
    before = chain.state_dict()
    one_round(chain, 0, updates(1)[0].state, updates(3))
    assert chain.rule.state_dict() == {}
    assert chain.state_dict() == before
    assert build_method(method()).callbacks == ()
