"""Seconds per round for two processes with one thread each, compared with one process and a loop by hand.

Each fit runs in separate forked processes; the measurement starts with the second round. Each repetition runs in turn:
the loop from `speed.py` with one thread and with two threads, `FederatedTrainer` in one process, and
`strategy="client_parallel"` in two processes. Ratios are computed within a repetition.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import QUIET, machine, parser, prepare, save_json, table, version, write_section
from speed import COHORT, SAMPLES, Experiment, Net, Stopwatch, elapsed, federated, spread
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer

WORDS = {
    "hand": "PyTorch loop by hand, 1 thread",
    "hand, 2 threads": "PyTorch loop by hand, 2 threads",
    "one": "`FederatedTrainer`, 1 process x 1 thread",
    "two": '`strategy="client_parallel"`, 2 processes x 1 thread',
}


def run(name: str, network: str, rounds: int) -> dict[str, Any]:
    """Runs one fit in this process: seconds per round (wall clock, CPU) and a checksum of the weights."""
    torch.set_num_threads(2 if name == "hand, 2 threads" else 1)
    experiment = Experiment(network, rounds)
    if name.startswith("hand"):
        seconds = experiment.by_hand()
    else:
        watch = Stopwatch()
        clients = [
            TensorDataset(experiment.inputs[first : first + SAMPLES], experiment.targets[first : first + SAMPLES])
            for first in range(0, len(experiment.inputs), SAMPLES)
        ]
        options = {"strategy": "client_parallel", "devices": 2} if name == "two" else {"devices": 1}
        trainer = FederatedTrainer(
            max_rounds=rounds + 1,
            clients_per_round=COHORT,
            seed=0,
            callbacks=[watch],
            accelerator="cpu",
            **options,
            **QUIET,
        )
        trainer.fit(Net(experiment.network), federated(clients))
        seconds = elapsed(watch.begin, watch.end)
    checksum = sum(float(value.double().sum()) for value in experiment.network.state_dict().values())
    return {"wall": seconds[0] / rounds, "process": seconds[1] / rounds, "checksum": checksum}


def measure(name: str, network: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Runs one fit in separate processes: the longest wall-clock time, and the CPU seconds of the busiest process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = 2 if name == "two" else 1
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if count > 1:  # environment variables set by `torchrun`
                    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "RANK": rank}
                    found |= {"LOCAL_RANK": rank, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": count, "TORCHELASTIC_RUN_ID": 0}
                    os.environ.update({key: str(value) for key, value in found.items()})
                save_json(folder / f"process-{rank}.json", run(name, network, rounds))
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    if any([os.waitpid(pid, 0)[1] for pid in pids]):  # waits for all processes before an error
        raise SystemExit(f"{name} failed.")
    parts = [json.loads((folder / f"process-{rank}.json").read_text()) for rank in range(count)]
    return {key: max(part[key] for part in parts) for key in ("wall", "process")} | {"checksum": parts[0]["checksum"]}


def report(results: dict[str, Any], threads: int) -> str:
    parts = [
        f"`python benchmarks/client_parallel.py --out benchmarks/results/performance.md`."
        f" {machine(threads)}. The data and the"
        f" schedule of the first table: {COHORT} clients in a round. Ratios are medians over repetitions of the ratio"
        " within a repetition, with the quartiles in brackets; *process* counts the seconds of the busier process."
    ]
    header = ["", "s / round, process", "s / round, wall", "/ one process, process", "/ one process, wall"]
    header += ["/ 2 threads by hand, wall"]
    for network, result in results.items():
        seconds, rows = result["seconds"], []
        for name, words in WORDS.items():
            values = {clock: np.array([run[clock] for run in seconds[name]]) for clock in ("process", "wall")}
            bases = {clock: np.array([run[clock] for run in seconds["one"]]) for clock in ("process", "wall")}
            hand = np.array([run["wall"] for run in seconds["hand, 2 threads"]])
            cells = [f"{np.median(values[clock]):.4f}" for clock in ("process", "wall")]
            cells += [spread(values[clock] / bases[clock]) for clock in ("process", "wall")]
            rows.append([words, *cells, spread(values["wall"] / hand)])
        sums = [[run["checksum"] for run in seconds[name]] for name in ("one", "two")]
        far = max(abs(one - two) / abs(one) for one, two in zip(*sums, strict=True))
        parts.append(f"**`{network}`, {len(seconds['one'])} repetitions of {result['rounds']} rounds**")
        parts += [
            table(header, rows),
            f"The sum of all weights in two processes differs from that in one by {far:.0e}.",
        ]
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--repetitions", type=int, default=8, help="repetitions")
    made.add_argument("--networks", nargs="+", default=["mcmahan_cnn", "mlp"], help="networks")
    arguments = made.parse_args()
    prepare(arguments)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for network in arguments.networks:
        rounds = (1 if arguments.quick else 3) if network == "mcmahan_cnn" else (5 if arguments.quick else 20)
        seconds: dict[str, list[dict[str, Any]]] = {name: [] for name in WORDS}
        for repetition in range(1 if arguments.quick else arguments.repetitions):
            names = list(WORDS)
            for name in names[repetition % 4 :] + names[: repetition % 4]:
                seconds[name].append(measure(name, network, rounds, arguments.runs))
            shown = {name: round(values[-1]["wall"], 4) for name, values in seconds.items()}
            print(f"{network} {repetition + 1} {shown}", flush=True)
        results[network] = {"rounds": rounds, "seconds": seconds, "version": version()}
        save_json(arguments.runs / "client_parallel.json", results)
    write_section(arguments.out, "client_parallel", report(results, arguments.threads))


if __name__ == "__main__":
    main()
