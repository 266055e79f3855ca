"""Tables and forest plot of a study."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.argument_checks import check_count
from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.evaluation.tables import csv_text
from lightning_fed.callbacks.pictures import has_matplotlib, new_figure
from lightning_fed.console import markdown_table
from lightning_fed.report.figures import COLORS, INK, save_figure
from lightning_fed.study.answers import Answer, Kind, answer_site, estimate
from lightning_fed.study.statistics import Estimate, effect_of_sums, holm, random_effects

LEVEL = 0.05
"""Significance level of the verdicts ("helps", "hurts")."""

TOO_FEW, UNKNOWN = "too few cases", "no difference shown"
_VERDICTS = ("hurts", UNKNOWN, "helps", TOO_FEW)  # in the order of the table


@dataclass(frozen=True)
class Study:
    """Results of a comparison of models at several sites (clients).

    ``models`` starts with the federated method for the main comparison, and ends with ``"central"`` (if trained) and
    ``"local"``, a separate model at each site. ``answers`` contains each site's results from :func:`answer_site`. With
    a secure sum, ``totals`` replaces ``answers``. Each method has seven totals: the number of sites, the four numbers
    from :func:`effect_sums` summed over sites, and the mean scores of the method and ``"local"``.
    """

    metric: str
    higher_is_better: bool
    models: Sequence[str]
    seeds: Sequence[int]
    min_support: int
    kinds: Mapping[str, Kind]
    answers: Mapping[str, Answer]
    megabytes: Mapping[str, float]
    totals: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteGain:
    """Gain of ``method`` over ``baseline`` at a site, positive if the method is better.

    ``count`` is the number of test cases. An empty ``site`` stands for all sites, and ``count`` is then the number of
    sites. ``adjusted`` is the p-value with Holm's correction. ``detectable`` is the smallest true gain with an 80 %
    chance of a significant result.
    """

    site: str
    method: str
    baseline: str
    count: int = 0
    values: tuple[float, float] = (math.nan, math.nan)
    gain: Estimate | None = None
    by_seed: tuple[float, ...] = ()
    adjusted: float = math.nan
    detectable: float = math.nan

    @property
    def verdict(self) -> str:
        if self.gain is None:
            return TOO_FEW
        if not self.adjusted < LEVEL:
            return UNKNOWN
        return "helps" if self.gain.value > 0 else "hurts"

    @property
    def interval(self) -> tuple[float, float]:
        low, high = (math.nan, math.nan) if self.gain is None else self.gain.interval(1 - LEVEL)
        return float(low), float(high)


def gather_study(
    results: Sequence[Mapping[str, Any]], models: Sequence[str], min_support: int, megabytes: Mapping[str, float]
) -> Study:
    """Creates a study from finished runs, one per model and seed. ``megabytes`` is the traffic by model."""
    check_count("min_support", min_support, lowest=2)
    runs: dict[str, dict[str, dict[int, Any]]] = {}
    for site in results[0]["sites"]["scores"]:
        runs[site] = {model: {} for model in models}
        for run in results:
            runs[site][run["method"]][run["seed"]] = run["sites"]["scores"].get(site, {"cases": []})
    found = {site: answer_site(scores, min_support) for site, scores in runs.items()}
    seeds = list(dict.fromkeys(run["seed"] for run in results))
    kinds, answers = ({site: found[site][0] for site in found}, {site: found[site][1] for site in found})
    first = results[0]
    return Study(
        first["sites"]["metric"], first["mode"] == "max", models, seeds, min_support, kinds, answers, megabytes
    )


def keep_primary(path: Path, method: str) -> None:
    """Stores the name of a study's primary method in a file. A later, different name is an error."""
    known = json.loads(path.read_text()) if path.exists() else method
    if known != method:
        raise MisconfigurationException(
            f"Expected {known!r} as the first federated method, because an earlier command chose this method for the"
            f" primary comparison of the study in this folder, but got {method!r}: put the earlier method first, or"
            " choose another `--out` for a new study."
        )
    write_text_atomically(path, json.dumps(method))


def compare_sites(study: Study, method: str, baseline: str) -> list[SiteGain]:
    """Compares two methods at each site. Sites with ``method`` significantly worse than ``baseline`` come first."""
    sign = 1 if study.higher_is_better else -1
    rows = []
    for site, answer in study.answers.items():
        row = SiteGain(site, method, baseline)
        if answer:
            sums, kind = answer[f"{method}|{baseline}"], study.kinds[site]
            gain, count, values = estimate(kind, sums["all"])
            by_seed = tuple(sign * float(estimate(kind, sums[str(seed)])[0].value) for seed in study.seeds)
            gain = replace(gain, value=sign * gain.value)
            row = replace(row, count=count, values=values, gain=gain, by_seed=by_seed)
        rows.append(row)
    # Holm's correction over the sites.
    adjusted = iter(holm([float(row.gain.p_value()) for row in rows if row.gain is not None]).tolist())
    level = 1 - LEVEL / max(sum(row.gain is not None for row in rows), 1)  # the strictest level in Holm's procedure
    rows = [
        row if row.gain is None else replace(row, adjusted=next(adjusted), detectable=float(row.gain.detectable(level)))
        for row in rows
    ]
    return sorted(rows, key=lambda row: (_VERDICTS.index(row.verdict), 0.0 if row.gain is None else row.gain.value))


def pool_sites(rows: Sequence[SiteGain]) -> SiteGain:
    """Returns the mean gain over sites, from a random-effects model."""
    used = [row for row in rows if row.gain is not None and row.gain.variance > 0]
    gains = [row.gain for row in used if row.gain is not None]
    if not gains:
        return SiteGain("", rows[0].method, rows[0].baseline)
    gain = gains[0]
    if len(gains) > 1:
        gain = random_effects([one.value for one in gains], [one.variance for one in gains])
    values = tuple(float(np.mean([row.values[place] for row in used])) for place in (0, 1))
    by_seed = tuple(float(np.mean(seed)) for seed in zip(*(row.by_seed for row in used), strict=True))
    return _mean_gain(used[0].method, used[0].baseline, len(used), values, gain, by_seed)


def _overall(study: Study, method: str, baseline: str, rows: Sequence[SiteGain]) -> SiteGain:
    if not study.totals:
        return pool_sites(rows)
    if baseline != study.models[-1]:
        return SiteGain("", method, baseline)
    sign, (sites, *totals) = 1 if study.higher_is_better else -1, study.totals[method]
    gain = effect_of_sums(totals[:4], int(sites))
    return _mean_gain(method, baseline, int(sites), totals[4:], replace(gain, value=sign * gain.value), ())


def _mean_gain(
    method: str, baseline: str, count: int, values: Sequence[float], gain: Estimate, by_seed: tuple[float, ...]
) -> SiteGain:
    return SiteGain(
        "", method, baseline, count, (values[0], values[1]), gain, by_seed,
        float(gain.p_value()), float(gain.detectable(1 - LEVEL)),
    )  # fmt: skip


def write_study(study: Study, folder: Path) -> str:
    """Writes ``study.json``, ``study.csv``, ``study.md`` and, with matplotlib, ``forest.png``. Returns the Markdown."""
    write_text_atomically(folder / "study.json", json.dumps(vars(study), indent=1))
    write_text_atomically(folder / "study.csv", _csv(study))
    text = describe(study)
    write_text_atomically(folder / "study.md", f"{text}\n")
    if has_matplotlib():
        pair = study.models[0], study.models[-1]
        rows = compare_sites(study, *pair)
        draw_forest([*rows, _overall(study, *pair, rows)], folder / "forest.png")
    return text


def load_study(path: Path) -> Study:
    """Loads a study's results from the file ``study.json``, written by :func:`write_study`."""
    return Study(**json.loads(path.read_text()))


def describe(study: Study) -> str:
    """Formats a study in Markdown, with a table of gains by site for each method."""
    baseline = study.models[-1]
    methods = [model for model in study.models[:-1] if model != "central"]
    tables = [compare_sites(study, method, baseline) for method in methods]
    pooled = [_overall(study, method, baseline, rows) for method, rows in zip(methods, tables, strict=True)]
    others = holm([row.adjusted for row in pooled[1:]])
    pooled[1:] = [replace(row, adjusted=float(p)) for row, p in zip(pooled[1:], others, strict=True)]
    losers = [f"{row.site} ({_signed(row)})" for row in tables[0] if row.verdict == "hurts"]
    lines = [
        f"`{methods[0]}` hurts at {', '.join(losers)}." if losers else f"No site is shown to lose with `{methods[0]}`."
    ]
    if study.totals:
        lines = [
            "The secure sum hides the gains of single sites: only the mean over sites is known here. "
            "Each site has a table with the site's gain."
        ]
    for place, (rows, over) in enumerate(zip(tables, pooled, strict=True)):
        kind = "primary comparison" if place == 0 else "exploratory"
        lines += [f"`{over.method}` against `{baseline}` ({kind}):", _table(study, rows, over)]
    return "\n\n".join([*lines, _note(study, tables[0], pooled[0])])


def draw_forest(rows: Sequence[SiteGain], path: Path) -> None:
    """Draws a forest plot: gain and confidence interval of each site, and the mean gain in the last row."""
    shown = [row for row in rows if row.gain is not None]
    figure = new_figure((7, 1.2 + 0.35 * len(shown)))
    axes = figure.add_subplot()
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, row in enumerate(shown):
        assert row.gain is not None
        color = {"helps": COLORS[0], "hurts": COLORS[1]}.get(row.verdict, INK)
        axes.plot(row.interval, [-place, -place], color=color)
        axes.plot([float(row.gain.value)], [-place], "s" if row.site else "D", color=color)
    names = [f"{row.site}, n = {row.count}" if row.site else f"mean over {row.count} sites" for row in shown]
    axes.set_yticks([-place for place in range(len(shown))], names)
    axes.set_xlabel(f"gain of {rows[0].method} over {rows[0].baseline}")
    save_figure(figure, path)


def _table(study: Study, rows: Sequence[SiteGain], over: SiteGain) -> str:
    method, baseline = over.method, over.baseline
    central = {} if "central" not in study.models else {
        row.site: row.values[1] for row in compare_sites(study, method, "central")
    }  # fmt: skip
    header = ["site", "n", baseline, method, *(["central"] if central else []), "gain", "95 % interval"]
    header += [*(["gain by seed"] if len(study.seeds) > 1 else []), "shown from", "verdict"]
    lines = [header]
    for row in [*rows, *([] if over.gain is None else [over])]:
        size = f"{row.count}" if row.count else f"below {study.min_support}"
        line = [row.site or "all sites", size if row.site else f"{size} {'site' if row.count == 1 else 'sites'}"]
        line += [_number(row.values[1]), _number(row.values[0])]
        line += [_number(central.get(row.site, math.nan))] if central else []
        line += [_signed(row), "" if row.gain is None else "{:+.3f} to {:+.3f}".format(*row.interval)]
        if len(study.seeds) > 1:
            line.append(f"{min(row.by_seed):+.3f} to {max(row.by_seed):+.3f}" if row.by_seed else "")
        lines.append([*line, _number(row.detectable or math.nan), row.verdict])
    return markdown_table(lines)


def _note(study: Study, rows: Sequence[SiteGain], over: SiteGain) -> str:
    seeds, direction = len(study.seeds), "" if study.higher_is_better else ", positive if the score falls"
    notes = [
        f"`{study.metric}` at each site, {'one seed' if seeds == 1 else f'mean over {seeds} seeds'}. Gain: difference"
        f" to `{over.baseline}` on the same cases{direction}.",
        "The intervals show the uncertainty from the choice of cases, for the models trained here. Over all sites, the"
        " probability of any false verdict is at most 5 % (Holm). `shown from` is the smallest true gain that is found"
        " with 80 % probability at a site of this size.",
    ]
    if isinstance(over.gain, Estimate) and over.count > 1:
        notes.append("All sites: random effects (DerSimonian and Laird; Hartung and Knapp).")
    left_out = [row.site for row in rows if row.gain is not None and not row.gain.variance > 0]
    if left_out:
        notes.append(f"The mean excludes {', '.join(left_out)}, because the gain's variance is 0 or unknown.")
    if seeds == 1:
        notes.append("Another seed gives other models: `--seeds 5` adds seeds and keeps finished runs.")
    sent = [f"`{name}` {number:.3g}" for name, number in study.megabytes.items()]
    return "\n".join([*notes, *([f"Megabytes sent in a training: {', '.join(sent)}."] if sent else [])])


def _csv(study: Study) -> str:
    header = ["site", "method", "baseline", "n", "method_score", "baseline_score", "gain", "low", "high", "p", "p_holm"]
    lines: list[list[Any]] = [[*header, "shown_from", "verdict", *(f"gain_seed_{seed}" for seed in study.seeds)]]
    for place, method in enumerate(study.models):
        for baseline in study.models[place + 1 :]:
            rows = compare_sites(study, method, baseline)
            for row in [*rows, _overall(study, method, baseline, rows)]:
                numbers: list[Any] = [row.count or "", *row.values]
                if row.gain is not None:
                    numbers += [row.gain.value, *row.interval, row.gain.p_value(), row.adjusted, row.detectable]
                else:
                    numbers = ["" for _ in range(9)]
                lines.append([row.site or "all sites", method, baseline, *numbers, row.verdict, *row.by_seed])
    return csv_text(lines)


def _signed(row: SiteGain) -> str:
    return "" if row.gain is None else f"{float(row.gain.value):+.3f}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"
