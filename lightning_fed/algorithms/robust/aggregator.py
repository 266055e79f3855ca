"""Base class of the robust rules: keeps a round's updates, compares the clients' steps, and combines them.

A step is what an update adds to the broadcast. The clients' numbers of examples are their own word, and play no part.
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
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.model.entries import is_running_statistic
from lightning_fed.numerics.precision import cast_back
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import Aggregator, RoundInfo

_MAX_CLIENTS_BY_NAME = 20


@dataclass
class MixedUpdate(ClientUpdate):
    """An update that a mixture has made of several.

    Args:
        shares: How much of each client's step is in it, the weight of a sum.

    """

    shares: dict[Client, float] = field(default_factory=dict)


def shares_of(update: ClientUpdate) -> dict[Client, float]:
    """Share of each client's step in an update: nothing but its own, unless it is mixed."""
    return update.shares if isinstance(update, MixedUpdate) else dict.fromkeys(update.clients, 1.0)


class RobustAggregator(Aggregator):
    r"""Base class of rules that stand some clients who may send anything. A rule implements :meth:`combine`.

    A round's updates are kept until all are there: n clients' states. The clients' steps, all floating-point entries
    that travel as one vector, are compared by their inner products, and combined some coordinates at a time. Running
    statistics of BatchNorm have scales of their own and must stay possible: they take no part in the comparison, and
    become the clients' mean by coordinate without the ``num_malicious`` smallest and largest. Integer entries take the
    value of more than half of the clients, or, where there is none, their lower median.

    A round with fewer updates than the rule needs brings no new model: its clients are left out, with the reason. A
    client whose answer was refused for what it held (NaN, another shape, a step out of all bounds) is one of the f: of
    the others at most f - 1 are malicious. A client that did not answer may be an honest one, and counts for nothing.

    Args:
        num_malicious: Number f of clients in a round that may send anything; ``None`` for the most that the rule stands
            with the round's number of updates.

    Attributes:
        least: Least number n of updates, as ``(a, b)``: n must be at least a f + b. Without malicious clients, f = 0,
            one is enough.
        updates: The states that were received in the round.
        origins: The clients that each of them stands for, and how much of each client's step is in it.
        memory: What the rule keeps from round to round: float64 entries.
        excluded: For every client that has taken part, the sum over its rounds of the share of it that did not count,
            and the number of these rounds.

    Raises:
        ValueError: If an argument is out of its range.

    Note:
        Logged are ``fed/excluded``, how many of the round's clients did not count, in fractions: a client's share is 1
        where nothing of its step is in the result, and 0 where it counts as much as the client that counts most; and
        ``client/<id>/excluded``, a client's mean share over its rounds, as long as at most 20 have taken part. Its
        state holds the ``clients``, the sums ``excluded`` and the numbers of ``rounds``, and ``memory``.

    """

    least: tuple[int, int] = (2, 1)

    def __init__(self, num_malicious: int | None = None) -> None:
        self.num_malicious = None if num_malicious is None else check_count("num_malicious", num_malicious, lowest=0)
        self.always: Sequence[Client] = ()  # trusted clients, which are no rows
        self.memory: State = {}
        self.excluded: dict[Client, tuple[float, int]] = {}
        self._excluded_now: dict[Client, float] = {}
        self.start(RoundInfo(-1), {})

    @abstractmethod
    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        """The new floating-point entries, in float64, and how much of every row has counted.

        Args:
            steps: The clients' steps, at least as many as the rule needs.
            num_malicious: Number f of rows that may be anything.

        Returns:
            The entries, by name, and the share of every row that counted, shape ``(rows,)``, from 0 to 1.

        """

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round from ``state``."""
        self._info, self._state = info, state
        self.updates: dict[Client, State] = {}
        self.origins: dict[Client, tuple[tuple[Client, ...], dict[Client, float]]] = {}

    def broadcast(self, request: Request) -> Broadcast:
        """The global state, the same for every client."""
        return Broadcast(self._info.round, dict(self._state))

    def receive(self, update: ClientUpdate) -> None:
        """Keeps the update until all are there."""
        self.updates[update.client] = update.state
        self.origins[update.client] = update.clients, shares_of(update)

    def merge(self, other: RobustAggregator) -> None:
        """Joins the updates that another rule of the same kind has received."""
        self.updates |= other.updates
        self.origins |= other.origins

    @torch.no_grad()
    def aggregate(self) -> State:
        """The combination of the clients' steps, entry by entry.

        Raises:
            BadUpdates: For clients whose steps cannot be compared; for all, where too few are left, or a trusted client
                is not there.

        """
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
        combined, kept = self.combine(steps, num_malicious)
        statistics, _ = Steps(self._state, states, [*filter(is_running_statistic, names)]).by_coordinate(
            partial(trimmed_mean, num_trimmed=num_malicious)
        )
        combined |= statistics
        new = {
            name: cast_back(combined[name], old) if name in combined else majority([state[name] for state in states])
            for name, old in self._state.items()
        }
        self._note(clients, kept)
        self.updates = {}
        return new

    def tolerated(self, count: int) -> int:
        """Number f, less those whose answers were refused; or the most that the rule stands with as many clients."""
        if self.num_malicious is not None:
            return max(0, self.num_malicious - len(self._info.refused))
        factor, constant = self.least
        return max(0, (count - constant) // factor)

    def metrics(self) -> dict[str, float]:
        """Number of the round's clients that did not count, and each client's share that did not, over its rounds."""
        values = {"fed/excluded": sum(self._excluded_now.values())}
        if len(self.excluded) <= _MAX_CLIENTS_BY_NAME:
            values |= {f"client/{client}/excluded": total / count for client, (total, count) in self.excluded.items()}
        return values

    def state_dict(self) -> dict[str, Any]:
        """See the class's note."""
        return {
            # Names as Python has them: NumPy's do not load with `weights_only=True`.
            "clients": [str(client) if isinstance(client, str) else int(client) for client in self.excluded],
            "excluded": [total for total, _ in self.excluded.values()],
            "rounds": [count for _, count in self.excluded.values()],
            "memory": self.memory,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it."""
        counts = zip(state.get("excluded", []), state.get("rounds", []), strict=True)
        self.excluded = dict(zip(state.get("clients", []), counts, strict=True))
        self.memory = dict(state.get("memory", {}))

    @property
    def clients(self) -> list[Client]:
        """The clients whose updates are there, without trusted ones, in an order that no client can choose."""
        return sorted(self.updates.keys() - set(self.always), key=client_key)

    def _find_lack(self) -> str | None:
        """Reason why nothing can come of the round; ``None`` where it can."""
        for client in self.always:
            if client not in self.updates:
                return f"the trusted client {client!r} has sent no good update"
        count = len(self.clients)
        num_malicious = self.tolerated(count)
        factor, constant = self.least
        needed = factor * num_malicious + constant if num_malicious else 1
        if count >= needed:
            return None
        return (
            f"{type(self).__name__} with num_malicious={num_malicious} needs {needed} good updates, and the round has"
            f" {count} of them"
        )

    def _note(self, clients: Sequence[Client], kept: Tensor) -> None:
        counted: dict[Client, float] = defaultdict(float)
        for client, share in zip(clients, kept.tolist(), strict=True):
            for member, part in self.origins[client][1].items():
                counted[member] += share * part
        most = max(counted.values(), default=0.0) or 1.0
        self._excluded_now = {client: 1 - share / most for client, share in counted.items()}
        noted = dict(self.excluded)
        for client, share in self._excluded_now.items():
            total, count = noted.get(client, (0.0, 0))
            noted[client] = total + share, count + 1
        self.excluded = noted


def number_entries(state: State) -> list[str]:
    """Names of the floating-point and complex entries."""
    return [name for name, value in state.items() if value.is_floating_point() or value.is_complex()]


def majority(values: Sequence[Tensor]) -> Tensor:
    """The lower median of whole numbers: where more than half agree, their value."""
    stacked = torch.stack(list(values))
    ordered = stacked.to(torch.int64).sort(dim=0).values
    return ordered[(len(values) - 1) // 2].to(stacked.dtype)
