"""Seconds per round, clients per second and peak memory on a GPU, for all ways to train a round's clients.

A loop by hand, a plain Trainer, ordinary, fused and vectorised visits, CUDA graphs, and several processes train the
same networks on the same data with the same steps; a check compares the final weights. The variants alternate by
repetition, with ratios within a repetition. The script downloads nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import QUIET, parser, prepare, save_json, table, write_section
from peers.work import RATE, Work, batches_of, cnn, mlp, resnet18
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import ClientParallelStrategy, FederatedDataModule, FederatedTrainer, Vectorized

HERE = Path(__file__).parent
DEVICE = torch.device("cuda", 0)


def deeplab50() -> nn.Module:
    from segmentation_models_pytorch import DeepLabV3Plus

    return DeepLabV3Plus("resnet50", encoder_weights=None, classes=12)


WORKS = {
    "mlp": ("MLP 784-64-10", 64, Work(mlp, (1, 28, 28), 10, 20, 10)),
    "cnn": ("CNN of McMahan et al.", 32, Work(cnn, (1, 28, 28), 10, 20, 10)),
    "resnet18": ("ResNet-18 with GroupNorm at 32x32", 10, Work(resnet18, (3, 32, 32), 10, 32, 5)),
    "deeplab": ("DeepLabV3+ (ResNet-50) at 256x256", 4, Work(deeplab50, (3, 256, 256), 12, 8, 4, dense=True)),
}
STACKS = {"mlp": (4, 16, 64), "cnn": (4, 16, 32), "resnet18": (), "deeplab": ()}
PROCESSES = (2, 4)


class Net(L.LightningModule):
    def __init__(self, network: nn.Module, forward: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network
        self.run = [network if forward is None else forward]  # a list: a compiled copy would duplicate the state

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.run[0](batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=RATE)


class Stamps(L.Callback):
    """Start times of rounds, and the end of the last round, after device synchronisation."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamps.append(now())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamps.append(now())


class Batches:
    def __init__(self, work: Work, clients: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.work, self.clients = work, clients

    def __len__(self) -> int:
        return self.work.batches * len(self.clients)

    def __iter__(self) -> Any:
        for data in self.clients:
            yield from batches_of(self.work, data)


def now() -> float:
    torch.cuda.synchronize()  # kernels run asynchronously
    return time.perf_counter()


class Bench:
    """Variants for one network: each method trains some rounds and returns the time stamps."""

    def __init__(self, key: str) -> None:
        _, self.count, self.work = WORKS[key]
        self.data = [self.work.make_data(client) for client in range(self.count)]
        self.start = self.work.make_network()
        self.compiled: tuple[nn.Module, nn.Module] | None = None

    def by_hand(self, rounds: int) -> tuple[list[float], nn.Module]:
        """Loop by hand: one network, a copy of the global values before each client, a running sum in float64."""
        net, stamps = copy.deepcopy(self.start).to(DEVICE), []
        entries = [value for value in net.state_dict().values() if value.is_floating_point()]
        for _ in range(rounds):
            stamps.append(now())
            begin = [value.clone() for value in entries]
            total = [torch.zeros_like(value, dtype=torch.float64) for value in entries]
            for data in self.data:
                for value, first in zip(entries, begin, strict=True):
                    value.copy_(first)
                optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
                for inputs, targets in batches_of(self.work, data):
                    optimizer.zero_grad()
                    F.cross_entropy(net(inputs.to(DEVICE)), targets.to(DEVICE)).backward()
                    optimizer.step()
                for value, one in zip(entries, total, strict=True):
                    one.add_(value)
            for value, one in zip(entries, total, strict=True):
                value.copy_(one / self.count)
        return [*stamps, now()], net

    def trainer(self, rounds: int) -> tuple[list[float], nn.Module]:
        """Plain Trainer on all batches, without federation."""
        watch, net = Stamps(), Net(copy.deepcopy(self.start))
        L.Trainer(max_epochs=rounds, callbacks=[watch], **on_gpu()).fit(net, Batches(self.work, self.data))
        return watch.stamps, net.network

    def federated(self, rounds: int, graphs: bool = False, **options: Any) -> tuple[list[float], nn.Module]:
        """Federated Trainer; with ``graphs`` through CUDA graphs."""
        watch, network, forward = Stamps(), copy.deepcopy(self.start), None
        if graphs:
            if self.compiled is None:
                self.compiled = network, torch.compile(network, mode="reduce-overhead", dynamic=False)
            network, forward = self.compiled
            network.load_state_dict(self.start.state_dict())
        net = Net(network, forward)
        trainer = FederatedTrainer(
            max_rounds=rounds, callbacks=[watch], seed=0, batch_norm="average", **{**on_gpu(), **options}
        )
        clients = {f"{client:04}": TensorDataset(*data) for client, data in enumerate(self.data)}
        trainer.fit(net, FederatedDataModule(clients, batch_size=self.work.batch_size, shuffle=False))
        return watch.stamps, net.network


def on_gpu() -> dict[str, Any]:
    return {**QUIET, "accelerator": "cuda", "devices": 1}


def contestants(key: str, bench: Bench) -> dict[str, Callable[[int], tuple[list[float], nn.Module]]]:
    """Name to function for training in this process."""
    found: dict[str, Callable[[int], tuple[list[float], nn.Module]]] = {
        "PyTorch loop by hand": bench.by_hand,
        "plain `L.Trainer`, no federation": bench.trainer,
        'ordinary visits, `visits="lightning"`': lambda rounds: bench.federated(rounds, visits="lightning"),
        'fused visits, `visits="fused"`': lambda rounds: bench.federated(rounds, visits="fused"),
        "fused visits, CUDA graphs": lambda rounds: bench.federated(rounds, True, visits="fused"),
    }
    for size in STACKS[key]:
        found[f"vectorised visits, `Vectorized({size})`"] = lambda rounds, size=size: bench.federated(
            rounds, visits=Vectorized(size)
        )
    return found


def in_processes(key: str, number: int, rounds: int, devices: int) -> dict[str, Any]:
    """Time stamps and weights from several processes, on a common device or on one device each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number), __file__,
            "--process", key, str(rounds), str(devices), str(out),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            print(done.stderr[-2000:])
            return {}
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def process(key: str, rounds: int, devices: int, out: Path) -> None:
    bench, number = Bench(key), int(os.environ["WORLD_SIZE"])
    if devices == 1:  # NCCL refuses two processes on a device
        strategy = ClientParallelStrategy(parallel_devices=[DEVICE] * number, process_group_backend="gloo")
        options: dict[str, Any] = {"devices": "auto"}
    else:
        strategy, options = ClientParallelStrategy(), {"devices": number}
    stamps, net = bench.federated(rounds, strategy=strategy, **options)
    if int(os.environ["RANK"]) == 0:
        memory = torch.cuda.max_memory_allocated() * number
        save_json(out, {"stamps": stamps, "weights": weights_of(net), "memory": memory})


def weights_of(net: nn.Module) -> list[float]:
    flat = torch.cat([value.detach().flatten() for value in net.parameters()])
    some: list[float] = flat[:: max(1, len(flat) // 2000)].double().tolist()
    return some


def seconds_of(stamps: Sequence[float]) -> list[float]:
    """Seconds per round without the first round, because libraries and compilers start in the first round."""
    return [end - begin for begin, end in itertools.pairwise(stamps[1:])]


def measure(key: str, arguments: argparse.Namespace) -> str:
    title, count, work = WORKS[key]
    if arguments.quick:
        count = min(count, 4)
        WORKS[key] = (title, count, replace(work, batches=2))
    bench = Bench(key)
    made = contestants(key, bench)
    times: dict[str, list[list[float]]] = {name: [] for name in made}
    memory: dict[str, float] = {}
    weights: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for _ in range(arguments.repetitions):
        for name, run in made.items():
            if name in failed:
                continue
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            try:
                stamps, net = run(arguments.rounds + 1)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                print(f"{key} {name}: {failed[name]}", flush=True)
                continue
            times[name].append(seconds_of(stamps))
            memory[name] = torch.cuda.max_memory_allocated() - start
            weights[name] = weights_of(net)
            print(f"{key} {name}: {statistics.median(times[name][-1]):.4f} s", flush=True)
    bench.compiled = None
    torch.compiler.reset()
    several = [(number, 1) for number in PROCESSES] + [
        (number, number) for number in (2, 4, 8) if number <= torch.cuda.device_count()
    ]
    for number, devices in [] if arguments.quick else several:
        name = f"{number} processes on {'one device' if devices == 1 else f'{devices} devices'}"
        result = in_processes(key, number, arguments.rounds + 1, devices)
        if result:
            times[name] = [seconds_of(result["stamps"])]
            memory[name], weights[name] = result["memory"], result["weights"]
            print(f"{key} {name}: {statistics.median(times[name][-1]):.4f} s", flush=True)
        else:
            failed[name] = "did not run"
    return report(title, count, work, times, memory, weights, failed)


def report(
    title: str,
    count: int,
    work: Work,
    times: dict[str, list[list[float]]],
    memory: dict[str, float],
    weights: dict[str, list[float]],
    failed: dict[str, str],
) -> str:
    """Table for one network, with a note on differing weights."""
    base = [statistics.median(part) for part in times["PyTorch loop by hand"]]
    rows, notes = [], []
    for name, parts in times.items():
        if not parts:
            continue
        medians = [statistics.median(part) for part in parts]
        against = base if len(medians) == len(base) else [statistics.median(base)] * len(medians)
        ratios = sorted(own / hand for own, hand in zip(medians, against, strict=True))
        seconds = statistics.median(medians)
        rows.append(
            (
                name,
                f"{seconds:.4f}",
                f"{count / seconds:.0f}",
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                f"{memory[name] / 2**20:.0f}",
            )
        )
    hand = torch.tensor(weights["PyTorch loop by hand"])
    trained = {name: torch.tensor(own) for name, own in weights.items() if "no federation" not in name}
    apart = {name: float((own - hand).abs().max() / hand.abs().max()) for name, own in trained.items()}
    others = {name: value for name, value in apart.items() if not value <= 0.01}
    if others:
        notes.append(f"Other weights than those of the loop by hand: {others}.")
    notes += [f"{name}: left out ({reason})." for name, reason in failed.items()]
    header = ["", "s / round", "clients / s", "/ by hand", "peak MiB"]
    words = f"**{title}, {count} clients, {work.batches} batches of {work.batch_size} each**"
    return "\n\n".join([words, table(header, rows), *notes])


def main() -> None:
    if "--process" in sys.argv:
        key, rounds, devices, out = sys.argv[sys.argv.index("--process") + 1 :]
        prepare(argparse.Namespace(threads=1, quick=False, runs=Path()))
        process(key, int(rounds), int(devices), Path(out))
        return
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS), help="networks")
    made.add_argument("--repetitions", type=int, default=5, help="times that all take their turn")
    made.add_argument("--rounds", type=int, default=2, help="rounds of a turn that count")
    arguments = made.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Expected a GPU that torch can use, but there is none.")
    prepare(arguments)
    parts = [
        f"`python benchmarks/gpu.py --out benchmarks/results/performance.md`. One {torch.cuda.get_device_name()}, torch"
        f" {torch.__version__}, lightning {L.__version__}, Python {sys.version.split()[0]}; float32, convolutions in"
        " TF32 as PyTorch has it. The examples are in the host's memory. Medians over repetitions, ratios within one,"
        " with their range; *memory* is the peak of what is allocated on the device, of all processes together."
    ]
    for key in arguments.works:
        if key == "deeplab" and find_spec("segmentation_models_pytorch") is None:
            parts.append("DeepLabV3+ is excluded: `segmentation_models_pytorch` is not installed.")
            continue
        parts.append(measure(key, arguments))
        write_section(arguments.out, "gpu", "\n\n".join(parts))


if __name__ == "__main__":
    main()
