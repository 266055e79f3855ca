"""The tables and the picture of a comparison."""

from __future__ import annotations

import csv
import io
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fed.compare import CENTRAL, write_whole

_log = logging.getLogger(__name__)


@dataclass
class Cell:
    """One method under one fraction of stragglers, over seeds; ``None`` where a number does not exist.

    Args:
        score: The metric in the last rounds, per seed.
        loss: Training loss in the last round, per seed.
        rounds_to_target: First round (from 1) that reaches the target, per seed; ``None`` for a seed that never does.
        megabytes: Sent up and down in all rounds, per seed.
        seconds: Process seconds of training and aggregation per round, per seed.
        test: The metric on the test data, per seed.

    """

    score: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    rounds_to_target: list[int | None] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)


def summarize(
    results: Sequence[Mapping[str, Any]], target: float = 0.8, last: int = 1
) -> dict[tuple[str, float], Cell]:
    """The numbers of the table, by method and fraction of stragglers.

    Args:
        results: Those of :func:`run_comparison`.
        target: Share of the centralised score that is to be reached, for the number of rounds to it
            (``#R@80%``); a seed's own centralised run counts. Without one there is no such number.
        last: Rounds at the end over which the score is the mean.

    Example:
        >>> rounds = [{"val_acc": 0.5}, {"val_acc": 0.75}]
        >>> run = {"seed": 0, "stragglers": 0.0, "monitor": "val_acc", "mode": "max", "rounds": rounds, "test": {}}
        >>> cells = summarize([{**run, "method": "central"}, {**run, "method": "fedavg"}])
        >>> cells["fedavg", 0.0].score, cells["fedavg", 0.0].rounds_to_target
        ([0.75], [2])

    """
    central = {
        run["seed"]: _mean_of_last(run["rounds"], run["monitor"], last) for run in results if run["method"] == CENTRAL
    }
    cells: dict[tuple[str, float], Cell] = {}
    for run in results:
        cell = cells.setdefault((run["method"], run["stragglers"]), Cell())
        rounds, monitor = run["rounds"], run["monitor"]
        cell.score.append(_mean_of_last(rounds, monitor, last))
        losses = [rounds[-1][name] for name in ("train_loss", "train_loss_epoch") if name in rounds[-1]]
        cell.loss += losses[:1]
        if run["seed"] in central and run["method"] != CENTRAL:
            cell.rounds_to_target.append(_first_round(rounds, monitor, run["mode"], target, central[run["seed"]]))
        if "comm/total_up_bytes" in rounds[-1]:
            sent = rounds[-1]["comm/total_up_bytes"] + rounds[-1]["comm/total_down_bytes"]
            cell.megabytes.append(sent / 1e6)
        cell.seconds.append(statistics.fmean(values["cpu_seconds"] for values in rounds if "cpu_seconds" in values)
                            if any("cpu_seconds" in values for values in rounds) else math.nan)  # fmt: skip
        name = monitor.replace("val", "test")
        if name in run["test"]:
            cell.test.append(run["test"][name])
    return cells


def write_report(results: Sequence[Mapping[str, Any]], folder: Path, target: float = 0.8, last: int = 1) -> str:
    """Writes ``rounds.csv``, ``summary.csv``, ``summary.md`` and ``curves.png`` (with matplotlib) into a folder.

    Args:
        results: Those of :func:`run_comparison`.
        folder: The folder.
        target: See :func:`summarize`.
        last: See :func:`summarize`.

    Returns:
        The table, in Markdown.

    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({name for run in results for values in run["rounds"] for name in values if "/" not in name[4:]})
    rows = [
        [run["method"], run["stragglers"], run["seed"], number, *(values.get(name, "") for name in names)]
        for run in results
        for number, values in enumerate(run["rounds"], start=1)
    ]
    write_whole(folder / "rounds.csv", _csv(["method", "stragglers", "seed", "round", *names], rows))
    cells = summarize(results, target, last)
    header = ["method", "stragglers", "seeds", results[0]["monitor"], "std", "train_loss", f"rounds_to_{target:.0%}"]
    header += ["reached_by", "megabytes", "cpu_seconds_per_round", "test", "test_std"]
    write_whole(folder / "summary.csv", _csv(header, [_summary_row(*key, cell) for key, cell in cells.items()]))
    text = _markdown(results, cells, target, last)
    write_whole(folder / "summary.md", text + "\n")
    try:
        _draw(results, folder / "curves.png", target)
    except ModuleNotFoundError:
        _log.warning("No picture of the curves: `pip install lightning-fed[demo]` brings matplotlib.")
    return text


def _summary_row(method: str, stragglers: float, cell: Cell) -> list[Any]:
    reached = [number for number in cell.rounds_to_target if number is not None]
    columns: list[Any] = [method, stragglers, len(cell.score), *_mean_std(cell.score)]
    columns += [_mean_std(cell.loss)[0], statistics.fmean(reached) if reached else "", len(reached)]
    columns += [_mean_std(cell.megabytes)[0], _mean_std(cell.seconds)[0], *_mean_std(cell.test)]
    return columns


def _markdown(
    results: Sequence[Mapping[str, Any]], cells: Mapping[tuple[str, float], Cell], target: float, last: int
) -> str:
    monitor, parts = results[0]["monitor"], sorted({part for _, part in cells})
    with_test = any(cell.test for cell in cells.values())
    header = ["method"]
    for part in parts:
        suffix = f" ({part:.0%} stragglers)" if len(parts) > 1 else ""
        header += [f"{monitor}{suffix}", *([f"test{suffix}"] if with_test else []), f"#R@{target:.0%}{suffix}"]
    if len(parts) > 1:
        header.append(f"{monitor}, mean and std over stragglers")
    header += ["train_loss", "MB", "CPU s / round"]
    lines = []
    for method in dict.fromkeys(run["method"] for run in results):
        line, means = [f"`{method}`"], []
        own = {part: cells[method, part] for part in parts if (method, part) in cells}
        for part in parts:
            cell = own.get(part)
            line.append("" if cell is None else _shown(cell.score))
            line += [] if not with_test else ["" if cell is None else _shown(cell.test)]
            line.append("" if cell is None else _shown_rounds(cell.rounds_to_target))
            means += [] if cell is None else [statistics.fmean(cell.score)]
        if len(parts) > 1:
            line.append(_shown(means) if len(means) > 1 else "")
        for numbers, digits in (
            ([loss for cell in own.values() for loss in cell.loss], 3),
            ([size for cell in own.values() for size in cell.megabytes], 1),
            ([second for cell in own.values() for second in cell.seconds], 2),
        ):
            line.append(f"{statistics.fmean(numbers):.{digits}f}" if numbers else "")
        lines.append(line)
    seeds = len({run["seed"] for run in results})
    longest = max(len(run["rounds"]) for run in results if run["method"] != CENTRAL or len(results) == 1)
    mean = "in the last round" if last == 1 else f"mean over the last {last} rounds"
    note = (
        f"{seeds} seeds, {longest} rounds; `{monitor}` {mean}, mean and standard deviation over seeds. #R@{target:.0%}:"
        f" first round at {target:.0%} of the centralised score, mean over the seeds that reach it (their number in"
        " brackets where not all do)."
    )
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", note])


def _draw(results: Sequence[Mapping[str, Any]], path: Path, target: float) -> None:
    from matplotlib.figure import Figure  # the extra `demo`

    parts = sorted({run["stragglers"] for run in results})
    methods = list(dict.fromkeys(run["method"] for run in results if run["method"] != CENTRAL))
    figure = Figure(figsize=(5 * len(parts), 4), layout="constrained")
    axes = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
    monitor = results[0]["monitor"]
    central = [run["rounds"][-1][monitor] for run in results if run["method"] == CENTRAL]
    for axis, part in zip(axes, parts, strict=True):
        for method in methods:
            runs = [run for run in results if run["method"] == method and run["stragglers"] == part]
            curves = [[values.get(monitor, math.nan) for values in run["rounds"]] for run in runs]
            length = min((len(curve) for curve in curves), default=0)
            if length == 0:
                continue
            means = [statistics.fmean(curve[number] for curve in curves) for number in range(length)]
            (line,) = axis.plot(range(1, length + 1), means, label=method)
            if len(curves) > 1:
                lows, highs = ([pick(curve[n] for curve in curves) for n in range(length)] for pick in (min, max))
                axis.fill_between(range(1, length + 1), lows, highs, alpha=0.15, color=line.get_color())
        if central:
            axis.axhline(statistics.fmean(central), color="black", linewidth=0.8, label=CENTRAL)
            axis.axhline(target * statistics.fmean(central), color="black", linewidth=0.8, linestyle=":")
        axis.set(title=f"{part:.0%} stragglers", xlabel="round")
    axes[0].set_ylabel(monitor)
    axes[-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _mean_of_last(rounds: Sequence[Mapping[str, float]], monitor: str, last: int) -> float:
    return statistics.fmean([values[monitor] for values in rounds if monitor in values][-last:])


def _first_round(
    rounds: Sequence[Mapping[str, float]], monitor: str, mode: str, target: float, central: float
) -> int | None:
    goal = target * central if mode == "max" else central / target
    for number, values in enumerate(rounds, start=1):
        value = values.get(monitor, math.nan)
        if (value >= goal) if mode == "max" else (value <= goal):
            return number
    return None


def _mean_std(numbers: Sequence[float]) -> tuple[Any, Any]:
    if not numbers:
        return "", ""
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else ""


def _shown(numbers: Sequence[float]) -> str:
    mean, std = _mean_std(numbers)
    return "" if mean == "" else f"{mean:.3f}" if std == "" else f"{mean:.3f} ± {std:.3f}"


def _shown_rounds(numbers: Sequence[int | None]) -> str:
    reached = [number for number in numbers if number is not None]
    if not numbers:
        return ""
    if not reached:
        return "never"
    mean = statistics.fmean(reached)
    return f"{mean:.1f}" if len(reached) == len(numbers) else f"{mean:.1f} ({len(reached)} of {len(numbers)})"


def _csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    return text.getvalue()
