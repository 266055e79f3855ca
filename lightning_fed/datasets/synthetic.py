"""Datamodule for the synthetic data of the FedProx paper."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from lightning_fed.argument_checks import check_count, check_inside
from lightning_fed.data.federated import ClientData, FederatedDataModule
from lightning_fed.datasets.synthetic_generator import synthetic_clients
from lightning_fed.messages import Client


class Synthetic(FederatedDataModule):
    """Generated classification data from the FedProx paper, with 60 features and 10 classes.

    Each client has at least 50 examples, with labels from the client's own linear model, see
    :func:`~lightning_fed.datasets.synthetic_clients`. A client's last examples are for testing, as in the paper. The
    last of the remaining examples are for validation.

    Source: T. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, section 5.1.

    Args:
        alpha: How much the clients' models for the labels differ, at least 0.
        beta: How much the clients' inputs differ, at least 0.
        num_clients: Number of clients, at least 1.
        val_fraction: Fraction of a client's remaining examples for validation, in (0, 1).
        test_fraction: Fraction of a client's examples for testing, in (0, 1).
        batch_size: Examples per batch.
        seed: Seed for the data, not for training.

    Raises:
        ValueError: If a number is outside the allowed range.

    Example:
        >>> data = Synthetic(alpha=1.0, beta=1.0, num_clients=3)
        >>> [len(part[0]) for part in (data.clients, data.val, data.test)]
        [58, 6, 7]
    """

    num_features = 60
    num_classes = 10

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 1.0,
        *,
        num_clients: int = 30,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        batch_size: int = 10,
        seed: int = 0,
    ) -> None:
        for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            check_inside(name, value)
        check_count("batch_size", batch_size)
        generated = synthetic_clients(
            alpha, beta, num_clients, seed, num_features=self.num_features, num_classes=self.num_classes
        )
        train: dict[Client, ClientData] = {}
        val, test = {}, {}
        for client, (inputs, labels) in enumerate(generated):
            end = _last_share_start(len(labels), test_fraction)
            middle = _last_share_start(end, val_fraction)
            train[client] = _dataset(inputs[:middle], labels[:middle])
            val[client] = _dataset(inputs[middle:end], labels[middle:end])
            test[client] = _dataset(inputs[end:], labels[end:])
        super().__init__(train, val, test, batch_size=batch_size)


def _last_share_start(count: int, fraction: float) -> int:
    return count - max(1, int(fraction * count))


def _dataset(inputs: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels))
