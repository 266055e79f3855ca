"""Flower's simulation (`flwr`) on Ray: one client process per core, with one thread each."""

from __future__ import annotations

import os
from collections.abc import Iterable

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_DEDUP_LOGS="0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import WORKS, arguments, now, save, visit

GIVEN = arguments()
WORK = WORKS[GIVEN.work]
STAMPS: list[float] = []
client = ClientApp()
server = ServerApp()
_kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    number = int(context.node_config["partition-id"])
    if number not in _kept:
        _kept[number] = WORK.make_data(number)
    network = WORK.make_network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    visit(network, WORK, _kept[number])
    answer = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": WORK.samples})}
    return Message(content=RecordDict(answer), reply_to=message)


class Stamped(FedAvg):
    """FedAvg with start times of rounds."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        STAMPS.append(now())
        return super().configure_train(server_round, arrays, config, grid)


@server.main()
def main(grid: Grid, context: Context) -> None:
    network = WORK.make_network()
    strategy = Stamped(fraction_evaluate=0.0, min_available_nodes=GIVEN.clients)
    arrays = ArrayRecord(network.state_dict())
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=GIVEN.rounds, timeout=3600)
    STAMPS.append(now())
    network.load_state_dict(result.arrays.to_torch_state_dict())
    save(GIVEN.out, STAMPS, network)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=GIVEN.clients, backend_config=resources)
