"""Waiting for clients on any network: deadlines, quorum, lost connections, late answers."""

import errno
import io
import itertools
import json
import math
import weakref

import pytest

from lightning_fed.backends.wire import transport
from lightning_fed.backends.wire.packets import Fault, Packet, write_fault
from lightning_fed.backends.wire.transport import Deadline, Transport


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Network(Transport):
    """Answers arrive at given times; connection names change over time.

    Args:
        clock: The clock.
        answers: Seconds until the answer, by client.
        connections: Pairs of time and name of the connection from then on, by client.
    """

    def __init__(self, clock, deadline, answers, connections=None):
        super().__init__(deadline, poll=0.5)
        self.clock, self.answers, self.connections = clock, answers, connections or {}
        self.messages, self.names, self.refusing = {}, itertools.count(), ()

    def await_clients(self, expected, patience):
        return expected

    def push(self, client, kind, packet, round):
        connection = self.connection(client)
        if connection is None:
            return None
        name = f"message-{next(self.names)}"
        self.messages[name] = client, self.clock.now + self.answers[client], packet, connection
        return name

    def pull(self, name):
        client, due, packet, connection = self.messages[name]
        if self.clock.now < due or self.connection(client) != connection:
            return None
        if client in self.refusing:
            return write_fault(Fault(client, "no"))
        return Packet(json.dumps({"kind": f"{client} to {packet.text}"}), b"1234")

    def connection(self, client):
        changes = self.connections.get(client, [(0, "here")])
        return [name for since, name in changes if since <= self.clock.now][-1]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)
    return clock


def ask(network, clients, round=0, again=None):
    packets = [(client, Packet(f"round {round}")) for client in clients]
    answers = network.ask("train", packets, round, again)
    return {
        client: json.loads(answer.text)["kind"] if isinstance(answer, Packet) else answer for client, answer in answers
    }


def test_a_round_waits_for_all_until_the_deadline(clock):
    network = Network(clock, 60, {"ann": 50, "bob": 70, "cid": 1})
    assert ask(network, ["ann", "bob", "cid"]) == {
        "ann": "ann to round 0", "bob": "the client did not answer within 60 s", "cid": "cid to round 0",
    }  # fmt: skip
    assert 60 <= clock.now < 62
    assert network.received == 8


def test_with_enough_answers_the_others_have_the_rest(clock):
    """Even if the first client is the slowest: answers are still used in client order."""
    network = Network(clock, Deadline(3600, min_clients=2, rest=20), {"ann": 500, "bob": 30, "cid": 10, "dan": 45})
    answers = ask(network, ["ann", "bob", "cid", "dan"])
    assert list(answers) == ["ann", "bob", "cid", "dan"]
    assert answers["ann"] == "the client did not answer within 20 s after 2 other answers"
    assert [answers[name] for name in ("bob", "cid", "dan")] == [f"{name} to round 0" for name in ("bob", "cid", "dan")]
    assert 50 <= clock.now < 52


def test_refusals_are_no_answers_that_others_are_cut_off_for(clock):
    network = Network(clock, Deadline(3600, min_clients=2), {"ann": 1, "bob": 1, "cid": 30, "dan": 40})
    network.refusing = ("ann", "bob")
    answers = ask(network, ["ann", "bob", "cid", "dan"])
    assert [answers[name] for name in ("ann", "bob", "cid")] == ["fault", "fault", "cid to round 0"]
    assert answers["dan"] == "dan to round 0"


def test_late_answers_are_counted_and_not_used(clock, caplog):
    network = Network(clock, 60, {"ann": 100, "bob": 1})
    ask(network, ["ann", "bob"])
    clock.now = 200
    network.answers["ann"] = 1
    assert ask(network, ["ann"], round=1) == {"ann": "ann to round 1"}
    assert network.late == 1
    assert "Dropped the late answer of client 'ann' to round 1." in caplog.text
    ask(network, ["ann"], round=2)
    assert network.late == 1


def test_a_message_without_any_answer_is_forgotten(clock):
    """Networks may lose messages in every round of a long run: the server must not poll all of them for ever."""
    network = Network(clock, 60, {"ann": math.inf})
    pulled, pull = [], network.pull
    network.pull = lambda name: pulled.append(name) or pull(name)
    for round in range(3):
        ask(network, ["ann"], round)
        clock.now += 1800
    pulled.clear()
    ask(network, [], 3)
    assert pulled == ["message-1", "message-2"]
    clock.now += 4000
    ask(network, [], 4)
    pulled.clear()
    ask(network, [], 5)
    assert not pulled


def test_bytes_of_unsent_messages_are_not_counted(clock):
    network = Network(clock, 60, {"ann": 1, "bob": 1}, {"bob": [(0, None)]})
    list(network.ask("train", [(client, Packet("", b"1234")) for client in ("ann", "bob")], 0))
    assert network.sent == 4


def test_a_connection_that_is_back_goes_on_with_its_message(clock):
    """A cut link does not end the visit; the finished answer is delivered later."""
    network = Network(clock, 3600, {"ann": 20}, {"ann": [(0, "a"), (10, None), (60, "a")]})
    assert ask(network, ["ann"]) == {"ann": "ann to round 0"}
    assert 60 <= clock.now < 63
    assert len(network.messages) == 1


def test_a_connection_that_stays_away_is_given_up(clock):
    network = Network(clock, 3600, {"ann": 20}, {"ann": [(0, "a"), (10, None)]})
    assert ask(network, ["ann"]) == {"ann": "the client's connection was lost"}
    assert 70 <= clock.now < 75


def test_the_answer_of_a_connection_that_was_given_up_is_late(clock):
    network = Network(clock, 3600, {"ann": 20}, {"ann": [(0, "a"), (10, None), (90, "a")]})
    assert ask(network, ["ann"]) == {"ann": "the client's connection was lost"}
    clock.now = 100
    ask(network, [], round=1)
    assert network.late == 1


def test_a_client_that_was_started_again_is_asked_again(clock):
    connections = {"ann": [(0, "a"), (10, None), (30, "b")]}
    network = Network(clock, 3600, {"ann": 20}, connections)
    assert ask(network, ["ann"], again=lambda client: Packet("the same")) == {"ann": "ann to the same"}
    assert 50 <= clock.now < 53
    clock.now = 0
    assert ask(Network(clock, 3600, {"ann": 20}, connections), ["ann"]) == {"ann": "the client's connection was lost"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0}, "`seconds` above 0"),
        ({"rest": -1}, "`rest` and `reconnect` of at least 0"),
        ({"min_clients": 0}, "min_clients"),
    ],
)
def test_deadlines_that_there_are_not(options, message):
    with pytest.raises(ValueError, match=message):
        Deadline(**options)


class Counting(Network):
    def __init__(self, clock):
        super().__init__(clock, 60, {"ann": 1, "bob": 2})
        self.packets, self.alive = [], []

    def signed(self, kind, packet):
        self.packets.append(weakref.ref(packet))
        return Packet("")

    def pull(self, name):
        self.alive.append(sum(packet() is not None for packet in self.packets))
        return super().pull(name)


def test_no_other_packet_is_held_while_an_answer_is_waited_for(clock):
    network = Counting(clock)
    packets = ((client, Packet("", b"1234")) for client in ("ann", "bob"))
    for _, answer in network.ask("train", packets, 0):
        network.packets.append(weakref.ref(answer))
        del answer
    assert set(network.alive) == {0}


class FullFile(io.BytesIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("opened", "is_read"), [(io.BytesIO, True), (io.BytesIO, False), (FullFile, True)])
def test_an_answer_that_waits_leaves_no_file_open(opened, is_read, monkeypatch):
    files, packet = [], Packet("text", b"1234")
    monkeypatch.setattr(transport.tempfile, "TemporaryFile", lambda: files.append(opened()) or files[-1])
    read = transport.put_aside(packet)
    if is_read:
        assert read() == packet
    else:
        del read
    assert [file.closed for file in files] == [True]
