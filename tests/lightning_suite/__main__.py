"""Lightning's own tests, plain and federated with one client: ``python -m tests.lightning_suite LIGHTNING --out
OUT``.

LIGHTNING is a working tree of Lightning at the tag of the installed version (or the previous version), outside this
repository::

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning /tmp/lightning

Every folder of tests runs in a separate process: first unchanged, then with a ``Federation`` of one client in every
Trainer, then with ``FederatedTrainer`` instead of ``Trainer``. Only tests that pass unchanged run federated. Tests with
other results run again without the rounds' metrics (``fed/...``, ``comm/...``), because many of Lightning's tests do
not expect additional metrics.

Results are JSON lines in OUT, and an interrupted run resumes from these lines; ``table.md`` counts results. A run takes
hours on two cores. Test files that import ``cloudpickle``, ``scikit-learn``, ``pandas`` or ``onnx``, or need the plugin
``pytest-rerunfailures``, are skipped without these packages. Tests that start processes are always skipped.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.lightning_suite.results import differs, read, table

ROOT = Path(__file__).parents[2]
DOORS = ("plain", "callback", "trainer")
FIRST = ("trainer", "loops", "callbacks", "checkpointing", "models", "tuner", "core", "loggers", "utilities")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", metavar="LIGHTNING", type=Path, help="a working tree of Lightning")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--doors", nargs="*", default=DOORS, choices=DOORS, help="which of the three runs")
    parser.add_argument("--folders", nargs="*", default=FIRST, help="folders and files of tests_pytorch")
    parser.add_argument("--again", action="store_true", help="run federated tests that did not pass once more")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tests = arguments.checkout / "tests" / "tests_pytorch"
    if arguments.again:
        for door in set(arguments.doors) - {"plain"}:
            forget_failures(results_of(arguments.out, door))
            results_of(arguments.out, f"{door}-hidden").unlink(missing_ok=True)
    for folder in arguments.folders:
        for door in arguments.doors:
            run(door, tests / folder, arguments)
            if door != "plain":
                run(f"{door}-hidden", tests / folder, arguments)
            (arguments.out / "table.md").write_text(table(arguments.out))
    print((arguments.out / "table.md").read_text())


def results_of(out, door):
    return (out / f"{door}.jsonl").resolve()


def forget_failures(path):
    kept = [result for result in read(path).values() if result["outcome"] == "passed"]
    path.write_text("".join(f"{json.dumps(result)}\n" for result in kept))


def wanted_tests(out, door, path):
    """Tests to run in a folder or file; ``None`` for all tests."""
    if door == "plain":
        return None
    source, is_wanted = door.removesuffix("-hidden"), differs
    if source == door:
        source, is_wanted = "plain", lambda result: result["outcome"] == "passed"
    known = read(results_of(out, door))
    results = read(results_of(out, source)).items()
    here = (f"{path}/", f"{path}::")
    return [test for test, each in results if test.startswith(here) and is_wanted(each) and test not in known]


def run(door, path, arguments):
    """Runs the tests of a folder or file; after a crash, runs the remaining tests without the crashing test."""
    checkout = arguments.checkout.resolve()
    wanted = wanted_tests(arguments.out, door, path.resolve().relative_to(checkout).as_posix())
    if wanted == []:
        return
    listed = (arguments.out / "wanted.json").resolve()
    listed.write_text(json.dumps(wanted))
    environment = {
        **os.environ,
        "DOOR": door.removesuffix("-hidden"),
        "NUMBERS": "hidden" if door.endswith("-hidden") else "shown",
        "RESULTS": str(results_of(arguments.out, door)),
        "WANTED": str(listed),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    plugins = ["-p", "tests.lightning_suite.plugin", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-c", str(checkout / "pyproject.toml"), "--rootdir", str(checkout)]
    options = ["-q", "--color", "no", "--timeout", "120", "--continue-on-collection-errors", str(path.resolve())]
    num_results = -1
    while num_results < len(read(results_of(arguments.out, door))):
        num_results = len(read(results_of(arguments.out, door)))
        ended = subprocess.run(
            [*command, *plugins, *options], cwd=checkout / "tests", env=environment, capture_output=True, text=True
        )
        if ended.returncode in (0, 1, 5):
            return
    print(f"{door}: {path.name} ended with {ended.returncode}\n{ended.stdout[-2000:]}", file=sys.stderr)


if __name__ == "__main__":
    main()
