"""The robust rules against plain implementations, their laws, and what becomes of entries that are no steps."""

import copy
import itertools

import numpy as np
import pytest
import torch

from lightning_fed import Availability, ClientUpdate
from lightning_fed.algorithms import (
    Bulyan,
    CenteredClipping,
    FairAvg,
    FedAvg,
    FedAvgM,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormClipping,
    ServerOptimizer,
    TrimmedMean,
    build_method,
)
from lightning_fed.algorithms.robust import geometric_median_weights, nearest_neighbor_mixing
from lightning_fed.server.schedule import client_key
from lightning_fed.server.server import Server
from tests import models
from tests.recorders import Recorder
from tests.references_robust import (
    arc_reference,
    bucketing_reference,
    bulyan_reference,
    centered_clipping_reference,
    fltrust_reference,
    geometric_median_reference,
    krum_reference,
    majority_reference,
    median_reference,
    multi_krum_reference,
    nnm_reference,
    norm_clipping_reference,
    trimmed_mean_reference,
)

# The fit here only trains, with a module that could validate.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SHAPES = {"conv.weight": (2, 3, 2), "conv.bias": (2,), "scale": ()}
WIDTH = 15
TRUSTED = "server"


def split(row):
    """A vector as entries of a model."""
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    parts = torch.split(torch.as_tensor(row), sizes)
    return {name: part.reshape(shape).clone() for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def joined(state):
    return torch.cat([state[name].reshape(-1) for name in SHAPES]).numpy()


def matrix(size, seed=0, outliers=0):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(size, WIDTH)) + rng.normal(size=WIDTH)
    rows[: int(outliers)] = 50 * rng.normal(size=(outliers, WIDTH))
    return rows


def in_order(size):
    """Names of clients in the order in which the rules take them."""
    return sorted([f"c{number}" for number in range(size)], key=client_key)


def aggregated(rule, rows, start=None, round=0, trusted=None, clients=None):
    """The step that a rule makes of the clients' steps, in float64."""
    start = np.zeros(WIDTH) if start is None else start
    clients = in_order(len(rows)) if clients is None else clients
    rule.start_round(round, split(start))
    for client, row in zip(clients, rows, strict=True):
        rule.receive(ClientUpdate(client, 1, split(start + row)))
    if trusted is not None:
        rule.receive(ClientUpdate(TRUSTED, 1, split(start + trusted)))
    assert rule.leave_out() == {}
    return joined(rule.aggregate()) - start


RULES = {
    "median": (lambda f: Median(), lambda rows, f: median_reference(rows)),
    "trimmed mean": (TrimmedMean, trimmed_mean_reference),
    "krum": (Krum, krum_reference),
    "multi-krum": (MultiKrum, multi_krum_reference),
    "multi-krum of 2": (lambda f: MultiKrum(f, 2), lambda rows, f: multi_krum_reference(rows, f, 2)),
    "bulyan": (Bulyan, bulyan_reference),
    "geometric median": (GeometricMedian, lambda rows, f: geometric_median_reference(rows)),
    "centered clipping": (
        lambda f: CenteredClipping(2.0, 4),
        lambda rows, f: centered_clipping_reference(rows, 2.0, 4, np.zeros(WIDTH)),
    ),
    "centered clipping, any scale": (
        lambda f: CenteredClipping(),
        lambda rows, f: centered_clipping_reference(rows, None, 3, np.zeros(WIDTH)),
    ),
    "norm clipping": (lambda f: NormClipping(3.0), lambda rows, f: norm_clipping_reference(rows, 3.0)),
    "norm clipping, any scale": (lambda f: NormClipping(), lambda rows, f: norm_clipping_reference(rows, None)),
}
# The sums of inner products that distances are made of, in float64, with steps of up to 50 in 15 coordinates.
CLOSE = {"rtol": 1e-7, "atol": 1e-7}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("size", "f"), [(7, 1), (11, 2), (12, 2)])
@pytest.mark.parametrize("outliers", [False, True])
def test_against_a_plain_implementation(name, size, f, outliers):
    make, reference = RULES[name]
    start = np.random.default_rng(9).normal(size=WIDTH)
    for seed in range(3):
        rows = matrix(size, seed, outliers * f)
        np.testing.assert_allclose(aggregated(make(f), rows, start), reference(rows, f), **CLOSE)


@pytest.mark.parametrize("size", [2, 5])
def test_fltrust_against_a_plain_implementation(size):
    rows, trusted = matrix(size, 1), matrix(1, 2)[0]
    rows[0] = -trusted  # of which nothing counts
    result = aggregated(FLTrust(TRUSTED), rows, trusted=trusted)
    np.testing.assert_allclose(result, fltrust_reference(rows, trusted), **CLOSE)
    for nobody in (np.zeros((1, WIDTH)), -trusted[None]):
        assert not aggregated(FLTrust(TRUSTED), nobody, trusted=trusted).any()
    assert not aggregated(FLTrust(TRUSTED), rows, trusted=0 * trusted).any()


@pytest.mark.parametrize("name", ["trimmed mean", "krum", "multi-krum", "bulyan", "geometric median", "norm clipping"])
@pytest.mark.parametrize("before", [["nnm"], ["arc"], ["arc", "nnm"], ["nnm", "arc"]])
def test_mixtures_before_a_rule(name, before):
    _, reference = RULES[name]
    kinds = {"norm clipping": lambda f, before: NormClipping(3.0, f, before)}
    kinds |= {"geometric median": lambda f, before: GeometricMedian(f, before=before)}
    kinds |= {"trimmed mean": TrimmedMean, "krum": Krum, "bulyan": Bulyan}
    kinds |= {"multi-krum": lambda f, before: MultiKrum(f, before=before)}
    for seed in range(2):
        rows = matrix(11, seed, 2)
        mixed = rows
        for mixture in before:
            mixed = {"nnm": nnm_reference, "arc": arc_reference}[mixture](mixed, 2)
        np.testing.assert_allclose(aggregated(kinds[name](2, before=before), rows), reference(mixed, 2), **CLOSE)


@pytest.mark.parametrize(("size", "bucket_size"), [(9, 3), (10, 3), (7, 1)])
def test_bucketing(size, bucket_size):
    """Groups are drawn from (seed, round): another round has others."""
    rows, results = matrix(size), []
    for seed, round in ((0, 0), (0, 1), (5, 0)):
        order = np.random.default_rng(np.random.SeedSequence([seed, round])).permutation(size)
        expected = median_reference(bucketing_reference(rows, order, bucket_size))
        result = aggregated(Median(before=["bucketing"], bucket_size=bucket_size, seed=seed), rows, round=round)
        np.testing.assert_allclose(result, expected, **CLOSE)
        results.append(result)
    assert all(np.allclose(left, right) for left, right in itertools.pairwise(results)) == (bucket_size == 1)


def test_centered_clipping_begins_where_the_last_round_ended():
    rule, center = CenteredClipping(1.5, 2), np.zeros(WIDTH)
    start = matrix(1, 5)[0]
    for round in range(3):
        rows = matrix(6, round)
        center = centered_clipping_reference(rows, 1.5, 2, center)
        np.testing.assert_allclose(aggregated(rule, rows, start, round), center, **CLOSE)
        start = start + center
        again = CenteredClipping(1.5, 2)
        again.load_state_dict(rule.state_dict())
        rule = again


# --- laws -------------------------------------------------------------------------------------------------------------

LAWS = {name: make for name, (make, _) in RULES.items()} | {
    "nnm, then bulyan": lambda f: Bulyan(f, before=["nnm"]),
    "bucketing": lambda f: Median(f, before=["bucketing"]),
    "arc, then krum": lambda f: Krum(f, before=["arc"]),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_order_in_which_updates_come_does_not_matter(name):
    """To the last bit: who is whom is what counts."""
    rows, clients = matrix(11, 0, 2), in_order(11)
    expected = aggregated(LAWS[name](2), rows, clients=clients)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(11)
        shuffled = aggregated(LAWS[name](2), rows[order], clients=[clients[place] for place in order])
        assert (shuffled == expected).all()


@pytest.mark.parametrize("name", LAWS)
def test_which_client_has_which_update_does_not_matter(name):
    if name == "bucketing":  # whose groups are of clients
        return
    rows = matrix(11, 0, 2)
    expected = aggregated(LAWS[name](2), rows)
    for seed in range(3):
        result = aggregated(LAWS[name](2), rows[np.random.default_rng(seed).permutation(11)])
        np.testing.assert_allclose(result, expected, **CLOSE)


OF_LENGTHS = ("clipping", "arc")  # which know where the global model is


@pytest.mark.parametrize("name", [name for name in LAWS if not any(word in name for word in OF_LENGTHS)])
def test_a_shift_of_all_steps_shifts_the_result(name):
    rows, shift = matrix(11, 0, 2), 20 * matrix(1, 4)[0]
    np.testing.assert_allclose(
        aggregated(LAWS[name](2), rows + shift), aggregated(LAWS[name](2), rows) + shift, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("rule", [TrimmedMean, MultiKrum, Bulyan])
@pytest.mark.parametrize("before", [[], ["nnm"], ["arc"]])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_without_malicious_clients_it_is_the_mean(rule, before, size):
    rows = matrix(size)
    np.testing.assert_allclose(aggregated(rule(0, before=before), rows), rows.mean(0), **CLOSE)


@pytest.mark.parametrize("value", [1e30, -1e30, 3.0])
@pytest.mark.parametrize("before", [[], ["nnm"], ["arc"], ["arc", "nnm"]])
@pytest.mark.parametrize("rule", [Median, TrimmedMean])
def test_the_result_is_inside_the_range_of_the_honest(rule, before, value):
    """Of their steps, and after clipping of the model itself, too; whatever the malicious send."""
    rows = matrix(9)
    rows[:4] = value * np.sign(matrix(4, 7))
    result = aggregated(rule(4, before=before), rows)
    low, high = rows[4:].min(0), rows[4:].max(0)
    if before == []:
        assert ((low <= result) & (result <= high)).all()
    else:  # a mixture of an honest client has malicious neighbours, which are as near as honest ones
        assert np.linalg.norm(result) < 10 * np.linalg.norm(rows[4:], axis=1).max()


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("value", [1e8, 1e30])
def test_huge_updates_do_not_carry_the_result_away(name, value):
    honest = matrix(11)[2:]
    rows = np.concatenate([np.full((2, WIDTH), value), honest])
    result = aggregated(LAWS[name](2), rows)
    assert np.linalg.norm(result - honest.mean(0)) < 3 * np.linalg.norm(honest - honest.mean(0), axis=1).max()


def test_a_step_is_its_own_nearest():
    """Also where a distance is lost to rounding."""
    rows = torch.tensor([[1e9], [1e9 + 1e-3], [1e9 - 1e-3]]).double()
    assert torch.equal(nearest_neighbor_mixing(rows @ rows.T, 2), torch.eye(3).double())


def test_few_iterations_where_a_client_is_far_away():
    """From the mean, which it has carried off, each iteration would come back by a half."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1e30, 1e30]]).double()
    center = geometric_median_weights(rows @ rows.T, max_iterations=20) @ rows
    torch.testing.assert_close(center, geometric_median_weights(rows @ rows.T) @ rows, rtol=1e-3, atol=1e-3)


# --- entries that are no steps ----------------------------------------------------------------------------------------


def net_state(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(5, 3, generator=generator).to(dtype),
        "norm.running_mean": torch.randn(3, generator=generator),
        "norm.running_var": torch.rand(3, generator=generator),
        "norm.num_batches_tracked": torch.tensor(seed // 2),
        "mask": torch.rand(4, generator=generator) < 0.5,
        "phase": torch.randn(2, generator=generator, dtype=torch.complex64),
        "empty": torch.zeros(0, 3),
    }


NAMES = ["median", "trimmed_mean", "krum", "multikrum", "bulyan", "geometric_median", "centered_clipping"]
NAMES += ["norm_clipping", "fltrust:trusted=server"]


@pytest.mark.parametrize("name", NAMES)
def test_other_entries(name):
    rule = build_method(name).aggregator
    states = [net_state(seed) for seed in range(1, 8)]
    states[0]["norm.running_var"].fill_(1e30)
    rule.start_round(0, net_state(0))
    for client, state in zip([*in_order(7)], copy.deepcopy(states), strict=True):
        rule.receive(ClientUpdate(client, 1, state))
    rule.receive(ClientUpdate(TRUSTED, 1, net_state(9)))
    if name in ("median", "trimmed_mean", "krum"):
        del rule.updates[TRUSTED]
    size = len(rule.clients)
    factor, constant = rule.least
    num_trimmed = (size - constant) // factor
    values = {key: [rule.updates[client][key] for client in rule.clients] for key in net_state(0)}
    new = rule.aggregate()
    assert {key: (value.shape, value.dtype) for key, value in new.items()} == {
        key: (value.shape, value.dtype) for key, value in net_state(0).items()
    }
    for key in ("norm.running_mean", "norm.running_var"):
        rows = torch.stack(values[key]).double().numpy()
        np.testing.assert_allclose(new[key], trimmed_mean_reference(rows, num_trimmed), rtol=1e-6)
    assert new["norm.running_var"].max() <= 1
    for key in ("norm.num_batches_tracked", "mask"):
        columns = torch.stack(values[key]).reshape(size, -1).T.tolist()
        assert new[key].reshape(-1).tolist() == [majority_reference(column) for column in columns]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NAMES[:-1])
def test_identical_clients_are_one_of_them(name, dtype):
    rule = build_method(name).aggregator
    rule.start_round(0, net_state(0, dtype))
    for client in range(7):
        rule.receive(ClientUpdate(client, 1 + client, net_state(3, dtype)))
    clipped = name.endswith("clipping")  # from where the model was, by a factor that rounds
    for key, value in rule.aggregate().items():
        expected = net_state(3, dtype)[key]
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected) or (clipped or dtype == torch.float64), key
        assert torch.allclose(value, expected, rtol=1e-3 if clipped else 1e-12), key


def test_numbers_of_examples_do_not_matter():
    def of(sizes):
        rule = MultiKrum(1)
        rule.start_round(0, split(np.zeros(WIDTH)))
        for client, (size, row) in enumerate(zip(sizes, matrix(6), strict=True)):
            rule.receive(ClientUpdate(client, size, split(row)))
        return joined(rule.aggregate())

    assert (of([1] * 6) == of([10**15, 1, 2, 3, 4, 5])).all()


# --- what a round needs -----------------------------------------------------------------------------------------------


def finished(rule, rows, start=None, clients=None):
    """A round through a server."""
    server = Server(rule)
    server.start_round(0, split(np.zeros(WIDTH) if start is None else start))
    for client, row in zip(clients or in_order(len(rows)), rows, strict=True):
        server.sent(client, server.prepare(client))
        server.accept(ClientUpdate(client, 1, split(row)))
    return server.finish_round(), server.report


@pytest.mark.parametrize(
    ("rule", "size", "needed"),
    [
        (Median(2), 4, 5),
        (TrimmedMean(2), 4, 5),
        (Krum(2), 6, 7),
        (MultiKrum(2), 6, 7),
        (Bulyan(2), 10, 11),
        (GeometricMedian(2), 4, 5),
        (FedAvgM(aggregator=Krum(2)), 6, 7),
    ],
)
def test_too_few_updates(rule, size, needed, caplog):
    """The model stays as it was, and so does what the rule remembers."""
    state, report = finished(rule, matrix(size))
    assert state is None
    assert len(report.failed) == size
    assert f"with num_malicious=2 needs {needed} good updates, and the round has {size}" in caplog.text
    state, report = finished(rule, matrix(needed))
    assert state is not None
    assert len(report.received) == needed


@pytest.mark.parametrize("make", [Krum, MultiKrum, TrimmedMean, Median, lambda f: FedAvgM(aggregator=Krum(f))])
@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_a_client_whose_update_is_refused_is_one_of_the_malicious(make, value):
    """Ten clients of which three may be malicious, and two send what no rule can use: one is left among eight."""
    rows = matrix(10)
    rows[3], rows[7] = value, value
    state, report = finished(make(3), rows)
    assert report.refused.keys() == report.failed.keys()
    assert len(report.failed) == 2
    good = [place for place in range(10) if place not in (3, 7)]
    clients = in_order(10)
    expected, _ = finished(make(1), rows[good], clients=[clients[place] for place in good])
    for name, values in expected.items():
        assert torch.equal(state[name], values)


def test_what_was_refused_in_one_round_says_nothing_of_the_next():
    """Two of ten steps are too long to be compared: then all ten are there again, of which three may be malicious."""
    rule, start = TrimmedMean(3), split(np.zeros(WIDTH))
    too_long = matrix(10)
    too_long[[3, 7]] = 1e200
    for round, rows in enumerate((too_long, matrix(10))):
        rule.start_round(round, start)
        for client, row in zip(in_order(10), rows, strict=True):
            rule.receive(ClientUpdate(client, 1, split(row)))
        assert len(rule.leave_out()) == (0 if round else 2)
        state = rule.aggregate()
    for name, values in split(aggregated(TrimmedMean(3), matrix(10))).items():
        assert torch.equal(state[name], values)


def test_a_client_that_does_not_answer_may_be_honest(caplog):
    server = Server(Krum(3))
    server.start_round(0, split(np.zeros(WIDTH)))
    for client, row in zip(in_order(10), matrix(10), strict=True):
        server.sent(client, server.prepare(client))
        if client in in_order(10)[:2]:
            server.fail(client, "it never answered")
        else:
            server.accept(ClientUpdate(client, 1, split(row)))
    assert server.finish_round() is None
    assert "Krum with num_malicious=3 needs 9 good updates, and the round has 8" in caplog.text


def test_too_few_groups(caplog):
    assert finished(Krum(1, before=["bucketing"], bucket_size=3), matrix(10))[0] is None
    assert "needs 5 good updates, and the round has 10, in 4 groups, of them" in caplog.text
    assert finished(Krum(before=["bucketing"], bucket_size=3), matrix(10))[0] is not None


def test_nobody_to_trust(caplog):
    assert finished(FLTrust(TRUSTED), matrix(3))[0] is None
    assert "the trusted client 'server' has sent no good update" in caplog.text


def test_a_step_that_cannot_be_compared_leaves_its_client_out():
    """The server refuses it before the rule does."""
    rows = matrix(6)
    rows[0] = 1e200
    clients = in_order(6)
    state, report = finished(Krum(1), rows)
    assert list(report.failed) == [clients[0]]
    assert report.failed[clients[0]].startswith("its step has the length inf, and the model")
    rule = Krum(1)
    rule.start_round(0, {"w": torch.zeros(1, dtype=torch.float64)})
    for client, value in zip(clients, [1e200, 1.0, 2.0, 3.0, 4.0, 5.0], strict=True):
        rule.receive(ClientUpdate(client, 1, {"w": torch.tensor([value], dtype=torch.float64)}))
    assert rule.leave_out() == {clients[0]: "its step is too long to be compared with the others"}
    np.testing.assert_allclose(joined(state), krum_reference(rows[1:], 1), **CLOSE)


def test_by_default_as_many_as_the_rule_stands():
    for rule, reference, f in ((TrimmedMean, trimmed_mean_reference, 5), (Bulyan, bulyan_reference, 2)):
        rows = matrix(11)
        np.testing.assert_allclose(aggregated(rule(), rows), reference(rows, f), **CLOSE)
        np.testing.assert_allclose(aggregated(rule(), rows[:1]), rows[0], **CLOSE)


# --- who was left out -------------------------------------------------------------------------------------------------


def test_who_did_not_count_is_logged():
    rule, clients = Krum(1), in_order(6)
    rows = matrix(6)
    rows[2] = 100
    chosen = int(np.argmin(np.linalg.norm(rows - krum_reference(rows, 1), axis=1)))
    for round in range(2):
        aggregated(rule, rows, round=round)
        metrics = rule.metrics()
        assert metrics.pop("fed/excluded") == 5
        assert metrics == {f"client/{client}/excluded": float(client != clients[chosen]) for client in clients}
    aggregated(rule, rows[[0, 1, 3, 4, 5, chosen][:5]], round=2)
    again = Krum(1)
    again.load_state_dict(rule.state_dict())
    assert again.metrics() == {**rule.metrics(), "fed/excluded": 0}


def test_shares_by_coordinate_and_after_mixtures():
    rows = matrix(5)
    rows[0] = 100
    rule = TrimmedMean(1)
    aggregated(rule, rows)
    kept = np.array([[value not in (min(column), max(column)) for value in column] for column in rows.T]).mean(0)
    shares = [rule.metrics()[f"client/{client}/excluded"] for client in in_order(5)]
    np.testing.assert_allclose(shares, 1 - kept / kept.max(), atol=1e-12)
    assert shares[0] == 1
    rule = TrimmedMean(1, before=["nnm"])
    aggregated(rule, rows)
    assert max(rule.metrics(), key=lambda name: "client" in name and rule.metrics()[name]) == (
        f"client/{in_order(5)[0]}/excluded"
    )
    rule = GeometricMedian()
    aggregated(rule, rows)
    assert rule.metrics()[f"client/{in_order(5)[0]}/excluded"] > 0.9


def test_many_clients_are_not_named():
    rule = Median()
    aggregated(rule, matrix(21))
    assert list(rule.metrics()) == ["fed/excluded"]


# --- with other parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Krum, TrimmedMean, lambda f: CenteredClipping(2.0), lambda f: NormClipping(2.0)])
def test_after_it_an_optimizer_of_the_server(rule):
    rows, start = matrix(7), matrix(1, 8)[0]
    step = aggregated(rule(1), rows, start)
    sgd = aggregated(ServerOptimizer("SGD", rule(1), lr=0.5), rows, start)
    np.testing.assert_allclose(sgd, 0.5 * step, **CLOSE)
    momentum = FedAvgM(aggregator=rule(1))
    first = aggregated(momentum, rows, start)
    again = FedAvgM(aggregator=rule(1))
    again.load_state_dict(copy.deepcopy(momentum.state_dict()))
    for one in (momentum, again):
        second = aggregated(one, rows, start, round=1)
    assert np.linalg.norm(second) > np.linalg.norm(first)


def test_fltrust_in_a_fit(federated_trainer):
    """The trusted client is in every round, and every round is what its messages make it."""
    recorder = Recorder()
    trainer = federated_trainer(
        max_rounds=4, method=FLTrust("bob"), clients_per_round=2, local_epochs=2, seed=2,
        availability=Availability(stragglers=0.5),
        batch_norm="average", callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(models.vectors()))
    sizes = set()
    for round, aggregate in enumerate(recorder.aggregates):
        visits = {visit.client: visit for visit in recorder.round(round)}
        sizes.add(len(visits))
        start = visits["bob"].broadcast
        steps = {
            client: np.concatenate([(visit.update[name] - start[name]).double().flatten() for name in start])
            for client, visit in visits.items()
        }
        trusted = steps.pop("bob")
        expected = fltrust_reference(np.array(list(steps.values())), trusted)
        moved = np.concatenate([(aggregate[name] - start[name]).double().flatten() for name in start])
        np.testing.assert_allclose(moved, expected, atol=1e-6)  # of float32 entries
    assert sizes == {2, 3}


def test_a_server_optimizer_has_the_trusted_client():
    assert FedAvgM(aggregator=FLTrust(TRUSTED)).always == (TRUSTED,)


def test_names_with_and_without_underscores():
    for name in ("trimmed_mean", "TrimmedMean", "trimmedmean", "TRIMMED_MEAN"):
        assert type(build_method(name).aggregator) is TrimmedMean
    assert type(FedAvgM(aggregator="geometric_median").inner) is GeometricMedian
    rule = build_method("multi_krum:num_malicious=2:before=[nnm, arc]").aggregator
    assert (rule.num_malicious, rule.before) == (2, ("nnm", "arc"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Krum(-1), "`num_malicious` to be at least 0, but got -1"),
        (lambda: Krum(0.5), "`num_malicious` to be a whole number, but got 0.5"),
        (lambda: Krum(before=["nmm"]), r"`before` to be one of \['nnm', 'bucketing', 'arc'\], but got 'nmm'"),
        (lambda: Krum(before="nnm"), r"`before` to be a list such as \['nnm'\], but got 'nnm'"),
        (lambda: Krum(bucket_size=0), "`bucket_size` to be at least 1, but got 0"),
        (lambda: Krum(seed=-1), "`seed` to be at least 0, but got -1"),
        (lambda: MultiKrum(num_selected=0), "`num_selected` to be at least 1, but got 0"),
        (lambda: GeometricMedian(smoothing=0), "`smoothing` to be greater than 0 and finite, but got 0"),
        (lambda: NormClipping(max_norm=-1.0), "`max_norm` to be greater than 0 and finite, but got -1.0"),
        (lambda: CenteredClipping(radius=0.0), "`radius` to be greater than 0 and finite, but got 0.0"),
        (lambda: CenteredClipping(iterations=0), "`iterations` to be at least 1, but got 0"),
    ],
)
def test_options_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_only_rules_of_one_kind_merge():
    with pytest.raises(TypeError, match="`other` to be a Krum, but got FedAvg"):
        Krum().merge(FedAvg())


def test_trimmed_mean_of_nobody_is_fairavg():
    rows = [net_state(seed) for seed in range(1, 6)]
    results = []
    for rule in (TrimmedMean(0), FairAvg()):
        rule.start_round(0, net_state(0))
        for client, row in enumerate(copy.deepcopy(rows)):
            rule.receive(ClientUpdate(client, 1, row))
        results.append(rule.aggregate())
    for name in ("weight", "norm.running_mean", "norm.running_var", "phase"):
        assert torch.allclose(results[0][name], results[1][name], rtol=1e-6), name
