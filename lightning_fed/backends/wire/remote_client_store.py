"""Server's record of the rounds in which remote clients stored state. The states stay on the clients."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from lightning_fed.client.client_store import ClientStore
from lightning_fed.messages import Client, State, plain_keys


class RemoteClientStore(ClientStore):
    """Stores for each client the round of the last valid update. The client's state stays on the client.

    A train request names this round, and the client restores the state from this round. An update not used by the
    server therefore has no effect on later training.
    """

    def __init__(self) -> None:
        self.run = ""  # name of the fit; new after every `restore(0, {})`
        self._rounds: dict[Client, int] = {}
        self._round, self._of_round = -1, dict[Client, int]()
        self._last = 0
        self._checkpoints: list[dict[Client, int]] = []  # the rounds in the last two checkpoints
        self.heads: dict[Client, Sequence[Any]] = {}  # last known line of each site's record
        self.restore(0, {})

    def kept(self, client: Client) -> int:
        return self._of_round.get(client, self._rounds.get(client, -1))

    def get(self, client: Client) -> State | None:
        return None

    def put(self, client: Client, round: int, state: State) -> None: ...

    def commit(self, round: int, clients: Collection[Client]) -> None:
        if round == self._round:
            self._of_round = {client: number for client, number in self._of_round.items() if client in clients}

    def record_update(self, client: Client, round: int, start: int) -> None:
        """Records a valid update in ``round``, trained from the global model of round ``start``."""
        if round != self._round:
            self._rounds = self._rounds | self._of_round
            self._round, self._of_round = round, {}
        self._of_round[client] = start

    def checkpoint(self, round: int) -> dict[str, Any]:
        rounds = self._rounds | (self._of_round if self._round < round else {})
        if round > self._last:
            self._last, self._checkpoints = round, [self._checkpoints[-1], rounds]
        heads = {"heads": plain_keys(self.heads), "lines": list(self.heads.values())}
        return {"run": self.run, "clients": list(rounds), "rounds": list(rounds.values()), **heads}

    def restore(self, round: int, state: dict[str, Any]) -> None:
        if "folder" in state or state.get("states"):
            raise ValueError(
                "Expected a checkpoint of a fit with remote clients, but got client states from a single-process fit."
            )
        self.run = state.get("run") or uuid.uuid4().hex
        if not isinstance(self.run, str) or not re.fullmatch("[0-9a-f]{1,64}", self.run):  # used as a folder name
            raise ValueError(
                f"Expected `run` as 1-64 digits (0-9a-f), but the checkpoint has {self.run!r}: use another checkpoint."
            )
        self._rounds = dict(zip(state.get("clients", ()), state.get("rounds", ()), strict=True))
        self._round, self._of_round = -1, {}
        self.heads = dict(zip(state.get("heads", ()), state.get("lines", ()), strict=True))
        self._last, self._checkpoints = round, [self._rounds]

    def needed(self, client: Client) -> int:
        return self._checkpoints[0].get(client, -1) + 1
