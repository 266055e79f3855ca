"""Attacks by well-formed messages in both directions, and damaged run folders."""

import json
import multiprocessing
import socket
import threading
import warnings

import lightning as L
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from lightning_fed import Federation
from lightning_fed.algorithms import FedPer
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.server import server_app
from lightning_fed.backends.flower.transport import FlowerTransport, from_records, to_records
from lightning_fed.backends.flower.worker import serve
from lightning_fed.backends.site.gate import POLICY_FILE
from lightning_fed.backends.wire import packets
from lightning_fed.backends.wire.packets import Packet, PacketError, read_packet, write_packet
from lightning_fed.backends.wire.run_folder import lock_folder
from lightning_fed.backends.wire.server import run_server
from lightning_fed.callbacks import ClassPrototypes
from lightning_fed.cli.main import main
from lightning_fed.messages import tensor_bytes
from tests import models
from tests.backends.flower.grids import FakeGrid
from tests.backends.flower.halves import (
    CASES,
    OPTIONS,
    SIZES,
    Loses,
    Padded,
    clients_of,
    in_process,
    is_lost,
    on_flower,
)
from tests.backends.flower.test_flower_app import light_app
from tests.backends.flower.test_flower_faults import changed, make_module, spoilt
from tests.breadth import slow
from tests.generators import same_random_numbers
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

NUMBERS = {
    "fedavg": [
        ({"metrics": {"loss": 10**400}}, "the answer's header is invalid"),
        ({"num_samples": 10**400}, "examples"),
        ({"steps": 10**30}, "steps"),
        ({"num_samples": "1\nRound 1: all is well"}, r"1\nRound"),
    ],
    "a schedule of steps": [
        ({"after": [1]}, "the client's scheduler steps are invalid: got"),
        ({"after": {"steps": []}}, "the client's scheduler steps are invalid: got"),
        ({"after": {"steps": [-1]}}, "[-1], expected 0 to 1000000 for each scheduler"),
        ({"after": {"steps": [10**9]}}, "[1000000000], expected 0 to 1000000 for each scheduler"),
        ({"after": {"steps": ["1"]}}, "['1'], expected"),
    ],
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_cannot_be_used(case, tmp_path, caplog):
    """Different numbers in each round."""
    headers, reasons = zip(*NUMBERS[case], strict=True)
    changes, case, rounds = [changed(**header) for header in headers], CASES[case], len(headers) + 1
    _, trainer, _, _ = on_flower(
        tmp_path, case.module, case.data(SIZES), case.federation, rounds, change=spoilt("train", changes)
    )
    left_out = [record.getMessage() for record in caplog.records if "is excluded" in record.getMessage()]
    for round, (message, reason) in enumerate(zip(left_out, reasons, strict=True)):
        assert message.startswith(f"Round {round + 1}: client 'bob' is excluded")
        assert reason in message
        assert "\n" not in message
    assert trainer.current_epoch == rounds


def private_head():
    return Federation(FedPer("net.head.*"))


def base_and_head():
    return models.Module(models.BaseAndHead())


@pytest.fixture(scope="module")
def an_order(tmp_path_factory):
    train_requests = []

    def listen(node, message, content):
        if message.metadata.message_type == "train":
            train_requests.append(from_records(message.content))
        return [content]

    with same_random_numbers():
        on_flower(tmp_path_factory.mktemp("run"), base_and_head, models.vectors(SIZES), private_head, 1, change=listen)
    return train_requests[0]


@pytest.fixture
def runner(tmp_path):
    clients = clients_of(models.vectors(SIZES))
    return client_app(private_head(), base_and_head, clients, OPTIONS, store=tmp_path / "a" / "store").runner


@pytest.mark.parametrize("where", ["../../outside", "/outside", "", "a" * 65, ["a"], None, 3])
@pytest.mark.parametrize("policy", [False, True])
def test_a_run_is_no_path(where, policy, an_order, runner, tmp_path):
    """A server cannot write or delete files in or next to a store, with or without a site policy."""
    if policy:
        (tmp_path / "a" / "store" / POLICY_FILE).touch()
    before = set(tmp_path.rglob("*"))
    said = json.loads(an_order.text)
    said["header"]["run"] = where.replace("/outside", f"{tmp_path}/outside") if where == "/outside" else where
    with pytest.raises(
        PacketError, match="the message is not from lightning-fed" if policy else "the run .* is invalid"
    ):
        runner.answer("train", Packet(json.dumps(said), an_order.data), {})
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("change", [{"needed": "x"}, {"kept": 1.5}, {"visit": None}, {"needed": 10**400}])
def test_orders_of_nonsense(change, an_order, runner):
    said = json.loads(an_order.text)
    said["header"] |= change
    with pytest.raises(PacketError, match="the train request is invalid"):
        runner.answer("train", Packet(json.dumps(said), an_order.data), {})
    with pytest.raises(PacketError, match="the train request is invalid"):
        runner.answer("train", write_packet("train", {}), {})


def test_keys_that_are_no_names(tmp_path, caplog):
    good = client_app(Federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path)
    data = {"\ud800": models.as_datasets(models.vectors(SIZES))["ann"]}
    bad = client_app(Federation(), make_module, data, OPTIONS, store=tmp_path)
    assert list(FlowerTransport(FakeGrid({11: bad, 12: good}), 1).await_clients(3, 1)) == ["ann", "bob", "cid"]
    assert "Node 11 sent no valid list of clients" in caplog.text


def test_a_node_with_a_million_clients_is_not_read(tmp_path, caplog):
    """The server searches the lists of all nodes for each client."""
    good = client_app(Federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path)
    names = [f"client {number}" for number in range(10**5)]

    def change(node, message, content):
        return [to_records(write_packet("hello", {"clients": names}))] if node == 11 else [content]

    assert list(FlowerTransport(FakeGrid({11: good, 12: good}, change=change), 1).await_clients(3, 1)) == [*SIZES]
    assert "the client's answer has 1588961 characters" in caplog.text


def test_another_optimizer_is_no_other_learning_rate(tmp_path):
    """The server's Adam must not change the client's SGD."""
    app = client_app(Federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / "c")
    transport = FlowerTransport(FakeGrid({11: app}), 5, 0.01)
    with pytest.raises(RuntimeError, match=r"optimizers are \['Adam'\], but the client's are \['SGD'\]"):
        run_server(
            Federation(), lambda: models.Module(models.dropout_mlp(), models.adam), None,
            {**OPTIONS, "max_epochs": 1}, transport, transport.await_clients(3, 1), tmp_path / "s",
        )  # fmt: skip


# --- Returning clients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("federation", "callbacks", "how"),
    [
        (lambda: Federation(FedPer("net.head.*")), list, "older"),
        (lambda: Federation("fedmargin"), lambda: [ClassPrototypes(lpm_before="last_local")], "lost"),
    ],
    ids=["personal layers", "what callbacks remember"],
)
def test_another_folder_is_noticed(federation, callbacks, how, tmp_path, caplog):
    """With an empty folder or a folder from an earlier round, a client must not continue."""

    class Change(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 1:
                newest = max(tmp_path.glob("1?/**/s-bob/*.safetensors"))
                for path in newest.parent.iterdir():
                    path.unlink() if how == "lost" or path == newest else None

    def module():
        return models.Module(models.BaseAndHead(), models.momentum)

    case_module = module if callbacks is list else make_module
    on_flower(
        tmp_path, case_module, models.vectors(SIZES), federation, callbacks=callbacks, server_callbacks=[Change()]
    )
    assert "Round 3: client 'bob' is excluded: the client has lost its state from round 2." in caplog.text


def test_nodes_that_come_back_with_each_others_data(tmp_path, caplog):
    """Nodes with keys return under their old names, so the server asks again for their clients."""

    class Swap(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                grids[0].configs[11], grids[0].configs[12] = grids[0].configs[12], grids[0].configs[11]

    grids = []
    _, trainer, _, _ = on_flower(
        tmp_path, make_module, models.vectors(SIZES), Federation, 4, server_callbacks=[Swap()], grids=grids
    )
    assert "Round 2: client 'bob' is excluded: the client's data are not on this node." in caplog.text
    assert trainer.callbacks[0].round_log.state_dict()["last"]["fed/failed"] == 0


def test_a_node_that_is_back_before_it_is_missed(tmp_path, caplog):
    """Flower detects a killed node after a minute; the replacement is asked from then on."""
    apps = {
        node: client_app(
            Federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / f"{node}"
        )
        for node in (11, 12)
    }
    grid = FakeGrid(apps)
    transport = FlowerTransport(grid, 5, 0.01)
    transport.await_clients(3, 1)
    while "Node 12 lists the clients" not in caplog.text:
        list(transport.ask("train", [], 0))
    grid.gone = {11}
    ((client, reply),) = transport.ask("query", [("ann", write_packet("hello", {}))], 1)
    assert (client, read_packet(reply, "hello")[0]) == ("ann", {"clients": ["ann", "bob", "cid"]})


# --- Server folder ----------------------------------------------------------------------------------------------------


def serve_rounds(tmp_path, apps, rounds, clients=2, patience=1.0):
    app = server_app(
        Federation(), make_module, None, {**OPTIONS, "max_epochs": rounds}, clients=clients, folder=tmp_path / "s",
        patience=patience,
    )  # fmt: skip
    app(FakeGrid(apps), Context(1, 1, {}, RecordDict(), {}))


def test_a_run_goes_on_with_its_own_clients(tmp_path, caplog):
    """With only a number of clients given, another client does not replace a late client."""
    data = models.as_datasets(models.vectors(SIZES))
    apps = {
        node: client_app(Federation(), make_module, {name: data[name]}, OPTIONS, store=tmp_path / name)
        for node, name in enumerate(SIZES)
    }
    ann, bob, cid = apps
    serve_rounds(tmp_path, {ann: apps[ann], bob: apps[bob]}, 1)
    with pytest.raises(TimeoutError, match=r"missing clients are \{'bob'\}"):
        serve_rounds(tmp_path, {ann: apps[ann], cid: apps[cid]}, 2, patience=0)
    serve_rounds(tmp_path, apps, 2)
    assert torch.load(tmp_path / "s" / "last.ckpt", weights_only=True)["epoch"] == 1
    assert "but resumes with" not in caplog.text
    serve_rounds(tmp_path, apps, 3, ["ann", "cid"])
    assert "The run started with the clients ['ann', 'bob'] but resumes with ['ann', 'cid']." in caplog.text


def test_a_checkpoint_is_never_half_written(tmp_path, monkeypatch):
    """A process killed during the write leaves the previous checkpoint."""
    real = L.Trainer.save_checkpoint

    def killed(trainer, path, *args, **options):
        if trainer.current_epoch == 0:
            return real(trainer, path, *args, **options)
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    app = client_app(Federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / "c")
    monkeypatch.setattr(L.Trainer, "save_checkpoint", killed)
    with pytest.raises(OSError, match="No space left"):
        serve_rounds(tmp_path, {11: app}, 3, 3)
    assert torch.load(tmp_path / "s" / "last.ckpt", weights_only=True)["epoch"] == 0
    monkeypatch.undo()
    serve_rounds(tmp_path, {11: app}, 3, 3)
    here = torch.load(tmp_path / "s" / "last.ckpt", weights_only=True)
    assert here["epoch"] == 2
    assert here["state_dict"].keys() == state_of(make_module()).keys()


def _be_there(folder, is_there, may_go):
    with lock_folder(folder):
        is_there.set()
        may_go.wait(30)


def test_one_server_in_a_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    is_there, may_go = context.Event(), context.Event()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about forks with threads
        process = context.Process(target=_be_there, args=(tmp_path, is_there, may_go))
        process.start()
    assert is_there.wait(30)
    with pytest.raises(RuntimeError, match="Another server is training in"), lock_folder(tmp_path):
        pass
    may_go.set()
    process.join(30)
    with lock_folder(tmp_path):
        pass


# --- Answers of the largest size, and invalid answers -----------------------------------------------------------------

LIMIT = 2**16, 8


def lengthened(content, size):
    """Pads an answer's tensors to this number of bytes."""
    packet = from_records(content)
    text = json.loads(packet.text)
    more = size - len(packet.data)
    text["tensors"]["extras"].append(["padding", "uint8", [more]])
    return to_records(Packet(json.dumps(text), packet.data + bytes(more)))


@pytest.mark.parametrize("checked_by", ["client", "server"])
def test_answers_at_the_limit_and_over_it(checked_by, monkeypatch, federated_trainer, tmp_path, caplog):
    """A client with one byte too many is excluded by name and does not even send the answer."""
    monkeypatch.setattr(packets, "_DATA", LIMIT)
    data, seen = models.vectors(SIZES), []
    most = LIMIT[0] + LIMIT[1] * tensor_bytes(make_module().state_dict())

    def lengthen(node, message, content):
        client = json.loads(from_records(message.content).text)["header"].get("visit", {}).get("client")
        if checked_by == "server" and client in ("ann", "bob"):
            content = lengthened(content, most + (client == "bob"))
        seen.append(len(from_records(content).data))
        return [content]

    callbacks = [Padded({"ann": 0, "bob": 1})] if checked_by == "client" else []
    there, trainer, _, _ = on_flower(
        tmp_path, make_module, data, lambda: Federation(seed=1), 1, lambda: callbacks, change=lengthen
    )
    assert list(trainer.callbacks[0].server.report.received) == ["ann", "cid"]
    left_out = [text for text in caplog.messages if "is excluded" in text]
    (text,) = left_out
    assert text.startswith("Round 1: client 'bob' is excluded: the client's answer has ")
    assert f" and {most + 1} bytes, but the limits are " in text
    assert text.endswith(f" and {most}.")
    assert max(seen) == most + (checked_by == "server")
    here, _ = in_process(federated_trainer, make_module, data, Federation(seed=1), 1, [Loses("bob", range(1))])
    assert_same(state_of(there), state_of(here))


def without_chunks(objects):
    return {name: content for name, content in objects.items() if not content.startswith(b"ArrayChunk")}


def of_another_kind(objects):
    return {name: content.replace(b"ConfigRecord", b"MetricRecord") for name, content in objects.items()}


def out_of_order(objects):
    return {
        name: content.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [7]') for name, content in objects.items()
    }


@pytest.mark.parametrize("damage", [slow(without_chunks), slow(of_another_kind), out_of_order])
def test_answers_that_flower_cannot_put_together(damage, federated_trainer, tmp_path, caplog):
    """The server process assembles messages: errors there are the fault of the sending client."""
    data = models.vectors(SIZES)

    def put_together(node, message, content):
        if is_lost(message, content):
            objects = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
            return [inflate_object_from_contents(content.object_id, damage(objects))]
        return [content]

    there, _, _, _ = on_flower(tmp_path, make_module, data, lambda: Federation(seed=1), change=put_together)
    left_out = [text for text in caplog.messages if "is excluded" in text]
    assert [
        text.startswith("Round 2: client 'bob' is excluded: the client's answer cannot be read:") for text in left_out
    ] == [True]
    here, _ = in_process(federated_trainer, make_module, data, Federation(seed=1), callbacks=[Loses()])
    assert_same(state_of(there), state_of(here))


def test_a_connection_that_fails_is_no_clients_fault(tmp_path):
    """If Flower itself does not answer, the run ends."""

    class Failing(FakeGrid):
        def pull_messages(self, message_ids):
            raise ConnectionError("the SuperLink is gone")

        def get_node_ids(self):
            if self.sent:
                raise ConnectionError("the SuperLink is gone")
            return super().get_node_ids()

    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        FlowerTransport(Failing({11: None}), 5).await_clients(1, 1)


# --- Worker and app ---------------------------------------------------------------------------------------------------


def test_a_worker_outlives_what_it_cannot_answer(tmp_path, caplog):
    """Unreadable data only affect one node, and an invalid request only one message."""

    def data(node):
        return {node["client"]: models.as_datasets(models.vectors(SIZES))["ann"]}

    whole = client_app(Federation(), lambda: None, data, OPTIONS, store=tmp_path)
    path = tmp_path / "private" / "worker"
    thread = threading.Thread(target=serve, args=(whole, path), daemon=True)  # the number of requests depends on time
    thread.start()
    while not path.exists():
        thread.join(0.01)
    FakeGrid({})
    with socket.socket(socket.AF_UNIX) as nonsense:
        nonsense.connect(str(path))
        nonsense.sendall(b"\0\0\0\1{")
    app = light_app()
    grid = FakeGrid({11: app, 12: app}, {11: {"worker": str(path)}, 12: {"worker": str(path), "client": "ann"}})
    list(FlowerTransport(grid, 5).ask("query", [], 0))
    assert "Node 11 sent no valid list of clients" in caplog.text
    assert "the client's program raised KeyError; see the client's log" in caplog.text
    del grid.apps[11]
    assert FlowerTransport(grid, 5).await_clients(1, 5) == ["ann"]
    with pytest.raises(FileExistsError, match="Another worker uses the socket"):
        serve(whole, path)
    assert path.exists()
    path.unlink()
    path.write_text("my notes")
    with pytest.raises(FileExistsError, match="is not a socket"):
        serve(whole, path)
    assert path.read_text() == "my notes"


@pytest.mark.parametrize("name", ["class", "torch", "Flwr"])
def test_names_that_are_taken(name, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["flower", "new", str(tmp_path / name), "-c", "nowhere.yaml"])
    assert "Expected an unused package name" in capsys.readouterr().err
