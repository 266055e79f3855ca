"""The command ``data``: what a recipe's clients have, before anything trains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import lightning as L

from lightning_fed.callbacks.federation import Federation
from lightning_fed.cli.recipes import split_options
from lightning_fed.compare.run import quiet
from lightning_fed.data.client_report import report_clients
from lightning_fed.data.federated import FederatedDataModule, split_training_data
from lightning_fed.data.population import Population
from lightning_fed.errors import OptionError
from lightning_fed.recipe import FederatedCLI
from lightning_fed.trainer import FederatedTrainer


def run(args: Sequence[str]) -> None:
    """The command.

    Args:
        args: The command line after ``data``.

    Raises:
        OptionError: If the recipe has neither clients nor a partition.

    """
    mine, own = split_options(args)
    options = _parser().parse_args(mine)
    with quiet():
        cli = FederatedCLI(["-c", str(options.recipe), *own], run=False)
    report = report_clients(
        population_of(cli.datamodule, cast(FederatedTrainer, cli.trainer).federation),
        getattr(cli.datamodule, "num_classes", None),
        getattr(cli.datamodule, "class_names", ()),
        getattr(cli.datamodule, "ignore_index", 255),
    )
    sys.stdout.write(f"{report}\n")
    if options.out is not None:
        report.save_picture(options.out)
        sys.stdout.write(f"\nPicture: {options.out}\n")


def _parser() -> argparse.ArgumentParser:
    """Parser of the command, for what stands before ``--``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed data",
        usage="lightning-fed data RECIPE [--out PICTURE] [-- options of fit]",
        description="Tells what every client of a recipe has: examples, classes, pixels per class, distance of its"
        " classes from those of all (total variation), and how its images look. The training data are read once.",
        epilog="What follows `--` is for `lightning-fed fit`: -- --trainer.partition.alpha 0.1",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument("--out", type=Path, help="file for a picture: the clients' images and shares of the classes")
    return parser


def population_of(data: L.LightningDataModule, federation: Federation) -> Population:
    """The clients of a recipe's training data.

    Args:
        data: The datamodule, which is set up.
        federation: The federation, whose partition splits data that bring no clients.

    Raises:
        OptionError: If there is none.

    """
    data.prepare_data()
    data.setup("fit")
    if isinstance(data, FederatedDataModule):
        return data.population()
    if federation.partition is None:
        raise OptionError("Expected a recipe with clients: a `partition` of the Trainer, or data that bring them.")
    return split_training_data(data.train_dataloader(), federation.partition, federation.schedule.seed)
