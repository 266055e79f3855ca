"""Evaluates FeSEM's centres (one global model per cluster) on validation and test data."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L

from lightning_fed.algorithms.fesem.aggregator import FeSEM
from lightning_fed.callbacks.evaluation.data_pass import Stage, evaluate_data
from lightning_fed.callbacks.evaluation.results import ClientResults
from lightning_fed.callbacks.federation import find_federation, move_behind_federation
from lightning_fed.messages import Client
from lightning_fed.method import register
from lightning_fed.model.entries import copy_state, live_entries, load_entries
from lightning_fed.process_group import process_group_of

_log = logging.getLogger(__name__)


class CenterEvaluation(L.Callback):
    """Evaluates all centres of :class:`FeSEM` on the Trainer's validation or test data.

    A centre is the global model for one cluster of clients. Each metric is averaged over all centres, and logged as
    ``fesem/<name>``. A centre's weight is the number of training examples in the cluster. For clients without a centre,
    the Trainer's model is evaluated. The cost is one validation per centre.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, method="fesem", logger=False)  # adds the callback
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        move_behind_federation(self, trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._evaluate(trainer, pl_module, trainer.val_dataloaders, "validation")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluate(trainer, pl_module, trainer.test_dataloaders, "test")

    def _evaluate(self, trainer: L.Trainer, pl_module: L.LightningModule, loaders: Any, stage: Stage) -> None:
        federation = find_federation(trainer)
        aggregator = federation.server.rule
        loader = _single_loader(loaders, stage)
        if loader is None or not isinstance(aggregator, FeSEM) or not aggregator.sizes():
            return
        entries = live_entries(pl_module)
        before = copy_state({name: entries[name] for center in aggregator.centers for name in center})
        pool, reports = process_group_of(trainer), {}
        sizes: dict[Client, int] = {
            "global" if index is None else index: size for index, size in aggregator.sizes().items()
        }
        try:
            for key in sizes:
                load_entries(entries, aggregator.centers[key] if isinstance(key, int) else before)
                reports[key] = evaluate_data(trainer, pl_module, loader, stage, pool=pool)
        finally:
            load_entries(entries, before)
        total = sum(sizes.values())
        values: dict[str, float] = {
            f"fesem/{name}": sum(sizes[key] * value for key, value in by_key.items()) / total
            for name, by_key in ClientResults.of(reports).values.items()
        }
        federation.round_log.put(trainer, trainer.current_epoch, values)


def _single_loader(loaders: Any, stage: Stage) -> Any:
    if not isinstance(loaders, list | tuple | dict):
        return loaders
    if len(loaders) > 1:
        _log.warning(
            "The centres are not evaluated: the Trainer has %d %s loaders instead of one.", len(loaders), stage
        )
        return None
    return next(iter(loaders.values() if isinstance(loaders, dict) else loaders), None)


register(FeSEM, callbacks=lambda rule: [CenterEvaluation()])
