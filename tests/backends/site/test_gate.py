"""A server without permission learns nothing, neither from an error text nor from a count."""

import json
import struct
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

from lightning_fed import Federation
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.transport import from_records
from lightning_fed.backends.site import gate, signatures
from lightning_fed.backends.site.gate import NOT_ANSWERED
from lightning_fed.backends.site.record import HEAD_FILE
from lightning_fed.backends.site.signatures import digest_order, sign
from lightning_fed.backends.wire.packets import NOT_HELD, Packet, PacketError, write_packet
from lightning_fed.messages import digest
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import UniformWeights
from tests import models
from tests.backends.flower.halves import OPTIONS, SIZES, clients_of, on_flower
from tests.backends.site.test_policy import lines_of, make_key, write_policy
from tests.generators import same_random_numbers

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

LARGEST = 3.4e38


class Counted(models.Module):
    steps = 0

    def training_step(self, batch, batch_idx):
        Counted.steps += 1
        return super().training_step(batch, batch_idx)


def linear():
    torch.manual_seed(0)
    return Counted(nn.Linear(6, 3), models.momentum)


def data_with(largest):
    """Clients with a first feature of at most `largest`, reached once."""
    data = models.vectors(SIZES)
    for inputs, _ in data.values():
        inputs[:, 0] = inputs[:, 0].clamp(max=largest)
        inputs[0, 0] = largest
    return data


def in_sum():
    return Federation(steps=[UniformWeights(), SecureSum(5.0)], seed=3)


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    """A good order for the client `ann`."""
    orders = []

    def listen(node, message, content):
        if message.metadata.message_type == "train":
            orders.append(from_records(message.content))
        return [content]

    with same_random_numbers():
        on_flower(tmp_path_factory.mktemp("run"), linear, models.vectors(SIZES), Federation, 1, change=listen)
    return orders[0]


def comparing(order, threshold):
    """The same order with another model: the result overflows for a first feature above the threshold."""
    values = [0.0] * 21
    values[0], values[6] = LARGEST / threshold, -LARGEST / threshold
    return Packet(order.text, struct.pack("21f", *values))


def ask(folder, largest, orders):
    runner = client_app(Federation(), linear, clients_of(data_with(largest)), OPTIONS, store=folder).runner
    Counted.steps = 0
    return [runner.answer("train", packet, {}) for packet in orders]


def test_a_policy_that_allows_nothing_does_not_train_and_says_nothing(order, tmp_path):
    """A binary search for the largest feature value always sees the same text."""
    thresholds = [2.0**exponent for exponent in range(-2, 10)]
    texts = {}
    for largest in (0.5, 7.25):
        folder = tmp_path / str(largest)
        write_policy(folder, entries=[], rounds_per_day=100)
        replies = ask(folder, largest, [comparing(order, threshold) for threshold in thresholds])
        texts[largest] = [json.loads(reply.text)["header"]["reason"] for reply in replies]
        assert Counted.steps == 0
    assert texts[0.5] == texts[7.25] == [NOT_ANSWERED] * len(thresholds)


def test_what_would_not_leave_is_not_trained(order, tmp_path, caplog):
    """The names of the entries in an update are known before a visit."""
    write_policy(tmp_path, entries=["net.bias"])
    (reply,) = ask(tmp_path, 1.0, [order])
    assert json.loads(reply.text)["header"]["reason"] == NOT_ANSWERED
    assert "does not allow 'net.weight' in entries" in caplog.text
    assert Counted.steps == 0
    assert [line["rule"].get("refused") for line in lines_of(tmp_path)] == [None, "entries"]
    write_policy(tmp_path, entries=["net.*"])
    (reply,) = ask(tmp_path, 1.0, [order])
    assert json.loads(reply.text)["kind"] == "update"
    assert Counted.steps > 0


def test_a_model_near_the_largest_number_is_not_trained(order, tmp_path, caplog):
    """Even with allowed entries, an overflow would compare an input with the server's number."""
    write_policy(tmp_path)
    for largest in (0.5, 7.25):
        (reply,) = ask(tmp_path, largest, [comparing(order, 2.0)])
        assert json.loads(reply.text)["header"]["reason"] == NOT_ANSWERED
        assert Counted.steps == 0
    assert "root mean square" in caplog.text


def test_orders_count_whatever_becomes_of_them(order, tmp_path, caplog):
    """The second order of a day does not train, although no update has left yet."""
    write_policy(tmp_path, rounds_per_day=1)
    broken = Packet(order.text, struct.pack("21f", *[1e9] * 21))  # plausible, but overflows with these inputs
    replies = ask(tmp_path, 1e30, [broken, order])
    assert [json.loads(reply.text)["header"]["reason"] for reply in replies] == [NOT_ANSWERED] * 2
    steps = Counted.steps
    assert steps > 0
    assert "allows 1 rounds per day" in caplog.text
    events = [(line["event"], line["rule"].get("refused")) for line in lines_of(tmp_path)]
    assert events == [("order", None), ("answer", None), ("answer", "rounds_per_day")]


def test_a_missing_entry_is_no_question_about_the_data(tmp_path):
    """A server leaves a counter of batches out of the message and sends the digest of a guess."""
    orders = []

    def listen(node, message, content):
        if message.metadata.message_type == "train":
            orders.append(from_records(message.content))
        return [content]

    def module():
        return models.Module(models.norm_mlp(), models.momentum)

    data = models.vectors(SIZES)
    on_flower(tmp_path / "run", module, data, lambda: Federation(batch_norm="average"), 1, change=listen)
    runner = client_app(
        Federation(batch_norm="average"), module, clients_of(data), OPTIONS, store=tmp_path / "store"
    ).runner
    said = {}
    name = next(name for name in module().state_dict() if name.endswith("num_batches_tracked"))
    counts = [torch.tensor(count) for count in range(6)]
    for count in (None, *counts):
        text = json.loads(orders[0].text)
        rows, offset, data = text["tensors"]["state"], 0, b""
        for row in rows:
            size = torch.empty(row[2], dtype=getattr(torch, row[1])).nbytes
            if count is None or row[0] != name:
                data += bytes(orders[0].data[offset : offset + size])
            offset += size
        if count is not None:
            text["tensors"]["state"] = [row for row in rows if row[0] != name]
            text["header"]["held"] = digest({name: count})
        reply = runner.answer("train", Packet(json.dumps(text), data + bytes(orders[0].data[offset:])), {})
        said[count] = json.loads(reply.text)["header"].get("reason")
    assert said.pop(None) is None
    assert set(said.values()) == {NOT_HELD}


def test_extras_near_the_largest_number_are_not_trained(tmp_path, caplog):
    """A control variate near the largest number overflows for some inputs only, as a weight does."""
    orders = []

    def listen(node, message, content):
        if message.metadata.message_type == "train":
            orders.append(from_records(message.content))
        return [content]

    on_flower(tmp_path / "run", linear, models.vectors(SIZES), lambda: Federation("scaffold"), 2, change=listen)
    order, count = orders[-1], sum(value.nbytes for value in linear().state_dict().values())
    text = json.loads(order.text)
    text["header"]["kept"] = -1  # this site has no state from an earlier round
    largest = Packet(json.dumps(text), bytes(order.data[:count]) + struct.pack("21f", *[LARGEST] * 21))
    app = client_app(Federation("scaffold"), linear, clients_of(data_with(1.0)), OPTIONS, store=tmp_path / "11")
    Counted.steps = 0
    reply = app.runner.answer("train", largest, {})
    assert "root mean square" in json.loads(reply.text)["header"]["reason"]
    assert Counted.steps == 0


@pytest.mark.parametrize("federation", [Federation, in_sum])
def test_an_exception_of_the_program_is_the_same_text(federation, tmp_path):
    """Also in a secure sum: the class of an exception may depend on the data."""
    left = []

    class Raises(Counted):
        def training_step(self, batch, batch_idx):
            raise KeyError("patient 17")

    def note(node, message, content):
        if node == 11 and message.metadata.message_type == "train":
            left.append(json.loads(from_records(content).text))
        return [content]

    write_policy(tmp_path / "11", extras=["*"])
    module = lambda: Raises(nn.Linear(6, 3), models.momentum)  # noqa: E731
    with pytest.raises(RuntimeError, match="clients"):
        on_flower(tmp_path, module, models.vectors(SIZES), federation, 1, change=note)
    assert {reply["header"]["reason"] for reply in left} == {NOT_ANSWERED}


def test_an_exception_of_the_gate_is_the_same_text(order, tmp_path, monkeypatch):
    """Neither the text nor the class of the exception."""

    def fail(*arguments):
        raise KeyError("patient 17")

    write_policy(tmp_path)
    monkeypatch.setattr(gate.SiteGate, "_append", fail)
    with pytest.raises(PacketError) as caught:
        ask(tmp_path, 1.0, [order])
    assert str(caught.value) == NOT_ANSWERED


def test_reasons_leave_where_the_policy_lets_reasons_leave(order, tmp_path):
    write_policy(tmp_path, entries=["net.bias"], faults="text")
    (reply,) = ask(tmp_path, 1.0, [order])
    assert "does not allow 'net.weight' in entries" in json.loads(reply.text)["header"]["reason"]


# --- signed orders ----------------------------------------------------------------------------------------------------


def ask_signed(folder, kind, packet, key, seconds=60.0, age=0.0):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signatures, "time", SimpleNamespace(time_ns=lambda: time.time_ns() - int(age * 1e9)))
        signed = Packet(sign(kind, packet.text, packet.data, key, seconds), packet.data)
    runner = client_app(Federation(), linear, clients_of(data_with(1.0)), OPTIONS, store=folder).runner
    return signed, runner


def test_a_signed_order_is_done_once_and_before_its_expiry(order, tmp_path, caplog):
    """Neither twice, nor late, nor as another type of order."""
    key, public = make_key(tmp_path / "keys", "server")
    write_policy(tmp_path, servers=[public], answers=["update", "statistics"], extras=["*"])
    signed, runner = ask_signed(tmp_path, "train", order, key)
    assert json.loads(runner.answer("train", signed, {}).text)["kind"] == "update"
    text, _, signature = signed.text.rpartition(":")
    for kind, packet in (
        ("train", signed),
        ("train", Packet(f"{text}:{signature.upper()}", signed.data)),
        ("train", Packet(f"{text}: {signature}", signed.data)),
        ("train", ask_signed(tmp_path, "evaluate", order, key)[0]),
        ("train", ask_signed(tmp_path, "train", order, key, age=120.0)[0]),
        ("train", ask_signed(tmp_path, "train", order, key, age=-30 * 3600.0)[0]),
        ("train", Packet(signed.text.replace("\n1", "\n2"), signed.data)),
    ):
        assert json.loads(runner.answer(kind, packet, {}).text)["header"]["reason"] == NOT_ANSWERED
    assert "the server's order is a copy of an earlier order" in caplog.text
    assert caplog.text.count("or the order has expired") == 6
    line = signed.text.partition("\n")[2]
    digests = {digest_order("update", order.text, order.data, text) for text in (line, line.upper(), line + " ")}
    assert digests == {lines_of(tmp_path)[0]["digest"]}  # a second check behind the spelling
    again, _ = ask_signed(tmp_path, "train", order, key)  # a lost answer is requested with a new signature
    assert json.loads(runner.answer("train", again, {}).text)["kind"] == "update"


def test_a_server_without_permission_does_not_fill_the_disk(order, tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "_MOST_LINES", 5)
    write_policy(tmp_path, servers=[])
    ask(tmp_path, 1.0, [order] * 20)
    assert [line["rule"] for line in lines_of(tmp_path)] == [{"refused": "servers"}] * 5
    write_policy(tmp_path)
    runner = start(tmp_path)
    for _ in range(20):
        assert json.loads(runner.answer("query", HELLO, {}).text)["kind"] == "hello"
    assert [line["answer"] for line in lines_of(tmp_path)[5:]] == ["clients"] * 5
    (reply,) = ask(tmp_path, 1.0, [order])  # a server with permission is answered
    assert json.loads(reply.text)["kind"] == "update"


# --- Missing policy ---------------------------------------------------------------------------------------------------

HELLO = write_packet("hello", {})


def test_the_server_keeps_the_head_of_the_record(tmp_path, caplog):
    """A user who cuts the record and rewrites the head file cannot change the line that the server has received."""
    heads = []

    def listen(node, message, content):
        if node == 11 and message.metadata.message_type == "train":
            texts = [from_records(part).text for part in (message.content, content)]
            heads.append([json.loads(text)["header"].get("head") for text in texts])
            if len(heads) == 4:  # both clients of the node, in two rounds
                lines = path.read_bytes().splitlines(True)[:2]
                path.write_bytes(b"".join(lines))
                digest = lines[-1][:64].decode()
                (tmp_path / "11" / HEAD_FILE).write_text(json.dumps({"line": 2, "digest": digest}))
                grids[0].apps[11].runner = client_app(
                    Federation(), linear, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / "11"
                ).runner
        return [content]

    grids, path = [], tmp_path / "11" / "site_record.jsonl"
    write_policy(tmp_path / "11", rounds_per_day=100)
    on_flower(tmp_path, linear, models.vectors(SIZES), Federation, 3, change=listen, grids=grids)
    assert [received is None for received, _ in heads] == [True, True, False, False, False, False]
    assert [received for received, _ in heads[2:4]] == [sent for _, sent in heads[:2]]
    assert caplog.text.count("lacks line 7, but the server has received") == 1
    assert caplog.text.count("lacks line 9, but the server has received") == 1
    assert [line["rule"].get("refused") for line in lines_of(tmp_path / "11")[-2:]] == ["record"] * 2
    assert [sent for _, sent in heads[4:]] == [None, None]  # faults


def start(folder, **options):
    """A new process of the site, with a worker or for one message."""
    data = clients_of(models.vectors(SIZES))
    return client_app(Federation(), lambda: None, data, OPTIONS, store=folder, **options).runner


def test_a_deleted_policy_lets_nothing_leave_after_a_restart(tmp_path):
    write_policy(tmp_path)
    start(tmp_path).answer("query", HELLO, {})
    (tmp_path / "site_policy.toml").unlink()
    with pytest.raises(PacketError, match=NOT_ANSWERED):
        start(tmp_path).answer("query", HELLO, {})


def test_a_site_without_traces_is_reminded_by_the_server(order, tmp_path, caplog):
    """A user who deletes policy, record and head file cannot open the site to a server that knows the record."""
    write_policy(tmp_path)
    (reply,) = ask(tmp_path, 1.0, [order])
    head = json.loads(reply.text)["header"]["head"]
    for file in ("site_policy.toml", "site_record.jsonl", HEAD_FILE):
        (tmp_path / file).unlink()
    text = json.loads(order.text)
    for known, kind in ((head, "fault"), (None, "update")):  # a new run of the server knows nothing
        text["header"]["head"] = known
        (reply,) = ask(tmp_path, 1.0, [Packet(json.dumps(text), order.data)])
        assert json.loads(reply.text)["kind"] == kind


@pytest.mark.parametrize(
    "name", ["site-policy.toml", "site_policy.tml", "Policy", "site_policy.toml.bak", "record.toml"]
)
def test_a_misspelt_policy_lets_nothing_leave(name, tmp_path, caplog):
    (tmp_path / name).write_text('servers = ["*"]')
    with pytest.raises(PacketError, match=NOT_ANSWERED):
        start(tmp_path).answer("query", HELLO, {})
    assert f"{name} suggests that the site has a policy" in caplog.text


def test_without_a_policy_and_traces_everything_leaves(tmp_path):
    (tmp_path / ("0" * 32)).mkdir()
    assert json.loads(start(tmp_path).answer("query", HELLO, {}).text)["kind"] == "hello"


def test_folders_of_others_above_the_policy(tmp_path, caplog):
    """A user with permission to rename a folder can replace the policy inside."""
    folder = tmp_path / "shared" / "site"
    folder.mkdir(parents=True)
    write_policy(folder)
    folder.parent.chmod(0o777)
    with pytest.raises(PacketError, match=NOT_ANSWERED):
        start(folder).answer("query", HELLO, {})
    assert "other users can change the file or folder" in caplog.text
