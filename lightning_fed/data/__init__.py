"""Data: partitions, clients, the round's loader, ready data sets."""

from lightning_fed.data.arrays import ArrayDataset as ArrayDataset
from lightning_fed.data.augment import FlipAndShift as FlipAndShift
from lightning_fed.data.camvid import CamVid as CamVid
from lightning_fed.data.cifar10 import CIFAR10 as CIFAR10
from lightning_fed.data.dataset_clients import DatasetClients as DatasetClients
from lightning_fed.data.federated import FederatedDataModule as FederatedDataModule
from lightning_fed.data.femnist import FEMNIST as FEMNIST
from lightning_fed.data.loader_clients import LoaderClients as LoaderClients
from lightning_fed.data.mnist import MNIST as MNIST
from lightning_fed.data.mnist import FashionMNIST as FashionMNIST
from lightning_fed.data.omniglot import Omniglot as Omniglot
from lightning_fed.data.partitioned import PartitionedData as PartitionedData
from lightning_fed.data.partitions import IID as IID
from lightning_fed.data.partitions import ByGroup as ByGroup
from lightning_fed.data.partitions import Dirichlet as Dirichlet
from lightning_fed.data.partitions import LabelsPerClient as LabelsPerClient
from lightning_fed.data.partitions import Partition as Partition
from lightning_fed.data.partitions import PermutedPixels as PermutedPixels
from lightning_fed.data.partitions import QuantitySkew as QuantitySkew
from lightning_fed.data.partitions import Shards as Shards
from lightning_fed.data.population import LazyClients as LazyClients
from lightning_fed.data.population import PlannedVisit as PlannedVisit
from lightning_fed.data.population import Population as Population
from lightning_fed.data.population import StreamItem as StreamItem
from lightning_fed.data.shakespeare import Shakespeare as Shakespeare
from lightning_fed.data.shapes import Shapes as Shapes
from lightning_fed.data.shapes import ShapesDataset as ShapesDataset
from lightning_fed.data.synthetic import Synthetic as Synthetic

__all__ = [
    "CIFAR10",
    "FEMNIST",
    "IID",
    "MNIST",
    "ArrayDataset",
    "ByGroup",
    "CamVid",
    "DatasetClients",
    "Dirichlet",
    "FashionMNIST",
    "FederatedDataModule",
    "FlipAndShift",
    "LabelsPerClient",
    "LazyClients",
    "LoaderClients",
    "Omniglot",
    "Partition",
    "PartitionedData",
    "PermutedPixels",
    "PlannedVisit",
    "Population",
    "QuantitySkew",
    "Shakespeare",
    "Shapes",
    "ShapesDataset",
    "Shards",
    "StreamItem",
    "Synthetic",
]
