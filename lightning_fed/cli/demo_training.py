"""Trains the demo, DeepLabV3+ on clients with different images, and writes a report."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fed.callbacks.client_segmentations import ClientSegmentations
from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation
from lightning_fed.compare.run import RoundCurve, quiet
from lightning_fed.data.partition import Partition
from lightning_fed.data.population import seeded_generators
from lightning_fed.datasets.array_module import ArrayDataModule
from lightning_fed.datasets.camvid import CamVid
from lightning_fed.datasets.shapes import Shapes
from lightning_fed.partitions.appearance import Look
from lightning_fed.partitions.label_partitions import Dirichlet
from lightning_fed.partitions.partitioned import PartitionedData
from lightning_fed.report.callback import Report
from lightning_fed.tasks.segmentation import SegmentationTask
from lightning_fed.trainer import FederatedTrainer

_ENCODER = "tu-mobilenetv3_small_100"
_SHAPES_MEAN, _SHAPES_STD = 0.47, 0.22  # one value for all channels
_DECISIONS = {
    "own": "the clients' inputs differ, so each client has separate statistics",
    "pooled": "the clients' inputs are similar, so all clients share pooled statistics",
    "": "no decision",
}
# Column name: name in the log, factor, number of digits.
_COLUMNS = {
    "clients": ("fed/clients", 1, 0),
    "loss": ("train_loss", 1, 3),
    "val mIoU": ("fed/val_miou/mean", 1, 3),
    "pixel acc": ("fed/val_pixel_acc/mean", 1, 3),
    "MB up": ("comm/up_bytes", 1e-6, 1),
    "MB down": ("comm/down_bytes", 1e-6, 1),
    "seconds": ("seconds", 1, 1),
}


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo: logged values by round, TensorBoard folder, and HTML report."""

    rounds: list[dict[str, float]]
    log_dir: Path
    report: Path


def run_demo(
    data_dir: Path | None = None,
    rounds: int = 16,
    out: Path = Path("runs/demo"),
    *,
    num_clients: int = 24,
    clients_per_round: int = 5,
    num_scenes: int = 960,
) -> DemoResult:
    """Trains DeepLabV3+ on clients with different images, and writes the results into ``out``.

    Each client's class frequencies are drawn from a Dirichlet distribution. The generated images of clients also differ
    in contrast and colours.
    """
    missing = [name for name in ("matplotlib", "tensorboard") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"The demo needs {' and '.join(missing)}: pip install 'lightning-fed[demo]'")
    data: ArrayDataModule
    mean, std = None, None
    if data_dir is None:
        data = Shapes(num_train=num_scenes, num_val=1, num_test=1, batch_size=8, eval_batch_size=32)
        split = Dirichlet(num_clients, alpha=1.0)
        mean, std = _SHAPES_MEAN, _SHAPES_STD
        partition: Partition = Look(split, contrast=1.0, colour=1.0, mean=mean, std=std)
    else:
        data = CamVid(data_dir, image_size=(96, 128), augment=True, batch_size=8, eval_batch_size=32)
        # CamVid has no background class.
        partition = Dirichlet(num_clients, alpha=0.5, background=None, min_size=4)
    clients = PartitionedData(data, partition, val_fraction=0.1, seed=0)
    with quiet(), _single_thread(), seeded_generators(seed=0):
        clients.setup("fit")
        task = SegmentationTask(
            "DeepLabV3Plus",
            num_classes=data.num_classes,
            encoder_name=_ENCODER,
            model_kwargs={"decoder_channels": 64},
            optimizer="AdamW",
            lr=0.002,
        )
        table, evaluation = RoundCurve(_say_round), ClientEvaluation(clients="round")
        logger = TensorBoardLogger(out, name="", default_hp_metric=False)
        trainer = FederatedTrainer(
            max_rounds=rounds,
            clients_per_round=clients_per_round,
            local_epochs=3,
            seed=0,
            logger=logger,
            callbacks=[
                table,
                evaluation,
                ClientSegmentations(4, class_names=data.class_names, mean=mean, std=std),
                Report(),
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        parameters = sum(parameter.numel() for parameter in task.parameters())
        _say(
            f"DeepLabV3+ ({_ENCODER}, {parameters / 1e6:.1f} M parameters, not pretrained) on {type(data).__name__}:"
            f" {len(data.train_dataset)} images over {num_clients} clients, {clients_per_round} in a round.\n"
        )
        _say("  ".join(["round", *_COLUMNS]))
        trainer.fit(task, datamodule=clients)
    shift = next((row["fed/batch_norm_shift"] for row in table.rounds if "fed/batch_norm_shift" in row), 0.0)
    _say(f"\nBatchNorm: {_DECISIONS[trainer.federation.batch_norm_decision]} (shift {shift:.2f} after round 1).")
    result = DemoResult(table.rounds, Path(logger.log_dir), Path(logger.log_dir) / "report.html")
    _say(
        "\nTensorBoard (steps are batches; `epoch` is the round, from 0):"
        f"\n    {_find_program('tensorboard')} --logdir {out}"
        f"\nReport with curves and predictions, for a browser:\n    {result.report}"
    )
    return result


@contextmanager
def _single_thread() -> Iterator[None]:
    # Small images do not benefit from a second thread, and idle threads busy-wait.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _say_round(number: int, values: Mapping[str, float]) -> None:
    cells = {name: f"{factor * values[key]:.{digits}f}" for name, (key, factor, digits) in _COLUMNS.items()}
    _say("  ".join(cell.rjust(len(name)) for name, cell in {"round": f"{number}", **cells}.items()))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _find_program(name: str) -> str:
    path = Path(sys.executable).with_name(name)  # works also if the environment is not activated
    if shutil.which(name) is not None or not path.exists():
        return name
    return os.path.relpath(path)
