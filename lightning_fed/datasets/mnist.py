"""MNIST and Fashion-MNIST from idx files in torchvision's layout."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from lightning_fed.data.arrays import ArrayDataset
from lightning_fed.datasets.array_module import ArrayDataModule, Split
from lightning_fed.datasets.augment import CropAndFlip
from lightning_fed.datasets.file_readers import find_file, read_idx

_PREFIXES: dict[Split, str] = {"train": "train", "val": "train", "test": "t10k"}


class IdxDataModule(ArrayDataModule):
    """A data set of four idx files (abstract: see `MNIST` and `FashionMNIST`).

    The files lie in `<data_dir>/<name of the data set>/raw/`, where torchvision puts them, gzipped or unpacked. They
    are only read, so the folder may be read-only. There is no validation split: `val_size` training images, drawn at
    random, are held out for it, and the test images are only for the test.

    Args:
        data_dir: Folder that holds the data set's own folder.
        download: Fetch missing files into `data_dir` with torchvision (needs a network).
        batch_size: Images in a training batch.
        eval_batch_size: Images in a batch of validation or test; None means `batch_size`.
        num_workers: Worker processes of each loader.
        train_size: Number of training images to keep, a random subset; None keeps all that are not held out.
        val_size: Number of training images held out for validation; 0 trains on all and validates on none.
        test_size: Number of test images to keep, a random subset; None keeps all.
        normalize: Subtract the mean of the training images and divide by their standard deviation; else [0, 1].
        augment: Cut out a random part of each training image and mirror it at random
            (:class:`~lightning_fed.datasets.CropAndFlip`), as the program of FedFusion does, also of digits. A
            partition's own changes, such as a permutation of the pixels, come after it.
        seed: Seed of the held-out images and of the subsets. It is not the seed of the training.

    Raises:
        FileNotFoundError: In `setup`, if a file is missing.
        ValueError: If a number is out of its range, or a file is not an idx file.
    """

    _folder: ClassVar[str]
    _names: ClassVar[tuple[str, ...]]
    _mean: ClassVar[float]
    _std: ClassVar[float]

    def __init__(
        self,
        data_dir: str | Path,
        *,
        download: bool = False,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        train_size: int | None = None,
        val_size: int = 5000,
        test_size: int | None = None,
        normalize: bool = True,
        augment: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            class_names=self._names,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            train_size=train_size,
            val_size=val_size,
            test_size=test_size,
            seed=seed,
        )
        self.data_dir = Path(data_dir)
        self.download = download
        self.normalize = normalize
        self.augment = augment

    def prepare_data(self) -> None:
        """Downloads missing files, if `download` is set."""
        if not self.download:
            return
        try:
            for split in ("train", "test"):
                self._find(split, "images-idx3"), self._find(split, "labels-idx1")
        except FileNotFoundError:
            # Imported here, because only the download needs torchvision.
            datasets = importlib.import_module("torchvision.datasets")
            getattr(datasets, self._folder)(str(self.data_dir), download=True)

    def load_split(self, split: Split) -> ArrayDataset:
        """Reads the images and labels of one split.

        Args:
            split: The split.

        Returns:
            Images (N, 1, 28, 28) and classes (N,).
        """
        images, labels = read_idx(self._find(split, "images-idx3")), read_idx(self._find(split, "labels-idx1"))
        all_positions = np.arange(len(labels))
        chosen = self.subset("test", all_positions) if split == "test" else self.held_out(split, len(labels))
        return ArrayDataset(
            torch.from_numpy(images[chosen]).unsqueeze(1),
            torch.from_numpy(labels[chosen]),
            mean=self._mean if self.normalize else None,
            std=self._std if self.normalize else None,
            augment=CropAndFlip() if self.augment and split == "train" else None,
        )

    def _find(self, split: Split, kind: str) -> Path:
        name = f"{self._folder}/raw/{_PREFIXES[split]}-{kind}-ubyte"
        instructions = "Pass `download=True` to fetch it with torchvision, or `data_dir` as the folder that has it."
        return find_file(self.data_dir, [name, f"{name}.gz"], instructions)


class MNIST(IdxDataModule):
    """Handwritten digits: 60,000 training and 10,000 test images, 28 x 28, white on black, 10 classes.

    Takes the arguments of `IdxDataModule`: `data_dir`, `download`, `batch_size`, `eval_batch_size`, `num_workers`,
    `train_size`, `val_size=5000`, `test_size`, `normalize`, `augment` and `seed`. The files are
    `<data_dir>/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte`, gzipped or not.

    Source: Y. LeCun, C. Cortes and C. Burges, http://yann.lecun.com/exdb/mnist/.

    Example:
        >>> data = MNIST("data", batch_size=20)
        >>> data.num_classes, data.class_names[:3]
        (10, ('0', '1', '2'))
    """

    _folder = "MNIST"
    _names = tuple("0123456789")
    _mean, _std = 0.1307, 0.3081


class FashionMNIST(IdxDataModule):
    """Zalando's articles: 60,000 training and 10,000 test images, 28 x 28, white on black, 10 classes of equal size.

    Takes the arguments of `IdxDataModule`: `data_dir`, `download`, `batch_size`, `eval_batch_size`, `num_workers`,
    `train_size`, `val_size=5000`, `test_size`, `normalize`, `augment` and `seed`. The files are
    `<data_dir>/FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte`, gzipped or not.

    Source: H. Xiao, K. Rasul and R. Vollgraf, https://github.com/zalandoresearch/fashion-mnist (MIT licence).

    Example:
        >>> data = FashionMNIST("data", batch_size=20)
        >>> data.num_classes, data.class_names[-1]
        (10, 'Ankle boot')
    """

    _folder = "FashionMNIST"
    _names = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    _mean, _std = 0.2860, 0.3530
