"""Own or pooled BatchNorm statistics for clients with one appearance and different classes, on Fashion-MNIST.

The shift by layer after the first round, the default's decision, and the accuracy at the clients with the same weights
and either kind of statistics. `batch_norm_decision.py` shows clients with different appearance.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from appearance import measured_states
from batch_norm_decision import shifts_of
from common import QUIET, Curve, machine, parser, prepare, run_all, spread, table, write_section
from torch import nn
from torch.utils.data import DataLoader

from lightning_fed import FederatedTrainer
from lightning_fed.data import Dirichlet, LabelsPerClient, Partition, PartitionedData
from lightning_fed.datasets import FashionMNIST
from lightning_fed.tasks import ClassificationTask

CLIENTS, EPOCHS, ROUNDS, BATCH, IMAGES = 10, 2, 8, 32, 8000
PARTITIONS: dict[str, Partition] = {
    "Dirichlet 0.1": Dirichlet(CLIENTS, 0.1),
    "Dirichlet 0.3": Dirichlet(CLIENTS, 0.3),
    "two classes each": LabelsPerClient(CLIENTS, 2),
    "one class each": LabelsPerClient(CLIENTS, 1),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.Flatten(), nn.Linear(1568, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def accuracy_of(task: ClassificationTask, states: dict[Any, Any], data: PartitionedData) -> float:
    """Mean over the clients, each with the client's state and test images."""
    scores = []
    for client, dataset in data.test.items():
        task.load_state_dict(states[client])
        task.eval()
        with torch.no_grad():
            found = [(task(images).argmax(1) == labels).float() for images, labels in DataLoader(dataset, 256)]
        scores.append(float(torch.cat(found).mean()))
    return sum(scores) / len(scores)


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    source = FashionMNIST(arguments.data, batch_size=BATCH, train_size=IMAGES, val_size=0, seed=seed)
    data = PartitionedData(source, PARTITIONS[name], val_fraction=0.05, test_fraction=0.25, seed=seed)
    data.setup("fit")
    L.seed_everything(seed, verbose=False)
    task, first = ClassificationTask(network(), 10, lr=0.05), {}
    sizes = {client: len(data.clients[client]) for client in data.test}
    rounds = 2 if arguments.quick else ROUNDS
    for number in (1, rounds):  # the same fit twice: the states after the first round, and after the last
        fresh = ClassificationTask(network(), 10, lr=0.05)
        fresh.load_state_dict(task.state_dict())
        trainer = FederatedTrainer(
            max_rounds=number, seed=seed, local_epochs=EPOCHS, callbacks=[Curve(f"{name} {seed}:")],
            limit_val_batches=0, **QUIET,
        )  # fmt: skip
        trainer.fit(fresh, datamodule=data)
        weights = {key: value.clone() for key, value in fresh.state_dict().items()}
        states = measured_states(fresh, weights, data)
        first = first or shifts_of(states["measured"], sizes)
    return {
        "shifts": list(first.values()),
        "decision": trainer.federation.batch_norm_decision,
        "pooled": accuracy_of(fresh, states["pooled"], data),
        "own": accuracy_of(fresh, states["measured"], data),
        "machine": machine(arguments.threads),
    }


def rows_of(results: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Table rows: shifts, decision and accuracy by partition."""
    return [
        [
            name,
            *(spread([result["shifts"][place] for result in runs], 2) for place in range(3)),
            " ".join(dict.fromkeys(result["decision"] for result in runs)),
            *(spread([result[way] for result in runs]) for way in ("pooled", "own")),
            spread([100 * (result["own"] - result["pooled"]) for result in runs], 1),
            str(len(runs)),
        ]
        for name, runs in results.items()
    ]


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=(0, 1, 2))
    arguments = made.parse_args()
    prepare(arguments)
    results = run_all("label_skew", PARTITIONS, run, arguments)
    header = ["", "shift, layer 1", "layer 2", "layer 3", "decision", "pooled", "own", "own to pooled", "seeds"]
    text = (
        f"`python benchmarks/label_skew.py --data DATA`. Fashion-MNIST, {IMAGES} images, {CLIENTS} clients, {ROUNDS}"
        f" rounds of {EPOCHS} epochs, a small CNN with three BatchNorm layers. Shift by layer after the first round;"
        " accuracy on a quarter of each client's images, held out, mean over clients; differences in points."
        f" {'; '.join(dict.fromkeys(result['machine'] for runs in results.values() for result in runs))}."
    )
    write_section(arguments.out, "label_skew", f"{text}\n\n{table(header, rows_of(results))}")


if __name__ == "__main__":
    main()
