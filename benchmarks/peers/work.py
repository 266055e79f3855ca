"""Common work of all contestants: data, networks and steps. Requires only PyTorch.

All clients in a round train on private examples in a fixed order, with plain SGD and a new optimizer; updates are
averaged with equal weights. Thus all contestants have equal final weights, up to rounding.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RATE = 0.05
KEPT = 2_000
"""Number of compared final weights."""


@dataclass(frozen=True)
class Work:
    """A row of the table.

    Args:
        network: Makes the network.
        image: Shape of an example.
        classes: Number of classes.
        batch_size: Examples in a batch.
        batches: Batches per client.
        dense: Whether every pixel has a label.
    """

    network: Callable[[], nn.Module]
    image: tuple[int, ...]
    classes: int
    batch_size: int
    batches: int
    dense: bool = False

    @property
    def samples(self) -> int:
        return self.batch_size * self.batches

    def make_network(self) -> nn.Module:
        torch.manual_seed(0)
        return self.network()

    def make_data(self, client: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000 + client)
        inputs = torch.randn(self.samples, *self.image, generator=generator)
        shape = (self.samples, *(self.image[1:] if self.dense else ()))
        return inputs, torch.randint(self.classes, shape, generator=generator)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    # McMahan et al.; 1.66 million parameters
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def small_cnn() -> nn.Module:
    # NIID-Bench; 48,846 parameters
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 62)),
    )


def resnet18() -> nn.Module:
    """ResNet-18 with GroupNorm and a small stem, for images with 32 x 32 pixels."""
    from torchvision.models import resnet18 as build

    network = build(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(2, channels))
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return network


def deeplab() -> nn.Module:
    """DeepLabV3+ on a ResNet-18, with GroupNorm: the peers do not average buffers."""
    from segmentation_models_pytorch import DeepLabV3Plus

    network = DeepLabV3Plus("resnet18", encoder_weights=None, classes=12)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features))
            elif isinstance(child, nn.Dropout):
                setattr(module, name, nn.Identity())
    return network


WORKS = {
    "mlp": Work(mlp, (1, 28, 28), 10, 20, 10),
    "cnn": Work(cnn, (1, 28, 28), 10, 20, 10),
    "small_cnn": Work(small_cnn, (1, 28, 28), 62, 10, 5),
    "resnet18": Work(resnet18, (3, 32, 32), 10, 20, 2),
    "deeplab": Work(deeplab, (3, 96, 96), 12, 8, 2, dense=True),
}


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser()
    made.add_argument("--contestant", default="")
    made.add_argument("--work", choices=list(WORKS), required=True)
    made.add_argument("--clients", type=int, required=True)
    made.add_argument("--rounds", type=int, required=True)
    made.add_argument("--threads", type=int, required=True)
    made.add_argument("--out", required=True)
    found = made.parse_args()
    torch.set_num_threads(found.threads)
    return found


def save(out: str, stamps: list[float], network: nn.Module, sent: float | None = None) -> None:
    """Writes start times of rounds, the end of the last round, final weights, and bytes per round."""
    flat = torch.cat([value.detach().flatten() for value in network.parameters()])
    some = flat[:: max(1, len(flat) // KEPT)].double().tolist()
    with open(out, "w") as file:
        json.dump({"stamps": stamps, "weights": some, "bytes": sent}, file)


def batches_of(work: Work, data: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(data[0].split(work.batch_size), data[1].split(work.batch_size), strict=True)


def visit(network: nn.Module, work: Work, data: tuple[Tensor, Tensor]) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for inputs, targets in batches_of(work, data):
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimizer.step()


def now() -> float:
    return time.time()  # comparable between processes
