"""Partitions that skew the labels: every client sees the classes in shares of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

from lightning_fed.data.labels import MapDataset, labels_of
from lightning_fed.data.partition_base import Partition, at_least, checked_seed, numbered, one_of, own_seed
from lightning_fed.functional import partition as functional
from lightning_fed.functional.partition import IndexArray
from lightning_fed.messages import Client

LabelFn = Callable[[Any], int]
"""Function of a sample that gives its label."""


@final
class Dirichlet(Partition):
    r"""Label skew drawn from a Dirichlet distribution, by either of its two published definitions.

    ``definition="per_class"`` splits every class over the clients in proportions
    :math:`p_c \sim \mathrm{Dir}(\alpha 1_K)`, so that sizes vary too. ``definition="per_client"`` gives every client
    equally many samples, with class probabilities :math:`q_k \sim \mathrm{Dir}(\alpha \pi)` around the data's own
    :math:`\pi`; there the concentrations sum to ``alpha``, so the same ``alpha`` is a stronger skew.

    Args:
        num_clients: Number of clients, at least 1.
        alpha: Concentration: small for much skew, ``inf`` for none. Greater than 0; per client 0 is allowed, and means
            one class per client.
        definition: ``"per_class"`` or ``"per_client"``.
        min_size: Per class: smallest number of samples of a client; the split is drawn again until it is reached.
        balance: Per class: whether a client that holds an equal share of all samples gets no more, as in NIID-Bench's
            code.
        label_fn: Function of a sample that gives its label, in place of the data set's targets.
        ignore_index: Value of void pixels in masks; ``None`` for none.
        background: Class of masks that is not foreground; ``None`` where every class counts.
        seed: Seed of the split; ``None`` for the federation's.

    Raises:
        ValueError: If an argument is out of its range.

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
        min_size: int = 10,
        balance: bool = False,
        label_fn: LabelFn | None = None,
        ignore_index: int | None = 255,
        background: int | None = 0,
        seed: int | None = None,
    ) -> None:
        self.num_clients = at_least("num_clients", num_clients, 1)
        self.definition = one_of("definition", definition, "per_class", "per_client")
        if definition == "per_class" and not alpha > 0:
            raise ValueError(f"Expected `alpha` to be greater than 0, but got {alpha}.")
        if not alpha >= 0:
            raise ValueError(f"Expected `alpha` to be at least 0, but got {alpha}.")
        if definition == "per_client" and balance:
            raise ValueError(
                "Expected `balance` with definition='per_class' only, but got it with 'per_client', where all clients"
                " have the same size."
            )
        self.alpha = alpha
        self.min_size = at_least("min_size", min_size, 0)
        self.balance = balance
        self.label_fn = label_fn
        self.ignore_index = ignore_index
        self.background = background
        self.seed = checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``.

        Raises:
            ValueError: If no draw gives every client ``min_size`` samples.

        """
        labels = labels_of(dataset, self.label_fn, ignore_index=self.ignore_index, background=self.background)
        seed = own_seed(self.seed, seed)
        if self.definition == "per_client":
            parts = functional.dirichlet_per_client(labels, self.num_clients, self.alpha, seed)
        else:
            parts = functional.dirichlet_per_class(
                labels, self.num_clients, self.alpha, seed, balance=self.balance, min_size=self.min_size
            )
        return numbered(self, dataset, parts)


@final
class Shards(Partition):
    """Pathological label skew: the samples sorted by label, cut into equal shards, and dealt out.

    Args:
        num_clients: Number of clients, at least 1.
        shards_per_client: Shards for each client, at least 1: roughly the number of labels it sees. Fewer than
            ``num_clients * shards_per_client`` samples are left over.
        label_fn: Function of a sample that gives its label, in place of the data set's targets.
        ignore_index: Value of void pixels in masks; ``None`` for none.
        background: Class of masks that is not foreground; ``None`` where every class counts.
        seed: Seed of the split; ``None`` for the federation's.

    Raises:
        ValueError: If an argument is out of its range.

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
        self.num_clients = at_least("num_clients", num_clients, 1)
        self.shards_per_client = at_least("shards_per_client", shards_per_client, 1)
        self.label_fn = label_fn
        self.ignore_index = ignore_index
        self.background = background
        self.seed = checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``."""
        labels = labels_of(dataset, self.label_fn, ignore_index=self.ignore_index, background=self.background)
        parts = functional.shards(labels, self.num_clients, self.shards_per_client, own_seed(self.seed, seed))
        return numbered(self, dataset, parts)


@final
class LabelsPerClient(Partition):
    """Every client has the same number of labels, and shares each of them equally with the others that have it.

    Args:
        num_clients: Number of clients, at least 1.
        labels_per_client: Number of different labels of each client, at least 1.
        assignment: ``"random"`` draws a client's labels; with fewer clients than labels, some may go to nobody.
            ``"even"`` deals them out, so that all labels have equally many owners, to within one: a single one, who has
            it as a whole, if there are ``num_clients * labels_per_client`` labels.
        label_fn: Function of a sample that gives its label, in place of the data set's targets.
        ignore_index: Value of void pixels in masks; ``None`` for none.
        background: Class of masks that is not foreground; ``None`` where every class counts.
        seed: Seed of the split; ``None`` for the federation's.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.rand(40, 2), torch.arange(40) % 4)
        >>> split = LabelsPerClient(num_clients=4, labels_per_client=3).split(dataset, seed=0)
        >>> [len({i % 4 for i in indices.tolist()}) for indices in split.values()]
        [3, 3, 3, 3]

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, section IV
        (quantity-based label imbalance, "#C = k"). Evenly assigned, with many labels, as in "Efficient image
        representation learning with federated sampled softmax" (FedSS): 20 of 11,318 to each of 596 clients.

    """

    def __init__(
        self,
        num_clients: int,
        labels_per_client: int,
        assignment: Literal["random", "even"] = "random",
        label_fn: LabelFn | None = None,
        ignore_index: int | None = 255,
        background: int | None = 0,
        seed: int | None = None,
    ) -> None:
        self.num_clients = at_least("num_clients", num_clients, 1)
        self.labels_per_client = at_least("labels_per_client", labels_per_client, 1)
        self.assignment: Literal["random", "even"] = assignment
        one_of("assignment", assignment, "random", "even")
        self.label_fn = label_fn
        self.ignore_index = ignore_index
        self.background = background
        self.seed = checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``.

        Raises:
            ValueError: If the data set has fewer different labels than a client should have.

        """
        labels = labels_of(dataset, self.label_fn, ignore_index=self.ignore_index, background=self.background)
        seed = own_seed(self.seed, seed)
        parts = functional.labels_per_client(
            labels, self.num_clients, self.labels_per_client, seed, assignment=self.assignment
        )
        return numbered(self, dataset, parts)
