"""Peak memory of the server in a round, for every rule, relative to the model size.

Each rule runs in a separate forked process: a server starts a round, sends the model to the clients and receives the
updates one after another, like updates from other machines. The script measures the increase in the process's peak
resident memory above the memory with only the global model. The increase includes the current update.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from common import machine, parser, peak_bytes, prepare, table, write_section

from lightning_fed.algorithms import build_method
from lightning_fed.messages import ClientUpdate
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps import Chain

RULES = (
    "fedavg", "fairavg", "fedavgm", "fedadam", "fedatt", "normclipping", "centeredclipping", "median", "trimmedmean",
    "geometricmedian", "krum", "multikrum", "bulyan", "fltrust:trusted=client-0", "fesem",
)  # fmt: skip
ENTRIES, PARAMETERS, CLIENTS = 10, 12_500_000, 8


def round_of(rule: str, parameters: int, clients: int) -> float:
    """Increase in peak memory during a round, in models."""
    generator = torch.Generator().manual_seed(0)
    state = {f"{entry}.weight": torch.randn(parameters // ENTRIES, generator=generator) for entry in range(ENTRIES)}
    method = build_method(rule)
    server = Server(Chain(method.aggregator, method.steps))
    before = peak_bytes()
    server.start_round(RoundInfo(0), state)
    for number in range(clients):
        client = f"client-{number}"
        server.sent(client, server.prepare(client))
        update = ClientUpdate(client, 10 + number, {name: value + 0.01 * number for name, value in state.items()})
        assert server.count(update)
        assert server.accept(update), server.report.failed
        del update
    assert server.finish_round() is not None
    return (peak_bytes() - before) / (4 * parameters)


def in_child(rule: str, parameters: int, clients: int) -> float:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writing, json.dumps(round_of(rule, parameters, clients)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        if status:
            raise RuntimeError(f"The round of {rule} has failed.")
        return float(json.loads(answer.read()))


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], data=False).parse_args()
    prepare(arguments)
    parameters = PARAMETERS // 10 if arguments.quick else PARAMETERS
    rows: list[list[Any]] = [
        [f"`{rule}`", *(f"{in_child(rule, parameters, clients):.1f}" for clients in (CLIENTS, 2 * CLIENTS))]
        for rule in RULES
    ]
    text = (
        f"`python benchmarks/rule_memory.py --out benchmarks/results/method_costs.md`."
        f" {machine(arguments.threads)}. A model of"
        f" {4 * parameters / 1e6:.0f} MB in {ENTRIES} entries.\n\n"
    )
    header = ["rule", f"{CLIENTS} clients", f"{2 * CLIENTS} clients"]
    write_section(arguments.out, "rule memory", text + table(header, rows))


if __name__ == "__main__":
    main()
