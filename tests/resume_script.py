"""Interrupted and resumed federated runs: imported by `test_resume.py`, and run as a process there.

`python -m tests.resume_script FILE` runs the jobs in a JSON file one after another, each in a forked child, so that
libraries are imported once. A child that reaches the breaking point writes a file and waits, until the parent kills the
child with SIGKILL.
"""

import csv
import json
import logging
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import (
    Availability,
    FederatedDataModule,
    FederatedTrainer,
    Federation,
    FixedStatistics,
    LocalStatistics,
)
from lightning_fed.callbacks import ClassPrototypes, FeatureFusion, SampledSoftmax
from lightning_fed.compression import Downlink, Quantized, TopK
from lightning_fed.data import Dirichlet
from lightning_fed.modules import SampledSoftmaxHead

SIZES = (9, 14, 6, 21, 11)
ROUNDS = 4
PERSONAL = {"personal": ["head.*"], "batch_norm": "recalibrate", "optimizer_state": "keep"}

RUNS = {
    # Everything with random numbers or step counts, for a model without client state.
    "schedulers": {
        "model": {"batch_norm": False, "schedulers": True},
        "federation": {
            "clients_per_round": 0.8,
            "local_epochs": 2,
            "availability": Availability(stragglers=0.5, client_dropout=0.2),
        },
    },
    "batch-norm-average": {
        "federation": {"clients_per_round": 3, "local_steps": 4, "availability": Availability(stragglers=0.4)}
    },
    "personal-in-memory": {"federation": {"clients_per_round": 3, **PERSONAL}},
    "personal-in-folder": {
        "model": {"optimizer": "adam"},
        "federation": {"clients_per_round": 3, "local_epochs": 2, "store": "clients", **PERSONAL},
    },
    "personal-batch-norm-in-folder": {
        "federation": {
            "clients_per_round": 0.6,
            "batch_norm": "personal",
            "store": "clients",
            "availability": Availability(client_dropout=0.3),
        }
    },
    "local-batch-norm-in-folder": {
        "federation": {
            "clients_per_round": 3,
            "batch_norm": LocalStatistics("pooled"),
            "store": "clients",
        }
    },
    "fixed-batch-norm": {"federation": {"clients_per_round": 3, "batch_norm": FixedStatistics(2)}},
    "two-optimizers": {
        "model": {"optimizer": "two"},
        "federation": {"batch_norm": "frozen", "optimizer_state": "keep", "clients_per_round": 4},
    },
    # Each client stores the error of compression, and the server's momentum is a second step with state.
    "compressed": {"federation": {"method": "fedavgm", "clients_per_round": 3, "steps": [Quantized(4)]}},
    "compressed-in-folder": {"federation": {"clients_per_round": 3, "steps": [TopK(0.2)], "store": "clients"}},
    "compressed-down": {
        "federation": {"method": "fedavgm", "clients_per_round": 3, "steps": [Quantized(8), Downlink(TopK(0.2))]}
    },
    # Prototypes stored on the server and on each client.
    "margins-in-memory": {
        "prototypes": {"lpm_before": "last_local"},
        "federation": {"method": "fedmargin", "clients_per_round": 3, "local_epochs": 2},
    },
    "margins-in-folder": {
        "prototypes": {"lpm_before": "last_local", "passes": "online"},
        "federation": {"method": "fedmargin", "clients_per_round": 3, "local_epochs": 2, "store": "clients"},
    },
    # Several server models and personal centres; gradients computed before the visits.
    "centers": {"federation": {"method": "fesem", "clients_per_round": 4, "local_epochs": 2}},
    "corrected-gradients": {
        "model": {"schedulers": True},
        "federation": {
            "method": "feddane",
            "clients_per_round": 3,
            "local_steps": 4,
            "availability": Availability(client_dropout=0.2),
        },
    },
    # Gradients corrected by state on the server and on each client.
    "control-variates": {
        "model": {"optimizer": "two"},
        "federation": {"method": "scaffold", "clients_per_round": 3, "local_epochs": 2, "store": "clients"},
    },
    "regularizers": {
        "federation": {
            "method": "feddyn:alpha=0.1",
            "clients_per_round": 3,
            "availability": Availability(client_dropout=0.2),
        }
    },
    # A personal model per client, and two models in one visit.
    "own-models": {
        "federation": {"method": "ditto", "clients_per_round": 3, "store": "clients", "optimizer_state": "keep"}
    },
    # The state of the server's optimizer.
    "server-momentum": {"federation": {"method": "fedavgm", "clients_per_round": 3, "local_epochs": 2}},
    "server-moments": {
        "federation": {
            "method": "fedadam",
            "clients_per_round": 3,
            "batch_norm": "average",
            "availability": Availability(client_dropout=0.2),
        },
    },
    # Sampled rows per client, and rows moved by momentum.
    "sampled-classes": {
        "model": {"batch_norm": False, "num_classes": 9},
        "sampled": {"num_negatives": 3, "resample": "batch"},
        "federation": {
            "method": "fedavgm",
            "clients_per_round": 3,
            "local_epochs": 2,
            "availability": Availability(client_dropout=0.2),
        },
    },
    # The extractor for evaluating the global model, and weights smoothed on the server.
    "fused-features": {
        "fusion": {"operator": "multi", "cache_global_features": True},
        "federation": {
            "clients_per_round": 3,
            "local_epochs": 2,
            "personal": ["head.*"],
            "availability": Availability(client_dropout=0.2),
        },
    },
    # Start models of clients in flight, and a virtual clock.
    "in-order-of-arrival": {
        "model": {"schedulers": True},
        "federation": {"method": "fedbuff", "clients_per_round": 4, "local_epochs": 2, "store": "clients"},
    },
    "partition": {"door": "partition", "federation": {"clients_per_round": 2, "local_epochs": 2}},
    "federated-trainer": {
        "door": "trainer",
        "federation": {
            "clients_per_round": 3,
            "local_epochs": 2,
            "store": "clients",
            "availability": Availability(stragglers=0.4),
            **PERSONAL,
        },
    },
    "saved-after-validation": {
        "checkpoint": {"save_on_train_epoch_end": False},
        "federation": {"clients_per_round": 3, **PERSONAL},
    },
}
"""Options of the runs, by name."""


class Interruption(Exception):
    """Simulates a kill without a separate process."""


class Net(L.LightningModule):
    def __init__(self, optimizer="sgd", batch_norm=True, schedulers=False, num_classes=None):
        super().__init__()
        self.optimizer = optimizer
        self.schedulers = schedulers
        self.automatic_optimization = optimizer != "two"
        norm = nn.BatchNorm1d(6) if batch_norm else nn.LayerNorm(6)
        self.body = nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(6, 3) if num_classes is None else SampledSoftmaxHead(6, num_classes)

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.02)
        if self.optimizer == "two":
            return (
                torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9),
                torch.optim.Adagrad(self.head.parameters(), lr=0.05),
            )
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        if not self.schedulers:
            return optimizer
        per_round = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        per_batch = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
        return [optimizer], [per_round, {"scheduler": per_batch, "interval": "step"}]


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(examples(60, seed=7), batch_size=5, shuffle=True)

    def val_dataloader(self):
        return DataLoader(examples(8, seed=9), batch_size=4)


class At(L.Callback):
    """Calls `action(trainer, module)` once in a hook of a round.

    The place is "first", "middle" or "last" batch, or the first batch of the "second visit". Hooks outside training
    batches follow the last batch.
    """

    HOOKS = (
        "on_train_batch_start",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_train_epoch_end",
    )

    def __init__(self, hook, round, where, action):
        assert hook in self.HOOKS
        self.hook, self.round, self.where = hook, round, where
        self.action = action
        self.is_done = False
        self.batch = -1
        self.skipped = 0
        self.clients = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.batch, self.clients = -1, []

    def reached(self, hook, trainer, pl_module, arguments):
        is_new = False
        if hook == "on_train_batch_start":
            self.batch += 1
            if self.batch == 0:
                self.skipped = arguments[1]  # Lightning skips batches already done, although the round is repeated
            federation = next(callback for callback in trainer.callbacks if isinstance(callback, Federation))
            is_new = federation.current_client not in self.clients
            self.clients += [federation.current_client] if is_new else []
        count = trainer.num_training_batches - self.skipped
        is_here = {
            "first": self.batch == 0,
            "middle": self.batch == count // 2,
            "last": self.batch == count - 1,
            "second visit": is_new and len(self.clients) == 2,
        }
        if (hook, trainer.current_epoch) == (self.hook, self.round) and is_here[self.where] and not self.is_done:
            self.is_done = True
            self.action(trainer, pl_module)


def _hook(name):
    return lambda self, trainer, pl_module, *arguments: self.reached(name, trainer, pl_module, arguments)


for _name in At.HOOKS:
    setattr(At, _name, _hook(_name))


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3] + 0.3 * inputs[:, 1:]).argmax(1))


def fit(run, folder, version, callbacks=(), ckpt_path=None, **trainer_options):
    trainer, module, data = prepare(run, folder, version, callbacks, **trainer_options)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def prepare(run, folder, version, callbacks=(), **trainer_options):
    """Trainer, module and data for `RUNS[run]` or for such options; checkpoints and logs go to `folder`."""
    options = RUNS[run] if isinstance(run, str) else run
    federation = {"seed": 3, **options.get("federation", {})}
    if federation.get("store") is not None:
        federation["store"] = os.path.join(folder, federation["store"])
    if options.get("door") == "partition":
        federation["partition"] = Dirichlet(6, alpha=1.0, min_size=3)
        data = Data()
    else:
        clients = {f"client-{place}": examples(size, place) for place, size in enumerate(SIZES)}
        val = {client: examples(4, 10 + place) for place, client in enumerate(clients)}
        data = FederatedDataModule(clients, val, batch_size=6)
    torch.manual_seed(0)
    module = Net(**options.get("model", {}))
    prototypes = [ClassPrototypes(**options["prototypes"])] if "prototypes" in options else []
    sampled = [SampledSoftmax(**options["sampled"])] if "sampled" in options else []
    fusion = [FeatureFusion(**options["fusion"])] if "fusion" in options else []
    # Both entry points: `L.Trainer` with the callback, and `FederatedTrainer`.
    callback = Federation(**federation)
    through_trainer = options.get("door") == "trainer"
    trainer = (partial(FederatedTrainer, federation=callback) if through_trainer else L.Trainer)(
        callbacks=[
            *([] if through_trainer else [callback]),
            *prototypes,
            *sampled,
            *fusion,
            *callbacks,
            ModelCheckpoint(os.path.join(folder, "checkpoints"), save_last=True, **options.get("checkpoint", {})),
        ],
        logger=CSVLogger(folder, name="", version=f"log-{version}", flush_logs_every_n_steps=1),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_epochs": ROUNDS, **trainer_options},
    )
    return trainer, module, data


def last_checkpoint(folder, name="checkpoints"):
    return max((Path(folder) / name).glob("last*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def rows(folder, version):
    by_round = {}
    if not os.path.exists(os.path.join(folder, f"log-{version}", "metrics.csv")):
        return by_round
    with open(os.path.join(folder, f"log-{version}", "metrics.csv"), newline="") as file:
        for row in csv.DictReader(file):
            values = {name: value for name, value in row.items() if value and name not in ("step", "epoch")}
            by_round.setdefault(int(float(row["epoch"])), {}).update(values)
    return by_round


def in_child(job):

    def wait_for_the_end(trainer, module):
        (Path(job["folder"]) / "reached").touch()
        time.sleep(600)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    fit(job["run"], job["folder"], job["version"], [At(*job["at"], wait_for_the_end)])


def main():
    for job in json.loads(Path(sys.argv[1]).read_text()):
        child = os.fork()
        if child == 0:
            try:
                in_child(job)
            finally:
                os._exit(0)
        folder = Path(job["folder"])
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if (folder / "reached").exists():
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                assert os.WTERMSIG(status) == signal.SIGKILL
                (folder / "killed").touch()
                break
            time.sleep(0.01)


if __name__ == "__main__":
    main()
