"""Runs ClassPrototypes in a plain Trainer with two processes.

Forking the processes is fast. A separate program is needed because a fork after OpenMP has started threads
would hang.
"""

import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.callbacks import ClassPrototypes
from tests import models
from tests.conftest import QUIET


class Silent(models.Module):
    """Logs nothing, because every process would log separately."""

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])


class Note(L.Callback):
    """Writes the examples, prototypes and logs of a process."""

    def __init__(self, prototypes, path):
        self.prototypes, self.path, self.batches = prototypes, path, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(tuple(batch))

    def on_train_epoch_end(self, trainer, pl_module):
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        torch.save(
            {"prototypes": tuple(self.prototypes.prototypes), "logged": logged, "batches": self.batches},
            f"{self.path}-{trainer.global_rank}.pt",
        )


def main(folder):
    torch.set_num_threads(1)
    for passes in ("exact", "online"):
        prototypes = ClassPrototypes(passes=passes)
        note = Note(prototypes, Path(folder) / passes)
        module = Silent(models.mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        trainer = L.Trainer(
            **QUIET, max_epochs=1, devices=2, strategy="ddp_fork", callbacks=[prototypes, note], default_root_dir=folder
        )
        trainer.fit(module, DataLoader(TensorDataset(*models.vectors({"x": 32})["x"]), 8))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*num_workers|.*fork")
    main(sys.argv[1])
