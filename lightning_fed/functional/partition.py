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

from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_fed.functional.dealing import IndexArray as IndexArray
from lightning_fed.functional.dealing import PartitionError as PartitionError
from lightning_fed.functional.dealing import (
    at_least,
    check_clients,
    check_min_size,
    cut,
    deal_in_order,
    draw_dirichlet,
    even_sizes,
    generator_for,
    one_dimensional,
    parts_of_owners,
)
from lightning_fed.functional.label_skew import dirichlet_per_class as dirichlet_per_class
from lightning_fed.functional.label_skew import dirichlet_per_client as dirichlet_per_client
from lightning_fed.functional.label_skew import labels_per_client as labels_per_client
from lightning_fed.functional.label_skew import shards as shards


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
    check_clients(num_clients, num_samples)
    order = generator_for("iid", seed).permutation(num_samples)
    return deal_in_order(order, even_sizes(num_samples, num_clients))


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
    check_clients(num_clients, num_samples)
    if distribution not in ("dirichlet", "lognormal"):
        raise PartitionError(f"Expected `distribution` to be 'dirichlet' or 'lognormal', but got {distribution!r}.")
    if not beta > 0:
        raise PartitionError(f"Expected `beta` to be greater than 0, but got {beta}.")
    if not 0 <= sigma < np.inf:
        raise PartitionError(f"Expected `sigma` to be at least 0 and finite, but got {sigma}.")
    check_min_size(min_size, num_clients, num_samples)
    rng = generator_for("quantity_skew", seed)
    for _ in range(at_least("max_tries", max_tries, 1)):
        if distribution == "dirichlet":
            shares = draw_dirichlet(rng, np.full(num_clients, 1 / num_clients), beta * num_clients, 1)[0]
        else:
            logarithms = rng.normal(0.0, sigma, num_clients)
            shares = np.exp(logarithms - logarithms.max())
            shares /= shares.sum()
        sizes = cut(shares[None], np.array([num_samples]))[0]
        if sizes.min() >= min_size:
            return deal_in_order(rng.permutation(num_samples), sizes)
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
    names, owner = np.unique(one_dimensional("groups", groups), return_inverse=True)
    return parts_of_owners(owner.astype(np.int64), names.size)


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
    at_least("num_pixels", num_pixels, 1)
    at_least("client", client, 0)
    return generator_for("pixel_permutation", seed, client).permutation(num_pixels).astype(np.int64)
