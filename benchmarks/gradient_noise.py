"""Gradient noise of sampled softmax (figure 9 in the FedSS paper), compared with full softmax.

All clients in the simulated round hold the same batch with the same positive classes, but draw separate negatives. The
noise is the norm of the difference between the round's mean gradient and the full softmax gradient, at the same
weights, averaged over many batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, load_json, machine, parser, prepare, save_json, table, version, write_section
from fedss import Embedder
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fed.algorithms.fedss import gradient_noise, sample_negatives, sampled_softmax_loss
from lightning_fed.datasets.omniglot import Omniglot
from lightning_fed.report.figures import save_figure

CLASSES, BATCH, COHORT = 964, 32, 16
SIZES = (0, 5, 10, 20, 50, 100, 200, 500, 900)


def gradients(model: Embedder, features: Tensor, loss: Tensor) -> list[Tensor]:
    """The extractor's gradients in one vector, and the head's gradient."""
    parts = torch.autograd.grad(loss, [*model.body.parameters(), model.head.weight], retain_graph=True)
    return [torch.cat([part.flatten() for part in parts[:-1]]), parts[-1].flatten()]


def noise(model: Embedder, batches: Iterator[Any], count: int, seed: int) -> dict[str, list[list[float]]]:
    """The extractor's and the head's noise in every batch, by number of negatives."""
    generator, found = np.random.default_rng(seed), {str(size): [] for size in (*SIZES, CLASSES)}
    model.eval()  # the network has neither dropout nor BatchNorm
    for _ in range(count):
        images, labels = next(batches)
        own = labels.unique()
        features = model.body(images)
        logits = model.head(features)
        full = gradients(model, features, F.cross_entropy(logits, labels))
        for size in (*SIZES, CLASSES):
            losses = []
            for _ in range(COHORT):
                negatives = sample_negatives(own, CLASSES, size, generator)
                classes = torch.cat([own, negatives]).sort().values
                losses.append(
                    sampled_softmax_loss(
                        logits[:, classes], torch.searchsorted(classes, labels), torch.isin(classes, own), CLASSES
                    )
                )
            mean = gradients(model, features, torch.stack(losses).mean())
            found[str(size)].append(
                [float(gradient_noise([one], [other])) for one, other in zip(mean, full, strict=True)]
            )
    return found


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def measure(omniglot: Omniglot, count: int, epochs: int) -> dict[str, Any]:
    L.seed_everything(0, verbose=False)
    model = Embedder(CLASSES, 0.1, 0.9)
    loader = DataLoader(omniglot.train_dataset, batch_size=BATCH, shuffle=True)
    results = {"start": noise(model, endless(loader), count, 0)}
    model.train()
    trainer = L.Trainer(max_epochs=epochs, limit_val_batches=0, **QUIET)
    trainer.fit(model, loader)
    results["trained"] = noise(model, endless(loader), count, 1)
    return {"noise": results, "batches": count, "epochs": epochs, "version": version()}


def report(results: dict[str, Any], threads: int) -> str:
    rows = []
    for size in (*SIZES, CLASSES):
        cells = [str(size) if size < CLASSES else "all"]
        for when in ("start", "trained"):
            values = np.array(results["noise"][when][str(size)])
            cells += [f"{mean:.3g}" for mean in values.mean(axis=0)]
        rows.append(cells)
    command = "python benchmarks/gradient_noise.py --data DATA --out benchmarks/results/fedss.md"
    words = (
        f"`{command} --figure docs/assets/gradient_noise.png`."
        f" Omniglot, {CLASSES} classes, the network of the study above; {COHORT} clients with the same batch of {BATCH}"
        f" and negatives of their own; mean over {results['batches']} batches of the Euclidean norm of the difference"
        f" to the full softmax's gradient, for new weights and after {results['epochs']} centralised epochs."
        f" {machine(threads)}."
    )
    header = ["negatives", "extractor, new", "head, new", "extractor, trained", "head, trained"]
    return f"{words}\n\n{table(header, rows)}"


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for when, style in (("start", "--"), ("trained", "-")):
        for place, part in enumerate(("extractor", "head")):
            means: Sequence[float] = [
                float(np.mean([each[place] for each in results["noise"][when][str(size)]])) for size in SIZES
            ]
            axes.plot(SIZES, means, style, marker="o", color=f"C{place}", label=f"{part}, {when}")
    axes.set_xscale("symlog", linthresh=5)  # the numbers include 0
    axes.set(yscale="log", xlabel="negatives per client", ylabel="gradient noise (L2)")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--figure", type=Path, default=None, help="PNG file of the picture")
    made.add_argument("--batches", type=int, default=100, help="batches")
    made.add_argument("--epochs", type=int, default=5, help="centralised epochs before the second measurement")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.batches, arguments.epochs = 2, 1
    path = arguments.runs / "gradient_noise.json"
    results = load_json(path)
    if results is None:
        omniglot = Omniglot(arguments.data)
        omniglot.setup("fit")
        results = measure(omniglot, arguments.batches, arguments.epochs)
        save_json(path, results)
    write_section(arguments.out, "gradient-noise", report(results, arguments.threads))
    if arguments.figure is not None:
        draw(results, arguments.figure)


if __name__ == "__main__":
    main()
