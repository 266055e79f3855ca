"""Clients with annotations for some classes only."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed.data import IID, Look, PartialLabels

MASKS = torch.randint(5, (12, 4, 4), generator=torch.Generator().manual_seed(0))
DATASET = TensorDataset(torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(1)), MASKS)


@pytest.mark.parametrize(("count", "always"), [(1, ()), (2, ()), (2, (0, 3)), (5, ())])
def test_other_classes_are_void(count, always):
    partition = PartialLabels(IID(6), 5, count, always)
    owned = set()
    for client, indices in partition.split(DATASET, 7).items():
        classes = partition.annotated(client, 7)
        assert len(classes) == count + len(always)
        assert set(always) <= set(classes)
        owned |= set(classes)
        transform = partition.transform(client, 7)
        for index in indices:
            image, mask = DATASET[index]
            same_image, changed = transform((image, mask))
            assert same_image is image
            for pixel, before in zip(changed.flatten().tolist(), mask.flatten().tolist(), strict=True):
                assert pixel == (before if before in classes else 255)
    assert owned == set(range(5))  # six clients, five classes
    assert torch.equal(MASKS, torch.randint(5, (12, 4, 4), generator=torch.Generator().manual_seed(0)))


def test_the_choice_is_of_the_seed_and_the_client():
    draws = [PartialLabels(IID(4), 20, 6).annotated(client, seed) for seed in range(3) for client in range(4)]
    assert len(set(draws)) == len(draws)
    assert PartialLabels(IID(4), 20, 6, seed=2).annotated(1, 0) == PartialLabels(IID(4), 20, 6).annotated(1, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_samples_of_other_forms(dtype):
    transform = PartialLabels(IID(2), 2, 1).transform(0, 0)
    mask = torch.tensor([[0, 1]], dtype=dtype)
    assert transform({"image": 1, "mask": mask})["mask"].tolist() == [[0, 255]]
    assert transform([1, mask, "name"])[1:][1] == "name"
    assert transform([1, mask])[1].dtype == dtype


def test_a_mask_for_each_class():
    masks = torch.randint(2, (4, 5, 3, 3), generator=torch.Generator().manual_seed(2))
    masks[0, :, 0, 0] = 255
    partition = PartialLabels(IID(2), 5, 2, mode="multilabel")
    for client in range(2):
        for mask in masks:
            before = mask.clone()
            changed = partition.transform(client, 3)((None, mask))[1]
            for label in range(5):
                expected = before[label] if label in partition.annotated(client, 3) else torch.full((3, 3), 255)
                assert torch.equal(changed[label], expected)
            assert torch.equal(mask, before)


def test_under_a_look():
    partition = Look(PartialLabels(IID(2), 5, 1), polarity=1.0)
    image, mask = partition.transform(0, 0)(DATASET[0])
    assert torch.allclose(image, 1 - DATASET[0][0])
    assert set(mask.unique().tolist()) <= {0, 255}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartialLabels(IID(2), 5, 0), "`classes_per_client` to be at least 1, but got 0"),
        (lambda: PartialLabels(IID(2), 5, 5, (0,)), "at most the 4 classes outside `always`, but got 5"),
        (lambda: PartialLabels(IID(2), 5, 1, (5,)), r"classes from 0 to 4, but got \[5\]"),
        (lambda: PartialLabels(IID(2), 5, 1).transform(0, 0)((1, 2)), "a class mask .*, but got int"),
        (lambda: PartialLabels(IID(2), 5, 1).transform(0, 0)({"image": 2}), "a class mask .*, but got NoneType"),
        (lambda: PartialLabels(IID(2), 5, 1).transform(0, 0)((1, torch.rand(2, 2))), "but got torch.float32 of shape"),
        (lambda: PartialLabels(IID(2), 5, 1, mode="binary"), "`mode` to be .*, but got 'binary'"),
        (
            lambda: PartialLabels(IID(2), 5, 1).transform(0, 0)((1, torch.ones(5, 2, 2, dtype=torch.int64))),
            "contains only 0 and 1. For one mask per class set mode='multilabel'",
        ),
        (
            lambda: PartialLabels(IID(2), 5, 1, mode="multilabel").transform(0, 0)((1, torch.ones(2, 2).long())),
            r"a mask of shape \(5, H, W\) with mode='multilabel', but got \(2, 2\)",
        ),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()
