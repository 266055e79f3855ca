"""Who holds which samples: ways to split one data set over clients, as functions of the labels (or a count) and a seed.

Every function returns one int64 array of sample indices per client, in ascending order, so that a client keeps the data
set's own order. No sample goes to two clients, and every sample goes to one unless the function says otherwise. The
same arguments give the same split, in every process: a function draws from its own ``numpy.random.SeedSequence`` stream
and neither reads nor moves numpy's global generator.

References:
    - McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section
      3: ``iid``, ``shards``.
    - Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019:
      ``dirichlet_per_class``.
    - Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
      2019, section 3: ``dirichlet_per_client``.
    - Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study" (NIID-Bench), ICDE 2022, section IV:
      ``dirichlet_per_class`` with ``balance``, ``labels_per_client``, ``quantity_skew``.

"""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]

# Beyond these numpy's sampler loses its precision (sums of gamma variates overflow, densities underflow), while the
# distribution is its limit to within any sample count: the mean, or one category alone.
_ALPHA_OF_MEAN, _ALPHA_OF_ONE = 1e15, 1e-15


class PartitionError(ValueError):
    """An argument that no split of these data can have; the command line shows it without a traceback."""


def iid(num_samples: int, num_clients: int, seed: int) -> list[IndexArray]:
    """Deals a random permutation of the samples to clients whose sizes differ by at most one.

    Args:
        num_samples: Number of samples.
        num_clients: Number of clients, at most ``num_samples``.
        seed: Seed, not negative.

    Returns:
        One index array per client.

    Raises:
        ValueError: If a number is out of its range.

    Example:
        >>> [part.size for part in iid(10, num_clients=3, seed=0)]
        [4, 3, 3]

    """
    _check_clients(num_clients, num_samples)
    order = _generator("iid", seed).permutation(num_samples)
    return _deal_in_order(order, _even_sizes(num_samples, num_clients))


def dirichlet_per_class(
    labels: npt.ArrayLike,
    num_clients: int,
    alpha: float,
    seed: int,
    *,
    balance: bool = False,
    min_size: int = 10,
    max_tries: int = 1000,
) -> list[IndexArray]:
    r"""Splits every class over the clients in proportions drawn from a Dirichlet distribution ("label-dir").

    .. math:: p_c \sim \mathrm{Dir}(\alpha 1_K), \qquad
        \text{client } k \text{ gets samples } \lfloor N_c \textstyle\sum_{j<k} p_{cj} \rfloor \text{ to }
        \lfloor N_c \sum_{j \le k} p_{cj} \rfloor \text{ of the shuffled class } c

    Sizes vary over clients: small ``alpha`` skews both labels and sizes. For equal sizes see
    :func:`dirichlet_per_client`.

    Args:
        labels: Class of each sample, shape ``(N,)``.
        num_clients: Number of clients :math:`K`.
        alpha: Concentration, greater than 0; ``inf`` splits every class evenly.
        seed: Seed, not negative.
        balance: Whether a client that holds :math:`N / K` samples or more gets none of the next classes (the
            proportions of the others are scaled up). NIID-Bench's code always does this.
        min_size: Smallest number of samples that a client may have; everything is drawn again until it is reached.
        max_tries: Number of draws after which to give up.

    Returns:
        One index array per client.

    Raises:
        ValueError: If an argument is out of its range, or no draw gives every client ``min_size`` samples.

    Example:
        >>> parts = dirichlet_per_class([0, 1] * 50, num_clients=4, alpha=1.0, seed=0)
        >>> sum(part.size for part in parts), min(part.size for part in parts) >= 10
        (100, True)

    """
    classes, class_sizes = _classes(labels)
    _check_clients(num_clients, classes.size)
    if not alpha > 0:
        raise PartitionError(f"Expected `alpha` to be greater than 0, but got {alpha}.")
    _check_min_size(min_size, num_clients, classes.size)
    rng = _generator("dirichlet_per_class", seed)
    for _ in range(_at_least("max_tries", max_tries, 1)):
        counts = _counts_per_class(rng, class_sizes, num_clients, alpha, balance)
        if counts.sum(axis=1).min() >= min_size:
            return _deal_by_class(rng, classes, counts)
    raise PartitionError(
        f"Expected every client to get at least {min_size} samples (`min_size`), but none of {max_tries} draws gave"
        f" that to {num_clients} clients of {classes.size} samples with alpha={alpha}. Lower `min_size` or"
        " `num_clients`, or raise `alpha`."
    )


def dirichlet_per_client(
    labels: npt.ArrayLike,
    num_clients: int,
    alpha: float,
    seed: int,
    *,
    prior: Literal["empirical", "uniform"] = "empirical",
) -> list[IndexArray]:
    r"""Gives every client equally many samples, with its own class probabilities drawn from a Dirichlet distribution.

    .. math:: q_k \sim \mathrm{Dir}(\alpha \pi), \qquad
        \lfloor N / K \rfloor \text{ times: class} \sim q_k \text{, an unused sample of that class}

    with :math:`\pi` a prior over the classes that sums to 1 (so the concentrations sum to ``alpha``, as in the paper,
    not to ``alpha`` times the number of classes). A class that has run out gets mass 0 and the others are scaled up; if
    they have no mass, :math:`q_k` is drawn again over the classes that are left. Clients are served in order, so
    it is the last ones that have to take what is left.

    The :math:`N \bmod K` samples left at the end go to nobody.

    Args:
        labels: Class of each sample, shape ``(N,)``.
        num_clients: Number of clients :math:`K`.
        alpha: Concentration, at least 0. With 0 every client has one class, drawn among those that still have enough
            samples for a whole client (a client has more only if there is none). With ``inf`` and the empirical
            prior the clients are identical: every class is dealt out evenly, to within one sample.
        seed: Seed, not negative.
        prior: The classes' shares of the data, or the same for every class.

    Returns:
        One index array per client, all of the same size.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> parts = dirichlet_per_client([0, 1] * 50, num_clients=4, alpha=0.1, seed=0)
        >>> [part.size for part in parts]
        [25, 25, 25, 25]

    """
    classes, class_sizes = _classes(labels)
    _check_clients(num_clients, classes.size)
    if not alpha >= 0:
        raise PartitionError(f"Expected `alpha` to be at least 0, but got {alpha}.")
    if prior not in ("empirical", "uniform"):
        raise PartitionError(f"Expected `prior` to be 'empirical' or 'uniform', but got {prior!r}.")
    rng = _generator("dirichlet_per_client", seed)
    pi = class_sizes / classes.size if prior == "empirical" else np.full(class_sizes.size, 1 / class_sizes.size)
    size = classes.size // num_clients
    if alpha == np.inf and prior == "empirical":  # drawn one by one, the last clients would get very different rests
        dealt = rng.permutation(classes.size)[: size * num_clients]
        owner = np.full(classes.size, -1, dtype=np.int64)
        owner[dealt[np.argsort(classes[dealt], kind="stable")]] = np.arange(dealt.size) % num_clients
        return _by_owner(owner, num_clients)
    left = class_sizes.copy()
    counts = np.zeros((num_clients, class_sizes.size), dtype=np.int64)
    for count in counts:
        count[:] = _draw_client(rng, pi, alpha, size, left)
        left -= count
    return _deal_by_class(rng, classes, counts)


def shards(labels: npt.ArrayLike, num_clients: int, shards_per_client: int, seed: int) -> list[IndexArray]:
    r"""Sorts the samples by label, cuts them into equal shards, and gives every client some at random.

    With :math:`K` clients and :math:`z` shards each there are :math:`K z` shards of :math:`\lfloor N / (K z) \rfloor`
    samples; the fewer than :math:`K z` samples that remain, the last in the order, go to nobody. A shard may straddle
    two labels, so a client has at most :math:`2 z` of them where every label fills a shard, and mostly :math:`z` or
    fewer.

    Args:
        labels: Class of each sample, shape ``(N,)``.
        num_clients: Number of clients :math:`K`.
        shards_per_client: Number of shards per client :math:`z`; MNIST in the paper: 100 clients, 2 shards of 300.
        seed: Seed, not negative.

    Returns:
        One index array per client, all of the same size.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> [part.tolist() for part in shards([0, 0, 1, 1], num_clients=2, shards_per_client=1, seed=0)]
        [[0, 1], [2, 3]]

    """
    classes, _ = _classes(labels)
    _check_clients(num_clients, classes.size)
    num_shards = num_clients * _at_least("shards_per_client", shards_per_client, 1)
    if num_shards > classes.size:
        raise PartitionError(
            f"Expected `num_clients` * `shards_per_client` to be at most the number of samples ({classes.size}), but"
            f" got {num_clients} * {shards_per_client}."
        )
    size = classes.size // num_shards
    owner_of_shard = np.empty(num_shards, dtype=np.int64)
    owner_of_shard[_generator("shards", seed).permutation(num_shards)] = np.arange(num_shards) // shards_per_client
    owner = np.full(classes.size, -1, dtype=np.int64)
    owner[np.argsort(classes, kind="stable")[: size * num_shards]] = np.repeat(owner_of_shard, size)
    return _by_owner(owner, num_clients)


def labels_per_client(
    labels: npt.ArrayLike,
    num_clients: int,
    labels_per_client: int,
    seed: int,
    *,
    assignment: Literal["random", "even"] = "random",
) -> list[IndexArray]:
    """Gives every client samples of a fixed number of labels (NIID-Bench's "#label").

    The samples of a label are shared equally (to within one) by the clients that have it. A label that no client has
    goes to nobody; where a label has more owners than samples, the last owners get none.

    Args:
        labels: Class of each sample, shape ``(N,)``.
        num_clients: Number of clients.
        labels_per_client: Number of different labels per client, at most as many as there are.
        seed: Seed, not negative.
        assignment: Who has which of the C labels. "random", as in NIID-Bench: client k has label k mod C and others at
            random; with fewer clients than labels, some may go to nobody. "even": every label has equally many owners,
            to within one, at random otherwise; if there are as many labels as ``num_clients * labels_per_client``,
            every one is with one client, as a whole. Labels go to nobody only where there are more than that.

    Returns:
        One index array per client.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import numpy as np
        >>> y = np.arange(100) % 5
        >>> [np.unique(y[part]).size for part in labels_per_client(y, num_clients=10, labels_per_client=2, seed=0)]
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
        >>> parts = labels_per_client(y, num_clients=5, labels_per_client=1, seed=0, assignment="even")
        >>> sorted(np.unique(y[part]).tolist() for part in parts)
        [[0], [1], [2], [3], [4]]

    """
    classes, class_sizes = _classes(labels)
    _check_clients(num_clients, classes.size)
    if not 1 <= labels_per_client <= class_sizes.size:
        raise PartitionError(
            f"Expected `labels_per_client` to be from 1 to the number of different labels ({class_sizes.size}), but got"
            f" {labels_per_client}."
        )
    if assignment not in ("random", "even"):
        raise PartitionError(f"Expected `assignment` to be 'random' or 'even', but got {assignment!r}.")
    rng = _generator("labels_per_client", seed)
    if assignment == "even":
        owned = _evenly_owned(rng, num_clients, class_sizes.size, labels_per_client)
    else:
        clients = np.arange(num_clients)
        scores = rng.random((num_clients, class_sizes.size))
        scores[clients, clients % class_sizes.size] = -1.0  # the lowest: every client's first label
        owned = np.zeros(scores.shape, dtype=np.int64)
        np.put_along_axis(owned, np.argsort(scores, axis=1)[:, :labels_per_client], 1, axis=1)
    num_owners = np.maximum(owned.sum(axis=0), 1)
    is_among_the_first = np.cumsum(owned, axis=0) <= class_sizes % num_owners
    return _deal_by_class(rng, classes, owned * (class_sizes // num_owners + is_among_the_first))


def quantity_skew(
    num_samples: int,
    num_clients: int,
    seed: int,
    *,
    distribution: Literal["dirichlet", "lognormal"] = "dirichlet",
    beta: float = 0.5,
    sigma: float = 1.0,
    min_size: int = 10,
    max_tries: int = 1000,
) -> list[IndexArray]:
    r"""Deals the samples at random to clients of unequal sizes.

    .. math:: p \sim \mathrm{Dir}(\beta 1_K) \quad \text{or} \quad
        p_k \propto s_k,\ \log s_k \sim \mathcal N(0, \sigma^2); \qquad
        \text{cut at } \lfloor N \textstyle\sum_{j \le k} p_j \rfloor

    (The mean of :math:`\log s_k` cancels.)

    Args:
        num_samples: Number of samples.
        num_clients: Number of clients :math:`K`.
        seed: Seed, not negative.
        distribution: ``"dirichlet"`` (NIID-Bench's "iid-diff-quantity") or ``"lognormal"`` (as in the FedProx data).
        beta: Concentration of the Dirichlet distribution, greater than 0; ``inf`` gives equal sizes.
        sigma: Standard deviation of the logarithm of a log-normal size, at least 0.
        min_size: Smallest number of samples that a client may have; the sizes are drawn again until it is reached.
        max_tries: Number of draws after which to give up.

    Returns:
        One index array per client.

    Raises:
        ValueError: If an argument is out of its range, or no draw gives every client ``min_size`` samples.

    Example:
        >>> parts = quantity_skew(1000, num_clients=5, seed=0)
        >>> sum(part.size for part in parts), min(part.size for part in parts) >= 10
        (1000, True)

    """
    _check_clients(num_clients, num_samples)
    if distribution not in ("dirichlet", "lognormal"):
        raise PartitionError(f"Expected `distribution` to be 'dirichlet' or 'lognormal', but got {distribution!r}.")
    if not beta > 0:
        raise PartitionError(f"Expected `beta` to be greater than 0, but got {beta}.")
    if not 0 <= sigma < np.inf:
        raise PartitionError(f"Expected `sigma` to be at least 0 and finite, but got {sigma}.")
    _check_min_size(min_size, num_clients, num_samples)
    rng = _generator("quantity_skew", seed)
    for _ in range(_at_least("max_tries", max_tries, 1)):
        if distribution == "dirichlet":
            shares = _dirichlet(rng, np.full(num_clients, 1 / num_clients), beta * num_clients, 1)[0]
        else:
            logarithms = rng.normal(0.0, sigma, num_clients)
            shares = np.exp(logarithms - logarithms.max())
            shares /= shares.sum()
        sizes = _cut(shares[None], np.array([num_samples]))[0]
        if sizes.min() >= min_size:
            return _deal_in_order(rng.permutation(num_samples), sizes)
    spread = f"beta={beta}" if distribution == "dirichlet" else f"sigma={sigma}"
    raise PartitionError(
        f"Expected every client to get at least {min_size} samples (`min_size`), but none of {max_tries} draws gave"
        f" that to {num_clients} clients of {num_samples} samples with {spread}. Lower `min_size` or `num_clients`, or"
        f" {'raise `beta`' if distribution == 'dirichlet' else 'lower `sigma`'}."
    )


def by_group(groups: npt.ArrayLike) -> list[IndexArray]:
    """Makes every group a client: writers, speakers, videos, hospitals.

    Args:
        groups: Group of each sample, shape ``(N,)``, numbers or strings.

    Returns:
        One index array per group, in the order of ``np.unique(groups)``.

    Raises:
        ValueError: If ``groups`` is not one-dimensional or is empty.

    Example:
        >>> [part.tolist() for part in by_group(["b", "a", "b"])]
        [[1], [0, 2]]

    """
    names, owner = np.unique(_one_dimensional("groups", groups), return_inverse=True)
    return _by_owner(owner.astype(np.int64), names.size)


def pixel_permutation(num_pixels: int, client: int, seed: int) -> IndexArray:
    """The client's own permutation of the pixels (user-specific Permuted MNIST).

    It depends on nothing but the arguments, so the same client permutes its training and its test images in the same
    way, and a client's permutation costs the same however many clients there are. Client 0 is permuted too.

    Args:
        num_pixels: Number of pixels, 784 for MNIST.
        client: Index of the client, from 0.
        seed: Seed, not negative.

    Returns:
        The permutation: pixel ``i`` of the permuted image is pixel ``permutation[i]`` of the original. It is uniform
        over all permutations and independent of the other clients', so two clients share one by chance only
        where there are hardly any pixels.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import numpy as np
        >>> image = np.arange(784)
        >>> permutation = pixel_permutation(784, client=3, seed=0)
        >>> bool((image[permutation][np.argsort(permutation)] == image).all())
        True

    """
    _at_least("num_pixels", num_pixels, 1)
    _at_least("client", client, 0)
    return _generator("pixel_permutation", seed, client).permutation(num_pixels).astype(np.int64)


def _generator(purpose: str, seed: int, *keys: int) -> np.random.Generator:
    """An independent stream of random numbers per purpose, seed and keys."""
    _at_least("seed", seed, 0)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *keys)))


def _dirichlet(
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


def _cut(shares: npt.NDArray[np.float64], totals: IndexArray) -> IndexArray:
    """Sizes of the pieces when row r of ``totals`` is cut at the running sums of row r of ``shares``, rounded down."""
    edges = np.floor(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    edges = np.minimum(edges, totals[:, None])
    edges[:, -1] = totals
    return np.diff(edges, axis=1, prepend=0)


def _counts_per_class(
    rng: np.random.Generator, class_sizes: IndexArray, num_clients: int, alpha: float, balance: bool
) -> IndexArray:
    """One draw of the number of samples of every class for every client, shape (clients, classes)."""
    mean = np.full(num_clients, 1 / num_clients)
    shares = _dirichlet(rng, mean, alpha * num_clients, class_sizes.size)
    if not balance:
        return _cut(shares, class_sizes).T
    counts = np.zeros((num_clients, class_sizes.size), dtype=np.int64)
    held = np.zeros(num_clients, dtype=np.int64)
    for label, total in enumerate(class_sizes):
        has_room = held * num_clients < class_sizes.sum()  # never empty: then all samples would be dealt
        share = shares[label] * has_room
        if share.sum() == 0:  # all of the mass was on full clients, as happens with a tiny alpha
            share[has_room] = _dirichlet(rng, np.full(has_room.sum(), 1 / has_room.sum()), alpha * has_room.sum(), 1)[0]
        counts[:, label] = _cut((share / share.sum())[None], total[None])[0]
        held += counts[:, label]
    return counts


def _draw_client(
    rng: np.random.Generator, pi: npt.NDArray[np.float64], alpha: float, size: int, left: IndexArray
) -> IndexArray:
    """Number of samples of every class for one client, when ``left`` of each class are unused.

    Drawing ``size`` classes at once and drawing again for those that had run out is the same, in distribution, as
    drawing them one by one and dropping a class as soon as its last sample is taken.
    """
    count = np.zeros_like(left)
    if alpha == 0:
        suffices = left >= size
        mass = _dirichlet(rng, _normalised(pi * (suffices if suffices.any() else left > 0)), alpha, 1)[0]
    else:
        mass = _dirichlet(rng, pi, alpha, 1)[0]
    while (missing := size - int(count.sum())) > 0:
        is_left = left > count
        if (mass * is_left).sum() == 0:
            mass[is_left] = _dirichlet(rng, _normalised(pi[is_left]), alpha * pi[is_left].sum(), 1)[0]
        drawn = rng.multinomial(missing, _normalised(mass[is_left]))
        count[is_left] += np.minimum(drawn, (left - count)[is_left])
    return count


def _evenly_owned(rng: np.random.Generator, num_clients: int, num_labels: int, per_client: int) -> IndexArray:
    """Deals shuffled decks of all labels, one after another, a hand of different ones to each client."""
    owned = np.zeros((num_clients, num_labels), dtype=np.int64)
    deck = rng.permutation(num_labels)
    for own in owned:
        if deck.size >= per_client:
            hand, deck = deck[:per_client], deck[per_client:]
        else:
            own[deck] = 1
            fresh = rng.permutation(num_labels)
            fresh = np.concatenate([fresh[own[fresh] == 0], fresh[own[fresh] == 1]])  # what the client has goes below
            hand, deck = fresh[: per_client - deck.size], fresh[per_client - deck.size :]
        own[hand] = 1
    return owned


def _normalised(mass: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    normalised: npt.NDArray[np.float64] = mass / mass.sum()
    return normalised


def _deal_by_class(rng: np.random.Generator, classes: IndexArray, counts: IndexArray) -> list[IndexArray]:
    """Gives client k ``counts[k, c]`` random samples of class c; the rest of a class goes to nobody."""
    num_clients, num_classes = counts.shape
    order = rng.permutation(classes.size)
    order = order[np.argsort(classes[order], kind="stable")]  # class by class, at random within a class
    unused = np.bincount(classes, minlength=num_classes) - counts.sum(axis=0)
    pieces = np.concatenate([counts, unused[None]]).T.ravel()
    owners = np.append(np.arange(num_clients), -1)
    owner = np.empty(classes.size, dtype=np.int64)
    owner[order] = np.repeat(np.tile(owners, num_classes), pieces)
    return _by_owner(owner, num_clients)


def _deal_in_order(order: IndexArray, sizes: IndexArray) -> list[IndexArray]:
    """Gives client k the next ``sizes[k]`` samples of ``order``."""
    owner = np.empty(order.size, dtype=np.int64)
    owner[order] = np.repeat(np.arange(sizes.size), sizes)
    return _by_owner(owner, sizes.size)


def _by_owner(owner: IndexArray, num_clients: int) -> list[IndexArray]:
    """The samples of every client in ascending order; those of owner -1 belong to nobody."""
    order = np.argsort(owner, kind="stable").astype(np.int64)
    edges = np.cumsum(np.bincount(owner + 1, minlength=num_clients + 1))
    return [part.copy() for part in np.split(order, edges[:-1])[1:]]  # copies: a part alone does not keep all alive


def _even_sizes(total: int, num_parts: int) -> IndexArray:
    return np.full(num_parts, total // num_parts) + (np.arange(num_parts) < total % num_parts)


def _classes(labels: npt.ArrayLike) -> tuple[IndexArray, IndexArray]:
    """Labels renumbered from 0 in their order, and the number of samples of each."""
    array = _one_dimensional("labels", labels)
    if array.dtype.kind not in "iubUS":
        raise PartitionError(f"Expected `labels` to be integers or strings, but got an array of {array.dtype}.")
    _, classes, class_sizes = np.unique(array, return_inverse=True, return_counts=True)
    return classes.astype(np.int64), class_sizes.astype(np.int64)


def _one_dimensional(name: str, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise PartitionError(f"Expected `{name}` to have shape (N,) with N at least 1, but got {array.shape}.")
    return array


def _at_least(name: str, value: int, lowest: int) -> int:
    if value < lowest:
        raise PartitionError(f"Expected `{name}` to be at least {lowest}, but got {value}.")
    return value


def _check_clients(num_clients: int, num_samples: int) -> None:
    _at_least("num_clients", num_clients, 1)
    if num_clients > num_samples:
        raise PartitionError(
            f"Expected `num_clients` to be at most the number of samples ({num_samples}), but got {num_clients}."
        )


def _check_min_size(min_size: int, num_clients: int, num_samples: int) -> None:
    _at_least("min_size", min_size, 0)
    if min_size * num_clients > num_samples:
        raise PartitionError(
            f"Expected `min_size` * `num_clients` to be at most the number of samples ({num_samples}), but got"
            f" {min_size} * {num_clients}."
        )
