"""Datamodules for clients with separate data."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import lightning as L
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
)

from lightning_fed.data.dataset_clients import (
    ClientSource,
    DatasetClients,
)
from lightning_fed.data.loader_clients import LoaderClients, check_client_loader
from lightning_fed.data.partition import Partition
from lightning_fed.data.population import KnownClasses, LazyClients, Population, check_class_numbers, client_keys
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client
from lightning_fed.numerics.trees import elements

_log = logging.getLogger(__name__)

ClientData: TypeAlias = Dataset[Any] | Iterable[Any]
"""A client's examples: a map-style data set, or a ``DataLoader`` (any iterable of batches)."""


class EvaluationData(L.LightningDataModule):
    """Datamodule with validation and test data, common to all clients or separate for each client.

    Args:
        val: Validation data: dataloaders as in ``Trainer.fit``, a data set, or a mapping by client.
        test: Test data, in the same formats.
        known_clients: Function that returns the client names. If no key of a mapping is a client name, the mapping
            contains dataloaders common to all clients. By default, all mappings are by client.
    """

    def __init__(
        self, val: Any = None, test: Any = None, known_clients: Callable[[], Sequence[Client]] | None = None
    ) -> None:
        super().__init__()
        self.known_clients = known_clients
        self.class_numbers: KnownClasses = {}
        self.val = val
        self.test = test
        for hook, data in (("val_dataloader", val), ("test_dataloader", test)):
            if data is None and getattr(type(self), hook) is getattr(EvaluationData, hook):
                # Without data, the hook is not defined: for an empty list Lightning would warn in every fit.
                setattr(self, hook, getattr(super(), hook))

    def val_dataloader(self) -> Any:
        """Returns the validation dataloaders. Separate data of clients are chained into one dataloader."""
        return self._evaluation_loader(self.val)

    def test_dataloader(self) -> Any:
        return self._evaluation_loader(self.test)

    def has_clients(self, stage: Literal["validation", "test"]) -> bool:
        hook, data = ("val_clients", self.val) if stage == "validation" else ("test_clients", self.test)
        if getattr(type(self), hook) is not getattr(EvaluationData, hook):
            return bool(getattr(self, hook)())
        return self._is_of_clients(data) and bool(data)  # a loader may have no length

    def val_clients(self) -> Mapping[Client, Iterable[Any]]:
        """Maps clients to validation dataloaders. Empty if the validation data are common to all clients."""
        return self._loaders(self.val) if self._is_of_clients(self.val) else {}

    def test_clients(self) -> Mapping[Client, Iterable[Any]]:
        return self._loaders(self.test) if self._is_of_clients(self.test) else {}

    def evaluation_loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=32)

    def _evaluation_loader(self, data: Any) -> Any:
        if data is None:
            return []
        if isinstance(data, Mapping):
            loaders = self._loaders(data)
            if not self._is_of_clients(data):
                return dict(loaders)
            by_index = itertools.zip_longest(*map(split_loaders, loaders.values()), fillvalue=())
            chained = [ChainedLoaders(column, list(loaders)) for column in by_index]
            return chained[0] if len(chained) == 1 else chained
        return self.evaluation_loader(data) if isinstance(data, Dataset) else data

    def _is_of_clients(self, data: Any) -> bool:
        if not isinstance(data, Mapping) or self.known_clients is None:
            return isinstance(data, Mapping)
        known = self.known_clients()
        return any(key in known for key in data)

    def _check_classes(self) -> None:
        for stage, data in (("validation", self.val), ("test", self.test)):
            if isinstance(data, dict):
                for client, value in data.items():
                    self._check_numbers(client, value, stage)
            elif not isinstance(data, Mapping):
                self._check_numbers(None, data, stage)

    def _check_numbers(self, client: Client | None, data: Any, stage: str) -> None:
        for part in split_loaders(data):
            check_class_numbers(self.class_numbers, client, part, stage)

    def _loaders(self, data: Mapping[Any, Any]) -> Mapping[Any, Iterable[Any]]:
        def loader(part: Any) -> Any:
            check_client_loader(part)
            return self.evaluation_loader(part) if isinstance(part, Dataset) else part

        def build(key: Any) -> Any:
            value = data[key]
            self._check_numbers(key, value, "validation" if data is self.val else "test")
            return [loader(part) for part in value] if _is_several(value) else loader(value)

        return LazyClients(data.keys(), build)  # type: ignore[arg-type] # a list would be searched


class LoaderDataModule(EvaluationData):
    """Datamodule with one training dataloader, whose data set is later split into clients.

    Args:
        train: The training dataloader.
        val: Validation data: dataloaders as in ``Trainer.fit``, or a mapping by client.
        known_clients: Function that returns the client names, as in
            :class:`~lightning_fed.data.federated.EvaluationData`.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.zeros(8, 3), torch.zeros(8)), batch_size=4)
        >>> LoaderDataModule(loader, val=loader).train_dataloader() is loader
        True
    """

    def __init__(
        self, train: Any, val: Any = None, known_clients: Callable[[], Sequence[Client]] | None = None
    ) -> None:
        super().__init__(val, known_clients=known_clients)
        self.train = train
        check_class_numbers(self.class_numbers, None, train)
        self._check_classes()

    def train_dataloader(self) -> Any:
        return self.train


class FederatedDataModule(EvaluationData):
    """Datamodule for the clients of a federation, each with separate data.

    With :class:`~lightning_fed.callbacks.Federation`, a round trains one client after another. A plain ``L.Trainer``
    trains on the pooled data of all clients, as a centralised baseline.

    Args:
        clients: Training data by client, either data sets or ``DataLoader`` objects. A sequence numbers the clients
            from 0. A :class:`~lightning_fed.data.LazyClients` builds the data on access.
        val: Validation data: dataloaders as in ``Trainer.fit``, a data set, or a mapping by client. A mapping gives
            scores for the pooled data and for every client.
        test: Test data, in the same formats.
        batch_size: Examples per batch, if the clients have data sets.
        shuffle: Whether to draw a new order for every epoch over a client's data.
        drop_last: Whether to drop an incomplete last batch.
        num_workers: Worker processes for the dataloaders.
        pin_memory: Whether to pin memory, as in ``DataLoader``.
        persistent_workers: Whether worker processes persist between rounds.
        collate_fn: Function from a list of samples to a batch.

    Raises:
        TypeError: If ``clients`` is neither a mapping nor a sequence, or mixes data sets and dataloaders.
        ValueError: If ``clients`` is empty.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> hospitals = {name: TensorDataset(torch.zeros(8, 3), torch.zeros(8)) for name in ("a", "b")}
        >>> data = FederatedDataModule(hospitals, batch_size=4)
        >>> data.population().clients, len(data.train_dataloader())
        (['a', 'b'], 4)
    """

    def __init__(
        self,
        clients: Mapping[Client, ClientData] | Sequence[ClientData],
        val: Any = None,
        test: Any = None,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(val, test)
        _check_kinds(clients, self.class_numbers)
        self._check_classes()
        self.clients = as_mapping(clients, "clients")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.collate_fn = collate_fn
        self.loader_options = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "persistent_workers": persistent_workers,
        }

    def population(self) -> Population:
        keys = client_keys(self.clients)
        if not isinstance(self._first_data(keys), Dataset):
            return LoaderClients(self.clients, class_numbers=self.class_numbers)
        return DatasetClients(
            ClientSource(self.clients, self.collate_fn, self.class_numbers),
            self.batch_size,
            self.shuffle,
            self.drop_last,
            self.loader_options,
        )

    def train_dataloader(self) -> Iterable[Any]:
        """Returns a dataloader over the pooled data of all clients, for a plain ``L.Trainer``."""
        keys = client_keys(self.clients)
        clients = [self.clients[key] for key in keys]
        if all(isinstance(client, Dataset) for client in clients):
            return self._loader(ConcatDataset(clients), shuffle=self.shuffle)
        return ChainedLoaders(clients)

    def evaluation_loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        return self._loader(dataset)

    def _first_data(self, keys: Sequence[Client]) -> Any:
        fault: Exception | None = None
        for key in keys:
            try:
                return self.clients[key]
            except Exception as error:
                fault = fault or error
        raise fault or ValueError("Expected `clients` to contain at least one client, but got none.")

    def _loader(self, dataset: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=self.drop_last and shuffle,
            collate_fn=self.collate_fn,
            **self.loader_options,  # type: ignore[arg-type]
        )


def datamodule_of_handed(
    train: Any, val: Any, partition: Partition | None, known_clients: Callable[[], Sequence[Client]]
) -> EvaluationData:
    """Builds the datamodule for data passed directly to ``Trainer.fit``.

    ``train`` has separate data for each client, or a ``DataLoader`` or data set that ``partition`` splits.
    """
    brings_clients = isinstance(train, Mapping | list | tuple) and not is_one_client(partition)
    if brings_clients and partition is not None:
        raise OptionError(
            "Expected one DataLoader or data set for `partition` to split into clients, but got a "
            f"{type(train).__name__} of {len(train)}. If the entries are the clients' data, omit `partition`. If every "
            "step takes a batch from every loader, put the loaders into a `CombinedLoader` for `partition` to split."
        )
    if brings_clients:
        return FederatedDataModule(train, val)
    if isinstance(train, Dataset) and not isinstance(train, IterableDataset):
        train = DataLoader(train, batch_size=32, shuffle=True)
    return LoaderDataModule(train, val, known_clients)


class ChainedLoaders:
    """Iterates over the clients' dataloaders, one after another. `client` is the last batch's client.

    After an exception in a client's dataloader, iteration continues with the next client.

    Example:
        >>> loader = ChainedLoaders([[1, 2], [3]])
        >>> len(loader), list(loader)
        (3, [1, 2, 3])
    """

    def __init__(self, loaders: Sequence[Any], clients: Sequence[Client] = ()) -> None:
        self.loaders, self.clients = loaders, clients
        self.client: Client | None = None

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self) -> Iterator[Any]:
        failures = 0
        for client, loader in itertools.zip_longest(self.clients, self.loaders):
            self.client = client
            try:
                yield from loader
            except Exception as error:
                failures += 1
                if client is None or failures == len(self.loaders):
                    raise
                _log.warning("The data of client %r raised %r: the remaining batches are skipped.", client, error)
        self.client = None


def evaluated_client(trainer: L.Trainer) -> Client | None:
    """Returns the client of the current validation or test batch, or ``None`` for data without clients."""
    if trainer.testing:
        loaders = trainer.test_dataloaders
    else:
        loaders = trainer.val_dataloaders if trainer.validating or trainer.sanity_checking else ()
    chained = loaders if isinstance(loaders, list) else [loaders]
    clients = [loader.client for loader in chained if isinstance(loader, ChainedLoaders) and loader.client is not None]
    return clients[0] if clients else None


def copy_loader(loader: Any) -> Any:
    """Returns a dataloader that can be read while another iterator reads ``loader``."""
    if isinstance(loader, ChainedLoaders):
        return ChainedLoaders([copy_loader(part) for part in loader.loaders], loader.clients)
    if not getattr(loader, "persistent_workers", False):
        return loader
    # With persistent workers, a second iterator would end the first.
    copied = copy.copy(loader)
    vars(copied)["persistent_workers"] = False  # a DataLoader does not allow this attribute to be set
    return copied


def split_loaders(data: Any) -> Sequence[Any]:
    """Returns a list of dataloaders, given one or several.

    Example:
        >>> split_loaders([DataLoader([1]), DataLoader([2])])[1].dataset, len(split_loaders(DataLoader([1])))
        ([2], 1)
    """
    return data if _is_several(data) else [data]


def _is_several(data: Any) -> bool:
    if not isinstance(data, list | tuple) or not data:
        return False
    return all(isinstance(part, DataLoader | Dataset) for part in data)


def as_mapping(clients: Any, name: str) -> Mapping[Client, Any]:
    """Converts client data to a mapping by client. In a sequence, the clients are 0, 1, ..."""
    if isinstance(clients, Mapping):
        return clients
    if isinstance(clients, Sequence) and not isinstance(clients, str):
        return LazyClients(range(len(clients)), clients.__getitem__)  # type: ignore[arg-type] # the keys are numbers
    raise TypeError(
        f"Expected `{name}` to be a mapping or a sequence of data sets or loaders, but got {type(clients).__name__}."
    )


def _check_kinds(clients: Any, numbers: KnownClasses) -> None:
    values = elements(clients, dict)
    for client, value in zip(clients if isinstance(clients, Mapping) else itertools.count(), values, strict=False):
        check_client_loader(value)
        check_class_numbers(numbers, client, value)
    kinds = {type(value).__name__: isinstance(value, Dataset) for value in values}
    if len(set(kinds.values())) > 1 or any(isinstance(value, IterableDataset) for value in values):
        raise TypeError(
            "Expected the clients to be all map-style data sets, or all loaders, but got "
            f"{' and '.join(sorted(kinds))}: put each data set in a `DataLoader`."
        )


def is_one_client(partition: Partition | None) -> bool:
    """True if a partition has only one client."""
    return partition is not None and partition.num_clients == 1
