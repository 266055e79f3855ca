"""Budgets: the numbers in specs/privacy.md, calibration, and refusals."""

import logging
import math
import sys
from importlib.util import find_spec
from statistics import NormalDist

import pytest
from torch import nn

from lightning_fed.privacy import Budget, calibrate
from lightning_fed.privacy.gradients import find_unsupported
from tests.breadth import quick, slow

# Cohort, population, rounds, delta: epsilon by noise multiplier, from Rényi divergences and from loss distributions.
# The latter are at most 2.4 % above `dp-accounting` with steps of 2e-5 (z = 1 in the first row).
VECTORS = {
    (1, 1000, 1500, 1e-6): {0.5: (5.5632, 4.4694), 1: (0.8758, 0.2267), 2: (0.1784, 0.0762), 5: (0.0364, 0.0262)},
    (5, 1000, 2000, 1e-6): {0.5: (13.5714, 11.8105), 1: (1.7257, 1.4070), 2: (0.5342, 0.4934), 5: (0.1968, 0.1719)},
    (10, 100, 100, 1e-3): {0.5: (30.3879, 22.5691), 1: (5.6551, 4.7844), 2: (1.7990, 1.5439), 5: (0.5527, 0.4694)},
    (7, 7, 50, 1e-2): {0.5: (140.3225, 131.9748), 1: (44.4190, 40.5883), 2: (15.4608, 13.7127), 5: (4.3405, 3.7075)},
}
needs_accountant = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="dp-accounting is not installed")


@needs_accountant
@pytest.mark.parametrize(
    "setting", [key if key[0] == 5 else pytest.param(key, marks=pytest.mark.slow) for key in VECTORS]
)
def test_the_numbers_of_the_spec(setting):
    cohort, population, rounds, delta = setting
    for z, (rdp, pld) in VECTORS[setting].items():
        assert Budget(z, delta, population, cohort).epsilon(rounds) == pytest.approx(rdp, abs=1e-3)
        tighter = Budget(z, delta, population, cohort, accountant="pld")
        assert tighter.epsilon(rounds) == pytest.approx(pld, abs=1e-3)


@needs_accountant
@pytest.mark.parametrize(("z", "epsilon"), [slow((1, 10.8154)), (2, 3.9845), slow((5, 1.2455))])
def test_a_cohort_of_a_fixed_size(z, epsilon):
    assert Budget(z, 1e-3, 100, 10, "fixed").epsilon(100) == pytest.approx(epsilon, abs=1e-3)


@needs_accountant
@pytest.mark.parametrize("sampling", quick(["poisson", "fixed"], ["poisson"]))
def test_rounds_are_composed_as_by_the_library(sampling):
    import dp_accounting as dp

    gaussian = dp.GaussianDpEvent(0.9)
    relation, event = {
        "poisson": (dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.PoissonSampledDpEvent(0.03, gaussian)),
        "fixed": (dp.NeighboringRelation.REPLACE_ONE, dp.SampledWithoutReplacementDpEvent(100, 3, gaussian)),
    }[sampling]
    for rounds in (1, 2, 77):
        accountant = dp.rdp.RdpAccountant(neighboring_relation=relation).compose(event, rounds)
        assert Budget(0.9, 1e-5, 100, 3, sampling).epsilon(rounds) == accountant.get_epsilon(1e-5)


@needs_accountant
@pytest.mark.parametrize(
    ("cohort", "rounds", "accountant", "z"),
    [(1, 1500, "rdp", 0.7138), slow((5, 2000, "rdp", 0.9401)), slow((1, 1500, "pld", 0.6162))],
)
def test_the_noise_of_an_epsilon(cohort, rounds, accountant, z):
    """The smallest sufficient noise."""
    budget = calibrate(2.0, 1e-6, 1000, cohort, rounds, accountant=accountant)
    assert budget.noise_multiplier == pytest.approx(z, rel=1e-3)
    assert 1.99 < budget.epsilon(rounds) <= 2.0


@needs_accountant
@pytest.mark.parametrize(("z", "rounds"), [(2000.0, 1000), (200.0, 100), (4.0, 10)])
def test_a_tight_bound_beside_the_closed_form(z, rounds):
    """Rounds with all clients form one Gaussian mechanism with known delta (Balle and Wang 2018, theorem 8)."""
    ratio, normal = math.sqrt(rounds) / z, NormalDist().cdf
    epsilon = Budget(z, 1e-5, 100, 100, accountant="pld").epsilon(rounds)

    def delta(epsilon):
        lost = normal(-ratio / 2 - epsilon / ratio)
        return normal(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * lost

    assert delta(epsilon) <= 1e-5 < delta(0.995 * epsilon)


@needs_accountant
@pytest.mark.parametrize(("z", "rounds", "least"), [(5.0, 1500, 0.0261), (20.0, 10_000, 0.0160)])
def test_a_tight_bound_of_rounds_that_tell_little(z, rounds, least):
    """`dp-accounting` with steps of 1e-5; steps of 1e-3 would give the larger bounds 0.054 and 0.071."""
    tight = Budget(z, 1e-6, 1000, 1, accountant="pld").epsilon(rounds)
    assert tight == pytest.approx(least, rel=0.02)
    assert tight < Budget(z, 1e-6, 1000, 1).epsilon(rounds)


@needs_accountant
def test_no_round_costs_nothing():
    assert Budget(1.0, 1e-3, 100, 10).epsilon(0) == 0
    for rounds in (-1, 2.5):
        with pytest.raises(ValueError, match="`rounds` to be"):
            Budget(1.0, 1e-3, 100, 10).epsilon(rounds)
    with pytest.raises(ValueError, match=r"an epsilon that a noise multiplier of 10,000 can reach, but got 1e-09"):
        calibrate(1e-9, 1e-6, 10, 10, 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1e-3, 10, 2), "`noise_multiplier` to be greater than 0 and finite, but got 0.0"),
        ((1.0, 1.0, 10, 2), r"`delta` to be in \(0, 1\), but got 1.0"),
        ((1.0, 1e-3, 10, 11), "`cohort` to be at most `population` .10., but got 11"),
        ((1.0, 1e-3, 10, 2, "some"), r"`sampling` to be one of \['poisson', 'fixed'\], but got 'some'"),
        ((1.0, 1e-3, 10, 2, "fixed", "pld"), "accountant='rdp' for sampling='fixed'"),
    ],
)
def test_budgets_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Budget(*arguments)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-fed\[privacy\]'"):
        Budget(1.234, 1e-3, 10, 2).epsilon(3)


def test_without_the_package_of_examples_gradients(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opacus.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(ModuleNotFoundError, match=r"`DPSGD` needs .* pip install 'lightning-fed\[privacy\]'"):
        find_unsupported(nn.Linear(1, 1))


@needs_accountant
def test_logging_is_set_up_by_the_program_alone(monkeypatch):
    """For this budget orders do not converge, and the library warns through absl."""
    level = logging.getLogger("absl").level
    monkeypatch.setattr(logging.root, "handlers", [])
    Budget(1.0, 1.1e-5, population=1001, cohort=100).epsilon(10)  # not in the cache of another test
    assert logging.root.handlers == []
    assert logging.getLogger("absl").level == level
