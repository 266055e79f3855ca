"""The rounds of a fit: planned, opened with their first batch, and closed after their last.

What happens inside a round is in :mod:`lightning_fed.rounds.round`, inside a visit in
:mod:`lightning_fed.rounds.visits`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint
from torch import nn

from lightning_fed.console import round_number
from lightning_fed.data.federated import (
    FederatedDataModule,
    datamodule_of_handed,
    is_one_client,
    split_training_data,
)
from lightning_fed.data.partitions import Partition
from lightning_fed.data.population import Population, in_one_thread, seeded_generators
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.fit.entry_policies import freeze_parameters
from lightning_fed.fit.failed_rounds import FailedRounds
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.fit.synchronisation import process_group_of, sharing_strategy
from lightning_fed.fit.trainer_checks import (
    check_optimizers,
    check_round,
    check_trainer,
    find_loader_owner,
)
from lightning_fed.lightning.internals import (
    TRANSFER_HOOKS,
    HandedDataModule,
    OverriddenMethod,
    advise_workers,
    callbacks_of,
    datamodule_of,
    end_with_batch,
    ends_after_batch,
    exchange_last_batch,
    exchange_reload_interval,
    exchange_validation_time,
    forget_length,
    handed_data,
    is_overridden,
    loader_to_overfit,
    log_position,
    move_log_position,
)
from lightning_fed.messages import Client
from lightning_fed.rounds.batch_loop import BatchLoop, find_obstacle
from lightning_fed.rounds.batch_norm import freeze_batch_norm, thaw_batch_norm
from lightning_fed.rounds.remote import RemoteSide
from lightning_fed.rounds.round import Round
from lightning_fed.rounds.round_averages import RoundAverages
from lightning_fed.rounds.simultaneous_visits import SimultaneousVisits
from lightning_fed.server.schedule import Cohort

_log = logging.getLogger(__name__)


class RoundLoop:
    """Puts the rounds into a Trainer's fit: a loader for each, and the ends of its visits.

    Args:
        fit: The fit.
        remote: The other half of the federation, where it is on another machine.

    Attributes:
        remote: Likewise.
        failed_rounds: Count of the rounds that brought no new model because clients failed.
        is_planned: True once the first round has been planned.
    """

    def __init__(self, fit: FederatedFit, remote: RemoteSide | None = None) -> None:
        self.fit, self.remote = fit, remote
        self.failed_rounds = FailedRounds(fit.options.faults.max_failed_rounds)
        self.is_planned = False
        self._round: Round | None = None
        self._executor: SimultaneousVisits | None = None
        self._batch_loop: BatchLoop | None = None
        self._averages: RoundAverages | None = None
        self._partition: Partition | None = None
        self._loader: RoundLoader | None = None
        self._finished_loader: RoundLoader | None = None
        self._is_left_out = False  # the batch, whose visit the module has ended
        self._has_advised = False
        self._overridden: list[OverriddenMethod | HandedDataModule] = []
        self._waiting: list[Callable[[], object]] = []  # callbacks that look at the round's last batch after it
        self._reload_interval: int | None = None  # the user's
        self._last_look = 0  # round in which the clients' data were asked for
        self._validation_time: float | None = None  # of the last validation, by Lightning's clock
        self._frozen: list[nn.Parameter] = []
        self._generators = ExitStack()  # as the fit has found them

    @property
    def round(self) -> Round | None:
        """The round that is under way; ``None`` between rounds."""
        return None if self._round is None or self._round.is_over else self._round

    @property
    def trains_at_once(self) -> bool:
        """True if several visits train at once."""
        return self._executor is not None

    # The fit

    def attach(self, trainer: L.Trainer, module: L.LightningModule, partition: Partition | None) -> None:
        """Replaces methods of the user's objects, until :meth:`detach`.

        Args:
            trainer: The Trainer.
            module: The module.
            partition: Splits the training data, where they do not come as clients already.

        Raises:
            MisconfigurationException: If the Trainer is asked for what cannot be right in a round, or the training data
                cannot be reached or do not fit ``partition``.

        """
        fit, self._partition = self.fit, partition
        fit.attach(trainer)
        check_trainer(trainer)
        strategy = sharing_strategy(trainer)
        if strategy is not None:
            fit.synchronise(strategy.synchronise(trainer, fit.server, fit.store, fit.schedule, fit.progress))
        train, val = handed_data(trainer)
        if train is not None:
            handed = datamodule_of_handed(train, val, partition, self.known_clients)
            self._overridden = [HandedDataModule(trainer, handed)]
        has_clients = isinstance(datamodule_of(trainer), FederatedDataModule)
        if self.remote is None and has_clients == (partition is not None):
            raise MisconfigurationException(
                "Expected a `partition` that splits the training data into clients, or a FederatedDataModule that"
                f" brings them, but got {'both' if partition is not None else 'neither'}."
            )
        loader_owner = find_loader_owner(trainer, module)
        self._averages = RoundAverages(fit)
        if not is_one_client(partition):  # a visit that fails is padded with `None` batches, and the log says why
            fit.ignore_warning("train_dataloader yielded None")
        # Lightning 2.6 with torch 2.13, about itself, and again whenever a library has changed the filters.
        fit.ignore_warning(
            r"`isinstance\(treespec, LeafSpec\)` is deprecated", r"(lightning\.pytorch|pytorch_lightning)\."
        )
        self._reload_interval = exchange_reload_interval(trainer, 1)
        if trainer.overfit_batches:  # type: ignore[attr-defined]
            trainer.limit_train_batches = 1.0  # the batches are those of every client, not of the round
        self._train_dataloader = OverriddenMethod(loader_owner, "train_dataloader", self._plan_round)
        self._save_checkpoint = OverriddenMethod(module, "on_save_checkpoint", self._on_save_checkpoint)
        self._has_batch_end = _has_own(module, "on_train_batch_end")
        self._batch_end = OverriddenMethod(module, "on_train_batch_end", self._on_train_batch_end)
        self._step = OverriddenMethod(module, "training_step", self._training_step)
        self._backward = OverriddenMethod(module, "backward", self._on_backward)
        self._overridden += [
            self._backward,
            self._train_dataloader,
            self._save_checkpoint,
            self._batch_end,
            self._step,
        ]
        self._has_batch_start = _has_own(module, "on_train_batch_start")
        if self._has_batch_start:
            self._batch_start = OverriddenMethod(module, "on_train_batch_start", self._on_train_batch_start)
            self._overridden.append(self._batch_start)

        savers = [callback for callback in callbacks_of(trainer) if isinstance(callback, Checkpoint)]
        self._overridden += [self._after_round(callback) for callback in savers]
        for owner in (datamodule_of(trainer), module):
            for hook in TRANSFER_HOOKS:
                if owner is not None and is_overridden(hook, owner):
                    self._overridden.append(_without_none(owner, hook))

    def start_fit(self) -> None:
        """Prepares the module for the rounds, when the policies of its entries are decided.

        Raises:
            MisconfigurationException: If visits are to be fused and cannot be.

        """
        fit = self.fit
        if self._averages is not None:
            self._averages.check_entries()
        self._batch_loop = self._fuse()
        if fit.options.optimizer_state == "keep":
            check_optimizers(fit.trainer.optimizers)
        fit.note_initial_statistics()
        self._frozen = freeze_parameters(fit.module, fit.policies)
        visits = fit.options.visits_at_once
        if visits is None:
            return
        self.find_population()
        if fit.is_batch_norm_fixed:
            freeze_batch_norm(fit.module)  # as in a round
        self._executor = visits.plan(fit)
        if fit.is_batch_norm_fixed:
            thaw_batch_norm(fit.module)

    def _fuse(self) -> BatchLoop | None:
        """Decides whether visits are fused; the log says why not, where that is left to it."""
        trainer, module, visits = self.fit.trainer, self.fit.module, self.fit.options.visits_one_by_one
        obstacle = None if visits == "lightning" else find_obstacle(trainer, module, self._has_batch_start)
        if obstacle is not None and visits == "fused":
            raise MisconfigurationException(
                f"`visits='fused'`: the visits cannot be fused, because {obstacle}. With visits='auto' Lightning's own"
                " loop trains them, with the same result."
            )
        if obstacle is not None and trainer.is_global_zero:
            _log.info("Visits are not fused, because %s.", obstacle)
        return None if obstacle is not None or visits == "lightning" else BatchLoop(trainer, module)

    def start_training(self) -> None:
        """Makes sure that the Trainer trains on rounds, and puts the states of the global generators aside.

        Raises:
            MisconfigurationException: If it trains on loaders that were handed to ``fit``.

        """
        if not isinstance(self.fit.trainer.train_dataloader, RoundLoader):
            raise MisconfigurationException(
                "The Trainer trains on other loaders than those of the clients: hand over a datamodule, such as"
                " `lightning_fed.data.LoaderDataModule(train, val)`."
            )
        if self.remote is None or not self.remote.has_server:  # a server of remote clients trains nothing here
            self._generators.enter_context(in_one_thread())
        self._generators.enter_context(seeded_generators())

    def end_training(self, module: L.LightningModule) -> None:
        """Leaves the last complete global model in the module, in the modes in which it trains without a federation."""
        if self.round is not None:
            self.round.abandon()
        if self._overridden and self.fit.is_batch_norm_fixed:  # not where `setup` was not reached
            thaw_batch_norm(module)

    def detach(self) -> None:
        """Restores what :meth:`attach` and the rounds have changed."""
        for method in self._overridden:
            method.restore()
        if self._averages is not None:
            self._averages.restore()
            self._averages = None
        if self._reload_interval is not None:
            exchange_reload_interval(self.fit.trainer, self._reload_interval)
            if self.fit.trainer.overfit_batches:  # type: ignore[attr-defined]
                self.fit.trainer.limit_train_batches = self.fit.trainer.overfit_batches  # type: ignore[attr-defined]
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._overridden, self._reload_interval, self._frozen = [], None, []
        self._executor = self._batch_loop = None
        self.fit.close()
        self._generators.close()

    def find_population(self) -> Population:
        """All clients; their data are asked for if they are not known yet."""
        if not self.fit.is_population_known and self._overridden:
            self._look_at_data()
        return self.fit.population

    def known_clients(self) -> Sequence[Client]:
        """The clients' keys, likewise."""
        return self.find_population().clients

    def _look_at_data(self) -> None:
        """Asks for the clients' data, as Lightning asks for a training loader."""
        fit = self.fit
        if self.remote is not None:
            fit.meet(self.remote.population)
        elif self._partition is None:
            fit.meet(datamodule_of(fit.trainer).population())
        else:
            loader = self._train_dataloader.original()
            if not fit.is_population_known:
                interval = exchange_reload_interval(fit.trainer, self._reload_interval or 0)  # which it looks at, too
                advise_workers(fit.trainer, loader)
                exchange_reload_interval(fit.trainer, interval)
            if fit.trainer.overfit_batches:  # type: ignore[attr-defined]
                loader = loader_to_overfit(loader)
            fit.meet(split_training_data(loader, self._partition, fit.schedule.seed))

    def ask_for_round(self) -> None:
        """Has Lightning ask for a training loader before the next epoch: for the next round's."""
        exchange_reload_interval(self.fit.trainer, 1)

    def start_epoch(self) -> None:
        """Has Lightning ask for validation data as the user has told it, when it has asked for the round's loader."""
        trainer = self.fit.trainer
        exchange_reload_interval(trainer, self._reload_interval or 0)
        exchange_validation_time(trainer, self._validation_time)
        loader = trainer.train_dataloader
        if isinstance(loader, RoundLoader) and loader.is_endless:
            forget_length(trainer)

    def averages_in_place(self) -> AbstractContextManager[None]:
        """The module meanwhile is the average of the global models, as in validation, where there is one."""
        return nullcontext() if self._averages is None else self._averages.in_place()

    # A round

    def _plan_round(self) -> RoundLoader:
        """Override of ``train_dataloader``: the next round's loader, which opens it when its first batch is fetched."""
        fit, round, interval = self.fit, self.fit.trainer.current_epoch, self._reload_interval or 0
        is_due = bool(interval) and round - self._last_look >= interval
        if self.is_planned and is_due:
            self._look_at_data()
        self.find_population()
        if is_due or not self.is_planned:
            self._last_look = round
        self._validation_time = exchange_validation_time(fit.trainer, None) if self.is_planned else None
        self.is_planned = True
        remote = self.remote
        cohort = fit.draw_cohort(round) if remote is None else remote.cohort(lambda: fit.draw_cohort(round))
        served = fit.served(cohort)
        if remote is not None:
            served = remote.visits_here(served)
        loader = RoundLoader(
            fit.population,
            served,
            fit.trainer.limit_train_batches,
            process_group_of(fit.trainer),
            fit.synchronisation.visit_costs,
            None if self._executor is None else self._executor.groups,
            fit.clock,
        )
        if remote is None:
            check_round(fit.trainer, loader.visits, len(fit.population.clients))
        if loader.is_endless:
            loader.on_end = partial(end_with_batch, fit.trainer)
        loader.on_start = partial(self._start_round, loader, cohort)
        return loader

    def _start_round(self, loader: RoundLoader, cohort: Cohort) -> None:
        """Opens the round if the loader is the one that Lightning trains on; anybody may ask a loader for batches."""
        if self.fit.trainer.train_dataloader is loader:
            interval: int = self.fit.trainer.log_every_n_steps  # type: ignore[attr-defined]
            if not self._has_advised and self.fit.trainer.num_training_batches < interval:
                self._has_advised = True  # Lightning has said it; rounds of other lengths would repeat it
                self.fit.ignore_warning("The number of training batches")
            if self.fit.rounds > self.fit.trainer.current_epoch:  # there is a checkpoint of before its validation
                raise MisconfigurationException(
                    f"Round {round_number(self.fit.trainer.current_epoch)} is in the checkpoint already, and only"
                    " its validation is not: resume with a Trainer that validates as the one before."
                )
            self._loader = loader
            self.fit.start_round(cohort)
            self._open_round()

    def _open_round(self) -> Round:
        if self.round is not None:
            return self.round
        assert self._loader is not None
        if self.remote is not None:
            self.remote.start(self.fit)
        round = self._round = Round(self.fit, self._loader, self.fit.cohort, self._executor)
        round.open()
        return round

    def start_batch(self) -> None:
        """Starts the visit, or those that train at once, if this is their first batch."""
        group = () if self._loader is None else self._loader.group
        if group and (self.round is None or self.round.visits.group is not group):
            self._open_round().visits.start_group(group)

    def _on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Override of the module's ``on_train_batch_start``."""
        loader, round = self._loader, self.round
        planned = None if loader is None else loader.current
        self._is_left_out = planned is not None and planned.is_over
        if self._is_left_out:
            return None
        with self._counting_in_visit(batch_idx) as local_idx:
            response = self._batch_start.original(batch, local_idx)
        if response != -1 or loader is None or round is None or planned is None:
            return response
        self._end_visit_early(round, loader, trained=planned.num_batches - loader.batches_left - 1)
        if planned is loader.visits[-1] and process_group_of(self.fit.trainer).size == 1:
            self._close_round(round, loader)
            return -1
        self._is_left_out = True
        return None  # the other clients' batches come yet

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Override of the module's ``training_step``."""
        round = self.round
        if self._is_left_out:
            self.fit.ignore_warning("`training_step` returned `None`")
            return None
        if round is None or not round.visits.group:  # beside the visits
            return self._step.original(*args, **kwargs)
        with self._counting_in_visit(0) as local_idx:
            if len(args) > 1:  # the batch, and its index where the step takes one
                args = (args[0], local_idx, *args[2:])
            return round.visits.train_step(self._step.original, args, kwargs)

    def _on_backward(self, *args: Any, **kwargs: Any) -> None:
        """Override of the module's ``backward``."""
        round = self.round
        if round is None or not round.visits.group:
            self._backward.original(*args, **kwargs)
        else:
            round.visits.backward(self._backward.original, args, kwargs)

    def _on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Override of the module's ``on_train_batch_end``: then the visit ends if this was its last batch.

        It is the last hook of a batch: what callbacks and the module do after a batch is part of the visit. Fused
        visits go on from here.
        """
        self._finish_batch(outputs, batch, batch_idx)
        batch_loop = self._batch_loop
        if batch_loop is None or batch_loop.is_over:
            return
        batch_loop.prepare()
        del outputs, batch
        while not (batch_loop.is_over or self._is_stream_over):
            batch_loop.end_batch()
            self._finish_batch(*batch_loop.train())

    @property
    def _is_stream_over(self) -> bool:
        """True if the round ends with this batch, of a stream of which Lightning does not know it."""
        loader = self._loader
        if loader is None or loader.current is None:
            return False
        return loader.current.is_stream and loader.is_over

    def _after_round(self, callback: L.Callback) -> OverriddenMethod:
        """Has a callback that saves checkpoints see a round's last batch when the round is over: with its model."""

        def wait(*args: Any) -> None:
            loader = self._loader
            is_open = loader is not None and loader is not self._finished_loader
            if loader is not None and is_open and (loader.is_over or self._is_cut(loader)):
                self._waiting.append(lambda: method.original(*args))
            else:
                method.original(*args)

        method = OverriddenMethod(callback, "on_train_batch_end", wait)
        return method

    def _finish_batch(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        planned = None if self._loader is None else self._loader.current
        is_skipped = batch is None or self._is_left_out or (planned is not None and planned.fault is not None)
        self._is_left_out = False
        if self._has_batch_end and not is_skipped:
            with self._counting_in_visit(batch_idx) as local_idx:
                self._batch_end.original(outputs, batch, local_idx)
        self._end_batch()

    def _end_batch(self) -> None:
        """Ends the visit if this was its last batch, and the round if it was the last visit."""
        loader = self._loader
        if self.round is not None and loader is not None:
            self.round.visits.end_batch(loader.batches_left)
            if self._is_cut(loader):
                self._cut(self.round, loader)
        if loader is None or loader.batches_left or loader is self._finished_loader:
            return
        round = self._open_round()
        if loader.group and not loader.group[0].is_over:
            round.visits.end_group(loader.group)
        if loader.is_over:
            self._close_round(round, loader)

    def _is_cut(self, loader: RoundLoader) -> bool:
        """True if the fit ends after this batch, inside the round.

        Of several processes none knows how far the others are, and visits that train at once are given up.
        """
        is_alone = process_group_of(self.fit.trainer).size == 1 and self._executor is None
        return is_alone and loader.current is not None and not loader.is_over and ends_after_batch(self.fit.trainer)

    def _cut(self, round: Round, loader: RoundLoader) -> None:
        """Ends the round with what its clients have trained so far."""
        planned = loader.current
        assert planned is not None
        if loader.batches_left and not planned.is_over:
            self._end_visit_early(round, loader, trained=planned.num_batches - loader.batches_left)
        elif not planned.is_over:
            round.visits.end_group(loader.group)
        has_aggregate = self._close_round(round, loader)
        _log.warning(
            "Round %d was cut short: the fit ends in visit %d of %d, %s.",
            round_number(self.fit.server.report.round),
            loader.visits.index(planned) + 1,
            len(loader.visits),
            "with what was trained so far" if has_aggregate else "and the global model stays as it was",
        )

    def _end_visit_early(self, round: Round, loader: RoundLoader, trained: int) -> None:
        """Ends a visit before its last batch: the client sends what it has trained."""
        planned = loader.current
        assert planned is not None
        planned.is_over = True
        if planned.fault is None and not trained:
            planned.fault = "`on_train_batch_start` returned -1 before it had trained"
        planned.num_batches = trained
        round.visits.end_group(loader.group)

    def _close_round(self, round: Round, loader: RoundLoader) -> bool:
        """Ends the round; returns whether there is an aggregate."""
        fit, server = self.fit, self.fit.server
        round.join()
        if self.remote is not None:
            self.remote.exchange(round)
        move_log_position(fit.trainer, -min(self._padded_steps(loader), log_position(fit.trainer)))
        has_aggregate = round.close()
        self._finished_loader = loader
        fit.progress.end_round(fit.trainer, is_cut=not loader.is_over)
        fit.count_rounds(server.report.round + 1)
        if has_aggregate and self._averages is not None:
            self._averages.end_round()
        round.end()  # what may raise comes when a checkpoint counts the round
        waiting, self._waiting = self._waiting, []
        if fit.has_server:
            self.failed_rounds.end_round(
                server.report,
                has_aggregate,
                server.min_clients,
                len(fit.population.clients),
                {**loader.errors, **server.errors},
                process_group_of(fit.trainer),
            )
        for save in waiting:
            save()
        return has_aggregate

    def _padded_steps(self, loader: RoundLoader) -> int:
        """Steps on the log's axis that Lightning counts for the padding behind the last visit."""
        window, real = self.fit.trainer.accumulate_grad_batches, sum(each.num_batches for each in loader.visits)
        return -(-(real + loader.padding) // window) + real // -window

    def cut_short(self) -> None:
        """Gives up the round that is open, if there is one, and says so."""
        round = self.round
        if round is not None:
            self.fit.synchronisation.join(round.start, round.cohort, is_cut=True)
            number = round_number(self.fit.server.report.round)
            _log.warning("Round %d was cut short: the global model stays as it was.", number)
            round.abandon()

    @contextmanager
    def _counting_in_visit(self, batch_idx: int) -> Iterator[int]:
        """The module meanwhile sees the batches counted as in a fit of its client alone.

        Gives the index of the batch in the client's local epoch; ``trainer.is_last_batch`` meanwhile says whether it is
        the local epoch's last, or the visit's. Of clients that train at once those of the first are counted. Between
        visits nothing changes, and ``batch_idx`` is given.
        """
        position = None if self._loader is None else self._loader.epoch_position
        if position is None:
            yield batch_idx
            return
        is_last = exchange_last_batch(self.fit.trainer, position.is_last)
        try:
            yield position.number
        finally:
            exchange_last_batch(self.fit.trainer, is_last)

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Override of ``on_save_checkpoint``: a checkpoint inside a round holds the last complete global model."""
        if self.round is not None:
            self.round.start.patch(checkpoint)
        self._save_checkpoint.original(checkpoint)


def _has_own(module: L.LightningModule, hook: str) -> bool:
    """True if a hook is not Lightning's empty one: also if something has wrapped that in the module."""
    return is_overridden(hook, module) or hook in vars(module)


def _without_none(owner: Any, name: str) -> OverriddenMethod:
    """Replaces a user's hook on batches, which need not know the ``None`` that stands for a batch of a failed visit."""
    method = OverriddenMethod(
        owner, name, lambda batch, *args: None if batch is None else method.original(batch, *args)
    )
    return method
