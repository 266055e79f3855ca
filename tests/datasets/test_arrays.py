"""`ArrayDataset`: three ways to fetch give equal results, as torchvision and `default_collate` do."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_fed.datasets.arrays import ArrayDataset

INDICES = [7, 0, 3, 3, 11]


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def classes(high: int = 10, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, (12,), dtype=dtype, generator=torch.Generator().manual_seed(1))


def shift(size):
    fill = {tv_tensors.Mask: 255, "others": 0}
    return v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(size, padding=2, fill=fill)])


DATASETS = {
    "grey images": lambda: ArrayDataset(images(12, 1, 28, 28), classes(), mean=0.1307, std=0.3081),
    "colour images, classes in a byte": lambda: ArrayDataset(
        images(12, 3, 9, 7), classes(dtype=torch.uint8), mean=(0.49, 0.48, 0.44), std=(0.2, 0.24, 0.26)
    ),
    "images as they are": lambda: ArrayDataset(images(12, 3, 8, 8), classes()),
    "only a mean": lambda: ArrayDataset(images(12, 3, 8, 8), classes(), mean=[0.1, 0.2, 0.3]),
    "masks in a byte": lambda: ArrayDataset(
        images(12, 3, 8, 6), images(12, 8, 6) % 12, mean=[0.1, 0.2, 0.3], std=[0.3, 0.2, 0.1]
    ),
    "augmented masks": lambda: ArrayDataset(
        images(12, 3, 8, 6), images(12, 8, 6) % 12, mean=0.5, std=0.25, augment=shift((8, 6))
    ),
    "augmented classes": lambda: ArrayDataset(
        images(12, 3, 8, 8), classes(), std=0.3, augment=v2.RandomHorizontalFlip()
    ),
    "features": lambda: ArrayDataset(floats(12, 5), classes(), mean=[0.0, 1.0, 2.0, 3.0, 4.0], std=2.0),
    "regression": lambda: ArrayDataset(floats(12, 5), floats(12)),
    "double": lambda: ArrayDataset(floats(12, 5).double(), floats(12, 2).double()),
    "numbers": lambda: ArrayDataset(floats(12), classes(), mean=1.0, std=3.0),
    "tokens": lambda: ArrayDataset(images(12, 20).long(), images(12, 20).long()),
}


def assert_same_bits(first: object, second: object) -> None:
    assert type(first) is list
    assert type(second) is list
    assert len(first) == len(second) == 2
    for left, right in zip(first, second, strict=True):
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
        assert left.is_contiguous()
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", DATASETS)
def test_every_way_to_fetch_gives_the_same_bits(name):
    dataset = DATASETS[name]()
    torch.manual_seed(5)  # the same random numbers for augmentation
    expected = default_collate([dataset[index] for index in INDICES])
    for kind in (list, np.array, torch.tensor):
        torch.manual_seed(5)
        assert_same_bits(dataset.get_batch(kind(INDICES)), expected)
    torch.manual_seed(5)
    assert_same_bits(default_collate(dataset.__getitems__(INDICES)), expected)
    torch.manual_seed(5)
    (loaded,) = DataLoader(dataset, batch_sampler=[INDICES], generator=torch.Generator())
    if dataset.augment is None:
        assert_same_bits(loaded, expected)


def test_augmentation_is_by_sample_in_the_order_asked_for():
    dataset = DATASETS["augmented masks"]()
    torch.manual_seed(5)
    first = dataset.get_batch(INDICES)[0]
    second = dataset.get_batch(INDICES)[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first[2], first[3]), "the same sample twice in a batch is changed twice"


def test_augmentation_comes_before_normalisation():
    dataset = ArrayDataset(
        images(2, 3, 4, 4), classes()[:2], mean=0.5, std=0.5, augment=lambda image, label: (image * 0, label + 1)
    )
    image, label = dataset[0]
    assert torch.equal(image, torch.full((3, 4, 4), -1.0))
    assert label == classes()[0] + 1
    assert torch.equal(dataset.get_batch([0, 1])[0], torch.full((2, 3, 4, 4), -1.0))


def test_normalisation_is_that_of_torchvision():
    transforms = pytest.importorskip("torchvision.transforms")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    stored = images(12, 3, 16, 16)
    pipeline = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    expected = torch.stack([pipeline(image.permute(1, 2, 0).numpy()) for image in stored])
    inputs, _ = ArrayDataset(stored, classes(), mean=mean, std=std).get_batch(range(12))
    assert torch.equal(inputs, expected)


def test_types_in_memory_and_handed_out():
    masks = ArrayDataset(images(12, 3, 8, 6), images(12, 8, 6))
    assert masks.inputs.dtype == masks.targets.dtype == torch.uint8
    assert masks[0][0].dtype == torch.float32
    assert masks[0][1].dtype == masks.get_batch([0])[1].dtype == torch.int64
    assert 0.0 <= masks.get_batch(range(12))[0].min() < masks.get_batch(range(12))[0].max() == 1.0
    assert ArrayDataset(images(12, 1, 2, 2), classes(dtype=torch.int32)).targets.dtype == torch.int64


def test_fetching_leaves_the_stored_data_as_they_are():
    dataset = DATASETS["features"]()
    before = dataset.inputs.clone()
    dataset.get_batch(INDICES)
    dataset[0][0].add_(1)
    assert torch.equal(dataset.inputs, before)


def test_subset_keeps_order_groups_and_options():
    dataset = ArrayDataset(
        images(12, 3, 8, 6),
        classes(),
        groups=np.array([f"w{i // 4}" for i in range(12)]),
        mean=[0.1, 0.2, 0.3],
        std=[0.3, 0.2, 0.1],
        augment=v2.RandomHorizontalFlip(),
    )
    part = dataset.subset(INDICES)
    assert part.groups.tolist() == ["w1", "w0", "w0", "w0", "w2"]
    assert part.targets.tolist() == dataset.targets[INDICES].tolist()
    torch.manual_seed(0)
    expected = dataset.get_batch(INDICES)
    torch.manual_seed(0)
    assert_same_bits(part.get_batch(range(5)), expected)


def test_it_is_a_sequence_and_travels_to_workers():
    dataset = DATASETS["grey images"]()
    assert len(dataset) == 12
    assert len(list(dataset)) == 12  # iteration ends at the IndexError
    assert torch.equal(dataset[-1][0], dataset[11][0])
    assert_same_bits(pickle.loads(pickle.dumps(dataset)).get_batch(INDICES), dataset.get_batch(INDICES))
    with pytest.raises(IndexError):
        dataset.get_batch([12])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": classes()[:5]}, "one target for each of the 12 inputs, but got 5"),
        ({"groups": np.zeros(5)}, r"`groups` to have shape \(12,\), but got \(5,\)"),
        ({"mean": [0.1, 0.2]}, "`mean` to be one number or 3, one per channel, but got 2"),
        ({"std": [0.1, 0.0, 0.2]}, "Expected `std` without zeros"),
        ({"inputs": images(12, 5).long(), "mean": 0.5}, "no `mean` for inputs of type torch.int64"),
    ],
)
def test_bad_input_is_named(options, message):
    arguments = {"inputs": images(12, 3, 4, 4), "targets": classes(), **options}
    with pytest.raises(ValueError, match=message):
        ArrayDataset(arguments.pop("inputs"), arguments.pop("targets"), **arguments)


def test_masks_follow_their_image():
    """Any torchvision transform moves image and mask together, and returns plain tensors."""
    rows, columns = torch.meshgrid(torch.arange(1, 7), torch.arange(1, 9), indexing="ij")
    mask = 10 * rows + columns
    dataset = ArrayDataset(100.0 + mask[None, None], mask[None], augment=shift((6, 8)))
    torch.manual_seed(0)
    seen = set()
    for _ in range(200):
        image, moved = dataset[0]
        assert type(image) is type(moved) is torch.Tensor
        labelled = moved != 255
        assert torch.equal(image[0][labelled].long(), 100 + moved[labelled])
        assert (image[0][~labelled] == 0).all()
        assert image.shape == (1, 6, 8)
        middle = moved[3, 3:5]
        seen.add((bool(middle[1] > middle[0]), int(middle.min())))
    assert len(seen) == 2 * 5 * 5, "every shift with and without mirroring"


def test_classes_stay_when_images_change():
    dataset = ArrayDataset(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([4]), augment=v2.RandomHorizontalFlip(1.0))
    for image, label in (dataset[0], [part[0] for part in dataset.get_batch([0])]):
        assert image.tolist() == [[[2.0, 1.0]]]
        assert label.item() == 4
