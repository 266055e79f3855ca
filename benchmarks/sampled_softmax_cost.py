"""Cost of a visit with few out of very many classes: client and server seconds, memory, bytes.

The same clients train a small network with an increasing number of classes in the head. Each client always holds the
same number of classes. The server averages with and without momentum. Class numbers and rules alternate within a
repetition, with ratios within a repetition.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, load_json, machine, parser, peak_bytes, prepare, save_json, table, version, write_section
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer
from lightning_fed.callbacks import SampledSoftmax
from lightning_fed.messages import message_bytes
from lightning_fed.modules import SampledSoftmaxHead

WIDTH, OWN, SAMPLES, CLIENTS, BATCH = 64, 100, 200, 5, 20
COUNTS = (10_000, 100_000, 1_000_000)
RULES = ("fedavg", "fedavgm")
CASES = [(rule, count) for rule in RULES for count in COUNTS]


class Classifier(L.LightningModule):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(), nn.Flatten()),
            nn.Linear(32 * 49, WIDTH),
        )
        self.head = SampledSoftmaxHead(WIDTH, num_classes)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, target = batch
        return F.cross_entropy(self.head(self.body(inputs)), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(FederatedCallback):
    """Seconds per visit (from the request to the answer), and seconds per round. Must be the first callback."""

    def __init__(self) -> None:
        self.visits: list[float] = []
        self.rounds: list[float] = []
        self.bytes = 0

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.rounds.append(time.process_time())

    def on_client_request(self, trainer: Any, module: Any, client: Any, request: Any) -> None:
        self._begin = time.process_time()

    def on_client_start(self, trainer: Any, module: Any, client: Any, broadcast: Any) -> None:
        self.bytes = message_bytes(broadcast)

    def on_client_end(self, trainer: Any, module: Any, client: Any, update: Any) -> None:
        self.visits.append(time.process_time() - self._begin)


def clients(num_classes: int) -> dict[int, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    data = {}
    for client in range(CLIENTS):
        own = torch.randint(num_classes, (OWN,), generator=generator)
        labels = own[torch.arange(SAMPLES) % OWN]
        data[client] = TensorDataset(torch.randn(SAMPLES, 1, 28, 28, generator=generator), labels)
    return data


def fit(rule: str, num_classes: int, held: int, rounds: int) -> dict[str, float]:
    """CPU seconds for a client's visit and for the rest of a round, and bytes down per client."""
    torch.manual_seed(0)
    module, clock = Classifier(num_classes), Clock()
    data = clients(num_classes)
    own = {client: dataset.tensors[1].unique() for client, dataset in data.items()}
    negatives = held - len(own[0])
    callbacks = [clock, SampledSoftmax(negatives, classes={client: rows.tolist() for client, rows in own.items()})]
    trainer = FederatedTrainer(max_rounds=rounds + 1, method=rule, callbacks=callbacks, seed=0, **QUIET)
    trainer.fit(module, datamodule=FederatedDataModule(data, batch_size=BATCH))
    visits = sum(clock.visits[CLIENTS:])
    whole = time.process_time() - clock.rounds[1]
    return {
        "client": visits / (rounds * CLIENTS),
        "server": (whole - visits) / rounds,
        "bytes": float(clock.bytes),
    }


def peak(rule: str, num_classes: int, held: int) -> float:
    """Peak memory of a process during two rounds, in MB."""
    call = f"own.fit({rule!r}, {num_classes}, {held}, 1)"
    code = f"import sampled_softmax_cost as own; own.prepare_alone(); {call}; own.say()"
    here = Path(__file__).parent
    return float(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=here).stdout
    )


def prepare_alone() -> None:
    torch.set_num_threads(1)


def say() -> None:
    print(peak_bytes() / 1e6)


def measure(held: int, rounds: int, repetitions: int) -> dict[str, Any]:
    results: list[list[dict[str, float]]] = [[] for _ in CASES]
    for repetition in range(repetitions + 1):
        for place in np.roll(np.arange(len(CASES)), -repetition):
            gc.collect()
            result = fit(*CASES[place], held, rounds)
            if repetition:
                results[place].append(result)
        print(f"{held} held, repetition {repetition}/{repetitions}", flush=True)
    memory = [peak(*case, held) for case in CASES]
    return {"runs": results, "memory": memory, "held": held, "rounds": rounds, "version": version()}


def report(results: dict[str, Any], threads: int) -> str:
    held, extractor = results["held"], sum(value.numel() for value in Classifier(10).body.parameters())
    rows = []
    for (rule, count), values, memory in zip(CASES, results["runs"], results["memory"], strict=True):
        pairs = zip(values, results["runs"][CASES.index((rule, COUNTS[0]))], strict=True)
        ratio = np.quantile([one["client"] / base["client"] for one, base in pairs], [0.5, 0.25, 0.75])
        client, server = (np.median([value[name] for value in values]) for name in ("client", "server"))
        rows.append(
            [
                f"`{rule}`, {count:,}",
                f"{1000 * client:.1f}",
                f"{ratio[0]:.2f} ({ratio[1]:.2f} - {ratio[2]:.2f})",
                f"{1000 * server:.0f}",
                f"{values[0]['bytes'] / 1e6:.3f}",
                f"{4 * (extractor + WIDTH * count) / 1e6:.1f}",
                f"{memory:.0f}",
            ]
        )
    header = [
        "rule, classes",
        "ms / visit, client",
        f"/ {COUNTS[0]:,} classes",
        "ms / round, the rest",
        "MB down per client",
        "MB of the whole model",
        "peak MB of the process",
    ]
    words = (
        f"`python benchmarks/sampled_softmax_cost.py --out benchmarks/results/method_costs.md`."
        f" {machine(threads)}. {CLIENTS} clients"
        f" of {SAMPLES} random 28 x 28 images, batches of {BATCH}; embeddings of {WIDTH}; every client holds {held:,}"
        " classes. Process seconds: *client* from drawing the classes it asks for to the update made, with the rows"
        " looked up for it and loaded; *the rest* is the server (averaging, with `fedavgm` momentum's step on the whole"
        " head, looking for NaN) and Lightning's round. Ratios are medians over"
        f" {len(results['runs'][0])} repetitions of {results['rounds']} rounds, with quartiles. Client and server share"
        " the process, whose memory is the head's, a new one, what the rows of a round take and, with momentum, its 8"
        " bytes per parameter before and after the round."
    )
    return f"{words}\n\n{table(header, rows)}"


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--held", type=int, default=1000, help="classes that a client holds")
    made.add_argument("--rounds", type=int, default=4, help="rounds of a fit")
    made.add_argument("--repetitions", type=int, default=4, help="fits of each rule and number of classes")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.rounds = arguments.repetitions = 1
    path = arguments.runs / f"sampled_softmax_cost_{arguments.held}.json"
    results = load_json(path) or measure(arguments.held, arguments.rounds, arguments.repetitions)
    save_json(path, results)
    write_section(arguments.out, "sampled-softmax-cost", report(load_json(path), arguments.threads))


if __name__ == "__main__":
    main()
