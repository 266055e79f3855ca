"""Poisson sampling: every example is drawn into a batch independently, with a secret key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_fed.data.dataset_clients import DatasetClients
from lightning_fed.data.loader_clients import LoaderClients
from lightning_fed.data.population import PlannedVisit, Population
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key
from lightning_fed.partitions.loader_parts import LOADER_OPTIONS, batches_of, check_class, is_whole

_BATCH = 0


class PoissonSampling:
    """Draws Poisson-sampled batches with a secret key.

    Each example is drawn independently. The probability is the batch size divided by the number of examples, so batches
    have the batch size on average.

    Args:
        key: Secret random key, a 128-bit integer.

    Example:
        >>> sampling = PoissonSampling(key=7)
        >>> 0 < len(sampling.draw("a", 0, 0, num_samples=100, batch_size=10)) < 40
        True
    """

    def __init__(self, key: int) -> None:
        self.key = key

    def draw(self, client: Client | None, round: int, number: int, num_samples: int, batch_size: int) -> np.ndarray:
        """Draws the increasing indices of a batch's examples, shape (examples,).

        ``number`` is the batch index in the client's local training. The batch may be empty. If a client has at most
        ``batch_size`` examples, all are drawn.
        """
        keys = [self.key, 0 if client is None else client_key(client), round, number, _BATCH]
        generator = np.random.default_rng(keys)
        # Draws the number of examples first, then the examples, which is equivalent to independent draws.
        size = int(generator.binomial(num_samples, min(1.0, batch_size / num_samples)))
        return np.sort(generator.choice(num_samples, size, replace=False))

    def served(self, client: Client | None, round: int, number: int, num_samples: int, batch_size: int) -> np.ndarray:
        """Returns the indices from :meth:`draw`, or index 0 for an empty batch, whose gradient the training ignores."""
        positions = self.draw(client, round, number, num_samples, batch_size)
        return positions if len(positions) else np.zeros(1, dtype=np.int64)

    def load(self, loader: Any, planned: PlannedVisit) -> Iterator[Any]:
        """Yields batches with independently drawn examples (Poisson sampling), for one client's training in a round."""
        visit, (loader, batch_size) = planned.visit, check_poisson_loader(loader)
        batches = (
            self.served(visit.client, visit.round, number, planned.num_samples, batch_size)
            for number in range(planned.num_batches)
        )
        yield from poisson_loader(loader, batches, visit.seed)


def examples_per_batch(population: Population, client: Client) -> int:
    """Expected number of examples in a Poisson-sampled batch. Raises an error if such batches are impossible."""
    if isinstance(population, DatasetClients) and population.split_loader is None:
        return population.batch_size
    loader: Any = population.split_loader or population
    if isinstance(population, LoaderClients):
        loader = population.loaders[client]
    return check_poisson_loader(loader)[1]


def check_poisson_loader(loader: Any) -> tuple[DataLoader[Any], int]:
    """Checks a dataloader for Poisson sampling. Returns the loader and the batch size.

    Raises:
        OptionError: If the loader is not a ``DataLoader`` over a map-style data set, or has a custom sampler.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise OptionError(
            "Expected one DataLoader over a map-style data set, because examples are drawn independently, but got "
            f"{type(loader).__name__}."
        )
    check_class(loader, "with independently drawn examples")
    sampler, batch_size, _ = batches_of(loader)
    if batch_size is None or loader.batch_size is None or not is_whole(sampler, loader.dataset):
        raise OptionError(
            "Expected a DataLoader with a batch size and without a custom sampler, because examples are drawn"
            f" independently, but got sampler={type(sampler).__name__} and batch_size={loader.batch_size}."
        )
    return loader, loader.batch_size


def poisson_loader(loader: DataLoader[Any], batches: Iterator[np.ndarray], seed: int) -> DataLoader[Any]:
    """Copies a dataloader, with other batches: ``batches`` yields the example indices for each batch."""
    generator = loader.generator if loader.generator is not None else torch.Generator().manual_seed(seed)
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    sampler: Any = map(np.ndarray.tolist, batches)  # lists of positions
    return DataLoader(
        loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn, generator=generator, **options
    )
