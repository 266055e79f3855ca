"""A round in several processes: each trains its share of the clients alone, then they join what came of it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fed.backends.client_parallel.distributed_log import DistributedLog
from lightning_fed.client.client_store import ClientStore
from lightning_fed.data.population import PlannedVisit, seed_everything
from lightning_fed.data.visit_costs import VisitCosts
from lightning_fed.messages import Client, State
from lightning_fed.model.entries import norm
from lightning_fed.rounds.callback import FederatedCallback
from lightning_fed.rounds.isolated_pass import find_metrics, unsynchronized
from lightning_fed.rounds.round import Round, federated_callbacks
from lightning_fed.rounds.trainer_checks import process_group_of
from lightning_fed.rounds.trainer_progress import RoundProgress
from lightning_fed.server.interface import RoundReport, ServerInterface
from lightning_fed.server.schedule import Cohort

_ROUNDING = 1e-4


@dataclass
class _Notes:
    """What a process says of its share of a round.

    Args:
        is_cut: Whether its round ended before its last visit was over.
        should_stop: Whether its Trainer was told to stop.
        steps: Optimizer steps that it has done.
        report: What happened.
        paces: Seconds that a batch of every client took.
        largest: Where the client with the most examples left the schedulers, see ``LocalOptimizers``.
        logged: What its visits have logged.
        stored: What clients keep from now on, see ``ClientStore.share``.
        noted: What callbacks have noted.

    """

    is_cut: bool
    should_stop: bool
    steps: int
    report: RoundReport
    visit_costs: dict[Client, float]
    largest: Any
    logged: dict[str, Any]
    stored: Any
    noted: list[Any]


class ProcessSynchronisation:
    """The processes of a fit, and what each has seen of the round so far.

    Args:
        trainer: The Trainer, with a strategy that shares clients out.
        log: What stands in for the module's ``log``.

    Attributes:
        ranks: The processes.
        paces: What visits took, where they are shared out by it.

    """

    def __init__(self, trainer: L.Trainer, log: DistributedLog) -> None:
        self.ranks = process_group_of(trainer)
        self.visit_costs = VisitCosts()
        self._trainer = trainer
        self._log = log
        self._goes_by_time = getattr(trainer.strategy, "balance", "batches") == "time"
        self._apart = ExitStack()
        self._started = 0.0
        self._seen: dict[Client, float] = {}
        self._should_stop = False

    def part(self, module: L.LightningModule) -> None:
        """Before the round's first batch: from here on every process is on its own."""
        self._apart = ExitStack()
        self._apart.enter_context(unsynchronized(find_metrics(module)))
        self.ranks.is_independent = True
        self._log.start_round()
        self._seen, self._should_stop = {}, False

    def start_visit(self, planned: PlannedVisit) -> None:
        """Notes when a visit begins."""
        self._log.start_visit(planned.position)
        self._started = time.perf_counter()

    def end_visit(self, planned: PlannedVisit) -> None:
        """Notes what it took."""
        if planned.fault is None and self._goes_by_time:
            self._seen[planned.visit.client] = (time.perf_counter() - self._started) / planned.num_batches

    def hold_stop(self) -> None:
        """Inside a round a Trainer that is told to stop goes on: it is to stop in all processes, after the round."""
        if self._trainer.should_stop:
            self._trainer.should_stop, self._should_stop = False, True

    def join(
        self,
        round: Round,
        server: ServerInterface,
        store: ClientStore,
        cohort: Cohort,
        start_seed: int,
        progress: RoundProgress,
        is_cut: bool = False,
    ) -> None:
        """After the last visit: all processes know of all visits, and the aggregators have all updates.

        Args:
            round: The round.
            server: The server half.
            store: Where clients keep what is theirs.
            cohort: The round's clients.
            start_seed: Seed of what the server draws at the start of the round.
            progress: Lightning's progress.
            is_cut: Whether the round ended in this process before its last visit was over.

        Raises:
            RuntimeError: In all processes, if the round was cut short in one.

        """
        trainer, ranks, number = self._trainer, self.ranks, server.report.round
        self.hold_stop()
        server.end_visits()
        module, steps = trainer.lightning_module, progress.steps(trainer)
        sharing = [each for each in federated_callbacks(trainer) if shares_notes(each)]
        notes: list[_Notes] = ranks.gather(
            _Notes(
                is_cut,
                self._should_stop,
                steps,
                server.report,
                self._seen,
                round.optimizers.largest,
                self._log.taken(),
                store.share(number),
                [callback.share_round(trainer, module) for callback in sharing],
            )
        )
        cut = [rank for rank, each in enumerate(notes) if each.is_cut]
        if cut:
            raise RuntimeError(
                f"Round {number} ended in process {cut[0]} before its visits were over, and the other processes cannot"
                " know: `on_train_batch_start` must not return -1, and nothing may leave the epoch in one process"
                " alone."
            )
        trainer.should_stop = any(each.should_stop for each in notes)
        progress.add_steps(trainer, sum(each.steps for each in notes) - steps)
        for each in notes:
            self.visit_costs.note(each.visit_costs)
        places = {visit.client: place for place, visit in enumerate(cohort.visits)}
        server.report = RoundReport.joined([each.report for each in notes], places)
        for rank, each in enumerate(notes):
            if rank != ranks.rank:
                store.join(number, each.stored)
        self._log.log_all(each.logged for each in notes)
        positions = [each.largest for each in notes if each.largest is not None]
        round.optimizers.largest = max(positions, key=lambda largest: largest[:2], default=None)
        for place, callback in enumerate(sharing):
            callback.join_round(trainer, module, [each.noted[place] for each in notes])
        seed_everything(start_seed)  # the aggregator starts the round once more
        self._merge(server, round.before)

    def agree(self, round: Round) -> None:
        """After the aggregation: makes sure that all processes have the same global model.

        Raises:
            RuntimeError: If they have not, beyond what a device may round differently.

        """
        local = round.local
        state = {name: local.entries[name] for name in local.shared}
        lengths = self.ranks.gather(float(norm(state.values())))
        if len(set(lengths)) == 1:
            return
        if max(lengths) - min(lengths) > _ROUNDING * max(lengths):
            raise RuntimeError(
                f"The processes have made different global models (their norms are {lengths}): an aggregator or a"
                " callback's `on_server_aggregate` does not do the same in all of them. What it draws must come from"
                " PyTorch's, NumPy's or Python's global generators, which have the same seed, and what it has noted in"
                " `on_server_receive` must be shared: see `FederatedCallback.share_round`."
            )
        local.load_global(self.ranks.broadcast(state))

    def rejoin(self) -> None:
        """The round is over: what is synchronised waits for all processes again."""
        self.ranks.is_independent = False
        self.release()

    def leave(self) -> None:
        """The fit ends with an error, in this process: from here on it waits for no other one."""
        self.ranks.is_independent = True

    def release(self) -> None:
        """Gives metrics back what was taken."""
        self._apart.close()

    def _merge(self, server: ServerInterface, before: State) -> None:
        """Has every process's aggregator receive what all have received, in the order of the ranks."""
        aggregator, round = server.aggregator, server.report.round
        known = _tensors([before, aggregator.state_dict()])
        for rank, part in enumerate(self.ranks.gather_one_by_one(aggregator, known)):
            if rank == 0:  # our own part is on its way by now
                aggregator.start_round(round, before)
            aggregator.merge(part)


def check_processes(trainer: L.Trainer, store: ClientStore) -> None:
    """Refuses what cannot be right where several processes share the clients of a round.

    Args:
        trainer: The Trainer.
        store: Where clients keep what is theirs.

    Raises:
        MisconfigurationException: With what to do instead.

    """
    if trainer.max_steps != -1:
        raise MisconfigurationException(
            "`max_steps` counts the steps of one process inside a round, and here every process has its own: use"
            f" `max_epochs` (rounds), and `local_steps` for short visits, but got max_steps={trainer.max_steps}."
        )
    if type(store).share is ClientStore.share:
        raise MisconfigurationException(
            f"`{type(store).__name__}` keeps what is the clients' for one process: a client may be trained by another"
            " one next. Use `MemoryStore`, `FolderStore` on a file system that all processes see, or implement"
            " `share` and `join`."
        )
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, ModelCheckpoint) and callback.every_n_epochs == 0:
            raise MisconfigurationException(
                f"`{name}` would save inside a round, at steps that every process counts for itself: use"
                " `every_n_epochs`. A checkpoint inside a round holds the last round's model in any case."
            )
        if isinstance(callback, FederatedCallback) and not shares_notes(callback):
            notes, uses = (
                is_overridden(hook, callback, FederatedCallback)
                for hook in ("on_server_receive", "on_server_aggregate")
            )
            if notes and uses:
                raise MisconfigurationException(
                    f"`{name}` sees a client's update in the process that trained it, and aggregates in all processes:"
                    " implement `share_round` and `join_round`, so that what it has noted reaches the others (or let"
                    " `share_round` return None, if it notes nothing)."
                )


def shares_notes(callback: FederatedCallback) -> bool:
    """Whether a callback has anything to share at the end of a round."""
    return is_overridden("share_round", callback, FederatedCallback)


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in containers, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inside for tensor in _tensors(each)]
