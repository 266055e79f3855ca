"""``lightning-fed flower``: the app for a recipe, and the worker next to a client's data."""

import importlib
import sys
import threading
import tomllib
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

import lightning_fed.backends.flower.transport as flower_transport
from lightning_fed import Federation
from lightning_fed.backends.ddp.runner import DistributedRunner, build_runner
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.transport import FlowerTransport, from_records, to_records
from lightning_fed.backends.flower.worker import serve
from lightning_fed.backends.wire.packets import Packet, read_packet, write_packet
from lightning_fed.backends.wire.server import run_server
from lightning_fed.cli.main import main
from lightning_fed.cli.recipe_halves import read_recipe
from lightning_fed.recipe import FederatedCLI
from tests import models
from tests.backends.flower.grids import FakeGrid
from tests.backends.flower.halves import OPTIONS, SIZES, clients_of, in_process
from tests.recorders import assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]


@pytest.fixture
def imports(monkeypatch):
    """Removes modules imported by a test."""
    before = set(sys.modules)

    def find(folder):
        monkeypatch.syspath_prepend(str(folder))

    yield find
    for name in set(sys.modules) - before:
        if name.startswith("my_hospitals"):
            del sys.modules[name]


def shrunk(folder):
    """A recipe from the repository, with few clients and rounds."""
    text = (Path(__file__).parents[3] / "recipes" / "synthetic.yaml").read_text()
    quiet = "accelerator: cpu\n  enable_progress_bar: false\n  enable_model_summary: false"
    for long, short in {
        "num_clients: 30": "num_clients: 4",
        "clients_per_round: 10": "clients_per_round: 3",
        "local_epochs: 5": "local_epochs: 1",
        "max_rounds: 30": f"max_rounds: 2\n  {quiet}",
    }.items():
        assert long in text
        text = text.replace(long, short)
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_the_app_of_a_recipe_trains_as_the_recipe(tmp_path, monkeypatch, imports, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    recipe, app = shrunk(tmp_path), tmp_path / "my-hospitals"
    main(["flower", "new", str(app), "-c", str(recipe)])
    written = tomllib.loads((app / "pyproject.toml").read_text())
    components = written["tool"]["flwr"]["app"]["components"]
    imports(app)
    server = importlib.import_module(components["serverapp"].partition(":")[0])
    whole = importlib.import_module("my_hospitals.clients")
    light = importlib.import_module(components["clientapp"].partition(":")[0])
    assert isinstance(light.app, ClientApp)
    nodes = {node: {"partition-id": index, "num-partitions": 2} for index, node in enumerate((11, 12))}
    server.app(FakeGrid(dict.fromkeys(nodes, light.app), nodes), Context(1, 1, {}, RecordDict(), {}))
    here = FederatedCLI(["-c", str(recipe), "--trainer.logger", "false", "--trainer.callbacks", "null"], run=False)
    here.trainer.fit(here.model, datamodule=here.datamodule)
    state = torch.load(tmp_path / "runs" / "my-hospitals" / "last.ckpt", weights_only=True)["state_dict"]
    assert_same(state, state_of(here.model))
    capsys.readouterr()
    assert len(here.datamodule.clients) == 4
    assert whole.recipe.client_trainer["accelerator"] == "cpu"
    assert "logger" not in whole.recipe.client_trainer


def test_several_devices_of_a_recipe_are_processes_of_the_clients(tmp_path, monkeypatch):
    """The server trains nothing, so the server has one device; model and data can be sent to the processes."""
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    devices = ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.sync_batchnorm", "true"]
    recipe = read_recipe(shrunk(tmp_path), devices)
    assert not recipe.server_trainer.keys() & {"devices", "strategy"}
    assert recipe.client_trainer["sync_batchnorm"] is True
    on_cpus = {**recipe.client_trainer, "sync_batchnorm": False}
    runner = build_runner(recipe.federation, recipe.model, recipe.data, on_cpus, store=tmp_path)
    assert isinstance(runner, DistributedRunner)


def test_what_is_no_app(tmp_path, capsys):
    for args, message in (
        (
            ["new", str(tmp_path / "x"), "-c", "nowhere.yaml"],
            "Expected a recipe (a YAML file), but 'nowhere.yaml' does not exist",
        ),
        (["new", str(tmp_path / "1x"), "-c", "nowhere.yaml"], "a folder name with a letter at the start, but got '1x'"),
        (
            ["worker", str(tmp_path), "--socket", str(tmp_path / "s")],
            "Expected a folder from `lightning-fed flower new`",
        ),
    ):
        with pytest.raises(SystemExit):
            main(["flower", *args])
        assert message in capsys.readouterr().err


# --- Worker -----------------------------------------------------------------------------------------------------------


def light_app():
    text = (Path(models.__file__).parents[1] / "lightning_fed/backends/flower/template/client.py.txt").read_text()
    scope = {}
    exec(compile(text.format(package="package"), "client.py", "exec"), scope)
    return scope["app"]


def start_worker(app, socket):
    """Returns when the worker accepts connections: the socket's file exists earlier."""
    thread = threading.Thread(target=serve, args=(app, socket), daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            return Client(str(socket), family="AF_UNIX").close()
        except (FileNotFoundError, ConnectionRefusedError):
            thread.join(0.01)
    raise AssertionError("the worker has ended")


def test_visits_in_workers(federated_trainer, tmp_path, monkeypatch):
    """The file started by SuperNodes forwards messages to the worker and returns the answers, bit for bit."""

    def module():
        return models.Module(models.dropout_mlp(), models.momentum)

    monkeypatch.setattr(flower_transport, "_ARRAY", 500)  # splits messages into several parts
    data = models.vectors(SIZES)
    here, _ = in_process(federated_trainer, module, data, Federation(), 2)
    whole = client_app(Federation(), module, clients_of(data), OPTIONS, store=tmp_path / "clients")
    socket = tmp_path / "private" / "worker"
    start_worker(whole, socket)
    assert socket.parent.stat().st_mode & 0o077 == 0
    there = module()
    grid = FakeGrid({11: light_app()}, {11: {"worker": str(socket)}})
    transport = FlowerTransport(grid, 30, 0.01)
    run_server(
        Federation(),
        there,
        None,
        {**OPTIONS, "max_epochs": 2},
        transport,
        transport.await_clients(3, 1),
        tmp_path / "server",
    )
    assert_same(state_of(there), state_of(here))


def test_what_a_worker_cannot_answer(tmp_path):
    """Invalid messages are rejected, senders may disconnect, and the worker continues."""
    whole = client_app(Federation(), lambda: None, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path)
    socket = tmp_path / "private" / "worker"
    start_worker(whole, socket)
    app, context = light_app(), Context(1, 11, {"worker": str(socket)}, RecordDict(), {})
    FakeGrid({})
    with pytest.raises(ValueError, match="the message is not from lightning-fed"):
        app(Message(to_records(Packet("nonsense")), 11, "train"), context)
    with Client(str(socket), family="AF_UNIX") as connection:
        connection.send_bytes(b"{}")
    reply = app(Message(to_records(write_packet("hello", {})), 11, "query"), context)
    header, _ = read_packet(from_records(reply.content), "hello")
    assert header == {"clients": ["ann", "bob", "cid"]}
    nowhere = Context(1, 11, {"worker": str(tmp_path / "private" / "none")}, RecordDict(), {})
    with pytest.raises(FileNotFoundError):
        app(Message(to_records(write_packet("hello", {})), 11, "query"), nowhere)


def test_one_worker_for_several_nodes(tmp_path):
    """Data that depend on the node's configuration are separate, and read once per node."""
    read = []

    def data(node):
        read.append(node["client"])
        return {node["client"]: models.as_datasets(models.vectors(SIZES))["ann"]}

    runner = client_app(Federation(), lambda: None, data, OPTIONS, store=tmp_path).runner
    for name in ("a", "b", "a"):
        header, _ = read_packet(runner.answer("query", write_packet("hello", {}), {"client": name}), "hello")
        assert header == {"clients": [name]}
    assert read == ["a", "b"]


def test_a_folder_that_others_reach_is_refused(tmp_path):
    whole = client_app(Federation(), lambda: None, clients_of(models.vectors(SIZES)), store=tmp_path)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only you can access"):
        serve(whole, tmp_path / "open" / "worker")
    with pytest.raises(TypeError, match="Expected an app from `client_app`"):
        serve(ClientApp(), tmp_path / "private" / "worker")
