"""Seconds and bytes per round for client evaluation, compared with training and with Lightning's validation.

All fits train the same clients in one process, in alternation: every repetition runs a short fit of each variant, and
ratios are computed within a repetition. Each client has a quarter as many validation examples as training examples.
Loggers, progress bars and checkpoints are off.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch
from common import QUIET, load_json, machine, parser, prepare, save_json, table, version, write_section
from margin_cost import SETTINGS, Setting
from speed import Stopwatch, elapsed, ratios
from torch.utils.data import Subset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.tasks import ClassificationTask

KINDS = {"train": "training alone", "val": "and validation on all data", "clients": "and evaluation by client"}
SIZES = {"mcmahan_cnn": (4, 200), "deeplab": (2, 32)}  # clients and examples


def run(setting: Setting, kind: str) -> tuple[tuple[float, float], dict[str, float]]:
    """Wall-clock and CPU seconds for a fit's second round, and the counted bytes."""
    watch = Stopwatch()
    callbacks = [watch, ClientEvaluation(1 if kind == "clients" else 0)]
    val = {key: Subset(data, range(len(data) // 4)) for key, data in setting.clients.items()}  # type: ignore[arg-type]
    data = FederatedDataModule(setting.clients, None if kind == "train" else val, batch_size=setting.batch_size)
    trainer = FederatedTrainer(max_rounds=2, seed=0, callbacks=callbacks, num_sanity_val_steps=0, **QUIET)
    trainer.fit(setting.module, datamodule=data)
    counted = {name: float(value) for name, value in trainer.callback_metrics.items() if "bytes" in name}
    return elapsed(watch.begin, watch.end), counted


def measure(setting: Setting, repetitions: int) -> dict[str, Any]:
    """Seconds per round for each variant and repetition, without the first repetition."""
    start = {name: value.clone() for name, value in setting.module.state_dict().items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in KINDS}
    names, counted = list(KINDS), {}
    for repetition in range(repetitions + 1):
        turn = repetition % len(names)
        for name in names[turn:] + names[:turn]:
            setting.module.load_state_dict(start)
            gc.collect()
            (wall, own), found = run(setting, name)
            counted = found if name == "clients" else counted
            if repetition:
                seconds[name].append([wall, own])
    count = sum(parameter.numel() for parameter in setting.module.parameters())
    return {"words": setting.words, "parameters": count, "seconds": seconds, "bytes": counted, "version": version()}


def report(results: dict[str, Any], threads: int) -> str:
    parts = [
        "`python benchmarks/evaluation_cost.py --out benchmarks/results/method_costs.md`."
        f" {machine(threads)}. All clients in every round, one local epoch, and a quarter as many validation examples."
        " Ratios are medians over repetitions of the ratio within a repetition, with the lowest and the highest in"
        " brackets, of the process' own seconds."
    ]
    for result in (results[name] for name in SETTINGS if name in results):
        seconds, rows = result["seconds"], []
        for name, words in KINDS.items():
            own = np.median(np.array(seconds[name]), axis=0)[1]
            found = ratios(seconds, name, "train", 1)
            rows.append([words, f"{own:.3f}", f"{np.median(found):.2f} ({found.min():.2f}-{found.max():.2f})"])
        counted = result["bytes"]
        what = f"**{result['words']}; {result['parameters']:,} parameters**: {len(seconds['train'])} repetitions."
        parts += [
            f"{what} Bytes of a round's evaluation: {counted['evaluation/down_bytes']:,.0f} down,"
            f" {counted['evaluation/up_bytes']:,.0f} up; of its training {counted['comm/down_bytes']:,.0f} and"
            f" {counted['comm/up_bytes']:,.0f}.",
            table(["", "s / round, process", "/ training"], rows),
        ]
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--repetitions", type=int, default=8, help="repetitions of each setting")
    made.add_argument("--parts", nargs="+", default=list(SIZES), choices=list(SIZES), help="what to measure")
    arguments = made.parse_args()
    prepare(arguments)
    results: dict[str, Any] = load_json(arguments.runs / "evaluation_cost.json") or {}
    for part in arguments.parts:
        torch.manual_seed(0)
        setting = SETTINGS[part][0](*((2, 24) if arguments.quick else SIZES[part]))
        if part == "mcmahan_cnn":  # with a validation step
            setting.module = ClassificationTask("mcmahan_cnn", num_classes=10, in_channels=1, input_size=28)
        results[part] = measure(setting, 1 if arguments.quick else arguments.repetitions)
        save_json(arguments.runs / "evaluation_cost.json", results)
    write_section(arguments.out, "evaluation-cost", report(results, arguments.threads))


if __name__ == "__main__":
    main()
