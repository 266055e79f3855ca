"""Seconds per round for FedMargin, with prototypes from exact and from online passes, compared with FedAvg.

All three train the same clients with one local epoch, in one process, in alternation: every repetition runs a short fit
of each variant, and ratios are computed within a repetition. Validation, loggers, progress bars and checkpoints are
off. BatchNorm's statistics are averaged, because recalibration would add the same pass to each method.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, load_json, machine, parser, prepare, save_json, table, version, write_section
from speed import Net, Stopwatch, elapsed, ratios, spread
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.callbacks import ClassPrototypes
from lightning_fed.datasets.shapes import ShapesDataset
from lightning_fed.tasks import SegmentationTask
from lightning_fed.tasks.networks import build_network

WORDS = {
    "fedavg": "FedAvg",
    "online": 'FedMargin, `passes="online"`',
    "exact": 'FedMargin, `passes="exact"`',
}


@dataclass
class Setting:
    """A model and clients. Every fit starts from the module's current weights."""

    words: str
    module: L.LightningModule
    clients: Mapping[int, Dataset[Any]]
    batch_size: int


def digits(count: int, samples: int) -> Setting:
    generator = torch.Generator().manual_seed(0)
    clients = {
        client: TensorDataset(
            torch.randn(samples, 1, 28, 28, generator=generator),
            torch.randint(10, (samples,), generator=generator),
        )
        for client in range(count)
    }
    words = f"`mcmahan_cnn` on random 28 x 28 images, {count} clients of {samples} examples, batches of 20"
    return Setting(words, Net(build_network("mcmahan_cnn", num_classes=10)), clients, 20)


def scenes(count: int, samples: int) -> Setting:
    clients = {client: ShapesDataset(samples, seed=client) for client in range(count)}
    module = SegmentationTask("DeepLabV3Plus", num_classes=6, encoder_name="mobilenet_v2", encoder_weights=None)
    words = f"DeepLabV3+ with MobileNetV2 on `Shapes` of 64 x 64, {count} clients of {samples} scenes, batches of 8"
    return Setting(words, module, clients, 8)


SETTINGS = {"mcmahan_cnn": (digits, (10, 200)), "deeplab": (scenes, (4, 32))}


def run(setting: Setting, method: str, rounds: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds for a fit, without the first round."""
    watch = Stopwatch()
    callbacks = [] if method == "fedavg" else [ClassPrototypes(passes=method)]  # type: ignore[arg-type]
    trainer = FederatedTrainer(
        max_rounds=rounds + 1,
        method="fedavg" if method == "fedavg" else "fedmargin",
        batch_norm="average",
        seed=0,
        callbacks=[*callbacks, watch],
        **QUIET,
    )
    trainer.fit(setting.module, datamodule=FederatedDataModule(setting.clients, batch_size=setting.batch_size))
    return elapsed(watch.begin, watch.end)


def measure(setting: Setting, rounds: int, repetitions: int) -> dict[str, Any]:
    """Seconds per round for each method and repetition, without the first repetition."""
    start = {name: value.clone() for name, value in setting.module.state_dict().items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in WORDS}
    names = list(WORDS)
    for repetition in range(repetitions + 1):
        for name in names[repetition % 3 :] + names[: repetition % 3]:
            setting.module.load_state_dict(start)
            gc.collect()
            wall, own = run(setting, name, rounds)
            if repetition:
                seconds[name].append([wall / rounds, own / rounds])
        shown = {name: round(values[-1][1], 4) for name, values in seconds.items() if values}
        print(f"{setting.words[:14]} {repetition}/{repetitions} {shown}", flush=True)
    return {"words": setting.words, "rounds": rounds, "seconds": seconds, "version": version()}


def report(results: dict[str, Any], threads: int) -> str:
    parts = [
        f"`python benchmarks/margin_cost.py --out benchmarks/results/method_costs.md`."
        f" {machine(threads)}. One local epoch; all"
        " clients in every round. Ratios are medians over repetitions of the ratio within a repetition, with the"
        " quartiles in brackets; seconds are the process' own."
    ]
    header = ["", "s / round", "/ FedAvg"]
    for result in (results[name] for name in SETTINGS if name in results):
        seconds, rows = result["seconds"], []
        for name, words in WORDS.items():
            own = np.median(np.array(seconds[name])[:, 1])
            rows.append([words, f"{own:.3f}", spread(ratios(seconds, name, "fedavg", 1))])
        count = len(seconds["fedavg"])
        parts += [f"**{result['words']}**: {count} repetitions of {result['rounds']} rounds.", table(header, rows)]
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--repetitions", type=int, default=8, help="repetitions of each setting")
    made.add_argument("--parts", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="what to measure")
    arguments = made.parse_args()
    prepare(arguments)
    results: dict[str, Any] = load_json(arguments.runs / "margin_cost.json") or {}
    for part in arguments.parts:
        build, sizes = SETTINGS[part]
        torch.manual_seed(0)
        setting = build(*((2, 24) if arguments.quick else sizes))
        results[part] = measure(setting, 1 if arguments.quick else 2, 1 if arguments.quick else arguments.repetitions)
        save_json(arguments.runs / "margin_cost.json", results)
    write_section(arguments.out, "margin-cost", report(results, arguments.threads))


if __name__ == "__main__":
    main()
