"""Client stores: versions, resuming, crashes, names."""

import copy
import io
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fed.client.client_store
from lightning_fed import ClientFault, FederatedCallback, FederatedDataModule, FederatedTrainer, Federation
from lightning_fed.client.client_store import FolderStore, MemoryStore
from tests.breadth import quick
from tests.models import Module, momentum

NAMES = [
    "plain",
    "a/b",
    "a\\b",
    "/absolute",
    "..",
    ".",
    "",
    " ",
    "dots.in.it",
    "per%20cent",
    "Klinikum Großhadern",
    "病院",
    "new\nline",
    "nul\0",
    "*",
    "é" * 100,
    "/data/hospitals/" * 30,
    "/data/hospitals/" * 30 + "other",
    "\udcff",  # a file name that is not UTF-8, as decoded by Python
    "1",
    1,
    0,
    -1,
    10**30,
]


def value(number):
    return {"head": torch.full((2,), float(number))}


def number(state):
    return None if state is None else int(state["head"][0])


@pytest.fixture(params=["memory", "folder"])
def make(request, tmp_path):
    """Makes stores; the stores of one test share a folder, as restarted processes do."""

    def make_store():
        return MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "clients")

    return make_store


def reopened(make, store, round):
    """Simulates a new process resumed from a checkpoint, with only the file and the folder."""
    buffer = io.BytesIO()
    torch.save(store.checkpoint(round), buffer)
    buffer.seek(0)
    restored = make()
    restored.restore(round, torch.load(buffer, weights_only=True))
    return restored


# --- Both kinds -------------------------------------------------------------------------------------------------------


def test_the_newest_is_what_is_got(make):
    store = make()
    assert store.get("a") is None
    for round in (0, 1, 4):
        store.put("a", round, value(round))
        assert number(store.get("a")) == round
    assert store.get("b") is None
    store.put("a", 4, value(9))  # again in the same round
    assert number(store.get("a")) == 9


def test_copies_are_kept(make):
    store, state = make(), value(1)
    store.put("a", 0, state)
    state["head"].zero_()
    assert number(store.get("a")) == 1


def test_names(make):
    store = make()
    for index, client in enumerate(NAMES):
        assert store.get(client) is None
        store.put(client, 0, value(index))
    assert [number(store.get(client)) for client in NAMES] == list(range(len(NAMES)))
    names = [client for client in NAMES if client != 10**30]  # a checkpoint holds 64 bits
    resumed = reopened(make, store, 1)
    assert [number(resumed.get(client)) for client in names] == [NAMES.index(client) for client in names]


def test_numpys_names_are_pythons(make):
    """Client names often come from an array, and a checkpoint of such names must load."""
    store = make()
    store.put(np.str_("a"), 0, value(1))
    store.put(np.int64(7), 0, value(2))
    store.put("7", 0, value(3))
    assert [number(store.get(client)) for client in ("a", 7, "7")] == [1, 2, 3]
    resumed = reopened(make, store, 1)
    assert [number(resumed.get(client)) for client in ("a", np.str_("a"), 7, np.int64(7), "7")] == [1, 1, 2, 2, 3]


def test_values_come_back_as_they_were(make):
    values = torch.arange(6.0)
    state = {
        "half": values.half(),
        "brain": values.bfloat16(),
        "double": values.double() / 3,
        "complex": torch.complex(values, -values),
        "bool": values > 2,
        "byte": values.byte(),
        "integer": torch.tensor(2**62 + 1),
        "scalar": torch.tensor(1 / 3),
        "none": torch.zeros(0, 3),
        "transposed": values.view(2, 3).T,
        "expanded": torch.ones(1).expand(4),
        "parameter": nn.Parameter(values.clone()),
        "same memory": values,
        "and its view": values.view(2, 3)[1],
        "optimizer:0:1:momentum_buffer:tensor": values.clone(),
    }
    store = make()
    store.put("a", 0, state)
    for candidate in (store, reopened(make, store, 1)):
        state_read = candidate.get("a")
        assert state_read.keys() == state.keys()
        for name, expected in state.items():
            assert state_read[name].dtype == expected.dtype
            assert state_read[name].shape == expected.shape
            assert torch.equal(state_read[name], expected), name
            assert not state_read[name].requires_grad


def test_going_back_to_the_last_checkpoint(make):
    """Later versions are dropped, including a client's only version."""
    store = make()
    store.put("a", 0, value(0))
    store.put("b", 1, value(1))
    resumed = reopened(make, store, 2)
    assert [number(resumed.get(client)) for client in "abc"] == [0, 1, None]
    crashed = reopened(make, store, 2)
    crashed.put("a", 2, value(20))
    crashed.put("c", 2, value(22))
    buffer = io.BytesIO()
    torch.save(crashed.checkpoint(2), buffer)  # inside round 2
    buffer.seek(0)
    resumed = make()
    resumed.restore(2, torch.load(buffer, weights_only=True))
    assert [number(resumed.get(client)) for client in "abc"] == [0, 1, None]
    resumed.put("c", 2, value(5))
    assert [number(resumed.get(client)) for client in "abc"] == [0, 1, 5]


def test_a_checkpoint_inside_a_round_has_no_part_of_it(make):
    store = make()
    store.put("a", 0, value(0))
    store.checkpoint(1)
    store.put("a", 1, value(10))
    store.put("b", 1, value(11))
    assert [number(store.get(client)) for client in "ab"] == [10, 11]
    resumed = reopened(make, store, 1)
    assert [number(resumed.get(client)) for client in "ab"] == [0, None]
    assert [number(store.get(client)) for client in "ab"] == [10, 11]  # the running store is unaffected
    resumed = reopened(make, store, 2)
    assert [number(resumed.get(client)) for client in "ab"] == [10, 11]


def test_starting_anew(make):
    store = make()
    for round, client in itertools.product(range(3), "ab"):
        store.put(client, round, value(round))
        store.checkpoint(round + 1)
    store.restore(0, {})
    assert [store.get(client) for client in "ab"] == [None, None]
    store.checkpoint(1)  # a round without a stored client
    store.put("a", 1, value(7))
    store.checkpoint(2)
    assert [number(store.get(client)) for client in "ab"] == [7, None]
    resumed = reopened(make, store, 2)
    assert [number(resumed.get(client)) for client in "ab"] == [7, None]  # none from the previous run


def test_every_history(make):
    generator = np.random.default_rng(0)
    clients = "abcd"
    for _ in range(6):
        store = make()
        store.restore(0, {})
        expected, history, checkpoints = {}, {0: {}}, {}
        for round in range(8):
            for client in clients:
                if generator.random() < 0.5:
                    expected[client] = 10 * round + clients.index(client)
                    store.put(client, round, value(expected[client]))
            checkpoints[round + 1] = store.checkpoint(round + 1)
            history[round + 1] = dict(expected)
            if generator.random() < 0.4:  # killed in the next round, and resumed
                back = round + 1 - int(generator.random() < 0.5)
                for client in clients[:2]:
                    store.put(client, round + 1, value(-1))
                store = make()
                store.restore(back, checkpoints.get(back, {}))
                expected = dict(history[back])
                assert {client: number(store.get(client)) for client in clients} == {
                    client: expected.get(client) for client in clients
                }
                store.checkpoint(back)
                checkpoints[round + 1], history[round + 1] = checkpoints.get(back, {}), dict(expected)
                break


# --- In memory --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_in_memory_is_a_copy():
    store = MemoryStore()
    store.put("a", 0, value(1))
    state = store.checkpoint(1)
    store.put("a", 1, value(2))
    store.get("a")["head"].zero_()
    assert number(state["states"][0]) == 1


# --- In a folder ------------------------------------------------------------------------------------------------------


def files(folder, client="s-a"):
    return sorted(path.name for path in (folder / "run-0" / client).iterdir())


def test_kills_after_the_write_add_no_files(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)
    store.put("a", 0, value(0))
    state = store.checkpoint(1)

    def kill(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_fed.atomic_files.sync_folder", kill)
    for round in (1, 2, 3):
        store = FolderStore(tmp_path)
        store.restore(1, state)
        with pytest.raises(KeyboardInterrupt):
            store.put("a", round, value(round))
        assert files(tmp_path) == ["00000000.safetensors", f"{round:08d}.safetensors"]


def test_names_stay_in_the_folder(tmp_path):
    store = FolderStore(tmp_path / "clients")
    for client in NAMES:
        store.put(client, 0, value(1))
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
    assert [path.name for path in (tmp_path / "clients").iterdir()] == ["run-0"]
    folders = list((tmp_path / "clients" / "run-0").iterdir())
    assert len(folders) == len(NAMES)
    assert all(path.is_dir() and len(list(path.iterdir())) == 1 for path in folders)


def test_old_versions_are_deleted(tmp_path):
    """Versions for two checkpoints are kept: the earlier serves if the last checkpoint is incomplete."""
    store = FolderStore(tmp_path)
    for round in range(6):
        store.put("a", round, value(round))
        if round < 2:
            store.put("seldom", round, value(round))
        store.checkpoint(round + 1)
        assert files(tmp_path) == [f"{version:08d}.safetensors" for version in range(max(round - 1, 0), round + 1)]
    assert files(tmp_path, "s-seldom") == ["00000001.safetensors"]
    for back, expected in ((6, [5, 1]), (5, [4, 1])):
        resumed = FolderStore(tmp_path)
        resumed.restore(back, {"folder": str(tmp_path), "run": 0})
        assert [number(resumed.get(client)) for client in ("a", "seldom")] == expected


def test_the_number_of_files_does_not_grow(tmp_path):
    store = FolderStore(tmp_path)
    generator = np.random.default_rng(1)
    for round in range(60):
        for client in generator.choice(10, 3, replace=False).tolist():
            store.put(client, round, value(round))
        if round % 3 == 2:
            store.checkpoint(round + 1)
            assert len(list(tmp_path.rglob("*.safetensors"))) <= 3 * 10 + 9


def test_resuming_from_a_checkpoint_that_is_too_old(tmp_path):
    """The error replaces a silent restart without client state."""
    store = FolderStore(tmp_path)
    for round in range(6):
        store.put("a", round, value(round))
        store.checkpoint(round + 1)
    for back in range(1, 5):
        with pytest.raises(ValueError, match=rf"after {back} rounds, .* from 5 rounds on"):
            FolderStore(tmp_path).restore(back, {"folder": str(tmp_path), "run": 0})
    FolderStore(tmp_path).restore(5, {"folder": str(tmp_path), "run": 0})
    anew = FolderStore(tmp_path)
    anew.restore(0, {})
    anew.put("a", 0, value(0))
    FolderStore(tmp_path).restore(1, anew.checkpoint(1))


def test_half_written_files_are_ignored(tmp_path):
    store = FolderStore(tmp_path)
    store.put("a", 0, value(0))
    (tmp_path / "run-0" / "s-a" / "00000001-0.partial").write_bytes(b"half")
    (tmp_path / "run-0" / "s-b").mkdir()
    (tmp_path / "run-0" / "s-b" / "00000000-0.partial").write_bytes(b"")
    (tmp_path / "run-0" / "oldest.partial").write_text("")
    resumed = FolderStore(tmp_path)
    resumed.restore(1, {"folder": str(tmp_path), "run": 0})
    assert number(resumed.get("a")) == 0
    assert resumed.get("b") is None
    resumed.put("a", 1, value(1))
    assert files(tmp_path) == ["00000000.safetensors", "00000001.safetensors"]


def test_a_put_that_fails_leaves_the_old_version(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)
    store.put("a", 0, value(0))

    def disk_full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("lightning_fed.client.client_store.save_file", disk_full)
    for round in (0, 1):
        with pytest.raises(OSError, match="No space"):
            store.put("a", round, value(1))
    assert number(store.get("a")) == 0


def test_versions_of_a_run_that_is_replaced(tmp_path):
    """A run resumed from an earlier round ignores versions of later rounds from the abandoned run."""
    store = FolderStore(tmp_path)
    for round in range(2):
        store.put("a", round, value(round))
        store.checkpoint(round + 1)
    store.put("a", 2, value(2))
    store.put("b", 2, value(2))
    resumed = FolderStore(tmp_path)
    resumed.restore(1, {"folder": str(tmp_path), "run": 0})
    assert number(resumed.get("a")) == 0
    resumed.put("a", 1, value(100))
    assert number(resumed.get("a")) == 100
    assert files(tmp_path) == ["00000000.safetensors", "00000001.safetensors"]
    resumed.checkpoint(3)  # without clients in round 2
    again = FolderStore(tmp_path)
    again.restore(3, {"folder": str(tmp_path), "run": 0})
    assert number(again.get("a")) == 100


def test_a_folder_of_several_runs(tmp_path):
    """A run never sees or deletes another run's clients."""
    checkpoints = []
    for run in range(3):
        store = FolderStore(tmp_path)
        store.restore(0, {})
        assert store.get("a") is None
        store.put("a", 0, value(run))
        if run == 1:
            store.put("b", 0, value(10))
        checkpoints.append(store.checkpoint(1))
    for run in (2, 0, 1):
        resumed = FolderStore(tmp_path)
        resumed.restore(1, checkpoints[run])
        assert number(resumed.get("a")) == run
        assert number(resumed.get("b")) == (10 if run == 1 else None)
    assert number(FolderStore(tmp_path).get("a")) == 2  # read-only: the last run


def test_the_other_kind_of_store(tmp_path):
    memory, folder = MemoryStore(), FolderStore(tmp_path)
    memory.put("a", 0, value(0))
    folder.put("a", 0, value(0))
    with pytest.raises(ValueError, match="set store=None"):
        folder.restore(1, memory.checkpoint(1))
    with pytest.raises(ValueError, match="set store='"):
        memory.restore(1, folder.checkpoint(1))


# --- In a fit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick([str, int, np.str_, np.int64], [np.str_, np.int64]))
def test_checkpoints_of_any_clients_load(kind, tmp_path):
    """With `weights_only=True`, and into a new federation."""
    data = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.randint(0, 2, (4,)))

    def trainer(rounds):
        return FederatedTrainer(
            max_rounds=rounds,
            personal=["net.1.*"],
            optimizer_state="keep",
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )

    clients = FederatedDataModule({kind(name): data for name in (1, 2)}, data)
    first = trainer(1)
    first.fit(Module(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))), datamodule=clients)
    path = first.checkpoint_callback.best_model_path
    checkpointed = torch.load(path, weights_only=True)["callbacks"]["Federation"]["store"]
    assert checkpointed["clients"] == [str(kind(1)), str(kind(2))] if issubclass(kind, str) else [1, 2]
    second = trainer(2)
    second.fit(Module(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))), datamodule=clients, ckpt_path=path)
    assert second.callback_metrics["fed/clients"] == 2


def test_two_fits_with_one_folder(tmp_path):
    data = [torch.utils.data.TensorDataset(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range(5)]
    federation = Federation(clients_per_round=2, personal=["net.1.*"], store=tmp_path / "clients", seed=0)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        module = Module(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
        trainer = FederatedTrainer(
            max_rounds=4,
            federation=federation,
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, data, data[0])
        results.append(module.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert sorted(path.name for path in (tmp_path / "clients").iterdir()) == ["run-0", "run-1"]


def test_who_has_nothing_more_is_forgotten(make):
    """Forgotten from this round on: a checkpoint before or inside the round still has the earlier state."""
    store = make()
    for client in ("a", "b"):
        store.put(client, 0, value(0))
    before = copy.deepcopy(store.checkpoint(1))
    store.put("a", 1, {})
    assert store.get("a") is None
    inside = copy.deepcopy(store.checkpoint(1))
    after = copy.deepcopy(store.checkpoint(2))
    assert "a" not in after.get("clients", "")
    store.put("b", 2, value(2))
    assert store.get("a") is None
    for round, state, expected in ((1, before, 0), (1, inside, 0), (2, after, None)):
        resumed = make()
        resumed.restore(round, state)
        assert (number(resumed.get("a")), number(resumed.get("b"))) == (expected, 0)
    store.put("a", 3, value(3))
    assert number(store.get("a")) == 3


def test_processes_forget_the_same_client(tmp_path, monkeypatch):
    """Concurrent processes tolerate files deleted by the other process."""
    first, second = (FolderStore(tmp_path) for _ in range(2))
    first.put("a", 0, value(0))
    for rank, store in enumerate((first, second)):
        store.restore(1, {"folder": str(tmp_path), "run": 0})
        store.start(SimpleNamespace(size=2, rank=rank, broadcast=lambda run: run))
    save = lightning_fed.client.client_store.save_file

    def and_the_other(tensors, path, metadata):
        save(tensors, path, metadata)
        monkeypatch.setattr("lightning_fed.client.client_store.save_file", save)
        second.put("a", 1, {})

    monkeypatch.setattr("lightning_fed.client.client_store.save_file", and_the_other)
    first.put("a", 1, {})
    assert [store.get("a") for store in (first, second)] == [None, None]
    assert files(tmp_path) == ["00000000.safetensors", "00000001.safetensors"]


# --- Missing and damaged files ----------------------------------------------------------------------------------------


def the_file(folder):
    return next(folder.rglob("*.safetensors"))


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a folder that is gone": (lambda path: shutil.rmtree(path.parent), "is missing"),
    "a file that is gone": (lambda path: path.unlink(), "is missing"),
    "another byte": (flip_a_byte, "has changed in the file since the last write: wrong checksum"),
    "no checksum": (
        lambda path: save_file(load_file(path), path),
        "has changed in the file since the last write: wrong checksum",
    ),
    "an empty file": (lambda path: path.write_bytes(b""), "cannot be read"),
    "something else": (lambda path: path.write_text("my notes"), "cannot be read"),
}


@pytest.mark.parametrize("is_resumed", [False, True], ids=["in the run", "after a resume"])
@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_noticed_and_the_file_named(damage, reason, is_resumed, tmp_path, caplog):
    store = FolderStore(tmp_path)
    store.put("a", 0, value(0))
    store.put("b", 0, value(1))
    damage(the_file(tmp_path / "run-0" / "s-a"))
    if is_resumed:
        state = torch.load(io.BytesIO(saved(store.checkpoint(1))), weights_only=True)
        store = FolderStore(tmp_path)
        store.restore(1, state)
    # without the path, which contains the client
    with pytest.raises(ClientFault, match=f"^the client's stored state {reason}$"):
        store.get("a")
    assert str(tmp_path / "run-0" / "s-a") in caplog.text
    assert number(store.get("b")) == 1
    assert store.get("c") is None


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_a_checkpoint_inside_a_round_does_not_miss_what_the_round_wrote(tmp_path):
    store = FolderStore(tmp_path)
    store.put("a", 0, value(0))
    store.checkpoint(1)
    store.put("a", 1, value(1))
    store.put("b", 1, value(1))
    inside = store.checkpoint(1)
    assert inside["kept"] == ["a"]
    resumed = FolderStore(tmp_path)
    resumed.restore(1, inside)
    assert (number(resumed.get("a")), resumed.get("b")) == (0, None)


def test_files_of_others_are_left_alone(tmp_path):
    store = FolderStore(tmp_path)
    store.put("a", 0, value(0))
    (tmp_path / "run-old").mkdir()
    (tmp_path / "run-1.zip").touch()
    (tmp_path / "run-0" / "s-a" / "best.safetensors").write_text("mine")
    (tmp_path / "run-0" / "s-a" / "00000000.safetensors.bak").write_text("mine")
    assert number(store.get("a")) == 0
    store.put("a", 1, value(1))
    store.checkpoint(2)
    anew = FolderStore(tmp_path)
    anew.restore(0, {})
    anew.put("a", 0, value(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0", "run-1", "run-1.zip", "run-old"]
    assert (tmp_path / "run-0" / "s-a" / "best.safetensors").read_text() == "mine"


def test_a_client_whose_folder_is_gone_is_left_out(tmp_path, caplog):

    class Lose(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                shutil.rmtree(tmp_path / "run-0" / "s-a")

    data = {name: TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long)) for name in "abc"}
    trainer = FederatedTrainer(
        max_rounds=2, personal=["net.bias"], store=tmp_path, accelerator="cpu", logger=False, callbacks=[Lose()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Module(nn.Linear(2, 3)), data, data)
    assert "Round 2: client 'a' is excluded: the client's stored state is missing." in caplog.text
    assert "Client 'a' does not answer: the client's stored state is missing." in caplog.text
    assert trainer.callback_metrics["fed/clients"] == 2


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_client_that_is_lost_before_batch_norm_is_measured_is_left_out_of_that(tmp_path, federated_trainer, caplog):
    class Lose(FederatedCallback):
        def on_server_aggregate(self, trainer, module, state):
            shutil.rmtree(tmp_path / "run-0" / "s-a")

    measured = []

    class Sees(FederatedCallback):
        def on_model_loaded(self, trainer, module, client):
            measured.append(client)

    data = {name: TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long)) for name in "abc"}
    trainer = federated_trainer(
        max_rounds=1, personal=["net.1.*"], batch_norm="recalibrate", store=tmp_path, callbacks=[Lose(), Sees()]
    )
    net = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 3))
    trainer.fit(Module(net), datamodule=FederatedDataModule(data))
    assert (
        "The BatchNorm statistics of client 'a' are excluded: ClientFault: the client's stored state is missing."
        in caplog.text
    )
    assert measured == ["b", "c", None]
    assert trainer.current_epoch == 1


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("optimizer_state", ["reset", "keep"])
def test_a_visit_reads_what_its_client_has_kept_once(optimizer_state, tmp_path, federated_trainer):
    read = []

    class Counting(FolderStore):
        def get(self, client):
            read.append(client)
            return super().get(client)

    data = {name: TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long)) for name in "ab"}
    trainer = federated_trainer(
        max_rounds=3, personal=["net.bias"], store=Counting(tmp_path), optimizer_state=optimizer_state
    )
    trainer.fit(Module(nn.Linear(2, 3), momentum), datamodule=FederatedDataModule(data))
    assert read[-4:] == ["a", "b"] * 2


def test_without_checkpoints_the_folder_does_not_grow(tmp_path):
    """A late checkpoint, or a checkpoint inside a round, still finds the required versions."""
    store = FolderStore(tmp_path)
    for round in range(6):
        store.put("a", round, {"head": torch.tensor([float(round)])})
        store.commit(round, ["a"])
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    inside = store.checkpoint(5)
    other = FolderStore(tmp_path)
    other.restore(5, inside)
    assert float(other.get("a")["head"]) == 4
    store.commit(5, [])
    assert float(store.get("a")["head"]) == 4


@pytest.mark.parametrize("run", ["../../..", -1, True, "0"])
def test_a_checkpoint_names_no_path(run, tmp_path):
    with pytest.raises(ValueError, match="Expected `run` to be an integer >= 0, but the checkpoint has"):
        FolderStore(tmp_path).restore(1, {"run": run})
