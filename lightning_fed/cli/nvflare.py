"""``lightning-fed nvflare``: writes an NVFLARE job from a recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_TEMPLATES = {
    "meta.json": "meta.json.txt",
    "app/config/config_fed_server.json": "config_fed_server.json.txt",
    "app/config/config_fed_client.json": "config_fed_client.json.txt",
    "app/custom/{package}/server.py": "server.py.txt",
    "app/custom/{package}/client.py": "client.py.txt",
}
_NEXT = """\
{folder} contains a job for {recipe}. Next steps:
  1. Try the job on this machine, with the recipe's data:
       nvflare simulator {folder} -w workspace -c site-1,site-2 -t 2
  2. In {folder}/app/custom, add the clients' data to client.py, and the sites' names to server.py.
  3. Submit the job to an NVFLARE server:
       nvflare job submit -j {folder}
More: https://lightning-fed.github.io/lightning-fed/guides/nvflare/
"""


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed nvflare`` with the command-line arguments ``args``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed nvflare", description="Write a federation across machines on NVFLARE."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="write an NVFLARE job for a recipe")
    new.add_argument("folder", type=Path, help="the new folder")
    new.add_argument("-c", "--config", type=Path, required=True, metavar="RECIPE", help="the recipe, a YAML file")
    options = parser.parse_args(args)
    from lightning_fed.cli.recipe_halves import write_halves  # imports torch

    write_halves(options.folder, options.config, _TEMPLATES, "nvflare")
    sys.stdout.write(_NEXT.format(recipe=options.config, folder=options.folder))
