"""Poisson sampling: every example is drawn by itself into each batch, from a secret key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_fed.data.loader_parts import LOADER_OPTIONS, batches_of, check_class, is_whole
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key

_BATCH = 0


class PoissonSampling:
    """Batches into which every example is drawn by itself, as functions of (key, client, round, number of the batch).

    An example is drawn with the probability batch size over examples, so that the batch size is the expected one.

    Args:
        key: The key, a whole number of 128 bits.

    Example:
        >>> sampling = PoissonSampling(key=7)
        >>> 0 < len(sampling.draw("a", 0, 0, num_samples=100, batch_size=10)) < 40
        True

    """

    def __init__(self, key: int) -> None:
        self.key = key

    def draw(self, client: Client | None, round: int, number: int, num_samples: int, batch_size: int) -> np.ndarray:
        """Positions of the examples of a batch, in order, shape (examples,); there may be none.

        Args:
            client: The client's key; ``None`` without a federation.
            round: Index of the round.
            number: Index of the batch in the visit.
            num_samples: Number of the client's examples.
            batch_size: Expected number of examples in the batch; with fewer examples all of them are drawn.

        """
        keys = [self.key, 0 if client is None else client_key(client), round, number, _BATCH]
        generator = np.random.default_rng(keys)
        # Their number, and then which they are: as if each were drawn by itself.
        size = int(generator.binomial(num_samples, min(1.0, batch_size / num_samples)))
        return np.sort(generator.choice(num_samples, size, replace=False))

    def served(self, client: Client | None, round: int, number: int, num_samples: int, batch_size: int) -> np.ndarray:
        """The positions of :meth:`draw`, or where there are none that of the first example, which stands for them.

        So that a batch of no example need not pass through a data set, a loader and a module: who trains on it must
        leave its gradient out.
        """
        positions = self.draw(client, round, number, num_samples, batch_size)
        return positions if len(positions) else np.zeros(1, dtype=np.int64)


class _ListedBatches:
    """Batch sampler of given batches."""

    def __init__(self, batches: Iterator[np.ndarray]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (positions.tolist() for positions in self._batches)


def check_poisson_loader(loader: Any) -> DataLoader[Any]:
    """Returns a loader if its examples can be drawn one by one.

    Args:
        loader: A loader of the user's.

    Raises:
        OptionError: If it is no ``DataLoader`` over a data set that can be indexed, or has a sampler of its own.

    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise OptionError(
            "Expected one DataLoader over a data set that can be indexed, of which every example is drawn by itself,"
            f" but got {type(loader).__name__}."
        )
    check_class(loader, "of which every example is drawn by itself")
    sampler, batch_size, _ = batches_of(loader)
    if batch_size is None or loader.batch_size is None or not is_whole(sampler, loader.dataset):
        raise OptionError(
            "Expected a DataLoader with a batch size and without a sampler of its own, because every example is drawn"
            f" by itself, but got sampler={type(sampler).__name__} and batch_size={loader.batch_size}."
        )
    return loader


def poisson_loader(loader: DataLoader[Any], batches: Iterator[np.ndarray], seed: int) -> DataLoader[Any]:
    """A loader of given batches, with the data set, collation and workers of another.

    Args:
        loader: The other one, of :func:`check_poisson_loader`.
        batches: Positions of the examples of every batch.
        seed: Seed of its workers, where the other has no generator of its own.

    """
    generator = loader.generator if loader.generator is not None else torch.Generator().manual_seed(seed)
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    sampler: Sequence[list[int]] = _ListedBatches(batches)  # type: ignore[assignment] # any iterable of lists
    return DataLoader(
        loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn, generator=generator, **options
    )
