"""Functions that assign samples to clients, used by several partitions."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lightning_fed.errors import OptionError

IndexArray = npt.NDArray[np.int64]

MAX_TRIES = 1000
"""Maximum number of draws for the clients' sizes."""

_SIZES = (10, 5, 2, 1)  # minimum samples per client, from the preferred size to the smallest

# Beyond these bounds numpy's sampler loses precision (sums of gamma variates overflow, densities underflow). The
# distribution then equals its limit for any number of samples: the mean, or a single category.
_ALPHA_OF_MEAN, _ALPHA_OF_ONE = 1e15, 1e-15


class PartitionError(OptionError):
    """Raised if a partition's argument does not fit the data. The command line prints the error without traceback."""


def generator_for(purpose: str, seed: int, *keys: int) -> np.random.Generator:
    """Creates a random generator seeded by the text ``purpose``, the seed, and further integers ``keys``."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *keys)))


def draw_dirichlet(
    rng: np.random.Generator, mean: npt.NDArray[np.float64], alpha: float, size: int
) -> npt.NDArray[np.float64]:
    """Draws from the Dirichlet distribution with parameters ``alpha * mean``, shape (size, categories)."""
    if alpha > _ALPHA_OF_MEAN:
        return np.tile(mean, (size, 1))
    if alpha < _ALPHA_OF_ONE:
        draws = np.zeros((size, mean.size))
        draws[np.arange(size), rng.choice(mean.size, size, p=mean)] = 1.0
        return draws
    return rng.dirichlet(alpha * mean, size)


def cut_shares(shares: npt.NDArray[np.float64], totals: IndexArray) -> IndexArray:
    """Cuts ``totals[r]`` samples into integer parts in proportion to ``shares[r]``. Returns the parts' sizes."""
    edges = np.floor(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    edges = np.minimum(edges, totals[:, None])
    edges[:, -1] = totals
    return np.diff(edges, axis=1, prepend=0)


def assign_by_class(rng: np.random.Generator, classes: IndexArray, counts: IndexArray) -> list[IndexArray]:
    """Assigns ``counts[k, c]`` random samples of class c to client k; ``classes[i]`` is the class of sample i."""
    num_clients, num_classes = counts.shape
    order = rng.permutation(classes.size)
    order = order[np.argsort(classes[order], kind="stable")]  # sorted by class, random within a class
    unused = np.bincount(classes, minlength=num_classes) - counts.sum(axis=0)
    part_sizes = np.concatenate([counts, unused[None]]).T.ravel()
    owners = np.append(np.arange(num_clients), -1)
    owner = np.empty(classes.size, dtype=np.int64)
    owner[order] = np.repeat(np.tile(owners, num_classes), part_sizes)
    return group_by_owner(owner, num_clients)


def assign_evenly(num_samples: int, num_clients: int, seed: int) -> list[IndexArray]:
    """Assigns samples to clients at random. Client sizes differ by at most one."""
    sizes = np.full(num_clients, num_samples // num_clients) + (np.arange(num_clients) < num_samples % num_clients)
    return assign_in_order(generator_for("iid", seed).permutation(num_samples), sizes)


def assign_in_order(order: IndexArray, sizes: IndexArray) -> list[IndexArray]:
    """Assigns consecutive samples in ``order`` to the clients: ``sizes[k]`` samples to client k."""
    owner = np.empty(order.size, dtype=np.int64)
    owner[order] = np.repeat(np.arange(sizes.size), sizes)
    return group_by_owner(owner, sizes.size)


def group_by_owner(owner: IndexArray, num_clients: int) -> list[IndexArray]:
    """Lists each client's sample indices, increasing. ``owner[i]`` is the client of sample i, or -1."""
    order = np.argsort(owner, kind="stable").astype(np.int64)
    edges = np.cumsum(np.bincount(owner + 1, minlength=num_clients + 1))
    return [
        part.copy() for part in np.split(order, edges[:-1])[1:]
    ]  # copies, so that one part does not keep all parts in memory


def number_classes(labels: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Renumbers labels from 0 in increasing order. Returns the new labels, and the sample count per class."""
    _, classes, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return classes.astype(np.int64), class_sizes.astype(np.int64)


def draw_until_large(
    draw: Callable[[], IndexArray],
    num_clients: int,
    num_samples: int,
    min_size: int | None,
    skew: str,
    remedy: str,
) -> IndexArray:
    """Draws sample counts until each client has at least ``min_size`` samples.

    The counts have shape ``(clients,)`` or ``(clients, classes)``. With ``min_size=None``, the minimum is 10, and after
    1000 failed draws 5, then 2, then 1. If all draws fail, the error message contains ``skew`` and ``remedy``.
    """
    sizes = _SIZES if min_size is None else (min_size,)
    option = "" if min_size is None else "`min_size` * "
    if sizes[-1] * num_clients > num_samples:
        factor = "" if min_size is None else f"{min_size} * "
        raise PartitionError(
            f"Expected {option}`num_clients` to be at most the number of samples ({num_samples}), but got"
            f" {factor}{num_clients}."
        )
    for size in sizes:
        for _ in range(MAX_TRIES if size * num_clients <= num_samples else 0):
            counts = draw()
            if counts.reshape(num_clients, -1).sum(axis=1).min() >= size:
                return counts
    least = "a sample" if min_size is None else f"at least {min_size} samples (`min_size`)"
    lower = "`num_clients`" if min_size is None else "`min_size` or `num_clients`"
    raise PartitionError(
        f"Expected every client to get {least}, but in each of {MAX_TRIES} random partitions, at least one of the "
        f"{num_clients} clients got fewer of the {num_samples} samples ({skew}): lower {lower}, or {remedy}."
    )


def pixel_permutation(num_pixels: int, client: int, seed: int) -> IndexArray:
    """Draws a client's pixel permutation: new pixel ``i`` is old pixel ``permutation[i]``."""
    return generator_for("pixel_permutation", seed, client).permutation(num_pixels).astype(np.int64)
