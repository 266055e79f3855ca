"""FEMNIST's ten letters a to j, for the setting of the FedProx paper: 200 users with three letters each."""

from __future__ import annotations

import numpy as np
import torch

from lightning_fed.datasets import FEMNIST
from lightning_fed.datasets.array_module import Split
from lightning_fed.datasets.arrays import ArrayDataset

FIRST, NUM_LETTERS, NUM_VAL = 36, 10, 200  # the label of "a" in FEMNIST's 62 classes


class Letters(FEMNIST):
    """The letters a to j from all splits of the file, 1,204 images: 200 for validation, the others for training."""

    num_classes = NUM_LETTERS

    def load_split(self, split: Split) -> ArrayDataset:
        with np.load(self.data_dir / "femnist" / "femnist_writers.npz") as file:
            images, labels = file["images"], file["label"]
        places = np.flatnonzero((labels >= FIRST) & (labels < FIRST + NUM_LETTERS))
        order = np.random.default_rng(self.seed).permutation(places)
        chosen = np.sort(order[NUM_VAL:] if split == "train" else order[:NUM_VAL])
        return self.make_dataset(
            split, torch.from_numpy(255 - images[chosen]).unsqueeze(1), torch.from_numpy(labels[chosen] - FIRST)
        )
