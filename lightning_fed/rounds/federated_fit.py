"""Parts of a fit that all its rounds share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import lightning as L

from lightning_fed.client.client_store import ClientStore
from lightning_fed.data.population import Population
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.messages import State
from lightning_fed.model.entries import Policy, batch_norm_statistics, copy_state, live_entries
from lightning_fed.rounds.batch_loop import BatchLoop
from lightning_fed.rounds.federated_callback import FederatedCallback, federated_callbacks
from lightning_fed.rounds.lightning_internals import IgnoredWarning
from lightning_fed.rounds.remote import RemoteSide
from lightning_fed.rounds.round_log import RoundLog
from lightning_fed.rounds.synchronisation import RoundSynchronisation
from lightning_fed.rounds.trainer_checks import check_min_clients
from lightning_fed.rounds.trainer_progress import RoundProgress
from lightning_fed.rounds.visit_executor import VisitExecutor
from lightning_fed.rule import PlanningAggregator, RoundPlan
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.schedule import Cohort, Schedule

if TYPE_CHECKING:
    from lightning_fed.rounds.round import Round

_log = logging.getLogger(__name__)

BatchNormMode = Literal["average", "recalibrate", "local", "fixed", "personal", "frozen"]
UnseenMode = Literal["batch", "pooled", "nearest"]
VisitsMode = Literal["auto", "lightning", "fused"]


@dataclass(eq=False)
class FederatedFit:
    """Parts of a fit that all its rounds share.

    Args:
        server: The server, or the connection to it.
        schedule: Draws the rounds' cohorts and seeds.
        store: Store of the clients' own state.
        batch_norm: Treatment of BatchNorm's running statistics.
        optimizer_state: Whether clients start with fresh optimizer state or with their own.
        partial_work: Whether the work of stragglers is used.
        remote: The other half of the federation, where it is on another machine.
        unseen_statistics: Running statistics that serve data of no known client, with ``batch_norm="local"``.
        fixed_after: Rounds before running statistics are fixed, with ``batch_norm="fixed"``.
        clock: Ends visits that take too long.

    Attributes:
        trainer: The Trainer; set before anything else is asked for.
        policies: The policy of every entry of the module; empty before the fit has started.
        unset: Names of the shared buffers that are frozen because they held NaN or infinite values when the fit began;
            ``None`` before that.
        round: The round that is under way; ``None`` between rounds.
        cohort: The clients of the round that is under way, or was last.
        rounds: Number of rounds that are over.
        round_log: Log of the rounds.
        progress: Lightning's progress in checkpoints.
        synchronisation: Steps of a round in which several processes join.
        executor: Trains several visits at once; ``None`` where they come one by one.
        batch_loop: Trains on the batches of fused visits; ``None`` where Lightning's own loop does.
        initial_statistics: BatchNorm's running statistics with which clients start, where those of the global model are
            measured and clients keep their own.
        has_warned_of_batch_norm: Whether the log has said what can be wrong with running statistics.
        has_warned_of_shift: Whether the log has said that one set of running statistics does not fit the clients.
        has_warned_of_filled: Whether the log has said that visits fill buffers that do not travel.

    """

    server: ServerInterface
    schedule: Schedule
    store: ClientStore
    batch_norm: BatchNormMode
    optimizer_state: Literal["reset", "keep"]
    partial_work: Literal["keep", "drop"]
    remote: RemoteSide | None = None
    unseen_statistics: UnseenMode = "batch"
    fixed_after: int | None = None
    clock: VisitClock = field(default_factory=lambda: VisitClock(None))
    trainer: L.Trainer = field(init=False)
    cohort: Cohort = field(init=False)
    policies: Mapping[str, Policy] = field(default_factory=dict, init=False)
    unset: frozenset[str] | None = field(default=None, init=False)
    round: Round | None = field(default=None, init=False)
    rounds: int = field(default=0, init=False)
    round_log: RoundLog = field(default_factory=RoundLog, init=False)
    progress: RoundProgress = field(default_factory=RoundProgress, init=False)
    synchronisation: RoundSynchronisation = field(default_factory=RoundSynchronisation, init=False)
    executor: VisitExecutor | None = field(default=None, init=False)
    batch_loop: BatchLoop | None = field(default=None, init=False)
    initial_statistics: State = field(default_factory=dict, init=False)
    has_warned_of_batch_norm: bool = field(default=False, init=False)
    has_warned_of_shift: bool = field(default=False, init=False)
    has_warned_of_filled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._population: Population | None = None
        self._ignored: list[IgnoredWarning] = []

    @property
    def module(self) -> L.LightningModule:
        """The module that trains."""
        return self.trainer.lightning_module

    @property
    def has_server(self) -> bool:
        """True if the server half is in this process."""
        return self.remote is None or self.remote.has_server

    @property
    def measures_batch_norm(self) -> bool:
        """True if clients measure BatchNorm's running statistics with every new global model."""
        return self.batch_norm == "recalibrate" or (self.batch_norm == "local" and self.unseen_statistics == "pooled")

    def note_initial_statistics(self) -> None:
        """Keeps the statistics with which clients start, before the first round's take their place in the module."""
        if self.batch_norm == "local" and self.measures_batch_norm and not self.initial_statistics:
            names = {name for name in batch_norm_statistics(self.module) if self.policies.get(name) == "personal"}
            entries = live_entries(self.module)
            self.initial_statistics = copy_state({name: entries[name] for name in entries if name in names})

    @property
    def is_batch_norm_fixed(self) -> bool:
        """True if BatchNorm normalises with its running statistics in training too, in the current round."""
        if self.fixed_after is not None:
            return self.trainer.current_epoch >= self.fixed_after
        return self.batch_norm == "frozen"

    @property
    def server_callbacks(self) -> list[FederatedCallback]:
        """The callbacks whose hooks of the server's side are called in this process."""
        return federated_callbacks(self.trainer) if self.has_server else []

    @property
    def is_population_known(self) -> bool:
        """True once the fit has asked for its clients."""
        return self._population is not None

    @property
    def population(self) -> Population:
        """All clients.

        Raises:
            RuntimeError: If they are not known yet.

        """
        if self._population is None:
            raise RuntimeError("The clients are not known before `fit` asks for the training data.")
        return self._population

    @population.setter
    def population(self, population: Population) -> None:
        """Makes the clients known, before the first round.

        Raises:
            MisconfigurationException: If no round can have the least number of clients.

        """
        self._population = population
        population.local_steps = self.schedule.local_steps
        cohort_size = self.schedule.cohort_size(len(population.clients))
        check_min_clients(self.server.min_clients, self.schedule, cohort_size, self.partial_work)

    def draw_cohort(self, round: int) -> Cohort:
        """Draws the clients of a round, as the schedule and the rule have it."""
        rule = self.server.rule
        plan = rule.plan(round) if isinstance(rule, PlanningAggregator) else RoundPlan()
        draw = plan.drawn, plan.always
        cohort = self.schedule.cohort(round, self.population.clients, *draw)
        if plan.present is None:
            return cohort
        visits = tuple(visit for visit in cohort.visits if visit.client in plan.present)
        absent = [visit.client for visit in cohort.visits if visit.client not in plan.present]
        return Cohort(visits, (*cohort.dropped, *absent))

    def ignore_warning(self, message: str, module: str = "") -> None:
        """Keeps a warning of Lightning's from being seen while the fit lasts: what it warns of is on purpose."""
        self._ignored.append(IgnoredWarning(message, module))

    def close(self) -> None:
        """Releases what was held for the fit: other models, warnings, metrics, worker processes."""
        self.clock.stop()
        self.synchronisation.release()
        self.executor = self.batch_loop = None
        for warning in self._ignored:
            warning.restore()
        self._ignored = []
        if self._population is not None:
            self._population.close()  # left to the garbage collector it takes seconds
