"""``lightning-fed study``: compares federated training with separate training at each site."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_fed.cli.compare import add_options, read_plan
from lightning_fed.cli.recipes import split_options
from lightning_fed.report.terminal import draw_tables


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed study`` with the command-line arguments ``args``."""
    parser = _parser()
    command_args, fit_args = split_options(args)
    options = parser.parse_args(command_args)
    plan = read_plan(parser, options, fit_args, sites=options.stage, patient=options.patient)
    from lightning_fed.compare.method_options import CENTRAL
    from lightning_fed.compare.plan import run_comparison
    from lightning_fed.compare.report import summarize
    from lightning_fed.report.overview import write_overview
    from lightning_fed.study.answers import LOCAL
    from lightning_fed.study.report import gather_study, keep_primary, write_study

    labels = [method.label for method in plan.methods]
    federated = [label for label in labels if label not in (CENTRAL, LOCAL)]
    if LOCAL not in labels or not federated:
        parser.error(f"Expected `--methods` to have {LOCAL!r} and a federated method, but got {labels}.")
    keep_primary(options.out / "primary.json", federated[0])
    results = run_comparison(plan)
    seeds = [seed for seed in plan.seeds if sum(run["seed"] == seed for run in results) == len(labels)]
    results = [run for run in results if run["seed"] in seeds]
    if not seeds:
        sys.stdout.write("No table yet: no seed has a finished run of every method.\n")
        return
    models = [*federated, *([CENTRAL] if CENTRAL in labels else []), LOCAL]
    sent = {label: cell.megabytes for (label, _), cell in summarize(results).items()}
    megabytes = {label: sum(numbers) / len(numbers) for label, numbers in sent.items() if numbers}
    study = gather_study(results, models, options.min_support, megabytes)
    text = write_study(study, options.out)
    page = write_overview(options.out, f"Study of the sites in {options.recipe.stem}", text)
    sys.stdout.write(
        f"\n{draw_tables(text)}\n\nTables, sums, runs and the forest plot: {options.out}\n"
        f"Overview with the reports of all runs, for a browser: {page}\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fed study",
        usage="lightning-fed study RECIPE --methods local FEDERATED ... [central] [options] [-- options of fit]",
        description="Train local, federated and central models on one schedule, and evaluate the models at every site:"
        " the gain of the federation by site, with intervals. The first federated method is the primary comparison;"
        " other methods are exploratory. A repeated command resumes the study and keeps finished runs.",
        epilog="Arguments after `--` go to `lightning-fed fit`, in all runs: -- --trainer.max_rounds 20.",
    )
    add_options(parser, "runs/study")
    parser.add_argument(
        "--stage", choices=["test", "validation"], default="test", help="the sites' data (default: %(default)s)"
    )
    parser.add_argument("--patient", help="key of the patient in a batch, if several cases belong to one patient")
    parser.add_argument(
        "--min-support", type=int, default=10, help="smallest number of cases for a site's sums (default: %(default)s)"
    )
    return parser
