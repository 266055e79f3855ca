"""Arrival times of client updates in asynchronous training."""

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
    r"""Simulated durations of the clients' local training.

    Training with :math:`n` batches takes :math:`e + n b \exp(\sigma z_k + \tau z_{k,v})` seconds. Here :math:`z_k` and
    :math:`z_{k,v}` are standard normal random numbers: :math:`z_k` for each client :math:`k`, and :math:`z_{k,v}` for
    each client and global model :math:`v`. To use measured durations, override :meth:`seconds`.

    Args:
        batch: Median seconds per batch, :math:`b`.
        spread: Standard deviation :math:`\sigma` of log durations between clients; 0 for equally fast clients.
        jitter: Standard deviation :math:`\tau` of one client's log durations.
        exchange: Seconds for sending messages, :math:`e`.

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
        """Returns the simulated seconds from sending a global model to receiving the client's update."""
        key = client_key(client)
        speed = np.random.default_rng([seed, _CLIENT, key]).standard_normal()
        chance = np.random.default_rng([seed, _VISIT, key, version]).standard_normal()
        return self.exchange + batches * self.batch * exp(self.spread * speed + self.jitter * chance)


class Arrival(NamedTuple):
    """One client's training, with arrival time, running number, and version of the received model."""

    seconds: float
    number: int
    client: Client
    version: int


class Order(ABC):
    """Base class for the order in which client updates reach the server.

    ``flying`` maps each client in training to the number of the global model from which the client started.
    """

    flying: Mapping[Client, int] = {}

    @abstractmethod
    def arrivals(self, round: int, schedule: Schedule, population: Population) -> Sequence[Arrival]:
        """Lists a round's client updates in order of arrival. Empty if the order is unknown in advance."""

    @abstractmethod
    def versions(self, round: int) -> Collection[int]:
        """Returns the model versions in use by unfinished trainings at the start of a round."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Restores the state from :meth:`state_dict`. The base class has no state."""


@dataclass(frozen=True)
class Clock:
    """State at the start of a simulated round: time, number of started trainings, and trainings still running."""

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
    """Reads the order of client updates from a file.

    Each line is a JSON list: round, client, number of the client's initial global model, and the update's hash.
    """

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
    """Selects clients on a network to train next, and tracks the clients in training.

    Updates arrive in real time, in an unknown order. A restarted server loads the tracked clients from a checkpoint.
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
        """Selects idle clients until ``clients_per_round`` clients train, and returns the selected clients.

        Clients in ``busy`` are not selected. The selected clients start from global model ``version``.
        """
        free = schedule.cohort_size(len(clients)) - len(self.flying)
        drawn = _draw(clients, {*busy, *self.flying}, free, schedule.seed, self._started)
        self.flying |= dict.fromkeys(drawn, version)
        self._started, self._is_running = self._started + len(drawn), True
        return drawn

    def state_dict(self) -> dict[str, Any]:
        clients = plain_keys(self.flying)
        return {"clients": clients, "versions": list(self.flying.values()), "started": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._is_running:  # a failed round is not undone: clients send each update once
            self.flying = dict(zip(state.get("clients", ()), state.get("versions", ()), strict=True))
            self._started = state.get("started", 0)


def read_lines(path: str) -> Iterator[list[Any]]:
    """Yields the complete lines in a file with an arrival order."""
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
