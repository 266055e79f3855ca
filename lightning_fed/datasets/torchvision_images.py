"""Base class for torchvision's image data sets without a validation split."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_fed.datasets.array_module import FileDataModule, Split
from lightning_fed.datasets.arrays import ArrayDataset


class TorchvisionImages(FileDataModule):
    """Base class of `MNIST`, `FashionMNIST` and `CIFAR10`.

    Args:
        data_dir: Folder containing the data set's folder, such as `MNIST` or `cifar-10-batches-py`.
        download: Whether to download missing files with torchvision.
        val_size: Number of random training images held out for validation; 0 for no validation.
        augment: Whether to augment training images at random.
        **options: `normalize`, and arguments of `ArrayDataModule`.
    """

    _source: ClassVar[str]
    _names: ClassVar[Sequence[str]]

    def __init__(
        self,
        data_dir: str | Path,
        *,
        download: bool = False,
        val_size: int = 5000,
        augment: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(data_dir, self._names, val_size=val_size, **options)
        self.download = download
        self.augment = augment

    @abstractmethod
    def find_files(self, split: Split) -> list[Path]:
        """Returns the paths of the files for a split, or the path of a folder with the files."""

    @abstractmethod
    def read_files(self, split: Split) -> tuple[Tensor, Callable[[np.ndarray], Tensor]]:
        """Returns the class of each image, and a function that reads the images at n indices, shape (n, C, H, W)."""

    def prepare_data(self) -> None:
        if not self.download:
            return
        try:
            self.find_files("train"), self.find_files("test")
        except FileNotFoundError:
            from torchvision import datasets  # slow to import, and needed only here

            getattr(datasets, self._source)(str(self.data_dir), download=True)

    def load_split(self, split: Split) -> ArrayDataset:
        labels, images_of = self.read_files(split)
        count = len(labels)
        chosen = self.subset("test", np.arange(count)) if split == "test" else self.held_out(split, count)
        return self.make_dataset(split, images_of(chosen), labels[torch.from_numpy(chosen)])
