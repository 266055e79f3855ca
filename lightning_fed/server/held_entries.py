"""Records which untrained entries clients already have, so that each value is sent once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_fed.messages import Client, State, plain_keys
from lightning_fed.model.entries import identical_entries

_ALWAYS = -1


class HeldEntries:
    """Record of untrained entries: the round of each entry's last change, and the last round of each client.

    All clients have the initial model. After a change by the server, or the end of an entry's training, the next
    broadcast to each client contains the entry once. ``values`` are the untrained entries in the current or last round.

    State: ``since``, the round of each entry's last change, by name; ``clients`` and ``rounds``, the last round with a
    valid update, for clients after a change.

    Example:
        >>> import torch
        >>> held, weight = HeldEntries(), torch.ones(1)
        >>> held.start_round(0, {"w": weight})
        >>> held.start_round(1, {"w": weight + 1})
        >>> held.record_clients(1, ["a"])
        >>> held.held_by("a", {"w": weight + 1}), held.held_by("b", {"w": weight + 1})
        (frozenset({'w'}), frozenset())
    """

    def __init__(self) -> None:
        self.values: State = {}
        self._since: dict[str, int] = {}
        self._rounds: dict[Client, int] = {}
        self._is_new = True

    @property
    def names(self) -> frozenset[str]:
        """Names of the untrained entries."""
        return frozenset(self._since)

    def restore(self, entries: Mapping[str, Tensor]) -> None:
        """Completes the values after loading a checkpoint: takes missing values from ``entries``, the fit's model."""
        self.values = {
            name: self.values[name].to(entries[name].device) if name in self.values else entries[name].detach().clone()
            for name in self._since
            if name in entries
        }

    def start_round(self, round: int, state: State) -> None:
        unchanged = identical_entries(self.values, state)
        since = {name: self._since.get(name, round) if name in unchanged else round for name in state}
        self._since = dict.fromkeys(state, _ALWAYS) if self._is_new else since
        self.values, self._is_new = state, False
        oldest = min((start for start in self._since.values() if start != _ALWAYS), default=None)
        self._rounds = {} if oldest is None else {key: last for key, last in self._rounds.items() if last >= oldest}

    def held_by(self, client: Client, state: Mapping[str, Tensor], has_present: bool = False) -> frozenset[str]:
        """Names of a message's entries already on the client. ``has_present``: the client has this round's model."""
        last = self._rounds.get(client, _ALWAYS)
        held = {name: self.values[name] for name, start in self._since.items() if has_present or last >= start}
        return identical_entries(held, state)

    def record_clients(self, round: int, clients: Iterable[Client]) -> None:
        """Records that clients hold the round's model; does nothing while all entries have their initial values."""
        if any(start != _ALWAYS for start in self._since.values()):
            self._rounds |= dict.fromkeys(clients, round)

    def state_dict(self, entries: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """State for checkpoints, described in the class docstring.

        ``entries`` is the initial model of a resumed fit. Entries that differ are excluded, because no client has the
        new values.
        """
        entries = {} if entries is None else entries
        now = {name: entries[name].to(value.device) for name, value in self.values.items() if name in entries}
        changed = now.keys() - identical_entries(self.values, now)
        since = {name: start for name, start in self._since.items() if name not in changed}
        state = {"since": since, "clients": plain_keys(self._rounds), "rounds": list(self._rounds.values())}
        return {} if self._is_new else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint. An empty state is the initial state."""
        self._since, self.values = dict(state.get("since", {})), {}
        self._is_new = not state
        self._rounds = dict(zip(state.get("clients", ()), state.get("rounds", ()), strict=True))
