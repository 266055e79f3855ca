"""Intervals for differences between methods in tables with means and standard deviations only.

The standard deviation of paired differences is at most the sum of both standard deviations. With this sum, and with all
numbers rounded in the unfavourable direction, the interval of the paired t test lies inside the computed interval.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from common import parser, table, write_section
from scipy.stats import t

RESULTS = Path(__file__).with_name("results")
EPOCHS = "epochs to converge"
NEWCOMERS = [
    ("fedfusion", f"fedfusion-{data}-three-seeds", EPOCHS, f"`fedfusion:operator={operator}`", "`fedavg`", 1)
    for data in ("permuted_mnist", "cifar10_classes")
    for operator in ("conv", "conv:conv_init=local", "multi")
]
COMPARISONS = (  # page, section, column, method, baseline, factor to points
    ("fedmargin", "fedmargin-fashion_mnist", "fed/val_acc/mean, 0% stragglers", "`fedper`", "`fedavg`", 100),
    ("fedmargin", "fedmargin-fashion_mnist", "fed/val_acc/mean, 0% stragglers", "`fedrep`", "`fedavg`", 100),
    ("finetuning", "finetuning", "in the last 3", "LoRA, rank 8", "all weights", 1),
    ("fedma", "fedma-shakespeare", "with 14.0 MB", "`fedavg`, 6 epochs a round", "`fedavg`", 100),
    ("fedma", "fedma-shakespeare", "with 14.0 MB", "`fedma`", "`fedavg`", 100),
    ("fedma", "fedma-shakespeare", "`val_acc`", "`fedma`", "`fedavg`", 100),
    ("fedma", "color-bias", "accuracy", "FedMA, two clients", "pooled", 1),
    ("fedma", "color-bias", "accuracy", "FedMA, two clients", "freezing and training without matching", 1),
    ("fedma", "color-bias", "accuracy", "FedMA, two clients", "pooled, oversampled", 1),
    *NEWCOMERS,
)


def widest(first: str, second: str, seeds: int) -> tuple[float, float, float]:
    """Difference between two cells such as ``0.938 ± 0.012``, and an interval that contains the paired interval.

    Example:
        >>> [round(number, 3) for number in widest("0.938 ± 0.012", "0.695 ± 0.018", 3)]
        [0.243, 0.165, 0.321]
    """
    (one, spread_one), (two, spread_two) = (map(float, cell.split(" ± ")) for cell in (first, second))
    unit = 10.0 ** -len(first.split(" ± ")[0].partition(".")[2])
    half = t.ppf(0.975, seeds - 1) * (spread_one + spread_two + unit) / math.sqrt(seeds) + unit
    return one - two, one - two - half, one - two + half


def read_cells(page: str, section: str, column: str) -> dict[str, tuple[str, int]]:
    """Cell and number of seeds by first cell, from a section's first table with the column."""
    text = (RESULTS / f"{page}.md").read_text()
    text = text.partition(f"<!-- {section} -->")[2].partition(f"<!-- /{section} -->")[0]
    header, *lines = text[text.index(f"| {column} |") :].splitlines()
    whole = text[: text.index(f"| {column} |")].rpartition("\n")[2] + header
    names = [cell.strip() for cell in whole.strip("|").split("|")]
    listed = re.search(r"seeds \[([\d, ]+)\]", text)
    known = len(listed[1].split(",")) if listed else 3 * bool(re.search("^(3|Three) seeds, ", text, re.M))
    found = {}
    for line in lines[1:]:
        if not line.startswith("|"):
            break
        cells = dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        found[cells[names[0]]] = cells[column], int(cells.get("seeds", known))
    return found


def rows() -> list[list[str]]:
    """Table rows for all comparisons."""
    made = []
    for page, section, column, method, baseline, factor in COMPARISONS:
        cells = read_cells(page, section, column)
        (one, seeds), (two, _) = cells[method], cells[baseline]
        value, low, high = (factor * number for number in widest(one, two, seeds))
        shown = "yes" if low * high > 0 else "no"
        difference = f"{value:+.1f} ({low:.1f} to {high:.1f})"
        made.append([f"{section}, {column}", method, one, baseline, two, difference, str(seeds), shown])
    return made


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], data=False).parse_args()
    header = ["table", "method", "value", "baseline", "value", "difference in points or epochs", "seeds", "excludes 0"]
    text = (
        "`python benchmarks/unpaired.py --out benchmarks/results/unpaired.md`. Differences between means, and the"
        " widest possible 95 % interval of the paired t test: the standard deviation of the paired differences is at"
        " most the sum of both standard deviations. If this interval contains 0, the paired interval is unknown, and"
        " the claim counts as not tested."
    )
    write_section(arguments.out, "unpaired", f"{text}\n\n{table(header, rows())}")


if __name__ == "__main__":
    main()
