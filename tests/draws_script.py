"""Fits with every method for `test_draws.py`; run as processes there.

`python -m tests.draws_script FOLDER SIZE JOB...` runs jobs in SIZE child processes, connected as under `torchrun`. The
result of a job is in `FOLDER/<job>-<rank>.pt`.
"""

import os
import random
import socket
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import Aggregator, Availability, FederatedCallback, FederatedDataModule, Federation
from lightning_fed.algorithms import METHODS, FedAwS, FedBN, FedFusion, FedPer, FedRep, FedSS
from lightning_fed.algorithms.robust.mixtures import Bucketing
from lightning_fed.attacks import ALIE, GaussianNoise
from lightning_fed.modules import SampledSoftmaxHead
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxMedianNorm, UniformWeights
from tests.conftest import QUIET
from tests.privacy.helpers import KnownKey

DROPOUT = 0.2
SIZES = {"ann": 9, "bob": 22, "cid": 6, "dee": 30, "eve": 13}


def examples(count, seed, classes=3):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3] + 0.3 * inputs[:, 1:]).argmax(1) + classes - 3)


class Net(L.LightningModule):
    def __init__(self, batch_norm=False, classes=3):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.example_input_array = torch.zeros(2, 4)
        norm = [nn.BatchNorm1d(8)] if batch_norm else []
        head = SampledSoftmaxHead(8, classes) if classes > 3 else nn.Linear(8, classes)
        self.net = nn.Sequential(nn.Linear(4, 8), *norm, nn.ReLU(), nn.Dropout(DROPOUT), head)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("drawn", torch.rand(()))  # random numbers in validation follow the schedule too
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ServerNoise(FederatedCallback):
    def on_server_round_start(self, trainer, module):
        self.scale = 0.01 * (1 + random.random())

    def on_server_aggregate(self, trainer, module, state):
        for value in state.values():
            if value.is_floating_point():
                value += self.scale * (torch.randn_like(value) + float(np.random.rand()))  # noqa: NPY002


class Slow(L.Callback):
    """Records the clients trained in this process; optionally delays batches in some rounds."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.clients = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        client = trainer.callbacks[0].current_client
        self.clients.append((trainer.current_epoch, client))
        if client == "cid":
            time.sleep(self.seconds)


def fit(federation, processes, callbacks=(), module=None, rounds=2, classes=3):
    data = {name: examples(size, place, classes) for place, (name, size) in enumerate(SIZES.items())}
    module = Net(classes=classes) if module is None else module
    trainer = L.Trainer(max_epochs=rounds, callbacks=[federation, *callbacks], **{**QUIET, **processes})
    val = DataLoader(examples(8, 9, classes), batch_size=2)
    trainer.fit(module, datamodule=FederatedDataModule(data, val, batch_size=4))
    drawn = trainer.callback_metrics["drawn"].clone() if processes.get("devices", 1) == 1 else torch.zeros(())
    return {**{name: value.clone() for name, value in module.state_dict().items()}, "drawn": drawn}


def by_rule(name):
    rounds, epochs = {"fedma": (4, 3), "pfnm": (1, 1)}.get(name, (2, 1))
    options = {"fltrust": ":trusted=bob"}.get(name, "")
    return lambda processes: fit(Federation(name + options, seed=3, local_epochs=epochs), processes, rounds=rounds)


def in_shares(processes):
    runs = []
    for seconds in (0.05, 0.0):
        slow = Slow(seconds)
        runs.append((fit(Federation(seed=3), processes, [slow], rounds=3), slow.clients))
    assert runs[0][1] == runs[1][1], "the shares differ"
    assert all(torch.equal(value, runs[1][0][name]) for name, value in runs[0][0].items()), "the weights differ"
    return runs[0][0]


OPTIONS = {"clients_per_round": 3, "seed": 3}
PRIVACY = KnownKey(0.1, 1e-2, noise_multiplier=0.5, adaptive=True, count_noise=0.5, key=1)
ATTACKS = [GaussianNoise(1), ALIE(1, seed=1)]
JOBS = {
    **{name: by_rule(name) for name, method in METHODS.items() if issubclass(method, Aggregator)},
    "fedatt with noise": lambda processes: fit(Federation("fedatt:noise=0.1", **OPTIONS), processes),
    "fedper": lambda processes: fit(Federation(FedPer(), **OPTIONS), processes),
    "fedrep": lambda processes: fit(Federation(FedRep(head_epochs=1), **OPTIONS), processes),
    "ditto": lambda processes: fit(Federation("ditto", **OPTIONS), processes),
    "moon": lambda processes: fit(Federation("moon", **OPTIONS), processes, rounds=3),
    "fedala": lambda processes: fit(Federation("fedala", **OPTIONS), processes, rounds=3),
    "fedbn": lambda processes: fit(Federation(FedBN(), **OPTIONS), processes, module=Net(batch_norm=True)),
    "bucketing": lambda processes: fit(Federation("median", steps=[Bucketing(2, 0)], **OPTIONS), processes),
    "attacks": lambda processes: fit(Federation("median", seed=3, steps=ATTACKS), processes),
    **(
        {"private": lambda processes: fit(Federation("fedavgm", steps=[PRIVACY], **OPTIONS), processes, rounds=4)}
        if find_spec("dp_accounting")
        else {}
    ),
    "bounded": lambda processes: fit(Federation(steps=[MaxMedianNorm(0.5)], **OPTIONS), processes),
    "secure sum": lambda processes: fit(Federation(steps=[UniformWeights(), SecureSum(0.1)], **OPTIONS), processes),
    "recalibrated": lambda processes: fit(Federation(**OPTIONS), processes, module=Net(batch_norm=True)),
    "fedfusion": lambda processes: fit(Federation(FedFusion("conv", at="net.1"), **OPTIONS), processes),
    "fedss": lambda processes: fit(Federation(FedSS(2), **OPTIONS), processes, classes=12),
    "fedss by batch": lambda processes: fit(Federation(FedSS(2, resample="batch"), **OPTIONS), processes, classes=12),
    "fedaws": lambda processes: fit(Federation(FedAwS(k=2, comparison=3), **OPTIONS), processes, classes=12),
    "stragglers": lambda processes: fit(
        Federation(availability=Availability(stragglers=0.5, client_dropout=0.2), local_epochs=2, seed=3), processes
    ),
    "noise of the server": lambda processes: fit(Federation(**OPTIONS), processes, [ServerNoise()]),
    "shares": in_shares,
}


def work(folder, size, names):
    rank = os.environ["LOCAL_RANK"]
    os.environ["PL_GLOBAL_SEED"] = "11"  # Lightning's strategy seeds the generators again before `setup`
    for place, name in enumerate(names):
        torch.manual_seed(100 * place + int(rank))  # different in every process
        random.seed(rank)
        np.random.seed(int(rank))  # noqa: NPY002
        torch.save(JOBS[name]({"strategy": "client_parallel", "devices": size}), Path(folder) / f"{name}-{rank}.pt")


def main():
    torch.set_num_threads(1)
    folder, size, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "x"}
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(found, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE=str(size))
            code = 1
            try:
                work(folder, size, names)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(map(abs, ended)))


if __name__ == "__main__":
    main()
