"""Changes the code with cosmic-ray, and lists changes not detected by any test.

    pip install cosmic-ray==8.7.0
    python tests/mutations.py                        # all targets, 14 changes each
    python tests/mutations.py server --mutants 100   # one target, more changes

A seed selects the changes from all of cosmic-ray's operators: another operator, another number, a `not`, a loop that
does not run. Each change is made in a copy of the checkout. There the target's tests run until the first failure.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.portable import LEFT_BEHIND, ROOT

PACKAGE = "lightning_fed"
TARGETS = {  # file, and its tests, the fastest first
    "server": ("server/server.py", ["tests/server/test_server.py", "tests/test_faults.py", "tests/test_invariants.py"]),
    "schedule": ("server/schedule.py", ["tests/server/test_schedule.py", "tests/test_invariants.py"]),
    "averaging": ("rule.py", ["tests/algorithms/test_fedavg.py", "tests/server"]),
    "weighted_mean": ("numerics/weighted_mean.py", ["tests/numerics", "tests/algorithms/test_fedavg.py"]),
    "entries": ("model/entries.py", ["tests/model/test_entries.py", "tests/test_faults.py", "tests/rounds"]),
    "local_model": ("client/local_model.py", ["tests/client", "tests/test_invariants.py", "tests/test_faults.py"]),
    "round": (
        "rounds/round.py",
        ["tests/test_invariants.py", "tests/test_faults.py", "tests/test_hooks.py", "tests/backends/vectorized"],
    ),
    "visits": (
        "rounds/visit_flow.py",
        ["tests/test_invariants.py", "tests/test_faults.py", "tests/test_hooks.py", "tests/backends/vectorized"],
    ),
    "margins": ("algorithms/fedmargin/margins.py", ["tests/algorithms/fedmargin/test_margins.py"]),
    "matching": ("matching/neuron_matching.py", ["tests/matching/test_neuron_matching.py", "tests/algorithms/fedma"]),
    "merging": ("matching/merging.py", ["tests/matching/test_merging.py", "tests/matching/test_one_shot.py"]),
    "losses": ("algorithms/fedss/losses.py", ["tests/algorithms/fedss/test_losses.py", "tests/algorithms/fedss"]),
}
CONFIGURATION = """\
[cosmic-ray]
module-path = "{path}"
timeout = {timeout}
excluded-modules = []
test-command = '{command}'

[cosmic-ray.distributor]
name = "local"

[cosmic-ray.filters.operators-filter]
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*", "core/RemoveDecorator"]
"""  # `a | b` is nearly always an annotation


def mutate(name, number, seed, timeout):
    """Runs the tests of a target on some mutants; returns the number of mutants, and the diffs of the survivors."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    module, tests = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy, configuration, session = Path(folder) / "copy", Path(folder) / "config.toml", Path(folder) / "session"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        if (ROOT.parent / "shared").exists():  # data sets next to the checkout
            (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
        command = f'"{sys.executable}" -m pytest -q -x -n0 -m "not slow" {PACKAGE}/{module} {" ".join(tests)}'
        configuration.write_text(
            CONFIGURATION.format(path=f"{PACKAGE}/{module}", timeout=timeout, command=command), "utf-8"
        )

        def cosmic_ray(*arguments):
            program = Path(sys.executable).with_name(arguments[0])
            environment = {**os.environ, "PYTHONPATH": str(copy)}
            command = [program, *map(str, arguments[1:])]
            subprocess.run(command, cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)

        cosmic_ray("cosmic-ray", "baseline", configuration)
        cosmic_ray("cosmic-ray", "init", configuration, session)
        cosmic_ray("cr-filter-operators", session, configuration)
        with use_db(session, WorkDB.Mode.open) as database:
            pending = sorted(database.pending_work_items, key=lambda item: repr(item.mutations))
            chosen = {item.job_id for item in random.Random(seed).sample(pending, min(number, len(pending)))}
            left_out = [item.job_id for item in pending if item.job_id not in chosen]
            database.set_multiple_results(left_out, WorkResult(WorkerOutcome.SKIPPED))
        cosmic_ray("cosmic-ray", "exec", configuration, session)
        with use_db(session, WorkDB.Mode.open) as database:
            results = [result for item, result in database.completed_work_items if item.job_id in chosen]
    return len(results), [result.diff for result in results if not result.is_killed]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--mutants", type=int, default=14, help="how many of a file, at most")
    parser.add_argument("--seed", type=int, default=0, help="from which they are drawn")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for the tests of one mutant")
    options = parser.parse_args()
    for name in options.targets:
        number, survivors = mutate(name, options.mutants, options.seed, options.timeout)
        print(f"{name}: {number - len(survivors)} of {number} mutants noticed", flush=True)
        for difference in survivors:
            lines = [line for line in difference.splitlines() if re.match(r"@@|[-+](?![-+])", line)]
            print("\n".join(f"    {line}" for line in lines), flush=True)


if __name__ == "__main__":
    main()
