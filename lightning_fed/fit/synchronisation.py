"""Interface of strategies for several processes, each with a share of a round's clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import lightning as L

from lightning_fed.client.local_model import LocalModel
from lightning_fed.client.local_optimizers import LocalOptimizers
from lightning_fed.data.round_plan import VisitCosts
from lightning_fed.messages import State
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup
from lightning_fed.server.schedule import Cohort


class RoundSynchronisation:
    """Synchronises processes with shares of a round's clients. This base class, for one process, does nothing.

    ``visit_costs`` are durations of earlier visits, used to balance the work, or ``None`` with one process. ``driver``
    is the class that runs the visits; if ``None``, :class:`~lightning_fed.rounds.visit_driver.VisitDriver`.
    """

    visit_costs: VisitCosts | None = None
    driver: Any = None

    def start_round(self) -> None:
        """Called before the first batch of a round. Afterwards the processes run independently until :meth:`join`."""

    def join(self, state: State, optimizers: LocalOptimizers, cohort: Cohort, is_cut: bool = False) -> None:
        """Merges the updates and reports of all processes, after the last visit.

        If ``is_cut`` (the fit ended in this process before the round's last visit), all processes raise an error.
        """

    def check_state(self, local: LocalModel) -> None:
        """Refuses a global model that differs between processes by more than rounding errors."""

    def end_round(self) -> None:
        """Called at the end of a round. Afterwards all processes run synchronously again."""

    def abort(self) -> None:
        """Called after an error in this process. Afterwards this process does not wait for other processes."""

    def release(self) -> None:
        """Re-enables the synchronisation of the module's metrics between processes, disabled during the round."""


class ClientSharing(ABC):
    """Base class of Lightning strategies that distribute the clients of a round over several processes."""

    @property
    @abstractmethod
    def process_group(self) -> ProcessGroup:
        """The processes for training the clients. Before the Trainer launches processes, only this process."""

    @abstractmethod
    def callbacks(self) -> Sequence[L.Callback]:
        """Returns the callbacks to add to a Trainer with this strategy."""

    @abstractmethod
    def synchronise(self, fit: Any) -> RoundSynchronisation:
        """Creates the synchronisation for a ``FederatedFit``. Refuses fits without support for several processes."""


def process_group_of(trainer: L.Trainer) -> ProcessGroup:
    """Returns the processes that share the federation's clients."""
    strategy = trainer.strategy
    return strategy.process_group if isinstance(strategy, ClientSharing) else SINGLE_PROCESS


def sharing_strategy(trainer: L.Trainer) -> ClientSharing | None:
    """Returns the Trainer's strategy if several processes share the clients, else ``None``."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, ClientSharing) and strategy.process_group.size > 1 else None
