"""``lightning-fed flower``: writes a Flower app from a recipe, and runs server, nodes and workers."""

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
{folder} contains an app for {recipe}. Next steps, with NAME as the server's name for nodes:
  1. On the server's machine:
       lightning-fed flower certificates {folder}/keys --name NAME
       {folder}/start_server.sh NAME:9092
  2. On each client's machine: copy the app and the server's ca.crt (into the folder keys), add the client's data to
     clients.py, make a key, register the public key on the server's machine, then start the node:
       lightning-fed flower certificates {folder}/keys --node CLIENT
       flwr supernode register CLIENT.key.pub here
       {folder}/start_node.sh NAME:9092 CLIENT
  3. On the server's machine:
       flwr run {folder} here --stream
The guide explains all steps, and the name `here` in Flower's configuration:
https://lightning-fed.github.io/lightning-fed/guides/deploy/
"""


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed flower`` with the command-line arguments ``args``."""
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
        raise FileNotFoundError(f"Expected a folder from `lightning-fed flower new`, but got {str(options.folder)!r}.")
    serve(importlib.import_module(f"{packages[0]}.clients").app, options.socket)


def _write_certificates(options: argparse.Namespace) -> None:
    from lightning_fed.backends.flower.certificates import write_certificates, write_node_key

    if not options.name and not options.node:
        raise OptionError(
            "Expected `--name` (the server's name, as used by nodes) or `--node` (a client's name), but got neither."
        )
    written = write_certificates(options.folder, options.name, options.days) if options.name else []
    for node in options.node:
        written += write_node_key(options.folder, node)
    for path in written:
        sys.stdout.write(f"{path}\n")


def evaluation_command(folder: Path, federation: str, stage: str, ckpt: Path | None) -> list[str]:
    """Returns Flower's command for evaluating a checkpoint, by default the run's last one.

    Example:
        >>> evaluation_command(Path("app"), "", "test", Path("best.ckpt"))[1:]
        ['run', 'app', '--stream', '--run-config', 'evaluate="test" checkpoint="best.ckpt"']
    """
    config = f'evaluate="{stage}" checkpoint="{ckpt or ""}"'
    names = [federation] if federation else []
    return ["flwr", "run", os.fspath(folder), *names, "--stream", "--run-config", config]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fed flower", description="Write and run a federation across machines on Flower."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="write a Flower app for a recipe")
    new.add_argument("folder", type=Path, help="the new folder")
    new.add_argument("-c", "--config", type=Path, required=True, metavar="RECIPE", help="the recipe, a YAML file")
    keys = commands.add_parser("certificates", help="create certificates for the server, or keys for nodes")
    keys.add_argument("folder", type=Path, help="the new folder")
    keys.add_argument("--name", action="append", default=[], help="a name or address of the server, as used by nodes")
    keys.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="CLIENT",
        help="name of a client, to create a key for the client's node",
    )
    keys.add_argument(
        "--days", type=int, default=365, help="validity of the server's certificate in days (default: 365)"
    )
    server = commands.add_parser("server", help="run the server: SuperLink, and the gateway for nodes")
    server.add_argument("--host", help="listening address of this machine (default: the name in --address)")
    server.add_argument(
        "--control-port", type=int, default=8000, help="the SuperLink's port on this machine (default: 8000)"
    )
    node = commands.add_parser("node", help="run a client's node: SuperNode and worker")
    node.add_argument("folder", type=Path, help="the app")
    node.add_argument("--client", required=True, help="the client's name; the node's key is KEYS/CLIENT.key")
    node.add_argument("--node-config", default="", help="additional node configuration: 'partition-id=0 ...'")
    for command in (server, node):
        command.add_argument("--keys", type=Path, required=True, help="folder with the certificates")
        command.add_argument(
            "--address", required=True, metavar="NAME:PORT", help="address of the server, as used by nodes"
        )
    evaluate = commands.add_parser("evaluate", help="evaluate a checkpoint on the clients")
    evaluate.add_argument("folder", type=Path, help="the app")
    evaluate.add_argument("federation", nargs="?", default="", help="the connection's name in Flower's configuration")
    evaluate.add_argument(
        "--stage",
        choices=("validate", "test"),
        default="validate",
        help="whether to run the validation or the test step, on the corresponding data",
    )
    evaluate.add_argument("--ckpt", type=Path, help="the checkpoint (default: the last checkpoint of the run)")
    worker = commands.add_parser("worker", help="run the long-lived process of a client")
    worker.add_argument("folder", type=Path, help="the app")
    worker.add_argument("--socket", type=Path, required=True, help="the socket for messages from the SuperNode")
    return parser
