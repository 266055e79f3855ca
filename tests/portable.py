"""Runs the suite with settings that simulate other machines, and writes the results into a page.

    python tests/portable.py --list
    python tests/portable.py --settings 1 4 --out docs/dev/testing.md

Restricting the libraries on this processor reproduces the floats of other processors. Settings are pairwise: every
pair of values of two variables occurs in some run. Each run uses a copy of the checkout with a space in its path.
"""

import argparse
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]
START, END = "<!-- portable -->", "<!-- /portable -->"
HEADER = "| setting | passed | skipped | failed | minutes | processor |\n|---|---:|---:|---:|---:|---|\n"
LEFT_BEHIND = (
    ".git", ".venv*", "site", "build", "dist", "runs", "lightning_logs",
    "checkpoints", "__pycache__", ".*_cache",
)  # fmt: skip

CAPABILITIES = ["default", "avx2", "avx512"]
OWN = ""  # the variable is unset: the processor's default
OLD_LIBRARIES = {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
VARIABLES = {
    "ATEN_CPU_CAPABILITY": CAPABILITIES,
    "libraries": [OWN, "old"],  # torch's compute libraries
    "OMP_NUM_THREADS": ["1", "2"],
    "PL_GLOBAL_SEED": [OWN, "0"],
    "order": ["1", "2"],  # order of the tests, drawn from this seed; `make test` uses the order in the files
}


def pairwise(variables):
    """Settings in which every pair of values occurs: always adds the setting with the most new pairs."""
    names = list(variables)
    candidates = [dict(zip(names, values, strict=True)) for values in itertools.product(*variables.values())]

    def pairs(setting):
        return set(itertools.combinations(setting.items(), 2))

    missing, settings = set().union(*map(pairs, candidates)), []
    while missing:
        settings.append(max(candidates, key=lambda setting: len(pairs(setting) & missing)))
        missing -= pairs(settings[-1])
    return settings


def capabilities():
    """Torch's vector instructions on this processor, the weakest first."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability().lower())"
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    best = done.stdout.strip()
    return CAPABILITIES[: CAPABILITIES.index(best) + 1] if best in CAPABILITIES else ["default"]


def environment_of(setting):
    old = OLD_LIBRARIES if setting["libraries"] != OWN else {}
    rest = {name: value for name, value in setting.items() if value != OWN and name not in ("libraries", "order")}
    return {**rest, **old}


def text_of(setting):
    variables = {**environment_of(setting), "order": setting["order"]}
    return ", ".join(f"`{name}={value}`" for name, value in variables.items())


def processor():
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"


def run(setting, workers, arguments):
    """One run in a copy of the checkout: numbers of passed, skipped and failed tests, minutes, and failed tests."""
    with tempfile.TemporaryDirectory(prefix="lightning fed ") as folder:
        copy, report = Path(folder) / "a copy", Path(folder) / "report.xml"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        if (ROOT.parent / "shared").exists():  # data sets next to the checkout
            (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
        varied = {*VARIABLES, *OLD_LIBRARIES}
        environment = {name: value for name, value in os.environ.items() if name not in varied}
        environment |= environment_of(setting)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
        environment["TMPDIR"] = str(copy.parent / "other files")
        environment["OMP_WAIT_POLICY"] = "passive"  # waiting threads leave the core to other workers
        Path(environment["TMPDIR"]).mkdir()
        order = ["-p", "randomly", f"--randomly-seed={setting['order']}"]
        command = [
            sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", str(workers), "--dist", "loadfile", *order,
            f"--basetemp={folder}/temporary files", f"--junitxml={report}", *arguments,
        ]  # fmt: skip
        start = time.monotonic()
        try:
            subprocess.run(command, cwd=copy, env=environment, check=False, timeout=7200)
        except subprocess.TimeoutExpired:
            return 0, 0, 1, (time.monotonic() - start) / 60, ["pytest, which did not end"]
        minutes = (time.monotonic() - start) / 60
        if not report.exists():
            return 0, 0, 1, minutes, ["pytest itself"]
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    return len(cases) - len(failed) - skipped, skipped, len(failed), minutes, names


def write(page, rows, left_out):
    """Writes rows into the page's table, and keeps rows for other processors and settings."""
    before, middle, after = page.read_text().partition(START)[0], *_between(page.read_text())
    old = [line for line in middle.splitlines() if line.startswith("| `") or line.startswith("| as it is")]
    table = {_key(line): line for line in [*old, *rows]}
    notes = f"\n{left_out}\n" if left_out else ""
    page.write_text(f"{before}{START}\n\n{HEADER}" + "\n".join(table.values()) + f"\n{notes}\n{END}{after}")


def _between(text):
    middle, _, after = text.partition(START)[2].partition(END)
    return middle, after


def _key(line):
    cells = line.split("|")
    return cells[1].strip(), cells[-2].strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the settings and end")
    parser.add_argument("--settings", type=int, nargs="+", help="numbers of the settings to run, as --list has them")
    parser.add_argument("--workers", type=int, default=2, help="processes that share the tests (default: 2)")
    parser.add_argument("--out", type=Path, help="page whose table is filled in")
    parser.add_argument("tests", nargs="*", help="arguments for pytest after `--`, such as a folder")
    arguments = parser.parse_args()

    settings = pairwise({**VARIABLES, "ATEN_CPU_CAPABILITY": capabilities()})
    lacking = CAPABILITIES[len(capabilities()) :]
    left_out = f"Left out, as the processor does not have it: {', '.join(lacking)} ({processor()})." if lacking else ""
    chosen = arguments.settings or range(1, len(settings) + 1)
    if not set(chosen) <= set(range(1, len(settings) + 1)):
        parser.error(f"expected --settings to be among 1 to {len(settings)}, but got {list(chosen)}")
    if left_out:
        print(left_out)
    if arguments.list:
        print(*(f"{number}: {text_of(setting)}" for number, setting in enumerate(settings, 1)), sep="\n")
        return
    is_good = True
    for number in chosen:
        setting = settings[number - 1]
        print(f"{number}: {text_of(setting)}", flush=True)
        passed, skipped, failed, minutes, names = run(setting, arguments.workers, arguments.tests)
        print(f"{passed} passed, {skipped} skipped, {failed} failed in {minutes:.0f} minutes", *names, sep="\n")
        is_good = is_good and passed > 0 and not failed
        if arguments.out:
            row = f"| {text_of(setting)} | {passed} | {skipped} | {failed} | {minutes:.0f} | {processor()} |"
            write(arguments.out, [row], left_out)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
