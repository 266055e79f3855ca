"""Compares models in pairs on a site's test cases. The server receives sums over cases, not single scores."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, TypeAlias

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.study.statistics import (
    SHIFT,
    Estimate,
    Floats,
    area_sums,
    difference_of_areas,
    difference_of_replicates,
    difference_of_sums,
    mean_by_group,
    paired_sums,
    placements,
)

_log = logging.getLogger(__name__)

LOCAL = "local"
"""Name for local training: every client keeps a separate model, and nothing is sent."""

Kind: TypeAlias = Literal["scores", "areas", "replicates"]
Answer: TypeAlias = dict[str, dict[str, list[float]]]
"""Sums by pair of models (``"fedavg|local"``) and by seed; ``"all"`` for the mean over seeds."""


def answer_site(runs: Mapping[str, Mapping[int, Mapping[str, Any]]], min_support: int = 10) -> tuple[Kind, Answer]:
    """Compares each pair of models on a site's test cases (examples). The result contains only sums over cases.

    Returns the kind of metric, and numbers by pair of models and by seed. The key ``"all"`` contains the numbers for
    scores averaged over seeds. The kinds are:

    - ``"scores"``: the metric has one score per case. The numbers are from :func:`paired_sums`.
    - ``"areas"``: the metric is the area under the ROC curve. The numbers are from :func:`area_sums`.
    - ``"replicates"``: other metrics, also computed on bootstrap samples (replicates). The first number counts the
      cases (or patients). The other numbers are the input for :func:`difference_of_replicates`.

    Args:
        runs: The site's scores by model and seed, as in :attr:`SiteScores.scores`, for the same cases.
        min_support: Smallest number of cases (or patients). Smaller sites get no numbers. For an area under the ROC
            curve, each class needs at least half as many cases.

    Example:
        >>> site = {"cases": ["a", "b"], "patients": None}
        >>> runs = {"fedavg": {0: {"scores": [1.0, 0.5], **site}}, "local": {0: {"scores": [0.5, 0.5], **site}}}
        >>> answer_site(runs, min_support=2)
        ('scores', {'fedavg|local': {'all': [2.0, 0.5, 0.0, 0.25, 0.0, 0.0], '0': [2.0, 0.5, 0.0, 0.25, 0.0, 0.0]}})
        >>> answer_site(runs)
        ('scores', {})
    """
    first = next(iter(next(iter(runs.values())).values()))
    all_runs = [run for seeds in runs.values() for run in seeds.values()]
    if any(run["cases"] != first["cases"] for run in all_runs):
        raise MisconfigurationException(
            "Expected the same cases at a site in every run, but the cases differ: fix the split with a seed for data"
            " and partition (end the command with `-- --data.seed 0`), or use a FederatedDataModule with fixed data."
        )
    kinds = set.intersection(*(set(run) for run in all_runs))
    if "positives" in kinds:
        return "areas", _answer_areas(runs, min_support)
    if "scores" in kinds:
        return "scores", _answer_scores(runs, first["patients"], min_support)
    if "replicates" not in kinds:
        raise MisconfigurationException("Expected every run to have valid scores, but all scores of some runs are NaN.")
    count = len(first["cases"] if first["patients"] is None else set(first["patients"]))
    return "replicates", _answer_replicates(runs, count, min_support)


def estimate(kind: Kind, sums: Sequence[float]) -> tuple[Estimate, int, tuple[float, float]]:
    """Estimates two models' score difference from :func:`answer_site` sums. Also returns case count and both scores."""
    if kind == "areas":
        return difference_of_areas(sums), int(sums[0] + sums[1]), (sums[2], sums[3])
    if kind == "replicates":
        return difference_of_replicates(sums[1:]), int(sums[0]), (sums[1], sums[2])
    count = sums[0]
    return difference_of_sums(sums), int(count), (sums[1] / count + SHIFT, sums[2] / count + SHIFT)


def _answer_scores(
    runs: Mapping[str, Mapping[int, Mapping[str, Any]]], patients: Sequence[Any] | None, min_support: int
) -> Answer:
    scores = {model: np.array([run["scores"] for run in seeds.values()]) for model, seeds in runs.items()}
    is_known = np.isfinite(np.concatenate(list(scores.values()))).all(0)
    if not is_known.all():
        _log.warning("%d of %d examples have no finite score and are excluded.", (~is_known).sum(), len(is_known))
    groups = list(range(len(is_known))) if patients is None else list(patients)
    groups = [group for group, known in zip(groups, is_known, strict=True) if known]
    if len(set(groups)) < min_support:
        return {}
    by_group = {model: mean_by_group(values[:, is_known], groups) for model, values in scores.items()}
    return _pairs(runs, by_group, lambda one, two: paired_sums(one.mean(0), two.mean(0)))


def _answer_areas(runs: Mapping[str, Mapping[int, Mapping[str, Any]]], min_support: int) -> Answer:
    components = {
        model: [placements(run["positives"], run["negatives"]) for run in seeds.values()]
        for model, seeds in runs.items()
    }
    if min(len(part) for part in next(iter(components.values()))[0]) < max(math.ceil(min_support / 2), 1):
        return {}
    return _pairs(runs, components, lambda one, two: area_sums(_mean_components(one), _mean_components(two)))


def _mean_components(parts: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    # An area is linear in the components, so the mean over seeds has the mean area.
    return np.mean([part[0] for part in parts], axis=0), np.mean([part[1] for part in parts], axis=0)


def _answer_replicates(runs: Mapping[str, Mapping[int, Mapping[str, Any]]], count: int, min_support: int) -> Answer:
    if count < min_support:
        return {}
    values = {
        model: np.array([[run["value"], *run["replicates"]] for run in seeds.values()]) for model, seeds in runs.items()
    }

    def sums(one: Any, two: Any) -> Any:
        pair = np.stack([one.mean(0), two.mean(0)])
        replicates = pair[:, 1:][:, np.isfinite(pair[:, 1:]).all(0)]
        return [count, *pair[:, 0], *paired_sums(*replicates)]

    return _pairs(runs, values, sums)


def _pairs(runs: Mapping[str, Mapping[int, Any]], values: Mapping[str, Any], sums: Any) -> Answer:
    answer: Answer = {}
    for first, second in combinations(runs, 2):
        seeds = {"all": slice(None)} | {str(seed): slice(place, place + 1) for place, seed in enumerate(runs[first])}
        answer[f"{first}|{second}"] = {
            name: [float(value) for value in sums(values[first][part], values[second][part])]
            for name, part in seeds.items()
        }
    return answer
