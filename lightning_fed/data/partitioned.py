"""Any datamodule's training data, split into clients with held-out validation data."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_fed.argument_checks import check_inside
from lightning_fed.data.arrays import ArrayDataset
from lightning_fed.data.dataset_clients import ClientSubset, DatasetClients
from lightning_fed.data.federated import FederatedDataModule, split_loader
from lightning_fed.data.partitions import Partition
from lightning_fed.data.population import Population
from lightning_fed.errors import OptionError
from lightning_fed.lightning.internals import TRANSFER_HOOKS
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key
from lightning_fed.server.schedule import default_seed

FORWARDED = (*TRANSFER_HOOKS, "predict_dataloader")


class PartitionedData(FederatedDataModule):
    """Clients split from another datamodule's training data, each with validation data of its own.

    It splits as a `partition` of the Trainer does, and holds out a share of every client's examples, so that clients
    are evaluated one by one: the only fair way for methods with a model per client. The held-out examples are drawn at
    random; shares are rounded down, but at least one example, as long as one is left to train on. They are not
    augmented where the training data set is an :class:`~lightning_fed.data.ArrayDataset`, as those of this package are;
    an augmentation inside another data set changes them too.

    The source datamodule works as without the split: it has the Trainer (`self.trainer`), its hooks are called, also
    those that transfer batches, and its state is in the checkpoint.

    Args:
        source: Any datamodule with one training loader, whose batch size, collation and workers are used. Its own
            validation data are not used.
        partition: Partition of its training data.
        val_fraction: Share of every client's examples that validates, in (0, 1).
        test_fraction: Share of every client's examples that is for the test, in [0, 1); with 0 the test data are
            those of `source`.
        seed: Seed of the split; None for that of `lightning.seed_everything`, or else 0, as in a federation. It is
            read in the first `setup`, and stays.

    Raises:
        ValueError: If a share is out of its range, or nothing is left to train on; in `setup`, if the loader has a
            sampler of its own.
        TypeError: If `source` is no datamodule; in `setup`, if it has no training loader over a map-style data set.

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
                f"Expected `source` to be a LightningDataModule, but got {type(source).__name__}:"
                " `L.LightningDataModule.from_datasets(data_set, batch_size=32)` makes one of a data set."
            )
        check_inside("val_fraction", val_fraction)
        if not 0 <= test_fraction < 1 - val_fraction:
            raise ValueError(
                f"Expected `test_fraction` to be in [0, 1 - val_fraction), but got {test_fraction} beside"
                f" val_fraction={val_fraction}."
            )
        self.source = source
        self.prepare_data_per_node = source.prepare_data_per_node
        for hook in FORWARDED:  # one that the source does not override is Lightning's here too
            setattr(self, hook, getattr(source, hook))
        self.partition = partition
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.seed = seed
        self._population: DatasetClients | None = None
        self._pooled: Dataset[Any]

    def prepare_data(self) -> None:
        """Prepares the data of the source datamodule."""
        self.source.trainer = self.trainer
        self.source.prepare_data()

    def setup(self, stage: str) -> None:
        """Reads the data, and splits the training data.

        Args:
            stage: As Lightning names it.
        """
        self.source.trainer = self.trainer
        self.source.setup(self._stage_of_source(stage))
        if self._stage_of_source(stage) == "fit":
            self._population = self._split()

    def teardown(self, stage: str) -> None:
        """Tears down the source datamodule.

        Args:
            stage: As Lightning names it.
        """
        self.source.teardown(self._stage_of_source(stage))

    def on_exception(self, exception: BaseException) -> None:
        """Passes an exception to the source datamodule."""
        self.source.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """The state of the source datamodule."""
        return self.source.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the source datamodule."""
        self.source.load_state_dict(state_dict)

    def population(self) -> Population:
        """The clients, from which rounds take their batches.

        Raises:
            RuntimeError: Before `setup`.
        """
        if self._population is None:
            raise RuntimeError("The clients are known after `setup`.")
        return self._population

    def train_dataloader(self) -> DataLoader[Any]:
        """The training data of all clients pooled, without the held-out ones, as a plain `L.Trainer` sees them."""
        return self._loader(self._pooled, shuffle=self.shuffle)

    def test_dataloader(self) -> Any:
        """The test data of the clients one after another, or else those of the source datamodule."""
        return super().test_dataloader() if self.test_fraction else self.source.test_dataloader()

    def _stage_of_source(self, stage: str) -> str:
        """The stage of the source datamodule: held-out data come from its training data."""
        return "fit" if stage == "validate" or (stage == "test" and self.test_fraction) else stage

    def _split(self) -> DatasetClients:
        if self.seed is None:  # a split that changed between two stages would validate on what was trained on
            self.seed = default_seed()
        seed = self.seed
        population = split_loader(self.source.train_dataloader(), self.partition, seed)
        if population.draws is not None:
            raise OptionError(
                "Expected a training loader that passes over all examples, of which some are held out, but got"
                f" sampler={type(population.draws.sampler).__name__}: pass the datamodule itself, with `partition=` on"
                " the Trainer."
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
