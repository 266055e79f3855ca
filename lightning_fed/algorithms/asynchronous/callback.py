"""Checks an asynchronous fit's settings, and records the order of updates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.algorithms.asynchronous.arrivals import RecordedOrder, read_lines
from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import is_overridden
from lightning_fed.messages import plain_keys


class AsynchronousRounds(FederatedCallback):
    """Checks the settings of an asynchronous fit, and writes the order of updates to a file.

    If the fit replays a recorded order, the callback compares both orders.

    Args:
        rule: The asynchronous aggregation rule, such as FedBuff.
    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, rule: Any, /) -> None:
        self.rule = rule

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation, rule = find_federation(trainer), self.rule
        name = type(rule).__name__
        if not federation.has_server:
            return
        availability = federation.arguments["availability"]
        if availability is not None:
            raise MisconfigurationException(
                f"Expected no `availability` with {name}, but got {availability}: describe slow clients in `durations`."
            )
        if federation.server.min_clients > rule.buffer:
            raise MisconfigurationException(
                f"Expected `min_clients` to be at most the buffer size {rule.buffer} of {name}, but got "
                f"{federation.server.min_clients}: the global model would never change."
            )
        for callback in federation.method.callbacks:
            if is_overridden("on_server_send", callback, FederatedCallback):
                raise MisconfigurationException(
                    f"Expected no `{type(callback).__name__}` with {name}, because the callback sends values for the "
                    "current global model, but some clients train from an older model: use a synchronous method."
                )
        if rule.record is not None and trainer.is_global_zero:
            path = Path(rule.record)
            if path.exists() and not federation.rounds and not federation.is_remote:
                raise MisconfigurationException(
                    f"Expected `record` to be a new file, but {rule.record!r} exists: choose another name, or pass "
                    "the file as `replay`."
                )
            lines = [line for line in read_lines(rule.record) if line[0] < federation.rounds] if path.exists() else []
            write_text_atomically(path, _text(lines))

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        rule, round = self.rule, find_federation(trainer).server.report.round
        lines = [
            [round, *plain_keys([client]), arrival.version, rule.digests.get(client, "")]
            for client, arrival in rule.arrived.items()
        ]
        if rule.record is not None and trainer.is_global_zero:
            with Path(rule.record).open("a") as file:
                file.write(_text(lines))
                file.flush()
                os.fsync(file.fileno())  # before the checkpoint, because the checkpoint excludes the lines
        if isinstance(rule.order, RecordedOrder):
            for line, recorded in zip(lines, rule.order.of_round(round), strict=True):
                if line != recorded:
                    raise MisconfigurationException(
                        f"The replay differs from {rule.order.path!r} in round {round}: expected {recorded}, but got "
                        f"{line}. Replay with the recorded data, seed, options and versions of the packages."
                    )


def _text(lines: list[list[Any]]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)
