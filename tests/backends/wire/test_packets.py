"""Messages as text and bytes: lossless, with the counted size, and strict readers."""

import ast
import itertools
import json
import tracemalloc
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

import lightning_fed.backends
from lightning_fed import Broadcast, ClientUpdate
from lightning_fed.backends.flower.transport import from_records, to_records
from lightning_fed.backends.wire.hyperparameters import digest, load_hyperparameters, pack_numbers
from lightning_fed.backends.wire.packets import (
    VERSION,
    Answer,
    Packet,
    PacketError,
    TrainRequest,
    find_bad_size,
    read_packet,
    read_reply,
    read_train_request,
    write_packet,
    write_request,
    write_train_request,
    write_update,
)
from lightning_fed.backends.wire.remote_client_store import RemoteClientStore
from lightning_fed.batch_norm.pooling import find_bad_statistics
from lightning_fed.messages import Request, message_bytes
from lightning_fed.server.schedule import Visit
from tests.recorders import assert_same

TENSORS = {
    "float32": torch.tensor([[1.5, -0.0], [float("inf"), 2**-149]]),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "half": torch.tensor([1.0, 65504.0], dtype=torch.float16),
    "bfloat16": torch.tensor([[3.0]], dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "int8": torch.tensor([-128], dtype=torch.int8),
    "uint8": torch.tensor([255], dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "number": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(10.0)[::3],
    "naïve/名前": torch.ones(2).requires_grad_(),
}


def test_a_models_large_entries_are_the_memory_that_came():
    """Small entries, entries outside a model, and unaligned entries are copies, so they do not keep a whole message
    alive.
    """
    large = torch.arange(2.0**18)
    state = {"large": large, "small": torch.ones(3), "odd": torch.ones(1, dtype=torch.bool), "shifted": large}
    packet = write_packet("update", {}, state=state, extras={"large": large})
    _, tensors = read_packet(packet, "update")
    start = torch.frombuffer(packet.data, dtype=torch.uint8).data_ptr()
    inside = {
        f"{group}/{name}"
        for group, values in tensors.items()
        for name, value in values.items()
        if start <= value.data_ptr() < start + len(packet.data)
    }
    assert inside == {"state/large"}
    assert_same(tensors["state"], state)


def test_tensors_come_out_as_they_went_in():
    packet = from_records(to_records(write_packet("update", {"x": 0.1 + 0.2}, state=TENSORS, extras={})))
    header, tensors = read_packet(packet, "update")
    assert header == {"x": 0.1 + 0.2}
    assert list(tensors["state"]) == list(TENSORS)
    for name, value in TENSORS.items():
        assert tensors["state"][name].dtype == value.dtype, name
        assert tensors["state"][name].shape == value.shape, name
        assert torch.equal(tensors["state"][name], value), name
    assert torch.signbit(tensors["state"]["float32"][0, 1])
    tensors["state"]["float32"].add_(1)  # the receiver owns the memory
    assert len(packet.data) == sum(value.numel() * value.element_size() for value in TENSORS.values())


def test_what_cannot_travel_is_named():
    with pytest.raises(PacketError, match=r"entry 'w' with dtype .* cannot be sent"):
        write_packet("update", {}, state={"w": torch.ones(2, 2).to_sparse()})


def test_orders_and_updates():
    visit = Visit("ann", 3, 2**32 - 1, epochs=2, portion=0.1, is_straggler=True)
    train_request = TrainRequest("0a", visit, 1, 0, 7, "digest", {"groups": [[{"lr": 0.1}]]}, "asked")
    broadcast = Broadcast(3, {"w": torch.ones(2)}, {"c": torch.zeros(1)})
    packet = write_train_request("train", train_request, broadcast)
    assert len(packet.data) == message_bytes(broadcast)
    came, again = read_train_request(packet, "train")
    assert came == train_request
    assert again.round == 3
    assert_same(again.state | again.extras, broadcast.state | broadcast.extras)
    update = ClientUpdate(4, 9, {"w": torch.ones(2)}, {}, {"loss": 0.1})
    packet = write_update(update, Answer(5, {"scaler": {}}))
    assert len(packet.data) == message_bytes(update)
    reply = read_reply(packet, 4)
    assert isinstance(reply, tuple)
    assert (reply[0].num_samples, reply[0].metrics, reply[1]) == (9, {"loss": 0.1}, Answer(5, {"scaler": {}}))
    with pytest.raises(PacketError, match="the answer is from client 4"):
        read_reply(packet, "4")


def test_rows_that_are_the_same_travel_once():
    rows = torch.tensor([1, 5])
    request = Request("ann", {"weight": rows, "bias": rows.clone(), "words": torch.tensor([0, 2])}, {"step": rows})
    packet = write_request(request)
    assert len(packet.data) == message_bytes(request) == 48
    came = read_reply(packet, "ann")
    assert isinstance(came, Request)
    assert_same(came.rows, request.rows)
    assert_same(came.extras, request.extras)


def test_nothing_is_unpickled():
    """No backend module imports an unpickler, and torch or numpy load no received data."""
    backends = Path(lightning_fed.backends.__file__).parent
    sources = [backends.glob(pattern) for pattern in ("wire/*.py", "flower/*.py", "flower/template/client.py.txt")]
    for path in itertools.chain(*sources):
        for node in ast.walk(ast.parse(path.read_text().replace("{package}", "package"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"pickle", "dill", "cloudpickle", "joblib"} & set(names), path
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("recv", "load", "loads") or ast.unparse(node) == "json.loads", path


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 1}', json.dumps({"version": 1, "kind": [], "header": {}, "tensors": {}})]
)
def test_texts_that_are_no_packets(text):
    with pytest.raises(PacketError, match=r"the message (is|has) "):
        read_packet(Packet(text), "update")


BAD_ENTRIES = {
    "a shape that is no list": ["w", "float32", {}],
    "a shape that is a text": ["w", "float32", ""],
    "a product that overflows": ["w", "float32", [2**47, 2**47, 0]],
    "a negative length": ["w", "float32", [-1]],
    "a length that is a truth": ["w", "float32", [True]],
    "a length that is no whole number": ["w", "float32", [1.0]],
    "more dimensions than tensors have": ["w", "float32", [1] * 65],
    "a lone surrogate": ["\ud800", "float32", [1]],
    "a name without end": ["w" * 5000, "float32", [1]],
    "no name": [None, "float32", [1]],
    "a type that is a list": ["w", [], [1]],
    "an unknown type": ["w", "quint8", [1]],
    "no entry": 3,
    "an entry of four": ["w", "float32", [1], 0],
}


@pytest.mark.parametrize("row", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_headers_that_are_no_tables(row):
    """Any content gives a packet error with a text of bounded length."""
    header = {"client": "a", "num_samples": 1, "metrics": {}, "steps": 0, "after": None, "keeps": False}
    text = {"version": VERSION, "kind": "update", "header": header, "tensors": {"state": [row], "extras": []}}
    with pytest.raises(PacketError, match=r"the message's tensor table has|has the invalid dtype") as caught:
        read_reply(Packet(json.dumps(text), b"1234"), "a")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    text["tensors"] = {"state": {"w": 1}}
    with pytest.raises(PacketError):
        read_reply(Packet(json.dumps(text), b"1234"), "a")


def test_replies_are_as_long_as_their_model_allows():
    model = {"w": torch.zeros(1000)}
    longest = Packet("x" * (2**20 + 2**11), bytes(2**26 + 8 * 4000))
    assert find_bad_size(longest, model) is None
    assert "67140865 bytes" in find_bad_size(Packet("", bytes(2**26 + 8 * 4000 + 1)), model)
    assert "1050625 characters" in find_bad_size(Packet("x" * (2**20 + 2**11 + 1)), model)


def test_a_packet_is_one_copy_of_its_tensors():
    """Neither writing nor reading allocates a second copy."""
    state = {name: torch.zeros(2**18) for name in "abcd"}
    tracemalloc.start()
    try:
        packet = write_packet("update", {}, state=state)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * len(packet.data)
        tracemalloc.reset_peak()
        read_packet(packet, "update")
        assert tracemalloc.get_traced_memory()[1] < 2.1 * len(packet.data)
    finally:
        tracemalloc.stop()


ORDERS = {
    "no client": {"visit": {"client": None}},
    "a surrogate for a client": {"visit": {"client": "\ud800"}},
    "no epochs": {"visit": {"epochs": 0}},
    "epochs without end": {"visit": {"epochs": 10**40}},
    "no steps": {"visit": {"steps": 0}},
    "a seed that no generator takes": {"visit": {"seed": 2**32}},
    "a portion of nothing": {"visit": {"portion": "all"}},
    "a negative rate": {"hyperparameters": {"groups": [[{"lr": -0.1}]]}},
    "an endless rate": {"hyperparameters": {"schedulers": [{"base_lrs": [1e200]}]}},
    "a rate that is no number": {"hyperparameters": {"groups": [[{"lr": float("nan")}]]}},
    "no hyperparameters": {"hyperparameters": []},
    "clients of a sum that are a text": {"peers": "ann"},
    "clients of a sum that are none": {"peers": ["ann", None]},
}


@pytest.mark.parametrize("change", ORDERS.values(), ids=ORDERS)
def test_orders_that_no_client_follows(change):
    visit = Visit("ann", 3, 1, epochs=2)
    order = write_train_request("train", TrainRequest("0a", visit, 1, 0, 7, "d", {"groups": [[{"lr": 0.1}]]}))
    assert read_train_request(order, "train")[0].visit == visit
    said = json.loads(order.text)
    said["header"] |= {**change, "visit": {**said["header"]["visit"], **change.get("visit", {})}}
    with pytest.raises(PacketError, match="the train request is invalid"):
        read_train_request(Packet(json.dumps(said)), "train")


def test_hyperparameters_are_the_servers():
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]

    def adam(**options):
        return torch.optim.Adam([{"params": [parameter]} for parameter in parameters], **options)

    server, client = adam(lr=0.3, betas=(0.5, 0.9), weight_decay=0.1), adam(lr=torch.tensor(1.0), foreach=False)
    groups = [[{k: v for k, v in group.items() if k != "params"} for group in server.param_groups]]
    sent = json.loads(json.dumps(pack_numbers({"groups": groups})))["groups"]
    load_hyperparameters([client], sent)
    group = client.param_groups[1]
    assert isinstance(group["lr"], torch.Tensor)
    assert float(group["lr"]) == pytest.approx(0.3)
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.9), 0.1)
    with pytest.raises(ValueError, match=r"have \[2\] parameter groups, but the client's have \[1\]"):
        load_hyperparameters([torch.optim.SGD(parameters, 0.1)], sent)


def test_a_digest_tells_states_apart():
    state = {"a": torch.ones(2), "b": torch.zeros(1)}
    expected = digest(state)
    assert expected == digest({"b": torch.zeros(1), "a": torch.ones(2)})
    changed = [
        {"a": torch.ones(2)},
        {**state, "b": torch.zeros(1, dtype=torch.float64)},
        {**state, "a": torch.ones(2, 1)},
        {**state, "a": torch.tensor([1.0, 1.0 + 2**-23])},
    ]
    assert len({expected, *map(digest, changed)}) == 5


def test_the_store_forgets_what_came_to_nothing():
    """The store records since when each client has stored state; a checkpoint in a round excludes this round."""
    client_store = RemoteClientStore()
    run = client_store.run
    client_store.record_update("a", 0, 0)
    client_store.record_update("b", 0, 0)
    client_store.heads["a"] = [4, "0" * 64]
    client_store.checkpoint(1)
    client_store.record_update("a", 1, 1)
    client_store.put("b", 1, {})  # values put by callbacks on the server belong to the client
    assert (client_store.kept("a"), client_store.kept("b"), client_store.kept("c"), client_store.needed("a")) == (
        1,
        0,
        -1,
        0,
    )
    inside = client_store.checkpoint(1)
    after = client_store.checkpoint(2)
    assert client_store.needed("a") == 1
    client_store.checkpoint(3)
    assert (client_store.needed("a"), client_store.needed("b")) == (2, 1)  # never above the state in use
    client_store.restore(1, inside)
    assert (client_store.run, client_store.kept("a"), client_store.kept("b")) == (run, 0, 0)
    client_store.heads.clear()
    client_store.restore(2, after)
    assert client_store.kept("a") == 1
    assert client_store.heads == {"a": [4, "0" * 64]}
    client_store.restore(0, {})
    assert client_store.run != run
    assert client_store.kept("a") == -1
    assert not client_store.heads
    with pytest.raises(ValueError, match="client states from a single-process fit"):
        client_store.restore(1, {"folder": "x", "run": 0})


@pytest.mark.parametrize(
    ("change", "is_bad"),
    [
        ({}, False),
        ({"batch_norm:0:count": torch.tensor(0.0)}, True),
        ({"batch_norm:0:var": torch.tensor([-1.0, 1.0])}, True),
        ({"batch_norm:0:mean": torch.zeros(3)}, True),
        ({"batch_norm:1:mean": torch.zeros(2)}, True),
        ({"other": torch.zeros(2)}, True),
    ],
)
def test_statistics_that_do_not_fit(change, is_bad):
    names = {"mean": torch.zeros(2), "var": torch.ones(2), "count": torch.tensor(4.0)}
    extras = {f"batch_norm:0:{name}": value for name, value in names.items()} | change
    assert bool(find_bad_statistics(extras, {"0.running_mean": torch.zeros(2)})) == is_bad
