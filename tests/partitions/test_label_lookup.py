import logging
import random
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset, random_split

from lightning_fed.partitions.label_lookup import groups_of, labels_of
from tests import references

CLASSES = [3, 0, 2, 2, 1, 0]
MASKS = np.random.default_rng(0).choice([0, 1, 2, 3, 255], size=(6, 5, 7), p=[0.3, 0.2, 0.1, 0.1, 0.3]).astype(np.uint8)
MASKS[4] = 0  # only background
MASKS[5] = np.where(MASKS[5] > 0, 255, 0)  # background and void
DOMINANT = [references.dominant_class_reference(mask, 255, 0) for mask in MASKS]


class Samples(Dataset):
    """Returns the given samples, and counts the requests."""

    def __init__(self, samples, **attributes):
        self.samples = samples
        self.reads = []
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads.append(index)
        return self.samples[index]


def unreadable(**attributes):
    return Samples([None] * 6, **attributes)


def assert_labels(labels, expected):
    assert isinstance(labels, np.ndarray)
    assert labels.dtype == np.int64
    assert labels.tolist() == expected


@pytest.mark.parametrize("name", ["targets", "labels"])
@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda y: torch.tensor(y, dtype=torch.uint8),
        lambda y: torch.tensor(y, dtype=torch.float32),
        lambda y: np.array(y)[:, None],
        lambda y: [torch.tensor(label) for label in y],
        lambda y: [np.int16(label) for label in y],
    ],
)
def test_class_labels_from_an_attribute(name, convert):
    dataset = unreadable(**{name: convert(CLASSES)})
    assert_labels(labels_of(dataset), CLASSES)
    assert dataset.reads == []


@pytest.mark.parametrize(
    "convert",
    [
        np.array,
        torch.from_numpy,
        lambda m: torch.from_numpy(m).long()[:, None],
        lambda m: m[..., None],
        lambda m: m.astype(np.float32),
        list,
        lambda m: [Image.fromarray(mask) for mask in m],
    ],
)
def test_dominant_class_of_masks(convert):
    dataset = unreadable(targets=convert(MASKS))
    assert_labels(labels_of(dataset), DOMINANT)
    assert dataset.reads == []
    assert DOMINANT[4:] == [0, 0]
    assert len(set(DOMINANT)) > 2


@pytest.mark.parametrize(("ignore_index", "background"), [(3, 1), (255, 2), (0, 255)])
def test_dominant_class_options(ignore_index, background):
    expected = [references.dominant_class_reference(mask, ignore_index, background) for mask in MASKS]
    assert_labels(labels_of(unreadable(targets=MASKS), ignore_index=ignore_index, background=background), expected)
    assert expected != DOMINANT


def test_dominant_class_without_background_or_void():
    masks = np.array([[[0, 0, 0, 1, 255, 255]], [[255, 255, 255, 255, 255, 1]], [[255] * 6]])
    assert_labels(labels_of(Samples([0] * 3, targets=masks)), [1, 1, 0])
    assert_labels(labels_of(Samples([0] * 3, targets=masks), background=None), [0, 1, 255])
    assert_labels(labels_of(Samples([0] * 3, targets=masks), ignore_index=None), [255, 255, 255])
    assert_labels(labels_of(Samples([0] * 3, targets=masks), ignore_index=None, background=None), [0, 255, 255])


def test_dominant_class_takes_the_smaller_of_two_equals_and_any_ignore_index():
    masks = torch.tensor([[[4, 2, 2, 4, -100, -100, -100]], [[2**40, 2**40, 5, 0, 0, 0, -100]]])
    assert_labels(labels_of(Samples([0] * 2, targets=masks), ignore_index=-100), [2, 2**40])
    assert_labels(labels_of([(0, np.array([[2**40, 2**40, 5, 0]]))]), [2**40])
    with pytest.raises(ValueError, match=r"at least 0, except `ignore_index` \(255\), but got -100"):
        labels_of(Samples([0] * 2, targets=masks))


def test_subset_and_concatenation_are_looked_through():
    first, second = unreadable(targets=CLASSES), unreadable(labels=torch.tensor(CLASSES) + 10)
    joined = ConcatDataset([first, Subset(second, [5, 3, -1]), TensorDataset(torch.rand(2, 3), torch.tensor([7, 8]))])
    assert_labels(labels_of(joined), [*CLASSES, 10, 12, 10, 7, 8])
    assert_labels(labels_of(Subset(joined, [10, 0, 6, 2, 0])), [8, 3, 10, 2, 3])
    assert_labels(labels_of(Subset(joined, [-1, -11, -5])), [8, 3, 10])
    assert_labels(labels_of(Subset(Subset(joined, range(5, 11)), torch.tensor([4, 1]))), [7, 10])
    assert first.reads == second.reads == []
    part, _ = random_split(first, [4, 2], generator=torch.Generator().manual_seed(0))
    assert_labels(labels_of(part), [CLASSES[index] for index in part.indices])
    assert_labels(labels_of(Subset(joined, [])), [])


def test_only_the_samples_of_a_subset_are_read():
    dataset = Samples([(torch.rand(2), label) for label in CLASSES])
    assert_labels(labels_of(Subset(dataset, [4, 1])), [1, 0])
    assert dataset.reads == [4, 1]


def test_tensor_dataset():
    x, y = torch.rand(6, 1, 4, 4), torch.tensor(CLASSES)
    assert_labels(labels_of(TensorDataset(x, y)), CLASSES)
    assert_labels(labels_of(TensorDataset(x, torch.from_numpy(MASKS))), DOMINANT)
    assert_labels(labels_of(TensorDataset(x, y, torch.arange(6))), CLASSES)  # (input, label, index)

    class Shifted(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x, y + 1

    assert_labels(labels_of(Shifted(x, y)), [label + 1 for label in CLASSES])


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    "make",
    [
        lambda y: (torch.rand(2), y),
        lambda y: [torch.rand(2), torch.tensor(y)],
        lambda y: Pair(torch.rand(2), np.int64(y)),
        lambda y: (torch.rand(2), y, {"writer": 3}),
        lambda y: (torch.rand(2), y, 99),
        lambda y: {"image": torch.rand(2), "label": y},
        lambda y: {"x": torch.rand(2), "labels": torch.tensor([y])},
        lambda y: {"target": float(y)},
    ],
)
def test_reading_class_labels_from_samples(make, caplog):
    dataset = Samples([make(label) for label in CLASSES])
    with caplog.at_level(logging.INFO, "lightning_fed"):
        assert_labels(labels_of(dataset), CLASSES)
    assert "Reading 6 samples of Samples to find their labels" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda mask: (torch.rand(3, 5, 7), torch.from_numpy(mask)),
        lambda mask: (torch.rand(3, 5, 7), mask[None].astype(np.float32)),
        lambda mask: (Image.new("RGB", (7, 5)), Image.fromarray(mask)),
        lambda mask: {"image": torch.rand(3, 5, 7), "mask": torch.from_numpy(mask).long()},
        lambda mask: (torch.rand(3, 5, 7), torch.from_numpy(mask).float(), 4),
    ],
)
def test_reading_masks_from_samples(make):
    assert_labels(labels_of(Samples([make(mask) for mask in MASKS])), DOMINANT)


@pytest.mark.parametrize(
    "targets",
    [
        [f"{number}.xml" for number in range(6)],
        [["a.png", "b.png"]] * 6,
        CLASSES[:3],
        np.random.default_rng(0).random((6, 4)),
        [None] * 6,
        len,
        "abcdef",
        [{"boxes": 1}] * 6,
    ],
)
def test_an_attribute_that_holds_no_labels_is_passed_over(targets):
    assert_labels(labels_of(Samples([(0, label) for label in CLASSES], targets=targets)), CLASSES)


def test_label_fn_overrides_everything():
    dataset = Samples([(torch.tensor([i, 2 * i]), 0) for i in range(6)], targets=[9] * 6)
    assert_labels(labels_of(dataset, lambda sample: sample[0][1]), [0, 2, 4, 6, 8, 10])
    assert_labels(labels_of(Subset(dataset, [5, 1]), lambda sample: int(sample[0][0])), [5, 1])

    class Renamed(Subset):
        def __getitem__(self, index):
            return {"x": super().__getitem__(index)[0]}

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    # The function gets the outermost data set's samples.
    assert_labels(labels_of(Renamed(dataset, [5, 1]), lambda sample: sample["x"][0]), [5, 1])
    with pytest.raises(TypeError, match=r"Expected labels to be all numbers or all strings, but got .*b'a'"):
        labels_of(dataset, lambda sample: b"a")


def test_random_augmentation_is_repeated_and_leaves_the_global_generators_alone():
    class Augmented(Samples):
        def __getitem__(self, index):
            draw = random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002
            return 0, int(1000 * draw)

    dataset = Augmented([0] * 6)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    first = labels_of(dataset)
    groups_of(dataset, lambda sample: sample[1])
    with pytest.raises(ZeroDivisionError):
        labels_of(dataset, lambda sample: 1 // 0)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected  # noqa: NPY002
    assert np.array_equal(labels_of(dataset), first)
    assert np.array_equal(labels_of(dataset, lambda sample: sample[1]), first)
    assert len(set(first.tolist())) > 1


class Stream(IterableDataset):
    def __iter__(self):
        yield 0, 1

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [
        (Stream(), TypeError, "Expected a data set with `__len__` and `__getitem__` (map-style), but got Stream:"),
        (object(), TypeError, "(map-style), but got object:"),
        (Samples([torch.rand(2)]), TypeError, "but got Tensor of shape (2,) and type torch.float32. Pass `label_fn`"),
        (Samples([(1,)]), TypeError, "'y', 'mask', but got tuple of length 1. Pass `label_fn`"),
        (Samples([{"x": 1}]), TypeError, "'label', 'labels', 'target', 'y', 'mask', but got dict of length 1."),
        (Samples([{"x": 1}]), TypeError, "The partitions `IID` and `ByGroup` need no labels."),
        (
            Samples([(0, {"boxes": []})]),
            TypeError,
            "or a class mask of shape (H, W), (1, H, W) or (H, W, 1), but got dict",
        ),
        (Samples([(0, "cat"), (1, "dog")]), TypeError, "(H, W, 1), but got str"),
        (Samples([(0, np.full(4, 2.0))]), TypeError, "but got ndarray of shape (4,) and type float64."),
        (Samples([(0, torch.zeros(3, 4, 4))]), TypeError, "but got ndarray of shape (3, 4, 4) and type float32."),
        (Samples([(0, Image.new("RGB", (5, 4)))]), TypeError, "but got ndarray of shape (4, 5, 3) and type uint8."),
        (
            Samples([(0, torch.rand(4, 4))]),
            TypeError,
            "Expected a mask of integer classes, but got float32",
        ),
        (Samples([(0, float("nan"))]), ValueError, "Expected labels to be finite, but got nan."),
        (TensorDataset(torch.rand(3, 2)), TypeError, "'mask', but got tuple of length 1."),
        (TensorDataset(torch.rand(3, 2), torch.full((3,), torch.inf)), ValueError, "to be finite, but got inf"),
    ],
)
def test_errors_say_what_was_expected_and_what_came(dataset, kind, message):
    with pytest.raises(kind) as error:
        labels_of(dataset)
    assert message in str(error.value)


class Table:
    """A table like ``datasets.Dataset``: stored columns, formatted rows."""

    def __init__(self, is_formatted=True, **columns):
        self.columns, self.is_formatted = columns, is_formatted
        self.column_names = list(columns)
        self.reads = 0

    def __len__(self):
        return len(self.columns[self.column_names[0]])

    def with_format(self, kind):
        assert kind is None
        return Table(False, **self.columns)

    def __getitem__(self, key):
        if isinstance(key, str):
            assert not self.is_formatted
            return iter(self.columns[key])  # lazy
        self.reads += 1
        return {"pixels": self.columns["image"][key]}


def test_columns_of_a_table():
    table = Table(image=list("abcdef"), label=CLASSES, writer=["x", "y", "x", "z", "z", "z"])
    assert_labels(labels_of(table), CLASSES)
    assert_labels(labels_of(Subset(table, [4, 1])), [CLASSES[4], CLASSES[1]])
    assert groups_of(Subset(table, [4, 1]), "writer").tolist() == ["z", "y"]
    assert table.reads == 0


@pytest.mark.parametrize("key", ["label", "labels", "target", "y", "mask"])
def test_names_of_targets(key):
    assert_labels(labels_of([{"x": 0, key: label} for label in CLASSES]), CLASSES)
    assert_labels(labels_of([SimpleNamespace(x=0, **{key: torch.tensor([label])}) for label in CLASSES]), CLASSES)


def test_attribute_y():
    assert_labels(labels_of(Samples([0] * 6, y=torch.tensor(CLASSES))), CLASSES)


def test_a_text_of_a_function():
    assert_labels(labels_of(Samples(list("dbbd")), lambda sample: sample), [1, 0, 0, 1])


def test_numbers_are_divided_into_bins(caplog):
    """Ten bins of equal size in order, over all parts; integers among the values are not separate labels."""
    values = torch.cat([torch.tensor([4.0]), torch.randn(99, generator=torch.Generator().manual_seed(0))])
    ranks = values.argsort().argsort()
    parts = [TensorDataset(torch.rand(50, 2), part) for part in values.split(50)]
    with caplog.at_level(logging.INFO, "lightning_fed"):
        labels = labels_of(ConcatDataset(parts))
    assert_labels(labels, (ranks // 10).tolist())
    assert "10 bins" in caplog.text
    assert_labels(labels_of([(0, value) for value in values]), (ranks // 10).tolist())


def test_error_names_the_sample():
    with pytest.raises(TypeError) as error:
        labels_of(Subset(Samples([(0, 1), (0, 2), (0, "x")]), [1, 2]))
    assert error.value.__notes__ == ["Raised for sample 2 of Samples."]


def test_other_map_style_data_sets():
    assert_labels(labels_of([(0, label) for label in CLASSES]), CLASSES)
    stacked = StackDataset(image=TensorDataset(torch.rand(6, 2)), label=CLASSES)
    assert_labels(labels_of(stacked), CLASSES)


@pytest.mark.parametrize(
    "values", [["a", "b", "a"], np.array(["a", "b", "a"]), np.array(["a", "b", "a"], dtype=object)]
)
def test_groups_that_are_strings(values):
    for groups in (groups_of([0, 1, 2], values), groups_of(Samples([0, 1, 2], groups=values))):
        assert groups.dtype.kind == "U"
        assert groups.tolist() == ["a", "b", "a"]


@pytest.mark.parametrize(
    "values", [[4, -1, 4], (4, -1, 4), torch.tensor([4, -1, 4]), np.array([4, -1, 4], dtype=np.int16)]
)
def test_groups_that_are_integers(values):
    for groups in (groups_of([0, 1, 2], values), groups_of(Samples([0, 1, 2], writer=values), "writer")):
        assert groups.dtype == np.int64
        assert groups.tolist() == [4, -1, 4]


def test_groups_of_nested_data_sets_and_of_samples():
    first, second = Samples([0, 1, 2], groups=[5, 6, 7]), Samples([3, 4], groups=torch.tensor([5, 9]))
    joined = ConcatDataset([first, second])
    assert groups_of(Subset(joined, [4, 0, 3])).tolist() == [9, 5, 5]
    assert groups_of(Subset(joined, [4, 0]), lambda sample: f"g{sample}").tolist() == ["g4", "g0"]
    assert groups_of(joined, lambda sample: torch.tensor(sample % 2)).tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("dataset", "group", "kind", "message"),
    [
        (
            [0],
            "groups",
            ValueError,
            "Expected the data set to have an attribute or column `groups` with one group per sample, but list",
        ),
        (
            Subset(Samples([0]), [0]),
            "video",
            ValueError,
            "an attribute or column `video` with one group per sample, but Samples has none",
        ),
        ([0, 1], [1], ValueError, "Expected `group` to have one group per sample (2), but got 1."),
        (
            Samples([0], groups=[1, 2]),
            "groups",
            ValueError,
            "`groups` to have one group per sample (1), but got 2.",
        ),
        ([0, 1], [1, "a"], TypeError, "Expected `group` to be all integers or all strings, but got int, str."),
        ([0, 1], [0.5, 1.0], TypeError, "all integers or all strings, but got float."),
        (Stream(), "groups", TypeError, "(map-style), but got Stream:"),
    ],
)
def test_group_errors(dataset, group, kind, message):
    with pytest.raises(kind) as error:
        groups_of(dataset, group)
    assert message in str(error.value)


# --- Uninformative labels ---------------------------------------------------------------------------------------------

HALF_FULL = (torch.arange(6) % 2).reshape(6, 1, 1).repeat(1, 2, 2)
SAYS_NOTHING = {  # tensors, options, log line
    "masks of 0 and 255": ((torch.rand(6, 1), 255 * HALF_FULL), {}, "have the label 0"),
    "masks of void": ((torch.rand(6, 1), torch.full((6, 2, 2), 255)), {"background": None}, "have the label 255"),
    "one label": ((torch.rand(6, 1), torch.full((6,), 3)), {}, "All 6 samples have the label 3"),
    "one text": ((torch.rand(6, 1), torch.zeros(6)), {"label_fn": lambda sample: "a"}, "have the label 0"),
    "unlabelled": ((torch.rand(6, 1), torch.tensor([0, 1, -1, -1, 2, 0])), {}, "2 of 6 samples have a negative label"),
    "only unlabelled": ((torch.rand(6, 1), torch.full((6,), -1)), {}, "6 of 6 samples have a negative label"),
    "two labels": ((torch.rand(6, 1), torch.arange(6) % 2), {}, None),
    "masks of 0 and 1": ((torch.rand(6, 1), HALF_FULL), {}, None),
    "255 counts": ((torch.rand(6, 1), 255 * HALF_FULL), {"ignore_index": None}, None),
    "one sample": ((torch.rand(1, 1), torch.zeros(1)), {}, None),
}


@pytest.mark.parametrize("kind", SAYS_NOTHING)
def test_labels_that_say_nothing_are_named_in_the_log(kind, caplog):
    tensors, options, line = SAYS_NOTHING[kind]
    labels_of(TensorDataset(*tensors), **options)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert not warnings if line is None else any(line in warning for warning in warnings)
