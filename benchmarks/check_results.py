"""Recomputes tables of results from stored scores of single runs, and lists all other sections with the command.

`benchmarks/results/scores/<study>.json` maps a run's name, with the seed at the end, to the script's result. Functions
of the script compute means, standard deviations and intervals again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import appearance
import asynchronous
import batch_norm_decision
import fedfusion
import fedmargin
import hospitals
import label_skew
import merging
import unpaired
from common import without_columns

RESULTS = Path(__file__).with_name("results")
PAGES = sorted([*RESULTS.glob("*.md"), *(Path(__file__).parents[1] / "docs" / "results").glob("*.md")])
SECTION = re.compile(r"<!-- (?P<name>[^/].*?) -->(?P<text>.*?)<!-- /(?P=name) -->", re.S)
COMMAND = re.compile(r"`(python benchmarks/[^`]*)`")
UNCERTAIN = re.compile(r"± \d|\(-?[\d.]+ to -?[\d.]+\)")  # a standard deviation or an interval
CONSTANT = ("| second annotator |",)  # rows without any run


def read_runs(study: str) -> dict[str, list[dict[str, Any]]]:
    """Results by name, without the seed at the end of a run's name."""
    stored = json.loads((RESULTS / "scores" / f"{study}.json").read_text())
    by_name = groupby(sorted(stored), key=lambda run: run.rpartition("_")[0])
    return {name: [stored[run] for run in runs] for name, runs in by_name}


def of_hospitals(study: str) -> list[list[str]]:
    found = {name.rpartition("_")[0]: runs for name, runs in read_runs(study).items()}
    cameras = next(iter(next(iter(found.values()))[0]["scores"].values()))["dice"]
    return hospitals.rows_of(found, list(cameras))


def of_appearance(study: str) -> list[list[str]]:
    by_setting: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, runs in read_runs(study).items():
        setting, _, way = name.rpartition("_")
        by_setting.setdefault(setting, {})[way] = runs
    return [row for found in by_setting.values() for row in appearance.rows_of(found)]


def of_merging(study: str) -> list[list[str]]:
    return merging.rows_of({name.replace("_", ", "): runs for name, runs in read_runs(study).items()})


def of_settings(rows_of: Callable[[dict[str, list[dict[str, Any]]]], list[list[str]]]) -> Callable[[str], Any]:
    return lambda study: rows_of({name.replace("_", " "): runs for name, runs in read_runs(study).items()})


def of_fedfusion(study: str) -> list[list[str]]:
    results = [run for runs in read_runs(study).values() for run in runs]
    results.sort(key=lambda run: (run["method"] == fedfusion.LOCAL, run["method"] == fedfusion.CONTROL))
    tables = [fedfusion.score_table(results, fedfusion.MONITORS, 5), fedfusion.operator_table(results)]
    for monitor in fedfusion.MONITORS[:-1]:
        shown = [{**run, "monitor": monitor} for run in results]
        tables.append(fedfusion.milestone_table(shown, fedfusion.milestones_of(shown, 5)))
    return [line[2:-2].split(" | ") for part in tables for line in part.splitlines()[2:]]


def of_margins(study: str) -> list[list[str]]:
    settings, tables = fedmargin.STUDIES[study.removeprefix("fedmargin-")], list[str]()
    results = [{"mode": "max", **run} for runs in read_runs(study).values() for run in runs]
    for run in results:  # times are stored with the last round
        run["rounds"] = [{"seconds": 0, "cpu_seconds": 0, **values} for values in run["rounds"]]
    results.sort(key=lambda run: fedmargin.PAPER_METHODS.index(run["method"]))
    for monitor in settings.monitors:
        shown = [{**run, "monitor": monitor} for run in results]
        tables += without_columns(fedmargin.markdown(shown, last=settings.last), "wall s").split("\n\n")[:1]
        tables += fedmargin.compare_pairs(shown, settings, monitor, settings.last).split("\n\n")[:1]
    return [line[2:-2].split(" | ") for part in tables for line in part.splitlines()[2:]]


def of_asynchronous(study: str) -> list[list[str]]:
    (dataset,) = (name for name, section in asynchronous.SECTIONS.items() if section == study)
    files = {name.replace(",", "").replace(" ", "_"): name for name in asynchronous.METHODS}
    stored = {files[name]: runs for name, runs in read_runs(study).items()}
    found = {name: stored[name] for name in asynchronous.METHODS if name in stored}
    return asynchronous.rows_of(found, asynchronous.DATASETS[dataset][2], asynchronous.SECONDS[dataset])


TABLES: dict[str, tuple[str, Callable[[str], list[list[str]]]]] = {
    "hospitals-measured": ("hospitals", of_hospitals),
    "hospitals-deeplab-measured": ("hospitals-deeplab", of_hospitals),
    "hospitals-pretrained-measured": ("hospitals-pretrained", of_hospitals),
    "hospitals-untrained": ("hospitals-untrained", of_hospitals),
    "appearance-measured": ("appearance", of_appearance),
    "asynchronous": ("asynchronous", of_asynchronous),
    "asynchronous-cifar10": ("asynchronous-cifar10", of_asynchronous),
    "batch_norm_decision": ("batch_norm_decision", of_settings(batch_norm_decision.rows_of)),
    "label_skew": ("label_skew", of_settings(label_skew.rows_of)),
    "fedfusion-cifar10_classes-ten-seeds": ("fedfusion-cifar10_classes", of_fedfusion),
    "fedmargin-letters": ("fedmargin-letters", of_margins),
    "fedmargin-synthetic-linear": ("fedmargin-synthetic-linear", of_margins),
    "merging": ("merging", of_merging),
    "unpaired": ("", lambda _: unpaired.rows()),  # from other tables
}
"""Section to the study with the stored runs, and the function that computes the table's rows."""


def differences(section: str, text: str) -> list[str]:
    """Rows in a section that differ from the stored runs, and computed rows without an equal in the section."""
    study, rows_of = TABLES[section]
    computed = sorted("| " + " | ".join(map(str, row)) + " |" for row in rows_of(study))
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", text, re.M)
    shown = sorted(line for part in tables for line in part.splitlines() if not line.startswith(CONSTANT))
    return [f"- {line}" for line in shown if line not in computed] + [
        f"+ {line}" for line in computed if line not in shown
    ]


def main() -> None:
    faults, others = 0, list[str]()
    for page in PAGES:
        for match in SECTION.finditer(page.read_text()):
            name, text = match["name"], match["text"]
            if name not in TABLES:
                command = COMMAND.search(text)
                others += [f"{page.name}: {name}: {command[1] if command else ''}"] if UNCERTAIN.search(text) else []
                continue
            found = differences(name, f"{text}\n")
            faults += len(found)
            print(f"{page.name}: {name}: {'as stored' if not found else ''}")
            print("\n".join(found), end="\n" if found else "")
    print(
        f"\nNot recomputable, because no scores of single runs are stored ({len(others)} sections, with their command):"
    )
    print("\n".join(others))
    sys.exit(min(faults, 1))


if __name__ == "__main__":
    main()
