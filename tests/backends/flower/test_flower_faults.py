"""Faults between server and clients: clients are excluded, rounds continue, and no state is lost."""

import errno
import json
import os
import re
import tempfile
import time
from datetime import timedelta

import lightning as L
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message import message as message_module
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed import Federation
from lightning_fed.algorithms import FedFusion, FedPer
from lightning_fed.attacks import SignFlip
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.server import server_app
from lightning_fed.backends.flower.transport import FlowerTransport, from_records, to_records
from lightning_fed.backends.wire import answer_file, packets
from lightning_fed.backends.wire import transport as wire_transport
from lightning_fed.backends.wire.packets import Packet, PacketError, write_packet
from lightning_fed.backends.wire.server import run_server
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.callbacks import ClassPrototypes, OwnClassConfusion
from lightning_fed.client import client_store
from tests import models
from tests.backends.flower.grids import FakeGrid
from tests.backends.flower.halves import CASES, LOST, OPTIONS, SIZES, Loses, clients_of, in_process, on_flower
from tests.breadth import quick, slow
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def make_module():
    return models.Module(models.dropout_mlp(), models.momentum)


def spoilt(message_type, changes):
    """Changes each answer of the lost client, in every round differently."""

    def on_the_way(node, message, content):
        if message.metadata.message_type != message_type:
            return [content]
        visit = json.loads(from_records(message.content).text)["header"].get("visit") or {}
        is_lost = visit.get("client") == LOST and visit["round"] < len(changes)
        return changes[visit["round"]](content) if is_lost else [content]

    return on_the_way


def changed(text=None, **header):

    def change(content):
        packet = from_records(content)
        said = json.loads(text or packet.text)
        said["header"].update(header) if header else None
        return [to_records(Packet(json.dumps(said), packet.data))]

    return change


def table(change):
    def changed(content):
        packet = from_records(content)
        said = json.loads(packet.text)
        return [to_records(Packet(*change(said, packet.data)))]

    return changed


def poisoned(said, data):
    return json.dumps(said), b"\xff" * len(data)  # NaN


def reshaped(said, data):
    said["tensors"]["state"][0][2] = said["tensors"]["state"][0][2][::-1]
    return json.dumps(said), data


def retyped(said, data):
    said["tensors"]["state"][0][1] = "int32"
    return json.dumps(said), data


def renamed(said, data):
    said["tensors"]["state"][0][0] = "net.0.wight"
    return json.dumps(said), data


def huge(said, data):
    group = "state" if said["tensors"]["state"] else "extras"
    said["tensors"][group][0][2] = [2**40, 2**40]
    return json.dumps(said), data


def shaped(shape):
    def change(said, data):
        said["tensors"]["state"][0][2] = shape
        return json.dumps(said), data

    return change


def filled(value):
    def change(said, data):
        return json.dumps(said), torch.full((len(data) // 4,), value).numpy().tobytes()

    return change


def reshaped_statistics(said, data):
    said["tensors"]["extras"][0][2] = [2, 4]
    return json.dumps(said), data


NONSENSE = {
    "no answer": (lambda content: [], "the client did not answer within 0 s"),
    "empty": (lambda content: [RecordDict()], "not from lightning-fed"),
    "other records": (
        lambda content: [RecordDict({"packet": ConfigRecord({"text": 3}), "tensors": ArrayRecord()})],
        "not from lightning-fed",
    ),
    "no JSON": (table(lambda said, data: ("{", data)), "not from lightning-fed"),
    "deep JSON": (table(lambda said, data: ("[" * 100_000, data)), "not from lightning-fed"),
    "another version": (table(lambda said, data: (json.dumps({**said, "version": 99}), data)), "install the same"),
    "another's": (changed(client="ann"), "the answer is from client 'ann'"),
    "too few bytes": (table(lambda said, data: (json.dumps(said), data[:-4])), "more bytes than the message contains"),
    "too many bytes": (table(lambda said, data: (json.dumps(said), data + b"0000")), "but the message contains"),
    "not finite": (table(poisoned), "has NaN or infinite values"),
    "another shape": (table(reshaped), "has shape"),
    "another type": (table(retyped), "has dtype"),
    "another name": (table(renamed), "missing entries"),
    "a huge shape": (table(huge), "has the invalid row"),
    "a shape that is no list": (table(shaped({})), "has the invalid row"),
    "a shape whose product overflows": (table(shaped([2**47, 2**47, 0])), "has the invalid row"),
    "a header without end": (
        table(lambda said, data: (json.dumps({**said, "more": "x" * 2_000_000}), data)),
        "characters and",
    ),
    "tensors without end": (
        table(lambda said, data: (json.dumps(said), data + bytes(2**17))),
        "the limits are",
    ),
    "10**18 examples": (changed(num_samples=10**15), "the client reports 1000000000000000 examples"),
    "steps of a year": (changed(steps=10**9), "the client reports 1000000000 steps, but at most"),
    "weights that overflow": (table(filled(3e38)), "the root mean square of all values is inf, but the limit is 1e+10"),
    "a number for a name": (
        table(lambda said, data: (json.dumps({**said, "tensors": {"state": [[1, "float32", [1]]]}}), data)),
        "has the invalid row",
    ),
    "no examples": (changed(num_samples=0), "the client reports 0 examples"),
    "many examples": (changed(num_samples="many"), "'many' examples"),
    "no metrics": (changed(metrics=None), "the answer's header is invalid"),
    "a program that failed": (
        lambda content: [to_records(write_packet("fault", {"client": LOST, "reason": "gone"}))],
        "gone",
    ),
}


def test_answers_that_cannot_be_used(federated_trainer, tmp_path, caplog, monkeypatch):
    """A different invalid answer per round: the client is excluded by name; the run equals one process without it."""
    monkeypatch.setattr(packets, "_DATA", (2**16, 8))  # allows 64 KiB instead of 64 MiB
    data, rounds = models.vectors({"ann": 16, LOST: 16}), len(NONSENSE) + 1
    loses = Loses(rounds=range(len(NONSENSE)))
    here, _ = in_process(federated_trainer, make_module, data, Federation(seed=1), rounds, [loses])
    caplog.clear()
    changes, reasons = zip(*NONSENSE.values(), strict=True)
    there, trainer, _, _ = on_flower(
        tmp_path, make_module, data, lambda: Federation(seed=1), rounds, change=spoilt("train", changes), limit=0.5
    )
    assert_same(state_of(there), state_of(here))
    assert trainer.callbacks[0].rounds == rounds
    left_out = [message for message in caplog.messages if "is excluded" in message]
    for round, (message, reason) in enumerate(zip(left_out, reasons, strict=True)):
        assert message.startswith(f"Round {round + 1}: client {LOST!r} is excluded")
        assert reason in message


COUNTED = ["no JSON", "a huge shape", "not finite", "another name", "steps of a year"]  # counted as malicious
NOT_COUNTED = ["no answer", "a program that failed"]  # honest clients may fail like this


def test_a_robust_rule_counts_an_answer_that_was_refused(tmp_path, caplog):
    """Up to one of three is malicious: with one exposed client two updates suffice, otherwise three are needed."""
    names = [*COUNTED, *NOT_COUNTED]
    changes = [NONSENSE[name][0] for name in names]
    on_flower(
        tmp_path, make_module, models.vectors(SIZES), lambda: Federation("median:num_malicious=1", seed=1),
        len(names), change=spoilt("train", changes), limit=0.5,
    )  # fmt: skip
    failed = re.findall(r"Round (\d+).* with num_malicious=1 needs 3 valid updates, but the round has 2", caplog.text)
    assert [names[int(round) - 1] for round in dict.fromkeys(failed)] == NOT_COUNTED


def test_statistics_that_cannot_be_used(tmp_path, caplog):
    changes = [table(reshaped_statistics), table(poisoned), table(huge)]
    failed = []

    class Count(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            failed.append(trainer.callback_metrics["fed/failed"])

    on_flower(
        tmp_path, lambda: models.Module(models.norm_mlp(), models.momentum), models.vectors(SIZES), Federation,
        len(changes), change=spoilt("evaluate", changes), server_callbacks=[Count()],
    )  # fmt: skip
    excluded = [message for message in caplog.messages if "excluded" in message]
    reasons = ("does not fit the model", "NaN or infinite", "has the invalid row")
    for message, reason in zip(excluded, reasons, strict=True):
        assert message.startswith("The BatchNorm statistics of client 'bob' are excluded")
        assert reason in message
    assert failed == [0, 0, 0]


def test_an_answer_that_comes_twice(federated_trainer, tmp_path):
    data = models.vectors(SIZES)
    here, _ = in_process(federated_trainer, make_module, data, Federation(seed=1), 2)
    there, _, _, _ = on_flower(
        tmp_path, make_module, data, lambda: Federation(seed=1), 2, change=lambda node, message, content: [content] * 2
    )
    assert_same(state_of(there), state_of(here))


@pytest.mark.parametrize("looks", [slow(0), 3])
def test_a_node_that_goes_and_comes_back(looks, federated_trainer, tmp_path, caplog):
    """While away, clients are excluded; afterwards they take part under the node's new name.

    If the node does not list its clients at once, the round waits.
    """
    data = models.vectors(SIZES)

    class Coming(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            (cohort, grid) = trainer.callbacks[0].cohort, grids[0]
            if trainer.current_epoch == 0:
                grid.gone = {12}
            elif trainer.current_epoch == 1:
                grid.apps[13], grid.configs[13], grid.late[13] = grid.apps[12], grid.configs[12], looks
            assert len(cohort.visits) == 3

    grids = []
    there, _, _, _ = on_flower(
        tmp_path, make_module, data, lambda: Federation(seed=1), server_callbacks=[Coming()], grids=grids
    )
    here, _ = in_process(federated_trainer, make_module, data, Federation(seed=1), callbacks=[Loses()])
    assert_same(state_of(there), state_of(here))
    assert "Round 2: client 'bob' is excluded: the client is not connected." in caplog.text
    assert {node for node, message in grids[0].sent if message.metadata.group_id == "2"} == {11, 13}


def test_a_new_node_that_says_nothing_holds_up_no_round(monkeypatch, tmp_path, caplog):
    class Coming(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                grids[0].gone, grids[0].silent = {12}, {13}
                grids[0].apps[13] = grids[0].apps[12]

    monkeypatch.setattr("lightning_fed.backends.flower.transport._HELLO_SECONDS", 0.05)
    grids = []
    _, trainer, _, _ = on_flower(
        tmp_path, make_module, models.vectors(SIZES), Federation, server_callbacks=[Coming()], grids=grids, limit=3600
    )
    assert trainer.current_epoch == 3
    assert caplog.text.count("client 'bob' is excluded: the client is not connected.") == 2


@pytest.mark.parametrize(("days", "lost"), [slow((-1, ())), (1, ("bob", "cid"))])
def test_the_clock_of_the_servers_machine_is_set(days, lost, federated_trainer, tmp_path, monkeypatch, caplog):
    """Changed after the first answer of a round: no effect backwards; forwards, the other messages have expired.

    Only the lifetime of Flower's messages depends on this clock, not our time limits.
    """
    shift, of_machine, of_flower = [0.0], time.time, message_module.now
    monkeypatch.setattr(time, "time", lambda: of_machine() + shift[0])
    monkeypatch.setattr(message_module, "now", lambda: of_flower() + timedelta(seconds=shift[0]))

    def set_clock(node, message, content):
        shift[0] = 86400.0 * days if message.metadata.group_id in "12" else 0.0
        return [content]

    there, *_ = on_flower(tmp_path, make_module, models.vectors(SIZES), lambda: Federation(seed=1), change=set_clock)
    assert shift[0] == 86400.0 * days
    here, _ = in_process(
        federated_trainer,
        make_module,
        models.vectors(SIZES),
        Federation(seed=1),
        callbacks=[Loses(name) for name in lost],
    )
    assert_same(state_of(there), state_of(here))
    said = [f"Round 2: client {name!r} is excluded: Flower reports: the message has expired." for name in lost]
    assert [line.getMessage() for line in caplog.records if "Flower reports" in line.getMessage()] == said


def full(function, is_full):
    """Wraps a write function with an error for a full disk."""

    def write(*arguments, **options):
        if is_full(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*arguments, **options)

    return write


def test_a_client_whose_disk_is_full_misses_the_round(federated_trainer, tmp_path, monkeypatch, caplog):
    """The client cannot store its state, and resumes from the previous state once space is free."""
    case, written = CASES["kept heads"], []

    def is_full(copies, path, *_):
        written.append(str(path))
        return f"s-{LOST}" in str(path) and path.name.startswith("00000001")

    monkeypatch.setattr(client_store, "save_file", full(client_store.save_file, is_full))
    there, *_ = on_flower(tmp_path, case.module, case.data(SIZES), case.federation)
    assert sum(f"s-{LOST}" in path for path in written) == 3
    here, _ = in_process(federated_trainer, case.module, case.data(SIZES), case.federation(), callbacks=[Loses()])
    assert_same(state_of(there), state_of(here))
    assert f"Round 2: client {LOST!r} is excluded: the client's program raised OSError" in caplog.text


def test_full_disks_that_cost_nothing(tmp_path, monkeypatch, caplog, federated_trainer):
    """For a client's last answer, and for answers waiting on the server."""
    monkeypatch.setattr(answer_file, "atomic_write", full(answer_file.atomic_write, lambda *_: True))
    monkeypatch.setattr(wire_transport.tempfile, "TemporaryFile", full(tempfile.TemporaryFile, lambda *_: True))
    deadline = Deadline(5, min_clients=3, rest=5, reconnect=0)
    there, *_ = on_flower(tmp_path, make_module, models.vectors(SIZES), lambda: Federation(seed=1), limit=deadline)
    here, _ = in_process(federated_trainer, make_module, models.vectors(SIZES), Federation(seed=1))
    assert_same(state_of(there), state_of(here))
    assert "Cannot store the client's answer: OSError: [Errno 28] No space left on device" in caplog.text
    assert "An answer stays in memory, because a temporary file cannot be written" in caplog.text


# --- Killed server ----------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    pass


def head_module():
    return models.Module(models.BaseAndHead(), models.adam)


RESUMED = {
    "fedavg": (lambda: Federation(seed=1), make_module, list),
    "fedper": (lambda: Federation(FedPer("net.head.*"), optimizer_state="keep"), head_module, list),
    "fedmargin": (lambda: Federation("fedmargin"), make_module, lambda: [ClassPrototypes(lpm_before="last_local")]),
}  # fmt: skip


KILLS = [(name, moment) for name in RESUMED for moment in ("between rounds", "inside a round")]


@pytest.mark.parametrize(("name", "moment"), quick(KILLS, [("fedper", "inside a round")]))
def test_the_server_is_killed_and_started_again(name, moment, federated_trainer, tmp_path):
    federation, module, callbacks = RESUMED[name]
    data = models.vectors(SIZES)
    here, _ = in_process(federated_trainer, module, data, federation(), callbacks=callbacks())

    def killed(node, message, content):
        if moment == "inside a round" and message.metadata.group_id == "1" and is_of(message, "cid"):
            raise KilledError
        return [content]

    class Kill(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            if moment == "between rounds" and trainer.current_epoch == 1:
                raise KilledError

    with pytest.raises(KilledError):
        on_flower(tmp_path, module, data, federation, callbacks=callbacks, change=killed, server_callbacks=[Kill()])
    there, trainer, _, grid = on_flower(tmp_path, module, data, federation, callbacks=callbacks)
    assert_same(state_of(there), state_of(here))
    assert trainer.current_epoch == 3
    assert {message.metadata.group_id for _, message in grid.sent} == {"hello", "1", "2"}


def is_of(message, client):
    return json.loads(from_records(message.content).text)["header"]["visit"]["client"] == client


def test_a_client_whose_folder_is_lost(tmp_path, caplog):
    """The client reports the loss instead of starting anew."""
    data = models.vectors(SIZES)

    def lose(node, message, content):
        if message.metadata.group_id == "0" and is_of(message, LOST):
            lost.append(node)
        return [content]

    class Lose(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            for path in (tmp_path / f"{lost[0]}").rglob("*.safetensors"):
                path.unlink()

    lost = []
    on_flower(
        tmp_path, lambda: models.Module(models.BaseAndHead()), data, lambda: Federation(FedPer("net.head.*")),
        change=lose, rounds=2, server_callbacks=[Lose()],
    )  # fmt: skip
    assert "client 'bob' is excluded: the client has lost its state from round 1." in caplog.text


# --- Faulty programs --------------------------------------------------------------------------------------------------


def test_programs_that_all_fail_end_the_run(tmp_path):
    """Only after several rounds: clients' reports from a single round do not end the run."""

    class Broken(models.Module):
        def training_step(self, batch, batch_idx):
            raise KeyError("image")

    with pytest.raises(
        RuntimeError, match=r"3 consecutive failed rounds .* 3 of 3 clients failed, .*step raised KeyError"
    ):
        on_flower(tmp_path, lambda: Broken(models.mlp()), models.vectors(SIZES), Federation, 9)


def test_one_client_that_says_its_program_is_at_fault_ends_no_run(tmp_path, caplog):

    def on_the_way(node, message, content):
        if message.metadata.message_type != "train" or not is_of(message, LOST):
            return [content]
        return [to_records(write_packet("fault", {"client": LOST, "reason": "the client's program raised KeyError"}))]

    _, trainer, _, _ = on_flower(
        tmp_path, make_module, models.vectors(SIZES), lambda: Federation(clients_per_round=1, seed=2), 6,
        change=on_the_way,
    )  # fmt: skip
    assert trainer.current_epoch == 6
    left_out = [message for message in caplog.messages if "is excluded" in message]
    assert left_out
    assert all("client 'bob' is excluded: the client's program raised KeyError" in message for message in left_out)


@pytest.mark.parametrize(
    ("federation", "reason"),
    [
        (lambda: Federation(seed=5), "the client's federation has seed 5, but the server's federation has seed 0"),
        (lambda: Federation(frozen=["net.0.*"]), "server and client have different frozen entries"),
    ],
)
def test_halves_that_do_not_fit(federation, reason, tmp_path):
    apps = {11: client_app(federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / "c")}
    transport = FlowerTransport(FakeGrid(apps), 5, 0.01)
    with pytest.raises(RuntimeError, match=reason):
        run_server(
            Federation(),
            make_module,
            None,
            {**OPTIONS, "max_epochs": 1},
            transport,
            transport.await_clients(3, 1),
            tmp_path / "s",
        )


def test_frozen_entries_must_be_the_same(tmp_path):
    def make_other():
        module = make_module()
        with torch.no_grad():
            module.net[0].weight += 1
        return module

    apps = {
        11: client_app(
            Federation(frozen=["net.0.*"]), make_other, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / "c"
        )
    }
    transport = FlowerTransport(FakeGrid(apps), 5, 0.01)
    with pytest.raises(RuntimeError, match="server and client have different frozen entries"):
        run_server(
            Federation(frozen=["net.0.*"]), make_module, None, {**OPTIONS, "max_epochs": 1},
            transport, transport.await_clients(3, 1), tmp_path / "s",
        )  # fmt: skip


def test_clients_that_do_not_come(tmp_path):
    transport = FlowerTransport(FakeGrid({}), 1, 0.01)
    with pytest.raises(TimeoutError, match=r"did not connect within 0 s: the missing clients are \{'ann'\}"):
        transport.await_clients(["ann"], 0)
    with pytest.raises(TimeoutError, match="0 of 2 are connected"):
        transport.await_clients(2, 0)


def test_two_nodes_with_the_same_client(tmp_path, caplog):
    def app(node):
        return client_app(
            Federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / f"{node}"
        )

    grid = FakeGrid({node: app(node) for node in (11, 12)})
    transport = FlowerTransport(grid, 5, 0.01)
    assert list(transport.await_clients(3, 1)) == ["ann", "bob", "cid"]
    assert "Node 12 lists the clients ['ann', 'bob', 'cid'] of another node" in caplog.text
    run_server(Federation(), make_module, None, {**OPTIONS, "max_epochs": 1}, transport, ["ann", "bob"], tmp_path / "s")
    assert {node for node, message in grid.sent if message.metadata.group_id == "0"} == {11}


def test_an_answer_in_time_is_read_after_the_time_limit(tmp_path):
    """Answers are read in client order: an answer waiting behind a silent client is not lost."""
    apps = {
        node: client_app(
            Federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / f"{node}"
        )
        for node in (11, 12)
    }
    grid = FakeGrid(apps, {node: {"partition-id": index, "num-partitions": 2} for index, node in enumerate(apps)})
    transport = FlowerTransport(grid, 0.2, 0.01)
    transport.await_clients(3, 60)
    grid.silent.add(12)
    answers = transport.ask("query", ((client, write_packet("hello", {})) for client in ("bob", "cid")), 0)
    assert next(answers) == ("bob", "the client did not answer within 0 s")
    time.sleep(0.1)  # processing an answer takes time
    client, answer = next(answers)
    assert client == "cid"
    assert isinstance(answer, Packet)


def test_a_message_of_nonsense_to_a_client(tmp_path):
    app = client_app(Federation(), make_module, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / "c")
    with pytest.raises(ValueError, match="the message is not from lightning-fed"):
        app.runner.answer("train", Packet("{}"), {})
    with pytest.raises(ValueError, match="the train request is invalid"):
        app.runner.answer("train", write_packet("train", {"visit": {"client": "ann", "round": 0, "seed": 0}}), {})


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_what_needs_data_on_the_server_is_refused(tmp_path):
    data = models.vectors(SIZES)
    with pytest.raises(MisconfigurationException, match="`GradientCorrection` does not work yet with clients on other"):
        on_flower(tmp_path, make_module, data, lambda: Federation("feddane"))
    with pytest.raises(MisconfigurationException, match="`OwnClassConfusion` does not work yet"):
        on_flower(tmp_path, make_module, data, Federation, server_callbacks=[OwnClassConfusion()])
    with pytest.raises(
        MisconfigurationException, match=r"`AttackCheck` does not work yet .* name the malicious clients instead"
    ):
        on_flower(tmp_path, make_module, data, lambda: Federation(steps=[SignFlip(1)]))
    with pytest.raises(MisconfigurationException, match=r"`FeatureFusion` does not work yet.*batch_norm='recalibrate'"):
        on_flower(tmp_path, lambda: models.Module(models.cnn()), models.images(SIZES), lambda: Federation(FedFusion()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainer": {}}, "number of rounds as `max_epochs`, but got None"),
        ({"trainer": {"max_epochs": 1, "callbacks": []}}, r"without .* but got \['callbacks'\]"),
        ({"trainer": {"max_epochs": 1, "val_check_interval": 1}}, "without `val_check_interval`, .* but got 1: use"),
        ({"trainer": [1]}, "Expected `trainer` to be a mapping"),
        ({"clients": 0}, "Expected `clients` to be at least 1, but got 0"),
        ({"time_limit": 0}, r"Expected `seconds` above 0.* but got Deadline\(seconds=0"),
    ],
)
def test_arguments_of_the_server(arguments, message):
    given = {"trainer": {"max_epochs": 1}, "clients": 2, "folder": "x", **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        server_app(Federation(), make_module, **given)


def test_arguments_of_the_client(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"but got \['max_epochs'\]"):
        client_app(Federation(), make_module, {}, {"max_epochs": 3})
    app = client_app(Federation(), make_module, lambda node: [1], store=tmp_path)
    with pytest.raises(PacketError, match="the client's program raised MisconfigurationException"):
        app.runner.answer("query", write_packet("hello", {}), {})
    assert "Expected `data` to contain clients" in caplog.text
