"""Bytes and seconds of a round's secure sum compared with a plain average, by parameters and clients.

The messages are the same as between Flower's clients and server. The seconds are for the computation of messages: one
client's part, and the server's part without lost clients, and with the largest number of lost clients allowed by the
threshold. The network, the training and Flower itself are excluded.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import load_json, machine, parser, prepare, save_json, table, write_section

from lightning_fed.backends.wire.secure_sum_packets import (
    REPLY_BYTES,
    SumRequest,
    context_of,
    write_sum_reply,
    write_sum_request,
)
from lightning_fed.backends.wire.secure_sum_protocol import (
    SEALED,
    Share,
    add_masks,
    find_masks,
    make_secrets,
    open_share,
    share_secrets,
)
from lightning_fed.privacy import Ring, SecureSum

SIZES = {"1.7 million": 1_663_370, "12 million": 12_000_000}  # McMahan's CNN, and a ResNet or DeepLab
CLIENTS = (5, 10, 50)
CONTEXT = context_of("0a", 0)


def seconds_of(function: Callable[[], Any], repetitions: int) -> tuple[float, Any]:
    """Median CPU seconds per call, after a warm-up, and the last result."""
    seconds, result = [], function()
    for _ in range(repetitions):
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), result


def measure(size: int, count: int, repetitions: int) -> dict[str, Any]:
    """Measures a round with ``count`` clients and vectors with ``size`` numbers."""
    least, names = SecureSum(1.0).least_clients(count), list(range(count))
    secrets = {name: make_secrets() for name in names}
    public = {name: secret.public for name, secret in secrets.items()}

    def setup() -> Any:
        made = make_secrets()
        return made.public, share_secrets(secrets[0], 0, public, least, CONTEXT)

    seconds = {"keys": seconds_of(setup, repetitions)[0]}
    sealed, own = {}, {}
    for name in names:
        sealed[name], own[name] = share_secrets(secrets[name], name, public, least, CONTEXT)
    step = torch.randn(size, generator=torch.Generator().manual_seed(0)) * (0.9 / size**0.5)
    ring, generator = Ring(1.0, count), np.random.default_rng(0)
    seconds["round"], encoded = seconds_of(lambda: ring.encode(step, generator), repetitions)
    vector, others = encoded.numpy().view(np.uint32).copy(), [public[name] for name in names[1:]]
    seconds["mask"], _ = seconds_of(lambda: add_masks(vector, secrets[0], others, CONTEXT), repetitions)

    def opened(holder: int) -> dict[int, Share]:
        sealing = secrets[holder].sealing
        return {
            name: own[name]
            if name == holder
            else open_share(sealing, public[name], public[holder], sealed[name][holder], CONTEXT)
            for name in names
        }

    seconds["open"], _ = seconds_of(lambda: opened(0), repetitions)
    positions = dict(zip(names, names, strict=True))

    def unmasked(survivors: list[int]) -> float:
        shares = {
            holder: {name: share.seed if name in survivors else share.pairing for name, share in opened(holder).items()}
            for holder in survivors
        }
        find = lambda: find_masks(np.zeros(size, np.uint32), public, survivors, shares, positions, least, CONTEXT)  # noqa: E731
        return seconds_of(find, repetitions)[0]

    seconds |= {"server, none": unmasked(names), "server, most": unmasked(names[count - least :])}

    peers = tuple(names)
    keys = SumRequest("keys", "0a", 0, 0, least)
    share = SumRequest("shares", "0a", 0, 0, least, peers, (), tuple(public.values()))
    hand_over = SumRequest("open", "0a", 0, 0, least, peers, (), (bytes(SEALED),) * count)
    unmask = SumRequest("unmask", "0a", 0, 0, least, peers, (True,) * count)
    requests = (keys, share, hand_over, unmask)
    down = [write_sum_request(request) for request in requests]
    up = [
        write_sum_reply(request, (bytes(REPLY_BYTES[request.stage]),) * (len(request.peers) or 1))
        for request in requests
    ]
    return {
        "seconds": seconds,
        "down": sum(len(packet.data) + len(packet.text) for packet in down),
        "up": sum(len(packet.data) + len(packet.text) for packet in up) + 4,  # the sum also includes the weight
        "least": least,
    }


def report(results: dict[str, Any], threads: int) -> str:
    load = os.getloadavg()[0]
    busy = f"; other programs were running, load average {load:.1f}" if load > threads + 0.5 else ""
    header = [
        "", "model, MB each way", "more down, kB", "more up, kB", "a client, s", "of it masks, s",
        "server, nobody lost, s", "server, most lost, s",
    ]  # fmt: skip
    body = []
    for words, size in SIZES.items():
        for count in CLIENTS:
            result = results.get(f"{words}, {count}")
            if result is None:
                continue
            spent = result["seconds"]
            client = sum(spent[name] for name in ("keys", "round", "mask", "open"))
            more = [f"{result[name] / 1e3:.1f}" for name in ("down", "up")]
            named = f"{words} parameters, {count} clients ({count - result['least']} may be lost)"
            numbers = [client, spent["mask"], spent["server, none"], spent["server, most"]]
            body.append([named, f"{4 * size / 1e6:.1f}", *more, *(f"{number:.3g}" for number in numbers)])
    about = (
        f"`python benchmarks/secure_sum_cost.py --out benchmarks/results/method_costs.md`."
        f" {machine(threads)}{busy}. Per round,"
        " medians of three repetitions; seconds are the process' own. The *model* is as many bytes in float32 as in"
        " masked whole numbers; *more* are all messages but the visit's, to and from one client. A"
        " client's seconds are those of keys, shares, rounding to whole numbers, masks, and opening the others' shares."
        " A threshold of two thirds. The network, the training and Flower are left out."
    )
    return f"{about}\n\n{table(header, body)}"


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], data=False).parse_args()
    prepare(arguments)
    results: dict[str, Any] = load_json(arguments.runs / "secure_sum_cost.json") or {}
    for words, size in SIZES.items():
        for count in CLIENTS[:1] if arguments.quick else CLIENTS:
            measured = measure(size // (1000 if arguments.quick else 1), count, 1 if arguments.quick else 3)
            results[f"{words}, {count}"] = measured
            print(words, count, measured["seconds"], flush=True)
            save_json(arguments.runs / "secure_sum_cost.json", results)
    write_section(arguments.out, "secure-sum-cost", report(results, arguments.threads))


if __name__ == "__main__":
    main()
