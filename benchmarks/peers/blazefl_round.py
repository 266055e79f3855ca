"""`blazefl` with FedAvg: one client per core, in threads with one PyTorch thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from torch import Tensor, nn
from work import RATE, WORKS, Work, arguments, batches_of, now, save


class Networks:
    """A model selector with one network."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def select_model(self, model_name: str) -> nn.Module:
        return self.work.make_network()


class Clients:
    """A partitioned data set with lists of batches as loaders."""

    def __init__(self, work: Work, data: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.batches = [list(batches_of(work, one)) for one in data]

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: Any = None) -> list[Any]:
        return self.batches[cid]


class Trainer(FedAvgThreadPoolClientTrainer):  # type: ignore[misc]
    """Clients in threads, without a progress bar."""

    def progress_fn(self, it: Any) -> Any:
        return it


def main() -> None:
    given = arguments()
    work = WORKS[given.work]
    clients = Clients(work, [work.make_data(client) for client in range(given.clients)])
    common = {
        "model_selector": Networks(work),
        "model_name": given.work,
        "dataset": clients,
        "device": "cpu",
        "seed": 0,
    }
    common |= {"num_clients": given.clients, "batch_size": work.batch_size}
    server = FedAvgBaseServerHandler(**common, global_round=given.rounds, sample_ratio=1.0)
    trainer = Trainer(**common, epochs=1, lr=RATE, num_parallels=2)
    stamps = []
    while not server.if_stop():
        stamps.append(now())
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
    save(given.out, [*stamps, now()], server.model)


if __name__ == "__main__":
    main()
