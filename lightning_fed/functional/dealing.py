"""Dealing samples to clients: what the ways to split a data set have in common.

Every draw comes from a stream of random numbers of its own, of a purpose and a seed.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]

# Beyond these numpy's sampler loses its precision (sums of gamma variates overflow, densities underflow), while the
# distribution is its limit to within any sample count: the mean, or one category alone.
_ALPHA_OF_MEAN, _ALPHA_OF_ONE = 1e15, 1e-15


class PartitionError(ValueError):
    """An argument that no split of these data can have; the command line shows it without a traceback."""


def generator_for(purpose: str, seed: int, *keys: int) -> np.random.Generator:
    """An independent stream of random numbers per purpose, seed and keys."""
    at_least("seed", seed, 0)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *keys)))


def draw_dirichlet(
    rng: np.random.Generator, mean: npt.NDArray[np.float64], alpha: float, size: int
) -> npt.NDArray[np.float64]:
    """Draws from Dir(alpha * mean), with its limits for alpha at 0 and infinity; shape (size, categories)."""
    if alpha > _ALPHA_OF_MEAN:
        return np.tile(mean, (size, 1))
    if alpha < _ALPHA_OF_ONE:
        draws = np.zeros((size, mean.size))
        draws[np.arange(size), rng.choice(mean.size, size, p=mean)] = 1.0
        return draws
    return rng.dirichlet(alpha * mean, size)


def cut(shares: npt.NDArray[np.float64], totals: IndexArray) -> IndexArray:
    """Sizes of the pieces when row r of ``totals`` is cut at the running sums of row r of ``shares``, rounded down."""
    edges = np.floor(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    edges = np.minimum(edges, totals[:, None])
    edges[:, -1] = totals
    return np.diff(edges, axis=1, prepend=0)


def deal_by_class(rng: np.random.Generator, classes: IndexArray, counts: IndexArray) -> list[IndexArray]:
    """Gives client k ``counts[k, c]`` random samples of class c; the rest of a class goes to nobody."""
    num_clients, num_classes = counts.shape
    order = rng.permutation(classes.size)
    order = order[np.argsort(classes[order], kind="stable")]  # class by class, at random within a class
    unused = np.bincount(classes, minlength=num_classes) - counts.sum(axis=0)
    pieces = np.concatenate([counts, unused[None]]).T.ravel()
    owners = np.append(np.arange(num_clients), -1)
    owner = np.empty(classes.size, dtype=np.int64)
    owner[order] = np.repeat(np.tile(owners, num_classes), pieces)
    return parts_of_owners(owner, num_clients)


def deal_in_order(order: IndexArray, sizes: IndexArray) -> list[IndexArray]:
    """Gives client k the next ``sizes[k]`` samples of ``order``."""
    owner = np.empty(order.size, dtype=np.int64)
    owner[order] = np.repeat(np.arange(sizes.size), sizes)
    return parts_of_owners(owner, sizes.size)


def parts_of_owners(owner: IndexArray, num_clients: int) -> list[IndexArray]:
    """The samples of every client in ascending order; those of owner -1 belong to nobody."""
    order = np.argsort(owner, kind="stable").astype(np.int64)
    edges = np.cumsum(np.bincount(owner + 1, minlength=num_clients + 1))
    return [part.copy() for part in np.split(order, edges[:-1])[1:]]  # copies: a part alone does not keep all alive


def even_sizes(total: int, num_parts: int) -> IndexArray:
    """Sizes of parts that differ by at most one, the larger ones first."""
    return np.full(num_parts, total // num_parts) + (np.arange(num_parts) < total % num_parts)


def number_classes(labels: npt.ArrayLike) -> tuple[IndexArray, IndexArray]:
    """Labels renumbered from 0 in their order, and the number of samples of each."""
    array = one_dimensional("labels", labels)
    if array.dtype.kind not in "iubUS":
        raise PartitionError(f"Expected `labels` to be integers or strings, but got an array of {array.dtype}.")
    _, classes, class_sizes = np.unique(array, return_inverse=True, return_counts=True)
    return classes.astype(np.int64), class_sizes.astype(np.int64)


def one_dimensional(name: str, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
    """The values as an array of shape ``(N,)``."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise PartitionError(f"Expected `{name}` to have shape (N,) with N at least 1, but got {array.shape}.")
    return array


def at_least(name: str, value: int, lowest: int) -> int:
    """The value, if it is not too small."""
    if value < lowest:
        raise PartitionError(f"Expected `{name}` to be at least {lowest}, but got {value}.")
    return value


def check_clients(num_clients: int, num_samples: int) -> None:
    """Makes sure that there is a sample for every client."""
    at_least("num_clients", num_clients, 1)
    if num_clients > num_samples:
        raise PartitionError(
            f"Expected `num_clients` to be at most the number of samples ({num_samples}), but got {num_clients}."
        )


def check_min_size(min_size: int, num_clients: int, num_samples: int) -> None:
    """Makes sure that there are ``min_size`` samples for every client."""
    at_least("min_size", min_size, 0)
    if min_size * num_clients > num_samples:
        raise PartitionError(
            f"Expected `min_size` * `num_clients` to be at most the number of samples ({num_samples}), but got"
            f" {min_size} * {num_clients}."
        )
