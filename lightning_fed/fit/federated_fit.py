"""A fit: what its rounds share, and the owner of what changes from round to round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.client.client_store import ClientStore
from lightning_fed.data.population import Population
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.federated_callback import FederatedCallback, federated_callbacks
from lightning_fed.fit.entry_policies import decide_policies, freeze_unset, unset_buffers
from lightning_fed.fit.options import BatchNormOption, FitOptions, LocalStatistics
from lightning_fed.fit.round_log import RoundLog
from lightning_fed.fit.synchronisation import RoundSynchronisation
from lightning_fed.lightning.internals import IgnoredWarning
from lightning_fed.lightning.trainer_progress import RoundProgress
from lightning_fed.messages import Broadcast, Client, State
from lightning_fed.model.entries import Policy, batch_norm_statistics, copy_state, live_entries
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.schedule import Cohort, Schedule, Visit

RemoteMeasurement: TypeAlias = Callable[
    [ServerInterface, Sequence[Visit], Callable[[Visit], Broadcast]], list[tuple[Client, State]]
]
"""See :meth:`RemoteSide.measure <lightning_fed.rounds.remote.RemoteSide.measure>`."""


class FederatedFit:
    """A fit: what its rounds share, and the owner of what changes from round to round.

    All may read; what changes is changed by the methods here, and by nobody else.

    Args:
        options: The options.
        server: The server, or the connection to it.
        schedule: Draws the rounds' cohorts and seeds.
        store: Store of the clients' own state.
        has_server: Whether the server half is in this process.
        measure_remotely: Has clients on other machines measure the inputs of BatchNorm layers; ``None`` where the
            clients are in this process.

    Attributes:
        trainer: The Trainer; from :meth:`attach` on.
        policies: The policy of every entry of the module; empty before :meth:`decide_policies`.
        unset: Names of the shared buffers that are frozen because they held NaN or infinite values when the fit began;
            ``None`` before that.
        cohort: The clients of the round that is under way, or was last.
        rounds: Number of rounds that are over.
        number: Number of fits that this one goes on from, each with optimizers of its own.
        round_log: Log of the rounds.
        progress: Lightning's progress in checkpoints.
        clock: Ends visits that take too long.
        synchronisation: Steps of a round in which several processes join.
        initial_statistics: BatchNorm's running statistics with which clients start, where those of the global model are
            measured and clients keep their own.
        batch_norm: The option ``batch_norm``, or its replacement where ``"auto"`` has no choice.
        decision: ``"own"`` or ``"pooled"`` statistics, or empty before the decision.
        num_measured: Number of rounds with reported statistics.
        reports: The newest report of each client, from rounds with too few reports for the decision.
        model_round: Index of the last round with a new global model; -1 for no round.
        norm_layers: Names of the BatchNorm layers in training mode; ``None`` before the first round.
        served_client: The client with BatchNorm statistics in the module, outside of visits; ``None`` for none.

    """

    trainer: L.Trainer
    cohort: Cohort

    def __init__(
        self,
        options: FitOptions,
        server: ServerInterface,
        schedule: Schedule,
        store: ClientStore,
        has_server: bool = True,
        measure_remotely: RemoteMeasurement | None = None,
    ) -> None:
        self.options, self.server, self.schedule, self.store = options, server, schedule, store
        self.has_server, self.measure_remotely = has_server, measure_remotely
        self.clock = VisitClock(options.faults.visit_timeout)
        self.policies: Mapping[str, Policy] = {}
        self.unset: frozenset[str] | None = None
        self.rounds = self.number = 0
        self.round_log, self.progress = RoundLog(), RoundProgress()
        self.synchronisation = RoundSynchronisation()
        self.initial_statistics: State = {}
        self.batch_norm: BatchNormOption = options.batch_norm
        self.decision = ""
        self.num_measured, self.model_round = 0, -1
        self.reports: dict[Client, State] = {}
        self.norm_layers: list[str] | None = None
        self.served_client: Client | None = None
        self._population: Population | None = None
        self._ignored: list[IgnoredWarning] = []
        self._warnings: set[str] = set()

    @property
    def module(self) -> L.LightningModule:
        """The module that trains."""
        return self.trainer.lightning_module

    @property
    def is_remote(self) -> bool:
        """True if the other half of the federation is on other machines."""
        return self.measure_remotely is not None

    @property
    def has_one_client(self) -> bool:
        """True if the only client is here: it trains as in a plain fit."""
        return not self.is_remote and len(self.population.clients) == 1

    @property
    def is_batch_norm_fixed(self) -> bool:
        """True if BatchNorm normalises with its running statistics in training too, in the current round."""
        after = self.options.fixes_batch_norm_after
        return after is not None and self.trainer.current_epoch >= after

    @property
    def has_own_statistics(self) -> bool:
        """True if each client has its own BatchNorm statistics."""
        return isinstance(self.batch_norm, LocalStatistics) or self.decision == "own"

    @property
    def has_measured_statistics(self) -> bool:
        """True if each client measures its BatchNorm statistics with the global model."""
        option = self.batch_norm
        return option.measured == "aggregation" if isinstance(option, LocalStatistics) else self.decision == "own"

    @property
    def unseen(self) -> str:
        """Statistics for data without a client: ``"batch"``, ``"data"``, ``"pooled"``, or empty for the model's own."""
        if isinstance(self.batch_norm, LocalStatistics):
            return self.batch_norm.unseen
        return "batch" if self.decision == "own" else ""

    @property
    def statistics_round(self) -> int | None:
        """Round whose global model clients measure their BatchNorm statistics with; ``None`` for no such round."""
        return self.model_round if self.has_measured_statistics and self.model_round >= 0 else None

    @property
    def reports_statistics(self) -> bool:
        """True if a round's clients report BatchNorm statistics to the server."""
        option = self.batch_norm
        if isinstance(option, LocalStatistics):
            return option.unseen == "pooled"
        is_one_client = self.is_population_known and len(self.population.clients) == 1
        # One client: as in a plain fit. Own statistics need no report.
        return option == "recalibrate" or (option == "auto" and self.decision != "own" and not is_one_client)

    @property
    def server_callbacks(self) -> list[FederatedCallback]:
        """The callbacks with server hooks in this process."""
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

    # What changes

    def attach(self, trainer: L.Trainer) -> None:
        """Makes the Trainer known."""
        self.trainer = trainer

    def synchronise(self, synchronisation: RoundSynchronisation) -> None:
        """Has the rounds join the processes that share them."""
        self.synchronisation = synchronisation

    def meet(self, population: Population) -> None:
        """Makes the clients known, before the first round; or their data of a later round, when they are loaded anew.

        Raises:
            MisconfigurationException: If no round can have the least number of clients.

        """
        if self._population is not None:
            population.sampling, population.has_raised = self._population.sampling, self._population.has_raised
            self._population.close()
        self._population = population
        population.local_epochs = self.schedule.local_epochs
        population.local_steps = self.schedule.local_steps
        population.overfit_batches = self.trainer.overfit_batches  # type: ignore[attr-defined]
        most, who = self.schedule.cohort_size(len(population.clients)), "of a round"
        if self.options.availability.partial_work == "drop" and self.options.availability.stragglers:
            most, who = self.schedule.active_size(most), "of a round that do all their work"
        if self.server.min_clients > most:
            raise MisconfigurationException(
                f"Expected `min_clients` to be at most the clients {who} ({most}), but got {self.server.min_clients}:"
                " the global model would never change."
            )

    def forget_policies(self) -> None:
        """Forgets the policies, before an evaluation: its module may be another one."""
        self.policies = {}

    def decide_policies(self, trainer: L.Trainer, module: L.LightningModule) -> bool:
        """Decides the policies of a module's entries; known policies stay.

        Returns:
            Whether there are entries without a policy before.

        """
        if self.policies.keys() >= live_entries(module).keys():
            return False
        sliced = {name for callback in federated_callbacks(trainer) for name in callback.sliced_entries(module)}
        options, known = self.options, self.policies
        if options.batch_norm == "auto" and not known:
            self.batch_norm = LocalStatistics() if self.needs_own_statistics(module, sliced) else "auto"
        policies = decide_policies(module, options.personal, options.frozen, self.batch_norm, sliced)
        new = {name: policy for name, policy in policies.items() if name not in known}
        if self.unset is None or known:  # a resumed fit knows them: by then they may have values
            self.unset = unset_buffers(module, new) | (self.unset or frozenset())
        self.policies = {**freeze_unset(new, self.unset), **known}
        return True

    def needs_own_statistics(self, module: L.LightningModule, sliced: Collection[str]) -> bool:
        """True if ``batch_norm="auto"`` has no choice, because the server does not see a client's statistics."""
        has_hidden_updates = bool(sliced) or self.server.chain.reveals != "update"
        return self.options.batch_norm == "auto" and has_hidden_updates and bool(batch_norm_statistics(module))

    def note_initial_statistics(self) -> None:
        """Keeps the statistics with which clients start, before the first round's take their place in the module."""
        if self.batch_norm == LocalStatistics("pooled", "visit") and not self.initial_statistics:
            names = {name for name in batch_norm_statistics(self.module) if self.policies.get(name) == "personal"}
            entries = live_entries(self.module)
            self.initial_statistics = copy_state({name: entries[name] for name in entries if name in names})

    def start_round(self, cohort: Cohort) -> None:
        """Notes the clients of a round."""
        self.cohort = cohort

    def count_rounds(self, number: int) -> None:
        """Notes how many rounds are over."""
        self.rounds = number

    def count_model(self, round: int) -> None:
        """Records a round with a new global model."""
        self.model_round = round

    def set_norm_layers(self, names: Sequence[str]) -> None:
        """Records the BatchNorm layers in training mode."""
        self.norm_layers = list(names)

    def serve(self, client: Client | None) -> None:
        """Records the client with BatchNorm statistics in the module."""
        self.served_client = client

    def count_reports(self) -> None:
        """Counts a round with reported BatchNorm statistics."""
        self.num_measured += 1

    def collect_reports(self, reports: Iterable[tuple[Client, State]]) -> list[tuple[Client, State]]:
        """Adds reports of a round to the collected ones; returns the newest report of each client."""
        self.reports |= dict(reports)
        return list(self.reports.items())

    def decide(self, decision: str) -> None:
        """Records the decision between own and pooled statistics."""
        self.decision, self.reports = decision, {}

    def note_warning(self, subject: str) -> bool:
        """Notes that the log warns of something; returns whether it does so for the first time in the fit."""
        is_first = subject not in self._warnings
        self._warnings.add(subject)
        return is_first

    def has_warned(self, subject: str) -> bool:
        """True if the log has warned of it."""
        return subject in self._warnings

    def ignore_warning(self, message: str, module: str = "") -> None:
        """Hides a warning from Lightning during the fit: the situation is on purpose."""
        self._ignored.append(IgnoredWarning(message, module))

    def close(self) -> None:
        """Releases what was held for the fit: warnings, metrics, worker processes."""
        self.clock.stop()
        self.synchronisation.release()
        for warning in self._ignored:
            warning.restore()
        self._ignored = []
        if self._population is not None:
            self._population.close()  # left to the garbage collector it takes seconds

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a later fit goes on, for checkpoints."""
        return {
            "rounds": self.rounds,
            "number": self.number,
            "totals": self.round_log.state_dict(),
            "initial_statistics": self.initial_statistics,
            "batch_norm": repr(self.options.batch_norm),
            "decision": self.decision,
            "num_measured": self.num_measured,
            # Names as Python has them: NumPy's do not load with `weights_only=True`.
            "reports": {
                str(client) if isinstance(client, str) else int(client): report
                for client, report in self.reports.items()
            },
            "model_round": self.model_round,
            "norm_layers": self.norm_layers,
            "unset": None if self.unset is None else sorted(self.unset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from it."""
        self.rounds, self.number = state["rounds"], state.get("number", 0)
        self.round_log.load_state_dict(state["totals"])
        self.initial_statistics = state.get("initial_statistics", {})  # not in checkpoints of older versions
        self.decision = state.get("decision", "") if self.options.batch_norm == "auto" else ""
        self.num_measured, self.reports = state.get("num_measured", 0), state.get("reports", {})
        self.model_round, self.norm_layers = state.get("model_round", self.rounds - 1), state.get("norm_layers")
        unset = state.get("unset")
        self.unset = None if unset is None else frozenset(unset)

    def go_on_from(self, fit: FederatedFit) -> None:
        """Goes on from another fit of the same Trainer."""
        self.rounds, self.round_log, self.number = fit.rounds, fit.round_log, fit.number + 1
        self.initial_statistics, self.unset = fit.initial_statistics, fit.unset
        self.decision, self.num_measured, self.model_round = fit.decision, fit.num_measured, fit.model_round
        self.norm_layers, self.reports = fit.norm_layers, fit.reports

    # What follows from the options

    def draw_cohort(self, round: int) -> Cohort:
        """Draws the clients of a round, as the schedule and the rule have it."""
        plan = self.server.rule.plan(round)
        draw = plan.drawn, plan.always
        cohort = self.schedule.cohort(round, self.population.clients, *draw)
        if plan.present is None:
            return cohort
        visits = tuple(visit for visit in cohort.visits if visit.client in plan.present)
        absent = [visit.client for visit in cohort.visits if visit.client not in plan.present]
        return Cohort(visits, (*cohort.dropped, *absent))

    def served(self, cohort: Cohort) -> Cohort:
        """A cohort without the stragglers, where their work is dropped."""
        if self.options.availability.partial_work == "keep":
            return cohort
        return Cohort(tuple(visit for visit in cohort.visits if not visit.is_straggler), cohort.dropped)
