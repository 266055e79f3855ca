"""The command line."""

from lightning_fed.cli.main import main as main

__all__ = [
    "main",
]
