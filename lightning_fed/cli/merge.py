"""``lightning-fed merge``: merges checkpoints with the same architecture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_fed.cli.recipes import MODEL_OPTIONS, split_model_options
from lightning_fed.errors import OptionError

_DESCRIPTION = (
    "Merge checkpoints with the same architecture: match neurons, then average. The model comes from a recipe (-c) "
    "or --model, with missing hyper-parameters from the first checkpoint; a checkpoint from `lightning-fed fit` "
    "contains the class name. BatchNorm's statistics are measured on the training data of the recipe or of --data."
)


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed merge`` with the command-line arguments ``args``."""
    parser = build_parser()
    command_args, model_args = split_model_options(args)
    options = parser.parse_args(command_args)
    if any(options.out.resolve() == path.resolve() for path in options.checkpoints):
        parser.error(f"Expected `--out` to differ from the merged checkpoints, but got {options.out}.")
    count = len(options.checkpoints)
    if options.weights is not None and len(options.weights) != count:
        parser.error(f"Expected one weight per checkpoint ({count}), but got {len(options.weights)} `--weights`.")
    from lightning_fed.cli.checkpoints import merge_checkpoints  # imports torch

    try:
        merge_checkpoints(options, model_args)
    except ValueError as error:
        raise OptionError(str(error)) from error


def build_parser() -> argparse.ArgumentParser:
    """Builds the command's parser, with an option for each argument of ``MatchedAverage`` except ``inputs``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed merge",
        usage="lightning-fed merge CHECKPOINT CHECKPOINT ... -o CHECKPOINT [-c RECIPE] [options]",
        description=_DESCRIPTION,
        epilog=MODEL_OPTIONS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="Lightning checkpoints, or state dicts")
    add("-o", "--out", required=True, type=_read_file, metavar="CHECKPOINT", help="the file to write")
    add("--weights", type=_read_weights, help="weight of each checkpoint, such as [100,250]")
    add("--num_batches", type=int, help="number of batches for BatchNorm's statistics (default: all)")
    add("--mode", choices=("grow", "permute", "none"), default="grow", help="add neurons, preserve widths, or average")
    add("--order", choices=("fedma", "pfnm"), default="fedma", help="order of the groups, and compared entries")
    add("--score", choices=("published", "marginal"), default="marginal", help="matching score")
    add("--gamma", type=float, help="larger values add more neurons (default: the default of --score)")
    add("--passes", type=int, default=5, help="maximum matching passes per group (default: %(default)s)")
    add("--sweeps", type=int, default=30, help="maximum alignment sweeps (default: %(default)s)")
    add(
        "--batch_norm",
        choices=("recalibrate", "average"),
        default="recalibrate",
        help="measure BatchNorm's statistics on data, or average the statistics",
    )
    add("--seed", type=int, default=0, help="seed for the order of the networks (default: %(default)s)")
    return parser


def _read_weights(text: str) -> list[float]:
    return [float(weight) for weight in text.strip("[]").split(",")]


def _read_file(text: str) -> Path:
    if Path(text).is_dir() or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"Expected `--out` to be a file, but got the folder {text}.")
    return Path(text)
