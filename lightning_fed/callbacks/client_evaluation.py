"""Evaluation client by client: the user's validation step on each client's own data with its own personal entries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.callbacks.side_pass import run_step, side_pass
from lightning_fed.data.population import batch_length
from lightning_fed.messages import Client


@dataclass
class ClientResults:
    """What the validation step logged, per client.

    Args:
        values: Metric name to client to value.
        higher_is_better: Metric name to which end of the scale is the good one.

    """

    values: dict[str, dict[Client, float]] = field(default_factory=dict)
    higher_is_better: dict[str, bool] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """``<metric>/mean``, ``/worst10`` (mean of the worst tenth of the clients) and ``/std`` over clients.

        Example:
            >>> results = ClientResults({"val_acc": {"a": 0.5, "b": 0.7}}, {"val_acc": True})
            >>> {name: round(value, 3) for name, value in results.summary().items()}
            {'val_acc/mean': 0.6, 'val_acc/worst10': 0.5, 'val_acc/std': 0.1}

        """
        summary = {}
        for name, values in self.values.items():
            ordered = torch.tensor(
                sorted(values.values(), reverse=not self.higher_is_better[name]), dtype=torch.float64
            )
            worst = ordered[: -(-len(ordered) // 10)]
            summary[f"{name}/mean"] = float(ordered.mean())
            summary[f"{name}/worst10"] = float(worst.mean())
            summary[f"{name}/std"] = float(ordered.std(correction=0))
        return summary


class _Recorder:
    """Stands in for ``LightningModule.log``: means weighted by batch size, metrics computed at the end."""

    def __init__(self) -> None:
        self.batch_size = 1
        self._sums: dict[str, tuple[float, float]] = {}
        self._metrics: dict[str, Metric] = {}

    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        if isinstance(value, Metric):
            self._metrics[name] = value
        elif isinstance(value, Tensor | int | float):
            size = batch_size or self.batch_size
            total, count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (total + size * float(value), count + size)

    def results(self) -> dict[str, tuple[float, bool]]:
        """Value of every name, and whether higher is better."""
        means = {name: (total / count, _is_score(name)) for name, (total, count) in self._sums.items()}
        computed = {
            name: (
                float(metric.compute()),
                _is_score(name) if metric.higher_is_better is None else metric.higher_is_better,
            )
            for name, metric in self._metrics.items()
        }
        return means | computed


def evaluate_clients(
    trainer: L.Trainer,
    module: L.LightningModule,
    clients: Mapping[Client, Iterable[Any]],
    load: Callable[[Client], None],
) -> ClientResults:
    """Runs the module's validation step over each client's data.

    Args:
        trainer: The Trainer.
        module: The user's module; its metrics, modes and logs are left as they were.
        clients: Client to loader.
        load: Makes the module this client's model.

    """
    results = ClientResults()
    for client, loader in clients.items():
        load(client)
        recorder = _Recorder()
        with side_pass(module, recorder.log):
            module.on_validation_epoch_start()
            for number, batch in enumerate(_limited(loader, trainer.limit_val_batches)):
                recorder.batch_size = batch_length(batch)
                run_step(trainer, module, "validation_step", batch, number)
            module.on_validation_epoch_end()
            for name, (value, higher_is_better) in recorder.results().items():
                results.values.setdefault(name, {})[client] = value
                results.higher_is_better[name] = higher_is_better
    return results


def _limited(loader: Iterable[Any], limit: int | float) -> Iterable[Any]:
    """As many batches as Lightning would take: a number of them, or a share."""
    if isinstance(limit, float):
        return loader if limit == 1.0 else itertools.islice(loader, int(limit * len(loader)))  # type: ignore[arg-type]
    return itertools.islice(loader, limit)


def _is_score(name: str) -> bool:
    return not any(word in name.lower() for word in ("loss", "error", "perplexity", "nll"))
