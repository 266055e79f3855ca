"""File with a client's newest train request, to refuse older requests after a delay in the network."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.backends.wire.packets import TrainRequest
from lightning_fed.errors import ClientFault
from lightning_fed.messages import file_name


def refuse_older_order(folder: Path, train_request: TrainRequest) -> None:
    """Stores a train request as the client's newest. If a newer request is stored, raises ``ClientFault``.

    An older request would replace the client state of later rounds. Requests are compared by server start and round.
    """
    visit = train_request.visit
    path, order = folder / "orders" / file_name(visit.client), [train_request.start, visit.round]
    newest = json.loads(path.read_text()) if path.exists() else []
    if newest > order:
        raise ClientFault(
            "the client has a newer request from a later start of the server, or from a later round: "
            "correct the clock of a restored server"
        )
    if newest < order:
        write_text_atomically(path, json.dumps(order))
