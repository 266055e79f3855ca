"""Central differential privacy: noise, sensitivity, what leaves, resume, refusals; the traps of specs/privacy.md."""

import copy
import math

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed import ClientUpdate, Faults, FederatedCallback, FederatedTrainer, Federation, Method, Vectorized
from lightning_fed.algorithms import FedAvg, FedAvgM, FedProx, FedSS, ServerOptimizer
from lightning_fed.errors import BadUpdate
from lightning_fed.method import build_method
from lightning_fed.privacy import Budget, CentralDP, PrivateMean
from lightning_fed.privacy.mean import CLIP, IS_SHORT
from lightning_fed.server.schedule import Schedule, SecretSampling
from lightning_fed.server.server import Server
from tests import models
from tests.recorders import Recorder, assert_same, loading, state_of
from tests.references_privacy import adaptive_clip_reference, noise_reference, private_mean_reference

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]
KEY = 0x0123456789ABCDEF0123456789ABCDEF
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


def rule_of(clip=1.0, budget=BUDGET, key=KEY, **options):
    rule = PrivateMean(clip, **options)
    rule.begin(budget, key)
    return rule


def aggregated(rule, updates, round=0, start=START):
    rule.start_round(round, start)
    for update in updates:
        rule.receive(copy.deepcopy(update))
    return rule.aggregate()


def moved(new, start=START):
    return {name: (new[name].double() - start[name].double()).numpy() for name in SHAPES}


# --- the sum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 6])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_against_a_plain_implementation(count, sampling):
    """Of nobody it is noise alone; the divisor is the expected cohort. Fixed cohorts have twice the noise."""
    rule = rule_of(0.7, Budget(1.3, 1e-3, 100, 10, sampling))
    sent = [clipped(step, 0.7) for step in steps(count)]
    new = aggregated(rule, [update_of(step) for step in sent], round=4)
    std = 1.3 * 0.7 * (2 if sampling == "fixed" else 1)
    expected = private_mean_reference(sent, 0.7, std, 10, KEY, 4, SHAPES)
    for name, value in moved(new).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6)  # of float32 models
    assert new["n"].item() == 3  # integers keep the server's value
    assert rule.metrics()["privacy/noise_std"] == pytest.approx(std)


def test_noise_is_normal_and_independent():
    """Standard deviation and kurtosis of every entry over 700 rounds; no correlation between entries and rounds."""
    rule, count = rule_of(0.5), 700
    draws = []
    for round in range(count):
        new = aggregated(rule, [], round)
        draws.append(np.concatenate([moved(new)[name].reshape(-1) for name in SHAPES]) * 10 / 0.5)
    draws = np.array(draws)
    size = draws.shape[1]
    assert size == 14
    # Five standard deviations of each estimate, for the worst of the entries.
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
    """Whatever it sends, if it is taken at all; the noise is the same."""
    for seed in range(5):
        sent = [clipped(step, 0.7 * (1 + 1e-7)) for step in steps(6, seed, scale)]
        extras = {IS_SHORT: torch.tensor(1.0)} if adaptive else {}
        budget = Budget(0.2, 1e-3, 100, 10)
        options = {"adaptive": adaptive, "count_noise": 0.5}
        whole = moved(aggregated(rule_of(0.7, budget, **options), [update_of(step, extras=extras) for step in sent]))
        rest = moved(aggregated(rule_of(0.7, budget, **options), [update_of(step, extras=extras) for step in sent[1:]]))
        change = math.sqrt(sum(float(np.square(whole[name] - rest[name]).sum()) for name in SHAPES)) * 10
        assert change <= 0.7 + 1e-5  # of models in float32


def test_what_is_too_long_or_says_more_is_left_out():
    rule = rule_of(1.0)
    rule.start_round(0, START)
    with pytest.raises(BadUpdate, match=r"its step is 1\.5 long, longer than the clip of 1"):
        rule.receive(update_of({"w": np.zeros((4, 3)), "b": np.array([1.5, 0.0])}))
    with pytest.raises(BadUpdate, match=r"it sends \['prototypes'\] along, and not \[\]: no noise covers it"):
        rule.receive(update_of(steps(1, scale=0.01)[0], extras={"prototypes": torch.zeros(3)}))
    assert rule.total == {}
    adaptive = rule_of(1.0, Budget(0.3, 1e-3, 100, 10), adaptive=True)
    adaptive.start_round(0, START)
    with pytest.raises(BadUpdate, match="along, and not"):
        adaptive.receive(update_of(steps(1, scale=0.01)[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_longer_by_rounding_is_taken(dtype):
    """And clipped once more, so that the noise covers it."""
    longer = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        start = {"w": 0.1 * torch.randn(3000, generator=generator).to(dtype)}
        step = torch.randn(3000, generator=generator, dtype=torch.float64)
        trained = (start["w"].double() + step / step.norm()).to(dtype)
        longer += float((trained.double() - start["w"].double()).norm()) > 1
        rule = rule_of(1.0)
        rule.start_round(0, start)
        rule.receive(ClientUpdate("a", 1, {"w": trained}))
        assert float(rule.total["w"].norm()) <= 1 + 1e-12
    assert longer


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_noise_of_a_larger_cohort(adaptive):
    """A tenth of the noise on the mean of 10 is that of 100 on theirs; what is accounted is the 100."""
    options = {"adaptive": adaptive, "count_noise": 0.2} if adaptive else {}
    extras = {IS_SHORT: torch.tensor(1.0)} if adaptive else {}
    updates = [update_of(step, str(number), extras) for number, step in enumerate(steps(8, scale=0.01))]
    few, many = PrivateMean(1.0, **options), PrivateMean(1.0, **options)
    few.begin(Budget(1.0, 1e-3, 1000, 100), KEY, 10)
    many.begin(Budget(1.0, 1e-3, 1000, 100), KEY)
    assert many.noise_std == pytest.approx(10 * few.noise_std)
    simulated, real = moved(aggregated(few, updates)), moved(aggregated(many, updates))
    silent = PrivateMean(1.0, **options)
    silent.begin(Budget(1.0, 1e-3, 1000, 100), KEY, 10)
    silent.noise = lambda name, shape, std: torch.zeros(tuple(shape), dtype=torch.float64)
    plain = moved(aggregated(silent, updates))
    for name in SHAPES:  # the mean of 8 over 100 hardly moves: both have the same noise
        expected = plain[name] + real[name] - plain[name] / 10
        np.testing.assert_allclose(simulated[name], expected, atol=1e-6)
    assert few.metrics()["privacy/simulated_epsilon"] == many.metrics()["privacy/epsilon"]
    assert "privacy/epsilon" not in few.metrics()
    if adaptive:  # 8 short ones: (8 / 2 + noise) / 10, and a tenth of the noise of 100
        noise = many.noise("", torch.Size([1]), 0.2)
        assert few.metrics()["privacy/clipped_share"] == pytest.approx(0.5 - 4 / 10 - float(noise))


def test_a_fit_with_the_noise_of_a_larger_cohort(federated_trainer, caplog):
    privacy = CentralDP(0.5, 1e-3, noise_multiplier=1.0, noise_cohort=100, noise_population=5000, key_for_tests=KEY)
    _, _, trainer = fit(federated_trainer, privacy)
    assert "epsilon is simulated, and bounds nothing of these clients" in caplog.text
    simulated = float(trainer.callback_metrics["privacy/simulated_epsilon"])
    assert simulated == pytest.approx(Budget(1.0, 1e-3, 5000, 100).epsilon(4))
    assert "privacy/epsilon" not in trainer.callback_metrics
    assert float(trainer.callback_metrics["privacy/noise_std"]) == pytest.approx(0.5 * 3 / 100)
    with pytest.raises(ValueError, match="`noise_cohort` to be from 3 clients, which train, to `noise_population`"):
        fit(federated_trainer, CentralDP(0.5, 1e-3, noise_multiplier=1.0, noise_cohort=1))


def test_a_zero_step_and_an_empty_round():
    zero = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    one, nobody = (aggregated(rule_of(), updates) for updates in ([update_of(zero)], []))
    assert_same(one, nobody)
    server = Server(rule_of())
    server.start_round(0, START)
    state = server.finish_round()
    assert_same(state, nobody)
    assert not torch.equal(state["w"], START["w"])


def test_the_clip_follows_the_lengths():
    rule, clip = rule_of(2.0, Budget(0.5, 1e-3, 100, 10), adaptive=True, count_noise=0.3, clip_rate=0.4), 2.0
    for round, is_short in enumerate(([True] * 9, [False, True], [])):
        updates = [
            update_of(step, extras={IS_SHORT: torch.tensor(float(short))})
            for step, short in zip(steps(len(is_short), round, 1e-3), is_short, strict=True)
        ]
        new = aggregated(rule, updates, round)
        noise = noise_reference(KEY, round, "", (1,), 3.0)[0]
        std = (0.5**-2 - (2 * 3.0) ** -2) ** -0.5 * clip
        assert rule.metrics()["privacy/noise_std"] == pytest.approx(std)
        assert rule.metrics()["privacy/clip"] == pytest.approx(clip)
        clip, share = adaptive_clip_reference(clip, is_short, 10, noise, 0.4, 0.5)
        assert rule.metrics()["privacy/clipped_share"] == pytest.approx(1 - share)
        assert rule.clip == pytest.approx(clip)
        assert new["w"].isfinite().all()
    assert rule.broadcast("a").extras[CLIP].item() == pytest.approx(clip)
    with pytest.raises(ValueError, match="a noise multiplier below 1, twice the noise of the count"):
        rule_of(1.0, Budget(1.0, 1e-3, 100, 10), adaptive=True)


def test_done_again_a_round_has_the_same_noise_and_costs_once():
    """As after a crash between the noise and the checkpoint."""
    rule = rule_of()
    aggregated(rule, [], 0)
    before = copy.deepcopy(rule.state_dict())
    first = aggregated(rule, [update_of(steps(1, scale=0.1)[0])], 1)
    again = PrivateMean(9.9)
    again.load_state_dict(before)
    second = aggregated(again, [update_of(steps(1, scale=0.1)[0])], 1)
    assert_same(first, second)
    assert (rule.rounds, again.rounds) == (2, 2)
    assert rule.metrics() == again.metrics()
    with pytest.raises(ValueError, match="Expected the budget that the rounds so far had"):
        again.begin(Budget(0.1, 1e-3, 100, 10), KEY)


def test_in_several_processes():
    """One noise for the sum of all."""
    sent = [update_of(step) for step in steps(5, scale=0.05)]
    whole = aggregated(rule_of(), sent)
    parts = [rule_of() for _ in range(3)]
    for part, share in zip(parts, (sent[:2], [], sent[2:]), strict=True):
        part.start_round(0, START)
        for update in share:
            part.receive(copy.deepcopy(update))
    merged = rule_of()
    merged.start_round(0, START)
    for part in parts:
        merged.merge(part)
    for name, value in merged.aggregate().items():
        torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-7)
    with pytest.raises(TypeError, match="`other` to be a PrivateMean, but got FedAvg"):
        merged.merge(FedAvg())


# --- draws of clients -------------------------------------------------------------------------------------------------


def test_every_client_is_drawn_by_itself():
    """Number and pairs of clients over 4,000 rounds, within five standard deviations; the seed plays no part."""
    clients, rounds = [f"c{number}" for number in range(20)], 4000
    sampling, schedule = SecretSampling(KEY), Schedule(0, clients_per_round=3)
    cohorts = [
        {visit.client for visit in schedule.cohort(round, clients, sampling=sampling).visits} for round in range(rounds)
    ]
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
    other = Schedule(7, clients_per_round=3)
    assert [visit.client for visit in other.cohort(5, clients, sampling=sampling).visits] == [
        visit.client for visit in schedule.cohort(5, clients, sampling=sampling).visits
    ]
    fixed = [schedule.cohort(round, clients, sampling=SecretSampling(KEY, False)) for round in range(20)]
    assert {len(cohort.visits) for cohort in fixed} == {3}
    assert [visit.client for visit in fixed[0].visits] != [
        visit.client for visit in schedule.cohort(0, clients, sampling=SecretSampling(KEY + 1, False)).visits
    ]


# --- fits -------------------------------------------------------------------------------------------------------------

CLIENTS = {f"c{number}": 6 + number for number in range(12)}
SHORT = 0.02  # shorter than most steps
DP = CentralDP(SHORT, 1e-3, noise_multiplier=1.0, key_for_tests=KEY)


def fit(trainer, privacy=DP, method="fedavg", rounds=4, module=None, callbacks=(), **options):
    recorder = Recorder()
    module = models.Module(models.mlp(), models.momentum) if module is None else module
    fitted = trainer(
        method=method, max_rounds=rounds, clients_per_round=3, seed=1, privacy=privacy,
        callbacks=[*callbacks, recorder], **options,
    )  # fmt: skip
    fitted.fit(module, models.as_datasets(models.vectors(CLIENTS)))
    return recorder, module, fitted


def test_a_fit_round_by_round(federated_trainer):
    recorder, _, trainer = fit(federated_trainer, rounds=8)
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
    assert len(recorder.aggregates) == 8
    assert len(set(sizes)) > 1
    assert long
    shown = {name for name in trainer.callback_metrics if name.startswith(("fed/", "comm/", "client/", "privacy/"))}
    assert shown == {"privacy/epsilon", "privacy/delta", "privacy/noise_std", "privacy/clip"}
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(Budget(1.0, 1e-3, 12, 3).epsilon(8))


def test_every_fit_has_a_key_of_its_own(federated_trainer):
    secret = CentralDP(0.3, 1e-3, noise_multiplier=1.0)
    states = [state_of(fit(federated_trainer, secret, rounds=1)[1]) for _ in range(2)]
    assert all(not torch.equal(value, states[1][name]) for name, value in states[0].items())
    _, module, trainer = fit(federated_trainer, secret, rounds=1)
    keys = [trainer.federation.server.aggregator.key]
    again = federated_trainer(federation=trainer.federation, max_rounds=1)
    again.fit(module, models.as_datasets(models.vectors(CLIENTS)))
    keys.append(again.federation.server.aggregator.key)
    assert keys[0] != keys[1]
    assert max(keys) > 2**100


def test_resume_is_exact_and_the_budget_goes_on(federated_trainer, tmp_path):
    secret = CentralDP(0.3, 1e-3, epsilon=5.0)
    path = tmp_path / "two.ckpt"

    class Saves(FederatedCallback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    _, module, trainer = fit(federated_trainer, secret, "fedavgm", 4, callbacks=[Saves()])
    resumed = models.Module(models.mlp(), models.momentum)
    again = federated_trainer(method="fedavgm", max_rounds=4, clients_per_round=3, seed=1, privacy=secret)
    again.fit(resumed, models.as_datasets(models.vectors(CLIENTS)), ckpt_path=path, **loading(weights_only=True))
    assert_same(state_of(module), state_of(resumed))
    assert trainer.callback_metrics["privacy/epsilon"] == again.callback_metrics["privacy/epsilon"]
    assert 4.99 < trainer.callback_metrics["privacy/epsilon"] <= 5.0


def test_the_fit_ends_with_its_budget(federated_trainer, tmp_path, caplog):
    limit = Budget(1.0, 1e-3, 12, 3).epsilon(3)
    privacy = CentralDP(0.3, 1e-3, noise_multiplier=1.0, max_epsilon=limit, key_for_tests=KEY)
    recorder, module, trainer = fit(federated_trainer, privacy, rounds=9)
    assert trainer.current_epoch == len(recorder.aggregates) == 3
    assert "The fit ends after 3 rounds" in caplog.text
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(limit)
    assert_same(recorder.aggregates[-1], state_of(module), recorder.aggregates[-1])
    path = tmp_path / "spent.ckpt"
    trainer.save_checkpoint(path)
    again = federated_trainer(method="fedavg", max_rounds=9, clients_per_round=3, seed=1, privacy=privacy)
    after = models.Module(models.mlp(), models.momentum)
    again.fit(after, models.as_datasets(models.vectors(CLIENTS)), ckpt_path=path, **loading(weights_only=True))
    assert_same(state_of(after), state_of(module))


def test_a_servers_optimizer_works_on_what_is_noised(federated_trainer):
    """With a rate of one and no momentum it is the noised mean."""
    states = [
        state_of(fit(federated_trainer, method=method, rounds=3)[1])
        for method in ("fedavg", FedAvgM(momentum=0.0), "fairavg", ServerOptimizer("SGD", FedProx(mu=0.0), lr=1.0))
    ]
    for state in states[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=1e-5, atol=1e-6)
    adam = state_of(fit(federated_trainer, method="fedadam", rounds=3)[1])
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
        trainer = federated_trainer(max_rounds=4, clients_per_round=4, seed=1, privacy=DP, visits=Vectorized(size))
        trainer.fit(module, models.as_datasets(models.vectors(CLIENTS)))
        states.append(state_of(module))
    assert "one after another all the same" not in caplog.text
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fedatt", "FedAtt is none"),
        ("fedmargin", "FedMargin is none"),
        ("fesem", "FeSEM is none"),
        ("fedma", "FedMA is none"),
        ("feddane", "FedDANE is none"),
        ("krum", "Krum is none"),
        (FedAvgM(aggregator="fedatt"), "FedAtt is none"),
        (FedSS(num_negatives=3), "SampledSoftmax sends more"),
        ("fedfusion", "FeatureFusion sends more"),
    ],
)
def test_methods_that_cannot_be_protected(method, words):
    with pytest.raises(ValueError, match=words):
        Federation(method, privacy=DP)


def test_methods_that_can():
    for method in ("fedavg", "fairavg", "fedprox", "fedper", "fedrep", "fedbn", "fedadam"):
        federation = Federation(method, privacy=DP)
        names = [type(callback).__name__ for callback in federation.method.callbacks]
        assert names[-2:] == ["ClippedSteps", "PrivacyBudget"]
        assert federation.server.aggregator.is_private
        assert federation.evaluate_clients_every == 0
    method = build_method("fedavg")
    assert isinstance(DP.protect(method).aggregator, PrivateMean)
    assert isinstance(method.aggregator, FedAvg)  # as it was
    assert [type(c).__name__ for c in DP.protect(Method(FedProx(0.5))).aggregator.required_callbacks()] == [
        "ProximalTerm"
    ]


def warm_up(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), "interval": "step"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"module": lambda: models.Module(models.norm_mlp())}, "BatchNorm's statistics .* without noise"),
        ({"module": lambda: models.Module(models.norm_mlp()), "batch_norm": "average"}, "BatchNorm's statistics"),
        ({"faults": Faults(min_clients=2)}, "Expected min_clients=1 with differential privacy, but got 2"),
        (
            {"module": lambda: models.Module(models.mlp(), models.momentum, warm_up)},
            "A scheduler per step goes on from",
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
    assert "delta=0.2 is not less than one over the number of clients (12)" in caplog.text


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


def test_the_first_argument_of_both_doors():
    assert isinstance(FederatedTrainer(privacy=DP, logger=False).federation.server.aggregator, PrivateMean)
    assert isinstance(Federation(privacy=DP).replace(local_epochs=2).server.aggregator, PrivateMean)
