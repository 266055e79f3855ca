"""FedSS as a method."""

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
    """Trains a last layer with very many classes, with only some rows on each client.

    The model's last layer is a :class:`~lightning_fed.modules.SampledSoftmaxHead`. Clients use
    :class:`~lightning_fed.callbacks.SampledSoftmax`, and the server averages with momentum
    (:class:`~lightning_fed.algorithms.FedAvgM`). Reference: FedSS, submission to ICLR 2022.

    - Sends: the model both ways, with only some rows of the last layer. Clients also send the indices of these rows.
    - Keeps: the momentum on the server, in float64.
    - Costs: less than ordinary training, because a client trains only some rows of the last layer.
    - For: very many classes.

    Args:
        num_negatives: Number of classes (negatives) drawn for each client, in addition to the client's own classes.
        objective: The client's loss, see :class:`~lightning_fed.callbacks.SampledSoftmax`.
        resample: Whether to draw negatives once per ``"round"`` or for each ``"batch"``.
        server_momentum: Momentum on the server.
        server_lr: Learning rate on the server.
        lazy_rows: Whether rows without training in a round stay unchanged, also with momentum.
        row_weighting: Divisor for a row's summed change, see :class:`~lightning_fed.algorithms.FedAvg`.
        head: Name of the ``SampledSoftmaxHead``, by default the only such layer.
        target: Position of the labels in a batch, see :class:`~lightning_fed.callbacks.SampledSoftmax`.
        classes: The clients' classes, by default from a pass over the data.

    Example:
        >>> FedSS(num_negatives=40).callbacks[0].num_negatives
        40
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
