"""Segmentation pictures: correct colours at correct pixels, in the event file, with unchanged training."""

import copy
import io
import itertools
import logging

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import pictures
from lightning_fed.callbacks.picture_grid import default_colors, segmentation_grid
from lightning_fed.callbacks.segmentation_images import SegmentationImages
from lightning_fed.errors import OptionError
from tests.breadth import quick, slow
from tests.conftest import QUIET

COLORS = [(10, 0, 0), (0, 200, 0), (0, 0, 90)]
GREY, WHITE = (128, 128, 128), (255, 255, 255)
IGNORED = 255


def pixel(grid, row, column):
    return tuple(grid[:, row, column].tolist())


# --- Picture ----------------------------------------------------------------------------------------------------------


def test_every_pixel_of_a_grid():
    """Three images of 4x6 pixels, compared with a pixel-by-pixel drawing."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 3, 4, 6, generator=generator)
    truth = torch.randint(3, (3, 4, 6), generator=generator)
    prediction = torch.randint(3, (3, 4, 6), generator=generator)
    truth[:, 0, :2] = IGNORED
    grid = segmentation_grid(images, truth, prediction, COLORS, padding=1)
    assert grid.dtype == torch.uint8
    assert grid.shape == (3, 3 * 5 + 1, 3 * 7 + 1)
    expected = np.full((3, 16, 22), 255)
    for i in range(3):
        for y in range(4):
            for x in range(6):
                row = 1 + 5 * i + y
                label = truth[i, y, x].item()
                expected[:, row, 1 + x] = np.round(images[i, :, y, x].numpy() * np.float32(255))
                expected[:, row, 8 + x] = GREY if label == IGNORED else COLORS[label]
                expected[:, row, 15 + x] = COLORS[prediction[i, y, x].item()]  # even for ignored true labels
    assert np.array_equal(grid.numpy(), expected)
    with_channel = segmentation_grid(images, truth[:, None], prediction[:, None], COLORS, padding=1)
    assert torch.equal(grid, with_channel)


def test_normalised_images_come_back():
    original = torch.tensor([[0, 51, 255], [102, 204, 17], [1, 2, 3]], dtype=torch.uint8).reshape(1, 3, 1, 3)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    columns = [torch.tensor(values).reshape(1, 3, 1, 1) for values in (mean, std)]
    normalised = (original / 255 - columns[0]) / columns[1]
    mask = torch.zeros(1, 1, 3, dtype=torch.long)
    for images, options in (
        (normalised, {"mean": mean, "std": std}),
        (original, {}),
        (original / 255, {}),
        (original / 255 - 0.5, {"mean": 0.5}),
        (original / 51, {"std": 0.2}),
    ):
        grid = segmentation_grid(images, mask, mask, padding=0, **options)
        assert torch.equal(grid[:, :, :3], original[0])
    # values outside [0, 1] without mean and std: rescaled to [0, 1]
    grid = segmentation_grid(original.float() * 3 - 100, mask, mask, padding=0)
    assert torch.equal(grid[:, :, :3], original[0])
    # with mean and std: clipped, not rescaled
    grid = segmentation_grid(original / 255 + 1.0, mask, mask, mean=0.0, padding=0)
    assert (grid[:, :, :3] == 255).all()


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_any_number_of_channels(channels):
    images = torch.rand(1, channels, 2, 2)
    mask = torch.zeros(1, 2, 2, dtype=torch.long)
    drawn = segmentation_grid(images, mask, mask, padding=0)[:, :, :2]
    source = images[0, :3] if channels >= 3 else images[0, :1].expand(3, 2, 2)
    assert torch.equal(drawn, (source * 255).round().to(torch.uint8))


def test_images_of_different_sizes():
    images = [torch.zeros(3, 4, 3), torch.zeros(3, 2, 5)]
    truth, prediction = [torch.ones(4, 3), torch.ones(2, 5)], [torch.full((4, 3), 2), torch.full((2, 5), 2)]
    grid = segmentation_grid(images, truth, prediction, COLORS, padding=1)
    assert grid.shape == (3, 2 * 5 + 1, 3 * 6 + 1)
    assert [pixel(grid, 4, 9), pixel(grid, 4, 10)] == [COLORS[1], WHITE]  # the first is 3 pixels wide
    assert [pixel(grid, 7, 17), pixel(grid, 8, 17)] == [COLORS[2], WHITE]  # the second is 2 pixels high


def test_default_colors_can_be_told_apart():
    colors = default_colors(60)
    assert len(set(colors)) == 60
    assert colors[0] == (0, 0, 0)
    assert not {GREY, WHITE} & set(colors)
    assert default_colors(3) == colors[:3]
    mask = torch.tensor([[[0, 1, 59, IGNORED]]])
    grid = segmentation_grid(torch.zeros(1, 3, 1, 4), mask, mask, padding=0)
    assert [pixel(grid, 0, 4 + i) for i in range(4)] == [colors[0], colors[1], colors[59], GREY]


@pytest.mark.parametrize("ignored", [-1, -100, 0, 255, None])
def test_any_ignored_index(ignored):
    mask = torch.tensor([[[1, 2, 2 if ignored is None else ignored]]])
    grid = segmentation_grid(torch.zeros(1, 3, 1, 3), mask, mask, COLORS, ignore_index=ignored, padding=0)
    assert [pixel(grid, 0, 3 + i) for i in range(3)] == [COLORS[1], COLORS[2], COLORS[2] if ignored is None else GREY]


def test_refusals():
    image, mask = torch.zeros(1, 3, 2, 2), torch.zeros(1, 2, 2)
    with pytest.raises(ValueError, match="same number of images, at least 1, but got 1, 0 and 1"):
        segmentation_grid(image, mask[:0], mask)
    with pytest.raises(ValueError, match="but got 0, 0 and 0"):
        segmentation_grid(image[:0], mask[:0], mask[:0])
    with pytest.raises(ValueError, match="from 0 to 2, one per colour, or `ignore_index` 255, but got 0 to 3"):
        segmentation_grid(image, mask, torch.tensor([[[0, 3], [0, 0]]]), COLORS)
    with pytest.raises(ValueError, match="but got -1 to 0"):
        segmentation_grid(image, mask, torch.tensor([[[0, -1], [0, 0]]]), COLORS)
    for colors in ([], [(0, 0)], [(0, 0, 256)]):
        with pytest.raises(ValueError, match=r"\(red, green, blue\) per class, with values from 0 to 255"):
            SegmentationImages(class_colors=colors)
    with pytest.raises(ValueError, match="`every_n_epochs` to be at least 1, but got 0"):
        SegmentationImages(every_n_epochs=0)
    with pytest.raises(ValueError, match="`num_images` to be at least 1, but got 0"):
        SegmentationImages(num_images=0)


# --- Callback ---------------------------------------------------------------------------------------------------------


class Segmenter(L.LightningModule):
    """A small segmentation module with BatchNorm, dropout, and noise even in evaluation."""

    def __init__(self, num_outputs=3):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.frozen = nn.Sequential(nn.BatchNorm2d(8))
        self.head = nn.Conv2d(8, num_outputs, 1)

    def on_train_epoch_start(self):
        self.frozen.eval()  # a frozen part inside a module in training

    def forward(self, x):
        x = self.frozen(self.body(x))
        return self.head(x + 0.1 * torch.randn_like(x))

    def training_step(self, batch, batch_idx):
        x, y = (batch["image"], batch["mask"]) if isinstance(batch, dict) else batch
        return F.cross_entropy(self(x), y, ignore_index=IGNORED)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def dataset(n=5, seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(n, 3, size, size, generator=generator), torch.randint(3, (n, size, size), generator=generator)
    y[:, :2] = IGNORED
    return list(zip(x, y, strict=True))


def as_dicts(pairs):
    return [{"image": x, "mask": y} for x, y in pairs]


@pytest.fixture(autouse=True)
def picture_without_axes(request, monkeypatch):
    """The picture is only the grid, except in tests of the axes."""
    if "axes" not in request.node.name:
        monkeypatch.setattr(pictures, "has_matplotlib", lambda: False)


def make_trainer(logger, callbacks=(), **kwargs):
    off = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", logger=logger, callbacks=list(callbacks), **{**off, **kwargs})


def fit(module, logger, callbacks=(), val=None, ckpt_path=None, **kwargs):
    torch.manual_seed(0)
    trainer = make_trainer(logger, callbacks, **kwargs)
    val = DataLoader(dataset(seed=1), batch_size=2) if val is None else val
    trainer.fit(module, DataLoader(dataset(), batch_size=2, shuffle=True), val, ckpt_path=ckpt_path)
    return trainer


def logged(logger, tag=SegmentationImages.tag):
    """Reads (epoch, picture) pairs from the event files. Each picture has the step of a logged epoch.

    Without logged values, the pairs have the step.
    """
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    if tag not in events.Tags()["images"]:
        return []
    has_values = "epoch" in events.Tags()["scalars"]
    epochs = {event.step: int(event.value) for event in events.Scalars("epoch")} if has_values else {}
    return [
        (
            epochs[event.step] if has_values else event.step,
            np.asarray(Image.open(io.BytesIO(event.encoded_image_string))).transpose(2, 0, 1),
        )
        for event in sorted(events.Images(tag), key=lambda event: event.step)
    ]


def steps(logger):
    return [step for step, _ in logged(logger)]


@pytest.mark.parametrize("form", [list, as_dicts])
def test_the_event_file_holds_the_grid_of_the_validated_model(tmp_path, form):
    """The picture shows the first images with the validated weights."""
    snapshots = {}

    class Snapshot(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                snapshots[trainer.current_epoch] = copy.deepcopy(pl_module.state_dict())

    val = DataLoader(form(dataset(seed=1)), batch_size=2)
    logger = TensorBoardLogger(tmp_path)
    module = Segmenter()
    nn.Module.__setattr__(module, "forward", lambda x: module.head(module.frozen(module.body(x))))  # without noise
    train = DataLoader(form(dataset()), batch_size=2)
    callback = SegmentationImages(every_n_epochs=2, num_images=3, class_colors=COLORS)
    make_trainer(logger, [callback, Snapshot()], max_epochs=5).fit(module, train, val)
    assert steps(logger) == [0, 2, 4]
    x, y = (torch.stack(parts) for parts in zip(*dataset(seed=1)[:3], strict=True))
    pictures = []
    for epoch, picture in logged(logger):
        module.load_state_dict(snapshots[epoch])
        with torch.no_grad():
            prediction = module.eval()(x).argmax(1)
        assert np.array_equal(picture, segmentation_grid(x, y, prediction, COLORS).numpy())
        pictures.append(picture)
    assert not np.array_equal(pictures[0], pictures[2])  # the model has changed
    assert np.array_equal(pictures[0][:, :, :20], pictures[2][:, :, :20])  # input and truth have not changed


TEXTS, SHARES = ["red", "sky", "#0000ff"], [(0.5, 0.2, 0.3)] * 3


@pytest.mark.parametrize(("count", "given"), [(3, [*map(list, COLORS)]), (2, COLORS[:2]), (3, TEXTS), (3, SHARES)])
def test_the_axes_name_the_epoch_the_images_and_the_classes(count, given, tmp_path, monkeypatch):
    """The module defines names and colours for each class; other values are ignored. The tiles are unchanged."""
    pytest.importorskip("matplotlib")
    figures, pixels = [], pictures.figure_pixels
    monkeypatch.setattr(pictures, "figure_pixels", lambda figure: figures.append(figure) or pixels(figure))
    module = Segmenter()
    module.class_names, module.class_colors = ["sky", "sea", "land"][:count], given
    fit(module, TensorBoardLogger(tmp_path), [SegmentationImages(images=[3, 1])], max_epochs=1)
    (figure,) = figures
    (axes,), (legend,) = figure.axes, figure.legends
    assert figure.get_suptitle() == "epoch 0"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["image", "truth", "prediction"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["image 3", "image 1"]
    names = module.class_names if count == 3 else ["0", "1", "2"]
    colors = COLORS if isinstance(given[0], list) else default_colors(3)
    assert [text.get_text() for text in legend.get_texts()] == [*names, "no label"]
    drawn = [tuple(round(255 * value) for value in patch.get_facecolor()[:3]) for patch in legend.get_patches()]
    assert drawn == [*colors, GREY]
    x, y = (torch.stack(parts) for parts in zip(*(dataset(seed=1)[position] for position in (3, 1)), strict=True))
    tiles = segmentation_grid(x, y, y, colors).permute(1, 2, 0).numpy()
    assert np.array_equal(axes.images[0].get_array()[:, :20], tiles[:, :20])  # image and truth


class ValidatesInTrainingMode(Segmenter):
    """A module that controls its modes: the callback must not update BatchNorm or change the modes."""

    def on_validation_model_eval(self):
        pass

    def on_validation_model_train(self):
        pass


@pytest.mark.parametrize(
    ("kind", "maps"), [(Segmenter, ("softmax_entropy", "feature_entropy")), (ValidatesInTrainingMode, ())]
)
def test_a_run_with_the_callback_ends_as_one_without(tmp_path, kind, maps):
    """Weights, statistics, logs and modes are bit-equal, although the forward pass draws random numbers."""
    ends = []
    callback = SegmentationImages(every_n_epochs=1, num_images=3, maps=maps)
    for name, callbacks in (("without", []), ("with", [callback])):
        modes = []

        class Modes(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, modes=modes):
                modes.append([module.training for module in pl_module.modules()])

        torch.manual_seed(7)
        module = kind()
        logger = TensorBoardLogger(tmp_path, name=name)
        val = DataLoader(dataset(seed=1), batch_size=2)
        trainer = fit(module, logger, [*callbacks, Modes()], val, max_epochs=3, val_check_interval=1)
        ends.append((module.state_dict(), trainer.callback_metrics["val_loss"].item(), modes, torch.rand(1).item()))
        pictures = logged(logger, callback.tag)
        assert len(pictures) == 3 * len(callbacks)  # once per epoch, although the epoch validates three times
        assert not any(layer._forward_hooks for layer in module.modules())  # noqa: SLF001 - no public name
    (state, loss, modes, draw), (plain_state, plain_loss, plain_modes, plain_draw) = ends
    assert all(torch.equal(state[name], plain_state[name]) for name in state)
    assert (loss, modes, draw) == (plain_loss, plain_modes, plain_draw)
    assert len(modes) == 9
    assert all({False, True} == set(mode) for mode in modes)


def test_the_prediction_is_made_in_evaluation(tmp_path):
    """Even if the module validates in training mode."""
    seen = []

    class Tells(ValidatesInTrainingMode):
        def forward(self, x):
            seen.append((len(x), any(module.training for module in self.modules()), torch.is_grad_enabled()))
            return super().forward(x)

    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "inference_mode": False}
    fit(Tells(), TensorBoardLogger(tmp_path), [SegmentationImages(num_images=3)], **options)
    assert seen[-3:] == [(1, False, False)] * 3
    assert seen[-4] == (1, True, False)  # the last batch of the validation


@pytest.mark.parametrize(
    ("options", "trainer_options", "expected"),
    [
        slow(({"every_n_epochs": 3}, {"max_epochs": 8}, [0, 3, 6])),
        slow(({"every_n_epochs": 1}, {"max_epochs": 3}, [0, 1, 2])),
        ({"every_n_epochs": 3}, {"max_epochs": 9, "check_val_every_n_epoch": 2}, [1, 5]),
        ({"every_n_epochs": 1}, {"max_epochs": 2, "limit_val_batches": 0}, []),
        ({"every_n_epochs": 1}, {"max_epochs": 1, "num_sanity_val_steps": 2, "limit_train_batches": 0}, []),
    ],
)
def test_when_grids_are_logged(tmp_path, options, trainer_options, expected):
    logger = TensorBoardLogger(tmp_path)
    fit(Segmenter(), logger, [SegmentationImages(**options)], **trainer_options)
    assert steps(logger) == expected


def test_the_first_images_of_the_first_loader_stay_the_same(tmp_path):
    """With fewer images than requested, a new order, a second loader, and a step that overwrites its batch."""
    logger = TensorBoardLogger(tmp_path)
    seen = []

    class Loader:
        def __init__(self, seed):
            self.pairs, self.order = dataset(3, seed=seed), [0, 1, 2]

        def __len__(self):
            return 3

        def __iter__(self):
            order = self.order
            self.order = [*order[1:], order[0]]
            seen.append(order[0])
            for index in order:
                x, y = self.pairs[index]
                yield x[None], y[None]

    class Overwrites(Segmenter):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            batch[0].zero_()
            batch[1].zero_()

    callback = SegmentationImages(every_n_epochs=1, num_images=4)
    val = [Loader(1), Loader(2)]
    fit(Overwrites(), logger, [callback], val, max_epochs=3, num_sanity_val_steps=0)
    assert len(set(seen)) == 3
    pictures = [picture for _, picture in logged(logger)]
    x, y = (torch.stack(parts) for parts in zip(*dataset(3, seed=1), strict=True))
    expected = segmentation_grid(x, y, y, default_colors(3)).numpy()
    assert len(pictures) == 3
    for picture in pictures:
        assert picture.shape == expected.shape
        assert np.array_equal(picture[:, :, :20], expected[:, :, :20])


@pytest.mark.parametrize(
    ("images", "federated"),
    quick(
        itertools.product([[4, 0, 3], [2], range(1, 4)], [False, True]),
        [([4, 0, 3], True), ([2], False), (range(1, 4), False)],
    ),
    ids=str,
)
def test_chosen_images(tmp_path, federated, images):
    """By position in the data set, across batches, in the given order."""
    logger, pairs = TensorBoardLogger(tmp_path), dataset(seed=1)
    callback, val = SegmentationImages(1, class_colors=COLORS, images=images), DataLoader(pairs, batch_size=2)
    if federated:
        options = {**QUIET, "max_rounds": 2, "logger": logger, "callbacks": [callback]}
        clients = {name: DataLoader(dataset(seed=seed), batch_size=2) for seed, name in enumerate("ab")}
        FederatedTrainer(**options).fit(Segmenter(), clients, val)
    else:
        fit(Segmenter(), logger, [callback], val, max_epochs=2)
    x, y = (torch.stack(parts) for parts in zip(*(pairs[index] for index in images), strict=True))
    expected = segmentation_grid(x, y, y, COLORS).numpy()
    assert steps(logger) == [0, 1]
    for _, picture in logged(logger):
        assert picture.shape == expected.shape
        assert np.array_equal(picture[:, :, :20], expected[:, :, :20])


def test_images_that_are_not_there(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    for images, missing in (([0, 5], r"\[5\]"), ([7, 6], r"\[7, 6\]")):
        with pytest.raises(
            OptionError, match=f"`images` .* positions among the 5 validation images, 0 to 4, but got {missing}"
        ):
            fit(Segmenter(), logger, [SegmentationImages(images=images)], max_epochs=1)
    with pytest.raises(OptionError, match=r"positions among the 2 validation images, 0 to 1, but got \[2\]"):
        fit(Segmenter(), logger, [SegmentationImages(images=[0, 2])], max_epochs=1, limit_val_batches=1)
    fit(Segmenter(), logger, [SegmentationImages(num_images=9)], max_epochs=1)  # all available images


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], r"a list of at least one position, but got \[\]"),
        (3, "a list of at least one position, but got 3"),
        ([0, -1], "at least 0, but got -1"),
        ([True], "a whole number, but got True"),
        ("12", "a whole number, but got '1'"),
    ],
)
def test_positions_that_cannot_be(images, message):
    with pytest.raises(ValueError, match=f"Expected `images` to be {message}"):
        SegmentationImages(images=images)


def test_only_the_first_batches_are_touched(tmp_path):
    """A batch without images and masks is only refused if needed for the picture."""
    logger = TensorBoardLogger(tmp_path)
    good, odd = torch.utils.data.default_collate(dataset(2)), {"image": torch.zeros(1)}

    class Ignores(Segmenter):
        def validation_step(self, batch, batch_idx):
            pass

    def loader(batches):
        return DataLoader(batches, batch_size=None)

    options = {"max_epochs": 1, "num_sanity_val_steps": 0}
    fit(Ignores(), logger, [SegmentationImages(num_images=2)], loader([good, odd]), **options)
    assert steps(logger) == [2]  # the third batch
    with pytest.raises(MisconfigurationException, match=r"`batch\[1\]`.* another structure: select .* with `target`"):
        fit(Ignores(), logger, [SegmentationImages(num_images=3)], loader([good, odd]), **options)


FORMS = {  # a batch, and the positions of images and masks
    "more elements": (lambda x, y: (x, y, x.mean((1, 2, 3))), {"target": 1}),
    "a label of every image too": (
        lambda x, y: {"label": x.mean((1, 2, 3)), "image": x, "mask": y},
        {"target": "mask"},
    ),
    "other places": (lambda x, y: (x.mean((1, 2, 3)), y, x), {"inputs": 2, "target": 1}),
    "other keys": (lambda x, y: {"left": x, "right": x + 1, "truth": y}, {"inputs": "left", "target": "truth"}),
    "functions": (
        lambda x, y: [{"a": (x, y)}],
        {"inputs": lambda batch: batch[0]["a"][0], "target": lambda batch: batch[0]["a"][1]},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_where_images_and_masks_are(tmp_path, form):
    class Ignores(Segmenter):
        def training_step(self, batch, batch_idx):
            pass

        def validation_step(self, batch, batch_idx):
            pass

    def fitted(make, options, name):
        logger = TensorBoardLogger(tmp_path, name=name)
        batches = DataLoader([make(*torch.utils.data.default_collate(dataset(3)))], batch_size=None)
        torch.manual_seed(0)
        trainer = make_trainer(logger, [SegmentationImages(**options)], max_epochs=1)
        trainer.validate(Ignores(), batches, verbose=False)
        ((_, picture),) = logged(logger)
        return picture

    make, options = FORMS[form]
    assert np.array_equal(fitted(make, options, "form"), fitted(lambda x, y: (x, y), {"target": 1}, "pair"))


def test_a_resumed_run_logs_what_the_uninterrupted_one_logs(tmp_path):
    whole = TensorBoardLogger(tmp_path, name="whole")
    fit(Segmenter(), whole, [SegmentationImages(every_n_epochs=3)], max_epochs=8)
    first, second = TensorBoardLogger(tmp_path, name="first"), TensorBoardLogger(tmp_path, name="second")
    trainer = fit(Segmenter(), first, [SegmentationImages(every_n_epochs=3)], max_epochs=5)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["SegmentationImages"]
    assert state == {"last_epoch": 3}
    fit(Segmenter(), second, [SegmentationImages(every_n_epochs=3)], ckpt_path=tmp_path / "last.ckpt", max_epochs=8)
    assert [*steps(first), *steps(second)] == steps(whole) == [0, 3, 6]


def test_one_callback_object_serves_two_runs(tmp_path):
    callback = SegmentationImages(every_n_epochs=10, num_images=1)
    grids = []
    for seed in (1, 2):
        logger = TensorBoardLogger(tmp_path, name=str(seed))
        fit(Segmenter(), logger, [callback], DataLoader(dataset(seed=seed), batch_size=2), max_epochs=2)
        ((step, picture),) = logged(logger)
        assert step == 0
        grids.append(picture[:, :, :10])
    assert not np.array_equal(*grids)


def test_trainer_validate_always_logs(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    callback = SegmentationImages(every_n_epochs=10)
    trainer = fit(Segmenter(), logger, [callback], max_epochs=2)
    trainer.validate(Segmenter(), DataLoader(dataset(seed=1), batch_size=2), verbose=False)
    assert steps(logger) == [0, 2]


def test_every_tensorboard_gets_the_grid_and_others_one_line(tmp_path, caplog):
    boards = [TensorBoardLogger(tmp_path, name=name) for name in "ab"]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        fit(Segmenter(), [*boards, CSVLogger(tmp_path)], [SegmentationImages(every_n_epochs=1)], max_epochs=3)
    assert [steps(board) for board in boards] == [[0, 1, 2]] * 2
    lines = [record.message for record in caplog.records if "SegmentationImages" in record.message]
    assert lines == ["SegmentationImages sends images only to TensorBoard, so these loggers receive none: CSVLogger."]


def test_without_tensorboard_the_module_is_not_called(tmp_path):
    calls = []

    class Counts(Segmenter):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    for callbacks in ([], [SegmentationImages(every_n_epochs=1)]):
        fit(Counts(), CSVLogger(tmp_path), callbacks, max_epochs=2)
        calls.append("end")
    middle = calls.index("end")
    assert calls[:middle] == calls[middle + 1 : -1]


@pytest.mark.parametrize("kind", ["binary", "torchvision"])
def test_other_outputs(tmp_path, kind):
    """One logit per pixel means a binary task; torchvision's models return a dict."""

    class Fixed(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            logit = x[:, :1] - 0.5 + self.weight
            return logit if kind == "binary" else {"out": torch.cat([-logit, logit], 1), "aux": None}

        def validation_step(self, batch, batch_idx):
            pass

    pairs = [(x, (x[:1] > 0.5).float()) for x, _ in dataset(3)]  # masks of shape (1, H, W), as for binary losses
    logger = TensorBoardLogger(tmp_path)
    callback = SegmentationImages(class_colors=COLORS[:2], target=1)
    make_trainer(logger, [callback]).validate(Fixed(), DataLoader(pairs, batch_size=2), verbose=False)
    ((_, picture),) = logged(logger)
    assert np.array_equal(picture[:, :, 10:20], picture[:, :, 20:30])  # the prediction equals the truth
    x = torch.stack([x for x, _ in pairs])
    mask = (x[:, 0] > 0.5).long()
    assert np.array_equal(picture, segmentation_grid(x, mask, mask, COLORS).numpy())


def test_a_module_without_logits_per_pixel_is_refused(tmp_path):
    class Classifier(Segmenter):
        def forward(self, x):
            return super().forward(x).mean((2, 3))

        def validation_step(self, batch, batch_idx):
            pass

    trainer = make_trainer(TensorBoardLogger(tmp_path), [SegmentationImages(target=1)])
    with pytest.raises(TypeError, match=r"logits of shape \(N, num_classes, H, W\).* but got shape \(1, 3\)"):
        trainer.validate(Classifier(), DataLoader(dataset(), batch_size=2), verbose=False)


class ThirdTensor(Segmenter):
    """Trains on the third of three tensors; the second has wrong masks."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[2], ignore_index=11)

    def validation_step(self, batch, batch_idx):
        pass


class Named(Segmenter):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["image"]), batch["truth"], ignore_index=11)

    def validation_step(self, batch, batch_idx):
        pass


def triples(seed=1):
    return [(x, torch.zeros_like(y), y.where(y != IGNORED, 11)) for x, y in dataset(seed=seed)]


def dictionaries(seed=1):
    return [{"image": x, "mask": wrong, "truth": y} for x, wrong, y in triples(seed)]


@pytest.mark.parametrize(("kind", "make"), [(ThirdTensor, triples), (Named, dictionaries)])
def test_the_truth_is_the_labels_in_the_loss(tmp_path, kind, make):
    logger, callback = TensorBoardLogger(tmp_path), SegmentationImages(num_images=3, class_colors=COLORS)
    loaders = [DataLoader(make(seed), batch_size=2) for seed in (0, 1)]
    make_trainer(logger, [callback], max_epochs=1).fit(kind(), *loaders)
    ((_, picture),) = logged(logger)
    x, _, y = (torch.stack(parts) for parts in zip(*triples()[:3], strict=True))
    expected = segmentation_grid(x, y, y, COLORS, ignore_index=11).numpy()
    assert np.array_equal(picture[:, :, :20], expected[:, :, :20])


CHANGED_MASKS = {
    "shifted": lambda z, y: F.cross_entropy(z, (y + 1) % 3),
    "flipped": lambda z, y: F.cross_entropy(z, y.flip(2)),
    "inverted": lambda z, y: F.binary_cross_entropy_with_logits(z[:, 0], 1.0 - y.clamp(max=1)),
    "no labels": lambda z, y: z.square().mean(),
}


@pytest.mark.parametrize("loss", quick(CHANGED_MASKS, ["shifted", "inverted", "no labels"]))
def test_changed_masks_need_a_target(tmp_path, loss):
    class Changed(ThirdTensor):
        def training_step(self, batch, batch_idx):
            return CHANGED_MASKS[loss](self(batch[0]), batch[2].where(batch[2] != 11, 0))

    module = Changed()
    start = copy.deepcopy(module.state_dict())
    loader = DataLoader(triples(), batch_size=2)
    with pytest.raises(MisconfigurationException, match="pass `SegmentationImages` a `target`"):
        make_trainer(TensorBoardLogger(tmp_path), [SegmentationImages()], max_epochs=1).fit(module, loader, loader)
    assert all(torch.equal(value, start[name]) for name, value in module.state_dict().items())
    logger = TensorBoardLogger(tmp_path, name="with a target")
    make_trainer(logger, [SegmentationImages(target=2, ignore_index=11)], max_epochs=1).fit(module, loader, loader)
    assert steps(logger) == [2]


OTHER_VALIDATION = {
    "two tensors": lambda x, wrong, y: (x, y),
    "another order": lambda x, wrong, y: (x, y, x),
    "four tensors": lambda x, wrong, y: (x, x, y, y),
    "names": lambda x, wrong, y: {"image": x, "mask": y},
}


@pytest.mark.parametrize("form", OTHER_VALIDATION)
def test_validation_batches_with_another_structure_need_a_target(tmp_path, form):
    val = DataLoader([OTHER_VALIDATION[form](*row) for row in triples()], batch_size=2)
    trainer = make_trainer(TensorBoardLogger(tmp_path), [SegmentationImages()], max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"`batch\[2\]`.* with another structure: select .* `target`"):
        trainer.fit(ThirdTensor(), DataLoader(triples(0), batch_size=2), val)


def test_without_a_fit_a_line_asks_for_a_target(tmp_path, caplog):
    logger = TensorBoardLogger(tmp_path)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        make_trainer(logger, [SegmentationImages()]).validate(ThirdTensor(), DataLoader(triples()), verbose=False)
    assert steps(logger) == []
    assert [message for message in caplog.messages if "pass `SegmentationImages` a `target`" in message] == [
        "SegmentationImages draws no pictures before a fit, because labels are unknown: pass "
        "`SegmentationImages` a `target`."
    ]
