"""Code shared by benchmark scripts: arguments, fit curves, stored results, Markdown sections."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from scipy.stats import t

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
"""Trainer arguments for training and validation only."""


def parser(description: str, data: bool = True, seeds: Sequence[int] = ()) -> argparse.ArgumentParser:
    """Parser with the common arguments; with ``seeds`` also the arguments for :func:`run_all`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if data:
        made.add_argument("--data", type=Path, required=True, help="folder that holds the data set")
    made.add_argument("--out", type=Path, default=None, help="Markdown file whose section is written (else: printed)")
    made.add_argument("--runs", type=Path, default=Path("runs/benchmarks"), help="folder of the results of single runs")
    made.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    made.add_argument("--machine", default="", help="words for the machine of the runs; else this one")
    made.add_argument("--quick", action="store_true", help="a smoke run of under a minute; its numbers mean nothing")
    if seeds:
        made.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="seeds")
        made.add_argument("--report", action="store_true", help="only make the table of what is there")
    return made


_machine = ""  # value of `--machine`


def prepare(arguments: argparse.Namespace) -> None:
    """Sets threads and silences Lightning's messages."""
    torch.set_num_threads(arguments.threads)
    global _machine
    _machine = arguments.machine
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec|torch.jit|logging interval).*")
    warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
    import logging

    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda", "lightning_fed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    data = getattr(arguments, "data", None)
    if data is not None and not data.is_dir():
        raise SystemExit(f"Expected --data to be the folder that holds the data set, but {data} is not a folder.")
    if arguments.quick:
        arguments.runs = arguments.runs / "quick"


class Curve(L.Callback):
    """Records logged values and training seconds per round or epoch, in ``rounds``."""

    def __init__(self, verbose: str = "") -> None:
        self.rounds: list[dict[str, float]] = []
        self.verbose = verbose
        self._begin = (0.0, 0.0)
        self._seconds = (0.0, 0.0)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin = (time.perf_counter(), time.process_time())
        self._seconds = (0.0, 0.0)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._stop()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._seconds == (0.0, 0.0):
            self._stop()
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        values |= {"wall_s": self._seconds[0], "cpu_s": self._seconds[1], "steps": trainer.global_step}
        self.rounds.append(values)
        if self.verbose:
            shown = {name: round(value, 4) for name, value in values.items() if name.startswith(("val_", "train_"))}
            print(f"{self.verbose} {len(self.rounds)} {shown} {values['cpu_s']:.1f} s", flush=True)

    def _stop(self) -> None:
        self._seconds = (time.perf_counter() - self._begin[0], time.process_time() - self._begin[1])


def save_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # an interrupted write leaves no partial result
    part.write_text(json.dumps(value))
    os.replace(part, path)


def load_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def run_all(
    study: str,
    names: Iterable[str],
    run: Callable[[str, int, argparse.Namespace], dict[str, Any]],
    arguments: argparse.Namespace,
) -> dict[str, list[dict[str, Any]]]:
    """Runs every name with every seed, except for stored results.

    Args:
        study: Folder for the results.
        names: Compared names.
        run: Function from name, seed and arguments to a result.
        arguments: Arguments from :func:`parser` with ``seeds``.

    Returns:
        Results by name, one for each seed; with ``--report`` only stored results.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    names = list(names)
    for seed in arguments.seeds[:1] if arguments.quick else arguments.seeds:
        for name in names:
            path = arguments.runs / study / f"{name.replace(',', '').replace(' ', '_')}_{seed}.json"
            if not path.exists() and not arguments.report:
                save_json(path, run(name, seed, arguments))
            if path.exists():
                results.setdefault(name, []).append(load_json(path))
    return results


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation as text; empty without values."""
    if not values:
        return ""
    std = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{std}"


SEEDS_TO_TELL = 5
PAIRED = (
    "Differences are paired by seed: their mean, and in brackets its 95 % interval by the paired t test; bold where"
    f" there are {SEEDS_TO_TELL} seeds or more and the interval leaves out 0."
)
"""Explanation below tables with differences; `docs/results/index.md` has the rule."""


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % interval for the mean of paired differences, one per seed; at least two."""
    mean, count = statistics.fmean(differences), len(differences)
    half = t.ppf(0.975, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return mean - half, mean + half


def paired(differences: Sequence[float], digits: int = 3) -> str:
    """Formats differences by seed according to :data:`PAIRED`, the common rule for all tables."""
    if not differences:
        return ""
    mean = f"{statistics.fmean(differences):.{digits}f}"
    if len(differences) == 1:
        return mean
    low, high = interval(differences)
    words = f"{mean} ({low:.{digits}f} to {high:.{digits}f})"
    return f"**{words}**" if len(differences) >= SEEDS_TO_TELL and low * high > 0 else words


def without_columns(text: str, *names: str) -> str:
    """Removes the named columns from Markdown tables."""
    lines, dropped = [], list[int]()
    for line in text.split("\n"):
        cells = line.strip("|").split("|")
        if not line.startswith("|"):
            dropped = []
        elif not dropped and any(cell.strip() in names for cell in cells):
            dropped = [place for place, cell in enumerate(cells) if cell.strip() in names]
        kept = [cell for place, cell in enumerate(cells) if place not in dropped]
        lines.append("|" + "|".join(kept) + "|" if dropped else line)
    return "\n".join(lines)


def picture(arguments: argparse.Namespace, name: str, words: str) -> str:
    if arguments.figures is None or arguments.out is None:
        return ""
    return f"![{words}]({os.path.relpath(arguments.figures / f'{name}.png', arguments.out.parent)})"


def version() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return found.stdout.strip() or "unknown"


def machine(threads: int) -> str:
    """Description of the machine, or the value of ``--machine``."""
    if _machine:
        return _machine
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    number = {1: "one shared core", 2: "two shared cores"}.get(cores or 0, f"{cores} cores")
    used = "1 thread" if threads == 1 else f"{threads} threads"
    gpu = f" and one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{number} ({platform.machine()}){gpu}, {used}, Python {platform.python_version()}, torch {torch.__version__},"
        f" lightning {L.__version__}"
    )


def peak_bytes() -> int:
    """Peak resident bytes of this process."""
    status = Path("/proc/self/status")  # `ru_maxrss` includes the parent process's peak
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Formats a Markdown table; all columns except the first contain numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def write_section(path: Path | None, name: str, text: str) -> None:
    """Writes text between ``<!-- name -->`` and ``<!-- /name -->`` in a Markdown file, or prints the text."""
    if path is None:
        print(text)
        return
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    content = path.read_text() if path.exists() else ""
    section = f"{begin}\n\n{text.strip()}\n\n{end}"
    if begin in content and end in content:
        before, _, rest = content.partition(begin)
        content = before + section + rest.partition(end)[2]
    else:
        content = f"{content.rstrip()}\n\n{section}\n".lstrip()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    print(f"wrote section `{name}` of {path}")
