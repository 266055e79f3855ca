"""File of a client with its last answer, for a server that asks again because the answer was lost on the way."""

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
    """A client's last finished visit: the same order is answered by the same update, without training again.

    Args:
        folder: Folder of the fit.
        train_request: The order.
        data: The tensors that came with it, as bytes.

    """

    def __init__(self, folder: Path, train_request: TrainRequest, data: bytes) -> None:
        self._path = folder / "answers" / file_name(train_request.visit.client)
        # A server that was started again says of the same order that older versions are not needed any more.
        order = hashlib.sha256(repr(replace(train_request, needed=0)).encode())
        order.update(data)
        self._key = order.hexdigest().encode()

    def read(self) -> Packet | None:
        """The answer; ``None`` where the last one was to another order."""
        try:
            with self._path.open("rb") as file:
                if file.readline().rstrip() != self._key:
                    return None
                return Packet(file.readline().rstrip().decode(), file.read())
        except (OSError, ValueError):
            return None

    def keep(self, answer: Packet) -> None:
        """Keeps an answer, in the place of the last one; where it cannot be written, a lost one is trained again."""
        try:
            with atomic_write(self._path, f"-{os.getpid()}.partial") as partial, partial.open("wb") as file:
                file.writelines((self._key, b"\n", answer.text.encode(), b"\n", answer.data))
        except OSError as error:
            _log.warning("The answer is not kept, in case it is lost: %s.", describe(error))
