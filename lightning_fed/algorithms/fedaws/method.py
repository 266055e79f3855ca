"""FedAwS as a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.fedavgm import FedAvgM
from lightning_fed.algorithms.fedaws.callback import SpreadOut, Variant
from lightning_fed.algorithms.fedss.callback import ClientClasses, SampledSoftmax
from lightning_fed.method import Method, register
from lightning_fed.numerics.row_sums import RowWeighting


@register
class FedAwS(Method):
    """Trains clients with only positive labels, and separates class vectors on the server.

    Class vectors are the last layer's rows. A client's loss is the cross-entropy over the client's classes
    (:class:`~lightning_fed.callbacks.SampledSoftmax` with ``objective="posonly"``). After every round, the server takes
    a gradient step with :class:`~lightning_fed.callbacks.SpreadOut`. In the paper each client has one class, and
    another loss. Reference: Yu et al., "Federated Learning with Only Positive Labels", ICML 2020.

    - Sends: the model both ways, with class vectors only for the client's classes.
    - Keeps: on the server the momentum, one float64 number per model parameter.
    - Costs: a server step over pairs of class vectors.
    - For: very many classes, such as people or places, with few classes per client.

    Args:
        strength: Weight of the regulariser, see :class:`~lightning_fed.callbacks.SpreadOut`.
        variant: ``"top_k"`` separates nearest classes, ``"margin"`` all classes closer than ``margin``.
        k: Number of nearest classes for ``"top_k"``.
        margin: Cosine distance below which ``"margin"`` separates two classes.
        server_momentum: Server momentum; the authors use 0.
        server_lr: Learning rate for averaging on the server.
        lazy_rows: Whether rows without training in a round stay unchanged, also with momentum.
        row_weighting: Weights for averaging rows, see :class:`FedAvg`.
        lr: Learning rate for the server's gradient step; by default the last layer's rate in local training.
        comparison: Number of classes drawn per round as candidates for nearest classes; by default all classes.
        normalize: Whether to preserve the lengths of class vectors.
        head: Name of the :class:`~lightning_fed.modules.SampledSoftmaxHead`; ``"auto"`` for a model with one such
            layer.
        target: Position of the labels in a batch, see :class:`~lightning_fed.callbacks.SampledSoftmax`.
        classes: Each client's classes; by default read from the data.

    Example:
        >>> FedAwS(strength=1.0).callbacks[1].strength
        1.0
    """

    def __init__(
        self,
        strength: float = 10.0,
        variant: Variant = "top_k",
        k: int = 10,
        margin: float = 0.9,
        server_momentum: float = 0.0,
        server_lr: float = 1.0,
        lazy_rows: bool = False,
        row_weighting: RowWeighting = "global",
        lr: float | None = None,
        comparison: int | None = None,
        normalize: bool = True,
        head: str = "auto",
        target: int | str | Callable[[Any], Tensor] | None = None,
        classes: ClientClasses | None = None,
    ) -> None:
        averaging = FedAvgM(server_lr, server_momentum, aggregator=FedAvg(row_weighting), lazy_rows=lazy_rows)
        softmax = SampledSoftmax(0, "posonly", head=head, target=target, classes=classes)
        entry = "auto" if head == "auto" else f"{head}.weight"
        super().__init__(
            averaging, [softmax, SpreadOut(variant, k, strength, margin, lr, comparison, normalize, entry)]
        )
