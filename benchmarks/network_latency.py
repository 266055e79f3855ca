"""Time per part of a round over Flower and over NVFLARE: a server and two sites on this machine, McMahan's CNN.

Both networks run as separate processes, as in the tests. The training code is in `network_halves.py`. For comparison, a
plain `L.Trainer` trains on one client's data. All times come from one clock.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
from common import QUIET, Curve, machine, parser, prepare, table, write_section
from network_halves import BATCH, CLIENTS, OPTIONS, SAMPLES, dataset, model
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "lightning_fed" / "backends"
sys.path.insert(0, str(ROOT))

HALVES = "network_halves"
"""Module with both halves."""
FLOWER_SERVER = """
from lightning_fed.backends.flower import server_app
from {halves} import server_half

app = server_half(server_app)
"""
FLOWER_CLIENTS = """
from lightning_fed.backends.flower import client_app
from {halves} import client_half

app = client_half(client_app)
"""
NVFLARE_SERVER = """
from lightning_fed.backends.nvflare import FederationController
from {halves} import server_half

class Server(FederationController):
    def __init__(self):
        server_half(super().__init__)
"""
NVFLARE_CLIENT = """
from lightning_fed.backends.nvflare import FederationExecutor
from {halves} import client_half

class Client(FederationExecutor):
    def __init__(self):
        client_half(super().__init__)
"""


def write_flower_app(folder: Path, name: str, **sources: str) -> Path:
    """Writes an app with these modules, and standard files from `lightning-fed flower new`."""
    package = folder / "app" / name
    package.mkdir(parents=True)
    for file, template in {"../pyproject.toml": "pyproject.toml.txt", "client.py": "client.py.txt"}.items():
        text = (TEMPLATES / "flower" / "template" / template).read_text()
        (package / file).write_text(text.format(name=name, package=name))
    for module, source in {"__init__": "", **sources}.items():
        (package / f"{module}.py").write_text(source.replace("{halves}", HALVES))
    return package.parent


def run_flower(
    folder: Path, app: Path, has_workers: bool, seconds: float, environment: Mapping[str, str] | None = None
) -> None:
    from lightning_fed.backends.flower.start import SERVER_ENVIRONMENT
    from tests.backends.flower.processes import Deployment

    with Deployment(folder, environment={**SERVER_ENVIRONMENT, **(environment or {})}) as deployment:
        for name in SERVER_ENVIRONMENT:  # only for the SuperLink
            del deployment.environment[name]
        deployment.configure()
        for index in range(len(CLIENTS)):
            config = f"partition-id={index} num-partitions={len(CLIENTS)}"
            if has_workers:
                socket = folder / f"node{index}" / "worker"
                command = sys.executable, "-m", "lightning_fed", "flower", "worker", str(app), "--socket", str(socket)
                deployment.start(f"worker{index}", *command)
                while not socket.exists():
                    time.sleep(0.2)
                config += f' worker="{socket}"'
            deployment.node(f"node{index}", config)
        deployment.run(app).wait(seconds)


def on_flower(folder: Path, has_workers: bool = True) -> None:
    app = write_flower_app(folder, "latency", server=FLOWER_SERVER, clients=FLOWER_CLIENTS)
    run_flower(folder, app, has_workers, seconds=1200)


def on_nvflare(folder: Path) -> None:
    """Runs a job in POC mode, with standard configuration from `lightning-fed nvflare new`."""
    from tests.backends.nvflare.processes import Poc

    app = folder / "latency" / "app"
    for path in (app / "config", app / "custom" / "latency"):
        path.mkdir(parents=True)
    for template in (TEMPLATES / "nvflare" / "template").glob("*.json.txt"):
        place = app.parent if template.stem == "meta.json" else app / "config"
        (place / template.stem).write_text(template.read_text().format(name="latency", package="latency"))
    for module, source in {"__init__": "", "server": NVFLARE_SERVER, "client": NVFLARE_CLIENT}.items():
        (app / "custom" / "latency" / f"{module}.py").write_text(source.replace("{halves}", HALVES))
    with Poc(folder, "") as poc:
        poc.wait(poc.submit(app.parent), seconds=1200)


NETWORKS: dict[str, Callable[[Path], None]] = {
    "Flower, with workers": on_flower,
    "NVFLARE, POC mode": on_nvflare,
    "Flower, a process per message": lambda folder: on_flower(folder, has_workers=False),
}

PARTS = ("training", "messages", "waiting for the message", "waiting for the answer")


def measure(train: Callable[[Path], None], rounds: int) -> list[list[float]]:
    """Seconds per round, in total and for each part, without the first and the last round."""
    with tempfile.TemporaryDirectory(prefix="net-") as folder:
        os.environ |= {"LATENCY_FOLDER": folder, "LATENCY_ROUNDS": f"{rounds + 2}"}
        train(Path(folder))
        notes = [json.loads(line) for line in (Path(folder) / "times").read_text().splitlines()]
    begins = [note["time"] for note in notes if note["what"] == "round"]
    return [parts_of([note for note in notes if begin <= note["time"] <= end]) for begin, end in pairwise(begins[1:])]


def parts_of(notes: list[dict[str, Any]]) -> list[float]:
    """Parts of a round, for the client with the last answer."""
    client = [note["process"] for note in notes if note["what"] == "leaves"][-1]
    server = notes[0]["process"]
    times = {note["what"]: note["time"] for note in notes[:-1] if note["process"] in (server, client)}
    training = times["trained"] - times["fit"]
    sending, answering = times["sent"] - times["round"], times["leaves"] - times["arrives"] - training
    end = notes[-1]["time"]
    return [
        end - times["round"],
        training,
        sending + answering + end - times["answered"],
        times["arrives"] - times["sent"],
        times["answered"] - times["leaves"],
    ]


def plain_epochs(epochs: int) -> list[float]:
    """Seconds per epoch for a plain Trainer on one client's data, without the first epoch."""
    curve = Curve()
    trainer = L.Trainer(**{**QUIET, **OPTIONS}, max_epochs=epochs + 1, callbacks=[curve])
    trainer.fit(model(), DataLoader(dataset(CLIENTS[0]), batch_size=BATCH, shuffle=True))
    return [values["wall_s"] for values in curve.rounds[1:]]


def in_words(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--rounds", type=int, default=8, help="rounds that are measured, beside the first and the last")
    arguments = made.parse_args()
    prepare(arguments)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    rows = []
    for name, train in list(NETWORKS.items())[: 1 if arguments.quick else None]:
        rounds = measure(train, 1 if arguments.quick else arguments.rounds)
        rows.append([name, *map(in_words, zip(*rounds, strict=True)), in_words(plain_epochs(len(rounds)))])
        print(rows[-1], flush=True)
    header = ["", "round", *PARTS, "epoch of a plain `L.Trainer`"]
    text = (
        f"`python benchmarks/network_latency.py --rounds {arguments.rounds}`. McMahan's CNN (1.7 million parameters,"
        f" 6.7 MB each way), two sites with a client of {SAMPLES} examples each, on the loopback address; seconds,"
        f" median and range of {arguments.rounds} rounds. {machine(1)}, flwr {version('flwr')}, nvflare"
        f" {version('nvflare')}. Load average {os.getloadavg()[1]:.1f}. Messages: both halves write, read and use them."
        " Times at a client are those of the one whose answer leaves last. The plain Trainer trains on one client's"
        f" data, right after the rounds of its row.\n\n{table(header, rows)}"
    )
    write_section(arguments.out, "networks", text)


if __name__ == "__main__":
    main()
