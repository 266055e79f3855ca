"""Gain from new client groups for the global model (Figure 6 in the FedMA paper).

16 CIFAR-10 clients with Dirichlet class mixes join in four groups. After each group, all present clients train for one
FedMA pass, or for as many rounds with another rule.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
from common import QUIET, Curve, machine, parser, prepare, run_all, spread, table, write_section
from torch.utils.data import Subset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import FedAvg, FedMA
from lightning_fed.data import Dirichlet
from lightning_fed.datasets.cifar10 import CIFAR10
from lightning_fed.tasks.classification import ClassificationTask

IMAGES, VALIDATION, CLIENTS, GROUP, ROUNDS, BATCH, LR = 4800, 2000, 16, 4, 9, 20, 0.02
RULES = {
    "FedMA": lambda: FedMA(),
    "freezing and training without matching": lambda: FedMA("none"),
    "FedAvg": lambda: FedAvg(),
}


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    source = CIFAR10(arguments.data, train_size=IMAGES, val_size=VALIDATION, batch_size=500)
    source.setup("fit")
    frames = source.train_dataset
    parts = list(Dirichlet(CLIENTS, alpha=0.5).split(frames, seed).items())
    L.seed_everything(seed, verbose=False)
    task = ClassificationTask("vgg9", 10, 3, 32, model_kwargs={"width": 0.25, "init": "kaiming"}, lr=LR, momentum=0.9)
    curve = Curve(f"{name} {seed}:")
    trainer = FederatedTrainer(max_rounds=1, method=RULES[name](), seed=seed, callbacks=[curve], **QUIET)
    scores = []
    for step in range(1, 2 if arguments.quick else CLIENTS // GROUP + 1):
        trainer.fit_loop.max_epochs = step * ROUNDS  # the same Trainer resumes with more clients
        there = {client: Subset(frames, indices) for client, indices in parts[: step * GROUP]}
        trainer.fit(task, FederatedDataModule(there, val=source.val_dataloader(), batch_size=BATCH))
        scores.append(curve.rounds[-1]["val_acc"])
    return {"name": name, "seed": seed, "scores": scores, "machine": machine(arguments.threads)}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], seeds=(0, 1, 2)).parse_args()
    prepare(arguments)
    results = run_all("clients_added", RULES, run, arguments)
    if not results:
        return
    steps = max(len(each["scores"]) for found in results.values() for each in found)
    rows = [
        [name, *(spread([100 * each["scores"][step] for each in found], 1) for step in range(steps)), f"{len(found)}"]
        for name, found in results.items()
    ]
    words = (
        f"`python benchmarks/clients_added.py --data DATA --out benchmarks/results/fedma.md`. CIFAR-10,"
        f" {IMAGES:,} images over {CLIENTS} clients (Dirichlet 0.5 per class), a quarter of VGG-9's channels."
        f" Clients come {GROUP} at a"
        f" time; after each all that are there train for {ROUNDS} rounds of one epoch, one pass of FedMA, with a"
        f" learning rate of {LR} (not tuned) and momentum. Accuracy in % on {VALIDATION:,} other images, mean ±"
        f" standard deviation over seeds. {machine(arguments.threads)}."
    )
    header = ["", *(f"{(step + 1) * GROUP} clients" for step in range(steps)), "seeds"]
    write_section(arguments.out, "clients-added", f"{words}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
