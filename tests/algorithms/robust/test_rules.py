"""Robust rules against plain implementations, laws, and entries other than parameters."""

import copy
import itertools

import numpy as np
import pytest
import torch

from lightning_fed import Availability, ClientUpdate, Method
from lightning_fed.algorithms import (
    Bulyan,
    CenteredClipping,
    FairAvg,
    FedAvg,
    FedAvgM,
    FedMA,
    FeSEM,
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
from lightning_fed.algorithms.robust import (
    AdaptiveClipping,
    Bucketing,
    NearestNeighborMixing,
    geometric_median_weights,
    nearest_neighbor_mixing,
)
from lightning_fed.errors import BadUpdates
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps.chain import Chain
from tests import models
from tests.breadth import pairs, quick
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

# The fit only trains, but the module defines a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SHAPES = {"conv.weight": (2, 3, 2), "conv.bias": (2,), "scale": ()}
WIDTH = 15
TRUSTED = "server"


def split(row):
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
    return sorted([f"c{number}" for number in range(size)], key=client_key)


def chain_of(rule, steps=()):
    """Chain for a rule or method, with additional steps; an existing chain is returned."""
    if isinstance(rule, Chain):
        return rule
    method = build_method(rule)
    return Chain(method.aggregator, [*method.steps, *steps])


def mixtures(before, f):
    """Mixture steps; the first applied is the outermost."""
    kinds = {"nnm": NearestNeighborMixing, "arc": AdaptiveClipping}
    return [kinds[name](f) for name in reversed(before)]


def aggregated(rule, rows, start=None, round=0, trusted=None, clients=None, steps=()):
    start = np.zeros(WIDTH) if start is None else start
    clients = in_order(len(rows)) if clients is None else clients
    chain = chain_of(rule, steps)
    chain.start(RoundInfo(round), split(start))
    for client, row in zip(clients, rows, strict=True):
        chain.receive(ClientUpdate(client, 1, split(start + row)), split(start))
    if trusted is not None:
        chain.receive(ClientUpdate(TRUSTED, 1, split(start + trusted)), split(start))
    return joined(chain.aggregate()) - start


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
# Distances come from sums of inner products in float64, with steps up to 50 in 15 coordinates.
CLOSE = {"rtol": 1e-7, "atol": 1e-7}


CROWDS = [(7, 1, False), (11, 2, True), (12, 2, True), (7, 1, True), (11, 2, False), (12, 2, False)]


@pytest.mark.parametrize(
    ("name", "size", "f", "outliers"),
    quick([(name, *crowd) for name in RULES for crowd in CROWDS], [(n, *crowd) for n in RULES for crowd in CROWDS[:3]]),
)
def test_against_a_plain_implementation(name, size, f, outliers):
    make, reference = RULES[name]
    start = np.random.default_rng(9).normal(size=WIDTH)
    for seed in range(3):
        rows = matrix(size, seed, outliers * f)
        np.testing.assert_allclose(aggregated(make(f), rows, start), reference(rows, f), **CLOSE)


@pytest.mark.parametrize("size", [2, 5])
def test_fltrust_against_a_plain_implementation(size):
    rows, trusted = matrix(size, 1), matrix(1, 2)[0]
    rows[0] = -trusted  # without any weight
    result = aggregated(FLTrust(TRUSTED), rows, trusted=trusted)
    np.testing.assert_allclose(result, fltrust_reference(rows, trusted), **CLOSE)
    for nobody in (np.zeros((1, WIDTH)), -trusted[None]):
        assert not aggregated(FLTrust(TRUSTED), nobody, trusted=trusted).any()
    assert not aggregated(FLTrust(TRUSTED), rows, trusted=0 * trusted).any()


MIXED = ["trimmed mean", "krum", "multi-krum", "bulyan", "geometric median", "norm clipping"]
BEFORE = [["nnm"], ["arc"], ["arc", "nnm"], ["nnm", "arc"]]


@pytest.mark.parametrize(
    ("name", "before"), quick(itertools.product(MIXED, BEFORE), itertools.product(MIXED, BEFORE[2:]))
)
def test_mixtures_before_a_rule(name, before):
    make, reference = RULES[name]
    for seed in range(2):
        rows = matrix(11, seed, 2)
        mixed = rows
        for mixture in before:
            mixed = {"nnm": nnm_reference, "arc": arc_reference}[mixture](mixed, 2)
        result = aggregated(make(2), rows, steps=mixtures(before, 2))
        np.testing.assert_allclose(result, reference(mixed, 2), **CLOSE)


def test_by_default_a_mixture_expects_fewer_than_half_to_be_malicious():
    for size in (1, 2, 7, 10):
        rows, f = matrix(size), (size - 1) // 2
        for step, reference in ((NearestNeighborMixing(), nnm_reference), (AdaptiveClipping(), arc_reference)):
            result = aggregated(TrimmedMean(0), rows, steps=[step])
            np.testing.assert_allclose(result, reference(rows, f).mean(0), **CLOSE)


@pytest.mark.parametrize(("size", "bucket_size"), [(9, 3), (10, 3), (7, 1)])
def test_bucketing(size, bucket_size):
    """(seed, round) defines the groups, so rounds differ."""
    rows, results = matrix(size), []
    for seed, round in ((0, 0), (0, 1), (5, 0)):
        order = np.random.default_rng(np.random.SeedSequence([seed, round])).permutation(size)
        expected = median_reference(bucketing_reference(rows, order, bucket_size))
        result = aggregated(Median(), rows, round=round, steps=[Bucketing(bucket_size, seed)])
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


# --- Laws -------------------------------------------------------------------------------------------------------------

LAWS = {name: make for name, (make, _) in RULES.items()} | {
    "nnm, then bulyan": lambda f: Method(Bulyan(f), steps=[NearestNeighborMixing(f)]),
    "bucketing": lambda f: Method(Median(f), steps=[Bucketing()]),
    "arc, then krum": lambda f: Method(Krum(f), steps=[AdaptiveClipping(f)]),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_order_in_which_updates_come_does_not_matter(name):
    """Bit for bit. Averaging behind a fixed bound stores no update: equal to rounding."""
    rows, clients = matrix(11, 0, 2), in_order(11)
    expected = aggregated(LAWS[name](2), rows, clients=clients)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(11)
        shuffled = aggregated(LAWS[name](2), rows[order], clients=[clients[place] for place in order])
        if name == "norm clipping":
            np.testing.assert_allclose(shuffled, expected, rtol=1e-12)
        else:
            assert (shuffled == expected).all()


@pytest.mark.parametrize("name", LAWS)
def test_which_client_has_which_update_does_not_matter(name):
    if name == "bucketing":  # groups depend on the clients
        return
    rows = matrix(11, 0, 2)
    expected = aggregated(LAWS[name](2), rows)
    for seed in range(3):
        result = aggregated(LAWS[name](2), rows[np.random.default_rng(seed).permutation(11)])
        np.testing.assert_allclose(result, expected, **CLOSE)


OF_LENGTHS = ("clipping", "arc")  # rules that depend on the global model


@pytest.mark.parametrize("name", [name for name in LAWS if not any(word in name for word in OF_LENGTHS)])
def test_a_shift_of_all_steps_shifts_the_result(name):
    rows, shift = matrix(11, 0, 2), 20 * matrix(1, 4)[0]
    np.testing.assert_allclose(
        aggregated(LAWS[name](2), rows + shift), aggregated(LAWS[name](2), rows) + shift, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("rule", "before", "size"), pairs([TrimmedMean, MultiKrum, Bulyan], [[], ["nnm"], ["arc"]], [1, 2, 6])
)
def test_without_malicious_clients_it_is_the_mean(rule, before, size):
    rows = matrix(size)
    np.testing.assert_allclose(aggregated(rule(0), rows, steps=mixtures(before, 0)), rows.mean(0), **CLOSE)


@pytest.mark.parametrize(
    ("rule", "before", "value"),
    pairs([Median, TrimmedMean], [[], ["nnm"], ["arc"], ["arc", "nnm"]], [1e30, -1e30, 3.0]),
)
def test_the_result_is_inside_the_range_of_the_honest(rule, before, value):
    rows = matrix(9)
    rows[:4] = value * np.sign(matrix(4, 7))
    result = aggregated(rule(4), rows, steps=mixtures(before, 4))
    low, high = rows[4:].min(0), rows[4:].max(0)
    if before == []:
        assert ((low <= result) & (result <= high)).all()
    else:  # malicious neighbours in the mixture of an honest client are as near as honest neighbours
        assert np.linalg.norm(result) < 10 * np.linalg.norm(rows[4:], axis=1).max()


@pytest.mark.parametrize("name", LAWS)
def test_huge_updates_do_not_carry_the_result_away(name):
    honest = matrix(11)[2:]
    for value in (1e8, 1e30):
        rows = np.concatenate([np.full((2, WIDTH), value), honest])
        result = aggregated(LAWS[name](2), rows)
        assert np.linalg.norm(result - honest.mean(0)) < 3 * np.linalg.norm(honest - honest.mean(0), axis=1).max()


def test_a_step_is_its_own_nearest():
    """Even if rounding hides a distance."""
    rows = torch.tensor([[1e9], [1e9 + 1e-3], [1e9 - 1e-3]]).double()
    assert torch.equal(nearest_neighbor_mixing(rows @ rows.T, 2), torch.eye(3).double())


def test_few_iterations_where_a_client_is_far_away():
    """The far client shifts the mean, and each iteration would only undo half of the shift."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1e30, 1e30]]).double()
    center = geometric_median_weights(rows @ rows.T, max_iterations=20) @ rows
    torch.testing.assert_close(center, geometric_median_weights(rows @ rows.T) @ rows, rtol=1e-3, atol=1e-3)


# --- Entries other than parameters ------------------------------------------------------------------------------------


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
NAMES += ["fltrust:trusted=server"]


@pytest.mark.parametrize("name", NAMES)
def test_other_entries(name):
    rule = build_method(name).aggregator
    states = [net_state(seed) for seed in range(1, 8)]
    states[0]["norm.running_var"].fill_(1e30)
    rule.start(RoundInfo(0), net_state(0))
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


@pytest.mark.parametrize("name", [*NAMES[:-1], "norm_clipping"])
def test_identical_clients_are_one_of_them(name):
    clipped = name.endswith("clipping")  # scales the distance from the model, with rounding
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        chain = chain_of(name)
        chain.start(RoundInfo(0), net_state(0, dtype))
        for client in range(7):
            chain.receive(ClientUpdate(client, 1 + client, net_state(3, dtype)), net_state(0, dtype))
        for key, value in chain.aggregate().items():
            expected = net_state(3, dtype)[key]
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected) or (clipped or dtype == torch.float64), key
            assert torch.allclose(value, expected, rtol=1e-3 if clipped else 1e-12), key


def test_numbers_of_examples_do_not_matter():
    def of(sizes):
        rule = MultiKrum(1)
        rule.start(RoundInfo(0), split(np.zeros(WIDTH)))
        for client, (size, row) in enumerate(zip(sizes, matrix(6), strict=True)):
            rule.receive(ClientUpdate(client, size, split(row)))
        return joined(rule.aggregate())

    assert (of([1] * 6) == of([10**15, 1, 2, 3, 4, 5])).all()


# --- Requirements of a round ------------------------------------------------------------------------------------------


def finished(rule, rows, start=None, clients=None, steps=()):
    server = Server(chain_of(rule, steps))
    server.start_round(RoundInfo(0), split(np.zeros(WIDTH) if start is None else start))
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
    state, report = finished(rule, matrix(size))
    assert state is None
    assert len(report.failed) == size
    assert f"with num_malicious=2 needs {needed} valid updates, but the round has {size}" in caplog.text
    state, report = finished(rule, matrix(needed))
    assert state is not None
    assert len(report.received) == needed


MAKES = [Krum, MultiKrum, TrimmedMean, Median, lambda f: FedAvgM(aggregator=Krum(f))]


@pytest.mark.parametrize(
    ("make", "value", "before"),
    quick(
        itertools.product(MAKES, [np.nan, 1e30], [[], ["nnm"], ["arc"]]),
        [(make, *case) for make in MAKES for case in ((1e30, []), (np.nan, ["nnm"]), (1e30, ["arc"]))],
    ),
)
def test_a_client_whose_update_is_refused_is_one_of_the_malicious(make, value, before):
    """Up to three of ten clients are malicious; two unusable updates leave up to one among eight."""
    rows = matrix(10)
    rows[3], rows[7] = value, value
    state, report = finished(make(3), rows, steps=mixtures(before, 3))
    assert report.refused.keys() == report.failed.keys()
    assert len(report.failed) == 2
    good = [place for place in range(10) if place not in (3, 7)]
    clients = in_order(10)
    expected, _ = finished(make(1), rows[good], clients=[clients[place] for place in good], steps=mixtures(before, 1))
    for name, values in expected.items():
        assert torch.equal(state[name], values)


def aggregated_as_by_a_server(chain, info):
    while True:
        try:
            return chain.aggregate(), len(info.refused)
        except BadUpdates as error:
            info.refused.update(error.reasons)


@pytest.mark.parametrize("before", [[], ["nnm"]])
def test_what_was_refused_in_one_round_says_nothing_of_the_next(before):
    """Two of ten steps are too long to compare; the next round again has ten clients with up to three malicious."""
    chain, start = chain_of(TrimmedMean(3), mixtures(before, 3)), split(np.zeros(WIDTH))
    too_long = matrix(10)
    too_long[[3, 7]] = 1e200
    good = [place for place in range(10) if place not in (3, 7)]
    fewer = {"rows": too_long[good], "clients": [in_order(10)[place] for place in good], "steps": mixtures(before, 1)}
    expected = [
        aggregated(TrimmedMean(1), **fewer),
        aggregated(TrimmedMean(3), matrix(10), steps=mixtures(before, 3)),
    ]
    for round, rows in enumerate((too_long, matrix(10))):
        info = RoundInfo(round)
        chain.start(info, start)
        for client, row in zip(in_order(10), rows, strict=True):
            chain.receive(ClientUpdate(client, 1, split(row)), start)
        state, num_refused = aggregated_as_by_a_server(chain, info)
        assert num_refused == (0 if round else 2)
        assert (joined(state) == expected[round]).all()


def test_a_client_that_does_not_answer_may_be_honest(caplog):
    server = Server(Chain(Krum(3)))
    server.start_round(RoundInfo(0), split(np.zeros(WIDTH)))
    for client, row in zip(in_order(10), matrix(10), strict=True):
        server.sent(client, server.prepare(client))
        if client in in_order(10)[:2]:
            server.fail(client, "the client never answered")
        else:
            server.accept(ClientUpdate(client, 1, split(row)))
    assert server.finish_round() is None
    assert "Krum with num_malicious=3 needs 9 valid updates, but the round has 8" in caplog.text


def test_too_few_groups(caplog):
    state, report = finished(Krum(1), matrix(10), steps=[Bucketing(3)])
    assert state is None
    assert report.failed.keys() == set(in_order(10))  # not only the clients in one group
    assert "Krum with num_malicious=1 needs 5 valid updates, but the round has 4" in caplog.text
    assert finished(Krum(), matrix(10), steps=[Bucketing(3)])[0] is not None


def test_nobody_to_trust(caplog):
    assert finished(FLTrust(TRUSTED), matrix(3))[0] is None
    assert "the trusted client 'server' sent no valid update" in caplog.text


def test_a_step_that_cannot_be_compared_leaves_its_client_out():
    rows = matrix(6)
    rows[0] = 1e200
    clients = in_order(6)
    state, report = finished(Krum(1), rows)
    assert list(report.failed) == [clients[0]]
    assert report.failed[clients[0]] == "the root mean square of all values is inf, but the limit is 1e+10"
    rule = Krum(1)
    rule.start(RoundInfo(0), {"w": torch.zeros(1, dtype=torch.float64)})
    for client, value in zip(clients, [1e200, 1.0, 2.0, 3.0, 4.0, 5.0], strict=True):
        rule.receive(ClientUpdate(client, 1, {"w": torch.tensor([value], dtype=torch.float64)}))
    with pytest.raises(BadUpdates) as raised:
        rule.aggregate()
    assert raised.value.reasons == {clients[0]: "the client's update has an infinite norm"}
    assert rule.aggregate()["w"].item() == 3.0
    np.testing.assert_allclose(joined(state), krum_reference(rows[1:], 1), **CLOSE)


def test_by_default_as_many_as_the_rule_stands():
    for rule, reference, f in ((TrimmedMean, trimmed_mean_reference, 5), (Bulyan, bulyan_reference, 2)):
        rows = matrix(11)
        np.testing.assert_allclose(aggregated(rule(), rows), reference(rows, f), **CLOSE)
        np.testing.assert_allclose(aggregated(rule(), rows[:1]), rows[0], **CLOSE)


# --- Excluded clients -------------------------------------------------------------------------------------------------


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


def test_shares_by_coordinate():
    rows = matrix(5)
    rows[0] = 100
    rule = TrimmedMean(1)
    aggregated(rule, rows)
    kept = np.array([[value not in (min(column), max(column)) for value in column] for column in rows.T]).mean(0)
    shares = [rule.metrics()[f"client/{client}/excluded"] for client in in_order(5)]
    np.testing.assert_allclose(shares, 1 - kept / kept.max(), atol=1e-12)
    assert shares[0] == 1
    rule = GeometricMedian()
    aggregated(rule, rows)
    assert rule.metrics()[f"client/{in_order(5)[0]}/excluded"] > 0.9


def shares_reference(chosen, mixing):
    """One row of a mixture, as excluded shares."""
    shares = mixing[chosen]
    return 1 - shares / shares.max()


def excluded(rule, size):
    return np.array([rule.metrics()[f"client/{client}/excluded"] for client in in_order(size)])


@pytest.mark.parametrize("before", [["nnm"], ["arc"], ["arc", "nnm"], ["nnm", "nnm"]])
def test_shares_after_mixtures(before):
    """Krum selects one row: a client counts by the step's share in this row."""
    rows, rule, references = matrix(9, 3, 2), Krum(2), {"nnm": nnm_reference, "arc": arc_reference}
    aggregated(rule, rows, steps=mixtures(before, 2))
    mixed, mixing = rows, np.eye(9)
    for name in before:
        after = references[name](mixed, 2)
        mixed, mixing = after, np.linalg.lstsq(mixed.T, after.T, rcond=None)[0].T @ mixing
    chosen = int(np.argmin(np.linalg.norm(mixed - krum_reference(mixed, 2), axis=1)))
    np.testing.assert_allclose(excluded(rule, 9), shares_reference(chosen, mixing), atol=1e-6)
    assert rule.metrics()["fed/excluded"] == pytest.approx(excluded(rule, 9).sum())
    if before == ["nnm"]:
        assert excluded(rule, 9).round(6).tolist().count(0) == 7


@pytest.mark.parametrize(("size", "bucket_size"), [(9, 3), (10, 3)])
def test_a_groups_share_goes_to_its_members(size, bucket_size):
    rows, rule = matrix(size), Krum(0)
    result = aggregated(rule, rows, steps=[Bucketing(bucket_size)])
    order = np.random.default_rng(np.random.SeedSequence([0, 0])).permutation(size)
    means = bucketing_reference(rows, order, bucket_size)
    chosen = int(np.argmin(np.linalg.norm(means - result, axis=1)))
    members = order[chosen * bucket_size : (chosen + 1) * bucket_size]
    assert excluded(rule, size).tolist() == [float(client not in members) for client in range(size)]
    rule = TrimmedMean(0)
    aggregated(rule, rows, steps=[Bucketing(bucket_size)])
    alone = [order[-1]] if size % bucket_size else range(size)  # a group of one counts as much as a group of three
    np.testing.assert_allclose(
        excluded(rule, size), [0.0 if client in alone else 2 / 3 for client in range(size)], atol=1e-12
    )


def test_many_clients_are_not_named():
    rule = Median()
    aggregated(rule, matrix(21))
    assert list(rule.metrics()) == ["fed/excluded"]


# --- Combinations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Krum, TrimmedMean, lambda f: CenteredClipping(2.0), lambda f: NormClipping(2.0)])
def test_after_it_an_optimizer_of_the_server(rule):
    rows, start = matrix(7), matrix(1, 8)[0]
    step = aggregated(rule(1), rows, start)
    sgd = aggregated(rule(1), rows, start, steps=[ServerOptimizer("SGD", lr=0.5)])
    np.testing.assert_allclose(sgd, 0.5 * step, **CLOSE)
    momentum = chain_of(FedAvgM(aggregator=rule(1)))
    first = aggregated(momentum, rows, start)
    again = chain_of(FedAvgM(aggregator=rule(1)))
    again.load_state_dict(copy.deepcopy(momentum.state_dict()))
    second, resumed = (aggregated(chain, rows, start, round=1) for chain in (momentum, again))
    assert (second == resumed).all()
    assert np.linalg.norm(second) > np.linalg.norm(first)


def test_fltrust_in_a_fit(federated_trainer):
    """The trusted client joins every round, and the messages define the result."""
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
        np.testing.assert_allclose(moved, expected, atol=1e-6)  # float32 entries
    assert sizes == {2, 3}


def test_a_server_optimizer_has_the_trusted_client():
    assert FedAvgM(aggregator=FLTrust(TRUSTED)).aggregator.always == (TRUSTED,)


def test_names_with_and_without_underscores():
    for name in ("trimmed_mean", "TrimmedMean", "trimmedmean", "TRIMMED_MEAN"):
        assert type(build_method(name).aggregator) is TrimmedMean
    assert type(FedAvgM(aggregator="geometric_median").aggregator) is GeometricMedian
    assert build_method("multi_krum:num_malicious=2").aggregator.num_malicious == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Krum(-1), "`num_malicious` to be at least 0, but got -1"),
        (lambda: Krum(0.5), "`num_malicious` to be a whole number, but got 0.5"),
        (lambda: NearestNeighborMixing(-1), "`num_malicious` to be at least 0, but got -1"),
        (lambda: AdaptiveClipping(0.5), "`num_malicious` to be a whole number, but got 0.5"),
        (lambda: Bucketing(0), "`bucket_size` to be at least 1, but got 0"),
        (lambda: Bucketing(seed=-1), "`seed` to be at least 0, but got -1"),
        (lambda: MultiKrum(num_selected=0), "`num_selected` to be at least 1, but got 0"),
        (lambda: GeometricMedian(smoothing=0), "`smoothing` to be greater than 0 and finite, but got 0"),
        (lambda: NormClipping(max_norm=-1.0), "`bound` to be greater than 0 and finite, but got -1.0"),
        (lambda: CenteredClipping(radius=0.0), "`radius` to be greater than 0 and finite, but got 0.0"),
        (lambda: CenteredClipping(iterations=0), "`iterations` to be at least 1, but got 0"),
    ],
)
def test_options_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("step", [NearestNeighborMixing(1), AdaptiveClipping(1), Bucketing()])
def test_rules_whose_steps_cannot_be_mixed(step):
    kind = type(step).__name__
    for rule in (FeSEM(2), FedMA()):
        with pytest.raises(ValueError, match=f"Expected no `{kind}` with {type(rule).__name__}, because not all"):
            chain_of(rule, [step])
    with pytest.raises(ValueError, match=f"Expected no `{kind}` with FLTrust: the step would mix"):
        chain_of(FLTrust(TRUSTED), [step])
    chain = chain_of(FedAvg(), [step])
    with pytest.raises(ValueError, match=rf"Expected no `{kind}` if clients hold only some rows of \['scale'\]"):
        chain.start(RoundInfo(0, sliced=frozenset(["scale"])), split(np.zeros(WIDTH)))


def test_a_group_counts_for_its_members_examples():
    """For rules that weigh by examples; steps within a group weigh equally."""
    rows = matrix(5)
    chain, start = chain_of(FedAvg(), [Bucketing(2)]), split(np.zeros(WIDTH))
    chain.start(RoundInfo(0), start)
    for number, (client, row) in enumerate(zip(in_order(5), rows, strict=True)):
        chain.receive(ClientUpdate(client, 10**number, split(row)), start)
    order = np.random.default_rng(np.random.SeedSequence([0, 0])).permutation(5)
    weights = [sum(10 ** int(member) for member in order[first : first + 2]) for first in (0, 2, 4)]
    expected = np.average(bucketing_reference(rows, order, 2), axis=0, weights=weights)
    np.testing.assert_allclose(joined(chain.aggregate()), expected, **CLOSE)


def test_entries_that_are_no_steps_pass_a_mixture():
    """Client entries are kept; a group gets the mean statistics and the most frequent value."""
    states, start = [net_state(seed) for seed in range(1, 8)], net_state(0)

    def aggregate(*steps):
        chain = chain_of(TrimmedMean(1), steps)
        chain.start(RoundInfo(0), start)
        for client, state in zip(in_order(7), copy.deepcopy(states), strict=True):
            chain.receive(ClientUpdate(client, 1, state), start)
        return chain.aggregate()

    plain, mixed = aggregate(), aggregate(NearestNeighborMixing(1))
    assert not torch.equal(plain["weight"], mixed["weight"])
    for key in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "mask", "empty"):
        assert torch.equal(plain[key], mixed[key]), key
    grouped = aggregate(Bucketing(2))
    order = np.random.default_rng(np.random.SeedSequence([0, 0])).permutation(7)
    groups = [order[first : first + 2] for first in range(0, 7, 2)]
    values = [np.stack([states[member]["norm.running_var"].double().numpy() for member in group]) for group in groups]
    expected = trimmed_mean_reference(np.stack([value.mean(0) for value in values]), 1)
    np.testing.assert_allclose(grouped["norm.running_var"], expected, rtol=1e-6)
    for key in ("norm.num_batches_tracked", "mask"):
        counts = torch.stack([states[number][key].reshape(-1).long() for number in range(7)]).numpy()
        of_groups = [[majority_reference(column) for column in counts[group].T.tolist()] for group in groups]
        assert grouped[key].reshape(-1).tolist() == [
            majority_reference(column) for column in zip(*of_groups, strict=True)
        ]
    assert {key: value.dtype for key, value in grouped.items()} == {key: value.dtype for key, value in start.items()}


def test_a_long_step_of_small_floats_is_shortened():
    """The difference of the largest float16 numbers overflows float16."""
    start = {"w": torch.tensor([-6e4, 1.0], dtype=torch.float16)}
    chain = chain_of(NormClipping(1.0))
    chain.start(RoundInfo(0), start)
    chain.receive(ClientUpdate("a", 1, {"w": torch.tensor([6e4, 1.0], dtype=torch.float16)}), start)
    assert chain.aggregate()["w"].tolist() == pytest.approx([-6e4, 1.0], rel=1e-3)


def test_trimmed_mean_of_nobody_is_fairavg():
    rows = [net_state(seed) for seed in range(1, 6)]
    results = []
    for rule in (TrimmedMean(0), FairAvg()):
        chain = chain_of(rule)
        chain.start(RoundInfo(0), net_state(0))
        for client, row in enumerate(copy.deepcopy(rows)):
            chain.receive(ClientUpdate(client, 1, row), net_state(0))
        results.append(chain.aggregate())
    for name in ("weight", "norm.running_mean", "norm.running_var", "phase"):
        assert torch.allclose(results[0][name], results[1][name], rtol=1e-6), name
