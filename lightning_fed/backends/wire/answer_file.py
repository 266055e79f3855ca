"""File with a client's last answer, to send the answer again after a network failure."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path

from lightning_fed.atomic_files import atomic_write
from lightning_fed.backends.wire.packets import Packet, TrainRequest
from lightning_fed.errors import describe
from lightning_fed.messages import file_name

_log = logging.getLogger(__name__)


class AnswerFile:
    """Stores a client's last update, so a repeated request to train needs no second training."""

    def __init__(self, folder: Path, train_request: TrainRequest, data: bytes) -> None:
        self._path = folder / "answers" / file_name(train_request.visit.client)
        # `needed`, `head` and `start` of the same order can change after a restart of the server.
        order = hashlib.sha256(repr(replace(train_request, needed=0, head=None, start=0)).encode())
        order.update(data)
        self._key = order.hexdigest().encode()

    def read(self) -> Packet | None:
        try:
            with self._path.open("rb") as file:
                if file.readline().rstrip() != self._key:
                    return None
                return Packet(file.readline().rstrip().decode(), file.read())
        except (OSError, ValueError):
            return None

    def store(self, answer: Packet) -> None:
        try:
            with atomic_write(self._path, f"-{os.getpid()}.partial") as partial, partial.open("wb") as file:
                file.writelines((self._key, b"\n", answer.text.encode(), b"\n", answer.data))
        except OSError as error:
            _log.warning(
                "Cannot store the client's answer: %s. If the network loses the answer, the client trains again.",
                describe(error),
            )
