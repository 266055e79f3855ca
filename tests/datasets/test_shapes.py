"""`Shapes`: drawing, dependence on options, and classes that require form and texture, not colour."""

import numpy as np
import pytest
import torch

from lightning_fed.datasets.shapes import Shapes, ShapesDataset

SIZE = 32


@pytest.fixture(scope="module")
def scenes():
    return ShapesDataset(400, image_size=SIZE)


def test_counts_types_and_classes(scenes):
    assert scenes.inputs.shape == (400, 3, SIZE, SIZE)
    assert scenes.targets.shape == (400, SIZE, SIZE)
    assert scenes.inputs.dtype == scenes.targets.dtype == torch.uint8
    assert scenes.targets.unique().tolist() == [0, 1, 2, 3, 4, 5]
    image, mask = scenes[0]
    assert (image.dtype, mask.dtype) == (torch.float32, torch.int64)
    batch, _ = scenes.get_batch(range(400))
    assert batch.mean((0, 2, 3)).abs().max() < 0.1
    assert (batch.std((0, 2, 3)) - 1).abs().max() < 0.1
    share = np.bincount(scenes.targets.flatten().numpy()) / scenes.targets.numel()
    assert 0.7 < share[0] < 0.85
    assert share[1:].min() > 0.6 * share[1:].max(), "the classes cover about equal areas"


def test_a_scene_depends_on_seed_split_and_index_only(scenes):
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    few = ShapesDataset(7, image_size=SIZE)
    assert torch.equal(few.inputs, scenes.inputs[:7])
    assert torch.equal(few.targets, scenes.targets[:7])
    # Nor does the form of the targets matter.
    assert torch.equal(ShapesDataset(7, image_size=SIZE, task="classification").inputs, scenes.inputs[:7])
    for options in ({"seed": 1}, {"split": "val"}, {"split": "test"}):
        other_scenes = ShapesDataset(7, image_size=SIZE, **options)
        assert not any(torch.equal(a, b) for a in other_scenes.inputs for b in scenes.inputs)
    assert len({image.numpy().tobytes() for image in scenes.inputs}) == 400


def test_making_scenes_touches_no_global_generator():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    ShapesDataset(3, image_size=16)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


def test_an_index_shows_the_same_scene_at_every_size():
    small, large = (ShapesDataset(20, image_size=size) for size in (32, 96))
    assert (large.targets[:, 1::3, 1::3] == small.targets).float().mean() > 0.99
    pooled = torch.nn.functional.avg_pool2d(large.inputs.float(), 3)
    difference = (pooled - small.inputs.float()).abs().mean() / 255
    assert difference < 0.05


def test_outlines_are_where_the_mask_is():
    """Independent of the generator: pixels change more across the mask's borders than elsewhere."""
    data = ShapesDataset(100, image_size=64)
    image, mask = data.inputs.float(), data.targets
    step = (image[..., 1:] - image[..., :-1]).abs().mean(1)
    border = (mask[..., 1:] == 0) != (mask[..., :-1] == 0)
    assert step[border].mean() > 3 * step[~border].mean()


def shares(dominant):
    """Share of the most frequent shape among the shape pixels of each scene, and number of classes."""
    masks = ShapesDataset(75, image_size=SIZE, dominant=dominant, seed=5).targets
    counts = np.stack([(masks == shape).sum((1, 2)).numpy() for shape in range(1, 6)], 1)
    return counts.max(1) / counts.sum(1), (counts > 0).sum(1)


def test_dominant_is_the_skew():
    mixed, default, pure = shares(0.0), shares(0.7), shares(1.0)
    assert mixed[0].mean() < default[0].mean() - 0.05
    assert (pure[0] == 1).all()
    assert (pure[1] == 1).all()
    assert (default[0] > 0.5).mean() > 0.9
    assert mixed[1].mean() > 2


def test_classification_is_the_dominant_shape(scenes):
    labels = ShapesDataset(400, image_size=SIZE, task="classification").targets
    assert labels.dtype == torch.int64
    counts = torch.stack([(scenes.targets == shape).sum((1, 2)) for shape in range(1, 6)], 1)
    assert labels.tolist() == counts.argmax(1).tolist()
    assert np.bincount(labels.numpy(), minlength=5).min() > 50


def test_colour_does_not_give_the_class_away(scenes):
    """The best guess from a pixel's colour is hardly better than chance (1 in 5)."""
    test = ShapesDataset(200, image_size=SIZE, split="test")

    def colours(data):
        pixels = data.inputs.permute(0, 2, 3, 1)[data.targets > 0].long() // 32
        return pixels @ torch.tensor([64, 8, 1]), data.targets[data.targets > 0].long()

    bins, classes = colours(scenes)
    votes = torch.zeros(512, 6).index_put_((bins, classes), torch.ones(len(bins)), accumulate=True)
    bins, classes = colours(test)
    assert (votes[bins].argmax(1) == classes).float().mean() < 0.3


def test_texture_does_not_settle_it_either():
    """Each texture occurs in every class: nine in ten shapes have the texture of their class, the others a random
    one.
    """
    data = ShapesDataset(300, image_size=64, dominant=1.0)
    image, mask = data.inputs.float().mean(1), data.targets
    # Rows change between lines, columns between pixels: most squares have rows and most triangles have columns.
    down = (image[:, 2:, 1:-1] - image[:, :-2, 1:-1]).abs()
    right = (image[:, 1:-1, 2:] - image[:, 1:-1, :-2]).abs()
    inside = -torch.nn.functional.max_pool2d(-mask.float()[:, None], 3, 1, 0)[:, 0] > 0
    for shape, sign in ((2, 1), (3, -1)):
        which = [(inside[i], down[i], right[i]) for i in range(300) if mask[i].max() == shape]
        ratio = torch.stack([sign * (d[m].mean() / r[m].mean()).log() for m, d, r in which])
        assert (ratio > 0).float().mean() > 0.8
        assert (ratio < 0).any()


def test_the_data_module():
    data = Shapes(num_train=10, num_val=4, num_test=3, image_size=SIZE, batch_size=4, augment=True, seed=7)
    data.setup("fit")
    assert (data.num_classes, data.class_names[0]) == (6, "background")
    assert [len(d) for d in (data.train_dataset, data.val_dataset, data.test_dataset)] == [10, 4, 3]
    assert [len(x) for x, _ in data.train_dataloader()] == [4, 4, 2]
    for split in ("train", "val", "test"):
        expected = ShapesDataset(3, image_size=SIZE, seed=7, split=split)
        assert torch.equal(getattr(data, f"{split}_dataset").inputs[:3], expected.inputs)
    assert data.train_dataset.augment is not None
    assert data.val_dataset.augment is data.test_dataset.augment is None
    labels = Shapes(num_train=10, task="classification", image_size=16, dominant=0.2)
    assert (labels.num_classes, labels.class_names[4]) == (5, "cross")
    assert labels.train_dataset.targets.shape == (10,)
    expected = ShapesDataset(10, image_size=16, dominant=0.2)
    assert torch.equal(labels.train_dataset.inputs, expected.inputs)


@pytest.mark.parametrize("build", [lambda **o: ShapesDataset(2, **o), Shapes])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 8}, "`image_size` to be at least 16, but got 8"),
        ({"dominant": 1.2}, r"`dominant` to be in \[0, 1\], but got 1.2"),
        ({"task": "detection"}, r"`task` to be one of \['segmentation', 'classification'\], but got 'detection'"),
        ({"seed": -1}, "`seed` to be at least 0, but got -1"),
    ],
)
def test_bad_input_is_named(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_bad_numbers_of_scenes_are_named():
    with pytest.raises(ValueError, match="`num_samples` to be at least 0, but got -1"):
        ShapesDataset(-1)
    with pytest.raises(ValueError, match="`num_train` to be at least 1, but got 0"):
        Shapes(num_train=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_is_learned_from_scratch_in_minutes():
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    data = Shapes(num_train=2000, num_val=100, image_size=48)
    model = smp.Unet("resnet18", encoder_weights=None, classes=6)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=300, pct_start=0.2)
    step = 0
    while step < 300:
        for images, masks in data.train_dataloader():
            loss = torch.nn.functional.cross_entropy(model(images), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step == 300:
                break
    model.eval()
    images, masks = data.val_dataset.get_batch(range(100))
    with torch.no_grad():
        confusion = torch.bincount((masks * 6 + model(images).argmax(1)).flatten(), minlength=36).view(6, 6)
    hits = confusion.diag()
    assert (hits / (confusion.sum(0) + confusion.sum(1) - hits)).mean() > 0.6
