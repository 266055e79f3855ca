"""Losses of clients with a few classes: the numbers in the spec, loops over the equations, and properties."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lightning_fed.algorithms.fedss import (
    gradient_noise,
    log_correction,
    sample_negatives,
    sampled_logits,
    sampled_softmax_loss,
)
from tests import references_sampled_softmax as references
from tests.breadth import quick

OBJECTIVES = ["fedss", "negonly", "posonly", "full"]
O = [2.0, 1.0, 0.0, -1.0, 0.5, 1.5]  # noqa: E741 - as in the spec


def of_columns(classes, **options):
    """Loss and gradient of the spec's example, with positives {0, 1}, target 0 and these held classes."""
    logits = torch.tensor([[O[c] for c in classes]], dtype=torch.float64, requires_grad=True)
    is_positive = torch.tensor([c < 2 for c in classes])
    loss = sampled_softmax_loss(logits, torch.tensor([0]), is_positive, len(O), **options)
    return loss, torch.autograd.grad(loss, logits)[0][0]


# --- Numbers from the spec --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.5528064537),
        ({"objective": "negonly"}, 0.3149893394),
        ({"objective": "posonly"}, 0.3132616875),
    ],
)
def test_losses_of_the_example(options, expected):
    assert of_columns([0, 1, 2, 3], **options)[0].item() == pytest.approx(expected, abs=1e-10)


def test_gradient_of_the_example():
    gradient = of_columns([0, 1, 2, 3])[1]
    expected = torch.tensor([-0.424667, 0.211653, 0.155726, 0.057288], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)
    assert abs(gradient.sum()) < 1e-15


def test_all_classes_are_the_full_softmax():
    loss, gradient = of_columns(range(6))
    full, full_gradient = of_columns(range(6), objective="full")
    assert loss.item() == pytest.approx(0.8682186072, abs=1e-10)
    assert torch.equal(loss, full)
    assert torch.equal(gradient, full_gradient)


@pytest.mark.parametrize(("positives", "m"), [((0, 1), m) for m in (1, 2, 3, 4)] + [((3,), 2), ((0, 2, 4, 5), 1)])
def test_the_partition_estimate_is_unbiased(positives, m):
    """The mean over all equally likely subsets."""
    candidates = [c for c in range(6) if c not in positives]
    correction = log_correction(len(positives), m, 6)
    estimates = []
    for negatives in itertools.combinations(candidates, m):
        logits = torch.tensor([[O[c] for c in positives + negatives]], dtype=torch.float64)
        is_positive = torch.tensor([True] * len(positives) + [False] * m)
        estimates.append(sampled_logits(logits, is_positive, correction).exp().sum().item())
    assert math.fsum(estimates) / len(estimates) == pytest.approx(17.6056277093, abs=1e-9)


# --- Reference --------------------------------------------------------------------------------------------------------


def random_client(seed, n=9, num_positives=3, m=4, batch=6):
    """Held classes in order, positives, negatives, logits and target columns (one is ignored)."""
    draw = np.random.default_rng(seed)
    positives = sorted(int(c) for c in draw.choice(n, num_positives, replace=False))
    negatives = references.negatives_reference(positives, n, m, draw)
    classes = sorted(positives + negatives)
    logits = torch.from_numpy(4 * draw.normal(size=(batch, len(classes))))
    target = torch.tensor([classes.index(draw.choice(positives)) for _ in range(batch)])
    target[draw.integers(batch)] = -100
    return classes, positives, negatives, logits, target


def against(function, classes, positives, negatives, logits, target, n, **options):
    """Reference values by example; ``None`` for ignored examples."""
    values = []
    for row, t in zip(logits.tolist(), target.tolist(), strict=True):
        o = dict(zip(classes, row, strict=True))
        values.append(None if t < 0 else function(o, positives, negatives, classes[t], n, **options))
    return values


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("num_positives", "m"), [(3, 4), (1, 1), (4, 0), (3, 6)])
def test_losses_and_gradients_against_the_reference(num_positives, m, objective):
    n = 9
    if objective == "full" and num_positives + m < n:
        m = n - num_positives
    client = random_client(num_positives + m, n, num_positives, m)
    classes, positives, _, logits, target = client
    is_positive = torch.tensor([c in positives for c in classes])
    expected = against(references.loss_reference, *client, n, objective=objective)
    known = [value for value in expected if value is not None]
    reductions = {
        "none": [value or 0.0 for value in expected],
        "sum": math.fsum(known),
        "mean": math.fsum(known) / len(known),
    }
    logits.requires_grad_()
    for reduction, value in reductions.items():
        loss = sampled_softmax_loss(logits, target, is_positive, n, reduction=reduction, objective=objective)
        torch.testing.assert_close(loss, torch.tensor(value, dtype=torch.float64), atol=1e-12, rtol=1e-12)
    gradient = torch.autograd.grad(loss, logits)[0]
    rows = against(references.gradient_reference, *client, n, objective=objective)
    rows = [[0.0] * len(classes) if row is None else [row[c] / len(known) for c in classes] for row in rows]
    torch.testing.assert_close(gradient, torch.tensor(rows, dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_a_single_positive_alone_teaches_nothing():
    logits = torch.randn(5, 1, requires_grad=True)
    loss = sampled_softmax_loss(logits, torch.zeros(5, dtype=torch.long), torch.ones(1).bool(), 9, objective="posonly")
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros(5, 1))


@pytest.mark.parametrize("objective", OBJECTIVES[:3])
def test_the_order_of_columns_does_not_matter(objective):
    classes, positives, _, logits, target = random_client(3)
    is_positive = torch.tensor([c in positives for c in classes])
    order = torch.randperm(len(classes))
    moved = torch.where(target >= 0, order.argsort()[target.clamp(min=0)], target)
    loss = sampled_softmax_loss(logits, target, is_positive, 9, objective=objective)
    permuted = sampled_softmax_loss(logits[:, order], moved, is_positive[order], 9, objective=objective)
    torch.testing.assert_close(permuted, loss, atol=1e-14, rtol=0)


@pytest.mark.parametrize("objective", OBJECTIVES[:3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype, objective):
    """Summing 30,000 exponentials in half precision would lose most terms."""
    logits = (20 * torch.randn(4, 30_000)).to(dtype)
    logits[0] *= 900  # up to 60,000: the exponential overflows float32
    logits = logits.clamp(-6e4, 6e4).requires_grad_()
    is_positive = torch.arange(30_000) < 20
    target = torch.tensor([0, 1, 19, 7])
    loss = sampled_softmax_loss(logits, target, is_positive, 1_000_000, objective=objective)
    wide = sampled_softmax_loss(logits.double(), target, is_positive, 1_000_000, objective=objective)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wide, atol=0, rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_target_types(dtype):
    classes, positives, _, logits, target = random_client(3)
    is_positive = torch.tensor([c in positives for c in classes])
    keep = target >= 0
    loss = sampled_softmax_loss(logits[keep], target[keep], is_positive, 9)
    assert sampled_softmax_loss(logits[keep], target[keep].to(dtype), is_positive, 9) == loss


def test_logits_of_a_batch_without_classes():
    """Gradients are zero and never NaN."""
    logits = torch.randn(3, 2, requires_grad=True)
    target = torch.full((3,), -100)
    value = sampled_logits(logits, torch.tensor([True, True]), 0.0, target, objective="negonly")
    assert torch.equal(value, logits)
    loss = F.cross_entropy(value, target, reduction="sum")
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros(3, 2))


# --- Gradient noise ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("norm", quick(["l2", "mean_abs"], ["l2"]))
def test_gradient_noise_falls_with_the_number_of_negatives(norm):
    """Figure 9 on a toy: all clients of a round hold the same batch and draw negatives independently."""
    n, d, positives, clients, draws = 12, 4, torch.tensor([2, 5]), 2, 200
    generator = np.random.default_rng(0)
    weight = torch.randn(n, d, dtype=torch.float64)
    features, target = torch.randn(8, d, dtype=torch.float64), torch.tensor([2, 5] * 4)

    def gradient(classes, objective):
        rows, inputs = weight[classes].requires_grad_(), features.clone().requires_grad_()
        is_positive = torch.isin(classes, positives)
        local = torch.searchsorted(classes, target)
        loss = sampled_softmax_loss(inputs @ rows.t(), local, is_positive, n, objective=objective)
        of_rows, of_inputs = torch.autograd.grad(loss, (rows, inputs))
        return [torch.zeros_like(weight).index_copy(0, classes, of_rows), of_inputs]

    full = gradient(torch.arange(n), "full")
    noise = {}
    for m in (1, 2, 4, 7, 10):
        values = []
        for _ in range(draws):
            rounds = []
            for _ in range(clients):
                negatives = sample_negatives(positives, n, m, generator)
                rounds.append(gradient(torch.cat([positives, negatives]).sort().values, "fedss"))
            mean = [sum(parts) / clients for parts in zip(*rounds, strict=True)]
            values.append([gradient_noise(mean[:1], full[:1], norm), gradient_noise(mean[1:], full[1:], norm)])
        noise[m] = torch.tensor(values).mean(0)
    for fewer, more in itertools.pairwise(noise.values()):
        assert (more < 0.9 * fewer).all()
    assert (noise[10] < 1e-6).all()
    assert (noise[7] > 1e-3).all()


def test_gradient_noise_is_of_all_entries_together():
    change = [torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)]
    reference = [torch.tensor([[0.0, 4.0]]), torch.tensor(1.0)]
    assert gradient_noise(change, reference).item() == 3.0
    assert gradient_noise(iter(change), iter(reference), "mean_abs").item() == pytest.approx(5 / 3)


# --- Negatives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positives", "n", "m"),
    [
        ([3, 0, 7], 10, 4), ([0, 1, 2], 10, 5), ([7, 8, 9], 10, 5), ([], 10, 3), ([4], 10, 0), ([1, 1, 5], 10, 99),
        (list(range(6)), 6, 3), ([0], 1, 1), (list(range(0, 5000, 3)), 20_000, 50), ([19_999], 20_000, 3000),
    ],
)  # fmt: skip
def test_negatives_against_the_reference(positives, n, m):
    drawn = sample_negatives(torch.tensor(positives, dtype=torch.long), n, m, np.random.default_rng(5))
    assert drawn.tolist() == references.negatives_reference(positives, n, m, np.random.default_rng(5))
    assert drawn.dtype == torch.int64
    assert len(drawn) == min(m, n - len(set(positives)))


def test_negatives_are_uniform():
    generator, draws = np.random.default_rng(0), 2000
    counts = Counter(tuple(sample_negatives(torch.tensor([1, 4]), 7, 2, generator).tolist()) for _ in range(draws))
    assert set(counts) == set(itertools.combinations([0, 2, 3, 5, 6], 2))
    share, deviation = draws / 10, math.sqrt(draws * 0.1 * 0.9)
    assert all(abs(count - share) < 4.5 * deviation for count in counts.values())


def test_negatives_cost_what_is_drawn():
    """Memory or time for every class would not suffice."""
    n = 2**50
    positives = torch.tensor([0, n // 2, n - 1])
    drawn = sample_negatives(positives, n, 1000, np.random.default_rng(0))
    assert len(drawn.unique()) == 1000
    assert (drawn.diff() > 0).all()
    assert not torch.isin(positives, drawn).any()
    assert drawn.double().mean() / n == pytest.approx(0.5, abs=0.05)


def test_negatives_are_the_generators():
    first, second = np.random.default_rng(1), np.random.default_rng(1)
    draws = [sample_negatives(torch.tensor([3]), 1000, 10, first) for _ in range(2)]
    assert not torch.equal(*draws)
    for drawn in draws:
        assert torch.equal(sample_negatives(torch.tensor([3], dtype=torch.int32), 1000, 10, second), drawn)


# --- Corrections and errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((2, 2, 6), math.log(2)),
        ((90, 10, 2028), math.log(193.8)),
        ((2, 4, 6), 0.0),
        ((6, 0, 6), 0.0),
    ],
)
def test_corrections(numbers, expected):
    assert log_correction(*numbers) == pytest.approx(expected, abs=1e-15)


def loss_of(**changes):
    arguments = {
        "logits": torch.zeros(2, 3),
        "target": torch.tensor([0, -100]),
        "is_positive": torch.tensor([True, False, True]),
        "num_classes": 5,
    }
    return sampled_softmax_loss(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loss_of(objective="all"), r"`objective` to be one of \['fedss'"),
        (lambda: loss_of(reduction="max"), "`reduction` to be one of"),
        (lambda: loss_of(logits=torch.zeros(3)), r"shape \(N, S\).* got \(3,\)"),
        (lambda: loss_of(is_positive=torch.tensor([1, 0, 1])), "of type bool .* torch.int64"),
        (lambda: loss_of(is_positive=torch.tensor([True])), r"shape \(1,\)"),
        (lambda: loss_of(target=torch.tensor([0])), "one class for each of the 2 rows"),
        (lambda: loss_of(target=torch.zeros(2)), "1D tensor of integers, but got torch.float32"),
        (
            lambda: loss_of(target=torch.tensor([1, 0])),
            r"-100 or a column of `logits` marked in `is_positive`, but got \[1\]",
        ),
        (lambda: loss_of(target=torch.tensor([3, -1])), r"but got \[-1, 3\]"),
        (lambda: loss_of(objective="full"), "5 columns in `logits` for objective='full', but got 3"),
        (lambda: loss_of(num_classes=2), r"at least the number of positives and negatives \(3\), but got 2"),
        (
            lambda: sampled_logits(torch.zeros(1, 2), torch.tensor([True, False]), 0.0, objective="negonly"),
            "`target` with objective='negonly'",
        ),
        (lambda: sample_negatives(torch.tensor([6]), 6, 1, np.random.default_rng()), "from 0 to 5, but got 6 to 6"),
        (lambda: sample_negatives(torch.tensor([-1, 2]), 6, 1, np.random.default_rng()), "but got -1 to 2"),
        (lambda: sample_negatives(torch.tensor([0.5]), 6, 1, np.random.default_rng()), "1D tensor of integers"),
        (lambda: sample_negatives(torch.ones(6).bool(), 6, 1, np.random.default_rng()), "got torch.bool"),
        (lambda: sample_negatives(torch.tensor(2), 6, 1, np.random.default_rng()), r"of shape \(\)"),
        (lambda: sample_negatives(torch.tensor([1]), 6, -1, np.random.default_rng()), "`num_negatives` to be at least"),
        (lambda: sample_negatives(torch.tensor([1]), 0, 1, np.random.default_rng()), "`num_classes` to be at least 1"),
        (lambda: gradient_noise([], []), "same shapes"),
        (lambda: gradient_noise([torch.zeros(2)], [torch.zeros(1, 2)]), r"got \[\(2,\)\] and \[\(1, 2\)\]"),
        (lambda: gradient_noise([torch.zeros(2)], [torch.zeros(2)] * 2), "same shapes"),
        (lambda: gradient_noise([torch.zeros(2)], [torch.zeros(2)], "l1"), "`norm` to be one of"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
