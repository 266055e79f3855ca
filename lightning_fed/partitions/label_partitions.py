"""Partitions with label skew: clients have different class distributions."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from lightning_fed.argument_checks import check_count, check_nonnegative, check_option
from lightning_fed.data.partition import MapDataset
from lightning_fed.partitions.base import NumberedPartition
from lightning_fed.partitions.label_lookup import NoLabels, labels_of
from lightning_fed.partitions.sample_assignment import (
    IndexArray,
    PartitionError,
    assign_by_class,
    cut_shares,
    draw_dirichlet,
    draw_until_large,
    generator_for,
    group_by_owner,
    number_classes,
)

LabelFn = Callable[[Any], int | str]
"""Function of a sample that gives its label."""


class LabelPartition(NumberedPartition):
    """Base class for partitions by class labels. Subclasses implement :meth:`assign_by_label`.

    Labels come from :func:`~lightning_fed.partitions.label_lookup.labels_of`. In segmentation, the label of an image is
    the foreground class with the most pixels.
    """

    def __init__(
        self,
        num_clients: int,
        label_fn: LabelFn | None,
        ignore_index: int | None,
        background: int | None,
        seed: int | None,
    ) -> None:
        super().__init__(num_clients, seed)
        self.label_fn = label_fn
        self.ignore_index = ignore_index
        self.background = background

    @abc.abstractmethod
    def assign_by_label(self, labels: IndexArray, seed: int) -> list[IndexArray]:
        """Assigns samples to clients by ``labels``, shape (samples,). Returns each client's sample indices."""

    def assign(self, dataset: MapDataset, seed: int) -> list[IndexArray]:
        try:
            labels = labels_of(dataset, self.label_fn, ignore_index=self.ignore_index, background=self.background)
        except NoLabels as error:
            name, number = type(self).__name__, self.num_clients
            raise NoLabels(
                f"`{name}` needs labels, but found none: use `IID({number})`, or add labels. {error}"
            ) from None
        return self.assign_by_label(labels, seed)


@final
class Dirichlet(LabelPartition):
    r"""Label skew from a Dirichlet distribution, in both published definitions.

    ``definition="per_class"`` splits the :math:`N_c` samples of each class c over :math:`K` clients with shares
    :math:`p_{ck}`. Client sizes vary.

    .. math:: p_c \sim \mathrm{Dir}(\alpha 1_K), \qquad
        \text{client } k \text{ gets samples } \lfloor N_c \textstyle\sum_{j<k} p_{cj} \rfloor \text{ to }
        \lfloor N_c \sum_{j \le k} p_{cj} \rfloor \text{ of the shuffled class } c

    ``definition="per_client"`` splits :math:`N` samples evenly. Client k draws classes with the probabilities
    :math:`q_k`:

    .. math:: q_k \sim \mathrm{Dir}(\alpha \pi), \qquad
        \lfloor N / K \rfloor \text{ times: class} \sim q_k \text{, an unused sample of that class}

    The prior class probabilities :math:`\pi` sum to 1. A class without remaining samples is not drawn. The same
    ``alpha`` gives a stronger skew than with ``"per_class"``. :math:`N \bmod K` samples are not assigned.

    Args:
        num_clients: Number of clients, at least 1.
        alpha: Concentration, greater than 0. Small values give a strong skew, ``inf`` gives none. With
            ``"per_client"``, 0 gives every client one class, if a class has enough unused samples.
        definition: ``"per_class"`` or ``"per_client"``.
        min_size: For ``"per_class"``: minimum samples per client. By default 10, or fewer after 1000 failed draws.
        balance: For ``"per_class"``: whether to give no further class to a client with :math:`N / K` or more samples.
        label_fn: Function from a sample to a label, used instead of the data set's targets.
        ignore_index: Mask value of pixels to skip, or ``None``.
        background: Background class in masks, or ``None``. An image has this label only if no other class is present.
        seed: Seed for the split; if ``None``, the federation's seed.
        prior: For ``"per_client"``: :math:`\pi`, class shares in the data (``"empirical"``) or equal (``"uniform"``).

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.rand(60, 2), torch.arange(60) % 3)
        >>> split = Dirichlet(num_clients=3, alpha=0, definition="per_client").split(dataset, seed=0)
        >>> [sorted({i % 3 for i in indices.tolist()}) for indices in split.values()]
        [[2], [0], [1]]

    References:
        - Per class: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019,
          section 4; Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, section
          IV.
        - Per client: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
          Classification", 2019, section 3.
    """

    def __init__(
        self,
        num_clients: int,
        alpha: float,
        definition: Literal["per_class", "per_client"] = "per_class",
        min_size: int | None = None,
        balance: bool = False,
        label_fn: LabelFn | None = None,
        ignore_index: int | None = 255,
        background: int | None = 0,
        seed: int | None = None,
        prior: Literal["empirical", "uniform"] = "empirical",
    ) -> None:
        super().__init__(num_clients, label_fn, ignore_index, background, seed)
        check_option("definition", definition, ("per_class", "per_client"))
        check_option("prior", prior, ("empirical", "uniform"))
        if definition == "per_class" and not alpha > 0:
            raise ValueError(f"Expected `alpha` to be greater than 0, but got {alpha}.")
        if not alpha >= 0:
            raise ValueError(f"Expected `alpha` to be at least 0, but got {alpha}.")
        if definition == "per_client" and balance:
            raise ValueError(
                "Expected `balance` with definition='per_class' only, but got it with 'per_client', where all "
                "clients have the same size."
            )
        if definition == "per_class" and prior != "empirical":
            raise ValueError(f"Expected `prior` with definition='per_client' only, but got {prior!r} with 'per_class'.")
        self.alpha = alpha
        self.definition = definition
        self.min_size = None if min_size is None else check_count("min_size", min_size, 0)
        self.balance = balance
        self.prior = prior

    def assign_by_label(self, labels: IndexArray, seed: int) -> list[IndexArray]:
        return self._per_class(labels, seed) if self.definition == "per_class" else self._per_client(labels, seed)

    def _per_class(self, labels: IndexArray, seed: int) -> list[IndexArray]:
        classes, class_sizes = number_classes(labels)
        rng = generator_for("dirichlet_per_class", seed)

        def draw() -> IndexArray:
            return _counts_per_class(rng, class_sizes, self.num_clients, self.alpha, self.balance)

        skew, remedy = f"alpha={self.alpha}", "raise `alpha`"
        counts = draw_until_large(draw, self.num_clients, classes.size, self.min_size, skew, remedy)
        return assign_by_class(rng, classes, counts)

    def _per_client(self, labels: IndexArray, seed: int) -> list[IndexArray]:
        classes, class_sizes = number_classes(labels)
        rng = generator_for("dirichlet_per_client", seed)
        is_empirical = self.prior == "empirical"
        pi = class_sizes / classes.size if is_empirical else np.full(class_sizes.size, 1 / class_sizes.size)
        size = classes.size // self.num_clients
        if self.alpha == np.inf and is_empirical:  # with single draws, the last clients would get very different shares
            assigned = rng.permutation(classes.size)[: size * self.num_clients]
            owner = np.full(classes.size, -1, dtype=np.int64)
            owner[assigned[np.argsort(classes[assigned], kind="stable")]] = np.arange(assigned.size) % self.num_clients
            return group_by_owner(owner, self.num_clients)
        unused = class_sizes.copy()
        counts = np.zeros((self.num_clients, class_sizes.size), dtype=np.int64)
        for count in counts:
            count[:] = _draw_client(rng, pi, self.alpha, size, unused)
            unused -= count
        return assign_by_class(rng, classes, counts)


@final
class Shards(LabelPartition):
    r"""Cuts the samples, sorted by label, into equal shards, and gives each client random shards.

    For :math:`N` samples and :math:`K` clients with :math:`z` shards each, a shard has :math:`N / (K z)` samples,
    rounded down. Remaining samples at the end are not assigned. A shard may contain two labels. A client usually has at
    most :math:`z` labels.

    Args:
        num_clients: Number of clients, at least 1.
        shards_per_client: Shards per client, at least 1. The paper gives each of 100 clients 2 shards of 300 MNIST
            samples.
        label_fn: Function from a sample to a label, instead of the data set's targets.
        ignore_index: Mask value of pixels to skip, or ``None``.
        background: Background class in masks, or ``None``. An image has this label only if no other class is present.
        seed: Seed for the split; if ``None``, the federation's seed.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.rand(8, 2), torch.arange(8) % 4)
        >>> split = Shards(num_clients=2, shards_per_client=2).split(dataset, seed=0)
        >>> [len({i % 4 for i in indices.tolist()}) for indices in split.values()]
        [2, 2]

    References:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
        section 3.
    """

    def __init__(
        self,
        num_clients: int,
        shards_per_client: int = 2,
        label_fn: LabelFn | None = None,
        ignore_index: int | None = 255,
        background: int | None = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_clients, label_fn, ignore_index, background, seed)
        self.shards_per_client = check_count("shards_per_client", shards_per_client)

    def assign_by_label(self, labels: IndexArray, seed: int) -> list[IndexArray]:
        classes, _ = number_classes(labels)
        num_shards = self.num_clients * self.shards_per_client
        if num_shards > classes.size:
            raise PartitionError(
                f"Expected `num_clients` * `shards_per_client` to be at most the number of samples ({classes.size}),"
                f" but got {self.num_clients} * {self.shards_per_client}."
            )
        size = classes.size // num_shards
        order = generator_for("shards", seed).permutation(num_shards)
        owner_of_shard = np.empty(num_shards, dtype=np.int64)
        owner_of_shard[order] = np.arange(num_shards) // self.shards_per_client
        owner = np.full(classes.size, -1, dtype=np.int64)
        owner[np.argsort(classes, kind="stable")[: size * num_shards]] = np.repeat(owner_of_shard, size)
        return group_by_owner(owner, self.num_clients)


@final
class LabelsPerClient(LabelPartition):
    r"""Gives every client the same number of labels. The clients with a label share its samples.

    By default the clients' shares are equal. With ``sigma`` each client with a label gets ``min_per_label`` samples,
    and a share :math:`p_k` in the remaining samples:

    .. math:: p_k \propto s_k,\ \log s_k \sim \mathcal N(0, \sigma^2)

    The numbers :math:`s_k` are drawn separately for each label. Samples whose label no client has are not assigned.

    Args:
        num_clients: Number of clients, at least 1.
        labels_per_client: Number of different labels per client, from 1 to the number of labels.
        assignment: How labels are chosen. ``"random"``, as in NIID-Bench: client k has label k modulo the number of
            labels, and others at random. ``"even"``: all labels have about equally many clients. ``"consecutive"``, as
            in FedProx: client k has the labels k, k + 1, ..., modulo the number of labels.
        label_fn: Function from a sample to a label, instead of the data set's targets.
        ignore_index: Mask value of pixels to skip, or ``None``.
        background: Background class in masks, or ``None``. An image has this label only if no other class is present.
        seed: Seed for the split; if ``None``, the federation's seed.
        sigma: Standard deviation :math:`\sigma` for random shares; 0 for equal shares.
        min_per_label: Minimum number of samples per client and label.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.rand(40, 2), torch.arange(40) % 4)
        >>> split = LabelsPerClient(num_clients=4, labels_per_client=3).split(dataset, seed=0)
        >>> [len({i % 4 for i in indices.tolist()}) for indices in split.values()]
        [3, 3, 3, 3]

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, section IV
        (quantity-based label imbalance, "#C = k"). Even assignment with many labels: "Efficient image representation
        learning with federated sampled softmax" (FedSS), with 20 out of 11,318 labels for each of 596 clients. Li et
        al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020: MNIST over 1,000 clients with two
        consecutive digits each, ``sigma=2`` and ``min_per_label=5``.
    """

    def __init__(
        self,
        num_clients: int,
        labels_per_client: int,
        assignment: Literal["random", "even", "consecutive"] = "random",
        label_fn: LabelFn | None = None,
        ignore_index: int | None = 255,
        background: int | None = 0,
        seed: int | None = None,
        sigma: float = 0.0,
        min_per_label: int = 0,
    ) -> None:
        super().__init__(num_clients, label_fn, ignore_index, background, seed)
        self.labels_per_client = check_count("labels_per_client", labels_per_client)
        check_option("assignment", assignment, ("random", "even", "consecutive"))
        check_nonnegative("sigma", sigma)
        self.assignment = assignment
        self.sigma = sigma
        self.min_per_label = check_count("min_per_label", min_per_label, 0)

    def assign_by_label(self, labels: IndexArray, seed: int) -> list[IndexArray]:
        classes, class_sizes = number_classes(labels)
        if not 1 <= self.labels_per_client <= class_sizes.size:
            raise PartitionError(
                f"Expected `labels_per_client` to be from 1 to the number of different labels ({class_sizes.size}), but"
                f" got {self.labels_per_client}."
            )
        rng = generator_for("labels_per_client", seed)
        if self.assignment == "even":
            owned = _evenly_owned(rng, self.num_clients, class_sizes.size, self.labels_per_client)
        elif self.assignment == "consecutive":
            distance = (np.arange(class_sizes.size) - np.arange(self.num_clients)[:, None]) % class_sizes.size
            owned = (distance < self.labels_per_client).astype(np.int64)
        else:
            clients = np.arange(self.num_clients)
            scores = rng.random((self.num_clients, class_sizes.size))
            scores[clients, clients % class_sizes.size] = -1.0  # the lowest: each client's first label
            owned = np.zeros(scores.shape, dtype=np.int64)
            np.put_along_axis(owned, np.argsort(scores, axis=1)[:, : self.labels_per_client], 1, axis=1)
        num_owners = owned.sum(axis=0)
        if (short := self.min_per_label * num_owners > class_sizes).any():
            raise PartitionError(
                f"Expected every label to have `min_per_label` ({self.min_per_label}) samples for each client with "
                f"the label, but one label has only {class_sizes[short][0]} samples for {num_owners[short][0]} "
                "clients: lower `min_per_label`, `labels_per_client` or `num_clients`."
            )
        if self.sigma > 0:
            return assign_by_class(rng, classes, self._skewed(rng, owned, class_sizes))
        num_owners = np.maximum(num_owners, 1)
        is_among_the_first = np.cumsum(owned, axis=0) <= class_sizes % num_owners
        return assign_by_class(rng, classes, owned * (class_sizes // num_owners + is_among_the_first))

    def _skewed(self, rng: np.random.Generator, owned: IndexArray, class_sizes: IndexArray) -> IndexArray:
        logarithms = rng.normal(0.0, self.sigma, owned.shape)
        counts = self.min_per_label * owned
        for label in np.flatnonzero(owned.sum(axis=0)):
            owners = np.flatnonzero(owned[:, label])
            shares = np.exp(logarithms[owners, label] - logarithms[owners, label].max())
            rest = class_sizes[label] - self.min_per_label * owners.size
            counts[owners, label] += cut_shares(shares[None] / shares.sum(), np.array([rest]))[0]
        return counts


def _counts_per_class(
    rng: np.random.Generator, class_sizes: IndexArray, num_clients: int, alpha: float, balance: bool
) -> IndexArray:
    mean = np.full(num_clients, 1 / num_clients)
    shares = draw_dirichlet(rng, mean, alpha * num_clients, class_sizes.size)
    if not balance:
        return cut_shares(shares, class_sizes).T
    counts = np.zeros((num_clients, class_sizes.size), dtype=np.int64)
    assigned = np.zeros(num_clients, dtype=np.int64)
    for label, total in enumerate(class_sizes):
        has_room = assigned * num_clients < class_sizes.sum()  # never empty: otherwise all samples would be assigned
        share = shares[label] * has_room
        if share.sum() == 0:  # full clients have all the mass, as with a tiny alpha
            room = has_room.sum()
            share[has_room] = draw_dirichlet(rng, np.full(room, 1 / room), alpha * room, 1)[0]
        counts[:, label] = cut_shares((share / share.sum())[None], total[None])[0]
        assigned += counts[:, label]
    return counts


def _draw_client(
    rng: np.random.Generator, pi: npt.NDArray[np.float64], alpha: float, size: int, unused: IndexArray
) -> IndexArray:
    count = np.zeros_like(unused)
    if alpha == 0:
        suffices = unused >= size
        mass = draw_dirichlet(rng, _normalised(pi * (suffices if suffices.any() else unused > 0)), alpha, 1)[0]
    else:
        mass = draw_dirichlet(rng, pi, alpha, 1)[0]
    while (missing := size - int(count.sum())) > 0:
        is_unused = unused > count
        if (mass * is_unused).sum() == 0:
            mass[is_unused] = draw_dirichlet(rng, _normalised(pi[is_unused]), alpha * pi[is_unused].sum(), 1)[0]
        drawn = rng.multinomial(missing, _normalised(mass[is_unused]))
        count[is_unused] += np.minimum(drawn, (unused - count)[is_unused])
    return count


def _evenly_owned(rng: np.random.Generator, num_clients: int, num_labels: int, per_client: int) -> IndexArray:
    owned = np.zeros((num_clients, num_labels), dtype=np.int64)
    remaining = rng.permutation(num_labels)
    for client_labels in owned:
        if remaining.size >= per_client:
            chosen, remaining = remaining[:per_client], remaining[per_client:]
        else:
            client_labels[remaining] = 1
            shuffled = rng.permutation(num_labels)
            shuffled = shuffled[np.argsort(client_labels[shuffled], kind="stable")]  # the client's labels come last
            chosen, remaining = shuffled[: per_client - remaining.size], shuffled[per_client - remaining.size :]
        client_labels[chosen] = 1
    return owned


def _normalised(mass: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    normalised: npt.NDArray[np.float64] = mass / mass.sum()
    return normalised
