"""Recipes: model, data and federation from a YAML file and the command line, through ``LightningCLI``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jsonargparse import _typehints
from jsonargparse.typing import class_from_function
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# Imported classes can be named without their path in recipes: `class_path: Dirichlet`.
import lightning_fed.algorithms
import lightning_fed.attacks
import lightning_fed.callbacks
import lightning_fed.compression
import lightning_fed.data
import lightning_fed.datasets
import lightning_fed.privacy
import lightning_fed.tasks
from lightning_fed import __version__
from lightning_fed.callbacks.federation import Federation
from lightning_fed.model.entries import Selector
from lightning_fed.steps.update_step import UpdateStep
from lightning_fed.trainer import FederatedTrainer

for _name in dir(lightning_fed.callbacks):
    getattr(lightning_fed.callbacks, _name)  # the names of this door load at the first access

COMMANDS = {
    "fit": "Train a model federatedly; one epoch is one round.",
    "validate": "Evaluate a checkpoint (--ckpt_path) on the validation data; without one, the model as it is made.",
    "test": "Evaluate a checkpoint (--ckpt_path) on the test data; without one, the model as it is made.",
    "predict": "Run a checkpoint (--ckpt_path) on the data to predict; without one, the model as it is made.",
}
"""The commands of ``LightningCLI``, which read a recipe, with their descriptions."""


@contextmanager
def remembered_subclasses() -> Iterator[None]:
    """Looks for a class's subclasses once, until further modules are imported.

    jsonargparse does so for every string where a module may stand as well, such as the name of a network: a hundred
    times for a recipe, while ``nn.Module`` has more than a thousand subclasses. A jsonargparse without this function,
    which is none of its public ones, is only slower.
    """
    find = getattr(_typehints, "get_all_subclass_paths", None)
    if find is None:
        yield
        return
    known: dict[Any, list[str]] = {}

    def look_up(*arguments: Any, **options: Any) -> list[str]:
        key = (arguments, tuple(sorted(options.items())), len(sys.modules))
        if key not in known:
            known[key] = find(*arguments, **options)
        return known[key]

    _typehints.get_all_subclass_paths = look_up
    try:
        yield
    finally:
        _typehints.get_all_subclass_paths = find


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
        commands = dict(COMMANDS)
        if run and isinstance(args, list) and args and args[0] in COMMANDS:
            # A parser for each command that is not asked for would take as long as the one that is.
            commands = {args[0]: COMMANDS[args[0]]}
            subcommands = {name: skipped for name, skipped in self.subcommands().items() if name in commands}
            setattr(self, "subcommands", lambda: subcommands)  # noqa: B010 - a method, for mypy
        with remembered_subclasses():
            super().__init__(
                trainer_class=_TRAINER_CLASS,
                # A run's configuration goes where its logs are. With `logger: false` that is one folder for all runs.
                save_config_kwargs={"overwrite": True},
                seed_everything_default=0,
                parser_kwargs={
                    "prog": "lightning-fed",
                    "usage": "lightning-fed COMMAND [options]",
                    "version": __version__,
                    # Without these an error would be preceded by the names of some sixty options.
                    **{name: {"usage": f"lightning-fed {name} -c RECIPE [options]", "description": text}
                       for name, text in commands.items()},
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
        """Says that there is nothing to test but the model as it is made."""
        self._look_for_checkpoint()

    def before_predict(self) -> None:
        """Says that there is nothing to predict with but the model as it is made."""
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
    steps: Sequence[UpdateStep] = (),
    callbacks: list[Callback] | Callback | None = None,
    enable_progress_bar: bool | None = None,
    **options: Any,
) -> FederatedTrainer:
    """Makes a :class:`~lightning_fed.FederatedTrainer` from a recipe, with the types that the command line checks.

    Args:
        max_rounds: Rounds to train: Lightning's ``max_epochs``.
        federation: A ready callback, instead of ``method`` and the arguments below:
            ``{class_path: lightning_fed.Federation, init_args: {method: fedbn}}``.
        personal: Entries that stay with their client: name patterns, or module types by class path.
        frozen: Entries that never travel, likewise.
        steps: Update steps, the innermost first.
        callbacks: Callbacks beside the federation's own.
        enable_progress_bar: Whether to show a progress bar.
        options: Further arguments of ``FederatedTrainer``, and those of ``L.Trainer``.

    """
    return FederatedTrainer(
        max_rounds=max_rounds,
        federation=federation,
        personal=tuple(personal),  # an empty list is not the default
        frozen=tuple(frozen),
        steps=tuple(steps),
        callbacks=callbacks,
        enable_progress_bar=enable_progress_bar is not False,
        **options,
    )


_TRAINER_CLASS = class_from_function(federated_trainer)  # made once: jsonargparse reads the sources of all callers
