"""``lightning-fed adapt``: measures BatchNorm statistics for a checkpoint, on data from a new site."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_fed.cli.recipes import MODEL_OPTIONS, split_model_options
from lightning_fed.errors import OptionError

_DESCRIPTION = (
    "Measure a checkpoint's BatchNorm statistics on unlabelled data from a new site. The model comes from a recipe "
    "(-c, --recipe) or --model; a checkpoint from `lightning-fed fit` contains the class name. The command reads the "
    "training data of the recipe or of --data, and ignores labels."
)


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed adapt`` with the command-line arguments ``args``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed adapt",
        usage="lightning-fed adapt CHECKPOINT [-o CHECKPOINT] [--recipe RECIPE] [--data CLASS] [options]",
        description=_DESCRIPTION,
        epilog=MODEL_OPTIONS,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a Lightning checkpoint, or a state dict")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="CHECKPOINT", help="the file to write (default: CHECKPOINT-adapted)"
    )
    parser.add_argument("--num_batches", type=int, help="number of batches (default: all)")
    command_args, model_args = split_model_options(args)
    options = parser.parse_args(command_args)
    source = options.checkpoint
    options.out = options.out or source.with_name(f"{source.stem}-adapted{source.suffix}")
    if options.out.resolve() == source.resolve():
        parser.error(f"Expected `--out` to differ from the checkpoint, but got {options.out}.")
    from lightning_fed.cli.checkpoints import adapt_checkpoint  # imports torch

    try:
        adapt_checkpoint(options, model_args)
    except ValueError as error:
        raise OptionError(str(error)) from error
