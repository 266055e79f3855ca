"""Loads clients' models into the module between rounds, for evaluation and for questions from the server."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch

from lightning_fed.client.local_model import OWN_MODEL, LocalModel, memory_of
from lightning_fed.console import list_first, round_number
from lightning_fed.data.population import seed_everything, seeded_generators
from lightning_fed.errors import ClientFault, VisitTimeout
from lightning_fed.federated_callback import AskableCallback, notify_model_loaded
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State, message_bytes, without_prefix
from lightning_fed.model.entries import find_measurement
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.numerics.trees import copy_tree
from lightning_fed.process_group import process_group_of
from lightning_fed.server.schedule import Visit

_log = logging.getLogger(__name__)


@dataclass
class Answers:
    """Clients' answers to a question from the server."""

    updates: dict[Client, ClientUpdate] = field(default_factory=dict)
    failed: dict[Client, str] = field(default_factory=dict)
    down_bytes: int = 0
    up_bytes: int = 0

    @classmethod
    def joined(cls, parts: Sequence[Answers], clients: Iterable[Client]) -> Answers:
        updates = {client: update for part in parts for client, update in part.updates.items()}
        failed = {client: reason for part in parts for client, reason in part.failed.items()}
        return cls(
            {client: updates[client] for client in clients if client in updates},
            failed,
            sum(part.down_bytes for part in parts),
            sum(part.up_bytes for part in parts),
        )


@contextmanager
def own_models(fit: FederatedFit, module: L.LightningModule) -> Iterator[Callable[[Client], None]]:
    """Yields a function that loads a client's model into the module. Finally restores the global model."""
    local = fit.local_model(module)
    state = local.global_state()

    def load(client: Client) -> None:
        _load(fit, local, client, state)
        notify_model_loaded(fit.trainer, module, client)

    try:
        yield load
    finally:
        local.load_global(state)
        notify_model_loaded(fit.trainer, module, None)


def client_state(
    fit: FederatedFit, module: L.LightningModule | None, client: Client, is_in_round: bool
) -> dict[str, Any]:
    """Implements :meth:`Federation.client_state`. Needs the global model in ``module``, so fails if ``is_in_round``."""
    # Validation without a fit does not load the clients.
    if module is not None and not fit.is_population_known and fit.policies:
        is_known = not fit.local_model(module).personal or fit.store.get(client) is not None
    else:
        is_known = client in fit.population.clients
    if not is_known:
        raise ValueError(f"Expected one of the federation's clients, but got {client!r}.")
    if is_in_round:
        raise RuntimeError("A client's own model is available only between rounds and after the fit.")
    assert module is not None
    local = fit.local_model(module)
    state = local.global_state()
    try:
        _load(fit, local, client, state)  # without `on_model_loaded`, because a callback may add hooks to the module
        own: dict[str, Any] = copy_tree(module.state_dict())
        return own
    finally:
        local.load_global(state)


def ask(
    fit: FederatedFit,
    module: L.LightningModule,
    callback: AskableCallback,
    clients: Iterable[Client],
    question: Mapping[str, Any],
    own: bool,
) -> Answers:
    """Sends a question to clients between rounds, and collects the answers. See :meth:`Federation.ask`."""
    trainer, clients = fit.trainer, list(clients)
    round = trainer.current_epoch
    with torch.inference_mode(False):  # tensors made in that mode cannot be trained
        local = fit.local_model(module)
        _log_strangers(fit, clients, bool(local.personal))
        measured: dict[Client, State] = {}
        state = local.global_state()
        seed = fit.schedule.end_seed(round)
        visits = [Visit(client, round, derive_seed(seed, client_key(client))) for client in clients]

        def send(visit: Visit) -> Broadcast:
            broadcast = Broadcast(round, _shared(fit, visit.client, state) if own else state)
            fit.server.sent(visit.client, broadcast)
            return broadcast

        with _counting(fit) as answers, seeded_generators():
            if fit.remote is not None:
                question = {**question, "callback": type(callback).__name__, "own": own}
                question |= {"statistics_round": fit.batch_norm.measure_round, "decision": fit.batch_norm.decision}
                for client, answer in fit.remote.ask(fit, question, visits, send):
                    if isinstance(answer, str):
                        answers.failed[client] = answer
                    else:
                        answers.updates[client] = answer
                        answers.up_bytes += message_bytes(answer)
            else:

                def answer_here(visit: Visit) -> ClientUpdate:
                    sent = send(visit).state
                    if own:
                        statistics = _load_own_model(fit, local, visit.client, sent)
                        measured.update({} if statistics is None else {visit.client: statistics})
                    else:
                        local.load_global(sent)
                    notify_model_loaded(trainer, module, visit.client if own else None)
                    seed_everything(visit.seed)
                    with fit.limit_visit():
                        return callback.on_client_question(trainer, module, visit.client, question)

                try:
                    _ask_here(fit, visits, answer_here, answers)
                finally:
                    local.load_global(state)
                    notify_model_loaded(trainer, module, None)
    if fit.remote is None:
        answers = Answers.joined(process_group_of(trainer).gather(answers), clients)
        _store_measurements(fit, local, measured, state)
    for client, reason in answers.failed.items():
        _log.warning("Client %r does not answer: %s.", client, reason)
    return answers


def measure_own_statistics(fit: FederatedFit, clients: Iterable[Client]) -> None:
    """Measures and stores BatchNorm statistics for the clients with data in this process.

    Clients with up-to-date statistics are skipped. The module contains the global model before and after.
    """
    module, ranks = fit.module, process_group_of(fit.trainer)
    if fit.remote is not None:
        return
    local = fit.local_model(module)
    state, measured = local.global_state(), dict[Client, State]()
    ordered = sorted(clients, key=lambda client: (isinstance(client, str), client))
    try:
        with torch.inference_mode(False), ranks.independent():
            for client in itertools.islice(ordered, ranks.rank, None, ranks.size):
                try:
                    statistics = _load_own_model(fit, local, client, _shared(fit, client, state))
                except ClientFault as fault:
                    _log.warning("The BatchNorm statistics of client %r are excluded: %s.", client, fault)
                    continue
                measured.update({} if statistics is None else {client: statistics})
    finally:
        local.load_global(state)
        notify_model_loaded(fit.trainer, module, None)
    _store_measurements(fit, local, measured, state)


def _load_own_model(fit: FederatedFit, local: LocalModel, client: Client, state: State) -> State | None:
    # Returns new BatchNorm statistics, if the client has measured for the evaluation.
    measurement = find_measurement(fit.module)
    if measurement is None:
        stored = local.recall(client)
        local.load_client(client, state, stored, without_prefix(memory_of(stored), OWN_MODEL))
        return None
    round = fit.batch_norm.measure_round
    statistics: State | None = measurement.load_own_model(fit, local, client, state, round)
    return statistics


def _load(fit: FederatedFit, local: LocalModel, client: Client, state: State) -> None:
    # With several processes, a single process stores no measurement.
    statistics = _load_own_model(fit, local, client, _shared(fit, client, state))
    if statistics is not None and process_group_of(fit.trainer).size == 1:
        _store_measurements(fit, local, {client: statistics}, state)


def _store_measurements(fit: FederatedFit, local: LocalModel, measured: Mapping[Client, State], state: State) -> None:
    measurement = find_measurement(fit.module)
    if measurement is None:
        return
    for part in process_group_of(fit.trainer).gather(measured):
        for client, statistics in part.items():
            measurement.store_statistics(local, client, fit.rounds - 1, statistics, _shared(fit, client, state))


def _ask_here(
    fit: FederatedFit, visits: Sequence[Visit], answer: Callable[[Visit], ClientUpdate], answers: Answers
) -> None:
    ranks = process_group_of(fit.trainer)
    with ranks.independent():
        for visit in itertools.islice(visits, ranks.rank, None, ranks.size):
            try:
                update = answer(visit)
            except (ClientFault, VisitTimeout) as fault:
                answers.failed[visit.client] = str(fault)
            except Exception as error:
                error.add_note(f"Raised as client {visit.client!r} answered after round {round_number(visit.round)}.")
                raise
            else:
                answers.updates[visit.client] = update
                answers.up_bytes += message_bytes(update)


@contextmanager
def _counting(fit: FederatedFit) -> Iterator[Answers]:
    # A byte count separate from the last round's.
    answers, server = Answers(), fit.server
    report, server.report = server.report, replace(server.report, up_bytes=0, down_bytes=0)
    try:
        yield answers
    finally:
        answers.down_bytes, server.report = server.report.down_bytes, report


def _shared(fit: FederatedFit, client: Client, state: State) -> State:
    # With most rules, the global model.
    return fit.server.rule.model_of(client) or state


def _log_strangers(fit: FederatedFit, clients: Sequence[Client], has_personal: bool) -> None:
    if not fit.is_population_known or not fit.record_warning("strangers"):
        return
    known = fit.population.clients
    keys = known if isinstance(known, range) else set(known)
    strangers = [client for client in clients if client not in keys]
    if strangers:
        _log.log(
            logging.WARNING if has_personal else logging.INFO,
            "%d evaluated clients do not train (%s), and use %s. The training clients are %s.",
            len(strangers),
            list_first(strangers),
            "the initial values of the personal entries" if has_personal else "the global model",
            list_first(known),
        )
