"""Results of one client's evaluation, as a message to the server."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fed.callbacks.evaluation.metric_states import MetricState, MetricStates, metric_of
from lightning_fed.callbacks.logged_values import LoggedValue
from lightning_fed.errors import BadUpdate
from lightning_fed.messages import Client, ClientUpdate, State

_REDUCTIONS = ("mean", "sum", "max", "min")
_LONGEST_NAME = 200
_MOST_NAMES = 1000


@dataclass
class EvaluationReport:
    """Results from one client's evaluation, for the server.

    Args:
        num_samples: Number of examples.
        logged: Weighted sum and sum of weights for each number logged in steps, by logged name.
        states: Metric states, by key from :func:`~lightning_fed.callbacks.evaluation.metric_states.state_key`.
        metrics: Key in ``states`` for each logged metric, by logged name.
        values: Final values for this client's data, by logged name.
        partial: Names of values that the server cannot compute from ``logged`` and ``states``.
        shown: Names shown in the progress bar.
        higher_is_better: Whether higher values are better, by logged name, as far as known.
        variances: Sampling variances for means over examples, by logged name.
        stays: Reasons for metric states that are not sent, by metric path.
        support: Number of examples per class, shape (classes,), or ``None`` if unknown.
    """

    num_samples: int = 0
    logged: dict[str, LoggedValue] = field(default_factory=dict)
    states: MetricStates = field(default_factory=MetricStates)
    metrics: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    shown: set[str] = field(default_factory=set)
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    variances: dict[str, float] = field(default_factory=dict)
    stays: dict[str, str] = field(default_factory=dict)
    support: Tensor | None = None

    def as_update(self, client: Client) -> ClientUpdate:
        extras: State = {}
        for name, logged in self.logged.items():
            total = math.nan if logged.total is None else float(logged.total)
            extras[f"logged|{logged.reduce_fx}|{name}"] = _numbers(total, logged.weight)
        for key, state in self.states.items():
            extras[f"updates|{key}"] = torch.tensor(state.updates)
            extras |= {f"state|{key}|{name}": value for name, value in state.values.items()}
        extras |= {f"metric|{key}|{name}": torch.zeros(0) for name, key in self.metrics.items()}
        for name, value in self.values.items():
            numbers = [self.variances[name]] if name in self.variances else []
            extras[f"value|{self._flags(name)}|{name}"] = _numbers(value, *numbers)
        extras |= {f"stays|{reason}|{name}": torch.zeros(0) for name, reason in self.stays.items()}
        if self.support is not None:
            extras["support"] = self.support
        return ClientUpdate(client, self.num_samples, {}, extras)

    @classmethod
    def of(cls, update: ClientUpdate) -> EvaluationReport:
        report = cls(update.num_samples)
        if len(update.extras) > 20 * _MOST_NAMES:
            raise BadUpdate(
                f"the client's evaluation has {len(update.extras)} tensors, but the limit is {20 * _MOST_NAMES}"
            )
        try:
            for entry, value in update.extras.items():
                report._read(entry, value)
        except BadUpdate:
            raise
        except (ArithmeticError, ValueError, KeyError, RuntimeError, IndexError, TypeError) as error:
            raise BadUpdate(f"the client's evaluation cannot be read: {type(error).__name__}") from error
        if any(key not in report.states and metric_of(key) not in report.stays for key in report.metrics.values()):
            raise BadUpdate("the client's evaluation lists a metric, but not the metric's state")
        if not report.values.keys() >= report.logged.keys() | report.metrics.keys():
            raise BadUpdate("the client's evaluation lists a logged name, but no value for the name")
        for name in (*report.values, *report.logged, *report.metrics):
            if len(name) > _LONGEST_NAME or not name.isprintable():
                raise BadUpdate(f"the client's evaluation has the name {name[:50]!r}, too long or not printable")
        if len(report.values) > _MOST_NAMES:
            raise BadUpdate(f"the client's evaluation has {len(report.values)} values, but the limit is {_MOST_NAMES}")
        return report

    def keep_names(self, names: set[str]) -> None:
        for entries in (self.logged, self.metrics, self.values, self.variances, self.higher_is_better):
            for name in entries.keys() - names:
                del entries[name]
        self.partial &= names
        self.shown &= names

    def _read(self, entry: str, value: Tensor) -> None:
        if entry == "support":
            if value.ndim != 1 or not bool((value >= 0).all()):
                raise BadUpdate("the client's numbers of examples per class are not a list of counts")
            self.support = value.double()
            return
        kind, detail, *names_in_entry = entry.split("|", 2)
        if kind == "logged":
            if detail not in _REDUCTIONS or len(value) != 2:
                raise BadUpdate(
                    f"a logged value has an unknown reduction, {detail!r:.50}, or does not consist of total and weight"
                )
            total, weight = value.double().cpu().unbind()
            if not float(weight) > 0 or not math.isfinite(float(weight)):
                raise BadUpdate(f"a logged value has the weight {float(weight)}, but weights are positive and finite")
            self.logged[names_in_entry[0]] = LoggedValue(detail, total, float(weight))
        elif kind == "updates":
            self.states.setdefault(detail, MetricState()).updates = int(value)
        elif kind == "state":
            self.states.setdefault(detail, MetricState()).values[names_in_entry[0]] = value.cpu()
        elif kind == "metric":
            self.metrics[names_in_entry[0]] = detail
        elif kind == "stays":
            self.stays[names_in_entry[0]] = detail
        elif kind == "value":
            self.values[names_in_entry[0]] = float(value[0])
            if len(value) > 1:
                if not 0 <= float(value[1]) < math.inf:
                    raise BadUpdate(
                        f"a logged value has the variance {float(value[1])}, but variances are finite and at least 0"
                    )
                self.variances[names_in_entry[0]] = float(value[1])
            for flag, names in (("m", self.partial), ("p", self.shown)):
                if flag in detail:
                    names.add(names_in_entry[0])
            if "h" in detail or "l" in detail:
                self.higher_is_better[names_in_entry[0]] = "h" in detail
        else:
            raise BadUpdate(f"the client's evaluation has an unknown entry {kind!r:.50}")

    def _flags(self, name: str) -> str:
        direction = self.higher_is_better.get(name)
        end = "" if direction is None else "h" if direction else "l"
        return ("m" if name in self.partial else "") + ("p" if name in self.shown else "") + end


def known_names(reports: Iterable[EvaluationReport]) -> list[str]:
    """Lists the names of all values in the reports, in order of first appearance."""
    return list(dict.fromkeys(name for report in reports for name in report.values))


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
