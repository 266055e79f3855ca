"""Kills one of Flower's processes at a given point of a fit, and restarts the process as described in the guide.

All processes watch the functions in `crash_points.SEAMS`. At the point named by the environment, the process kills
itself or a Flower process with SIGKILL. The result must equal, bit for bit, an uninterrupted fit in one process in
which the same client's messages are lost.
"""

import csv
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file

from lightning_fed.backends.flower import client_app
from lightning_fed.backends.flower.transport import from_records, to_records
from lightning_fed.backends.flower.worker import serve
from lightning_fed.backends.wire.packets import Fault, write_fault
from tests.backends.flower.halves import CASES, OPTIONS, SIZES, clients_of, on_flower
from tests.backends.flower.processes import Deployment
from tests.crash_points import Points, differences

CASE, ROUNDS, ROUND, LOST = CASES["kept heads"], 3, 1, "bob"
APP, TEMPLATE = Path(__file__).parent / "app", "lightning_fed/backends/flower/template/client.py.txt"
STATED_SECONDS = 300
"""Time limit for the end of a server process without SuperLink, and of nodes unknown to a new SuperLink."""

POINTS = {
    "message out, before": ("server", 5),
    "visit start, before": ("worker1", 2),
    "store write, after": ("worker1", 2),
    "visit end, before": ("worker1", 2),
    "message in, before": ("server", 5),
    "aggregate, after": ("server", 2),
    "checkpoint moved, before": ("server", 2),
}
"""Points in round 1 about the client of node 1: the process that reaches the point, and the number of its call."""

IN_VISIT = ("message out, before", "visit start, before", "store write, after", "visit end, before")


def lost_rounds(process, point):
    """Rounds that the client of node 1 may miss. Rounds interrupted on the server are repeated.

    Until Flower detects the killed node, messages to this client are lost.
    """
    if process not in ("worker1", "node1"):
        return set()
    return {ROUND} if point in IN_VISIT else {ROUND + 1} if process == "node1" else set()


class KillPoint(Points):
    """Kills a process once, at the point named by the environment.

    Args:
        half: Name of the watching process.
        folder: Deployment folder with the process ids.
    """

    def __init__(self, half, folder):
        super().__init__()
        self.half, self.folder = half, folder
        self.kill = json.loads(os.environ["KILL"])

    def reach(self, name):
        self.reached.append(name)
        number = self.reached.count(name)
        if [self.half, name, number] != self.kill["at"] or (self.folder / "killed").exists():
            return
        (self.folder / "killed").touch()
        os.kill(int((self.folder / f"{self.kill['process']}.pid").read_text()), signal.SIGKILL)


class Hold(L.Callback):
    """Delays the server's next round until the client's process has restarted."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_start(self, trainer, module):
        if (self.folder / "killed").exists():
            (self.folder / "holding").touch()
            while not (self.folder / "restarted").exists():
                time.sleep(0.05)


def watched(folder):
    """Callbacks and Trainer arguments for a server process in a test with kills."""
    if "KILL" not in os.environ:
        return [], {}
    deployment = Path(folder).parent
    (deployment / "server.pid").write_text(f"{os.getpid()}")
    KillPoint("server", deployment).watch()
    is_held = json.loads(os.environ["KILL"])["process"] in ("worker1", "node1")
    return [Hold(deployment)] if is_held else [], {"logger": _logger(Path(folder))}


def _logger(folder):
    return CSVLogger(folder, "log", f"{time.time_ns()}")


def work(node, folder):
    logging.basicConfig(level=logging.INFO)
    KillPoint(f"worker{node}", folder).watch()
    app = client_app(
        CASE.federation(), CASE.module, clients_of(CASE.data(SIZES)), {**OPTIONS, **CASE.options},
        callbacks=CASE.callbacks(), store=folder / f"store{node}",
    )  # fmt: skip
    serve(app, folder / f"node{node}" / "worker")


# --- Fit --------------------------------------------------------------------------------------------------------------


class Fit:
    """A SuperLink, two nodes with workers, and a run.

    Args:
        folder: An empty folder.
        process: Name of the process to kill.
        point: Name of the point.
    """

    def __init__(self, folder, process, point):
        half, number = POINTS[point]
        self.folder = folder
        self.app = shutil.copytree(APP, folder / "app")
        template = Path(__file__).parents[3] / TEMPLATE
        (self.app / "fedapp" / "client.py").write_text(template.read_text().format(package="fedapp"))
        kill = json.dumps({"process": process, "at": [half, point, number]})
        self.deployment = Deployment(folder, environment={"KILL": kill, "OMP_NUM_THREADS": "1"})
        self.deployment.configure()

    def start(self, *names):
        said = {"worker": "Waiting for messages", "node": "SuperNode ID"}
        for name in names:
            kind, node = name[:-1], name[-1]
            if kind == "worker":
                self.deployment.start(name, sys.executable, "-m", __name__, node, str(self.folder))
            else:
                config = f'partition-id={node} num-partitions=2 worker="{self.folder}/node{node}/worker"'
                self.deployment.node(name, config)
        for name in names:
            process = self.deployment.processes[name]
            self.deployment.wait_for(name, said[name[:-1]], 600, since=f"process {process.pid}\n")

    def run(self):
        config = f'case="kept heads" folder="{self.folder / "run"}" rounds={ROUNDS} limit=300.0'
        self.deployment.run(self.app, "--run-config", config)

    def restart(self, process):
        deployment = self.deployment
        if process in deployment.processes:
            deployment.processes[process].wait(60)  # a zombie still counts as a running process for its children
        if process in ("worker1", "node1"):
            wait_until((self.folder / "holding").exists)
            deployment.kill(process)
            self.start(process)
            (self.folder / "restarted").touch()
            return
        server = int((self.folder / "server.pid").read_text())
        wait_until(lambda: not is_running(server), STATED_SECONDS)
        if process == "superlink":
            assert deployment.processes["run"].wait(STATED_SECONDS) != 0
        deployment.kill("run")
        if process == "superlink":
            deployment.kill("superlink")
            deployment.start_link()
            for node in ("node0", "node1"):  # unknown to the restarted SuperLink
                deployment.processes[node].wait(STATED_SECONDS)
                deployment.kill(node)
            self.start("node0", "node1")
        self.run()

    def finish(self):
        self.deployment.processes["run"].wait(600)
        assert f"max_epochs={ROUNDS}" in self.deployment.log("run"), self.deployment.log("run")[-5000:]


def kill(folder, process, point):
    """Kills a process at a point; returns the ending, the logged rows, and the client's lost rounds."""
    folder.mkdir(parents=True, exist_ok=True)
    fit = Fit(folder, process, point)
    with fit.deployment as deployment:
        fit.start("worker0", "worker1", "node0", "node1")
        fit.run()
        wait_until((folder / "killed").exists)
        fit.restart(process)
        fit.finish()
        lost = re.findall(rf"Round (\d+): client '{LOST}' is excluded", deployment.log("run"))
    stores = [folder / "store0", folder / "store1"]
    return ending(folder / "run", stores), rows(folder / "run"), frozenset(int(round) - 1 for round in lost)


@cache
def expected(lost):
    """The same results in one process without kills, with the client's updates in these rounds lost."""

    def lose(node, message, content):
        visit = json.loads(from_records(message.content).text)["header"].get("visit") or {}
        is_lost = visit.get("client") == LOST and visit["round"] in lost
        return [to_records(write_fault(Fault(LOST, "lost")))] if is_lost else [content]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_flower(
            folder, CASE.module, CASE.data(SIZES), CASE.federation, ROUNDS, CASE.callbacks, change=lose,
            server_options={"logger": _logger(folder / "server")},
        )  # fmt: skip
        return ending(folder / "server", [folder / "11", folder / "12"]), rows(folder / "server")


def kill_everywhere(folder, process, only=None):
    """Kills a process at every point; returns the names of the points, and `crash_points.differences` by point."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_fed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    points, found = list(POINTS), {}
    for index in range(len(points)) if only is None else only(points):
        try:
            found[index] = compare(folder / f"{index}", process, points[index])
        except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as fault:
            found[index] = [str(fault)], []
    return points, found


def compare(folder, process, point):
    """Differences between an interrupted fit and the fit in one process."""
    left, logged, lost = kill(folder, process, point)
    assert lost <= lost_rounds(process, point)
    whole, whole_rows = expected(lost)
    return differences(left, whole, logged, whole_rows)


# --- Results ----------------------------------------------------------------------------------------------------------


def ending(folder, stores):
    """Weights and counters in the last checkpoint, and the stored client states."""
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    (federation,) = (state for name, state in checkpoint["callbacks"].items() if name.startswith("Federation"))
    store = {name: value for name, value in federation["store"].items() if name != "run"}  # random
    kept = {}  # only rounds known to the server; a version for a lost update has no owner
    for client, round in zip(store["clients"], store["rounds"], strict=True):
        (path,) = (
            path
            for folder in stores
            for path in (folder / federation["store"]["run"]).glob(f"run-*/s-{client}/{round:08d}.safetensors")
        )
        kept[client] = load_file(path)
    return {
        "weights": checkpoint["state_dict"],
        "clients' own": kept,
        "counters": {
            **federation,
            "store": store,
            "global_step": checkpoint["global_step"],
            "loops": checkpoint["loops"],
        },
        "points": ["visit start, before"],
    }


def rows(folder):
    """Logged values by round and name, over all parts of the fit."""
    by_round = {}
    for path in sorted(folder.glob("log/*/metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                values = {name: value for name, value in row.items() if value and name not in ("step", "epoch")}
                by_round.setdefault(int(float(row["epoch"])), {}).update(values)
    return by_round


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
