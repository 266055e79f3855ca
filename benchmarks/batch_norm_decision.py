"""Own or pooled BatchNorm statistics: the shift by setting, and one decision per model against one per layer.

All ways have the same weights. `pooled` and `own` treat the whole model, `by layer` has own statistics only
in layers with a shift above the threshold. Settings and networks come from `appearance.py`, the retina from
`hospitals.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import appearance
import hospitals
import torch
from common import QUIET, Curve, machine, parser, prepare, run_all, spread, table, write_section
from torch import Tensor

from lightning_fed import FederatedTrainer
from lightning_fed.batch_norm.measurement import LARGE_SHIFT
from lightning_fed.batch_norm.pooling import shift_between

SETTINGS = ("alike", "mild", "weak", "medium", "strong", "drives", "retina", "classes 0.1")
WAYS = ("pooled", "own", "by layer")


def shifts_of(states: Mapping[Any, Mapping[str, Tensor]], sizes: Mapping[Any, int]) -> dict[str, float]:
    """Shift by layer, from the clients' running statistics."""
    layers = [name.removesuffix(".running_mean") for name in next(iter(states.values())) if "running_mean" in name]
    shifts = {}
    for layer in layers:
        reports = [
            {
                f"batch_norm:{layer}:mean": state[f"{layer}.running_mean"],
                f"batch_norm:{layer}:var": state[f"{layer}.running_var"],
                f"batch_norm:{layer}:count": torch.tensor(float(sizes[client])),
            }
            for client, state in states.items()
        ]
        shifts[layer] = shift_between(reports, layer) or 0.0
    return shifts


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    if name == "retina":
        data, classes = hospitals.Retina(arguments.data).hospitals(), 2
    else:
        data, classes = appearance.data_of(name, seed, arguments)
    task = appearance.task_of(classes, "batch", seed, "scratch", arguments)
    curve = Curve(f"{name} {seed}:")
    trainer = FederatedTrainer(
        max_rounds=arguments.rounds or appearance.ROUNDS["scratch"], seed=seed, local_epochs=appearance.EPOCHS,
        callbacks=[curve], limit_val_batches=0, **QUIET,
    )  # fmt: skip
    trainer.fit(task, datamodule=data)
    weights = {key: value.clone() for key, value in task.state_dict().items()}
    measured = appearance.measured_states(task, weights, data)
    own, shared = measured["measured"], measured["pooled"]
    shifts = shifts_of(own, {client: len(data.clients[client]) for client in own})
    large = tuple(f"{layer}." for layer, shift in shifts.items() if shift > LARGE_SHIFT)
    by_layer = {
        client: {key: value if key.startswith(large) else shared[client][key] for key, value in state.items()}
        for client, state in own.items()
    }
    states = {"pooled": shared, "own": own, "by layer": by_layer}
    return {
        "shifts": [values["fed/batch_norm_shift"] for values in curve.rounds if "fed/batch_norm_shift" in values],
        "decision": trainer.federation.batch_norm_decision,
        "large": len(large),
        "layers": len(shifts),
        "scores": {way: appearance.scores_of(task, states[way], data) for way in WAYS},
        "machine": machine(arguments.threads),
    }


def rows_of(results: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Table rows: shift, decision and mean IoU by setting."""
    return [
        [
            name,
            spread([result["shifts"][0] for result in runs], 2),
            " ".join(dict.fromkeys(result.get("decision", "") for result in runs)),
            f"{max(result['large'] for result in runs)} of {runs[0]['layers']}" if "large" in runs[0] else "",
            *(spread([result["scores"][way]["all"] for result in runs if way in result["scores"]]) for way in WAYS),
            spread([100 * (result["scores"]["own"]["all"] - result["scores"]["pooled"]["all"]) for result in runs], 1),
            str(len(runs)),
        ]
        for name, runs in results.items()
    ]


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False, seeds=(0, 1, 2))
    made.add_argument("--data", type=Path, default=None, help="folder that holds CamVid and the retina")
    made.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="settings")
    made.add_argument("--rounds", type=int, default=0, help="rounds; 0 for those of `appearance.py`")
    made.add_argument("--scenes", type=int, default=360, help="generated scenes of all clients together")
    made.add_argument("--side", type=int, default=64, help="pixels of a side of a generated scene")
    made.add_argument("--small", action="store_true", help="a U-Net of three stages in place of DeepLabV3+")
    arguments = made.parse_args()
    prepare(arguments)
    arguments.weights = None
    if arguments.quick:
        arguments.rounds, arguments.scenes, arguments.side, arguments.small = 2, 60, 32, True
        arguments.settings = ["alike", "strong"]
    study = "batch_norm_decision_small" if arguments.small else "batch_norm_decision"
    results = run_all(study, arguments.settings, run, arguments)
    header = ["", "shift", "decision", "layers above", *WAYS, "own to pooled", "seeds"]
    flag, network = (" --small", "a small U-Net") if arguments.small else ("", "DeepLabV3+ with a ResNet-18")
    text = (
        f"`python benchmarks/batch_norm_decision.py{flag} --data DATA`. {network}, from scratch. Mean IoU on all"
        " clients' test images together. Shift: in the first round, largest of the layers. Layers above: with a shift"
        f" above {LARGE_SHIFT} at the end; `by layer` has own statistics in these. Differences in points."
        f" {'; '.join(dict.fromkeys(result['machine'] for runs in results.values() for result in runs))}."
    )
    write_section(arguments.out, study, f"{text}\n\n{table(header, rows_of(results))}")


if __name__ == "__main__":
    main()
