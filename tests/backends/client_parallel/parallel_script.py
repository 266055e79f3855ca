"""Federated runs in two processes: imported by `test_client_parallel.py`, and run as processes by these tests.

A serving process runs each job in two forked children, connected as under `torchrun`; forks import the libraries once.
Each job writes results to `<folder>/<job>-<rank>.pt` and the output to `<folder>/<job>-<rank>.log`.

`python -m tests.backends.client_parallel.parallel_script FOLDER JOB` runs one job with Lightning's own launcher.
"""

import os
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import (
    Aggregator,
    Availability,
    ClientParallelStrategy,
    ClientStore,
    ClientUpdate,
    Faults,
    FederatedCallback,
    FederatedDataModule,
    FederatedTrainer,
    Federation,
    MemoryStore,
)
from lightning_fed.algorithms import FedAvg, FedAwS, FedSS
from lightning_fed.callbacks import CommunicationReport, FeatureFusion, LocalEvaluation
from lightning_fed.client.local_model import STATISTICS
from lightning_fed.data import IID
from lightning_fed.messages import Broadcast
from lightning_fed.modules import SampledSoftmaxHead
from lightning_fed.privacy import DPSGD, SecureSum
from lightning_fed.steps import UniformWeights
from tests import evaluations, models, resume_script
from tests.conftest import QUIET
from tests.recorders import MemoryLogger

TWO = {"strategy": "client_parallel", "devices": 2}
SIZES = {"ann": 9, "bob": 22, "cid": 6, "dee": 30, "eve": 13}


# --- training modules -----------------------------------------------------------------------------------------------


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3] + 0.3 * inputs[:, 1:]).argmax(1))


def clients(sizes=SIZES):
    return {name: examples(size, place) for place, (name, size) in enumerate(sizes.items())}


class Net(L.LightningModule):
    """A small classifier with BatchNorm and dropout. Different in every process, as without a seed."""

    def __init__(self, batch_norm=True):
        super().__init__()
        if os.environ.get("LOCAL_RANK") == "1":
            torch.manual_seed(99)
        norm = nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8)
        self.net = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Talkative(Net):
    """Logs in all ways, and synchronises wherever possible."""

    def __init__(self):
        super().__init__()
        accuracy = {"task": "multiclass", "num_classes": 3}
        self.accuracy = torchmetrics.Accuracy(**accuracy)
        self.eager = torchmetrics.Accuracy(**accuracy, dist_sync_on_step=True)
        self.scores = torchmetrics.MetricCollection(
            [torchmetrics.Precision(**accuracy), torchmetrics.Recall(**accuracy)]
        )
        self.validated = nn.ModuleList(torchmetrics.Accuracy(**accuracy) for _ in range(2))
        self.worlds = set()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.worlds.add((self.trainer.world_size, tuple(self.all_gather(loss.detach()).shape)))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("last_loss", loss, sync_dist=True)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("max", loss, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=7)
        client = next(each for each in self.trainer.callbacks if isinstance(each, Federation)).current_client
        self.log(f"of_{client}", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.eager(logits, batch[1])
        self.log("eager", self.eager, on_step=True, on_epoch=True)
        self.scores(logits, batch[1])
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        self.log("so_far", self.eager.compute(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.validated[dataloader_idx](logits, batch[1])
        self.log("val_acc", self.validated[dataloader_idx])

    def on_validation_epoch_end(self):
        self.log("val_last", float(self.trainer.current_epoch), sync_dist=True)


class ManyClasses(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.head = SampledSoftmaxHead(6, 12)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @staticmethod
    def clients():
        made = {}
        for client in range(5):
            inputs = examples(8 + 3 * client, client).tensors[0]
            made[client] = TensorDataset(inputs, (torch.arange(len(inputs)) % 3 + 2 * client) % 12)
        return made


class Plain(Aggregator):
    """A user's rule: the mean over the clients, stored one by one."""

    def __init__(self):
        self.seen = 0

    def start(self, info, state):
        self.round, self.state, self.updates = info.round, state, []

    def broadcast(self, request):
        return Broadcast(self.round, dict(self.state))

    def receive(self, update):
        self.updates.append(update)

    def merge(self, other):
        self.updates += other.updates

    def aggregate(self):
        self.seen += len(self.updates)
        ordered: list[ClientUpdate] = sorted(self.updates, key=lambda update: update.client)
        return {
            name: torch.stack([update.state[name].double() for update in ordered]).mean(0).to(value.dtype)
            for name, value in self.state.items()
        }


class Noise(FederatedCallback):
    """Adds noise to the aggregate, from the global generator, and records the first entry's noise."""

    def __init__(self):
        self.drawn = []

    def on_server_aggregate(self, trainer, module, state):
        noise = {name: 0.01 * torch.randn_like(value) for name, value in state.items() if value.is_floating_point()}
        for name, value in noise.items():
            state[name] += value
        self.drawn.append(noise["net.0.weight"])


class Seen(FederatedCallback):
    """Records this process's clients, and the global model in each round."""

    keeps_privacy = True

    def __init__(self):
        self.clients = []
        self.models = []
        self.batches = []

    def on_train_epoch_start(self, trainer, module):
        self.clients.append([])
        self.batches.append(0)

    def on_client_start(self, trainer, module, client, broadcast):
        self.clients[-1].append(client)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches[-1] += 1

    def on_train_epoch_end(self, trainer, module):
        self.models.append({name: value.clone() for name, value in module.state_dict().items()})


# --- Jobs: functions of a folder and the Trainer's options; results are comparable ------------------------------------


def train(folder, processes, module, data, rounds=3, callbacks=(), trainer=None, **federation):
    seen, logger = Seen(), MemoryLogger()
    options = {**QUIET, "logger": logger, **(trainer or {}), **processes}
    torch.manual_seed(0)
    made = FederatedTrainer(max_rounds=rounds, callbacks=[seen, *callbacks], **{"seed": 3, **federation}, **options)
    module = module()
    made.fit(module, datamodule=data)
    return {**result(made, module, logger), "clients": seen.clients, "models": seen.models, "batches": seen.batches}


def result(trainer, module, logger=None):
    federation = trainer.callbacks[0]
    return {
        "state": dict(module.state_dict()),
        "steps": trainer.global_step,
        "rounds": federation.rounds,
        "report": vars(federation.server.report),
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "lines": [] if logger is None else by_round(logger),
    }


def by_round(logger):
    rounds = {}
    for _, values in logger.lines:
        if "fed/clients" in values or "val_loss" in values or "train_loss" in values or "loss_epoch" in values:
            rounds.setdefault(values["epoch"], {}).update({name: float(value) for name, value in values.items()})
    return rounds


def resumable(run):
    """A run of `resume_script`: one run for each method with a state."""

    def job(folder, processes):
        trainer, module, data = resume_script.prepare(run, folder, "x", **processes)
        trainer.fit(module, datamodule=data)
        found = result(trainer, module)
        found["kept"] = {client: trainer.callbacks[0].store.get(client) or {} for client in data_clients(trainer)}
        found["lines"] = resume_script.rows(folder, "x") if trainer.is_global_zero else {}
        return found

    return job


def data_clients(trainer):
    return trainer.callbacks[0].population.clients


def talkative(folder, processes):
    """Three of five clients in a round, two validation loaders, callbacks with a monitor, and the processes seen."""
    val = {"near": DataLoader(examples(16, 90), 4), "far": DataLoader(examples(24, 91), 4)}
    checkpoint = ModelCheckpoint(folder, "{epoch}", monitor="val_acc/dataloader_idx_1", mode="max", save_top_k=1)
    stop = EarlyStopping("loss_epoch", patience=1, mode="max")
    watches = ModelCheckpoint(folder, "last-{epoch}", monitor="last_loss")
    data = Loaders(val)
    torch.manual_seed(0)
    module = Talkative()
    found = train(
        folder, processes, lambda: module, data, 5, [checkpoint, stop, watches], {"enable_checkpointing": True},
        clients_per_round=3, local_epochs=2,
    )  # fmt: skip
    files = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    found |= {"worlds": sorted(module.worlds), "world": module.trainer.world_size, "is_own": "log" not in vars(module)}
    return {**found, "files": files, "best": float(checkpoint.best_model_score), "stopped": stop.stopped_epoch}


class Loaders(FederatedDataModule):
    def __init__(self, val):
        super().__init__(clients(), batch_size=4)
        self.loaders = val

    def val_dataloader(self):
        return list(self.loaders.values())


def one_client(folder, processes):
    return train(folder, processes, Talkative, FederatedDataModule(clients(), batch_size=4), clients_per_round=1)


def three_clients(folder, processes):
    return train(folder, processes, Net, FederatedDataModule(clients(), batch_size=4), clients_per_round=3)


class Switched(Net):
    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch == 1)


def switched(folder, processes):
    """A client's known entries depend on visits in other processes."""
    data = FederatedDataModule(clients(), batch_size=4)
    return train(folder, processes, Switched, data, rounds=9, clients_per_round=3)


class Skipping(Net):
    """Ends all clients' visits except one before the second batch."""

    def on_train_batch_start(self, batch, batch_idx):
        federation = next(each for each in self.trainer.callbacks if isinstance(each, Federation))
        return -1 if batch_idx and federation.current_client != next(iter(SIZES)) else None


def skipping(folder, processes):
    """Visits ended by the module, in the middle and at the end of a process's share.

    Steps are not compared: a single process skips the remaining batches of the round's last visit.
    """
    found = train(folder, processes, Skipping, FederatedDataModule(clients(), batch_size=4))
    return {name: value for name, value in found.items() if name != "lines"} | {"steps": 0}


def by_batches(folder, processes):
    if "strategy" in processes:
        processes = {**processes, "strategy": ClientParallelStrategy(balance="batches")}
    return train(folder, processes, Net, FederatedDataModule(clients(), batch_size=4))


def nobody(folder, processes):
    return train(
        folder,
        processes,
        Net,
        FederatedDataModule(clients(), batch_size=4),
        4,
        clients_per_round=2,
        availability=Availability(client_dropout=0.7),
    )


class Broken(TensorDataset):
    def __getitem__(self, index):
        raise OSError("the disk is gone")


def faults(folder, processes):
    """A client without data, a client with an exception in the data, a client with NaN."""
    data = clients()
    data["cid"] = Broken(*data["cid"].tensors)
    data["dee"].tensors[0][:] = float("nan")
    data["fay"] = TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    return train(folder, processes, Net, FederatedDataModule(data, batch_size=4))


def limits(folder, processes):
    data = FederatedDataModule(clients(), batch_size=4)
    few = train(folder, processes, Net, data, 2, trainer={"limit_train_batches": 11})
    share = train(folder, processes, Net, data, 2, trainer={"limit_train_batches": 0.7})
    return {**share, "few": few}


class StopOne(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx, os.environ.get("LOCAL_RANK", "1")) == (1, 2, "1"):
            trainer.should_stop = True


class Shares(FederatedCallback):
    """Shares the rank in some processes; in other processes `share_round` returns None or ends without a value."""

    def __init__(self, ranks, otherwise=None):
        self.ranks, self.otherwise = ranks, otherwise
        self.values = None

    def share_round(self, trainer, module):
        return self.share(trainer.global_rank) if trainer.global_rank in self.ranks else self.otherwise

    def share(self, rank):
        self.values = yield rank


def stopped(folder, processes):
    data = FederatedDataModule(clients(), DataLoader(examples(8, 9), 4), batch_size=4)
    sharing = [Shares([1]), Shares([0], otherwise=(value for value in ())), Shares([0, 1])]
    found = train(folder, processes, Net, data, 4, [StopOne(), *sharing], personal=["net.4.*"])
    return {**found, "shared": [callback.values for callback in sharing]}


def counted(folder, processes):
    """FedSS: requests and rows of a head, with a count of sent bytes."""
    report = CommunicationReport()
    torch.manual_seed(0)
    module = ManyClasses()
    federation = Federation(FedSS(num_negatives=2), clients_per_round=3, seed=3)
    trainer = L.Trainer(max_epochs=3, callbacks=[federation, report], **QUIET, **processes)
    trainer.fit(module, datamodule=FederatedDataModule(ManyClasses.clients(), batch_size=4))
    return {**result(trainer, module), "rows": [list(row) for row in report.rows], "table": report.table()}


def spread_out(folder, processes):
    """FedAwS: the server must know the classes of all clients."""
    torch.manual_seed(0)
    module = ManyClasses()
    federation = Federation(FedAwS(), clients_per_round=3, seed=3)
    trainer = L.Trainer(max_epochs=3, callbacks=[federation], **QUIET, **processes)
    trainer.fit(module, datamodule=FederatedDataModule(ManyClasses.clients(), batch_size=4))
    return result(trainer, module)


def matched(folder, processes):
    """FedMA: two passes of two rounds, with the models stored at the clients."""
    data = FederatedDataModule(clients(), batch_size=4)
    options = {"clients_per_round": 3, "local_epochs": 2, "method": "fedma", "store": f"{folder}/of-clients"}
    found = train(folder, processes, Net, data, 4, **options)
    found["logged"] = {name: value for name, value in found["logged"].items() if not name.endswith("/seconds")}
    return {**found, "lines": []}


def evaluated_locally(folder, processes):
    """Fused features; clients are evaluated after training, in the training process and afterwards.

    Each client has a personal BatchNorm for both extractors; every process draws the operator at random.
    """
    data = FederatedDataModule(clients(), clients({name: 6 for name in SIZES}), batch_size=4)
    callbacks = [FeatureFusion(at="net.2", network="net"), LocalEvaluation()]
    return train(folder, processes, Net, data, 3, callbacks, clients_per_round=3, batch_norm="personal")


def evaluated(folder, processes):
    """Metrics of every kind, with states joined over the processes."""
    held_out = evaluations.held_out(models.vectors, 1)
    data = FederatedDataModule(models.as_datasets(models.vectors(evaluations.TRAIN)), held_out, batch_size=8)
    return train(folder, processes, evaluations.Classifier, data, 2)


def own_statistics(folder, processes):
    """Clients with different images decide for individual statistics, and are evaluated also without a visit."""
    unlike = {
        client: (inputs + 20.0 * place, targets)
        for place, (client, (inputs, targets)) in enumerate(models.vectors(SIZES).items())
    }
    held_out = {client: DataLoader(TensorDataset(*tensors), len(tensors[0])) for client, tensors in unlike.items()}
    data = FederatedDataModule(models.as_datasets(unlike), held_out, batch_size=8)
    store = MemoryStore()
    found = train(
        folder, processes, lambda: models.Module(models.norm_mlp()), data, 2, clients_per_round=3, store=store
    )
    kept = {client: dict(store.get(client) or {}) for client in SIZES}
    for state in kept.values():
        state.pop(STATISTICS)  # a digest of weights, which can differ in the last bits
    return found | {"kept": kept}


def averages_of_weights(folder, processes):
    """Clients average their steps; statistics are measured with the model and with the average."""
    data = FederatedDataModule(models.as_datasets(models.vectors(SIZES)), models.as_datasets(models.vectors(SIZES)))
    average = L.pytorch.callbacks.EMAWeightAveraging(decay=0.6, update_every_n_steps=2)
    module, options = lambda: models.Module(models.norm_mlp(), models.momentum), {"batch_norm": "recalibrate"}
    return train(folder, processes, module, data, 3, [average], clients_per_round=3, local_epochs=2, **options)


def max_steps(folder, processes):
    """A round has 11 steps, so the fit ends after two rounds."""
    data = FederatedDataModule(clients(), clients(), batch_size=8)
    limits = {"max_steps": 14}
    found = train(folder, processes, Net, data, 5, trainer=limits)
    assert (found["steps"], found["rounds"]) == (22, 2)
    return found


def own_rule(folder, processes):
    rule = Plain()
    found = train(folder, processes, Net, FederatedDataModule(clients(), batch_size=4), method=rule)
    return {**found, "seen": rule.seen}


def private_examples(folder, processes):
    """Examples drawn and noised by a key, accounts joined over the processes, and a secure sum."""
    private = DPSGD(0.5, 0.8, 1e-3, key_for_tests=7)
    data = FederatedDataModule(clients(), batch_size=4)
    options = {"clients_per_round": 3, "steps": [UniformWeights(), SecureSum(2.0)]}
    found = train(folder, processes, lambda: Net(batch_norm=False), data, 2, [private], **options)
    return {**found, "accounts": private.state_dict()["accounts"]}


def noisy(folder, processes):
    noise = Noise()
    found = train(folder, processes, Net, FederatedDataModule(clients(), batch_size=4), callbacks=[noise])
    return {**found, "drawn": noise.drawn}


class Partitioned(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(examples(60, seed=7), batch_size=5, shuffle=True)

    def val_dataloader(self):
        return DataLoader(examples(8, seed=9), batch_size=4)


def second_door(folder, processes):
    """`L.Trainer` with a callback and a strategy object; then `validate` and `test`."""
    if "strategy" in processes:
        processes = {**processes, "strategy": ClientParallelStrategy(timeout=timedelta(minutes=2))}
    torch.manual_seed(0)
    module, logger = Net(), MemoryLogger()
    federation = Federation("fedavgm", partition=IID(7), clients_per_round=5, seed=3)
    trainer = L.Trainer(max_epochs=3, callbacks=[federation], **{**QUIET, "logger": logger}, **processes)
    trainer.fit(module, datamodule=Partitioned())
    found = result(trainer, module, logger)
    found["validated"] = trainer.validate(module, datamodule=Partitioned(), verbose=False)
    return found


def resumed(folder, processes):
    options = {**QUIET, "enable_checkpointing": True, **processes}
    federation = {"clients_per_round": 3, "personal": ["net.4.*"], "method": "fedavgm", "seed": 3}
    for rounds, path in ((2, None), (4, f"{folder}/resumed.ckpt")):
        torch.manual_seed(0)
        module = Net()
        checkpoint = ModelCheckpoint(folder, "resumed", enable_version_counter=False)
        trainer = FederatedTrainer(max_rounds=rounds, callbacks=[checkpoint], **federation, **options)
        trainer.fit(module, datamodule=FederatedDataModule(clients(), batch_size=4), ckpt_path=path)
    return result(trainer, module)


def four_rounds(folder, processes):
    data = FederatedDataModule(clients(), batch_size=4)
    personal = ["net.4.*"]
    return train(folder, processes, Net, data, 4, clients_per_round=3, personal=personal, method="fedavgm")


class Raise(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch is not None and os.environ.get("LOCAL_RANK") == "1":
            raise ValueError("in the second process")


class Hang(L.Callback):
    """Blocks the second process in a visit of the second round."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and os.environ.get("LOCAL_RANK") == "1":
            time.sleep(600)


class Reach(L.Callback):
    """Writes a file when the second process is inside a visit of the third round, and waits to be killed."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 2 and os.environ.get("LOCAL_RANK") == "1":
            (Path(self.folder) / "reached").touch()
            time.sleep(600)


class Slow(L.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1 and os.environ.get("LOCAL_RANK") == "1":
            time.sleep(1)


class Stuck(Net):
    """A blocked training step, in the second process's first visit of the second round."""

    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 1 and os.environ.get("LOCAL_RANK") == "1" and not hasattr(self, "has_hung"):
            self.has_hung = True
            time.sleep(600)
        return super().training_step(batch, batch_idx)


FOUR = {"clients_per_round": 3, "personal": ["net.4.*"], "method": "fedavgm"}


def broken_off(name, callback, timeout=None):
    """Four rounds with the last checkpoint stored, until the callback ends the fit."""

    def job(folder, processes):
        if timeout is not None:
            processes = {**processes, "strategy": ClientParallelStrategy(timeout=timedelta(seconds=timeout))}
        callbacks = [ModelCheckpoint(folder, name, enable_version_counter=False), callback(folder)]
        data = FederatedDataModule(clients(), batch_size=4)
        return train(folder, processes, Net, data, 4, callbacks, {"enable_checkpointing": True}, **FOUR)

    return job


def after(name):

    def job(folder, processes):
        torch.manual_seed(0)
        module, logger = Net(), MemoryLogger()
        trainer = FederatedTrainer(max_rounds=4, seed=3, **FOUR, **{**QUIET, **processes, "logger": logger})
        path = str(Path(folder).parent / name / f"{name}.ckpt")
        trainer.fit(module, datamodule=FederatedDataModule(clients(), batch_size=4), ckpt_path=path)
        return result(trainer, module, logger)

    return job


def stuck(folder, processes):
    data = FederatedDataModule(clients(), batch_size=4)
    return train(folder, processes, Stuck, data, faults=Faults(visit_timeout=8))


class Forgetful(FederatedCallback):
    """Stores a value in one process and uses the value in all."""

    def on_server_receive(self, trainer, module, update):
        self.last = update.client

    def on_server_aggregate(self, trainer, module, state):
        pass


class Diverging(FederatedCallback):
    def on_server_aggregate(self, trainer, module, state):
        for value in state.values():
            value += 1 + trainer.global_rank


class Synchronized(Net):
    def __init__(self):
        super().__init__()
        self.net[1] = nn.SyncBatchNorm(8)


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(2, 2 + int(os.environ.get("LOCAL_RANK", "0")))


class OwnStore(ClientStore):
    def get(self, client):
        return None

    def put(self, client, round, state):
        pass

    def commit(self, round, clients):
        pass

    def checkpoint(self, round):
        return {}

    def restore(self, round, state):
        pass


def refusals(folder, processes):
    """Error messages for refused settings, by name."""
    said = {}

    def attempt(name, module=Net, callbacks=(), method="fedavg", trainer=None, data=None, **federation):
        data = data or FederatedDataModule(clients(), batch_size=4)
        try:
            train(folder, processes, module, data, 1, callbacks, trainer, method=method, **federation)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        torch.distributed.barrier()

    class Lambda(FedAvg):
        def __init__(self):
            super().__init__()
            self.weigh = lambda update: 1.0

    saves = {"enable_checkpointing": True}
    attempt("every_n_train_steps", callbacks=[ModelCheckpoint(folder, "inside", every_n_train_steps=2)], trainer=saves)
    attempt("on_server_receive", callbacks=[Forgetful()])
    attempt("sync_batch_norm", Synchronized)
    attempt("sync_batchnorm", trainer={"sync_batchnorm": True})
    attempt("module", Wider)
    attempt("lambda", method=Lambda())
    attempt("on_server_aggregate", callbacks=[Diverging()])
    attempt("store", store=OwnStore())
    broken = {name: Broken(*dataset.tensors) for name, dataset in clients().items()}
    attempt("all_fail", data=FederatedDataModule(broken, batch_size=4))
    empty = {name: TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)) for name in clients()}
    attempt("all_empty", data=FederatedDataModule(empty, batch_size=4))
    return said


class Normed(Net):
    """Without dropout: a visit and a plain Trainer draw different numbers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(layer for layer in self.net if not isinstance(layer, nn.Dropout)))


def inside_one_client(folder, processes):
    """DDP on one client's data, plain and federated, with an uneven number of examples, resumed inside a round."""

    def fit(name, path=None):
        torch.manual_seed(0)
        module, saver = Normed(), ModelCheckpoint(f"{folder}/{name}", every_n_train_steps=5, save_top_k=-1)
        options = {**QUIET, "strategy": "ddp", "devices": 2, "max_epochs": 2, "accumulate_grad_batches": 2}
        options |= {"callbacks": [saver], "enable_checkpointing": True}
        if name == "plain":
            trainer = L.Trainer(**options)
        else:
            own = {"partition": IID(1), "optimizer_state": "keep", "batch_norm": "average"}
            trainer = FederatedTrainer(**options, **own)
        data = DataLoader(examples(43, 0), 4, shuffle=True)
        trainer.fit(module, data, DataLoader(examples(20, 1), 4), ckpt_path=path)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items() if "loss" in key}
        return {"state": dict(module.state_dict()), "steps": trainer.global_step, "logged": logged}

    ends = {name: fit(name) for name in ("plain", "federated")}
    return {**ends, "resumed": fit("resumed", f"{folder}/federated/epoch=1-step=5.ckpt")}


def ddp_refusals(folder, processes):
    """Fits with several clients, without kept optimizers, or with measured BatchNorm statistics."""
    errors = []
    one = {"partition": IID(1)}
    measured = {**one, "optimizer_state": "keep", "batch_norm": "recalibrate"}
    for options in ({"partition": IID(2)}, one, {**one, "method": "median"}, measured):
        try:
            trainer = FederatedTrainer(**{**QUIET, "strategy": "ddp", "devices": 2, "max_rounds": 1}, **options)
            trainer.fit(Normed(), DataLoader(examples(12, 0), 4))
        except MisconfigurationException as error:
            errors.append(str(error))
    return errors


JOBS = {
    **{run: resumable(run) for run in resume_script.RUNS},
    **{
        job.__name__.replace("_", "-"): job
        for job in (
            talkative, one_client, three_clients, switched, by_batches, skipping, nobody, faults, limits,
            stopped, counted, spread_out, matched, evaluated_locally, evaluated, averages_of_weights, max_steps,
            own_rule, private_examples, noisy, own_statistics, second_door, resumed, four_rounds, stuck, refusals,
            inside_one_client, ddp_refusals,
        )
    },
    "raising": broken_off("raising", lambda folder: Raise()),
    "hanging": broken_off("hanging", lambda folder: Hang(), timeout=2),
    "slow": broken_off("slow", lambda folder: Slow(), timeout=60),
    "killed": broken_off("killed", Reach),
    **{f"after-{name}": after(name) for name in ("raising", "hanging", "killed")},
}  # fmt: skip


# --- processes ------------------------------------------------------------------------------------------------------

SECONDS = 240  # time limit for a job


def work(folder, name):
    own = Path(folder) / name
    own.mkdir(exist_ok=True)
    found = JOBS[name](str(own), TWO)
    torch.save(found, Path(folder) / f"{name}-{os.environ.get('LOCAL_RANK', '0')}.pt")


@contextmanager
def children(folder, job):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ.update(found, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE="2")
            code = 1
            with open(Path(folder) / f"{job}-{rank}.log", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                try:
                    work(folder, job)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def run(folder, job):
    """Runs a job in two processes; returns each exit code (or minus the signal) and the seconds."""
    started = time.monotonic()
    ended = {}
    with children(folder, job) as pids:
        while len(ended) < 2 and time.monotonic() - started < SECONDS:
            for rank, pid in enumerate(pids):
                if rank not in ended:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - started
            for reached in Path(folder).glob("*/reached"):
                os.kill(pids[1], signal.SIGKILL)
                reached.rename(reached.with_name("killed"))
            if job == "hanging" and ended:
                break
            time.sleep(0.02)
    return ended


def serve(folder, connection):
    """Runs the jobs received from a connection, until closed, and answers with the children's exit codes."""
    with suppress(EOFError):
        while True:
            connection.send(run(folder, connection.recv()))


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
