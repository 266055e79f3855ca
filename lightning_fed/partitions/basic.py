"""Partitions, which assign the samples of one data set to clients.

A client's indices are increasing. Every sample belongs to one client, unless a class documents an exception. Equal
arguments give equal splits in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_nonnegative, check_option
from lightning_fed.data.partition import MapDataset, Partition
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key
from lightning_fed.partitions.base import NumberedPartition, PartitionOfPartition, change_input
from lightning_fed.partitions.label_lookup import groups_of, length_of
from lightning_fed.partitions.sample_assignment import (
    IndexArray,
    PartitionError,
    assign_evenly,
    assign_in_order,
    cut_shares,
    draw_dirichlet,
    draw_until_large,
    generator_for,
    group_by_owner,
    pixel_permutation,
)


@final
class IID(NumberedPartition):
    """Random equal shares of the data. Client sizes differ by at most one sample.

    Args:
        num_clients: Number of clients, at least 1.
        seed: Seed for the split; if ``None``, the federation's seed.

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

    def assign(self, dataset: MapDataset, seed: int) -> list[IndexArray]:
        return assign_evenly(length_of(dataset), self.num_clients, seed)


@final
class QuantitySkew(NumberedPartition):
    r"""Splits the samples at random into parts of unequal sizes.

    The shares :math:`p` of the :math:`K` clients follow a Dirichlet distribution with :math:`K` parameters
    :math:`\beta`, or are proportional to log-normal numbers :math:`s_k`. The :math:`N` shuffled samples are cut at the
    cumulative shares:

    .. math:: p \sim \mathrm{Dir}(\beta 1_K) \quad \text{or} \quad
        p_k \propto s_k,\ \log s_k \sim \mathcal N(0, \sigma^2); \qquad
        \text{cut at } \lfloor N \textstyle\sum_{j \le k} p_j \rfloor

    Args:
        num_clients: Number of clients, at least 1.
        beta: Concentration for ``"dirichlet"``, greater than 0. Small values give very unequal sizes, ``inf`` equal
            sizes.
        distribution: Distribution of sizes: ``"dirichlet"`` as in NIID-Bench, or ``"lognormal"`` as in FedProx.
        sigma: Standard deviation of the log-sizes for ``"lognormal"``, at least 0.
        min_size: Minimum number of samples per client. By default 10, or fewer after 1000 failed draws.
        seed: Seed for the split; if ``None``, the federation's seed.

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
        min_size: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_clients, seed)
        check_option("distribution", distribution, ("dirichlet", "lognormal"))
        if not beta > 0:
            raise ValueError(f"Expected `beta` to be greater than 0, but got {beta}.")
        check_nonnegative("sigma", sigma)
        self.beta = beta
        self.distribution = distribution
        self.sigma = sigma
        self.min_size = None if min_size is None else check_count("min_size", min_size, 0)

    def assign(self, dataset: MapDataset, seed: int) -> list[IndexArray]:
        num_samples = length_of(dataset)
        rng = generator_for("quantity_skew", seed)

        def draw() -> IndexArray:
            if self.distribution == "dirichlet":
                mean = np.full(self.num_clients, 1 / self.num_clients)
                shares = draw_dirichlet(rng, mean, self.beta * self.num_clients, 1)[0]
            else:
                logarithms = rng.normal(0.0, self.sigma, self.num_clients)
                shares = np.exp(logarithms - logarithms.max())
                shares /= shares.sum()
            sizes: IndexArray = cut_shares(shares[None], np.array([num_samples]))[0]
            return sizes

        if self.distribution == "dirichlet":
            skew, remedy = f"beta={self.beta}", "raise `beta`"
        else:
            skew, remedy = f"sigma={self.sigma}", "lower `sigma`"
        sizes = draw_until_large(draw, self.num_clients, num_samples, self.min_size, skew, remedy)
        return assign_in_order(rng.permutation(num_samples), sizes)


@final
class PermutedPixels(PartitionOfPartition):
    """Splits data like another partition, and permutes each client's pixels differently.

    A datamodule's validation data are not permuted. Use :class:`~lightning_fed.data.PartitionedData` to hold out
    permuted examples.

    Args:
        partition: Partition of the data set, such as `IID` in the paper.
        seed: Seed for the permutations; if ``None``, the federation's seed.

    Raises:
        TypeError: If ``partition`` is not a partition.
        ValueError: If ``seed`` is negative.

    Example:
        >>> import torch
        >>> partition = PermutedPixels(IID(num_clients=2))
        >>> image, label = partition.transform(client=0, seed=0)((torch.arange(4.0).reshape(1, 2, 2), 7))
        >>> image.shape, image.flatten().sort().values.tolist(), label
        (torch.Size([1, 2, 2]), [0.0, 1.0, 2.0, 3.0], 7)

    References:
        Yao et al., "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019, section 4.3
        (user-specific non-IID: Permuted MNIST).
    """

    def change(self, client: Client, seed: int) -> PixelPermutation:
        number = client if isinstance(client, int) else client_key(client)
        return PixelPermutation(number, self.seed_of(seed))


@final
class ByGroup(Partition):
    """Makes each group of samples a client, for example each writer, speaker or hospital.

    Args:
        group: All samples' groups, the name of a data set attribute with the groups, or a function from a sample to the
            group.
        seed: Has no effect, because the split is not random.

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
        self.seed = None if seed is None else check_count("seed", seed, 0)

    def split(self, dataset: MapDataset, seed: int) -> dict[Client, IndexArray]:
        names, owner = np.unique(groups_of(dataset, self.group), return_inverse=True)
        if names.size == 0:
            raise PartitionError("Expected a data set with at least one sample, but got an empty one.")
        return dict(zip(names.tolist(), group_by_owner(owner.astype(np.int64), names.size), strict=True))


@final
@dataclass(frozen=True)
class PixelPermutation:
    """Transform that permutes the pixels in a sample's image, equally in all channels.

    A sample is an image, a tuple or list with the image as first element, or a mapping with the image under the key
    ``"image"`` (else the first key). The image has the shape ``(..., H, W)``, or ``(pixels,)`` if flattened.
    """

    client: int
    seed: int

    def __post_init__(self) -> None:
        check_count("client", self.client, 0)
        check_count("seed", self.seed, 0)

    def __call__(self, sample: Any) -> Any:
        return change_input(sample, self._permuted)

    def _permuted(self, image: Tensor) -> Tensor:
        pixels = image.flatten(-2) if image.ndim > 1 else image
        order = _cached_permutation(pixels.shape[-1], self.client, self.seed).to(image.device)
        return pixels[..., order].reshape(image.shape)


@lru_cache(maxsize=64)  # each lookup creates a transform; 64 permutations for 224 x 224 pixels take 26 MB
def _cached_permutation(num_pixels: int, client: int, seed: int) -> Tensor:
    return torch.from_numpy(pixel_permutation(num_pixels, client, seed))
