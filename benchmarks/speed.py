"""Seconds per round: a PyTorch loop by hand, a plain Trainer, FederatedTrainer, and a new Trainer per client.

FederatedTrainer appears with fused visits and with Lightning's loop; the plain Trainer appears with a plain generator
and with a ``DataLoader`` as in federated clients. All train on the same batches of random data, in one process, in
alternation: every repetition runs a short fit of each variant, and ratios are computed within a repetition. Validation,
loggers, progress bars and checkpoints are off.

Further parts: peak memory of rounds with 10, 50 and 200 clients; a round with a population of 1,000 and of 1,000,000
clients; and rounds with simultaneous clients.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, load_json, machine, parser, prepare, save_json, table, version, write_section
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer, Vectorized
from lightning_fed.data import LazyClients
from lightning_fed.messages import tensor_bytes
from lightning_fed.server.schedule import Schedule, Visit
from lightning_fed.tasks.networks import build_network

BATCH_SIZE, SAMPLES, COHORT, POPULATION, RATE = 20, 200, 10, 100, 0.05
PARTS = ["mcmahan_cnn", "mlp", "memory", "population", "vectorized"]
WORDS = {
    "by hand": "(a) PyTorch loop by hand, one model",
    "trainer": "(b) plain `L.Trainer`, same batches",
    "ours": "(c) `FederatedTrainer`, fused visits",
    "trainers": "(d) new `L.Trainer` per client",
    "lightning": '(e) `FederatedTrainer(visits="lightning")`',
    "vectorized": "(f) `FederatedTrainer(visits=Vectorized(...))`, all at once",
    "vmap by hand": "(g) `torch.func.vmap` loop by hand, all at once",
    "loader": "(h) plain `L.Trainer`, the same batches from a `DataLoader`",
}
SIX = ("by hand", "trainer", "ours", "trainers", "lightning", "loader")
TOGETHER = ("by hand", "trainer", "ours", "vectorized", "vmap by hand")


class Net(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Stopwatch(L.Callback):
    """Times a fit from the second epoch on."""

    def __init__(self) -> None:
        self.begin = self.end = (0.0, 0.0)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.begin = now()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.end = now()


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()  # wall clock, CPU


class Experiment:
    """Common data, schedule and initial weights.

    Args:
        network: Network name.
        rounds: Number of timed rounds, after one warm-up round.
        cohort: Clients in a round.
    """

    def __init__(self, network: str, rounds: int, cohort: int = COHORT) -> None:
        self.rounds, self.cohort = rounds, cohort
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(POPULATION * SAMPLES, 1, 28, 28, generator=generator)
        self.targets = torch.randint(10, (POPULATION * SAMPLES,), generator=generator)
        self.schedule = Schedule(0, clients_per_round=cohort)
        self.network = build_network(network, num_classes=10)
        self.start = {name: value.clone() for name, value in self.network.state_dict().items()}

    def visits(self, number: int) -> Sequence[Visit]:
        return self.schedule.cohort(number, range(POPULATION)).visits

    def orders(self, visit: Visit) -> Sequence[Tensor]:
        """Example indices for each batch in a visit."""
        order = np.random.default_rng([visit.seed, 0]).permutation(SAMPLES) + SAMPLES * int(visit.client)
        return torch.from_numpy(order).split(BATCH_SIZE)

    def batches(self, visit: Visit) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.orders(visit):
            yield self.inputs[batch], self.targets[batch]

    def by_hand(self) -> tuple[float, float]:
        for number in range(self.rounds + 1):
            if number == 1:
                begin = now()
            self._average(number, self._train_by_hand)
        return elapsed(begin, now())

    def trainers(self) -> tuple[float, float]:
        net = Net(self.network)
        begin = now()
        for number in range(self.rounds + 1):
            if number == 1:
                begin = now()
            self._average(number, lambda visit: L.Trainer(max_epochs=1, **QUIET).fit(net, Epoch(self, [visit])))
        return elapsed(begin, now())

    def trainer(self) -> tuple[float, float]:
        return self._one_fit(self._epochs())

    def loader(self) -> tuple[float, float]:
        return self._one_fit(DataLoader(TensorDataset(self.inputs, self.targets), batch_sampler=Orders(self._epochs())))

    def vectorized(self) -> tuple[float, float]:
        return self.ours(visits=Vectorized(self.cohort))

    def vmap_by_hand(self) -> tuple[float, float]:
        """Lower bound for simultaneous clients: the same steps without Lightning."""

        def loss(state: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.network, state, (inputs,)), targets)

        for number in range(self.rounds + 1):
            if number == 1:
                begin = now()
            visits = self.visits(number)
            state = {
                name: value.expand(len(visits), *value.shape).clone().requires_grad_()
                for name, value in self.network.state_dict().items()
            }
            optimizer = torch.optim.SGD(state.values(), lr=RATE)
            for batches in zip(*map(self.batches, visits), strict=True):
                inputs, targets = (torch.stack(values) for values in zip(*batches, strict=True))
                optimizer.zero_grad()
                vmap(loss)(state, inputs, targets).sum().backward()
                optimizer.step()
            self.network.load_state_dict({name: value.detach().double().mean(0) for name, value in state.items()})
        return elapsed(begin, now())

    def lightning(self) -> tuple[float, float]:
        return self.ours(visits="lightning")

    def ours(self, visits: Any = "fused") -> tuple[float, float]:
        watch = Stopwatch()
        clients = [
            TensorDataset(self.inputs[first : first + SAMPLES], self.targets[first : first + SAMPLES])
            for first in range(0, len(self.inputs), SAMPLES)
        ]
        trainer = FederatedTrainer(
            max_rounds=self.rounds + 1,
            clients_per_round=self.cohort,
            visits=visits,
            seed=0,
            callbacks=[watch],
            **QUIET,
        )
        trainer.fit(Net(self.network), federated(clients))
        return elapsed(watch.begin, watch.end)

    def reset(self) -> None:
        self.network.load_state_dict(self.start)
        gc.collect()

    def _epochs(self) -> Epoch:
        visits = [visit for number in range(self.rounds + 1) for visit in self.visits(number)]
        return Epoch(self, visits, self.cohort)

    def _one_fit(self, loader: Any) -> tuple[float, float]:
        watch = Stopwatch()
        trainer = L.Trainer(max_epochs=self.rounds + 1, callbacks=[watch], **QUIET)
        trainer.fit(Net(self.network), datamodule=Data(loader))
        return elapsed(watch.begin, watch.end)

    def _train_by_hand(self, visit: Visit) -> None:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=RATE)
        for inputs, targets in self.batches(visit):
            optimizer.zero_grad()
            F.cross_entropy(self.network(inputs), targets).backward()
            optimizer.step()

    def _average(self, number: int, train: Callable[[Visit], Any]) -> None:
        start = {name: value.clone() for name, value in self.network.state_dict().items()}
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        visits = self.visits(number)
        for visit in visits:
            self.network.load_state_dict(start)
            train(visit)
            for name, value in self.network.state_dict().items():
                total[name].add_(value, alpha=SAMPLES)
        self.network.load_state_dict({name: value / (SAMPLES * len(visits)) for name, value in total.items()})


class Epoch:
    """Batches for some visits without the cost of a ``DataLoader``; every epoch has other visits."""

    def __init__(self, experiment: Experiment, visits: Sequence[Visit], per_epoch: int = 1) -> None:
        self.experiment = experiment
        self.visits = visits
        self.per_epoch = per_epoch
        self.epoch = 0

    def __len__(self) -> int:
        return self.per_epoch * (SAMPLES // BATCH_SIZE)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for visit in self.next_visits():
            yield from self.experiment.batches(visit)

    def next_visits(self) -> Sequence[Visit]:
        first = self.epoch % (len(self.visits) // self.per_epoch) * self.per_epoch
        self.epoch += 1
        return self.visits[first : first + self.per_epoch]


class Orders:
    """Example indices for the same batches, for a ``DataLoader``."""

    def __init__(self, epochs: Epoch) -> None:
        self.epochs = epochs

    def __len__(self) -> int:
        return len(self.epochs)

    def __iter__(self) -> Iterator[list[int]]:
        for visit in self.epochs.next_visits():
            yield from (order.tolist() for order in self.epochs.experiment.orders(visit))


class Data(L.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


def federated(clients: Any) -> FederatedDataModule:
    return FederatedDataModule(clients, batch_size=BATCH_SIZE)


def elapsed(begin: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - begin[0], end[1] - begin[1]


def measure(
    network: str,
    rounds: int,
    repetitions: int,
    warm_up: bool = True,
    names: Sequence[str] = SIX,
    cohort: int = COHORT,
) -> dict[str, Any]:
    """Wall-clock and CPU seconds per round for each repetition, and distances to the weights from the loop by hand."""
    experiment = Experiment(network, rounds, cohort)
    runs = {name: getattr(experiment, name.replace(" ", "_")) for name in names}
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    weights: dict[str, Tensor] = {}
    for repetition in range(0 if warm_up else 1, repetitions + 1):
        first = repetition % len(names)
        for name in (*names[first:], *names[:first]):
            experiment.reset()
            wall, own = runs[name]()
            weights[name] = torch.cat([value.flatten() for value in experiment.network.state_dict().values()])
            if repetition:
                seconds[name].append([wall / rounds, own / rounds])
        shown = {name: round(values[-1][1], 4) for name, values in seconds.items() if values}
        print(f"{network} {repetition}/{repetitions} {shown}", flush=True)
    if "loader" in names and not torch.equal(weights["trainer"], weights["loader"]):
        raise RuntimeError("The plain Trainers do not train on the same batches.")
    hand = weights["by hand"]
    equal = {name: torch.equal(weights[name], hand) for name in ("ours", "trainers", "lightning") if name in names}
    apart = {name: float((value - hand).norm() / hand.norm()) for name, value in weights.items()}
    return {
        "network": network,
        "rounds": rounds,
        "seconds": seconds,
        "equal": equal,
        "apart": apart,
        "version": version(),
    }


def population_cost(repetitions: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds per round with 1,000 and with 1,000,000 lazily built clients."""
    seconds: dict[str, list[list[float]]] = {"1000": [], "1000000": []}
    inputs, targets = torch.randn(SAMPLES, 1, 28, 28), torch.randint(10, (SAMPLES,))
    for repetition in range(repetitions + 1):
        sizes = list(seconds)
        for size in sizes if repetition % 2 else sizes[::-1]:
            watch = Stopwatch()
            clients = LazyClients(range(int(size)), lambda client: TensorDataset(inputs, targets))
            trainer = FederatedTrainer(
                max_rounds=rounds + 1, clients_per_round=COHORT, seed=repetition, callbacks=[watch], **QUIET
            )
            trainer.fit(Net(build_network("mlp", num_classes=10)), federated(clients))
            if repetition:
                seconds[size].append([value / rounds for value in elapsed(watch.begin, watch.end)])
    return seconds


def peak_memory(cohort: int) -> int:
    inputs, targets = torch.randn(BATCH_SIZE, 1, 28, 28), torch.randint(10, (BATCH_SIZE,))
    clients = LazyClients(range(1000), lambda client: TensorDataset(inputs, targets))
    trainer = FederatedTrainer(max_rounds=1, clients_per_round=cohort, seed=0, **QUIET)
    trainer.fit(Net(build_network("mcmahan_cnn", num_classes=10)), federated(clients))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ratios(seconds: dict[str, list[list[float]]], name: str, base: str, clock: int) -> np.ndarray:
    return np.array(seconds[name])[:, clock] / np.array(seconds[base])[:, clock]


def spread(values: np.ndarray) -> str:
    low, high = np.percentile(values, [25, 75])
    return f"{np.median(values):.2f} ({low:.2f}-{high:.2f})"


def report_together(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> str:
    where = f"{machine(arguments.threads)}, load average {os.getloadavg()[0]:.1f}"
    parts = [
        f"`python benchmarks/speed.py --parts vectorized --out benchmarks/results/performance.md`."
        f" {where}. MLP 784-64-10, batches"
        f" of {BATCH_SIZE}, {SAMPLES} examples per client, SGD; process seconds. Medians over repetitions, of ratios"
        " within a repetition, with the quartiles in brackets."
    ]
    rows = []
    for cohort, result in results.items():
        seconds = result["seconds"]
        for name in TOGETHER:
            own = np.median(np.array(seconds[name])[:, 1])
            rows.append([cohort, WORDS[name], f"{own:.4f}", spread(ratios(seconds, name, "by hand", 1))])
            rows[-1] += [f"{result['apart'][name]:.0e}"] if name in TOGETHER[-2:] else []
    header = ["clients", "", "s / round", "/ (a)", "weights' distance from (a)'s, relative"]
    parts.append(table(header, [[*row, *[""] * (len(header) - len(row))] for row in rows]))
    return "\n\n".join(parts)


def report(results: dict[str, Any], arguments: argparse.Namespace) -> str:
    parts = [
        f"`python benchmarks/speed.py --out benchmarks/results/performance.md`."
        f" {machine(arguments.threads)}. Batches of"
        f" {BATCH_SIZE}, {SAMPLES} examples per client, {COHORT} clients in a round, SGD. Ratios are medians over"
        " repetitions of the ratio within a repetition, with the quartiles in brackets; *process* counts this"
        " process' own seconds, which other work on a shared machine disturbs less than the wall clock; ratios are of"
        " these."
    ]
    bases = {"(a)": "by hand", "(b)": "trainer", "(h)": "loader"}
    header = ["", "s / round, process", "s / round, wall", *(f"/ {letter}" for letter in bases)]
    for network, result in ((name, results[name]) for name in PARTS[:2] if name in results):
        seconds, rows = result["seconds"], []
        for name in seconds:
            words = WORDS[name]
            wall, own = np.median(np.array(seconds[name]), axis=0)
            cells = [spread(ratios(seconds, name, base, 1)) if base in seconds else "" for base in bases.values()]
            rows.append([words, f"{own:.4f}", f"{wall:.4f}", *cells])
        equal = ", ".join(f"{WORDS[name][:3]} {'yes' if same else 'NO'}" for name, same in result["equal"].items())
        parts += [f"**`{network}`, {len(seconds['ours'])} repetitions of {result['rounds']} rounds**"]
        parts += [table(header, rows), f"Weights bit-equal to those of (a): {equal}."]
    if "memory" in results:
        rows = [[cohort, f"{peak / 2**20:.0f}"] for cohort, peak in results["memory"].items()]
        model = tensor_bytes(build_network("mcmahan_cnn", num_classes=10).state_dict())
        parts.append(
            f"**Memory of averaging**: `mcmahan_cnn` ({model / 2**20:.1f} MiB), one round, a process for each."
            f" Keeping all updates would add {model * 190 / 2**20:.0f} MiB from 10 to 200 clients."
        )
        parts.append(table(["clients in a round", "peak resident MiB"], rows))
    if "population" in results:
        seconds = results["population"]
        wall = [np.median(np.array(values)[:, 0]) for values in seconds.values()]
        own = [np.median(np.array(values)[:, 1]) for values in seconds.values()]
        rows = [
            [f"{int(size):,}", f"{mine:.4f}", f"{clock:.4f}"]
            for size, mine, clock in zip(seconds, own, wall, strict=True)
        ]
        rows.append(["ratio", *(spread(ratios(seconds, "1000000", "1000", clock)) for clock in (1, 0))])
        parts.append("**Size of the population**: MLP 784-64-10, 10 clients in a round, clients built on demand.")
        parts.append(table(["clients", "s / round, process", "s / round, wall"], rows))
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument(
        "--repetitions", type=int, default=12, help="repetitions with the CNN; the MLP gets twice as many"
    )
    made.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure")
    made.add_argument("--peak-memory-of", type=int, default=None, metavar="CLIENTS", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.peak_memory_of is not None:
        print(json.dumps(peak_memory(arguments.peak_memory_of)))
        return
    repetitions = 1 if arguments.quick else arguments.repetitions
    results: dict[str, Any] = load_json(arguments.runs / "speed.json") or {}
    for part in arguments.parts:
        if part == "mcmahan_cnn":
            results[part] = measure(part, 1 if arguments.quick else 2, repetitions, not arguments.quick)
        elif part == "mlp":
            results[part] = measure(part, 2 if arguments.quick else 10, 2 * repetitions)
        elif part == "memory":
            results[part] = {}
            for cohort in (10,) if arguments.quick else (10, 50, 200):
                command = [sys.executable, __file__, "--peak-memory-of", str(cohort)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results[part][cohort] = json.loads(done.stdout.splitlines()[-1])
        elif part == "vectorized":
            results[part] = {
                str(cohort): measure("mlp", 2 if arguments.quick else rounds, repetitions, True, TOGETHER, cohort)
                for cohort, rounds in ((10, 10), (50, 3))
            }
        else:
            results[part] = population_cost(repetitions, 2 if arguments.quick else 10)
        save_json(arguments.runs / "speed.json", results)
    if results.keys() - {"vectorized"}:
        write_section(arguments.out, "speed", report(results, arguments))
    if "vectorized" in results:
        write_section(arguments.out, "vectorized", report_together(results["vectorized"], arguments))


if __name__ == "__main__":
    main()
