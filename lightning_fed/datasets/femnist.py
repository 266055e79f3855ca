"""FEMNIST: handwritten characters with their writers, from one npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lightning_fed.data.arrays import ArrayDataset
from lightning_fed.datasets.array_module import ArrayDataModule, Split
from lightning_fed.datasets.file_readers import find_file, read_npz

_NAMES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_MEAN, _STD = 0.9612, 0.1655  # of the training images as stored, black on white
_INSTRUCTIONS = (
    "Make it from LEAF (https://github.com/TalwalkarLab/leaf) with the arrays that `help(FEMNIST)` lists, "
    "or pass `data_dir` as the folder that has it."
)


class FEMNIST(ArrayDataModule):
    """FEMNIST of the LEAF benchmark: 28 x 28 characters of 62 classes, with the writer of each as natural client.

    Read from `femnist/femnist_writers.npz` under `data_dir`, or the same file in `data_dir` itself. Arrays: `images`
    (N, 28, 28) uint8, black on white; `label` (0..9 digits, 10..35 capital, 36..61 small letters); `writer`, an index
    into `writer_names`; `split` (0 training, 1 test of the same writers, 2 test of writers never seen in training).

    There is no validation split: the share `val_fraction` of every writer's training samples, drawn at random and
    rounded down, is held out for it. The data sets' `groups` are the writers' names.

    Source: S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097; NIST Special Database 19.

    Args:
        data_dir: Folder that holds the file, or the file.
        invert: White on black, as in MNIST.
        test_writers: Test on new samples of the writers in training (`"seen"`), or on other writers (`"unseen"`).
        batch_size: Images in a training batch.
        eval_batch_size: Images in a batch of validation or test; None means `batch_size`.
        num_workers: Worker processes of each loader.
        val_fraction: Share of each writer's training samples held out for validation, in [0, 1).
        train_size: Number of training samples to keep, a random subset over all writers; None keeps all that are
            not held out.
        val_size: Number of validation samples to keep, a random subset; None keeps all.
        test_size: Number of test samples to keep, a random subset; None keeps all.
        normalize: Subtract the mean of the training images and divide by their standard deviation; else [0, 1].
        seed: Seed of the held-out samples and of the subsets. It is not the seed of the training.

    Raises:
        FileNotFoundError: In `setup`, if the file is missing.
        ValueError: If a number is out of its range, or an array is missing from the file.

    Example:
        >>> data = FEMNIST("data", invert=True, test_writers="unseen")
        >>> data.num_classes, data.class_names[10]
        (62, 'A')
    """

    def __init__(
        self,
        data_dir: str | Path,
        *,
        invert: bool = False,
        test_writers: Literal["seen", "unseen"] = "seen",
        batch_size: int = 20,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        train_size: int | None = None,
        val_size: int | None = None,
        test_size: int | None = None,
        normalize: bool = True,
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
        if not 0 <= val_fraction < 1:
            raise ValueError(f"Expected `val_fraction` to be in [0, 1), but got {val_fraction}.")
        if test_writers not in ("seen", "unseen"):
            raise ValueError(f"Expected `test_writers` to be 'seen' or 'unseen', but got {test_writers!r}.")
        self.data_dir = Path(data_dir)
        self.invert = invert
        self.test_writers = test_writers
        self.val_fraction = val_fraction
        self.normalize = normalize

    def load_split(self, split: Split) -> ArrayDataset:
        """Reads one split.

        Args:
            split: The split.

        Returns:
            Images (N, 1, 28, 28), classes (N,), and the writers' names as groups.
        """
        path = find_file(self.data_dir, ["femnist/femnist_writers.npz", "femnist_writers.npz"], _INSTRUCTIONS)
        arrays = read_npz(path, ("images", "label", "writer", "split", "writer_names"))
        if split == "test":
            candidates = np.flatnonzero(arrays["split"] == (1 if self.test_writers == "seen" else 2))
        else:
            training = np.flatnonzero(arrays["split"] == 0)
            is_held_out = self._is_held_out(arrays["writer"][training])
            candidates = training[is_held_out if split == "val" else ~is_held_out]
        chosen = self.subset(split, candidates)
        images = arrays["images"][chosen]
        return ArrayDataset(
            torch.from_numpy(255 - images if self.invert else images).unsqueeze(1),
            torch.from_numpy(arrays["label"][chosen]),
            groups=arrays["writer_names"][arrays["writer"][chosen]],
            mean=(1 - _MEAN if self.invert else _MEAN) if self.normalize else None,
            std=_STD if self.normalize else None,
        )

    def _is_held_out(self, writers: np.ndarray) -> np.ndarray:
        """Mask of the training samples held out for validation, drawn for each writer independently."""
        is_held_out = np.zeros(len(writers), dtype=bool)
        for writer in np.unique(writers):
            samples = np.flatnonzero(writers == writer)
            generator = np.random.default_rng(np.random.SeedSequence([self.seed, int(writer)]))
            is_held_out[generator.permutation(samples)[: int(self.val_fraction * len(samples))]] = True
        return is_held_out
