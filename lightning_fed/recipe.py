"""Reads recipes: YAML files with model, data and federation."""

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

# Recipes can use imported classes without their import path: `class_path: Dirichlet`.
import lightning_fed.algorithms
import lightning_fed.attacks
import lightning_fed.callbacks
import lightning_fed.compression
import lightning_fed.data
import lightning_fed.datasets
import lightning_fed.privacy
import lightning_fed.steps
import lightning_fed.tasks
from lightning_fed import __version__
from lightning_fed.callbacks.federation import Federation
from lightning_fed.lightning.internals import callbacks_of
from lightning_fed.model.entries import Selector
from lightning_fed.report.callback import Report
from lightning_fed.steps.update_step import UpdateStep
from lightning_fed.trainer import FederatedTrainer

for _door in (lightning_fed.callbacks, lightning_fed.data, lightning_fed.steps):
    for _name in dir(_door):
        getattr(_door, _name)  # names are loaded on first access

# Recipe commands of `LightningCLI`, with descriptions.
COMMANDS = {
    "fit": "Train a model in federated rounds; one epoch is one round.",
    "validate": "Evaluate a checkpoint (--ckpt_path), or else the initial model, on the validation data.",
    "test": "Evaluate a checkpoint (--ckpt_path), or else the initial model, on the test data.",
    "predict": "Run a checkpoint (--ckpt_path), or else the initial model, on the prediction data.",
}


@contextmanager
def remembered_subclasses() -> Iterator[None]:
    """Caches the subclasses of each class, so that recipes are parsed faster.

    Without the cache, jsonargparse searches all subclasses of ``nn.Module`` for each network name.
    """
    # A private function of jsonargparse. If a version lacks the function, parsing is slower.
    search = getattr(_typehints, "get_all_subclass_paths", None)
    if search is None:
        yield
        return
    cache: dict[Any, list[str]] = {}

    def look_up(*arguments: Any, **options: Any) -> list[str]:
        key = (arguments, tuple(sorted(options.items())), len(sys.modules))  # an import may add classes
        if key not in cache:
            cache[key] = search(*arguments, **options)
        return cache[key]

    _typehints.get_all_subclass_paths = look_up
    try:
        yield
    finally:
        _typehints.get_all_subclass_paths = search


class FederatedCLI(LightningCLI):
    """Command line for federated training: ``LightningCLI`` with a :class:`~lightning_fed.FederatedTrainer`.

    Recipes (YAML files) name model and data by class path. For a class in lightning_fed, the class name is enough.
    Errors have no traceback, unless the environment variable ``JSONARGPARSE_DEBUG`` is ``true``.

    Args:
        args: Command line arguments; if ``None``, the arguments of the process.
        run: Whether to run the command in the first argument. Otherwise the objects are only created.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        self._hidden_path: str | None = None
        commands = dict(COMMANDS)
        if run and isinstance(args, list) and args and args[0] in COMMANDS:
            # Creates the parser only for the requested command, because all parsers together would multiply the
            # start-up time.
            commands = {args[0]: COMMANDS[args[0]]}
            subcommands = {name: skipped for name, skipped in self.subcommands().items() if name in commands}
            setattr(self, "subcommands", lambda: subcommands)  # noqa: B010 - a method, for mypy
        with remembered_subclasses():
            super().__init__(
                trainer_class=_TRAINER_CLASS,
                # The configuration is saved next to the logs. With `logger: false` all runs share one folder.
                save_config_kwargs={"overwrite": True},
                seed_everything_default=0,
                parser_kwargs={
                    "prog": "lightning-fed",
                    "usage": "lightning-fed COMMAND [options]",
                    "version": __version__,
                    # Otherwise each error would start with about sixty option names.
                    **{name: {"usage": f"lightning-fed {name} -c RECIPE [options]", "description": text}
                       for name, text in commands.items()},
                },
                args=args,
                run=run,
            )  # fmt: skip

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses the command line. Takes the model from the config file if a Python script saved ``ckpt_path``."""
        super().parse_arguments(parser, args)
        options = self.config.get(self.config.get("subcommand", ""), {})
        path = options.get("ckpt_path")
        if path and Path(path).is_file():
            saved = torch.load(path, weights_only=True, map_location="cpu", mmap=True).get("hyper_parameters")
            # Hyper-parameters without a class come from a fit in Python. Lightning would pass these to the recipe's
            # model.
            if saved and "_class_path" not in saved:
                self._hidden_path, options["ckpt_path"] = path, None
                sys.stderr.write(f"note: {path} was saved from Python: the model and arguments come from the recipe.\n")

    def before_instantiate_classes(self) -> None:
        if self._hidden_path is not None:
            self.config[self.config.subcommand].ckpt_path = self._hidden_path

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            self.parser.error(str(error), error)

    def before_fit(self) -> None:
        callbacks = callbacks_of(self.trainer)
        if not any(isinstance(callback, Report) for callback in callbacks):
            callbacks.append(Report())

    def before_validate(self) -> None:
        self._look_for_checkpoint()

    def before_test(self) -> None:
        self._look_for_checkpoint()

    def before_predict(self) -> None:
        self._look_for_checkpoint()

    def _look_for_checkpoint(self) -> None:
        if self.config[self.subcommand].ckpt_path is None:
            sys.stderr.write("warning: No `--ckpt_path`: the model has its initial weights.\n")

    def predict(self, **arguments: Any) -> None:
        """Runs ``predict``, and saves the predictions of all batches in ``predictions.pt`` next to the logs.

        With several processes, each process writes a file (``predictions_0.pt``, ...). The option
        ``--return_predictions false`` disables saving.
        """
        predictions = self.trainer.predict(**arguments)
        if predictions:
            rank = f"_{self.trainer.global_rank}" if self.trainer.world_size > 1 else ""
            path = Path(self.trainer.log_dir or self.trainer.default_root_dir) / f"predictions{rank}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(predictions, path)
            sys.stdout.write(f"Saved the predictions of {len(predictions)} batches: {path}\n")


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
    """Creates a :class:`~lightning_fed.FederatedTrainer` from the arguments in a recipe.

    Args:
        max_rounds: Number of rounds: Lightning's ``max_epochs``.
        federation: A :class:`~lightning_fed.Federation`, instead of ``method``, ``personal`` and other options. In a
            recipe: ``{class_path: lightning_fed.Federation, init_args: ...}``.
        personal: Tensors trained on each client and never sent: name patterns or module types (class paths).
        frozen: Tensors neither trained nor sent: name patterns or module types (class paths).
        steps: Update steps, in order of execution on the client.
        callbacks: Callbacks in addition to the federation.
        enable_progress_bar: Whether to show a progress bar.
        options: Further arguments for ``FederatedTrainer`` and ``L.Trainer``.
    """
    return FederatedTrainer(
        max_rounds=max_rounds,
        federation=federation,
        personal=tuple(personal),  # the default is an empty tuple
        frozen=tuple(frozen),
        steps=tuple(steps),
        callbacks=callbacks,
        enable_progress_bar=enable_progress_bar is not False,
        **options,
    )


# The annotations tell `LightningCLI` how to parse a recipe.
_TRAINER_CLASS = class_from_function(federated_trainer)  # created once: jsonargparse reads the sources of all callers
