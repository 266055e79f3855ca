"""Accuracy of merged networks: plain averages, averages with matched neurons, and with private neurons added.

All networks train on ten smooth patterns with noise. *Moved*: eight networks with the same start, each trained on
different data; the neurons were then permuted. *Independent*: two networks with different starts.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from common import PAIRED, machine, paired, parser, prepare, run_all, spread, table, write_section
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.matching import MatchedAverage, PermutationGroups
from lightning_fed.tasks.networks import lenet

WAYS = {
    "plain average": {"mode": "none"},
    "`permute`, `sweeps=0`": {"mode": "permute", "sweeps": 0},
    "`permute`": {"mode": "permute"},
    "`grow`": {"mode": "grow"},
    "`grow`, `pfnm`": {"mode": "grow", "order": "pfnm"},
}
COMPARED = ("`permute`", "`grow`")  # ways with paired differences
ROWS = {
    "LeNet, moved": "LeNet, eight clients of one start whose neurons were put in other places",
    "LeNet, independent": "LeNet, two independent starts",
    "ResNet, moved": "ResNet with BatchNorm, eight clients of one start, likewise",
    "ResNet, independent": "ResNet with BatchNorm, two independent starts",
    "ResNet, averaged": "the same, with averaged statistics",
}


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, features: Tensor) -> Tensor:
        made = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(features)))))
        return F.relu(made + self.shortcut(features))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*stem, Block(16, 16, 1), Block(16, 32, 2), *head)


def small_lenet() -> nn.Module:
    return lenet(10, 1, 16, channels=(8, 16), hidden=64)


def patterns(size: int) -> tuple[Tensor, Tensor]:
    """1,800 images with labels: 1,200 for training, 600 for the test."""
    generator = torch.Generator().manual_seed(0)
    smooth = F.interpolate(torch.randn(10, 1, 4, 4, generator=generator), size=8, mode="bicubic")
    labels = torch.randint(10, (1800,), generator=generator)
    images = smooth[labels] + 0.8 * torch.randn(1800, 1, 8, 8, generator=generator)
    return F.interpolate(images, size=size), labels


def train(net: nn.Module, images: Tensor, labels: Tensor, epochs: int, seed: int) -> nn.Module:
    generator, optimizer = torch.Generator().manual_seed(seed), torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
    net.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=generator).split(32):
            optimizer.zero_grad()
            F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return net.eval()


def moved(start: nn.Module, images: Tensor, labels: Tensor, seed: int) -> list[nn.Module]:
    """Trains eight clients from a common start, and permutes the neurons in every group."""
    groups, nets = PermutationGroups.of(start, images[:2]), []
    for client in range(8):
        own = slice(150 * client, 150 * (client + 1))
        net = train(copy.deepcopy(start), images[own], labels[own], 1, client)
        generator = torch.Generator().manual_seed(8 * seed + client)
        orders = {group.name: torch.randperm(group.size, generator=generator) for group in groups}
        net.load_state_dict(groups.permute(net.state_dict(), orders))
        nets.append(net)
    return nets


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((net.eval()(images).argmax(1) == labels).float().mean())


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Mean accuracy of the networks, and accuracy of each merged network."""
    architecture, kind = name.split(", ")
    make: Callable[[], nn.Module] = small_lenet if architecture == "LeNet" else resnet
    images, labels = patterns(16 if architecture == "LeNet" else 8)
    train_set, test_set = (images[:1200], labels[:1200]), (images[1200:], labels[1200:])
    nets = []
    for own in (seed,) if kind == "moved" else (seed, seed + 1):
        torch.manual_seed(own)
        nets.append(train(make(), *train_set, 4 if architecture == "LeNet" else 3, own))
    if kind == "moved":
        nets = moved(nets[0], *train_set, seed)
    statistics = "average" if kind == "averaged" else "recalibrate"
    result = {"networks": sum(accuracy(net, *test_set) for net in nets) / len(nets)}
    for way, options in WAYS.items():
        merged = MatchedAverage(batch_norm=statistics, **options).merge(nets, data=images[:600].split(100))
        result[way] = accuracy(merged.module, *test_set)
    print(name, seed, result, flush=True)
    return result


def rows_of(results: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Table rows: accuracies, and paired differences from the plain average, by kind of network."""
    columns = ["networks", *WAYS]
    return [
        [
            label,
            *(spread([one[column] for one in results[name]]) for column in columns),
            *(paired([one[way] - one["plain average"] for one in results[name]]) for way in COMPARED),
        ]
        for name, label in ROWS.items()
        if name in results
    ]


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], data=False, seeds=tuple(range(0, 20, 2))).parse_args()
    prepare(arguments)
    results = run_all("merging", ROWS, run, arguments)
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    words = (
        f"`python benchmarks/merging.py --out benchmarks/results/merging.md`."
        f" {machine(arguments.threads)}. Images of 8 x 8"
        " (LeNet: enlarged to 16 x 16) of ten generated patterns with noise, 1,200 to train on and 600 to test; 4"
        " epochs (ResNet: 3). Accuracy on test images, mean and standard deviation over the starts with the seeds"
        f" {', '.join(map(str, seeds))}, of independent networks over the pairs"
        f" {', '.join(f'({seed}, {seed + 1})' for seed in seeds)}. {PAIRED} Primary comparison: `grow` minus plain"
        " average for LeNet with two independent starts."
    )
    header = ["accuracy", "networks", *WAYS, *(f"{way} minus plain average" for way in COMPARED)]
    write_section(arguments.out, "merging", f"{words}\n\n{table(header, rows_of(results))}")


if __name__ == "__main__":
    main()
