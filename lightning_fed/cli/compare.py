"""``lightning-fed compare``: trains a recipe with several methods for comparison."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fed.cli.methods import read_methods
from lightning_fed.cli.recipes import split_options
from lightning_fed.report.terminal import draw_tables

if TYPE_CHECKING:
    from lightning_fed.compare.plan import Plan

_COMMA = r",(?![^\[]*\])"  # except inside brackets: ``fedfusion:levels=[2,-1]`` is one method


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed compare`` with the command-line arguments ``args``."""
    parser = _parser()
    command_args, fit_args = split_options(args)
    options = parser.parse_args(command_args)
    if options.last < 1 or not 0 < options.target <= 1:
        parser.error("Expected `--last` to be at least 1 and `--target` to be in (0, 1].")
    plan = read_plan(parser, options, fit_args, stragglers=options.stragglers, test=options.test)
    from lightning_fed.compare.plan import run_comparison
    from lightning_fed.compare.report import write_report
    from lightning_fed.report.overview import write_overview

    results = run_comparison(plan)
    if results:
        table = write_report(results, options.out, options.target, options.last)
        page = write_overview(options.out, f"Comparison of methods on {options.recipe.stem}", table)
        sys.stdout.write(
            f"\n{draw_tables(table)}\n\nTables, curves, checkpoints and logs: {options.out}\n"
            f"Overview with the reports of all runs, for a browser: {page}\n"
            f"To draw the clients' classes: lightning-fed data {options.recipe} --out clients.png\n"
        )


def read_plan(
    parser: argparse.ArgumentParser, options: argparse.Namespace, fit_args: Sequence[str], **more: Any
) -> Plan:
    """Builds the plan of a comparison from parsed options. Exits with an error message for invalid options."""
    # Imports torch: only after the parser, so errors and help are fast.
    from lightning_fed.compare.method_options import MethodChoice
    from lightning_fed.compare.plan import Plan

    texts = [text for part in options.methods for text in re.split(_COMMA, part) if text.strip()]
    shared = {name: getattr(options, name) for name in ("recipe", "out", "monitor", "mode", "minutes")}
    try:
        methods = [MethodChoice.parse(text) for text in texts]
        return Plan(methods=methods, seeds=range(options.seeds), overrides=fit_args, **shared, **more)
    except ValueError as error:
        parser.error(str(error))


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Adds the command-line options of a comparison to a parser. ``out`` is the default folder for results."""
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        metavar="METHOD",
        help=f"any of central, local, {', '.join(read_methods())}; with options: fedprox:mu=0.1 fedmargin:combine=lpm."
        " central trains on the pooled data, local trains a model per client without any exchange",
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, starting at 0 (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder (default: %(default)s)")
    parser.add_argument("--monitor", help="compared metric (default: from the recipe's ModelCheckpoint)")
    parser.add_argument(
        "--mode", choices=["max", "min"], help="whether larger or smaller values are better (default: by the name)"
    )
    parser.add_argument(
        "--minutes", type=float, help="time limit: stop between two rounds; the same command continues (default: none)"
    )


def _parser() -> argparse.ArgumentParser:
    # `split_options` removes the arguments after `--`.
    parser = argparse.ArgumentParser(
        prog="lightning-fed compare",
        usage="lightning-fed compare RECIPE --methods METHOD ... [options] [-- options of fit]",
        description="Train a recipe with several methods, with equal clients, rounds, stragglers and initial weights."
        " A repeated command resumes an interrupted comparison and keeps finished runs.",
        epilog="Arguments after `--` go to `lightning-fed fit`, in all runs: -- --trainer.max_rounds 20."
        " local, fedper, fedrep, fedbn, silobn, fesem, ditto and fedala train a model per client: compare these methods"
        " with `--monitor fed/<metric>/mean`.",
    )
    add_options(parser, "runs/compare")
    parser.add_argument(
        "--stragglers", type=_fractions, help="fractions of the cohort, such as 0,0.5,0.8 (default: the recipe's)"
    )
    parser.add_argument(
        "--target", type=float, default=0.8, help="target, as a fraction of central's score (default: %(default)s)"
    )
    parser.add_argument(
        "--last",
        type=int,
        default=1,
        help="number of final rounds over which the score is averaged (default: %(default)s)",
    )
    parser.add_argument("--test", action="store_true", help="evaluate the finished models on the test data")
    return parser


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"Expected numbers separated by commas, but got {text!r}.") from None
