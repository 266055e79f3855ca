"""Simulates a deployment with the real programs. Compares models with a fit, and messages with policies."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightning_fed.algorithms.asynchronous.arrivals import RecordedOrder, read_lines
from lightning_fed.algorithms.asynchronous.rules import AsynchronousRule
from lightning_fed.backends.rehearsal.network import Message, RehearsalTransport, Site
from lightning_fed.backends.rehearsal.profiles import DAY, Sites
from lightning_fed.backends.rehearsal.stand_in import (
    QUIET,
    SERVER_MEMORY,
    RehearsedRunner,
    StandIn,
    build_stand_in_data,
    train_stand_in,
)
from lightning_fed.backends.rehearsal.world import Killed, Machine, World
from lightning_fed.backends.site.gate import POLICY_FILE
from lightning_fed.backends.site.policy import ANSWERS, change_update, find_kind, read_policy
from lightning_fed.backends.site.record import RecordError, read_record
from lightning_fed.backends.wire.arrivals import ORDER
from lightning_fed.backends.wire.packets import Packet
from lightning_fed.backends.wire.server import ServerRunner
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.errors import describe
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client, ClientUpdate, State, file_name
from lightning_fed.model.entries import copy_state, live_entries
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps.chain import Chain

_MOST_STARTS = 200  # of the server
_MOST_VERSIONS = 4  # of a client's stored state in a run, independent of the number of rounds


@dataclass(frozen=True)
class Plan:
    """Deployment to simulate, and options for the simulation.

    ``federation`` and ``model`` are functions, called in every simulated process. ``data`` returns a client's data, by
    default artificial data. Message sizes and memory use are scaled to ``model_bytes``, the size of the deployed model.
    By default, this is the size of ``model``. With ``trains``, clients train ``model``; by default
    :func:`train_stand_in` computes artificial updates.
    """

    sites: Sites
    federation: Callable[[], Federation]
    rounds: int
    deadline: Deadline | None = None
    model: Callable[[], L.LightningModule] = StandIn
    data: Callable[[Client], Any] | None = None
    model_bytes: float | None = None
    trains: bool = False
    trainer: Mapping[str, Any] = field(default_factory=lambda: QUIET)


@dataclass
class RoundResult:
    """State after a round: clients with a valid update, excluded clients with reasons, and the global model."""

    received: Sequence[Client]
    failed: Mapping[Client, str]
    model: State
    is_new: bool


@dataclass
class Outcome:
    """Result of one simulated federated fit.

    - ``megabytes``: traffic in both directions, for the real model.
    - ``failure``: reason if the rehearsal ended before the last round.
    - ``excluded``: number of rounds without a client's update, by (client, reason).
    - ``log``: events as (seconds, machine, text).
    - ``answer_seconds``: seconds from each request to the client's answer.
    - ``order``: arrivals of updates, for asynchronous methods.
    """

    seed: int
    rounds: int = 0
    hours: float = 0.0
    megabytes: float = 0.0
    failure: str | None = None
    excluded: Counter[tuple[Client, str]] = field(default_factory=Counter)
    visits: dict[int, RoundResult] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    log: list[tuple[float, str, str]] = field(default_factory=list)
    answer_seconds: list[float] = field(default_factory=list)
    order: list[list[Any]] = field(default_factory=list)


def rehearse(plan: Plan, seed: int) -> Outcome:
    """Runs a deployment's server and clients in simulated time. Equal ``plan`` and ``seed`` give an equal outcome."""
    outcome = Outcome(seed)
    with tempfile.TemporaryDirectory() as name:
        _Run(plan, outcome, Path(name).resolve()).run()
    return outcome


class _Ledger(FederatedCallback):
    keeps_privacy = True

    def __init__(self, run: _Run) -> None:
        self._run = run

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        if not self._run.server.is_dead:
            self._run.end_round(
                find_federation(trainer), trainer.current_epoch, copy_state(live_entries(module)), is_new
            )


class _Run:
    def __init__(self, plan: Plan, outcome: Outcome, folder: Path) -> None:
        self.plan, self.outcome, self.folder = plan, outcome, folder
        model_bytes = sum(value.nbytes for value in plan.model().state_dict().values())
        self.world = World(outcome.seed, (plan.model_bytes or model_bytes) / model_bytes)
        self.server_memory = SERVER_MEMORY * model_bytes * self.world.scale / 1e9
        self.server = Machine("server", plan.sites.server, folder / "server", self.world)
        self.key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"rehearsal").digest())
        self.left: dict[str, list[tuple[float, Message, Packet]]] = {str(client): [] for client in plan.sites.sites}
        self.sites = {client: self._build_site(client, model_bytes) for client in plan.sites.sites}
        # Steps of a secure sum by site and run: a server without a checkpoint starts a new run, with separate keys.
        self.steps = defaultdict[tuple[str, str], set[str]](set)
        self.has_masks = plan.federation().server.chain.reveals == "sum"
        self.released: set[int] = set()  # hashes of the models that clients received
        self.transport: RehearsalTransport

    def check(self, is_kept: bool, text: str) -> None:
        if not is_kept:
            event = len(self.outcome.log or self.world.log)
            self.outcome.violations.append(f"seed {self.outcome.seed}, {self.world.now:.1f} s, event {event}: {text}")
            self.world.note("", f"VIOLATION: {text}")

    def run(self) -> None:
        plan, world, outcome = self.plan, self.world, self.outcome
        deadline = plan.deadline or plan.sites.deadline
        if self.server_memory > plan.sites.server.memory:
            outcome.failure = f"the server needs {self.server_memory:.3g} GB of memory, more than the machine has"
            return
        num_bytes, handler = 0, signal.getsignal(signal.SIGTERM)
        with world.replace_time(self.folder):
            while self.server.starts <= _MOST_STARTS:
                self.transport = RehearsalTransport(
                    world, self.server, self.sites, deadline, self.check, self.key, self.released
                )
                try:
                    with world.run_on(self.server):
                        ServerRunner(
                            plan.federation(), plan.model, None, {**plan.trainer, "max_epochs": plan.rounds},
                            clients=list(self.sites), folder=self.server.folder, callbacks=[_Ledger(self)],
                            patience=plan.sites.patience,
                        ).run(self.transport)  # fmt: skip
                    break
                except (Killed, OSError) as error:  # after a full disk, the operator starts the server again
                    if isinstance(error, OSError):
                        world.note("server", f"ends: {describe(error)}")
                    world.advance(self.server.kill())
                except Exception as error:
                    outcome.failure = describe(error)
                    world.note("server", f"ends: {outcome.failure}")
                    break
                finally:
                    # A killed server does not remove Lightning's handler, with references to all objects of the server.
                    if handler is not None and threading.current_thread() is threading.main_thread():
                        signal.signal(signal.SIGTERM, handler)
                    num_bytes += self.transport.sent + self.transport.received
                    outcome.answer_seconds += self.transport.answer_seconds()
            outcome.log, world.log = sorted(world.log, key=lambda event: event[0]), []
            outcome.rounds = len(outcome.visits)
            outcome.hours, outcome.megabytes = world.now / 3600, num_bytes * world.scale / 1e6
            self._check_models()
            for site in self.sites.values():
                self._check_site(site)

    def end_round(self, federation: Federation, round: int, model: State, is_new: bool) -> None:
        if federation.rounds <= round:
            return  # abandoned, because the fit ends
        report, outcome = federation.server.report, self.outcome
        for later in [number for number in outcome.visits if number >= round]:
            del outcome.visits[later]
        for client, reason in report.failed.items():
            outcome.excluded[client, reason] += 1
            is_kept = "stored state" not in reason and "lost its state" not in reason
            is_lost = self.sites[client].machine.lost or self.server.lost[self.server.folder / "last.ckpt"] > 1
            self.check(
                is_kept or bool(is_lost), f"round {round + 1}: {client!r} has no state, but no disk lost it: {reason}"
            )
        outcome.visits[round] = RoundResult(list(report.received), dict(report.failed), model, is_new)
        results = self.transport.results.pop(-1 if federation.server.rule.has_versions else round, {})
        lost = [client for client, is_good in results.items() if is_good and client not in report.received]
        extra = [client for client in report.received if not results.get(client)]
        if federation.server.chain.reveals == "update":
            self.check(not lost, f"round {round + 1}: the valid updates of {lost} are lost")
            self.check(not extra, f"round {round + 1}: updates of {extra} are used, but no valid answer arrived")
        missing = {visit.client for visit in federation.cohort.visits} ^ {*report.received, *report.failed}
        self.check(not missing, f"round {round + 1}: {missing} are neither used nor excluded")
        for step in federation.server.chain.steps:
            released = len(self.released) - 1 if round else 0
            spent = getattr(step, "rounds", math.inf)
            self.check(spent >= released, f"round {round + 1}: {released} models were sent, but epsilon counts {spent}")

    def _build_site(self, client: Client, model_bytes: float) -> Site:
        plan, profile = self.plan, self.plan.sites.sites[client]
        store = self.folder / file_name(client)
        store.mkdir(mode=0o700)
        if profile.policy:
            (store / POLICY_FILE).write_text(profile.policy)
            (store / POLICY_FILE).chmod(0o600)
        machine = Machine(str(client), profile, store, self.world)
        machine.keep(store / POLICY_FILE)

        def make_runner() -> RehearsedRunner:
            data = build_stand_in_data(client, profile.batches) if plan.data is None else plan.data(client)
            return RehearsedRunner(
                machine, plan.federation(), plan.model, data, model_bytes * self.world.scale, plan.trains, store,
                plan.trainer, [],
            )  # fmt: skip

        return Site(self.world, machine, make_runner, self._inspect)

    def _inspect(self, site: Site, message: Message, reply: Packet) -> None:
        name, content = site.machine.name, json.loads(reply.text)
        self.left[name].append((self.world.time(), message, reply))
        if not self.has_masks or content["kind"] not in ("sum", "update"):
            return
        request = json.loads(message.packet.text.partition("\n")[0])["header"]
        step, steps = content["header"].get("stage", "update"), self.steps[name, request["run"]]
        if step == "keys":
            steps.clear()
        self.check(
            step not in steps, f"{name} uses the keys of a secure sum twice in the step {step!r} ({message.name})"
        )
        steps.add(step)

    def _check_models(self) -> None:
        plan, clients, order = self.plan, list(self.sites), self.server.folder / ORDER
        federation = plan.federation()
        self.outcome.order = list(read_lines(str(order))) if order.exists() else []
        if plan.trains or federation.server.chain.reveals == "model":
            return
        is_exact = federation.server.chain.reveals == "update"
        server = Server(Chain(federation.server.rule, [step for step in federation.steps if step.reveals == "update"]))
        state, stored = copy_state(live_entries(plan.model())), dict[Client, State]()
        rule, population = server.rule, SimpleNamespace(clients=clients)
        if isinstance(rule, AsynchronousRule) and self.outcome.order:
            rule.replay = str(order)
            rule.order = RecordedOrder(rule.replay)
        for round, result in sorted(self.outcome.visits.items()):
            visits = rule.draw_cohort(round, federation.schedule, population).visits if result.is_new else ()
            server.start_round(RoundInfo(round, clients, seed=federation.seed), state)
            pending: dict[Client, State] = {}
            for visit in visits:
                client = visit.client
                if client not in result.received:
                    continue
                broadcast = server.prepare(client)
                server.sent(client, broadcast)
                trained, pending[client] = train_stand_in(broadcast.state, visit, stored.get(client, {}))
                update = ClientUpdate(client, plan.sites.sites[client].batches, trained)
                update = server.chain.on_client(update, broadcast, pending[client])
                if server.count(update):
                    server.accept(update)
            new = (server.finish_round() if result.is_new else None) or state
            is_equal = all(
                torch.equal(value, new[name]) or (not is_exact and torch.allclose(value, new[name], atol=1e-3))
                for name, value in result.model.items()
            )
            self.check(
                is_equal and new.keys() == result.model.keys(),
                f"round {round + 1}: the model differs from a fit in one process: a lost, doubled or changed update",
            )
            recorded = [line for line in self.outcome.order if line[0] == round]
            digests = rule.digests if isinstance(rule, AsynchronousRule) else {}
            self.check(
                not result.is_new or [[line[1], line[3]] for line in recorded] == [[*item] for item in digests.items()],
                f"round {round + 1}: the updates differ from the recorded order",
            )
            state, stored = result.model, stored | {client: kept for client, kept in pending.items() if kept}

    def _check_site(self, site: Site) -> None:
        machine, left = site.machine, self.left[site.machine.name]
        for run in machine.folder.iterdir():
            count = sum(1 for _ in run.rglob("*.safetensors"))
            self.check(count <= _MOST_VERSIONS, f"{machine.name} has {count} states of a run: its disk is not bounded")
        if not machine.profile.policy:
            return
        policy = read_policy(machine.folder / POLICY_FILE)
        path = machine.folder / policy.record
        lines = []
        try:
            lines = list(read_record(path)) if path.exists() else []
        except RecordError as error:
            self.check("truncated" in str(error), f"the record of {machine.name} is damaged: {error}")
            return
        known, clock = {line.content.get("digest") for line in lines}, 0.0
        recent: list[tuple[float, str, int]] = []
        for time, message, reply in left:
            answer, clock = ANSWERS[message.kind], max(clock, time)
            if answer == "clients" or find_kind(reply.text) == "fault":
                continue
            bare = change_update(reply, head=None)
            hashed = hashlib.sha256(f"{bare.text}\0".encode() + bare.data).hexdigest()
            self.check(hashed in known, f"{machine.name} sent an answer to {message.name} that is not in the record")
            recent = [one for one in recent if one[0] > clock - DAY]
            recent.append((clock, answer, len(bare.text.encode()) + len(bare.data)))
            count, size = sum(one[1] == answer for one in recent), sum(one[2] for one in recent)
            is_kept = count <= policy.rounds_per_day and size <= policy.bytes_per_day
            self.check(
                is_kept, f"{machine.name} sent {count} answers and {size} bytes in a day, more than the policy allows"
            )
