"""``lightning-fed adapt``: measures a checkpoint's BatchNorm statistics on data from a new site."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fed.batch_norm.measurement import adapt
from lightning_fed.cli.merge import add_recipe_arguments, take_hyperparameters
from lightning_fed.errors import OptionError
from lightning_fed.matching.checkpoints import load_matched, read_checkpoint, state_of, with_state
from lightning_fed.model.entries import batch_norm_layers

_DESCRIPTION = (
    "Measure a checkpoint's BatchNorm statistics on unlabelled data from a new site. The model comes from a recipe "
    "(-c, --recipe) or --model; a checkpoint from `lightning-fed fit` contains the class name. The command reads the "
    "training data of the recipe or of --data, and ignores labels."
)


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed adapt`` with the command-line arguments ``args``."""
    parser = _parser()
    take_hyperparameters(parser, args)
    config = parser.parse_args(list(args))
    for name in ("model", "data"):
        if config[name] is None:
            parser.error(f"Expected `-c RECIPE` or `--{name} CLASS`, but got neither.")
    source = Path(config.checkpoint)
    out = source.with_name(f"{source.stem}-adapted{source.suffix}") if config.out is None else Path(config.out)
    if out.resolve() == source.resolve():
        parser.error(f"Expected `--out` to differ from the checkpoint, but got {out}.")
    L.seed_everything(config.seed_everything, verbose=False)
    content = read_checkpoint(config.checkpoint)
    built = parser.instantiate_classes(config)
    try:
        module = load_matched(built.model, content)
        built.data.prepare_data()
        built.data.setup("fit")
        adapted = adapt(module, islice(built.data.train_dataloader(), config.num_batches))
    except ValueError as error:
        raise OptionError(str(error)) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(with_state(content, {**state_of(content), **adapted.state_dict()}), out)
    sys.stdout.write(
        f"Measured the statistics of {len(batch_norm_layers(adapted))} BatchNorm layers.\nCheckpoint: {out}\n"
    )


def _parser() -> LightningArgumentParser:
    parser = LightningArgumentParser(
        prog="lightning-fed adapt",
        usage="lightning-fed adapt CHECKPOINT [-o CHECKPOINT] [--recipe RECIPE] [--data CLASS] [options]",
        description=_DESCRIPTION,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a Lightning checkpoint, or a state dict")
    parser.add_argument("-o", "--out", metavar="CHECKPOINT", help="the file to write (default: CHECKPOINT-adapted)")
    parser.add_argument("-c", "--recipe", action="config", help="a recipe with the model and the data")
    parser.add_argument("--num_batches", type=int | None, help="number of batches; null for all")
    parser.add_argument("--seed_everything", type=int, default=0, help="seed for random numbers in the data")
    return add_recipe_arguments(parser)
