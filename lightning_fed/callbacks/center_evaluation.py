"""Evaluation of a federation that keeps several global models."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L

from lightning_fed.aggregators.fesem import FeSEM
from lightning_fed.callbacks.client_evaluation import evaluate_clients
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.messages import Client, State
from lightning_fed.state import copy_state, live_entries, load_entries

_log = logging.getLogger(__name__)


class CenterEvaluation(L.Callback):
    """Runs the module's validation step over the validation data with every centre of :class:`FeSEM`.

    Whatever ``validation_step`` logs is logged once more as ``fesem/<name>``: the mean over the centres, weighted by
    the examples of the clients that are assigned to them; clients without a centre count with the global model, from
    which they would start. Without validation data nothing happens. It costs one validation per centre.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, aggregator="fesem", logger=False)  # adds it by itself

    """

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluates the centres in the rounds in which Lightning validates."""
        federation = find_federation(trainer)
        aggregator = federation.server.aggregator
        loader = self._loader(trainer)
        every = trainer.check_val_every_n_epoch
        if loader is None or not isinstance(aggregator, FeSEM) or (every and federation.rounds % every):
            return
        entries = live_entries(pl_module)
        before = copy_state({name: entries[name] for center in aggregator.centers for name in center})
        models: dict[Client, State] = {}
        weights: dict[Client, int] = {}
        for place, size in aggregator.sizes().items():
            key = "global" if place is None else place
            models[key] = before if place is None else aggregator.centers[place]
            weights[key] = size

        def load(key: Client) -> None:
            load_entries(entries, models[key])

        try:
            results = evaluate_clients(trainer, pl_module, dict.fromkeys(models, loader), load)
        finally:
            load_entries(entries, before)
        total = sum(weights.values())
        values: dict[str, float] = {
            f"fesem/{name}": sum(weights[key] * value for key, value in by_key.items()) / total
            for name, by_key in results.values.items()
        }
        federation.log_book.put(trainer, federation.rounds - 1, values)

    def _loader(self, trainer: L.Trainer) -> Any:
        loaders = trainer.val_dataloaders if trainer.limit_val_batches else None
        if not isinstance(loaders, list | tuple | dict):
            return loaders
        if len(loaders) > 1:
            _log.warning("The centres are not evaluated: there are %d validation loaders, not one.", len(loaders))
            return None
        return next(iter(loaders.values() if isinstance(loaders, dict) else loaders), None)
