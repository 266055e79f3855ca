"""FedBuff and FedAsync compared with FedAvg in virtual time, with clients of very different speeds.

All methods get the same virtual time, clients in flight, durations and initial weights. Nothing is tuned.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning as L
from common import QUIET, machine, paired, parser, prepare, run_all, spread, table, write_section

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import Durations, FedAsync, FedBuff
from lightning_fed.callbacks import ProximalTerm
from lightning_fed.data import Dirichlet
from lightning_fed.datasets.mnist import FashionMNIST
from lightning_fed.method import Method
from lightning_fed.tasks.classification import ClassificationTask

CLIENTS, IN_FLIGHT, STEPS, ALPHA = 30, 10, 10, 0.5
DURATIONS = Durations(batch=1.0, spread=1.0)
METHODS = {
    "FedAvg": (lambda: "fedavg", IN_FLIGHT),
    "FedBuff, K = 5": (lambda: FedBuff(5, weighting="examples", durations=DURATIONS), 5),
    "FedBuff, K = 5, no discount": (lambda: FedBuff(5, 0, "examples", DURATIONS), 5),
    "FedAsync": (lambda: Method(FedAsync(durations=DURATIONS), callbacks=[ProximalTerm(0.01)]), 1),
}
TARGETS = (0.75, 0.80)


class VirtualTime(L.Callback):
    """Records accuracy, virtual seconds and visits after each validation, and stops the fit at the time limit."""

    def __init__(self, limit: float, every: int) -> None:
        self.limit, self.every = limit, every
        self.seconds, self.visits = 0.0, 0
        self.points: list[tuple[float, int, float]] = []
        self.arrived: list[Any] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = trainer.federation
        clients = [visit.client for visit in federation.cohort.visits]
        if "fed/virtual_seconds" in trainer.callback_metrics:
            self.seconds = float(trainer.callback_metrics["fed/virtual_seconds"])
        else:  # a synchronous round waits for the slowest client
            round = trainer.current_epoch
            self.seconds += max(DURATIONS.seconds(federation.seed, client, round, STEPS) for client in clients)
        self.visits += len(clients)
        self.arrived += clients
        if (trainer.current_epoch + 1) % self.every == 0:
            self.points.append((self.seconds, self.visits, float(trainer.callback_metrics["val_acc"])))
        trainer.should_stop = self.seconds >= self.limit


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    method, per_round = METHODS[name]
    data = FashionMNIST(arguments.data, batch_size=20, eval_batch_size=500, train_size=12_000, val_size=2_000)
    L.seed_everything(seed, verbose=False)
    task = ClassificationTask("mlp", num_classes=10, lr=arguments.lr)
    clock = VirtualTime(arguments.seconds, max(1, 5 // per_round))
    trainer = FederatedTrainer(
        max_rounds=100_000,
        method=method(),
        partition=Dirichlet(CLIENTS, alpha=ALPHA, min_size=20),
        clients_per_round=IN_FLIGHT,
        local_steps=STEPS,
        seed=seed,
        callbacks=[clock],
        num_sanity_val_steps=0,
        check_val_every_n_epoch=clock.every,
        **QUIET,
    )
    start = time.process_time()
    trainer.fit(task, datamodule=data)
    clients = trainer.federation.population.clients
    slowest = sorted(clients, key=lambda client: -DURATIONS.seconds(seed, client, 0, 1))[: CLIENTS // 3]
    print(f"{name}, seed {seed}: {clock.points[-1]}", flush=True)
    return {
        "points": clock.points,
        "slow": sum(client in slowest for client in clock.arrived) / len(clock.arrived),
        "cpu": time.process_time() - start,
    }


def at(result: dict[str, Any], place: int, limit: float) -> float:
    """Accuracy at the last validation within a limit of seconds (place 0) or visits (place 1)."""
    within = [point[2] for point in result["points"] if point[place] <= limit]
    return within[-1] if within else float("nan")


def reached(result: dict[str, Any], target: float) -> float | None:
    return next((seconds for seconds, _, accuracy in result["points"] if accuracy >= target), None)


def report(results: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    base, rows = results["FedAvg"], []
    visits = min(result["points"][-1][1] for result in base)
    for name, ours in results.items():
        ends = [at(result, 0, arguments.seconds) for result in ours]
        equal = [at(result, 1, visits) for result in ours]
        times = []
        for target in TARGETS:
            found = [seconds for result in ours if (seconds := reached(result, target)) is not None]
            times.append(f"{statistics.median(found):.0f} ({len(found)})" if found else "(0)")
        pairs = [ours, base] if name != "FedAvg" else []
        difference = (
            [
                [at(left, place, limit) - at(right, place, limit) for left, right in zip(*pairs, strict=False)]
                for place, limit in ((0, arguments.seconds), (1, visits))
            ]
            if pairs
            else [[], []]
        )
        rows.append([
            name, spread(ends), paired(difference[0]), spread(equal), paired(difference[1]), *times,
            f"{statistics.fmean(result['points'][-1][1] for result in ours):.0f}",
            f"{statistics.fmean(result['slow'] for result in ours):.2f}",
        ])  # fmt: skip
    header = [
        "method", f"accuracy after {arguments.seconds:.0f} s", "minus FedAvg", f"after {visits} visits", "minus FedAvg",
        *(f"median seconds to {target:.2f} (seeds)" for target in TARGETS), "visits", "share of the slowest third",
    ]  # fmt: skip
    cpu = sum(result["cpu"] for ours in results.values() for result in ours)
    words = (
        "`python benchmarks/asynchronous.py --data DATA --out docs/results/asynchronous.md`. Fashion-MNIST, 12,000 "
        f"training images, {CLIENTS} clients by Dirichlet({ALPHA}) per class, {IN_FLIGHT} in flight, visits of {STEPS} "
        f"batches of 20, multilayer perceptron, SGD with rate {arguments.lr}, all weights by examples except FedAsync. "
        "Virtual seconds: 1 s per batch for the median client, and a standard deviation of 1 for the logarithm over "
        "clients. Accuracy on 2,000 held-out training images, at the last validation within the limit (every 5 visits, "
        f"FedAvg 10). Seeds {', '.join(map(str, arguments.seeds))}. Differences: mean and 95 % "
        f"interval by the paired t test, in bold without 0 in the interval. {cpu / 60:.0f} CPU minutes on "
        f"{machine(arguments.threads)}."
    )
    return "\n\n".join([words, table(header, rows)])


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=range(5))
    made.add_argument("--seconds", type=float, default=1200.0, help="virtual seconds per run")
    made.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seconds = 100.0
    write_section(arguments.out, "asynchronous", report(run_all("asynchronous", METHODS, run, arguments), arguments))


if __name__ == "__main__":
    main()
