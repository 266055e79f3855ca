"""``lightning-fed data``: shows each client's data in a recipe, without training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fed.cli.recipes import split_options
from lightning_fed.report.terminal import draw_tables


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed data`` with the command-line arguments ``args``."""
    command_args, fit_args = split_options(args)
    parser = argparse.ArgumentParser(
        prog="lightning-fed data",
        usage="lightning-fed data RECIPE [--out PICTURE] [-- options of fit]",
        description="Show the data of each client in a recipe: examples, classes, pixels per class, total variation "
        "distance between the class distributions of the client and of all clients, and images. Reads "
        "the training data once.",
        epilog="Arguments after `--` are passed to `lightning-fed fit`: -- --trainer.partition.alpha 0.1",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument("--out", type=Path, help="file for a picture of the clients' images and class distributions")
    options = parser.parse_args(command_args)
    # Imports torch, so only after the parser: errors and help stay fast.
    from lightning_fed.backends.wire.data import read_data
    from lightning_fed.compare.run import quiet
    from lightning_fed.datasets.client_report import report_clients
    from lightning_fed.recipe import FederatedCLI

    with quiet():
        cli = FederatedCLI(["-c", str(options.recipe), *fit_args], run=False)
    trainer: Any = cli.trainer
    population, _ = read_data(trainer.federation, cli.datamodule)
    report = report_clients(
        population,
        getattr(cli.datamodule, "num_classes", None),
        getattr(cli.datamodule, "class_names", ()),
        getattr(cli.datamodule, "ignore_index", 255),
    )
    sys.stdout.write(f"{draw_tables(str(report))}\n")
    if options.out is not None:
        report.save_picture(options.out)
        sys.stdout.write(f"\nPicture: {options.out}\n")
