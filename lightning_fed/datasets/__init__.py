"""Data sets for experiments, and a report on the clients' data."""

from lightning_fed.datasets.camvid import CamVid as CamVid
from lightning_fed.datasets.cifar10 import CIFAR10 as CIFAR10
from lightning_fed.datasets.client_report import ClientReport as ClientReport
from lightning_fed.datasets.client_report import ClientSummary as ClientSummary
from lightning_fed.datasets.client_report import report_clients as report_clients
from lightning_fed.datasets.client_report import report_partition as report_partition
from lightning_fed.datasets.femnist import FEMNIST as FEMNIST
from lightning_fed.datasets.mnist import MNIST as MNIST
from lightning_fed.datasets.mnist import FashionMNIST as FashionMNIST
from lightning_fed.datasets.omniglot import Omniglot as Omniglot
from lightning_fed.datasets.shakespeare import Shakespeare as Shakespeare
from lightning_fed.datasets.shapes import Shapes as Shapes
from lightning_fed.datasets.shapes import ShapesDataset as ShapesDataset
from lightning_fed.datasets.synthetic import Synthetic as Synthetic
from lightning_fed.datasets.synthetic_generator import synthetic_clients as synthetic_clients

__all__ = [
    "CIFAR10",
    "FEMNIST",
    "MNIST",
    "CamVid",
    "ClientReport",
    "ClientSummary",
    "FashionMNIST",
    "Omniglot",
    "Shakespeare",
    "Shapes",
    "ShapesDataset",
    "Synthetic",
    "report_clients",
    "report_partition",
    "synthetic_clients",
]
