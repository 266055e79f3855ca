"""Splits a recipe into a server program and a client program, and writes the files of a network app."""

from __future__ import annotations

import importlib.util
import keyword
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fed.backends.wire.data import read_data
from lightning_fed.callbacks.federation import Federation
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.errors import OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client

_log = logging.getLogger(__name__)

_ON_CLIENTS = (
    "accelerator", "devices", "precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches",
    "limit_train_batches", "overfit_batches", "deterministic", "benchmark", "detect_anomaly", "sync_batchnorm",
)  # fmt: skip
_NOT_ON_SERVER = (
    "devices",
    "strategy",
    "max_steps",
    "max_time",
    "fast_dev_run",
    "reload_dataloaders_every_n_epochs",
    "max_rounds",
)


@dataclass(frozen=True)
class Recipe:
    """Objects of the server program and the client program, built from one LightningCLI config file."""

    federation: Federation
    model: L.LightningModule
    data: L.LightningDataModule
    server_trainer: dict[str, Any]
    client_trainer: dict[str, Any]
    server_callbacks: list[L.Callback]
    client_callbacks: list[L.Callback]


def read_recipe(path: str | os.PathLike[str], args: Sequence[str] = ()) -> Recipe:
    """Builds the objects of server and client from a LightningCLI config file. ``args`` override the file."""
    from lightning_fed.recipe import FederatedCLI

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # `sys.argv` belongs to Flower's processes
        cli = FederatedCLI(["--config", os.fspath(path), *args], run=False)
    trainer: Any = cli.trainer
    given = {name: value for name, value in cli.config_init["trainer"].items() if value is not None}
    rounds = given.get("max_rounds", given.get("max_epochs"))
    if rounds is None:
        raise OptionError(f"Expected `trainer.max_rounds` in {os.fspath(path)}, but got none.")
    callbacks = given.pop("callbacks", [])
    callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    federations = {"federation", *Federation(seed=0).arguments}
    options = {name: value for name, value in given.items() if name not in federations}
    return Recipe(
        federation=trainer.federation,
        model=cli.model,
        data=cli.datamodule,
        server_trainer={name: options[name] for name in options if name not in _NOT_ON_SERVER} | {"max_epochs": rounds},
        client_trainer={name: options[name] for name in options if name in _ON_CLIENTS},
        server_callbacks=callbacks,
        client_callbacks=[callback for callback in callbacks if isinstance(callback, FederatedCallback)],
    )


def _clients_of(recipe: Recipe) -> Sequence[Client]:
    data = recipe.data
    numbered = getattr(recipe.federation.partition, "num_clients", None)
    if numbered is not None:
        return range(numbered)
    if isinstance(data, FederatedDataModule) and data.clients:
        return list(data.clients)
    try:
        population, _ = read_data(recipe.federation, data)
    except Exception as error:
        _log.warning(
            "Set the number of clients in server.py, because the recipe's data are not on this machine (%s).", error
        )
        return []
    return population.clients


def write_halves(folder: Path, recipe: Path, templates: Mapping[str, str], network: str) -> None:
    """Writes server and client programs for a recipe. ``templates`` maps each program to a template's file."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise OptionError(f"Expected a folder name with a letter at the start, but got {folder.name!r}.")
    installed = importlib.util.find_spec(module)
    if keyword.iskeyword(module) or (installed is not None and installed.origin is not None):
        raise OptionError(
            f"Expected an unused package name, but {module!r} is a Python keyword or package: choose another folder."
        )
    if not recipe.is_file():
        raise FileNotFoundError(f"Expected a recipe (a YAML file), but {str(recipe)!r} does not exist.")
    if any((folder / file).exists() for file in templates):
        raise FileExistsError(f"Expected a new folder, but {str(folder)!r} already contains an app.")
    built = read_recipe(recipe)
    clients = list(_clients_of(built))
    values = {
        "name": name,
        "package": module,
        "clients": clients,
        "count": len(clients),
        "folder": str(Path.cwd() / "runs" / name),
    }
    for file, template in templates.items():
        target = folder / file.format(**values)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            (files("lightning_fed.backends") / network / "template" / template).read_text().format(**values)
        )
        if target.suffix == ".sh":
            target.chmod(0o755)
        if target.name == "server.py":
            shutil.copy(recipe, target.with_name("recipe.yaml"))
            target.with_name("__init__.py").write_text('"""A federation with lightning-fed."""\n')
