"""CIFAR-10 from an npz file with JPEG images, or from torchvision's batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_fed.datasets.array_module import Split
from lightning_fed.datasets.arrays import Augment
from lightning_fed.datasets.file_readers import decode_images, find_file, read_npz, split_bytes
from lightning_fed.datasets.torchvision_images import TorchvisionImages


class CIFAR10(TorchvisionImages):
    """CIFAR-10: 50,000 training and 10,000 test images, 32 x 32 RGB, in 10 classes.

    For the arguments see `TorchvisionImages`. `augment` mirrors images at random, and shifts by up to 4 pixels. The
    first of these found under `data_dir` is read:

    - `cifar10/cifar10_{train,test}_jpeg.npz`, or the same files directly in `data_dir`. Arrays: `data`, all JPEG files
      concatenated (uint8), with file i at `data[offsets[i]:offsets[i + 1]]`; `offsets`; and `labels` (0..9).
    - `cifar-10-batches-py/`, torchvision's pickled batches.

    With JPEG files, accuracies are only roughly comparable with published values. Source: A. Krizhevsky, "Learning
    Multiple Layers of Features from Tiny Images", 2009.

    Example:
        >>> data = CIFAR10("data", train_size=10_000, augment=True)
        >>> data.num_classes, data.class_names[3]
        (10, 'cat')
    """

    _source = "CIFAR10"
    _names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    _mean, _std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def find_files(self, split: Split) -> list[Path]:
        name = f"cifar10_{'test' if split == 'test' else 'train'}_jpeg.npz"
        instructions = (
            "Pass `download=True` to download the batches with torchvision, or pass the folder that contains the "
            "files or batches as `data_dir`."
        )
        return [find_file(self.data_dir, [f"cifar10/{name}", name, "cifar-10-batches-py"], instructions)]

    def read_files(self, split: Split) -> tuple[Tensor, Callable[[np.ndarray], Tensor]]:
        (path,) = self.find_files(split)
        if path.suffix == ".npz":
            arrays = read_npz(path, ("data", "offsets", "labels"))
            return torch.from_numpy(arrays["labels"]), lambda chosen: decode_images(
                split_bytes(arrays["data"], arrays["offsets"], chosen)
            )
        from torchvision import datasets  # slow to import, and needed only here

        batches = datasets.CIFAR10(str(path.parent), train=split != "test")
        pixels = torch.from_numpy(batches.data).permute(0, 3, 1, 2)
        return torch.tensor(batches.targets), lambda chosen: pixels[torch.from_numpy(chosen)].contiguous()

    def _augmentation(self) -> Augment:
        from torchvision.transforms import v2

        change: Augment = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(32, padding=4)])
        return change
