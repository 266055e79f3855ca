"""Simulated secure sums: the ring, fits against a plain implementation, data seen by the server, refusals."""

import copy
import itertools
import math
import pickle
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed import ClientUpdate, FederatedDataModule, Federation, Vectorized
from lightning_fed.algorithms import FedAvg, FedAvgM
from lightning_fed.algorithms.robust.mixtures import Bucketing
from lightning_fed.attacks import ALIE, SignFlip
from lightning_fed.errors import BadUpdate, BadUpdates, ClientFault
from lightning_fed.messages import Broadcast
from lightning_fed.privacy import DPSGD, CentralDP, Ring, SecureSum
from lightning_fed.privacy.secure_sum import WEIGHT
from lightning_fed.rule import RoundInfo
from lightning_fed.steps import Chain, MaxMedianNorm, MaxNorm, MaxSamples, UniformWeights, UpdateStep
from tests import models
from tests.breadth import quick, slow
from tests.privacy.helpers import KnownKey, WireRecorder
from tests.recorders import assert_same, loading, state_of
from tests.references_privacy import clipped_reference, encoded_reference, masked_sum_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
needs_accountant = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="dp-accounting is not installed")


def vectors(count, size=50, seed=0):
    return list(torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


# --- Ring -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "max_weight"), [(1, 1), (10, 1), (7, 600), (100_000, 1)])
def test_numbers_of_the_ring_against_numpy(clients, max_weight):
    ring = Ring(3.0, clients, max_weight)
    value = max_weight * vectors(1)[0] / 10
    encoded = ring.encode(value, np.random.default_rng(5))
    uniform = np.random.default_rng(5).random(50)
    expected, scale = encoded_reference(value.numpy(), 3.0, clients, max_weight, uniform)
    assert encoded.dtype == torch.int32
    np.testing.assert_array_equal(encoded.long().numpy() % 2**32, expected)
    assert ring.scale == pytest.approx(scale)
    assert (ring.decode(encoded) - value).abs().max() < 1 / scale


def test_rounding_is_right_in_the_mean():
    ring, value = Ring(1.0, 1000), vectors(1)[0] / 10
    rng = np.random.default_rng(1)
    mean = sum(ring.decode(ring.encode(value, rng)) for _ in range(400)) / 400
    error = (mean - value) * ring.scale
    assert error.abs().max() < 5 * 0.5 / math.sqrt(400)  # the standard deviation of a rounding is at most half a unit


@pytest.mark.parametrize(("clients", "max_weight"), [(3, 1), (1000, 1), (12, 90)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_no_sum_leaves_the_ring(clients, max_weight, sign):
    """All clients have the longest step in the same entry and the largest weight; weights are summed separately."""
    ring = Ring(0.7, clients, max_weight)
    longest = torch.tensor([sign * 0.7 * max_weight, 0.0], dtype=torch.float64)
    rng, total = np.random.default_rng(2), torch.zeros(2, dtype=torch.int32)
    weights = torch.zeros((), dtype=torch.int32)
    for _ in range(clients):
        total = ring.add(total, ring.encode(longest, rng))
        weights = ring.add(weights, torch.tensor(max_weight, dtype=torch.int32))
    assert ring.decode(total)[0] == pytest.approx(clients * float(longest[0]), rel=1e-6)
    assert weights == clients * max_weight
    for _ in range(2 + clients // 100):  # more clients would overflow: the bound is tight
        total = ring.add(total, ring.encode(longest, rng))
    assert float(ring.decode(total)[0]) * sign < 0


def test_sums_are_the_same_bits_in_any_order_and_with_masks():
    ring, rng = Ring(10.0, 9), np.random.default_rng(3)
    encoded = [ring.encode(value, rng) for value in vectors(9)]
    sums = []
    for order in (range(9), reversed(range(9)), rng.permutation(9)):
        total = torch.zeros(50, dtype=torch.int32)
        for position in order:
            total = ring.add(total, encoded[position])
        sums.append(total)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    plain = [value.long().numpy() % 2**32 for value in encoded]
    masked, seen = masked_sum_reference(plain, 4)
    np.testing.assert_array_equal(masked, sums[0].long().numpy() % 2**32)
    assert all((one != other).mean() > 0.9 for one, other in zip(plain, seen, strict=True))


@pytest.mark.parametrize("size", [1, 1000, 1_000_000])
def test_rounding_makes_no_step_longer_than_the_clip(size):
    ring = Ring(0.5, 200)
    longest, rng = ring.longest(size), np.random.default_rng(1)
    value = torch.full((size,), longest / math.sqrt(size), dtype=torch.float64)
    assert ring.decode(ring.encode(value, rng)).norm() <= 0.5
    assert 0.49 < longest < 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Ring(1.0, 3_000_000),
            "at most 2,097,151 clients in a secure sum of 32-bit integers with weights up to 1, but got",
        ),
        (lambda: Ring(1.0, 1000, 10_000), "at most 209 clients in a secure sum .* with weights up to 10,000"),
        (lambda: Ring(1.0, 100_000).longest(10**10), "rounding error below half of `clip` .* 10,000,000,000 numbers"),
        (lambda: SecureSum(0.0), "`clip` to be greater than 0 and finite, but got 0.0"),
        (lambda: SecureSum(1.0, 0.5), "`threshold` to be more than a half and at most 1, but got 0.5"),
        (lambda: SecureSum(1.0, 1.1), "`threshold` to be more than a half and at most 1, but got 1.1"),
    ],
)
def test_rings_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- Step -------------------------------------------------------------------------------------------------------------

START = {"w": torch.linspace(-1, 1, 12).view(4, 3), "n": torch.tensor(3)}


def chain_of(ring, updates=(), least=0, steps=None):
    chain = Chain(FedAvg(), [MaxSamples(ring.max_weight), SecureSum(ring.clip)] if steps is None else steps)
    secure = chain.steps[-1]
    secure.ring, secure.least = ring, least
    chain.start(RoundInfo(0), START)
    for update in updates:
        chain.receive(copy.deepcopy(update), START)
    return chain


def update_of(ring, step, weight, seed=0):
    state = {"w": ring.encode(weight * step.view(4, 3), np.random.default_rng(seed)), "n": torch.tensor(9)}
    return ClientUpdate(f"c{seed}", 1, state, {WEIGHT: torch.tensor(weight, dtype=torch.int32)})


def test_the_mean_and_its_parts():
    ring, weights = Ring(5.0, 6, 40), [3, 40, 0, 7, 1, 22]
    steps = [value[:12] / 3 for value in vectors(6)]
    updates = [update_of(ring, *pair, seed) for seed, pair in enumerate(zip(steps, weights, strict=True))]
    whole = chain_of(ring, updates).aggregate()
    mean = sum(weight * step for step, weight in zip(steps, weights, strict=True)) / sum(weights)
    torch.testing.assert_close(whole["w"].double() - START["w"].double(), mean.view(4, 3), atol=2e-7, rtol=0)
    assert whole["n"] == 3
    assert_same(whole, chain_of(ring, reversed(updates)).aggregate())
    merged = chain_of(ring)
    for part in (updates[4:], [], updates[:4]):
        merged.merge(pickle.loads(pickle.dumps(chain_of(ring, part).part)))
    with pytest.raises(BadUpdate, match="the secure sum accepts at most 6 clients"):
        merged.receive(updates[0], START)
    assert_same(whole, merged.aggregate())


def test_updates_that_are_left_out():
    ring, chain = Ring(5.0, 6, 40), chain_of(Ring(5.0, 6, 40))
    for extras, words in (
        ({}, "instead of only one int32 number"),
        ({WEIGHT: torch.tensor(1), "loss": torch.tensor(2.0)}, "instead of only one int32 number"),
        ({WEIGHT: torch.tensor([1, 2])}, "instead of only one int32 number"),
        ({WEIGHT: torch.tensor(3)}, "instead of only one int32 number"),  # 64 bits
    ):
        update = update_of(ring, torch.zeros(12), 1)
        update.extras = extras
        with pytest.raises(BadUpdate, match=words):
            chain.receive(update, START)
    assert chain.part.total == {}


@pytest.mark.parametrize("weights", [[41, 40], [-1, 0], [0, 0]])
def test_weights_that_cannot_be_are_those_of_all(weights):
    """The server does not see single weights, so the whole sum is rejected."""
    ring = Ring(5.0, 6, 40)
    chain = chain_of(ring, [update_of(ring, torch.zeros(12), weight, seed) for seed, weight in enumerate(weights)])
    reason = f"the weights add up to {sum(weights)} instead of 1 to 80: a client sent a wrong weight"
    with pytest.raises(BadUpdates) as refused:
        chain.aggregate()
    assert refused.value.reasons == {"c0": reason, "c1": reason}
    assert chain.part.total == {}


@pytest.mark.parametrize(("count", "threshold", "least"), [(2, 0.51, 2), (3, 2 / 3, 2), (9, 2 / 3, 6), (10, 2 / 3, 7)])
def test_a_sum_of_too_few(count, threshold, least):
    assert SecureSum(1.0, threshold).least_clients(count) == least
    assert 2 * least > count
    ring = Ring(5.0, 12)
    for present in (least - 1, least):
        chain = chain_of(ring, least=least)
        for seed in range(present):
            chain.merge(chain_of(ring, [update_of(ring, torch.ones(12) / 4, 1, seed)]).part)
        if present == least:
            assert chain.aggregate()["w"].isfinite().all()
            continue
        with pytest.raises(BadUpdates, match=f"requires at least {least} clients, but got {present}") as refused:
            chain.aggregate()
        assert list(refused.value.reasons) == [f"c{seed}" for seed in range(present)]
        assert chain.part.total == {}


def sent_by(chain, client, step, num_samples=8):
    broadcast = Broadcast(0, dict(START))
    chain.on_send("a", broadcast)
    state = {"w": (START["w"].double() + step.view(4, 3)).float(), "n": torch.tensor(9)}
    return chain.on_client(ClientUpdate(client, num_samples, state), broadcast, {})


@pytest.mark.parametrize("bound", [0.4, 50.0])
@pytest.mark.parametrize("weights", [UniformWeights(), MaxSamples(40)])
def test_bounds_and_weights_inside_act_on_the_client(bound, weights):
    """The sum contains bounded, weighted steps, and the server applies no bound."""
    counts, steps = [3, 90, 17], [value[:12] for value in vectors(3)]
    ring = Ring(20.0, 3, 1 if isinstance(weights, UniformWeights) else 40)
    for inside in ([weights, MaxNorm(bound)], [MaxNorm(bound), weights]):
        chain = chain_of(ring, steps=[*inside, SecureSum(20.0)])
        updates = [sent_by(chain, f"c{number}", *pair) for number, pair in enumerate(zip(steps, counts, strict=True))]
        counted = [weights.weight(count) for count in counts]
        for update, step, weight in zip(updates, steps, counted, strict=True):
            expected = weight * clipped_reference(step.numpy(), bound)
            np.testing.assert_allclose(
                ring.decode(update.state["w"]).flatten().numpy(), expected, atol=1 / ring.scale + 1e-6 * weight
            )
            assert int(update.extras[WEIGHT]) == weight
            assert update.num_samples == 1
        total = sum(ring.decode(update.state["w"]) for update in updates)
        for update in updates:
            chain.receive(update, START)
        new = chain.aggregate()
        assert torch.equal(new["w"], (START["w"].double() + total / sum(counted)).float())
        assert chain.metrics({}) == {}


def test_a_client_that_a_step_inside_refuses_is_left_out():
    """The fit continues: on the client the refusal is a client fault."""

    class Refuses(UpdateStep):
        def on_server(self, update, sent):
            raise BadUpdate("it is too loud")

    chain = chain_of(Ring(5.0, 3), steps=[Refuses(), UniformWeights(), SecureSum(5.0)])
    with pytest.raises(ClientFault, match="it is too loud"):
        sent_by(chain, "a", vectors(1)[0][:12])


def test_a_step_inside_whose_weight_is_too_large_changes_nothing_of_a_private_sum():
    """Behind the clip every client has weight 1, for any reported number of examples."""

    class Heavy(UpdateStep):
        def on_client(self, update, sent, memory):
            update.num_samples = 1000
            return update

    chain = chain_of(Ring(0.5, 3), steps=[CentralDP(0.5, 1e-3, 1.0), Heavy(), SecureSum()])
    update = sent_by(chain, "a", vectors(1)[0][:12])
    assert 0.49 < chain.steps[-1].ring.decode(update.state["w"]).norm() <= 0.5


# --- Fits -------------------------------------------------------------------------------------------------------------

CLIENTS = {f"c{number}": 6 + 3 * number for number in range(5)}
WEIGHTS = {"samples": MaxSamples(15), "uniform": UniformWeights()}


def fit(trainer, rounds=3, steps=(), method="fedavg", module=None, **options):
    recorder = WireRecorder()
    module = models.Module(models.mlp(), models.momentum) if module is None else module
    callbacks = [*options.pop("callbacks", ()), recorder]
    fitted = trainer(max_rounds=rounds, method=method, seed=1, callbacks=callbacks, steps=list(steps), **options)
    fitted.fit(module, models.as_datasets(models.vectors(CLIENTS)))
    return recorder, module, fitted


@pytest.mark.parametrize(
    ("clip", "kind"),
    quick(itertools.product([0.01, 50.0], WEIGHTS), zip([0.01, 50.0], WEIGHTS, strict=True)),
)
def test_a_fit_round_by_round(kind, clip, federated_trainer):
    """Against NumPy: clipped, weighted steps; the sum adds exactly the sent integers."""
    recorder, _, trainer = fit(federated_trainer, 3, [WEIGHTS[kind], SecureSum(clip)], clients_per_round=3)
    assert len(recorder.aggregates) == 3
    ring = Ring(clip, 3, 15 if kind == "samples" else 1)
    for round, new in enumerate(recorder.aggregates):
        visits = recorder.round(round)
        names = sorted(visits[0].broadcast)
        weights = [min(CLIENTS[visit.client], ring.max_weight) for visit in visits]
        steps = [
            np.concatenate([(visit.end[name].double() - visit.broadcast[name].double()).flatten() for name in names])
            for visit in visits
        ]
        assert all(np.linalg.norm(step) > 0.01 for step in steps)
        for name in names:
            assert {visit.update[name].dtype for visit in visits} == {torch.int32}
            total = sum(visit.update[name].long() for visit in visits)
            expected = visits[0].broadcast[name].double() + ring.decode(total) / sum(weights)
            assert torch.equal(new[name], expected.float())
        clipped = sum(
            weight * clipped_reference(step, clip) for weight, step in zip(weights, steps, strict=True)
        ) / sum(weights)
        moved = np.concatenate([(new[name].double() - visits[0].broadcast[name].double()).flatten() for name in names])
        np.testing.assert_allclose(moved, clipped, atol=3 / ring.scale / sum(weights) + 2e-7)
        assert {visit.num_samples for visit in visits} == {1}
    size = sum(value.numel() for value in recorder.aggregates[0].values())
    assert recorder.up_bytes == [3 * 4 * (size + 1)] * 3  # and the weight
    assert "fed/update_norm" not in trainer.callback_metrics
    assert trainer.callback_metrics["fed/num_samples"] == 3


@pytest.mark.parametrize("method", ["fedavg", "fairavg", slow("fedavgm"), slow("fedprox:mu=0.1"), "fedper"])
def test_it_is_the_average_but_for_rounding(method, federated_trainer):
    weights = [] if method == "fairavg" else [MaxSamples(1000)]
    plain, _, _ = fit(federated_trainer, 1, (), method)
    secure, _, _ = fit(federated_trainer, 1, [*weights, SecureSum(20.0)], method)
    units = 5 / Ring(20.0, 5, 1 if method == "fairavg" else 1000).scale / (5 if method == "fairavg" else 60)
    for name, value in plain.aggregates[0].items():
        torch.testing.assert_close(secure.aggregates[0][name], value, atol=units + 1e-6, rtol=0)


@pytest.mark.parametrize("size", [1, 3])
def test_clients_at_once_and_both_doors(size, either_trainer, federated_trainer):
    states, options = [], {"steps": [UniformWeights(), SecureSum(5.0)], "seed": 1}
    for make, more in ((either_trainer, {"visits": Vectorized(size)}), (federated_trainer, {})):
        module = models.Module(models.mlp())
        data = FederatedDataModule(models.as_datasets(models.vectors(CLIENTS)), batch_size=8)
        make(max_rounds=2, **options, **more).fit(module, datamodule=data)
        states.append(state_of(module))
    for name, value in states[0].items():  # rounding in float32 may change the rounding in the ring
        torch.testing.assert_close(value, states[1][name], atol=1e-6, rtol=1e-6)


def test_resume_is_exact(federated_trainer, tmp_path):
    path = tmp_path / "one.ckpt"

    class Saves(WireRecorder):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    options = {"steps": [UniformWeights(), SecureSum(1.0)], "method": FedAvgM()}
    _, module, _ = fit(federated_trainer, 3, callbacks=[Saves()], **options)
    resumed = models.Module(models.mlp(), models.momentum)
    again = federated_trainer(max_rounds=3, seed=1, **options)
    again.fit(resumed, models.as_datasets(models.vectors(CLIENTS)), ckpt_path=path, **loading(weights_only=True))
    assert_same(state_of(module), state_of(resumed))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("size", [1, 5])
def test_a_step_that_is_not_finite_is_left_out(value, size, federated_trainer):
    """Integers would hide the fault: the new model is the mean of the other clients."""

    data = models.vectors(CLIENTS)
    data["c1"][0][:] = value
    recorder, module = WireRecorder(), models.Module(models.mlp())
    options = {"steps": [UniformWeights(), SecureSum(5.0)], "visits": Vectorized(size), "callbacks": [recorder]}
    trainer = federated_trainer(max_rounds=1, seed=1, **options)
    trainer.fit(module, models.as_datasets(data))
    assert trainer.callback_metrics["fed/failed"] == 1
    assert trainer.callback_metrics["fed/clients"] == 4
    ring, visits = Ring(5.0, 5), [visit for visit in recorder.visits if visit.client != "c1"]
    for name, new in recorder.aggregates[0].items():
        total = sum(visit.update[name].long() for visit in visits)
        assert torch.equal(new, (visits[0].broadcast[name].double() + ring.decode(total) / 4).float())


@needs_accountant
@pytest.mark.parametrize("sampling", ["poisson", slow("fixed")])
def test_with_central_differential_privacy(sampling, federated_trainer):
    dp = KnownKey(0.01, 1e-3, noise_multiplier=0.5, sampling=sampling)
    plain, _, _ = fit(federated_trainer, 3, [dp], clients_per_round=3)
    secure, _, trainer = fit(federated_trainer, 3, [dp, SecureSum()], clients_per_round=3)
    assert len(secure.aggregates) == 3
    assert trainer.callback_metrics["privacy/epsilon"] > 0
    assert not [name for name in trainer.callback_metrics if name.startswith(("fed/", "comm/", "client/"))]
    ring = trainer.federation.server.chain.steps[-1].ring
    assert ring.clients == 5  # a Poisson draw may contain all clients
    for visit in secure.visits:
        assert visit.extras == ()
        whole = torch.cat([ring.decode(value).flatten() for value in visit.update.values()])
        assert 0.01 * (1 - 1e-5) < whole.norm() <= 0.01
    for name, value in plain.aggregates[0].items():
        torch.testing.assert_close(secure.aggregates[0][name], value, atol=1e-6, rtol=0)


@needs_accountant
@pytest.mark.parametrize("secure", [[], [SecureSum()]], ids=["", "secure sum"])
def test_a_private_step_that_is_not_finite_is_left_out(secure, federated_trainer):
    """Even if the client detects the fault: the fit continues with the other clients."""
    data = models.vectors(CLIENTS)
    data["c1"][0][:] = math.nan
    dp = KnownKey(0.01, 1e-3, noise_multiplier=0.5, sampling="fixed")
    trainer = federated_trainer(max_rounds=1, seed=1, steps=[dp, *secure])
    module = models.Module(models.mlp())
    trainer.fit(module, models.as_datasets(data))
    assert list(trainer.federation.server.report.failed) == ["c1"]
    assert sorted(trainer.federation.server.report.received) == ["c0", "c2", "c3", "c4"]
    assert all(value.isfinite().all() for value in state_of(module).values())


@needs_accountant
def test_with_dpsgd(federated_trainer):
    """Clients add noise to their steps, and send integers."""
    pytest.importorskip("opacus", reason="opacus is not installed")
    callback = DPSGD(1.0, 1.0, 1e-3)
    steps = [UniformWeights(), SecureSum(5.0)]
    trainer = federated_trainer(max_rounds=2, callbacks=[callback], steps=steps)
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(CLIENTS)))
    assert trainer.callback_metrics["dp/epsilon"] == pytest.approx(callback.epsilon())


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["median", "krum", "fedatt", "scaffold", "fednova", "fedmargin", "qffl", "fesem"])
def test_methods_that_are_no_sum(method):
    with pytest.raises(ValueError, match=r"Expected an averaging method for a secure sum"):
        Federation(method, steps=[UniformWeights(), SecureSum(1.0)])


@pytest.mark.parametrize("method", ["moon", "fedala", "fedfusion"])
def test_methods_that_send_more(method, federated_trainer):
    with pytest.raises(MisconfigurationException, match=r"clients to send only updates, but `\w+\.on_client_end`"):
        fit(federated_trainer, 1, [UniformWeights(), SecureSum(1.0)], method)


DP = CentralDP(1.0, 1e-3, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([SecureSum(1.0)], "Expected `MaxSamples` or `UniformWeights` before `SecureSum`"),
        ([SecureSum(1.0), UniformWeights()], "Expected `MaxSamples` or `UniformWeights` before"),
        ([MaxSamples(9), SecureSum(1.0), UniformWeights()], "Expected `UniformWeights` before `SecureSum`"),
        ([MaxSamples(9), SecureSum(1.0), MaxNorm(1.0)], "Expected `MaxNorm` before `SecureSum` in `steps`"),
        ([MaxSamples(9), SecureSum(1.0), SignFlip(1)], "Expected `SignFlip` before `SecureSum` in `steps`"),
        ([MaxSamples(9), SecureSum(1.0), ALIE(1)], "Expected `ALIE` before `SecureSum` in `steps`"),
        ([MaxSamples(9), SecureSum(1.0), SecureSum(1.0)], "Expected `SecureSum` before `SecureSum` in `steps`"),
        ([UniformWeights(), SecureSum(1.0), DP], "Expected `CentralDP` before `SecureSum` in `steps`"),
        (
            [MaxMedianNorm(1.0), MaxSamples(9), SecureSum(1.0)],
            "no `MaxMedianNorm` before `SecureSum` in `steps`, because the first step compares",
        ),
        (
            [UniformWeights(), Bucketing(2), SecureSum(1.0)],
            "no `Bucketing` before `SecureSum` in `steps`, because the first step compares",
        ),
        (
            [ALIE(1), UniformWeights(), SecureSum(1.0)],
            "no `ALIE` before `SecureSum` in `steps`, because the first step compares",
        ),
        ([SecureSum()], "Expected a `clip` either in `SecureSum` or in `CentralDP`"),
        ([DP, SecureSum(1.0)], "Expected a `clip` either in `SecureSum` or in `CentralDP`"),
        (
            [CentralDP(1.0, 1e-3, 1.0, adaptive=True), SecureSum()],
            "with a fixed clipping norm for a secure sum, but got adaptive=True",
        ),
        ([DP, DP, SecureSum()], "Expected one `CentralDP`, but got several"),
    ],
)
def test_steps_that_cannot_be(steps, message):
    with pytest.raises(ValueError, match=message):
        Federation(steps=steps)


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [
        (
            [UniformWeights(), SecureSum(1.0)], {"clients_per_round": 1},
            "Expected at least 2 clients per round for a secure sum, but got 1",
        ),
        ([MaxSamples(10**7), SecureSum(1.0)], {}, "of 32-bit integers with weights"),
    ],
)  # fmt: skip
def test_fits_that_cannot_be(steps, options, message, federated_trainer):
    with pytest.raises(ValueError, match=message):
        fit(federated_trainer, 1, steps, **options)


def test_statistics_would_travel_alone(federated_trainer):
    module = models.Module(models.norm_mlp())
    with pytest.raises(MisconfigurationException, match="would be sent outside the secure sum"):
        fit(federated_trainer, 1, [UniformWeights(), SecureSum(1.0)], module=module, batch_norm="recalibrate")
