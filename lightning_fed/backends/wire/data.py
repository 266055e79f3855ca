"""Validation data of one half of a federation."""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_fed.callbacks.evaluation.client_evaluation import ClientsBatch
from lightning_fed.data.federated import EvaluationData
from lightning_fed.data.partitioned import FORWARDED
from lightning_fed.messages import Client


class HalfData(EvaluationData):
    """Validation data, and the datamodule's hooks on batches; each half knows its clients by itself.

    Args:
        data: Validation data, as :class:`~lightning_fed.data.FederatedDataModule` takes them, or a datamodule that is
            set up. ``ClientsBatch()`` stands for those of the clients, in validation and in test.

    """

    def __init__(self, data: Any = None) -> None:
        self._source = data if isinstance(data, L.LightningDataModule) else None
        super().__init__(None if self._source is not None else data, data if isinstance(data, ClientsBatch) else None)
        if self._source is not None:
            for hook in (*FORWARDED, "val_dataloader", "test_dataloader"):
                setattr(self, hook, getattr(self._source, hook))

    def train_dataloader(self) -> Any:
        """An empty loader, which a federation replaces."""
        return []

    def val_clients(self) -> dict[Client, Any]:
        """Every client's validation loader, where this half has them."""
        return self._source.val_clients() if isinstance(self._source, EvaluationData) else super().val_clients()

    def test_clients(self) -> dict[Client, Any]:
        """Every client's test loader, likewise."""
        return self._source.test_clients() if isinstance(self._source, EvaluationData) else super().test_clients()
