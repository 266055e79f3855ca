"""Tables and curves for a comparison."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import Any

from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.evaluation.tables import csv_text
from lightning_fed.callbacks.pictures import new_figure
from lightning_fed.compare.method_options import CENTRAL
from lightning_fed.console import markdown_table
from lightning_fed.report.figures import COLORS, INK, save_figure
from lightning_fed.study.statistics import difference_of_sums, paired_sums

_log = logging.getLogger(__name__)

_OF_CLIENTS = (
    "client/",
    "fedmargin/lpm/",
    "fedmargin/apm/",
    "fedmargin/attention/",
)  # values per client


@dataclass
class Cell:
    """Results of one method with one fraction of stragglers (slow clients). Each list has one value per seed.

    Args:
        score: Mean metric over the last rounds.
        loss: Training loss ``train_loss`` in the last round, if logged.
        rounds_to_target: First round in which the score reaches the target, from 1. ``None`` if never.
        megabytes: Megabytes sent in both directions, over all rounds.
        seconds: Wall-clock seconds for training and aggregation, over all rounds.
        cpu_seconds: CPU seconds for training and aggregation, over all rounds.
        test: Metric on the test data.
    """

    score: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    rounds_to_target: list[int | None] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)


def summarize(
    results: Sequence[Mapping[str, Any]], target: float = 0.8, last: int = 1
) -> dict[tuple[str, float | None], Cell]:
    """Summarises results by method and fraction of stragglers (slow clients).

    Args:
        results: Results from :func:`~lightning_fed.compare.run_comparison`.
        target: Target score divided by the score of centralised training. If lower is better, the inverse ratio.
        last: Number of final rounds in the mean score.

    Example:
        >>> rounds = [{"val_acc": 0.75, "seconds": 2.0, "cpu_seconds": 1.0}]
        >>> run = {"method": "fedavg", "stragglers": 0.5, "seed": 0, "monitor": "val_acc", "rounds": rounds, "test": {}}
        >>> summarize([run])["fedavg", 0.5].score
        [0.75]
    """
    central = {run["seed"]: _score(run, last) for run in results if run["method"] == CENTRAL}
    cells: dict[tuple[str, float | None], Cell] = {}
    for run in results:
        cell = cells.setdefault((run["method"], run["stragglers"]), Cell())
        final = run["rounds"][-1]
        cell.score.append(_score(run, last))
        cell.loss += [final[name] for name in ("train_loss", "train_loss_epoch") if name in final][:1]
        if run["method"] != CENTRAL and run["seed"] in central:
            cell.rounds_to_target.append(_first_round(run, target, central[run["seed"]]))
        if "comm/total_up_bytes" in final:
            cell.megabytes.append((final["comm/total_up_bytes"] + final["comm/total_down_bytes"]) / 1e6)
        cell.seconds.append(sum(values["seconds"] for values in run["rounds"]))
        cell.cpu_seconds.append(sum(values["cpu_seconds"] for values in run["rounds"]))
        name = run["monitor"].replace("val", "test", 1)
        cell.test += [run["test"][name]] if name in run["test"] else []
    return cells


def write_report(results: Sequence[Mapping[str, Any]], folder: Path, target: float = 0.8, last: int = 1) -> str:
    """Writes ``rounds.csv``, ``summary.csv``, ``summary.md`` and, with matplotlib, ``curves.png`` into a folder.

    Returns the table in Markdown. For the other arguments see :func:`summarize`; at least one result is needed.
    """
    write_text_atomically(folder / "rounds.csv", _rounds(results))
    write_text_atomically(folder / "summary.csv", _summary(results, target, last))
    text = markdown(results, target, last)
    write_text_atomically(folder / "summary.md", f"{text}\n")
    try:
        draw(results, folder / "curves.png", target, last)
    except ModuleNotFoundError:
        _log.warning("The curves are not drawn: install matplotlib with `pip install lightning-fed[demo]`.")
    return text


def markdown(results: Sequence[Mapping[str, Any]], target: float = 0.8, last: int = 1) -> str:
    """Formats a comparison's scores and notes in Markdown. For the arguments see :func:`summarize`."""
    cells, parts, monitor = summarize(results, target, last), _parts(results), results[0]["monitor"]
    has_test = any(cell.test for cell in cells.values())
    has_target = any(cell.rounds_to_target for cell in cells.values())
    header = ["method"]
    for part in parts:
        suffix = f", {part:.0%} stragglers" if len(parts) > 1 else ""
        header += [monitor + suffix, *(["test" + suffix] * has_test), *([f"#R@{target:.0%}" + suffix] * has_target)]
    if len(parts) > 1:
        header += [f"{monitor} over stragglers", *([f"#R@{target:.0%} over stragglers"] * has_target)]
    header += ["train_loss", "MB", "wall s", "CPU s"]
    seeds = dict.fromkeys(run["seed"] for run in results)
    by_seed = [summarize([run for run in results if run["seed"] == seed], target, last) for seed in seeds]
    lines = []
    for method in dict.fromkeys(run["method"] for run in results):
        method_cells = [cells.get((method, None if method == CENTRAL else part), Cell()) for part in parts]
        line = [f"`{method}`"]
        for cell in method_cells:
            line += [_shown(cell.score, 3), *([_shown(cell.test, 3)] * has_test)]
            line += [_shown_rounds(cell.rounds_to_target)] * has_target
        if len(parts) > 1:
            line.append(
                _shown(
                    [] if method == CENTRAL else [statistics.fmean(cell.score) for cell in method_cells if cell.score],
                    3,
                )
            )
            line += [_shown_rounds(*(cell.rounds_to_target for cell in method_cells))] * has_target
        line.append(_shown(_over_parts(by_seed, method, "loss"), 3))
        line.append(_shown(_over_parts(by_seed, method, "megabytes"), 1, is_fixed=True))
        line.append(_shown(_over_parts(by_seed, method, "seconds"), 1))
        line.append(_shown(_over_parts(by_seed, method, "cpu_seconds"), 1))
        lines.append(line)
    table = markdown_table([header, *lines], "---:")
    return "\n\n".join([table, _note(results, target, last), *_differences(results, last)])


def draw(results: Sequence[Mapping[str, Any]], path: Path, target: float = 0.8, last: int = 1) -> None:
    """Draws each method's validation metric by round into a PNG file.

    Each fraction of stragglers has a panel. A curve shows the mean over seeds, and the band shows the range over seeds.
    For ``target`` and ``last`` see :func:`summarize`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    parts, monitor = _parts(results), results[0]["monitor"]
    figure = new_figure((max(5 * len(parts), 8), 5))
    panels = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
    central = [_score(run, last) for run in results if run["method"] == CENTRAL]
    for axes, part in zip(panels, parts, strict=True):
        methods = dict.fromkeys(run["method"] for run in results if run["method"] != CENTRAL)
        for method, (style, color) in zip(methods, cycle(product(("-", "--", ":", "-."), COLORS)), strict=False):
            runs = [run for run in results if run["method"] == method and run["stragglers"] == part]
            curves = [[values.get(monitor, math.nan) for values in run["rounds"]] for run in runs]
            columns = list(zip(*curves, strict=False))  # rounds completed by all seeds
            rounds = range(1, len(columns) + 1)
            axes.plot(rounds, [*map(statistics.fmean, columns)], style, color=color, label=_short_name(method))
            axes.fill_between(rounds, [*map(min, columns)], [*map(max, columns)], alpha=0.15, color=color, linewidth=0)
        if central:
            goal = _goal(results[0]["mode"], target, statistics.fmean(central))
            axes.axhline(statistics.fmean(central), color=INK, linewidth=0.8, label=CENTRAL)
            axes.axhline(goal, color=INK, linewidth=0.8, linestyle=":", label=f"{target:.0%} of {CENTRAL}")
        axes.set(title=f"{part:.0%} stragglers" if len(parts) > 1 else "", xlabel="round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(monitor)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize="small", loc="outside lower center", ncols=2)  # saves width
    save_figure(figure, path)


def _short_name(method: str) -> str:
    name, colon, options = method.partition(":")
    return name.rpartition(".")[2] + colon + options  # a class has an import path


def _rounds(results: Sequence[Mapping[str, Any]]) -> str:
    logged = {name for run in results for values in run["rounds"] for name in values}
    # Excludes values of single clients, because the table would have thousands of columns.
    names = sorted(name for name in logged if not name.startswith(_OF_CLIENTS))
    rows = [
        [run["method"], run["stragglers"], run["seed"], number, *(values.get(name) for name in names)]
        for run in results
        for number, values in enumerate(run["rounds"], start=1)
    ]
    return csv_text([["method", "stragglers", "seed", "round", *names], *rows])


def _summary(results: Sequence[Mapping[str, Any]], target: float, last: int) -> str:
    header = ["method", "stragglers", "seeds"]
    for name in (results[0]["monitor"], "test", "train_loss", "megabytes", "seconds", "cpu_seconds"):
        header += [name, f"{name}_std"]
    header += [f"rounds_to_{target:.0%}", f"rounds_to_{target:.0%}_std", "seeds_that_reach_it"]
    rows = []
    for (method, part), cell in summarize(results, target, last).items():
        row: list[Any] = [method, part, len(cell.score)]
        reached = [number for number in cell.rounds_to_target if number is not None]
        for numbers in (cell.score, cell.test, cell.loss, cell.megabytes, cell.seconds, cell.cpu_seconds, reached):
            row += _mean_std(numbers)
        rows.append([*row, len(reached) if cell.rounds_to_target else None])
    return csv_text([header, *rows])


def _note(results: Sequence[Mapping[str, Any]], target: float, last: int) -> str:
    monitor, seeds = results[0]["monitor"], len({run["seed"] for run in results})
    lengths = sorted({len(run["rounds"]) for run in results if run["method"] != CENTRAL})
    rounds = f", {'-'.join(map(str, lengths))} {'round' if lengths == [1] else 'rounds'}" if lengths else ""
    over = "of the last round" if last == 1 else f"over the last {last} rounds"
    notes = [f"{seeds} {'seed' if seeds == 1 else 'seeds'}{rounds}; `{monitor}` {over}, mean ± standard deviation."]
    errors = [run["rounds"][-1].get(f"{monitor}_se", 0.0) for run in results]
    if any(errors):
        notes.append(f"Standard error of a run's `{monitor}` over the clients' cases: at most {max(errors):.3f}.")
    if any(run["method"] == CENTRAL for run in results):
        notes.append(
            f"#R@{target:.0%}: first round that reaches {target:.0%} of the centralised score; mean over the seeds "
            "that reach the target (in brackets: number of these seeds)."
        )
    personal = dict.fromkeys(f"`{run['method']}`" for run in results if run["has_own_models"])
    if personal and not monitor.startswith(("fed/", "fesem/")):
        notes.append(
            f"`{monitor}` evaluates the global model, but clients of {', '.join(personal)} have personal models: use"
            f" `--monitor fed/{monitor}/mean`, with validation data for every client."
        )
    return " ".join(notes)


def _differences(results: Sequence[Mapping[str, Any]], last: int) -> list[str]:
    """Describes the difference in score between each method and the first method."""
    methods = list(dict.fromkeys(run["method"] for run in results if run["method"] != CENTRAL))
    if len(methods) < 2:
        return []
    if len({run["seed"] for run in results}) < 2:
        return ["One seed cannot distinguish a difference from chance: `--seeds 5` adds seeds and keeps finished runs."]
    scores: dict[tuple[str, float], dict[int, float]] = {}
    for run in results:
        scores.setdefault((run["method"], run["stragglers"]), {})[run["seed"]] = _score(run, last)
    sign = 1 if results[0]["mode"] == "max" else -1
    lines = []
    for part in _parts(results):
        where = f" with {part:.0%} stragglers" if len(_parts(results)) > 1 else ""
        lines.append(
            f"Compared with `{methods[0]}`{where}: mean difference and 95 % confidence interval, paired by seed:\n"
        )
        baseline = scores.get((methods[0], part), {})
        for method in methods[1:]:
            pairs = [
                (score, baseline[seed]) for seed, score in scores.get((method, part), {}).items() if seed in baseline
            ]
            if len(pairs) == 2:
                both = " and ".join(f"{score - other:+.3f}" for score, other in pairs)
                lines[-1] += f"\n- `{method}`: {both}; two seeds cannot show a difference"
            elif len(pairs) > 2:
                first, second = zip(*pairs, strict=True)
                estimate = difference_of_sums(paired_sums(first, second))
                is_better, (low, high) = sign * estimate.value > 0, estimate.interval()
                verdict = "no difference shown" if not estimate.p_value() < 0.05 else "better" if is_better else "worse"
                lines[-1] += f"\n- `{method}`: {float(estimate.value):+.3f} ({low:+.3f} to {high:+.3f}), {verdict}"
    return lines


def _parts(results: Sequence[Mapping[str, Any]]) -> list[float]:
    return sorted({run["stragglers"] for run in results if run["stragglers"] is not None}) or [0.0]


def _score(run: Mapping[str, Any], last: int) -> float:
    return statistics.fmean([values[run["monitor"]] for values in run["rounds"] if run["monitor"] in values][-last:])


def _goal(mode: str, target: float, central: float) -> float:
    return target * central if mode == "max" else central / target


def _first_round(run: Mapping[str, Any], target: float, central: float) -> int | None:
    goal = _goal(run["mode"], target, central)
    for number, values in enumerate(run["rounds"], start=1):
        value = values.get(run["monitor"], math.nan)
        if (value >= goal) if run["mode"] == "max" else (value <= goal):
            return number
    return None


def _mean_std(numbers: Sequence[float]) -> tuple[float | None, float | None]:
    mean = statistics.fmean(numbers) if numbers else None
    if len(numbers) < 2:
        return mean, None
    # sample standard deviation
    return mean, statistics.stdev(numbers) if all(map(math.isfinite, numbers)) else math.nan


def _over_parts(by_seed: Sequence[Mapping[tuple[str, float | None], Cell]], method: str, name: str) -> list[float]:
    numbers = [
        [number for key, cell in cells.items() if key[0] == method for number in getattr(cell, name)]
        for cells in by_seed
    ]
    return [statistics.fmean(values) for values in numbers if values]


def _shown(numbers: Sequence[float], digits: int, is_fixed: bool = False) -> str:
    mean, std = _mean_std(numbers)
    if mean is None:
        return ""
    if std is None or (is_fixed and std < 0.5 * 10**-digits):
        return _number(mean, digits)
    return f"{_number(mean, digits)} ± {_number(std, digits)}"


def _number(value: float, digits: int) -> str:
    return f"{value:.1e}" if abs(value) >= 1e6 else f"{value:.{digits}f}"  # losses of diverged runs


def _shown_rounds(*parts: Sequence[int | None]) -> str:
    reached = [[number for number in part if number is not None] for part in parts]
    count, total = sum(map(len, reached)), sum(map(len, parts))
    if total and not count:
        return "never"
    some = f" ({count} of {total})" if count < total else ""
    return _shown(reached[0] if len(parts) == 1 else [statistics.fmean(part) for part in reached if part], 1) + some
