"""Matching of neurons: plain loops, planted neurons, identities and limits."""

import math

import numpy as np
import pytest
import torch

from lightning_fed.matching import match_neurons
from tests.breadth import quick, slow
from tests.references_matching import (
    estimate_reference,
    estimated_reference,
    match_reference,
    means_reference,
    new_score,
    score_table,
)


def random_clients(sizes, features, seed=0, scale=1.0, dtype=torch.float64):
    """Noisy copies of common neurons, so that some scores are close."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(max(sizes), features, generator=generator, dtype=torch.float64)
    clients = []
    for size in sizes:
        chosen = torch.randperm(max(sizes), generator=generator)[:size]
        noise = torch.randn(size, features, generator=generator, dtype=torch.float64)
        clients.append((scale * (common[chosen] + 0.8 * noise)).to(dtype))
    return clients


def partition(assignments):
    """The matched sets of (client, neuron)."""
    sets = {}
    for client, indices in enumerate(assignments):
        for neuron, index in enumerate(indices.tolist()):
            sets.setdefault(index, set()).add((client, neuron))
    return {frozenset(members) for members in sets.values()}


def numpy_of(clients):
    return [neurons.numpy() for neurons in clients]


def compared(clients, score, gamma, variance, prior_variance, prior_mean, passes=5, max_width=None, seed=3):
    """Our matching, after asserting equality with the reference."""
    count, size = len(clients), clients[0].shape[1]
    options = {"variance": variance, "prior_variance": prior_variance, "prior_mean": prior_mean}
    ours = match_neurons(
        clients, np.random.default_rng(seed), score, gamma=gamma, passes=passes, max_width=max_width, **options
    )
    full = [
        torch.as_tensor(options[name], dtype=torch.float64).expand(shape).numpy()
        for name, shape in (("variance", (count, size)), ("prior_variance", (size,)), ("prior_mean", (size,)))
    ]
    generator = np.random.default_rng(seed)
    expected = match_reference(numpy_of(clients), generator, score, gamma, *full, passes, max_width=max_width)
    assert partition(ours.assignments) == {frozenset(members) for members in expected}
    matching = [
        int(ours.assignments[client][neuron]) for (client, neuron), *_ in expected
    ]  # our neuron for every expected neuron
    assert sorted(matching) == list(range(len(expected)))
    tolerance = 1e-10 if clients[0].dtype == torch.float64 else 1e-5
    means, estimate = (
        means_reference(expected, numpy_of(clients)),
        estimate_reference(expected, numpy_of(clients), *full),
    )
    np.testing.assert_allclose(ours.means[matching], means, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(ours.estimate[matching], estimate, rtol=tolerance, atol=tolerance)
    assert ours.owners[matching].tolist() == [len(members) for members in expected]
    assert ours.passes <= passes
    return ours


# --- Plain loops ------------------------------------------------------------------------------------------------------

SIZES = [(6, 6, 6), (5, 8, 3, 8), (4, 4), (3,), (4,) * 13]
"""Neurons per client. With 13 clients popularity exceeds 10."""


@pytest.mark.parametrize(
    "sizes", [sizes if len(sizes) < 13 else pytest.param(sizes, marks=pytest.mark.slow) for sizes in SIZES], ids=str
)
@pytest.mark.parametrize("score", ["published", "marginal"])
def test_one_precision_for_all_is_the_reference(sizes, score):
    widths = set()
    for gamma, variance, prior_variance, mean in ((7.0, 1.0, 1.0, 0.0), (1.0, 0.3, 2.0, 0.1), (0.01, 0.9, 0.4, 0.0)):
        match = compared(random_clients(sizes, 5), score, gamma, variance, prior_variance, mean)
        widths.add(len(match.owners))
    assert len(sizes) == 1 or len(widths) > 1


@pytest.mark.parametrize("score", ["published", "marginal"])
def test_precisions_per_number_and_client_are_the_references(score):
    generator = torch.Generator().manual_seed(5)
    clients = random_clients((5, 8, 3, 8), 6, seed=2)
    per_number, per_client, both = (
        0.2 + 2 * torch.rand(shape, generator=generator, dtype=torch.float64) for shape in ((6,), (4, 1), (4, 6))
    )
    prior, mean = 0.3 + torch.rand(6, generator=generator), torch.randn(6, generator=generator)
    for variance in (per_number, per_client, both):
        compared(clients, score, 1.5, variance, prior.double(), mean.double())
        compared(clients, score, 1.5, variance, 0.7, 0.2)


@pytest.mark.parametrize("score", ["published", "marginal"])
def test_a_hard_limit_of_the_width_is_the_references(score):
    clients = random_clients((5, 8, 3, 8), 6, seed=4)
    free = compared(clients, score, 5.0, 0.1, 1.0, 0.0)
    assert len(free.owners) > 10
    for limit in (10, 8):
        assert len(compared(clients, score, 5.0, 0.1, 1.0, 0.0, max_width=limit).owners) <= limit


def test_float32_is_the_reference():
    for variance in (0.5, torch.tensor([0.5, 0.4, 0.7, 1.0, 0.1, 0.3])):
        match = compared(random_clients((7, 9, 9), 6, dtype=torch.float32), "marginal", 1.0, variance, 1.0, 0.0)
        assert match.means.dtype == match.estimate.dtype == torch.float32


def test_half_precision_is_computed_in_float32():
    clients = random_clients((7, 9), 6, dtype=torch.float16)
    first, second = (
        match_neurons([neurons.to(kind) for neurons in clients], np.random.default_rng(0))
        for kind in (clients[0].dtype, torch.float32)
    )
    assert first.means.dtype == torch.float32
    assert torch.equal(first.means, second.means)


def test_stopping_early_changes_nothing():
    """The reference always makes five passes; clear neurons converge in one, noise needs more."""
    clear = compared(random_clients((6, 6, 6), 40), "marginal", 1.0, 0.6, 1.0, 0.0)
    noisy = compared([torch.randn(9, 2, dtype=torch.float64) for _ in range(4)], "marginal", 1.0, 0.6, 1.0, 0.0)
    assert clear.passes == 1 < noisy.passes


@pytest.mark.parametrize("blocks", [None, slow([4, 1]), [2, 2, 1]])
def test_estimated_variances_are_the_references(blocks):
    for seed in range(2):
        clients = random_clients((6, 5, 6), 5, seed, scale=0.1)
        clients = [neurons * torch.tensor([1, 1, 1, 1, 20.0]) for neurons in clients]
        ours = match_neurons(clients, np.random.default_rng(seed), blocks=blocks)
        expected, noise, prior = estimated_reference(
            numpy_of(clients), np.random.default_rng(seed), 1.0, blocks or [5], passes=5
        )
        assert partition(ours.assignments) == {frozenset(members) for members in expected}
        np.testing.assert_allclose(ours.variance, np.repeat(np.array(noise).T, blocks or [5], axis=1), rtol=1e-7)
        np.testing.assert_allclose(ours.prior_variance, np.repeat(prior, blocks or [5]), rtol=1e-7)


def unlike_drifts(seed, num_clients=8, neurons=20, features=28):
    """Clients moved from one start by 0.05 to 1 of the weights' scale, and the variances of the moves."""
    generator = torch.Generator().manual_seed(seed)
    start, scales = torch.randn(neurons, features, generator=generator), torch.linspace(0.05, 1, num_clients)
    clients = [start + scale * torch.randn(neurons, features, generator=generator) for scale in scales]
    return [0.1 * neurons for neurons in clients], 0.01 * scales**2


def test_clients_that_moved_unlike_far_from_one_start_are_matched():
    """A common variance gave distant clients separate neurons: 25 instead of 20."""
    for seed in range(3):
        clients, variances = unlike_drifts(seed)
        orders = [torch.randperm(20, generator=torch.Generator().manual_seed(seed + j)) for j in range(8)]
        match = match_neurons(
            [neurons[order] for neurons, order in zip(clients, orders, strict=True)], np.random.default_rng(0)
        )
        assert partition(match.assignments) == partition(orders)
        torch.testing.assert_close(match.variance[1:, 0], variances[1:], rtol=0.2, atol=0)
        assert float(match.prior_variance[0]) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("known", [{}, {"variance": 0.02}, {"prior_variance": 0.02}], ids=str)
def test_estimated_variances_are_the_most_likely_ones(known):
    """The likelihood's gradient vanishes: each client's neurons are normal with variances s_j + s_0 and covariance
    s_0.
    """
    clients, _ = unlike_drifts(5, num_clients=5)
    clients = [neurons.double() for neurons in clients]
    match = match_neurons(clients, np.random.default_rng(0), **known)
    assert len(match.owners) == 20
    pairs = zip(clients, match.assignments, strict=True)
    together = torch.stack([neurons[indices.argsort()] for neurons, indices in pairs], -1)

    def likelihood(log_noise, log_prior):
        covariance = log_noise.exp().diag() + log_prior.exp()
        normal = torch.distributions.MultivariateNormal(torch.zeros(5).double(), covariance)
        return normal.log_prob(together).mean()

    estimate = match.variance[:, 0].log(), match.prior_variance[0].log()
    gradients = torch.func.grad(likelihood, argnums=(0, 1))(*estimate)
    start = torch.func.grad(likelihood, argnums=(0, 1))(*(torch.full_like(part, math.log(0.01)) for part in estimate))
    if "variance" in known:
        assert (match.variance == 0.02).all()
    else:
        assert float(gradients[0].abs().max()) < 1e-3 < 0.1 < float(start[0].abs().max())
    if "prior_variance" in known:
        assert (match.prior_variance == 0.02).all()
    else:
        assert abs(float(gradients[1])) < 1e-3


# --- Reference by hand ------------------------------------------------------------------------------------------------


def test_scores_by_hand():
    """Two clients with one neuron and one number, unit variances: (2 + 1)^2 / 3 - 2^2 / 2 and 1^2 / 2, plus logs."""
    arguments = [np.array([[2.0]]), np.array([[1.0]])], [[1.0], [1.0]], [1.0], [0.0]
    table = score_table(1, [[(0, 0)]], *arguments, "published", 7.0)
    np.testing.assert_allclose(table, [[3 - 2 + math.log(1 / 1), 0.5 + 2 * math.log(7 / 2)]])
    table = score_table(1, [[(0, 0)]], *arguments, "marginal", 7.0)
    np.testing.assert_allclose(table, [[1 + math.log(2 / 3), 0.5 + math.log(1 / 2) + 2 * math.log(7 / 2)]])


def test_the_published_priors_numbers():
    """For 16 clients, gamma 7 and zero weights: 2 log(7 / 16), the second new neuron, and log(1 / 15)."""
    clients, ones = [np.zeros((2, 1))] * 16, [[1.0]] * 16
    new = [new_score(1, 0, k, clients, ones, [1.0], [0.0], "published", 7.0) for k in (1, 2)]
    np.testing.assert_allclose(new, [-1.65, -3.04], atol=0.005)
    table = score_table(1, [[(0, 0)]], clients, ones, [1.0], [0.0], "published", 7.0)
    np.testing.assert_allclose(table[0], [-2.71, *new], atol=0.005)


# --- Known solutions --------------------------------------------------------------------------------------------------


def planted(num_clients, shared, private, features, noise, seed=0):
    """Clients with common neurons, private neurons and noise in random order; and labels."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(shared, features, generator=generator)
    clients, labels = [], []
    for client in range(num_clients):
        private_neurons = torch.randn(private, features, generator=generator)
        order = torch.randperm(shared + private, generator=generator)
        neurons = torch.cat([common, private_neurons]) + noise * torch.randn(
            shared + private, features, generator=generator
        )
        label = torch.cat([torch.arange(shared), shared + client * private + torch.arange(private)])
        clients.append(neurons[order])
        labels.append(label[order])
    return clients, labels


@pytest.mark.parametrize(
    ("num_clients", "shared", "private", "features", "noise"),
    [(2, 24, 8, 60, 0.3), (5, 24, 8, 200, 1.0), (16, 24, 8, 60, 0.5), (5, 32, 0, 60, 0.5), (5, 8, 24, 200, 0.5)],
)
def test_planted_neurons_are_recovered(num_clients, shared, private, features, noise):
    clients, labels = planted(num_clients, shared, private, features, noise)
    match = match_neurons(clients, np.random.default_rng(0))
    assert partition(match.assignments) == partition(labels)
    assert len(match.owners) == shared + private * num_clients
    if shared > private:  # enough common neurons to estimate the variance
        assert float(match.variance.mean()) == pytest.approx(noise**2, rel=0.1)
        assert match.variance[:, 0].tolist() == pytest.approx([noise**2] * num_clients, rel=0.2)
        assert float(match.prior_variance[0]) == pytest.approx(1, rel=0.15)


def test_the_published_score_merges_private_neurons():
    """The specification's measurement: 16 clients with 8 private of 64 neurons each end with 79 neurons."""
    clients, labels = planted(16, 56, 8, 40, 0.1)
    clients = [0.05 * neurons for neurons in clients]
    match = match_neurons(clients, np.random.default_rng(0), "published")
    assert len(match.owners) == 64 + 15
    assert len(set.union(*(set(label.tolist()) for label in labels))) == 184
    assert len(match_neurons(clients, np.random.default_rng(0)).owners) == 184


@pytest.mark.parametrize("kind", quick(["random", "shared", "opposite"], ["shared"]))
def test_the_published_prior_sets_the_width(kind):
    """For short neurons every later client adds one neuron per k < gamma sqrt(J - 1) / J.

    The k-th new neuron of client 2 is worth more than a neuron of client 1 while 2 log(gamma / (J k)) exceeds
        log(1 / (J - 1)). Later clients have the same choice, plus common neurons, which are worth more.
    """
    with_seven = [(2, 3), (4, 3), (5, 2), (11, 2), (12, 1), (16, 1), (47, 1), (48, 0)]
    cases = [*((count, 7.0, added) for count, added in with_seven), (16, 1e-3, 0), (16, 20.0, 4), (3, 1.0, 0)]
    for count, gamma, added in cases:
        clients = _of_norm(0.1, kind, count)
        match = match_neurons(clients, np.random.default_rng(0), "published", gamma=gamma)
        assert len(match.owners) == 12 + added * (count - 1)
        assert added == sum(k < gamma * math.sqrt(count - 1) / count for k in range(1, 13))


def test_of_long_neurons_the_weights_decide_too():
    """The widths for which the prior would give 27 and 47."""
    widths = [
        len(match_neurons(_of_norm(norm, kind, 16), np.random.default_rng(0), "published").owners)
        for norm in (0.3, 3.0)
        for kind in ("random", "shared", "opposite")
    ]
    assert widths[:3] == [27] * 3
    assert 27 not in widths[3:]
    clients = [torch.randn(32, 28, generator=torch.Generator().manual_seed(client)) for client in range(16)]
    assert len(match_neurons(clients, np.random.default_rng(0), "published").owners) > 200


def _of_norm(norm, kind, count):
    """Clients with 12 neurons of a given norm: unrelated, all in common, or each the opposite of the previous."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(12, 20, generator=generator)
    clients = {
        "random": [torch.randn(12, 20, generator=generator) for _ in range(count)],
        "shared": [first[torch.randperm(12, generator=generator)] for _ in range(count)],
        "opposite": [first * (-1) ** client for client in range(count)],
    }[kind]
    return [norm * neurons / neurons.norm(dim=1, keepdim=True) for neurons in clients]


@pytest.mark.parametrize("options", [{"score": "marginal"}, {"score": "published", "gamma": 1e-3}], ids=str)
def test_identical_clients_are_returned_exactly(options):
    for seed in range(3):
        client = torch.randn(20, 11, generator=torch.Generator().manual_seed(seed))
        for count in (1, 2, 3, 7):
            match = match_neurons([client] * count, np.random.default_rng(seed), **options)
            assert all(torch.equal(match.means[indices], client) for indices in match.assignments)
            assert match.owners.tolist() == [count] * 20
            torch.testing.assert_close(match.means, client[torch.argsort(match.assignments[0])], rtol=0, atol=0)


def test_permuted_clients_are_found_again():
    client = torch.randn(30, 9)
    orders = [torch.randperm(30) for _ in range(4)]
    match = match_neurons([client[order] for order in orders], np.random.default_rng(0))
    for indices, order in zip(match.assignments, orders, strict=True):
        assert torch.equal(match.means[indices], client[order])
    assert len(match.owners) == 30


@pytest.mark.parametrize("score", ["published", "marginal"])
def test_the_order_of_a_clients_neurons_changes_nothing(score):
    clients = random_clients((9, 7, 9), 8)
    before = match_neurons(clients, np.random.default_rng(1), score)
    orders = [torch.randperm(len(neurons)) for neurons in clients]
    after = match_neurons(
        [neurons[order] for neurons, order in zip(clients, orders, strict=True)], np.random.default_rng(1), score
    )
    back = [
        torch.empty_like(indices).index_copy_(0, order, indices)
        for indices, order in zip(after.assignments, orders, strict=True)
    ]
    assert partition(back) == partition(before.assignments)
    for old, new in zip(before.assignments, back, strict=True):
        torch.testing.assert_close(before.means[old], after.means[new])
        torch.testing.assert_close(before.estimate[old], after.estimate[new])


def test_two_neurons_of_a_client_never_become_one():
    clients = [torch.ones(6, 3), torch.ones(4, 3), torch.ones(6, 3)]
    for score in ("published", "marginal"):
        match = match_neurons(clients, np.random.default_rng(0), score, variance=1.0, prior_variance=1.0)
        assert all(len(indices.unique()) == len(indices) for indices in match.assignments)


def test_limits_of_gamma_and_of_the_variances():
    clients = random_clients((8, 8, 8), 6)

    def width(score="marginal", **options):
        options = {"variance": 0.5, "prior_variance": 1.0, **options}
        return len(match_neurons(clients, np.random.default_rng(0), score, **options).owners)

    for score in ("published", "marginal"):
        assert width(score, gamma=1e-30) == 8
        assert width(score, gamma=1e30) == 24
        assert width(score, gamma=1e30, max_width=11) == 11
    # without information in the weights popularity and gamma decide; with full information only equal neurons match
    assert width(variance=1e12, gamma=1e-3) == 8
    assert width(variance=1e-9) == 24
    assert width(variance=torch.full((6,), torch.inf), gamma=1e-3) == 8


def test_numbers_of_infinite_variance_have_no_say():
    clients = random_clients((7, 7, 6), 6)
    with_others = [
        torch.cat([neurons, 50 * torch.randn(len(neurons), 3, dtype=neurons.dtype)], 1) for neurons in clients
    ]
    variance = torch.tensor([0.5] * 6 + [torch.inf] * 3)
    ours = match_neurons(with_others, np.random.default_rng(0), variance=variance, prior_variance=1.0)
    expected = match_neurons(clients, np.random.default_rng(0), variance=0.5, prior_variance=1.0)
    assert partition(ours.assignments) == partition(expected.assignments)
    torch.testing.assert_close(ours.means[:, :6], expected.means)
    equal = [torch.cat([neurons, torch.full((len(neurons), 3), 4.0, dtype=neurons.dtype)], 1) for neurons in clients]
    ours = match_neurons(equal, np.random.default_rng(0), blocks=[6, 3])
    expected = match_neurons(clients, np.random.default_rng(0))
    assert partition(ours.assignments) == partition(expected.assignments)
    assert (ours.means[:, 6:] == 4).all()
    assert ours.variance[0, 6:].isinf().all()


def test_the_seed_decides():
    clients = [torch.randn(20, 2) for _ in range(8)]
    options = {"variance": 0.5, "prior_variance": 1.0}
    matches = [match_neurons(clients, np.random.default_rng(seed), **options) for seed in (0, 0, 1, 2, 3)]
    assert all(torch.equal(a, b) for a, b in zip(matches[0].assignments, matches[1].assignments, strict=True))
    assert any(partition(match.assignments) != partition(matches[0].assignments) for match in matches)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    match_neurons(clients, np.random.default_rng(0))
    assert torch.equal(torch.get_rng_state(), before)


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clients": []}, "at least one client, but got none"),
        ({"clients": [torch.zeros(2, 3), torch.zeros(2, 4)]}, r"shape \(L_j, 3\).* but got .*\(2, 4\) at position 1"),
        ({"clients": [torch.zeros(2, 3), torch.zeros(0, 3)]}, r"L_j at least 1, but got .*\(0, 3\) at position 1"),
        ({"clients": [torch.zeros(3)]}, r"shape \(L_j, 3\)"),
        ({"clients": [torch.zeros(2, 3, dtype=torch.int64)]}, "floating-point tensors"),
        (
            {"clients": [torch.zeros(2, 3), torch.full((2, 3), torch.nan)]},
            "finite, but tensor 1 has NaN",
        ),
        ({"score": "posterior"}, "`score` to be one of"),
        ({"gamma": 0}, "`gamma` to be greater than 0 and finite, but got 0"),
        ({"gamma": float("nan")}, "`gamma` to be greater than 0"),
        ({"variance": 0.0}, "`variance` to be greater than 0, but got 0.0"),
        ({"variance": torch.ones(5)}, r"`variance` to broadcast to the shape \(2, 3\), but got the shape \(5,\)"),
        ({"prior_variance": -1.0}, "`prior_variance` to be greater than 0"),
        ({"prior_mean": torch.ones(2, 3)}, r"`prior_mean` to broadcast to the shape \(3,\)"),
        ({"blocks": [2, 2]}, r"`blocks` to have sizes of at least 1 that sum to 3, but got \[2, 2\]"),
        ({"blocks": [3, 0]}, "`blocks` to have sizes of at least 1 that"),
        ({"passes": -1}, "`passes` to be at least 0, but got -1"),
        ({"max_width": 1}, "`max_width` to be at least 2, but got 1"),
    ],
    ids=str,
)
def test_refusals(change, words):
    arguments = {"clients": [torch.zeros(2, 3), torch.ones(2, 3)], "generator": np.random.default_rng(0), **change}
    with pytest.raises(ValueError, match=words):
        match_neurons(**arguments)
