"""Lightning: one Trainer on all batches without federation, one Trainer per client, and `FederatedTrainer`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from work import RATE, WORKS, Work, arguments, batches_of, now, save

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


class Net(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Stamps(L.Callback):
    """Start times of rounds, and the end of the last round."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.sent: float | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamps.append(now())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamps.append(now())
        up, down = (trainer.callback_metrics.get(f"comm/{way}_bytes") for way in ("up", "down"))
        self.sent = None if up is None or down is None else float(up + down)


class Batches:
    def __init__(self, work: Work, clients: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.work = work
        self.clients = clients

    def __len__(self) -> int:
        return self.work.batches * len(self.clients)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for data in self.clients:
            yield from batches_of(self.work, data)


def trainers(net: Net, work: Work, clients: int, rounds: int) -> list[float]:
    """Trains with a new Trainer for every visit."""
    data, stamps = [work.make_data(client) for client in range(clients)], []
    for _ in range(rounds):
        stamps.append(now())
        start = [value.detach().clone() for value in net.parameters()]
        total = [torch.zeros_like(value, dtype=torch.float64) for value in start]
        for own in data:
            with torch.no_grad():
                for value, first in zip(net.parameters(), start, strict=True):
                    value.copy_(first)
            L.Trainer(max_epochs=1, **QUIET).fit(net, Batches(work, [own]))
            with torch.no_grad():
                for value, one in zip(net.parameters(), total, strict=True):
                    one.add_(value)
        with torch.no_grad():
            for value, one in zip(net.parameters(), total, strict=True):
                value.copy_(one / clients)
    return [*stamps, now()]


def main() -> None:
    given = arguments()
    warnings.filterwarnings("ignore")
    work = WORKS[given.work]
    net = Net(work.make_network())
    watch = Stamps()
    if given.contestant == "trainers":
        save(given.out, trainers(net, work, given.clients, given.rounds), net)
        return
    if given.contestant == "trainer":
        data = Batches(work, [work.make_data(client) for client in range(given.clients)])
        L.Trainer(max_epochs=given.rounds, callbacks=[watch], **QUIET).fit(net, data)
        save(given.out, watch.stamps, net)
        return
    from lightning_fed import FederatedDataModule, FederatedTrainer
    from lightning_fed.privacy import CentralDP

    options: dict[str, Any] = {}
    if given.contestant == "ours_lightning":
        options = {"visits": "lightning"}
    if given.contestant == "ours_parallel":
        options = {"strategy": "client_parallel", "devices": 2}
    if given.contestant == "ours_fastest":
        options = {"visits": "fastest"}
    if given.contestant == "ours_private":
        options = {"steps": [CentralDP(clip=1.0, delta=1e-6, noise_multiplier=1.0, sampling="fixed")]}
    trainer = FederatedTrainer(max_rounds=given.rounds, callbacks=[watch], seed=0, **{**QUIET, **options})
    clients = {f"{client:04}": TensorDataset(*work.make_data(client)) for client in range(given.clients)}
    trainer.fit(net, FederatedDataModule(clients, batch_size=work.batch_size, shuffle=False))
    if trainer.is_global_zero:
        save(given.out, watch.stamps, net, watch.sent)


if __name__ == "__main__":
    main()
