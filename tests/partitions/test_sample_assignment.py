import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp

from lightning_fed.data import IID, ByGroup, Dirichlet, LabelsPerClient, QuantitySkew, Shards
from lightning_fed.partitions import sample_assignment as dealing_module
from lightning_fed.partitions.basic import PixelPermutation
from lightning_fed.partitions.sample_assignment import pixel_permutation
from tests import references
from tests.breadth import quick

N, K = 1003, 20
LABELS = np.random.default_rng(3).choice([2, 5, 7, 11, 30], size=N, p=[0.1, 0.15, 0.2, 0.25, 0.3])
BALANCED = np.arange(1000) % 10


class Labelled(list):
    def __init__(self, labels):
        super().__init__(labels)
        self.targets = np.asarray(labels)


def parts_of(partition, dataset, seed):
    return list(partition.split(dataset, seed).values())


def iid(num_samples, num_clients, seed):
    return parts_of(IID(num_clients), range(num_samples), seed)


def quantity_skew(num_samples, num_clients, seed, **options):
    return parts_of(QuantitySkew(num_clients, **options), range(num_samples), seed)


def dirichlet_per_class(labels, num_clients, alpha, seed, **options):
    return parts_of(Dirichlet(num_clients, alpha, **options), Labelled(labels), seed)


def dirichlet_per_client(labels, num_clients, alpha, seed, **options):
    return parts_of(Dirichlet(num_clients, alpha, "per_client", **options), Labelled(labels), seed)


def shards(labels, num_clients, shards_per_client, seed):
    return parts_of(Shards(num_clients, shards_per_client), Labelled(labels), seed)


def labels_per_client(labels, num_clients, labels_per_client, seed, **options):
    return parts_of(LabelsPerClient(num_clients, labels_per_client, **options), Labelled(labels), seed)


def by_group(groups):
    return parts_of(ByGroup(groups), range(len(groups)), 0)


# name: (split by seed, number of unassigned samples)
SPLITS = {
    "iid": (lambda seed: iid(N, K, seed), 0),
    "per_class": (lambda seed: dirichlet_per_class(LABELS, K, 0.5, seed), 0),
    "per_class balance": (lambda seed: dirichlet_per_class(LABELS, K, 0.5, seed, balance=True), 0),
    "per_class inf": (lambda seed: dirichlet_per_class(LABELS, K, np.inf, seed), 0),
    "per_class tiny": (lambda seed: dirichlet_per_class(LABELS, K, 1e-300, seed, min_size=0), 0),
    "per_class tiny balance": (lambda seed: dirichlet_per_class(LABELS, K, 1e-9, seed, balance=True, min_size=0), 0),
    "per_client": (lambda seed: dirichlet_per_client(LABELS, K, 0.5, seed), N % K),
    "per_client uniform": (lambda seed: dirichlet_per_client(LABELS, K, 0.5, seed, prior="uniform"), N % K),
    "per_client inf": (lambda seed: dirichlet_per_client(LABELS, K, np.inf, seed), N % K),
    "per_client tiny": (lambda seed: dirichlet_per_client(LABELS, K, 1e-300, seed), N % K),
    "per_client 0": (lambda seed: dirichlet_per_client(LABELS, K, 0, seed), N % K),
    "shards": (lambda seed: shards(LABELS, K, 3, seed), N % (3 * K)),
    "labels_per_client": (lambda seed: labels_per_client(LABELS, K, 2, seed), 0),
    "labels_per_client even": (lambda seed: labels_per_client(LABELS, K, 2, seed, assignment="even"), 0),
    "labels_per_client sigma": (lambda seed: labels_per_client(LABELS, K, 2, seed, sigma=2.0, min_per_label=3), 0),
    "quantity dirichlet": (lambda seed: quantity_skew(N, K, seed, beta=2.0), 0),
    "quantity lognormal": (lambda seed: quantity_skew(N, K, seed, distribution="lognormal", sigma=0.5), 0),
}
split_cases = pytest.mark.parametrize(("split", "left_over"), SPLITS.values(), ids=SPLITS)


def histogram(labels, part):
    return np.array([(labels[part] == label).sum() for label in np.unique(labels)])


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@split_cases
def test_parts_are_disjoint_and_cover_the_samples(split, left_over):
    for seed in range(5):
        parts = split(seed)
        assert len(parts) == K
        assert all(isinstance(part, np.ndarray) and part.dtype == np.int64 and part.ndim == 1 for part in parts)
        assert all((np.diff(part) > 0).all() for part in parts)
        dealt = np.concatenate(parts)
        assert np.unique(dealt).size == dealt.size == N - left_over
        assert dealt.min() >= 0
        assert dealt.max() < N


@split_cases
def test_split_depends_on_the_seed_and_on_nothing_else(split, left_over):
    np.random.seed(0)  # noqa: NPY002 - the global generator must not matter
    first = split(7)
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    assert same(split(7), first)
    assert not same(split(8), first)
    np.random.seed(0)  # noqa: NPY002
    split(7)
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), state, strict=True))  # noqa: NPY002


def test_split_is_the_same_in_another_process_with_numpy_alone():
    program = (
        "import sys, types\n"
        "for name in ('lightning_fed', 'lightning_fed.partitions'):\n"  # without the packages' own imports
        "    sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules[name].__path__ = [sys.argv[1]]\n"
        "sys.modules['lightning_fed'].__path__ = [f'{sys.argv[1]}/..']\n"
        "import lightning_fed.partitions.sample_assignment as m\n"
        "print(m.assign_evenly(20, 3, 5)[0].tolist(), m.pixel_permutation(9, 4, 5).tolist(),"
        " {'torch', 'lightning'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(Path(dealing_module.__file__).parent)],
        env={"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == f"{iid(20, 3, 5)[0].tolist()} {pixel_permutation(9, 4, 5).tolist()} set()"


def test_functions_draw_from_different_streams():
    assert not np.array_equal(np.sort(pixel_permutation(N, 0, 0)[: N // 2]), iid(N - 1, 2, 0)[0])
    assert not same(iid(N, K, 0), quantity_skew(N, K, 0, beta=np.inf))


def test_a_part_does_not_keep_the_others_alive():
    assert all(part.base is None for part in iid(N, K, 0))


def test_iid_sizes_and_histograms():
    parts = iid(N, K, 0)
    assert sorted({part.size for part in parts}) == [50, 51]
    assert same(iid(5, 5, 0), iid(5, 5, 0))
    mean_index = [part.mean() for part in iid(100_000, 10, 0)]
    np.testing.assert_allclose(mean_index, 50_000, rtol=0.02)


@pytest.mark.parametrize(
    ("split", "alpha"),
    [
        (dirichlet_per_class, 1e6),
        (dirichlet_per_class, 1e20),
        (dirichlet_per_class, np.inf),
        (dirichlet_per_client, np.inf),
    ],
)
def test_dirichlet_with_much_alpha_is_the_global_histogram(split, alpha):
    labels = np.random.default_rng(0).choice(5, size=50_000, p=[0.1, 0.15, 0.2, 0.25, 0.3])
    overall = np.bincount(labels) / labels.size
    for part in split(labels, 10, alpha, seed=1):
        np.testing.assert_allclose(np.bincount(labels[part], minlength=5) / part.size, overall, rtol=0.05)


@pytest.mark.parametrize("alpha", [1e6, 1e20])
def test_dirichlet_per_client_with_much_alpha_is_the_global_histogram_but_for_chance(alpha):
    labels = np.random.default_rng(0).choice(5, size=50_000, p=[0.1, 0.15, 0.2, 0.25, 0.3])
    overall = np.bincount(labels) / labels.size
    for part in dirichlet_per_client(labels, 10, alpha, seed=1):
        np.testing.assert_allclose(np.bincount(labels[part], minlength=5) / part.size, overall, atol=0.05)


def test_dirichlet_per_client_with_infinite_alpha_deals_every_class_evenly():
    counts = np.stack([histogram(LABELS, part) for part in dirichlet_per_client(LABELS, K, np.inf, seed=0)])
    assert (np.ptp(counts, axis=0) <= 1).all()
    assert set(counts.sum(axis=1)) == {N // K}


def test_dirichlet_with_little_alpha_has_one_dominant_class():
    for alpha in (0, 1e-300, 1e-12, 1e-4):
        shares = [histogram(BALANCED, p).max() / p.size for p in dirichlet_per_client(BALANCED, 20, alpha, seed=0)]
        # the last clients get the remaining samples
        assert np.mean(np.array(shares) > 0.95) >= (1.0 if alpha == 0 else 0.4)
        assert shares[0] > 0.95
    # Each class has one dominant client.
    for alpha in (1e-300, 1e-12, 1e-4):
        parts = dirichlet_per_class(BALANCED, 20, alpha, seed=0, min_size=0)
        counts = np.stack([histogram(BALANCED, part) for part in parts])
        assert (counts.max(axis=0) / counts.sum(axis=0) > 0.95).all()


def test_dirichlet_per_client_gives_equal_sizes():
    for alpha in (0, 0.05, 1, 100, np.inf):
        assert {part.size for part in dirichlet_per_client(LABELS, K, alpha, seed=0)} == {N // K}


def test_dirichlet_per_client_prior():
    # Few samples are drawn, so no class runs out and the shares equal the prior.
    labels = np.repeat([0, 1], [9_000, 1_000])
    share = {}
    for prior in ("empirical", "uniform"):
        clients = [dirichlet_per_client(labels, 100, 1e3, seed, prior=prior)[0] for seed in range(20)]
        share[prior] = np.mean([(labels[client] == 0).mean() for client in clients])
    assert share["empirical"] == pytest.approx(0.9, abs=0.02)
    assert share["uniform"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_dirichlet_per_client_concentrations_sum_to_alpha():
    # Var(q_c) = pi_c (1 - pi_c) / (alpha + 1), plus a small term for sampling 200 examples.
    labels = np.arange(2_000) % 10  # the first client's 200 examples would be of one class
    for alpha in (0.5, 4.0):
        shares = [np.mean(labels[dirichlet_per_client(labels, 10, alpha, seed)[0]] == 0) for seed in range(200)]
        assert np.var(shares) == pytest.approx(0.09 / (alpha + 1), rel=0.35)


@pytest.mark.parametrize("balance", [False, True])
def test_dirichlet_per_class_is_distributed_as_in_the_published_program(balance):
    labels = np.repeat([0, 1, 2], [40, 60, 20])
    rng = np.random.default_rng(0)
    splits = [dirichlet_per_class(labels, 4, 0.7, seed, balance=balance, min_size=5) for seed in range(400)]
    reference_splits = [
        references.dirichlet_per_class_reference(labels.tolist(), 4, 0.7, rng, balance, 5) for _ in range(400)
    ]
    statistics = {
        "size of a client": lambda parts: len(parts[1]),
        "largest size": lambda parts: max(len(part) for part in parts),
        "samples of class 0": lambda parts: int((labels[np.asarray(parts[0], dtype=int)] == 0).sum()),
        "samples of the last class": lambda parts: int((labels[np.asarray(parts[-1], dtype=int)] == 2).sum()),
        "where they are": lambda parts: float(np.mean([i for i in parts[2] if labels[i] == 1] or [0.0])),
    }
    for name, statistic in statistics.items():
        assert ks_2samp([*map(statistic, splits)], [*map(statistic, reference_splits)]).pvalue > 1e-3, name


@pytest.mark.parametrize(
    ("alpha", "prior"),
    quick(itertools.product([0.3, 3.0], ["empirical", "uniform"]), [(0.3, "empirical")]),
)
def test_dirichlet_per_client_is_distributed_as_in_the_paper(alpha, prior):
    labels = np.repeat([0, 1, 2], [10, 30, 60])
    pi = [0.1, 0.3, 0.6] if prior == "empirical" else [1 / 3] * 3
    rng = np.random.default_rng(0)
    splits = [dirichlet_per_client(labels, 5, alpha, seed, prior=prior) for seed in range(400)]
    reference_splits = [
        references.dirichlet_per_client_reference(labels.tolist(), 5, alpha, rng, pi) for _ in range(400)
    ]
    for client in (0, 2, 4):  # the classes run out for the last clients
        for label in range(3):
            counts = [
                [int((labels[parts[client]] == label).sum()) for parts in source]
                for source in (splits, reference_splits)
            ]
            assert ks_2samp(*counts).pvalue > 1e-3, (client, label)
    positions = [[float(np.mean(parts[0])) for parts in source] for source in (splits, reference_splits)]
    assert ks_2samp(*positions).pvalue > 1e-3


def test_dirichlet_per_client_without_alpha_gives_one_class_each():
    # 100 clients with 10 samples, 100 samples per class: exactly 10 random clients per class.
    owners = [BALANCED[part[0]] for part in dirichlet_per_client(BALANCED, 100, 0, seed=0)]
    assert all(np.unique(BALANCED[part]).size == 1 for part in dirichlet_per_client(BALANCED, 100, 0, seed=0))
    assert np.bincount(owners).tolist() == [10] * 10
    assert owners != sorted(owners)
    # Two clients fit into each class; only the fifth client takes the rest of both.
    labels = np.repeat([0, 1], 25)
    for seed in range(20):
        num_labels = [np.unique(labels[part]).size for part in dirichlet_per_client(labels, 5, 0, seed)]
        assert num_labels == [1, 1, 1, 1, 2]
    # No class suffices for a client, so each client takes a whole class and a part of another.
    parts = dirichlet_per_client([0, 0, 1, 1, 2, 2], 2, 0, seed=0)
    assert [part.size for part in parts] == [3, 3]


def test_dirichlet_per_class_min_size_and_its_error(monkeypatch):
    labels = np.repeat([0, 1], 100)
    for seed in range(20):
        assert min(part.size for part in dirichlet_per_class(labels, 10, 1.0, seed, min_size=12)) >= 12
    sizes = [min(part.size for part in dirichlet_per_class(labels, 10, 1.0, seed, min_size=0)) for seed in range(20)]
    assert min(sizes) < 12
    monkeypatch.setattr(dealing_module, "MAX_TRIES", 50)
    with pytest.raises(ValueError, match=r"at least 20 samples \(`min_size`\), but in each of 50 .* of the 10 clients"):
        dirichlet_per_class(labels, 10, 0.1, seed=0, min_size=20)
    with pytest.raises(ValueError, match=r"`min_size` \* `num_clients` to be at most .* \(200\), but got 21 \* 10\."):
        dirichlet_per_class(labels, 10, 0.1, seed=0, min_size=21)


def test_dirichlet_per_class_balance_caps_the_sizes():
    labels = np.repeat(np.arange(20), 50)
    for seed in range(10):
        sizes = [part.size for part in dirichlet_per_class(labels, 5, 0.3, seed, balance=True, min_size=0)]
        assert max(sizes) < 200 + 50  # below N / K before the last class
    free = [
        max(part.size for part in dirichlet_per_class(labels, 5, 0.3, seed, balance=False, min_size=0))
        for seed in range(10)
    ]
    assert max(free) >= 250


def test_shards_are_those_of_the_paper():
    for seed in range(5):
        pieces = references.shards_reference(LABELS.tolist(), 3 * K)
        for part in shards(LABELS, K, 3, seed):
            owned = [shard for shard in pieces if shard <= set(part.tolist())]
            assert len(owned) == 3
            assert sum(map(len, owned)) == part.size
    # As for MNIST: 200 shards with 300 samples, at most 4 labels per client.
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    parts = shards(labels, 100, 2, seed=0)
    assert {part.size for part in parts} == {600}
    num_labels = [np.unique(labels[part]).size for part in parts]
    assert max(num_labels) <= 4
    assert np.mean(np.array(num_labels) <= 2) > 0.8


def test_shards_are_dealt_at_random():
    firsts = [shards(np.arange(40), 2, 2, seed)[0].tolist() for seed in range(300)]
    pairs = {tuple(sorted({index // 10 for index in first})): 0 for first in firsts}
    for first in firsts:
        pairs[tuple(sorted({index // 10 for index in first}))] += 1
    assert len(pairs) == 6  # every pair of the four shards
    assert min(pairs.values()) > 30


@pytest.mark.parametrize("num_labels", [1, 2, 4, 5])
def test_labels_per_client_properties(num_labels):
    names = np.unique(LABELS)
    parts = labels_per_client(LABELS, K, num_labels, seed=0)
    owned = np.stack([histogram(LABELS, part) for part in parts])
    assert ((owned > 0).sum(axis=1) == num_labels).all()
    assert all(owned[client, client % names.size] > 0 for client in range(K))
    for counts in owned.T:  # equal shares of every label
        assert np.ptp(counts[counts > 0]) <= 1
    assert owned.sum() == N


def test_labels_per_client_chooses_labels_as_the_published_program():
    rng = np.random.default_rng(0)
    splits, reference_splits = [], []
    for seed in range(200):
        parts = labels_per_client(BALANCED, 12, 3, seed)
        splits.append(sum((BALANCED[part] == 9).any() for part in parts))
        reference_splits.append(sum(9 in owned for owned in references.label_owners_reference(12, 10, 3, rng)))
    assert ks_2samp(splits, reference_splits).pvalue > 1e-3


def test_labels_per_client_leaves_out_a_label_only_without_owner():
    parts = labels_per_client(BALANCED, 4, 2, seed=0)
    owned = np.stack([histogram(BALANCED, part) for part in parts])
    assert set(owned.sum(axis=0)) == {0, 100}
    assert owned.sum() < 1000


def test_labels_per_client_of_consecutive_labels():
    parts = labels_per_client(BALANCED, 25, 3, seed=0, assignment="consecutive")
    for client, part in enumerate(parts):
        assert set(BALANCED[part]) == {client % 10, (client + 1) % 10, (client + 2) % 10}


@pytest.mark.slow
def test_labels_per_client_with_sizes_as_in_the_published_program():
    """Compares counts per client and the largest and median sizes over 300 splits, with at least 5 per label."""
    class_sizes, rng = range(1200, 2200, 100), np.random.default_rng(0)
    labels = np.repeat(np.arange(10), class_sizes)
    options = {"assignment": "consecutive", "sigma": 2.0, "min_per_label": 5}
    splits = [labels_per_client(labels, 40, 2, seed, **options) for seed in range(300)]
    counts = np.array([[histogram(labels, part) for part in parts] for parts in splits])
    reference = np.array([references.two_digit_users_reference(class_sizes, 40, rng) for _ in range(300)])
    assert np.array_equal(counts > 0, reference > 0)
    assert (counts.sum(axis=1) == np.array(class_sizes)).all()
    assert counts[counts > 0].min() == 5
    for user, label in ((0, 0), (17, 8), (39, 0)):
        assert ks_2samp(counts[:, user, label], reference[:, user, label]).pvalue > 1e-3, (user, label)
    for statistic in (lambda sizes: sizes.max(axis=1), lambda sizes: np.median(sizes, axis=1)):
        assert ks_2samp(statistic(counts.sum(axis=2)), statistic(reference.sum(axis=2))).pvalue > 1e-3


def test_labels_per_client_has_too_few_of_a_label():
    with pytest.raises(ValueError, match=r"`min_per_label` \(6\) samples .* label has only 20 samples for 4 clients"):
        labels_per_client(np.repeat([0, 1], [20, 50]), 4, 2, 0, min_per_label=6)
    assert [part.size for part in labels_per_client(np.repeat([0, 1], [20, 50]), 4, 2, 0, min_per_label=5)] == [
        18, 18, 17, 17,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_clients", "per_client", "owners"),
    [
        (5, 2, {1}),  # as many labels as places: one client per label
        (10, 1, {1}),
        (4, 2, {0, 1}),  # two labels have no client
        (7, 2, {1, 2}),  # four labels have two clients
        (12, 3, {3, 4}),
        (6, 10, {6}),
        (9, 7, {6, 7}),
        (23, 9, {20, 21}),  # hands from two decks
    ],
)
def test_labels_evenly_assigned(num_clients, per_client, owners):
    """Every client has the requested number of labels, and every label has equally many clients with equal shares."""
    for seed in range(20):
        parts = labels_per_client(BALANCED, num_clients, per_client, seed, assignment="even")
        owned = np.stack([histogram(BALANCED, part) for part in parts])
        assert ((owned > 0).sum(axis=1) == per_client).all()
        assert set((owned > 0).sum(axis=0)) == owners
        assert all(np.ptp(counts[counts > 0]) <= 1 for counts in owned.T if counts.any())
        dealt = np.concatenate(parts)
        assert np.unique(dealt).size == dealt.size == 100 * min(10, num_clients * per_client)


def test_labels_evenly_assigned_are_random():
    """Any two labels can meet at one client, within the first deck and across two decks."""
    pairs, seconds = set(), set()
    for seed in range(150):
        parts = labels_per_client(BALANCED, 7, 3, seed, assignment="even")
        hands = [tuple(np.unique(BALANCED[part])) for part in parts]
        pairs |= {(a, b) for a in hands[0] for b in hands[0] if a < b}
        seconds |= {(a, b) for a in hands[3] for b in hands[3] if a < b}  # the third label comes from the second deck
        assert len(set(hands[:3])) == 3
    assert len(pairs) == len(seconds) == 45


def test_quantity_skew_is_distributed_as_in_the_published_program():
    rng = np.random.default_rng(0)
    splits = [[part.size for part in quantity_skew(200, 5, seed, beta=0.5, min_size=4)] for seed in range(400)]
    reference_splits = [references.quantity_skew_reference(200, 5, 0.5, rng, 4) for _ in range(400)]
    for statistic in (max, min, lambda sizes: sizes[0], lambda sizes: sizes[-1]):
        assert ks_2samp([*map(statistic, splits)], [*map(statistic, reference_splits)]).pvalue > 1e-3


def test_quantity_skew_lognormal_sizes():
    # The log ratio of two sizes has standard deviation sigma * sqrt(2).
    ratios = []
    for seed in range(300):
        parts = quantity_skew(2_000, 4, seed, distribution="lognormal", sigma=0.8)
        ratios.append(np.log(parts[0].size / parts[1].size))
    assert np.std(ratios) == pytest.approx(0.8 * np.sqrt(2), rel=0.15)
    assert np.mean(ratios) == pytest.approx(0, abs=0.2)
    sizes = [part.size for part in quantity_skew(N, K, 0, distribution="lognormal", sigma=0)]
    assert max(sizes) - min(sizes) <= 1


def test_quantity_skew_deals_samples_at_random():
    mean_index = [part.mean() for part in quantity_skew(100_000, 5, 0, min_size=5000)]
    np.testing.assert_allclose(mean_index, 50_000, rtol=0.05)


def test_quantity_skew_error_of_min_size(monkeypatch):
    monkeypatch.setattr(dealing_module, "MAX_TRIES", 7)
    with pytest.raises(ValueError, match=r"at least 40 samples .* 7 random .* \(.*beta=0\.01\): .* raise `beta`"):
        quantity_skew(1000, 20, 0, beta=0.01, min_size=40)
    with pytest.raises(ValueError, match=r"sigma=9\): .* lower `sigma`"):
        quantity_skew(1000, 20, 0, distribution="lognormal", sigma=9, min_size=40)


def test_by_group():
    groups = np.random.default_rng(0).choice(["zoe", "ann", "bob"], size=50)
    parts = by_group(groups)
    assert [groups[part][0] for part in parts] == ["ann", "bob", "zoe"]
    assert all(np.unique(groups[part]).size == 1 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(50))
    assert [part.tolist() for part in by_group([30, -1, 30])] == [[1], [0, 2]]


def test_pixel_permutations():
    permutations = [pixel_permutation(784, client, seed=0) for client in range(200)]
    assert all(np.array_equal(np.sort(p), np.arange(784)) and p.dtype == np.int64 for p in permutations)
    assert len({p.tobytes() for p in permutations}) == 200
    assert np.array_equal(pixel_permutation(784, 3, seed=0), permutations[3])
    assert not np.array_equal(pixel_permutation(784, 3, seed=1), permutations[3])
    assert not np.array_equal(pixel_permutation(784, 0, seed=0), np.arange(784))
    # (seed, client) does not collide with (client, seed)
    assert not np.array_equal(pixel_permutation(784, 1, seed=2), pixel_permutation(784, 2, seed=1))
    image = np.random.default_rng(0).random(784)
    assert np.array_equal(image[permutations[5]][np.argsort(permutations[5])], image)
    # Uniform: a pixel may come from any position.
    assert np.mean([p[0] for p in permutations]) == pytest.approx(391.5, rel=0.15)


def test_names_of_the_labels_do_not_matter():
    assert same(dirichlet_per_client([30, -5] * 20, 4, 1.0, 0), dirichlet_per_client([7, 1] * 20, 4, 1.0, 0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_group([[1], [2]]), "Expected `group` to be all integers or all strings, but got list."),
        (
            lambda: shards(["a", "b"], 1, 1, 0),
            "Expected a sample to be a tuple or list with an input",
        ),
    ],
)
def test_labels_and_groups_are_one_per_sample(call, message):
    with pytest.raises(TypeError) as error:
        call()
    assert message in str(error.value)


def test_one_client_gets_everything():
    for parts in (
        iid(30, 1, 0),
        dirichlet_per_class(LABELS[:30], 1, 0.1, 0),
        dirichlet_per_client(LABELS[:30], 1, 0.1, 0),
        shards(LABELS[:30], 1, 2, 0),
        labels_per_client(LABELS[:30], 1, 5, 0),
        quantity_skew(30, 1, 0),
    ):
        assert len(parts) == 1
        assert parts[0].tolist() == list(range(30))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(10, 0, 0), "Expected `num_clients` to be at least 1, but got 0."),
        (lambda: iid(10, 11, 0), "Expected `num_clients` to be at most the number of samples (10), but got 11."),
        (lambda: iid(10, 2, -1), "Expected `seed` to be at least 0, but got -1."),
        (lambda: dirichlet_per_class(LABELS, 2, 0, 0), "Expected `alpha` to be greater than 0, but got 0."),
        (lambda: dirichlet_per_class(LABELS, 2, np.nan, 0), "Expected `alpha` to be greater than 0, but got nan."),
        (lambda: dirichlet_per_class(LABELS, 2, 1, 0, min_size=-1), "Expected `min_size` to be at least 0"),
        (lambda: dirichlet_per_client(LABELS, 2, -1, 0), "Expected `alpha` to be at least 0, but got -1."),
        (lambda: dirichlet_per_client(LABELS, 2, np.nan, 0), "Expected `alpha` to be at least 0, but got nan."),
        (
            lambda: dirichlet_per_client(LABELS, 2, 1, 0, prior="x"),
            "`prior` to be one of ['empirical', 'uniform'], but got 'x'",
        ),
        (lambda: shards(LABELS, 2, 0, 0), "Expected `shards_per_client` to be at least 1, but got 0."),
        (lambda: shards(LABELS, 600, 2, 0), "at most the number of samples (1003), but got 600 * 2."),
        (
            lambda: labels_per_client(LABELS, 2, 0, 0),
            "`labels_per_client` to be at least 1, but got 0.",
        ),
        (
            lambda: labels_per_client(LABELS, 2, 6, 0),
            "`labels_per_client` to be from 1 to the number of different labels (5), but got 6.",
        ),
        (
            lambda: labels_per_client(LABELS, 2, 1, 0, assignment="x"),
            "`assignment` to be one of ['random', 'even', 'consecutive'], but got 'x'",
        ),
        (lambda: quantity_skew(10, 2, 0, beta=0), "Expected `beta` to be greater than 0, but got 0."),
        (lambda: quantity_skew(10, 2, 0, sigma=-1), "Expected `sigma` to be at least 0 and finite, but got -1."),
        (lambda: quantity_skew(10, 2, 0, distribution="x"), "one of ['dirichlet', 'lognormal'], but got 'x'"),
        (lambda: quantity_skew(10, 2, 0, min_size=6), "number of samples (10), but got 6 * 2."),
        (lambda: by_group([]), "Expected a data set with at least one sample, but got an empty one."),
        (lambda: shards([], 1, 1, 0), "Expected `num_clients` to be at most the number of samples (0), but got 1."),
        (lambda: PixelPermutation(-1, 0), "Expected `client` to be at least 0, but got -1."),
        (lambda: PixelPermutation(0, -1), "Expected `seed` to be at least 0, but got -1."),
    ],
)
def test_errors_name_the_argument_and_its_value(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - compared below
        call()
    assert message in str(error.value)


def test_a_thousand_clients_share_the_samples():
    labels = np.arange(60_000) % 62
    for call in (
        lambda: iid(60_000, 1000, 0),
        lambda: dirichlet_per_class(labels, 1000, 0.1, 0, min_size=0),
        lambda: dirichlet_per_class(labels, 1000, 0.1, 0, min_size=0, balance=True),
        lambda: dirichlet_per_client(labels, 1000, 0.1, 0),
        lambda: shards(labels, 1000, 2, 0),
        lambda: labels_per_client(labels, 1000, 2, 0),
        lambda: quantity_skew(60_000, 1000, 0, min_size=0),
        lambda: by_group(labels),
    ):
        parts = call()
        sizes = [len(part) for part in (parts.values() if isinstance(parts, dict) else parts)]
        assert 0 < sum(sizes) <= 60_000
