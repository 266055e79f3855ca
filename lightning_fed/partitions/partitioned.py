"""Splits any datamodule's training data into clients, with validation data for each client."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_fed.argument_checks import check_inside
from lightning_fed.data.dataset_clients import ClientSubset, DatasetClients
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.data.partition import Partition
from lightning_fed.data.population import Population
from lightning_fed.datasets.arrays import ArrayDataset
from lightning_fed.errors import OptionError
from lightning_fed.lightning.internals import TRANSFER_HOOKS, is_overridden
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key
from lightning_fed.partitions.loader_split import split_loader
from lightning_fed.partitions.sampler_stream import SampledClients
from lightning_fed.server.schedule import default_seed

FORWARDED = (*TRANSFER_HOOKS, "predict_dataloader")


class PartitionedData(FederatedDataModule):
    """Splits the training data of another datamodule into clients, with validation data for each client.

    A random share of every client's examples is held out for evaluation by client. Methods with one model per client
    require such an evaluation. Held-out examples have no augmentation if the training data set is an
    :class:`~lightning_fed.data.ArrayDataset`. Augmentation inside other data sets remains.

    Args:
        source: Any datamodule with one training loader, whose settings are reused. Validation data are ignored.
        partition: Partition of the training data.
        val_fraction: Fraction of every client's examples for validation, in (0, 1).
        test_fraction: Fraction for testing, in [0, 1). With 0, the test data come from `source`.
        seed: Seed for the split; by default the seed from `lightning.seed_everything`, or 0.

    Raises:
        ValueError: If a fraction is outside the allowed range, no example remains for training, or the loader has a
            custom sampler.
        TypeError: If `source` is not a datamodule, or has no training loader with a map-style data set.

    Example:
        >>> from lightning_fed.data import LabelsPerClient
        >>> from lightning_fed.datasets import Shapes
        >>> shapes = Shapes(num_train=40, image_size=16, task="classification")
        >>> data = PartitionedData(shapes, LabelsPerClient(num_clients=4, labels_per_client=2), val_fraction=0.2)
        >>> data.setup("fit")
        >>> data.population().clients, sorted(data.val_clients())
        ([0, 1, 2, 3], [0, 1, 2, 3])
    """

    def __init__(
        self,
        source: L.LightningDataModule,
        partition: Partition,
        *,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        seed: int | None = None,
    ) -> None:
        super().__init__({}, val={}, test={})
        if not isinstance(source, L.LightningDataModule):
            raise TypeError(
                f"Expected `source` to be a LightningDataModule, but got {type(source).__name__}: create one with "
                "`L.LightningDataModule.from_datasets(data_set, batch_size=32)`."
            )
        check_inside("val_fraction", val_fraction)
        if not 0 <= test_fraction < 1 - val_fraction:
            raise ValueError(
                f"Expected `test_fraction` to be in [0, 1 - val_fraction), but got {test_fraction} with"
                f" val_fraction={val_fraction}."
            )
        self.source = source
        self.prepare_data_per_node = source.prepare_data_per_node
        # Without an override in the source, Lightning's hook is used.
        for hook in (*FORWARDED, "on_exception", "state_dict", "load_state_dict"):
            if not is_overridden(hook, self, PartitionedData):
                setattr(self, hook, getattr(source, hook))
        self.partition = partition
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.seed = seed
        self._population: DatasetClients | None = None
        self._pooled: Dataset[Any]

    def prepare_data(self) -> None:
        self.source.trainer = self.trainer
        self.source.prepare_data()

    def setup(self, stage: str) -> None:
        self.source.trainer = self.trainer
        self.source.setup(self._stage_of_source(stage))
        if self._stage_of_source(stage) == "fit":
            self._population = self._split()

    def teardown(self, stage: str) -> None:
        self.source.teardown(self._stage_of_source(stage))

    def population(self) -> Population:
        if self._population is None:
            raise RuntimeError(
                "Expected `setup` before `population`, because the clients are unknown before: call `setup` first."
            )
        return self._population

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns a loader over all clients' training data, without held-out examples, for a plain `L.Trainer`."""
        return self._loader(self._pooled, shuffle=self.shuffle)

    def test_dataloader(self) -> Any:
        """Returns the clients' test data, or without ``test_fraction`` the test data of ``source``."""
        return super().test_dataloader() if self.test_fraction else self.source.test_dataloader()

    def _stage_of_source(self, stage: str) -> str:
        return "fit" if stage == "validate" or (stage == "test" and self.test_fraction) else stage

    def _split(self) -> DatasetClients:
        if self.seed is None:  # a new split between two stages would mix training and validation examples
            self.seed = default_seed()
        seed = self.seed
        population = split_loader(self.source.train_dataloader(), self.partition, seed)
        if isinstance(population, SampledClients):
            raise OptionError(
                "Expected a training loader without a custom sampler, because PartitionedData holds out "
                f"examples for validation, but got sampler={type(population.draws.sampler).__name__}: pass the "
                "datamodule itself to `fit`, with `partition=` on the Trainer (which holds out no examples)."
            )
        source = population.source
        train, val, test = dict[Client, Any](), dict[Client, Any](), dict[Client, Any]()
        for client, whole in source.datasets.items():
            assert isinstance(whole, ClientSubset)
            dataset, count = whole.dataset, len(whole)
            num_val = _share(self.val_fraction, count, count - 1)
            num_test = _share(self.test_fraction, count, count - num_val - 1)
            order = np.random.default_rng([seed, client_key(client)]).permutation(count)
            plain = dataset.without_augmentation() if isinstance(dataset, ArrayDataset) else dataset
            places = np.split(order, [num_val, num_val + num_test])
            for parts, samples, part in zip((val, test, train), (plain, plain, dataset), places, strict=True):
                parts[client] = ClientSubset(samples, whole.indices[np.sort(part)], whole.transform)
        source.datasets = train
        self.clients, self.val, self.test = (
            {client: part for client, part in parts.items() if len(part)} for parts in (train, val, test)
        )
        self._pooled = ConcatDataset(self.clients.values())
        if all(part.transform is None for part in train.values()):
            indices = np.concatenate([part.indices for part in train.values()])
            self._pooled = ClientSubset(next(iter(train.values())).dataset, indices)
        self.batch_size, self.shuffle, self.drop_last = population.batch_size, population.shuffle, population.drop_last
        self.collate_fn = source.collate
        return population


def _share(fraction: float, count: int, most: int) -> int:
    return max(0, min(max(1, int(fraction * count)), most)) if fraction else 0
