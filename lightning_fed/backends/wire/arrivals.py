"""Server side of asynchronous rounds: the round ends after a few answers, and the other clients continue to train."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.algorithms.asynchronous.arrivals import Arrival, NetworkOrder
from lightning_fed.algorithms.asynchronous.rules import AsynchronousRule
from lightning_fed.backends.wire.clients_for_server import RemoteClientSide, RemoteVisit, is_lacking
from lightning_fed.backends.wire.packets import VISIT, Packet
from lightning_fed.backends.wire.transport import Answer, Message
from lightning_fed.federated_callback import AskableCallback, FederatedCallback, federated_callbacks
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import is_overridden
from lightning_fed.messages import Client, Request, message_bytes
from lightning_fed.rounds.round import Round
from lightning_fed.rounds.visit_flow import run_to_step, server_callbacks
from lightning_fed.server.schedule import Cohort
from lightning_fed.server.server import ServerInterface

ORDER = "order.jsonl"
"""Name of the file with the arrival order, in the folder of the run."""

_PAUSE = 5.0  # seconds until the next look for connected clients


class RemoteArrivals(RemoteClientSide):
    """Runs asynchronous rounds with clients on other machines.

    After each client's answer, the server immediately starts training on another client. The answering client starts
    again only in the next round. A round ends after ``buffer`` valid updates, or if no connected client is left.
    """

    def __init__(self, *parts: Any, folder: Path) -> None:
        super().__init__(*parts)
        self._folder, self._order = folder, NetworkOrder()
        self._messages: dict[Client, Message] = {}
        self._unsent: dict[Client, frozenset[str]] = {}

    def connect(self, server: ServerInterface) -> ServerInterface:
        assert isinstance(server.rule, AsynchronousRule)
        self._rule = server.rule
        self._rule.order, self._rule.record = self._order, str(self._folder / ORDER)
        return server

    def start(self, fit: FederatedFit) -> None:
        super().start(fit)
        callbacks, refused = federated_callbacks(fit.trainer), ""
        if self._rule.replay is not None:
            refused = "`replay`: replay the order in one process"
        elif self._transport.deadline.min_clients is not None:
            refused = "`min_clients` in `Deadline`, because a round ends after `buffer` updates"
        elif fit.trainer.lr_scheduler_configs:
            refused = "learning-rate schedulers, because each client starts in another round"
        for callback in callbacks:
            if isinstance(callback, AskableCallback):
                refused = f"`{type(callback).__name__}`, because clients in training cannot answer: evaluate afterwards"
            elif is_overridden("on_client_request", callback, FederatedCallback):
                refused = f"`{type(callback).__name__}`, because the callback sends a request before each visit"
        if refused:
            name = type(self._rule).__name__
            raise MisconfigurationException(f"With clients on other machines, {name} does not support {refused}.")

    def exchange(self, round: Round) -> None:
        server, order = round.fit.server, self._order
        number, waited = server.report.round, 0.0
        ended: dict[Client, RemoteVisit] = {}
        self._prepare(round)
        for client in [client for client in order.flying if client not in self._messages]:  # sent by a killed server
            if not self._send(round, client):
                self._receive(round, client, "the client is not connected", ended)
        while len(server.report.received) < self._rule.buffer:
            away = self._start_visits(round, ended)
            if not self._messages and (not away or waited > self._transport.deadline.reconnect):
                for client in away:
                    ended[client] = RemoteVisit(round.fit.schedule.visit_of(number, client), len(ended))
                    server.fail(client, "the client is not connected")
                break
            waited = 0.0 if self._messages else waited + _PAUSE
            arrival = self._transport.await_any(self._messages, partial(self._pack_visit, round), _PAUSE)
            if arrival is not None:
                self._receive(round, *arrival, ended)
                del arrival  # frees the answer before the next one
        round.cohort = Cohort(tuple(replace(remote.visit, round=number) for remote in ended.values()))
        self._end_optimizers(round, [remote for remote in ended.values() if remote.steps is not None])

    def _start_visits(self, round: Round, busy: dict[Client, RemoteVisit]) -> list[Client]:
        fit, away = round.fit, list[Client]()
        clients, number = fit.population.clients, fit.server.report.round
        while drawn := self._order.start(fit.schedule, clients, [*busy, *away], number):
            lost = [client for client in drawn if not self._send(round, client)]
            for client in lost:
                del self._order.flying[client]
            away += lost
        return away

    def _send(self, round: Round, client: Client, is_whole: bool = False) -> bool:
        message = None
        if self._transport.connection(client) is not None:
            packet = self._pack_visit(round, client, is_whole)
            message = self._transport.send(client, VISIT, packet, self._order.flying[client])
        if message is not None:
            self._messages[client] = message
        return message is not None

    def _pack_visit(self, round: Round, client: Client, is_whole: bool = False) -> Packet:
        fit, server = round.fit, round.fit.server
        broadcast = server.rule.broadcast(Request(client))
        for callback in server_callbacks(fit):
            callback.on_server_send(fit.trainer, fit.module, client, broadcast)
        self._unsent[client] = broadcast.unsent = (
            frozenset() if is_whole else server.held.held_by(client, broadcast.state)
        )
        server.report.down_bytes += message_bytes(broadcast)
        order = self._train_request_for(fit.schedule.visit_of(self._order.flying[client], client))
        return self._pack(server, VISIT, order, broadcast, {frozenset(): ""})

    def _receive(self, round: Round, client: Client, answer: Answer, ended: dict[Client, RemoteVisit]) -> None:
        fit, server, rule = round.fit, round.fit.server, self._rule
        if self._unsent.get(client) and is_lacking(answer):
            if self._send(round, client, is_whole=True):
                return
            answer = "the client is not connected"
        version = self._order.flying.pop(client)
        rule.arrived[client] = Arrival(0.0, len(ended), client, version)
        remote = ended[client] = RemoteVisit(fit.schedule.visit_of(version, client), len(ended))
        flow = self._run_visit(round, remote, None)
        next(flow)
        flow.send(server.prepare(client))
        run_to_step(fit, flow, answer)
        if client not in server.report.received:
            del rule.arrived[client]
