"""Accuracy of the clients' separate models and of the ensemble (baselines in the FedMA paper).

Data, network, split and learning rate equal `cifar10_long` in `fedma.py`, or `cifar10_full` with `--full`. Each client
starts from different weights and trains with a plain Trainer. The ensemble averages the class probabilities.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from common import QUIET, machine, parser, prepare, run_all, spread, table, write_section
from torch.utils.data import DataLoader, Subset

from lightning_fed.data import Dirichlet
from lightning_fed.datasets.cifar10 import CIFAR10
from lightning_fed.tasks.classification import ClassificationTask

VALIDATION, LR = 2000, 0.01
EPOCHS = {"10 epochs": 10, "30 epochs": 30}


@dataclass(frozen=True)
class Setting:
    study: str
    images: int
    clients: int
    batch: int
    width: float
    words: str


LONG = Setting("cifar10_long", 12000, 4, 32, 0.25, "a quarter of VGG-9's channels")
FULL = Setting("cifar10_full", 48000, 16, 64, 1.0, "all channels of VGG-9")


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    setting = FULL if arguments.full else LONG
    source = CIFAR10(arguments.data, train_size=setting.images, val_size=VALIDATION, batch_size=500)
    source.setup("fit")
    parts = Dirichlet(setting.clients, alpha=0.5).split(source.train_dataset, seed)
    batches = list(source.val_dataloader())
    labels = torch.cat([target for _, target in batches])
    predictions = []
    for place, indices in enumerate(parts.values()):
        L.seed_everything(1000 * seed + place, verbose=False)
        network = {"width": setting.width, "init": "kaiming"}
        task = ClassificationTask("vgg9", 10, 3, 32, model_kwargs=network, lr=LR, momentum=0.9)
        loader = DataLoader(Subset(source.train_dataset, indices), batch_size=setting.batch, shuffle=True)
        L.Trainer(max_epochs=1 if arguments.quick else EPOCHS[name], **QUIET).fit(task, loader)
        task.eval()
        with torch.no_grad():
            predictions.append(torch.cat([task(images).softmax(dim=1) for images, _ in batches]))
    accuracies = [float((each.argmax(dim=1) == labels).float().mean()) for each in predictions]
    ensemble = float((torch.stack(predictions).mean(dim=0).argmax(dim=1) == labels).float().mean())
    print(f"{name} {seed}: alone {accuracies}, ensemble {ensemble}", flush=True)
    return {"alone": accuracies, "ensemble": ensemble, "machine": machine(arguments.threads)}


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=(0, 1))
    made.add_argument("--full", action="store_true", help="the setting of `cifar10_full`: all images and channels")
    arguments = made.parse_args()
    prepare(arguments)
    setting, flag, suffix = (FULL, " --full", "-full") if arguments.full else (LONG, "", "")
    results = run_all(f"local_models{suffix}", EPOCHS, run, arguments)
    if not results:
        return
    rows = [
        [
            name,
            spread([statistics.fmean(each["alone"]) for each in found]),
            spread([max(each["alone"]) for each in found]),
            spread([each["ensemble"] for each in found]),
            f"{len(found)}",
        ]
        for name, found in results.items()
    ]
    words = (
        f"`python benchmarks/local_models.py --data DATA{flag} --out benchmarks/results/fedma.md`. What the clients'"
        f" own models reach: CIFAR-10 ({setting.images:,} images), {setting.words}, {setting.clients} clients"
        f" (Dirichlet 0.5 per class), as in the table of `{setting.study}`; weights of each client's own, batches of"
        f" {setting.batch}, rate {LR} with momentum. Accuracy on {VALIDATION:,} other images, mean ± standard deviation"
        f" over seeds; the ensemble takes the mean of the class probabilities. {machine(arguments.threads)}."
    )
    header = ["trained for", "a client, mean", "the best client", "ensemble", "seeds"]
    write_section(arguments.out, f"fedma-local-models{suffix}", f"{words}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
