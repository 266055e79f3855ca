"""Tables of a study: losing sites come first, verdicts hold over all sites, and the mean is a random effect."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image
from scipy import stats

from lightning_fed.study import load_study, paired_sums, write_study
from lightning_fed.study.report import Study, compare_sites, describe, pool_sites
from tests import references_study as reference

GAINS = {"a": 0.1, "loser": -0.2, "equal": 0.0, "weak": 0.02}  # of the federation, for noise 0.05 and 20 cases


def scores_of(site, gain):
    rng = np.random.default_rng(list(GAINS).index(site))
    local = rng.uniform(0.3, 0.7, 20)
    fedavg = local + gain + rng.normal(0, 0.05, 20) if gain else local
    return {"fedavg": fedavg, "fedprox": local + rng.normal(0, 0.05, 20), "central": local + 0.2, "local": local}


SCORES = {site: scores_of(site, gain) for site, gain in GAINS.items()}
MODELS = ("fedavg", "fedprox", "central", "local")


def made_up(higher_is_better=True, seeds=(0, 1)):
    answers = {}
    for site, scores in SCORES.items():
        answer = answers[site] = {}
        for place, first in enumerate(MODELS):
            for second in MODELS[place + 1 :]:
                sums = paired_sums(scores[first], scores[second]).tolist()
                answer[f"{first}|{second}"] = {"all": sums} | {str(seed): sums for seed in seeds}
    answers["tiny"] = {}
    kinds = dict.fromkeys(answers, "scores")
    sent = {"fedavg": 12.34, "local": 0.0}
    return Study("test_dice", higher_is_better, list(MODELS), list(seeds), 10, kinds, answers, sent)


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def tables(text):
    """The tables of a page, by heading."""
    found, heading = {}, ""
    for block in text.split("\n\n"):
        if block.startswith("|"):
            header, _, *rows = map(cells, block.split("\n"))
            found[heading] = [dict(zip(header, row, strict=True)) for row in rows]
        heading = block
    return found


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_losing_sites_are_named_first(higher_is_better):
    """For a loss the planted signs are reversed."""
    text = describe(made_up(higher_is_better))
    primary = tables(text)["`fedavg` against `local` (primary comparison):"]
    verdicts = {row["site"]: row["verdict"] for row in primary}
    loser, winner = ("loser", "a") if higher_is_better else ("a", "loser")
    assert verdicts[loser] == "hurts"
    assert verdicts[winner] == "helps"
    assert (verdicts["equal"], verdicts["tiny"]) == ("no difference shown", "too few cases")
    assert primary[0]["site"] == loser
    assert [row["site"] for row in primary][-2:] == ["tiny", "all sites"]
    row = next(row for row in primary if row["site"] == loser)
    assert text.startswith(f"`fedavg` hurts at {loser} ({row['gain']})")
    difference = np.mean(SCORES[loser]["fedavg"] - SCORES[loser]["local"])
    assert float(row["gain"]) == pytest.approx(difference if higher_is_better else -difference, abs=6e-4)
    low, high = map(float, row["95 % interval"].split(" to "))
    assert low < float(row["gain"]) < high < 0
    assert float(row["central"]) == pytest.approx(SCORES[loser]["central"].mean(), abs=6e-4)
    assert row["gain by seed"] == f"{row['gain']} to {row['gain']}"
    assert ("positive if the score falls" in text) == (not higher_is_better)


def test_verdicts_hold_over_all_sites():
    """A p-value below 5 % at one site is not enough: Holm's correction counts the sites with an answer."""
    rows = {row.site: row for row in compare_sites(made_up(), "fedavg", "local")}
    p = {site: stats.ttest_rel(SCORES[site]["fedavg"], SCORES[site]["local"]).pvalue for site in ("a", "loser", "weak")}
    rejected = reference.holm_rejects([p["a"], p["loser"], p["weak"], 1.0], 0.05)
    assert {place for place, site in enumerate(("a", "loser", "weak")) if rows[site].adjusted < 0.05} == rejected
    assert rows["a"].adjusted == pytest.approx(4 * p["a"] if p["a"] < p["loser"] else 3 * p["a"])
    study = made_up()
    weak = replace(study, answers={"weak": study.answers["weak"]})
    assert compare_sites(weak, "fedavg", "local")[0].adjusted == pytest.approx(p["weak"])


def test_the_stated_gain_has_a_power_of_80_percent():
    """At the strictest level in Holm's procedure for four sites with an answer, by the noncentral t distribution."""
    (row,) = (row for row in compare_sites(made_up(), "fedavg", "local") if row.site == "a")
    difference = SCORES["a"]["fedavg"] - SCORES["a"]["local"]
    center = row.detectable / (difference.std(ddof=1) / np.sqrt(20))
    assert stats.nct.sf(stats.t.ppf(1 - 0.05 / 4 / 2, 19), 19, center) == pytest.approx(0.8, abs=1e-6)


def test_only_the_primary_comparison_is_not_adjusted():
    """Equal scores with p = 0.03: the primary method helps, two exploratory methods show nothing."""
    noise = np.random.default_rng(0).normal(size=12)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    sums = paired_sums(0.5 + 0.01 * (noise + stats.t.ppf(1 - 0.03 / 2, 11) / np.sqrt(12)), np.full(12, 0.5)).tolist()
    models = ["fedavg", "fedprox", "moon", "local"]
    answer = {f"{model}|local": {"all": sums, "0": sums} for model in models[:-1]}
    study = Study("test_dice", True, models, [0], 10, {"a": "scores"}, {"a": answer}, {"fedavg": 1.0})
    assert [rows[-1]["verdict"] for rows in tables(describe(study)).values()] == ["helps", *["no difference shown"] * 2]


def test_the_mean_excludes_sites_without_a_variance():
    rows = compare_sites(made_up(), "fedavg", "local")
    pooled, sites = pool_sites(rows), ("a", "loser", "weak")
    differences = [SCORES[site]["fedavg"] - SCORES[site]["local"] for site in sites]
    mean, variance, _ = reference.random_effects(
        [values.mean() for values in differences], [values.var(ddof=1) / 20 for values in differences]
    )
    assert (pooled.count, float(pooled.gain.value)) == (3, pytest.approx(mean))
    half = stats.t.ppf(0.975, 2) * np.sqrt(variance)
    assert pooled.interval == pytest.approx((mean - half, mean + half))
    assert "The mean excludes equal, because the gain's variance is 0 or unknown." in describe(made_up())
    one = pool_sites([row for row in rows if row.site == "a"])
    assert one.interval == next(row.interval for row in rows if row.site == "a")
    assert pool_sites([row for row in rows if row.site == "tiny"]).gain is None


def test_other_methods_are_exploratory():
    text = describe(made_up(seeds=(0,)))
    assert list(tables(text)) == [
        "`fedavg` against `local` (primary comparison):",
        "`fedprox` against `local` (exploratory):",
    ]
    assert "gain by seed" not in text
    assert "Another seed gives other models" in text
    assert "Megabytes sent in a training: `fedavg` 12.3, `local` 0." in text


def test_the_files_of_a_study(tmp_path, monkeypatch):
    """The tables follow from the sums in `study.json` alone; the plot shows each site with an answer."""
    drawn, plot = [], Axes.plot

    def noting(axes, x, *args, **kwargs):
        drawn.append((list(x), args[0][0], kwargs["color"]))
        return plot(axes, x, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", noting)
    text = write_study(made_up(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forest.png", "study.csv", "study.json", "study.md"]
    assert describe(load_study(tmp_path / "study.json")) == text == (tmp_path / "study.md").read_text().strip()
    with (tmp_path / "study.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 6  # pairs; five sites and the mean
    rows = [row for row in rows if (row["method"], row["baseline"], row["gain"] != "") == ("fedavg", "local", True)]
    colors = {"hurts": "#d55e00", "helps": "#0072b2", "no difference shown": "0.5"}  # not red and green
    for place, row in enumerate(rows):
        color = colors[row["verdict"]]
        assert drawn[2 * place] == (pytest.approx([float(row["low"]), float(row["high"])]), -place, color)
        assert drawn[2 * place + 1] == (pytest.approx([float(row["gain"])]), -place, color)
    assert len(drawn) == 2 * len(rows)
    with Image.open(tmp_path / "forest.png") as picture:
        assert picture.size[1] > 200
