"""Clients with different appearance: every step against numpy, one draw per client, fixed noise per image."""

import pickle

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter1d
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.data import IID, ByGroup, Dirichlet, ImageLook, Look, PartitionedData, PermutedPixels
from lightning_fed.data.population import PlannedVisit
from lightning_fed.datasets import Shapes
from lightning_fed.partitions.loader_split import split_loader
from lightning_fed.server.schedule import Visit

IMAGE = torch.rand(3, 6, 7, generator=torch.Generator().manual_seed(0))
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def contrast(image):
    return np.clip(0.5 + 1.7 * (image - 0.5), 0, 1)


def gains(image):
    return np.clip(image * np.array([0.5, 1.5, 1.0])[:, None, None], 0, 1)


def blur(image):
    for axis in (1, 2):
        image = gaussian_filter1d(image, 1.3, axis=axis, mode="nearest", radius=4)
    return image


STEPS = {
    "contrast": (ImageLook(contrast=1.7), contrast),
    "gains": (ImageLook(gains=(0.5, 1.5, 1.0)), gains),
    "negative": (ImageLook(is_negative=True), lambda image: 1 - image),
    "blur": (ImageLook(blur=1.3), blur),
    "all": (
        ImageLook(1.7, (0.5, 1.5, 1.0), 1.3, 0.0, True),
        lambda image: blur(1 - contrast(gains(image))),
    ),
    "none": (ImageLook(), lambda image: image),
}


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize(("look", "reference"), STEPS.values(), ids=STEPS)
def test_steps_are_those_of_numpy(look, reference, is_normalised):
    expected = torch.from_numpy(reference(IMAGE.double().numpy())).float()
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    image = IMAGE
    if is_normalised:
        look, image, expected = (
            ImageLook(**{**vars(look), "mean": MEAN, "std": STD}),
            (IMAGE - mean) / std,
            (expected - mean) / std,
        )
    changed, target = look((image, 5))
    assert target == 5
    assert changed.dtype == torch.float32
    assert torch.allclose(changed, expected, atol=2e-5)
    # the input does not change
    assert torch.equal(IMAGE, torch.rand(3, 6, 7, generator=torch.Generator().manual_seed(0)))


def test_noise_is_of_the_image_and_the_client():
    look, image = ImageLook(noise=0.1, seed=3), torch.full((3, 40, 40), 0.5)
    noise = look(image) - 0.5
    assert float(noise.std()) == pytest.approx(0.1, rel=0.05)
    state = torch.get_rng_state()
    assert torch.equal(look(image) - 0.5, noise)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(ImageLook(noise=0.1, seed=4)(image) - 0.5, noise)
    assert not torch.allclose(look(image + 0.01) - 0.51, noise, atol=1e-3)


def test_bytes_stay_bytes_and_grey_images_have_one_gain():
    image = torch.tensor([[[0, 100, 255]]], dtype=torch.uint8)
    assert ImageLook(is_negative=True)(image).tolist() == [[[255, 155, 0]]]
    assert ImageLook(gains=(0.5, 9.0, 9.0))(image).tolist() == [[[0, 50, 128]]]
    assert ImageLook(gains=(0.5, 9.0, 9.0))(image[0].float() / 255).shape == (1, 3)


def test_looks_are_drawn_once_per_client():
    looks = Look(IID(6), contrast=1.0, colour=0.5, blur=2.0, noise=0.1, polarity=0.5)
    drawn = [looks.change(client, seed=1) for client in range(6)]
    assert drawn == [looks.change(client, seed=1) for client in range(6)]
    assert pickle.loads(pickle.dumps(looks)).change(3, 1) == drawn[3]
    assert len({look.contrast for look in drawn}) == 6
    assert all(0.5 <= look.contrast <= 2 and 0 <= look.blur <= 2 and 0 <= look.noise <= 0.1 for look in drawn)
    assert all(1 / 1.5 <= gain <= 1.5 for look in drawn for gain in look.gains)
    assert [look.is_negative for look in drawn] == [False, True] * 3
    assert looks.change(0, 2) != drawn[0]
    assert Look(IID(6), contrast=1.0, seed=1).change(0, 99).contrast == drawn[0].contrast  # another strength, same draw
    assert Look(IID(6)).change(0, 1)((IMAGE, 0))[0].equal(IMAGE)
    named = [Look(ByGroup(), polarity=0.5).change(f"hospital {n}", 0).is_negative for n in range(400)]
    assert 160 < sum(named) < 240  # half, to four standard deviations


def test_each_client_trains_and_is_evaluated_on_its_own_look():
    shapes = Shapes(num_train=24, num_val=0, num_test=4, image_size=16)
    looks = Look(IID(3), polarity=0.5, mean=0.47, std=0.22)
    plain, negative = (PartitionedData(shapes, partition, val_fraction=0.25) for partition in (IID(3), looks))
    for data in (plain, negative):
        data.setup("fit")
    for client in range(3):
        sign = -1 if client == 1 else 1
        offset = 0.0 if client != 1 else (1 - 2 * 0.47) / 0.22
        for one, other in ((plain.clients, negative.clients), (plain.val, negative.val)):
            for (x, mask), (y, same_mask) in zip(one[client], other[client], strict=True):
                assert torch.allclose(sign * x + offset, y, atol=1e-5)
                assert torch.equal(mask, same_mask)


def test_it_comes_after_the_other_partitions_transform():
    dataset = TensorDataset(torch.rand(8, 1, 4, 4), torch.arange(8))
    inner = PermutedPixels(IID(2))
    partition = Look(inner, polarity=1.0)
    population = split_loader(DataLoader(dataset, 4), partition, 0)
    (batch,) = population.stream([PlannedVisit(Visit(1, 0, 0), 4, 1)])
    expected = [1 - inner.transform(1, 0)(dataset[int(label)])[0] for label in batch.batch[1]]
    assert torch.allclose(batch.batch[0], torch.stack(expected))
    assert repr(partition) == "Look(partition=PermutedPixels(partition=IID(num_clients=2)), polarity=1.0)"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Look(4), TypeError, r"`partition` to be a Partition object .*, but got 4"),
        (lambda: Look(IID(2), blur=-1), ValueError, "`blur` to be at least 0 and finite, but got -1"),
        (lambda: Look(IID(2), contrast=float("inf")), ValueError, "`contrast` to be at least 0 and finite"),
        (lambda: Look(IID(2), polarity=2), ValueError, r"`polarity` to be in \[0, 1\], but got 2"),
        (lambda: ImageLook()(torch.tensor([[[-1.5, 1.0]]])), ValueError, "from -1.5 to 1: pass the `mean` and `std`"),
        (lambda: ImageLook()(torch.zeros(1, 2, 2, dtype=torch.int64)), ValueError, "or of uint8, but got torch.int64"),
        (lambda: ImageLook()((np.zeros((2, 2)), 0)), TypeError, "a tensor of shape .*, but got ndarray"),
    ],
)
def test_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_split_is_the_other_partitions():
    dataset = TensorDataset(torch.rand(90, 1, 2, 2), torch.arange(90) % 3)
    inner = Dirichlet(3, 0.5)
    split = Look(inner, contrast=1.0).split(dataset, 4)
    assert all(np.array_equal(split[client], indices) for client, indices in inner.split(dataset, 4).items())
