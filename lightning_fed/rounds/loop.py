"""The rounds of a fit, one after another: planned, opened with their first batch, closed after their last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.backends.client_parallel.synchronisation import ProcessSynchronisation
from lightning_fed.backends.vectorized.stacked_model import StackedModel, joint_loss
from lightning_fed.backends.vectorized.visit_groups import plan_visit_groups
from lightning_fed.client.client_store import ClientStore
from lightning_fed.data.interleave import StackedBatch, batch_tensors
from lightning_fed.data.population import PlannedVisit, Population, seed_everything, seeded_generators
from lightning_fed.data.round_loader import RoundLoader, VisitGroups
from lightning_fed.errors import ClientFault
from lightning_fed.messages import Client
from lightning_fed.model.entries import Policy
from lightning_fed.rounds.batch_norm import (
    freeze_batch_norm,
    has_no_measuring_step,
    recalibrate,
    thaw_batch_norm,
    warn_of_averaging,
)
from lightning_fed.rounds.callback import FederatedCallback
from lightning_fed.rounds.carried_attributes import note_attributes, warn_of_carried
from lightning_fed.rounds.client_errors import client_fault
from lightning_fed.rounds.failed_rounds import FailedRounds
from lightning_fed.rounds.remote import RemoteSide
from lightning_fed.rounds.round import Round, federated_callbacks
from lightning_fed.rounds.round_log import RoundLog
from lightning_fed.rounds.trainer_checks import IgnoredWarning, process_group_of
from lightning_fed.rounds.trainer_progress import RoundProgress
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.schedule import Cohort, Schedule

_log = logging.getLogger(__name__)

BatchNormMode = Literal["average", "recalibrate", "personal", "frozen"]


class RoundLoop:
    """What :class:`~lightning_fed.callbacks.Federation` does between Lightning's hooks.

    Args:
        server: The server half, or the way to it.
        schedule: Who takes part.
        store: Where clients keep what is theirs.
        batch_norm: What becomes of BatchNorm's running statistics.
        optimizer_state: Whether clients start with fresh optimizer state or with their own.
        partial_work: Whether the work of stragglers is used.
        max_failed_rounds: Number of failed rounds in a row that ends the fit.
        remote: The other half of the federation, where it is on another machine.

    Attributes:
        trainer: The Trainer; a fit sets it before anything else.
        population: All clients; a fit sets it before the first round.
        cohort: The clients of the round that is under way, or was last.
        policies: The policy of every entry of the module; likewise.
        log_book: What is logged.
        progress: What checkpoints say of Lightning's progress.
        rounds: Number of rounds that are over.
        failed_rounds: Those of which nothing came because clients failed.
        open: The round that is under way; ``None`` between rounds.
        processes: Those that share the clients, where there are several.
        together: Which visits train at once, and the stack that they do it in; ``None`` where they come one by one.

    """

    trainer: L.Trainer
    population: Population
    cohort: Cohort

    def __init__(
        self,
        server: ServerInterface,
        schedule: Schedule,
        store: ClientStore,
        batch_norm: BatchNormMode,
        optimizer_state: Literal["reset", "keep"],
        partial_work: Literal["keep", "drop"],
        max_failed_rounds: int | None = None,
        remote: RemoteSide | None = None,
    ) -> None:
        self.server, self.schedule, self.store = server, schedule, store
        self.batch_norm, self.optimizer_state, self.partial_work = batch_norm, optimizer_state, partial_work
        self.remote = remote
        self.policies: Mapping[str, Policy] = {}
        self.round_log = RoundLog()
        self.progress = RoundProgress()
        self.rounds = 0
        self.failed_rounds = FailedRounds(max_failed_rounds)
        self.open: Round | None = None
        self.processes: ProcessSynchronisation | None = None
        self.together: tuple[VisitGroups, StackedModel] | None = None
        self._has_warned = self._has_warned_of_forms = False
        self._loader: RoundLoader | None = None
        self._served: RoundLoader | None = None  # the loader whose round is over
        self._attributes: dict[str, Any] = {}  # as the round found them
        self._ignored: list[IgnoredWarning] = []

    @property
    def visit(self) -> PlannedVisit | None:
        """The visit that is under way; ``None`` between visits."""
        return None if self.open is None else self.open.visit

    def plan_visit_groups(self, size: int, find_population: Callable[[], Population]) -> None:
        """Decides whether visits can train at once, before the first round.

        Args:
            size: At most how many.
            find_population: Asks for the clients' data, where more than one visit at a time is wanted.

        """
        if size == 1:
            return
        trainer, module = self.trainer, self.trainer.lightning_module
        if self.batch_norm == "frozen":
            freeze_batch_norm(module)  # as in a round
        self.together = plan_visit_groups(
            size,
            trainer,
            module,
            find_population(),
            self.schedule,
            self.policies,
            self.server.aggregator,
            self.optimizer_state,
        )
        if self.batch_norm == "frozen":
            thaw_batch_norm(module)

    def plan(self) -> RoundLoader:
        """The loader of the next round, which opens it when Lightning asks for its first batch."""
        cohort = self._draw() if self.remote is None else self.remote.cohort(self._draw)
        served = cohort
        if self.partial_work == "drop":
            served = Cohort(tuple(visit for visit in cohort.visits if not visit.is_straggler), cohort.dropped)
        if self.remote is not None:
            served = self.remote.visits_here(served)
        visit_costs = None if self.processes is None else self.processes.visit_costs
        loader = RoundLoader(
            self.population,
            served,
            self.trainer.limit_train_batches,
            process_group_of(self.trainer),
            visit_costs,
            None if self.together is None else self.together[0],
        )
        loader.on_start = lambda: self._start(loader, cohort)
        return loader

    def scheduler_steps(self, rounds: int, window: int) -> int:
        """Number of steps that a per-step scheduler makes in a fit.

        Args:
            rounds: Number of rounds of the fit.
            window: Batches for one step of the optimizer.

        """
        sizes: dict[Client, tuple[int, int]] = {}
        steps = furthest = 0
        for round in range(rounds):
            visits = [
                visit for visit in self._draw(round).visits if self.partial_work == "keep" or not visit.is_straggler
            ]
            for client in {visit.client: None for visit in visits}.keys() - sizes.keys():
                sizes[client] = self._size_of(client)
            lengths = [-(-visit.num_batches(sizes[visit.client][1]) // window) for visit in visits]
            if lengths:
                furthest = max(furthest, steps + max(lengths))
                largest = max(range(len(visits)), key=lambda place: sizes[visits[place].client][0])
                steps += lengths[largest]
        return furthest

    def _size_of(self, client: Client) -> tuple[int, int]:
        """Number of examples and of batches in an epoch, none of a client that cannot be asked."""
        try:
            length = self.population.batches_per_epoch(client)
            return self.population.num_samples(client), 1 if length is None else length
        except MisconfigurationException:
            raise
        except Exception:  # the client is left out, when its round comes
            return 0, 0

    def _draw(self, round: int | None = None) -> Cohort:
        """The round's clients, as the schedule and the rule have it; by default of the round that comes."""
        round = self.trainer.current_epoch if round is None else round
        asked = self.server.aggregator.plan(round)
        cohort = self.schedule.cohort(round, self.population.clients, asked.drawn, asked.local_epochs)
        if asked.present is None:
            return cohort
        visits = tuple(visit for visit in cohort.visits if visit.client in asked.present)
        absent = [visit.client for visit in cohort.visits if visit.client not in asked.present]
        return Cohort(visits, (*cohort.dropped, *absent))

    def start_batch(self) -> None:
        """Starts the visit, or those that train at once, if this is the first batch."""
        group = () if self._loader is None else self._loader.group
        if group and (self.open is None or self.open.group is not group):
            round = self._opened()
            if self.processes is not None:
                self.processes.start_visit(group[0])
            round.start_visits(group)

    @contextmanager
    def counting_in_visit(self) -> Iterator[int | None]:
        """The module meanwhile sees the batches counted as in a fit of its client alone.

        Gives the index of the batch in the client's local epoch; ``trainer.is_last_batch`` meanwhile says whether it is
        the local epoch's last, or the visit's. Of clients that train at once those of the first are counted. Between
        visits nothing changes, and ``None`` is given.
        """
        place = None if self._loader is None or not self._loader.group else self._loader.epoch_position
        if place is None:
            yield None
            return
        progress = self.trainer.fit_loop.epoch_loop.batch_progress  # what `trainer.is_last_batch` reads
        before, progress.is_last_batch = progress.is_last_batch, place.is_last
        try:
            yield place.number
        finally:
            progress.is_last_batch = before

    def step(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's own step; where it fails by the client's fault, the client is left out and the round goes on."""
        if self.open is not None and len(self.open.group) > 1:
            return self._step_together(training_step, *args)
        visit = self.visit
        if visit is not None and visit.fault is not None:  # it failed before its first batch
            return self._skip()
        if visit is not None and args:
            assert self.open is not None
            try:
                args = (self.open.prepare(args[0]), *args[1:])
            except ClientFault as error:
                visit.fail(str(error), error)
                return self._skip()
        try:
            return training_step(*args, **kwargs)
        except Exception as error:
            planned = self.visit
            fault = None if planned is None else client_fault(error, planned)
            # With manual optimization a step that broke off may have left anything undone.
            if planned is None or fault is None or not self.trainer.lightning_module.automatic_optimization:
                raise
            planned.fail(fault, error)
            return self._skip()

    def _step_together(self, training_step: Callable[..., Any], parts: list[StackedBatch], *rest: Any) -> Any:
        """One step of all who train at once; those who fail by their own fault are left out."""
        assert self.open is not None
        assert self.together is not None
        assert self._loader is not None
        assert self._loader.numbers is not None
        group, losses = self.open.group, []
        if not self._has_warned_of_forms and len(parts) == len(group):
            self._has_warned_of_forms = self._warn_of_forms(parts)
        for part in parts:
            try:
                losses.append(self.together[1].step(training_step, part, rest, self._loader.numbers))
            except Exception as error:
                faults = {index: client_fault(error, group[index]) for index in part.clients}
                if None in faults.values():
                    clients = [group[index].visit.client for index in part.clients]
                    error.add_note(
                        f"In round {group[0].visit.round}, in the visits of clients {clients}, who train at once:"
                        " with `vectorize=1` one trains after another."
                    )
                    raise
                for index, fault in faults.items():
                    group[index].fault, group[index].error = fault, error.with_traceback(None)
        return joint_loss(losses) if losses else self._skip()

    def _warn_of_forms(self, parts: Sequence[StackedBatch]) -> bool:
        shapes = {tuple((tensor.shape, tensor.dtype) for tensor in batch_tensors(part.batch)) for part in parts}
        if len(shapes) == 1:
            _log.warning(
                "`vectorize`: the batches of %d clients have the same shapes, but other texts, numbers or objects in"
                " them (names of files?). Each client's step is run alone, which is slower than with `vectorize=1`:"
                " leave out of the batches what `training_step` does not need.",
                len(parts),
            )
        return len(shapes) == 1

    def has_trained(self, batch: Any) -> bool:
        """Whether a batch was trained on."""
        planned = None if self._loader is None else self._loader.current
        return batch is not None and (planned is None or planned.fault is None)

    def end_batch(self) -> None:
        """Ends the visit if this was its last batch, and the round if it was the last visit."""
        loader = self._loader
        if self.processes is not None and self.open is not None:
            self.processes.hold_stop()
        if self.open is not None and loader is not None:
            self.open.end_batch(loader.batches_left)
        if loader is None or loader.batches_left or loader is self._served:
            return
        round = self._opened()
        if loader.group:
            round.end_visits(loader.group)
            if self.processes is not None:
                self.processes.end_visit(loader.group[0])
        if loader.is_over:
            self._close(round)

    def abandon(self) -> None:
        """Goes back to the global model at the start of the round, if one is open."""
        if self.open is not None:
            self.open.abandon()
            self._end(is_new=False)

    def leave(self, module: L.LightningModule) -> None:
        """The same at the end of a fit, which leaves the module as it trains elsewhere."""
        self.abandon()
        if self.batch_norm == "frozen":
            thaw_batch_norm(module)

    def cut_short(self) -> None:
        """Gives up the round that is open, if there is one, and says so."""
        if self.open is not None:
            if self.processes is not None:
                self._join(self.processes, self.open, is_cut=True)
            _log.warning("Round %d was cut short: the global model stays as it was.", self.server.report.round)
            self.abandon()

    def give_back(self) -> None:
        """Lets warnings be seen again, and gives metrics back."""
        if self.processes is not None:
            self.processes.release()
        self.together = None  # which has the memory of several models
        for warning in self._ignored:
            warning.give_back()
        self._ignored = []

    def ignore(self, text: str) -> None:
        """Keeps a warning of Lightning's from being seen while the fit lasts: what it warns of is on purpose."""
        self._ignored.append(IgnoredWarning(text))

    def _start(self, loader: RoundLoader, cohort: Cohort) -> None:
        """The round begins with its first batch, if it is Lightning that asks for it: the hook is anybody's to call."""
        if self.trainer.train_dataloader is loader:
            self._loader, self.cohort = loader, cohort
            self._opened()

    def _opened(self) -> Round:
        if self.open is None:
            assert self._loader is not None
            trainer, module = self.trainer, self.trainer.lightning_module
            self.progress.start_round(trainer)
            if self.remote is not None:
                self.remote.start(self)
            stack = None if self.together is None else self.together[1]
            seed_everything(self.schedule.start_seed(trainer.current_epoch))
            self.open = Round(trainer, module, self.server, self.policies, self.store, self.optimizer_state, stack)
            if self.processes is not None:
                self.processes.part(module)
            if process_group_of(trainer).rank == 0:
                for client, reason in self._loader.failed.items():
                    self.server.fail(client, reason)
            if self.batch_norm == "frozen":
                freeze_batch_norm(module)
            visits = self._loader.visits
            if self.batch_norm == "average" and visits and not self._has_warned:
                warn_of_averaging(module, self.open.local, min(planned.num_batches for planned in visits))
                self._has_warned = True
            if self.batch_norm == "recalibrate" and not self._has_warned and has_no_measuring_step(module):
                _log.warning(
                    "batch_norm='recalibrate' cannot measure BatchNorm's running statistics, so that they are averaged:"
                    " with manual optimization `training_step` would train the model, and %s has no"
                    " `validation_step` to run instead. Implement one, or choose another `batch_norm`.",
                    type(module).__name__,
                )
                self._has_warned = True
            for callback in self._server_side():
                callback.on_server_round_start(trainer, module)
            self._attributes = note_attributes(module)
        return self.open

    def _close(self, round: Round) -> None:
        warn_of_carried(self.trainer.lightning_module, self._attributes, self.server.report.round)
        if self.processes is not None:
            self._join(self.processes, round)
        if self.remote is not None:
            self.remote.exchange(self)
        seed_everything(self.schedule.end_seed(self.server.report.round))
        has_come = round.close()
        if self.processes is not None:
            self.processes.agree(round)
        if round.is_new and self.batch_norm == "recalibrate":
            module = self.trainer.lightning_module
            with seeded_generators():  # every process measures its share
                recalibrate(self.trainer, module, self.server, round.local, self.population, self.cohort, self.remote)
        report = self.server.report
        if self.remote is None or self.remote.has_server:
            after, parameters = round.local.entries, round.local.parameters
            measured = self.server.aggregator.metrics() if has_come else {}
            self.round_log.end_round(self.trainer, report, self.cohort, round.before, after, parameters, measured)
        if self.processes is not None:
            self.processes.rejoin()
        self._end(round.is_new)
        self._served = self._loader
        self.progress.end_round()
        self.rounds = report.round + 1
        if self.remote is None or self.remote.has_server:
            assert self._loader is not None
            num_clients, errors = len(self.population.clients), self._loader.errors
            ranks = process_group_of(self.trainer)
            self.failed_rounds.end_round(report, has_come, self.server.min_clients, num_clients, errors, ranks)

    def _end(self, is_new: bool) -> None:
        self.open = None
        for callback in self._server_side():
            callback.on_server_round_end(self.trainer, self.trainer.lightning_module, is_new)

    def _server_side(self) -> list[FederatedCallback]:
        """The callbacks whose hooks of the server's side are called here."""
        is_client = self.remote is not None and not self.remote.has_server
        return [] if is_client else federated_callbacks(self.trainer)

    def _join(self, processes: ProcessSynchronisation, round: Round, is_cut: bool = False) -> None:
        start_seed = self.schedule.start_seed(self.server.report.round)
        processes.join(round, self.server, self.store, self.cohort, start_seed, self.progress, is_cut)

    def _skip(self) -> None:
        self.ignore("`training_step` returned `None`")
