"""Copies, merges and loads the states of torchmetrics metrics."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryMatthewsCorrCoef,
    BinaryNegativePredictiveValue,
    BinaryPrecisionRecallCurve,
    BinarySpecificity,
    MulticlassAccuracy,
    MulticlassHammingDistance,
    MulticlassMatthewsCorrCoef,
    MulticlassNegativePredictiveValue,
    MulticlassPrecisionRecallCurve,
    MulticlassSpecificity,
    MultilabelMatthewsCorrCoef,
    MultilabelNegativePredictiveValue,
    MultilabelPrecisionRecallCurve,
    MultilabelSpecificity,
)
from torchmetrics.retrieval import RetrievalFallOut
from torchmetrics.retrieval.base import RetrievalMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultitaskWrapper, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_fed.errors import BadUpdate, describe
from lightning_fed.features.isolated_pass import find_metrics
from lightning_fed.lightning.internals import OverriddenMethod
from lightning_fed.messages import State
from lightning_fed.numerics.precision import at_least_float32

_log = logging.getLogger(__name__)

REASONS = (
    "the client withholds the metric",
    "the state is a list of predictions or targets, and therefore reveals data",
    "the metric's states cannot be merged, because a `dist_reduce_fx` is not a sum, minimum, maximum or concatenation",
)
"""Reasons why a state stays with its client."""

_MERGING = {dim_zero_sum, dim_zero_min, dim_zero_max, dim_zero_cat, torch.min, torch.max}
_TRANSPARENT = ClasswiseWrapper, MinMaxMetric, MultitaskWrapper
_CURVES = BinaryPrecisionRecallCurve, MulticlassPrecisionRecallCurve, MultilabelPrecisionRecallCurve
_CORRELATIONS = BinaryMatthewsCorrCoef, MulticlassMatthewsCorrCoef, MultilabelMatthewsCorrCoef
# Counts used as denominators by metrics without an argument `zero_division`.
_DENOMINATORS: tuple[tuple[tuple[type[Metric], ...], tuple[str, str]], ...] = (
    ((BinarySpecificity, MulticlassSpecificity, MultilabelSpecificity), ("tn", "fp")),
    (
        (BinaryNegativePredictiveValue, MulticlassNegativePredictiveValue, MultilabelNegativePredictiveValue),
        ("tn", "fn"),
    ),
    ((MulticlassAccuracy, MulticlassHammingDistance), ("tp", "fn")),
)


@dataclass
class MetricState:
    """State of one metric: tensors by name, and the number of processed batches."""

    values: State = field(default_factory=dict)
    updates: int = 0


@dataclass(frozen=True)
class StateRules:
    """Rules for the metric states that a client sends to the server.

    A metric sends list states only if a pattern in ``lists`` matches, and nothing if a pattern in ``withheld`` matches.
    """

    lists: Sequence[str] = ()
    withheld: Sequence[str] = ()

    def find_obstacle(self, name: str, metric: Metric) -> str | None:
        """Returns the reason why a metric's state is not sent to the server, or ``None`` for a sent state."""
        if _matches(name, self.withheld):
            return REASONS[0]
        if holds_lists(metric) and not _matches(name, self.lists):
            return REASONS[1]
        return None if is_mergeable(metric) else REASONS[2]


def holds_lists(metric: Metric) -> bool:
    """True if a state of the metric is a list, whose length grows with the data."""
    defaults = metric._defaults  # noqa: SLF001
    return any(
        isinstance(defaults[name], list) or reduction is dim_zero_cat for name, reduction in _reductions(metric).items()
    )


def is_mergeable(metric: Metric) -> bool:
    """True if a metric's states from several clients can be merged.

    Each state must be reduced by sum, minimum, maximum or concatenation. Metrics from torchmetrics may also have
    tensor states without reduction (``PearsonCorrCoef`` merges these in ``compute``).
    """
    is_known = type(metric).__module__.partition(".")[0] == "torchmetrics"
    for name, reduction in _reductions(metric).items():
        if isinstance(metric._defaults[name], list):  # noqa: SLF001
            if reduction is not dim_zero_cat:
                return False
        elif reduction not in _MERGING and not is_known:
            return False
    return not isinstance(metric, Running)  # depends on the order of batches


@contextmanager
def computing(metrics: Iterable[Metric], change: Callable[[Metric, Callable[[], Any]], Any]) -> Iterator[None]:
    """Context that calls ``change(metric, compute)`` instead of ``metric.compute()``."""
    before = [(metric, metric.compute) for metric in metrics]
    for metric, compute in before:
        vars(metric)["compute"] = partial(change, metric, compute)
    try:
        yield
    finally:
        for metric, compute in before:
            vars(metric)["compute"] = compute


def holds_states(metric: Metric) -> bool:
    """True if a metric accumulates values. A composed metric such as ``a + b`` does not."""
    return bool(metric._defaults)  # noqa: SLF001


def is_updated(metric: Metric) -> bool:
    """True if a metric has processed a batch. Always true for wrapper metrics."""
    return not holds_states(metric) or isinstance(metric, WrapperMetric) or metric.update_called


def counting_metrics(metrics: Iterable[Metric]) -> list[Metric]:
    """Selects the metrics that have processed a batch. Skips metrics inside a wrapper metric."""
    found = [metric for metric in metrics if is_updated(metric)]
    wrappers = [
        metric for metric in found if isinstance(metric, WrapperMetric) and not isinstance(metric, _TRANSPARENT)
    ]
    inside = {id(part) for wrapper in wrappers for part in wrapper.modules()}
    return [metric for metric in found if id(metric) not in inside]


def compute_measured(metric: Metric, compute: Callable[[], Any]) -> Any:
    """Computes a metric, with NaN for undefined numbers.

    A number is undefined before the first batch, or as a result of 0 / 0, such as the recall of a class without
    examples. torchmetrics returns 0 or 1 in these cases. An average over an undefined class is also undefined, except
    the macro average in ``MulticlassAccuracy``.
    """
    if not is_updated(metric):
        return torch.tensor(math.nan)
    undefined = _undefined_numbers(metric)
    if undefined is None or not bool(undefined.any()):
        return _compute_twice(metric, compute)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchmetrics averages over these classes
        value = compute()
    if isinstance(value, Tensor) and value.shape == undefined.shape:
        return at_least_float32(value).masked_fill(undefined.to(value.device), math.nan)  # Matthews: int64 for one case
    return as_nan(value)


def _compute_twice(metric: Metric, compute: Callable[[], Any]) -> Any:
    value = compute()
    fill = getattr(metric, "zero_division", None)
    if not isinstance(fill, int | float) or not isinstance(value, Tensor):
        return value
    computed, metric._computed = metric._computed, None  # noqa: SLF001
    metric.zero_division = 1 - fill
    try:
        other = compute()
    finally:
        metric.zero_division, metric._computed = fill, computed  # noqa: SLF001
    return value.masked_fill(value != other, math.nan)


class RunningValue(Tensor):
    """Marks a metric's value computed from only part of an epoch, and all tensors computed from this value."""


@contextmanager
def tracing(metrics: Iterable[Metric], traced: list[Metric]) -> Iterator[None]:
    """Context that marks metric values computed before the end of an epoch.

    In this context, ``metric.compute()`` returns a :class:`RunningValue`, and the metric is appended to ``traced``.
    Values for one batch, from ``metric(...)``, stay unmarked.
    """
    metrics, depth = list(metrics), [0]

    def forward(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        try:
            return call(*args, **kwargs)
        finally:
            depth[0] -= 1

    def compute(metric: Metric, call: Callable[[], Any]) -> Any:
        value = compute_measured(metric, call)
        if depth[0] or not holds_states(metric):
            return value
        traced.append(metric)
        return apply_to_collection(value, Tensor, lambda tensor: tensor.as_subclass(RunningValue))

    overridden = [OverriddenMethod(metric, "forward", partial(forward, metric.forward)) for metric in metrics]
    try:
        with computing(metrics, compute):
            yield
    finally:
        for method in overridden:
            method.restore()


@contextmanager
def updating(metrics: Iterable[Metric], updated: list[Metric]) -> Iterator[None]:
    """Context that adds each metric to ``updated`` at the metric's first update, unless a reset came first."""
    fresh: list[Metric] = []
    unused = [metric for metric in metrics if holds_states(metric) and not metric.update_called]

    def update(metric: Metric, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if all(metric is not other for other in [*fresh, *updated]):
            updated.append(metric)
        call(*args, **kwargs)

    def reset(metric: Metric, call: Callable[[], None]) -> None:
        fresh.append(metric)
        call()

    overridden = [
        OverriddenMethod(metric, name, partial(replacement, metric, getattr(metric, name)))
        for metric in unused
        for name, replacement in (("update", update), ("reset", reset))
    ]
    try:
        yield
    finally:
        for method in overridden:
            method.restore()


def as_nan(value: Any) -> Any:
    """Copies a metric's value, with NaN in place of every number."""
    return apply_to_collection(value, (Tensor, float, int), lambda number: torch.as_tensor(number).float() * math.nan)


def _undefined_numbers(metric: Metric) -> Tensor | None:
    if isinstance(metric, _CURVES):
        return _undefined_curves(metric)
    if isinstance(metric, RetrievalMetric):
        targets = dim_zero_cat(metric.target)
        return ~(targets < 1 if isinstance(metric, RetrievalFallOut) else targets > 0).any()
    if isinstance(metric, _CORRELATIONS):
        counts = torch.as_tensor(metric.confmat).reshape(-1, *metric.confmat.shape[-2:]).sum(0)
        return ((counts.sum(0) > 0).sum() < 2) | ((counts.sum(1) > 0).sum() < 2)
    names = next((names for kinds, names in _DENOMINATORS if isinstance(metric, kinds)), None)
    return None if names is None else _undefined_ratios(metric, names)


def _undefined_ratios(metric: Metric, names: tuple[str, str]) -> Tensor:
    counts = {name: dim_zero_cat(metric.metric_state[name]) for name in ("tp", "fp", "tn", "fn")}
    average = getattr(metric, "average", None)
    if average == "micro":
        counts = {name: count.sum(-1) for name, count in counts.items()}
    undefined = counts[names[0]] + counts[names[1]] == 0
    if average == "weighted":
        undefined &= counts["tp"] + counts["fn"] > 0
    if average == "macro":
        if isinstance(metric, MulticlassAccuracy | MulticlassHammingDistance):
            return torch.zeros_like(undefined)
        undefined &= counts["tp"] + counts["fp"] + counts["fn"] > 0
    return undefined


def _undefined_curves(metric: Metric) -> Tensor:
    state = metric.metric_state
    confusion = state.get("confmat")
    if isinstance(confusion, Tensor):  # (thresholds[, classes], 2, 2)
        negatives, positives = confusion[0].sum(-1).unbind(-1)
    else:
        target = dim_zero_cat(state["target"])
        classes = getattr(metric, "num_classes", None)
        if classes is not None and getattr(metric, "average", None) != "micro":
            hits = one_hot(target.clamp(min=0).flatten(), classes) * (target.flatten() >= 0)[:, None]
            positives = hits.sum(0)
            negatives = positives.sum() - positives
        else:
            positives, negatives = (target == 1).sum(0), (target == 0).sum(0)
    if getattr(metric, "average", None) == "micro":
        positives, negatives = positives.sum(), negatives.sum()
    return (positives == 0) | (negatives == 0)


def named_metrics(module: L.LightningModule) -> dict[str, Metric]:
    """Maps attribute paths (such as ``"head.accuracy"``) to the module's metrics.

    A metric in a plain list or dictionary has no path, so the key is the class name and an index.
    """
    all_metrics = find_metrics(module)
    for metric in all_metrics:
        if isinstance(metric, MetricCollection):
            dict(metric.items(copy_state=False))  # from here on, every metric in a compute group has the shared state
    paths = {id(layer): path for path, layer in module.named_modules()}
    metrics = [metric for metric in all_metrics if isinstance(metric, Metric)]
    names = [paths.get(id(metric), f"{type(metric).__name__}#{place}") for place, metric in enumerate(metrics)]
    names = [name.replace("|", "/") for name in names]  # the separator used in a message
    return {name: metrics[place] for place, name in sorted(enumerate(names), key=lambda item: "#" in item[1])}


class MetricStates(dict[str, MetricState]):
    """Dictionary of metric states. A key from :func:`state_key` names metric and dataloader.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric = MeanMetric()
        >>> metric.update(torch.tensor([1.0, 2.0]))
        >>> parts = [MetricStates.of({"loss": metric}), MetricStates.of({"loss": MeanMetric()})]
        >>> MetricStates.merge({"loss": metric}, parts).compute({"loss": metric}, ["loss"])
        {'loss': 1.5}
    """

    @classmethod
    def of(cls, metrics: Mapping[str, Metric], place: int | None = None) -> MetricStates:
        return cls({state_key(name, place): _read_state(metric) for name, metric in metrics.items()})

    @classmethod
    def merge(cls, metrics: Mapping[str, Metric], parts: Sequence[Mapping[str, MetricState]]) -> MetricStates:
        merged = cls()
        for key in dict.fromkeys(key for part in parts for key in part if metric_of(key) in metrics):
            try:
                merged[key] = _join_states(metrics[metric_of(key)], (part[key] for part in parts if key in part))
            except Exception as error:  # for example lists of different shapes
                _log.warning("The states of metric %r cannot be merged: %s.", metric_of(key), describe(error))
        return merged

    def compute(self, metrics: Mapping[str, Metric], keys: Iterable[str]) -> dict[str, float]:
        """Computes metric values from the states. Skips a metric if ``compute`` raises an error.

        A key names a metric, for one dataloader or for all data (:func:`state_key`). The states are loaded into
        ``metrics``. Afterwards each metric contains the state for all data.
        """
        for name, metric in metrics.items():  # a metric can depend on other metrics, so all states are loaded first
            _write_state(metric, self.get(name))
        values: dict[str, float] = {}
        for key in keys:
            name = metric_of(key)
            if key in self and (key == name or holds_states(metrics[name])):
                _write_state(metrics[name], self[key])
                values |= compute_number(key, metrics[name])
                _write_state(metrics[name], self.get(name))
        return values


def state_key(metric: str, place: int | None = None) -> str:
    """Returns the key of a metric's state. ``place`` is the dataloader's index, or ``None`` for all data."""
    return metric if place is None else f"@{place}@{metric}"


def metric_of(key: str) -> str:
    """Returns the metric's path from a key created by :func:`state_key`."""
    return key.split("@", 2)[-1] if key.startswith("@") else key


def compute_number(name: str, metric: Metric) -> dict[str, float]:
    """Returns ``{name: value}`` with a metric's value, or an empty dictionary if ``compute`` raises an error."""
    try:
        return {name: float(metric.compute())}
    except Exception as error:
        _log.debug("Metric %r cannot be computed from the clients' states: %r.", name, error)
        return {}


def _read_state(metric: Metric) -> MetricState:
    values = {}
    for name, value in metric.metric_state.items():
        if isinstance(value, list):
            if not value:
                continue
            value = dim_zero_cat(value)
        values[name] = value.detach().to("cpu", copy=True)
    return MetricState(values, metric._update_count)  # noqa: SLF001


def _write_state(metric: Metric, state: MetricState | None) -> None:
    if not holds_states(metric):
        return
    metric.reset()
    if state is not None:
        for name, value in state.values.items():
            tensor = value.to(metric.device)
            setattr(metric, name, [tensor] if isinstance(metric._defaults[name], list) else tensor)  # noqa: SLF001
        metric._update_count, metric._computed = state.updates, None  # noqa: SLF001


def _join_states(metric: Metric, parts: Iterable[MetricState]) -> MetricState:
    parts = [part for part in parts if part.updates]
    updates = [part.updates for part in parts]
    joined = {}
    for name, reduction in _reductions(metric).items():
        values = [part.values[name] for part in parts if name in part.values]
        if values:
            joined[name] = _join(values, updates, reduction, isinstance(metric._defaults[name], list))  # noqa: SLF001
    return MetricState(joined, sum(updates))


def check_state(metric: Metric, state: MetricState) -> None:
    """Compares a client's metric state with the server's metric. Raises ``BadUpdate`` for other names or shapes."""
    reductions = _reductions(metric)
    if state.updates < 0:
        raise BadUpdate(f"the client reports {state.updates} batches for a metric, but the number must be at least 0")
    for name in (*reductions, *(state.values.keys() - reductions.keys())):
        default = metric._defaults.get(name)  # noqa: SLF001
        value = state.values.get(name)
        if value is None:
            if not isinstance(default, list):
                raise BadUpdate(f"the client's evaluation lacks the state {name!r} of a metric")
            continue
        if default is None:
            raise BadUpdate(f"the client sent the state {name!r}, but the server's metric has no such state")
        if isinstance(default, Tensor) and reductions[name] is not dim_zero_cat and value.shape != default.shape:
            shapes = f"shape {tuple(value.shape)}, but the server's metric has shape {tuple(default.shape)}"
            raise BadUpdate(f"the client's metric state {name!r} has {shapes}")


def share_of_cases(metric: Metric | None, state: MetricState | None, cases: int) -> float | None:
    """Returns the fraction of correct examples from an accuracy's state, or ``None`` for other metrics.

    The result is also ``None`` if the counts in the state do not sum to the number of examples, ``cases``.
    """
    is_binary = isinstance(metric, BinaryAccuracy)
    if state is None or not (is_binary or (isinstance(metric, MulticlassAccuracy) and metric.average == "micro")):
        return None
    names = ("tp", "tn", "fp", "fn") if is_binary else ("tp", "fn")
    counts = [int(state.values[name].sum()) for name in names]
    return sum(counts[: len(counts) // 2]) / cases if sum(counts) == cases else None


def support_of(metric: Metric) -> Tensor | None:
    """Returns the metric's number of examples or pixels per class, or ``None`` if unknown.

    The counts come from a property ``support``, a confusion matrix, or the states ``tp`` and ``fn``.
    """
    support = getattr(metric, "support", None)
    state = metric.metric_state
    confusion, hits, misses = (state.get(name) for name in ("confmat", "tp", "fn"))
    if isinstance(support, Tensor):
        counts = support
    elif isinstance(confusion, Tensor) and confusion.ndim == 2 and confusion.shape[0] == confusion.shape[1]:
        counts = confusion.sum(1)
    elif isinstance(hits, Tensor) and isinstance(misses, Tensor) and hits.ndim == 1 and len(hits) > 1:
        counts = hits + misses
    else:
        return None
    return counts.detach().cpu().double()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _reductions(metric: Metric) -> Mapping[str, Callable[[Tensor], Tensor] | None]:
    return metric._reductions  # type: ignore[return-value] # noqa: SLF001


def _join(
    values: Sequence[Tensor], updates: Sequence[int], reduction: Callable[[Tensor], Tensor] | None, is_list: bool
) -> Tensor:
    if is_list or reduction is dim_zero_cat:
        return torch.cat(list(values))
    stacked = torch.stack(list(values))
    if reduction is dim_zero_sum:
        # In float64 the sum of many float32 sums is close to the sum in one process.
        return stacked.double().sum(0).to(stacked.dtype) if stacked.is_floating_point() else stacked.sum(0)
    if reduction is dim_zero_mean:
        weights = torch.tensor(updates, dtype=torch.float64)
        mean: Tensor = torch.tensordot(weights / weights.sum(), at_least_float32(stacked).double(), 1)
        return mean.to(stacked.dtype if stacked.is_floating_point() else torch.float32)
    if reduction is dim_zero_max:
        return stacked.amax(0)
    if reduction is dim_zero_min:
        return stacked.amin(0)
    joined: Tensor = stacked if reduction is None else reduction(stacked)
    return joined
