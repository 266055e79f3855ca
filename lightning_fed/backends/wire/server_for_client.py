"""Stand-ins for the server in a client's Trainer. The real server runs on another machine."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.backends.wire.held_file import HeldFile
from lightning_fed.backends.wire.hyperparameters import (
    digest_request,
    load_hyperparameters,
    load_numbers,
    name_optimizers,
    on_device,
    pack_numbers,
)
from lightning_fed.backends.wire.packets import NOT_HELD, QUESTION, REQUEST, VISIT, TrainRequest
from lightning_fed.batch_norm.measurement import client_statistics, load_own_model, measured_layers
from lightning_fed.client.client_store import FolderStore
from lightning_fed.compression import VERSION, Downlink
from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit, Population, seed_everything
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.errors import ClientFault, VisitTimeout, describe
from lightning_fed.features.isolated_pass import forward_step
from lightning_fed.federated_callback import AskableCallback, federated_callbacks, notify_model_loaded
from lightning_fed.fit.federated_fit import FederatedFit, RemoteSide
from lightning_fed.lightning.internals import keep_schedulers, loss_scaler
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, digest, message_bytes
from lightning_fed.model.entries import (
    copy_state,
    find_implausible,
    find_non_finite,
    freeze_batch_norm,
    live_entries,
    untrained_entries,
)
from lightning_fed.rounds.round import Round
from lightning_fed.rounds.visit_flow import Ask, ask_server
from lightning_fed.rule import RoundInfo
from lightning_fed.server.schedule import Cohort, Visit
from lightning_fed.server.server import RoundReport, ServerInterface

_log = logging.getLogger(__name__)


class HalvesMismatch(ValueError):
    """Raised if server program and client program differ. The server receives the error text, without private data."""


def find_public_reason(error: Exception) -> str:
    """Describes an exception for the server. Usually names only the class, because the text may be private."""
    if isinstance(error, HalvesMismatch):
        return str(error)
    return f"the client's program raised {type(error).__name__}; see the client's log"


class RemoteServer(ServerInterface):
    """Stands in for the server on a client's machine. Contains the received broadcast.

    ``asked`` is the hash of the client's request for parameter rows, or empty without a request. ``fault`` is the
    reason if the client cannot send an update.
    """

    def __init__(self, server: ServerInterface, broadcast: Broadcast, asked: str) -> None:
        super().__init__(server.chain, server.min_clients)
        self._broadcast, self._asked = broadcast, asked
        self.update: ClientUpdate | None = None
        self.fault: str | None = None

    def start_round(self, info: RoundInfo, state: State) -> None:
        self.report = RoundReport(info.round)
        for step in self.chain.steps:
            step.start(info, state)

    def arrive(self, device: torch.device) -> None:
        broadcast = self._broadcast
        broadcast.state, broadcast.extras = on_device(broadcast.state, device), on_device(broadcast.extras, device)

    def prepare(self, client: Client, request: Request | None = None) -> Broadcast:
        """Returns the broadcast received from the server.

        Raises ``ClientFault`` if the broadcast contains implausible values (such as NaN), or answers another request.
        """
        request = Request(client) if request is None else request
        if self._asked and digest_request(request) != self._asked:
            raise ClientFault(
                "the client requests other rows for training than before in this round: make the data order repeatable"
            )
        fault = find_implausible(self._broadcast.state | self._broadcast.extras)
        if fault is not None:
            raise ClientFault(f"the server's message is invalid: {fault}")
        self._broadcast.rows = dict(request.rows)
        return self._broadcast

    def count(self, update: ClientUpdate) -> bool:
        self.report.up_bytes += message_bytes(update)
        return True

    def accept(self, update: ClientUpdate) -> bool:
        fault = find_non_finite(update.state) or find_non_finite(update.extras)
        if fault is not None:
            return self.fail(update.client, fault)
        self.update = update
        self.report.received[update.client] = update.num_samples
        self.report.metrics[update.client] = update.metrics
        return True

    def fail(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        self.fault = reason
        if error is not None and not isinstance(error, ClientFault | VisitTimeout):
            # The text of an exception may contain names of files.
            self.fault = reason.replace(describe(error), type(error).__name__)
            if self.fault == reason:
                self.fault = f"the client failed with {type(error).__name__}"
        return super().fail(client, reason, error)

    def finish_round(self) -> State | None:
        return None


class RemoteServerSide(RemoteSide):
    """Stands in for the server in a client's Trainer, to handle one received message.

    ``judge_entries`` raises an error if the site's policy forbids sending a model tensor. ``held`` stores tensors from
    earlier messages, to replace omitted tensors. After training, ``left`` contains the step counts of per-step
    schedulers and the loss scaler's state, for the answer.
    """

    has_server = False

    def __init__(
        self,
        kind: str,
        train_request: TrainRequest,
        broadcast: Broadcast,
        population: Population,
        judge_entries: Callable[[Iterable[str]], None],
        held: HeldFile,
    ) -> None:
        self.population, self._held, self._judge_entries = population, held, judge_entries
        self._kind, self._train_request, self._broadcast = kind, train_request, broadcast
        self.server: RemoteServer
        self.request: Request | None = None
        self.answer: ClientUpdate | None = None
        self.left: dict[str, Any] | None = None

    def connect(self, server: ServerInterface) -> ServerInterface:
        self.server = RemoteServer(server, self._broadcast, self._train_request.asked)
        return self.server

    def cohort(self, drawn: Callable[[], Cohort]) -> Cohort:
        return Cohort((self._train_request.visit,))

    def visits_here(self, cohort: Cohort) -> Cohort:
        return cohort if self._kind == VISIT else Cohort(())

    def start(self, fit: FederatedFit) -> None:
        trainer, train_request = fit.trainer, self._train_request
        if self._kind == QUESTION:
            keep_schedulers(trainer, [])
        else:
            self._load_optimizers(trainer, train_request.hyperparameters)
        self.server.arrive(trainer.lightning_module.device)
        fit.store.restore(train_request.kept + 1, {"run": 0})
        assert isinstance(fit.store, FolderStore)
        if train_request.kept >= 0 and fit.store.newest(train_request.visit.client) != train_request.kept:
            raise ClientFault(f"the client has lost its state from round {round_number(train_request.kept)}")
        entries = live_entries(trainer.lightning_module)
        frozen = {name: entries[name] for name in entries if fit.policies[name] == "frozen"}
        if digest(frozen) != train_request.frozen:
            raise HalvesMismatch(
                "server and client have different frozen entries, which are never sent (frozen on the client: "
                f"{', '.join(frozen) or 'none'}): both programs need the same model, the same option `frozen` and "
                "equal initial weights"
            )
        if fit.is_batch_norm_fixed:
            freeze_batch_norm(fit.module)  # as in a round
        untrained = untrained_entries(fit.module)
        if train_request.held:
            # Other entries hold results of training: a server could guess a count of batches, digest by digest.
            self._fill_in(fit, {name: value for name, value in entries.items() if name in untrained})
        if self._kind == VISIT:
            self._judge_entries([name for name in self._broadcast.state if name not in untrained])
        if train_request.keeps:
            version = {VERSION: self._broadcast.extras[VERSION]} if VERSION in self._broadcast.extras else {}
            self._held.store(self._broadcast.state | version)

    @staticmethod
    def _load_optimizers(trainer: L.Trainer, sent: dict[str, Any]) -> None:
        if sent["optimizers"] != name_optimizers(trainer.optimizers):
            raise HalvesMismatch(
                f"the server's optimizers are {sent['optimizers']}, but the client's are "
                f"{name_optimizers(trainer.optimizers)}: both need the same model"
            )
        load_hyperparameters(trainer.optimizers, sent["groups"])
        configs: list[Any] = trainer.lr_scheduler_configs
        stepwise = [config for config in configs if _is_stepwise(trainer, config)]
        for config, numbers in zip(stepwise, sent["schedulers"], strict=True):
            load_numbers(config.scheduler, numbers)
        # The server steps per-epoch schedulers, because a client's fit has only one round.
        keep_schedulers(trainer, stepwise)
        scaler = loss_scaler(trainer)
        if sent["scaler"] and scaler is not None:
            load_numbers(scaler, sent["scaler"])

    def _fill_in(self, fit: FederatedFit, entries: State) -> None:
        broadcast, kept = self._broadcast, self._held.read()
        shared = [name for name, policy in fit.policies.items() if policy == "shared"]
        restored = [
            step.restore(kept, broadcast.extras) for step in fit.server.chain.steps if isinstance(step, Downlink)
        ]
        known = ChainMap(*restored, kept, entries)
        held = {name: known[name] for name in shared if name not in broadcast.state and name in known}
        if digest(held) != self._train_request.held:
            raise ClientFault(NOT_HELD)
        held = on_device(copy_state(held), fit.module.device)  # copies, because training changes the values
        whole = broadcast.state | held
        broadcast.state = {name: whole[name] for name in (*shared, *(whole.keys() - set(shared)))}
        broadcast.unsent = frozenset(held)

    def exchange(self, round: Round) -> None:
        fit, trainer, visit = round.fit, round.fit.trainer, self._train_request.visit
        optimizers = round.optimizers
        if self._kind == VISIT:
            if optimizers.finals:
                (end,) = optimizers.finals.values()
                steps = optimizers.steps_of(end)
                if steps is None:
                    raise MisconfigurationException(
                        "Expected `last_epoch` in the state of every per-step scheduler, to count the client's steps, "
                        f"but got {[sorted(state) for state in optimizers.start['schedulers']]}: use other schedulers."
                    )
                self.left = {"steps": steps, "scaler": pack_numbers(end["scaler"])}
            return
        loader = RoundLoader(fit.population, Cohort((visit,)), trainer.limit_train_batches)
        if loader.failed:
            self.server.fail(visit.client, loader.failed[visit.client], loader.errors.get(visit.client))
            return
        (planned,) = loader.visits
        if self._kind == REQUEST:
            self._request(round, planned)
            return
        if self._kind == QUESTION:
            self._answer(round, visit)
            return
        module = trainer.lightning_module
        step = forward_step(module)
        try:
            if step is None:
                raise ClientFault("to measure BatchNorm with manual optimization, the module needs `validation_step`")
            round.local.load_client(visit.client, ask_server(fit, Request(visit.client)).state)
            measured = client_statistics(trainer, module, fit.population, visit, measured_layers(fit), step)
            self.answer = ClientUpdate(visit.client, fit.population.num_samples(visit.client), {}, measured)
        except Exception as error:
            self.server.fail(visit.client, describe(error), error)

    def _request(self, round: Round, planned: PlannedVisit) -> None:
        round.driver.current = visit = round.driver.open_visit(planned)
        try:
            with closing(visit.run()) as flow:
                self.request = cast(Ask, next(flow)).request
        except ClientFault as error:
            self.server.fail(planned.visit.client, str(error), error)
        finally:
            round.driver.current = None

    def _answer(self, round: Round, visit: Visit) -> None:
        fit, trainer, module = round.fit, round.fit.trainer, round.fit.module
        question = self._train_request.question or {}
        name = question.get("callback")
        try:
            callback = next((one for one in federated_callbacks(trainer) if type(one).__name__ == name), None)
            if not isinstance(callback, AskableCallback):
                raise ClientFault(f"the client's program has no callback {str(name)[:100]!r}, which the server queries")
            state = ask_server(fit, Request(visit.client)).state
            fit.batch_norm.decision = "own" if question.get("decision") == "own" else ""
            if question.get("own"):
                measured = question.get("statistics_round")
                measured = measured if type(measured) is int and measured >= 0 else None
                load_own_model(fit, round.local, visit.client, state, measured)
            else:
                round.local.load_global(state)
            notify_model_loaded(trainer, module, visit.client if question.get("own") else None)
            seed_everything(visit.seed)
            self.answer = callback.on_client_question(trainer, module, visit.client, question)
        except ClientFault as fault:
            self.server.fault = str(fault)
        except Exception as error:
            _log.exception("Client %r cannot answer the query.", visit.client)
            self.server.fault = find_public_reason(error)


def _is_stepwise(trainer: L.Trainer, config: Any) -> bool:
    return config.interval == "step" or not trainer.lightning_module.automatic_optimization
