"""NVFLARE's simulator: two client processes at once. With more clients, every visit starts a new process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nvflare.apis.executor import Executor
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob
from work import WORKS, arguments, now, save, visit

_data: dict[str, Any] = {}


def parameters(network: torch.nn.Module) -> dict[str, Any]:
    return {name: value.detach().numpy() for name, value in network.named_parameters()}


def load(network: torch.nn.Module, values: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, value in network.named_parameters():
            value.copy_(torch.as_tensor(values[name]))


class Client(Executor):  # type: ignore[misc]
    """Trains a site's client."""

    def __init__(self, work: str) -> None:
        super().__init__()
        self.work = work

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: Any, abort_signal: Any) -> Shareable:
        torch.set_num_threads(1)
        work, site = WORKS[self.work], fl_ctx.get_identity_name()
        if site not in _data:
            _data[site] = work.make_data(int(site.rpartition("-")[2]) - 1)
        network = work.make_network()
        load(network, FLModelUtils.from_shareable(shareable).params)
        visit(network, work, _data[site])
        return FLModelUtils.to_shareable(FLModel(ParamsType.FULL, parameters(network)))


class Stamped(FedAvg):  # type: ignore[misc]
    """FedAvg with start times of rounds."""

    def __init__(self, work: str, num_clients: int, num_rounds: int, out: str) -> None:
        super().__init__(num_clients=num_clients, num_rounds=num_rounds, persistor_id="")
        self.work, self.out = work, out
        self.stamps: list[float] = []

    def run(self) -> None:
        self.model = parameters(WORKS[self.work].make_network())
        self.stamps.append(now())
        super().run()

    def save_model(self, model: FLModel) -> None:
        self.stamps.append(now())
        network = WORKS[self.work].make_network()
        load(network, model.params)
        save(self.out, self.stamps, network)


def main() -> None:
    given = arguments()
    job = FedJob("peers")
    job.to_server(Stamped(given.work, given.clients, given.rounds, given.out))
    for number in range(given.clients):
        job.to(Client(given.work), f"site-{number + 1}", tasks=["train"])
    job.simulator_run(str(Path(given.out).with_name("simulator")), threads=2)


if __name__ == "__main__":
    main()
