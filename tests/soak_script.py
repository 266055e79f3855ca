"""A long fit of a small model in a separate process, with resource use after every round, for `test_soak.py`.

`python -m tests.soak_script FOLDER ROUNDS METHOD` writes a JSON line: bytes of resident memory, open descriptors,
threads and files in the folder, each as a list with one number per round.
"""

import gc
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import FedMA

WIDTH = 256
"""Width of the model, for one megabyte in float32, mostly in the second layer."""


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU()
        )
        self.head = nn.Linear(4 * WIDTH, 3)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Watch(L.Callback):
    def __init__(self, folder):
        self.folder = folder
        self.seen = {"bytes": [], "descriptors": [], "threads": [], "files": []}

    def on_train_epoch_start(self, trainer, pl_module):
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.seen["bytes"].append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.seen["descriptors"].append(len(os.listdir("/proc/self/fd")))
        self.seen["threads"].append(len(os.listdir("/proc/self/task")))
        self.seen["files"].append(sum(path.is_file() for path in self.folder.rglob("*")))


OPTIONS = {
    "fedavgm": lambda folder: {
        "method": "fedavgm", "personal": ["head.*"], "optimizer_state": "keep", "store": folder / "clients",
    },
    "fedma": lambda folder: {"method": FedMA("permute")},  # constant widths
}  # fmt: skip


def main():
    folder, rounds, method = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_fed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = {f"client-{index}": TensorDataset(torch.randn(8, 8), torch.arange(8) % 3) for index in range(6)}
    watch = Watch(folder)
    trainer = FederatedTrainer(
        **OPTIONS[method](folder),
        max_rounds=rounds,
        clients_per_round=3,
        seed=1,
        callbacks=[watch, ModelCheckpoint(folder / "checkpoints", save_last=True)],
        logger=CSVLogger(folder, name="", version="log"),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Net(), datamodule=FederatedDataModule(data, data, batch_size=8))
    sys.stdout.write(json.dumps(watch.seen))


if __name__ == "__main__":
    main()
