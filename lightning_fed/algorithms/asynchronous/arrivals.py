"""Arrival times of client updates: simulated by a virtual clock, or read from a file."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_fed.argument_checks import check_nonnegative
from lightning_fed.data.population import Population
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client, plain_keys
from lightning_fed.numerics.seeds import client_key
from lightning_fed.server.schedule import Schedule, Visit, count_visit_batches

# Independent random streams.
_CLIENT, _VISIT, _START = range(100, 103)


@dataclass(frozen=True)
class Durations:
    r"""Simulated durations of clients' training, a pure function of seed, client and model version.

    Training with :math:`n` batches takes :math:`e + n b \exp(\sigma z_k + \tau z_{k,v})` seconds. The standard normal
    numbers :math:`z_k` and :math:`z_{k,v}` depend on client :math:`k`, and on client and model version :math:`v`. To
    use measured durations, override :meth:`seconds` in a subclass.

    Args:
        batch: Median seconds per batch, :math:`b`.
        spread: Standard deviation :math:`\sigma` of log durations over clients; 0 if all clients are equally fast.
        jitter: Standard deviation :math:`\tau` of log durations over one client's trainings.
        exchange: Seconds for messages per training, :math:`e`.

    Raises:
        ValueError: If an argument is negative or not finite.

    Example:
        >>> durations = Durations(batch=2.0, spread=0.0, exchange=5.0)
        >>> durations.seconds(seed=0, client="a", version=3, batches=10)
        25.0
    """

    batch: float = 1.0
    spread: float = 1.0
    jitter: float = 0.0
    exchange: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_nonnegative(name, value)

    def seconds(self, seed: int, client: Client, version: int, batches: int) -> float:
        """Simulated seconds from sending global model ``version`` to a client until the client's update arrives."""
        key = client_key(client)
        speed = np.random.default_rng([seed, _CLIENT, key]).standard_normal()
        chance = np.random.default_rng([seed, _VISIT, key, version]).standard_normal()
        return self.exchange + batches * self.batch * exp(self.spread * speed + self.jitter * chance)


class Arrival(NamedTuple):
    """One client's training: simulated arrival time of the update, running number, client, initial model's version."""

    seconds: float
    number: int
    client: Client
    version: int


class Order(ABC):
    """Base class for the order in which client updates reach the server.

    ``flying`` maps each client that trains on another machine to the version of the received global model.
    """

    flying: Mapping[Client, int] = {}

    @abstractmethod
    def arrivals(self, round: int, schedule: Schedule, population: Population) -> Sequence[Arrival]:
        """Returns the trainings with an update in round ``round``, in the order of the updates' arrival."""

    @abstractmethod
    def versions(self, round: int) -> Collection[int]:
        """Returns the global model versions from which clients still train when round ``round`` starts."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Restores the clients in training from :meth:`state_dict`. In the base class the state is empty."""


@dataclass(frozen=True)
class Clock:
    """State of the simulated clock before a round: time, number of started trainings, and unfinished trainings."""

    round: int = 0
    seconds: float = 0.0
    started: int = 0
    flying: tuple[Arrival, ...] = ()


class VirtualOrder(Order):
    """Arrival order computed from simulated durations. Equal arrival times are ordered by start time."""

    def __init__(self, durations: Durations, buffer: int) -> None:
        self.durations, self.buffer = durations, buffer
        self.clock = Clock()  # before the current or the next round
        self._planned: dict[int, Clock] = {}

    def arrivals(self, round: int, schedule: Schedule, population: Population) -> Sequence[Arrival]:
        if self.buffer > len(population.clients):
            raise OptionError(
                f"Expected `buffer` to be at most the number of clients ({len(population.clients)}), but got "
                f"{self.buffer}: a client has at most one update in the buffer."
            )
        clocks = self._planned | {self.clock.round: self.clock}
        clock = clocks.get(max((known for known in clocks if known <= round), default=0), Clock())
        current, population.round = population.round, round
        while clock.round <= round:
            arrived, clock = self._advance(clock, schedule, population)
            self._planned[clock.round] = clock
        population.round = current
        return arrived

    def versions(self, round: int) -> Collection[int]:
        self.clock = self._planned.get(round, self.clock)
        self._planned = {later: clock for later, clock in self._planned.items() if later == round + 1}
        return {arrival.version for arrival in self.clock.flying}

    def state_dict(self) -> dict[str, Any]:
        flying = [[*arrival[:2], *plain_keys([arrival.client]), arrival.version] for arrival in self.clock.flying]
        return {**vars(self.clock), "flying": flying}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock = Clock(**{**state, "flying": tuple(Arrival(*arrival) for arrival in state["flying"])})
        self._planned = {}

    def _advance(self, clock: Clock, schedule: Schedule, population: Population) -> tuple[list[Arrival], Clock]:
        clients, arrived, flying = population.clients, list[Arrival](), list(clock.flying)
        while len(arrived) < self.buffer:
            busy = {arrival.client for arrival in (*flying, *arrived)}
            free = schedule.cohort_size(len(clients)) - len(flying)
            for client in _draw(clients, busy, free, schedule.seed, clock.started):
                seconds = clock.seconds + self._seconds(
                    schedule.visit_of(clock.round, client), schedule.seed, population
                )
                heappush(flying, Arrival(seconds, clock.started, client, clock.round))
                clock = replace(clock, started=clock.started + 1)
            arrived.append(heappop(flying))
            clock = replace(clock, seconds=arrived[-1].seconds)
        return arrived, replace(clock, round=clock.round + 1, flying=tuple(flying))

    def _seconds(self, visit: Visit, seed: int, population: Population) -> float:
        try:
            per_epoch = population.batches_per_epoch(visit.client)
        except Exception:  # the round reports the error and excludes the client
            per_epoch = 0
        if per_epoch is None and visit.steps is None:
            raise OptionError(
                f"Expected `local_steps` to be set, because the loader of client {visit.client!r} has no length."
            )
        batches = count_visit_batches(visit, 1 if per_epoch is None else per_epoch)
        return self.durations.seconds(seed, visit.client, visit.round, batches)


class RecordedOrder(Order):
    """Arrival order from a file. A line is a JSON list: round, client, start model version, and the update's hash."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines = list(read_lines(path))

    def arrivals(self, round: int, schedule: Schedule, population: Population) -> Sequence[Arrival]:
        last = max((line[0] for line in self.lines), default=-1)
        if round > last:
            raise OptionError(
                f"Expected `replay` to contain round {round + 1}, but {self.path!r} ends with round {last + 1}: "
                f"train at most {last + 1} rounds."
            )
        lines = enumerate(self.of_round(round))  # none after a round without an update
        return [Arrival(0.0, number, client, version) for number, (_, client, version, _) in lines]

    def versions(self, round: int) -> Collection[int]:
        return {version for arrived, _, version, _ in self.lines if arrived >= round > version}

    def of_round(self, round: int) -> list[list[Any]]:
        return [line for line in self.lines if line[0] == round]


class NetworkOrder(Order):
    """Arrival order on a network: client updates arrive in real time.

    A failed round does not reset the order, because clients do not send updates again. Only a restarted server
    loads an earlier order, from the checkpoint.
    """

    def __init__(self) -> None:
        self.flying: dict[Client, int] = {}
        self._started = 0
        self._is_running = False

    def arrivals(self, round: int, schedule: Schedule, population: Population) -> Sequence[Arrival]:
        return ()  # a client is only known after the client's update has arrived

    def versions(self, round: int) -> Collection[int]:
        return self.flying.values()

    def start(
        self, schedule: Schedule, clients: Sequence[Client], busy: Collection[Client], version: int
    ) -> list[Client]:
        """Draws and returns new clients, outside ``busy``, for model ``version``: ``clients_per_round`` then train."""
        free = schedule.cohort_size(len(clients)) - len(self.flying)
        drawn = _draw(clients, {*busy, *self.flying}, free, schedule.seed, self._started)
        self.flying |= dict.fromkeys(drawn, version)
        self._started, self._is_running = self._started + len(drawn), True
        return drawn

    def state_dict(self) -> dict[str, Any]:
        clients = plain_keys(self.flying)
        return {"clients": clients, "versions": list(self.flying.values()), "started": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._is_running:
            self.flying = dict(zip(state.get("clients", ()), state.get("versions", ()), strict=True))
            self._started = state.get("started", 0)


def read_lines(path: str) -> Iterator[list[Any]]:
    """Yields the lines in an arrival order file. An incomplete last line, without a line break, is skipped."""
    for line in Path(path).read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _draw(clients: Sequence[Client], busy: Collection[Client], count: int, seed: int, number: int) -> list[Client]:
    if count >= len(clients) - len(busy):
        return [client for client in clients if client not in busy]
    positions = set[int]()
    for start in range(number, number + count):
        generator, position = np.random.default_rng([seed, _START, start]), -1
        while position < 0 or position in positions or clients[position] in busy:
            position = int(generator.integers(len(clients)))
        positions.add(position)
    return [clients[position] for position in sorted(positions)]
