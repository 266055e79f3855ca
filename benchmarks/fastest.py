"""Seconds of a round with several clients at once, as multiples of fused visits: the table behind ``visits="fastest"``.

All variants train the same networks on the same random data in one process, in alternation. The script downloads
nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import lightning as L
import torch
from common import QUIET, machine, parser, prepare, table, write_section
from peers import work
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer, Vectorized

CLIENTS, STEPS, BATCH_SIZE, ROUNDS = 25, 5, 20, 3
SIZES = (1, 5, 10, 25)


def wide_mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    )


def cnn_with_3x3() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1568, 28), nn.ReLU(), nn.Linear(28, 10)),
    )


class Net(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Stamps(L.Callback):
    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamps.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamps.append(time.perf_counter())


def seconds(make: Callable[[], nn.Module], size: int) -> float:
    """Seconds of a round after a first round, with ``size`` clients at once."""
    generator, watch = torch.Generator().manual_seed(0), Stamps()
    inputs = torch.randn(CLIENTS, STEPS * BATCH_SIZE, 1, 28, 28, generator=generator)
    targets = torch.randint(10, (CLIENTS, STEPS * BATCH_SIZE), generator=generator)
    clients = {client: TensorDataset(inputs[client], targets[client]) for client in range(CLIENTS)}
    trainer = FederatedTrainer(max_rounds=ROUNDS, visits=Vectorized(size), callbacks=[watch], seed=0, **QUIET)
    trainer.fit(Net(make()), FederatedDataModule(clients, batch_size=BATCH_SIZE))
    rounds = [end - start for start, end in zip(watch.stamps, watch.stamps[1:], strict=False)]
    return statistics.median(rounds[1:])


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--repetitions", type=int, default=3, help="times that all take their turn")
    given = made.parse_args()
    prepare(given)
    rows = []
    for make in (work.mlp, wide_mlp, work.small_cnn, cnn_with_3x3, work.cnn):
        ratios: dict[int, list[float]] = {size: [] for size in SIZES}
        for repetition in range(given.repetitions + 1):
            order = SIZES if repetition % 2 else SIZES[::-1]
            times = {size: seconds(make, size) for size in order}
            for size in SIZES if repetition else ():  # the first repetition warms up
                ratios[size].append(times[size] / times[1])
        count = sum(parameter.numel() for parameter in make().parameters())
        rows.append([make.__name__, f"{count:,}", *(f"{statistics.median(ratios[size]):.2f}" for size in SIZES)])
    text = (
        f"`python benchmarks/fastest.py --threads {given.threads} --repetitions {given.repetitions} --out"
        " benchmarks/results/performance.md`. Seconds per round, divided by"
        f" the default's; {CLIENTS} clients, {STEPS} steps with {BATCH_SIZE} examples; columns: clients at once;"
        f" medians of {given.repetitions} repetitions. {machine(given.threads)}."
    )
    write_section(given.out, "fastest", f"{text}\n\n{table(['network', 'parameters', *map(str, SIZES)], rows)}")


if __name__ == "__main__":
    main()
