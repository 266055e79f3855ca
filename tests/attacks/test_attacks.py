"""Attacks in fits: malicious updates, unaffected honest clients, and the resulting model."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import ClientUpdate, FederatedDataModule, FederatedTrainer, Vectorized
from lightning_fed.algorithms import FedAvg, FedAvgM, FLTrust, GeometricMedian, Krum, TrimmedMean
from lightning_fed.algorithms.robust import AdaptiveClipping, Bucketing, NearestNeighborMixing
from lightning_fed.attacks import (
    ALIE,
    IPM,
    Backdoor,
    BadValues,
    FreeRider,
    GaussianNoise,
    LabelFlip,
    Mimic,
    Scaling,
    SignFlip,
)
from lightning_fed.method import build_method
from lightning_fed.numerics.seeds import client_key
from lightning_fed.process_group import pack, unpack
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps.chain import Chain
from tests import models
from tests.breadth import quick
from tests.conftest import QUIET
from tests.recorders import Recorder, assert_same, loading, state_of
from tests.references_robust import arc_reference, bucketing_reference, nnm_reference, trimmed_mean_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

MALICIOUS = ["ann", "cid"]
SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}
NET = models.norm_mlp


class WireRecorder(Recorder):
    def on_server_receive(self, trainer, module, update):
        super().on_server_receive(trainer, module, update)
        visit = next(visit for visit in reversed(self.visits) if visit.client == update.client)
        visit.update = {name: value.cpu().clone() for name, value in update.state.items()}


def fit(trainer, steps=(), method="fairavg", rounds=1, net=NET, **options):
    recorder, module = WireRecorder(), models.Module(net(), models.momentum)
    fitted = trainer(
        max_rounds=rounds, method=method, seed=1, batch_norm="average", steps=steps, callbacks=[recorder], **options
    )
    fitted.fit(module, models.as_datasets(models.vectors(SIZES)))
    return recorder, module, fitted


def updates(recorder, round=0):
    return {visit.client: visit.update for visit in recorder.round(round)}


def is_statistic(name):
    return "running" in name or "tracked" in name


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return fit(functools.partial(FederatedTrainer, **QUIET, default_root_dir=tmp_path_factory.mktemp("honest")))[0]


FORMULAS = {
    "sign flip": (SignFlip(MALICIOUS, 2.0), lambda start, trained: start - 2 * (trained - start)),
    "scaling": (Scaling(MALICIOUS, 5.0), lambda start, trained: start + 5 * (trained - start)),
    "free rider": (FreeRider(MALICIOUS), lambda start, trained: start),
    "huge": (BadValues(MALICIOUS, "huge"), lambda start, trained: torch.full_like(start, 3.4028234663852886e38)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_what_malicious_clients_send(name, honest, federated_trainer):
    attack, formula = FORMULAS[name]
    attacked, _, _ = fit(federated_trainer, [attack], "median")
    start = honest.visits[0].broadcast
    for client, update in updates(attacked).items():
        expected = updates(honest)[client]
        if client in MALICIOUS:
            expected = {
                key: value if is_statistic(key) else formula(start[key], value) for key, value in expected.items()
            }
            assert any(not torch.equal(update[key], updates(honest)[client][key]) for key in update)
        assert_same(expected, update)


def test_noise_is_of_client_and_round(federated_trainer):
    def noise(seed=0):
        recorder, _, _ = fit(federated_trainer, [GaussianNoise(MALICIOUS, 0.5, seed)], "median", 2)
        return {
            (visit.round, visit.client): torch.cat(
                [(visit.update[key] - visit.broadcast[key]).flatten() for key in visit.update if not is_statistic(key)]
            )
            for visit in recorder.visits
            if visit.client in MALICIOUS
        }

    drawn = noise()
    assert len({float(values[0]) for values in drawn.values()}) == len(drawn) == 4
    for key, values in noise().items():
        assert torch.equal(values, drawn[key])
    assert not torch.equal(noise(1)[0, "ann"], drawn[0, "ann"])
    pooled = torch.cat([*drawn.values()])
    # five standard deviations of the estimate
    assert pooled.std().item() == pytest.approx(0.5, rel=5 / (2 * len(pooled)) ** 0.5)
    assert abs(pooled.mean().item()) < 5 * 0.5 / len(pooled) ** 0.5


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_values_that_are_none_are_left_out(kind, federated_trainer):
    _, module, trainer = fit(federated_trainer, [BadValues(MALICIOUS, kind)])
    assert trainer.callback_metrics["fed/failed"] == 2
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_a_number_of_clients_is_drawn(federated_trainer):
    attack = FreeRider(2, 1)
    recorder, _, trainer = fit(federated_trainer, [attack], "median", 2)
    clients = trainer.federation.population.clients
    for round in range(2):
        free = {
            visit.client
            for visit in recorder.round(round)
            if all(torch.equal(visit.update[key], visit.broadcast[key]) for key in ("net.0.weight", "net.0.bias"))
        }
        assert free == attack.malicious(clients)
        assert len(free) == 2
    assert len({frozenset(FreeRider(2, seed).malicious(clients)) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SignFlip("ann"), "`clients` to be a list of names or a number, but got 'ann'"),
        (lambda: SignFlip(-1), "`clients` to be at least 0, but got -1"),
        (lambda: SignFlip(1, seed=-1), "`seed` to be at least 0, but got -1"),
        (lambda: GaussianNoise(1, std=-1.0), "`std` to be at least 0 and finite, but got -1.0"),
        (lambda: BadValues(1, "zero"), r"`kind` to be one of \['nan', 'inf', 'huge'\], but got 'zero'"),
        (lambda: LabelFlip(1, num_classes=1), "`num_classes` to be at least 2, but got 1"),
        (lambda: Backdoor(1, share=0.0), r"`share` to be in \(0, 1\], but got 0.0"),
        (lambda: Backdoor(1, target=-1), "`target` to be at least 0, but got -1"),
    ],
)
def test_options_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


UNKNOWN = {"a name": (["ann", "zoe"], "clients of the federation, but got 'zoe'")}
UNKNOWN |= {"a number": (9, "`clients` to be at most 5 .all clients., but got 9")}


@pytest.mark.parametrize("attack", [SignFlip, IPM])
@pytest.mark.parametrize(("clients", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_clients_that_there_are_not(attack, clients, message, federated_trainer):
    with pytest.raises(ValueError, match=message):
        fit(federated_trainer, [attack(clients)])


@pytest.mark.parametrize(
    ("callbacks", "steps"),
    [
        ([LabelFlip(["zoe"], 3)], []),
        ([LabelFlip(["zoe"], 3)], [SignFlip(["ann"])]),
        ([LabelFlip(["ann"], 3)], [SignFlip(["zoe"])]),
        ([], [IPM(["ann"]), ALIE(["zoe"])]),
        ([], [IPM(["zoe"]), ALIE(["ann"])]),
    ],
)
def test_every_one_of_several_attacks_is_checked(callbacks, steps, federated_trainer):
    trainer = federated_trainer(max_rounds=1, method="median", steps=steps, callbacks=callbacks)
    with pytest.raises(ValueError, match="clients of the federation, but got 'zoe'"):
        trainer.fit(models.Module(NET(), models.momentum), models.as_datasets(models.vectors(SIZES)))


# --- Omniscient attacks -----------------------------------------------------------------------------------------------


def stacked(recorder, key, start):
    honest = [update[key] for client, update in updates(recorder).items() if client not in MALICIOUS]
    return torch.stack(honest).double() - start[key].double()


OMNISCIENT = {
    "ipm": (IPM(MALICIOUS, 0.8), lambda steps: -0.8 * steps.mean(0)),
    "alie": (ALIE(MALICIOUS, 1.2), lambda steps: steps.mean(0) + 1.2 * steps.std(0)),
}


@pytest.mark.parametrize("name", [*OMNISCIENT, "mimic"])
def test_what_they_make_of_the_honest_steps(name, honest, federated_trainer):
    """The average covers the honest updates and two copies of the attack's update."""
    attack, formula = OMNISCIENT.get(name, (Mimic(MALICIOUS), None))
    attacked, _, trainer = fit(federated_trainer, [attack])
    start = honest.visits[0].broadcast
    others = [client for client in updates(honest) if client not in MALICIOUS]
    if name == "mimic":
        victim = others.index(min(others, key=client_key))
        formula = lambda steps: steps[victim]  # noqa: E731
    for key, value in attacked.aggregates[0].items():
        if not is_statistic(key):
            steps = stacked(honest, key, start)
            expected = start[key] + (steps.sum(0) + 2 * formula(steps)) / 5
            # Malicious models are rounded to float32 before the rule.
            assert torch.allclose(value.double(), expected, rtol=1e-6, atol=1e-7), key
        else:
            assert torch.equal(value, honest.aggregates[0][key])
    assert trainer.callback_metrics["fed/clients"] == 5


def test_rules_that_an_attack_cannot_know(federated_trainer):
    for rule in ("fesem", "fedma"):
        with pytest.raises(ValueError, match=r"Expected no `IPM` with Fe.*, because not all clients start"):
            fit(federated_trainer, [IPM(1)], rule)
    chain = Chain(FedAvg(), [IPM(MALICIOUS)])
    with pytest.raises(ValueError, match=r"Expected no `IPM` if clients hold only some rows of \['w'\]"):
        chain.start(RoundInfo(0, sliced=frozenset(["w"])), {"w": torch.zeros(2)})


def vectors_of(clients, width=6, seed=0):
    return dict(zip(clients, np.random.default_rng(seed).normal(size=(len(clients), width)), strict=True))


def chain_of(method, *steps):
    method = build_method(method)
    return Chain(method.aggregator, [*method.steps, *steps])


def aggregated(make, start, steps, shares):
    """The step of a round with one chain per share of the clients; the chains are sent and merged."""
    state = {"w": torch.tensor(start)}
    sent = []
    for share in shares:
        chain = make()
        chain.start(RoundInfo(0), state)
        for client in share:
            chain.receive(ClientUpdate(client, 1, {"w": torch.tensor(start + steps[client])}), state)
        sent.append(pack(chain.part, [state["w"]]))
    whole = make()
    whole.start(RoundInfo(0), state)
    for rest, tensors in sent:
        whole.merge(unpack(rest, [tensor.clone() for tensor in tensors], [state["w"]]))
    return whole.aggregate()["w"].numpy() - start


def test_two_attacks_at_once():
    """The inner attack sees the outer attack's updates, but not vice versa."""
    steps = vectors_of("abcde")
    honest = np.stack([steps[client] for client in "abc"])
    alie = lambda rows: rows.mean(0) + 1.5 * rows.std(0, ddof=1)  # noqa: E731
    outer = alie(np.stack([*honest, steps["d"]]))
    inner = -2 * np.stack([*honest, outer]).mean(0)
    result = aggregated(lambda: chain_of("fairavg", IPM(["d"]), ALIE(["e"])), np.ones(6), steps, ["abcde"])
    np.testing.assert_allclose(result, np.stack([*honest, outer, inner]).mean(0), rtol=1e-9, atol=1e-12)


CLIENTS = [*"abcdefg", *MALICIOUS]
SHARES = [[CLIENTS], [[*"gca", "cid"], ["ann", *"bdef"]], [[], MALICIOUS, [*"gfedcba"]]]


@pytest.mark.parametrize("attack", [IPM(MALICIOUS), ALIE(MALICIOUS), Mimic(MALICIOUS)])
@pytest.mark.parametrize("inner", [FedAvg, lambda: Krum(1), lambda: FedAvgM(aggregator=TrimmedMean(1))])
def test_in_several_processes(attack, inner):
    start, steps = vectors_of(["start"], seed=1)["start"], vectors_of(CLIENTS)
    results = [aggregated(lambda: chain_of(inner(), attack), start, steps, shares) for shares in SHARES]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shares", SHARES, ids=["one process", "two", "three"])
@pytest.mark.parametrize("mixture", ["nnm", "arc", "bucketing"])
def test_an_attack_a_mixture_and_a_rule(mixture, shares):
    """ALIE from the honest steps, then the mixture of all steps, then the trimmed mean."""
    start, steps = vectors_of(["start"], seed=1)["start"], vectors_of(CLIENTS)
    honest = np.stack([steps[client] for client in CLIENTS if client not in MALICIOUS])
    fake = honest.mean(0) + 1.5 * honest.std(0, ddof=1)
    order = sorted(CLIENTS, key=client_key)
    rows = np.stack([fake if client in MALICIOUS else steps[client] for client in order])
    if mixture == "bucketing":
        groups = np.random.default_rng(np.random.SeedSequence([3, 0])).permutation(len(rows))
        step, mixed = Bucketing(2, seed=3), bucketing_reference(rows, groups, 2)
    elif mixture == "nnm":
        step, mixed = NearestNeighborMixing(2), nnm_reference(rows, 2)
    else:
        step, mixed = AdaptiveClipping(2), arc_reference(rows, 2)
    result = aggregated(lambda: chain_of(TrimmedMean(2), step, ALIE(MALICIOUS)), start, steps, shares)
    np.testing.assert_allclose(result, trimmed_mean_reference(mixed, 2), rtol=1e-7, atol=1e-9)
    without = aggregated(lambda: chain_of(TrimmedMean(2), step), start, steps, shares)
    assert not np.allclose(result, without, rtol=1e-3)


def test_a_trusted_client_is_not_among_the_honest():
    server = Server(chain_of(FLTrust("server"), Mimic(["bad"])))
    server.start_round(RoundInfo(0), {"w": torch.zeros(2)})
    steps = {"server": [1.0, 0.0], "good": [0.0, 2.0], "bad": [5.0, 5.0]}
    for client, step in steps.items():
        server.sent(client, server.prepare(client))
        assert server.accept(ClientUpdate(client, 1, {"w": torch.tensor(step)}))
    assert server.finish_round()["w"].tolist() == [0.0, 0.0]  # the honest step is orthogonal, and so is the copy


def test_nobody_honest_is_there():
    result = aggregated(lambda: chain_of("fairavg", IPM(MALICIOUS)), np.zeros(1), {"ann": np.ones(1)}, [["ann"]])
    assert result == 1.0


# --- Attacks on data --------------------------------------------------------------------------------------------------


def test_labels_are_flipped(federated_trainer):
    clients = models.vectors(SIZES)
    flipped = {
        name: (inputs, 2 - labels if name in MALICIOUS else labels) for name, (inputs, labels) in clients.items()
    }
    assert max(int(labels.max()) for _, labels in clients.values()) == 2
    runs = []
    for data, callbacks in ((clients, [LabelFlip(MALICIOUS, 3)]), (flipped, [])):
        recorder = Recorder()
        trainer = federated_trainer(max_rounds=2, seed=1, callbacks=[*callbacks, recorder])
        trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(data))
        runs.append(recorder)
    for left, right in zip(runs[0].visits, runs[1].visits, strict=True):
        assert_same(left.update, right.update)


def test_a_batch_without_labels(federated_trainer):
    data = {"ann": TensorDataset(torch.zeros(4, 2)), "bob": TensorDataset(torch.zeros(4, 2))}
    with pytest.raises(ValueError, match="batches with inputs and integer labels for an attack on the data"):
        federated_trainer(max_rounds=1, callbacks=[LabelFlip(["ann"], 3)]).fit(models.Quadratic(), data)


def pictures(size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (size,), generator=generator)
    images = 0.3 * torch.rand(size, 1, 6, 6, generator=generator)
    for label, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 6))):
        images[labels == label, :, rows, :3] += 0.7
    return images, labels


def test_a_backdoor_opens_and_is_measured(federated_trainer):
    """With three of four malicious clients the trigger works, without malicious clients it fails."""
    clients = {name: TensorDataset(*pictures(60, seed)) for seed, name in enumerate("abcd")}
    val = pictures(90, 9)
    rates, scores = {}, {}
    for malicious in (0, 3):
        module = models.Module(
            nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), functools.partial(torch.optim.Adam, lr=0.05)
        )
        attack = Backdoor(malicious, target=2, size=2)
        data = FederatedDataModule(clients, DataLoader(TensorDataset(*val), 32), batch_size=20)
        trainer = federated_trainer(max_rounds=3, local_epochs=3, callbacks=[attack], seed=0)
        trainer.fit(module, datamodule=data)
        rates[malicious] = trainer.callback_metrics["backdoor/success_rate"].item()
        images, labels = val
        others = images[labels != 2].clone()
        others[:, :, -2:, -2:] = 1.0
        with torch.no_grad():
            share = (module.net(others).argmax(1) == 2).double().mean().item()
            scores[malicious] = (module.net(images).argmax(1) == labels).double().mean().item()
        assert rates[malicious] == pytest.approx(share, abs=1e-6)
    assert rates[0] < 0.2 < 0.8 < rates[3]
    assert min(scores.values()) > 0.9


def test_some_of_a_batch_gets_the_trigger(federated_trainer):
    attack = Backdoor(["a"], target=2, size=2, share=0.5, value=-1.0)
    images, labels = pictures(5, 0)
    trainer = federated_trainer(max_rounds=1, callbacks=[attack])
    clients = {"a": TensorDataset(*pictures(5, 1)), "b": TensorDataset(*pictures(5, 2))}
    trainer.fit(models.Module(nn.Sequential(nn.Flatten(), nn.Linear(36, 3))), clients)
    before = copy.deepcopy((images, labels))
    poisoned, wrong = attack.on_client_batch(trainer, None, "a", [images, labels])
    assert torch.equal(images, before[0])
    assert torch.equal(labels, before[1])
    assert (poisoned[:3, :, -2:, -2:] == -1).all()
    assert (poisoned == -1).sum() == 3 * 4
    assert wrong.tolist() == [2, 2, 2, *labels[3:].tolist()]
    assert attack.on_client_batch(trainer, None, "b", [images, labels])[0] is images


# --- Rules against attacks, and execution of visits -------------------------------------------------------------------


RULES, ATTACKS = ["krum", "median", "centered_clipping"], [SignFlip, GaussianNoise, ALIE]


@pytest.mark.parametrize(
    ("method", "attack"), quick(itertools.product(RULES, ATTACKS), list(zip(RULES, ATTACKS, strict=True))[1:])
)
def test_clients_at_once_are_clients_one_after_another(method, attack, federated_trainer, caplog):
    """Equal up to the rounding of float32 products with other shapes."""
    states = []
    for size in (1, 5):
        module = models.Module(models.mlp(), models.momentum)
        trainer = federated_trainer(
            max_rounds=2, method=method, seed=1, visits=Vectorized(size), steps=[attack(MALICIOUS)]
        )
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert "clients train one after another" not in caplog.text
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], rtol=1e-4, atol=1e-5)


def test_a_robust_rule_stands_what_an_average_does_not(federated_trainer):
    """A quadratic with known optimum: five clients near 1, and two attackers."""
    clients = {name: (torch.full((4, 2), 1.0 + 0.01 * place),) for place, name in enumerate("abcdefg")}
    distances = []
    for method in ("fairavg", Krum(2), GeometricMedian(), TrimmedMean()):
        module = models.Quadratic(lr=0.5)
        trainer = federated_trainer(max_rounds=4, method=method, steps=[SignFlip(["d", "e"], 5.0)], seed=0)
        trainer.fit(module, models.as_datasets(clients))
        distances.append(float(np.linalg.norm(module.w.detach().numpy() - 1.01)))
    assert distances[0] > 1
    assert max(distances[1:]) < 0.1


def test_a_resumed_fit_under_attack(federated_trainer, tmp_path):
    attacks = [ALIE(["ann"])]
    _, module, trainer = fit(federated_trainer, attacks, "centered_clipping", 2)
    _, _, first = fit(federated_trainer, attacks, "centered_clipping", 1)
    path = tmp_path / "last.ckpt"
    first.save_checkpoint(path)
    resumed = models.Module(NET(), models.momentum)
    again = federated_trainer(
        max_rounds=2, method="centered_clipping", seed=1, batch_norm="average", steps=[ALIE(["ann"])]
    )
    again.fit(resumed, models.as_datasets(models.vectors(SIZES)), ckpt_path=path, **loading(weights_only=True))
    assert_same(state_of(module), state_of(resumed))
    names = [name for name in trainer.callback_metrics if name.endswith("/excluded")]
    assert len(names) == 6
    assert {name: trainer.callback_metrics[name] for name in names} == {
        name: again.callback_metrics[name] for name in names
    }
