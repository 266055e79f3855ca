"""Loop by hand: one model, a copy of the global weights before each client, a running sum in float64."""

from __future__ import annotations

import torch
from work import WORKS, arguments, now, save, visit


def main() -> None:
    given = arguments()
    work = WORKS[given.work]
    network = work.make_network()
    data = [work.make_data(client) for client in range(given.clients)]
    stamps = []
    for _ in range(given.rounds):
        stamps.append(now())
        start = [value.detach().clone() for value in network.parameters()]
        total = [torch.zeros_like(value, dtype=torch.float64) for value in start]
        for own in data:
            with torch.no_grad():
                for value, first in zip(network.parameters(), start, strict=True):
                    value.copy_(first)
            visit(network, work, own)
            with torch.no_grad():
                for value, one in zip(network.parameters(), total, strict=True):
                    one.add_(value)
        with torch.no_grad():
            for value, one in zip(network.parameters(), total, strict=True):
                value.copy_(one / given.clients)
    save(given.out, [*stamps, now()], network)


if __name__ == "__main__":
    main()
