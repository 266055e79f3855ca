"""The same federation in one process, and as server and clients with Flower's apps and a fake grid in between."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from lightning_fed import Availability, FederatedCallback, FederatedDataModule, Federation
from lightning_fed.algorithms import FedBN, FedBuff, FedFusion, FedPer, FedSS
from lightning_fed.attacks import IPM, SignFlip
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.transport import FlowerTransport, from_records
from lightning_fed.backends.wire import packets
from lightning_fed.backends.wire.server import run_server
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.callbacks import ClassPrototypes, ClientEvaluation, LayerwiseTraining, find_federation
from lightning_fed.messages import message_bytes, tensor_bytes
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxSamples
from lightning_fed.tasks import ClassificationTask
from tests import evaluations, models
from tests.backends.flower.grids import FakeGrid
from tests.conftest import QUIET
from tests.privacy.helpers import KnownKey

OPTIONS = {name: QUIET[name] for name in ("accelerator", "logger", "enable_progress_bar", "enable_model_summary")}
SIZES = {"ann": 33, "bob": 20, "cid": 48}


ROUND, LOST = 1, "bob"


def is_lost(message, content):
    sent = json.loads(from_records(message.content).text)["header"]
    return (sent.get("visit") or {}).get("client") == LOST and sent["visit"]["round"] == ROUND


class Loses(FederatedCallback):
    """In one process: invalidates some clients' updates in some rounds."""

    changes_update = True

    def __init__(self, client=LOST, rounds=(ROUND,)):
        self.client, self.rounds = client, rounds

    def on_client_end(self, trainer, module, client, update):
        if trainer.current_epoch in self.rounds and client == self.client:
            next(iter(update.state.values())).fill_(float("nan"))


class Padded(FederatedCallback):
    """Pads some clients' updates to the server's size limit, plus some bytes.

    Args:
        excess: Number of bytes beyond the limit, by client.
    """

    def __init__(self, excess):
        self.excess = excess

    def on_client_end(self, trainer, module, client, update):
        if client in self.excess:
            base, factor = packets._DATA  # noqa: SLF001 - users cannot set the limit
            size = base + factor * tensor_bytes(module.state_dict()) + self.excess[client] - message_bytes(update)
            update.extras["padding"] = torch.randint(
                256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(len(client))
            )


def clients_of(data, batch_size=16, held_out=None):
    return FederatedDataModule(models.as_datasets(data), held_out, held_out, batch_size=batch_size)


def in_process(trainer, make_module, data, federation, rounds=3, callbacks=(), val=None, options=()):
    module = make_module()
    fitted = trainer(federation=federation, max_rounds=rounds, callbacks=list(callbacks), **dict(options))
    datamodule = FederatedDataModule(models.as_datasets(data), val, batch_size=16)
    fitted.fit(module, datamodule=datamodule)
    return module, fitted


def on_flower(
    folder, make_module, data, federation, rounds=3, callbacks=list, val=None, change=None, options=(), limit=5,
    server_callbacks=(), grids=None, server_options=(), key=None, held_out=None, patience=1,
):  # fmt: skip
    """Fits with two nodes: node 11 has every other client, node 12 the rest.

    Args:
        folder: Where both sides store their state.
        make_module: Makes the module.
        data: Tensors by client.
        federation: Makes the federation.
        rounds: Number of rounds.
        callbacks: Makes the callbacks on both sides.
        val: The server's validation data.
        change: See `FakeGrid`.
        options: Trainer arguments on both sides.
        limit: Time limit of a round in seconds, or a `Deadline`.
        server_callbacks: Additional callbacks on the server.
        grids: A list that receives the grid.
        server_options: Additional Trainer arguments on the server.
        key: The server's key.
        held_out: The clients' validation and test data.
        patience: Seconds to wait until all clients are connected.

    Returns:
        The server's module, the server's Trainer, the transport and the grid.
    """
    apps = {
        node: client_app(
            federation(), make_module, clients_of(data, held_out=held_out), {**OPTIONS, **dict(options)},
            callbacks=callbacks(), store=folder / f"{node}",
        )
        for node in (11, 12)
    }  # fmt: skip
    grid = FakeGrid(
        apps, {node: {"partition-id": index, "num-partitions": 2} for index, node in enumerate(apps)}, change
    )
    if grids is not None:
        grids.append(grid)
    transport = FlowerTransport(
        grid, limit if isinstance(limit, Deadline) else Deadline(limit, reconnect=0), poll=0.01, key=key
    )
    module = make_module()
    trainer = run_server(
        federation(), module, val, {**OPTIONS, **dict(options), **dict(server_options), "max_epochs": rounds},
        transport, transport.await_clients(len(data), patience), folder / "server", [*callbacks(), *server_callbacks],
    )  # fmt: skip
    return module, trainer, transport, grid


def replay(trainer, folder, case, rounds):
    """Fits in one process in the recorded order of arrival. Returns the module and the lines of the order."""
    order = folder / "order.jsonl"
    buffer = case.federation().server.rule.buffer
    federation = case.federation().replace(method=FedBuff(buffer, replay=str(order)))
    module, _ = in_process(trainer, case.module, case.data(SIZES), federation, rounds)
    return module, [json.loads(line) for line in order.read_text().splitlines()]


@dataclass
class Case:
    """A federation with module and data; `has_more_messages` if Flower needs more messages than one process."""

    federation: Callable
    module: Callable = lambda: models.Module(models.dropout_mlp(), models.momentum)
    data: Callable = models.vectors
    callbacks: Callable = list
    options: dict = field(default_factory=dict)
    has_more_messages: bool = False
    held_out: Callable = lambda: None


class Sleeping(models.Module):
    """One visit in round 1 sleeps once; the environment names the client."""

    def training_step(self, batch, batch_idx):
        client, seconds, path = os.environ.get("SLEEPER", "::").split(":")
        federation = find_federation(self.trainer)
        if self.trainer.current_epoch == 1 and federation.current_client == client and not Path(path).exists():
            Path(path).touch()
            time.sleep(float(seconds) if "Federated" not in type(self.trainer).__name__ else 0)
        return super().training_step(batch, batch_idx)


def sleeping_module():
    return Sleeping(models.dropout_mlp(), models.momentum)


def wide_module():
    """1.5 MB, so that a connection can break in the middle of a message."""
    torch.manual_seed(0)
    return Sleeping(nn.Sequential(nn.Linear(6, 40_000), nn.ReLU(), nn.Linear(40_000, 3)), models.momentum)


def few_scenes(sizes):
    return models.scenes({name: 4 + index for index, name in enumerate(sizes)})


def norm_module():
    return models.Module(models.norm_mlp(), models.adam)


def head_module():
    torch.manual_seed(0)
    return ClassificationTask(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12)), num_classes=12, head="sampled_softmax", lr=0.05
    )


def warm_up(optimizer):
    return {
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
        "interval": "step",
    }


def milestones(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.3)


def base_and_head():
    return models.Module(models.BaseAndHead(), models.momentum)


def plain_module():
    return models.Module(models.mlp(), models.momentum)


def cnn_module():
    return models.Module(models.cnn(), models.momentum)


def deeplab_module():
    return models.Module(models.deeplab(), models.momentum)


CASES = {
    "sleeping": Case(lambda: Federation(seed=1), sleeping_module),
    "fedavg": Case(lambda: Federation("fedavg", local_epochs=2, seed=3)),
    "deeplab": Case(lambda: Federation(batch_norm="recalibrate"), deeplab_module, few_scenes),
    "fedavg, stragglers, two of three": Case(lambda: Federation(
        local_epochs=3, availability=Availability(stragglers=0.5), clients_per_round=2, batch_norm="average", seed=1)),
    "dropout": Case(lambda: Federation(availability=Availability(client_dropout=0.4), seed=2)),
    "fedavgm": Case(lambda: Federation("fedavgm")),
    "fedadam": Case(lambda: Federation("fedadam")),
    "fairavg": Case(lambda: Federation("fairavg")),
    "fedprox": Case(lambda: Federation("fedprox")),
    "fedatt": Case(lambda: Federation("fedatt")),
    "scaffold": Case(lambda: Federation("scaffold", clients_per_round=2)),
    "fednova": Case(lambda: Federation("fednova")),
    "feddyn": Case(lambda: Federation("feddyn", clients_per_round=2)),
    "qffl": Case(lambda: Federation("qffl")),
    "ditto": Case(lambda: Federation("ditto")),
    "moon": Case(lambda: Federation("moon"), base_and_head),
    "fedala": Case(lambda: Federation("fedala")),
    "krum": Case(lambda: Federation("krum")),
    "attacked": Case(lambda: Federation("centered_clipping", steps=[SignFlip(["ann"]), IPM(["cid"])])),
    "fltrust": Case(lambda: Federation("fltrust:trusted=bob", clients_per_round=1)),
    **({"private": Case(lambda: Federation(
        "fedavgm", clients_per_round=2,
        steps=[KnownKey(0.5, 1e-3, noise_multiplier=0.5, adaptive=True, count_noise=0.4, key=5)]))}
       if find_spec("dp_accounting") else {}),
    "secure sum": Case(
        lambda: Federation("fedavgm", steps=[MaxSamples(40), SecureSum(5.0)], seed=3), has_more_messages=True),
    "fesem": Case(lambda: Federation("fesem")),
    "fedma": Case(
        lambda: Federation("fedma"), plain_module,
        callbacks=lambda: [LayerwiseTraining(example_input=torch.zeros(2, 6))]),
    "fedmargin": Case(lambda: Federation("fedmargin")),
    "recalibrate": Case(lambda: Federation(batch_norm="recalibrate"), norm_module),
    "frozen": Case(lambda: Federation(batch_norm="frozen", frozen=["net.0.*"]), norm_module),
    "silobn": Case(lambda: Federation("silobn"), norm_module),
    "silobn, pooled": Case(lambda: Federation("silobn:unseen=pooled"), norm_module),
    "fixbn": Case(lambda: Federation("fixbn:after=1"), norm_module),
    "fedper": Case(lambda: Federation(FedPer("net.head.*")), base_and_head),
    "fedbn": Case(lambda: Federation(FedBN()), norm_module),
    "kept optimizers": Case(lambda: Federation(optimizer_state="keep"), norm_module),
    "kept heads": Case(
        lambda: Federation(FedPer("net.head.*"), optimizer_state="keep", batch_norm="average", seed=1), base_and_head
    ),
    "fedss": Case(lambda: Federation(FedSS(num_negatives=3)), head_module),
    "fedfusion": Case(lambda: Federation(FedFusion(operator="multi"), batch_norm="average"), cnn_module, models.images),
    "last local prototypes": Case(
        lambda: Federation("fedmargin"), callbacks=lambda: [ClassPrototypes(lpm_before="last_local")]),
    "a schedule of rounds": Case(Federation, lambda: models.Module(models.mlp(), models.momentum, milestones)),
    "a schedule of steps": Case(Federation, lambda: models.Module(models.mlp(), models.adam, warm_up)),
    "two optimizers": Case(Federation, models.TwoOptimizers),
    "bf16": Case(Federation, options={"precision": "bf16-mixed"}),
    "overfitting": Case(lambda: Federation(local_epochs=2, seed=3), options={"overfit_batches": 1}),
}  # fmt: skip

ALL_CASES = {
    **CASES,
    "evaluated": Case(
        lambda: Federation(seed=1),
        evaluations.Classifier,
        callbacks=lambda: [ClientEvaluation(folder=os.environ.get("TABLES"))],
        held_out=lambda: evaluations.held_out(models.vectors, 1),
    ),
    "buffered": Case(lambda: Federation(FedBuff(1), optimizer_state="keep", seed=3), sleeping_module),
    "padded": Case(lambda: Federation(seed=1), callbacks=lambda: [Padded({"ann": 0, "bob": 1})]),
    "wide": Case(lambda: Federation(seed=1), wide_module),
    "two sites": Case(
        lambda: Federation(local_epochs=2, seed=3), data=lambda _: models.vectors({"site-1": 33, "site-2": 20})
    ),
}
"""Also evaluation at the clients, asynchronous rounds, and a case different from one process: a client's answers exceed
the size limit."""
