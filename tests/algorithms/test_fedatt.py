"""FedAtt: the paper's equations by hand, in any message order, in parts, and in a fit."""

import copy
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from lightning_fed.algorithms import FedAtt
from lightning_fed.algorithms.fedatt import SoftmaxMean
from lightning_fed.messages import ClientUpdate
from lightning_fed.rule import RoundInfo
from tests import models
from tests.breadth import slow
from tests.recorders import Recorder, assert_same
from tests.references_baselines import attention_reference, fedprox_reference
from tests.test_invariants import held_bytes

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def net_state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(5, 3, generator=generator),
        "bias": 10 * torch.randn(3, generator=generator),
        "norm.running_mean": torch.randn(3, generator=generator),
        "norm.running_var": torch.rand(3, generator=generator),
        "norm.num_batches_tracked": torch.tensor(seed),
        "scale": torch.randn((), generator=generator),
    }


def updates(count):
    return [ClientUpdate(index, 1 + 7 * index % 11, net_state(index + 1)) for index in range(count)]


def aggregated(rule, received, start=None):
    rule.start(RoundInfo(0), net_state(0) if start is None else start)
    for update in copy.deepcopy(list(received)):
        rule.receive(update)
    return rule.aggregate()


@pytest.mark.parametrize(("step_size", "expected"), [(1.0, 2.1931757), (1.2, 2.4318109)])
def test_the_example_of_the_paper(step_size, expected):
    received = [ClientUpdate(1, 1, {"w": torch.tensor(0.0)}), ClientUpdate(2, 3, {"w": torch.tensor(3.0)})]
    new = aggregated(FedAtt(step_size), received, {"w": torch.tensor(1.0)})
    assert new["w"].item() == pytest.approx(expected, abs=1e-7)


def test_the_weights_are_a_softmax_of_the_distances():
    mean = SoftmaxMean()
    for value, score in ((0.0, 1.0), (1.0, 2.0)):
        mean.add({"w": torch.tensor(value)}, {"w": torch.tensor(score)})
    assert mean.mean()["w"].item() == pytest.approx(0.7310586, abs=1e-7)  # weight of the second client


def test_the_example_in_a_fit(federated_trainer):
    """Two quadratics: one full step reaches each client's optimum."""
    clients = {"a": (torch.tensor([[0.0]]),), "b": (torch.full((3, 1), 3.0),)}
    module = models.Quadratic(size=1)
    module.w.data.fill_(1.0)
    federated_trainer(max_rounds=1, method="fedatt").fit(module, models.as_datasets(clients))
    assert module.w.item() == pytest.approx(2.4318109, abs=1e-6)


@pytest.mark.parametrize("step_size", [1.0, 1.2, 0.3])
def test_against_a_plain_implementation(step_size):
    received = updates(6)
    states, sizes = [update.state for update in received], [update.num_samples for update in received]
    expected = attention_reference(net_state(0), states, sizes, step_size)
    new = aggregated(FedAtt(step_size), received)
    assert new.keys() == expected.keys()
    for name, value in expected.items():
        assert new[name].dtype == value.dtype
        assert torch.allclose(new[name], value, rtol=1e-6, atol=1e-7), name
    assert torch.equal(new["norm.num_batches_tracked"], expected["norm.num_batches_tracked"])


@pytest.mark.parametrize("net", [slow(models.mlp), models.cnn])
def test_a_fit_against_a_plain_loop(net, federated_trainer):
    """Unequal clients, three of five per round, one network with BatchNorm."""
    clients = models.vectors() if net is models.mlp else models.images()

    def combine(start, states, sizes):
        return attention_reference(start, states, sizes, 1.2)

    history = fedprox_reference(
        net(), clients, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), models.momentum, mu=0.0, rounds=2,
        cohort_size=3, seed=4, combine=combine,
    )  # fmt: skip
    recorder = Recorder()
    trainer = federated_trainer(
        max_rounds=2, clients_per_round=3, method="fedatt", seed=4, batch_norm="average", callbacks=[recorder]
    )
    trainer.fit(models.Module(net(), models.momentum), models.as_datasets(clients))
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"], value, rtol=1e-4, atol=1e-6), name


def test_running_statistics_stay_possible():
    """A step beyond the clients' variances would give a negative variance."""
    start = {"norm.running_var": torch.tensor([1.0]), "norm.running_mean": torch.tensor([0.0])}
    received = [ClientUpdate(index, 1, {**start, "norm.running_var": torch.tensor([0.01])}) for index in range(2)]
    assert aggregated(FedAtt(step_size=1.5), received, start)["norm.running_var"].item() == pytest.approx(0.01)


def test_identical_clients():
    """With step size 1 the aggregate equals the common model; with another step size the number of clients is
    irrelevant.
    """
    for count in (1, 2, 7):
        received = [ClientUpdate(index, index + 1, net_state(5)) for index in range(count)]
        assert_same(net_state(5), aggregated(FedAtt(step_size=1.0), received))
        assert_same(aggregated(FedAtt(), received[:1]), aggregated(FedAtt(), received))
    unmoved = [ClientUpdate(index, 1, net_state(0)) for index in range(3)]
    assert_same(net_state(0), aggregated(FedAtt(), unmoved))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    received = [ClientUpdate(index, 1, {"w": torch.tensor([1.0 + index], dtype=dtype)}) for index in range(3)]
    new = aggregated(FedAtt(), received, {"w": torch.tensor([1.0], dtype=dtype)})
    assert new["w"].dtype == dtype


def test_order_does_not_matter():
    received = updates(4)
    whole = aggregated(FedAtt(), received)
    assert all(close(aggregated(FedAtt(), order), whole) for order in itertools.permutations(received))


def close(left, right):
    return all(torch.allclose(left[name], right[name], rtol=1e-6) for name in right)


@pytest.mark.parametrize("cuts", [(0, 3), (2, 5), (5, 5)])
def test_shards_merge_to_the_whole(cuts):
    received = updates(6)
    whole = aggregated(FedAtt(), received)
    shards = []
    for start, stop in itertools.pairwise((0, *cuts, 6)):
        shard = FedAtt()
        shard.start(RoundInfo(0), net_state(0))
        for update in copy.deepcopy(received[start:stop]):
            shard.receive(update)
        shards.append(shard)
    first, *aggregators = shards
    for aggregator in aggregators:
        first.merge(aggregator)
    assert close(first.aggregate(), whole)


def test_large_distances_do_not_overflow():
    start = {"w": torch.zeros(4)}
    for order in ((1e4, 1e6), (1e6, 1e4)):
        received = [ClientUpdate(index, 1, {"w": torch.full((4,), value)}) for index, value in enumerate(order)]
        assert aggregated(FedAtt(1.0), received, start)["w"].tolist() == [1e6] * 4


def test_memory_of_one_state_however_many_clients():
    start = {"w": torch.zeros(1000), "steps": torch.tensor(0)}
    held = {}
    for count in (1, 2, 50):
        rule = FedAtt()
        rule.start(RoundInfo(0), start)
        for client in range(count):
            rule.receive(ClientUpdate(client, 1, {"w": torch.randn(1000), "steps": torch.tensor(client)}))
        held[count] = held_bytes(rule)
    assert held[1] == held[2] == held[50] < 8000 + 4000 + 200


def test_noise_depends_on_seed_and_round():
    def noisy(seed, round, noise=0.1):
        rule = FedAtt(noise=noise, seed=seed)
        rule.start(RoundInfo(round), {"w": torch.zeros(20_000), "norm.running_var": torch.ones(1)})
        rule.receive(ClientUpdate("a", 1, {"w": torch.zeros(20_000), "norm.running_var": torch.ones(1)}))
        return rule.aggregate()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = noisy(0, 0)
    assert torch.equal(before, torch.get_rng_state())
    assert_same(first, noisy(0, 0))
    assert not torch.equal(first["w"], noisy(1, 0)["w"])
    assert not torch.equal(first["w"], noisy(0, 1)["w"])
    assert first["w"].std().item() == pytest.approx(0.1, rel=0.05)
    assert abs(first["w"].mean().item()) < 5 * 0.1 / math.sqrt(20_000)
    assert first["norm.running_var"].item() == 1
    assert noisy(0, 0, noise=0.0)["w"].abs().max() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0.0}, "`step_size` to be greater than 0 and finite, but got 0.0"),
        ({"noise": -1.0}, "`noise` to be at least 0 and finite, but got -1.0"),
        ({"seed": -1}, "`seed` to be at least 0, but got -1"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        FedAtt(**options)
