"""Worker: builds model and data once, and answers messages forwarded by Flower's short-lived client processes."""

from __future__ import annotations

import json
import logging
import os
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM
from socket import socket as connect_to
from typing import NoReturn

from flwr.clientapp import ClientApp

from lightning_fed.backends.flower.client import LightningClientApp
from lightning_fed.backends.flower.transport import split_bytes
from lightning_fed.backends.wire.packets import Packet, PacketError
from lightning_fed.backends.wire.runner import ClientRunner

_log = logging.getLogger(__name__)


def serve(app: ClientApp, socket: str | os.PathLike[str]) -> NoReturn:
    """Answers messages for the client app, received at a Unix socket.

    Raises ``PermissionError`` if other users have access to the socket's folder.
    """
    if not isinstance(app, LightningClientApp):
        raise TypeError(f"Expected an app from `client_app`, but got {app!r}.")
    path = Path(socket)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_mode & 0o077:
        raise PermissionError(
            "Expected a folder for the socket that only you can access (chmod 700), but other users can access "
            f"{str(path.parent)!r}."
        )
    if path.exists() and not path.is_socket():
        raise FileExistsError(f"Expected the path of a socket, but {str(path)!r} is not a socket.")
    if _is_served(path):
        raise FileExistsError(f"Another worker uses the socket {str(path)!r}.")
    path.unlink(missing_ok=True)
    with Listener(str(path), family="AF_UNIX") as listener:
        _log.info("Waiting for messages at %s.", path)
        while True:
            try:
                with listener.accept() as connection:
                    _answer(app.runner, connection)
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:  # the SuperNode's process failed
                _log.warning("Could not answer a message: %r.", error)


def _is_served(path: Path) -> bool:
    with connect_to(AF_UNIX, SOCK_STREAM) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
        except BlockingIOError:  # the queue is full
            return True
        except OSError as error:
            return isinstance(error, TimeoutError)
    return True


def _answer(runner: ClientRunner, connection: Connection) -> None:
    head = json.loads(connection.recv_bytes())
    text = connection.recv_bytes().decode()
    packet = Packet(text, b"".join([connection.recv_bytes() for _ in range(head["parts"])]))
    try:
        reply = runner.answer(head["kind"], packet, head["node"])
    except PacketError as error:
        connection.send_bytes(json.dumps({"error": str(error)}).encode())
        return
    parts = split_bytes(reply.data)
    connection.send_bytes(json.dumps({"parts": len(parts)}).encode())
    connection.send_bytes(reply.text.encode())
    for part in parts:
        connection.send_bytes(part)
