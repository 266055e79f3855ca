"""The virtual clock: an order by hand, draws, and the same order from a saved clock."""

import json
from dataclasses import dataclass

import pytest

from lightning_fed.algorithms import Durations
from lightning_fed.algorithms.asynchronous.arrivals import NetworkOrder, RecordedOrder, VirtualOrder
from lightning_fed.errors import OptionError
from lightning_fed.server.schedule import Schedule

SECONDS = {"ann": 1.0, "bob": 2.0, "cid": 5.0}


@dataclass
class Clients:
    """Clients with a number of batches per pass; an exception in place of a number is raised."""

    clients: object
    batches: object = 1
    round: int = 0

    def batches_per_epoch(self, client):
        if isinstance(self.batches, Exception):
            raise self.batches
        return self.batches


class Given(Durations):
    def seconds(self, seed, client, version, batches):
        return SECONDS[client] * batches


def order(schedule, clients, rounds, buffer=2, durations=None):
    virtual = VirtualOrder(durations or Durations(), buffer)
    return [virtual.arrivals(round, schedule, clients) for round in range(rounds)]


def test_an_order_by_hand():
    """All clients in flight: ann (1 s) waits at 1 for bob at 2; cid arrives at 5 from the first model."""
    arrivals = order(Schedule(), Clients(list(SECONDS)), 4, durations=Given())
    assert [[(one.seconds, one.client, one.version) for one in flush] for flush in arrivals] == [
        [(1.0, "ann", 0), (2.0, "bob", 0)],
        [(3.0, "ann", 1), (4.0, "bob", 1)],
        [(5.0, "cid", 0), (5.0, "ann", 2)],  # cid's start is earlier
        [(6.0, "bob", 2), (6.0, "ann", 3)],
    ]


def test_a_freed_place_goes_to_another_client():
    """Two of three clients in flight: after the first arrival the third client starts from the same model."""
    (first, *_) = order(Schedule(clients_per_round=2), Clients(list(SECONDS)), 1, buffer=3, durations=Given())
    assert sorted(one.client for one in first) == sorted(SECONDS)
    assert {one.version for one in first} == {0}
    starts = sorted(first, key=lambda one: one.number)
    assert starts[2].seconds == min(one.seconds for one in starts[:2]) + SECONDS[starts[2].client]


def test_the_work_of_a_visit_takes_time():
    (flush,) = order(Schedule(local_epochs=3), Clients(["ann"], batches=4), 1, buffer=1, durations=Given())
    assert flush[0].seconds == 12.0
    durations = Durations(batch=2.0, spread=0.0, exchange=7.0)
    (flush,) = order(Schedule(local_steps=5), Clients(["ann"], batches=None), 1, buffer=1, durations=durations)
    assert flush[0].seconds == 17.0


def test_durations_differ_by_client_and_by_visit():
    seconds = [Durations(spread=1.0).seconds(0, client, version, 10) for client in range(500) for version in (0, 1)]
    assert seconds[::2] == seconds[1::2]
    assert 7 < sorted(seconds)[500] < 14
    jitter = Durations(spread=0.0, jitter=0.5)
    assert len({jitter.seconds(0, "ann", version, 1) for version in range(9)}) == 9
    assert jitter.seconds(1, "ann", 0, 1) != jitter.seconds(0, "ann", 0, 1) == jitter.seconds(0, "ann", 0, 1)


def test_an_order_is_a_function_of_the_seed():
    clients, schedule = Clients(range(1_000_000)), Schedule(seed=4, clients_per_round=6)
    whole = order(schedule, clients, 8)
    assert whole != order(Schedule(seed=5, clients_per_round=6), clients, 8)
    virtual = VirtualOrder(Durations(), 2)  # first rounds out of order, then from a saved clock
    for round in (7, 3, 0):
        assert virtual.arrivals(round, schedule, clients) == whole[round]
    for round in range(4):
        virtual.arrivals(round, schedule, clients)
        virtual.versions(round)
    virtual.versions(4)
    resumed = VirtualOrder(Durations(), 2)
    resumed.load_state_dict(json.loads(json.dumps(virtual.state_dict())))
    slower = Clients(range(1_000_000), batches=3)  # reloaded data: the visits in flight keep their times
    assert resumed.arrivals(4, schedule, slower) == virtual.arrivals(4, schedule, slower)
    assert [resumed.arrivals(round, schedule, clients) for round in range(4, 8)] == whole[4:]


def test_a_client_is_in_flight_once():
    in_flight = 5
    flushes = order(Schedule(clients_per_round=in_flight), Clients(list("abcdefgh")), 40, 3, Durations(spread=0.5))
    arrivals = [(place, one) for place, flush in enumerate(flushes) for one in flush]
    for place, one in arrivals:
        assert place >= one.version
        others = [other for at, other in arrivals if other.client == one.client and other is not one and at >= place]
        assert all(other.version > place for other in others)  # a client starts again after the flush
    assert {one.client for _, one in arrivals} == set("abcdefgh")
    assert [one.seconds for _, one in arrivals] == sorted(one.seconds for _, one in arrivals)
    assert sorted(one.number for _, one in arrivals)[:100] == sorted({one.number for _, one in arrivals})[:100]


def test_visits_on_a_network_survive_restarts_and_failed_rounds():
    names, schedule, order = list("abcde"), Schedule(seed=4, clients_per_round=3), NetworkOrder()
    before = json.loads(json.dumps(order.state_dict()))
    started = order.start(schedule, names, ["a"], 0)
    assert len(started) == 3
    assert "a" not in started
    order.load_state_dict(before)  # after a failed round: the clients still train
    assert order.flying == dict.fromkeys(started, 0)
    del order.flying[started[1]]
    resumed = NetworkOrder()
    resumed.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert (resumed.flying, list(resumed.versions(7))) == (order.flying, [0, 0])
    assert resumed.start(schedule, names, started, 7) == order.start(schedule, names, started, 7)
    assert sorted(resumed.flying.values()) == [0, 0, 7]


def test_faults():
    with pytest.raises(OptionError, match=r"Expected `buffer` to be at most the number of clients \(3\), but got 4"):
        order(Schedule(), Clients(list(SECONDS)), 1, buffer=4)
    with pytest.raises(
        OptionError, match="Expected `local_steps` to be set, because the loader of client 'ann' has no length"
    ):
        order(Schedule(), Clients(["ann"], batches=None), 1, buffer=1)
    (flush,) = order(Schedule(), Clients(["ann"], batches=OSError("no disk")), 1, buffer=1)
    assert flush[0].client == "ann"  # the round excludes the client
    with pytest.raises(ValueError, match="Expected `spread` to be at least 0 and finite, but got -1"):
        Durations(spread=-1)


def test_a_recorded_order(tmp_path):
    path = tmp_path / "order"
    path.write_text('[0, "ann", 0, "x"]\n[0, 7, 0, "y"]\n[1, "bob", 0, "z"]\n[1, "an')  # a kill cut the last line
    recorded = RecordedOrder(str(path))
    assert [(one.client, one.version) for one in recorded.arrivals(0, Schedule(), None)] == [("ann", 0), (7, 0)]
    assert [(one.client, one.version) for one in recorded.arrivals(1, Schedule(), None)] == [("bob", 0)]
    assert recorded.versions(1) == {0}
    path.write_text('[0, "ann", 0, "x"]\n[2, "bob", 0, "z"]\n')
    assert RecordedOrder(str(path)).arrivals(1, Schedule(), None) == []  # a round without an update
    assert recorded.versions(2) == set()
    with pytest.raises(OptionError, match=r"Expected `replay` to contain round 3, but .* ends with round 2"):
        recorded.arrivals(2, Schedule(), None)
