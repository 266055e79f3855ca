"""FedBuff and FedAsync compared with FedAvg in virtual time, with clients of very different speeds.

All methods get the same virtual time, clients in flight, durations and initial weights. Nothing is tuned. The control,
FedAvg with a deadline, drops every client of a round that needs more than twice the median duration.

Primary comparison, chosen before the run on CIFAR-10: accuracy of FedBuff (K = 5) minus accuracy of FedAvg with a
deadline, at the end of the virtual time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
from common import QUIET, machine, paired, parser, prepare, run_all, spread, table, write_section

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import Durations, FedAsync, FedAvg, FedBuff
from lightning_fed.callbacks import ProximalTerm
from lightning_fed.data import Dirichlet, Population
from lightning_fed.datasets.cifar10 import CIFAR10
from lightning_fed.datasets.mnist import FashionMNIST
from lightning_fed.method import Method
from lightning_fed.server.schedule import Cohort, Schedule
from lightning_fed.tasks.classification import ClassificationTask

CLIENTS, IN_FLIGHT, STEPS, ALPHA = 30, 10, 10, 0.5
DURATIONS = Durations(batch=1.0, spread=1.0)
DEADLINE = 20.0  # seconds: twice the median duration


class OnTime(FedAvg):
    """FedAvg with a deadline: drops all clients of a round that are slower than the deadline."""

    def draw_cohort(self, round: int, schedule: Schedule, population: Population) -> Cohort:
        visits = super().draw_cohort(round, schedule, population).visits
        late = {visit.client for visit in visits if seconds_of(schedule.seed, visit.client, round) > DEADLINE}
        return Cohort(tuple(visit for visit in visits if visit.client not in late), tuple(late))


def seconds_of(seed: int, client: Any, round: int) -> float:
    return DURATIONS.seconds(seed, client, round, STEPS)


CONTROL, UNDISCOUNTED = f"FedAvg, deadline {DEADLINE:.0f} s", "FedBuff, K = 5, no discount"
METHODS = {
    "FedAvg": (lambda: "fedavg", IN_FLIGHT),
    CONTROL: (OnTime, IN_FLIGHT),
    "FedBuff, K = 5": (lambda: FedBuff(5, weighting="examples", durations=DURATIONS), 5),
    UNDISCOUNTED: (lambda: FedBuff(5, 0, "examples", DURATIONS), 5),
    "FedAsync": (lambda: Method(FedAsync(durations=DURATIONS), callbacks=[ProximalTerm(0.01)]), 1),
}
DATASETS = {  # data, network, targets, visits between validations
    "fashion": (FashionMNIST, "mlp", (0.75, 0.80), 5),
    "cifar10": (CIFAR10, "niid_cnn", (0.35, 0.40), 20),
}
SECONDS = {"fashion": 1200.0, "cifar10": 2400.0}  # of the published tables
SECTIONS = {"fashion": "asynchronous", "cifar10": "asynchronous-cifar10"}


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
            drawn = [*clients, *federation.cohort.dropped]
            seconds = max(seconds_of(federation.seed, client, trainer.current_epoch) for client in drawn)
            self.seconds += min(seconds, DEADLINE) if isinstance(federation.server.rule, OnTime) else seconds
        self.visits += len(clients)
        self.arrived += clients
        if (trainer.current_epoch + 1) % self.every == 0:
            self.points.append((self.seconds, self.visits, float(trainer.callback_metrics["val_acc"])))
        trainer.should_stop = self.seconds >= self.limit


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    method, per_round = METHODS[name]
    kind, network, _, visits = DATASETS[arguments.dataset]
    data = kind(arguments.data, batch_size=20, eval_batch_size=500, train_size=12_000, val_size=2_000)
    L.seed_everything(seed, verbose=False)
    size = {"in_channels": 3, "input_size": 32} if arguments.dataset == "cifar10" else {}
    task = ClassificationTask(network, num_classes=10, lr=arguments.lr, **size)
    clock = VirtualTime(arguments.seconds, max(1, visits // per_round))
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


def differences(ours: list[Any], base: list[Any], place: int, limit: float) -> str:
    if ours is base or len(ours) != len(base):
        return ""  # results have no seeds: with missing seeds, pairs by position would be wrong
    pairs = zip(ours, base, strict=True)
    return paired([at(left, place, limit) - at(right, place, limit) for left, right in pairs])


def visits_of(results: dict[str, list[dict[str, Any]]]) -> int:
    return min(result["points"][-1][1] for result in results["FedAvg"])


def rows_of(results: dict[str, list[dict[str, Any]]], targets: Sequence[float], seconds: float) -> list[list[str]]:
    """Accuracies and paired differences after equal seconds and after equal visits, by method."""
    base, control, rows = results["FedAvg"], results[CONTROL], []
    visits = visits_of(results)
    for name, ours in results.items():
        times = []
        for target in targets:
            found = [first for result in ours if (first := reached(result, target)) is not None]
            times.append(f"{statistics.median(found):.0f} ({len(found)})" if found else "(0)")
        rows.append([
            name,
            spread([at(result, 0, seconds) for result in ours]),
            differences(ours, base, 0, seconds),
            differences(ours, control, 0, seconds),
            spread([at(result, 1, visits) for result in ours]),
            differences(ours, base, 1, visits),
            *times,
            f"{statistics.fmean(result['points'][-1][1] for result in ours):.0f}",
            f"{statistics.fmean(result['slow'] for result in ours):.2f}",
        ])  # fmt: skip
    return rows


def report(results: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    kind, network, targets, interval = DATASETS[arguments.dataset]
    header = [
        "method", f"accuracy after {arguments.seconds:.0f} s", "minus FedAvg", "minus FedAvg with deadline",
        f"after {visits_of(results)} visits", "minus FedAvg",
        *(f"median seconds to {target:.2f} (seeds)" for target in targets),
        "visits", "share of the slowest third",
    ]  # fmt: skip
    cpu = sum(result["cpu"] for ours in results.values() for result in ours)
    missing = "".join(
        f"`{name}` has {len(ours)} of these seeds. "
        for name, ours in results.items()
        if len(ours) < len(arguments.seeds)
    )
    options = "" if arguments.dataset == "fashion" else f" --dataset {arguments.dataset}"
    words = (
        f"`python benchmarks/asynchronous.py --data DATA{options} --out docs/results/asynchronous.md`\n\n"
        f"- Data: 12,000 training images from {kind.__name__}, divided among {CLIENTS} clients by Dirichlet({ALPHA}) "
        f"per class.\n- Training: at any time {IN_FLIGHT} clients train. In a visit, one client trains on {STEPS} "
        f"batches of 20 images, with the network `{network}` and SGD with learning rate {arguments.lr}. Updates are "
        "weighted by the number of examples, except in FedAsync.\n- Speed: the virtual seconds per batch differ "
        "between clients, by a log-normal distribution with median 1 and sigma 1. In *FedAvg, "
        f"deadline {DEADLINE:.0f} s*, a round excludes every client with a visit longer than {DEADLINE:.0f} virtual "
        "seconds.\n- Accuracy: measured on "
        f"2,000 held-out training images, after about every {interval} visits. The accuracy after a number of seconds "
        "or visits is the last accuracy measured up to this moment.\n- Seeds: "
        f"{', '.join(map(str, arguments.seeds))}. Differences are means over seeds, with the 95 % interval by the "
        f"paired t test. A difference is bold if the interval excludes 0.\n- {missing}{cpu / 60:.0f} CPU minutes on "
        f"{machine(arguments.threads)}."
    )
    return "\n\n".join([words, table(header, rows_of(results, targets, arguments.seconds))])


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=range(5))
    made.add_argument("--seconds", type=float, default=None, help="virtual seconds per run; else those of the images")
    made.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD")
    made.add_argument("--dataset", choices=DATASETS, default="fashion", help="images")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick or arguments.seconds is None:
        arguments.seconds = 100.0 if arguments.quick else SECONDS[arguments.dataset]
    name = SECTIONS[arguments.dataset]
    methods = [method for method in METHODS if arguments.dataset == "fashion" or method != UNDISCOUNTED]
    write_section(arguments.out, name, report(run_all(name, methods, run, arguments), arguments))


if __name__ == "__main__":
    main()
