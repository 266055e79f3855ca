"""FedSS as a method: clients hold, train and send a few rows of a head, and the server averages with momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.fedavgm import FedAvgM
from lightning_fed.algorithms.fedss.callback import ClientClasses, SampledSoftmax
from lightning_fed.algorithms.fedss.losses import Objective
from lightning_fed.method import Method, register
from lightning_fed.numerics.row_sums import RowWeighting


@register
class FedSS(Method):
    """Sampled softmax: clients hold, train and send a few rows of a head with very many classes.

    :class:`~lightning_fed.callbacks.SampledSoftmax` for a model whose last layer is a
    :class:`~lightning_fed.modules.SampledSoftmaxHead`, and averaging with momentum on the server
    (:class:`~lightning_fed.algorithms.FedAvgM` of :class:`~lightning_fed.algorithms.FedAvg`).

    - Sends: the model with ``num_negatives`` and the client's own class vectors, both ways; the request for them.
    - Keeps: the server a vector in float64 for its momentum.
    - Costs: less than the training alone: a client holds a part of the head.
    - For: very many classes.

    Args:
        num_negatives: Classes that a client draws beside its own.
        objective: The client's loss.
        resample: Whether they are drawn once for a round or for every batch of it.
        server_momentum: Momentum on the server.
        server_lr: Learning rate on the server.
        lazy_rows: Whether rows that nobody held in a round are left alone; otherwise momentum still moves them.
        row_weighting: Whose weights a row's changes are divided by: those of all clients of the round, or of the
            clients that hold the row (``"per_row"``).
        head: Name of the head; ``"auto"`` finds the only one.
        target: Where a batch has its labels, see :class:`~lightning_fed.callbacks.SampledSoftmax`.
        classes: The clients' own classes; ``None`` looks for them in the data.

    Raises:
        ValueError: If an option is unknown or out of its range.

    Example:
        >>> FedSS(num_negatives=40).callbacks[0].num_negatives
        40

    References:
        "Efficient image representation learning with federated sampled softmax", submission to ICLR 2022.

    """

    def __init__(
        self,
        num_negatives: int,
        objective: Objective = "fedss",
        resample: Literal["round", "batch"] = "round",
        server_momentum: float = 0.9,
        server_lr: float = 1.0,
        lazy_rows: bool = False,
        row_weighting: RowWeighting = "global",
        head: str = "auto",
        target: int | str | Callable[[Any], Tensor] | None = None,
        classes: ClientClasses | None = None,
    ) -> None:
        averaging = FedAvgM(server_lr, server_momentum, aggregator=FedAvg(row_weighting), lazy_rows=lazy_rows)
        softmax = SampledSoftmax(num_negatives, objective, resample, head, target, classes)
        super().__init__(averaging, [softmax])
