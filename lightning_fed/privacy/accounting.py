"""Privacy budgets: computes the privacy loss for a given noise, or the noise for a given privacy loss.

Requires ``dp-accounting`` (``pip install lightning-fed[privacy]``), imported on first use.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from scipy.optimize import brentq

from lightning_fed.argument_checks import check_count, check_inside, check_option, check_positive
from lightning_fed.errors import OptionError
from lightning_fed.privacy.root_logger import root_logger_as_it_was

_LEAST_NOISE = 0.05  # with less noise the bounds exceed 1,000 and are numerically unreliable
_FINEST_GRID, _COARSEST_GRID = 1e-5, 1e-3  # discretisation of the privacy loss, in nats

Sampling = Literal["poisson", "fixed"]
Accountant = Literal["rdp", "pld"]


@dataclass(frozen=True)
class Budget:
    r"""Noise, sampling and delta of a fit, from which epsilon is computed.

    The budget protects clients. With :class:`DPSGD` it protects examples: replace "client" by "example", and "round" by
    "step". C is the maximum norm of a client's update.

    - With ``"poisson"`` sampling, each client is drawn independently. One client changes the sum of updates by at most
      C, and the noise has standard deviation :math:`z C`.
    - With ``"fixed"`` sampling, a fixed number of clients is drawn. One replaced client changes the sum by at most 2 C,
      and the noise has standard deviation :math:`2 z C`.

    Args:
        noise_multiplier: Noise multiplier :math:`z`: the noise relative to one client's largest change of the sum.
        delta: Probability :math:`\delta` that the privacy loss exceeds epsilon.
        population: Total number of clients.
        cohort: Number of clients per round; the expected number with ``"poisson"``.
        sampling: ``"poisson"`` or ``"fixed"``. The drawn clients must stay secret.
        accountant: Method for computing epsilon: ``"rdp"`` (Rényi divergences, fast) or ``"pld"`` (privacy loss
            distributions, tighter).

    Example:
        >>> Budget(noise_multiplier=2.0, delta=1e-3, population=100, cohort=10).sampling
        'poisson'
    """

    noise_multiplier: float
    delta: float
    population: int
    cohort: int
    sampling: Sampling = "poisson"
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        check_option("sampling", self.sampling, ("poisson", "fixed"))
        check_option("accountant", self.accountant, ("rdp", "pld"))
        check_count("population", self.population)
        check_count("cohort", self.cohort)
        if self.cohort > self.population:
            raise ValueError(
                f"Expected `cohort` to be at most `population` ({self.population}), but got {self.cohort}."
            )
        check_positive("noise_multiplier", self.noise_multiplier)
        check_inside("delta", self.delta)
        if self.sampling == "fixed" and self.accountant == "pld":
            raise ValueError(
                "Expected accountant='rdp' for sampling='fixed', but got 'pld', which provides no bound for this "
                "sampling."
            )

    def epsilon(self, rounds: int) -> float:
        """Computes the epsilon bound after a number of rounds."""
        if check_count("rounds", rounds, 0) == 0:
            return 0.0
        return _epsilon(self, rounds)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


def calibrate(
    epsilon: float,
    delta: float,
    population: int,
    cohort: int,
    rounds: int,
    sampling: Sampling = "poisson",
    accountant: Accountant = "rdp",
) -> Budget:
    """Finds the budget with the smallest noise multiplier (at least 0.05) for a given epsilon.

    Args:
        epsilon: Largest epsilon allowed after all rounds.
        delta: See :class:`Budget`.
        population: Total number of clients.
        cohort: Number of clients per round; the expected number with ``"poisson"``.
        rounds: Total rounds.
        sampling: Sampling of clients, see :class:`Budget`.
        accountant: Method for computing epsilon, see :class:`Budget`.

    Raises:
        ValueError: If an argument is outside its range, or no noise multiplier up to 10,000 suffices.
        ModuleNotFoundError: If ``dp-accounting`` is not installed.
    """
    check_positive("epsilon", epsilon)
    check_count("rounds", rounds)

    def budget(noise_multiplier: float) -> Budget:
        return Budget(noise_multiplier, delta, population, cohort, sampling, accountant)

    def excess(log_z: float) -> float:
        # positive if the noise is insufficient
        return math.log(budget(math.exp(log_z)).epsilon(rounds) / epsilon)

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + math.log(2)
        if high > math.log(1e4):
            raise OptionError(
                f"Expected an epsilon that a noise multiplier of 10,000 can reach, but got {epsilon}: increase epsilon."
            )
    while low == high or excess(low) <= 0:
        low, high = low - math.log(2), low
        if low < math.log(_LEAST_NOISE):
            return budget(_LEAST_NOISE)
    multiplier = math.exp(brentq(excess, low, high, xtol=1e-5))
    return next(
        candidate
        for attempt in range(100)
        if (candidate := budget(multiplier * (1 + attempt * 1e-5))).epsilon(rounds) <= epsilon
    )


def plan_budget(
    noise_multiplier: float | None,
    epsilon: float | None,
    delta: float,
    population: int,
    cohort: int,
    rounds: int | None,
    sampling: Sampling = "poisson",
    accountant: Accountant = "rdp",
) -> Budget:
    """Creates a :class:`Budget` from a noise multiplier, or from the epsilon after all rounds (:func:`calibrate`)."""
    if noise_multiplier is not None:
        return Budget(noise_multiplier, delta, population, cohort, sampling, accountant)
    if epsilon is None or rounds is None or rounds < 1:
        raise OptionError(
            f"Expected a number of rounds (`max_rounds`) to compute the noise for an epsilon, but got {rounds}: set "
            "`max_rounds`, or pass a `noise_multiplier`."
        )
    return calibrate(epsilon, delta, population, cohort, rounds, sampling, accountant)


@contextmanager
def _without_advice() -> Iterator[None]:
    _dp_accounting()
    # absl warns about skipped orders. The bound also holds without these orders.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with root_logger_as_it_was():
            yield
    finally:
        logger.setLevel(level)


@lru_cache(maxsize=1024)
@_without_advice()
def _epsilon(budget: Budget, rounds: int) -> float:
    dp = _dp_accounting()
    orders, divergences = _divergences(budget)
    from_divergences = float(dp.rdp.compute_epsilon(orders, rounds * divergences, budget.delta)[0])
    if budget.accountant == "rdp":
        return from_divergences
    # A coarse grid loosens the bound, mostly for small losses per round, for which a fine grid is fast.
    grid = min(max(from_divergences / 1000, _FINEST_GRID), _COARSEST_GRID)
    accountant = dp.pld.PLDAccountant(_relation(budget), value_discretization_interval=grid)
    return min(from_divergences, float(accountant.compose(_round(budget), rounds).get_epsilon(budget.delta)))


@lru_cache(maxsize=1024)
@_without_advice()
def _divergences(budget: Budget) -> tuple[Any, Any]:
    # Divergences add up over rounds, so one round suffices.
    accountant = _dp_accounting().rdp.RdpAccountant(neighboring_relation=_relation(budget))
    accountant.compose(_round(budget))
    return accountant.orders, accountant.rdp


def _relation(budget: Budget) -> Any:
    relations = _dp_accounting().NeighboringRelation
    return relations.REPLACE_ONE if budget.sampling == "fixed" else relations.ADD_OR_REMOVE_ONE


def _round(budget: Budget) -> Any:
    dp = _dp_accounting()
    gaussian = dp.GaussianDpEvent(budget.noise_multiplier)
    if budget.sampling == "fixed":
        return dp.SampledWithoutReplacementDpEvent(budget.population, budget.cohort, gaussian)
    return dp.PoissonSampledDpEvent(budget.cohort / budget.population, gaussian)


def _dp_accounting() -> Any:
    try:
        return import_module("dp_accounting")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Privacy budgets need the package `dp-accounting`: pip install 'lightning-fed[privacy]'", name=error.name
        ) from error


def budget_of(state: Mapping[str, Any]) -> Budget:
    """Creates a :class:`Budget` from the mapping returned by :meth:`Budget.state_dict`."""
    return Budget(**state)
