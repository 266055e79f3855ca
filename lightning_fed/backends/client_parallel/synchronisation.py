"""Merges the results of several processes at the end of each round."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fed.backends.client_parallel.distributed_log import DistributedLog
from lightning_fed.client.client_store import ClientStore
from lightning_fed.client.local_model import LocalModel
from lightning_fed.client.local_optimizers import LocalOptimizers
from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit, seed_everything
from lightning_fed.data.round_plan import VisitCosts
from lightning_fed.features.isolated_pass import find_metrics, unsynchronized
from lightning_fed.federated_callback import FederatedCallback, federated_callbacks
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import add_optimizer_steps, callbacks_of, is_overridden
from lightning_fed.messages import Client, State
from lightning_fed.model.entries import norm
from lightning_fed.numerics.trees import tree_leaves
from lightning_fed.process_group import ProcessGroup, RoundSynchronisation
from lightning_fed.rounds.visit_driver import VisitDriver
from lightning_fed.server.schedule import Cohort
from lightning_fed.server.server import RoundReport

_ROUNDING = 1e-4  # largest relative difference between the norms of equal models


@dataclass
class _Share:
    """Results of one process in a round, sent to all other processes.

    - ``visit_costs``: training time in seconds per batch, by client.
    - ``finals``: final learning-rate scheduler states, by the client's index in the round.
    - ``stored``: state kept for each client.
    - ``noted``: for each callback, the value yielded by ``share_round``, or ``None``.
    """

    is_cut: bool
    should_stop: bool
    steps: int
    report: RoundReport
    visit_costs: dict[Client, float]
    finals: Any
    logged: Any
    stored: Any
    noted: list[Any]


def deliver_values(flow: Generator[Any, Any, None], values: list[Any]) -> None:
    """Resumes a callback's generator ``share_round`` with the values from all processes."""
    with suppress(StopIteration):
        flow.send(values)
        raise RuntimeError(
            "Expected `share_round` to yield once, but got a second `yield`: yield all values at once, as a tuple."
        )


class ProcessSynchronisation(RoundSynchronisation):
    """Trains a round's clients in several processes, and merges the results after each round.

    ``balance`` is the quantity to balance between processes: number of batches, or measured training time.
    """

    visit_costs: VisitCosts  # measured costs, used to balance the processes

    def __init__(
        self, fit: FederatedFit, processes: ProcessGroup, log: DistributedLog, balance: Literal["batches", "time"]
    ) -> None:
        self.visit_costs, self.driver = VisitCosts(), ParallelVisits
        self._fit, self._trainer, self._server, self._store = fit, fit.trainer, fit.server, fit.store
        self._processes, self._log = processes, log
        self._goes_by_time = balance == "time"
        self._unsynchronized = ExitStack()
        self._visit_start = 0.0
        self._seconds: dict[Client, float] = {}
        self._should_stop = False

    def start_round(self) -> None:
        self._unsynchronized = ExitStack()
        self._unsynchronized.enter_context(unsynchronized(find_metrics(self._trainer.lightning_module)))
        self._processes.is_independent = True
        self._log.start_round()
        self._seconds, self._should_stop = {}, False
        self._first_step = self._trainer.global_step

    def start_visit(self, planned: PlannedVisit) -> None:
        self._log.start_visit(planned.position)
        self._visit_start = time.perf_counter()

    def postpone_stop(self) -> None:
        trainer = self._trainer
        # All processes stop together at the end of the round.
        if trainer.should_stop:
            trainer.should_stop, self._should_stop = False, True

    def end_visit(self, planned: PlannedVisit) -> None:
        if planned.fault is None and self._goes_by_time:
            self._seconds[planned.visit.client] = (time.perf_counter() - self._visit_start) / planned.num_batches

    def join(self, state: State, optimizers: LocalOptimizers, cohort: Cohort, is_cut: bool = False) -> None:
        server, trainer, module = self._server, self._trainer, self._trainer.lightning_module
        number = server.report.round
        self.postpone_stop()
        server.end_visits()
        steps = trainer.global_step - self._first_step
        flows = [_share(callback, trainer, module) for callback in federated_callbacks(trainer)]
        shares: list[_Share] = self._processes.gather(
            _Share(
                is_cut,
                self._should_stop,
                steps,
                server.report,
                self._seconds,
                optimizers.finals,
                self._log.take_entries(),
                self._store.share(number),
                [None if flow is None else next(flow, None) for flow in flows],  # flows differ between processes
            )
        )
        cut = [rank for rank, share in enumerate(shares) if share.is_cut]
        if cut:
            raise RuntimeError(
                f"Expected every process to train all assigned clients in round {round_number(number)}, but process "
                f"{cut[0]} left the epoch early: to end the fit, set `trainer.should_stop` (effective after the round) "
                "instead of returning -1 from `on_train_batch_start`."
            )
        trainer.should_stop = any(share.should_stop for share in shares)
        add_optimizer_steps(trainer, sum(share.steps for share in shares) - steps)
        for share in shares:
            self.visit_costs.note(share.visit_costs)
        positions = {visit.client: position for position, visit in enumerate(cohort.visits)}
        server.report = RoundReport.joined([share.report for share in shares], positions)
        for rank, share in enumerate(shares):
            if rank != self._processes.rank:
                self._store.join(number, share.stored)
        self._log.log_all([share.logged for share in shares])
        optimizers.finals = {position: final for share in shares for position, final in share.finals.items()}
        for index, flow in enumerate(flows):
            if flow is not None:
                deliver_values(flow, [share.noted[index] for share in shares])
        seed_everything(self._fit.schedule.start_seed(number))  # restarts the exception chain at the round's error
        self._merge(state)

    def check_state(self, local: LocalModel) -> None:
        state = {name: local.entries[name] for name in local.shared}
        norms = self._processes.gather(float(norm(state.values())))
        if len(set(norms)) == 1:
            return
        if max(norms) - min(norms) > _ROUNDING * max(norms):
            raise RuntimeError(
                f"The processes have different global models (norms {norms}): an aggregator or a callback's "
                "`on_server_aggregate` differs between processes. Draw random numbers only from PyTorch's, NumPy's "
                "or Python's global generators (with equal seeds), and share values recorded in `on_server_receive`: "
                "see `FederatedCallback.share_round`."
            )
        local.load_global(self._processes.broadcast(state))

    def end_round(self) -> None:
        self._processes.is_independent = False
        self.release()

    def abort(self) -> None:
        self._processes.is_independent = True

    def release(self) -> None:
        self._unsynchronized.close()

    def _merge(self, start: State) -> None:
        server = self._server
        leaves = tree_leaves([start, server.chain.state_dict()])
        known = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for rank, part in enumerate(self._processes.gather_one_by_one(server.chain.part, known)):
            if rank == 0:  # this process has already sent its part
                server.start_chain()
            server.chain.merge(part)


class ParallelVisits(VisitDriver):
    """Trains the clients assigned to this process; other processes train the round's other clients."""

    may_end_early = False

    @property
    def _synchronisation(self) -> ProcessSynchronisation:
        assert isinstance(self.fit.synchronisation, ProcessSynchronisation)
        return self.fit.synchronisation

    def start(self, group: Sequence[PlannedVisit]) -> None:
        self._synchronisation.start_visit(group[0])
        super().start(group)

    def end(self, group: Sequence[PlannedVisit]) -> None:
        super().end(group)
        self._synchronisation.end_visit(group[0])

    def _end_batch(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super()._end_batch(outputs, batch, batch_idx)
        if not self._loader.is_over:
            self._synchronisation.postpone_stop()


def check_processes(trainer: L.Trainer, store: ClientStore) -> None:
    """Refuses settings and callbacks that do not work with several processes.

    Raises:
        MisconfigurationException: If other processes cannot read the client store. If a callback saves checkpoints
            within a round, or aggregates updates without sharing these between processes (``share_round``).
    """
    if type(store).share is ClientStore.share:
        raise MisconfigurationException(
            f"`{type(store).__name__}` keeps client states in one process, but another process may train the client"
            " next. Use `MemoryStore`, `FolderStore` on a shared file system, or implement"
            " `share` and `join`."
        )
    for callback in callbacks_of(trainer):
        name = type(callback).__name__
        if isinstance(callback, ModelCheckpoint) and callback.every_n_epochs == 0:
            raise MisconfigurationException(
                f"`{name}` would save within a round, at steps that each process counts separately: use "
                "`every_n_epochs`. A checkpoint within a round would contain the model of the last round anyway."
            )
        if isinstance(callback, FederatedCallback) and not shares_notes(callback):
            notes, uses = (
                is_overridden(hook, callback, FederatedCallback)
                for hook in ("on_server_receive", "on_server_aggregate")
            )
            if notes and uses:
                raise MisconfigurationException(
                    f"`{name}` receives updates only in the process that trained the client, but aggregates in all "
                    "processes: implement `share_round`, which shares the received data between processes."
                )


def shares_notes(callback: FederatedCallback) -> bool:
    """True if a callback implements ``share_round`` or sets ``shared_attribute``, to share data between processes."""
    return hasattr(callback, "shared_attribute") or is_overridden("share_round", callback, FederatedCallback)


def _share(callback: Any, trainer: L.Trainer, module: L.LightningModule) -> Any:
    if hasattr(callback, "shared_attribute") and not is_overridden("share_round", callback, FederatedCallback):
        return _share_attribute(callback)
    return callback.share_round(trainer, module)


def _share_attribute(callback: Any) -> Generator[Any, list[Any], None]:
    shares = yield getattr(callback, callback.shared_attribute)
    merged = {client: value for share in shares for client, value in share.items()}
    setattr(callback, callback.shared_attribute, merged)
