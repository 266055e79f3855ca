"""Simulated network between server and clients, with checks of the server's reactions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightning_fed.backends.rehearsal.world import Killed, Machine, World
from lightning_fed.backends.wire.packets import VISIT, Packet, PacketError, is_answer
from lightning_fed.backends.wire.runner import ClientRunner
from lightning_fed.backends.wire.transport import Answer, Deadline, Transport
from lightning_fed.messages import Client

_TICK = 3.0  # seconds between a change of a connection and the server's reaction, at most


@dataclass
class Message:
    """Message from the server to a client, with the times of delivery and answer.

    Times are in simulated seconds, or ``None`` before the event.

    - ``start``: number of starts of the client's process before the message was sent.
    - ``arrived_at``: the first answer, ``reply``, arrives at the server.
    - ``closed_at``: the server accepts an answer or stops waiting.
    - ``given_up_at``: the server considers the connection lost.
    - ``is_damaged``: whether the network has changed the answer.
    """

    name: str
    client: Client
    kind: str
    packet: Packet
    start: int
    sent_at: float
    arrived_at: float | None = None
    answers: list[Answer] = field(default_factory=list)
    reply: Answer | None = None
    closed_at: float | None = None
    is_damaged: bool = False
    is_fetched: bool = False
    given_up_at: float | None = None
    late_pulls: int = 0

    @property
    def is_answered(self) -> bool:
        return isinstance(self.reply, Packet) and is_answer(self.reply)

    def is_late(self, now: float, valid: float) -> bool:
        if self.closed_at is None or self.is_fetched or now - self.closed_at > valid:
            return False
        return bool(self.answers) and isinstance(self.reply, Packet)


class Site:
    """A client's simulated machine. Calls ``inspect(site, message, answer)`` for each answer."""

    def __init__(
        self,
        world: World,
        machine: Machine,
        make_runner: Callable[[], ClientRunner],
        inspect: Callable[[Site, Message, Packet], None],
    ) -> None:
        self.world, self.machine = world, machine
        self._make_runner, self._inspect = make_runner, inspect
        self._runner: ClientRunner | None = None
        self._busy_until = 0.0
        self._waiting: list[Message] = []
        self._plan_kill()

    def send(self, message: Message) -> None:
        if self.machine.random.random() < self.machine.profile.loss:
            self.world.note(self.machine.name, f"does not receive {message.name}: lost on the way")
            return
        self._transfer(message.packet, lambda: self._receive(message))

    def _receive(self, message: Message) -> None:
        machine, now = self.machine, self.world.now
        if not machine.is_up:
            self._waiting.append(message)
            return
        if now < self._busy_until:
            self.world.at(self._busy_until, lambda: self._receive(message))
            return
        self.world.note(machine.name, f"receives {message.name} ({message.kind})")
        reply: Answer | None = None
        with self.world.run_on(machine):
            machine.set_fuse(machine.profile.seconds_per_step * machine.profile.batches)
            try:
                if self._runner is None:
                    self._runner = self._make_runner()
                reply = self._runner.answer(message.kind, message.packet, {})
            except PacketError as error:
                reply = f"the network reports: {error}"
            except Killed:
                self._runner = None
            self._busy_until = end = now + self.world.offset
            if isinstance(reply, Packet):
                self._inspect(self, message, reply)
        if reply is None:
            self.world.at(end, self._kill)
        else:
            self.world.at(end, lambda: self._answer(message, reply, machine.starts))

    def _answer(self, message: Message, reply: Answer, start: int) -> None:
        if not self.machine.is_up or self.machine.starts != start:
            return
        if self.machine.random.random() < self.machine.profile.loss:
            self.world.note(self.machine.name, f"sends an answer to {message.name} that is lost on the way")
            return
        sent, reply = reply, self._damage(message, reply)
        is_damaged = reply is not sent
        self._transfer(sent, lambda: self._deliver(message, reply, start, is_damaged))

    def _transfer(self, content: Answer, arrive: Callable[[], None]) -> None:
        profile, draws = self.machine.profile, self.machine.random
        size = len(content.text) + len(content.data) * self.world.scale if isinstance(content, Packet) else 0.0
        arrival = self.machine.transfer(self.world.now, size)
        for _ in range(1 + (draws.random() < profile.duplicate)):
            late = draws.uniform(0, profile.outage) if draws.random() < profile.delay else 0.0
            self.world.at(arrival + late, arrive)

    def _deliver(self, message: Message, reply: Answer, start: int, is_damaged: bool) -> None:
        if not self.machine.is_up or self.machine.starts != start:
            self.world.note(self.machine.name, f"loses the answer to {message.name} with the process")
            return
        self.world.note(self.machine.name, f"has answered {message.name}")
        if message.arrived_at is None:
            message.arrived_at, message.reply, message.is_damaged = self.world.now, reply, is_damaged
        message.answers.append(reply)

    def _damage(self, message: Message, reply: Answer) -> Answer:
        profile, draws = self.machine.profile, self.machine.random
        if not isinstance(reply, Packet) or not reply.data:
            return reply
        if draws.random() < profile.cut:
            self.world.note(self.machine.name, f"sends an incomplete answer to {message.name}")
            return replace(reply, data=reply.data[: draws.randrange(len(reply.data))])
        if draws.random() < profile.bad:
            kind = draws.choice(("not a number", "text", "another client"))
            self.world.note(self.machine.name, f"sends an invalid answer to {message.name}: {kind}")
            if kind == "not a number":
                return replace(reply, data=b"\xff" * len(reply.data))
            if kind == "text":
                return Packet("{")
            content = json.loads(reply.text)
            content["header"]["client"] = "nobody"
            return replace(reply, text=json.dumps(content))
        return reply

    def _plan_kill(self) -> None:
        if self.machine.next_kill < float("inf"):
            self.world.at(self.machine.next_kill, self._kill)

    def _kill(self) -> None:
        if self.machine.is_up and self.world.now >= self.machine.next_kill:
            self._runner = None
            self.machine.kill(self._start)

    def _start(self) -> None:
        self._plan_kill()
        self._busy_until = self.world.now
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            # Some networks store messages until a node fetches them, others lose messages to a dead node.
            if self.machine.random.random() < 0.5:
                self.world.at(self.world.now, lambda message=message: self._receive(message))  # type: ignore[misc]


class RehearsalTransport(Transport):
    """Simulated network in which waiting only advances the simulated clock.

    Reports the server's mistakes to ``check``, such as a missed deadline.
    """

    def __init__(
        self,
        world: World,
        server: Machine,
        sites: Mapping[Client, Site],
        deadline: Deadline,
        check: Callable[[bool, str], None],
        key: Ed25519PrivateKey,
        released: set[int],
    ) -> None:
        super().__init__(deadline, max(0.1, deadline.seconds / 2000), key)
        self._world, self.server, self._sites, self._check = world, server, sites, check
        self._limit = deadline
        self._slack, self._valid = self._poll * 2 + _TICK, deadline.seconds + 3600
        self.messages: dict[str, Message] = {}
        # Validity of each answer, by round (-1 for the open round of an asynchronous rule) and client.
        self.results: dict[int, dict[Client, bool]] = {}
        self._released = released
        self._num_sent = self._num_received = 0
        self._in_memory: list[ref[Packet]] = []

    def answer_seconds(self) -> list[float]:
        return [
            message.arrived_at - message.sent_at
            for message in self.messages.values()
            if message.arrived_at is not None and message.kind == VISIT
        ]

    def await_clients(self, expected: int | Sequence[Client], patience: float) -> Sequence[Client]:
        names = list(self._sites)
        wanted = names if isinstance(expected, int) else list(expected)
        end = self._world.now + patience
        while missing := [client for client in wanted if self.connection(client) is None]:
            if self._world.now > end:
                raise TimeoutError(f"The sites {missing} did not connect within {patience:.0f} s.")
            self._world.sleep(self._poll)
        return wanted

    def push(self, client: Client, kind: str, packet: Packet, round: int) -> str | None:
        site = self._sites[client]
        if not site.machine.is_online(self._world.now):
            return None
        name = f"message {len(self.messages) + 1} of round {round + 1}"
        for old in self.messages.values():
            if old.client == client and old.closed_at is None:
                old.closed_at = self._world.now
        message = Message(name, client, kind, packet, site.machine.starts, self._world.now)
        self.messages[name] = message
        if kind == VISIT:
            self._released.add(hash(packet.data))
        self._num_sent += len(packet.data)
        site.send(message)
        return name

    def pull(self, name: str) -> Answer | None:
        message = self.messages[name]
        is_over = message.closed_at is not None and self._world.now - message.closed_at > self._valid + self._slack
        message.late_pulls += is_over
        words = f"the server asks {message.late_pulls} times for an expired answer to {name}: its memory is not bounded"
        self._check(message.late_pulls < 2, words)
        message.is_fetched = message.is_fetched or bool(message.answers)
        answer = message.answers.pop(0) if message.answers else None
        if isinstance(answer, Packet) and message.kind == VISIT:
            answer = replace(answer)  # only the server's process has this copy
            self._in_memory = [held for held in self._in_memory if held() is not None]
            if self._in_memory and not any("stays in memory" in text for _, _, text in self._world.log):  # a full disk
                self._check(False, f"the server's memory holds an earlier answer together with the answer to {name}")
            self._in_memory.append(ref(answer))
        return answer

    def connection(self, client: Client) -> int | None:
        machine = self._sites[client].machine
        return machine.starts if machine.is_online(self._world.now) else None

    def ask(
        self,
        kind: str,
        packets: Iterable[tuple[Client, Packet]],
        round: int,
        again: Callable[[Client], Packet] | None = None,
    ) -> Iterator[tuple[Client, Answer]]:
        """Calls :meth:`Transport.ask`, and checks answers, waiting times and byte counts against the simulation."""
        start = turn = self._world.now
        self.server.set_fuse(self._limit.seconds)
        before, due = self.late, sum(message.is_late(start, self._valid) for message in self.messages.values())
        for client, answer in super().ask(kind, packets, round, again):
            now = self._world.now
            mine = [one for one in self.messages.values() if one.client == client and one.sent_at >= start]
            answers = sorted(
                one.arrived_at
                for one in self.messages.values()
                if one.sent_at >= start and one.is_fetched and one.arrived_at is not None and one.is_answered
            )
            end = start + self._limit.seconds
            if self._limit.min_clients is not None and len(answers) >= self._limit.min_clients:
                end = min(end, answers[self._limit.min_clients - 1] + self._limit.rest)
            place = f"round {round + 1}, {kind} of {client!r}"
            self._check(now <= end + self._slack, f"{place} ends {now - end:.1f} s after the deadline")
            self._judge(place, mine[-1] if mine else None, answer, (turn, end), again is not None)
            for message in mine:
                message.closed_at = now
            self._num_received += len(answer.data) if isinstance(answer, Packet) else 0
            if kind == VISIT:
                is_good = isinstance(answer, Packet) and is_answer(answer) and not mine[-1].is_damaged
                self.results.setdefault(round, {})[client] = is_good
            turn = now
            yield client, answer
            del answer  # as in `Transport.ask`
        counts = (self.late - before, self.sent, self.received)
        expected = (due, self._num_sent, self._num_received)
        self._check(
            counts == expected,
            f"round {round + 1}, {kind}: late answers and bytes (down, up) are counted as {counts}, but are {expected}",
        )

    def await_any(
        self, messages: dict[Client, Any], again: Callable[[Client], Packet], seconds: float
    ) -> tuple[Client, Answer] | None:
        turn, ends = self._world.now, {client: one.sent_at + self._limit.seconds for client, one in messages.items()}
        self.server.set_fuse(seconds)
        arrival = super().await_any(messages, again, seconds)
        if arrival is not None:
            client, answer = arrival
            message = [one for one in self.messages.values() if one.client == client][-1]
            place = f"{message.name} to {client!r}"
            late = self._world.now - ends[client]
            self._check(late <= self._slack, f"{place} ends {late:.1f} s after the deadline")
            self._judge(place, message, answer, (turn, ends[client]), True)
            message.closed_at = self._world.now
            self._num_received += len(answer.data) if isinstance(answer, Packet) else 0
            is_good = isinstance(answer, Packet) and is_answer(answer) and not message.is_damaged
            self.results.setdefault(-1, {})[client] = is_good
        return arrival

    def _miss(self, message: Any, again: Callable[[Client], Packet] | None) -> Answer | None:
        answer = super()._miss(message, again)
        if answer is not None:
            self.messages[message.name].given_up_at = self._world.now
        return answer

    def _judge(
        self, place: str, message: Message | None, answer: Answer, times: tuple[float, float], can_repeat: bool
    ) -> None:
        now, (turn, end), check = self._world.now, times, self._check
        if message is not None and message.given_up_at is not None:  # the client's turn may come later
            now = message.given_up_at
        if message is None:
            check(
                answer == "the client is not connected",
                f"{place}: no message was sent, but the result is {answer!r:.60}",
            )
            return
        arrived = message.arrived_at
        if arrived is not None and arrived < now - self._slack:
            check(answer == message.reply, f"{place}: the answer of {now - arrived:.1f} s ago is lost: {answer!r:.60}")
            check(now <= max(arrived, turn) + self._slack, f"{place}: the answer waited for {now - arrived:.1f} s")
        if answer == message.reply:
            return
        machine = self._sites[message.client].machine
        lost_at, back_at = machine.lost_since(message.start, now), machine.online_since(now)
        if answer == "the client's connection was lost":
            first = lost_at
            while first is not None:  # polling may miss a short connection between two losses
                earlier, lost = machine.lost_since(message.start, first - self._slack), first
                first = earlier if earlier is not None and earlier < lost else None
            is_lost = lost_at is not None and now - lost >= self._limit.reconnect
            check(is_lost, f"{place}: given up, although the connection was lost at {lost_at}")
        else:
            check(
                isinstance(answer, str) and "did not answer" in answer and now >= end,
                f"{place}: given up {end - now:.1f} s before the deadline: {answer!r:.60}",
            )
            is_kept = lost_at is None or now - max(turn, lost_at) <= self._limit.reconnect + self._slack
            check(is_kept or back_at is not None, f"{place}: still waited for, although the connection was lost")
        is_new = back_at is not None and machine.starts != message.start and now - max(turn, back_at) > self._slack
        check(not (is_new and can_repeat), f"{place}: restarted, but not asked again")
