"""Seconds per round, start-up and memory for pfl, Flower, NVFLARE, BlazeFL, plain Lightning and a loop by hand.

All contestants train the same networks on the same data with the same steps; a check compares the final weights. Each
contestant runs in separate processes, alternating by repetition, with ratios within a repetition. Each peer has a
separate environment below ``--runs``, with access to this environment's PyTorch if the Python version is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import load_json, machine, parser, prepare, save_json, table, version, write_section

HERE = Path(__file__).parent
SCRIPTS = HERE / "peers"


@dataclass(frozen=True)
class Contestant:
    """Start of a contestant.

    Args:
        words: Name in the table.
        script: Script, in ``peers/``.
        package: Package for the contestant's environment; empty for this environment.
        processes: Number of training processes; the cores are divided among the processes as threads.
        launcher: Python's arguments before the script.
        base: Contestant with ratio 1.
        rounds: Number of timed rounds; 0 for the row's number.
        python: Python version of the environment; empty for the current version.
    """

    words: str
    script: str
    package: str = ""
    processes: int = 1
    launcher: Sequence[str] = ()
    base: str = "by_hand"
    rounds: int = 0
    python: str = ""


PAIRS = (
    ("ours", "pfl"),
    ("ours_private", "pfl_private"),
    ("ours_fastest", "pfl"),
    ("ours_fastest", "pfl_2"),
    ("ours_parallel", "pfl_2"),
    ("flwr", "ours"),
)
"""Contestants that are compared directly."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
CONTESTANTS = {
    "by_hand": Contestant("PyTorch loop by hand", "by_hand.py"),
    "trainer": Contestant("plain `L.Trainer`, no federation", "lightning_round.py"),
    "trainers": Contestant("a new `L.Trainer` per visit", "lightning_round.py"),
    "ours": Contestant("`FederatedTrainer`", "lightning_round.py"),
    "ours_lightning": Contestant('`FederatedTrainer(visits="lightning")`', "lightning_round.py"),
    "ours_fastest": Contestant('`FederatedTrainer(visits="fastest")`', "lightning_round.py"),
    "ours_parallel": Contestant('`FederatedTrainer(strategy="client_parallel")`', "lightning_round.py", processes=2),
    "pfl": Contestant("`pfl`", "pfl_round.py", "pfl"),
    "ours_private": Contestant("`FederatedTrainer` with `CentralDP`", "lightning_round.py"),
    "pfl_private": Contestant("`pfl` with central differential privacy", "pfl_round.py", "pfl"),
    "pfl_2": Contestant("`pfl`, two processes", "pfl_round.py", "pfl", 2, (*TORCHRUN, "2")),
    "flwr": Contestant("`flwr` simulation, Ray, two clients at once", "flower_round.py", "flwr[simulation]", 2),
    "by_hand_2": Contestant("PyTorch loop by hand, two rounds", "by_hand.py", base="by_hand_2", rounds=1),
    "nvflare": Contestant(
        "`nvflare` simulator, two clients at once", "nvflare_round.py", "nvflare[PT]", 2, base="by_hand_2", rounds=1
    ),
    "by_hand_blazefl": Contestant(
        "PyTorch loop by hand, BlazeFL's environment", "by_hand.py", "blazefl[contrib,reproducibility]", python="3.12"
    ),
    "blazefl": Contestant(
        "`blazefl`, two threads, with a global interpreter lock", "blazefl_round.py",
        "blazefl[contrib,reproducibility]", 2, base="by_hand_blazefl", python="3.12",
    ),
}  # fmt: skip
ALSO = ("numpy", "torchvision", "segmentation-models-pytorch")
"""Packages of the networks, for an environment with another Python version."""
SAME = 1e-2
"""Tolerance for final weights: 1e-7 in the CNN's first weights grows to 2e-3 in three rounds."""
ROWS = {  # name: network, clients in a round, timed rounds
    "MLP, 10 clients": ("mlp", 10, 12),
    "MLP, 100 clients": ("mlp", 100, 3),
    "MLP, 1000 clients": ("mlp", 1000, 1),
    "small CNN, 50 clients": ("small_cnn", 50, 4),
    "CNN of McMahan et al., 10 clients": ("cnn", 10, 2),
    "ResNet-18 with GroupNorm at 32x32, 4 clients": ("resnet18", 4, 1),
    "DeepLabV3+ (ResNet-18, GroupNorm) at 96x96, 4 clients": ("deeplab", 4, 1),
}


def environment(contestant: Contestant, folder: Path) -> str:
    """Python of the contestant's environment, with access to this environment's packages."""
    package = contestant.package
    if not package:
        return sys.executable
    place = folder / package.partition("[")[0]
    python = place / "bin" / "python"
    if not (place / "ready").exists() and contestant.python:
        subprocess.run([f"python{contestant.python}", "-m", "venv", "--clear", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", package, *ALSO], check=True)
        (place / "ready").touch()
    elif not (place / "ready").exists():
        venv.create(place, clear=True, with_pip=True)
        site = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
        (Path(site) / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
        (place / "ready").touch()
    return str(python)


def installed(package: str, python: str) -> str:
    name = package.partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def memory_of(process: int) -> int:
    """Proportional bytes for a process and all descendants: shared memory counts once."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    total, waiting = 0, [process]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def run(name: str, row: str, rounds: int, arguments: argparse.Namespace, tries: int = 3) -> dict[str, Any]:
    """Runs a contestant, with another attempt after an error, because setups with two processes sometimes fail."""
    contestant, (work, clients, _) = CONTESTANTS[name], ROWS[row]
    rounds = contestant.rounds or rounds
    python = environment(contestant, arguments.runs / "peers")
    threads = max(1, arguments.cores // contestant.processes)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, *contestant.launcher, str(SCRIPTS / contestant.script), "--contestant", name]
        command += ["--work", work, "--clients", str(clients), "--rounds", str(rounds + 1)]
        command += ["--threads", str(threads), "--out", str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parent)}
        log = Path(folder) / "log"
        begin, peak = time.time(), 0
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=folder)
            while process.poll() is None:
                peak = max(peak, memory_of(process.pid))
                time.sleep(0.5)
        if process.returncode or not out.exists():
            if tries > 1:
                print(f"{row} {name} ended with {process.returncode}, and is started again", flush=True)
                return run(name, row, rounds, arguments, tries - 1)
            raise RuntimeError(f"{name} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        found = json.loads(out.read_text())
    stamps = found["stamps"]
    return {
        "round": float(np.mean(np.diff(stamps[1:]))),
        "start": stamps[1] - begin,  # includes the first round with most imports
        "memory": peak,
        "bytes": found["bytes"],
        "weights": found["weights"],
    }


def measure(
    row: str, names: Sequence[str], before: Mapping[str, Any], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Adds missing repetitions to the row; raises an error for a contestant with different final weights."""
    rounds = 1 if arguments.quick else ROWS[row][2]
    is_same = list(before) == list(names)
    found: dict[str, Any] = {name: list(before[name]) if is_same else [] for name in names}
    for repetition in range(len(found["by_hand"]), arguments.repetitions):
        weights: dict[str, np.ndarray] = {}
        for name in [*names[repetition % len(names) :], *names[: repetition % len(names)]]:
            one = run(name, row, rounds, arguments)
            weights[name] = np.array(one.pop("weights"))
            found[name].append(one)
            print(f"{row} {repetition + 1}/{arguments.repetitions} {name} {one['round']:.3f} s", flush=True)
        for name, value in weights.items():
            base = weights[CONTESTANTS[name].base]
            error = np.abs(value - base).max() / np.abs(base).max()
            if name != "trainer" and not name.endswith("_private") and not error < SAME:
                raise RuntimeError(f"{name} does other work than the loop by hand: weights differ by {error:.1e}")
        yield {"seconds": found, "version": version()}


def ratios(result: Mapping[str, Any], name: str, base: str = "") -> list[float]:
    seconds = result["seconds"]
    bases = seconds[base or CONTESTANTS[name].base]
    return [one["round"] / other["round"] for one, other in zip(seconds[name], bases, strict=True)]


def spread(found: Sequence[float]) -> str:
    return f"{np.median(found):.2f}" + (f" ({min(found):.2f}-{max(found):.2f})" if len(found) > 1 else "")


def compare_pairs(results: Mapping[str, Any]) -> str:
    """Ratios of two contestants' seconds within a repetition, by row: medians with ranges."""
    rows = []
    for name, base in PAIRS:
        cells = [
            spread(ratios(result, name, base)) if {name, base} <= result["seconds"].keys() else ""
            for result in results.values()
        ]
        rows += [[f"{CONTESTANTS[name].words} / {CONTESTANTS[base].words}", *cells]] if any(cells) else []
    return table(["seconds of a round / seconds of a round", *results], rows)


def overview(results: Mapping[str, Any]) -> str:
    """Median ratios to the loop by hand, by contestant and row."""
    rows = []
    for name, contestant in CONTESTANTS.items():
        cells = [f"{np.median(ratios(one, name)):.2f}" if name in one["seconds"] else "" for one in results.values()]
        rows += [[contestant.words, *cells]] if any(cells) else []
    return table(["seconds of a round / by hand", *results], rows)


def report(results: Mapping[str, Any], arguments: argparse.Namespace) -> str:
    versions = ", ".join(
        f"{one.package.partition('[')[0]} {installed(one.package, environment(one, arguments.runs / 'peers'))}"
        for one in {contestant.package: contestant for contestant in CONTESTANTS.values()}.values()
        if one.package
    )
    parts = [
        f"`python benchmarks/speed_peers.py --out benchmarks/results/performance.md`."
        f" {machine(arguments.cores)}; {versions}. One"
        f" process has {arguments.cores} threads, each of two processes half of them. Medians over repetitions, ratios"
        " within a repetition; *start* is what passes before the second round, *memory* the largest sum over all"
        f" processes. All end with the weights of the loop by hand, to {SAME:.0%} of the largest (rounding grows with"
        " training)."
    ]
    parts += [overview(results), compare_pairs(results)]
    for row, result in results.items():
        rows = []
        for name, runs in result["seconds"].items():
            rows.append(
                [
                    CONTESTANTS[name].words,
                    f"{np.median([one['round'] for one in runs]):.3f}",
                    spread(ratios(result, name)),
                    f"{np.median([one['start'] for one in runs]):.1f}",
                    f"{np.median([one['memory'] for one in runs]) / 2**20:.0f}",
                ]
            )
        repetitions = f"{len(result['seconds']['by_hand'])} repetitions of {ROWS[row][2]} rounds"
        parts += [f"**{row}**, {repetitions}", table(["", "s / round", "/ by hand", "start, s", "memory, MiB"], rows)]
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument(
        "--cores", type=int, default=os.cpu_count() or 1, help="cores, shared by a contestant's processes"
    )
    made.add_argument("--repetitions", type=int, default=5, help="repetitions, with those that are there")
    made.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="what to measure")
    made.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS), help="who")
    made.add_argument("--section", default="peers", help="section of the file with the results")
    made.add_argument("--report", action="store_true", help="only make the tables of what is there")
    arguments = made.parse_args()
    prepare(arguments)
    arguments.runs = arguments.runs.resolve()
    if arguments.quick:
        arguments.repetitions, arguments.rows = 1, arguments.rows[:1]
    bases = {CONTESTANTS[name].base for name in arguments.contestants}
    names = [name for name in CONTESTANTS if name in {"by_hand", *bases, *arguments.contestants}]
    results: dict[str, Any] = load_json(arguments.runs / "speed_peers.json") or {}
    for row in [] if arguments.report else arguments.rows:
        before = results.get(row, {}).get("seconds", {})
        for result in measure(row, names, before, arguments):
            results[row] = result
            save_json(arguments.runs / "speed_peers.json", results)
    write_section(
        arguments.out, arguments.section, report({row: results[row] for row in ROWS if row in results}, arguments)
    )


if __name__ == "__main__":
    main()
