"""Record of what the clients have already of the entries that do not train, so that it is not sent to them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_fed.messages import Client, State, plain_keys
from lightning_fed.model.entries import identical_entries

_ALWAYS = -1


class HeldEntries:
    """Record of the entries that do not train: since when they have their values, and which clients have these.

    All clients have the model with which the first round begins. An entry that stops training later, or is given other
    values by the server, is sent to a client once: with the first broadcast after that.

    State: ``since``, the round at whose start an entry got its values, by name; ``clients`` and ``rounds``, the last
    round of a good update, of the clients for which it matters.

    Attributes:
        values: The entries of the round that is under way, or was last.

    Example:
        >>> import torch
        >>> held, weight = HeldEntries(), torch.ones(1)
        >>> held.start_round(0, {"w": weight})
        >>> held.held_by("a", {"w": weight})
        frozenset({'w'})
        >>> held.start_round(1, {"w": weight + 1})
        >>> held.held_by("a", {"w": weight + 1})
        frozenset()
        >>> held.note(1, ["a"])
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
        """Names of the entries that a client which has them is not sent."""
        return frozenset(self._since)

    def restore(self, entries: Mapping[str, Tensor]) -> None:
        """Takes the values from the model with which a fit goes on, where they are not known."""
        self.values = {
            name: self.values[name].to(entries[name].device) if name in self.values else entries[name].detach().clone()
            for name in self._since
            if name in entries
        }

    def start_round(self, round: int, state: State) -> None:
        """Starts a round.

        Args:
            round: Index of the round.
            state: The entries that do not train, at the start of the round.

        """
        unchanged = identical_entries(self.values, state)
        since = {name: self._since.get(name, round) if name in unchanged else round for name in state}
        self._since = dict.fromkeys(state, _ALWAYS) if self._is_new else since
        self.values, self._is_new = state, False
        oldest = min((start for start in self._since.values() if start != _ALWAYS), default=None)
        self._rounds = {} if oldest is None else {key: last for key, last in self._rounds.items() if last >= oldest}

    def held_by(self, client: Client, state: Mapping[str, Tensor], has_present: bool = False) -> frozenset[str]:
        """Names of the entries of a message that its client has already.

        Args:
            client: The client.
            state: The entries of the message.
            has_present: Whether the client has been sent the model of the round that is under way.

        """
        last = self._rounds.get(client, _ALWAYS)
        held = {name: self.values[name] for name, start in self._since.items() if has_present or last >= start}
        return identical_entries(held, state)

    def note(self, round: int, clients: Iterable[Client]) -> None:
        """Notes clients that have been sent the model of a round; nothing where all have all entries in any case."""
        if any(start != _ALWAYS for start in self._since.values()):
            self._rounds |= dict.fromkeys(clients, round)

    def state_dict(self, entries: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """See the class's note.

        Args:
            entries: The model with which a resumed fit will begin: what has other values by now is left out, because
                nobody has them. By default nothing has.

        """
        entries = {} if entries is None else entries
        now = {name: entries[name].to(value.device) for name, value in self.values.items() if name in entries}
        changed = now.keys() - identical_entries(self.values, now)
        since = {name: start for name, start in self._since.items() if name not in changed}
        state = {"since": since, "clients": plain_keys(self._rounds), "rounds": list(self._rounds.values())}
        return {} if self._is_new else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it; an empty state is that of a fit that begins."""
        self._since, self.values = dict(state.get("since", {})), {}
        self._is_new = not state
        self._rounds = dict(zip(state.get("clients", ()), state.get("rounds", ()), strict=True))
