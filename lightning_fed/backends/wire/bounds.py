"""Bounds that a client sets on what its server may order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_fed.argument_checks import check_count, check_positive
from lightning_fed.backends.wire.packets import TrainRequest, find_bad_rate


@dataclass(frozen=True)
class OrderBounds:
    """Bounds of the work that a client does on a server's order; what goes beyond is not begun, and the server told.

    Args:
        max_epochs: Most passes over the client's data in a visit.
        max_batches: Most batches in a visit.
        min_batches: Fewest batches in a visit: the update of a single batch says most about its examples.
        max_lr: Highest learning rate that an optimizer or scheduler is given.
        min_clients: Fewest clients of a secure sum that this client is part of: a sum of few says more of each.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> from lightning_fed.server.schedule import Visit
        >>> order = TrainRequest("0a", Visit("hospital-a", 0, 7, epochs=50), -1, 0, 0, "", {"groups": [[{"lr": 0.1}]]})
        >>> OrderBounds(max_epochs=5).find_excess(order, batches_per_epoch=10)
        'the server asks for 50 epochs, and this client allows 5'

    """

    max_epochs: int | None = None
    max_batches: int | None = None
    min_batches: int = 1
    max_lr: float | None = None
    min_clients: int = 2

    def __post_init__(self) -> None:
        for name in ("max_epochs", "max_batches", "min_batches"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("min_clients", self.min_clients, lowest=2)
        if self.max_lr is not None:
            check_positive("max_lr", self.max_lr)
        if self.max_batches is not None and self.min_batches > self.max_batches:
            raise ValueError(
                f"Expected `min_batches` of at most max_batches={self.max_batches}, but got {self.min_batches}."
            )

    def find_excess(self, train_request: TrainRequest, batches_per_epoch: int | None) -> str | None:
        """Describes how an order goes beyond the bounds, in words; ``None`` if it does not.

        Args:
            train_request: The order.
            batches_per_epoch: Batches in one pass over the client's data; ``None`` where it has no length.

        """
        visit = train_request.visit
        if visit.steps is None and self.max_epochs is not None and visit.epochs > self.max_epochs:
            return f"the server asks for {visit.epochs} epochs, and this client allows {self.max_epochs}"
        per_epoch = (visit.steps or 0) if batches_per_epoch is None else batches_per_epoch
        batches = visit.num_batches(per_epoch)
        if self.max_batches is not None and batches > self.max_batches:
            return f"the server asks for {batches} batches, and this client allows {self.max_batches}"
        passes = math.ceil(batches / per_epoch) if per_epoch else 0
        if visit.steps is not None and self.max_epochs is not None and passes > self.max_epochs:
            return f"the server asks for {passes} passes, and this client allows {self.max_epochs}"
        if 0 < batches < self.min_batches:
            return f"the server asks for {batches} batches, and this client answers for {self.min_batches} or more"
        rate = None if self.max_lr is None else find_bad_rate(train_request.hyperparameters, self.max_lr)
        return None if rate is None else f"the server's learning rate {rate}, and this client allows {self.max_lr}"
