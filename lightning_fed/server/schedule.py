"""Draws each round's clients, stragglers, dropouts and seeds.

All draws depend only on seed and round, not on a global random generator.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_fed.argument_checks import check_count, check_option, check_share
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key, derive_seed

# Independent random streams, one per purpose.
_COHORT, _STRAGGLERS, _DROPOUT, _VISIT, _SECOND, _START, _END = range(7)


def default_seed() -> int:
    """Returns the seed set by ``lightning.seed_everything``, or 0 if no seed was set."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


@dataclass(frozen=True)
class Visit:
    """A client's planned local training in one round.

    Args:
        client: The client's name.
        round: Index of the round, from 0.
        seed: Seed for all random draws in this training (data order, dropout, ...).
        epochs: Passes over the client's data, if ``steps`` is ``None``.
        steps: Number of batches, if given.
        portion: Fraction of one epoch for a straggler, in (0, 1). If ``None``, the other numbers apply.
        is_straggler: Whether the client does only part of its local work.
    """

    client: Client
    round: int
    seed: int
    epochs: int = 1
    steps: int | None = None
    portion: float | None = None
    is_straggler: bool = False


def count_visit_batches(visit: Visit, batches_per_epoch: int) -> int:
    """Returns a client's number of training batches in one round."""
    if batches_per_epoch == 0:
        return 0
    if visit.steps is not None:
        return visit.steps
    if visit.portion is not None:  # uniform over 1 .. batches - 1
        return 1 + int(visit.portion * (batches_per_epoch - 1))
    return visit.epochs * batches_per_epoch


@dataclass(frozen=True)
class Cohort:
    """Clients drawn for a round: planned trainings, and clients that never report (``dropped``)."""

    visits: tuple[Visit, ...]
    dropped: tuple[Client, ...] = ()


@dataclass(frozen=True)
class SecretSampling:
    """Settings for drawing clients with a secret key, so that others cannot reproduce the draws.

    Args:
        key: The secret key, a 128-bit integer.
        is_poisson: Whether each client is drawn independently, with probability ``clients_per_round``. Otherwise the
            number of clients is fixed.
    """

    key: int
    is_poisson: bool = True


@dataclass(frozen=True)
class Availability:
    """Simulates stragglers (clients with less local work), and clients that never report.

    Args:
        stragglers: Fraction of stragglers in a round, in [0, 1).
        partial_work: ``"keep"`` aggregates the stragglers' updates, ``"drop"`` excludes stragglers.
        client_dropout: Probability in [0, 1) that a drawn client never reports.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation(local_epochs=5, availability=Availability(stragglers=0.5, client_dropout=0.1))
    """

    stragglers: float = 0.0
    partial_work: Literal["keep", "drop"] = "keep"
    client_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_share("stragglers", self.stragglers)
        check_option("partial_work", self.partial_work, ("keep", "drop"))
        check_share("client_dropout", self.client_dropout)


class Schedule:
    r"""Draws each round's clients, stragglers (clients with less local work), dropouts and seeds.

    Clients are drawn uniformly without replacement. A fraction :math:`C` of :math:`K` clients means
    :math:`m = \max(\lceil C K \rceil, 1)` clients per round (McMahan et al. 2017). With the straggler fraction
    :math:`\delta`, a round has :math:`m - \mathrm{round}(m (1 - \delta))` stragglers (Li et al., "Federated
    Optimization in Heterogeneous Networks", MLSys 2020).

    A straggler trains a random number of epochs, from 1 to ``local_epochs`` - 1. With ``local_steps`` or one epoch, a
    straggler trains a random number of batches. Each drawn client drops out (never reports) with probability
    ``client_dropout``.

    Args:
        seed: Seed for the draws, not negative.
        clients_per_round: Number of clients (int), or fraction (float in (0, 1]).
        local_epochs: Passes over a client's data in a round.
        local_steps: Batches for a client in a round; replaces ``local_epochs``.
        availability: Settings for stragglers and dropouts.

    Attributes:
        secret: Secret key for drawing clients (:class:`SecretSampling`); if ``None``, clients are drawn from ``seed``.

    Example:
        >>> schedule = Schedule(seed=1, clients_per_round=2)
        >>> cohort = schedule.cohort(round=0, clients=range(1_000_000))
        >>> len(cohort.visits), cohort == schedule.cohort(round=0, clients=range(1_000_000))
        (2, True)
    """

    def __init__(
        self,
        seed: int = 0,
        clients_per_round: int | float = 1.0,
        local_epochs: int = 1,
        local_steps: int | None = None,
        availability: Availability = Availability(),
    ) -> None:
        if seed < 0:
            raise ValueError(f"Expected `seed` to be at least 0, but got {seed}.")
        local_epochs = check_count("local_epochs", local_epochs)
        local_steps = None if local_steps is None else check_count("local_steps", local_steps)
        if local_steps is not None and local_epochs != 1:
            raise ValueError(
                f"Expected only one of `local_epochs` and `local_steps`, but got local_epochs={local_epochs} and "
                f"local_steps={local_steps}."
            )
        self.seed = seed
        self.clients_per_round = _count_or_fraction(clients_per_round)
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.availability = availability
        self.secret: SecretSampling | None = None

    def cohort_size(self, population: int) -> int:
        """Returns the number of clients drawn per round from ``population`` clients."""
        if population < 1:
            raise ValueError("Expected at least one client, but got none.")
        if isinstance(self.clients_per_round, float):
            return max(math.ceil(self.clients_per_round * population - 1e-9), 1)  # 0.07 * 100 is a little over 7
        if self.clients_per_round > population:
            raise OptionError(
                f"Expected `clients_per_round` to be at most the number of clients ({population}), but got"
                f" {self.clients_per_round}."
            )
        return self.clients_per_round

    def active_size(self, size: int) -> int:
        return math.floor(size * (1 - self.availability.stragglers) + 0.5 + 1e-9)  # halves are rounded upwards

    def cohort(
        self,
        round: int,
        clients: Sequence[Client],
        drawn: int | None = None,
        always: Sequence[Client] = (),
    ) -> Cohort:
        """Draws a round's clients, with stragglers and dropouts.

        Args:
            round: Index of the round, from 0.
            clients: All clients, in a fixed order.
            drawn: Index of an earlier round whose clients are drawn again; by default, new clients are drawn.
            always: Clients in every round, never stragglers or dropouts.
        """
        chosen = self._draw(_COHORT, round if drawn is None else drawn, clients)
        straggling = self._stragglers(round, len(chosen))
        visits, dropped = [], []
        for position, client in enumerate(chosen):
            if self._drops_out(round, client) and client not in always:
                dropped.append(client)
            else:
                is_straggler = position in straggling and client not in always
                visits.append(self.visit_of(round, client, is_straggler))
        for client in always:
            if client not in chosen:
                if client not in clients:
                    raise OptionError(f"Expected `trusted` or a rule's `always` to name a client, but got {client!r}.")
                visits.append(self.visit_of(round, client))
        return Cohort(tuple(visits), tuple(dropped))

    def served(self, cohort: Cohort) -> Cohort:
        """Returns the clients to train: with ``partial_work="drop"`` the cohort without stragglers."""
        if self.availability.partial_work == "keep":
            return cohort
        return Cohort(tuple(visit for visit in cohort.visits if not visit.is_straggler), cohort.dropped)

    def second_draw(self, round: int, clients: Sequence[Client]) -> list[Client]:
        """Draws a second set of clients, without dropouts, on which FedDANE computes gradients."""
        chosen = self._draw(_SECOND, round, clients)
        return [client for client in chosen if not self._drops_out(round, client)]

    def start_seed(self, round: int) -> int:
        """Returns the seed for the server's random draws at the start of a round."""
        return derive_seed(self.seed, round, _START)

    def end_seed(self, round: int) -> int:
        """Returns the seed for random draws in a round's aggregation and validation."""
        return derive_seed(self.seed, round, _END)

    def _draw(self, purpose: int, round: int, clients: Sequence[Client]) -> list[Client]:
        size = self.cohort_size(len(clients))
        if size == len(clients):
            return list(clients)
        generator = self._generator(purpose, round)
        if self.secret is not None:
            generator = np.random.default_rng([self.secret.key, round, purpose])
            if self.secret.is_poisson:  # draws the number first, then the clients: equivalent to independent draws
                size = int(generator.binomial(len(clients), size / len(clients)))
        positions = generator.choice(len(clients), size, replace=False)
        return [clients[int(position)] for position in np.sort(positions)]

    def _stragglers(self, round: int, size: int) -> set[int]:
        order = self._generator(_STRAGGLERS, round).permutation(size)
        return {int(position) for position in order[self.active_size(size) :]}

    def _drops_out(self, round: int, client: Client) -> bool:
        share = self.availability.client_dropout
        return share > 0 and bool(self._generator(_DROPOUT, round, client_key(client)).random() < share)

    def visit_of(self, round: int, client: Client, is_straggler: bool = False) -> Visit:
        """Plans a client's training in a round. A straggler gets less work, but the same seed."""
        key = client_key(client)
        seed = derive_seed(self.seed, round, _VISIT, key)
        epochs, steps, portion = self.local_epochs, self.local_steps, None
        if is_straggler:
            draw = self._generator(_STRAGGLERS, round, key)
            if steps is not None:
                steps = int(draw.integers(1, steps)) if steps > 1 else 1
            elif epochs > 1:
                epochs = int(draw.integers(1, epochs))
            else:
                portion = float(draw.random())
        return Visit(client, round, seed, epochs, steps, portion, is_straggler)

    def _generator(self, purpose: int, round: int, *keys: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, round, purpose, *keys])


def _count_or_fraction(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"Expected `clients_per_round` to be a count (int) or a fraction (float), but got {value!r}.")
    if isinstance(value, numbers.Integral):
        return check_count("clients_per_round", value)
    if not 0 < float(value) <= 1:
        raise ValueError(
            f"Expected `clients_per_round` as a fraction to be in (0, 1], but got {value}: pass an int for a number "
            "of clients."
        )
    return float(value)
