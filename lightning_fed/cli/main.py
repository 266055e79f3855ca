"""The command line: recipes, and the commands around them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed import __version__
from lightning_fed.cli.recipes import absent_recipe, run_recipes
from lightning_fed.data.sample_assignment import PartitionError
from lightning_fed.errors import OptionError
from lightning_fed.recipe import COMMANDS, FederatedCLI

_HELP = """\
usage: lightning-fed COMMAND [options]

Federated training with PyTorch Lightning: one epoch of one Trainer is one round over many clients.

commands:
  demo                      train DeepLabV3+ on 24 clients with generated images; minutes, no download
  fit -c RECIPE             train what a recipe (a YAML file) describes
  validate -c RECIPE        evaluate a checkpoint on validation data: --ckpt_path FILE
  test -c RECIPE            the same on test data
  predict -c RECIPE         run a checkpoint on the data to predict
  compare RECIPE            train with several methods on equal rounds: --methods fedavg fedmargin --seeds 3
  data RECIPE               tell what every client has, and how its images look, before anything trains
  methods                   list the methods and their options
  privacy RECIPE            say what a recipe's rounds cost of the clients' privacy
  merge CKPT CKPT -o CKPT   match the neurons of trained models, and average them
  flower new DIR -c RECIPE  write a Flower app: the same federation, across machines
  recipes [NAME]            list the ready recipes, or print one
  doctor                    tell versions, devices, and what is not installed
  completion SHELL          write completions of this program for bash, zsh or tcsh

  COMMAND --help            all options of a command
  fit --data.help CamVid    the options of a data set; so too --model.help, --trainer.partition.help
  --version                 the version

examples:
  lightning-fed demo
  lightning-fed recipes shapes_deeplab > shapes.yaml
  lightning-fed fit -c shapes.yaml --trainer.max_rounds 5 --trainer.method fairavg

A recipe names a model, data and the options of the Trainer. Each can be changed on the command line, and model and
data may be your own: --model my_project.MyModule. `fit -c RECIPE --print_config` shows everything that can be set.
"""


def main(args: Sequence[str] | None = None) -> None:
    """The program ``lightning-fed``.

    Args:
        args: The command line after the program's name; ``None`` for the process's own.

    Raises:
        SystemExit: If the command line is wrong (status 2), the run cannot work (status 1), or only help was asked for.

    """
    given = sys.argv[1:] if args is None else list(args)
    try:
        _dispatch(given, args is None)
    except SystemExit as stopped:
        hint = absent_recipe(given) if stopped.code else None
        if hint is not None:
            sys.stderr.write(hint)
        raise


def _dispatch(given: Sequence[str], is_process: bool) -> None:
    command = given[0] if given else "--help"
    programs = {
        "demo": _demo,
        "compare": _compare,
        "data": _data,
        "methods": _methods,
        "privacy": _privacy,
        "merge": _merge,
        "flower": _flower,
        "recipes": run_recipes,
        "doctor": _doctor,
        "completion": _completion,
    }
    if command in ("-h", "--help"):
        sys.stdout.write(_HELP)
    elif command == "--version":
        sys.stdout.write(f"lightning-fed {__version__}\n")
    elif command in programs:
        programs[command](given[1:])
    elif command in COMMANDS:
        _run(None if is_process else list(given))
    else:
        known = [*programs, *COMMANDS]
        sys.stderr.write(f"{_HELP}\nerror: Expected a command of {known}, but got {command!r}.\n")
        raise SystemExit(2)


def _run(args: list[str] | None) -> None:
    _find_own_modules()
    try:
        FederatedCLI(args)
    except (FileNotFoundError, MisconfigurationException, OptionError, PartitionError) as error:
        _stop(error)


def _demo(args: Sequence[str]) -> None:
    parser = demo_parser()
    options = parser.parse_args(args)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"Expected `--rounds` to be at least 1, but got {options.rounds}.")
    from lightning_fed.cli.demo import run_demo  # not for those who do not want it

    try:
        run_demo(data_dir=options.data, rounds=options.rounds, out=options.out)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        _stop(error)


def demo_parser() -> argparse.ArgumentParser:
    """Parser of ``demo``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed demo",
        description="Trains DeepLabV3+ on 24 clients whose images differ, and shows how it went.",
    )
    parser.add_argument("--data", type=Path, help="folder with CamVid; without it, scenes of shapes are generated")
    parser.add_argument("--rounds", type=int, help="number of rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for logs and the picture")
    return parser


def _compare(args: Sequence[str]) -> None:
    from lightning_fed.compare.method_options import MethodChoice
    from lightning_fed.compare.plan import Plan, run_comparison
    from lightning_fed.compare.report import write_report

    parser = compare_parser()
    mine, own = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, ())
    options = parser.parse_args(mine)
    _find_own_modules()
    try:
        if options.last < 1 or not 0 < options.target <= 1:
            raise ValueError("Expected `--last` to be at least 1 and `--target` to be in (0, 1].")
        plan = Plan(
            recipe=options.recipe,
            methods=[MethodChoice.parse(text) for part in options.methods for text in _split(part) if text.strip()],
            seeds=range(options.seeds),
            stragglers=options.stragglers,
            out=options.out,
            monitor=options.monitor,
            mode=options.mode,
            test=options.test,
            overrides=own,
        )
    except ValueError as error:
        parser.error(str(error))
    try:
        results = run_comparison(plan)
    except (FileNotFoundError, MisconfigurationException, OptionError, PartitionError) as error:
        _stop(error)
    table = write_report(results, options.out, options.target, options.last)
    sys.stdout.write(f"\n{table}\n\nTables, curves, checkpoints and logs: {options.out}\n")


def compare_parser() -> argparse.ArgumentParser:
    """Parser of ``compare``, for what stands before ``--``."""
    from lightning_fed.compare.method_options import CENTRAL, method_choices

    parser = argparse.ArgumentParser(
        prog="lightning-fed compare",
        usage="lightning-fed compare RECIPE --methods METHOD ... [options] [-- options of fit]",
        description="Trains a recipe with several methods: the same clients, rounds, stragglers and initial weights for"
        " all. Finished runs are kept, an interrupted one goes on where it stopped: the same command again resumes.",
        epilog="What follows `--` is for `lightning-fed fit`, in all runs: -- --trainer.max_rounds 20",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        metavar="METHOD",
        help=f"of {', '.join(method_choices())}; with options: fedprox:mu=0.1 fedmargin:combine=lpm. {CENTRAL} trains"
        " on all data at once. fedper, fedrep, fedbn, silobn and fesem give clients models of their own, which only"
        " `--monitor fed/<metric>/mean` measures",
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0 on (default: %(default)s)")
    parser.add_argument(
        "--stragglers", type=_fractions, help="fractions of the cohort, such as 0,0.5,0.8 (default: the recipe's)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder (default: %(default)s)")
    parser.add_argument("--monitor", help="metric to compare (default: that of the recipe's ModelCheckpoint)")
    parser.add_argument("--mode", choices=["max", "min"], help="which end of `--monitor` is good (default: max)")
    parser.add_argument(
        "--target", type=float, default=0.8, help=f"share of {CENTRAL}'s score to be reached (default: %(default)s)"
    )
    parser.add_argument(
        "--last", type=int, default=1, help="rounds at the end whose mean is the score (default: %(default)s)"
    )
    parser.add_argument("--test", action="store_true", help="evaluate the finished models on the test data")
    return parser


def _data(args: Sequence[str]) -> None:
    from lightning_fed.cli.data import run_data  # not for those who do not want it

    _find_own_modules()
    try:
        run_data(args)
    except (FileNotFoundError, ModuleNotFoundError, MisconfigurationException, OptionError, PartitionError) as error:
        _stop(error)


def _methods(args: Sequence[str]) -> None:
    from lightning_fed.cli.methods import run_methods  # not for those who do not want it

    _find_own_modules()
    run_methods(args)


def _privacy(args: Sequence[str]) -> None:
    from lightning_fed.cli.privacy import run_privacy  # not for those who do not want it

    _find_own_modules()
    try:
        run_privacy(args)
    except (FileNotFoundError, ModuleNotFoundError, MisconfigurationException, OptionError, PartitionError) as error:
        _stop(error)


def _merge(args: Sequence[str]) -> None:
    from lightning_fed.cli.merge import run_merge  # not for those who do not want it

    _find_own_modules()
    try:
        run_merge(args)
    except (FileNotFoundError, MisconfigurationException, OptionError) as error:
        _stop(error)


def _flower(args: Sequence[str]) -> None:
    from lightning_fed.cli.flower import run_flower  # which reads recipes with `FederatedCLI`

    _find_own_modules()
    try:
        run_flower(args)
    except (OSError, ModuleNotFoundError, MisconfigurationException, OptionError) as error:
        _stop(error)


def _doctor(args: Sequence[str]) -> None:
    from lightning_fed.cli.doctor import run_doctor  # not for those who do not want it

    run_doctor(args)


def _completion(args: Sequence[str]) -> None:
    from lightning_fed.cli.completion import run_completion  # which reads the parsers of all commands

    try:
        run_completion(args)
    except ModuleNotFoundError as error:
        _stop(error)


def _split(text: str) -> list[str]:
    """Parts between commas, except inside brackets: ``fedfusion:levels=[2,-1]`` is one method."""
    return re.split(r",(?![^\[]*\])", text)


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"Expected numbers with commas between them, but got {text!r}.") from None


def _find_own_modules() -> None:
    """As `python -m` does: modules of the user's in the current folder can be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _stop(error: Exception) -> NoReturn:
    """Ends the program with the error's text; with the switch, with its traceback."""
    if os.environ.get("JSONARGPARSE_DEBUG", "").lower() == "true":
        raise error
    sys.stderr.write(f"error: {error}\n")
    raise SystemExit(1) from error
