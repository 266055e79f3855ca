"""Plausibility checks for a client's evaluation results."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_fed.callbacks.evaluation.data_pass import is_close
from lightning_fed.callbacks.evaluation.report import EvaluationReport
from lightning_fed.callbacks.evaluation.results import is_score
from lightning_fed.errors import BadUpdate
from lightning_fed.messages import Client, find_bad_count

_FEWEST = 3  # minimum number of clients to compare: with two, neither is an outlier
_MOST_CHANGE = 2  # maximum ratio of two numbers of examples from one client
_MOST_EXAMPLES = 10  # maximum ratio to the examples in training, or to the median
_MOST_BY_MEDIAN = 1000  # maximum ratio to the median, independent of the number in training
_MOST_COUNTS = 10  # factor for the median count per example, because images have different sizes
_MOST_BATCHES = 100  # maximum updates of a metric per example
_FARTHEST = 100  # maximum distance from the median, in spreads
_FARTHEST_NEGATIVE = 10  # median distances from the median, for a client with the only negative loss

_BY_EXAMPLE = ("sum",)  # reductions whose result grows with the number of examples


def check_numbers(report: EvaluationReport, announced: int | None) -> None:
    """Raises `BadUpdate` if a report contains implausible counts of examples or batches.

    The number of examples may at most double or halve since the client's first report (``announced``).
    """
    fault = find_bad_count(report.num_samples)
    if fault is not None:
        raise BadUpdate(fault)
    ratio = 1 if announced is None else max(announced, report.num_samples) / min(announced, report.num_samples)
    if ratio > _MOST_CHANGE:
        raise BadUpdate(
            f"the client had {announced} examples in the first evaluation, but now has {report.num_samples}"
        )
    for key, state in report.states.items():
        if not 0 <= state.updates <= _MOST_BATCHES * report.num_samples:
            raise BadUpdate(
                f"metric {key!r} reports {state.updates} batches, impossible with only {report.num_samples} examples"
            )
        for name, value in state.values.items():
            if not value.is_complex() and bool((value < 0).any()) and is_count(value):
                raise BadUpdate(f"state {name!r} of metric {key!r} has a negative count")


def is_count(value: Tensor) -> bool:
    """True if a metric's state has an integer dtype. Integer states contain counts."""
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def find_outliers(
    reports: Mapping[Client, EvaluationReport],
    trained: Mapping[Client, int] = MappingProxyType({}),
    computed: Mapping[Client, Mapping[str, float]] = MappingProxyType({}),
) -> dict[Client, str]:
    """Finds clients with implausible evaluation results. Returns the reason by client.

    A client's number is compared with the median m over all clients. The median distance to m is d. ``computed``
    contains values from metric states. With fewer than three clients, only the last case is checked. The cases are:

    - A value is more than 100 max(d, abs(m), 1) away from m.
    - A loss is negative and below m - max(10 d, abs(m), 1), and no other client has a negative loss.
    - A sum of counts per example is above 10 max(m, 1). Counts are integers in a metric's state, or class sizes.
    - The number of examples is above 1,000 m.
    - The number of examples is above 10 m, and also above 10 times the client's number in training (``trained``).
    """
    outliers: dict[Client, str] = {}
    _compare_examples(outliers, {client: report.num_samples for client, report in reports.items()}, trained)
    for key in _names(computed.values()):
        _compare(outliers, f"value of metric {key!r}", {
            client: values[key] for client, values in computed.items() if not math.isnan(values.get(key, math.nan))
        }, False)  # fmt: skip
    for name in _names(report.values for report in reports.values()):
        values = _finite({client: report.values.get(name) for client, report in reports.items()})
        _compare(outliers, f"value of {name!r}", values, not is_score(name))
    for name in _names(report.logged for report in reports.values()):
        values = _finite({client: _logged(report, name) for client, report in reports.items()})
        _compare(outliers, f"total of {name!r}", values, not is_score(name))
    for key in _names(report.states for report in reports.values()):
        counts = _finite({client: _count(report, key) for client, report in reports.items()})
        _compare_counts(outliers, f"counts of metric {key!r}", counts)
    supports = _finite({
        client: float(report.support.sum()) / report.num_samples
        for client, report in reports.items()
        if report.support is not None
    })  # fmt: skip
    _compare_counts(outliers, "examples per class", supports)
    return outliers


def find_disagreements(
    reports: Mapping[Client, EvaluationReport], computed: Mapping[Client, Mapping[str, float]]
) -> dict[Client, str]:
    """Returns a reason for each client whose logged values do not match the sums or metric states in the report."""
    faults: dict[Client, str] = {}
    holders = Counter(name for report in reports.values() for name in report.values)
    flags = Counter(name for report in reports.values() for name in report.partial)
    for client, report in reports.items():
        values = {name: logged.value for name, logged in report.logged.items()}
        values |= {name: computed[client][key] for name, key in report.metrics.items() if key in computed[client]}
        for name, value in values.items():
            if 2 * flags[name] <= holders[name] and not is_close(report.values[name], value):
                faults[client] = (
                    f"the client's value of {name!r} is {report.values[name]:g}, but the sums and states of the "
                    f"client give {value:g}"
                )
    return faults


def _names(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for names in mappings for name in names))


def _finite(values: Mapping[Client, float | None]) -> dict[Client, float]:
    return {client: value for client, value in values.items() if value is not None and math.isfinite(value)}


def _logged(report: EvaluationReport, name: str) -> float | None:
    logged = report.logged.get(name)
    if logged is None or logged.total is None:
        return None
    return logged.value / report.num_samples if logged.reduce_fx in _BY_EXAMPLE else logged.value


def _count(report: EvaluationReport, key: str) -> float | None:
    if key not in report.states:
        return None
    counts = [float(value.double().sum()) for value in report.states[key].values.values() if is_count(value)]
    return sum(counts) / report.num_samples if counts else None


def _compare_examples(
    outliers: dict[Client, str], numbers: Mapping[Client, int], trained: Mapping[Client, int]
) -> None:
    if not numbers:
        return
    median = statistics.median_low(numbers.values())
    for client, number in numbers.items():
        limit = _MOST_BY_MEDIAN * median if len(numbers) >= _FEWEST else math.inf
        if client in trained:
            limit = min(limit, _MOST_EXAMPLES * max(trained[client], median))
        if number > limit:
            outliers[client] = (
                f"the client has {number} examples, but the median of {len(numbers)} clients is {median}, and "
                f"in training the client had {trained.get(client, 'none')}"
            )


def _compare(outliers: dict[Client, str], what: str, values: Mapping[Client, float], is_loss: bool) -> None:
    if len(values) < _FEWEST:
        return
    median = statistics.median(values.values())
    if not math.isfinite(median):
        return
    distance = statistics.median(abs(value - median) for value in values.values())
    farthest = _FARTHEST * max(distance, abs(median), 1.0)
    lowest = median - max(_FARTHEST_NEGATIVE * distance, abs(median), 1.0)
    negative = [client for client, value in values.items() if value < 0]
    for client, value in values.items():
        if abs(value - median) > farthest or (is_loss and negative == [client] and value < lowest):
            outliers.setdefault(
                client, f"the client's {what} is {value:g}; the median of {len(values)} clients is {median:g}"
            )


def _compare_counts(outliers: dict[Client, str], what: str, counts: Mapping[Client, float]) -> None:
    if len(counts) < _FEWEST:
        return
    median = statistics.median_low(counts.values())
    for client, count in counts.items():
        if count > _MOST_COUNTS * max(median, 1.0):  # a rare event may be absent on most clients
            outliers.setdefault(
                client,
                f"the client's {what} are {count:g} per example, but the median of {len(counts)} clients is {median:g}",
            )
