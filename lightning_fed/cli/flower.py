"""``lightning-fed flower``: write a Flower app from a recipe, and run server, nodes and workers."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fed.errors import OptionError

_TEMPLATES = {
    "pyproject.toml": "pyproject.toml.txt",
    "start_server.sh": "start_server.sh.txt",
    "start_node.sh": "start_node.sh.txt",
    "{package}/server.py": "server.py.txt",
    "{package}/clients.py": "clients.py.txt",
    "{package}/client.py": "client.py.txt",
}
_NEXT = """\
An app of {recipe} is in {folder}. The next three steps, where nodes reach the server as NAME:
  1. On the server's machine:
       lightning-fed flower certificates {folder}/keys --name NAME
       {folder}/start_server.sh NAME:9092
  2. On each client's machine, with the app and the server's ca.crt in its folder keys, and the client's own data in
     clients.py, make a key; on the server's machine register its public half; then start the node:
       lightning-fed flower certificates {folder}/keys --node CLIENT
       flwr supernode register CLIENT.key.pub here
       {folder}/start_node.sh NAME:9092 CLIENT
  3. On the server's machine:
       flwr run {folder} here --stream
What `here` is in Flower's configuration, and the other steps in full:
https://lightning-fed.github.io/lightning-fed/guides/deploy/
"""


def run(args: Sequence[str]) -> None:
    """Runs the command."""
    options = _parser().parse_args(args)
    if options.command == "new":
        from lightning_fed.cli.recipe_halves import write_halves

        write_halves(options.folder, options.config, _TEMPLATES, "flower")
        sys.stdout.write(_NEXT.format(recipe=options.config, folder=options.folder))
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
    from lightning_fed.backends.flower.certificates import write_certificates, write_node_key

    if not options.name and not options.node:
        raise OptionError("Expected `--name`, by which nodes reach the server, or `--node`, a client's name.")
    written = write_certificates(options.folder, options.name, options.days) if options.name else []
    for node in options.node:
        written += write_node_key(options.folder, node)
    for path in written:
        sys.stdout.write(f"{path}\n")


def evaluation_command(folder: Path, federation: str, stage: str, ckpt: Path | None) -> list[str]:
    """Flower's command line to evaluate a run on the clients. ``ckpt=None`` stands for the run's last checkpoint.

    Example:
        >>> evaluation_command(Path("app"), "", "test", Path("best.ckpt"))[1:]
        ['run', 'app', '--stream', '--run-config', 'evaluate="test" checkpoint="best.ckpt"']
    """
    config = f'evaluate="{stage}" checkpoint="{ckpt or ""}"'
    names = [federation] if federation else []
    return ["flwr", "run", os.fspath(folder), *names, "--stream", "--run-config", config]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fed flower", description="Write and run a federation across machines, on Flower."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="write a Flower app of a recipe")
    new.add_argument("folder", type=Path, help="where to")
    new.add_argument("-c", "--config", type=Path, required=True, metavar="RECIPE", help="the recipe, a YAML file")
    keys = commands.add_parser("certificates", help="make the server's certificate, or nodes' keys")
    keys.add_argument("folder", type=Path, help="where to")
    keys.add_argument("--name", action="append", default=[], help="a name or address by which nodes reach the server")
    keys.add_argument("--node", action="append", default=[], metavar="CLIENT", help="a client whose node gets a key")
    keys.add_argument("--days", type=int, default=365, help="days for which the server's is valid (365)")
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
