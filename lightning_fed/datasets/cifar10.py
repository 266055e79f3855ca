"""CIFAR-10 from an npz file of JPEG images, or from the batches that torchvision downloads."""

from __future__ import annotations

import importlib
import io
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.arrays import ArrayDataset
from lightning_fed.datasets.array_module import ArrayDataModule, Split
from lightning_fed.datasets.augment import FlipAndShift
from lightning_fed.datasets.file_readers import decode_images, find_file, read_npz, split_bytes

_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_BATCHES = "cifar-10-batches-py"
# All names that a pickled array refers to, in numpy 1 and 2.
_ARRAY_PARTS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how protocol 2 writes the bytes of an array in Python 3
}


class CIFAR10(ArrayDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images, 32 x 32 RGB, 10 classes of equal size.

    Read from the first of these that is found under `data_dir`:

    - `cifar10/cifar10_{train,test}_jpeg.npz`, or the same files in `data_dir` itself. Arrays: `data`, all JPEG files
      end to end (uint8), file i being `data[offsets[i]:offsets[i + 1]]`; `offsets`; and `labels` (0..9).
    - `cifar-10-batches-py/`, the pickled batches that torchvision downloads. Only arrays are unpickled.

    JPEG files are lossy: accuracies on them compare with one another, and with published ones only roughly. There
    is no validation split: `val_size` training images, drawn at random, are held out for it, and the test images are
    only for the test. Only the images that are kept are decoded (about 10,000 in a second).

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    Args:
        data_dir: Folder that holds one of the above.
        download: Fetch the batches into `data_dir` with torchvision if nothing is found (needs a network).
        batch_size: Images in a training batch.
        eval_batch_size: Images in a batch of validation or test; None means `batch_size`.
        num_workers: Worker processes of each loader.
        train_size: Number of training images to keep, a random subset; None keeps all that are not held out.
        val_size: Number of training images held out for validation; 0 trains on all and validates on none.
        test_size: Number of test images to keep, a random subset; None keeps all.
        normalize: Subtract the training images' mean per channel and divide by the standard deviation; else [0, 1].
        augment: Mirror training images at random and shift them by up to 4 pixels.
        seed: Seed of the held-out images and of the subsets. It is not the seed of the training.

    Raises:
        FileNotFoundError: In `setup`, if nothing of the above is found.
        ValueError: If a number is out of its range.

    Example:
        >>> data = CIFAR10("data", train_size=10_000, augment=True)
        >>> data.num_classes, data.class_names[3]
        (10, 'cat')
    """

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
            class_names=_NAMES,
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
        """Downloads the batches, if `download` is set and no file is found."""
        if not self.download:
            return
        try:
            self._find("train"), self._find("test")
        except FileNotFoundError:
            # Imported here, because only the download needs torchvision.
            importlib.import_module("torchvision.datasets").CIFAR10(str(self.data_dir), download=True)

    def load_split(self, split: Split) -> ArrayDataset:
        """Reads the images and labels of one split.

        Args:
            split: The split.

        Returns:
            Images (N, 3, 32, 32) and classes (N,).
        """
        path = self._find(split)
        if path.suffix == ".npz":
            arrays = read_npz(path, ("data", "offsets", "labels"))
            labels = arrays["labels"]
        else:
            names = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
            batches = [_read_batch(path / name) for name in names]
            labels = np.concatenate([labels for _, labels in batches])
        all_positions = np.arange(len(labels))
        chosen = self.subset("test", all_positions) if split == "test" else self.held_out(split, len(labels))
        images: Tensor
        if path.suffix == ".npz":
            images = decode_images(split_bytes(arrays["data"], arrays["offsets"], chosen))
        else:
            images = torch.from_numpy(np.concatenate([pixels for pixels, _ in batches])[chosen])
        return ArrayDataset(
            images,
            torch.from_numpy(labels[chosen]),
            mean=_MEAN if self.normalize else None,
            std=_STD if self.normalize else None,
            augment=FlipAndShift(max_shift=4) if self.augment and split == "train" else None,
        )

    def _find(self, split: Split) -> Path:
        name = f"cifar10_{'test' if split == 'test' else 'train'}_jpeg.npz"
        instructions = (
            "Pass `download=True` to fetch the batches with torchvision, or `data_dir` as the folder that has one."
        )
        return find_file(self.data_dir, [f"cifar10/{name}", name, _BATCHES], instructions)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles dicts, lists and numpy arrays only, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ARRAY_PARTS:
            raise pickle.UnpicklingError(f"Expected only arrays in a CIFAR-10 batch, but found `{module}.{name}`.")
        return super().find_class(module, name)


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The pixels (N, 3, 32, 32), uint8, and the labels (N,) of one pickled batch."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected the batch {path}, but found none. The download may have been cut short.")
    batch = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    return batch["data"].reshape(-1, 3, 32, 32), np.asarray(batch["labels"], dtype=np.int64)
