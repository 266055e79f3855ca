"""HTML page with a fit's results: curves, tables and pictures in one file."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lightning_fed.callbacks.pictures import VIRIDIS
from lightning_fed.console import round_number

WIDTH, HEIGHT = 360, 210
"""Size of a chart, in units of the SVG file."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 34
_MOST_CLIENTS = 200
_COLUMNS = {  # columns of the table by round: name in the log, factor
    "clients": ("fed/clients", 1.0),
    "failed": ("fed/failed", 1.0),
    "MB sent to clients": ("comm/down_bytes", 1e-6),
    "MB sent by clients": ("comm/up_bytes", 1e-6),
    "seconds": ("seconds", 1.0),
}
_NOT_GLOBAL = ("fed/", "comm/", "client/", "clients/", "evaluation/", "privacy/", "seconds", "step", "epoch")
_CLASS_IOU = re.compile(r".*iou/(?P<name>.+)")
_FOLDER = Path(__file__).parent
_TEMPLATES = Environment(  # compiles each template once
    loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


@dataclass
class ClientRow:
    """Row of a client in the report. ``first`` and ``last`` map each score's name to (round, value)."""

    name: str
    visits: int = 0
    failures: int = 0
    reason: str = ""
    examples: int | None = None
    first: Mapping[str, Sequence[float]] = field(default_factory=dict)
    last: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """PNG file with a client's segmentations."""

    client: str
    content: bytes

    @property
    def address(self) -> str:
        return embed_picture(self.content)


@dataclass(frozen=True)
class FitResults:
    """Contents of a report.

    Args:
        title: Heading.
        facts: Texts by name, such as "method" and "seed".
        rounds: Logged values by round (from 0) and name.
        score: Name of the score in the table of clients; empty without scores.
        higher_is_better: Whether higher values are better, by score name.
        clients: Rows of the table of clients.
        iou: IoU by client and class.
        classes: Names of the classes in ``iou``, in order.
        pictures: Pictures of segmentations, worst client first.
        scored_round: Round (from 1) of ``iou`` and ``pictures``; ``None`` without segmentations.
    """

    title: str
    facts: Mapping[str, str]
    rounds: Mapping[int, Mapping[str, float]]
    score: str = ""
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    clients: Sequence[ClientRow] = ()
    iou: Mapping[tuple[str, str], float] = field(default_factory=dict)
    classes: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    scored_round: int | None = None


def render_page(results: FitResults) -> str:
    r"""Builds the HTML page from a fit's results. All names and texts are escaped.

    Example:
        >>> page = render_page(FitResults("FedAvg", {"seed": "0"}, {0: {"val_acc": 0.5}}))
        >>> "<td data-value=\"0.5\">0.5</td>" in page
        True
    """
    names = list(dict.fromkeys(name for values in results.rounds.values() for name in values))
    global_names = sorted(name for name in names if not name.startswith(_NOT_GLOBAL))
    return render_template(
        "report.html",
        results=results,
        charts=[line_chart(title, series) for title, series in _curves(results, global_names).items()],
        columns=[*_COLUMNS, *global_names],
        table=[_round_cells(round, values, global_names) for round, values in sorted(results.rounds.items())],
        clients=_client_cells(results)[:_MOST_CLIENTS],
        iou=_iou_cells(results),
        scale=[f"rgb{color}" for color in VIRIDIS],
        format=format_number,
    )


def render_template(name: str, **values: Any) -> str:
    """Fills in a template file from the package, with the common style sheet. All values are escaped."""
    style = (_FOLDER / "style.css").read_text(encoding="utf-8")
    return _TEMPLATES.get_template(name).render(style=style, **values)


def embed_picture(content: bytes) -> str:
    """Returns a PNG file's content as a ``data:`` address, so that the page needs no other file."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def format_number(value: float | None) -> str:
    """Formats a number with four digits, and a missing number as a dash."""
    return "-" if value is None else f"{value:.4g}"


def line_chart(title: str, series: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """Computes the axes, lines and points in a line chart."""
    rounds = sorted({round_number(round) for values in series.values() for round in values})
    numbers = [value for values in series.values() for value in values.values()]
    ticks = _ticks(min(numbers), max(numbers))
    low, high = ticks[0], ticks[-1]
    first, last = rounds[0], max(rounds[-1], rounds[0] + 1)

    def x(round: float) -> float:
        return _LEFT + (round - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    every = math.ceil((last - first + 1) / 8)
    lines = []
    for name, values in series.items():
        places = [(round_number(round), value) for round, value in sorted(values.items())]
        points = [(f"{x(round):.1f}", f"{y(value):.1f}", round, value) for round, value in places]
        path = "M" + " L".join(f"{across},{down}" for across, down, _, _ in points)
        lines.append({"name": name, "points": points, "path": path})
    return {
        "title": title,
        "width": WIDTH,
        "height": HEIGHT,
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "bottom": HEIGHT - _BOTTOM,
        "x_ticks": [(f"{x(round):.1f}", round) for round in range(first, rounds[-1] + 1, every)],
        "y_ticks": [(f"{y(value):.1f}", f"{value:.6g}") for value in ticks],
        "lines": lines,
    }


def _ticks(low: float, high: float) -> list[float]:
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= span / 4)
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(start, max(end, start + 1) + 1)]


def _curves(results: FitResults, global_names: Sequence[str]) -> dict[str, dict[str, dict[int, float]]]:
    """Groups the logged values by chart, curve and round."""
    charts: dict[str, dict[str, dict[int, float]]] = {}
    for name in global_names:
        is_loss = "loss" in name
        if _CLASS_IOU.fullmatch(name):
            continue
        series = charts.setdefault("loss" if is_loss else name, {})
        wanted = {name: name if is_loss else "global model"}
        if not is_loss:
            wanted |= {f"fed/{name}/mean": "mean over clients", f"fed/{name}/worst10": "worst tenth of the clients"}
        for logged, label in wanted.items():
            values = {round: row[logged] for round, row in results.rounds.items() if logged in row}
            if values:
                series[label] = values
    return {title: series for title, series in charts.items() if series}


def _round_cells(round: int, values: Mapping[str, float], names: Sequence[str]) -> list[float | None]:
    cells: list[float | None] = [float(round_number(round))]
    for name, factor in [*_COLUMNS.values(), *((name, 1.0) for name in names)]:
        cells.append(factor * values[name] if name in values else None)
    return cells


def _client_cells(results: FitResults) -> list[dict[str, Any]]:
    is_higher = results.higher_is_better.get(results.score, True)
    rows: list[dict[str, Any]] = []
    for client in results.clients:
        first, last = client.first.get(results.score), client.last.get(results.score)
        gain = None
        if first is not None and last is not None and first[0] < last[0]:
            gain = last[1] - first[1]
        rows.append({"client": client, "score": None if last is None else last[1], "gain": gain})
    rows.sort(key=lambda row: (row["score"] is None, (row["score"] or 0.0) * (1 if is_higher else -1)))
    longest = max([1.0, *(abs(row["score"]) for row in rows if row["score"] is not None)])
    return [{**row, "share": 100 * abs(row["score"] or 0.0) / longest} for row in rows]


def _iou_cells(results: FitResults) -> dict[str, Any]:
    """Builds a table of IoU by client and class. Each cell's colour shows the IoU."""
    iou = dict(results.iou)
    if not iou:  # logged by the module with `per_class`
        for client in results.clients:
            for name, score in client.last.items():
                if match := _CLASS_IOU.fullmatch(name):
                    iou[client.name, match["name"]] = score[1]
    names = list(dict.fromkeys(name for name, _ in iou))
    classes = list(dict.fromkeys([*results.classes, *(name for _, name in iou)]))
    rows = []
    for name in names:
        known = [iou.get((name, kind)) for kind in classes]
        rows.append((name, [(value, *_shade(value)) for value in known]))
    return {"classes": classes, "rows": rows}


def _shade(value: float | None) -> tuple[str, str]:
    if value is None:
        return "transparent", "inherit"
    place = round(max(0.0, min(1.0, value)) * (len(VIRIDIS) - 1))
    return f"rgb{VIRIDIS[place]}", "#000" if place > 9 else "#fff"
