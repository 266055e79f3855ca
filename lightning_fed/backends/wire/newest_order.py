"""File with a client's newest train request, to refuse older requests after a delay in the network."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.backends.wire.packets import TrainRequest
from lightning_fed.errors import ClientFault
from lightning_fed.messages import file_name


def refuse_older_order(folder: Path, train_request: TrainRequest) -> None:
    """Stores a client's newest train request in a file. Raises ``ClientFault`` for an older request."""
    visit = train_request.visit
    path, order = folder / "orders" / file_name(visit.client), [train_request.start, visit.round]
    newest = json.loads(path.read_text()) if path.exists() else []
    if newest > order:  # an older request would overwrite newer client state
        raise ClientFault(
            "the client refuses an outdated request, because a newer request (from a later start of the server, or a "
            "later round) has arrived before: if the server was restored from a backup, correct the server's clock"
        )
    if newest < order:
        write_text_atomically(path, json.dumps(order))
