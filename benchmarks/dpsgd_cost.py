"""Seconds per round for DP-SGD with and without noise, compared with plain training.

All variants train the same clients in one process, in alternation: every repetition runs a short fit of each variant,
and ratios are computed within a repetition. All networks have GroupNorm instead of BatchNorm. Validation, loggers,
progress bars and checkpoints are off. Plain training passes over all examples; DP-SGD draws as many batches with the
same expected size.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import torch
from common import QUIET, load_json, machine, parser, prepare, save_json, table, version, write_section
from margin_cost import SETTINGS, Setting
from speed import Stopwatch, elapsed, ratios, spread

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.modules import to_group_norm
from lightning_fed.privacy import DPSGD

METHODS = {
    "plain": ("plain training", None),
    "clip": ("`DPSGD`, `noise_multiplier=0`", 0.0),
    "noise": ("`DPSGD`, `noise_multiplier=1`", 1.0),
}
SIZES = {"mcmahan_cnn": (4, 200), "deeplab": (2, 32)}  # clients and examples


def run(setting: Setting, method: str) -> tuple[float, float]:
    """Wall-clock and CPU seconds for a fit's second round."""
    watch, noise = Stopwatch(), METHODS[method][1]
    callbacks = [watch] if noise is None else [DPSGD(1.0, noise, delta=1e-3), watch]
    trainer = FederatedTrainer(max_rounds=2, seed=0, callbacks=callbacks, **QUIET)
    trainer.fit(setting.module, datamodule=FederatedDataModule(setting.clients, batch_size=setting.batch_size))
    return elapsed(watch.begin, watch.end)


def measure(setting: Setting, repetitions: int) -> dict[str, Any]:
    """Seconds per round for each method and repetition, without the first repetition."""
    setting.module = to_group_norm(setting.module)  # type: ignore[assignment] # the same module
    start = {name: value.clone() for name, value in setting.module.state_dict().items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    names = list(METHODS)
    for repetition in range(repetitions + 1):
        turn = repetition % len(names)
        for name in names[turn:] + names[:turn]:
            setting.module.load_state_dict(start)
            gc.collect()
            wall, own = run(setting, name)
            if repetition:
                seconds[name].append([wall, own])
        shown = {name: round(values[-1][1], 4) for name, values in seconds.items() if values}
        print(f"{setting.words[:14]} {repetition}/{repetitions} {shown}", flush=True)
    count = sum(parameter.numel() for parameter in setting.module.parameters())
    return {"words": setting.words, "parameters": count, "seconds": seconds, "version": version()}


def report(results: dict[str, Any], threads: int) -> str:
    load = os.getloadavg()[0]
    busy = f"; other programs were running, load average {load:.1f}" if load > threads + 0.5 else ""
    parts = [
        f"`python benchmarks/dpsgd_cost.py --out benchmarks/results/method_costs.md`."
        f" {machine(threads)}{busy}. All clients in every"
        " round, one local epoch. Ratios are medians over repetitions of the ratio within a repetition, with the"
        " quartiles in brackets; seconds are the process' own."
    ]
    header = ["", "s / round", "/ plain"]
    for result in (results[name] for name in SETTINGS if name in results):
        seconds, rows = result["seconds"], []
        for name, (words, _) in METHODS.items():
            own = np.median(np.array(seconds[name])[:, 1])
            rows.append([words, f"{own:.3f}", spread(ratios(seconds, name, "plain", 1))])
        what = f"**{result['words']}; {result['parameters']:,} parameters**"
        parts += [f"{what}: {len(seconds['plain'])} repetitions of a round.", table(header, rows)]
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--repetitions", type=int, default=5, help="repetitions of each setting")
    made.add_argument("--parts", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="what to measure")
    arguments = made.parse_args()
    prepare(arguments)
    results: dict[str, Any] = load_json(arguments.runs / "dpsgd_cost.json") or {}
    for part in arguments.parts:
        torch.manual_seed(0)
        setting = SETTINGS[part][0](*((2, 24) if arguments.quick else SIZES[part]))
        results[part] = measure(setting, 1 if arguments.quick else arguments.repetitions)
        save_json(arguments.runs / "dpsgd_cost.json", results)
    write_section(arguments.out, "dpsgd-cost", report(results, arguments.threads))


if __name__ == "__main__":
    main()
