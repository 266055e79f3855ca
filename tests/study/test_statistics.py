"""Statistics from sums equal the statistics of all cases; intervals and tests keep the stated rates."""

import numpy as np
import pytest
from scipy import stats

from lightning_fed.study.statistics import (
    Estimate,
    area_sums,
    difference_of_areas,
    difference_of_replicates,
    difference_of_sums,
    draw_cases,
    effect_of_sums,
    effect_sums,
    holm,
    mean_by_group,
    paired_sums,
    placements,
    random_effects,
    tau_squared_of_sums,
)
from tests import references_study as reference

DRAWS = 10_000
FIRST, SECOND = [0.81, 0.77, 0.90, 0.65, 0.72, 0.88], [0.79, 0.70, 0.91, 0.60, 0.69, 0.80]
POSITIVES = [(0.9, 0.8), (0.7, 0.6), (0.6, 0.9), (0.4, 0.5), (0.8, 0.7)]
NEGATIVES = [(0.3, 0.2), (0.5, 0.6), (0.6, 0.4), (0.2, 0.3)]
SITES = ([0.04, 0.01, 0.07, -0.02], [0.0004, 0.0009, 0.0016, 0.0001])


def exactly(value):
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def areas_of(positives, negatives):
    positives, negatives = np.transpose(positives), np.transpose(negatives)
    return area_sums(*(placements(*model) for model in zip(positives, negatives, strict=True)))


# --- Vectors of the spec ----------------------------------------------------------------------------------------------


def test_paired_scores_of_the_spec():
    assert paired_sums(FIRST, SECOND, shift=0.0) == exactly([6, 4.73, 4.49, 3.7743, 3.4183, 3.5887])
    for shift in (0.0, 0.5):
        found = difference_of_sums(paired_sums(FIRST, SECOND, shift))
        assert (found.value, np.sqrt(found.variance)) == (exactly(0.04), pytest.approx(0.013662601, abs=1e-9))
        assert found.interval() == pytest.approx((0.004879166, 0.075120834), abs=1e-9)
        assert found.p_value() == pytest.approx(0.0327199, abs=1e-7)


def test_areas_of_the_spec():
    sums = areas_of(POSITIVES, NEGATIVES)
    assert sums == exactly([5, 4, 0.875, 0.925, 0.046875, 0.01953125, 0.0125, 0.0225, 0.0075, 0.0225])
    found = difference_of_areas(sums)
    assert found.variance == exactly(0.0115625)
    assert found.value / np.sqrt(found.variance) == pytest.approx(-0.46499055, abs=1e-8)


def test_random_effects_of_the_spec():
    found = random_effects(*SITES)
    assert found.fixed == pytest.approx(-0.003170732, abs=1e-9)
    assert found.q == pytest.approx(11.03048780, abs=1e-8)
    assert found.tau_squared == pytest.approx(0.001206043956, abs=1e-12)
    assert found.value == pytest.approx(0.017700652, abs=1e-9)
    assert found.variance == pytest.approx(0.000450549, abs=1e-9)  # the floor, above q = 0.000360561
    assert found.interval() == pytest.approx((-0.049850366, 0.085251670), abs=1e-9)
    assert found.i_squared == exactly((found.q - 3) / found.q)


def test_holm_of_the_spec():
    assert holm([0.004, 0.03, 0.2, 0.011]) == exactly([0.016, 0.06, 0.2, 0.033])
    assert holm([0.011, np.nan, 0.2]) == pytest.approx([0.022, np.nan, 0.2], nan_ok=True)


# --- Independent implementations --------------------------------------------------------------------------------------


def test_sums_equal_the_paired_t_of_all_cases():
    rng = np.random.default_rng(0)
    for count, offset in ((2, 0.0), (17, 0.0), (300, 1000.0)):
        first, second = offset + rng.random((2, count))
        found, expected = difference_of_sums(paired_sums(first, second, offset or 0.5)), stats.ttest_rel(first, second)
        tolerance = {"rel": 1e-9 if offset else 1e-12}  # scores far from the shift lose digits
        assert found.p_value() == pytest.approx(expected.pvalue, **tolerance)
        for level in (0.95, 0.8):
            interval = expected.confidence_interval(level)
            assert found.interval(level) == pytest.approx((interval.low, interval.high), **tolerance)


def test_sums_of_areas_equal_delong_over_all_pairs():
    """With ties, and areas of 1."""
    rng = np.random.default_rng(1)
    for m, n, steps in ((2, 2, 50), (9, 30, 10), (40, 25, 10**6)):
        positives, negatives = (rng.integers(steps, size=(size, 2)) / steps for size in (m, n))
        positives[:, 1] += 1 if m == 9 else 0
        areas, variance = reference.delong(positives.tolist(), negatives.tolist())
        sums = areas_of(positives, negatives)
        assert sums[2:4] == exactly(areas)
        assert difference_of_areas(sums).variance == exactly(variance)


def test_random_effects_equal_the_papers():
    rng = np.random.default_rng(2)
    for sites, spread in ((2, 0.0), (3, 1.0), (8, 0.2)):
        values, variances = spread * rng.normal(size=sites) + 1, rng.random(sites) + 0.1
        found = random_effects(values, variances)
        assert (found.value, found.variance, found.tau_squared) == tuple(
            map(exactly, reference.random_effects(values.tolist(), variances.tolist()))
        )


def test_sums_over_sites_give_the_random_effects():
    """Without the single sites' numbers. Also for offsets far above the differences' spread."""
    rng = np.random.default_rng(2)
    for sites, offset in ((2, 0.0), (5, 0.1), (8, 30.0)):
        values, variances = offset + rng.normal(0, 0.05, sites), rng.uniform(1e-6, 1e-2, sites)
        tau_squared = tau_squared_of_sums(effect_sums(values, variances).sum(0), sites)
        found = effect_of_sums(effect_sums(values, variances, tau_squared).sum(0), sites)
        mean, variance, _ = reference.random_effects(values.tolist(), variances.tolist())
        assert (float(found.value), float(found.variance)) == pytest.approx((mean, variance), rel=1e-7)


def test_random_effects_equal_statsmodels():
    """Numbers from statsmodels 0.15.0, `combine_effects(*SITES, method_re="dl")`."""
    found = random_effects(*SITES)
    assert (found.value, found.fixed, found.q, found.tau_squared, found.i_squared) == tuple(
        map(exactly, (0.0177006523513749, -0.0031707317073170725, 11.030487804878048, 0.0012060439560439558,
                      0.7280265339966832))
    )  # fmt: skip
    assert found.variance == exactly(max(0.0003605612074819781, 0.0004505485805625764))  # Hartung-Knapp, known weights


def test_holm_rejects_as_the_procedure():
    rng = np.random.default_rng(3)
    p = rng.random((200, 6)) ** 4
    adjusted = holm(p)
    for level in (0.05, 0.3):
        found = [set(np.flatnonzero(row <= level)) for row in adjusted]
        assert found == [reference.holm_rejects(row.tolist(), level) for row in p]


def test_bootstrap_has_the_variance_of_the_mean():
    scores = np.random.default_rng(4).random((2, 40))
    draws = np.stack([draw_cases(5, replicate, "site", 40) for replicate in range(4000)])
    replicates = scores[:, draws].mean(-1)
    found = difference_of_replicates([*scores.mean(-1), *paired_sums(*replicates)])
    expected = difference_of_sums(paired_sums(*scores))
    assert found.value == exactly(expected.value)
    assert found.variance == pytest.approx(expected.variance * 39 / 40, rel=0.06)  # 2.2 % standard error
    assert not np.array_equal(draws[0], draw_cases(5, 0, "other", 40))
    assert not np.array_equal(draws[0], draws[1])


# --- Missing numbers --------------------------------------------------------------------------------------------------


def test_too_few_cases_give_no_interval():
    for found in (
        difference_of_sums(paired_sums([0.5], [0.25])),
        difference_of_areas(areas_of(POSITIVES[:1], NEGATIVES)),
        difference_of_areas(areas_of(POSITIVES, NEGATIVES[:1])),
    ):
        assert np.isnan([*found.interval(), found.p_value(), found.detectable()]).all()
    assert float(difference_of_sums(paired_sums([0.5], [0.25])).value) == 0.25
    with pytest.raises(ValueError, match="at least two sites"):
        random_effects([0.1], [0.1])
    with pytest.raises(ValueError, match="positive variances"):
        random_effects([0.1, 0.2], [0.1, 0.0])


def test_equal_differences_have_no_variance():
    """Rounding errors are no variance: such a site would outweigh all others."""
    scores = np.random.default_rng(6).random(50)
    assert difference_of_sums(paired_sums(scores, scores)).p_value() == 1
    constant = difference_of_sums(paired_sums(scores + 0.1, scores))
    assert (float(constant.variance), float(constant.p_value())) == (0.0, 0.0)


def test_cases_of_one_patient_count_once():
    scores, patients = np.random.default_rng(7).random((2, 6)), ["a", "b", "a", "c", "c", "c"]
    means = mean_by_group(scores, patients)
    assert means[1] == exactly([scores[1, [0, 2]].mean(), scores[1, 1], scores[1, 3:].mean()])
    assert paired_sums(*means)[0] == 3


# --- Rates over many studies ------------------------------------------------------------------------------------------

SIZES = (10, 14, 25, 40)  # cases by site


def draw_sites(rng, effects):
    """Estimates by site: differences with mean ``effects`` and site-specific spread."""
    found = []
    for place, (size, effect) in enumerate(zip(SIZES, effects, strict=True)):
        case = rng.normal(0.7, 0.2, (DRAWS, size))  # difficulty, shared by both models
        second = case + rng.normal(0, 0.05, (DRAWS, size))
        first = case + effect + rng.normal(0, 0.03 + 0.02 * place, (DRAWS, size))
        found.append(difference_of_sums(paired_sums(first, second)))
    return found


def test_intervals_cover_the_truth():
    rng = np.random.default_rng(8)
    effects = (0.0, 0.1, -0.05, 0.02)
    for effect, found in zip(effects, draw_sites(rng, effects), strict=True):
        low, high = found.interval()
        assert 0.945 <= np.mean((low <= effect) & (effect <= high)) <= 0.955


def test_holm_keeps_false_findings_rare():
    rng = np.random.default_rng(9)
    p = np.stack([found.p_value() for found in draw_sites(rng, [0.0] * 4)], axis=-1)
    assert np.mean((p < 0.05).any(-1)) > 0.15  # without a correction
    assert np.mean((holm(p) < 0.05).any(-1)) <= 0.055


def test_a_losing_site_is_named_at_the_stated_power():
    """The loss is the smallest detectable difference at a level that holds for all sites."""
    rng = np.random.default_rng(10)
    for place, size in enumerate(SIZES):
        spread = np.hypot(0.05, 0.03 + 0.02 * place) / np.sqrt(size)
        truth = Estimate(np.array(0.0), np.array(spread**2), np.array(size - 1.0))
        loss = float(truth.detectable(1 - 0.05 / len(SIZES)))
        effects = [-loss if site == place else 0.0 for site in range(len(SIZES))]
        found = draw_sites(rng, effects)
        adjusted = holm(np.stack([estimate.p_value() for estimate in found], axis=-1))
        named = np.mean((adjusted[:, place] < 0.05) & (found[place].value < 0))
        assert 0.8 <= named < 0.84  # Holm's procedure is a little stronger than the level


@pytest.mark.parametrize("sites", [3, 8])
def test_random_effects_over_few_sites(sites, record_property):
    """The interval is wide with few sites, so the coverage has no upper limit."""
    rng = np.random.default_rng(11)
    variances = rng.uniform(0.5, 2.0, sites)
    values = rng.normal(0.3, np.sqrt(variances + 0.5), (DRAWS, sites))
    low, high = random_effects(values, variances).interval()
    coverage = float(np.mean((low <= 0.3) & (high >= 0.3)))
    record_property("coverage", coverage)
    assert coverage >= 0.945
