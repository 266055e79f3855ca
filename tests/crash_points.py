"""Fits that are killed at every point at which something lasting happens, and resumed.

A point is a call of one of the functions of `SEAMS`: its beginning, the middle of what it writes, or its end. A fit
counts its points; then it is started once for each, kills itself there with SIGKILL, and is resumed in another process
from what lies on the disk. What it ends with is compared, bit for bit, with what the fit ended with that nobody killed.

`python -m tests.crash_points FILE` does the jobs of a JSON file, each fit in a forked child, so that the libraries are
imported once. `python -m tests.crash_points --table docs/guides/faults.md` kills every method at every point, and
writes the table.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

import lightning as L
import torch
import torch._export.non_strict_utils
import torch._inductor.output_code  # with it what FedMA would import in every child
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy

from lightning_fed.algorithms import METHODS
from lightning_fed.client import client_store
from lightning_fed.client.client_store import FolderStore, MemoryStore
from lightning_fed.rounds.round import Round
from lightning_fed.server.server import Server
from tests.resume_script import last_checkpoint, prepare, rows

ROUNDS = 3
OPTIONS = {"clients_per_round": 3, "local_steps": 2, "store": "clients"}

RUNS = {
    **{name: {"federation": {"method": name, **OPTIONS}} for name in METHODS},
    "ditto": {"federation": {"method": "ditto", "clients_per_round": 3, "store": "clients"}},
    "fedaws": {"model": {"batch_norm": False, "num_classes": 9}, "federation": {"method": "fedaws", **OPTIONS}},
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
    "fixbn": {"federation": {**OPTIONS, "batch_norm": "fixed", "fixed_after": 2}},
    "clients in memory": {"federation": {**OPTIONS, "store": None, "personal": ["head.*"], "optimizer_state": "keep"}},
    "two clients at once": {"federation": {**OPTIONS, "vectorize": 2}},
}
"""Options of the fits, as in `resume_script.RUNS`: every method, and other ways to keep and to train clients."""

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
    "message in": ([(Round, "receive")], BEFORE),
    "visit start": ([(Round, "start_group")], BEFORE),
    "visit end": ([(Round, "end_group")], BEFORE),
    "aggregate": ([(Round, "aggregate")], AROUND),
    "recalibrate": ([(Round, "measure_batch_norm")], AROUND),
}
"""Functions that are watched, by what they do, and the points of each."""

LATE_ROWS = ("train_loss",)
"""What Lightning writes of an epoch after the epoch's checkpoint: a kill in between loses it, in any fit."""


class Points:
    """Counts the points that a fit reaches, and kills the process at one.

    Args:
        kill_at: Index of the point; `None` for none.

    """

    def __init__(self, kill_at=None):
        self.kill_at = kill_at
        self.reached = []

    def reach(self, name):
        self.reached.append(name)
        if self.kill_at == len(self.reached) - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self):
        """Replaces the functions of `SEAMS`, in a process that has nothing else to do."""
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


def fit(run, folder, version, kill_at=None):
    """Trains in this process, from the last checkpoint if there is one; what came of it is in `<folder>/<version>.pt`.

    Args:
        run: Name in `RUNS`.
        folder: Where everything is that the fit writes.
        version: Name of this part of the fit.
        kill_at: Index of the point at which the process ends.

    """
    tempfile.tempdir = str(folder / "temporary")
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_fed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    points = Points(kill_at)
    points.watch()
    trainer, module, data = prepare(RUNS[run], folder, version, max_epochs=ROUNDS)
    has_checkpoint = bool(list(folder.glob("checkpoints/last*.ckpt")))
    trainer.fit(module, datamodule=data, ckpt_path=last_checkpoint(folder) if has_checkpoint else None)
    federation = trainer.callbacks[0]
    counters = {name: value for name, value in federation.state_dict().items() if name != "store"}
    ending = {
        "weights": module.state_dict(),
        "clients' own": {client: federation.store.get(client) or {} for client in federation.population.clients},
        "counters": {**counters, "global_step": trainer.global_step, "epoch": trainer.current_epoch},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "points": points.reached,
    }
    torch.save(ending, folder / f"{version}.pt")


def in_child(run, folder, version, kill_at=None):
    """The same in a forked child; returns how it ended, as `os.waitstatus_to_exitcode` has it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fit(run, folder, version, kill_at)
            code = 0
        except BaseException:
            (folder / f"{version}.log").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read(folder, version):
    """What a fit that came to its end has left."""
    return torch.load(folder / f"{version}.pt", weights_only=False)


def differences(ending, expected, logged, expected_rows):
    """Where two fits differ, as names.

    Args:
        ending: What the one has left.
        expected: What the other has left.
        logged: Rows of the one's log, of all its parts.
        expected_rows: Rows of the other's.

    """
    ours, theirs = ({**flat(left), **flat(log, "rows")} for left, log in ((ending, logged), (expected, expected_rows)))
    is_late = [name for name in theirs if name not in ours and name.rpartition("/")[2] in LATE_ROWS]
    lost = is_late if len(is_late) <= 1 else []
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in lost and not is_same(ours.get(name), theirs.get(name))
    ]


def flat(value, path=""):
    """What is in nested containers, by path; which points a fit has reached, and times, are left out."""
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
    return type(one) is type(other) and (one == other or one != one and other != other)


def whole(run, folder):
    """Trains without a kill; returns what the fit has left, and its rows."""
    folder.mkdir(parents=True)
    code = in_child(run, folder, "whole")
    assert code == 0, (folder / "whole.log").read_text()
    return read(folder, "whole"), rows(folder, "whole")


def kill(run, folder, point):
    """Kills a fit at a point and resumes it; returns what it has left, and the rows of both parts."""
    folder.mkdir(parents=True)
    code = in_child(run, folder, "killed", point)
    assert code == -signal.SIGKILL, f"ended with {code} before point {point}"
    code = in_child(run, folder, "resumed")
    assert code == 0, (folder / "resumed.log").read_text()
    logged = rows(folder, "killed")
    for round, values in rows(folder, "resumed").items():
        logged[round] = {**logged.get(round, {}), **values}
    return read(folder, "resumed"), logged


def kill_everywhere(run, folder, only=None):
    """Kills a fit at every point; returns the names of the points, and by point what was different afterwards.

    Args:
        run: Name in `RUNS`.
        folder: An empty folder.
        only: Takes the names of the points, and returns the indices of those at which the fit is killed.

    """
    expected, expected_rows = whole(run, folder / "whole")
    points = expected["points"]
    found = {}
    for point in range(len(points)) if only is None else only(points):
        try:
            ending, logged = kill(run, folder / f"{point}", point)
            found[point] = differences(ending, expected, logged, expected_rows)
        except AssertionError as error:
            found[point] = [str(error)]
        shutil.rmtree(folder / f"{point}")
    return points, found


def one_of_each(points):
    """Of every kind of point the one in the middle of the fit."""
    by_name = {}
    for index, name in enumerate(points):
        by_name.setdefault(name, []).append(index)
    return sorted(indices[len(indices) // 2] for indices in by_name.values())


def make_table(runs, path):
    """Kills every run at every point, and writes the table into a guide, between its marks, line by line."""
    lines = ["| fit | points | kills | differences |", "|---|---:|---:|---:|"]
    kinds = Counter()
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            points, found = kill_everywhere(run, Path(folder))
        kinds.update(name.partition(",")[0] for name in points)
        wrong = {points[point]: where for point, where in found.items() if where}
        lines.append(f"| {run} | {len(points)} | {len(found)} | {len(wrong)} |")
        sys.stdout.write(f"{lines[-1]} {json.dumps(wrong)[:2000] if wrong else ''}\n")
        sys.stdout.flush()
        if path is not None:
            write_between_marks(path, "crash points", lines)
    sys.stdout.write(f"{dict(kinds)}\n")


def write_between_marks(path, mark, lines):
    """Replaces what a document has between `<!-- mark -->` and `<!-- /mark -->`."""
    before, rest = path.read_text().split(f"<!-- {mark} -->\n")
    _, after = rest.split(f"<!-- /{mark} -->")
    path.write_text(f"{before}<!-- {mark} -->\n\n" + "\n".join(lines) + f"\n\n<!-- /{mark} -->{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="?", type=Path, help="JSON: list of {run, folder, all}")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), help="names of fits for the table")
    parser.add_argument("--table", type=Path, help="the guide that gets the table")
    arguments = parser.parse_args()
    if arguments.jobs is None:
        make_table(arguments.runs, arguments.table)
        return
    for job in json.loads(arguments.jobs.read_text()):
        points, found = kill_everywhere(job["run"], Path(job["folder"]), None if job["all"] else one_of_each)
        (Path(job["folder"]) / "found.json").write_text(json.dumps({"points": points, "found": found}))


if __name__ == "__main__":
    main()
