"""Where the seconds of a round over Flower go: a SuperLink and two SuperNodes on this machine, McMahan's CNN.

The script is its own Flower app: it writes one in a temporary folder, starts Flower's processes and two workers, and
trains. What the two clients' training takes is measured in the workers, around `Trainer.fit`; when a message is sent
and its answer is there, on the server; when a worker gets it and is done, there. All on one clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import machine, parser, prepare, table, write_section

from lightning_fed.backends.flower.start import SERVER_ENVIRONMENT

TEMPLATE = Path(__file__).parents[1] / "lightning_fed" / "backends" / "flower" / "template"
CLIENTS, SAMPLES, BATCH = 2, 300, 20

WORDS = ("training", "sent", "picked up", "a process started", "carried to the worker", "back")

COMMON = f"""
import json, os, sys, time
import torch
torch.set_num_threads(1)
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from lightning_fed import FederatedDataModule, Federation
from lightning_fed.tasks import ClassificationTask
from lightning_fed.tasks.networks import build_network

def note(what, **values):
    with open(os.environ["LATENCY_LOG"], "a") as log:
        log.write(json.dumps({{"what": what, "time": time.time(), **values}}) + "\\n")

def data():
    generator = torch.Generator().manual_seed(0)
    return FederatedDataModule({{
        place: TensorDataset(
            torch.randn({SAMPLES}, 1, 28, 28, generator=generator),
            torch.randint(10, ({SAMPLES},), generator=generator),
        )
        for place in range({CLIENTS})
    }}, batch_size={BATCH})

def model():
    return ClassificationTask(build_network("mcmahan_cnn", num_classes=10), num_classes=10, lr=0.05)

def federation():
    return Federation("fedavg", local_epochs=1, seed=0)

OPTIONS = {{"accelerator": "cpu", "logger": False}}
"""

SERVER = """
from flowerlatency.common import *
from flwr.serverapp import ServerApp
from lightning_fed.backends.flower import server, transport

class Watched(transport.FlowerTransport):
    def ask(self, kind, packets, round):
        note("ask", round=round)
        def watched():
            yield from packets
            note("pushing", round=round)
        for client, reply in super().ask(kind, watched(), round):
            note("answer", round=round, client=client, bytes=len(getattr(reply, "data", b"")))
            yield client, reply
        note("asked", round=round)

server.FlowerTransport = Watched
app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    server.server_app(
        federation(), model, None, {**OPTIONS, "max_epochs": config["rounds"]},
        clients=2, folder=config["folder"], time_limit=300,
    )(grid, context)
"""

CLIENTS_APP = """
from flowerlatency.common import *
from lightning_fed.backends.flower import client as engine

class Watched(engine.ClientRunner):
    def answer(self, kind, packet, node):
        note("arrives", kind=kind, node=node["partition-id"])
        reply = super().answer(kind, packet, node)
        note("leaves", kind=kind, node=node["partition-id"])
        return reply

    def _fit(self, elsewhere, run, round, *more):
        begin = time.time()
        steps = super()._fit(elsewhere, run, round, *more)
        note("fit", round=round, seconds=time.time() - begin, client=elsewhere.server.update.client)
        return steps

engine.ClientRunner = Watched
app = engine.client_app(federation(), model, data(), OPTIONS)
"""


PROCESS = """
import json as _json, os as _os, time as _time

def _note(what, when):
    with open(_os.environ["LATENCY_LOG"], "a") as log:
        log.write(_json.dumps({"what": what, "time": when}) + "\\n")

with open("/proc/self/stat") as _stat, open("/proc/uptime") as _up:
    _ticks = int(_stat.read().rsplit(")", 1)[1].split()[19])
    _age = float(_up.read().split()[0]) - _ticks / _os.sysconf("SC_CLK_TCK")
_note("started", _time.time() - _age)
_note("loaded", _time.time())
"""


def write_app(folder: Path, name: str, common: str, server: str, clients: str, process: str = "") -> Path:
    """Writes an app: the package's sources, and what is added to the one that every message starts."""
    package = folder / "app" / name
    package.mkdir(parents=True)
    values = {"name": name, "package": name}
    text = (TEMPLATE / "pyproject.toml.txt").read_text().format(**values)
    (package.parent / "pyproject.toml").write_text(f'{text}rounds = 3\nfolder = "."\n')
    light = (TEMPLATE / "client.py.txt").read_text().format(**values)
    (package / "client.py").write_text(light + process)
    for file, source in (("__init__", ""), ("common", common), ("server", server), ("clients", clients)):
        (package / f"{file}.py").write_text(source)
    return package.parent


def run(rounds: int, has_workers: bool, limit: float) -> list[dict[str, Any]]:
    """One run: what the processes have noted."""
    folder = Path(tempfile.mkdtemp(prefix="flower-"))
    try:
        app = write_app(folder, "flowerlatency", COMMON, SERVER, CLIENTS_APP, PROCESS)
        run_app(folder, app, rounds, has_workers, limit, {"LATENCY_LOG": str(folder / "latency.jsonl")})
        return [json.loads(line) for line in (folder / "latency.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(folder)


def run_app(folder: Path, app: Path, rounds: int, has_workers: bool, limit: float, environment: dict[str, str]) -> None:
    """Runs an app on a SuperLink and two SuperNodes, whose files are in the folder, and ends them all."""
    started: list[subprocess.Popen[bytes]] = []
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FLWR_HOME": str(folder / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    (folder / "flower").mkdir()
    (folder / "flower" / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')

    def start(*command: str, **more: str) -> subprocess.Popen[bytes]:
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**environment, **more},
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process

    try:
        superlink = "flower-superlink", "--insecure", "--disable-runtime-dependency-installation"
        start(*superlink, "--port", str(port), **SERVER_ENVIRONMENT)
        time.sleep(5)
        for node in range(CLIENTS):
            config = f"partition-id={node} num-partitions={CLIENTS}"
            if has_workers:
                at = folder / f"node{node}" / "worker"
                start(sys.executable, "-m", "lightning_fed", "flower", "worker", str(app), "--socket", str(at))
                while not at.exists():
                    time.sleep(0.2)
                config += f' worker="{at}"'
            start(
                "flower-supernode", "--insecure",
                "--superlink", f"127.0.0.1:{port}", "--port", str(port + 1 + node),
                "--node-config", config,
            )  # fmt: skip
        options = f'rounds={rounds} folder="{folder}/run"'
        start("flwr", "run", str(app), "here", "--stream", "--run-config", options).wait(limit)
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{error}\n{(folder / 'log').read_text()[-3000:]}") from error
    finally:
        for process in started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()
        # The server's half is in a session of its own.
        pattern = f"flwr-serverapp --runtime-api-address 127.0.0.1:{port}"
        found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
        for number in found.stdout.split():
            os.kill(int(number), signal.SIGKILL)


def rounds_of(notes: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Seconds of every round but the first: in all, training, and what comes before and after it.

    All of the client that is later at each step; with a process per message the worker is that process.
    """
    found = []
    asked = {note["round"]: note["time"] for note in notes if note["what"] == "ask"}
    for round, begin in sorted(asked.items())[1:]:
        end = max(note["time"] for note in notes if note["what"] == "answer" and note["round"] == round)
        fits = [note for note in notes if note["what"] == "fit" and note["round"] == round]
        inside = [note for note in notes if begin <= note["time"] <= end]

        def last(what: str, inside: list[dict[str, Any]] = inside) -> float:
            return max(note["time"] for note in inside if note["what"] == what)

        sent, arrived, left = last("pushing"), last("arrives"), last("leaves")
        started, loaded = last("started"), last("loaded")
        found.append(
            {
                "round": end - begin,
                "training": max(fits, key=lambda note: note["time"])["seconds"],
                "sending": sent - begin,
                "polling": started - sent,
                "process": loaded - started,
                "carrying": arrived - loaded,
                "answering": end - left,
            }
        )
    return found


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--rounds", type=int, default=8, help="rounds; the first is not counted")
    arguments: argparse.Namespace = made.parse_args()
    prepare(arguments)
    rounds = 3 if arguments.quick else arguments.rounds
    rows = []
    settings = {"with workers": True, "a process per message": False}
    for name, has_workers in list(settings.items())[: 1 if arguments.quick else None]:
        found = rounds_of(run(rounds if has_workers else 3, has_workers, limit=1200))
        values = {key: statistics.median(each[key] for each in found) for key in found[0]}
        over = statistics.median(each["round"] - each["training"] for each in found)
        rows.append([name, len(found), *(f"{values[key]:.1f}" for key in values), f"{over:.1f}"])
    header = ["", "rounds", "round", *WORDS, "added in all"]
    text = (
        f"`python benchmarks/flower_latency.py --rounds {arguments.rounds}`. McMahan's CNN (1.7 million parameters,"
        f" 6.7 MB each way), {CLIENTS} SuperNodes with a client of {SAMPLES} examples each; seconds, medians over"
        f" rounds. {machine(1)}. Load average {os.getloadavg()[1]:.1f}. A message is sent to the SuperLink,"
        " picked up by its SuperNode, which looks at once after a message and else every 3 s, and brought by a process"
        f" to the worker; the answer goes back to the server. Times are those of the later of the two"
        f" clients.\n\n{table(header, rows)}"
    )
    write_section(arguments.out, "flower", text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
