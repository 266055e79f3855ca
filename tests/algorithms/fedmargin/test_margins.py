"""Margins between class prototypes, and attention from margins."""

import itertools
import math

import pytest
import torch

from lightning_fed.algorithms.fedmargin.attention import combine_attention, margin_attention
from lightning_fed.algorithms.fedmargin.margins import (
    aggregate_mean_margin,
    aggregate_prototype_margin,
    class_margins,
    local_prototype_margin,
)
from lightning_fed.algorithms.fedmargin.prototypes import (
    Prototypes,
    aggregate_prototypes,
    reference_prototypes,
    update_prototypes,
)
from lightning_fed.numerics.weighted_mean import WeightedMean
from tests import references_margin as references
from tests.algorithms.fedmargin.test_prototypes import prototypes, random_clients
from tests.breadth import pairs, quick

MARGINS = ["semantic", "hypothesis", "relative", "gain"]
REDUCTIONS = ["mean", "sum", "count", "max"]
ATTENTIONS = ["sum", "softmax"]
COMBINATIONS = ["mean", "product", "lpm", "apm"]


def clients(means=references.AFTER, **options):
    return [prototypes(m, c, **options) for m, c in zip(means, references.COUNTS, strict=True)]


def margins_of_a_round(after, before, previous, margin="semantic", reduction="mean"):
    """LPM and APM of all clients, shape (K,)."""
    current = aggregate_prototypes(after)
    reference = reference_prototypes(previous, current)
    options = {"margin": margin, "class_reduction": reduction}
    lpm = [local_prototype_margin(a, b, fallback=reference, **options) for a, b in zip(after, before, strict=True)]
    apm = [aggregate_prototype_margin(a, reference, **options) for a in after]
    return torch.stack(lpm), torch.stack(apm)


def example_margins(margin="semantic", **options):
    previous = prototypes(references.PREVIOUS, **options)
    return margins_of_a_round(clients(**options), clients(references.BEFORE, **options), previous, margin)


def mean_weight(attention):
    """Attention-weighted mean of the clients' scalar weights."""
    mean = WeightedMean()
    for weight, share in zip(references.WEIGHTS, attention.tolist(), strict=True):
        mean.add({"w": torch.tensor(weight, dtype=torch.float64)}, share, 1)
    return mean.mean()["w"].item()


def close(result, expected, atol=1e-5):
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(result.double(), expected, atol=atol, rtol=0, equal_nan=True)


# --- Example with three clients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("margin", "lpm", "apm"),
    [
        ("semantic", (0.5, 0.301777, 0.5), (0.666667, 0.762377, 0.5)),
        ("hypothesis", (1.666667, 0, 0.5), (1.360380, 0.039399, 0.5)),
        ("relative", (0.622222, 0, 0.333333), (0.516022, 0.050463, 0.333333)),
        ("gain", (0.849837, -0.25, math.nan), (1.360380, 0.039399, 0.5)),
    ],
)
def test_margins_of_the_example(margin, lpm, apm, dtype):
    result = example_margins(margin, dtype=dtype)
    close(result[0], lpm)
    close(result[1], apm)


def test_class_margins_of_the_example():
    after, before = clients(), clients(references.BEFORE)
    close(class_margins(after[0], before[0], "hypothesis"), (1.5, 2, 1.5))
    close(class_margins(after[1], before[1], "hypothesis"), (0, 0, math.nan))
    close(class_margins(after[2], before[2], "hypothesis"), (math.nan,) * 3)
    reference = prototypes({0: (0, 0), 1: (3, 0), 2: (0, 3)})
    close(class_margins(after[2], before[2], "hypothesis", fallback=reference), (math.nan, math.nan, 0.5))


EXAMPLES = [  # margin, attention, combination, sizes, a^L, a^A, a, w
    (
        "semantic", "sum", "mean", None,
        (0.384090, 0.231819, 0.384090), (0.345594, 0.395210, 0.259196), (0.364842, 0.313515, 0.321643), 2.278444,
    ),
    ("semantic", "sum", "product", None, None, None, (0.409802, 0.282847, 0.307351), 2.204901),
    ("semantic", "sum", "mean", [40, 40, 20], None, None, (0.434761, 0.373597, 0.191642), 1.948522),
    (
        "semantic", "softmax", "mean", None,
        (0.379752, 0.240496, 0.379752), (0.341045, 0.395781, 0.263175), (0.360398, 0.318138, 0.321463), 2.282528,
    ),
    ("hypothesis", "sum", "mean", None, None, None, (0.742652, 0.010369, 0.246979), 1.751306),
    ("relative", "sum", "mean", None, None, None, (0.612318, 0.028040, 0.359641), 2.106964),
]  # fmt: skip


@pytest.mark.parametrize(("margin", "kind", "combine", "sizes", "local", "aggregate", "both", "w"), EXAMPLES)
def test_attention_of_the_example(margin, kind, combine, sizes, local, aggregate, both, w):
    lpm, apm = (margin_attention(values, kind) for values in example_margins(margin))
    attention = combine_attention(lpm, apm, combine, num_samples=sizes)
    for result, expected in ((lpm, local), (apm, aggregate), (attention, both)):
        if expected is not None:
            close(result, expected)
    assert mean_weight(attention) == pytest.approx(w, abs=1e-5)


def test_mean_margins_of_the_example():
    current = aggregate_prototypes(clients())
    updated = update_prototypes(prototypes(references.PREVIOUS), current)
    close(aggregate_mean_margin(current), 1.597952)
    close(aggregate_mean_margin(updated), 1.607624)
    close(aggregate_mean_margin(current, "nearest"), 1.354281)
    close(aggregate_mean_margin(updated, "nearest"), 1.366665)


# --- Reference --------------------------------------------------------------------------------------------------------


def moved(means, seed):
    generator = torch.Generator().manual_seed(seed)
    return {c: (torch.tensor(m) + torch.randn(len(m), generator=generator)).tolist() for c, m in means.items()}


def as_nan(value):
    return math.nan if value is None else value


@pytest.mark.parametrize(("seed", "margin", "reduction"), pairs(range(3), MARGINS, REDUCTIONS))
def test_client_margins_against_the_reference(seed, margin, reduction):
    means, counts = random_clients(seed)
    options = {"num_classes": 5, "garbage": torch.nan}
    for client, (after, count) in enumerate(zip(means, counts, strict=True)):
        before = moved(after, seed)
        reference = moved(means[(client + 1) % 4], seed)  # lacks classes of the client
        query, earlier, aggregate = (
            prototypes(after, count, **options),
            *(prototypes(m, **options) for m in (before, reference)),
        )
        for fallback in (None, reference):
            expected = references.class_margins_reference(after, before, margin, fallback)
            given = None if fallback is None else aggregate
            close(
                class_margins(query, earlier, margin, fallback=given),
                [as_nan(expected.get(c)) for c in range(5)],
                atol=1e-12,
            )
            result = local_prototype_margin(query, earlier, margin=margin, class_reduction=reduction, fallback=given)
            close(result, as_nan(references.reduce_reference(expected, count, reduction)), atol=1e-12)
        kind = "hypothesis" if margin == "gain" else margin
        expected = references.reduce_reference(
            references.class_margins_reference(after, reference, kind), count, reduction
        )
        result = aggregate_prototype_margin(query, aggregate, margin=margin, class_reduction=reduction)
        close(result, as_nan(expected), atol=1e-12)


@pytest.mark.parametrize(("client", "kind", "normalize"), pairs(range(4), ["pairs", "nearest"], [False, True]))
def test_mean_margin_against_the_reference(client, kind, normalize):
    means, _ = random_clients(3)
    expected = references.mean_margin_reference(means[client], kind, normalize)
    result = aggregate_mean_margin(
        prototypes(means[client], num_classes=5, garbage=torch.nan), kind, normalize=normalize
    )
    close(result, as_nan(expected), atol=1e-12)


VALUES = [
    [1.0, 2.0, 5.0],
    [0.3],
    [0.0, 0.0],
    [None, 2.0, 4.0],
    [None, None],
    [None],
    [3.0, -1.0, None, 0.5],
    [-2.0, -1.0, None],
    [0.0, None, 0.0],
    [0.0, 4.0, None, None],
    [1e-300, 3e-300],
    [1e300, 3e300],
]


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("values", VALUES, ids=str)
def test_attention_against_the_reference(values, kind):
    result = margin_attention(torch.tensor([as_nan(v) for v in values], dtype=torch.float64), kind)
    close(result, references.attention_reference(values, kind), atol=1e-12)
    assert result.min() >= 0
    assert result.sum().item() == pytest.approx(1)


SHARES = [([0.2, 0.5, 0.3], [0.6, 0.1, 0.3]), ([0.0, 1.0, 0.0], [0.5, 0.5, 0.0]), ([1, 0, 0], [0, 0.5, 0.5])]


@pytest.mark.parametrize(("shares", "combine", "sizes"), pairs(SHARES, COMBINATIONS, [None, [3, 0, 8], [1, 1, 1]]))
def test_combination_against_the_reference(shares, combine, sizes):
    local, aggregate = shares
    result = combine_attention(
        torch.tensor(local, dtype=torch.float64), torch.tensor(aggregate).double(), combine, num_samples=sizes
    )
    weights = references.combine_reference(local, aggregate, combine)
    if sizes is not None and not any(a * n for a, n in zip(weights, sizes, strict=True)):
        expected = [1 / 3] * 3
    else:
        expected = references.combine_reference(local, aggregate, combine, sizes)
    close(result, expected, atol=1e-7)
    assert result.sum().item() == pytest.approx(1)


# --- Properties -------------------------------------------------------------------------------------------------------


def random_round(seed=0, scale=1.0, count=6):
    """Clients with 4 classes after and before training, and the previous aggregate."""
    means, counts = random_clients(seed, count)
    scaled = [{c: [scale * x for x in m] for c, m in client.items()} for client in means]
    earlier = [{c: [scale * x for x in m] for c, m in moved(client, seed).items()} for client in means]
    before = [prototypes(m, c, 5) for m, c in zip(earlier, counts, strict=True)]
    previous = prototypes({0: [scale, 0.0, 0.0], 3: [0.0, scale, -scale]}, num_classes=5)
    return [prototypes(m, c, 5) for m, c in zip(scaled, counts, strict=True)], before, previous


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_permuted_clients_have_permuted_attention(margin, kind):
    after, before, previous = random_round()
    order = [4, 0, 5, 2, 1, 3]
    results = []
    for indices in (range(6), order):
        rounds = [after[k] for k in indices], [before[k] for k in indices], previous
        results.append([margin_attention(values, kind) for values in margins_of_a_round(*rounds, margin)])
    for plain, permuted in zip(*results, strict=True):
        torch.testing.assert_close(plain[order], permuted, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("scale", "margin", "reduction"), pairs([1e-6, 0.5, 1e6], ["semantic", "hypothesis", "gain"], REDUCTIONS)
)
def test_the_scale_of_the_features_does_not_matter(scale, margin, reduction):
    for plain, scaled in zip(
        margins_of_a_round(*random_round(), margin, reduction),
        margins_of_a_round(*random_round(scale=scale), margin, reduction),
        strict=True,
    ):
        torch.testing.assert_close(scaled, scale * plain, atol=0, rtol=1e-9, equal_nan=True)
        for kind in ("sum", "softmax"):
            torch.testing.assert_close(margin_attention(scaled, kind), margin_attention(plain, kind), atol=1e-9, rtol=0)


def test_the_relative_margin_has_no_scale():
    for plain, scaled in zip(
        margins_of_a_round(*random_round(), "relative"),
        margins_of_a_round(*random_round(scale=1e3), "relative"),
        strict=True,
    ):
        torch.testing.assert_close(plain, scaled, atol=1e-12, rtol=0)
        assert plain.abs().max() <= 1


COUNTS = [1, 2, 3, 10, 49]


@pytest.mark.parametrize(
    ("count", "margin", "kind", "combine"),
    quick(
        list(itertools.product(COUNTS, MARGINS, ATTENTIONS, COMBINATIONS)),
        pairs(COUNTS, MARGINS, ATTENTIONS, COMBINATIONS),
    ),
)
def test_equal_clients_count_the_same_exactly(count, margin, kind, combine):
    """Equals FairAvg bit for bit, even with a missing or non-positive margin."""
    after, before, previous = random_round(1)
    for client in (0, 1):  # the second has one class
        rounds = [after[client]] * count, [before[client]] * count, previous
        lpm, apm = (margin_attention(values, kind) for values in margins_of_a_round(*rounds, margin))
        weights = combine_attention(lpm, apm, combine)
        assert weights.tolist() == [1 / count] * count


@pytest.mark.parametrize("count", [1, 2, 3, 6, 13, 48])
@pytest.mark.parametrize("kind", ["sum", "softmax"])
def test_a_missing_margin_among_equals_counts_the_same_exactly(count, kind):
    for value in (0.1, 1 / 3, 7.3e-5, 1e9 + 0.1):
        values = torch.full((count + 1,), value, dtype=torch.float64).index_fill(0, torch.tensor([0]), torch.nan)
        assert margin_attention(values, kind).tolist() == [1 / (count + 1)] * (count + 1)


@pytest.mark.parametrize("sizes", [[600, 17, 3, 41], [5, 1, 1], [9, 7, 3, 2, 2, 8]])
def test_equal_attention_times_sizes_are_the_shares_of_the_examples(sizes):
    uniform = margin_attention(torch.full((len(sizes),), 0.3))
    for combine in COMBINATIONS:
        result = combine_attention(uniform, uniform, combine, num_samples=sizes)
        assert result.tolist() == [size / sum(sizes) for size in sizes]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_client_that_did_not_move_gets_no_attention_by_lpm(reduction):
    after, before, previous = random_round()
    before[2] = after[2]
    lpm, _ = margins_of_a_round(after, before, previous, reduction=reduction)
    assert lpm[2] == 0
    attention = margin_attention(lpm)
    assert attention[2] == 0
    assert (attention[[0, 1, 3, 4, 5]] > 0).all()


def test_nobody_moved():
    after, _, previous = random_round()
    lpm, _ = margins_of_a_round(after, after, previous)
    assert margin_attention(lpm).tolist() == [1 / 6] * 6


def test_a_client_that_moved_more_gets_more():
    after, before, _ = random_round()
    before = [Prototypes(torch.zeros_like(b.means), b.counts) for b in before]
    after = [Prototypes(torch.ones_like(a.means) * k, a.counts) for k, a in enumerate(after)]
    lpm = torch.stack([local_prototype_margin(a, b) for a, b in zip(after, before, strict=True)])
    assert (margin_attention(lpm).diff() > 0).all()


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_class_that_a_client_lacks_changes_nothing_for_it(margin, reduction):
    """LPM ignores the class, even with NaN; for APM the class is only a competitor, here a distant one."""
    query, earlier = prototypes({0: (1, 2), 2: (3, 1)}), prototypes({0: (0, 1), 2: (2, 2)})
    more = prototypes({0: (0, 1), 1: (9, 9), 2: (2, 2)})
    options = {"margin": margin, "class_reduction": reduction}
    expected = local_prototype_margin(query, earlier, **options)
    with_garbage = Prototypes(earlier.means.index_fill(0, torch.tensor([1]), torch.nan), earlier.counts)
    assert torch.equal(local_prototype_margin(query, with_garbage, **options), expected)
    assert torch.equal(
        aggregate_prototype_margin(query, more, **options), aggregate_prototype_margin(query, earlier, **options)
    )


@pytest.mark.parametrize("margin", MARGINS)
def test_a_client_that_the_aggregate_does_not_know_gets_the_mean_of_the_others(margin):
    stranger = prototypes({2: (1, 1)})
    aggregate = prototypes({0: (0, 0), 1: (8, 0)})
    apm = aggregate_prototype_margin(stranger, aggregate, margin=margin)
    assert apm.isnan()
    attention = margin_attention(torch.tensor([1.0, 3.0, apm, 5.0]))
    close(attention, [1 / 12, 3 / 12, 3 / 12, 5 / 12], atol=1e-12)
    assert margin_attention(apm.reshape(1)).tolist() == [1.0]


def test_a_client_with_one_class():
    query, earlier = prototypes({1: (3, 4)}), prototypes({1: (0, 0)})
    assert local_prototype_margin(query, earlier) == 2.5
    for margin in ("hypothesis", "relative", "gain"):
        assert local_prototype_margin(query, earlier, margin=margin).isnan()
        assert local_prototype_margin(query, earlier, margin=margin, fallback=earlier).isnan()
    fallback = prototypes({0: (3, 8), 1: (3, 4)})
    assert local_prototype_margin(query, earlier, margin="hypothesis", fallback=fallback) == -0.5
    assert local_prototype_margin(query, earlier, margin="relative", fallback=fallback) == pytest.approx(-1 / 9)


def test_a_client_without_classes():
    nobody = Prototypes(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    for margin, reduction in itertools.product(MARGINS, REDUCTIONS):
        options = {"margin": margin, "class_reduction": reduction}
        assert local_prototype_margin(nobody, nobody, **options).isnan()
        assert aggregate_prototype_margin(nobody, prototypes({0: (1, 1)}), **options).isnan()
    assert aggregate_mean_margin(nobody).isnan()
    assert aggregate_mean_margin(prototypes({0: (1, 1)})).isnan()


def test_prototypes_that_coincide():
    query = prototypes({0: (1, 1), 1: (1, 1)})
    for margin in MARGINS:
        assert local_prototype_margin(query, query, margin=margin) == 0
    assert aggregate_mean_margin(query) == 0


def test_semantic_is_the_distance_to_the_plane_between():
    """A point on the plane half way has the same distance to both prototypes."""
    p, q = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([4.0, -2.0, 3.0])
    spm = class_margins(prototypes({0: p.tolist()}), prototypes({0: q.tolist()}))[0]
    foot = p + spm * (q - p) / (q - p).norm()
    assert (foot - p).norm() == pytest.approx((foot - q).norm().item())


def test_close_prototypes_far_from_zero():
    """Distances are not lost to rounding."""
    means = torch.tensor([[1e6, 0.0], [1e6 + 1e-3, 0.0]], dtype=torch.float64)
    result = aggregate_mean_margin(Prototypes(means, torch.ones(2, dtype=torch.int64)))
    assert result.item() == pytest.approx(5e-4, rel=1e-6)


def test_half_precision():
    query, earlier = (prototypes(m, dtype=torch.float16) for m in ({0: (300, 400)}, {0: (0, 0)}))
    assert local_prototype_margin(query, earlier).item() == 250  # 300 squared exceeds the float16 range
    assert local_prototype_margin(query, earlier).dtype == torch.float64
    assert margin_attention(torch.tensor([60000.0, 60000.0], dtype=torch.float16)).tolist() == [0.5, 0.5]


def test_inputs_are_left_as_they_are():
    values = torch.tensor([-1.0, torch.nan, 3.0], dtype=torch.float64)
    margin_attention(values)
    close(values, [-1.0, math.nan, 3.0])
    query = prototypes({0: (1, 2), 1: (3, 4)})
    aggregate_mean_margin(query, "nearest")
    class_margins(query, query, "hypothesis")
    assert query.means.tolist() == [[1, 2], [3, 4], [0, 0]]


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_unknown_options():
    query, values = prototypes({0: (1, 2)}), torch.tensor([0.5, 0.5])
    kinds = r"\['semantic', 'hypothesis', 'relative', 'gain'\]"
    reductions = r"`class_reduction` to be one of \['mean', 'sum', 'count', 'max'\], but got 'median'"
    for function in (local_prototype_margin, aggregate_prototype_margin):
        with pytest.raises(ValueError, match=f"`margin` to be one of {kinds}, but got 'lvq'"):
            function(query, query, margin="lvq")
        with pytest.raises(ValueError, match=reductions):
            function(query, query, class_reduction="median")
    with pytest.raises(ValueError, match=r"`kind` to be one of \['pairs', 'nearest'\], but got 'all'"):
        aggregate_mean_margin(query, "all")
    with pytest.raises(ValueError, match=r"`kind` to be one of \['sum', 'softmax'\], but got 'max'"):
        margin_attention(values, "max")
    with pytest.raises(ValueError, match=r"one of \['mean', 'product', 'lpm', 'apm'\], but got 'sum'"):
        combine_attention(values, values, "sum")


def test_what_cannot_be_attended_to():
    with pytest.raises(ValueError, match=r"one number per client, but got shape \(0,\)"):
        margin_attention(torch.zeros(0))
    with pytest.raises(ValueError, match=r"one number per client, but got shape \(2, 1\)"):
        margin_attention(torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"finite or missing \(NaN\), but got \[inf, 1.0\]"):
        margin_attention(torch.tensor([torch.inf, 1.0]))
    with pytest.raises(ValueError, match=r"got shapes \(2,\) and \(3,\)"):
        combine_attention(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="one number per client"):
        combine_attention(torch.ones(0), torch.ones(0))
    for sizes in ([1], [1, -1]):
        with pytest.raises(ValueError, match="`num_samples` to contain 2 non-negative numbers of examples"):
            combine_attention(torch.ones(2), torch.ones(2), num_samples=sizes)


def test_prototypes_of_other_shapes():
    query = prototypes({0: (1, 2)})
    for mismatched in (prototypes({0: (1,)}), prototypes({0: (1, 2)}, num_classes=4)):
        with pytest.raises(ValueError, match="prototypes with equal shapes"):
            class_margins(query, mismatched)
        with pytest.raises(ValueError, match="prototypes with equal shapes"):
            class_margins(query, query, fallback=mismatched)
