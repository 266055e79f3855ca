"""Ready data sets: read from local files, or generated."""

from lightning_fed.datasets.camvid import CamVid as CamVid
from lightning_fed.datasets.cifar10 import CIFAR10 as CIFAR10
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
    "FashionMNIST",
    "Omniglot",
    "Shakespeare",
    "Shapes",
    "ShapesDataset",
    "Synthetic",
    "synthetic_clients",
]
