"""``lightning-fed merge``: merges checkpoints with the same architecture."""

from __future__ import annotations

import inspect
import sys
from argparse import SUPPRESS
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fed.errors import OptionError
from lightning_fed.matching.checkpoints import read_checkpoint, state_of, with_state
from lightning_fed.matching.merging import MatchedAverage, MergedModel
from lightning_fed.model.entries import batch_norm_layers
from lightning_fed.tasks.base import Task

_DESCRIPTION = (
    "Merge checkpoints with the same architecture: match neurons, then average. The model comes from a recipe (-c) "
    "or --model, with missing hyper-parameters from the first checkpoint; a checkpoint from `lightning-fed fit` "
    "contains the class name. BatchNorm's statistics are measured on the training data of the recipe or of --data."
)
READ_PAST = ("trainer", "optimizer", "lr_scheduler")  # recipe entries ignored by this command


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed merge`` with the command-line arguments ``args``."""
    parser = _parser()
    take_hyperparameters(parser, args)
    config = parser.parse_args(list(args))
    if config.model is None:
        parser.error("Expected a model from `-c RECIPE` or `--model CLASS`, because the first checkpoint names none.")
    out = Path(config.out)
    if any(out.resolve() == Path(path).resolve() for path in config.checkpoints):
        parser.error(f"Expected `--out` to differ from the merged checkpoints, but got {out}.")
    if out.is_dir() or config.out.endswith("/"):
        parser.error(f"Expected `--out` to be a file, but got the folder {config.out}.")
    count = len(config.checkpoints)
    if config.weights is not None and len(config.weights) != count:
        parser.error(f"Expected one weight per checkpoint ({count}), but got {len(config.weights)} `--weights`.")
    if config.seed_everything is not False:
        L.seed_everything(None if config.seed_everything is True else config.seed_everything, True, verbose=False)
    try:
        average = MatchedAverage(**{name: config[name] for name in _options()})
        built = parser.instantiate_classes(config)
    except ValueError as error:
        parser.error(str(error))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)  # reports a wrong path before the slow matching
    except OSError as error:
        parser.error(f"Expected `--out` to be in a writable folder, but got {out}: {error.strerror}.")
    try:
        first = read_checkpoint(config.checkpoints[0])
        before = {name: value.shape for name, value in built.model.state_dict().items()}
        merged = _merge(average, built.model, built.data, config)
    except ValueError as error:
        raise OptionError(str(error)) from error
    torch.save(with_state(first, {**state_of(first), **merged.state}), out)
    is_resized = any(before[name] != value.shape for name, value in merged.state.items())
    sys.stdout.write(_report(merged, out, is_resized))


def _parser() -> LightningArgumentParser:
    parser = LightningArgumentParser(
        prog="lightning-fed merge",
        usage="lightning-fed merge CHECKPOINT CHECKPOINT ... -o CHECKPOINT [-c RECIPE] [options]",
        description=_DESCRIPTION,
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="Lightning checkpoints, or state dicts")
    parser.add_argument("-o", "--out", required=True, metavar="CHECKPOINT", help="the file to write")
    parser.add_argument("-c", "--config", action="config", help="a recipe with the model and data")
    parser.add_argument("--weights", type=list[float] | None, help="weight of each checkpoint, such as [100,250]")
    parser.add_argument(
        "--num_batches", type=int | None, help="number of batches for BatchNorm's statistics; null for all"
    )
    parser.add_argument("--seed_everything", type=bool | int, default=0, help="seed for random numbers in the data")
    parser.add_class_arguments(MatchedAverage, skip={"inputs"}, instantiate=False)
    return add_recipe_arguments(parser)


def add_recipe_arguments(parser: LightningArgumentParser) -> LightningArgumentParser:
    """Adds arguments for a recipe's model and data to a parser, and returns the parser."""
    parser.add_lightning_class_args(L.LightningModule, "model", subclass_mode=True, required=False)
    parser.add_lightning_class_args(L.LightningDataModule, "data", subclass_mode=True, required=False)
    for name in READ_PAST:
        parser.add_argument(f"--{name}", type=Any, help=SUPPRESS)
    return parser


def _options() -> list[str]:
    return [name for name in inspect.signature(MatchedAverage).parameters if name != "inputs"]


def take_hyperparameters(parser: LightningArgumentParser, args: Sequence[str]) -> None:
    """Sets the parser's defaults for the model to the hyper-parameters saved in the first checkpoint of ``args``."""
    first = next((index for index, _ in enumerate(args) if not _is_option_or_value(args, index)), None)
    if first is None:
        return  # the parser reports missing checkpoints or prints the help
    try:
        hyperparameters = dict(read_checkpoint(args[first]).get(L.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    except ValueError as error:
        parser.error(str(error))
    hyperparameters.pop("_instantiator", None)
    named = hyperparameters.pop("_class_path", None)
    for index, arg in enumerate(args):
        if arg == "--model" and index + 1 < len(args):
            named = args[index + 1]
        elif arg.startswith("--model="):
            named = arg.partition("=")[2]
    if named is None or named.startswith("{"):
        return
    try:
        parser.set_defaults({"model": {"class_path": named, "dict_kwargs": hyperparameters}})
    except (AttributeError, ImportError, ValueError) as error:
        parser.error(f"Expected an importable class for the model, but got {named!r}: {error}.")


def _is_option_or_value(args: Sequence[str], index: int) -> bool:
    before = args[index - 1] if index else ""
    return args[index].startswith("-") or (before.startswith("-") and "=" not in before)


def _merge(
    average: MatchedAverage, module: L.LightningModule, data: L.LightningDataModule | None, config: Namespace
) -> MergedModel:
    if batch_norm_layers(module) and average.batch_norm == "recalibrate" and data is None:
        raise OptionError(
            "Expected data to measure BatchNorm's running statistics, but got none: pass `-c RECIPE` or `--data`, or "
            "average the statistics with `--batch_norm average`."
        )
    batches: Iterable[Any] | None = None
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        batches = data.train_dataloader()
        batches = batches if config.num_batches is None else islice(batches, config.num_batches)
    example = module.example_input() if isinstance(module, Task) and batches is None else None
    return average.merge(config.checkpoints, module, example_input=example, data=batches, weights=config.weights)


def _report(merged: MergedModel, out: Path, is_resized: bool) -> str:
    width = max((len(group.name) for group in merged.groups), default=0)
    lines = [f"{'neurons of':{width}}  before  after  matched  agreement  seconds"] if merged.groups else []
    lines += [
        f"{group.name:{width}}  {group.before:6}  {group.width:5}  {group.matched:7.0%}"
        f"  {group.agreement:9.0%}  {group.seconds:7.2f}"
        for group in merged.groups
    ]
    lines.append(f"Merged checkpoint: {out}")
    if is_resized:
        lines.append("The layers have other widths than the model's layers: load the checkpoint with `load_matched`.")
    return "\n".join(lines) + "\n"
