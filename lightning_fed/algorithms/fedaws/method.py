"""FedAwS as a method: clients train among their own classes, and the server keeps the class vectors apart."""

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
    """Clients that know their own classes only, and a server that keeps the class vectors apart.

    Clients train with the softmax among their own classes
    (:class:`~lightning_fed.callbacks.SampledSoftmax` with ``objective="posonly"``), and the server takes a step of
    :class:`~lightning_fed.callbacks.SpreadOut` after every round.

    - Sends: the model with the class vectors of the client's own classes alone, both ways.
    - Keeps: the server a vector in float64 for its momentum.
    - Costs: a step on the server over all pairs of class vectors.
    - For: very many classes, of which every client has few: people, places.

    Args:
        strength: Strength of the step.
        variant: Whether the nearest classes are pushed away, or all that are nearer than a margin.
        k: Number of nearest classes.
        margin: The margin.
        server_momentum: Momentum on the server, which the authors do not have; in the FedSS paper's comparison all
            methods have 0.9.
        server_lr: Learning rate on the server, of averaging.
        lazy_rows: Whether rows that nobody held in a round are left alone by averaging; otherwise momentum still moves
            them.
        row_weighting: Whose weights a row's changes are divided by: those of all clients of the round, or of the
            clients that hold the row (``"per_row"``).
        lr: Learning rate of the step; ``None`` for the head's in the clients' training.
        comparison: Number of classes, drawn in every round, among which the nearest are looked for; ``None`` for all.
        normalize: Whether class vectors keep their lengths in the step.
        head: Name of the head; ``"auto"`` finds the only one.
        target: Where a batch has its labels, see :class:`~lightning_fed.callbacks.SampledSoftmax`.
        classes: The clients' own classes; ``None`` looks for them in the data.

    Raises:
        ValueError: If an option is unknown or out of its range.

    Example:
        >>> FedAwS(strength=1.0).callbacks[1].strength
        1.0

    References:
        Yu et al., "Federated Learning with Only Positive Labels", ICML 2020. Its clients have one class each and
        another loss for it; the softmax among their own is how the FedSS paper uses it.

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
