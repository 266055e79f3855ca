"""Merges and adapts checkpoints, for ``lightning-fed merge`` and ``lightning-fed adapt``."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fed.batch_norm.measurement import adapt
from lightning_fed.errors import OptionError
from lightning_fed.matching.checkpoints import load_matched, read_checkpoint, state_of, with_state
from lightning_fed.matching.merging import MatchedAverage, MergedModel
from lightning_fed.model.entries import batch_norm_layers
from lightning_fed.tasks.base import Task

_UNUSED = ("trainer", "optimizer", "lr_scheduler")  # recipe entries for other commands


def merge_checkpoints(options: Namespace, model_args: Sequence[str]) -> None:
    """Merges checkpoints into one. ``model_args`` give config file, model and data."""
    first = read_checkpoint(options.checkpoints[0])
    config = _build_model("merge", model_args, first, ("model",))
    names = ("mode", "order", "score", "gamma", "passes", "sweeps", "batch_norm", "seed")
    average = MatchedAverage(**{name: getattr(options, name) for name in names})
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)  # reports a wrong path before the slow matching
    except OSError as error:
        raise OptionError(
            f"Expected `--out` to be in a writable folder, but got {options.out}: {error.strerror}."
        ) from error
    before = {name: value.shape for name, value in config.model.state_dict().items()}
    if batch_norm_layers(config.model) and average.batch_norm == "recalibrate" and config.data is None:
        raise OptionError(
            "Expected data to measure BatchNorm's running statistics, but got none: pass `-c RECIPE` or `--data`, or "
            "average the statistics with `--batch_norm average`."
        )
    batches = None if config.data is None else _batches(config.data, options.num_batches)
    example = config.model.example_input() if isinstance(config.model, Task) and batches is None else None
    merged = average.merge(
        options.checkpoints, config.model, example_input=example, data=batches, weights=options.weights
    )
    torch.save(with_state(first, {**state_of(first), **merged.state}), options.out)
    sys.stdout.write(_report(merged, options.out))
    if any(before[name] != value.shape for name, value in merged.state.items()):
        sys.stdout.write(
            "The layers have other widths than the model's layers: load the checkpoint with `load_matched`.\n"
        )


def adapt_checkpoint(options: Namespace, model_args: Sequence[str]) -> None:
    """Saves a checkpoint with BatchNorm statistics of new data. ``model_args`` give config file, model and data."""
    content = read_checkpoint(options.checkpoint)
    config = _build_model("adapt", model_args, content, ("model", "data"))
    adapted = adapt(load_matched(config.model, content), _batches(config.data, options.num_batches))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(with_state(content, {**state_of(content), **adapted.state_dict()}), options.out)
    sys.stdout.write(
        f"Measured the statistics of {len(batch_norm_layers(adapted))} BatchNorm layers.\nCheckpoint: {options.out}\n"
    )


def _build_model(command: str, args: Sequence[str], content: Mapping[str, Any], required: Sequence[str]) -> Any:
    # Missing hyper-parameters come from the checkpoint.
    parser = LightningArgumentParser(prog=f"lightning-fed {command}")
    parser.add_argument("-c", "--config", "--recipe", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=0)
    parser.add_lightning_class_args(L.LightningModule, "model", subclass_mode=True, required=False)
    parser.add_lightning_class_args(L.LightningDataModule, "data", subclass_mode=True, required=False)
    for name in _UNUSED:
        parser.add_argument(f"--{name}", type=Any, help=SUPPRESS)
    hyperparameters = dict(content.get(L.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    hyperparameters.pop("_instantiator", None)
    saved_class = hyperparameters.pop("_class_path", None)
    parts = [part for arg in args for part in arg.split("=", 1)]
    named = dict(pairwise(parts)).get("--model", saved_class)
    if named is not None and not named.startswith("{"):
        try:
            parser.set_defaults({"model": {"class_path": named, "dict_kwargs": hyperparameters}})
        except (AttributeError, ImportError, ValueError) as error:
            parser.error(f"Expected an importable class for the model, but got {named!r}: {error}.")
    config = parser.parse_args(list(args))
    for name in required:
        if config[name] is None:
            parser.error(f"Expected `-c RECIPE` or `--{name} CLASS`, but got neither.")
    if config.seed_everything is not False:
        L.seed_everything(None if config.seed_everything is True else config.seed_everything, True, verbose=False)
    return parser.instantiate_classes(config)


def _batches(data: L.LightningDataModule, count: int | None) -> Iterable[Any]:
    data.prepare_data()
    data.setup("fit")
    return islice(data.train_dataloader(), count)


def _report(merged: MergedModel, out: Path) -> str:
    width = max((len(group.name) for group in merged.groups), default=0)
    lines = [f"{'neurons of':{width}}  before  after  matched  agreement  seconds"] if merged.groups else []
    lines += [
        f"{group.name:{width}}  {group.before:6}  {group.width:5}  {group.matched:7.0%}"
        f"  {group.agreement:9.0%}  {group.seconds:7.2f}"
        for group in merged.groups
    ]
    return "\n".join([*lines, f"Merged checkpoint: {out}", ""])
