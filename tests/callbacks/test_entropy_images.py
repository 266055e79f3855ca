"""Entropy maps next to segmentations: colours equal entropies computed in numpy."""

import logging
import math

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib import colormaps
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fed.algorithms import FedMargin
from lightning_fed.callbacks import SegmentationImages, segmentation_grid
from lightning_fed.callbacks.pictures import VIRIDIS, paint_numbers
from lightning_fed.trainer import FederatedTrainer
from tests import models
from tests.callbacks.test_segmentation_images import (
    COLORS,
    GREY,
    WHITE,
    Segmenter,
    dataset,
    fit,
    logged,
    make_trainer,
    picture_without_axes,  # noqa: F401 - for all tests in this file
    pixel,
)
from tests.conftest import QUIET

MAPS = ("softmax_entropy", "feature_entropy")
TAG = "segmentation/input_truth_prediction_softmax_entropy_feature_entropy"


def entropy(shares):
    shares = np.asarray(shares, dtype=np.float64)
    return -sum(np.where(share > 0, share * np.log(np.where(share > 0, share, 1)), 0) for share in shares)


def viridis(values):
    """Matplotlib's colours, shape (3, H, W)."""
    return np.moveaxis(255 * colormaps["viridis"](np.asarray(values))[..., :3], -1, 0).round().astype(int)


# --- Picture ----------------------------------------------------------------------------------------------------------


def test_the_colours_are_those_of_viridis():
    """Exact at every 17th of 256 colours, linear in between, with increasing brightness."""
    values = torch.linspace(0, 1, 256).reshape(1, -1)
    drawn = paint_numbers(values)
    assert drawn.dtype == torch.uint8
    expected = viridis(values)
    assert np.array_equal(drawn[:, :, ::17].numpy(), expected[:, :, ::17])
    assert np.abs(drawn.numpy() - expected).max() <= 7
    lightness = torch.tensor([0.2126, 0.7152, 0.0722]) @ drawn[:, 0].float()
    assert (lightness[::17].diff() > 5).all()
    assert (drawn[:, 0, 1:] != drawn[:, 0, :-1]).any(0).all()
    ends = paint_numbers(torch.tensor([[-3.0, 1.0 + 1e-6, math.inf, math.nan]]))
    assert [pixel(ends, 0, row) for row in range(4)] == [VIRIDIS[0], VIRIDIS[-1], VIRIDIS[-1], GREY]


def test_every_pixel_of_a_grid_with_maps():
    generator = torch.Generator().manual_seed(0)
    images, mask = torch.rand(2, 3, 4, 6, generator=generator), torch.ones(2, 4, 6)
    maps = torch.randint(16, (2, 2, 4, 6), generator=generator) / 15
    maps[1, 0, 2, 3] = math.nan
    plain = segmentation_grid(images, mask, mask, COLORS, padding=1)
    grid = segmentation_grid(images, mask, mask, COLORS, padding=1, maps=maps)
    assert grid.shape == (3, 2 * 5 + 1, 5 * 7 + 1)
    assert torch.equal(grid[:, :, :22], plain)
    expected = np.full((3, 11, 14), 255)
    for column in range(2):
        for row in range(2):
            for y in range(4):
                for x in range(6):
                    value = maps[column, row, y, x].item()
                    color = GREY if math.isnan(value) else VIRIDIS[round(15 * value)]
                    expected[:, 1 + 5 * row + y, 7 * column + x] = color
    assert np.array_equal(grid[:, :, 22:].numpy(), expected)


def test_maps_of_different_sizes():
    images, masks = [torch.zeros(3, 4, 3), torch.zeros(3, 2, 5)], [torch.zeros(4, 3), torch.zeros(2, 5)]
    grid = segmentation_grid(images, masks, masks, COLORS, padding=1, maps=[[torch.ones(4, 3), torch.ones(2, 5)]])
    assert grid.shape == (3, 2 * 5 + 1, 4 * 6 + 1)
    assert [pixel(grid, 4, 21), pixel(grid, 4, 22)] == [VIRIDIS[-1], WHITE]
    assert [pixel(grid, 7, 23), pixel(grid, 8, 23)] == [VIRIDIS[-1], WHITE]


def test_refusals():
    image, mask = torch.zeros(2, 3, 2, 2), torch.zeros(2, 2, 2)
    with pytest.raises(ValueError, match=r"Expected `maps` with 2 images each, but got \[2, 1\]"):
        segmentation_grid(image, mask, mask, maps=[mask, mask[:1]])
    with pytest.raises(ValueError, match=r"Expected `maps` to be one of .*'feature_entropy'.* but got 'entropy'"):
        SegmentationImages(maps=["entropy"])
    with pytest.raises(ValueError, match=r"Expected `activation` to be one of .* but got 'tanh'"):
        SegmentationImages(activation="tanh")


# --- Callback ---------------------------------------------------------------------------------------------------------


class Known(L.LightningModule):
    """Four features at half the size, one of them negative, and three logits, without training."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 2, stride=2)
        self.grow = nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        return self.head(self.grow(self.body(x)))

    def validation_step(self, batch, batch_idx):
        pass


def drawn_again(module, x, layer, activation):
    """Both maps of all images, computed from the weights."""
    with torch.no_grad():
        features = F.conv2d(x, module.body.weight, module.body.bias, stride=2)
        grown = features.repeat_interleave(2, 2).repeat_interleave(2, 3)
        logits = F.conv2d(grown, module.head.weight, module.head.bias)
    powers = np.exp(logits.double().numpy()).swapaxes(0, 1)
    soft = entropy(powers / powers.sum(0)) / math.log(3)
    shares = (features if layer == "body" else grown).double().numpy().swapaxes(0, 1)
    shares = np.exp(shares) if activation == "softmax" else np.maximum(shares, 0 if activation == "relu" else -shares)
    total = shares.sum(0)
    shares = np.where(total > 0, shares / np.where(total > 0, total, 1), 0.25)
    maps = entropy(shares) / math.log(4)
    return soft, enlarged(maps) if layer == "body" else maps


def enlarged(maps):
    """Bilinear upsampling by two: pixel centres at -1/4 and 1/4 of the small pixels, edges repeated."""
    for axis in (1, 2):
        padded = np.concatenate([np.take(maps, [0], axis), maps, np.take(maps, [-1], axis)], axis)
        size = maps.shape[axis]
        before, here, after = (np.take(padded, range(start, start + size), axis) for start in range(3))
        pair = np.stack([0.75 * here + 0.25 * before, 0.75 * here + 0.25 * after], axis + 1)
        maps = pair.reshape(*maps.shape[:axis], 2 * size, *maps.shape[axis + 1 :])
    return maps


def assert_colors(tiles, values):
    """Rounding in float32 may select the next colour, and our colours are within 7 of matplotlib's."""
    assert np.abs(tiles.astype(int) - viridis(values)).max() <= 10


@pytest.mark.parametrize("activation", ["relu", "abs", "softmax"])
@pytest.mark.parametrize("layer", ["auto", "body"])
def test_the_event_file_holds_the_entropies(tmp_path, layer, activation):
    """In a plain Trainer; "auto" selects the input of the last convolution, here the upsampled features."""
    torch.manual_seed(3)
    module, logger = Known(), TensorBoardLogger(tmp_path)
    with torch.no_grad():
        module.head.weight.mul_(6)  # from certain to uncertain
    callback = SegmentationImages(
        target=1, num_images=3, class_colors=COLORS, maps=MAPS, layer=layer, activation=activation
    )
    loader = DataLoader(dataset(seed=1), batch_size=2)
    make_trainer(logger, [callback]).validate(module, loader, verbose=False)
    ((step, picture),) = logged(logger, TAG)
    assert step == 0
    assert logged(logger) == []  # the tag lists the columns
    x, y = (torch.stack(parts) for parts in zip(*dataset(seed=1)[:3], strict=True))
    with torch.no_grad():
        prediction = module(x).argmax(1)
    assert np.array_equal(picture[:, :, :32], segmentation_grid(x, y, prediction, COLORS).numpy())
    soft, features = drawn_again(module, x, layer, activation)
    assert np.ptp(soft) > 0.2
    assert np.ptp(features) > 0.03
    for row in range(3):
        top = 2 + 10 * row
        assert_colors(picture[:, top : top + 8, 32:40], soft[row])
        assert_colors(picture[:, top : top + 8, 42:50], features[row])


@pytest.mark.parametrize("maps", [("feature_entropy", "softmax_entropy"), ("softmax_entropy",), ("feature_entropy",)])
def test_columns_come_in_the_order_asked_for(tmp_path, maps):
    module, loader = Known(), DataLoader(dataset(seed=1), batch_size=2)
    pictures = {}
    for wanted in (MAPS, maps):
        logger = TensorBoardLogger(tmp_path, name="_".join(wanted))
        callback = SegmentationImages(target=1, maps=wanted, layer="body")
        make_trainer(logger, [callback]).validate(module, loader, verbose=False)
        ((_, pictures[wanted]),) = logged(logger, "segmentation/input_truth_prediction_" + "_".join(wanted))
    offsets = {"softmax_entropy": 32, "feature_entropy": 42}
    whole = pictures[MAPS]
    columns = [whole[:, :, offsets[name] : offsets[name] + 10] for name in maps]
    assert np.array_equal(pictures[maps], np.concatenate([whole[:, :, :32], *columns], 2))


def test_one_logit_is_two_classes(tmp_path):
    """Logit 0 has maximal entropy, logit -20 almost none, logit 1 is in between."""

    class Binary(Known):
        def forward(self, x):
            self.body(x)
            return torch.where(x[:, :1] > 0.5, 0.0, torch.where(x[:, 1:2] > 0.5, -20.0, 1.0))

    logger = TensorBoardLogger(tmp_path)
    callback = SegmentationImages(target=1, num_images=2, class_colors=COLORS, maps=["softmax_entropy"])
    make_trainer(logger, [callback]).validate(Binary(), DataLoader(dataset(seed=1), batch_size=2), verbose=False)
    ((_, picture),) = logged(logger, callback.tag)
    x = dataset(seed=1)[0][0]
    tile = picture[:, 2:10, 32:40]
    likely = 1 / (1 + math.exp(-1))
    between = entropy([likely, 1 - likely]) / math.log(2)
    assert_colors(tile, np.where(x[0] > 0.5, 1.0, np.where(x[1] > 0.5, 0.0, between)))


@pytest.mark.slow
def test_features_of_an_smp_model_in_a_federation(tmp_path, caplog):
    """The encoder's last map at an eighth of the size is found and upsampled; training does not change."""
    ends = []
    for callbacks in ([], [SegmentationImages(every_n_epochs=1, num_images=2, maps=MAPS)]):
        logger = TensorBoardLogger(tmp_path, name=str(len(callbacks)))
        trainer = FederatedTrainer(
            **{**QUIET, "logger": logger, "max_rounds": 1, "callbacks": callbacks, "method": FedMargin()}
        )
        data = models.as_datasets(models.scenes({"a": 2, "b": 2}))
        module = models.Module(models.unet())
        with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
            trainer.fit(module, {name: DataLoader(part, 2) for name, part in data.items()}, DataLoader(data["a"], 2))
        ends.append(module.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert [step for step, _ in logged(logger, TAG)] == [0]
    lines = [record.message for record in caplog.records if "SegmentationImages" in record.message]
    assert lines == ["SegmentationImages: the features are the output of 'net.encoder'."]
    ((_, picture),) = logged(logger, TAG)
    with torch.no_grad():
        features = module.eval().net.encoder(data["a"][0][0][None])[-1].double()
    assert features.shape[2:] == (4, 4)
    shares = features[0].relu().numpy()
    values = entropy(shares / shares.sum(0)) / math.log(len(shares))
    tile = picture[:, 2:34, 2 + 4 * 34 : 34 + 4 * 34]
    expected = enlarged(enlarged(enlarged(values[None])))[0]
    flat = slice(3, 29)  # three upsamplings by two differ slightly from one by eight
    assert np.abs(tile[:, flat, flat].astype(int) - viridis(expected)[:, flat, flat]).max() < 40
    corners = [values[0, 0], values[0, -1], values[-1, 0], values[-1, -1]]
    assert_colors(tile[:, [[0, 0], [31, 31]], [[0, 31], [0, 31]]], np.reshape(corners, (2, 2)))


def test_a_layer_that_is_not_there_is_named_before_training(tmp_path):
    callback, module = SegmentationImages(target=1, maps=MAPS, layer="neck"), Segmenter()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"the name of a layer in Segmenter, but got 'neck'"):
        fit(module, TensorBoardLogger(tmp_path), [callback], max_epochs=1, num_sanity_val_steps=0)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module = Segmenter()
    with pytest.raises(ValueError, match="but got 'neck'"):
        make_trainer(TensorBoardLogger(tmp_path), [callback]).validate(module, DataLoader(dataset(), 2), verbose=False)
    fit(Segmenter(), CSVLogger(tmp_path), [callback], max_epochs=1)  # without pictures no layer is needed


def test_a_layer_that_is_not_run_is_named(tmp_path):
    class Skips(Known):
        def forward(self, x):
            return self.head(F.pad(x, (0, 0, 0, 0, 0, 1)))

    trainer = make_trainer(TensorBoardLogger(tmp_path), [SegmentationImages(target=1, maps=MAPS, layer="body")])
    module = Skips()
    with pytest.raises(ValueError, match="but the output of 'body' did not run"):
        trainer.validate(module, DataLoader(dataset(), 2), verbose=False)
    assert not any(layer._forward_hooks for layer in module.modules())  # noqa: SLF001 - no public name


class InPlace(Known):
    def forward(self, x):
        return self.head(self.grow(F.relu_(self.body(x))))


class Twice(Known):
    def forward(self, x):
        return super().forward(x) + super().forward(x.flip(3))


class Compiled(Known):
    def __init__(self):
        super().__init__()
        self.run = torch.compile(super().forward, backend="eager")

    def forward(self, x):
        return self.run(x)


NEW_ENOUGH = pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch 2.6 brings it")


@pytest.mark.parametrize("kind", [InPlace, Twice, pytest.param(Compiled, marks=NEW_ENOUGH)])
def test_features_are_those_of_the_first_pass_as_the_layer_makes_them(tmp_path, kind):
    """An in-place layer or a second forward pass does not change the features; compiled code is handled."""
    pictures = []
    for which in (Known, kind):
        torch.manual_seed(0)
        module, logger = which(), TensorBoardLogger(tmp_path, name=which.__name__)
        with torch.no_grad():
            module.eval()(torch.zeros(1, 3, 8, 8))  # compiled before features are tapped
        callback = SegmentationImages(target=1, maps=["feature_entropy"], layer="body", activation="abs")
        trainer = make_trainer(logger, [callback], inference_mode=False)  # inference mode would compile again
        trainer.validate(module, DataLoader(dataset(), 2), verbose=False)
        ((_, picture),) = logged(logger, callback.tag)
        pictures.append(picture[:, :, 32:])
    assert np.array_equal(*pictures)


def test_one_callback_object_finds_the_layer_of_every_module(tmp_path):
    callback = SegmentationImages(target=1, maps=["feature_entropy"], num_images=1)
    unnamed = Known()
    unnamed.last, unnamed.head = unnamed.head, nn.Identity()
    nn.Module.__setattr__(unnamed, "forward", lambda x: unnamed.last(unnamed.grow(unnamed.body(x))))
    for name, module in (("a", Known()), ("b", unnamed)):
        logger = TensorBoardLogger(tmp_path, name=name)
        make_trainer(logger, [callback]).validate(module, DataLoader(dataset(), 2), verbose=False)
        assert len(logged(logger, callback.tag)) == 1


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path):
    class Trained(Known):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1], ignore_index=255)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    def run(name, max_epochs, ckpt_path=None):
        torch.manual_seed(5)
        logger = TensorBoardLogger(tmp_path, name=name)
        trainer = make_trainer(logger, [SegmentationImages(2, 2, maps=MAPS)], max_epochs=max_epochs)
        loaders = DataLoader(dataset(), batch_size=2), DataLoader(dataset(seed=1), batch_size=2)
        trainer.fit(Trained(), *loaders, ckpt_path=ckpt_path)
        return trainer, logged(logger, TAG)

    _, whole = run("whole", 5)
    trainer, first = run("first", 3)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    _, second = run("second", 5, tmp_path / "last.ckpt")
    assert [step for step, _ in (*first, *second)] == [step for step, _ in whole] == [2, 8, 14]
    for (_, expected), (_, grid) in zip(whole, (*first, *second), strict=True):
        assert np.array_equal(expected, grid)
    assert not np.array_equal(whole[0][1], whole[1][1])
