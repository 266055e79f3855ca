"""``lightning-fed demo``: trains DeepLabV3+ on clients with different images."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed demo`` with the command-line arguments ``args``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed demo",
        description="Train DeepLabV3+ on 24 clients with different images, and print the scores.",
    )
    parser.add_argument("--data", type=Path, help="folder with CamVid (default: generated scenes)")
    parser.add_argument("--rounds", type=int, default=16, help="number of rounds (default: 16)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for logs and the report")
    options = parser.parse_args(args)
    if options.rounds < 1:
        parser.error(f"Expected `--rounds` to be at least 1, but got {options.rounds}.")
    from lightning_fed.cli.demo_training import run_demo  # imports torch

    run_demo(data_dir=options.data, rounds=options.rounds, out=options.out)
