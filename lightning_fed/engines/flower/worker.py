"""A client's long-lived process: it answers what SuperNodes' short-lived ones bring, with everything loaded.

A SuperNode starts a process for every message. Where that process is only to carry the message here (the ``client.py``
that ``lightning-fed flower new`` writes imports no torch), a message costs a second, and model and data stay built.
"""

from __future__ import annotations

import json
import logging
import os
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from flwr.clientapp import ClientApp

from lightning_fed.engines.flower.client import ClientRunner, LightningClientApp
from lightning_fed.engines.flower.wire import Letter, WireError

_log = logging.getLogger(__name__)


def serve(app: ClientApp, socket: str | os.PathLike[str], count: int | None = None) -> None:
    """Answers messages that come over a Unix socket, one after another.

    Only this user can reach the socket: its folder is closed to others. What comes is text and bytes, which are not
    unpickled.

    Args:
        app: What :func:`~lightning_fed.engines.flower.client_app` made.
        socket: Where to listen; a file that is left there is replaced.
        count: Number of messages after which to end; ``None`` for never.

    Raises:
        TypeError: If the app is another one.
        PermissionError: If others can reach the socket's folder.

    """
    if not isinstance(app, LightningClientApp):
        raise TypeError(f"Expected an app of `client_app`, but got {app!r}.")
    path = Path(socket)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_mode & 0o077:
        raise PermissionError(
            "Expected a folder for the socket that only you can reach (chmod 700), but others can reach"
            f" {str(path.parent)!r}."
        )
    path.unlink(missing_ok=True)
    with Listener(str(path), family="AF_UNIX") as listener:
        _log.info("Waiting for messages at %s.", path)
        while count is None or count > 0:
            try:
                with listener.accept() as connection:
                    _answer(app.runner, connection)
            except (OSError, EOFError) as error:  # whoever brought it is gone
                _log.warning("A message was not answered: %s.", error)
            count = None if count is None else count - 1
    path.unlink(missing_ok=True)


def _answer(runner: ClientRunner, connection: Connection) -> None:
    head = json.loads(connection.recv_bytes())
    letter = Letter(connection.recv_bytes().decode(), connection.recv_bytes())
    try:
        reply = runner.answer(head["kind"], letter, head["node"])
    except WireError as error:
        connection.send_bytes(json.dumps({"error": str(error)}).encode())
        return
    connection.send_bytes(b"{}")
    connection.send_bytes(reply.text.encode())
    connection.send_bytes(reply.data)
