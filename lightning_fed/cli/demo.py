"""The demo: DeepLabV3+ trained over many unlike clients, with a table, TensorBoard logs and a picture at the end."""

from __future__ import annotations

import logging
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_fed.argument_checks import check_count
from lightning_fed.callbacks.segmentation_grid import default_colors, segmentation_grid
from lightning_fed.callbacks.segmentation_images import SegmentationImages
from lightning_fed.data.arrays import ArrayDataset
from lightning_fed.data.label_lookup import labels_of
from lightning_fed.data.partitions import Dirichlet
from lightning_fed.data.population import seeded_generators
from lightning_fed.datasets.array_module import ArrayDataModule
from lightning_fed.datasets.camvid import CamVid
from lightning_fed.datasets.shapes import Shapes
from lightning_fed.model.feature_extraction import evaluating
from lightning_fed.tasks.segmentation import SegmentationTask
from lightning_fed.trainer import FederatedTrainer

_ENCODER = "tu-mobilenetv3_small_100"
_NUM_PICTURES = 8
_COLUMNS = ("round", "clients", "loss", "val mIoU", "pixel acc", "MB up", "MB down", "seconds")


@dataclass(frozen=True)
class Round:
    """Line of the demo's table: a round.

    Args:
        number: The round, from 1.
        clients: Clients whose update was used.
        loss: Mean training loss over the round's examples, as the clients saw it before their steps.
        val_loss: Loss of the new global model on the validation data.
        val_miou: Its mean intersection over union.
        val_pixel_acc: Share of pixels that it gets right.
        up_bytes: Bytes of the clients' messages.
        down_bytes: Bytes of the server's messages.
        seconds: Wall-clock time, with validation.

    """

    number: int
    clients: int
    loss: float
    val_loss: float
    val_miou: float
    val_pixel_acc: float
    up_bytes: int
    down_bytes: int
    seconds: float

    def __str__(self) -> str:
        scores = [f"{value:.3f}" for value in (self.loss, self.val_miou, self.val_pixel_acc)]
        costs = [f"{value:.1f}" for value in (self.up_bytes / 1e6, self.down_bytes / 1e6, self.seconds)]
        return _line([str(self.number), str(self.clients), *scores, *costs])


@dataclass(frozen=True)
class DemoResult:
    """Result of a run of the demo.

    Args:
        rounds: The table.
        log_dir: Folder with TensorBoard's event file, the checkpoint and the picture.
        picture: The PNG file.

    """

    rounds: tuple[Round, ...]
    log_dir: Path
    picture: Path


class RoundTable(L.Callback):
    """Writes a line per round to the standard output while the training goes on.

    Attributes:
        rounds: The rounds so far.

    """

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self._start = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the head of the table."""
        _say(_line(_COLUMNS))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes the time."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the round's line, from the values that every logger gets."""
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rounds.append(
            Round(
                number=trainer.current_epoch + 1,
                clients=int(values["fed/clients"]),
                loss=values["train_loss"],
                val_loss=values["val_loss"],
                val_miou=values["val_miou"],
                val_pixel_acc=values["val_pixel_acc"],
                up_bytes=int(values["comm/up_bytes"]),
                down_bytes=int(values["comm/down_bytes"]),
                seconds=time.perf_counter() - self._start,
            )
        )
        _say(str(self.rounds[-1]))


def run_demo(
    data_dir: Path | None = None,
    rounds: int | None = None,
    out: Path = Path("runs/demo"),
    *,
    num_clients: int = 24,
    clients_per_round: int = 5,
    num_scenes: int = 960,
) -> DemoResult:
    """Trains DeepLabV3+ federatedly, with a table, TensorBoard logs and a picture.

    The clients' images are unlike: a Dirichlet distribution says how many images with which dominant class each has.

    Args:
        data_dir: Folder with CamVid; ``None`` generates scenes of shapes.
        rounds: Number of rounds; ``None`` for as many as take two to three minutes on two cores.
        out: Folder for logs and the picture; every run has its own folder in it.
        num_clients: Number of clients.
        clients_per_round: Number of clients that train in a round.
        num_scenes: Number of generated training scenes.

    Raises:
        ModuleNotFoundError: If the packages of the extra ``demo`` are not installed.
        ValueError: If a number is out of its range.
        FileNotFoundError: If ``data_dir`` has no CamVid.

    """
    missing = [name for name in ("matplotlib", "tensorboard") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"The demo needs {' and '.join(missing)}: pip install 'lightning-fed[demo]'")
    if rounds is not None:
        check_count("rounds", rounds)
    data: ArrayDataModule
    if data_dir is None:
        data = Shapes(num_train=num_scenes, num_val=96, num_test=1, batch_size=8, eval_batch_size=32)
        partition = Dirichlet(num_clients, alpha=0.3)
    else:
        data = CamVid(data_dir, image_size=(96, 128), augment=True, batch_size=8, eval_batch_size=32)
        # There is no background among CamVid's classes.
        partition = Dirichlet(num_clients, alpha=0.5, background=None, min_size=4)
    with _single_thread_and_quiet(), seeded_generators(seed=0):
        data.setup("fit")
        task = SegmentationTask(
            "DeepLabV3Plus",
            num_classes=data.num_classes,
            encoder_name=_ENCODER,
            model_kwargs={"decoder_channels": 64},
            optimizer="AdamW",
            lr=0.002,
        )
        table = RoundTable()
        logger = TensorBoardLogger(out, name="")
        trainer = FederatedTrainer(
            max_rounds=rounds or 16,
            clients_per_round=clients_per_round,
            local_epochs=3,
            partition=partition,
            batch_norm="recalibrate",
            seed=0,
            logger=logger,
            callbacks=[table, SegmentationImages(every_n_epochs=4)],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        parameters = sum(parameter.numel() for parameter in task.parameters())
        _say(
            f"DeepLabV3+ ({_ENCODER}, {parameters / 1e6:.1f} M parameters, not pretrained) on {type(data).__name__}:"
            f" {len(data.train_dataset)} images over {num_clients} clients, {clients_per_round} in a round.\n"
        )
        trainer.fit(task, datamodule=data)
    result = DemoResult(tuple(table.rounds), Path(logger.log_dir), Path(logger.log_dir) / "demo.png")
    clients = partition.split(data.train_dataset, trainer.federation.schedule.seed)
    labels = labels_of(data.train_dataset, background=partition.background)
    counts = [np.bincount(labels[indices], minlength=data.num_classes) for indices in clients.values()]
    draw(result, task, data, np.stack(counts))
    _say(
        f"\nTensorBoard (its steps count rounds from 0):\n    {_program('tensorboard')} --logdir {out}"
        f"\nCurves and predictions:\n    {result.picture}"
    )
    return result


def draw(result: DemoResult, task: SegmentationTask, data: ArrayDataModule, counts: np.ndarray) -> None:
    """Draws the clients' classes, the curves, and predictions beside the truth.

    Args:
        result: The rounds, and where the picture goes.
        task: The trained global model.
        data: The validation images come from here.
        counts: Images of each client by dominant class, shape ``(num_clients, num_classes)``.

    """
    from matplotlib.figure import Figure  # the extra `demo`

    colors = default_colors(data.num_classes)
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.25), squeeze=False).flat
    skew, loss, score = above.subplots(1, 3)

    bottom = np.zeros(len(counts))
    for number, (name, color) in enumerate(zip(data.class_names, colors, strict=True)):
        if counts[:, number].any():
            skew.bar(range(len(counts)), counts[:, number], 0.9, bottom, color=[v / 255 for v in color], label=name)
            bottom += counts[:, number]
    skew.set(title="Training images by dominant class", xlabel="client", ylabel="images", ylim=(0, 1.3 * bottom.max()))
    skew.legend(fontsize="small", ncols=3, loc="upper center")

    numbers = [row.number for row in result.rounds]
    loss.plot(numbers, [row.loss for row in result.rounds], "o-", label="clients, training")
    loss.plot(numbers, [row.val_loss for row in result.rounds], "o-", label="global model, validation")
    loss.set(title="Loss", xlabel="round", ylim=(0, None))
    score.plot(numbers, [row.val_pixel_acc for row in result.rounds], "o-", color="tab:green", label="pixel accuracy")
    score.plot(numbers, [row.val_miou for row in result.rounds], "o-", color="tab:red", label="mean IoU")
    score.set(title="Global model, validation", xlabel="round", ylim=(0, 1))
    for axes in (loss, score):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in (skew, loss, score):
        axes.xaxis.get_major_locator().set_params(integer=True)

    tiles = _predictions(task, data.val_dataset)
    grid = below.subplots(3, len(tiles), squeeze=False)
    for column, picture in enumerate(tiles):
        for row, (name, tile) in enumerate(zip(("input", "truth", "prediction"), picture.chunk(3, dim=2), strict=True)):
            grid[row, column].imshow(tile.permute(1, 2, 0).numpy(), interpolation="nearest")
            grid[row, column].set(xticks=[], yticks=[], ylabel=name if column == 0 else "")
    figure.savefig(result.picture, dpi=100)


def _predictions(task: SegmentationTask, dataset: ArrayDataset) -> list[Tensor]:
    """Input, truth and prediction side by side, uint8 of shape (3, H, 3 W), for some images from all over the set."""
    indices = np.linspace(0, len(dataset) - 1, min(_NUM_PICTURES, len(dataset))).astype(int)
    inputs, masks = dataset.get_batch(indices)
    with evaluating(task):
        predicted = task(inputs).argmax(1)
    colors = default_colors(task.num_classes)
    images = dataset.inputs[indices]  # before normalisation
    return [
        segmentation_grid(image[None], mask[None], guess[None], class_colors=colors, padding=0)
        for image, mask, guess in zip(images, masks, predicted, strict=True)
    ]


@contextmanager
def _single_thread_and_quiet() -> Iterator[None]:
    """One thread, and none of Lightning's advice on loggers, devices and workers; the demo has a table of its own."""
    logs = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_fed")]
    levels, threads = [log.level for log in logs], torch.get_num_threads()
    for log, level in zip(logs, (logging.ERROR, logging.WARNING), strict=True):
        log.setLevel(level)
    # Images so small gain nothing from a second thread; and where the cores are busy, threads spin while they wait for
    # one another.
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.|torch\.")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        torch.set_num_threads(threads)


def _line(values: Sequence[str]) -> str:
    return "  ".join(value.rjust(len(column)) for value, column in zip(values, _COLUMNS, strict=True))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _program(name: str) -> str:
    """Command that starts a program of this environment, activated or not."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) is not None or not path.exists():
        return name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
