"""A learning rate for the methods of a study: chosen once, with one of them, under a seed of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import load_json, save_json

from lightning_fed.compare import MethodChoice, Plan, run_comparison, summarize

SEED = 1_000
"""Other seeds train what is reported."""


def tune(
    name: str,
    rates: Iterable[float],
    folder: Path,
    make_plan: Callable[[float], Plan],
    last: int,
    method: str = "fedavg",
) -> None:
    """Trains a method with every rate, and keeps the scores.

    Args:
        name: What is printed.
        rates: Learning rates.
        folder: Where the runs and ``rates.json`` go.
        make_plan: The study's plan with a rate; its methods, seeds and folder do not count.
        last: Rounds at the end whose mean is the score.
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
    """The mean over seeds of the metric in the last rounds."""
    (cell,) = summarize(results, last=last).values()
    return statistics.fmean(cell.score)


def best_rate(folder: Path) -> float | None:
    """The rate that was chosen; ``None`` where none was."""
    scores = load_json(folder / "rates.json")
    return float(max(scores, key=scores.__getitem__)) if scores else None
