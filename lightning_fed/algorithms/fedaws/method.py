"""FedAwS as a method: clients train with only positive labels, and the server separates the class vectors."""

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
    """Clients train with only positive labels, and the server separates class vectors (rows of the last layer).

    Clients train with a softmax over their positive classes (:class:`~lightning_fed.callbacks.SampledSoftmax` with
    ``objective="posonly"``), and the server performs a step with :class:`~lightning_fed.callbacks.SpreadOut` after
    every round. Reference: Yu et al., "Federated Learning with Only Positive Labels", ICML 2020. The paper has one
    class per client and another loss; the softmax over positive classes follows the FedSS paper.

    - Sends: the model both ways, with class vectors only for the client's classes.
    - Keeps: one float64 vector on the server for momentum.
    - Costs: a server step over all pairs of class vectors.
    - For: very many classes with few per client, such as people or places.

    Args:
        strength: Weight of the regulariser, see :class:`~lightning_fed.callbacks.SpreadOut`.
        variant: ``"top_k"`` separates nearest classes, ``"margin"`` all classes within a margin.
        k: Number of nearest classes to separate each class from, for ``"top_k"``.
        margin: Cosine distance below which ``"margin"`` separates two classes.
        server_momentum: Server momentum; the authors use 0; the FedSS paper uses 0.9 for all compared methods.
        server_lr: Learning rate of the server's averaging step.
        lazy_rows: Whether rows without a client in the round stay unchanged, also with momentum.
        row_weighting: Divisor for a row's changes, see :class:`FedAvg`.
        lr: Learning rate of the spread-out step; ``None`` for the head's learning rate in local training.
        comparison: Number of classes to draw per round for the nearest-class search; ``None`` for all.
        normalize: Whether to preserve the lengths of class vectors.
        head: Name of the head; ``"auto"`` for a model with one head.
        target: Position of the labels in a batch, see :class:`~lightning_fed.callbacks.SampledSoftmax`.
        classes: The clients' positive classes; ``None`` reads the classes from the data.

    Raises:
        ValueError: If an option is invalid.

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
