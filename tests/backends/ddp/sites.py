"""Two sites with two processes each, in a federation over Flower's messages. Other processes can load this file."""

import os
import signal
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedTrainer, Federation
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.transport import FlowerTransport
from lightning_fed.backends.wire.server import run_server
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.data import IID
from tests import models, warm_process
from tests.backends.flower.grids import FakeGrid
from tests.backends.flower.halves import OPTIONS, clients_of
from tests.conftest import QUIET

SIZES = {"ann": 32, "bob": 24}
RANKS = {"devices": 2, "strategy": "ddp"}


class Fragile(models.Module):
    """In one process of one visit, the process dies, sleeps or raises: ``FRAGILE=action:process:path of a token``."""

    def training_step(self, batch, batch_idx):
        action, rank, path = os.environ.get("FRAGILE", ":0:").split(":")
        if action and str(self.trainer.global_rank) == rank and batch_idx == 1 and os.path.exists(path):
            os.remove(path)
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "sleep":
                time.sleep(60)
            raise RuntimeError("a broken process")
        return super().training_step(batch, batch_idx)


def module():
    return Fragile(models.mlp(), models.momentum)


def normed():
    """Without dropout, because a plain DataLoader draws from the global generator."""
    torch.manual_seed(0)
    return models.Module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), models.adam)


class SyncOnCPU(nn.BatchNorm1d):
    """Synchronised BatchNorm by definition: statistics of the joint batch. Torch's layer needs a GPU."""

    def forward(self, inputs):
        if not (self.training and dist.is_initialized()):
            return F.batch_norm(
                inputs, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum
            )
        ones = torch.ones_like(inputs)
        count, total, squares = all_reduce(torch.stack([x.sum(0) for x in (ones, inputs, inputs.square())]))
        mean = total / count
        variance = squares / count - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (inputs - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def norm_net(layer):
    torch.manual_seed(0)
    return models.Module(nn.Sequential(nn.Linear(6, 8), layer(8), nn.ReLU(), nn.Linear(8, 3)), models.momentum)


def synchronised():
    return norm_net(SyncOnCPU)


def unsynchronised():
    return norm_net(nn.BatchNorm1d)


def fit(folder, rounds, federation=Federation, batch_size=4, trainer=RANKS, make=module, data=None, grids=None):
    """Trains one node per client; returns the server's module and Trainer."""
    data = models.vectors(SIZES) if data is None else data
    apps = {
        node: client_app(
            federation(), make, clients_of({name: data[name]}, batch_size), {**OPTIONS, **trainer},
            store=folder / f"{node}",
        )
        for node, name in enumerate(data)
    }  # fmt: skip
    grid = FakeGrid(apps)
    if grids is not None:
        grids.append(grid)
    transport = FlowerTransport(grid, Deadline(100, reconnect=0), poll=0.01)
    model = make()
    fitted = run_server(
        federation(), model, None, {**OPTIONS, "max_epochs": rounds}, transport,
        transport.await_clients(len(data), 1), folder / "server", [],
    )  # fmt: skip
    return model, fitted


def run_ranks(function, *arguments, seconds=120, **environment):
    """Calls a function in two processes with the variables of ``torchrun``; returns the exit codes."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", **environment}
    running = [
        warm_process.start(function, *arguments, environment={**os.environ, **place, "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        end = time.monotonic() + seconds
        for process in running:
            process.join(max(end - time.monotonic(), 0))
        return [process.exitcode for process in running]
    finally:
        for process in running:
            warm_process.end(process)


def free_port():
    from lightning.fabric.plugins.environments.lightning import find_free_network_port

    return find_free_network_port()


class Dealt:
    """A distributed sampler with a given order, equal to torch's without shuffling."""

    def __init__(self, order, rank):
        self.indices = order[rank::2]

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


def plain_ddp(path, make, client, seed, epochs):
    """One visit by plain Lightning DDP: the module of ``make``, the visit's order in each epoch."""
    module, trainer = (
        make(),
        L.Trainer(**{**QUIET, **RANKS}, max_epochs=epochs, use_distributed_sampler=False,
                  reload_dataloaders_every_n_epochs=1),
    )  # fmt: skip
    tensors = models.vectors(SIZES)[client]

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            order = np.random.default_rng([seed, trainer.current_epoch]).permutation(len(tensors[0])).tolist()
            return DataLoader(TensorDataset(*tensors), 4, sampler=Dealt(order, trainer.global_rank))

    trainer.fit(module, datamodule=Data())
    if trainer.is_global_zero:
        torch.save(module.state_dict(), path)


class Broken(TensorDataset):
    """In the second process, example 30 raises."""

    def __getitem__(self, index):
        if os.environ["LOCAL_RANK"] == "1" and index == 30:
            raise OSError("unreadable")
        return super().__getitem__(index)


def one_client(path, data_kind, options):
    """Trains the only client of a federation, in this process, in two processes; saves the error of a process."""
    trainer = FederatedTrainer(
        **{**QUIET, **RANKS}, max_rounds=2, partition=IID(1), optimizer_state="keep", seed=1, **options
    )
    try:
        trainer.fit(module(), DataLoader(data_kind(*models.vectors({"a": 40})["a"]), 4, shuffle=True))
    except Exception as error:
        Path(f"{path}-{trainer.global_rank}").write_text(repr(error))
        raise
