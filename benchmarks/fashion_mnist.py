"""FedAvg on Fashion-MNIST: `FederatedTrainer` and a hand-written PyTorch loop must have equal curves.

Both share the definition of the experiment: split over clients, schedule (cohorts and seeds) and initial weights. The
hand-written loop has separate code for local training, batches and averaging. A third curve shows the same network on
pooled data with the same number of steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, Curve, load_json, machine, parser, prepare, save_json, table, version, write_section
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed import FederatedTrainer
from lightning_fed.data import Dirichlet
from lightning_fed.datasets.mnist import FashionMNIST
from lightning_fed.report.figures import save_figure
from lightning_fed.server.schedule import Schedule
from lightning_fed.tasks.classification import ClassificationTask

BATCH_SIZE = 20


def make_task(arguments: argparse.Namespace) -> ClassificationTask:
    L.seed_everything(arguments.seed, verbose=False)
    return ClassificationTask(arguments.network, num_classes=10, lr=arguments.lr)


def make_partition(arguments: argparse.Namespace) -> Dirichlet:
    return Dirichlet(arguments.clients, alpha=arguments.alpha)


def train_ours(data: FashionMNIST, arguments: argparse.Namespace) -> dict[str, Any]:
    task, curve = make_task(arguments), Curve("ours")
    trainer = FederatedTrainer(
        max_rounds=arguments.rounds,
        partition=make_partition(arguments),
        clients_per_round=arguments.cohort,
        seed=arguments.seed,
        callbacks=[curve],
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(task, datamodule=data)
    return finished(task.model, data, [values["val_acc"] for values in curve.rounds], curve.rounds)


def train_centrally(data: FashionMNIST, steps: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains on pooled data, with a validation after each of the federation's step counts in ``steps``."""
    task, curve = make_task(arguments), Curve("central")
    marks = iter(np.diff([0, *steps]).tolist())
    accuracies = []
    for _ in range(arguments.rounds):  # one short fit per round: validation falls where the rounds end
        trainer = L.Trainer(max_epochs=-1, max_steps=next(marks), limit_val_batches=0, **QUIET)
        trainer.fit(task, data.train_dataloader())
        accuracies.append(accuracy(task.model, *plain(data.val_dataset)))
        print(f"central {len(accuracies)} {accuracies[-1]:.4f}", flush=True)
    return finished(task.model, data, accuracies, curve.rounds)


def train_by_hand(data: FashionMNIST, arguments: argparse.Namespace) -> dict[str, Any]:
    """FedAvg (McMahan et al. 2017, Algorithm 1) in plain PyTorch."""
    network = make_task(arguments).model
    inputs, targets = plain(data.train_dataset)
    validation = plain(data.val_dataset)
    parts = make_partition(arguments).split(data.train_dataset, arguments.seed)
    schedule = Schedule(arguments.seed, clients_per_round=arguments.cohort)
    accuracies = []
    for number in range(arguments.rounds):
        start = {name: value.clone() for name, value in network.state_dict().items()}
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        num_samples = 0
        for visit in schedule.cohort(number, list(parts)).visits:
            network.load_state_dict(start)
            optimizer = torch.optim.SGD(network.parameters(), lr=arguments.lr)
            mine = parts[visit.client]
            order = np.random.default_rng([visit.seed, 0]).permutation(len(mine))
            for batch in batches(mine[order]):
                optimizer.zero_grad()
                F.cross_entropy(network(inputs[batch]), targets[batch]).backward()
                optimizer.step()
            for name, value in network.state_dict().items():
                total[name] += len(mine) * value.double()
            num_samples += len(mine)
        network.load_state_dict({name: (value / num_samples).float() for name, value in total.items()})
        accuracies.append(accuracy(network, *validation))
        print(f"by hand {number + 1} {accuracies[-1]:.4f}", flush=True)
    return finished(network, data, accuracies, [])


def batches(indices: np.ndarray) -> list[Tensor]:
    """Batches of 20; a single remaining example joins the last batch."""
    places = list(range(0, len(indices), BATCH_SIZE))
    if len(places) > 1 and len(indices) % BATCH_SIZE == 1:
        places.pop()
    return [torch.from_numpy(part) for part in np.split(indices, places[1:])]


def plain(dataset: Any) -> tuple[Tensor, Tensor]:
    images = dataset.inputs.float() / 255
    return (images - 0.2860) / 0.3530, dataset.targets


@torch.no_grad()
def accuracy(network: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    right = sum(
        int((network(x).argmax(1) == y).sum()) for x, y in zip(inputs.split(500), targets.split(500), strict=True)
    )
    return float(torch.tensor(right) / len(targets))


def finished(network: nn.Module, data: FashionMNIST, accuracies: list[float], curve: list[Any]) -> dict[str, Any]:
    state = {name: value.clone() for name, value in network.state_dict().items()}
    return {
        "accuracy": accuracies,
        "test": accuracy(network, *plain(data.test_dataset)),
        "curve": curve,
        "version": version(),
        "state": state,
    }


def kept(path: Path, train: Any) -> dict[str, Any]:
    result, weights = load_json(path), path.with_suffix(".pt")
    if result is None:
        result = train()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(result.pop("state"), weights)
        save_json(path, result)
    return {**result, "state": torch.load(weights, weights_only=True)}


def report(ours: dict[str, Any], by_hand: dict[str, Any], central: dict[str, Any], arguments: Any) -> str:
    different = sum(int((ours["state"][name] != value).sum()) for name, value in by_hand["state"].items())
    entries = sum(value.numel() for value in by_hand["state"].values())
    is_equal = ours["accuracy"] == by_hand["accuracy"]
    marks = [r for r in range(1, arguments.rounds + 1) if r in (1, 2, 3) or r % 5 == 0 or r == arguments.rounds]
    rows = [
        [mark, *(f"{result['accuracy'][mark - 1]:.4f}" for result in (ours, by_hand, central))] for mark in marks
    ] + [["test, at the end", *(f"{result['test']:.4f}" for result in (ours, by_hand, central))]]
    words = (
        "The table shows the accuracy on 5,000 held-out training images after each round. The network"
        f" `{arguments.network}` is trained on {arguments.clients} clients with different class frequencies"
        f" (Dirichlet({arguments.alpha}) per class). In each round, {arguments.cohort} clients train for one local"
        f" epoch, with batches of {BATCH_SIZE} and SGD (learning rate {arguments.lr}, seed {arguments.seed}). In each"
        " row, the centralised training has taken as many steps as all clients together"
        f" ({ours['curve'][-1]['steps']:.0f} in the last round). Script: `python benchmarks/fashion_mnist.py --data"
        f" DATA --out docs/results/fedavg.md`. Machine: {machine(arguments.threads)}."
    )
    verdict = (
        f"In all {arguments.rounds} rounds, `FederatedTrainer` and the PyTorch loop have"
        f" {'**equal**' if is_equal else '**NOT equal**'} accuracies. After the last round, **{different:,}** of"
        f" {entries:,} weights differ between the two programs"
        f" ({'bit-equal' if different == 0 else 'not bit-equal'})."
    )
    header = ["round", "`FederatedTrainer`", "PyTorch by hand", "centralised"]
    return "\n\n".join([words, table(header, rows), verdict])


def draw(path: Path, ours: dict[str, Any], by_hand: dict[str, Any], central: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    rounds = range(1, len(ours["accuracy"]) + 1)
    axes.plot(rounds, central["accuracy"], color="0.6", label="centralised, same number of steps")
    axes.plot(rounds, by_hand["accuracy"], color="tab:orange", linewidth=4, alpha=0.6, label="FedAvg by hand")
    axes.plot(rounds, ours["accuracy"], color="tab:blue", linewidth=1.2, label="FedAvg, FederatedTrainer")
    axes.set(xlabel="round", ylabel="validation accuracy", title="Fashion-MNIST, Dirichlet 0.1, 10 of 100 clients")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--network", default="mcmahan_cnn", help="network of `ClassificationTask`")
    made.add_argument("--rounds", type=int, default=25, help="rounds")
    made.add_argument("--clients", type=int, default=100, help="clients")
    made.add_argument("--cohort", type=int, default=10, help="clients in a round")
    made.add_argument("--alpha", type=float, default=0.1, help="concentration of the Dirichlet split")
    made.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD")
    made.add_argument("--seed", type=int, default=0, help="seed of the weights, the split and the schedule")
    made.add_argument("--figure", type=Path, default=None, help="PNG file of the curves")
    arguments = made.parse_args()
    prepare(arguments)
    sizes = {}
    if arguments.quick:
        arguments.rounds, arguments.clients, arguments.cohort = 2, 10, 2
        sizes = {"train_size": 1500, "val_size": 500, "test_size": 500}
    data = FashionMNIST(arguments.data, batch_size=BATCH_SIZE, eval_batch_size=500, **sizes)
    data.setup(None)
    folder = arguments.runs / f"fashion_mnist_{arguments.network}_{arguments.rounds}_{arguments.seed}"
    ours = kept(folder / "ours.json", lambda: train_ours(data, arguments))
    by_hand = kept(folder / "by_hand.json", lambda: train_by_hand(data, arguments))
    steps = [int(values["steps"]) for values in ours["curve"]]
    central = kept(folder / "central.json", lambda: train_centrally(data, steps, arguments))
    if arguments.figure is not None:
        draw(arguments.figure, ours, by_hand, central)
    write_section(arguments.out, "fashion_mnist", report(ours, by_hand, central, arguments))


if __name__ == "__main__":
    main()
