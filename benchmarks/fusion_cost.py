"""Seconds per round of FedFusion compared with FedAvg: each operator, also with cached global features in a visit.

All methods train the same clients in one process, alternating: every repetition runs a short fit per method, with
ratios within a repetition. Validation, loggers, progress bars and checkpoints are off. BatchNorm's statistics are
averaged, because recalibration would add the same pass to each method.
"""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import numpy as np
import torch
from common import QUIET, load_json, machine, parser, prepare, save_json, table, version, write_section
from margin_cost import SETTINGS, Setting
from speed import Stopwatch, elapsed, ratios, spread

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.callbacks import FeatureFusion

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("FedAvg", {}),
    "single": ("`single`", {"operator": "single"}),
    "multi": ("`multi`", {"operator": "multi"}),
    "conv": ("`conv`", {"operator": "conv"}),
    "cached": ("`conv`, `cache_global_features=True`", {"operator": "conv", "cache_global_features": True}),
}
PARTS = {  # setting, local epochs, methods
    "mcmahan_cnn": ("mcmahan_cnn", 1, ("fedavg", "single", "multi", "conv")),
    "mcmahan_cnn, 5 epochs": ("mcmahan_cnn", 5, ("fedavg", "conv", "cached")),
    "deeplab": ("deeplab", 1, ("fedavg", "multi")),
}
SIZES = {"mcmahan_cnn": (4, 100), "deeplab": (2, 16)}  # clients and examples


def run(setting: Setting, method: str, epochs: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds for a fit's second round."""
    watch = Stopwatch()
    options = METHODS[method][1]
    # The 1x1 convolution starts as the identity; the values do not influence the time.
    callbacks = [FeatureFusion(**options, conv_init="local")] if options else []
    trainer = FederatedTrainer(
        max_rounds=2, local_epochs=epochs, batch_norm="average", seed=0, callbacks=[*callbacks, watch], **QUIET
    )
    module = copy.deepcopy(setting.module)  # the fit modifies the module
    trainer.fit(module, datamodule=FederatedDataModule(setting.clients, batch_size=setting.batch_size))
    return elapsed(watch.begin, watch.end)


def measure(setting: Setting, epochs: int, methods: tuple[str, ...], repetitions: int) -> dict[str, Any]:
    """Seconds per round for each method and repetition, without the first repetition."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in methods}
    for repetition in range(repetitions + 1):
        turn = repetition % len(methods)
        for name in methods[turn:] + methods[:turn]:
            gc.collect()
            wall, own = run(setting, name, epochs)
            if repetition:
                seconds[name].append([wall, own])
        shown = {name: round(values[-1][1], 4) for name, values in seconds.items() if values}
        print(f"{setting.words[:14]} {repetition}/{repetitions} {shown}", flush=True)
    return {"words": setting.words, "epochs": epochs, "seconds": seconds, "version": version()}


def report(results: dict[str, Any], threads: int) -> str:
    load = os.getloadavg()[0]
    busy = f"; other programs were running, load average {load:.1f}" if load > threads + 0.5 else ""
    parts = [
        f"`python benchmarks/fusion_cost.py --out benchmarks/results/method_costs.md`."
        f" {machine(threads)}{busy}. All clients in every"
        " round. Ratios are medians over repetitions of the ratio within a repetition, with the quartiles in brackets;"
        " seconds are the process' own."
    ]
    header = ["", "s / round", "/ FedAvg"]
    for result in (results[name] for name in PARTS if name in results):
        seconds, rows = result["seconds"], []
        for name in seconds:
            own = np.median(np.array(seconds[name])[:, 1])
            rows.append([METHODS[name][0], f"{own:.3f}", spread(ratios(seconds, name, "fedavg", 1))])
        epochs = "one local epoch" if result["epochs"] == 1 else f"{result['epochs']} local epochs"
        count = len(seconds["fedavg"])
        parts += [f"**{result['words']}, {epochs}**: {count} repetitions of a round.", table(header, rows)]
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--repetitions", type=int, default=8, help="repetitions of each part")
    made.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="what to measure")
    arguments = made.parse_args()
    prepare(arguments)
    results: dict[str, Any] = load_json(arguments.runs / "fusion_cost.json") or {}
    for part in arguments.parts:
        kind, epochs, methods = PARTS[part]
        torch.manual_seed(0)
        setting = SETTINGS[kind][0](*((2, 24) if arguments.quick else SIZES[kind]))
        results[part] = measure(setting, epochs, methods, 1 if arguments.quick else arguments.repetitions)
        save_json(arguments.runs / "fusion_cost.json", results)
    write_section(arguments.out, "fusion-cost", report(results, arguments.threads))


if __name__ == "__main__":
    main()
