"""Label skew: ways to split a data set in which clients see the classes in unlike shares.

See :mod:`lightning_fed.functional.partition`, from which these functions are imported.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_fed.functional.dealing import (
    IndexArray,
    PartitionError,
    at_least,
    check_clients,
    check_min_size,
    cut,
    deal_by_class,
    draw_dirichlet,
    generator_for,
    number_classes,
    parts_of_owners,
)


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
    classes, class_sizes = number_classes(labels)
    check_clients(num_clients, classes.size)
    if not alpha > 0:
        raise PartitionError(f"Expected `alpha` to be greater than 0, but got {alpha}.")
    check_min_size(min_size, num_clients, classes.size)
    rng = generator_for("dirichlet_per_class", seed)
    for _ in range(at_least("max_tries", max_tries, 1)):
        counts = _counts_per_class(rng, class_sizes, num_clients, alpha, balance)
        if counts.sum(axis=1).min() >= min_size:
            return deal_by_class(rng, classes, counts)
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
    classes, class_sizes = number_classes(labels)
    check_clients(num_clients, classes.size)
    if not alpha >= 0:
        raise PartitionError(f"Expected `alpha` to be at least 0, but got {alpha}.")
    if prior not in ("empirical", "uniform"):
        raise PartitionError(f"Expected `prior` to be 'empirical' or 'uniform', but got {prior!r}.")
    rng = generator_for("dirichlet_per_client", seed)
    pi = class_sizes / classes.size if prior == "empirical" else np.full(class_sizes.size, 1 / class_sizes.size)
    size = classes.size // num_clients
    if alpha == np.inf and prior == "empirical":  # drawn one by one, the last clients would get very different rests
        dealt = rng.permutation(classes.size)[: size * num_clients]
        owner = np.full(classes.size, -1, dtype=np.int64)
        owner[dealt[np.argsort(classes[dealt], kind="stable")]] = np.arange(dealt.size) % num_clients
        return parts_of_owners(owner, num_clients)
    left = class_sizes.copy()
    counts = np.zeros((num_clients, class_sizes.size), dtype=np.int64)
    for count in counts:
        count[:] = _draw_client(rng, pi, alpha, size, left)
        left -= count
    return deal_by_class(rng, classes, counts)


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
    classes, _ = number_classes(labels)
    check_clients(num_clients, classes.size)
    num_shards = num_clients * at_least("shards_per_client", shards_per_client, 1)
    if num_shards > classes.size:
        raise PartitionError(
            f"Expected `num_clients` * `shards_per_client` to be at most the number of samples ({classes.size}), but"
            f" got {num_clients} * {shards_per_client}."
        )
    size = classes.size // num_shards
    owner_of_shard = np.empty(num_shards, dtype=np.int64)
    owner_of_shard[generator_for("shards", seed).permutation(num_shards)] = np.arange(num_shards) // shards_per_client
    owner = np.full(classes.size, -1, dtype=np.int64)
    owner[np.argsort(classes, kind="stable")[: size * num_shards]] = np.repeat(owner_of_shard, size)
    return parts_of_owners(owner, num_clients)


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
    classes, class_sizes = number_classes(labels)
    check_clients(num_clients, classes.size)
    if not 1 <= labels_per_client <= class_sizes.size:
        raise PartitionError(
            f"Expected `labels_per_client` to be from 1 to the number of different labels ({class_sizes.size}), but got"
            f" {labels_per_client}."
        )
    if assignment not in ("random", "even"):
        raise PartitionError(f"Expected `assignment` to be 'random' or 'even', but got {assignment!r}.")
    rng = generator_for("labels_per_client", seed)
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
    return deal_by_class(rng, classes, owned * (class_sizes // num_owners + is_among_the_first))


def _counts_per_class(
    rng: np.random.Generator, class_sizes: IndexArray, num_clients: int, alpha: float, balance: bool
) -> IndexArray:
    """One draw of the number of samples of every class for every client, shape (clients, classes)."""
    mean = np.full(num_clients, 1 / num_clients)
    shares = draw_dirichlet(rng, mean, alpha * num_clients, class_sizes.size)
    if not balance:
        return cut(shares, class_sizes).T
    counts = np.zeros((num_clients, class_sizes.size), dtype=np.int64)
    held = np.zeros(num_clients, dtype=np.int64)
    for label, total in enumerate(class_sizes):
        has_room = held * num_clients < class_sizes.sum()  # never empty: then all samples would be dealt
        share = shares[label] * has_room
        if share.sum() == 0:  # all of the mass was on full clients, as happens with a tiny alpha
            room = has_room.sum()
            share[has_room] = draw_dirichlet(rng, np.full(room, 1 / room), alpha * room, 1)[0]
        counts[:, label] = cut((share / share.sum())[None], total[None])[0]
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
        mass = draw_dirichlet(rng, _normalised(pi * (suffices if suffices.any() else left > 0)), alpha, 1)[0]
    else:
        mass = draw_dirichlet(rng, pi, alpha, 1)[0]
    while (missing := size - int(count.sum())) > 0:
        is_left = left > count
        if (mass * is_left).sum() == 0:
            mass[is_left] = draw_dirichlet(rng, _normalised(pi[is_left]), alpha * pi[is_left].sum(), 1)[0]
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
