"""FEMNIST's ten letters a to j, for the setting in the FedProx paper: 200 users with three letters each."""

from __future__ import annotations

import numpy as np
import torch

from lightning_fed.datasets import FEMNIST
from lightning_fed.datasets.array_module import Split
from lightning_fed.datasets.arrays import ArrayDataset

FIRST, NUM_LETTERS = 36, 10  # the label of "a" in FEMNIST's 62 classes
VAL = 9  # one of nine images: 60 users need at least 60 training images per letter


class Letters(FEMNIST):
    """The letters a to j from all splits, 1,204 images: every ninth image per letter is for validation."""

    num_classes = NUM_LETTERS

    def load_split(self, split: Split) -> ArrayDataset:
        with np.load(self.data_dir / "femnist" / "femnist_writers.npz") as file:
            images, labels = file["images"], file["label"]
        rng = np.random.default_rng(self.seed)
        orders = [rng.permutation(np.flatnonzero(labels == FIRST + letter)) for letter in range(NUM_LETTERS)]
        parts = [order[len(order) // VAL :] if split == "train" else order[: len(order) // VAL] for order in orders]
        chosen = np.sort(np.concatenate(parts))
        return self.make_dataset(
            split, torch.from_numpy(255 - images[chosen]).unsqueeze(1), torch.from_numpy(labels[chosen] - FIRST)
        )
