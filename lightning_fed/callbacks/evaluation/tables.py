"""Table with named rows and columns, written as CSV, Markdown or picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.evaluation.results import ClientResults
from lightning_fed.callbacks.pictures import draw_matrix, save_picture
from lightning_fed.console import markdown_table
from lightning_fed.messages import Client

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Table:
    """Table of numbers by row name and column name.

    ``corner`` is the heading above the row names. Missing values and NaN are empty cells.

    Example:
        >>> table = Table("client", ["a", "b"], ["val_iou"], {("a", "val_iou"): 0.5})
        >>> print(table.markdown())
        | client | val_iou |
        |---|---|
        | a | 0.5 |
        | b |  |
    """

    corner: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Mapping[tuple[str, str], float]

    def cells(self, digits: int) -> list[list[str]]:
        return [[row, *(self._cell(row, column, digits) for column in self.columns)] for row in self.rows]

    def csv(self) -> str:
        return csv_text([[self.corner, *self.columns], *self.cells(17)])

    def markdown(self) -> str:
        return markdown_table([[self.corner, *self.columns], *self.cells(3)])

    def write(self, path: Path) -> None:
        write_text_atomically(path.with_suffix(".csv"), self.csv())

    def draw(self, path: Path) -> None:
        values = torch.tensor([[self._value(row, column) for column in self.columns] for row in self.rows])
        known = values[~values.isnan()]
        lowest, largest = float(known.min()), max(float(known.max()), float(known.min()) + 1e-6)

        def label(axes: Axes) -> None:
            axes.set_xticks(range(len(self.columns)), self.columns, rotation=30, ha="right")
            axes.set_yticks(range(len(self.rows)), self.rows)
            axes.set(ylabel=self.corner, xlabel="client")
            for index, row in enumerate(self.rows):
                for place, column in enumerate(self.columns):
                    color = "black" if values[index, place] > 0.4 * lowest + 0.6 * largest else "white"
                    axes.text(place, index, self._cell(row, column, 3) or "-", ha="center", va="center", color=color)

        size = (3 + 0.8 * len(self.columns), 1.5 + 0.6 * len(self.rows))
        save_picture(draw_matrix(values, 14, size, label, largest, lowest), path)

    def _value(self, row: str, column: str) -> float:
        return float(self.values.get((row, column), math.nan))

    def _cell(self, row: str, column: str, digits: int) -> str:
        value = self._value(row, column)
        if math.isnan(value):
            return ""
        return f"{value:.0f}" if value.is_integer() else f"{value:.{digits}g}"


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Formats rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


ALL, GLOBAL = "all", "global"
"""Names of the rows of all clients together, and of the global model."""


def row_name(client: Client) -> str:
    """Formats a client's name for a table. Names that look like numbers or summary rows get quotes."""
    text = str(client)
    is_ambiguous = text in (ALL, GLOBAL) or text[:1] in ("'", '"') or text.removeprefix("-").isdecimal()
    return repr(client) if is_ambiguous else text


def client_table(results: ClientResults, pooled: Mapping[str, float], with_support: bool = True) -> Table:
    """Builds a table with one row per client, a row for all clients and, if known, the examples per class."""
    values: dict[tuple[str, str], float] = {}
    for client, count in results.num_samples.items():
        values[row_name(client), "examples"] = count
    values[ALL, "examples"] = sum(results.num_samples.values())
    for name, by_client in results.values.items():
        values |= {(row_name(client), name): value for client, value in by_client.items()}
        values[ALL, name] = pooled.get(name, math.nan)
    columns = ["examples", *results.values]
    if with_support and results.support:
        classes = max(len(support) for support in results.support.values())
        columns += [f"support/{index}" for index in range(classes)]
        for client, support in results.support.items():
            for index, count in enumerate(support.tolist()):
                values[row_name(client), f"support/{index}"] = count
                values[ALL, f"support/{index}"] = values.get((ALL, f"support/{index}"), 0) + count
    return Table("client", [*map(row_name, results.num_samples), ALL], columns, values)
