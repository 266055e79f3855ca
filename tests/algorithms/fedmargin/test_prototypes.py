"""Class prototypes of a client, a round, and several rounds."""

import itertools

import pytest
import torch

from lightning_fed.algorithms.fedmargin.prototypes import (
    Prototypes,
    aggregate_prototypes,
    class_prototypes,
    class_sums,
    reference_prototypes,
    update_prototypes,
)
from lightning_fed.features.label_maps import resize_labels
from tests import references_margin as references

WEIGHTINGS = ["class_count", "num_samples", "uniform"]


def prototypes(means, counts=None, num_classes=3, dtype=torch.float64, garbage=0.0):
    """From dictionaries; the unused rows of absent classes hold ``garbage``."""
    width = len(next(iter(means.values())))
    rows = torch.full((num_classes, width), garbage, dtype=dtype)
    numbers = torch.zeros(num_classes, dtype=torch.int64)
    for c, mean in means.items():
        rows[c], numbers[c] = torch.tensor(mean, dtype=dtype), counts[c] if counts else 1
    return Prototypes(rows, numbers)


def assert_prototypes(result, expected, atol=1e-12):
    assert result.present.nonzero().flatten().tolist() == sorted(expected)
    for c, mean in expected.items():
        torch.testing.assert_close(result.means[c].double(), torch.tensor(mean, dtype=torch.float64), atol=atol, rtol=0)


def random_clients(seed, count=4, num_classes=5, width=3):
    """Means and counts by class; every client lacks classes, one has a single class, one class has no client."""
    generator = torch.Generator().manual_seed(seed)
    means, counts = [], []
    for client in range(count):
        classes = torch.randperm(num_classes - 1, generator=generator)[: 1 if client == 1 else num_classes - 2].tolist()
        means.append({c: torch.randn(width, generator=generator, dtype=torch.float64).tolist() for c in classes})
        counts.append({c: int(torch.randint(1, 50, (), generator=generator)) for c in classes})
    return means, counts


# --- Sums over batches ------------------------------------------------------------------------------------------------


def random_batch(shape, label_size, seed=0, num_classes=4):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes + 1, (shape[0], *label_size), generator=generator)
    return torch.randn(shape, generator=generator), labels.where(labels < num_classes, 255)


@pytest.mark.parametrize("excluded", [(), (0,), (1, 3)])
@pytest.mark.parametrize(
    ("shape", "label_size"),
    [((30, 5), ()), ((3, 2, 4, 6), (8, 12)), ((2, 3, 3, 5), (7, 11)), ((2, 3, 5, 4), (5, 4)), ((2, 3, 6, 6), (3, 3))],
)
def test_against_the_reference(shape, label_size, excluded):
    features, labels = random_batch(shape, label_size)
    means, counts = references.prototypes_reference(features, labels, 255, excluded)
    sums, numbers = class_sums(features, labels, 4, exclude_classes=excluded)
    result = class_prototypes(sums, numbers, dtype=torch.float64)
    assert_prototypes(result, means)
    assert {c: int(n) for c, n in enumerate(result.counts) if n} == counts
    assert (sums.dtype, numbers.dtype) == (torch.float64, torch.int64)


def test_the_example_of_segmentation():
    features = torch.arange(8.0).view(1, 2, 2, 2)
    labels = torch.tensor([[[0, 0, 1, 1], [0, 0, 1, 1], [255, 255, 1, 0], [255, 255, 1, 0]]])
    assert resize_labels(labels, (2, 2)).tolist() == [[[0, 1], [255, 1]]]
    result = class_prototypes(*class_sums(features, labels, 2))
    assert result.means.tolist() == [[0.0, 4.0], [2.0, 6.0]]
    assert result.counts.tolist() == [1, 2]


def test_volumes_and_sequences():
    for spatial in ((6,), (4, 2, 3)):
        features = torch.randn(2, 3, *spatial)
        labels = torch.randint(3, (2, *spatial))
        flat = features.flatten(2).transpose(1, 2).reshape(-1, 3)
        assert_prototypes(
            class_prototypes(*class_sums(features, labels, 3), dtype=torch.float64),
            references.prototypes_reference(flat, labels.flatten(), 255, ())[0],
        )


@pytest.mark.parametrize("elements", [1, 7, 60, 1000])
@pytest.mark.parametrize(("shape", "label_size"), [((9, 5), ()), ((5, 3, 4, 5), (8, 5))])
def test_pieces_do_not_matter(shape, label_size, elements, monkeypatch):
    features, labels = random_batch(shape, label_size)
    whole = class_sums(features, labels, 4)
    monkeypatch.setattr("lightning_fed.numerics.chunks.CHUNK_ELEMENTS", elements)
    sums, counts = class_sums(features, labels, 4)
    torch.testing.assert_close(sums, whole[0], rtol=1e-14, atol=1e-14)
    assert torch.equal(counts, whole[1])


def test_batches_add_up():
    features, labels = random_batch((12, 4), ())
    whole = class_sums(features, labels, 4)
    first, second = class_sums(features[:5], labels[:5], 4), class_sums(features[5:], labels[5:], 4)
    torch.testing.assert_close(first[0] + second[0], whole[0], rtol=1e-14, atol=1e-14)
    assert torch.equal(first[1] + second[1], whole[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_small_types_are_summed_in_double(dtype):
    features = torch.full((5000, 2), 2.0).to(dtype)  # in float16 the sum would stop at 4096
    features[::2] += 1
    sums, _ = class_sums(features, torch.zeros(5000, dtype=torch.int64), 1)
    assert sums.tolist() == [[12500.0, 12500.0]]


def test_what_is_left_out_may_be_anything():
    features = torch.tensor([[1.0], [torch.nan], [torch.inf], [3.0]])
    sums, counts = class_sums(features, torch.tensor([0, 255, 1, 0]), 3, exclude_classes=[1])
    assert (sums.flatten().tolist(), counts.tolist()) == ([4.0, 0.0, 0.0], [2, 0, 0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_types_of_labels(dtype):
    sums, counts = class_sums(torch.ones(3, 1), torch.tensor([0, 254, 255]).to(dtype), 255)
    assert counts.sum() == 2
    assert sums[254] == 1


def test_an_ignored_negative_label():
    _, counts = class_sums(torch.ones(3, 1), torch.tensor([-100, 1, 1]), 300, ignore_index=-100)
    assert counts[1] == 2
    _, counts = class_sums(torch.ones(1, 1), torch.tensor([255]), 300, ignore_index=None)
    assert counts[255] == 1


@pytest.mark.parametrize(("num_classes", "counted"), [(255, 1), (256, 2), (300, 2)])
def test_a_void_label_that_is_a_class(num_classes, counted):
    """By default 255 is void unless a class 255 exists."""
    _, counts = class_sums(torch.ones(2, 1), torch.tensor([254, 255]), num_classes)
    assert counts.sum() == counted


def test_nothing_to_sum():
    sums, counts = class_sums(torch.ones(0, 2, 3, 3), torch.zeros(0, 6, 6, dtype=torch.int64), 4)
    assert (sums.shape, counts.tolist()) == ((4, 2), [0] * 4)
    assert not class_prototypes(sums, counts).present.any()


def test_gradients_are_not_recorded():
    sums, _ = class_sums(torch.ones(2, 1, requires_grad=True), torch.tensor([0, 0]), 1)
    assert not sums.requires_grad


BAD_SUMS = [
    ({"labels": torch.zeros(3)}, "`labels` to be integers, but got torch.float32"),
    ({"labels": torch.tensor([0, 1, 4])}, r"in 0 to 3 or `ignore_index` \(255\), but got 4"),
    ({"labels": torch.tensor([0, -1, 0])}, "but got -1"),
    ({"labels": torch.zeros(2, dtype=torch.int64)}, r"but got \(3, 2\) and \(2,\)"),
    ({"labels": torch.zeros(3, 4, 4, dtype=torch.int64)}, r"but got \(3, 2\) and \(3, 4, 4\)"),
    ({"features": torch.zeros(3)}, r"but got \(3,\) and \(3,\)"),
    ({"ignore_index": 2}, r"outside the classes \(0 to 3\), but got 2: pass `ignore_index=None`"),
    ({"exclude_classes": [4]}, "`exclude_classes` to be in 0 to 3, but got 4"),
    ({"num_classes": 0}, "`num_classes` to be at least 1, but got 0"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_SUMS)
def test_what_cannot_be_summed(wrong, message):
    right = {"features": torch.zeros(3, 2), "labels": torch.zeros(3, dtype=torch.int64), "num_classes": 4}
    with pytest.raises(ValueError, match=message):
        class_sums(**{**right, **wrong})


def test_means_are_float32():
    sums, counts = torch.tensor([[0.0], [4.0]], dtype=torch.float64), torch.tensor([0, 2])
    result = class_prototypes(sums, counts)
    assert (result.means.flatten().tolist(), result.counts.tolist()) == ([0.0, 2.0], [0, 2])
    assert result.means.dtype == torch.float32


# --- Over clients -----------------------------------------------------------------------------------------------------


def example(dtype=torch.float64):
    return [prototypes(m, c, dtype=dtype) for m, c in zip(references.AFTER, references.COUNTS, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_example_of_a_round(dtype):
    previous = prototypes(references.PREVIOUS, dtype=dtype)
    current = aggregate_prototypes(example(dtype))
    assert_prototypes(current, {0: (0.375, -0.25), 1: (2.75, 0.25), 2: (0, 3)}, atol=1e-5)
    updated = update_prototypes(previous, current)
    assert_prototypes(updated, {0: (0.3375, -0.225), 1: (2.775, 0.225), 2: (0, 3)}, atol=1e-5)
    reference = reference_prototypes(previous, current)
    assert_prototypes(reference, {0: (0, 0), 1: (3, 0), 2: (0, 3)}, atol=1e-5)
    for result in (current, updated, reference):
        assert result.means.dtype == dtype


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_aggregate_against_the_reference(seed, weighting):
    means, counts = random_clients(seed)
    sizes = [17, 3, 40, 8]
    expected = references.aggregate_reference(means, counts, sizes, weighting)
    clients = [prototypes(m, c, 5, garbage=torch.nan) for m, c in zip(means, counts, strict=True)]
    for order in itertools.permutations(range(4)):
        result = aggregate_prototypes([clients[k] for k in order], weighting, [sizes[k] for k in order])
        assert_prototypes(result, expected)
        assert result.counts.tolist() == [sum(count.get(c, 0) for count in counts) for c in range(5)]
        assert result.means[4].tolist() == [0.0] * 3


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_aggregate_of_equal_clients_is_that_client(weighting):
    means, counts = random_clients(0)
    client = prototypes(means[0], counts[0], 5, dtype=torch.float32)
    result = aggregate_prototypes([client] * 7, weighting, [3] * 7)
    assert torch.equal(result.means, client.means)
    assert torch.equal(result.present, client.present)


def test_clients_without_examples():
    clients = [prototypes({0: (1,)}, num_classes=2), prototypes({0: (2,), 1: (5,)}, num_classes=2)]
    result = aggregate_prototypes(clients, "num_samples", [4, 0])
    assert result.means.tolist() == [[1.0], [0.0]]
    assert result.counts.tolist() == [2, 0]


def test_what_cannot_be_aggregated():
    client = prototypes({0: (1, 2)})
    with pytest.raises(ValueError, match=r"`weighting` to be one of \['class_count'.*\], but got 'size'"):
        aggregate_prototypes([client], "size")
    with pytest.raises(ValueError, match="at least one client, but got none"):
        aggregate_prototypes([])
    with pytest.raises(ValueError, match=r"means \(4, 2\) and counts \(4,\), and the first set has means \(3, 2\)"):
        aggregate_prototypes([client, prototypes({0: (1, 2)}, num_classes=4)])
    with pytest.raises(ValueError, match=r"counts \(2,\)"):
        aggregate_prototypes([Prototypes(client.means, client.counts[:2])])
    for sizes in (None, [1, 2], [-1]):
        with pytest.raises(ValueError, match="`num_samples` to contain 1 non-negative numbers of examples"):
            aggregate_prototypes([client], "num_samples", sizes)


# --- Over rounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_memory_against_the_reference(seed):
    means, _ = random_clients(seed)
    expected = references.memory_reference(means[0], means[1])
    old, new = (prototypes(m, num_classes=5, garbage=torch.nan) for m in means[:2])
    result = update_prototypes(old, new)
    assert_prototypes(result, expected)
    assert not result.means[~result.present].any()


def test_the_first_round():
    current = prototypes({1: (3, 4)})
    assert update_prototypes(None, current) is current
    assert reference_prototypes(None, current) is current


def test_the_mean_of_all_rounds_is_that_of_all_vectors():
    rounds = [({0: (1,), 1: (4,)}, {0: 2, 1: 5}), ({0: (7,)}, {0: 4}), ({0: (-2,), 2: (9,)}, {0: 6, 2: 1})]
    total = None
    for means, counts in rounds:
        total = update_prototypes(total, prototypes(means, counts), memory="cumulative")
    assert_prototypes(total, {0: ((2 * 1 + 4 * 7 - 6 * 2) / 12,), 1: (4,), 2: (9,)})
    assert total.counts.tolist() == [12, 5, 1]


def test_a_round_like_the_last_changes_nothing():
    client = prototypes(references.AFTER[0], references.COUNTS[0], dtype=torch.float32)
    for memory in ("ema", "cumulative"):
        assert torch.equal(update_prototypes(client, client, memory=memory).means, client.means)


def test_what_cannot_be_remembered():
    client, narrower = prototypes({0: (1, 2)}), prototypes({0: (1,)})
    with pytest.raises(ValueError, match=r"`memory` to be one of \['ema', 'cumulative'\], but got 'mean'"):
        update_prototypes(client, client, memory="mean")
    with pytest.raises(ValueError, match="prototypes with equal shapes"):
        update_prototypes(client, narrower)
    with pytest.raises(ValueError, match="prototypes with equal shapes"):
        reference_prototypes(client, narrower)
