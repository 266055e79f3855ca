"""A learning rate for a study's methods: chosen once, with one method, under a separate seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import load_json, save_json

from lightning_fed.compare import MethodChoice, Plan, run_comparison, summarize

SEED = 1_000
"""Separate from the seeds of reported runs."""


def tune(
    name: str,
    rates: Iterable[float],
    folder: Path,
    make_plan: Callable[[float], Plan],
    last: int,
    method: str = "fedavg",
) -> None:
    """Trains a method with every rate, and stores the scores in ``rates.json``.

    Args:
        name: Printed name.
        rates: Learning rates.
        folder: Folder for the runs and ``rates.json``.
        make_plan: Function from rate to plan; the plan's methods, seeds and folder are ignored.
        last: Number of final rounds in the mean score.
        method: The method.
    """
    scores = {}
    for rate in rates:
        print(f"{name}, learning rate {rate:g}", flush=True)
        plan = replace(
            make_plan(rate), methods=[MethodChoice.parse(method)], seeds=[SEED], out=folder / f"rate_{rate:g}"
        )
        scores[f"{rate:g}"] = score(run_comparison(plan), last)
    if scores:
        save_json(folder / "rates.json", scores)
        print(f"{name}: {best_rate(folder)} of {scores}", flush=True)


def score(results: Sequence[Mapping[str, Any]], last: int) -> float:
    (cell,) = summarize(results, last=last).values()
    return statistics.fmean(cell.score)


def best_rate(folder: Path) -> float | None:
    scores = load_json(folder / "rates.json")
    return float(max(scores, key=scores.__getitem__)) if scores else None
