"""Colour bias: pooled training learns colours instead of classes; clients with one colour each may not.

The FedMA paper's bias study (Figure 4): 95 % of the training images are grey in five classes, 5 % in the other classes.
One client has the grey images, another client has the coloured images. In the test data half of each class is grey.
Baselines: pooled training on the same images, with and without remedies for the bias, and training on unbiased images.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from common import QUIET, Curve, machine, parser, prepare, run_all, spread, table, write_section
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import Aggregator, FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import FedAvg, FedMA
from lightning_fed.datasets.cifar10 import CIFAR10
from lightning_fed.tasks.classification import ClassificationTask

IMAGES, TEST, BATCH, ROUNDS, EPOCHS, SHARE, LR = 4000, 2000, 32, 9, 2, 0.95, 0.02
GREY_CLASSES = 5
LUMA = torch.tensor([0.299, 0.587, 0.114])

FEDERATED = {
    "FedMA, two clients": lambda: FedMA(),
    "FedMA, independent starts": lambda: FedMA(initial="independent"),
    "freezing and training without matching": lambda: FedMA("none"),
    "FedAvg, two clients": lambda: FedAvg(),
}
POOLED = ("pooled", "pooled, oversampled", "pooled, as many of each", "pooled, without bias")


def colored(images: Tensor, labels: Tensor, shares: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Converts images to grey, with a share per class; also returns the mask."""
    generator = torch.Generator().manual_seed(seed)
    is_grey = torch.rand(len(labels), generator=generator) < shares[labels]
    grey = (images * LUMA[:, None, None]).sum(1, keepdim=True).expand_as(images)
    return torch.where(is_grey[:, None, None, None], grey, images), is_grey


def load(arguments: argparse.Namespace) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    source = CIFAR10(arguments.data, train_size=IMAGES, val_size=TEST, normalize=False)
    source.setup("fit")
    parts = []
    for dataset in (source.train_dataset, source.val_dataset):
        images, labels = zip(*dataset, strict=True)
        parts.append((torch.stack(images), torch.as_tensor(labels)))
    return parts[0], parts[1]


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    (images, labels), (test_images, test_labels) = load(arguments)
    biased = torch.where(torch.arange(10) < GREY_CLASSES, SHARE, 1 - SHARE)
    even = torch.full((10,), 0.5)
    inputs, is_grey = colored(images, labels, even if name == POOLED[-1] else biased, seed)
    tests, _ = colored(test_images, test_labels, even, 1000)
    mean, std = inputs.mean((0, 2, 3), keepdim=True), inputs.std((0, 2, 3), keepdim=True)
    inputs, tests = (inputs - mean) / std, (tests - mean) / std
    L.seed_everything(seed, verbose=False)
    task = ClassificationTask("vgg9", 10, 3, 32, model_kwargs={"width": 0.25, "init": "kaiming"}, lr=LR, momentum=0.9)
    rounds = 1 if arguments.quick else ROUNDS
    curve = Curve(f"{name} {seed}:")
    validation = DataLoader(TensorDataset(tests, test_labels), 500)
    if name in FEDERATED:
        rule: Aggregator = FEDERATED[name]()
        first = labels < GREY_CLASSES
        clients = {
            "grey": TensorDataset(inputs[first], labels[first]),
            "colored": TensorDataset(inputs[~first], labels[~first]),
        }
        trainer = FederatedTrainer(
            max_rounds=rounds, local_epochs=EPOCHS, method=rule, seed=seed, callbacks=[curve], **QUIET
        )
        trainer.fit(task, FederatedDataModule(clients, val=validation, batch_size=BATCH))
    else:
        chosen = balanced(name, labels, is_grey, seed)
        epochs = max(1, round(rounds * EPOCHS * IMAGES / len(chosen)))  # equal number of examples
        trainer = L.Trainer(max_epochs=epochs, callbacks=[curve], check_val_every_n_epoch=max(1, epochs // 18), **QUIET)
        loader = DataLoader(TensorDataset(inputs[chosen], labels[chosen]), BATCH, shuffle=True)
        trainer.fit(task, loader, validation)
    scores = [values["val_acc"] for values in curve.rounds if "val_acc" in values]
    return {"name": name, "seed": seed, "test": scores[-1], "scores": scores, "machine": machine(arguments.threads)}


def balanced(name: str, labels: Tensor, is_grey: Tensor, seed: int) -> Tensor:
    """Indices of training images: equal numbers of grey and coloured images per class, by repetition or exclusion."""
    everything = torch.arange(len(labels))
    if name in ("pooled", "pooled, without bias"):
        return everything
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in range(10):
        kinds = [everything[(labels == label) & (is_grey == kind)] for kind in (True, False)]
        sizes = [len(kind) for kind in kinds]
        size = max(sizes) if name == "pooled, oversampled" else min(sizes)
        for kind in kinds:
            order = kind[torch.randperm(len(kind), generator=generator)]
            chosen.append(order.repeat(-(-size // len(kind)))[:size])
    return torch.cat(chosen)


def report(results: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    rows = [
        [name, spread([100 * each["test"] for each in found], 1), f"{len(found)}"] for name, found in results.items()
    ]
    return (
        f"`python benchmarks/color_bias.py --data DATA --out benchmarks/results/fedma.md`. CIFAR-10,"
        f" {IMAGES:,} images, a quarter of VGG-9's channels: of classes 0 to 4 {SHARE:.0%} are grey, of 5 to 9"
        f" {1 - SHARE:.0%}; one client"
        f" has these and one those; {ROUNDS} rounds of {EPOCHS} epochs (a pass of FedMA), pooled training of as many,"
        f" with a learning rate of {LR} (not tuned) and momentum; {TEST:,} other images, half of them grey. Accuracy"
        " in %, mean ± standard deviation over seeds."
        f" {machine(arguments.threads)}.\n\n" + table(["", "accuracy", "seeds"], rows)
    )


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], seeds=(0, 1, 2)).parse_args()
    prepare(arguments)
    results = run_all("color_bias", [*POOLED, *FEDERATED], run, arguments)
    if results:
        write_section(arguments.out, "color-bias", report(results, arguments))


if __name__ == "__main__":
    main()
