"""Kills fits at every point with a lasting effect, and resumes them.

A point is a call to a function in `SEAMS`: before the call, in the middle of a write, or after the call. One fit counts
its points. For each point another fit kills itself with SIGKILL, and a new process resumes from the files on disk. The
result must equal an uninterrupted fit bit for bit.

`python -m tests.crash_points FILE` runs the jobs in a JSON file, each fit in a forked child, so that libraries are
imported once. `python -m tests.crash_points --table benchmarks/results/crash_points.md` kills every method at every
point, and writes the table.
"""

import argparse
import contextlib
import errno
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from safetensors.torch import load_file

from lightning_fed import FixedStatistics, Vectorized
from lightning_fed.algorithms import METHODS
from lightning_fed.client import client_store
from lightning_fed.client.client_store import FolderStore, MemoryStore
from lightning_fed.rounds.round import Round
from lightning_fed.rounds.visit_driver import VisitDriver
from lightning_fed.server.server import Server
from tests.resume_script import last_checkpoint, prepare, rows

ROUNDS = 3
OPTIONS = {"clients_per_round": 3, "local_steps": 2, "store": "clients"}

RUNS = {
    **{name: {"federation": {"method": name, **OPTIONS}} for name in METHODS},
    "ditto": {"federation": {"method": "ditto", "clients_per_round": 3, "store": "clients"}},
    "fedaws": {"model": {"batch_norm": False, "num_classes": 9}, "federation": {"method": "fedaws", **OPTIONS}},
    "fedbuff": {"federation": {"method": "fedbuff:buffer=3", **OPTIONS, "clients_per_round": 4}},
    "feddyn": {"federation": {"method": "feddyn:alpha=0.1", **OPTIONS}},
    "fedfusion": {"fusion": {"operator": "multi"}, "federation": {**OPTIONS, "personal": ["head.*"]}},
    "fedma": {"model": {"batch_norm": None}, "federation": {"method": "fedma", **OPTIONS}},
    "fedmargin": {"federation": {"method": "fedmargin", **OPTIONS}, "prototypes": {"lpm_before": "last_local"}},
    "fedper": {"federation": {**OPTIONS, "personal": ["head.*"], "optimizer_state": "keep"}},
    "fedrep": {"federation": {"method": "fedrep", "clients_per_round": 3, "store": "clients"}},
    "fedss": {
        "model": {"batch_norm": False, "num_classes": 9},
        "sampled": {"num_negatives": 3, "resample": "batch"},
        "federation": {**OPTIONS, "method": "fedavgm"},
    },
    "fltrust": {"federation": {"method": "fltrust:trusted=client-1", **OPTIONS}},
    "fixbn": {"federation": {**OPTIONS, "batch_norm": FixedStatistics(2)}},
    "clients in memory": {"federation": {**OPTIONS, "store": None, "personal": ["head.*"], "optimizer_state": "keep"}},
    "two clients at once": {"federation": {**OPTIONS, "visits": Vectorized(2)}},
}
"""Options of the fits, as in `resume_script.RUNS`: every method, and other client stores and forms of visits."""

ON_FLOWER = {
    f"{case} on Flower": case
    for case in ("fedavg", "fedper", "scaffold", "fedmargin", "recalibrate", "kept optimizers")
}
"""Fits with Flower's apps and a fake grid in one process: server and clients are killed and restarted together."""

PROCESSES = {
    "Flower's SuperLink": "superlink",
    "a SuperNode": "node1",
    "the server's process on Flower": "server",
    "a worker": "worker1",
}
"""Processes to kill, Flower's and ours: `process_kills.py` next to Flower's tests defines the points."""

AROUND, BEFORE = ("before", "after"), ("before",)

SEAMS = {
    "store write": ([(FolderStore, "put"), (MemoryStore, "put")], AROUND),
    "file written": ([(client_store, "save_file")], ("half", "after")),
    "file moved": ([(Path, "replace")], AROUND),
    "file deleted": ([(Path, "unlink")], AROUND),
    "checkpoint write": ([(L.Trainer, "save_checkpoint")], AROUND),
    "checkpoint moved": ([(shutil, "move")], AROUND),
    "checkpoint deleted": ([(Strategy, "remove_checkpoint")], AROUND),
    "log write": ([(CSVLogger, "save")], ("after",)),
    "message out": ([(Server, "sent")], BEFORE),
    "message in": ([(Server, "count")], BEFORE),
    "visit start": ([(VisitDriver, "start")], BEFORE),
    "visit end": ([(VisitDriver, "end")], BEFORE),
    "aggregate": ([(Round, "aggregate")], AROUND),
    "recalibrate": ([(Round, "measure_batch_norm")], AROUND),
}
"""Watched functions by effect, and the points of each function."""

if find_spec("flwr"):
    from lightning_fed.backends.flower.transport import FlowerTransport
    from lightning_fed.backends.wire import held_file
    from lightning_fed.backends.wire.server_for_client import RemoteServer

    SEAMS["file written"][0].append((held_file, "save_file"))
    SEAMS["message in"][0].append((RemoteServer, "count"))
    SEAMS["message sent"] = [(FlowerTransport, "_push")], AROUND
    SEAMS["message awaited"] = [(FlowerTransport, "pull")], AROUND

LATE_ROW = "train_loss"
"""Row written by Lightning after the epoch's checkpoint: a kill in between loses the row, in any fit."""


FAILING = {
    errno.ENOSPC: ("file written", "checkpoint moved", "log write"),
    errno.EROFS: ("file written", "file moved", "file deleted", "checkpoint moved", "checkpoint deleted", "log write"),
}
"""Effects that fail on a full disk and on a read-only disk."""


class Points:
    """Counts the points of a fit, and kills the process at a point or lets the disk fail from a point on.

    Args:
        kill_at: Index of the point; `None` never kills.
        error: Errno for failing writes, instead of a kill.
    """

    def __init__(self, kill_at=None, error=None):
        self.kill_at = kill_at
        self.error = error
        self.reached = []

    def reach(self, name):
        self.reached.append(name)
        if self.kill_at is None or self.kill_at >= len(self.reached):
            return
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if name.partition(",")[0] in FAILING[self.error]:
            raise OSError(self.error, os.strerror(self.error))

    def watch(self):
        """Replaces the functions in `SEAMS`, in a process used for nothing else."""
        for name, (places, moments) in SEAMS.items():
            for owner, function in places:
                setattr(owner, function, self._watched(name, getattr(owner, function), moments))

    def _watched(self, name, function, moments):
        def watched(*args, **kwargs):
            if "before" in moments:
                self.reach(f"{name}, before")
            if "half" in moments and self.kill_at == len(self.reached):
                function(*args, **kwargs)
                os.truncate(args[1], os.path.getsize(args[1]) // 2)
            if "half" in moments:
                self.reach(f"{name}, half")
            result = function(*args, **kwargs)
            if "after" in moments:
                self.reach(f"{name}, after")
            return result

        return watched


def fit(run, folder, version, kill_at=None, error=None):
    """Trains in this process, from the last checkpoint if present; the result is in `<folder>/<version>.pt`.

    Args:
        run: Name in `RUNS`.
        folder: Folder for all files of the fit.
        version: Name for this part of the fit.
        kill_at: Index of the point for the kill, or for the start of disk failures.
        error: Errno for failing writes.
    """
    tempfile.tempdir = str(folder / "temporary")
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_fed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    points = Points(kill_at, error)
    points.watch()
    if run in ON_FLOWER:
        trainer, own = _fit_on_flower(ON_FLOWER[run], folder)
    else:
        trainer, module, data = prepare(RUNS[run], folder, version, max_epochs=ROUNDS)
        has_checkpoint = bool(list(folder.glob("checkpoints/last*.ckpt")))
        trainer.fit(module, datamodule=data, ckpt_path=last_checkpoint(folder) if has_checkpoint else None)
        store = trainer.callbacks[0].store
        own = {client: store.get(client) or {} for client in trainer.callbacks[0].population.clients}
    federation = trainer.callbacks[0]
    counters = {name: value for name, value in federation.state_dict().items() if name != "store"}
    ending = {
        "weights": trainer.lightning_module.state_dict(),
        "clients' own": own,
        "counters": {**counters, "global_step": trainer.global_step, "epoch": trainer.current_epoch},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "points": points.reached,
    }
    torch.save(ending, folder / f"{version}.pt")


def _fit_on_flower(name, folder):
    """The server's Trainer, and the stored client states by name."""
    from tests.backends.flower.halves import CASES, on_flower
    from tests.backends.flower.halves import SIZES as NUM_SAMPLES

    case = CASES[name]
    _, trainer, _, _ = on_flower(
        folder, case.module, case.data(NUM_SAMPLES), case.federation, ROUNDS, case.callbacks, options=case.options,
        limit=60,
    )  # fmt: skip
    newest = {}
    for node in ("11", "12"):
        # the last run, in case the server started anew
        runs = sorted((folder / node).glob("*"), key=lambda run: run.stat().st_mtime_ns)
        for path in sorted(runs[-1].glob("*/*/*.safetensors")) if runs else ():
            newest[path.parent.name] = load_file(path)
    return trainer, newest


def in_child(run, folder, version, kill_at=None, error=None):
    """Runs `fit` in a forked child; returns the code from `os.waitstatus_to_exitcode`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fit(run, folder, version, kill_at, error)
            code = 0
        except BaseException:
            (folder / f"{version}.log").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read(folder, version):
    """Results from a complete fit."""
    return torch.load(folder / f"{version}.pt", weights_only=False)


def differences(ending, expected, logged, expected_rows):
    """Names of differences between two fits: from this package, and from Lightning.

    Lightning writes an epoch's training row after the checkpoint. If a resumed fit has nothing left to train,
    `callback_metrics` lacks the module's values.

    Args:
        ending: Results from the resumed fit.
        expected: Results from the uninterrupted fit.
        logged: Rows logged by all parts of the resumed fit.
        expected_rows: Rows logged by the uninterrupted fit.
    """
    ours, theirs = ({**flat(left), **flat(log, "rows")} for left, log in ((ending, logged), (expected, expected_rows)))
    names = [name for name in sorted(ours.keys() | theirs.keys()) if not is_same(ours.get(name), theirs.get(name))]
    late = [name for name in names if name not in ours and name.startswith("rows/") and name.endswith(f"/{LATE_ROW}")]
    of_lightning = late if len(late) == 1 else []
    if "visit start, before" not in ending["points"]:
        of_lightning += [
            name for name in names if name not in ours and name.startswith("metrics/") and name.count("/") == 1
        ]
    return [name for name in names if name not in of_lightning], of_lightning


def flat(value, path=""):
    """Leaves in nested containers by path, without reached points and times."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            name: inside
            for key, each in pairs
            if key != "points" and not str(key).endswith("seconds")
            for name, inside in flat(each, f"{path}/{key}" if path else str(key)).items()
        } or {path: type(value)()}
    return {path: value}


def is_same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and (one == other or (one != one and other != other))


def whole(run, folder):
    """Trains without a kill; returns results and logged rows."""
    folder.mkdir(parents=True)
    code = in_child(run, folder, "whole")
    assert code == 0, (folder / "whole.log").read_text()
    return read(folder, "whole"), rows(folder, "whole")


def kill(run, folder, point, error=None):
    """Kills a fit at a point and resumes; returns results, and rows logged by both parts.

    With an `error` the disk fails from the point until the resume, and the fit must raise this error.
    """
    folder.mkdir(parents=True)
    code = in_child(run, folder, "killed", point, error)
    if error is None:
        assert code == -signal.SIGKILL, f"ended with {code} before point {point}"
    else:
        last_lines = (folder / "killed.log").read_text().splitlines()[-4:] if code == 1 else [f"ended with {code}"]
        assert any(os.strerror(error) in line for line in last_lines), "\n".join(last_lines)
    code = in_child(run, folder, "resumed")
    assert code == 0, (folder / "resumed.log").read_text()
    logged = rows(folder, "killed")
    for round, values in rows(folder, "resumed").items():
        logged[round] = {**logged.get(round, {}), **values}
    return read(folder, "resumed"), logged


def kill_everywhere(run, folder, only=None, error=None):
    """Kills a fit at every point; returns the points' names, and the `differences` by point.

    Args:
        run: Name in `RUNS`.
        folder: An empty folder.
        only: Selects indices from the points' names.
        error: Errno for failing writes, instead of a kill.
    """
    expected, expected_rows = whole(run, folder / "whole")
    points = expected["points"]
    found = {}
    for point in range(len(points)) if only is None else only(points):
        try:
            ending, logged = kill(run, folder / f"{point}", point, error)
            found[point] = differences(ending, expected, logged, expected_rows)
        except AssertionError as fault:
            found[point] = [str(fault)], []
        shutil.rmtree(folder / f"{point}")
    return points, found


def kill_a_process(run, folder, only=None):
    """The same for one of `PROCESSES`."""
    from tests.backends.flower import process_kills

    return process_kills.kill_everywhere(folder, PROCESSES[run], only)


def one_of_each(points):
    """One point for each function in `SEAMS`, in the middle of the fit."""
    by_function = {}
    for index, name in enumerate(points):
        by_function.setdefault(name.partition(",")[0], []).append(index)
    return sorted(indices[len(indices) // 2] for indices in by_function.values())


def one_of_each_write(error):
    """Selects one point per function affected by the disk error."""
    return lambda points: [index for index in one_of_each(points) if points[index].partition(",")[0] in FAILING[error]]


def make_table(runs, path, only=None):
    """Kills every run at the points selected by `only`, and prints the rows or writes them into a page."""
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            points, found = (kill_a_process if run in PROCESSES else kill_everywhere)(run, Path(folder), only)
        wrong, late = ({point: names[kind] for point, names in found.items() if names[kind]} for kind in (0, 1))
        row = f"| {run} | {len(points)} | {len(found)} | {len(wrong)} | {len(late)} |"
        sys.stdout.write(f"{row}\n")
        for part in (wrong, late):
            sys.stdout.write("".join(f"    {point} {points[point]}: {names}\n" for point, names in part.items()))
        sys.stdout.flush()
        if path is not None:
            put_row(path, row)


def put_row(path, row):
    """Inserts a row between `<!-- crash points -->` and `<!-- /crash points -->`, or replaces the row with the same
    name.

    Fits with equal numbers share a row.
    """
    before, rest = path.read_text().split("<!-- crash points -->\n")
    table, after = rest.split("<!-- /crash points -->")
    head = ["| fits | points of each | kills | differences | of Lightning's log |", "|---|---:|---:|---:|---:|"]
    names = {}
    for line in [*(line for line in table.splitlines() if line.startswith("|") and line not in head), row]:
        _, of, numbers = line.split("|", 2)
        new = [name.strip() for name in of.split(",")]
        names = {key: [name for name in known if name not in new] for key, known in names.items()}
        names.setdefault(numbers, []).extend(new)
    lines = [*head, *(f"| {', '.join(known)} |{numbers}" for numbers, known in names.items() if known)]
    path.write_text(f"{before}<!-- crash points -->\n\n" + "\n".join(lines) + f"\n\n<!-- /crash points -->{after}")


def import_once(runs):
    """Imports the modules needed by FedMA's tracing before the forks."""
    of_tracing = ("torch.export._trace", "torch._export.non_strict_utils", "torch._functorch.partitioners")
    for name in of_tracing if "fedma" in runs else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # prevents page copies of imported objects in the children


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="?", type=Path, help="JSON: list of {run, folder, all, error}")
    parser.add_argument(
        "--runs", nargs="*", default=[*RUNS, *ON_FLOWER, *PROCESSES], help="names of fits for the table"
    )
    parser.add_argument("--one-of-each", action="store_true", help="one point of each kind instead of all")
    parser.add_argument("--table", type=Path, help="the page that gets the table")
    arguments = parser.parse_args()
    jobs = None if arguments.jobs is None else json.loads(arguments.jobs.read_text())
    import_once(arguments.runs if jobs is None else [job["run"] for job in jobs])
    if jobs is None:
        make_table(arguments.runs, arguments.table, one_of_each if arguments.one_of_each else None)
        return
    for job in jobs:
        error = job.get("error")
        only = None if job.get("all") else one_of_each if error is None else one_of_each_write(error)
        points, found = kill_everywhere(job["run"], Path(job["folder"]), only, error)
        (Path(job["folder"]) / "found.json").write_text(json.dumps({"points": points, "found": found}))


if __name__ == "__main__":
    main()
