"""What the clients' own models reach without a federation: each alone, and their ensemble (baselines of FedMA's paper).

The data, network, split and learning rate are those of `cifar10_long` in `fedma.py`. Each client starts with weights of
its own and trains with a plain Trainer; the ensemble's prediction is the mean of their class probabilities.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import lightning as L
import torch
from common import QUIET, machine, parser, prepare, run_all, spread, table, write_section
from torch.utils.data import DataLoader, Subset

from lightning_fed.data import Dirichlet
from lightning_fed.datasets.cifar10 import CIFAR10
from lightning_fed.tasks.classification import ClassificationTask

IMAGES, VALIDATION, CLIENTS, BATCH, LR = 12000, 2000, 4, 32, 0.01
EPOCHS = {"10 epochs": 10, "30 epochs": 30}


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    source = CIFAR10(arguments.data, train_size=IMAGES, val_size=VALIDATION, batch_size=500)
    source.setup("fit")
    parts = Dirichlet(CLIENTS, alpha=0.5).split(source.train_dataset, seed)
    batches = list(source.val_dataloader())
    labels = torch.cat([target for _, target in batches])
    predictions = []
    for place, indices in enumerate(parts.values()):
        L.seed_everything(1000 * seed + place, verbose=False)
        network = {"width": 0.25, "init": "kaiming"}
        task = ClassificationTask("vgg9", 10, 3, 32, model_kwargs=network, lr=LR, momentum=0.9)
        loader = DataLoader(Subset(source.train_dataset, indices), batch_size=BATCH, shuffle=True)
        L.Trainer(max_epochs=1 if arguments.quick else EPOCHS[name], **QUIET).fit(task, loader)
        task.eval()
        with torch.no_grad():
            predictions.append(torch.cat([task(images).softmax(dim=1) for images, _ in batches]))
    accuracies = [float((each.argmax(dim=1) == labels).float().mean()) for each in predictions]
    ensemble = float((torch.stack(predictions).mean(dim=0).argmax(dim=1) == labels).float().mean())
    print(f"{name} {seed}: alone {accuracies}, ensemble {ensemble}", flush=True)
    return {"alone": accuracies, "ensemble": ensemble, "machine": machine(arguments.threads)}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], seeds=(0, 1)).parse_args()
    prepare(arguments)
    results = run_all("local_models", EPOCHS, run, arguments)
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
        f"`python benchmarks/local_models.py --data DATA --out benchmarks/results/fedma.md`. What the clients' own"
        f" models reach: CIFAR-10 ({IMAGES:,} images), a quarter of VGG-9's channels, {CLIENTS} clients (Dirichlet 0.5"
        f" per class), as in the table of `cifar10_long`; weights of each client's own, batches of {BATCH}, rate {LR}"
        f" with momentum. Accuracy on {VALIDATION:,} other images, mean ± standard deviation over seeds; the ensemble"
        f" takes the mean of the class probabilities. {machine(arguments.threads)}."
    )
    header = ["trained for", "a client, mean", "the best client", "ensemble", "seeds"]
    write_section(arguments.out, "fedma-local-models", f"{words}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
