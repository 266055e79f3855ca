"""FEMNIST: handwritten characters with their writers, from an npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lightning_fed.argument_checks import check_option, check_share
from lightning_fed.datasets.array_module import FileDataModule, Split
from lightning_fed.datasets.arrays import ArrayDataset
from lightning_fed.datasets.file_readers import find_file, read_npz

_NAMES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_INSTRUCTIONS = (
    "Create the file from LEAF (https://github.com/TalwalkarLab/leaf) with the arrays listed in `help(FEMNIST)`, or "
    "pass the folder that contains the file as `data_dir`."
)


class FEMNIST(FileDataModule):
    """FEMNIST from the LEAF benchmark: 28 x 28 characters in 62 classes, with writers as natural clients.

    The file is `femnist/femnist_writers.npz` under `data_dir`, or the same file directly in `data_dir`. Arrays:
    `images` (N, 28, 28) uint8, black on white; `label` (0..9 digits, 10..35 capital, 36..61 small letters); `writer`,
    an index into `writer_names`; `split` (0 training, 1 test with the same writers, 2 test with new writers).

    A random part of every writer's training samples is for validation. Source: S. Caldas et al., "LEAF: A Benchmark for
    Federated Settings", arXiv:1812.01097; NIST Special Database 19.

    Args:
        data_dir: Folder that contains the file, or the file itself.
        invert: Whether to invert to white on black, as in MNIST.
        test_writers: Whether test samples are from training writers (`"seen"`) or other writers (`"unseen"`).
        val_fraction: Fraction of each writer's training samples for validation, in [0, 1).
        batch_size: Images per training batch.
        **options: `normalize`, `eval_batch_size`, `num_workers`, `train_size`, `val_size`, `test_size` and `seed`.

    Raises:
        FileNotFoundError: In `setup`, if the file is missing.
        ValueError: If a number is outside the allowed range, or an array is missing from the file.

    Example:
        >>> data = FEMNIST("data", invert=True, test_writers="unseen")
        >>> data.num_classes, data.class_names[10]
        (62, 'A')
    """

    _std = 0.1655  # for the stored training images, black on white, with mean 0.9612

    def __init__(
        self,
        data_dir: str | Path,
        *,
        invert: bool = False,
        test_writers: Literal["seen", "unseen"] = "seen",
        val_fraction: float = 0.1,
        batch_size: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(data_dir, _NAMES, batch_size=batch_size, **options)
        check_option("test_writers", test_writers, ("seen", "unseen"))
        self.invert = invert
        self.test_writers = test_writers
        self.val_fraction = check_share("val_fraction", val_fraction)
        self._mean = 1 - 0.9612 if invert else 0.9612

    def load_split(self, split: Split) -> ArrayDataset:
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
        return self.make_dataset(
            split,
            torch.from_numpy(255 - images if self.invert else images).unsqueeze(1),
            torch.from_numpy(arrays["label"][chosen]),
            arrays["writer_names"][arrays["writer"][chosen]],
        )

    def _is_held_out(self, writers: np.ndarray) -> np.ndarray:
        is_held_out = np.zeros(len(writers), dtype=bool)
        for writer in np.unique(writers):
            samples = np.flatnonzero(writers == writer)
            generator = np.random.default_rng([self.seed, int(writer)])
            is_held_out[generator.permutation(samples)[: int(self.val_fraction * len(samples))]] = True
        return is_held_out
