"""``lightning-fed compare``: trains a recipe with several methods, with equal rounds."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fed.cli.methods import read_methods
from lightning_fed.cli.recipes import split_options

_COMMA = r",(?![^\[]*\])"  # except inside brackets: ``fedfusion:levels=[2,-1]`` is one method


def run(args: Sequence[str]) -> None:
    """Runs the command."""
    parser = _parser()
    command_args, fit_args = split_options(args)
    options = parser.parse_args(command_args)
    # Imports torch, so only after the parser: errors and help stay fast.
    from lightning_fed.compare.method_options import MethodChoice
    from lightning_fed.compare.plan import Plan, run_comparison
    from lightning_fed.compare.report import write_report

    try:
        if options.last < 1 or not 0 < options.target <= 1:
            raise ValueError("Expected `--last` to be at least 1 and `--target` to be in (0, 1].")
        plan = Plan(
            recipe=options.recipe,
            methods=[
                MethodChoice.parse(text) for part in options.methods for text in re.split(_COMMA, part) if text.strip()
            ],
            seeds=range(options.seeds),
            stragglers=options.stragglers,
            out=options.out,
            monitor=options.monitor,
            mode=options.mode,
            test=options.test,
            overrides=fit_args,
        )
    except ValueError as error:
        parser.error(str(error))
    results = run_comparison(plan)
    table = write_report(results, options.out, options.target, options.last)
    sys.stdout.write(
        f"\n{table}\n\nTables, curves, checkpoints and logs: {options.out}\n"
        f"To draw the clients' classes: lightning-fed data {options.recipe} --out clients.png\n"
    )


def _parser() -> argparse.ArgumentParser:
    # `split_options` removes the arguments after `--`.
    parser = argparse.ArgumentParser(
        prog="lightning-fed compare",
        usage="lightning-fed compare RECIPE --methods METHOD ... [options] [-- options of fit]",
        description="Train a recipe with several methods, with equal clients, rounds, stragglers and initial "
        "weights. If the command is repeated, it resumes an interrupted comparison and skips finished "
        "runs.",
        epilog="Arguments after `--` are passed to `lightning-fed fit` in all runs: -- --trainer.max_rounds 20",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        metavar="METHOD",
        help=f"any of central, {', '.join(read_methods())}; with options: fedprox:mu=0.1 fedmargin:combine=lpm. "
        "central trains on the pooled data. fedper, fedrep, fedbn, silobn, fesem, ditto and fedala train a "
        "model per client: compare them with `--monitor fed/<metric>/mean`",
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, starting at 0 (default: %(default)s)")
    parser.add_argument(
        "--stragglers", type=_fractions, help="fractions of the cohort, such as 0,0.5,0.8 (default: as in the recipe)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder (default: %(default)s)")
    parser.add_argument("--monitor", help="compared metric (default: from the recipe's ModelCheckpoint)")
    parser.add_argument(
        "--mode", choices=["max", "min"], help="whether larger or smaller values are better (default: max)"
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
