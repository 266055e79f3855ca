"""Server side of a federation with remote clients: exchanges the messages of a round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fed.backends.wire.hyperparameters import (
    digest_request,
    fit_numbers,
    name_optimizers,
    on_device,
    pack_numbers,
)
from lightning_fed.backends.wire.packets import (
    NOT_HELD,
    NOT_HERE,
    QUESTION,
    REQUEST,
    STATISTICS,
    VISIT,
    Answer,
    Fault,
    Packet,
    TrainRequest,
    find_bad_size,
    read_reply,
    unreadable,
    write_train_request,
)
from lightning_fed.backends.wire.question_sum import Replies, ask_sum
from lightning_fed.backends.wire.remote_client_store import RemoteClientStore
from lightning_fed.backends.wire.secure_sum_server import ServerSum
from lightning_fed.backends.wire.transport import Transport
from lightning_fed.batch_norm.measurement import warn_of_report
from lightning_fed.batch_norm.pooling import find_bad_statistics
from lightning_fed.client.local_optimizers import LocalOptimizers
from lightning_fed.compression import CODES, VERSION
from lightning_fed.console import round_number
from lightning_fed.data.population import Population
from lightning_fed.errors import BadUpdate, describe, without_frames
from lightning_fed.federated_callback import FederatedCallback, federated_callbacks
from lightning_fed.fit.federated_fit import FederatedFit, RemoteSide
from lightning_fed.lightning.internals import add_optimizer_steps, is_overridden
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, digest, message_bytes
from lightning_fed.model.entries import find_non_finite, live_entries
from lightning_fed.privacy.secure_sum import RingSum
from lightning_fed.rounds.round import Round
from lightning_fed.rounds.visit_flow import Answer as UpdateAnswer
from lightning_fed.rounds.visit_flow import Ask, Flow, Step, run_to_step
from lightning_fed.server.schedule import Cohort, Visit
from lightning_fed.server.server import ServerInterface

_log = logging.getLogger(__name__)

_MOST_STEPS, _MANUAL_STEPS = 1_000_000, 100
_MOST_TIMES = 100  # factor for the median step count: limit for a client's step count
_LOSS_SCALES = 2.0**-30, 2.0**40

_Reply: TypeAlias = Request | tuple[ClientUpdate, Answer] | Fault


class RemotePopulation(Population):
    """Population of clients with data on other machines. Every access to client data is an error."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise MisconfigurationException(
            "Expected no callback or option that reads client data on the server, because the data are on the clients' "
            "machines: use this callback or option (see the traceback) only with clients in one process."
        )

    num_samples = batches_per_epoch = stream = _refuse


class RemoteClientSide(RemoteSide):
    """Sends the messages of rounds to clients on other machines, and receives the answers.

    ``client_store`` contains, for each client, the last round in which the client saved state.
    """

    has_server = True

    def __init__(
        self, transport: Transport, client_store: RemoteClientStore, clients: Sequence[Client], seed: int, start: int
    ) -> None:
        self._transport, self._client_store = transport, client_store
        self._constant = {"seed": seed, "start": start}
        self.population = RemotePopulation(clients)
        self._cohort = Cohort(())
        self._distrusted: set[Client] = set()  # clients distrusted in secure sums
        self._train_request: dict[str, Any] = {}
        self._server_entries: State = {}

    def visits_here(self, cohort: Cohort) -> Cohort:
        # Clients train on other machines. Answers arrive during a placeholder batch.
        self._cohort = cohort
        return Cohort((), cohort.dropped)

    def start(self, fit: FederatedFit) -> None:
        """Hides PyTorch's warning about scheduler steps without optimizer steps: clients run the optimizer steps."""
        fit.ignore_warning("Detected call of `lr_scheduler.step")  # `optimizer.step` runs on the clients

    def _prepare(self, round: Round) -> None:
        fit, optimizers = round.fit, round.optimizers
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in optimizers.step_schedulers):
            raise MisconfigurationException(
                "Expected per-step schedulers that the server can repeat, but `ReduceLROnPlateau` depends on a "
                "client's measurements: choose another schedule, or step the scheduler once per round."
            )
        frozen = {name: value for name, value in round.local.server_entries.items() if fit.policies[name] == "frozen"}
        filled = [
            name for name in frozen if name in (fit.unset or ()) and find_non_finite({name: frozen[name]}) is None
        ]
        if filled:
            raise MisconfigurationException(
                "Expected that buffers with NaN or infinite initial values stay unchanged, because the server does not "
                f"send such buffers. On the server, validation or a hook has changed {sorted(filled)}. Add these "
                "buffers to `personal` for separate values per client, or start with finite values for averaging."
            )
        self._server_entries = round.local.server_entries
        start = pack_numbers(optimizers.start) | {"optimizers": name_optimizers(fit.trainer.optimizers)}
        self._train_request = self._common(frozen) | {"hyperparameters": start}

    def exchange(self, round: Round) -> None:
        fit, server = round.fit, round.fit.server
        self._prepare(round)
        secure_sum = self._start_sum(fit)
        visits = {
            visit.client: RemoteVisit(visit, position)
            for position, visit in enumerate(self._cohort.visits)
            if visit.client not in server.report.failed
        }
        requests = self._requests(fit, [remote.visit for remote in visits.values()], round.state)
        flows = {client: self._run_visit(round, remote, requests.get(client)) for client, remote in visits.items()}

        def messages() -> Iterator[tuple[Visit, Broadcast, str]]:
            for client, remote in visits.items():
                try:
                    if run_to_step(fit, flows[client]) is None:
                        continue
                except Exception as error:
                    if not remote.asked:
                        raise
                    # The request contains rows outside the model.
                    server.refuse(
                        client, f"the client's request cannot be answered: {describe(error)}", without_frames(error)
                    )
                    continue
                yield remote.visit, remote.broadcast, remote.asked

        for client, reply in self._ask(server, VISIT, messages()):
            run_to_step(fit, flows.pop(client), reply)
            del reply  # frees a large model while waiting for the next one
        self._end_optimizers(round, [remote for remote in visits.values() if remote.steps is not None])
        if secure_sum is not None:
            secure_sum.unmask([client for client in secure_sum.peers if client in server.report.received])

    def _run_visit(self, round: Round, remote: RemoteVisit, request: _Reply | None) -> Flow:
        fit, server, client = round.fit, round.fit.server, remote.visit.client
        if request is not None:
            if not isinstance(request, Request):
                _exclude(server, client, request, "the client sent no request")
                return
            request.extras = on_device(request.extras, fit.module.device)
            fault = find_non_finite(request.extras)
            if fault is not None:
                server.refuse(client, fault)
                return
            remote.asked = digest_request(request)
        remote.broadcast = yield Ask(request or Request(client))
        answer = self._open((yield Step()), client, round.state)
        if not isinstance(answer, tuple):
            _exclude(server, client, answer, "the client sent a request instead of an update")
            return
        update, reported = answer
        try:
            steps = _read_steps(
                reported, round.optimizers, _most_steps(remote.visit, fit.module.automatic_optimization)
            )
            device = fit.module.device
            update.state, update.extras = on_device(update.state, device), on_device(update.extras, device)
            _fill_in(update, remote.broadcast.state, reported.unsent)
        except BadUpdate as error:
            server.refuse(client, str(error))
            return
        except Exception as error:
            server.refuse(client, f"the client's answer is invalid: {describe(error)}", without_frames(error))
            return
        if (yield UpdateAnswer(update)):
            remote.steps = steps
            if reported.keeps:
                self._client_store.record_update(client, server.report.round, remote.visit.round)

    def _end_optimizers(self, round: Round, visits: Sequence[RemoteVisit]) -> None:
        optimizers, trainer = round.optimizers, round.fit.trainer
        counts = sorted(remote.steps.num_steps for remote in visits if remote.steps is not None)
        most = _MOST_TIMES * counts[(len(counts) - 1) // 2] if counts else 0
        for remote in visits:
            assert remote.steps is not None
            add_optimizer_steps(trainer, min(remote.steps.num_steps, most))
            if remote.steps.of_schedulers is None:
                continue
            of_schedulers = [min(steps, most) for steps in remote.steps.of_schedulers]
            try:
                final = _repeat_steps(optimizers, of_schedulers)
            except Exception as error:  # a schedule with fewer steps
                _log.warning(
                    "Round %d: the server cannot repeat the scheduler steps reported by client %r, %s: %s.",
                    round_number(remote.visit.round), remote.visit.client, of_schedulers, describe(error),
                )  # fmt: skip
                continue
            if remote.steps.scaler:
                final["scaler"] = remote.steps.scaler
            if optimizers.has_lasting_state:
                optimizers.finals[remote.position] = final

    def ask(
        self,
        fit: FederatedFit,
        question: Mapping[str, Any],
        visits: Sequence[Visit],
        send: Callable[[Visit], Broadcast],
    ) -> Replies:
        entries = live_entries(fit.module)
        frozen = {name: entries[name] for name in entries if fit.policies[name] == "frozen"}

        def ask(visits: Sequence[Visit], peers: list[Client] | None = None) -> Replies:
            asked = {"hyperparameters": {}, "question": dict(question), "peers": peers}
            self._train_request = self._common(frozen) | asked
            messages = ((visit, send(visit), "") for visit in visits)
            for client, reply in self._ask(fit.server, QUESTION, messages):
                yield client, self._read_answer(reply, client, entries)

        return ask_sum(self._transport, fit.server, question, visits, ask) if "sum" in question else ask(visits)

    def _common(self, frozen: State) -> dict[str, Any]:
        return {
            "run": self._client_store.run,
            "frozen": digest(frozen),
            **self._constant,
        }

    def _start_sum(self, fit: FederatedFit) -> ServerSum | None:
        self._train_request["peers"] = None
        sums = [held for held in fit.server.chain.held if isinstance(held, RingSum)]
        if not sums:
            return None
        server, run = fit.server, self._client_store.run
        secure_sum = ServerSum(self._transport, server, sums[0], run, self._distrusted)
        secure_sum.share_secrets(
            [visit.client for visit in self._cohort.visits if visit.client not in server.report.failed]
        )
        self._train_request["peers"] = list(secure_sum.peers)
        return secure_sum

    def measure(
        self, server: ServerInterface, visits: Sequence[Visit], send: Callable[[Visit], Broadcast]
    ) -> list[tuple[Client, State]]:
        reports: list[tuple[Client, State]] = []
        models: dict[Client, State] = {}

        def messages() -> Iterator[tuple[Visit, Broadcast, str]]:
            for visit in visits:
                broadcast = send(visit)
                models[visit.client] = {**self._server_entries, **broadcast.state}
                yield visit, broadcast, ""

        for client, reply in self._ask(server, STATISTICS, messages()):
            answer = self._read_answer(reply, client, models[client])
            if isinstance(answer, str):
                fault: str | None = answer
            else:
                server.report.up_bytes += message_bytes(answer)
                try:
                    fault = find_bad_statistics(answer.extras, models[client])
                except Exception as error:
                    fault = describe(error)
                if fault is None:
                    reports.append((client, answer.extras))
                    continue
            warn_of_report(client, fault)
        return reports

    def _ask(
        self, server: ServerInterface, kind: str, messages: Iterable[tuple[Visit, Broadcast, str]]
    ) -> Iterator[tuple[Client, Packet | str]]:
        sent: dict[Client, tuple[Visit, Broadcast, str]] = {}
        digests: dict[Any, str] = {frozenset(): ""}
        lacking: list[Client] = []

        def pack(message: tuple[Visit, Broadcast, str]) -> tuple[Client, Packet]:
            visit, broadcast, asked = message
            sent[visit.client] = message
            return visit.client, self._pack(server, kind, self._train_request_for(visit, asked), broadcast, digests)

        def pack_again(client: Client) -> Packet:
            server.report.down_bytes += message_bytes(sent[client][1])
            return pack(sent[client])[1]

        def pack_whole(client: Client) -> tuple[Client, Packet]:
            broadcast = sent[client][1]
            broadcast.unsent = frozenset()
            broadcast.extras = {name: value for name, value in broadcast.extras.items() if not name.startswith(CODES)}
            return client, pack_again(client)

        number, waiting = server.report.round, list[tuple[Client, Packet | str]]()
        for client, reply in self._transport.ask(kind, map(pack, messages), number, pack_again):
            if sent[client][1].unsent and is_lacking(reply):
                lacking.append(client)
            if lacking:  # preserves the order of answers
                waiting.append((client, reply))
            else:
                yield client, reply
            del reply
        if not lacking:
            return
        _log.info(
            "Round %d: %d clients do not store the expected entries, so the server sends all entries.",
            round_number(number),
            len(lacking),
        )
        answers = dict(self._transport.ask(kind, map(pack_whole, lacking), number, pack_again))
        for client, reply in waiting:
            yield client, answers.get(client, reply)

    def _pack(
        self, server: ServerInterface, kind: str, order: TrainRequest, broadcast: Broadcast, digests: dict[Any, str]
    ) -> Packet:
        if broadcast.unsent not in digests:
            digests[broadcast.unsent] = digest({name: broadcast.state[name] for name in broadcast.unsent})
        missing = server.held.names - broadcast.unsent
        keeps = VERSION in broadcast.extras or (bool(missing) and missing <= broadcast.state.keys())
        return write_train_request(kind, replace(order, held=digests[broadcast.unsent], keeps=keeps), broadcast)

    def _requests(self, fit: FederatedFit, visits: Sequence[Visit], model: State) -> dict[Client, _Reply]:
        callbacks = federated_callbacks(fit.trainer)
        if not any(is_overridden("on_client_request", callback, FederatedCallback) for callback in callbacks):
            return {}
        packets = ((visit.client, write_train_request(REQUEST, self._train_request_for(visit))) for visit in visits)
        replies = self._transport.ask(REQUEST, packets, fit.server.report.round)
        return {client: self._open(reply, client, model) for client, reply in replies}

    def _read_answer(self, reply: Packet | str, client: Client, model: State) -> ClientUpdate | str:
        answer = self._open(reply, client, model)
        if isinstance(answer, tuple):
            return answer[0]
        return answer.reason if isinstance(answer, Fault) else "the client sent an answer of another kind"

    def _open(self, reply: Packet | str, client: Client, model: State) -> _Reply:
        answer = read_answer(reply, client, model)
        if isinstance(answer, Fault) and answer.reason == NOT_HERE:  # the transport then searches for another node
            self._transport.forget(client)
        if isinstance(answer, tuple) and answer[1].head is not None:
            self._client_store.heads[client] = answer[1].head
        return answer

    def _train_request_for(self, visit: Visit, asked: str = "") -> TrainRequest:
        store, client = self._client_store, visit.client
        kept, needed, head = store.kept(client), store.needed(client), store.heads.get(client)
        return TrainRequest(visit=visit, kept=kept, needed=needed, asked=asked, head=head, **self._train_request)


def is_lacking(reply: Packet | str) -> bool:
    """True if a client lacks model tensors that the server has omitted from the message."""
    return isinstance(reply, Packet) and not reply.data and NOT_HELD in reply.text


def _fill_in(update: ClientUpdate, sent: State, count: int) -> None:
    if not count:
        return
    missing = frozenset(sent.keys() - update.state.keys())
    if len(missing) != count:
        raise BadUpdate(f"the client reports {count} omitted tensors, but the update lacks {len(missing)} tensors")
    whole = update.state | {name: sent[name] for name in missing}
    update.state = {name: whole[name] for name in (*sent, *(update.state.keys() - sent.keys()))}
    update.unsent = missing


def _most_steps(visit: Visit, is_automatic: bool) -> int:
    # The server does not know a client's batches per epoch. Manual optimization may take several steps per
    # batch.
    if visit.steps is None:
        return _MOST_STEPS
    return min(visit.steps * (1 if is_automatic else _MANUAL_STEPS), _MOST_STEPS)


@dataclass(frozen=True)
class _Steps:
    """Step counts and loss scaler state reported by a client after local training."""

    num_steps: int
    of_schedulers: list[int] | None = None
    scaler: dict[str, Any] = field(default_factory=dict)


def _read_steps(said: Answer, optimizers: LocalOptimizers, most: int) -> _Steps:
    """Reads a client's step counts and loss scale after training. Invalid values raise ``BadUpdate``."""
    if said.steps > most:
        raise BadUpdate(f"the client reports {said.steps} steps, but at most {most} are possible")
    after: Any = said.after
    if after is None:
        return _Steps(said.steps)
    steps: Any = after.get("steps") if isinstance(after, dict) else None
    is_list = isinstance(steps, list) and len(steps) == len(optimizers.step_schedulers)
    if not is_list or not all(type(step) is int and 0 <= step <= most for step in steps):
        raise BadUpdate(
            f"the client's scheduler steps are invalid: got {steps!r:.100}, expected 0 to {most} for each scheduler"
        )
    start, scaler = pack_numbers(optimizers.start["scaler"]), after.get("scaler")
    if not start or not scaler:
        return _Steps(said.steps, steps)
    try:
        fitted = fit_numbers(scaler, start)
    except ValueError as error:
        raise BadUpdate(f"the client's loss scale is invalid: {error}") from error
    moved = {name for name in start if fitted[name] != start[name]} - {"scale", "_growth_tracker"}
    if moved or not _LOSS_SCALES[0] <= fitted["scale"] <= _LOSS_SCALES[1]:
        raise BadUpdate(f"the client's loss scale is invalid: {fitted}")
    return _Steps(said.steps, steps, fitted)


def _repeat_steps(optimizers: LocalOptimizers, steps: Sequence[int]) -> dict[str, Any]:
    optimizers.start_visit()
    for number in range(max(steps, default=0)):
        for scheduler, count in zip(optimizers.step_schedulers, steps, strict=True):
            if number < count:
                scheduler.step()
    final = optimizers.capture(buffers=False)
    optimizers.start_visit()
    return final


@dataclass
class RemoteVisit:
    """Server's record of one remote client's training in a round.

    ``position`` is the client's index in the round. ``asked`` is the hash of the client's request for parameter rows.
    ``steps`` are the step counts reported with the accepted update.
    """

    visit: Visit
    position: int
    asked: str = ""
    broadcast: Broadcast = field(init=False)
    steps: _Steps | None = None


class _Unreadable(Fault): ...


def _exclude(server: ServerInterface, client: Client, answer: _Reply, otherwise: str) -> None:
    if isinstance(answer, Fault) and not isinstance(answer, _Unreadable):
        server.fail(client, answer.reason)
    else:
        server.refuse(client, answer.reason if isinstance(answer, Fault) else otherwise)


def read_answer(reply: Packet | str, client: Client, model: State) -> _Reply:
    """Reads a client's reply. Returns a fault if the reply is unreadable."""
    if isinstance(reply, str):
        return Fault(client, reply)
    try:
        bad_size = find_bad_size(reply, model)
        return read_reply(reply, client) if bad_size is None else _Unreadable(client, bad_size)
    except Exception as error:  # also catches unexpected errors while reading
        return _Unreadable(client, unreadable(error))
