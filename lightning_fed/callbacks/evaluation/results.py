"""Evaluation results of all clients, and summaries over the clients."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fed.callbacks.evaluation.report import EvaluationReport
from lightning_fed.messages import Client

_PARTS = ("loss", "error", "perplexity", "distance", "divergence", "discrepancy")
_LOWER_IS_BETTER = {
    "nll", "mse", "mae", "rmse", "mape", "smape", "msle", "rmsle", "ece", "mce", "ace", "brier", "wer", "cer", "ter",
    "kl", "js", "mmd", "emd", "fid", "kid", "lpips", "hausdorff", "hd", "hd95", "assd", "bce", "ce", "entropy", "ppl",
    "bpd", "bpc", "eer", "fpr", "fnr",
}  # fmt: skip
_CLIENTS_VALUE = re.compile(r"fed/(?P<name>.+)/(mean|worst10|min|pooled)")


@dataclass
class ClientResults:
    """Evaluation values of all clients, by metric name and client."""

    values: dict[str, dict[Client, float]] = field(default_factory=dict)
    variances: dict[str, dict[Client, float]] = field(default_factory=dict)
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    num_samples: dict[Client, int] = field(default_factory=dict)
    support: dict[Client, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, reports: Mapping[Client, EvaluationReport]) -> ClientResults:
        results = cls(num_samples={client: report.num_samples for client, report in reports.items()})
        for client, report in reports.items():
            for name, value in report.values.items():
                results.values.setdefault(name, {})[client] = value
                known = results.higher_is_better.get(name, is_score(name))
                results.higher_is_better[name] = report.higher_is_better.get(name, known)
            for name, variance in report.variances.items():
                results.variances.setdefault(name, {})[client] = variance
            if report.support is not None:
                results.support[client] = report.support
        return results

    def summary(self) -> dict[str, float]:
        """Summarises each metric over the clients. NaN values are skipped.

        The names are ``<metric>/mean``, ``/std``, ``/min`` and ``/worst10``, the mean over the worst tenth of clients.
        ``/mean_se`` is the standard error of ``/mean``, given only if every client's value has a sampling variance.
        """
        summary = {}
        for name, values in self.values.items():
            known = [value for value in values.values() if not math.isnan(value)] or [math.nan]
            ordered = torch.tensor(sorted(known, reverse=not self.higher_is_better[name]), dtype=torch.float64)
            worst = ordered[: -(-len(ordered) // 10)]
            summary[f"{name}/mean"] = float(ordered.mean())
            summary[f"{name}/worst10"] = float(worst.mean())
            summary[f"{name}/std"] = float(ordered.std(correction=0))
            summary[f"{name}/min"] = float(ordered.min())
            variances = self.variances.get(name, {})
            if variances.keys() == values.keys():
                summary[f"{name}/mean_se"] = math.sqrt(sum(variances.values())) / len(values)
        return summary


def monitored_name(name: str) -> str:
    """Returns the module's name for a summary value: ``val_acc`` for ``fed/val_acc/mean``."""
    match = _CLIENTS_VALUE.fullmatch(name)
    return name if match is None else match["name"]


def is_score(name: str) -> bool:
    """Guesses from a metric's name if higher values are better: true for ``val_acc``, false for ``valRMSE``."""
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
    return not words & _LOWER_IS_BETTER and not any(part in name.lower() for part in _PARTS)
