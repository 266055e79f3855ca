"""The command line: recipes through ``LightningCLI``, and the demo."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# Imported classes can be named without their path in recipes: `class_path: Dirichlet`.
import lightning_fed.algorithms
import lightning_fed.callbacks
import lightning_fed.data
import lightning_fed.datasets
import lightning_fed.tasks  # noqa: F401
from lightning_fed import __version__
from lightning_fed.callbacks.federation import Federation
from lightning_fed.data.sample_assignment import PartitionError
from lightning_fed.errors import OptionError
from lightning_fed.model.entries import Selector
from lightning_fed.trainer import FederatedTrainer

_COMMANDS = {
    "fit": "Train a model federatedly; one epoch is one round.",
    "validate": "Evaluate a checkpoint (--ckpt_path) on the validation data; without one, the model as it is made.",
    "test": "Evaluate a checkpoint (--ckpt_path) on the test data; without one, the model as it is made.",
    "predict": "Run a checkpoint (--ckpt_path) on the data to predict; without one, the model as it is made.",
}

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
  merge CKPT CKPT -o CKPT   match the neurons of trained models, and average them
  flower new DIR -c RECIPE  write a Flower app: the same federation, across machines

  COMMAND --help            all options of a command
  fit --data.help CamVid    the options of a data set; so too --model.help, --trainer.partition.help
  --version                 the version

examples:
  lightning-fed demo
  lightning-fed fit -c recipes/shapes_deeplab.yaml --trainer.max_rounds 5 --trainer.aggregator fairavg

A recipe names a model, data and the options of the Trainer. Each can be changed on the command line, and model and
data may be your own: --model my_project.MyModule. `fit -c RECIPE --print_config` shows everything that can be set.
"""


class FederatedCLI(LightningCLI):
    """``LightningCLI`` with a :class:`~lightning_fed.FederatedTrainer`, and errors without a traceback.

    Model and data are named by their class path, or by name alone where lightning_fed has them. The environment
    variable ``JSONARGPARSE_DEBUG=true`` brings the tracebacks back.

    Args:
        args: The command line; ``None`` for the process's own.
        run: Whether the command line starts with a command, which is run; otherwise only the objects are built.

    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        self._kept_path: str | None = None
        super().__init__(
            trainer_class=federated_trainer,
            # A run's configuration goes where its logs are. With `logger: false` that is one folder for all runs.
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_kwargs={
                "prog": "lightning-fed",
                "usage": "lightning-fed COMMAND [options]",
                "version": __version__,
                # Without these an error would be preceded by the names of some sixty options.
                **{name: {"usage": f"lightning-fed {name} -c RECIPE [options]", "description": text}
                   for name, text in _COMMANDS.items()},
            },
            args=args,
            run=run,
        )  # fmt: skip

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Reads the command line; a checkpoint's hyper-parameters replace the recipe's where it says whose they are.

        Lightning takes those of a checkpoint that was saved without its command line for another recipe's model, which
        they are not: they do not name a class.
        """
        super().parse_arguments(parser, args)
        own = self.config.get(self.config.get("subcommand", ""), {})
        path = own.get("ckpt_path")
        if path and Path(path).is_file():
            saved = torch.load(path, weights_only=True, map_location="cpu", mmap=True).get("hyper_parameters")
            if saved and "_class_path" not in saved:
                self._kept_path, own["ckpt_path"] = path, None
                sys.stderr.write(
                    f"note: {path} was saved from Python: the model is the recipe's, with its arguments.\n"
                )

    def before_instantiate_classes(self) -> None:
        """Takes up the checkpoint that Lightning was not to look into."""
        if self._kept_path is not None:
            self.config[self.config.subcommand].ckpt_path = self._kept_path

    def instantiate_classes(self) -> None:
        """Builds data, model and Trainer; a value that one of them refuses is an error of the command line."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            self.parser.error(str(error), error)

    def before_validate(self) -> None:
        """Says that there is nothing to evaluate but the model as it is made."""
        self._look_for_checkpoint()

    def before_test(self) -> None:
        """Likewise."""
        self._look_for_checkpoint()

    def before_predict(self) -> None:
        """Likewise."""
        self._look_for_checkpoint()

    def _look_for_checkpoint(self) -> None:
        if self.config[self.subcommand].ckpt_path is None:
            sys.stderr.write("warning: There is no `--ckpt_path`: the model has the weights that it is made with.\n")

    def predict(self, **arguments: Any) -> None:
        """Predicts, and saves the list of the batches' predictions as ``predictions.pt`` beside the logs.

        With several processes each saves its own batches (``predictions_0.pt``, ...); with ``--return_predictions
        false`` nothing is saved, which is for a ``BasePredictionWriter`` among the callbacks.

        Args:
            arguments: Those of ``Trainer.predict``.

        """
        predictions = self.trainer.predict(**arguments)
        if predictions:
            rank = f"_{self.trainer.global_rank}" if self.trainer.world_size > 1 else ""
            path = Path(self.trainer.log_dir or self.trainer.default_root_dir) / f"predictions{rank}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(predictions, path)
            sys.stdout.write(f"Predictions of {len(predictions)} batches: {path}\n")


def federated_trainer(
    *,
    max_rounds: int | None = None,
    federation: Federation | None = None,
    personal: Sequence[Selector] = (),
    frozen: Sequence[Selector] = (),
    callbacks: list[Callback] | Callback | None = None,
    enable_progress_bar: bool | None = None,
    **options: Any,
) -> FederatedTrainer:
    """Federation and Trainer.

    A :class:`~lightning_fed.FederatedTrainer`, with the types that the command line checks.

    Args:
        max_rounds: Rounds to train: Lightning's ``max_epochs``.
        federation: A ready callback, such as a preset, instead of the arguments below:
            ``{class_path: lightning_fed.algorithms.FedPer, init_args: {head: "head.*"}}``.
        personal: Entries that stay with their client: name patterns, or module types by class path.
        frozen: Entries that never travel, likewise.
        callbacks: Callbacks beside the federation's own.
        enable_progress_bar: Whether to show a progress bar.
        options: Further arguments of ``FederatedTrainer``, and those of ``L.Trainer``.

    """
    return FederatedTrainer(
        max_rounds=max_rounds,
        federation=federation,
        personal=tuple(personal),  # an empty list is not the default
        frozen=tuple(frozen),
        callbacks=callbacks,
        enable_progress_bar=enable_progress_bar is not False,
        **options,
    )


def main(args: Sequence[str] | None = None) -> None:
    """The program ``lightning-fed``.

    Args:
        args: The command line after the program's name; ``None`` for the process's own.

    Raises:
        SystemExit: If the command line is wrong (status 2), the run cannot work (status 1), or only help was asked for.

    """
    given = sys.argv[1:] if args is None else list(args)
    command = given[0] if given else "--help"
    if command in ("-h", "--help"):
        sys.stdout.write(_HELP)
    elif command == "--version":
        sys.stdout.write(f"lightning-fed {__version__}\n")
    elif command == "demo":
        _demo(given[1:])
    elif command == "compare":
        _compare(given[1:])
    elif command == "merge":
        _merge(given[1:])
    elif command == "flower":
        _flower(given[1:])
    elif command in _COMMANDS:
        _run(None if args is None else given)
    else:
        known = ["demo", "compare", "merge", "flower", *_COMMANDS]
        sys.stderr.write(f"{_HELP}\nerror: Expected a command of {known}, but got {command!r}.\n")
        raise SystemExit(2)


def _run(args: list[str] | None) -> None:
    _find_own_modules()
    try:
        FederatedCLI(args)
    except (FileNotFoundError, MisconfigurationException, OptionError, PartitionError) as error:
        _stop(error)


def _demo(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-fed demo",
        description="Trains DeepLabV3+ on 24 clients whose images differ, and shows how it went.",
    )
    parser.add_argument("--data", type=Path, help="folder with CamVid; without it, scenes of shapes are generated")
    parser.add_argument("--rounds", type=int, help="number of rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for logs and the picture")
    options = parser.parse_args(args)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"Expected `--rounds` to be at least 1, but got {options.rounds}.")
    from lightning_fed.cli.demo import run_demo  # not for those who do not want it

    try:
        run_demo(data_dir=options.data, rounds=options.rounds, out=options.out)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        _stop(error)


def _compare(args: Sequence[str]) -> None:
    # Which builds what `FederatedCLI` builds.
    from lightning_fed.compare.methods import CENTRAL, Method, method_names
    from lightning_fed.compare.plan import Plan, run_comparison
    from lightning_fed.compare.report import write_report

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
        help=f"of {', '.join(method_names())}; with options: fedprox:mu=0.1 fedmargin:combine=lpm. {CENTRAL} trains on"
        " all data at once. fedper, fedrep, fedbn and fesem give clients models of their own, which only"
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
    mine, own = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, ())
    options = parser.parse_args(mine)
    try:
        if options.last < 1 or not 0 < options.target <= 1:
            raise ValueError("Expected `--last` to be at least 1 and `--target` to be in (0, 1].")
        plan = Plan(
            recipe=options.recipe,
            methods=[Method.parse(text) for part in options.methods for text in _split(part) if text.strip()],
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
    _find_own_modules()
    try:
        results = run_comparison(plan)
    except (FileNotFoundError, MisconfigurationException, OptionError, PartitionError) as error:
        _stop(error)
    table = write_report(results, options.out, options.target, options.last)
    sys.stdout.write(f"\n{table}\n\nTables, curves, checkpoints and logs: {options.out}\n")


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


def _split(text: str) -> list[str]:
    """What is between commas, but for those in brackets: ``fedfusion:levels=[2,-1]`` is one method."""
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
