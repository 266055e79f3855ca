"""Random search: for any input, message readers return a message or raise a packet error.

``FUZZ_SECONDS=600 pytest tests/backends/wire/test_packet_fuzz.py`` searches for 600 seconds.
"""

import json
import os
import time

import pytest
import torch

from lightning_fed.rule import RoundInfo
from lightning_fed.steps.chain import Chain

pytest.importorskip("flwr")
pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fed.algorithms import FedAvg
from lightning_fed.backends.wire.clients_for_server import read_answer
from lightning_fed.backends.wire.packets import (
    VERSION,
    Answer,
    Fault,
    Packet,
    PacketError,
    TrainRequest,
    read_packet,
    read_reply,
    read_train_request,
    write_fault,
    write_request,
    write_train_request,
    write_update,
)
from lightning_fed.backends.wire.secure_sum_packets import (
    REPLY_BYTES,
    SumRequest,
    read_sum_reply,
    read_sum_request,
    write_sum_reply,
    write_sum_request,
)
from lightning_fed.backends.wire.secure_sum_protocol import PUBLIC, SEALED
from lightning_fed.batch_norm.pooling import find_bad_statistics
from lightning_fed.messages import Broadcast, ClientUpdate, Request
from lightning_fed.server.schedule import Visit, count_visit_batches
from lightning_fed.server.server import Server

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
FEW = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
MANY = settings(max_examples=3000, deadline=None, database=None, suppress_health_check=list(HealthCheck))

MODEL = {"w": torch.ones(2, 3), "steps": torch.tensor(3), "1.running_mean": torch.zeros(2)}
UPDATE = ClientUpdate("a", 5, MODEL, {"batch_norm:1:mean": torch.zeros(2)}, {"loss": 0.1})
REPLIES = [
    write_update(UPDATE, Answer(3, {"steps": [3], "scaler": {"scale": 2.0}}, True)),
    write_request(Request("a", {"w": torch.tensor([0, 1])}, {"x": torch.zeros(1)})),
    write_fault(Fault("a", "the client's data are gone")),
]
ORDER = write_train_request(
    "train",
    TrainRequest(
        "0a",
        Visit("a", 3, 7, 2),
        1,
        0,
        7,
        "digest",
        {"groups": [[{"lr": 0.1}]], "schedulers": [{}]},
        "x",
        peers=["a", 1],
    ),
    Broadcast(3, MODEL),
)

SUMS = [
    SumRequest("keys", "0a", 3, "a", 2),
    SumRequest("shares", "0a", 3, "a", 2, ("a", 1, "b"), (), (b"x" * PUBLIC,) * 3),
    SumRequest("open", "0a", 3, "a", 2, ("a", 1, "b"), (), (b"y" * SEALED,) * 3),
    SumRequest("unmask", "0a", 3, "a", 2, ("a", 1, "b"), (True, False, True)),
]
SUM_REPLIES = [
    write_sum_reply(request, (b"z" * REPLY_BYTES[request.stage],) * (len(request.peers) or 1)) for request in SUMS
]

numbers = st.one_of(
    st.integers(),
    st.integers(-3, 6),
    st.sampled_from([2**31, 2**47, 2**48, 2**63, 2**64, -(2**63), 10**400, 1e308, float("nan"), float("inf"), -0.0]),
    st.floats(),
)
CHARACTERS = st.characters(exclude_categories=["Cs"])  # the default set, which hypothesis computes in seconds
texts = st.one_of(
    st.text(CHARACTERS, max_size=8),
    st.sampled_from(["float32", "int64", "bool", "quint8", "w", "a", "state", "extras", "\ud800", "update", "fault"]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=6,
)


def paths(value, path=()):
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from paths(part, (*path, key))


@st.composite
def changed(draw, packets):
    """A valid message with some header fields changed, removed or doubled, and some bytes changed."""
    packet = draw(st.sampled_from(packets))
    said, data = json.loads(packet.text), packet.data
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(paths(said))[1:]))
        owner = said
        for key in path[:-1]:
            owner = owner[key]
        how = draw(st.sampled_from(["replace", "remove", "double"]))
        if how == "replace":
            owner[path[-1]] = draw(values)
        elif how == "remove":
            del owner[path[-1]]
        elif isinstance(owner, list):
            owner.append(owner[path[-1]])
        else:
            owner[draw(texts)] = owner[path[-1]]
        if not list(paths(said))[1:]:
            break
    change = draw(st.sampled_from(["none", "cut", "longer", "other"]))
    if change == "cut":
        data = data[: draw(st.integers(0, len(data)))]
    elif change == "longer":
        data = data + draw(st.binary(max_size=40))
    elif change == "other":
        data = draw(st.binary(max_size=80))
    return Packet(json.dumps(said), data)


anything = st.one_of(
    st.builds(Packet, st.text(CHARACTERS, max_size=200), st.binary(max_size=50)),
    st.builds(lambda value, data: Packet(json.dumps(value), data), values, st.binary(max_size=50)),
    st.builds(
        lambda kind, header, table, data: Packet(
            json.dumps({"version": VERSION, "kind": kind, "header": header, "tensors": table}), data
        ),
        st.sampled_from(["update", "request", "fault", "train", "sum"]), values, values, st.binary(max_size=50),
    ),
)  # fmt: skip


def search(check, strategy):
    """Runs a few fixed examples, or searches for `FUZZ_SECONDS`."""
    if not SECONDS:
        FEW(given(strategy)(check))()
    end = time.monotonic() + SECONDS / 5  # five searches share the time
    while time.monotonic() < end:
        MANY(given(strategy)(check))()


def read(reader, packet, *arguments):
    """The reader's message; ``None`` after a packet error with a printable reason in one line."""
    try:
        return reader(packet, *arguments)
    except PacketError as error:
        reason = str(error)
    assert reason.isprintable()
    assert len(reason) < 600
    return None


def check_reply(packet):
    reply = read(read_reply, packet, "a")
    if reply is None:
        return
    assert isinstance(read_answer(packet, "a", MODEL), type(reply))
    if isinstance(reply, Fault | Request):
        return
    update, _ = reply
    server = Server(Chain(FedAvg()))
    server.start_round(RoundInfo(0), MODEL)
    server.prepare("a")
    assert server.count(update)
    server.accept(update)
    state = server.finish_round()
    assert state is None or all(bool(value.isfinite().all()) for value in state.values())
    find_bad_statistics(update.extras, MODEL)


def check_order(packet):
    order = read(read_train_request, packet, "train")
    if order is None:
        return
    train_request, broadcast = order
    assert count_visit_batches(train_request.visit, 5) >= 1
    assert all(isinstance(value, torch.Tensor) for value in (broadcast.state | broadcast.extras).values())


def check_hello(packet):
    message = read(read_packet, packet, "update", "hello")
    assert message is None or isinstance(message[0], dict)


def check_sum_request(packet):
    request = read(read_sum_request, packet)
    if request is None:
        return
    assert len(request.rows) == len(request.peers) == len(set(request.peers))
    assert len(request.survivors) in (0, len(request.peers))
    assert all(type(row) is bytes for row in request.rows)


def check_sum_reply(packet):
    for request in SUMS:
        reply = read(read_sum_reply, packet, request)
        assert reply is None or isinstance(reply, Fault) or all(type(row) is bytes for row in reply)


@pytest.mark.slow
def test_requests_of_secure_sums():
    search(check_sum_request, st.one_of(changed([write_sum_request(request) for request in SUMS]), anything))


def test_replies_of_secure_sums():
    search(check_sum_reply, st.one_of(changed([*SUM_REPLIES, REPLIES[2]]), anything))


def test_replies():
    search(check_reply, st.one_of(changed(REPLIES), anything))


def test_orders():
    search(check_order, st.one_of(changed([ORDER]), anything))


def test_messages():
    search(check_hello, anything)
