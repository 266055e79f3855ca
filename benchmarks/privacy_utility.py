"""Accuracy cost of central differential privacy, compared with `pfl` on the same data, clip and noise.

Rounds have 50 clients, with the noise for 1,000 clients drawn from a million (as in pfl-research's benchmarks), or for
100 clients: the budgets are simulated. The learning rate and the clip are chosen without noise, and are equal in all
runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import QUIET, Curve, load_json, machine, parser, prepare, run_all, spread, table, write_section
from simulated_privacy import SimulatedDP
from speed_peers import CONTESTANTS, SCRIPTS, environment, installed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer, Vectorized
from lightning_fed.data import IID, ByGroup, Dirichlet, Partition
from lightning_fed.datasets import CIFAR10, FEMNIST, FashionMNIST
from lightning_fed.privacy.accounting import calibrate
from lightning_fed.tasks import ClassificationTask

COHORT, DELTA, SHARE = 50, 1e-6, 1_000  # SHARE: population size relative to the cohort
BATCH, LAST, TEST, MOST = 10, 5, 2_000, 50
EPSILONS = (8.0, 4.0, 2.0)
WITHOUT, TIMED = "no privacy", "timed"
TIMED_ROUNDS = 6


@dataclass(frozen=True)
class Study:
    """A data set, with clients and network.

    Args:
        words: Name in the table.
        network: Network name, number of classes, channels and image side.
        lr: The clients' learning rate.
        clip: Maximum norm of a client's step.
        rounds: Number of rounds.
        noise_cohort: Simulated cohort size for the noise.
    """

    words: str
    network: tuple[str, int, int, int]
    lr: float
    clip: float
    rounds: int
    noise_cohort: int = 1_000


STUDIES = {
    "fashion_mnist": Study(
        "Fashion-MNIST, 400 clients of about 50 images (Dirichlet 0.5 per client), MLP of 64 units",
        ("mlp", 10, 1, 28), 0.1, 1.0, 60,
    ),
    "fashion_mnist_100": Study(
        "The same with the noise of 100 clients",
        ("mlp", 10, 1, 28), 0.1, 1.0, 60, 100,
    ),
    "femnist": Study(
        "FEMNIST, its 105 writers with up to 50 images, NIID-Bench's CNN", ("niid_cnn", 62, 1, 28), 0.1, 2.0, 30,
    ),
    "cifar10": Study(
        "CIFAR-10, 400 clients of 50 images (IID, as pfl-research has them), NIID-Bench's CNN",
        ("niid_cnn", 10, 3, 32), 0.1, 1.0, 30,
    ),
}  # fmt: skip


def tensors_of(dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*(dataset[index] for index in range(len(dataset))), strict=True)  # type: ignore[arg-type]
    return torch.stack(images), torch.as_tensor(labels)


@cache
def clients_of(study: str, folder: Path, seed: int) -> tuple[list[TensorDataset], TensorDataset]:
    source: FEMNIST | FashionMNIST | CIFAR10
    partition: Partition
    if study == "femnist":
        source, partition = FEMNIST(folder), ByGroup()
    else:
        kind = FashionMNIST if study.startswith("fashion_mnist") else CIFAR10
        source = kind(folder, train_size=20_000, val_size=TEST)
        partition = Dirichlet(400, 0.5, "per_client") if kind is FashionMNIST else IID(400)
    source.setup("fit")
    images, labels = tensors_of(source.train_dataset)
    parts = partition.split(source.train_dataset, seed)
    clients = [TensorDataset(images[indices], labels[indices]) for indices in map(torch.as_tensor, parts.values())]
    clients = [TensorDataset(*(values[:MOST] for values in client.tensors)) for client in clients]
    return clients, TensorDataset(*tensors_of(source.val_dataset))


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains with one budget: ``study / who / epsilon``."""
    key, who, budget = name.split(" / ")
    study = STUDIES[key]
    rounds = 2 if arguments.quick else TIMED_ROUNDS if budget == TIMED else study.rounds
    clients, test = clients_of(key, arguments.data, seed)
    multiplier = None
    if budget != WITHOUT:
        epsilon = EPSILONS[-1] if budget == TIMED else float(budget)
        multiplier = calibrate(epsilon, DELTA, study.noise_cohort * SHARE, study.noise_cohort, rounds).noise_multiplier
    kind, classes, channels, side = study.network
    L.seed_everything(seed, verbose=False)
    task = ClassificationTask(kind, classes, channels, side, lr=study.lr)
    if who == "pfl":
        found = beside(study, task, clients, test, rounds, multiplier, seed, arguments)
    else:
        curve = Curve()
        steps = []
        if multiplier is not None:
            steps.append(
                SimulatedDP(study.clip, DELTA, multiplier, study.noise_cohort, study.noise_cohort * SHARE, key=seed)
            )
        trainer = FederatedTrainer(
            "fairavg",  # equal client weights, as with privacy
            max_rounds=rounds,
            clients_per_round=COHORT,
            local_epochs=1,
            steps=steps,
            visits=Vectorized(COHORT if kind == "mlp" else 1),
            seed=seed,
            callbacks=[curve],
            num_sanity_val_steps=0,
            **QUIET,
        )
        datamodule = FederatedDataModule(dict(enumerate(clients)), DataLoader(test, 500), batch_size=BATCH)
        trainer.fit(task, datamodule=datamodule)
        found = {
            "scores": [values["val_acc"] for values in curve.rounds[-LAST:]],
            "seconds": statistics.median(values["wall_s"] for values in curve.rounds[1:]),
            "epsilon": curve.rounds[-1].get("privacy/simulated_epsilon"),
        }
    return {**found, "noise_multiplier": multiplier, "machine": machine(arguments.threads)}


def beside(
    study: Study,
    task: ClassificationTask,
    clients: list[TensorDataset],
    test: TensorDataset,
    rounds: int,
    multiplier: float | None,
    seed: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Trains in a separate process with `pfl`."""
    work: Mapping[str, Any] = {
        "root": str(Path(__file__).resolve().parents[1]), "network": study.network, "state": task.model.state_dict(),
        "clients": [client.tensors for client in clients], "test": test.tensors, "rounds": rounds, "last": LAST,
        "cohort": COHORT, "noise_cohort": study.noise_cohort, "clip": study.clip, "noise_multiplier": multiplier,
        "lr": study.lr, "batch_size": BATCH, "seed": seed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.save(work, Path(folder) / "work.pt")
        out = Path(folder) / "out.json"
        command = [
            os.path.abspath(environment(CONTESTANTS["pfl"], arguments.runs / "peers")),
            str(SCRIPTS / "pfl_private.py"),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
        subprocess.run(
            [*command, str(Path(folder) / "work.pt"), str(out)],
            check=True,
            env=env,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        found = load_json(out)
    stamps = found["stamps"]
    return {
        "scores": found["scores"],
        "seconds": statistics.median(end - begin for begin, end in itertools.pairwise(stamps[1:])),
    }


def names(arguments: argparse.Namespace) -> list[str]:
    made = []
    for key in arguments.studies:
        made += [f"{key} / lightning_fed / {budget}" for budget in (WITHOUT, *map(str, EPSILONS))]
        made += [f"{key} / pfl / {budget}" for budget in (WITHOUT, str(EPSILONS[-1]))]
        made += [f"{key} / {who} / {TIMED}" for who in ("lightning_fed", "pfl")]  # timed runs follow each other
    return made


def section(key: str, results: dict[str, list[dict[str, Any]]]) -> str:
    """Table for a study: accuracy in percent, paired losses due to privacy, seconds."""
    rows = []
    for name, runs in results.items():
        study, who, budget = name.split(" / ")
        if study != key or budget == TIMED:
            continue
        scores = [100 * statistics.fmean(run["scores"]) for run in runs]
        plain = [100 * statistics.fmean(run["scores"]) for run in results.get(f"{key} / {who} / {WITHOUT}", [])]
        lost = [score - other for score, other in zip(scores, plain, strict=False)] if budget != WITHOUT else []
        multiplier = runs[0]["noise_multiplier"]
        rows.append(
            [
                f"`{who}`", "" if budget == WITHOUT else f"{float(budget):g}",
                "" if multiplier is None else f"{multiplier:.3f}", spread(scores, 2), spread(lost, 2),
                str(len(runs)),
            ]
        )  # fmt: skip
    study = STUDIES[key]
    header = ["", "epsilon", "z", "accuracy", "minus without privacy, by seed", "seeds"]
    timed = [results.get(f"{key} / {who} / {TIMED}", []) for who in ("lightning_fed", "pfl")]
    ours, theirs = ([run["seconds"] for run in runs] for runs in timed)
    seconds = ""
    if ours and theirs:
        ratios = [own / other for own, other in zip(ours, theirs, strict=False)]
        seconds = (
            f"\n\nSeconds of a round, epsilon {EPSILONS[-1]:g}, one after the other: {statistics.median(ours):.2f}, and"
            f" `pfl` {statistics.median(theirs):.2f}; ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to"
            f" {max(ratios):.2f} in {len(ratios)} pairs)."
        )
    return (
        f"**{study.words}**: {study.rounds} rounds, one local epoch in batches of {BATCH}, SGD of {study.lr:g}, clip"
        f" {study.clip:g}.\n\n{table(header, rows)}{seconds}"
    )


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=(0, 1, 2))
    made.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="data sets")
    arguments = made.parse_args()
    arguments.data = arguments.data.resolve()
    prepare(arguments)
    results = run_all("privacy_utility", names(arguments), run, arguments)
    if not results:
        return
    runs = [found for several in results.values() for found in several]
    text = (
        "`python benchmarks/privacy_utility.py --data DATA --out benchmarks/results/privacy.md`. Central differential"
        f" privacy, delta {DELTA:g}: {COHORT} clients train in a round, with the noise of 1,000 drawn from 1,000,000,"
        " or of 100 drawn from 100,000, so that epsilon is simulated. Every client counts the same."
        f" Accuracy in % on held-out images, mean of the last {LAST} rounds, ± standard deviation over seeds. `pfl`"
        f" {installed('pfl', environment(CONTESTANTS['pfl'], arguments.runs / 'peers'))} has the same clients, first"
        " weights, clip and noise multiplier; it draws other clients, as many in every round. Seconds are medians"
        f" of rounds without evaluation; with the MLP our visits are vectorised. {runs[0]['machine']}."
    )
    sections = [section(key, results) for key in arguments.studies]
    write_section(arguments.out, "privacy utility", "\n\n".join([text, *sections]))


if __name__ == "__main__":
    main()
