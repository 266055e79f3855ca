"""Interface of what lets several processes share the clients of a round: a strategy offers it, rounds use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import lightning as L

from lightning_fed.client.client_store import ClientStore
from lightning_fed.client.local_model import LocalModel
from lightning_fed.client.local_optimizers import LocalOptimizers
from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.visit_costs import VisitCosts
from lightning_fed.lightning.trainer_progress import RoundProgress
from lightning_fed.messages import State
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.schedule import Cohort, Schedule


class RoundSynchronisation:
    """Steps of a round in which several processes join; with one process, as here, there is nothing to do.

    Attributes:
        visit_costs: Costs of the visits so far, by which they are shared out; ``None`` where they are not.

    """

    visit_costs: VisitCosts | None = None

    def start_round(self) -> None:
        """Prepares for a round, before its first batch: from here on the processes run independently."""

    def start_visit(self, planned: PlannedVisit) -> None:
        """Runs before the first batch of a visit."""

    def end_batch(self) -> None:
        """Runs after every batch."""

    def end_visit(self, planned: PlannedVisit) -> None:
        """Runs after the last batch of a visit."""

    def join(self, state: State, optimizers: LocalOptimizers, cohort: Cohort, is_cut: bool = False) -> None:
        """Merges what the processes' aggregators have received, and has all know of all visits, after the last visit.

        Args:
            state: The global model's shared entries at the round's start.
            optimizers: Optimizers and schedulers, reset for every visit.
            cohort: The round's clients.
            is_cut: Whether the round ended in this process before its last visit was over.

        Raises:
            RuntimeError: In all processes, if the round was cut short in one.

        """

    def check_state(self, local: LocalModel) -> None:
        """Makes sure, after the aggregation, that all processes have the same global model.

        Args:
            local: The module's entries.

        Raises:
            RuntimeError: If they have not, beyond what a device may round differently.

        """

    def end_round(self) -> None:
        """Ends a round: the processes wait for each other again."""

    def abort(self) -> None:
        """Ends a fit by an error of this process, which from here on waits for no other one."""

    def release(self) -> None:
        """Restores what was changed of the module for the round."""


class ClientSharing(ABC):
    """Base of Lightning strategies whose processes share the clients of a round."""

    @property
    @abstractmethod
    def process_group(self) -> ProcessGroup:
        """The processes; this one alone before they are joined."""

    @abstractmethod
    def callbacks(self) -> Sequence[L.Callback]:
        """Callbacks that the Trainer needs where there are several processes."""

    @abstractmethod
    def synchronise(
        self,
        trainer: L.Trainer,
        server: ServerInterface,
        store: ClientStore,
        schedule: Schedule,
        progress: RoundProgress,
    ) -> RoundSynchronisation:
        """Makes the synchronisation of a fit's rounds.

        Args:
            trainer: The Trainer.
            server: The server.
            store: Store of the clients' own state.
            schedule: Draws the rounds' seeds.
            progress: Lightning's progress in checkpoints.

        Raises:
            MisconfigurationException: If something in the fit cannot be right in several processes.

        """


def process_group_of(trainer: L.Trainer) -> ProcessGroup:
    """The processes that train the federation's clients: those of a strategy that shares clients out, or this alone."""
    strategy = trainer.strategy
    return strategy.process_group if isinstance(strategy, ClientSharing) else SINGLE_PROCESS


def sharing_strategy(trainer: L.Trainer) -> ClientSharing | None:
    """The Trainer's strategy, where it has several processes share the clients."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, ClientSharing) and strategy.process_group.size > 1 else None
