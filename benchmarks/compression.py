"""Compressed updates: scores and transmitted bytes for a CNN, a DeepLab and low-rank adapters."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import lightning as L
from common import PAIRED, QUIET, Curve, machine, paired, parser, prepare, run_all, spread, table, write_section

from lightning_fed import FederatedTrainer
from lightning_fed.compression import Downlink, Float16, Quantized, TopK
from lightning_fed.data import Dirichlet
from lightning_fed.datasets import CIFAR10, CamVid
from lightning_fed.steps import UpdateStep
from lightning_fed.tasks import ClassificationTask, SegmentationTask

PLAIN = "float32"
FORMS: dict[str, Callable[[], list[UpdateStep]]] = {
    PLAIN: list,
    "Float16()": lambda: [Float16()],
    "Quantized(8)": lambda: [Quantized(8)],
    "Quantized(4)": lambda: [Quantized(4)],
    "TopK(0.1)": lambda: [TopK(0.1)],
    "TopK(0.01)": lambda: [TopK(0.01)],
    "Quantized(8), Downlink(Quantized(8))": lambda: [Quantized(8), Downlink(Quantized(8))],
    "Quantized(4), Downlink(Quantized(4))": lambda: [Quantized(4), Downlink(Quantized(4))],
}


@dataclass(frozen=True)
class Study:
    """A model for all compression forms.

    Args:
        words: Description of the setting.
        monitor: Score, in percent.
        train: Trains with a form, a seed and rounds; returns scores and bytes by round.
    """

    words: str
    monitor: str
    rounds: int
    train: Callable[..., dict[str, list[float]]]


def train_cnn(form: str, seed: int, arguments: argparse.Namespace, rounds: int) -> dict[str, list[float]]:
    L.seed_everything(seed, verbose=False)
    task = ClassificationTask("niid_cnn", num_classes=10, in_channels=3, input_size=32, lr=0.01, momentum=0.9)
    data = CIFAR10(arguments.data, batch_size=64, eval_batch_size=500, train_size=500 if arguments.quick else 10_000)
    return fit(task, data, Dirichlet(10, alpha=0.5, balance=True), form, seed, rounds)


def train_deeplab(form: str, seed: int, arguments: argparse.Namespace, rounds: int) -> dict[str, list[float]]:
    L.seed_everything(seed, verbose=False)
    task = SegmentationTask(
        "DeepLabV3Plus", num_classes=11, encoder_name="mobilenet_v2", optimizer="AdamW", lr=0.001, ignore_index=255
    )
    data = CamVid(arguments.data, image_size=(96, 128), batch_size=8, train_size=32 if arguments.quick else 96)
    return fit(task, data, Dirichlet(4, alpha=1.0), form, seed, rounds)


def train_lora(form: str, seed: int, arguments: argparse.Namespace, rounds: int) -> dict[str, list[float]]:
    import finetuning  # needs the extra `peft`

    return finetuning.run("LoRA, rank 8", seed, argparse.Namespace(**vars(arguments), rounds=rounds), FORMS[form]())


def fit(
    task: L.LightningModule,
    data: L.LightningDataModule,
    partition: Dirichlet,
    form: str,
    seed: int,
    rounds: int,
) -> dict[str, list[float]]:
    curve = Curve(form)
    trainer = FederatedTrainer(
        max_rounds=rounds, partition=partition, steps=FORMS[form](), seed=seed, accelerator="cpu", callbacks=[curve],
        num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip
    trainer.fit(task, datamodule=data)
    return {
        name: [values.get(name, 0.0) for values in curve.rounds]
        for name in ("val_acc", "val_miou", "comm/up_bytes", "comm/down_bytes")
    }


STUDIES = {
    "cnn": Study(
        "CIFAR-10 (a lossy JPEG copy), NIID-Bench's CNN, 10,000 images, 10 clients by Dirichlet 0.5, all in every"
        " round, one local epoch in batches of 64, SGD of 0.01 with momentum 0.9. Score: accuracy",
        "val_acc",
        12,
        train_cnn,
    ),
    "deeplab": Study(
        "CamVid, 96 frames of 96 x 128 pixels, DeepLabV3+ on MobileNetV2 from scratch, 4 clients by Dirichlet 1.0, all"
        " in every round, one local epoch in batches of 8, AdamW of 0.001. Score: mean IoU",
        "val_miou",
        12,
        train_deeplab,
    ),
    "lora": Study(
        "The transformer and the writers of `finetuning.py`, with LoRA of rank 8, 10 of them in a round."
        " Score: accuracy",
        "val_acc",
        12,
        train_lora,
    ),
}


def section(name: str, found: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    study, last = STUDIES[name], 3
    scores = {form: [100 * fmean(run[study.monitor][-last:]) for run in runs] for form, runs in found.items()}
    up, down = ({form: sum(runs[0][f"comm/{way}_bytes"]) for form, runs in found.items()} for way in ("up", "down"))
    rows = []
    for form, values in scores.items():
        pairs = zip(values, scores.get(PLAIN, []), strict=False)
        apart = "" if form == PLAIN else paired([value - plain for value, plain in pairs], 1)
        rows.append([
            f"`{form}`", *(f"{sent[form] / 1e6:.2f} ({sent[PLAIN] / sent[form]:.1f})" for sent in (up, down)),
            spread(values, 1), apart, len(values),
        ])  # fmt: skip
    header = ["form", "MB up (times less)", "MB down (times less)", f"score, last {last} rounds (%)"]
    header += [f"to `{PLAIN}`", "seeds"]
    return (
        f"`python benchmarks/compression.py --data DATA --studies {name} --out benchmarks/results/compression.md`."
        f" {study.words} in %, {len(found[PLAIN][0][study.monitor])} rounds, mean ± standard deviation over seeds."
        f" {PAIRED} {machine(arguments.threads)}.\n\n{table(header, rows)}"
    )


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=(0, 1, 2))
    made.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="models")
    arguments = made.parse_args()
    prepare(arguments)
    for name in arguments.studies:
        rounds = 2 if arguments.quick else STUDIES[name].rounds
        train = partial(STUDIES[name].train, rounds=rounds)
        found = run_all(f"compression/{name}", FORMS, train, arguments)
        if PLAIN in found:
            write_section(arguments.out, f"compression-{name}", section(name, found, arguments))


if __name__ == "__main__":
    main()
