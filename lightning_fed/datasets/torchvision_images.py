"""Base of the image data sets that torchvision downloads, without a validation split."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.arrays import ArrayDataset
from lightning_fed.datasets.array_module import FileDataModule, Split


class TorchvisionImages(FileDataModule):
    """Images of classes as torchvision stores them (abstract: see `MNIST`, `FashionMNIST` and `CIFAR10`).

    The files are only read, so that their folder may be read-only. There is no validation split: `val_size` training
    images, drawn at random, are held out for it, and the test images are only for the test.

    Args:
        data_dir: Folder that holds the data set's own folder.
        download: Fetch missing files into `data_dir` with torchvision (needs a network).
        val_size: Number of training images held out for validation; 0 trains on all and validates on none.
        augment: Change training images at random. A partition's own changes, such as a permutation of the pixels, come
            after it.
        **options: `normalize`, and `batch_size`, `eval_batch_size`, `num_workers`, `train_size` (None keeps all that
            are not held out), `test_size` and `seed` of `ArrayDataModule`.

    Raises:
        FileNotFoundError: In `setup`, if a file is missing.
        ValueError: If a number is out of its range, or a file is of another format.
        RuntimeError: If torchvision finds CIFAR's batches changed.
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
        """The files of a split, or the folder that has them.

        Raises:
            FileNotFoundError: If one is missing.
        """

    @abstractmethod
    def read_files(self, split: Split) -> tuple[Tensor, Callable[[np.ndarray], Tensor]]:
        """Classes (N,) of the images in the files, and a function that gives those at some positions (n, C, H, W)."""

    def prepare_data(self) -> None:
        """Downloads missing files, if `download` is set."""
        if not self.download:
            return
        try:
            self.find_files("train"), self.find_files("test")
        except FileNotFoundError:
            from torchvision import datasets  # slow to import: only for those who use it

            getattr(datasets, self._source)(str(self.data_dir), download=True)

    def load_split(self, split: Split) -> ArrayDataset:
        """Reads the images and labels of one split.

        Args:
            split: The split.

        Returns:
            Images (N, C, H, W) and classes (N,).
        """
        labels, images_of = self.read_files(split)
        count = len(labels)
        chosen = self.subset("test", np.arange(count)) if split == "test" else self.held_out(split, count)
        return self.make_dataset(split, images_of(chosen), labels[torch.from_numpy(chosen)])
