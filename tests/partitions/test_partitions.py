import inspect
import logging
import pickle
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_fed import data
from lightning_fed.data import Dirichlet, LabelsPerClient, Partition, Shards
from lightning_fed.partitions.basic import (
    IID,
    ByGroup,
    PermutedPixels,
    PixelPermutation,
    QuantitySkew,
)
from lightning_fed.partitions.label_lookup import labels_of
from lightning_fed.partitions.sample_assignment import PartitionError, pixel_permutation
from tests import references

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"

N, K, SEED = 603, 6, 11
LABELS = np.random.default_rng(0).choice(4, size=N, p=[0.1, 0.2, 0.3, 0.4])
DATASET = TensorDataset(torch.rand(N, 1, 4, 4), torch.from_numpy(LABELS))

# name: (partition, number of unassigned samples)
CASES = {
    "IID": (IID(K), 0),
    "Dirichlet": (Dirichlet(K, 0.5), 0),
    "Dirichlet balance": (Dirichlet(K, 0.5, min_size=30, balance=True), 0),
    "Dirichlet per client": (Dirichlet(K, 0.5, definition="per_client"), N % K),
    "Dirichlet prior": (Dirichlet(K, 0.5, definition="per_client", prior="uniform"), N % K),
    "Shards": (Shards(K, 3), N % (3 * K)),
    "LabelsPerClient": (LabelsPerClient(K, 2), 0),
    "LabelsPerClient even": (LabelsPerClient(K, 2, "even"), 0),
    "LabelsPerClient sigma": (LabelsPerClient(K, 2, "consecutive", sigma=1.0, min_per_label=5), 0),
    "QuantitySkew": (QuantitySkew(K, 0.7), 0),
    "QuantitySkew lognormal": (QuantitySkew(K, distribution="lognormal", sigma=0.4, min_size=20), 0),
}
cases = pytest.mark.parametrize(("partition", "left_over"), CASES.values(), ids=CASES)


def same(a, b):
    return list(a) == list(b) and all(np.array_equal(a[key], b[key]) for key in a)


@cases
def test_split_is_the_deal_under_the_clients_numbers(partition, left_over, caplog):
    with caplog.at_level(logging.INFO, "lightning_fed"):
        split = partition.split(DATASET, SEED)
    assert list(split) == list(range(K))
    assert same(split, dict(enumerate(partition.assign(DATASET, SEED))))
    assert all(type(client) is int for client in split)
    dealt = np.concatenate(list(split.values()))
    assert np.unique(dealt).size == dealt.size == N - left_over
    assert (f"does not assign {left_over} of {N} samples" in caplog.text) == (left_over > 0)


@cases
def test_own_seed_goes_before_the_federations(partition, left_over):
    assert not same(partition.split(DATASET, SEED), partition.split(DATASET, SEED + 1))
    arguments = {name: getattr(partition, name) for name in inspect.signature(type(partition)).parameters}
    seeded = type(partition)(**{**arguments, "seed": SEED + 1})
    assert same(seeded.split(DATASET, SEED), partition.split(DATASET, SEED + 1))
    assert same(seeded.split(DATASET, 0), partition.split(DATASET, SEED + 1))
    assert same(type(partition)(**{**arguments, "seed": 0}).split(DATASET, SEED), partition.split(DATASET, 0))


@cases
def test_partitions_are_picklable_and_say_what_they_are(partition, left_over):
    again = pickle.loads(pickle.dumps(partition))
    assert same(again.split(DATASET, SEED), partition.split(DATASET, SEED))
    assert repr(eval(repr(partition), {name: getattr(data, name) for name in data.__all__})) == repr(partition)
    assert f"num_clients={K}" in repr(partition)


def test_reprs_show_what_differs_from_the_default():
    assert repr(Dirichlet(100, 0.1)) == "Dirichlet(num_clients=100, alpha=0.1)"
    assert repr(Dirichlet(9, 1, "per_client", seed=0)) == (
        "Dirichlet(num_clients=9, alpha=1, definition='per_client', seed=0)"
    )
    assert repr(ByGroup()) == "ByGroup()"
    assert repr(ByGroup(np.array([1, 2]))) == "ByGroup(group=array([1, 2]))"


@cases
def test_a_split_changes_no_samples(partition, left_over):
    assert partition.transform(0, SEED) is None


def test_a_partition_of_ones_own_needs_only_split():
    class Halves(Partition):
        def split(self, dataset, seed):
            return {"a": np.arange(len(dataset) // 2), "b": np.arange(len(dataset) // 2, len(dataset))}

    assert list(Halves().split(DATASET, 0)) == ["a", "b"]
    assert Halves().transform("a", 0) is None
    assert repr(Halves()) == "Halves()"
    with pytest.raises(TypeError, match="abstract"):
        Partition()


def test_clients_without_samples_are_counted(caplog):
    with caplog.at_level(logging.INFO, "lightning_fed"):
        Dirichlet(K, 1e-9, min_size=0).split(DATASET, 0)
    assert "of 6 clients without samples" in caplog.text


@pytest.mark.parametrize("partition", [Dirichlet(3, 0, "per_client"), Shards(3, 1), LabelsPerClient(3, 1)])
def test_segmentation_by_dominant_foreground_class(partition):
    masks = torch.zeros(30, 4, 4, dtype=torch.uint8)
    for index in range(30):
        masks[index, 0, 0] = 1 + index % 3  # one foreground pixel
        masks[index, 1] = 255
    dataset = TensorDataset(torch.rand(30, 3, 4, 4), masks)
    for indices in partition.split(dataset, 0).values():
        assert len({index % 3 for index in indices.tolist()}) == 1
        assert indices.size == 10


@pytest.mark.parametrize("kind", [Dirichlet, Shards, LabelsPerClient])
def test_label_options_reach_the_labels(kind):
    arguments = {
        "num_clients": 2,
        "alpha": 0,
        "definition": "per_client",
        "shards_per_client": 1,
        "labels_per_client": 1,
    }
    arguments = {name: value for name, value in arguments.items() if name in inspect.signature(kind).parameters}
    masks = torch.tensor([[[0, 0, 0, 5, 5, 7]], [[0, 0, 0, 7, 7, 5]]]).repeat(10, 1, 1)
    dataset = TensorDataset(torch.rand(20, 1, 1, 6), masks)

    def parities(**options):
        split = kind(**arguments, **options).split(dataset, 0)
        return [{index % 2 for index in indices.tolist()} for indices in split.values()]

    assert sorted(map(sorted, parities())) == [[0], [1]]
    # 5 is ignored and 0 is background: all labels are 7. With label_fn: halves of the data set.
    labels = labels_of(dataset, ignore_index=5)
    assert set(labels.tolist()) == {7}
    assert sorted(map(sorted, parities(ignore_index=0, background=9))) == [[0], [1]]
    for options in ({"background": None}, {"ignore_index": 5, "background": 0}):  # one label for all
        everything = kind(**arguments, **options).split(dataset, 0)
        if kind is Shards:
            assert everything[0].tolist() in ([*range(10)], [*range(10, 20)])
        else:
            assert any(len({index % 2 for index in indices.tolist()}) == 2 for indices in everything.values())
    first, _ = kind(**arguments, label_fn=lambda sample: int(sample[1][0, 3] == 5)).split(dataset, 0).values()
    assert len({index % 2 for index in first.tolist()}) == 1


def test_by_group_names_its_clients():
    dataset = TensorDataset(torch.arange(6))
    dataset.groups = ["b", "a", "b", "c", "a", "b"]
    dataset.video = torch.tensor([10, 2, 10, 2, 2, 10])
    split = ByGroup().split(dataset, 0)
    assert {client: indices.tolist() for client, indices in split.items()} == {"a": [1, 4], "b": [0, 2, 5], "c": [3]}
    assert all(type(client) is str for client in split)
    split = ByGroup("video").split(dataset, 0)
    assert {client: indices.tolist() for client, indices in split.items()} == {2: [1, 3, 4], 10: [0, 2, 5]}
    assert all(type(client) is int for client in split)
    assert same(ByGroup("video").split(dataset, 1), split)
    assert list(ByGroup(lambda sample: int(sample[0]) % 2).split(dataset, 0)) == [0, 1]
    assert list(ByGroup(np.array([1, 1, 3, 3, 3, 3])).split(dataset, 0)) == [1, 3]
    assert ByGroup("video").split(Subset(dataset, [5, 1]), 0).keys() == {2, 10}


def test_by_group_on_real_writers():
    path = DATA / "femnist" / "femnist_writers.npz"
    if not path.exists():
        pytest.skip(f"needs the FEMNIST sample at {path}")
    with np.load(path) as file:
        is_train = file["split"] == 0
        labels, writers = file["label"][is_train], file["writer"][is_train]
        names = file["writer_names"][writers]
    dataset = TensorDataset(torch.zeros(labels.size, 1), torch.from_numpy(labels))
    dataset.groups, dataset.names = writers, names
    split = ByGroup().split(dataset, 0)
    assert list(split) == list(range(105))
    sizes = [indices.size for indices in split.values()]
    assert (min(sizes), int(np.median(sizes)), max(sizes), sum(sizes)) == (3, 151, 165, 14_626)
    assert all((writers[indices] == client).all() for client, indices in split.items())
    by_name = ByGroup("names").split(dataset, 0)
    assert {names[indices[0]] for indices in by_name.values()} == set(by_name) == set(names.tolist())
    # 62 real, unbalanced classes
    split = Dirichlet(50, 0.1).split(dataset, 0)
    assert min(indices.size for indices in split.values()) >= 10
    assert np.array_equal(np.sort(np.concatenate(list(split.values()))), np.arange(14_626))
    counts = {np.unique(labels[indices]).size for indices in LabelsPerClient(100, 3).split(dataset, 0).values()}
    assert counts == {3}


IMAGE = torch.arange(2 * 3 * 4.0).reshape(2, 3, 4)
Pair = namedtuple("Pair", "image label")


def test_permutation_is_that_of_the_reference_on_every_channel():
    permuted = PixelPermutation(client=2, seed=5)(IMAGE)
    order = pixel_permutation(12, 2, 5)
    assert np.array_equal(permuted, references.permuted_pixels_reference(IMAGE.numpy(), order))
    inverse = torch.from_numpy(np.argsort(order))
    assert torch.equal(permuted.flatten(1)[:, inverse].reshape(IMAGE.shape), IMAGE)
    assert not torch.equal(permuted, IMAGE)


@pytest.mark.parametrize(
    ("sample", "image_of"),
    [
        ((IMAGE, 3), lambda s: s[0]),
        ([IMAGE, 3, "x"], lambda s: s[0]),
        (Pair(IMAGE, 3), lambda s: s.image),
        ({"label": 3, "image": IMAGE}, lambda s: s["image"]),
        ({"pixels": IMAGE, "label": 3}, lambda s: s["pixels"]),
        (IMAGE, lambda s: s),
    ],
)
def test_permutation_of_every_kind_of_sample(sample, image_of):
    original = IMAGE.clone()
    change = PermutedPixels(IID(4)).transform(client=1, seed=0)
    changed = change(sample)
    assert type(changed) is type(sample)
    assert torch.equal(image_of(changed), change(IMAGE))
    assert torch.equal(IMAGE, original)
    assert image_of(sample) is IMAGE
    if isinstance(sample, dict):
        assert list(changed) == list(sample)
        assert changed["label"] == 3
    elif not isinstance(sample, torch.Tensor):
        assert changed[1:] == sample[1:]


def test_permutation_of_other_shapes_and_types():
    change = PixelPermutation(0, 0)
    plane = IMAGE[0]
    assert torch.equal(change(plane), change(IMAGE)[0])
    assert torch.equal(change(plane.flatten()), change(plane).flatten())
    assert change(IMAGE.to(torch.uint8)).dtype == torch.uint8
    assert torch.equal(change(IMAGE.to(torch.uint8)).float(), change(IMAGE))
    large = torch.rand(3, 20, 30)  # each number of pixels has a separate permutation
    assert torch.equal(change(large).flatten(1).sort().values, large.flatten(1).sort().values)
    for wrong in ((np.zeros((2, 2)), 1), "x", {}, torch.tensor(1.0)):
        with pytest.raises(TypeError, match=r"Expected the input of a sample to be a tensor of shape \(\.\.\., H, W\)"):
            change(wrong)


def test_permutations_belong_to_client_and_seed():
    partition = PermutedPixels(IID(50))
    image = torch.arange(784.0).reshape(1, 28, 28)
    changed = [partition.transform(client, SEED)(image) for client in range(50)]
    assert len({tuple(image.flatten().tolist()) for image in changed}) == 50
    assert torch.equal(partition.transform(3, SEED)(image), changed[3])  # for training and test data
    assert not torch.equal(partition.transform(3, SEED + 1)(image), changed[3])
    assert torch.equal(PermutedPixels(IID(50), seed=SEED).transform(3, 0)(image), changed[3])
    again = pickle.loads(pickle.dumps(partition.transform(3, SEED)))
    assert torch.equal(again(image), changed[3])
    by_name = [PermutedPixels(ByGroup()).transform(name, SEED)(image) for name in ("even", "odd", "even")]
    assert torch.equal(by_name[0], by_name[2])
    assert not torch.equal(by_name[0], by_name[1])


def test_clients_of_permuted_pixels_are_those_of_the_other_partition():
    inner = LabelsPerClient(2, 2, "even")
    assert same(PermutedPixels(inner).split(DATASET, SEED), inner.split(DATASET, SEED))
    with pytest.raises(TypeError, match="Expected `partition` to be a Partition object"):
        PermutedPixels(3)


class Changed(torch.utils.data.Dataset):  # importable for worker processes without fork: Python 3.14, macOS
    def __init__(self, change):
        self.change = change

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.change((IMAGE + index, index))


def test_permutation_in_worker_processes():
    change = PermutedPixels(IID(2)).transform(1, 0)
    (images, _), *_ = DataLoader(Changed(change), batch_size=4, num_workers=1)
    assert torch.equal(images[2], change(IMAGE + 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: IID(0), "Expected `num_clients` to be at least 1, but got 0."),
        (lambda: IID(2, seed=-3), "Expected `seed` to be at least 0, but got -3."),
        (lambda: Dirichlet(0, 1), "Expected `num_clients` to be at least 1, but got 0."),
        (lambda: Dirichlet(2, -1), "Expected `alpha` to be greater than 0, but got -1."),
        (lambda: Dirichlet(2, 0), "Expected `alpha` to be greater than 0, but got 0."),
        (lambda: Dirichlet(2, float("nan")), "Expected `alpha` to be greater than 0, but got nan."),
        (lambda: Dirichlet(2, -1, "per_client"), "Expected `alpha` to be at least 0, but got -1."),
        (lambda: Dirichlet(2, 1, "x"), "Expected `definition` to be one of ['per_class', 'per_client'], but got 'x'."),
        (lambda: Dirichlet(2, 1, min_size=-1), "Expected `min_size` to be at least 0, but got -1."),
        (lambda: Dirichlet(2, 1, "per_client", balance=True), "Expected `balance` with definition='per_class' only"),
        (
            lambda: Dirichlet(2, 1, prior="uniform"),
            "Expected `prior` with definition='per_client' only, but got 'uniform'",
        ),
        (lambda: IID(2.5), "Expected `num_clients` to be a whole number, but got 2.5."),
        (lambda: Shards(2, 0), "Expected `shards_per_client` to be at least 1, but got 0."),
        (lambda: LabelsPerClient(2, 0), "Expected `labels_per_client` to be at least 1, but got 0."),
        (
            lambda: LabelsPerClient(2, 1, "all"),
            "Expected `assignment` to be one of ['random', 'even', 'consecutive'], but got 'all'.",
        ),
        (lambda: LabelsPerClient(2, 1, sigma=-1), "Expected `sigma` to be at least 0 and finite, but got -1."),
        (lambda: LabelsPerClient(2, 1, min_per_label=-1), "Expected `min_per_label` to be at least 0, but got -1."),
        (lambda: QuantitySkew(2, 0), "Expected `beta` to be greater than 0, but got 0."),
        (lambda: QuantitySkew(2, sigma=-1), "Expected `sigma` to be at least 0 and finite, but got -1."),
        (
            lambda: QuantitySkew(2, distribution="x"),
            "`distribution` to be one of ['dirichlet', 'lognormal'], but got 'x'.",
        ),
        (lambda: QuantitySkew(2, min_size=-1), "Expected `min_size` to be at least 0, but got -1."),
        (lambda: PermutedPixels(IID(2), seed=-1), "Expected `seed` to be at least 0, but got -1."),
        (lambda: ByGroup(seed=-1), "Expected `seed` to be at least 0, but got -1."),
        (lambda: LabelsPerClient(2, 5).split(DATASET, 0), "Expected `labels_per_client` to be from 1 to"),
        (lambda: Dirichlet(604, 0.1).split(DATASET, 0), "Expected `num_clients` to be at most"),
    ],
)
def test_errors_name_the_argument_and_its_value(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - compared below
        call()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("IID", {"num_clients": 3}, "IID(num_clients=3)"),
        ("Dirichlet", {"num_clients": 3, "alpha": "0.1"}, "Dirichlet(num_clients=3, alpha=0.1)"),
        (
            "Dirichlet",
            {"num_clients": 3, "alpha": ".inf", "definition": "per_client", "background": None},
            "Dirichlet(num_clients=3, alpha=inf, definition='per_client', background=None)",
        ),
        ("Shards", {"num_clients": 3, "shards_per_client": 4}, "Shards(num_clients=3, shards_per_client=4)"),
        (
            "LabelsPerClient",
            {"num_clients": 3, "labels_per_client": 2},
            "LabelsPerClient(num_clients=3, labels_per_client=2)",
        ),
        (
            "LabelsPerClient",
            {"num_clients": 3, "labels_per_client": 2, "assignment": "even"},
            "LabelsPerClient(num_clients=3, labels_per_client=2, assignment='even')",
        ),
        (
            "QuantitySkew",
            {"num_clients": 3, "distribution": "lognormal"},
            "QuantitySkew(num_clients=3, distribution='lognormal')",
        ),
        (
            "PermutedPixels",
            {"partition": {"class_path": "IID", "init_args": {"num_clients": 3}}, "seed": 1},
            "PermutedPixels(partition=IID(num_clients=3), seed=1)",
        ),
        ("ByGroup", {}, "ByGroup()"),
        ("ByGroup", {"group": "video"}, "ByGroup(group='video')"),
        ("ByGroup", {"group": [1, 2]}, "ByGroup(group=[1, 2])"),
    ],
)
def test_partitions_are_configured_from_text(name, arguments, expected):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--partition", type=Partition | None)
    config = parser.parse_object({"partition": {"class_path": f"lightning_fed.data.{name}", "init_args": arguments}})
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name until 4.49
    assert repr(instantiate(config).partition) == expected


def test_wrong_choice_in_text_is_refused():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--partition", type=Partition)
    with pytest.raises(Exception, match="definition"):
        parser.parse_args(
            ["--partition=Dirichlet", "--partition.num_clients=3", "--partition.alpha=1", "--partition.definition=x"]
        )


@pytest.mark.parametrize(
    "dataset", [[(torch.ones(2), "ann")] * 6, [torch.ones(2)] * 6, TensorDataset(torch.ones(6, 2)), [{"x": 1}] * 6]
)
@pytest.mark.parametrize("partition", [Dirichlet(3, 0.5), Shards(3), LabelsPerClient(3, 1)])
def test_data_without_labels(partition, dataset):
    words = rf"^`{type(partition).__name__}` needs labels, but found none: use `IID\(3\)`, or add labels\. Expected "
    with pytest.raises(TypeError, match=words):
        partition.split(dataset, 0)


def test_the_element_that_is_read_is_named(caplog):
    speech = [(torch.ones(2), 16_000 + index % 2, "yes", "ann", index) for index in range(40)]
    with caplog.at_level("INFO", "lightning_fed"):
        Dirichlet(2, 1.0).split(speech, 0)
    assert "The label of a sample is the second of its 5 elements (a int)" in caplog.text


@pytest.mark.parametrize("size", [8, 12, 35])
def test_a_small_set_is_split_without_a_word_of_a_smallest_size(size):
    dataset = TensorDataset(torch.ones(size, 1), torch.arange(size) % 2)
    for partition in (Dirichlet(3, 0.5), QuantitySkew(3)):
        assert min(map(len, partition.split(dataset, 0).values())) >= 1
    with pytest.raises(PartitionError, match=rf"^Expected `num_clients` to be at most .* \({size}\), but got 40\."):
        Dirichlet(40, 0.5).split(dataset, 0)
