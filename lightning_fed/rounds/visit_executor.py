"""Interface for training several visits of a round at once, and the table of the backends that do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_fed.data.interleave import ClientGenerators, StackedBatch
from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.round_loader import VisitGroups

if TYPE_CHECKING:
    from lightning_fed.rounds.federated_fit import FederatedFit
    from lightning_fed.rounds.round import Round


class VisitExecutor(ABC):
    """Trains groups of visits, all visits of a group at once, with the result of one after another.

    Args:
        groups: Rule by which the round's loader puts visits into groups.

    """

    def __init__(self, groups: VisitGroups) -> None:
        self.groups = groups

    @abstractmethod
    def start(self, round: Round, group: Sequence[PlannedVisit]) -> None:
        """Starts the visits before their first batch (:meth:`Round.start_visit`, :meth:`Round.suspend_visit`)."""

    @abstractmethod
    def step(
        self,
        group: Sequence[PlannedVisit],
        training_step: Callable[..., Any],
        parts: Sequence[StackedBatch],
        rest: Sequence[Any],
        numbers: ClientGenerators,
    ) -> Any:
        """Runs the training step for a batch of every visit.

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
        """After a batch, which may have been the last one of some of the visits."""

    @abstractmethod
    def end(self, round: Round, group: Sequence[PlannedVisit]) -> None:
        """Ends the visits after the last batch (:meth:`Round.resume_visit`, :meth:`Round.end_visit`)."""

    @abstractmethod
    def abandon(self) -> None:
        """Gives the module back as one model, where the round is given up."""


VISIT_EXECUTORS: dict[str, Callable[[int, FederatedFit], VisitExecutor | None]] = {}
"""Functions that decide, before the first round, whether visits can be trained at once: at most how many, and the fit.

They return ``None``, with the reason in the log, where visits have to be trained one after another.
"""
