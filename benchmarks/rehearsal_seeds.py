"""Many seeds of the rehearsed deployments in the tests: which seeds violate an invariant?

    python benchmarks/rehearsal_seeds.py --seeds 10000 --out docs/guides/rehearsal.md

The nightly job runs this script (`make rehearse`). The exit status is 1 after a violation. Finished seeds are stored,
and the script continues after an interruption. Remove the stored seeds after a change to the package.
"""

import json
import os
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from common import machine, parser, prepare, table, write_section

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_fed.backends.rehearsal.rehearsal import rehearse
from tests.backends.rehearsal.plans import build_plans

plans = cache(build_plans)


def run_seed(seed):
    """Returns a seed's deployment, rounds and violations; an exception counts as a violation."""
    warnings.simplefilter("ignore")
    name = list(plans())[seed % len(plans())]
    try:
        outcome = rehearse(plans()[name], seed)
        found = [*outcome.violations, *([outcome.failure] if outcome.failure else [])]
    except Exception as error:
        outcome, found = None, [repr(error)]
    rounds = 0 if outcome is None else outcome.rounds
    return {"seed": seed, "name": name, "rounds": rounds, "violations": found}


def main():
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--seeds", type=int, default=10_000, help="number of seeds")
    made.add_argument("--report", action="store_true", help="only make the table of stored seeds")
    arguments = made.parse_args()
    prepare(arguments)
    path = arguments.runs / "rehearsal_seeds" / "seeds.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {result["seed"] for result in results}
    seeds = [seed for seed in range(20 if arguments.quick else arguments.seeds) if seed not in known]
    if not arguments.report:
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool, path.open("a") as file:
            for result in pool.map(run_seed, seeds):
                results.append(result)
                file.write(f"{json.dumps(result)}\n")
                file.flush()
                for text in result["violations"]:
                    print(f"{result['name']}, seed {result['seed']}: {text}", flush=True)
    bad = [result for result in results if result["violations"]]
    counts, rounds, violated = Counter(), Counter(), Counter(result["name"] for result in bad)
    for result in results:
        counts[result["name"]] += 1
        rounds[result["name"]] += result["rounds"]
    rows = [[name, f"{counts[name]:,}", f"{rounds[name]:,}", violated[name]] for name in plans()]
    rows.append(["all", f"{len(results):,}", f"{rounds.total():,}", len(bad)])
    header = ["deployment", "seeds", "rounds", "seeds with a violation"]
    text = f"Script: `python benchmarks/rehearsal_seeds.py`. Machine: {machine(1)}.\n\n{table(header, rows)}"
    write_section(arguments.out, "seeds", text)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
