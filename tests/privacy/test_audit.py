"""Audits: the bound from guesses, and canaries in the rule with full noise, reduced noise and no noise."""

import math

import pytest
import torch
from scipy.stats import binom

from lightning_fed.privacy import Budget, CentralDP, audit_mean, empirical_epsilon
from tests.breadth import quick, slow


@pytest.mark.parametrize(("guesses", "correct"), [(100, 100), (100, 80), (40, 31)])
def test_the_bound_of_guesses_without_delta(guesses, correct):
    """This many correct guesses or more have probability 0.05 under the epsilon."""
    epsilon = empirical_epsilon(1000, guesses, correct, 0.0)
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert sum(binom.pmf(k, guesses, chance) for k in range(correct, guesses + 1)) == pytest.approx(0.05, abs=1e-4)


def test_delta_and_confidence_lower_the_bound():
    bounds = [empirical_epsilon(100, 100, 95, delta) for delta in (0.0, 1e-5, 1e-3)]
    assert bounds[0] > bounds[1] > bounds[2]
    assert empirical_epsilon(100, 100, 95, 0.0, 0.99) < bounds[0]
    assert empirical_epsilon(100, 100, 95, 0.5) == 0.0


needs_accountant = pytest.mark.usefixtures("accountant")


@pytest.fixture
def accountant():
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")


@needs_accountant
@pytest.mark.parametrize(
    ("budget", "rounds", "least"),
    [
        (Budget(0.5, 1e-5, 600, 600), 1, 0.5),
        slow((Budget(1.5, 1e-5, 600, 600), 8, 0.5)),
        slow((Budget(0.5, 1e-5, 600, 60), 10, 0.0)),
        slow((Budget(0.5, 1e-5, 600, 60, "fixed"), 10, 0.0)),
    ],
)
def test_the_bound_is_below_what_is_claimed(budget, rounds, least):
    """The lower bound is positive for small noise. An audit fails once in twenty, so two of five may fail."""
    audits = [audit_mean(budget, rounds, 600, seed=seed, key_for_tests=seed) for seed in range(5)]
    assert sorted(audit.lower_bound <= audit.claimed for audit in audits)[2]
    assert sorted(audit.lower_bound for audit in audits)[2] >= least
    assert {audit.num_guesses for audit in audits} == {120}


@needs_accountant
@pytest.mark.parametrize("share", quick([0.0, 0.2], [0.2]))
def test_without_its_noise_a_mechanism_is_found_out(share, monkeypatch):
    """No noise, or a fifth of the noise, as if divided by the number of clients."""
    made = CentralDP.noise

    def less(step, name, shape, std):
        return share * made(step, name, shape, std) if name else torch.zeros(shape, dtype=torch.float64)

    budget = Budget(4.0, 1e-5, 1000, 1000)
    honest = audit_mean(budget, 4, 1000, key_for_tests=5)
    assert honest.lower_bound <= honest.claimed < 3.5
    monkeypatch.setattr(CentralDP, "noise", less)
    found = audit_mean(budget, 4, 1000, key_for_tests=5)
    assert found.lower_bound > found.claimed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_canaries": 11}, "`num_canaries` to be at most 10 .all clients., but got 11"),
        ({"num_canaries": 10, "share": 0.1}, "`share`, .*, to be from 2/10 .for two guesses. to 1, but got 0.1"),
        ({"num_canaries": 10, "share": 1.3}, "`share`, .*, to be from 2/10 .for two guesses. to 1, but got 1.3"),
    ],
)
def test_audits_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        audit_mean(Budget(1.0, 1e-3, 10, 10), 1, **options)
