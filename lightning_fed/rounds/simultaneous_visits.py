"""Interface of what trains the visits of several clients at once: an object given as ``visits=`` makes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_fed.data.interleave import ClientGenerators, StackedBatch
from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.round_loader import VisitGroups


class SimultaneousVisits(ABC):
    """Trains the visits of a group at once, with the result of one after another.

    Attributes:
        groups: Rule by which the round's loader puts visits into groups.

    """

    groups: VisitGroups

    @abstractmethod
    def take(self) -> None:
        """Takes the module as it is for the next client's model."""

    @abstractmethod
    def start(self) -> None:
        """Runs before the clients' first batch, when all their models are taken."""

    @abstractmethod
    def step(
        self,
        group: Sequence[PlannedVisit],
        training_step: Callable[..., Any],
        parts: Sequence[StackedBatch],
        rest: Sequence[Any],
        numbers: ClientGenerators,
    ) -> Tensor | None:
        """Runs the training step for a batch of every visit; clients that fail by their own fault are left out.

        Args:
            group: The visits.
            training_step: The module's.
            parts: The visits' batches.
            rest: Further arguments of the training step.
            numbers: The clients' random numbers.

        Returns:
            The loss; ``None`` where all clients have failed.

        """

    @abstractmethod
    def end_batch(self, group: Sequence[PlannedVisit], batches_left: int) -> None:
        """Keeps the models of those clients whose last batch it was, where others go on."""

    @abstractmethod
    def leave(self) -> None:
        """Gives the module its own tensors back, after the last batch."""

    @abstractmethod
    def put(self, row: int) -> None:
        """Makes the module one client's model."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets the clients' models."""
