"""Central differential privacy: noise, sensitivity, messages, resume, refusals; the pitfalls in specs/privacy.md."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_fed import (
    ClientUpdate,
    Faults,
    FederatedCallback,
    FederatedTrainer,
    Federation,
    LocalStatistics,
    Method,
    Vectorized,
)
from lightning_fed.algorithms import METHODS, FedAvg, FedAvgM, FedProx, ServerOptimizer
from lightning_fed.attacks import ALIE, Scaling
from lightning_fed.errors import BadUpdate
from lightning_fed.messages import Broadcast, Request
from lightning_fed.privacy import Budget, CentralDP, SecureSum
from lightning_fed.privacy.central import CLIP, IS_SHORT, PrivateSum
from lightning_fed.rule import RoundInfo
from lightning_fed.server.schedule import Schedule, SecretSampling
from lightning_fed.server.server import Server
from lightning_fed.steps import Chain, MaxMedianNorm, MaxNorm, MaxSamples, UniformWeights
from lightning_fed.tasks import ClassificationTask
from tests import models
from tests.breadth import quick
from tests.privacy.helpers import KEY, KnownKey, WireRecorder
from tests.recorders import assert_same, loading, state_of
from tests.references_privacy import adaptive_clip_reference, noise_reference, private_mean_reference

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]
BUDGET = Budget(1.0, 1e-3, 100, 10)
START = {"w": torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(2), "n": torch.tensor(3)}
SHAPES = {"w": (4, 3), "b": (2,)}


def steps(count, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [{name: scale * rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(count)]


def update_of(step, client="a", extras=None, start=START):
    state = {name: (start[name].double() + torch.as_tensor(step[name])).float() for name in SHAPES}
    return ClientUpdate(client, 7, {**state, "n": torch.tensor(9)}, extras or {})


def length_of(step):
    return math.sqrt(sum(float(np.square(value).sum()) for value in step.values()))


def clipped(step, clip):
    length = length_of(step)
    return {name: value * min(1.0, clip / length) for name, value in step.items()} if length else step


def chain_of(clip=1.0, budget=BUDGET, key=KEY, **options):
    dp = KnownKey(clip, budget.delta, budget.noise_multiplier, sampling=budget.sampling, **options)
    dp.begin(budget, key)
    return Chain(FedAvg(), [dp])


def aggregated(chain, updates, round=0, start=START):
    chain.start(RoundInfo(round), start)
    for update in updates:
        chain.receive(copy.deepcopy(update), start)
    return chain.aggregate()


def moved(new, start=START):
    return {name: (new[name].double() - start[name].double()).numpy() for name in SHAPES}


# --- Sum --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 6])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_against_a_plain_implementation(count, sampling):
    """Without updates the result is noise; the divisor is the expected cohort. Fixed cohorts have twice the noise."""
    chain = chain_of(0.7, Budget(1.3, 1e-3, 100, 10, sampling))
    sent = [clipped(step, 0.7) for step in steps(count)]
    new = aggregated(chain, [update_of(step, str(number)) for number, step in enumerate(sent)], round=4)
    std = 1.3 * 0.7 * (2 if sampling == "fixed" else 1)
    expected = private_mean_reference(sent, 0.7, std, 10, KEY, 4, SHAPES)
    for name, value in moved(new).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6)  # float32 models
    assert new["n"].item() == 3  # integers keep the server's value
    assert chain.metrics({})["privacy/noise_std"] == pytest.approx(std)


def test_noise_is_normal_and_independent():
    """Standard deviation and kurtosis of every entry over 700 rounds; no correlation between entries and rounds."""
    chain, count = chain_of(0.5), 700
    draws = []
    for round in range(count):
        new = aggregated(chain, [], round)
        draws.append(np.concatenate([moved(new)[name].reshape(-1) for name in SHAPES]) * 10 / 0.5)
    draws = np.array(draws)
    size = draws.shape[1]
    assert size == 14
    # Five standard deviations of each estimate, for the worst entry.
    assert np.abs(draws.mean(0)).max() < 5 / math.sqrt(count)
    assert np.abs(draws.std(0) - 1).max() < 5 / math.sqrt(2 * count)
    kurtosis = ((draws - draws.mean(0)) ** 4).mean(0) / draws.var(0) ** 2
    assert np.abs(kurtosis - 3).max() < 5 * math.sqrt(24 / count)
    between = np.corrcoef(draws.T) - np.eye(size)
    assert np.abs(between).max() < 5 / math.sqrt(count)
    following = np.abs((draws[1:] * draws[:-1]).mean(0)).max()
    assert following < 5 / math.sqrt(count)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_one_client_changes_the_sum_by_the_clip_at_most(adaptive, scale):
    """For any accepted update, with equal noise."""
    for seed in range(5):
        sent = [clipped(step, 0.7 * (1 + 1e-7)) for step in steps(6, seed, scale)]
        extras = {IS_SHORT: torch.tensor(1.0)} if adaptive else {}
        budget = Budget(0.2, 1e-3, 100, 10)
        options = {"adaptive": adaptive, "count_noise": 0.5}
        updates = [update_of(step, str(number), extras) for number, step in enumerate(sent)]
        whole = moved(aggregated(chain_of(0.7, budget, **options), updates))
        rest = moved(aggregated(chain_of(0.7, budget, **options), updates[1:]))
        change = math.sqrt(sum(float(np.square(whole[name] - rest[name]).sum()) for name in SHAPES)) * 10
        assert change <= 0.7 + 1e-5  # models in float32


def test_what_is_too_long_or_says_more_is_left_out():
    chain = chain_of(1.0)
    chain.start(RoundInfo(0), START)
    with pytest.raises(BadUpdate, match=r"the client's update has norm 1\.5, above clip=1"):
        chain.receive(update_of({"w": np.zeros((4, 3)), "b": np.array([1.5, 0.0])}), START)
    with pytest.raises(BadUpdate, match=r"the client sends the additional tensors \['prototypes'\] instead of \[\]"):
        chain.receive(update_of(steps(1, scale=0.01)[0], extras={"prototypes": torch.zeros(3)}), START)
    assert chain.held[0].total == {}
    adaptive = chain_of(1.0, Budget(0.3, 1e-3, 100, 10), adaptive=True)
    adaptive.start(RoundInfo(0), START)
    with pytest.raises(BadUpdate, match="instead of"):
        adaptive.receive(update_of(steps(1, scale=0.01)[0]), START)


def test_a_client_counts_once_whatever_it_reports():
    """Steps inside or outside do not change the weight either."""
    sent = [update_of(step, str(number)) for number, step in enumerate(steps(3, scale=0.05))]
    expected = aggregated(chain_of(), sent)
    heavy = copy.deepcopy(sent)
    heavy[0].num_samples = 10**9
    assert_same(aggregated(chain_of(), heavy), expected)
    (dp,) = chain_of().steps
    for around in ([MaxSamples(5), dp], [dp, MaxSamples(5)], [UniformWeights(), dp]):
        assert_same(aggregated(Chain(FedAvg(), around), heavy), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_longer_by_rounding_is_taken(dtype):
    """The clip is repeated on the server, so that the noise covers the rounding."""
    longer = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        start = {"w": 0.1 * torch.randn(3000, generator=generator).to(dtype)}
        step = torch.randn(3000, generator=generator, dtype=torch.float64)
        trained = (start["w"].double() + step / step.norm()).to(dtype)
        longer += float((trained.double() - start["w"].double()).norm()) > 1
        chain = chain_of(1.0)
        chain.start(RoundInfo(0), start)
        chain.receive(ClientUpdate("a", 1, {"w": trained}), start)
        assert float(chain.held[0].total["w"].norm()) <= 1 + 1e-12
    assert longer


def test_the_vector_of_all_entries_equals_single_entries():
    """Bit for bit, with several dtypes and clients. Clipped entries share no memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (4, 3), "none": (0, 2), "b": (5,), "d": (2, 2), "scalar": ()}
    dtypes = {"b": torch.bfloat16, "d": torch.float64, "scalar": torch.float64}

    def draw():
        return {
            name: torch.randn(shape, generator=generator).to(dtypes.get(name, torch.float32))
            for name, shape in shapes.items()
        }

    start = draw()

    def clip(state):
        steps = {name: state[name].double() - start[name].double() for name in start}
        length = math.sqrt(sum(float(step.square().sum()) for step in steps.values()))
        return steps, min(1.0, 0.7 / length)

    chain, total = chain_of(0.7), dict.fromkeys(start, 0.0)
    chain.start(RoundInfo(0), start)
    sent = Broadcast(0, dict(start))
    chain.on_send("a", sent)
    for client in ("a", "b", "c"):
        trained = draw()
        update = chain.on_client(ClientUpdate(client, 7, dict(trained)), sent, {})
        steps, factor = clip(trained)
        expected = {name: (value.double() + factor * steps[name]).to(value.dtype) for name, value in start.items()}
        assert_same(update.state, expected)
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in update.state.values())
        steps, factor = clip(update.state)
        total = {name: total[name] + factor * steps[name] for name in start}
        chain.receive(update, start)
    assert_same(chain.held[0].total, total)


def test_a_zero_step_and_an_empty_round():
    zero = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    one, nobody = (aggregated(chain_of(), updates) for updates in ([update_of(zero)], []))
    assert_same(one, nobody)
    server = Server(chain_of())
    server.start_round(RoundInfo(0), START)
    state = server.finish_round()
    assert_same(state, nobody)
    assert not torch.equal(state["w"], START["w"])


def test_the_clip_follows_the_lengths():
    chain, clip = chain_of(2.0, Budget(0.5, 1e-3, 100, 10), adaptive=True, count_noise=0.3, clip_rate=0.4), 2.0
    for round, is_short in enumerate(([True] * 9, [False, True], [])):
        updates = [
            update_of(step, str(number), {IS_SHORT: torch.tensor(float(short))})
            for number, (step, short) in enumerate(zip(steps(len(is_short), round, 1e-3), is_short, strict=True))
        ]
        new = aggregated(chain, updates, round)
        noise = noise_reference(KEY, round, "", (1,), 3.0)[0]
        std = (0.5**-2 - (2 * 3.0) ** -2) ** -0.5 * clip
        assert chain.metrics({})["privacy/noise_std"] == pytest.approx(std)
        assert chain.metrics({})["privacy/clip"] == pytest.approx(clip)
        clip, share = adaptive_clip_reference(clip, is_short, 10, noise, 0.4, 0.5)
        assert chain.metrics({})["privacy/clipped_share"] == pytest.approx(1 - share)
        assert chain.steps[0].clip == pytest.approx(clip)
        assert new["w"].isfinite().all()
    broadcast = chain.rule.broadcast(Request("a"))
    chain.on_send("a", broadcast)
    assert broadcast.extras[CLIP].item() == pytest.approx(clip)
    with pytest.raises(ValueError, match="a noise multiplier below 1 with adaptive=True"):
        chain_of(1.0, Budget(1.0, 1e-3, 100, 10), adaptive=True)


def test_done_again_a_round_has_the_same_noise_and_costs_once():
    """As after a crash between the noise and the checkpoint."""
    chain = chain_of()
    aggregated(chain, [], 0)
    before = copy.deepcopy(chain.state_dict())
    first = aggregated(chain, [update_of(steps(1, scale=0.1)[0])], 1)
    again = Chain(FedAvg(), [KnownKey(9.9, 1e-3, 7.0)])
    again.load_state_dict(before)
    second = aggregated(again, [update_of(steps(1, scale=0.1)[0])], 1)
    assert_same(first, second)
    assert (chain.steps[0].rounds, again.steps[0].rounds) == (2, 2)
    assert chain.metrics({}) == again.metrics({})
    with pytest.raises(ValueError, match="Expected the privacy budget of the checkpoint or earlier fit"):
        again.steps[0].begin(Budget(0.1, 1e-3, 100, 10), KEY)


def test_in_several_processes():
    """A single noise term for the total sum."""
    sent = [update_of(step, str(number)) for number, step in enumerate(steps(5, scale=0.05))]
    whole = aggregated(chain_of(), sent)
    parts = [chain_of() for _ in range(3)]
    for part, share in zip(parts, (sent[:2], [], sent[2:]), strict=True):
        part.start(RoundInfo(0), START)
        for update in share:
            part.receive(copy.deepcopy(update), START)
    merged = chain_of()
    merged.start(RoundInfo(0), START)
    for part in parts:
        assert isinstance(part.part, PrivateSum)
        merged.merge(pickle.loads(pickle.dumps(part.part)))
    for name, value in merged.aggregate().items():
        torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-7)


# --- Sampling of clients ----------------------------------------------------------------------------------------------


def secret_schedule(key, is_poisson=True, seed=0):
    schedule = Schedule(seed, clients_per_round=3)
    schedule.secret = SecretSampling(key, is_poisson)
    return schedule


def test_every_client_is_drawn_by_itself():
    """Numbers and pairs of clients over 2,000 rounds, within five standard deviations; the seed has no influence."""
    clients, rounds = [f"c{number}" for number in range(20)], 2000
    schedule = secret_schedule(KEY)
    cohorts = [{visit.client for visit in schedule.cohort(round, clients).visits} for round in range(rounds)]
    q = 3 / 20
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert abs(sizes.mean() - 3) < 5 * math.sqrt(20 * q * (1 - q) / rounds)
    assert sizes.var() == pytest.approx(20 * q * (1 - q), rel=0.15)
    assert (sizes == 0).mean() == pytest.approx((1 - q) ** 20, abs=5 * math.sqrt(0.04 / rounds))
    for client in clients[:5]:
        share = np.mean([client in cohort for cohort in cohorts])
        assert abs(share - q) < 5 * math.sqrt(q * (1 - q) / rounds)
    both = np.mean([{"c0", "c1"} <= cohort for cohort in cohorts])
    assert abs(both - q**2) < 5 * math.sqrt(q**2 / rounds)
    other = secret_schedule(KEY, seed=7)
    assert [visit.client for visit in other.cohort(5, clients).visits] == [
        visit.client for visit in schedule.cohort(5, clients).visits
    ]
    schedule = secret_schedule(KEY, is_poisson=False)
    fixed = [schedule.cohort(round, clients) for round in range(20)]
    assert {len(cohort.visits) for cohort in fixed} == {3}
    assert [visit.client for visit in fixed[0].visits] != [
        visit.client for visit in secret_schedule(KEY + 1, is_poisson=False).cohort(0, clients).visits
    ]


# --- Fits -------------------------------------------------------------------------------------------------------------

CLIENTS = {f"c{number}": 6 + number for number in range(12)}
SHORT = 0.02  # shorter than most steps
DP = KnownKey(SHORT, 1e-3, noise_multiplier=1.0)


def fit(trainer, privacy=DP, method="fedavg", rounds=4, module=None, callbacks=(), steps=(), **options):
    recorder = WireRecorder()
    module = models.Module(models.mlp(), models.momentum) if module is None else module
    fitted = trainer(
        method=method, max_rounds=rounds, clients_per_round=3, seed=1, steps=[*steps, privacy],
        callbacks=[*callbacks, recorder], **options,
    )  # fmt: skip
    fitted.fit(module, models.as_datasets(models.vectors(CLIENTS)))
    return recorder, module, fitted


def test_a_fit_round_by_round(federated_trainer):
    recorder, _, trainer = fit(federated_trainer, rounds=5)
    assert recorder.visits[0].extras == ()
    sizes, long = [], 0
    for round, new in enumerate(recorder.aggregates):
        visits = recorder.round(round)
        sizes.append(len(visits))
        if not visits:
            continue
        start = visits[0].broadcast
        shapes = {name: tuple(value.shape) for name, value in start.items()}
        sent = [
            {name: (visit.update[name].double() - start[name].double()).numpy() for name in shapes} for visit in visits
        ]
        for step, visit in zip(sent, visits, strict=True):
            trained = {name: (visit.end[name].double() - start[name].double()).numpy() for name in shapes}
            long += length_of(trained) > SHORT
            for name, value in clipped(trained, SHORT).items():
                np.testing.assert_allclose(step[name], value, atol=1e-7)
        expected = private_mean_reference(sent, SHORT, SHORT, 3, KEY, round, shapes)
        for name, value in expected.items():
            np.testing.assert_allclose((new[name].double() - start[name].double()).numpy(), value, atol=1e-6)
        assert {visit.num_samples for visit in visits} == {1}
    assert len(recorder.aggregates) == 5
    assert len(set(sizes)) > 1
    assert long
    shown = {name for name in trainer.callback_metrics if name.startswith(("fed/", "comm/", "client/", "privacy/"))}
    assert shown == {"privacy/epsilon", "privacy/delta", "privacy/noise_std", "privacy/clip"}
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(Budget(1.0, 1e-3, 12, 3).epsilon(5))


def key_of(trainer):
    return trainer.federation.server.chain.steps[-1].key


def test_every_fit_has_a_key_of_its_own(federated_trainer):
    secret = CentralDP(0.3, 1e-3, noise_multiplier=1.0)
    states = [state_of(fit(federated_trainer, secret, rounds=1)[1]) for _ in range(2)]
    assert all(not torch.equal(value, states[1][name]) for name, value in states[0].items())
    _, module, trainer = fit(federated_trainer, secret, rounds=1)
    keys = [key_of(trainer)]
    again = federated_trainer(federation=trainer.federation, max_rounds=1)
    again.fit(module, models.as_datasets(models.vectors(CLIENTS)))
    keys.append(key_of(again))
    assert keys[0] != keys[1]
    assert max(keys) > 2**100


def test_another_fit_on_the_same_clients_begins_its_budget_anew(federated_trainer, caplog):
    """The second fit warns; other clients and a resumed fit do not warn."""
    data = {"of": models.vectors({"ledger-a": 12, "ledger-b": 12}), "other": models.vectors({"ledger-c": 12, "b": 12})}

    def fit(clients):
        caplog.clear()
        trainer = federated_trainer(max_rounds=2, steps=[CentralDP(1.0, delta=1e-2, noise_multiplier=1.0)])
        trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(data[clients]))
        return float(trainer.callback_metrics["privacy/epsilon"])

    epsilon = fit("of")
    assert "Earlier fits" not in caplog.text
    fit("other")
    assert "Earlier fits" not in caplog.text
    fit("of")
    assert f"spent epsilon {epsilon:.4g}. The epsilon of this fit" in caplog.text


def test_resume_is_exact_and_the_budget_goes_on(federated_trainer, tmp_path):
    secret = CentralDP(0.3, 1e-3, epsilon=5.0)
    path = tmp_path / "two.ckpt"

    class Saves(FederatedCallback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    _, module, trainer = fit(federated_trainer, secret, "fedavgm", 4, callbacks=[Saves()])
    resumed = models.Module(models.mlp(), models.momentum)
    again = federated_trainer(method="fedavgm", max_rounds=4, clients_per_round=3, seed=1, steps=[secret])
    again.fit(resumed, models.as_datasets(models.vectors(CLIENTS)), ckpt_path=path, **loading(weights_only=True))
    assert_same(state_of(module), state_of(resumed))
    assert trainer.callback_metrics["privacy/epsilon"] == again.callback_metrics["privacy/epsilon"]
    assert 4.99 < trainer.callback_metrics["privacy/epsilon"] <= 5.0


def test_the_fit_ends_with_its_budget(federated_trainer, tmp_path, caplog):
    limit = Budget(1.0, 1e-3, 12, 3).epsilon(3)
    privacy = KnownKey(0.3, 1e-3, noise_multiplier=1.0, max_epsilon=limit)
    recorder, module, trainer = fit(federated_trainer, privacy, rounds=9)
    assert trainer.current_epoch == len(recorder.aggregates) == 3
    assert "The fit ends after 3 rounds" in caplog.text
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(limit)
    assert_same(recorder.aggregates[-1], state_of(module), recorder.aggregates[-1])
    path = tmp_path / "spent.ckpt"
    trainer.save_checkpoint(path)
    again = federated_trainer(method="fedavg", max_rounds=9, clients_per_round=3, seed=1, steps=[privacy])
    after = models.Module(models.mlp(), models.momentum)
    again.fit(after, models.as_datasets(models.vectors(CLIENTS)), ckpt_path=path, **loading(weights_only=True))
    assert_same(state_of(after), state_of(module))


def test_a_servers_optimizer_works_on_what_is_noised(federated_trainer):
    """A rate of one without momentum gives the noisy mean."""
    states = [
        state_of(fit(federated_trainer, method=method, rounds=2)[1])
        for method in (
            "fedavg",
            FedAvgM(momentum=0.0),
            "fairavg",
            Method(FedProx(mu=0.0), steps=[ServerOptimizer("SGD", lr=1.0)]),
        )
    ]
    for state in states[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=1e-5, atol=1e-6)
    adam = state_of(fit(federated_trainer, method="fedadam", rounds=2)[1])
    assert not torch.allclose(adam["net.0.weight"], states[0]["net.0.weight"])


def test_personal_entries_stay_at_home(federated_trainer):
    recorder, _, _ = fit(federated_trainer, module=models.Module(models.BaseAndHead(), models.momentum), rounds=2,
                         personal=["net.head.*"], batch_norm="personal")  # fmt: skip
    assert recorder.visits
    assert all("head" not in name for visit in recorder.visits for name in visit.update)


def test_clients_at_once(federated_trainer, caplog):
    states = []
    for size in (1, 4):
        module = models.Module(models.mlp(), models.momentum)
        trainer = federated_trainer(max_rounds=2, clients_per_round=4, seed=1, steps=[DP], visits=Vectorized(size))
        trainer.fit(module, models.as_datasets(models.vectors(CLIENTS)))
        states.append(state_of(module))
    assert "clients train one after another" not in caplog.text
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5)


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fedatt", "an averaging method .*, but got FedAtt"),
        ("fedmargin", "an averaging method .*, but got FedMargin"),
        ("fesem", "an averaging method .*, but got FeSEM"),
        ("fedma", "an averaging method .*, but got FedMA"),
        ("feddane", "an averaging method .*, but got FedDANE"),
        ("krum", "an averaging method .*, but got Krum"),
        (FedAvgM(aggregator="fedatt"), "an averaging method .*, but got FedAtt"),
        ("scaffold", "an averaging method .*, but got SCAFFOLD"),
        ("fednova", "an averaging method .*, but got FedNova"),
        ("median", "an averaging method .*, but got Median"),
    ],
)
def test_methods_that_cannot_be_protected(method, words):
    with pytest.raises(ValueError, match=words):
        Federation(method, steps=[DP])


SEND_STEPS_ALONE = {
    "fedavg", "fairavg", "fedprox", "fedper", "fedrep", "fedbn", "silobn", "fixbn", "ditto", "fedavgm", "fedadam",
    "fedadagrad", "fedyogi",
}  # fmt: skip
NEEDED = {"fedss": "num_negatives=3", "fixbn": "after=2", "fltrust": "trusted=c0"}


LIKE_OTHERS = {"fedadagrad", "fedyogi", "fixbn", "silobn"}  # like FedAdam and FedBN


@pytest.mark.parametrize("name", quick(sorted(METHODS), METHODS.keys() - LIKE_OTHERS))
def test_methods_that_are_not_refused_send_steps_alone(name, federated_trainer):
    """All other methods are refused, when building the federation or before the first round."""
    method = f"{name}:{NEEDED[name]}" if name in NEEDED else name
    if name in SEND_STEPS_ALONE:
        module = models.Module(models.norm_mlp() if name in ("fedbn", "silobn") else models.mlp())
        recorder, _, trainer = fit(federated_trainer, method=method, rounds=2, module=module)
        assert {visit.extras for visit in recorder.visits} == {()}
        assert trainer.federation.server.report.failed == {}
        return
    make = (
        models.Module(models.mlp())
        if name not in ("fedss", "fedaws")
        else ClassificationTask(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12)), num_classes=12, head="sampled_softmax"
        )
    )
    words = r"an averaging method|compares single updates|clients to send only updates, but `\w+\.on_client_\w+`"
    with pytest.raises((ValueError, MisconfigurationException), match=words):
        fit(federated_trainer, method=method, module=make)


def test_methods_that_can():
    for method in SEND_STEPS_ALONE - {"fixbn"}:
        chain = Federation(method, steps=[DP]).server.chain
        assert type(chain.rule) is FedAvg
        assert isinstance(chain.steps[-1], KnownKey)
        assert chain.steps[-1] is not DP  # separate steps for each federation


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([DP, DP], "Expected one `CentralDP`, but got several"),
        ([MaxMedianNorm(2.0), DP], "no `MaxMedianNorm` before `KnownKey` in `steps`, because the first step compares"),
        ([DP, MaxMedianNorm(2.0)], "no `MaxMedianNorm` with `CentralDP`, because one client could change"),
        ([DP, ALIE(1)], "no `ALIE` with `CentralDP`"),
        ([UniformWeights(), SecureSum(1.0), DP], "Expected `KnownKey` before `SecureSum`"),
    ],
)
def test_steps_beside_which_it_cannot_be_right(steps, words):
    with pytest.raises(ValueError, match=words):
        Federation(steps=steps)


def test_a_bound_inside_acts_on_the_client(federated_trainer):
    """The step is bounded by both; the log does not count shortened steps."""
    recorder, _, trainer = fit(federated_trainer, steps=[MaxNorm(SHORT / 4)])
    lengths = [
        math.sqrt(sum(float((visit.update[name].double() - value.double()).square().sum())
                      for name, value in visit.broadcast.items()))
        for visit in recorder.visits
    ]  # fmt: skip
    assert lengths
    assert max(lengths) == pytest.approx(SHORT / 4, rel=1e-3)
    assert "fed/shortened" not in trainer.callback_metrics
    alone, _, _ = fit(federated_trainer, KnownKey(SHORT / 4, 1e-3, noise_multiplier=4.0))
    for one, other in zip(recorder.aggregates, alone.aggregates, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


def test_a_client_that_does_not_clip_is_left_out():
    """The server checks the received norm, for any later change on the client."""
    chain = Chain(FedAvg(), [*chain_of(0.5).steps, Scaling(["a"], scale=3.0)])
    chain.start(RoundInfo(0, clients=["a", "b"]), START)
    sent = Broadcast(0, dict(START))
    chain.on_send("a", sent)
    for client in ("a", "b"):
        update = chain.on_client(update_of(steps(1)[0], client), sent, {})
        if client == "b":
            chain.receive(update, START)
            continue
        with pytest.raises(BadUpdate, match=r"the client's update has norm 1\.5"):
            chain.receive(update, START)
    assert chain.held[0].members == ("b",)


def warm_up(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), "interval": "step"}


def by_epoch(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"module": lambda: models.Module(models.norm_mlp()), "batch_norm": "recalibrate"},
            "BatchNorm statistics .* without noise",
        ),
        ({"module": lambda: models.Module(models.norm_mlp()), "batch_norm": "average"}, "BatchNorm statistics"),
        (
            {"module": lambda: models.Module(models.norm_mlp()), "batch_norm": LocalStatistics("pooled")},
            "BatchNorm statistics",
        ),
        ({"faults": Faults(min_clients=2)}, "Expected min_clients=1 with differential privacy, but got 2"),
        (
            {"module": lambda: models.Module(models.mlp(), models.momentum, warm_up)},
            "a scheduler per step or manual optimization: .* would depend on the clients' step counts",
        ),
        (
            {"module": lambda: models.ManualModule(models.mlp(), scheduler=by_epoch)},
            "automatic optimization with differential privacy, but got a scheduler per step",
        ),
        (
            {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
            "with differential privacy, but got '16-mixed', whose loss scale",
        ),
    ],
)
def test_what_else_would_leave_the_clients(options, words, federated_trainer):
    options = dict(options)
    module = options.pop("module", lambda: models.Module(models.mlp()))()
    with pytest.raises(MisconfigurationException, match=words):
        fit(federated_trainer, module=module, **options)


def test_an_epsilon_needs_a_number_of_rounds(federated_trainer):
    with pytest.raises(ValueError, match="a number of rounds"):
        fit(federated_trainer, CentralDP(0.3, 1e-3, epsilon=2.0), rounds=-1)


def test_a_delta_that_says_little(federated_trainer, caplog):
    fit(federated_trainer, CentralDP(0.3, 0.2, noise_multiplier=1.0), rounds=1)
    assert "delta=0.2 is not below one over the number of clients (12)" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Expected one of `noise_multiplier` and `epsilon`"),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, "Expected one of `noise_multiplier` and `epsilon`"),
        ({"noise_multiplier": 0.0}, "`noise_multiplier` to be greater than 0 and finite, but got 0.0"),
        ({"epsilon": 1.0, "clip": -1.0}, "`clip` to be greater than 0 and finite, but got -1.0"),
        ({"epsilon": 1.0, "delta": 0.0}, r"`delta` to be in \(0, 1\), but got 0.0"),
        ({"epsilon": 1.0, "quantile": 1.0}, r"`quantile` to be in \(0, 1\), but got 1.0"),
        ({"epsilon": 1.0, "sampling": "fixed", "accountant": "pld"}, "accountant='rdp' for sampling='fixed'"),
        ({"epsilon": 1.0, "max_epsilon": float("inf")}, "`max_epsilon` to be greater than 0 and finite"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        CentralDP(**{"clip": 1.0, "delta": 1e-3, **options})


def test_both_doors():
    trainer = FederatedTrainer(steps=[DP], logger=False)
    for federation in (trainer.federation, Federation(steps=[DP]).replace(local_epochs=2)):
        assert isinstance(federation.server.chain.steps[0], CentralDP)


# --- Other steps after a resume ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def private_rounds(tmp_path_factory):
    path = tmp_path_factory.mktemp("private") / "last.ckpt"
    fit_steps(None, 3, [private()]).save_checkpoint(path)
    return path


def private(clip=1.0, noise=1.0, **options):
    return CentralDP(clip=clip, delta=0.01, noise_multiplier=noise, **options)


def fit_steps(path, rounds, chain, **options):
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = FederatedTrainer(max_rounds=rounds, steps=chain, seed=1, enable_checkpointing=False, **quiet, **options)
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors()), ckpt_path=path)
    return trainer


OTHER_STEPS = {
    "none": [],
    "another clip": [private(clip=5.0)],
    "another noise": [private(noise=0.1)],
    "another sampling": [private(sampling="fixed")],
    "one more": [private(), MaxNorm(1.0)],
    "another order": [MaxNorm(1.0), private()],
}


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_a_fit_does_not_resume_with_other_steps(name, private_rounds):
    """Otherwise the model would move without the noise behind the logged epsilon."""
    with pytest.raises(ValueError, match=r"steps of the checkpoint, CentralDP\(clip=1\.0, delta=0\.01.*, but got"):
        fit_steps(private_rounds, 6, OTHER_STEPS[name])


def test_a_checkpoint_without_a_record_of_its_steps_is_refused(private_rounds, tmp_path):
    checkpoint = torch.load(private_rounds, weights_only=True)
    del checkpoint["callbacks"]["Federation"]["steps"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(
        ValueError, match="steps of the checkpoint, which the checkpoint does not record, but got CentralDP"
    ):
        fit_steps(tmp_path / "old.ckpt", 6, [private()])


def test_a_fit_resumes_with_the_same_steps(private_rounds):
    assert fit_steps(private_rounds, 6, [private()]).logged_metrics["privacy/epsilon"] > 0
