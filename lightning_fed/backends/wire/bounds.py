"""Client-side limits on the work that a server may request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_fed.argument_checks import check_count, check_positive
from lightning_fed.backends.wire.packets import TrainRequest, find_bad_rate
from lightning_fed.server.schedule import count_visit_batches


@dataclass(frozen=True)
class OrderBounds:
    """Limits for the training requested by the server. A client refuses requests outside the limits.

    Args:
        max_epochs: Maximum number of passes over the client's data in a round.
        max_batches: Maximum number of batches in a round.
        min_batches: Minimum number of batches. An update from few batches reveals more about the examples.
        max_lr: Maximum learning rate of optimizers and schedulers.
        min_clients: Minimum number of clients in a secure sum, including this client.

    Example:
        >>> from lightning_fed.server.schedule import Visit
        >>> order = TrainRequest("0a", Visit("hospital-a", 0, 7, epochs=50), -1, 0, 0, "", {"groups": [[{"lr": 0.1}]]})
        >>> OrderBounds(max_epochs=5).find_excess(order, batches_per_epoch=10)
        'the server asks for 50 epochs, but this client allows 5'
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
                f"Expected `min_batches` to be at most max_batches={self.max_batches}, but got {self.min_batches}."
            )

    def find_excess(self, train_request: TrainRequest, batches_per_epoch: int | None) -> str | None:
        """Returns the reason to refuse a request for too much or too little training; ``None`` if allowed."""
        visit = train_request.visit
        if visit.steps is None and self.max_epochs is not None and visit.epochs > self.max_epochs:
            return f"the server asks for {visit.epochs} epochs, but this client allows {self.max_epochs}"
        per_epoch = (visit.steps or 0) if batches_per_epoch is None else batches_per_epoch
        batches = count_visit_batches(visit, per_epoch)
        if self.max_batches is not None and batches > self.max_batches:
            return f"the server asks for {batches} batches, but this client allows {self.max_batches}"
        passes = math.ceil(batches / per_epoch) if per_epoch else 0
        if visit.steps is not None and self.max_epochs is not None and passes > self.max_epochs:
            return f"the server asks for {passes} passes, but this client allows {self.max_epochs}"
        if 0 < batches < self.min_batches:
            return f"the server asks for {batches} batches, but this client requires at least {self.min_batches}"
        rate = None if self.max_lr is None else find_bad_rate(train_request.hyperparameters, self.max_lr)
        return None if rate is None else f"the server's learning rate {rate}, but this client allows {self.max_lr}"
