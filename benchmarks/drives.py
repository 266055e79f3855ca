"""Causes of the lower scores for CamVid's three drives than for central training: optimizer resets, averaging, or data.

The script adds one part after another to central training, with equal frames, network and passes, and then shortens
the local work. The network is from `appearance.py --small`; the frames have a quarter of the pixels.
"""

from __future__ import annotations

import argparse
from typing import Any

import appearance
import lightning as L
import torch
from common import PAIRED, QUIET, Curve, machine, paired, parser, prepare, run_all, spread, table, write_section
from torch.utils.data import ConcatDataset, random_split

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.data import ByGroup, PartitionedData
from lightning_fed.datasets import CamVid

ROUNDS, EPOCHS, STEPS = 20, 2, 4
WAYS: dict[str, dict[str, Any]] = {
    "central": {},
    "one client with all frames": {"clients": "one"},
    "three alike": {"clients": "alike"},
    "three drives": {"clients": "drives"},
    "three drives, optimizers kept": {"clients": "drives", "optimizer_state": "keep"},
    f"three drives, {STEPS} steps a round": {"clients": "drives", "local_steps": STEPS},
    "three drives, half the rate": {"clients": "drives", "rate": 0.5},
    "three drives, twice the rate": {"clients": "drives", "rate": 2},
    "three drives, trained three times as long": {"clients": "drives", "longer": 3},
}
AGAINST = ("central", "three alike", "three drives")


def clients_of(kind: str, data: Any, seed: int) -> FederatedDataModule:
    """All frames at one client, random parts with the drives' sizes, or the drives."""
    if kind == "drives":
        return FederatedDataModule(dict(data.clients), batch_size=appearance.BATCH)
    pooled: ConcatDataset[Any] = ConcatDataset(data.clients.values())
    sizes = [len(pooled)] if kind == "one" else [len(frames) for frames in data.clients.values()]
    parts = random_split(pooled, sizes, torch.Generator().manual_seed(seed))
    return FederatedDataModule({f"part {place}": part for place, part in enumerate(parts)}, batch_size=appearance.BATCH)


def data_of(seed: int, arguments: argparse.Namespace) -> PartitionedData:
    source = CamVid(arguments.data, image_size=(48, 64), batch_size=appearance.BATCH, val_size=0)
    data = PartitionedData(source, ByGroup(), val_fraction=0.05, test_fraction=0.25, seed=seed)
    data.setup("fit")
    return data


def balance(data: PartitionedData, seed: int) -> dict[str, float]:
    """Mean total variation distance between a client's and the overall class distribution of pixels."""
    found = {}
    for kind in ("alike", "drives"):
        parts = [torch.stack([mask for _, mask in frames]) for frames in clients_of(kind, data, seed).clients.values()]
        counts = torch.stack([part[part < 11].bincount(minlength=11).double() for part in parts])
        shares, whole = counts / counts.sum(1, keepdim=True), counts.sum(0) / counts.sum()
        found[kind] = float((shares - whole).abs().sum(1).mean() / 2)
    return found


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    data = data_of(seed, arguments)
    task = appearance.task_of(11, "batch", seed, "scratch", arguments)
    curve, options = Curve(f"{name} {seed}:"), dict(WAYS[name])
    task.lr *= options.pop("rate", 1)
    rounds = ROUNDS * options.pop("longer", 1)
    if "local_steps" in options:  # equals the clients' mean number of steps
        batches = sum(-(-len(frames) // appearance.BATCH) for frames in data.clients.values()) / len(data.clients)
        rounds = round(ROUNDS * EPOCHS * batches / STEPS)
    if arguments.quick:
        rounds = 1
    quiet = {"callbacks": [curve], "limit_val_batches": 0, **QUIET}
    if name == "central":
        L.Trainer(max_epochs=rounds * EPOCHS, **quiet).fit(task, data.train_dataloader())
    else:
        federated = clients_of(options.pop("clients"), data, seed)
        if "local_steps" not in options:
            options["local_epochs"] = EPOCHS
        trainer = FederatedTrainer(max_rounds=rounds, seed=seed, batch_norm="average", **options, **quiet)
        trainer.fit(task, datamodule=federated)
    scores = appearance.scores_of(task, dict.fromkeys(data.test, task.state_dict()), data)
    print(name, seed, scores["all"], f"{sum(values['cpu_s'] for values in curve.rounds):.0f} s", flush=True)
    return {"seed": seed, "all": scores["all"], "clients": scores["clients"], "rounds": rounds}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], seeds=(0, 1)).parse_args()
    prepare(arguments)
    arguments.small = True
    results = run_all("drives", WAYS, run, arguments)
    if not results:
        return
    scores = {name: {each["seed"]: 100 * each["all"] for each in found} for name, found in results.items()}
    seed = arguments.seeds[0]
    apart_by = balance(data_of(seed, arguments), seed)
    rows = []
    for name, own in scores.items():
        row = [name, f"{results[name][0]['rounds']}", spread(list(own.values()), 1)]
        for other in AGAINST:
            base = scores.get(other, {})
            apart = [value - base[seed] for seed, value in own.items() if seed in base]
            row.append("" if other == name else paired(apart, 1))
        rows.append([*row, f"{len(own)}"])
    words = (
        f"`python benchmarks/drives.py --data DATA --out benchmarks/results/segmentation.md`. CamVid at 64x48 by drive,"
        f" a small U-Net from scratch, AdamW, batches of {appearance.BATCH}; {ROUNDS} rounds of {EPOCHS} local epochs"
        f" (central: as many epochs), or rounds of {STEPS} steps, in all as many as the clients have in the mean."
        " `one client with all frames` has optimizers that start anew in every round, and nothing else of a federation;"
        " `three alike` has parts of the"
        " drives' sizes, drawn from all frames. Mean IoU on a quarter of every drive's frames, held out, %, mean ±"
        f" standard deviation over seeds. {PAIRED} {machine(arguments.threads)}."
        f" A client's share of pixels by class is {apart_by['drives']:.2f} from that of all with drives, and"
        f" {apart_by['alike']:.2f} with clients that are alike (total variation, mean over clients, seed {seed})."
    )
    header = ["", "rounds", "mean IoU", *(f"to {other}" for other in AGAINST), "seeds"]
    write_section(arguments.out, "drives", f"{words}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
