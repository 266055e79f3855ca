"""Entry point of the command line, for training a recipe and for the other commands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from lightning_fed import __version__
from lightning_fed.argument_checks import check_option
from lightning_fed.cli.recipes import absent_recipe
from lightning_fed.errors import OptionError

PROGRAMS = (  # names of modules
    "demo", "compare", "study", "data", "methods", "privacy", "merge", "adapt", "flower", "nvflare", "audit", "recipes",
    "doctor", "rehearse", "replay", "certify",
)  # fmt: skip
_RECIPE_COMMANDS = ("fit", "validate", "test", "predict")  # from LightningCLI

_HELP = """\
usage: lightning-fed COMMAND [options]

Federated training with PyTorch Lightning: one epoch of one Trainer is one round over many clients.

commands:
  demo                      train DeepLabV3+ on 24 clients with generated images; minutes, no download
  fit -c RECIPE             train with a recipe (a YAML file)
  validate -c RECIPE        evaluate a checkpoint on validation data: --ckpt_path FILE
  test -c RECIPE            evaluate a checkpoint on test data
  predict -c RECIPE         run a checkpoint on the data to predict
  compare RECIPE            train with several methods on equal rounds: --methods fedavg fedmargin --seeds 3
  study RECIPE              test at each site if the federation helps: --methods local fedavg central
  data RECIPE               show each client's data and images, without training
  methods                   list the methods and their options
  privacy RECIPE            compute the privacy budget of a recipe
  merge CKPT CKPT -o CKPT   average trained models with matched neurons
  adapt CKPT -c RECIPE      measure BatchNorm's statistics on data from a new site: --data CLASS
  flower new DIR -c RECIPE  write a Flower app, to train across machines
  nvflare new DIR -c RECIPE write an NVFLARE job, to train across machines
  rehearse RECIPE           rehearse a deployment in virtual time: --sites sites.toml --seeds 1000
  replay RUN ROUND          repeat a kept round: --without SITE --rule NAME
  certify RUN               write or verify a signed certificate of a run
  audit RECORD              show and verify a site's record of sent answers
  recipes [NAME]            list the ready recipes, or print one
  doctor                    print versions, devices, and missing extras; --flower: check a connection

  COMMAND --help            all options of a command
  fit --data.help CamVid    options of a data set; also --model.help, --trainer.partition.help
  --version                 the version

examples:
  lightning-fed demo
  lightning-fed recipes shapes_deeplab > shapes.yaml
  lightning-fed fit -c shapes.yaml --trainer.max_rounds 5 --trainer.method fairavg

A recipe names model, data and Trainer options. The command line can override each value. Custom models and data
work, too: --model my_project.MyModule. `fit -c RECIPE --print_config` shows all options.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the program ``lightning-fed`` with ``args``, by default the process's arguments."""
    arguments = sys.argv[1:] if args is None else list(args)
    try:
        _dispatch(arguments, args is None)
    except SystemExit as stopped:
        hint = absent_recipe(arguments) if stopped.code else None
        if hint is not None:
            sys.stderr.write(hint)
        raise


def _dispatch(arguments: Sequence[str], is_process: bool) -> None:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return
    if command == "--version":
        sys.stdout.write(f"lightning-fed {__version__}\n")
        return
    _find_own_modules()
    try:
        check_option("COMMAND", command, [*PROGRAMS, *_RECIPE_COMMANDS])
    except ValueError as error:
        sys.stderr.write(f"{_HELP}\nerror: {error}\n")
        raise SystemExit(2) from error
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)
    try:
        if command in _RECIPE_COMMANDS:
            recipe = import_module("lightning_fed.recipe")  # imports torch; some commands do not need torch
            recipe.FederatedCLI(None if is_process else list(arguments))
        else:
            import_module(f"lightning_fed.cli.{command}").run(arguments[1:])
    except Exception as error:
        if not _is_mistake(error, command):
            raise
        _stop(error)


def _is_mistake(error: Exception, command: str) -> bool:
    # The user can correct these errors, so the program prints no traceback.
    if isinstance(error, FileNotFoundError | OptionError):
        return True
    if command not in _RECIPE_COMMANDS and isinstance(error, OSError | ModuleNotFoundError):
        return True
    from lightning.fabric.utilities.exceptions import MisconfigurationException  # imports torch

    return isinstance(error, MisconfigurationException)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("GPU available", "TPU available", "💡 Tip"))


def _find_own_modules() -> None:
    # Like `python -m`: recipes can refer to modules in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _stop(error: Exception) -> NoReturn:
    # The environment variable shows tracebacks, as in LightningCLI.
    if os.environ.get("JSONARGPARSE_DEBUG", "").lower() == "true":
        raise error
    text = str(error)
    unreadable = FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError
    if isinstance(error, unreadable) and error.filename is not None:
        text = f"Expected a readable file, but got {error.filename!r} ({error.strerror}): correct the path."
    sys.stderr.write(f"error: {text}\n")
    raise SystemExit(1) from error
