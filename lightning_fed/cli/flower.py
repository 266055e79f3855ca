"""``lightning-fed flower``: a Flower app of a recipe, and the long-lived process beside a client's data."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fed.callbacks.federation import Federation
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.errors import OptionError
from lightning_fed.rounds.federated_callback import FederatedCallback

_ON_CLIENTS = (
    "accelerator", "devices", "precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches",
    "limit_train_batches", "deterministic", "benchmark", "detect_anomaly",
)  # fmt: skip
_NOT_ON_SERVER = (
    "strategy",
    "max_steps",
    "max_time",
    "fast_dev_run",
    "reload_dataloaders_every_n_epochs",
    "max_rounds",
)


@dataclass(frozen=True)
class Recipe:
    """Contents of a recipe, for the two halves of a federation.

    Args:
        federation: The federation.
        model: The LightningModule.
        data: The datamodule.
        server_trainer: Arguments of the server's ``L.Trainer``.
        client_trainer: Arguments of the clients' ``L.Trainer``: those that concern training.
        server_callbacks: The recipe's callbacks.
        client_callbacks: The callbacks that take part in a visit.

    """

    federation: Federation
    model: L.LightningModule
    data: L.LightningDataModule
    server_trainer: dict[str, Any]
    client_trainer: dict[str, Any]
    server_callbacks: list[L.Callback]
    client_callbacks: list[L.Callback]


def read_recipe(path: str | os.PathLike[str], args: Sequence[str] = ()) -> Recipe:
    """Builds the objects of a recipe (a YAML file as ``lightning-fed fit`` takes it).

    Args:
        path: The recipe.
        args: Options that change it, as on the command line.

    Raises:
        OptionError: If it does not give the number of rounds.

    """
    from lightning_fed.recipe import FederatedCLI

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # Flower's processes have arguments too
        cli = FederatedCLI(["--config", os.fspath(path), *args], run=False)
    trainer: Any = cli.trainer
    given = {name: value for name, value in cli.config_init["trainer"].items() if value is not None}
    rounds = given.get("max_rounds", given.get("max_epochs"))
    if rounds is None:
        raise OptionError(f"Expected `trainer.max_rounds` in {os.fspath(path)}, but there is none.")
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


def write_app(folder: Path, recipe: Path) -> None:
    """Writes a Flower app.

    Args:
        folder: Where to; made if it does not exist.
        recipe: The recipe that it is for, which is copied.

    Raises:
        FileExistsError: If there is an app already.
        FileNotFoundError: If there is no such recipe.
        OptionError: If the folder's name cannot be that of a package.

    """
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    package = name.replace("-", "_")
    if not package.isidentifier():
        raise OptionError(f"Expected a folder whose name begins with a letter, but got {folder.name!r}.")
    installed = importlib.util.find_spec(package)
    if keyword.iskeyword(package) or (installed is not None and installed.origin is not None):
        raise OptionError(f"Expected a folder with a name of its own, but {package!r} is a word or package of Python.")
    if not recipe.is_file():
        raise FileNotFoundError(f"Expected a recipe, a YAML file, but there is no {str(recipe)!r}.")
    if (folder / "pyproject.toml").exists():
        raise FileExistsError(f"There is an app in {str(folder)!r} already.")
    built = read_recipe(recipe)
    scripts = ("start_server.sh", "start_node.sh")
    has_clients = isinstance(built.data, FederatedDataModule) and len(built.data.clients)
    values = {
        "name": name,
        "package": package,
        "clients": has_clients or getattr(built.federation.partition, "num_clients", 2),
        "folder": str(Path.cwd() / "runs" / name),
    }
    (folder / package).mkdir(parents=True, exist_ok=True)
    shutil.copy(recipe, folder / package / "recipe.yaml")
    (folder / package / "__init__.py").write_text('"""A federation with lightning-fed."""\n')
    templates = files("lightning_fed.backends.flower") / "template"
    modules = (f"{package}/server.py", f"{package}/clients.py", f"{package}/client.py")
    for target in ("pyproject.toml", *modules, *scripts):
        text = (templates / f"{Path(target).name}.txt").read_text()
        (folder / target).write_text(text.format(**values))
    for script in scripts:
        (folder / script).chmod(0o755)


def run(args: Sequence[str]) -> None:
    """The commands.

    Args:
        args: The command line after ``flower``.

    """
    options = _parser().parse_args(args)
    if options.command == "new":
        write_app(options.folder, options.config)
        sys.stdout.write(f"An app of {options.config}: {options.folder}\n")
        return
    if options.command == "evaluate":
        sys.exit(subprocess.call(evaluation_command(options.folder, options.federation, options.stage, options.ckpt)))
    if options.command == "certificates":
        _write_certificates(options)
        return
    logging.basicConfig(level=logging.INFO)
    if options.command == "server":
        from lightning_fed.backends.flower.start import start_server

        start_server(options.keys, options.address, options.host, options.control_port)
        return
    if options.command == "node":
        from lightning_fed.backends.flower.start import start_node

        start_node(options.folder, options.keys, options.address, options.client, options.node_config)
        return
    from lightning_fed.backends.flower.worker import serve

    sys.path.insert(0, str(options.folder.resolve()))
    packages = [path.parent.name for path in options.folder.glob("*/clients.py")]
    if len(packages) != 1:
        raise FileNotFoundError(f"Expected an app of `lightning-fed flower new`, but {str(options.folder)!r} is none.")
    serve(importlib.import_module(f"{packages[0]}.clients").app, options.socket)


def _write_certificates(options: argparse.Namespace) -> None:
    """Writes the certificates of a server, and the keys of nodes."""
    from lightning_fed.backends.flower.certificates import write_certificates, write_node_key

    if not options.name and not options.node:
        raise OptionError("Expected `--name`, by which nodes reach the server, or `--node`, a client's name.")
    written = write_certificates(options.folder, options.name, options.days) if options.name else []
    for node in options.node:
        written += write_node_key(options.folder, node)
    for path in written:
        sys.stdout.write(f"{path}\n")


def evaluation_command(folder: Path, federation: str, stage: str, ckpt: Path | None) -> list[str]:
    """The command line of Flower that evaluates a run of an app at its clients.

    Args:
        folder: The app.
        federation: Name of the connection in Flower's configuration; empty for the default.
        stage: ``"validate"`` or ``"test"``.
        ckpt: The checkpoint, as the server finds it; ``None`` for the run's last.

    Example:
        >>> evaluation_command(Path("app"), "", "test", Path("best.ckpt"))[1:]
        ['run', 'app', '--stream', '--run-config', 'evaluate="test" checkpoint="best.ckpt"']

    """
    config = f'evaluate="{stage}" checkpoint="{ckpt or ""}"'
    names = [federation] if federation else []
    return ["flwr", "run", os.fspath(folder), *names, "--stream", "--run-config", config]


def _parser() -> argparse.ArgumentParser:
    """Parser of the command."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed flower", description="A federation across machines, on Flower."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="write a Flower app of a recipe")
    new.add_argument("folder", type=Path, help="where to")
    new.add_argument("-c", "--config", type=Path, required=True, metavar="RECIPE", help="the recipe, a YAML file")
    keys = commands.add_parser("certificates", help="make the server's certificate, or nodes' keys")
    keys.add_argument("folder", type=Path, help="where to")
    keys.add_argument("--name", action="append", default=[], help="a name or address by which nodes reach the server")
    keys.add_argument("--node", action="append", default=[], metavar="CLIENT", help="a client whose node gets a key")
    keys.add_argument("--days", type=int, default=365, help="days for which certificates are valid (365)")
    server = commands.add_parser("server", help="run the server: SuperLink, and the gateway for nodes")
    server.add_argument("--host", help="address of this machine at which to listen; by default the name of --address")
    server.add_argument("--control-port", type=int, default=8000, help="the SuperLink's port on this machine (8000)")
    node = commands.add_parser("node", help="run a client's node: SuperNode, and the worker beside the data")
    node.add_argument("folder", type=Path, help="the app")
    node.add_argument("--client", required=True, help="the client's name; its key is in KEYS/CLIENT.key")
    node.add_argument("--node-config", default="", help="more of the node's configuration: 'partition-id=0 ...'")
    for each in (server, node):
        each.add_argument("--keys", type=Path, required=True, help="folder of the certificates")
        each.add_argument("--address", required=True, metavar="NAME:PORT", help="where nodes reach the server")
    evaluate = commands.add_parser("evaluate", help="evaluate a checkpoint of a run at its clients")
    evaluate.add_argument("folder", type=Path, help="the app")
    evaluate.add_argument("federation", nargs="?", default="", help="the connection, as `flwr run` takes it")
    evaluate.add_argument("--stage", choices=("validate", "test"), default="validate", help="whose step and data")
    evaluate.add_argument("--ckpt", type=Path, help="the checkpoint, by default the run's last")
    worker = commands.add_parser("worker", help="run the long-lived process beside a client's data")
    worker.add_argument("folder", type=Path, help="the app")
    worker.add_argument("--socket", type=Path, required=True, help="where the SuperNode's processes find it")
    return parser
