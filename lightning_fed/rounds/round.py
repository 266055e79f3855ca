"""One round of a fit.

1. :meth:`Round.open`: the server starts the round from the global model.
2. The clients train (:mod:`lightning_fed.rounds.visit_flow`).
3. :meth:`Round.join`: merges the results of all processes.
4. :meth:`Round.close`: aggregates, loads the new global model and logs.
5. :meth:`Round.end`: calls the callbacks.

:meth:`Round.abandon` ends an unfinished round, and restores the model from the round's start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.client.local_optimizers import LocalOptimizers
from lightning_fed.console import round_number
from lightning_fed.data.population import seed_everything, seeded_generators
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.fit.entry_policies import warn_of_dropped, warn_of_filled
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lazy_names import find_feature
from lightning_fed.lightning.internals import is_overridden, loss_scaler, loss_scaler_key, show_status, tensor_version
from lightning_fed.messages import Client, State
from lightning_fed.model.entries import (
    find_fault,
    find_implausible,
    find_measurement,
    freeze_batch_norm,
    tied_names,
    trainable_entries,
    untrained_entries,
)
from lightning_fed.numerics.trees import copy_tree
from lightning_fed.process_group import process_group_of
from lightning_fed.rounds.visit_driver import VisitDriver
from lightning_fed.rounds.visit_flow import ClientVisit, server_callbacks
from lightning_fed.rule import RoundInfo
from lightning_fed.server.schedule import Cohort

_log = logging.getLogger(__name__)


class Round:
    """One round, from the start on the server until the aggregation.

    Attributes:
        fit: The fit; ``fit.module`` contains the global model at the start of the round.
        loader: Dataloader with the training batches of all clients in the round.
        cohort: The round's clients.
        local: Loads clients' models into the module, one after another.
        state: The global model's shared tensors at the round's start.
        optimizers: Optimizers and schedulers, reset before each client's training.
        driver: Trains the clients in Lightning's loop.
    """

    # 1. Open

    def __init__(
        self, fit: FederatedFit, loader: RoundLoader, cohort: Cohort, driver: Callable[..., VisitDriver]
    ) -> None:
        self.fit, self.cohort, self.loader = fit, cohort, loader
        self._is_new = False
        self._trainer, self._module, self._server = fit.trainer, fit.module, fit.server
        if fit.is_batch_norm_fixed:
            freeze_batch_norm(fit.module)
        round = fit.trainer.current_epoch
        seed_everything(fit.schedule.start_seed(round))
        self._server_callbacks = server_callbacks(fit)
        self.local = fit.local_model(fit.module)
        self.optimizers = self._collect_optimizers()
        self.state = self.local.global_state(self._server.held.values)
        is_reset = fit.options.optimizer_state == "reset"
        checks = find_feature("lightning_fed.checks.carried_attributes")
        self._check = checks and checks.CarriedAttributes(fit.module, fit.trainer, not fit.has_one_client, is_reset)
        self._measured: dict[str, float] = {}
        untrained = untrained_entries(fit.module) - self.local.sliced.keys()
        self._untrained = [name for name in self.state if name in untrained]
        self._writes = self._count_writes()
        open_visit = partial(ClientVisit, fit, self.local, self.optimizers, self._untrained)
        self.driver = driver(fit, loader, open_visit)
        unchanged = {name: self.state[name] for name in self._untrained}
        self._server.held.start_round(round, unchanged)
        info = RoundInfo(
            round,
            fit.population.clients,
            trainable_entries(fit.module),
            frozenset(self._untrained) & frozenset(self.local.parameters),
            frozenset(self.local.sliced),
            fit.schedule.seed,
        )
        self._server.start_round(info, self.state)

    def open(self) -> None:
        if self.fit.synchronisation is not None:
            self.fit.synchronisation.start_round()
        if process_group_of(self._trainer).rank == 0:
            for client, reason in self.loader.failed.items():
                self._server.fail(client, reason, self.loader.errors.get(client))
        measurement = find_measurement(self._module)
        self.fit.batch_norm.norm_layers = [] if measurement is None else list(measurement.measured_layers(self.fit))
        if measurement is not None:
            measurement.warn_of_batch_norm(self.fit, self.local, self.loader.visits)
        for callback in self._server_callbacks:
            callback.on_server_round_start(self._trainer, self._module)
        if self._check is not None:
            self._check.start_round()
            self.loader.on_visit = self._check.start_visit

    def _collect_optimizers(self) -> LocalOptimizers:
        trainer, configs = self._trainer, self._trainer.lr_scheduler_configs
        # With manual optimization, the user steps the schedulers.
        is_manual = not self._module.automatic_optimization
        self._per_step = [index for index, config in enumerate(configs) if is_manual or config.interval == "step"]
        per_epoch = [index for index in range(len(configs)) if index not in self._per_step]
        self._epoch_schedulers = {index: copy_tree(configs[index].scheduler.state_dict()) for index in per_epoch}
        return LocalOptimizers(
            trainer.optimizers,
            [configs[index].scheduler for index in self._per_step],
            loss_scaler(trainer),
            "continue" if self.fit.is_plain else self.fit.options.optimizer_state,
            [configs[index].scheduler for index in per_epoch if not configs[index].reduce_on_plateau],
        )

    def _count_writes(self) -> dict[str, int]:
        # PyTorch's write counters for the tensors that messages share.
        return {name: tensor_version(self.state[name]) for name in self._untrained}

    def _check_writes(self) -> None:
        written = [name for name, count in self._count_writes().items() if count != self._writes[name]]
        if written:
            raise MisconfigurationException(
                f"Expected frozen parameters and buffers to stay unchanged, but {type(self._server.rule).__name__} "
                f"or a callback has written into {written[0]!r} ({len(written)} tensors in total). All updates of "
                "a round share these tensors (`update.unsent`), so in-place operations change every update: assign a "
                "new tensor instead, as in `update.state[name] = tensor`."
            )

    # 2. Close

    def join(self) -> None:
        if self.local.dropped and self.fit.record_warning("dropped"):
            warn_of_dropped(self.local.dropped)
        frozen = [name for name in self.fit.unset or () if self.fit.policies[name] == "frozen"]
        filled = self.local.changed_server_entries(frozen) if frozen else []  # by the last visit
        if filled and self.fit.record_warning("filled"):
            warn_of_filled(filled)
        if self._check is not None:
            self._check.end_round(self._server.report.round)
        self.join_processes()

    def join_processes(self, is_cut: bool = False) -> None:
        if self.fit.synchronisation is not None:
            self.fit.synchronisation.join(self.state, self.optimizers, self.cohort, is_cut)

    def close(self) -> bool:
        """Aggregates the updates, loads the new global model and logs. Returns whether the aggregation succeeded."""
        report = self._server.report
        self.driver.detach()
        show_status(self._trainer, "averaging")
        seed_everything(self.fit.schedule.end_seed(report.round))
        state = self.aggregate()
        received = () if state is None else report.received
        is_new = state is not None and state is not self.state
        served = self.fit.schedule.served(self.cohort).visits  # without stragglers whose work is dropped
        counting = [position for position, visit in enumerate(served) if visit.client in received]
        self.load_global(self.state if state is None else state, counting)
        if self.fit.synchronisation is not None:
            self.fit.synchronisation.check_state(self.local)
        if is_new:
            fault = self.measure_batch_norm()
            if fault is not None:
                _log.error("Round %d is reverted: %s.", round_number(report.round), fault)
                self._server.abandon_round()
                self.load_global(self.state)
                state, received, is_new = None, (), False
        if is_new:
            self.fit.batch_norm.model_round = report.round
        self._commit(received)
        self._server.held.record_clients(report.round, report.received)
        self.log(has_aggregate=state is not None)
        if self.fit.synchronisation is not None:
            self.fit.synchronisation.end_round()
        self._is_new = is_new
        return state is not None

    def aggregate(self) -> State | None:
        """Aggregates the updates, and lets callbacks change the result. Returns ``None`` if the aggregation fails."""
        state = self._server.finish_round()
        self._check_writes()
        if state is None:
            return None
        start = self.state
        # Copies, because callbacks may write into the state, and a rule may return tensors of a client's update.
        new = {name: value.clone() if value is start.get(name) else value for name, value in state.items()}
        form = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
        for callback in self._server_callbacks:
            callback.on_server_aggregate(self._trainer, self._module, new)
        if any(
            is_overridden("on_server_aggregate", callback, FederatedCallback) for callback in self._server_callbacks
        ):
            fault = find_fault(new, form) or find_implausible(new)
            if fault is not None:
                _log.error("The aggregate is discarded after `on_server_aggregate`: %s.", fault)
                self._server.abandon_round()
                return None
        return state if state is start else new  # the initial state if the rule has no new model yet

    def load_global(self, state: State, counting: Collection[int] = ()) -> None:
        self.local.load_global(state)
        self.optimizers.end_round(counting)

    def _commit(self, counting: Collection[Client]) -> None:
        if self.fit.has_server:
            self.fit.store.commit(self._server.report.round, counting)

    def measure_batch_norm(self) -> str | None:
        measurement = find_measurement(self._module)
        if measurement is None:
            return None
        fault: str | None
        with seeded_generators():  # processes measure different clients
            self._measured, fault = measurement.measure_round(self.fit, self.local)
        return fault

    def log(self, has_aggregate: bool) -> None:
        if not self.fit.has_server:
            return
        chain, report = self._server.chain, self._server.report
        metrics = {**chain.metrics(report.norms), **self._measured} if has_aggregate else {}
        self.fit.round_log.end_round(
            self._trainer,
            report,
            self.cohort,
            self.state,
            self.local.entries,
            self.local.parameters,
            metrics,
            chain.reveals == "model",
        )

    def end(self) -> None:
        for callback in self._server_callbacks:
            callback.on_server_round_end(self._trainer, self._module, self._is_new)

    # At any time

    def abandon(self) -> None:
        """Ends the round without aggregation, and restores the global model from the round's start.

        If ``fit.is_plain`` (a single client, trained as without a federation), the weights trained so far are kept.
        """
        if self._check is not None:
            self._check.stop()
        self.driver.close()
        if not self.fit.is_plain:
            self.local.load_global(self.state)
        self.optimizers.start_visit()
        self._server.abandon_round()
        self._commit(())

    def patch(self, checkpoint: dict[str, Any]) -> None:
        """Replaces the model in a checkpoint by the global model from the round's start."""
        state = {**self.state, **self.local.server_entries}
        # `WeightAveraging` saves the average as the model, and the model under another name.
        model = checkpoint.get("current_model_state", checkpoint["state_dict"])
        firsts = tied_names({name: value for name, value in model.items() if isinstance(value, torch.Tensor)})
        model |= {name: state[first].clone() for name, first in firsts.items() if first in state}
        if "optimizer_states" not in checkpoint:
            return
        checkpoint["optimizer_states"], schedulers, scaler = self.optimizers.checkpoint()
        if scaler:
            checkpoint[loss_scaler_key(self._trainer)] = scaler
        for index, scheduler in zip(self._per_step, schedulers, strict=True):
            checkpoint["lr_schedulers"][index] = scheduler
        for index, scheduler in self._epoch_schedulers.items():  # Lightning steps before callbacks get the last batch
            checkpoint["lr_schedulers"][index] = copy_tree(scheduler)
