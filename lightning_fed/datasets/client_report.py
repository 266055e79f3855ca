"""Reports on the clients' data before training."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fed.callbacks.pictures import new_figure
from lightning_fed.console import markdown_table
from lightning_fed.data.dataset_clients import ClientSource, DatasetClients, client_subsets
from lightning_fed.data.partition import MapDataset, Partition
from lightning_fed.data.population import PlannedVisit, Population, seeded_generators
from lightning_fed.features.batches import as_classes, find_inputs, find_target
from lightning_fed.messages import Client
from lightning_fed.report.figures import save_figure
from lightning_fed.server.schedule import Visit

_PICTURES = 3
_MOST_COLUMNS = 20


@dataclass(frozen=True, eq=False)
class ClientSummary:
    """Summary of one client's data.

    Args:
        client: The client's name or number.
        num_examples: Number of examples.
        counts: Examples per class, shape ``(classes,)``. For masks, pixels per class.
        num_ignored: Examples without a class. For masks, pixels without a class.
        brightness: Mean pixel value, or NaN if the inputs are not images.
        contrast: Standard deviation over an image's pixels, averaged over images and channels.
        sharpness: Mean absolute difference between neighbouring pixels, divided by ``contrast``.
        distance: Total variation distance between the class frequencies of this client and of all clients, 0 to 1.
        images: The client's first images, each with shape ``(C, H, W)``.
    """

    client: Client
    num_examples: int
    counts: Tensor
    num_ignored: int
    brightness: float
    contrast: float
    sharpness: float
    distance: float = math.nan
    images: tuple[Tensor, ...] = ()

    @property
    def present(self) -> list[int]:
        return torch.nonzero(self.counts).flatten().tolist()


@dataclass(frozen=True, eq=False)
class ClientReport:
    """Summaries of all clients' data, from :func:`report_clients`. ``str()`` returns a Markdown table."""

    clients: tuple[ClientSummary, ...]
    class_names: tuple[str, ...] = field(default=())

    @property
    def num_classes(self) -> int:
        return max((len(summary.counts) for summary in self.clients), default=0)

    def __str__(self) -> str:
        rows = [["client", "examples", "classes", "void", "distance", "brightness", "contrast", "sharpness"]]
        for summary in self.clients:
            void = summary.num_ignored / max(1, summary.num_ignored + int(summary.counts.sum()))
            classes = (f"{len(summary.present)} of {self.num_classes}", f"{void:.0%}") if self.num_classes else "--"
            numbers = (summary.distance, summary.brightness, summary.contrast, summary.sharpness)
            looks = ("-" if math.isnan(value) else f"{value:.2f}" for value in numbers)
            rows.append([str(summary.client), str(summary.num_examples), *classes, *looks])
        text = markdown_table(rows)
        if 0 < self.num_classes <= _MOST_COLUMNS:
            shares = [
                [str(summary.client), *(f"{share:.1%}" if share else "0" for share in self._shares(summary))]
                for summary in self.clients
            ]
            text += "\n\nShare of each class among the labels:\n\n"
            text += markdown_table([["client", *self._names()], *shares])
        return text

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws each client's first images and class shares. Without labels, bars show the numbers of examples."""
        widths = [1.9 + 1.1 * _PICTURES] if any(summary.images for summary in self.clients) else []
        widths += [2.2 + 0.35 * max(5, self.num_classes)]
        figure = new_figure((sum(widths), 1.2 + 1.1 * len(self.clients)))
        *left, right = figure.subfigures(1, len(widths), squeeze=False, width_ratios=widths)[0]
        for part in left:
            part.suptitle("first images of each client")
            grid = part.subplots(len(self.clients), _PICTURES, squeeze=False)
            for row, summary in zip(grid, self.clients, strict=True):
                for axis in row:
                    axis.set(xticks=[], yticks=[], frame_on=False)
                for axis, image in zip(row, summary.images, strict=False):
                    axis.imshow(_displayed(image), vmin=0, vmax=1, cmap="gray")
                name = f"{summary.client}\n{summary.num_examples} examples"
                row[0].set_ylabel(name, rotation=0, ha="right", va="center")
        axis, places = right.subplots(), range(len(self.clients))
        axis.set_yticks(places, [str(summary.client) for summary in self.clients])
        axis.set(ylabel="client", xlabel="class" if self.num_classes else "examples")
        if not self.num_classes:
            axis.barh(places, [summary.num_examples for summary in self.clients])
            axis.invert_yaxis()
        else:
            shares = torch.tensor([self._shares(summary) for summary in self.clients])
            drawn = axis.imshow(shares.sqrt().numpy(), aspect="auto", vmin=0, vmax=1, cmap="viridis")
            axis.set_xticks(range(self.num_classes), self._names(), rotation=90)
            bar = right.colorbar(drawn, ax=axis, label="share of the class")
            bar.set_ticks([0, 0.1**0.5, 0.5**0.5, 1], labels=["0", "10 %", "50 %", "100 %"])
        save_figure(figure, Path(path))

    def _shares(self, summary: ClientSummary) -> list[float]:
        shares: list[float] = (summary.counts / summary.counts.sum().clamp_min(1)).tolist()
        return shares

    def _names(self) -> list[str]:
        names = [*self.class_names, *map(str, range(len(self.class_names), self.num_classes))]
        return names[: self.num_classes]


def report_partition(
    partition: Partition,
    dataset: MapDataset,
    seed: int = 0,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
    ignore_index: int | None = 255,
) -> ClientReport:
    """Summarises the data of each client in a partition of a data set. See :func:`report_clients`."""
    indices = partition.split(dataset, seed)
    parts = client_subsets(dataset, indices, partial(partition.transform, seed=seed))  # type: ignore[arg-type]
    population = DatasetClients(ClientSource(parts), batch_size=32, shuffle=False)
    return report_clients(population, num_classes, class_names, ignore_index)


def report_clients(
    population: Population,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
    ignore_index: int | None = 255,
) -> ClientReport:
    """Counts the classes in each client's training data, and measures image statistics (:class:`ClientSummary`).

    Reads each client's data in one pass, with transforms and random augmentation. Targets are labels ``(N,)``, class
    masks ``(N, H, W)``, or a binary mask per class, ``(N, classes, H, W)``.

    Args:
        population: The clients.
        num_classes: Number of classes. By default the largest label plus one.
        class_names: Class names.
        ignore_index: Label of examples or pixels without a class. Negative labels also mean no class.

    Raises:
        ValueError: If a batch has no inputs, a label is too large, or a client's data have no length.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_fed.data import FederatedDataModule
        >>> masks = torch.tensor([[[0, 1]], [[1, 255]]])
        >>> clients = {"a": (torch.rand(2, 3, 1, 2), masks), "b": (torch.rand(2, 3, 1, 2), 0 * masks)}
        >>> data = FederatedDataModule({client: TensorDataset(*tensors) for client, tensors in clients.items()})
        >>> report = report_clients(data.population())
        >>> [(summary.client, summary.counts.tolist(), round(summary.distance, 3)) for summary in report.clients]
        [('a', [1, 2], 0.381), ('b', [4, 0], 0.286)]
    """
    with seeded_generators(0):
        summaries = [_summarize(population, client, ignore_index) for client in population.clients]
    size = max((len(summary.counts) for summary in summaries), default=0)
    if num_classes is not None and size > num_classes:
        raise ValueError(f"Expected classes from 0 to {num_classes - 1}, but got {size - 1}.")
    size = max(size, num_classes or 0) if size else 0
    counts = [_padded(summary.counts, size) for summary in summaries]
    total = sum(counts, torch.zeros(size, dtype=torch.float64))
    return ClientReport(
        tuple(
            replace(summary, counts=count, distance=_distance(count, total))
            for summary, count in zip(summaries, counts, strict=True)
        ),
        tuple(class_names),
    )


def _summarize(population: Population, client: Client, ignore_index: int | None) -> ClientSummary:
    counts, num_ignored, num_examples = torch.zeros(0, dtype=torch.int64), 0, 0
    sums, num_images = torch.zeros(3, dtype=torch.float64), 0
    images: list[Tensor] = []
    for batch in _one_pass(population, client):
        x = find_inputs(batch)
        num_examples += len(x)
        if x.ndim == 4:
            pixels = x.double() / 255 if x.dtype == torch.uint8 else x.double()
            images += [image.float() for image in pixels[: _PICTURES - len(images)]]
            steps = [pixels.diff(dim=dim).abs().flatten(1).mean(1) for dim in (2, 3) if pixels.shape[dim] > 1]
            spread = pixels.flatten(2).std(2, correction=0).mean(1)
            difference = torch.stack(steps).mean(0).sum() if steps else torch.zeros(())
            sums += torch.stack([pixels.flatten(1).mean(1).sum(), spread.sum(), difference.double()])
            num_images += len(x)
        added, ignored = _count(batch, x, ignore_index)
        num_ignored += ignored
        size = max(len(counts), len(added))
        counts = _padded(counts, size) + _padded(added, size)
    brightness, contrast, difference_mean = (sums / num_images).tolist() if num_images else (math.nan,) * 3
    return ClientSummary(
        client,
        num_examples,
        counts,
        num_ignored,
        brightness,
        contrast,
        difference_mean / contrast if contrast else 0.0 if num_images else math.nan,
        images=tuple(images),
    )


def _count(batch: Any, x: Tensor, ignore_index: int | None) -> tuple[Tensor, int]:
    try:
        labels = find_target(batch)
        has_mask_per_class = labels.ndim == x.ndim == 4 and labels.shape[1] > 1
        labels = labels if has_mask_per_class else as_classes(labels, x.ndim).flatten()
    except ValueError:
        return torch.zeros(0, dtype=torch.int64), 0
    is_ignored = labels < 0
    if ignore_index is not None:
        is_ignored |= labels == ignore_index
    if has_mask_per_class:
        return ((labels != 0) & ~is_ignored).movedim(1, 0).flatten(1).sum(1), int(is_ignored.sum())
    return torch.bincount(labels[~is_ignored].long()), int(is_ignored.sum())


def _one_pass(population: Population, client: Client) -> Iterator[Any]:
    batches = population.batches_per_epoch(client, isolated=True)
    if batches is None:
        raise ValueError(f"Expected data with a length, but the data of client {client!r} have no length.")
    planned = PlannedVisit(Visit(client, 0, 0), population.num_samples(client), batches)
    for item in population.stream([planned], isolated=True):
        if item.error is not None:
            raise item.error
        if item.batch is not None:
            yield item.batch


def _padded(counts: Tensor, size: int) -> Tensor:
    return torch.cat([counts, counts.new_zeros(size - len(counts))])


def _distance(counts: Tensor, whole: Tensor) -> float:
    if not counts.sum():
        return math.nan
    return float((counts / counts.sum() - whole / whole.sum()).abs().sum() / 2)


def _displayed(image: Tensor) -> Any:
    low, high = image.min(), image.max()
    if low < 0 or high > 1:
        image = (image - low) / (high - low).clamp_min(1e-12)
    return (image[:3].movedim(0, -1) if len(image) >= 3 else image[0]).numpy()
