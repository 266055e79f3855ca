"""BatchNorm treatments for federated segmentation on CamVid, compared with central training.

The script runs one (setting, method, seed) after another, stores each result as JSON, skips finished runs, and makes a
table from the stored results. All comparisons use validation frames; only ``--test`` uses test frames.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, Curve, load_json, machine, parser, prepare, save_json, table, version, write_section
from torch.utils.data import DataLoader, Dataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.data import ByGroup, Dirichlet
from lightning_fed.datasets.camvid import CamVid
from lightning_fed.report.figures import INK, save_figure
from lightning_fed.tasks.segmentation import SegmentationTask

BATCH_SIZE = 8


@dataclass(frozen=True)
class Setting:
    """Clients, and local work per round."""

    name: str
    words: str
    rounds: int
    clients_per_round: int | float = 1.0
    local_epochs: int = 1


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("sequence", "3 video sequences, all in every round, 1 local epoch", rounds=15),
        Setting("dirichlet", "8 clients, Dirichlet 0.1, 4 in a round, 1 local epoch", rounds=30, clients_per_round=4),
        Setting("sequence-3", "3 video sequences, all in every round, 3 local epochs", rounds=5, local_epochs=3),
    )
}

METHODS: dict[str, dict[str, Any]] = {
    "average": {"batch_norm": "average"},
    "recalibrate": {"batch_norm": "recalibrate"},
    "groupnorm": {"norm": "group"},
    "personal": {"batch_norm": "personal"},
    "frozen": {"batch_norm": "frozen", "settings": ("sequence",), "seeds": 1},
    "central": {"central": True, "settings": ("sequence",)},
    "central-groupnorm": {"central": True, "norm": "group", "settings": ("sequence",)},
}
WORDS = {
    "average": "FedAvg, `batch_norm='average'`",
    "recalibrate": "FedAvg, `batch_norm='recalibrate'`",
    "personal": "FedAvg, `batch_norm='personal'` (FedBN)",
    "frozen": "FedAvg, `batch_norm='frozen'`",
    "groupnorm": "FedAvg, GroupNorm (`to_group_norm`)",
    "central": "centralised, BatchNorm",
    "central-groupnorm": "centralised, GroupNorm",
}


class Clients(FederatedDataModule):
    """Clients with training and held-out frames; validation frames for the global model."""

    def __init__(self, train: Mapping[Any, Dataset[Any]], held_out: Mapping[Any, Dataset[Any]], val: Any) -> None:
        super().__init__(train, val=held_out, batch_size=BATCH_SIZE)
        self.global_val = val

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.global_val, batch_size=BATCH_SIZE)


def make_data(camvid: CamVid, setting: Setting, seed: int, quick: bool) -> Clients:
    """Splits every second frame; each client holds out 15 % (the end of a sequence, otherwise random frames)."""
    frames = camvid.train_dataset
    frames = frames.subset(np.arange(0, len(frames), 8 if quick else 2))
    if setting.name.startswith("sequence"):
        parts = ByGroup().split(frames, seed)
    else:
        parts = Dirichlet(8, 0.1, definition="per_client", background=None).split(frames, seed)
    train, held_out = {}, {}
    for client, indices in parts.items():
        if not setting.name.startswith("sequence"):
            indices = np.random.default_rng([seed, len(train)]).permutation(indices)
        kept = len(indices) - max(1, round(0.15 * len(indices)))
        train[client], held_out[client] = frames.subset(indices[:kept]), frames.subset(indices[kept:])
    val = camvid.val_dataset
    return Clients(train, held_out, val.subset(np.arange(0, len(val), 25 if quick else 2)))


def make_task(method: str, arguments: argparse.Namespace) -> SegmentationTask:
    return SegmentationTask(
        arguments.model,
        num_classes=11,
        encoder_name=arguments.encoder,
        norm=METHODS[method].get("norm", "batch"),
        lr=arguments.lr,
        momentum=0.9,
    )


def run(setting: Setting, method: str, seed: int, camvid: CamVid, arguments: argparse.Namespace) -> dict[str, Any]:
    L.seed_everything(seed, verbose=False)
    task = make_task(method, arguments)
    data = make_data(camvid, setting, seed, arguments.quick)
    sizes = [len(part) for part in data.clients.values()]
    rounds = 1 if arguments.quick else setting.rounds
    steps = rounds * setting.local_epochs * sum(-(-size // BATCH_SIZE) for size in sizes)
    steps = round(steps * (setting.clients_per_round / len(sizes) if setting.clients_per_round != 1.0 else 1))
    curve = Curve(f"{setting.name} {method} {seed}:")
    if METHODS[method].get("central"):
        trainer = L.Trainer(max_epochs=-1, max_steps=steps, callbacks=[curve], **QUIET)
    else:
        trainer = FederatedTrainer(
            max_rounds=rounds,
            local_epochs=setting.local_epochs,
            clients_per_round=setting.clients_per_round,
            batch_norm=METHODS[method].get("batch_norm", "average"),
            seed=seed,
            callbacks=[curve],
            **QUIET,
        )
    trainer.fit(task, datamodule=data)
    torch.save(task.state_dict(), result_path(arguments, setting.name, method, seed).with_suffix(".pt"))
    return {
        "setting": setting.name,
        "method": method,
        "seed": seed,
        "sizes": sizes,
        "steps": trainer.global_step,
        "version": version(),
        "machine": machine(arguments.threads),
        "curve": curve.rounds,
    }


def test(setting: str, method: str, seed: int, camvid: CamVid, arguments: argparse.Namespace) -> None:
    path = result_path(arguments, setting, method, seed)
    result = load_json(path)
    if result is None or "test" in result:
        return
    task = make_task(method, arguments)
    task.load_state_dict(torch.load(path.with_suffix(".pt"), weights_only=True))
    trainer = L.Trainer(**QUIET)
    loader = DataLoader(camvid.test_dataset, batch_size=BATCH_SIZE)
    result["test"] = trainer.test(task, loader, verbose=False)[0]
    save_json(path, result)
    print(f"{setting} {method} {seed}: {result['test']}", flush=True)


def result_path(arguments: argparse.Namespace, setting: str, method: str, seed: int) -> Path:
    return arguments.runs / "camvid" / f"{setting}_{method}_{seed}.json"


def last(result: dict[str, Any], name: str, count: int = 3) -> float:
    """Mean over the last rounds with a value: single rounds are noisy at a constant learning rate."""
    values = [values[name] for values in result["curve"] if name in values]
    return float(np.mean(values[-count:])) if values else float("nan")


def report(arguments: argparse.Namespace) -> str:
    parts = []
    height, width = arguments.size
    for setting in SETTINGS.values():
        rows = []
        for method in METHODS:
            results = [load_json(result_path(arguments, setting.name, method, seed)) for seed in range(10)]
            results = [result for result in results if result is not None]
            if not results:
                continue
            curve = results[0]["curve"]
            down = np.mean([values["comm/down_bytes"] for values in curve]) if "comm/down_bytes" in curve[0] else None
            up = np.mean([values["comm/up_bytes"] for values in curve]) if "comm/up_bytes" in curve[0] else None
            rows.append(
                [
                    WORDS[method],
                    len(results),
                    spread(results, "val_miou"),
                    spread(results, "val_pixel_acc"),
                    spread(results, "val_loss"),
                    spread(results, "train_loss"),
                    spread(results, "fed/val_miou/mean"),
                    over(result.get("test", {}).get("test_miou") for result in results),
                    f"{np.mean([values['cpu_s'] for r in results for values in r['curve'][: setting.rounds]]):.1f}",
                    "" if down is None else f"{(down + up) / 1e6:.0f}",
                ]
            )
        if rows:
            parts.append(f"**{setting.words[0].upper()}{setting.words[1:]}, {setting.rounds} rounds**")
            header = ["", "seeds", "val mIoU", "val pixel acc.", "val loss", "train loss", "mIoU at the clients"]
            parts.append(table([*header, "test mIoU", "CPU s / round", "MB / round"], rows))
            parts.append(growth(arguments, setting))
    words = (
        f"`python benchmarks/camvid.py --data DATA --out benchmarks/results/segmentation.md`."
        f" CamVid at {width}x{height}, every second training frame (184, of which the clients hold back 15 % each),"
        f" `{arguments.model}`,"
        f" `{arguments.encoder}` from scratch, cross-entropy, SGD with rate {arguments.lr} and momentum 0.9, batches"
        f" of {BATCH_SIZE}. Validation and test frames are SegNet's (validation: every second one of its 101 frames,"
        " from drive 0016E5; test: all 233, from drives 0001TP and Seq05VD). *mIoU at the clients* is the mean over"
        " clients, each with its own held-out frames and its own personal entries. Means over the last three rounds,"
        " with the range over seeds in brackets; the learning rate is constant, so single rounds are noisy. CPU"
        " seconds are those of training and aggregation in a round, the mean over rounds and seeds; megabytes those"
        f" of a round's messages, the mean over the rounds of the first seed. {machine(arguments.threads)}."
    )
    return "\n\n".join([words, *parts])


def growth(arguments: argparse.Namespace, setting: Setting) -> str:
    """Table of the validation mIoU by round, for seed 0."""
    marks = sorted({1, 2, 3, 5, 10, 15, 20, 30} & set(range(1, setting.rounds + 1)))
    rows = []
    for method in METHODS:
        result = load_json(result_path(arguments, setting.name, method, 0))
        if result is not None:
            curve = [values["val_miou"] for values in result["curve"]]
            cells = [f"{curve[mark - 1]:.3f}" if mark <= len(curve) else "" for mark in marks]
            rows.append([WORDS[method], *cells])
    return table(["validation mIoU after round (seed 0)", *map(str, marks)], rows)


def draw(path: Path, arguments: argparse.Namespace) -> None:
    """Draws the validation mIoU by round, one line per method: mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"average": "tab:red", "recalibrate": "tab:blue", "groupnorm": "tab:green", "personal": "tab:purple"}
    colours |= {"frozen": "tab:brown", "central": INK, "central-groupnorm": "0.65"}
    shown = [s for s in SETTINGS.values() if result_path(arguments, s.name, "average", 0).exists()]
    figure, panels = plt.subplots(
        1, len(shown), figsize=(4.2 * len(shown), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, setting in zip(panels[0], shown, strict=True):
        for method, colour in colours.items():
            results = [load_json(result_path(arguments, setting.name, method, seed)) for seed in range(10)]
            curves = [[values["val_miou"] for values in r["curve"] if "val_miou" in values] for r in results if r]
            if not curves:
                continue
            lines = np.array([curve[: min(map(len, curves))] for curve in curves])
            rounds = np.arange(1, lines.shape[1] + 1)
            axes.plot(rounds, lines.mean(0), color=colour, label=method.replace("central-", "centralised, "))
            axes.fill_between(rounds, lines.min(0), lines.max(0), color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="round", title=setting.words, xlim=(1, setting.rounds))
        axes.title.set_fontsize(8)
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("validation mIoU of the global model")
    panels[0, 0].legend(fontsize=7)
    save_figure(figure, path)


def spread(results: list[dict[str, Any]], name: str) -> str:
    return over(last(result, name) for result in results)


def over(values: Any) -> str:
    """Mean and range over seeds."""
    known = [value for value in values if value is not None and not np.isnan(value)]
    if not known:
        return ""
    mean = f"{np.mean(known):.3f}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.3f}-{max(known):.3f})"


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--size", type=int, nargs=2, default=(64, 96), metavar=("HEIGHT", "WIDTH"), help="frame size")
    made.add_argument("--model", default="DeepLabV3Plus", help="architecture of segmentation_models_pytorch")
    made.add_argument("--encoder", default="mobilenet_v2", help="its encoder")
    made.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD, for all methods")
    made.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="which settings")
    made.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="which methods")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds")
    made.add_argument("--test", action="store_true", help="evaluate finished runs on the test frames (do this once)")
    made.add_argument("--report", action="store_true", help="only make the tables of what is there")
    made.add_argument("--figure", type=Path, default=None, help="PNG file of the curves")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seeds, arguments.size, arguments.settings = [0], (32, 48), ["sequence"]
        arguments.methods = ["average", "recalibrate", "groupnorm", "central"]
    camvid = CamVid(arguments.data, image_size=tuple(arguments.size))
    (arguments.runs / "camvid").mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        for seed in arguments.seeds:
            for name in arguments.settings:
                for method in arguments.methods:
                    is_wanted = name in METHODS[method].get("settings", SETTINGS)
                    if not is_wanted or seed >= METHODS[method].get("seeds", 10):
                        continue
                    path = result_path(arguments, name, method, seed)
                    if arguments.test:
                        test(name, method, seed, camvid, arguments)
                    elif not path.exists():
                        save_json(path, run(SETTINGS[name], method, seed, camvid, arguments))
    if arguments.figure is not None:
        draw(arguments.figure, arguments)
    write_section(arguments.out, "camvid", report(arguments))


if __name__ == "__main__":
    main()
