"""The robust rules against byzfl 0.0.11, if installed (``pip install lightning-fed[oracles]``).

The arguments translate different definitions: byzfl's Krum sums ``n - f - 1`` distances, as ours does with one
malicious client fewer, and byzfl's geometric median defaults to three iterations from 0.
"""

import numpy as np
import pytest

from lightning_fed.algorithms import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from lightning_fed.attacks import ALIE, IPM, HonestSteps
from tests.algorithms.robust.test_rules import WIDTH, aggregated, joined, matrix, split
from tests.algorithms.robust.test_rules import mixtures as steps

aggregators = pytest.importorskip("byzfl.aggregators.aggregators", reason="byzfl is not installed")
mixtures = pytest.importorskip("byzfl.aggregators.preaggregators", reason="byzfl is not installed")
attacks = pytest.importorskip("byzfl.attacks.attacks", reason="byzfl is not installed")

PAIRS = {
    "median": (Median, lambda f: aggregators.Median()),
    "trimmed mean": (TrimmedMean, aggregators.TrMean),
    "krum": (Krum, lambda f: aggregators.Krum(f + 1)),
    "multi-krum": (lambda f: MultiKrum(f, len_of_selected(f)), lambda f: aggregators.MultiKrum(f + 1)),
    "geometric median": (
        lambda f: GeometricMedian(f, 1e-6),
        lambda f: aggregators.GeometricMedian(nu=1e-6, T=3000),
    ),
    "centered clipping": (
        lambda f: CenteredClipping(3.0, 4, f),
        lambda f: aggregators.CenteredClipping(L=4, tau=3.0),
    ),
    "norm clipping": (
        lambda f: NormClipping(2.5),
        lambda f: lambda rows: mixtures.Clipping(c=2.5)(rows).mean(0),
    ),
}
SIZE = 11


def len_of_selected(f):
    return SIZE - f - 1


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("f", [1, 3])
@pytest.mark.parametrize("before", [[], ["nnm"], ["arc"], ["arc", "nnm"]])
def test_the_rules_are_byzfls(name, f, before):
    make, oracle = PAIRS[name]
    for seed in range(3):
        rows = matrix(SIZE, seed, f)
        expected = rows.copy()
        for mixture in before:
            expected = {"nnm": mixtures.NNM, "arc": mixtures.ARC}[mixture](f)(expected)
        result = aggregated(make(f), rows, steps=steps(before, f))
        np.testing.assert_allclose(result, oracle(f)(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (IPM(1, tau=0.7), attacks.InnerProductManipulation(0.7)),
        (ALIE(1, z=1.2), attacks.ALittleIsEnough(1.2)),
    ],
)
def test_the_attacks_are_byzfls(ours, theirs):
    rows, honest = matrix(6), HonestSteps()
    for number, row in enumerate(rows):
        honest.add(f"c{number}", split(row))
    fake = joined(ours.fake(honest))
    assert fake.shape == (WIDTH,)
    np.testing.assert_allclose(fake, theirs(rows), rtol=1e-9, atol=1e-9)
