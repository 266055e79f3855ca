"""Base class for aggregation rules with protection against malicious clients.

Robust rules ignore the clients' numbers of examples, because malicious clients may send false numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.robust.equations import trimmed_mean
from lightning_fed.algorithms.robust.steps import Steps
from lightning_fed.argument_checks import check_count
from lightning_fed.errors import BadUpdates
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, plain_keys
from lightning_fed.model.entries import is_running_statistic
from lightning_fed.numerics.precision import cast_back
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import Aggregator, RoundInfo

_MAX_CLIENTS_BY_NAME = 20


@dataclass
class MixedUpdate(ClientUpdate):
    """Weighted sum over several clients' updates. ``shares`` maps each client to a weight."""

    shares: dict[Client, float] = field(default_factory=dict)


def shares_of(update: ClientUpdate) -> dict[Client, float]:
    """Maps an update's clients to weights in the update. An ordinary update has one client with weight 1."""
    return update.shares if isinstance(update, MixedUpdate) else dict.fromkeys(update.clients, 1.0)


class RobustAggregator(Aggregator):
    """Base class of aggregation rules for federations with some malicious clients.

    Subclasses implement :meth:`combine`, which receives the round's updates. An update is the client's model minus the
    global model, as one vector of all shared floating-point values except BatchNorm's running statistics. These
    statistics are averaged without the f smallest and f largest values, for f malicious clients. Integers take the
    majority value. A subclass sets ``least = (a, b)``: a round with fewer than ``a f + b`` updates fails. If f = 0, one
    update suffices.

    Args:
        num_malicious: Number f of malicious clients per round; by default the largest number that the rule tolerates.
            The round's refused updates, for example with NaN values, are subtracted from a given number.

    Note:
        Logs ``fed/excluded``, the number of clients excluded from the result. A client with weight w in the result
        counts as the fraction 1 - w / m, where m is the largest weight. With at most 20 clients, also logs each
        client's mean fraction over rounds (``client/<id>/excluded``).
    """

    least: tuple[int, int] = (2, 1)

    def __init__(self, num_malicious: int | None = None) -> None:
        self.num_malicious = None if num_malicious is None else check_count("num_malicious", num_malicious, lowest=0)
        self.always: Sequence[Client] = ()  # trusted clients are not in the matrix
        self.memory: State = {}
        self.excluded: dict[Client, tuple[float, int]] = {}
        self._excluded_now: dict[Client, float] = {}
        self.start(RoundInfo(-1), {})

    @abstractmethod
    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        """Combines client updates, with at most ``num_malicious`` malicious updates.

        Returns the new model's tensors in float64, and for each update the fraction of values used.
        """

    def start(self, info: RoundInfo, state: State) -> None:
        self._info, self._state = info, state
        self.updates: dict[Client, State] = {}
        self.origins: dict[Client, tuple[tuple[Client, ...], dict[Client, float]]] = {}

    def broadcast(self, request: Request) -> Broadcast:
        return Broadcast(self._info.round, dict(self._state))

    def receive(self, update: ClientUpdate) -> None:
        self.updates[update.client] = update.state
        self.origins[update.client] = update.clients, shares_of(update)

    def merge(self, other: RobustAggregator) -> None:
        self.updates |= other.updates
        self.origins |= other.origins

    @torch.no_grad()
    def aggregate(self) -> State:
        clients = self.clients
        states = [self.updates[client] for client in clients]
        names = number_entries(self._state)
        steps = Steps(self._state, states, [name for name in names if not is_running_statistic(name)])
        faults = steps.find_too_long(clients)
        if not faults and (lack := self._find_lack()) is not None:
            faults = dict.fromkeys(self.updates, lack)
        self.updates = {client: state for client, state in self.updates.items() if client not in faults}
        if faults:
            raise BadUpdates(
                {member: reason for client, reason in faults.items() for member in self.origins[client][0]}
            )
        num_malicious = self.tolerated(len(clients))
        combined, influence = self.combine(steps, num_malicious)
        statistics, _ = Steps(self._state, states, [*filter(is_running_statistic, names)]).by_coordinate(
            partial(trimmed_mean, num_trimmed=num_malicious)
        )
        combined |= statistics
        new = {
            name: cast_back(combined[name], old) if name in combined else majority([state[name] for state in states])
            for name, old in self._state.items()
        }
        self._record_exclusions(clients, influence)
        self.updates = {}
        return new

    def tolerated(self, count: int) -> int:
        """Returns the assumed number of malicious clients among ``count`` accepted updates.

        By default, this is the largest number that the rule tolerates.
        """
        if self.num_malicious is not None:
            return max(0, self.num_malicious - len(self._info.refused))
        factor, constant = self.least
        return max(0, (count - constant) // factor)

    def metrics(self) -> dict[str, float]:
        values = {"fed/excluded": sum(self._excluded_now.values())}
        if len(self.excluded) <= _MAX_CLIENTS_BY_NAME:
            values |= {f"client/{client}/excluded": total / count for client, (total, count) in self.excluded.items()}
        return values

    def state_dict(self) -> dict[str, Any]:
        return {
            "clients": plain_keys(self.excluded),
            "excluded": [total for total, _ in self.excluded.values()],
            "rounds": [count for _, count in self.excluded.values()],
            "memory": self.memory,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        counts = zip(state.get("excluded", []), state.get("rounds", []), strict=True)
        self.excluded = dict(zip(state.get("clients", []), counts, strict=True))
        self.memory = dict(state.get("memory", {}))

    @property
    def clients(self) -> list[Client]:
        """Clients with an update in this round, in a fixed order. Trusted clients are excluded."""
        return sorted(self.updates.keys() - set(self.always), key=client_key)

    def _find_lack(self) -> str | None:
        for client in self.always:
            if client not in self.updates:
                return f"the trusted client {client!r} sent no valid update"
        count = len(self.clients)
        num_malicious = self.tolerated(count)
        factor, constant = self.least
        needed = factor * num_malicious + constant if num_malicious else 1
        if count >= needed:
            return None
        return (
            f"{type(self).__name__} with num_malicious={num_malicious} needs {needed} valid updates, but the round "
            f"has {count}"
        )

    def _record_exclusions(self, clients: Sequence[Client], influence: Tensor) -> None:
        weights: dict[Client, float] = defaultdict(float)
        for client, share in zip(clients, influence.tolist(), strict=True):
            for member, part in self.origins[client][1].items():
                weights[member] += share * part
        largest = max(weights.values(), default=0.0) or 1.0
        self._excluded_now = {client: 1 - share / largest for client, share in weights.items()}
        excluded = dict(self.excluded)
        for client, share in self._excluded_now.items():
            total, count = excluded.get(client, (0.0, 0))
            excluded[client] = total + share, count + 1
        self.excluded = excluded


def number_entries(state: State) -> list[str]:
    """Names of the floating-point and complex entries in a state dict."""
    return [name for name, value in state.items() if value.is_floating_point() or value.is_complex()]


def majority(values: Sequence[Tensor]) -> Tensor:
    """Majority value of each element over several integer tensors; without a majority, the lower median."""
    stacked = torch.stack(list(values))
    ordered = stacked.to(torch.int64).sort(dim=0).values
    return ordered[(len(values) - 1) // 2].to(stacked.dtype)
