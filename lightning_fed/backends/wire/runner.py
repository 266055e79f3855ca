"""Client program for any network transport: trains one round in an ordinary Trainer per request."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fed.backends.site.gate import POLICY_FILE, SiteGate
from lightning_fed.backends.site.policy import ANSWERS, Half, Refusal
from lightning_fed.backends.site.site_log import keep_log
from lightning_fed.backends.wire.answer_file import AnswerFile
from lightning_fed.backends.wire.bounds import OrderBounds
from lightning_fed.backends.wire.data import HalfData, read_data
from lightning_fed.backends.wire.held_file import HeldFile
from lightning_fed.backends.wire.newest_order import refuse_older_order
from lightning_fed.backends.wire.options import check_options
from lightning_fed.backends.wire.packets import (
    HELLO,
    NOT_HERE,
    VISIT,
    Answer,
    Fault,
    Packet,
    PacketError,
    TrainRequest,
    find_bad_size,
    read_packet,
    read_train_request,
    write_fault,
    write_packet,
    write_request,
    write_update,
)
from lightning_fed.backends.wire.question_sum import mask_answer
from lightning_fed.backends.wire.secure_sum_client import NOT_MASKED, NOT_SUMMED, ClientSum
from lightning_fed.backends.wire.secure_sum_packets import SUM, SumRequest, read_sum_request
from lightning_fed.backends.wire.server import Model
from lightning_fed.backends.wire.server_for_client import RemoteServerSide, find_public_reason
from lightning_fed.callbacks.federation import Federation
from lightning_fed.client.client_store import FolderStore
from lightning_fed.console import round_number
from lightning_fed.data.population import Population
from lightning_fed.errors import ClientFault
from lightning_fed.fit.round_log import format_bytes
from lightning_fed.lightning.internals import start_at_epoch
from lightning_fed.messages import Broadcast, Client
from lightning_fed.model.entries import live_entries
from lightning_fed.privacy.secure_sum import SecureSum

_log = logging.getLogger(__name__)

ClientsData = L.LightningDataModule | Mapping[Client, Any]

_LARGE = 16 * 2**20  # bytes; garbage collection pays off only for larger models
_QUIET: dict[str, Any] = {
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
_OURS = (
    "callbacks", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "fast_dev_run", "strategy",
    "limit_val_batches", "num_sanity_val_steps", "check_val_every_n_epoch", "val_check_interval",
    "reload_dataloaders_every_n_epochs",
)  # fmt: skip


class ClientRunner:
    """Answers the server's messages on a client's machine. Model and data are built once per process.

    Takes the arguments of :func:`~lightning_fed.backends.flower.client_app`.
    """

    store_kind = FolderStore

    def __init__(
        self,
        federation: Federation,
        model: Model,
        data: ClientsData | Callable[[Mapping[str, Any]], ClientsData],
        trainer: Mapping[str, Any] | None,
        *,
        callbacks: Sequence[L.Callback] = (),
        store: str | os.PathLike[str],
        bounds: OrderBounds | None = None,
        policy: str | os.PathLike[str] | None = None,
    ) -> None:
        self._bounds = OrderBounds() if bounds is None else bounds
        self._federation, self._model, self._data = federation, model, data
        self._options, self._callbacks = check_options(trainer, _OURS), list(callbacks)
        self._store = Path(store)
        self._store.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._run = ""
        self._module: L.LightningModule
        self._found: dict[str, tuple[Population, HalfData]] = {}  # by node
        chain = federation.server.chain
        of_steps = chain.callbacks()
        self._summed = next((step for step in chain.steps if isinstance(step, SecureSum)), None)
        self._gate = SiteGate(
            self._store / POLICY_FILE if policy is None else Path(policy),
            policy is not None,
            Half(federation.method.name, chain.steps, [*federation.method.callbacks, *of_steps, *self._callbacks]),
            self._store,
        )

    def answer(self, kind: str, packet: Packet, node: Mapping[str, Any]) -> Packet:
        try:
            return self._gate.guard(kind, packet, lambda bare: self._answer(kind, bare, node))
        except PacketError:
            raise
        except Exception as error:  # other messages and nodes must still get answers
            _log.exception("Could not answer a message of type %r for the node %s.", kind, dict(node))
            raise PacketError(find_public_reason(error)) from None
        finally:
            _free(len(packet.data))

    def keep_log(self) -> None:
        if self._gate.is_in_force():
            keep_log(self._store)

    def _answer(self, kind: str, packet: Packet, node: Mapping[str, Any]) -> Packet:
        if kind not in ANSWERS:
            raise PacketError(f"this client does not support messages of type {kind!r:.100}")
        population, datamodule = self._data_at(node)
        clients = _clients_at(node, population)
        if kind == HELLO:
            read_packet(packet, "hello")
            return write_packet("hello", {"clients": clients})
        if kind == SUM:
            return self._answer_sum(read_sum_request(packet), clients)
        train_request, broadcast = read_train_request(packet, kind)
        try:
            self._check_order(kind, train_request, clients, population)
            if kind == VISIT:
                refuse_older_order(self._store / train_request.run, train_request)
            is_kept = kind == VISIT and self._summed is None  # keys of a secure sum must not be reused
            finished = AnswerFile(self._store / train_request.run, train_request, packet.data) if is_kept else None
            last = None if finished is None else finished.read()
            if last is not None:
                number = round_number(train_request.visit.round)
                _log.info("Round %d: client %r sends its stored answer again.", number, train_request.visit.client)
                return last
            reply = self._carry_out(kind, train_request, broadcast, population, datamodule)
            excess = find_bad_size(reply, live_entries(self._module))
            if excess is not None:  # the server would refuse to read the reply
                raise ClientFault(excess)
            if finished is not None:
                finished.store(reply)
            return reply
        except Refusal:
            raise
        except ClientFault as fault:
            return write_fault(Fault(train_request.visit.client, str(fault)))

    def _carry_out(
        self,
        kind: str,
        train_request: TrainRequest,
        broadcast: Broadcast,
        population: Population,
        datamodule: HalfData,
    ) -> Packet:
        run, round, client = train_request.run, train_request.visit.round, train_request.visit.client
        remote = RemoteServerSide(
            kind, train_request, broadcast, population, self._gate.judge_entries, HeldFile(self._store / run)
        )
        start = time.monotonic()
        try:
            self._build_module(run, train_request.seed)
            steps = self._fit(remote, run, round, datamodule)
        except ClientFault:
            raise
        except Exception as error:
            _log.exception("Round %d: client %r failed.", round_number(round), client)
            self._run = ""  # the module may be in an inconsistent state
            raise ClientFault(find_public_reason(error)) from error
        if remote.request is not None:
            return write_request(remote.request)
        if remote.answer is not None:
            if (step := self._summed) is not None:
                mask_answer(remote.answer, train_request, lambda run: self._sum_of(run, client, step))
            return write_update(remote.answer, Answer())
        update = remote.server.update
        if update is None:
            raise ClientFault(remote.server.fault or "the client has no answer to send")
        examples, seconds = update.num_samples, time.monotonic() - start
        store = FolderStore(self._store / run, keep_all=True)
        if train_request.needed:
            store.prune(client, train_request.needed)
        keeps = store.newest(client) == round
        if self._summed is not None:
            assert train_request.peers is not None
            self._sum_of(run, client, self._summed).mask(update, broadcast.state, train_request.peers, round)
        packet = write_update(update, Answer(steps, remote.left, keeps, len(update.unsent)))
        _log.info(
            "Round %d: client %r trained on %d examples in %.1f s. The answer has %s.",
            round_number(round), client, examples, seconds, format_bytes(len(packet.data)),
        )  # fmt: skip
        return packet

    def _build_module(self, run: str, seed: int) -> None:
        if run != self._run:
            L.seed_everything(seed, verbose=False)
            self._module = self._model if isinstance(self._model, L.LightningModule) else self._model()
            self._run = run

    def _check_order(
        self, kind: str, train_request: TrainRequest, clients: Sequence[Client], population: Population
    ) -> None:
        visit, seed = train_request.visit, self._federation.schedule.seed
        if visit.client not in clients:
            raise ClientFault(NOT_HERE)
        has_peers = train_request.peers is not None
        if (kind == VISIT or has_peers) and has_peers != (self._summed is not None):
            raise ClientFault(NOT_SUMMED if self._summed is None else NOT_MASKED)
        if train_request.seed != seed:
            raise ClientFault(
                f"the client's federation has seed {seed}, but the server's federation has seed {train_request.seed}"
            )
        if kind != VISIT:
            return
        try:
            per_epoch = population.batches_per_epoch(visit.client)
        except Exception:  # the visit reports the error
            per_epoch = None
        excess = self._bounds.find_excess(train_request, per_epoch)
        if excess is not None:
            _log.warning("Round %d: client %r does not train: %s.", round_number(visit.round), visit.client, excess)
            raise ClientFault(excess)

    def _answer_sum(self, request: SumRequest, clients: Sequence[Client]) -> Packet:
        if request.client not in clients or self._summed is None:
            return write_fault(Fault(request.client, NOT_SUMMED if request.client in clients else NOT_HERE))
        return self._sum_of(request.run, request.client, self._summed).answer(request)

    def _sum_of(self, run: str, client: Client, summed: SecureSum) -> ClientSum:
        return ClientSum(self._store, run, client, summed.threshold, self._bounds.min_clients)

    def _fit(self, remote: RemoteServerSide, run: str, round: int, datamodule: HalfData) -> int:
        half = self._federation.replace(
            clients_per_round=1.0,
            availability=None,
            faults=replace(self._federation.options.faults, min_clients=1),
            partition=None,
            visits=self._federation.options.visits_one_by_one,
            store=self.store_kind(self._store / run, keep_all=True),
        )
        half.split(remote)
        trainer = L.Trainer(
            **{**_QUIET, **self._options},
            max_epochs=round + 1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[half, *self._callbacks],
        )
        start_at_epoch(trainer, round)
        try:
            trainer.fit(self._module, datamodule=datamodule)
            return trainer.global_step
        finally:
            self._module.zero_grad(set_to_none=True)
            # References to the Trainer would keep the round's tensors in memory until the next visit.
            self._module.trainer, datamodule.trainer = None, None
            del trainer, half
            _free(sum(value.nbytes for value in live_entries(self._module).values()))  # before the answer is written

    def _data_at(self, node: Mapping[str, Any]) -> tuple[Population, HalfData]:
        key = json.dumps(dict(node), sort_keys=True) if callable(self._data) else ""
        if key not in self._found:
            self._found[key] = read_data(self._federation, self._data(node) if callable(self._data) else self._data)
        return self._found[key]


def _clients_at(node: Mapping[str, Any], population: Population) -> list[Client]:
    if "partition-id" in node and "num-partitions" in node:  # in a Flower simulation
        return list(population.clients[int(node["partition-id"]) :: int(node["num-partitions"])])
    return list(population.clients)


def _free(num_bytes: int) -> None:
    if num_bytes > _LARGE:  # reference cycles would keep a large model in memory until a later visit
        gc.collect()
