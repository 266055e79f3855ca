"""Privacy audit: computes a lower bound for epsilon with artificial clients (canaries).

Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023. https://arxiv.org/abs/2305.08846
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import binom

from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.argument_checks import check_count
from lightning_fed.messages import ClientUpdate
from lightning_fed.privacy.accounting import Budget
from lightning_fed.privacy.central import CentralDP
from lightning_fed.rule import RoundInfo
from lightning_fed.server.schedule import Schedule, SecretSampling
from lightning_fed.server.server import Server
from lightning_fed.steps.chain import Chain


@dataclass(frozen=True)
class Audit:
    """Result of a privacy audit, with bounds for epsilon.

    Args:
        num_canaries: Number of canaries, which are artificial clients included with probability 1/2.
        num_guesses: Number of canaries guessed as included or excluded.
        num_correct: Number of correct guesses.
        lower_bound: Lower bound of epsilon, measured by the audit at the requested confidence.
        claimed: Upper bound of epsilon, computed for the privacy budget.
    """

    num_canaries: int
    num_guesses: int
    num_correct: int
    lower_bound: float
    claimed: float


def audit_mean(
    budget: Budget,
    rounds: int,
    num_canaries: int = 1000,
    share: float = 0.2,
    seed: int = 0,
    confidence: float = 0.95,
    key_for_tests: int | None = None,
) -> Audit:
    """Measures a lower bound for epsilon in :class:`~lightning_fed.privacy.CentralDP`.

    Canaries are artificial clients, each included with probability 1/2. The model has one coordinate per canary. An
    update of an included canary changes this coordinate by the clipping norm. Afterwards the audit guesses that
    canaries with the largest coordinates were included, and canaries with the smallest were excluded. No client trains.
    The lower bound is at most about the logarithm of the guess count.

    Args:
        budget: Privacy budget, with at least ``num_canaries`` clients.
        rounds: Number of rounds.
        num_canaries: Number of canary clients.
        share: Fraction of canaries to guess, half as "included", half as "excluded".
        seed: Seed for choosing the included canaries.
        confidence: Confidence level of the lower bound.
        key_for_tests: Noise key, only for tests; by default, a secret key is drawn.

    Raises:
        ValueError: If there are more canaries than clients, or ``share`` gives fewer than two guesses.

    Example:
        >>> audit = audit_mean(Budget(0.5, 1e-3, 100, 100), rounds=1, num_canaries=100)  # doctest: +SKIP
        >>> audit.lower_bound < audit.claimed  # doctest: +SKIP
        True
    """
    if not 1 <= check_count("num_canaries", num_canaries) <= budget.population:
        raise ValueError(
            f"Expected `num_canaries` to be at most {budget.population} (all clients), but got {num_canaries}."
        )
    half = int(share * num_canaries / 2)
    if not 1 <= half <= num_canaries // 2:
        raise ValueError(
            f"Expected `share`, the fraction of canaries to guess, to be from 2/{num_canaries} (for two guesses) to 1, "
            f"but got {share}."
        )
    is_there = np.random.default_rng([seed]).random(num_canaries) < 0.5
    dp = CentralDP(1.0, budget.delta, budget.noise_multiplier, sampling=budget.sampling, accountant=budget.accountant)
    key = dp.draw_key() if key_for_tests is None else key_for_tests
    dp.begin(budget, key)
    server = Server(Chain(FedAvg(), [dp]))
    schedule = Schedule(clients_per_round=budget.cohort)
    schedule.secret = SecretSampling(key, budget.sampling == "poisson")
    scores = torch.zeros(num_canaries, dtype=torch.float64)
    for round in range(rounds):
        start = torch.zeros(num_canaries, dtype=torch.float64)
        server.start_round(RoundInfo(round), {"model": start})
        for visit in schedule.cohort(round, range(budget.population)).visits:
            client = int(visit.client)
            server.sent(client, server.prepare(client))
            state = start.clone()
            if client < num_canaries and is_there[client]:
                state[client] = 1.0
            server.accept(ClientUpdate(client, 1, {"model": state}))
        new = server.finish_round()
        assert new is not None
        scores += new["model"]
    order = scores.argsort(descending=True).numpy()
    correct = int(is_there[order[:half]].sum() + (~is_there[order[-half:]]).sum())
    bound = empirical_epsilon(num_canaries, 2 * half, correct, budget.delta, confidence)
    return Audit(num_canaries, 2 * half, correct, bound, budget.epsilon(rounds))


def empirical_epsilon(
    num_canaries: int, num_guesses: int, num_correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Lower bound of epsilon, from guesses about the use of artificial clients (canaries) in the training.

    Args:
        num_canaries: Number of canaries, each included with probability 1/2.
        num_guesses: Number of canaries guessed as included or excluded.
        num_correct: Number of correct guesses.
        delta: Probability that the privacy loss exceeds epsilon.
        confidence: Confidence level of the bound.

    Example:
        >>> round(empirical_epsilon(100, 100, 100, 0.0), 2), empirical_epsilon(100, 100, 50, 0.0)
        (3.49, 0.0)

    Reference: Steinke et al., NeurIPS 2023, Theorem 5.2 and Appendix D.
    """

    def p_value(epsilon: float) -> float:
        correct_by_chance = 1 / (1 + np.exp(-epsilon))
        beta = float(binom.sf(num_correct - 1, num_guesses, correct_by_chance))
        numbers = np.arange(1, num_correct + 1)
        sums = np.cumsum(binom.pmf(num_correct - numbers, num_guesses, correct_by_chance))
        alpha = float((sums / numbers).max(initial=0.0))
        return beta + alpha * delta * 2 * num_canaries

    low, high = 0.0, 100.0
    if p_value(low) >= 1 - confidence:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) < 1 - confidence else (low, middle)
    return low
