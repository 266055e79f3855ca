"""Base classes of simulated attacks by malicious clients on a federation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import lightning as L
import numpy as np

from lightning_fed.argument_checks import check_count
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.errors import OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client, State
from lightning_fed.model.entries import is_running_statistic
from lightning_fed.steps.update_step import UpdateStep


class Attack:
    """Base class of simulated attacks by some malicious clients.

    Args:
        clients: Names of the malicious clients, or the number of clients to draw at random.
        seed: Seed for drawing clients and for random attacks.

    Raises:
        ValueError: If an argument is invalid; in a fit, if a client is unknown or clients are too few.
    """

    def __init__(self, clients: Sequence[Client] | int, seed: int = 0) -> None:
        if isinstance(clients, str):
            raise ValueError(f"Expected `clients` to be a list of names or a number, but got {clients!r}.")
        self.clients = tuple(clients) if isinstance(clients, Sequence) else check_count("clients", clients, lowest=0)
        self.seed = check_count("seed", seed, lowest=0)

    @property
    def needs_population(self) -> str:
        """Explains why the attack needs a list of all clients; empty if the attack needs no list."""
        is_drawn = isinstance(self.clients, int)
        return (
            "the attack draws the malicious clients from all clients: name the malicious clients instead"
            if is_drawn
            else ""
        )

    def malicious(self, population: Sequence[Client]) -> frozenset[Client]:
        """Returns the malicious clients. Raises ``ValueError`` if ``population`` has too few clients."""
        if not isinstance(self.clients, int):
            return frozenset(self.clients)
        if self.clients > len(population):
            raise OptionError(
                f"Expected `clients` to be at most {len(population)} (all clients), but got {self.clients}."
            )
        return frozenset(population[position] for position in _draw(len(population), self.clients, self.seed))

    def check_clients(self, population: Sequence[Client]) -> None:
        unknown = sorted(repr(client) for client in self.malicious(population) if client not in population)
        if unknown:
            raise OptionError(f"Expected `clients` to be clients of the federation, but got {', '.join(unknown)}.")


@lru_cache
def _draw(size: int, count: int, seed: int) -> tuple[int, ...]:
    # cached, because attacks on data ask for every batch
    generator = np.random.default_rng([seed])
    return tuple(int(position) for position in generator.choice(size, count, replace=False))


class AttackStep(Attack, UpdateStep):
    """Base class of update steps that attack updates. In ``steps``, place attacks last, but before compression."""

    def callbacks(self) -> Sequence[Any]:
        return [AttackCheck(self)]


class AttackCheck(FederatedCallback):
    """Raises an error if an attack on updates names an unknown client."""

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, attack: Attack) -> None:
        self.needs_local_clients = attack.needs_population

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        for step in federation.server.chain.steps:
            if isinstance(step, Attack):
                step.check_clients(federation.population.clients)


def attacked_entries(state: State) -> list[str]:
    """Names of the tensors changed by attacks: floating-point parameters and buffers, except running statistics."""
    return [
        name
        for name, value in state.items()
        if (value.is_floating_point() or value.is_complex()) and not is_running_statistic(name)
    ]
