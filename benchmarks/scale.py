"""Cost constants of a round: per client, per parameter, per client in the population; and a check of the constants.

In one process, one thread. A parameter's constant is for a float32 value; times are per client in a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import QUIET, machine, parser, peak_bytes, prepare, table, version, write_section
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import FedAvg
from lightning_fed.client.client_store import FolderStore
from lightning_fed.client.local_model import LocalModel
from lightning_fed.data import LazyClients
from lightning_fed.messages import ClientUpdate
from lightning_fed.model.entries import entry_policies
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps.chain import Chain

POPULATIONS = (10**3, 10**5, 10**6)
COHORTS = (100, 1_000)
SIZES = (10**6, 10**7, 10**8)
CHECKS = ((100, 10**5), (1_000, 10**5), (20, 3 * 10**7))
PLANS = ((10**3, 10**6), (10**3, 10**9), (10**5, 10**6), (10**5, 10**8), (10**6, 10**6), (10**6, 10**7))
STEPS, BATCH_SIZE, INPUTS = 5, 4, 16


class Net(L.LightningModule):
    """A training layer, and a buffer for size only."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, 4)
        self.register_buffer("size", torch.zeros(max(1, parameters)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def dataset(client: Any) -> TensorDataset:
    generator = torch.Generator().manual_seed(client)  # lazily made clients must be reproducible
    count = STEPS * BATCH_SIZE
    return TensorDataset(torch.randn(count, INPUTS, generator=generator), torch.zeros(count, dtype=torch.int64))


class Stamps(L.Callback):
    """Start times of rounds, and the end of the last round."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamps.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamps.append(time.perf_counter())


def fit(population: int, cohort: int, parameters: int, rounds: int) -> float:
    """Seconds per round, without the first round."""
    watch = Stamps()
    trainer = FederatedTrainer(max_rounds=rounds + 1, clients_per_round=cohort, seed=0, callbacks=[watch], **QUIET)
    trainer.fit(Net(parameters), FederatedDataModule(LazyClients(range(population), dataset), batch_size=BATCH_SIZE))
    return (watch.stamps[-1] - watch.stamps[1]) / rounds


def best(function: Callable[[], Any], repetitions: int = 5) -> float:
    """Minimum seconds of several calls: other processes only increase the time."""
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def per_parameter(size: int) -> dict[str, float]:
    """Seconds per parameter, for every part of a visit with cost proportional to the model size."""
    net = nn.ParameterDict({f"{part}": nn.Parameter(torch.randn(size // 10)) for part in range(10)})
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(folder)
        local = LocalModel(net, entry_policies(net), store)
        server = Server(Chain(FedAvg()))
        server.start_round(RoundInfo(0), local.global_state())
        broadcast = server.prepare("a")
        server.fail("a", "")
        found = {"load": best(lambda: local.load_client("a", broadcast.state))}
        found["answer"] = best(lambda: local.answer("a", 1))
        update = local.answer("a", 1)

        def accept() -> None:
            server.sent("a", server.prepare("a"))
            server.report.received.clear()
            assert server.count(update)
            assert server.accept(update)

        accept()
        found["check and add"] = best(accept)
        other = FedAvg()
        other.start(RoundInfo(0), broadcast.state)
        other.receive(ClientUpdate("b", 1, dict(update.state)))
        found["merge"] = best(lambda: server.rule.merge(other))
        found["mean"] = best(server.rule.aggregate, 2)
        if size <= 10**7:
            state = local.client_entries()
            found["store"] = best(lambda: store.put("a", 0, state))
            found["recall"] = best(lambda: store.get("a"))
    return {name: seconds / size for name, seconds in found.items()}


def child(kind: str, *numbers: int) -> dict[str, float]:
    """Runs a measurement in a separate process, for a correct peak memory."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind, *map(str, numbers)], capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_child(kind: str, numbers: list[int]) -> dict[str, float]:
    if kind == "parameters":
        return per_parameter(numbers[0])
    population, cohort, parameters, rounds = numbers
    gc.collect()
    before = peak_bytes()
    seconds = fit(population, cohort, parameters, rounds)
    return {"seconds": seconds, "memory": peak_bytes() - before}


def measure(quick: bool) -> str:
    sizes, cohorts = SIZES[:2] if quick else SIZES, COHORTS
    drawn = {size: child("fit", size, 10, 1, 20) for size in POPULATIONS}
    clients = {cohort: child("fit", 10**6, cohort, 1, 2) for cohort in cohorts}
    least = clients[cohorts[0]]
    most = clients[cohorts[-1]]
    per_client = (most["seconds"] - least["seconds"]) / (cohorts[-1] - cohorts[0])
    fixed = least["seconds"] - cohorts[0] * per_client
    parts = {size: child("parameters", size) for size in sizes}
    constants = parts[sizes[-1]] | {
        name: value for name, value in parts[SIZES[1]].items() if name in ("store", "recall")
    }
    visit = constants["load"] + constants["answer"] + constants["check and add"]
    once = constants["mean"] + constants["load"]

    def predict(cohort: int, parameters: int) -> float:
        return fixed + cohort * (per_client + visit * parameters) + once * parameters

    rows = [(f"{size:,}", f"{value['seconds']:.4f}", f"{value['memory'] / 2**20:.0f}") for size, value in drawn.items()]
    text = [
        f"`python benchmarks/scale.py --out benchmarks/results/scale.md`, {machine(1)}, commit {version()}.",
        "**Clients to draw from**, 10 in a round",
        table(["clients", "s / round", "MiB added by the fit"], rows),
        f"**Clients in a round**, {STEPS} steps of {BATCH_SIZE} examples each with a network of 69 parameters, of a"
        " million clients",
        table(
            ["clients", "s / round", "ms / client", "MiB added by the fit"],
            [
                (
                    f"{cohort:,}",
                    f"{value['seconds']:.3f}",
                    f"{1e3 * value['seconds'] / cohort:.2f}",
                    f"{value['memory'] / 2**20:.0f}",
                )
                for cohort, value in clients.items()
            ],
        ),
        "**Parameters**: nanoseconds per parameter, of the whole model at once",
        table(
            ["part", *(f"{size:,}" for size in sizes)],
            [
                (name, *(f"{1e9 * parts[size][name]:.2f}" if name in parts[size] else "" for size in sizes))
                for name in parts[sizes[0]]
            ],
        ),
        f"So a round takes about $t = {fixed:.2f}\\,\\mathrm{{s}} + C\\,({1e3 * per_client:.2f}\\,\\mathrm{{ms}} +"
        f" {1e9 * visit:.2f}\\,\\mathrm{{ns}} \\cdot P) + {1e9 * once:.2f}\\,\\mathrm{{ns}} \\cdot P$ with $C$"
        " clients of these few steps and $P$ parameters, beside the training itself. Predicted and measured:",
        table(
            ["clients", "parameters", "predicted, s", "measured, s"],
            [
                (
                    f"{cohort:,}",
                    f"{parameters:,}",
                    f"{predict(cohort, parameters):.2f}",
                    f"{child('fit', 10**6, cohort, parameters, 2)['seconds']:.2f}",
                )
                for cohort, parameters in (CHECKS[:1] if quick else CHECKS)
            ],
        ),
        "What follows for rounds that nobody here has run: hours of one process for everything but the training, and"
        " what travels in a round in both directions.",
        table(
            ["clients", "parameters", "hours", "of them per parameter", "TB that travel", "GB on the server"],
            [
                (
                    f"{cohort:,}",
                    f"{parameters:,}",
                    f"{predict(cohort, parameters) / 3600:.2f}",
                    f"{100 * (cohort * visit + once) * parameters / predict(cohort, parameters):.0f} %",
                    f"{8 * cohort * parameters / 1e12:.3g}",
                    f"{24 * parameters / 1e9:.3g}",
                )
                for cohort, parameters in PLANS
            ],
        ),
    ]
    return "\n\n".join(text)


def main() -> None:
    if "--child" in sys.argv:
        at = sys.argv.index("--child")
        prepare(argparse.Namespace(threads=1, quick=False, runs=Path()))
        print(json.dumps(run_child(sys.argv[at + 1], [int(number) for number in sys.argv[at + 2 :]])))
        return
    arguments = parser(__doc__.splitlines()[0], data=False).parse_args()
    prepare(arguments)
    write_section(arguments.out, "scale", measure(arguments.quick))


if __name__ == "__main__":
    main()
