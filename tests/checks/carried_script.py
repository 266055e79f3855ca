"""Visits write attributes in two processes: run by `test_carried_attributes.py`.

`python -m tests.checks.carried_script FOLDER` trains; `<folder>/<rank>.txt` has the log of each process.
"""

import logging
import sys
from pathlib import Path

import torch

from lightning_fed import FederatedTrainer
from tests import models
from tests.conftest import QUIET


class Counting(models.Module):
    """Counts batches in an attribute and in a non-persistent buffer."""

    def __init__(self):
        super().__init__(models.mlp())
        self.count = 0
        self.register_buffer("buffered", torch.tensor(0), persistent=False)

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.buffered += 1
        return super().training_step(batch, batch_idx)


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    trainer = FederatedTrainer(
        max_rounds=2, seed=0, strategy="client_parallel", devices=2, default_root_dir=folder, **QUIET
    )
    logger = logging.getLogger("lightning_fed.checks.carried_attributes")
    logger.addHandler(logging.FileHandler(folder / f"{trainer.global_rank}.txt"))
    trainer.fit(Counting(), models.as_datasets(models.vectors()))


if __name__ == "__main__":
    main()
