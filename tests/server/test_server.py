"""The server: prepares, counts, checks, aggregates. `test_faults.py` covers invalid updates."""

import pytest
import torch

from lightning_fed import ClientUpdate
from lightning_fed.algorithms import FedAvg, FeSEM
from lightning_fed.errors import BadUpdate
from lightning_fed.messages import Broadcast, Request, message_bytes
from lightning_fed.model.entries import norm
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import RoundReport, Server
from lightning_fed.steps.chain import Chain
from lightning_fed.steps.update_step import UpdateStep


def state(value=1.0):
    return {"w": torch.full((2,), value), "steps": torch.tensor(3)}


@pytest.fixture
def server():
    server = Server(Chain(FedAvg()))
    server.start_round(RoundInfo(5), state())
    return server


def send(server, client, shape=None, request=None):
    """Sends a message as a round does: callbacks may change the message before counting."""
    broadcast = server.prepare(client, request)
    if shape is not None:
        shape(broadcast)
    server.sent(client, broadcast)
    return broadcast


def receive(server, update, unpack=None):
    """Receives an update as a round does: callbacks may change the update after counting and before checks."""
    if not server.count(update):
        return False
    if unpack is not None:
        unpack(update)
    return server.accept(update)


def answer(client, value, samples=1, **extras):
    return ClientUpdate(client, samples, state(value), extras=extras)


def test_a_round(server):
    messages = [send(server, client) for client in ("a", "b")]
    assert [message.round for message in messages] == [5, 5]
    assert all(torch.equal(message.state["w"], torch.ones(2)) for message in messages)
    assert receive(server, answer("b", 3.0, samples=3))
    assert receive(server, answer("a", 0.0, samples=1))
    aggregate = server.finish_round()
    assert aggregate["w"].tolist() == [2.25, 2.25]
    assert aggregate["steps"].dtype == torch.int64
    assert server.report.round == 5
    assert server.report.received == {"b": 3, "a": 1}
    assert server.report.failed == {}


def test_the_order_of_answers_does_not_matter(server):
    results = []
    for order in ("abc", "cab"):
        server.start_round(RoundInfo(0), state())
        for client in "abc":
            send(server, client)
        for client in order:
            receive(server, answer(client, {"a": 0.1, "b": 0.7, "c": -3.3}[client], {"a": 5, "b": 1, "c": 2}[client]))
        results.append(server.finish_round())
    assert torch.equal(results[0]["w"], results[1]["w"])


def test_bytes_are_those_of_the_messages(server):
    size = 2 * 4 + 8

    def shape(broadcast):
        broadcast.extras["classes"] = torch.zeros(10, dtype=torch.int64)

    send(server, "a")
    assert server.report.down_bytes == size
    send(server, "b", shape)
    assert server.report.down_bytes == 2 * size + 80
    receive(server, answer("a", 1.0, variates=torch.zeros(5)))
    assert server.report.up_bytes == size + 20
    receive(server, answer("b", float("nan")))
    assert server.report.up_bytes == 2 * size + 20  # already sent
    receive(server, answer("stranger", 1.0))
    assert server.report.up_bytes == 3 * size + 20


def test_counting_comes_before_unpacking(server):
    """A compressed message is counted in compressed form and checked in expanded form."""
    send(server, "a")
    packed = ClientUpdate("a", 1, {}, extras={"half": torch.full((2,), 2.0, dtype=torch.float16)})

    def unpack(update):
        half = update.extras.pop("half")
        update.state |= {"w": half.float(), "steps": torch.tensor(3)}

    assert receive(server, packed, unpack)
    assert server.report.up_bytes == 4
    assert server.finish_round()["w"].tolist() == [2.0, 2.0]


def test_a_shaped_message_is_answered_with_what_the_rule_expects(server):
    """A client with two rows answers with all entries after unpacking: the rule does not see the packing."""

    def slice_rows(broadcast):
        broadcast.state["w"] = broadcast.state["w"][:1]

    assert message_bytes(send(server, "a", slice_rows)) < message_bytes(send(server, "c"))
    assert send(server, "b").state["w"].shape == (2,)  # other clients receive all rows
    few = answer("a", 1.0)
    few.state["w"] = few.state["w"][:1]
    assert not receive(server, few)
    assert server.report.failed["a"] == "entry 'w' has shape (1,) instead of (2,)"
    assert receive(server, answer("c", 1.0), lambda update: None)
    assert receive(server, answer("b", 1.0))


def test_unpacking_errors_are_not_the_clients(server):
    send(server, "a")

    def unpack(update):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        receive(server, answer("a", 1.0), unpack)


def test_a_round_forgets_the_one_before(server):
    send(server, "late")
    send(server, "a")
    receive(server, ClientUpdate("a", 1, state(2.0), metrics={"loss": 1.0}))
    report = server.report
    server.start_round(RoundInfo(6), state())
    assert server.report == RoundReport(6)
    assert report.received == {"a": 1}
    assert not receive(server, answer("late", 9.0))  # from the previous round
    assert "not requested" in server.report.failed["late"]
    assert server.finish_round() is None


def test_metrics_are_kept_by_client(server):
    send(server, "a")
    receive(server, ClientUpdate("a", 1, state(), metrics={"loss": 0.5}))
    assert server.report.metrics == {"a": {"loss": 0.5}}


@pytest.mark.parametrize(("good", "changes"), [(0, False), (1, False), (2, True), (3, True)])
def test_min_clients(good, changes):
    server = Server(Chain(FedAvg()), min_clients=2)
    server.start_round(RoundInfo(0), state())
    for client in range(3):
        send(server, client)
        receive(server, answer(client, 2.0 if client < good else float("inf")))
    aggregate = server.finish_round()
    assert (aggregate is not None) == changes
    assert len(server.report.received) == good
    assert len(server.report.failed) == 3 - good


def test_failing_by_hand(server, caplog):
    send(server, "a")
    assert server.fail("a", "its battery is empty") is False
    assert not receive(server, answer("a", 1.0))
    assert "Round 6: client 'a' is excluded: its battery is empty." in caplog.messages


def test_nobody_is_missing_twice(server):
    send(server, "a")
    send(server, "b")
    receive(server, answer("a", 1.0))
    server.fail("b", "it went away")
    server.finish_round()
    assert server.report.failed == {"b": "it went away"}


def test_norm():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor(4.0), torch.zeros(0), torch.tensor([[12]], dtype=torch.int64)]
    assert norm(tensors).item() == 13.0
    half = torch.full((100,), 300.0, dtype=torch.float16)  # the square overflows
    assert norm([half]).item() == pytest.approx(3000.0)


class Counting(FedAvg):
    """Counts its rounds, and aggregates large values to an implausible model."""

    def __init__(self):
        super().__init__()
        self.rounds = 0

    def aggregate(self):
        self.rounds += 1
        return {name: value * 1e9 for name, value in super().aggregate().items()}

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]


def test_a_round_that_comes_to_nothing_is_taken_back():
    server = Server(Chain(Counting()))
    for number, value in enumerate((1.0, 5e9, 2.0)):
        server.start_round(RoundInfo(number), {"w": torch.zeros(1)})
        assert server.state_before == {"rule": {"rounds": min(number, 1)}, "steps": {}}
        send(server, "a")
        receive(server, ClientUpdate("a", 1, {"w": torch.tensor([value])}))
        state = server.finish_round()
        assert (state is None) == (number == 1)
    assert server.rule.rounds == 2
    server.abandon_round()
    assert server.rule.rounds == 1


def test_a_client_is_sent_the_rows_that_it_asked_for():
    server = Server(Chain(FedAvg()))
    table = torch.arange(10.0).reshape(5, 2)
    server.start_round(RoundInfo(0), {"table": table, "w": torch.zeros(2)})
    rows = torch.tensor([1, 4])
    message = send(server, "a", request=Request("a", {"table": rows}))
    assert torch.equal(message.state["table"], table[rows])
    assert torch.equal(message.rows["table"], rows)
    assert server.report.up_bytes == 16  # the request: two integers
    assert (
        server.report.down_bytes == message_bytes(message) == 16 + 8
    )  # the rows and `w`; the client knows the row numbers
    seen = []
    update = ClientUpdate("a", 1, {"table": torch.ones(2, 2), "w": torch.ones(2)})
    assert receive(server, update, lambda answered: seen.append(answered.rows["table"]))
    assert server.report.up_bytes == 16 + 24
    assert torch.equal(seen[0], rows)  # hooks see the rows too
    new = server.finish_round()
    assert torch.equal(new["table"][rows], torch.ones(2, 2))
    assert torch.equal(new["table"][[0, 2, 3]], table[[0, 2, 3]])


def test_a_rule_answers_what_a_client_says_of_itself():
    """The client's request counts in any case."""

    class Brief(FedAvg):
        resizes = True

        def broadcast(self, request):
            message = super().broadcast(request)
            return Broadcast(message.round, {n: v for n, v in message.state.items() if n not in request.extras})

        def expected(self, broadcast):
            return super().broadcast(Request("")).state

    for rule, size in ((Brief(), 8), (FedAvg(), 20)):
        server = Server(Chain(rule))
        server.start_round(RoundInfo(0), {"table": torch.zeros(3), "w": torch.zeros(2)})
        request = Request("a", extras={"table": torch.tensor(1)})
        assert message_bytes(send(server, "a", request=request)) == size
        assert message_bytes(send(server, "b")) == 20
        assert (server.report.up_bytes, server.report.down_bytes) == (8, size + 20)
        assert receive(server, ClientUpdate("a", 1, {"table": torch.ones(3), "w": torch.ones(2)}))


def test_rows_that_were_not_asked_for_cannot_be_written():
    server = Server(Chain(FedAvg()))
    server.start_round(RoundInfo(0), {"table": torch.zeros(3, 1)})
    send(server, "a", request=Request("a", {"table": torch.tensor([0])}))
    receive(server, ClientUpdate("a", 1, {"table": torch.ones(1, 1)}, rows={"table": torch.tensor([2])}))
    assert server.finish_round()["table"].flatten().tolist() == [1, 0, 0]
    server.start_round(RoundInfo(1), {"table": torch.zeros(3, 1)})
    send(server, "b")
    assert receive(server, ClientUpdate("b", 1, {"table": torch.ones(3, 1)}, rows={"table": torch.tensor([2])}))
    assert server.finish_round()["table"].flatten().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"head": torch.tensor([0])}, "requests rows of 'head', but the entry is not sent"),
        ({"table": torch.tensor([1, 0])}, "requests rows of 'table', but the row indices are not strictly increasing"),
    ],
)
def test_a_request_that_does_not_fit(rows, message):
    server = Server(Chain(FedAvg()))
    server.start_round(RoundInfo(0), {"table": torch.zeros(3, 1)})
    with pytest.raises(ValueError, match=message):
        send(server, "a", request=Request("a", rows))


def test_a_rule_that_needs_whole_entries():
    server = Server(Chain(FeSEM(num_centers=2)))
    server.start_round(RoundInfo(0), {"table": torch.zeros(3, 1)})
    with pytest.raises(ValueError, match=r"some rows of \['table'\], but FeSEM needs whole entries"):
        send(server, "a", request=Request("a", {"table": torch.tensor([0])}))


def test_an_update_that_the_rule_cannot_use():
    """Only the rule knows the required extras; the client is excluded, and the round continues."""

    class Picky(FedAvg):
        def receive(self, update):
            if "votes" not in update.extras:
                raise BadUpdate("the client sent no votes")
            super().receive(update)

    server = Server(Chain(Picky()))
    server.start_round(RoundInfo(0), state())
    for client in ("a", "b"):
        send(server, client)
    assert not receive(server, answer("a", 5.0))
    assert receive(server, answer("b", 2.0, votes=torch.ones(1)))
    assert server.report.failed == {"a": "the client sent no votes"}
    assert server.finish_round()["w"].tolist() == [2.0, 2.0]


class Announces(UpdateStep):
    def on_send(self, client, broadcast):
        broadcast.extras["announced"] = torch.zeros(1)


def test_steps_add_extras_to_messages_of_visits_only():
    start = state()
    server = Server(Chain(FedAvg(), [Announces()]))
    server.start_round(RoundInfo(0), start)
    visit, measurement = server.prepare("a"), Broadcast(0, start)
    server.sent("a", visit)
    server.sent("b", measurement)
    assert "announced" in visit.extras
    assert not measurement.extras
