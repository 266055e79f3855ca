"""``lightning-fed completion``: a script with which a shell completes commands, options and file names."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fed.cli.data import data_parser
from lightning_fed.cli.doctor import doctor_parser
from lightning_fed.cli.flower import flower_parser
from lightning_fed.cli.main import compare_parser, demo_parser
from lightning_fed.cli.merge import merge_parser
from lightning_fed.cli.methods import methods_parser
from lightning_fed.cli.privacy import privacy_parser
from lightning_fed.cli.recipes import recipe_folder, recipes_parser
from lightning_fed.compare.method_options import method_choices
from lightning_fed.recipe import COMMANDS
from lightning_fed.trainer import FederatedTrainer

_SHELLS = ("bash", "zsh", "tcsh")


def run_completion(args: Sequence[str]) -> None:
    """The command.

    Args:
        args: The command line after ``completion``.

    Raises:
        ModuleNotFoundError: If ``shtab``, the extra ``completion``, is not installed.

    """
    options = completion_parser().parse_args(args)
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Completions need the package `shtab`: pip install 'lightning-fed[completion]'", name=error.name
        ) from error
    sys.stdout.write(shtab.complete(whole_parser(shtab.FILE), options.shell) + "\n")


def completion_parser() -> argparse.ArgumentParser:
    """Parser of the command."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed completion",
        description="Writes completions of commands, options, methods, recipes and file names, for a shell to read.",
        epilog="lightning-fed completion bash > ~/.local/share/bash-completion/completions/lightning-fed",
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    return parser


def whole_parser(file: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Parser of the whole program with all options, as a shell sees it; it is not what reads the command line.

    Args:
        file: Function of each shell that completes names of files.

    """
    program = argparse.ArgumentParser(prog="lightning-fed")
    program.add_argument("--version", action="store_true", help="the version")
    commands = program.add_subparsers()
    parsers = {
        "demo": demo_parser(),
        **dict.fromkeys(COMMANDS, _fit_parser()),
        "compare": compare_parser(),
        "data": data_parser(),
        "methods": methods_parser(),
        "privacy": privacy_parser(),
        "merge": merge_parser(),
        "flower": flower_parser(),
        "recipes": recipes_parser(),
        "doctor": doctor_parser(),
        "completion": completion_parser(),
    }
    for name, parser in parsers.items():
        for action in parser._actions:  # noqa: SLF001 - shtab reads actions, and asks for marks on them
            _mark(name, action, file)
        commands.add_parser(name, parents=[parser], add_help=False, conflict_handler="resolve", help=name)
    return program


def _mark(command: str, action: argparse.Action, file: Mapping[str, Any]) -> None:
    """Marks an option's values: files, methods or recipes."""
    if action.type is Path or action.dest in ("config", "ckpt_path", "checkpoints", "out"):
        action.complete = file  # type: ignore[attr-defined]
    elif action.dest in ("methods", "trainer.method"):
        action.choices = list(method_choices())
    elif command == "recipes" and action.dest == "name":
        action.choices = sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def _fit_parser() -> argparse.ArgumentParser:
    """The options of a recipe that are the same for all models and data."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", "--config", metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument("--ckpt_path", help="the checkpoint")
    for name in ("print_config", "seed_everything", "model", "data", "model.help", "data.help"):
        parser.add_argument(f"--{name}")
    arguments = inspect.signature(FederatedTrainer).parameters | inspect.signature(L.Trainer).parameters
    for name, argument in arguments.items():
        if argument.kind is not argument.VAR_KEYWORD:
            parser.add_argument(f"--trainer.{name}")
    return parser
