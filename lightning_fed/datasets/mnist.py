"""MNIST and Fashion-MNIST from idx files in torchvision's layout."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from lightning_fed.datasets.array_module import Split
from lightning_fed.datasets.arrays import Augment
from lightning_fed.datasets.file_readers import find_file
from lightning_fed.datasets.torchvision_images import TorchvisionImages


class _IdxImages(TorchvisionImages):
    """Base class for data sets in idx files, in the folder ``<name>/raw``."""

    def find_files(self, split: Split) -> list[Path]:
        prefix = "t10k" if split == "test" else "train"
        names = [f"{self._source}/raw/{prefix}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        instructions = (
            "Pass `download=True` to download the data set with torchvision, or pass the folder that "
            "contains it as `data_dir`."
        )
        return [find_file(self.data_dir, [name, f"{name}.gz"], instructions) for name in names]

    def read_files(self, split: Split) -> tuple[Tensor, Callable[[np.ndarray], Tensor]]:
        images, labels = map(_read_idx, self.find_files(split))
        return labels, lambda chosen: images[torch.from_numpy(chosen)].unsqueeze(1)

    def _augmentation(self) -> Augment:  # as in FedFusion's program
        from torchvision.transforms import v2  # slow to import, and needed only here

        change: Augment = v2.Compose([v2.RandomResizedCrop(28), v2.RandomHorizontalFlip()])
        return change


def _read_idx(path: Path) -> Tensor:
    from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

    try:
        with TemporaryDirectory() as folder:
            unpacked = path
            if path.suffix == ".gz":  # torchvision reads unpacked files, and the folder may be read-only
                unpacked = Path(folder) / path.stem
                unpacked.write_bytes(gzip.decompress(path.read_bytes()))
            values: Tensor = read_sn3_pascalvincent_tensor(str(unpacked))
    except (AssertionError, LookupError, ValueError) as error:
        raise ValueError(
            f"Expected {path} to be an idx file, but the format differs or the file is incomplete."
        ) from error
    return values


class MNIST(_IdxImages):
    """Handwritten digits: 60,000 training and 10,000 test images, 28 x 28, white on black, 10 classes.

    For the arguments see `TorchvisionImages`. `augment` crops and mirrors images at random. The files are
    `<data_dir>/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte`, gzipped or not.

    Source: Y. LeCun, C. Cortes and C. Burges, http://yann.lecun.com/exdb/mnist/.

    Example:
        >>> data = MNIST("data", batch_size=20)
        >>> data.num_classes, data.class_names[:3]
        (10, ('0', '1', '2'))
    """

    _source = "MNIST"
    _names = tuple("0123456789")
    _mean, _std = 0.1307, 0.3081


class FashionMNIST(_IdxImages):
    """Zalando's articles: 60,000 training and 10,000 test images, 28 x 28, white on black, 10 classes.

    Arguments and files are as for `MNIST`, in `<data_dir>/FashionMNIST/raw/`. Source: H. Xiao, K. Rasul and R.
    Vollgraf, https://github.com/zalandoresearch/fashion-mnist (MIT licence).

    Example:
        >>> data = FashionMNIST("data", batch_size=20)
        >>> data.num_classes, data.class_names[-1]
        (10, 'Ankle boot')
    """

    _source = "FashionMNIST"
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
