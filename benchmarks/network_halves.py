"""Both halves of the federation in `network_latency.py`: the training, and the recorded times.

The clocks are in the code common to all networks: in the server's exchange of a round's packets and answers, and in a
client's answer and training.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.backends.wire.runner import ClientRunner
from lightning_fed.backends.wire.transport import Transport
from lightning_fed.tasks import ClassificationTask
from lightning_fed.tasks.networks import build_network

CLIENTS, SAMPLES, BATCH = ("site-1", "site-2"), 300, 20
FEDERATION = Federation("fedavg", local_epochs=1, seed=0)
OPTIONS = {"accelerator": "cpu", "logger": False}


def dataset(client: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(CLIENTS.index(client))
    return TensorDataset(
        torch.randn(SAMPLES, 1, 28, 28, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    )


def model() -> L.LightningModule:
    return ClassificationTask(build_network("mcmahan_cnn", num_classes=10), num_classes=10, lr=0.05)


def server_half(make: Callable[..., Any], **options: Any) -> Any:
    """Server half with recorded times: start of a round, sent packets, and each answer."""
    ask = Transport.ask

    def watched(self: Transport, kind: str, packets: Iterator[Any], round: int, again: Any = None) -> Iterator[Any]:
        def sent() -> Iterator[Any]:
            yield from packets
            note("sent")

        note("round")
        for answer in ask(self, kind, sent(), round, again):
            note("answered")
            yield answer

    Transport.ask = watched
    trainer = {**OPTIONS, "max_epochs": int(os.environ["LATENCY_ROUNDS"])}
    folder = Path(os.environ["LATENCY_FOLDER"]) / "run"
    return make(FEDERATION, model, None, trainer, clients=CLIENTS, folder=folder, time_limit=300, **options)


def client_half(make: Callable[..., Any]) -> Any:
    """Client half with recorded times: arrival of a packet, training, and answer."""
    for name, begins, ends in (("answer", "arrives", "leaves"), ("_fit", "fit", "trained")):
        setattr(ClientRunner, name, timed(getattr(ClientRunner, name), begins, ends))
    torch.set_num_threads(1)
    return make(FEDERATION, model, data_of, OPTIONS)


def data_of(node: Mapping[str, Any]) -> FederatedDataModule:
    """Data for an NVFLARE site; on Flower for both sites, because a node selects the node's site."""
    sites = [node["site"]] if "site" in node else CLIENTS
    return FederatedDataModule({site: dataset(site) for site in sites}, batch_size=BATCH)


def timed(function: Callable[..., Any], begins: str, ends: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        note(begins)
        result = function(*arguments)
        note(ends)
        return result

    return call


def note(what: str) -> None:
    line = json.dumps({"what": what, "time": time.time(), "process": os.getpid()})
    with (Path(os.environ["LATENCY_FOLDER"]) / "times").open("a") as file:
        file.write(f"{line}\n")
