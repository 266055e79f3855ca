"""Runs the rounds of a fit inside Lightning's fit loop: each round is one epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import lightning.pytorch.callbacks as lightning_callbacks
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint

from lightning_fed.console import round_number
from lightning_fed.data.federated import FederatedDataModule, datamodule_of_handed, is_one_client
from lightning_fed.data.partition import Partition
from lightning_fed.data.population import (
    Population,
    generator_states,
    in_one_thread,
    restore_generators,
    seeded_generators,
)
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.federated_callback import VISIT_HOOKS, FederatedCallback, federated_callbacks
from lightning_fed.fit.checks import (
    check_processes,
    check_round,
    check_trainer,
    find_loader_owner,
    validate_after_rounds,
)
from lightning_fed.fit.entry_policies import check_sliced, freeze_parameters
from lightning_fed.fit.failed_rounds import FailedRounds
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lazy_names import find_feature, load_feature
from lightning_fed.lightning.internals import (
    TRANSFER_HOOKS,
    OverriddenMethod,
    advise_workers,
    await_validation,
    batches_in_epoch,
    complete_epoch,
    datamodule_of,
    distribute_loader,
    end_with_batch,
    ends_after_batch,
    exchange_reload_interval,
    exchange_validation_time,
    find_callbacks,
    fit_progress,
    forget_length,
    handed_data,
    is_overridden,
    loader_to_overfit,
    log_position,
    move_log_position,
    replace_handed_data,
    restart_epoch,
    validates_after_batch,
)
from lightning_fed.messages import Client
from lightning_fed.model.entries import check_entries, freeze_batch_norm, thaw_batch_norm
from lightning_fed.process_group import process_group_of, sharing_strategy
from lightning_fed.rounds.client_models import measure_own_statistics
from lightning_fed.rounds.round import Round
from lightning_fed.rounds.visit_driver import VisitDriver
from lightning_fed.rule import AveragingAggregator
from lightning_fed.server.schedule import Cohort

_log = logging.getLogger(__name__)

_WEIGHT_AVERAGING: Any = getattr(lightning_callbacks, "WeightAveraging", ())  # from Lightning 2.6 on


class VisitPlan(NamedTuple):
    """Python classes that train the clients and load the batches. ``clients``: number of clients trained at once."""

    driver: Callable[..., VisitDriver] = VisitDriver
    loader: Callable[..., RoundLoader] = RoundLoader
    clients: int = 1


class RoundLoop:
    """Runs the rounds of a fit inside Lightning's fit loop.

    Attributes:
        open_round: The current round; ``None`` between rounds.
        plan: Python classes that train the clients and load the batches.
        is_attached: True during a fit, while methods of the module and the Trainer are overridden.
        is_planned: True after ``plan`` is set, with the first round's dataloader.
        is_ready: True after :meth:`prepare`.
        failed_rounds: Counts rounds without a new model.
    """

    def __init__(self, fit: FederatedFit) -> None:
        self.fit = fit
        self.is_attached = self.is_planned = self.is_ready = self._is_started = False
        self.plan = VisitPlan()
        self.open_round: Round | None = None
        self._batch_loop: Any = None  # for fused visits
        self._waiting: list[Callable[[], object]] = []  # delayed callbacks
        self._partition: Partition | None = None
        self._reload_interval = 0  # the user's
        self._correct: Callable[[dict[str, Any]], None] | None = None  # for Lightning's progress in checkpoints
        self._is_cut = False  # the fit ended inside the last round
        self._last_look = 0  # last round with a request for the clients' data
        self._validation_time: float | None = None  # of the last validation, by Lightning's clock
        self._validation: dict[float, int] = {}  # rounds between validations by `val_check_interval`
        self._generators: Any = None  # states in the last unfinished round of a plain fit
        self.failed_rounds = FailedRounds()

    def state_dict(self) -> dict[str, Any]:
        if self.open_round is not None:
            self._save_generators()
        return {
            **self.fit.state_dict(),
            "generators": self._generators,
            "validation": self._validation,
            "failed_rounds": [self.failed_rounds.in_a_row, self.failed_rounds.has_trained],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise MisconfigurationException(
                f"Expected a checkpoint from this version, but {missing} are missing: use the version that saved it."
            )
        self.fit.load_state_dict(state)
        self._generators, self._validation = state["generators"], state["validation"]
        self.failed_rounds = FailedRounds(*state["failed_rounds"])

    def continue_from(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state)
        self.fit.number += 1
        # An interrupted validation leaves fewer batches.
        self.fit.rounds = min(self.fit.rounds, self.fit.trainer.current_epoch)

    def _save_generators(self) -> None:
        if self.fit.is_plain:
            self._generators = generator_states()

    # The fit

    def attach(self, module: L.LightningModule, partition: Partition | None) -> None:
        """Replaces methods of module and Trainer until :meth:`detach`.

        ``partition`` splits the data into clients. Invalid Trainer settings or data raise an error.
        """
        fit, trainer, self._partition = self.fit, self.fit.trainer, partition
        revert = fit.changes.callback
        strategy = sharing_strategy(trainer)
        if strategy is not None:
            fit.synchronisation = strategy.synchronise(fit)
            revert(fit.synchronisation.release)
        train, val = handed_data(trainer)
        if train is not None:
            handed = datamodule_of_handed(train, val, partition, lambda: self.find_population().clients)
            revert(replace_handed_data(trainer, handed))
        has_clients = isinstance(datamodule_of(trainer), FederatedDataModule)
        if fit.remote is None and has_clients == (partition is not None):
            raise MisconfigurationException(
                "Expected either a `partition` that splits the training data into clients, or a FederatedDataModule "
                f"that contains clients, but got {'both' if partition is not None else 'neither'}."
            )
        loader_owner = find_loader_owner(trainer, module)
        if not is_one_client(partition):  # a failed visit is padded with `None` batches, and the log gives the reason
            fit.ignore_warning("train_dataloader yielded None")
        fit.ignore_warning("You're resuming from a checkpoint that ended before")  # every loader continues
        # Lightning 2.6 with torch 2.13 causes this warning by its own code, again after each change of the filters.
        fit.ignore_warning(
            r"`isinstance\(treespec, LeafSpec\)` is deprecated", r"(lightning\.pytorch|pytorch_lightning)\."
        )
        self._reload_interval = exchange_reload_interval(trainer, 1)
        revert(exchange_reload_interval, trainer, self._reload_interval)
        if trainer.overfit_batches:  # type: ignore[attr-defined]
            revert(setattr, trainer, "limit_train_batches", trainer.overfit_batches)  # type: ignore[attr-defined]
            trainer.limit_train_batches = 1.0  # every client's batches are limited, not the round's
        self._train_dataloader = OverriddenMethod(loader_owner, "train_dataloader", self._plan_round)
        self._save_checkpoint = OverriddenMethod(module, "on_save_checkpoint", self._on_save_checkpoint)
        savers = find_callbacks(trainer, Checkpoint)
        methods = [self._train_dataloader, self._save_checkpoint, *map(self._delay, savers)]
        for owner in (datamodule_of(trainer), module):
            for hook in TRANSFER_HOOKS:
                if owner is not None and is_overridden(hook, owner):
                    methods.append(_without_none(owner, hook))
        for method in methods:
            revert(method.restore)
        self.is_attached = True

    def prepare(self) -> None:
        """Decides whether the fit is federated or plain, and checks the Trainer.

        A plain fit has one client, and trains as without a federation. A plain fit cannot resume as a federated fit or
        vice versa.
        """
        fit, options, chain = self.fit, self.fit.options, self.fit.server.chain
        has_one = is_one_client(self._partition)
        if self._partition is None and fit.remote is None:
            has_one = len(self.find_population().clients) == 1
        then, fit.is_plain = (
            fit.is_plain,
            has_one
            and fit.remote is None
            and options.optimizer_state == "keep"
            and not (chain.steps or options.has_personal_entries or options.frozen)
            and type(chain.rule).aggregate is AveragingAggregator.aggregate
            and sharing_strategy(fit.trainer) is None
            and not any(
                is_overridden(hook, callback, FederatedCallback)
                for callback in federated_callbacks(fit.trainer)
                for hook in VISIT_HOOKS
            ),
        )
        measures = fit.batch_norm.treatment == "recalibrate" or fit.batch_norm.has_own  # in the share of each process
        check_processes(fit.trainer, not fit.has_server or (fit.is_plain and not measures))
        check_trainer(fit.trainer, fit.is_plain, options.optimizer_state == "keep")
        # Only checkpoints of a plain fit contain optimizer states in Lightning's form.
        if fit.trainer.ckpt_path is not None and then not in (None, fit.is_plain):
            raise MisconfigurationException(
                f"In the checkpoint's fit, optimizers {'continue' if then else 'restart'} at the start of a client's "
                f"training, but in this fit they {'restart' if then else 'continue'}: resume with the same clients and "
                "options, and with the same callbacks that have hooks in a client's training (`on_client_start`)."
            )
        self.is_ready = True

    def start_fit(self) -> None:
        """Prepares the module, once per fit."""
        fit = self.fit
        if self._is_started:
            return
        self._is_started = True
        self._check_entries()
        fit.decide_policies(fit.trainer, fit.module)
        check_sliced(fit.module, fit.policies, fit.server.rule, fit.options, fit.batch_norm.is_reported)
        if fit.batch_norm.treatment != fit.options.batch_norm and fit.trainer.is_global_zero and fit.has_server:
            has_slices = "sliced" in fit.policies.values()
            reason = (
                "a report needs the whole model on each client"
                if has_slices
                else "the server must not receive statistics of single clients"
            )
            _log.info("BatchNorm: each client has separate statistics, because %s.", reason)
        averaging = find_callbacks(fit.trainer, _WEIGHT_AVERAGING)
        if averaging and not fit.is_plain:
            feature = load_feature("lightning_fed.callbacks.weight_averages")
            fit.averages = feature.WeightAverages(fit, averaging)
            fit.changes.callback(fit.averages.restore)
        if not fit.is_plain or fit.options.visits_at_once:  # Lightning asks for validation data first
            self.find_population()
        if fit.options.visits_one_by_one != "lightning" and (fused := find_feature("lightning_fed.backends.fused")):
            self._batch_loop = fused.build_batch_loop(fit)
        fit.batch_norm.store_initial(fit.module, fit.policies)
        self._freeze_parameters()
        self._plan_visits()

    def _check_entries(self) -> None:
        is_plain = self.fit.remote is None and is_one_client(self._partition)  # as in a fit without a federation
        check_entries(self.fit.module, () if is_plain else self.fit.trainer.optimizers)

    def _plan_visits(self) -> None:
        fit = self.fit
        self.plan = VisitPlan() if fit.synchronisation is None else VisitPlan(fit.synchronisation.driver)
        visits = fit.options.visits_at_once
        if visits is None:
            return
        if fit.is_batch_norm_fixed:
            freeze_batch_norm(fit.module)  # as in a round
        self.plan = visits.plan(fit) or self.plan
        if fit.is_batch_norm_fixed:
            thaw_batch_norm(fit.module)

    def _find_new_entries(self) -> bool:
        fit = self.fit
        self._check_entries()
        has_new = fit.decide_policies(fit.trainer, fit.module)
        if has_new:
            self._freeze_parameters()
        return has_new

    def _freeze_parameters(self) -> None:
        for parameter in freeze_parameters(self.fit.module, self.fit.policies):
            self.fit.changes.callback(parameter.requires_grad_, True)

    def start_training(self) -> None:
        fit = self.fit
        if not isinstance(fit.trainer.train_dataloader, RoundLoader):
            raise MisconfigurationException(
                "The Trainer does not train on the clients' loaders: pass a datamodule to `fit`, such as "
                "`lightning_fed.data.LoaderDataModule(train, val)`."
            )
        if fit.remote is None or not fit.has_server:  # a server of remote clients trains nothing here
            fit.changes.enter_context(in_one_thread())
        fit.changes.enter_context(seeded_generators())

    def end_training(self, module: L.LightningModule) -> None:
        self._abandon_round()
        if self.is_attached and self.fit.is_batch_norm_fixed:  # not without `setup`
            thaw_batch_norm(module)

    def detach(self) -> None:
        if self.open_round is not None:
            self.open_round.driver.detach()
        self.fit.close()
        self.fit.averages, self.is_attached = None, False

    def find_population(self) -> Population:
        if not self.fit.is_population_known and self.is_attached:
            self._look_at_data()
        return self.fit.population

    def _look_at_data(self) -> None:
        fit = self.fit
        if fit.remote is not None:
            fit.set_population(fit.remote.population)
        elif self._partition is None:
            fit.set_population(datamodule_of(fit.trainer).population())
        else:
            loader = self._train_dataloader.original()
            if not fit.is_population_known:
                # Lightning's check includes the interval.
                interval = exchange_reload_interval(fit.trainer, self._reload_interval)
                advise_workers(fit.trainer, loader)
                exchange_reload_interval(fit.trainer, interval)
            if fit.trainer.overfit_batches:  # type: ignore[attr-defined]
                loader = loader_to_overfit(loader)
            if fit.has_ranks:
                loader = distribute_loader(fit.trainer, loader)
            split = load_feature("lightning_fed.partitions.loader_split").split_training_data
            fit.set_population(split(loader, self._partition, fit.schedule.seed))

    def start_epoch(self) -> None:
        trainer = self.fit.trainer
        exchange_reload_interval(trainer, self._reload_interval)
        exchange_validation_time(trainer, self._validation_time)
        loader = trainer.train_dataloader
        if isinstance(loader, RoundLoader) and loader.is_endless:
            forget_length(trainer)

    def _delay(self, callback: L.Callback) -> OverriddenMethod:
        """Delays a checkpoint callback until the aggregation, to save the aggregated model."""

        def wait(*args: Any) -> None:
            round = self.open_round
            if round is not None and (round.loader.is_over or round.driver.find_cut()):
                self._waiting.append(lambda: method.original(*args))
            else:
                method.original(*args)

        method = OverriddenMethod(callback, "on_train_batch_end", wait)
        return method

    # A round

    def _plan_round(self) -> RoundLoader:
        """Returns the dataloader for the next round, in place of the user's ``train_dataloader``."""
        if self.is_ready:
            self.start_fit()
            if self._find_new_entries():
                self._plan_visits()
        fit, trainer, remote = self.fit, self.fit.trainer, self.fit.remote
        round, interval = trainer.current_epoch, self._reload_interval
        if not self.is_planned:
            self._last_look = round
        if interval and round - self._last_look >= interval:
            self._look_at_data()
            self._last_look = round
        self.find_population()
        self._validation_time = exchange_validation_time(trainer, None) if self.is_planned else None
        self.is_planned = True
        draw = partial(fit.server.rule.draw_cohort, round, fit.schedule, fit.population)
        cohort = draw() if remote is None else remote.cohort(draw)
        served = fit.schedule.served(cohort)
        loader = self.plan.loader(
            fit.population,
            served if remote is None else remote.visits_here(served),
            trainer.limit_train_batches,
            process_group_of(trainer),
            fit.synchronisation and fit.synchronisation.visit_costs,
            fit.clock,
        )
        if remote is None:
            check_round(trainer, loader.visits, len(fit.population.clients))
            if len(fit.population.clients) > 1:
                validate_after_rounds(trainer, loader.visits, self._validation, fit.changes.callback)
        if loader.is_endless:
            loader.on_end = partial(end_with_batch, trainer)
        loader.on_start = partial(self._start_round, loader, cohort)
        return loader

    def _start_round(self, loader: RoundLoader, cohort: Cohort) -> None:
        """Starts the round when the training loop requests the first batch."""
        fit, trainer = self.fit, self.fit.trainer
        if trainer.train_dataloader is not loader:
            return
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.num_training_batches < interval and fit.record_warning("log_every_n_steps"):
            fit.ignore_warning("The number of training batches")  # Lightning repeats the advice for other lengths
        num_trained = batches_in_epoch(trainer)  # more than 0 after a resume
        if fit.is_plain:
            loader.num_skipped, loader.on_skipped = num_trained, partial(restore_generators, self._generators)
            self.start_epoch()  # Lightning omits the hook in a resumed epoch
        elif num_trained or fit.rounds > trainer.current_epoch:
            raise MisconfigurationException(
                f"The checkpoint was saved inside round {round_number(trainer.current_epoch)}, and this fit cannot "
                "continue the round: resume with the clients, options and validation settings of the fit that saved "
                "the checkpoint."
            )
        fit.cohort = cohort
        if self._find_new_entries() and self.plan.loader is not RoundLoader:
            raise MisconfigurationException(
                "Expected no new parameters or buffers after the creation of a round's dataloader, because several "
                "clients train at once, but a hook has added some: add the tensors earlier (in `setup`), or use "
                "visits='auto'."
            )
        if fit.remote is not None:
            fit.remote.start(fit)
        self._correct = partial(
            restart_epoch,
            global_step=trainer.global_step,
            progress=fit_progress(trainer),
            window=trainer.accumulate_grad_batches,
        )
        round = self.open_round = Round(fit, loader, cohort, self.plan.driver)
        round.driver.attach(partial(self._close_round, round), self._batch_loop)
        round.open()

    def _close_round(self, round: Round) -> bool:
        fit, trainer, server, loader = self.fit, self.fit.trainer, self.fit.server, round.loader
        round.join()
        if fit.remote is not None:
            fit.remote.exchange(round)
            fit.cohort = round.cohort
        window, real = trainer.accumulate_grad_batches, sum(planned.num_batches for planned in loader.visits)
        padded = -(-(real + loader.padding) // window) + real // -window  # Lightning's steps after the last visit
        move_log_position(trainer, -min(padded, log_position(trainer)))
        has_aggregate = round.close()
        self.open_round = None
        self._is_cut, self._correct = not loader.is_over, self._complete_round
        fit.rounds = server.report.round + 1
        if has_aggregate:
            self.measure_statistics(server.report.received)
        round.end()  # after counting, because hooks may raise and checkpoints need the count
        if has_aggregate:
            self.failed_rounds = FailedRounds(has_trained=True)
        elif fit.has_server:
            self.failed_rounds.count(
                server.report,
                fit.options.faults.max_failed_rounds,
                server.min_clients,
                len(fit.population.clients),
                {**loader.errors, **server.errors},
                process_group_of(trainer),
            )
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
        return has_aggregate

    def measure_statistics(self, clients: Collection[Client]) -> None:
        if self.fit.batch_norm.measure_round is not None:
            with self.fit.averages_in_place():
                measure_own_statistics(self.fit, clients)

    def end_epoch(self) -> None:
        self.cut_short()
        exchange_reload_interval(self.fit.trainer, 1)
        self._correct, self._is_cut = complete_epoch, False
        self.fit.rounds = self.fit.trainer.current_epoch + 1  # also after a failed round

    def start_validation(self) -> None:
        if self.open_round is None:
            self._correct = partial(complete_epoch, is_counted=False) if self._is_cut else None
        # After a stop request, a Trainer validates directly.
        if ends_after_batch(self.fit.trainer):
            self.cut_short()

    def correct_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Changes the batch counts in a checkpoint, so that a resumed fit never starts inside a round.

        A checkpoint saved within a round resumes at the round's first batch. A plain fit (one client) keeps the counts.
        """
        if self._correct is not None and not self.fit.is_plain:
            self._correct(checkpoint)

    def _complete_round(self, checkpoint: dict[str, Any]) -> None:
        # Decides after the hooks at the round's end, because a hook may stop the fit.
        if not self._is_cut and validates_after_batch(self.fit.trainer):
            await_validation(checkpoint)
        else:
            complete_epoch(checkpoint, is_counted=False)

    def cut_short(self) -> None:
        """Discards an unfinished round at the end of the fit. A plain fit (one client) keeps the round."""
        round = self.open_round
        if round is not None and self.fit.is_plain and round.loader.current is not None:
            round.driver.cut(round.loader.current)
        elif round is not None:
            round.join_processes(is_cut=True)
            number = round_number(self.fit.server.report.round)
            _log.warning("Round %d was cut short, so the global model does not change.", number)
            self._abandon_round()

    def _abandon_round(self) -> None:
        round = self.open_round
        if round is not None:
            round.abandon()
            self._save_generators()
            self.open_round = None
            round.end()

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # A checkpoint inside a round holds the last complete global model.
        if self.open_round is not None and not self.fit.is_plain:
            self.open_round.patch(checkpoint)
        if self.fit.averages is not None:
            self.fit.averages.patch(checkpoint)
        self._save_checkpoint.original(checkpoint)


def _without_none(owner: Any, name: str) -> OverriddenMethod:
    # A failed visit is completed with `None` batches, which do not reach the user's hook.
    method = OverriddenMethod(
        owner, name, lambda batch, *args: None if batch is None else method.original(batch, *args)
    )
    return method
