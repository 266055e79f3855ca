"""Data: partitions, clients, the round's loader, ready data sets."""

from lightning_fed.data.federated import FederatedDataModule as FederatedDataModule
from lightning_fed.data.partitions import IID as IID
from lightning_fed.data.partitions import ByGroup as ByGroup
from lightning_fed.data.partitions import Dirichlet as Dirichlet
from lightning_fed.data.partitions import LabelsPerClient as LabelsPerClient
from lightning_fed.data.partitions import Partition as Partition
from lightning_fed.data.partitions import PermutedPixels as PermutedPixels
from lightning_fed.data.partitions import QuantitySkew as QuantitySkew
from lightning_fed.data.partitions import Shards as Shards
from lightning_fed.data.population import LazyClients as LazyClients

__all__ = [
    "IID",
    "ByGroup",
    "Dirichlet",
    "FederatedDataModule",
    "LabelsPerClient",
    "LazyClients",
    "Partition",
    "PermutedPixels",
    "QuantitySkew",
    "Shards",
]
