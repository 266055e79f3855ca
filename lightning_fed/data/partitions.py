"""Partitions for the Trainer and the command line: which client gets which samples of one data set.

Thin classes around :mod:`lightning_fed.functional.partition`, which documents each way to split in full. A partition
finds the labels with :func:`lightning_fed.data.labels.labels_of`; for segmentation the label of an image is its
dominant foreground class.
"""

from __future__ import annotations

import abc
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.labels import MapDataset, groups_of, labels_of, length_of
from lightning_fed.functional import partition as functional
from lightning_fed.functional.partition import IndexArray
from lightning_fed.messages import Client

_log = logging.getLogger(__name__)

LabelFn = Callable[[Any], int]
"""Function of a sample that gives its label."""


class Partition(abc.ABC):
    """A way to split a data set over clients: a pure function of the data set and a seed.

    To write your own, override :meth:`split`.
    """

    @abc.abstractmethod
    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set.

        Args:
            dataset: A data set with ``__len__`` and ``__getitem__``.
            seed: The federation's seed, not negative.

        Returns:
            Client to the indices of its samples; no index occurs twice.

        """

    def transform(self, client: Client, seed: int) -> Callable[[Any], Any] | None:
        """What is done to each of a client's training samples; the same is right for its validation and test samples.

        Args:
            client: The client, a key of what :meth:`split` returns.
            seed: The seed that :meth:`split` was given.

        Returns:
            A picklable function of one sample, or ``None`` for nothing.

        """
        return None

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self)).parameters.values()
        values = [(p, getattr(self, p.name, p.default)) for p in parameters]
        shown = [f"{p.name}={value!r}" for p, value in values if repr(value) != repr(p.default)]
        return f"{type(self).__name__}({', '.join(shown)})"


@final
class IID(Partition):
    """Every client gets a random share of the data; sizes differ by at most one sample.

    Args:
        num_clients: Number of clients, at least 1.
        seed: Seed of the split; ``None`` for the federation's.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.rand(10, 2), torch.arange(10) % 2)
        >>> {client: indices.size for client, indices in IID(num_clients=3).split(dataset, seed=0).items()}
        {0: 4, 1: 3, 2: 3}

    References:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
        section 3.

    """

    def __init__(self, num_clients: int, seed: int | None = None) -> None:
        self.num_clients = _at_least("num_clients", num_clients, 1)
        self.seed = _checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``."""
        return _numbered(self, dataset, functional.iid(length_of(dataset), self.num_clients, _own(self.seed, seed)))


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
        self.num_clients = _at_least("num_clients", num_clients, 1)
        self.definition = _one_of("definition", definition, "per_class", "per_client")
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
        self.min_size = _at_least("min_size", min_size, 0)
        self.balance = balance
        self.label_fn = label_fn
        self.ignore_index = ignore_index
        self.background = background
        self.seed = _checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``.

        Raises:
            ValueError: If no draw gives every client ``min_size`` samples.

        """
        labels = labels_of(dataset, self.label_fn, ignore_index=self.ignore_index, background=self.background)
        seed = _own(self.seed, seed)
        if self.definition == "per_client":
            parts = functional.dirichlet_per_client(labels, self.num_clients, self.alpha, seed)
        else:
            parts = functional.dirichlet_per_class(
                labels, self.num_clients, self.alpha, seed, balance=self.balance, min_size=self.min_size
            )
        return _numbered(self, dataset, parts)


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
        self.num_clients = _at_least("num_clients", num_clients, 1)
        self.shards_per_client = _at_least("shards_per_client", shards_per_client, 1)
        self.label_fn = label_fn
        self.ignore_index = ignore_index
        self.background = background
        self.seed = _checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``."""
        labels = labels_of(dataset, self.label_fn, ignore_index=self.ignore_index, background=self.background)
        parts = functional.shards(labels, self.num_clients, self.shards_per_client, _own(self.seed, seed))
        return _numbered(self, dataset, parts)


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
        self.num_clients = _at_least("num_clients", num_clients, 1)
        self.labels_per_client = _at_least("labels_per_client", labels_per_client, 1)
        self.assignment: Literal["random", "even"] = assignment
        _one_of("assignment", assignment, "random", "even")
        self.label_fn = label_fn
        self.ignore_index = ignore_index
        self.background = background
        self.seed = _checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``.

        Raises:
            ValueError: If the data set has fewer different labels than a client should have.

        """
        labels = labels_of(dataset, self.label_fn, ignore_index=self.ignore_index, background=self.background)
        seed = _own(self.seed, seed)
        parts = functional.labels_per_client(
            labels, self.num_clients, self.labels_per_client, seed, assignment=self.assignment
        )
        return _numbered(self, dataset, parts)


@final
class QuantitySkew(Partition):
    """Clients of unequal sizes, each with a random share of the data.

    Args:
        num_clients: Number of clients, at least 1.
        beta: Concentration of ``"dirichlet"``: small for very unequal sizes. Greater than 0.
        distribution: Distribution of the sizes, ``"dirichlet"`` or ``"lognormal"``.
        sigma: Standard deviation of the logarithm of the sizes of ``"lognormal"``, at least 0.
        min_size: Smallest number of samples of a client; the sizes are drawn again until it is reached.
        seed: Seed of the split; ``None`` for the federation's.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> split = QuantitySkew(num_clients=4, beta=1.0).split(TensorDataset(torch.rand(200, 2)), seed=0)
        >>> sum(indices.size for indices in split.values())
        200

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, section IV (quantity
        skew).

    """

    def __init__(
        self,
        num_clients: int,
        beta: float = 0.5,
        distribution: Literal["dirichlet", "lognormal"] = "dirichlet",
        sigma: float = 1.0,
        min_size: int = 10,
        seed: int | None = None,
    ) -> None:
        self.num_clients = _at_least("num_clients", num_clients, 1)
        if not beta > 0:
            raise ValueError(f"Expected `beta` to be greater than 0, but got {beta}.")
        if not 0 <= sigma < float("inf"):
            raise ValueError(f"Expected `sigma` to be at least 0 and finite, but got {sigma}.")
        self.beta = beta
        self.distribution: Literal["dirichlet", "lognormal"] = distribution
        _one_of("distribution", distribution, "dirichlet", "lognormal")
        self.sigma = sigma
        self.min_size = _at_least("min_size", min_size, 0)
        self.seed = _checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``.

        Raises:
            ValueError: If no draw gives every client ``min_size`` samples.

        """
        parts = functional.quantity_skew(
            length_of(dataset),
            self.num_clients,
            _own(self.seed, seed),
            distribution=self.distribution,
            beta=self.beta,
            sigma=self.sigma,
            min_size=self.min_size,
        )
        return _numbered(self, dataset, parts)


@final
class PermutedPixels(Partition):
    """User-specific skew of the inputs: an IID split, and each client sees the pixels in an order of its own.

    Training data are permuted. Validation data of a datamodule are left as they are, and tell nothing of clients that
    see other images: :class:`~lightning_fed.data.PartitionedData` keeps some of every client's own back, permuted as
    these are. :meth:`transform` gives what to do to a client's.

    Args:
        num_clients: Number of clients, at least 1.
        seed: Seed of the split and of the permutations; ``None`` for the federation's.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> partition = PermutedPixels(num_clients=2)
        >>> image, label = partition.transform(client=0, seed=0)((torch.arange(4.0).reshape(1, 2, 2), 7))
        >>> image.shape, image.flatten().sort().values.tolist(), label
        (torch.Size([1, 2, 2]), [0.0, 1.0, 2.0, 3.0], 7)

    References:
        Yao et al., "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019, section 4.3
        (user-specific non-IID: Permuted MNIST).

    """

    def __init__(self, num_clients: int, seed: int | None = None) -> None:
        self.num_clients = _at_least("num_clients", num_clients, 1)
        self.seed = _checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into clients ``0`` to ``num_clients - 1``."""
        return _numbered(self, dataset, functional.iid(length_of(dataset), self.num_clients, _own(self.seed, seed)))

    def transform(self, client: Client, seed: int) -> Callable[[Any], Any]:
        """The client's permutation of the pixels of a sample's input; see :class:`PixelPermutation`."""
        if not isinstance(client, int) or not 0 <= client < self.num_clients:
            raise ValueError(f"Expected `client` to be from 0 to {self.num_clients - 1}, but got {client!r}.")
        return PixelPermutation(client, _own(self.seed, seed))


@final
class ByGroup(Partition):
    """Natural clients: every writer, speaker, video or hospital is one, under its own name.

    Args:
        group: Name of an attribute of the data set that holds the group of each sample, or the groups themselves, or a
            function of a sample that gives its group.
        seed: Accepted as everywhere, but nothing is random here.

    Raises:
        ValueError: If ``seed`` is negative.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.rand(3, 2))
        >>> {client: indices.tolist() for client, indices in ByGroup(["b", "a", "b"]).split(dataset, seed=0).items()}
        {'a': [1], 'b': [0, 2]}

    References:
        Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, section 2.

    """

    def __init__(
        self,
        group: Callable[[Any], int | str] | str | Sequence[int] | Sequence[str] = "groups",
        seed: int | None = None,
    ) -> None:
        self.group = group
        self.seed = _checked_seed(seed)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        """Splits a data set into its groups; nothing is random."""
        groups = groups_of(dataset, self.group)
        names = [name.item() for name in np.unique(groups)]
        return dict(zip(names, functional.by_group(groups), strict=True))


@final
@dataclass(frozen=True)
class PixelPermutation:
    """Permutes the pixels of a sample's input: one permutation of the H x W places for all channels.

    The input is the first element of a tuple or list, the entry ``"image"`` of a mapping (or its first), or the sample
    itself; it is a tensor of shape ``(..., H, W)``, or ``(P,)`` for flattened images. Targets are left alone, and so is
    the sample that is passed in.

    Args:
        client: Index of the client, from 0.
        seed: Seed, not negative.

    Example:
        >>> import torch
        >>> image = torch.arange(12).reshape(3, 2, 2)
        >>> permuted = PixelPermutation(client=1, seed=0)(image)
        >>> (permuted - permuted[0]).flatten(1).tolist()
        [[0, 0, 0, 0], [4, 4, 4, 4], [8, 8, 8, 8]]

    """

    client: int
    seed: int

    def __call__(self, sample: Any) -> Any:
        """The sample with its input permuted.

        Raises:
            TypeError: If the input is no tensor.

        """
        if isinstance(sample, Mapping):
            key = "image" if "image" in sample else next(iter(sample), None)
            return {**sample, key: self._permuted(sample.get(key))}
        if isinstance(sample, tuple | list) and sample:
            elements = [self._permuted(sample[0]), *sample[1:]]
            return type(sample)(*elements) if hasattr(sample, "_fields") else type(sample)(elements)
        return self._permuted(sample)

    def _permuted(self, image: Any) -> Tensor:
        if not isinstance(image, Tensor) or image.ndim == 0:
            raise TypeError(
                "Expected the input of a sample to be a tensor of shape (..., H, W), but got"
                f" {type(image).__name__}. Convert images to tensors in the data set's own transform."
            )
        pixels = image.flatten(-2) if image.ndim > 1 else image
        order = _permutation(pixels.shape[-1], self.client, self.seed).to(image.device)
        return pixels[..., order].reshape(image.shape)


@lru_cache(maxsize=64)  # a transform is made anew for every batch; 64 clients' permutations of 224 x 224 take 26 MB
def _permutation(num_pixels: int, client: int, seed: int) -> Tensor:
    return torch.from_numpy(functional.pixel_permutation(num_pixels, client, seed))


def _numbered(partition: Partition, dataset: MapDataset, parts: list[IndexArray]) -> dict[Client, IndexArray]:
    """Clients under their numbers; says how many samples go to nobody, and how many clients have none."""
    left_over = length_of(dataset) - sum(part.size for part in parts)
    num_empty = sum(part.size == 0 for part in parts)
    if left_over:
        _log.info("%r leaves over %d of %d samples.", partition, left_over, length_of(dataset))
    if num_empty:
        _log.info("%r leaves %d of %d clients without samples.", partition, num_empty, len(parts))
    return dict(enumerate(parts))


def _own(own: int | None, federation: int) -> int:
    return federation if own is None else own


def _checked_seed(seed: int | None) -> int | None:
    return None if seed is None else _at_least("seed", seed, 0)


def _at_least(name: str, value: int, lowest: int) -> int:
    if value < lowest:
        raise ValueError(f"Expected `{name}` to be at least {lowest}, but got {value}.")
    return value


def _one_of(name: str, value: str, *allowed: str) -> str:
    if value not in allowed:
        raise ValueError(f"Expected `{name}` to be one of {', '.join(map(repr, allowed))}, but got {value!r}.")
    return value
