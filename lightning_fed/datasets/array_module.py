"""Base classes of the package's datamodules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed.argument_checks import check_count
from lightning_fed.datasets.arrays import ArrayDataset, Augment

Split = Literal["train", "val", "test"]

SPLITS: dict[Split, int] = {"train": 0, "val": 1, "test": 2}
_NEEDED: dict[str | None, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("test",),
    None: ("train", "val", "test"),
}


class ArrayDataModule(LightningDataModule, ABC):
    """Abstract data module with three data sets in memory. Subclasses implement `load_split`.

    Args:
        class_names: Class names.
        batch_size: Samples per training batch.
        eval_batch_size: Samples per batch in validation, test and prediction. None means `batch_size`.
        num_workers: Worker processes per dataloader. 0 is usually fastest.
        train_size: Size of a random training subset. None means all samples.
        val_size: Size of a random validation subset.
        test_size: Size of a random test subset.
        seed: Seed for splits and subsets, not for training.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        *,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        train_size: int | None = None,
        val_size: int | None = None,
        test_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._sizes: dict[Split, int | None] = {"train": train_size, "val": val_size, "test": test_size}
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.batch_size = check_count("batch_size", batch_size)
        check_count("eval_batch_size", self.eval_batch_size)
        self.num_workers = check_count("num_workers", num_workers, 0)
        self.seed = check_count("seed", seed, 0)
        for split, size in self._sizes.items():
            if size is not None:
                check_count(f"{split}_size", size, int(split == "train"))
        self.class_names = tuple(class_names)
        self._datasets: dict[Split, ArrayDataset] = {}

    @abstractmethod
    def load_split(self, split: Split) -> ArrayDataset:
        """Reads the data set for one split. Subclasses select the samples with the methods `subset` and `held_out`."""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def train_dataset(self) -> ArrayDataset:
        return self._dataset("train")

    @property
    def val_dataset(self) -> ArrayDataset:
        return self._dataset("val")

    @property
    def test_dataset(self) -> ArrayDataset:
        return self._dataset("test")

    def setup(self, stage: str | None = None) -> None:
        for split in _NEEDED[stage]:
            self._dataset(split)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_dataset, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_dataset, self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test_dataset, self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.test_dataloader()

    def subset(self, split: Split, candidates: np.ndarray) -> np.ndarray:
        """Draws a random subset of `candidates`, with the size for `split`. The order does not change."""
        size = self._sizes[split]
        if size is None:
            return candidates
        if size > len(candidates):
            raise ValueError(f"Expected `{split}_size` to be at most {len(candidates)}, but got {size}.")
        chosen: np.ndarray = np.sort(self._shuffled(split, len(candidates))[:size])
        return np.take(candidates, chosen)

    def held_out(self, split: Split, num_train: int) -> np.ndarray:
        """Returns the indices of the samples for training or for validation.

        Of ``num_train`` samples, `val_size` random samples are for validation.
        """
        all_positions = np.arange(num_train)
        validation = self.subset("val", all_positions)
        return validation if split == "val" else self.subset("train", np.setdiff1d(all_positions, validation))

    def _shuffled(self, split: Split, num_samples: int) -> np.ndarray:
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, SPLITS[split]]))
        return generator.permutation(num_samples)

    def _dataset(self, split: Split) -> ArrayDataset:
        if split not in self._datasets:
            self._datasets[split] = self.load_split(split)
        return self._datasets[split]

    def _loader(self, dataset: ArrayDataset, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


class FileDataModule(ArrayDataModule):
    """Abstract data module for files. Subclasses implement `load_split`.

    With `normalize`, images are standardised by the mean and standard deviation of the training images.
    """

    augment = False
    _mean: float | tuple[float, ...]
    _std: ClassVar[float | tuple[float, ...]]

    def __init__(
        self, data_dir: str | Path, class_names: Sequence[str], *, normalize: bool = True, **options: Any
    ) -> None:
        super().__init__(class_names, **options)
        self.data_dir = Path(data_dir)
        self.normalize = normalize

    def make_dataset(
        self, split: Split, inputs: Tensor, targets: Tensor, groups: np.ndarray | None = None
    ) -> ArrayDataset:
        """Builds the data set for a split, with this module's normalisation and augmentation.

        Inputs have shape (N, C, H, W). Targets are classes (N,) or masks (N, H, W). Groups (N,) name each sample's
        natural client, such as the writer.
        """
        return ArrayDataset(
            inputs,
            targets,
            groups=groups,
            mean=self._mean if self.normalize else None,
            std=self._std if self.normalize else None,
            augment=self._augmentation() if self.augment and split == "train" else None,
        )

    def _augmentation(self) -> Augment:
        return random_flip()


def random_flip() -> Augment:
    """Creates an augmentation that mirrors half of the samples horizontally."""
    from torchvision.transforms import v2  # slow to import, and needed only here

    flip: Augment = v2.RandomHorizontalFlip()
    return flip
