"""Client names and evaluation data for the server program or the client program of a federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.callbacks.evaluation.client_evaluation import ClientsBatch
from lightning_fed.callbacks.federation import Federation
from lightning_fed.data.federated import EvaluationData, FederatedDataModule
from lightning_fed.data.population import Population
from lightning_fed.partitions.loader_split import split_training_data
from lightning_fed.partitions.partitioned import FORWARDED


class HalfData(EvaluationData):
    """Datamodule with the evaluation data of a server program or client program.

    Training data come from :func:`read_data`. A server without data passes ``ClientsBatch()``: only clients evaluate.
    """

    def __init__(self, data: Any = None) -> None:
        source = data if isinstance(data, L.LightningDataModule) else None
        super().__init__(None if source is not None else data, data if isinstance(data, ClientsBatch) else None)
        if source is not None:
            hooks = [*FORWARDED, "val_dataloader", "test_dataloader"]
            if isinstance(source, EvaluationData):  # clients that have evaluation data
                hooks += ["val_clients", "test_clients", "has_clients"]
            for hook in hooks:
                setattr(self, hook, getattr(source, hook))

    def train_dataloader(self) -> Any:
        return []


def read_data(federation: Federation, data: Any) -> tuple[Population, HalfData]:
    """Returns the clients and the validation data in ``data``. The federation's ``partition`` splits a datamodule."""
    partition = federation.partition
    if isinstance(data, Mapping):
        data = FederatedDataModule(data)
    if isinstance(data, FederatedDataModule) == (partition is not None) or not isinstance(data, L.LightningDataModule):
        raise MisconfigurationException(
            "Expected `data` to contain clients (a mapping or a FederatedDataModule), or a datamodule that the "
            f"federation's `partition` splits, but got {type(data).__name__} and partition={partition!r}."
        )
    data.prepare_data()
    data.setup("fit")
    if isinstance(data, FederatedDataModule):
        return data.population(), HalfData(data)
    assert partition is not None
    return split_training_data(data.train_dataloader(), partition, federation.schedule.seed), HalfData(data)
