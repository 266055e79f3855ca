"""Generates the classification data Synthetic(alpha, beta) of the FedProx paper.

``alpha`` controls how much the clients' models for the labels differ, ``beta`` how much the inputs differ.

Sources: Shamir, Srebro and Zhang, "Communication-Efficient Distributed Optimization using an Approximate
Newton-type Method", ICML 2014; Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt


def synthetic_clients(
    alpha: float = 1.0,
    beta: float = 1.0,
    num_clients: int = 30,
    seed: int = 0,
    *,
    num_features: int = 60,
    num_classes: int = 10,
) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]:
    r"""Draws inputs and labels for every client.

    .. math::
        u_k \sim \mathcal N(0, \alpha^2), \quad B_k \sim \mathcal N(0, \beta^2), \quad
        (W_k)_{jc}, (b_k)_c \sim \mathcal N(u_k, 1), \quad (v_k)_j \sim \mathcal N(B_k, 1)

    .. math::
        x \sim \mathcal N(v_k, \mathrm{diag}(j^{-1.2})), \quad y = \arg\max\,(x W_k + b_k), \quad
        n_k = \lfloor s_k \rfloor + 50, \ \log s_k \sim \mathcal N(4, 2^2)

    Client k has :math:`n_k` inputs x, shape ``(n_k, num_features)``, with mean :math:`v_k`. The client's linear model
    :math:`W_k, b_k` gives the labels y, shape ``(n_k,)``. The index j counts features, and c classes.

    Args:
        alpha: Standard deviation of the model means :math:`u_k`, at least 0.
        beta: Standard deviation of the input means :math:`B_k`, at least 0.
        num_clients: Number of clients, at least 1.
        seed: Seed, not negative.
        num_features: Length of an input, at least 1.
        num_classes: Number of classes, at least 2.

    Example:
        >>> inputs, labels = synthetic_clients(1.0, 1.0, num_clients=3)[0]
        >>> inputs.shape[1], inputs.dtype.name, len(inputs) == len(labels) >= 50
        (60, 'float32', True)
    """
    lowest = {"alpha": 0, "beta": 0, "num_clients": 1, "seed": 0, "num_features": 1, "num_classes": 2}
    values = dict(zip(lowest, (alpha, beta, num_clients, seed, num_features, num_classes), strict=True))
    for name, value in values.items():
        if not lowest[name] <= value < np.inf:
            raise ValueError(f"Expected `{name}` to be at least {lowest[name]} and finite, but got {value}.")
    return [_client(client, alpha, beta, seed, num_features, num_classes) for client in range(num_clients)]


def _client(
    client: int, alpha: float, beta: float, seed: int, num_features: int, num_classes: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(b"synthetic"), client)))
    num_samples = int(rng.lognormal(4.0, 2.0)) + 50
    model_mean, input_mean = rng.normal(0.0, alpha), rng.normal(0.0, beta)
    weight = rng.normal(model_mean, 1.0, (num_features, num_classes))
    bias = rng.normal(model_mean, 1.0, num_classes)
    center = rng.normal(input_mean, 1.0, num_features)
    scale = np.arange(1, num_features + 1) ** -0.6  # standard deviations: the variances are j ** -1.2
    inputs = rng.normal(center, scale, (num_samples, num_features))
    return inputs.astype(np.float32), np.argmax(inputs @ weight + bias, axis=1).astype(np.int64)
