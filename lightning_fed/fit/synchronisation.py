"""Interface of a strategy with several processes for a round's clients."""

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
    """Synchronisation of several processes in a round; the base class, for one process, does nothing.

    ``visit_costs``: costs of earlier visits, to balance the shares; ``None`` for one process.
    """

    visit_costs: VisitCosts | None = None

    def start_round(self) -> None:
        """Called before the round's first batch: from here on the processes run independently."""

    def start_visit(self, planned: PlannedVisit) -> None:
        """Called before the first batch of a visit."""

    def end_batch(self) -> None:
        """Called after every batch."""

    def end_visit(self, planned: PlannedVisit) -> None:
        """Called after the last batch of a visit."""

    def join(self, state: State, optimizers: LocalOptimizers, cohort: Cohort, is_cut: bool = False) -> None:
        """Merges the updates and reports of all processes, after the last visit.

        ``is_cut``: the round ended in this process before the last visit was over. All processes then raise an error.
        """

    def check_state(self, local: LocalModel) -> None:
        """Refuses global models that differ between processes by more than rounding on different devices."""

    def end_round(self) -> None:
        """Called at the end of a round: the processes wait for each other again."""

    def abort(self) -> None:
        """Called after an error in this process, which no longer waits for other processes."""

    def release(self) -> None:
        """Reverts the changes made to the module for the round."""


class ClientSharing(ABC):
    """Base class for Lightning strategies that distribute a round's clients over several processes."""

    @property
    @abstractmethod
    def process_group(self) -> ProcessGroup:
        """The processes; before the launch, only this process."""

    @abstractmethod
    def callbacks(self) -> Sequence[L.Callback]:
        """Callbacks for a Trainer with several processes."""

    @abstractmethod
    def synchronise(
        self,
        trainer: L.Trainer,
        server: ServerInterface,
        store: ClientStore,
        schedule: Schedule,
        progress: RoundProgress,
    ) -> RoundSynchronisation:
        """Builds the synchronisation of a fit's rounds; refuses a fit without support for several processes."""


def process_group_of(trainer: L.Trainer) -> ProcessGroup:
    """The processes that share the federation's clients."""
    strategy = trainer.strategy
    return strategy.process_group if isinstance(strategy, ClientSharing) else SINGLE_PROCESS


def sharing_strategy(trainer: L.Trainer) -> ClientSharing | None:
    """The Trainer's strategy if several processes share the clients, otherwise ``None``."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, ClientSharing) and strategy.process_group.size > 1 else None
