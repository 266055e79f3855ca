"""Flower's processes on the loopback address: a SuperLink and two SuperNodes with workers."""

import csv
import multiprocessing
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from lightning_fed.backends.flower import client_app
from lightning_fed.backends.flower.worker import serve
from lightning_fed.backends.wire import packets
from lightning_fed.messages import tensor_bytes
from tests.backends.flower import process_kills
from tests.backends.flower.halves import (
    ALL_CASES,
    CASES,
    OPTIONS,
    SIZES,
    Loses,
    clients_of,
    in_process,
    replay,
)
from tests.backends.flower.processes import Deployment
from tests.backends.site.test_policy import lines_of, make_key, write_policy
from tests.crash_points import PROCESSES
from tests.recorders import assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.timeout(900),
]

TEMPLATE = Path(__file__).parents[3] / "lightning_fed" / "backends" / "flower" / "template" / "client.py.txt"


def write_app(folder):
    app = shutil.copytree(Path(__file__).parent / "app", folder / "app")
    (app / "fedapp" / "client.py").write_text(TEMPLATE.read_text().format(package="fedapp"))
    return app


def _work(name, folder, socket):
    case = ALL_CASES[name]
    federation = case.federation()
    app = client_app(
        federation, case.module, clients_of(case.data(SIZES), held_out=case.held_out()), {**OPTIONS, **case.options},
        callbacks=case.callbacks(), store=folder,
    )  # fmt: skip
    serve(app, socket)


class Workers:
    """One worker per node, not forked: a fork may hang after this process has used threads."""

    def __init__(self, folder, name):
        context = multiprocessing.get_context("spawn")
        self.processes = [
            context.Process(target=_work, args=(name, folder / f"store{node}", socket_of(folder, node)), daemon=True)
            for node in range(2)
        ]

    def __enter__(self):
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()


def socket_of(folder, node):
    return folder / f"node{node}" / "worker"


def start_node(deployment, node, *options, address=""):
    config = f'partition-id={node} num-partitions=2 worker="{socket_of(deployment.folder, node)}"'
    deployment.node(f"node{node}", config, *options, address=address)


def start_nodes(deployment):
    for node in range(2):
        start_node(deployment, node)


def run(deployment, app, folder, case="fedavg", rounds=3, limit=300.0, more=""):
    config = f'case="{case}" folder="{folder}" rounds={rounds} limit={limit} {more}'
    return deployment.run(app, "--run-config", config)


def finish(deployment, process, seconds=500):
    process.wait(seconds)
    assert "max_epochs" in deployment.log("run"), deployment.log("run")


def compare(folder, module):
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    assert_same(checkpoint["state_dict"], state_of(module))
    return checkpoint


@pytest.mark.slow
def test_two_rounds_on_two_nodes(federated_trainer, tmp_path):
    case = CASES["fedavg"]
    here, trainer = in_process(federated_trainer, case.module, case.data(SIZES), case.federation(), rounds=2)
    with Deployment(tmp_path) as deployment, Workers(tmp_path, "fedavg"):
        deployment.configure()
        start_nodes(deployment)
        finish(deployment, run(deployment, write_app(tmp_path), tmp_path / "run", rounds=2))
    checkpoint = compare(tmp_path / "run", here)
    assert checkpoint["global_step"] == trainer.global_step


@pytest.mark.slow
def test_evaluation_on_two_nodes(federated_trainer, tmp_path):
    """A server without data: values equal one process, in the fit and from the checkpoint."""
    case, tables = ALL_CASES["evaluated"], tmp_path / "tables"
    data, federation = case.data(SIZES), case.federation()
    _, trainer = in_process(federated_trainer, case.module, data, federation, 2, case.callbacks(), case.held_out())
    app, environment = write_app(tmp_path), {"TABLES": f"{tables}"}
    configured = (
        (app / "pyproject.toml").read_text().replace('"fedavg"', '"evaluated"').replace("rounds = 3", "rounds = 2")
    )
    (app / "pyproject.toml").write_text(configured.replace('folder = "."', f'folder = "{tmp_path / "run"}"'))
    with Deployment(tmp_path, environment=environment) as deployment, Workers(tmp_path, "evaluated"):
        deployment.configure()
        start_nodes(deployment)
        finish(deployment, run(deployment, app, tmp_path / "run", "evaluated", rounds=2))
        (tables / "clients.csv").unlink()
        command = ("lightning-fed", "flower", "evaluate", f"{app}", "here", "--stage", "test")
        assert deployment.start("evaluate", *command).wait(400) == 0, deployment.log("evaluate")
    checkpoint = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    found = checkpoint["callbacks"]["Federation"]["totals"]["last"]
    expected = trainer.federation.round_log.state_dict()["last"]
    names = [name for name in expected if name.startswith(("fed/val", "fed/all", "client/", "evaluation/"))]
    assert len(names) > 50
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-5)
    with (tables / "clients.csv").open() as file:
        rows = {row.pop("client"): row for row in csv.DictReader(file)}
    assert list(rows) == [*SIZES, "all"]
    keys = {client: f"client/{client}/{{}}" for client in SIZES} | {"all": "fed/{}/pooled"}
    evaluated = {
        keys[client].format(name): float(value)
        for client, row in rows.items()
        for name, value in row.items()
        if keys[client].format(name) in expected
    }
    assert len(evaluated) > 30
    assert evaluated == pytest.approx({name: expected[name] for name in evaluated}, rel=1e-5)


@pytest.mark.slow
def test_methods_on_two_nodes(federated_trainer, tmp_path):
    """After three rounds each method's global model equals one process."""
    with Deployment(tmp_path) as deployment:
        deployment.configure()
        start_nodes(deployment)
        app = write_app(tmp_path)
        for name in ("fedmargin", "fedss", "fedfusion", "deeplab", "secure sum"):
            case = CASES[name]
            here, _ = in_process(
                federated_trainer, case.module, case.data(SIZES), case.federation(), callbacks=case.callbacks()
            )
            with Workers(tmp_path, name):
                finish(deployment, run(deployment, app, tmp_path / name, name))
            compare(tmp_path / name, here)


@pytest.mark.slow
def test_answers_of_the_largest_size(federated_trainer, tmp_path):
    """An answer of 64 MB is used; a client with one more byte is excluded by name, with both numbers."""
    case, rounds = ALL_CASES["padded"], range(1)
    callbacks = [Loses("bob", rounds)]
    here, _ = in_process(federated_trainer, case.module, case.data(SIZES), case.federation(), len(rounds), callbacks)
    with Deployment(tmp_path) as deployment, Workers(tmp_path, "padded"):
        deployment.configure()
        start_nodes(deployment)
        finish(deployment, run(deployment, write_app(tmp_path), tmp_path / "run", "padded", rounds=len(rounds)))
        limit = packets._DATA[0] + packets._DATA[1] * tensor_bytes(here.state_dict())  # noqa: SLF001
        for round in rounds:
            assert f"Round {round + 1}: client 'bob' is excluded: the client's answer has" in deployment.log("run")
        assert deployment.log("run").count(f"{limit + 1} bytes, but the limits are") == len(rounds)
        assert deployment.log("run").count("is excluded") == len(rounds)
    compare(tmp_path / "run", here)


@pytest.mark.slow
def test_two_sites_with_policies(federated_trainer, tmp_path):
    """One policy permits the server's key; the other withholds entries, so the client is excluded by name."""
    case = CASES["fedavg"]
    here, _ = in_process(federated_trainer, case.module, case.data(SIZES), case.federation(), 2, [Loses("bob", (0, 1))])
    _, public = make_key(tmp_path / "keys", "server")
    write_policy(tmp_path / "store0", servers=[public])
    write_policy(tmp_path / "store1", servers=[public], entries=["net.0.*"])
    with Deployment(tmp_path) as deployment, Workers(tmp_path, "fedavg"):
        deployment.configure()
        start_nodes(deployment)
        key = f'key="{tmp_path / "keys" / "server"}"'
        finish(deployment, run(deployment, write_app(tmp_path), tmp_path / "run", rounds=2, more=key))
        for round in range(2):
            refused = f"Round {round + 1}: client 'bob' is excluded: the site does not answer this order"
            assert refused in deployment.log("run")
        assert deployment.log("run").count("is excluded") == 2
    compare(tmp_path / "run", here)
    assert {line["rule"]["servers"] for line in lines_of(tmp_path / "store0")} == {public}
    refused = [line["rule"].get("refused") for line in lines_of(tmp_path / "store1")]
    assert [rule for rule in refused if rule] == ["entries"] * 2


# --- Killed processes -------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(tmp_path, monkeypatch):
    """A file written by a visit before sleeping once; the environment names client and round."""

    def set_up(client, seconds):
        monkeypatch.setenv("SLEEPER", f"{client}:{seconds}:{tmp_path / 'asleep'}")
        return tmp_path / "asleep"

    return set_up


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_node_is_killed_in_a_visit(federated_trainer, tmp_path, sleeper):
    asleep, case = sleeper("bob", 300), CASES["sleeping"]
    here, _ = in_process(federated_trainer, case.module, case.data(SIZES), case.federation(), 2, [Loses()])
    asleep.unlink(missing_ok=True)
    with Deployment(tmp_path) as deployment, Workers(tmp_path, "sleeping") as workers:
        deployment.configure()
        start_nodes(deployment)
        process = run(deployment, write_app(tmp_path), tmp_path / "run", "sleeping", rounds=2)
        wait_until(asleep.exists)
        deployment.kill("node1")
        workers.processes[1].kill()
        finish(deployment, process)
        assert "Round 2: client 'bob' is excluded" in deployment.log("run")
        assert deployment.log("run").count("is excluded") == 1
    compare(tmp_path / "run", here)


@pytest.mark.slow
def test_the_server_is_killed_between_and_inside_rounds(federated_trainer, tmp_path, sleeper):
    """Restarted with the same folder, the run equals an uninterrupted run."""
    asleep, case = sleeper("cid", 5), CASES["sleeping"]
    here, _ = in_process(federated_trainer, case.module, case.data(SIZES), case.federation(), 3)
    asleep.unlink(missing_ok=True)
    with Deployment(tmp_path) as deployment, Workers(tmp_path, "sleeping"):
        deployment.configure()
        start_nodes(deployment)
        app, folder = write_app(tmp_path), tmp_path / "run"
        run(deployment, app, folder, "sleeping")
        wait_until((folder / "last.ckpt").exists)
        kill_server(deployment)
        run(deployment, app, folder, "sleeping")
        wait_until(asleep.exists)
        kill_server(deployment)
        finish(deployment, run(deployment, app, folder, "sleeping"))
    compare(folder, here)


@pytest.mark.slow
def test_a_killed_server_continues_asynchronous_rounds(federated_trainer, tmp_path, sleeper):
    """The server is killed twice, the second time while bob trains with an old model. The order replays bit for bit."""
    asleep, case = sleeper("bob", 5), ALL_CASES["buffered"]
    with Deployment(tmp_path) as deployment, Workers(tmp_path, "buffered"):
        deployment.configure()
        start_nodes(deployment)
        app, folder = write_app(tmp_path), tmp_path / "run"
        run(deployment, app, folder, "buffered", 12)
        wait_until((folder / "last.ckpt").exists)
        kill_server(deployment)
        run(deployment, app, folder, "buffered", 12)
        wait_until(asleep.exists)
        kill_server(deployment)
        finish(deployment, run(deployment, app, folder, "buffered", 12))
    module, order = replay(federated_trainer, folder, case, 12)
    compare(folder, module)
    assert len({client for _, client, _, _ in order}) == len(SIZES)
    assert any(version < arrived for arrived, _, version, _ in order)


def kill_server(deployment):
    assert deployment.server_apps()
    deployment.kill_server_app()
    deployment.kill("run")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", process_kills.POINTS)
@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_a_process_is_killed(process, point, tmp_path):
    ours, of_lightning = process_kills.compare(tmp_path, process, point)
    assert (ours, of_lightning) == ([], [])


# --- TLS and authentication -------------------------------------------------------------------------------------------

CERTIFICATES = """
openssl req -x509 -newkey rsa:2048 -nodes -days 365 -keyout ca.key -out ca.crt -subj "/CN=Our federation"
openssl req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj "/CN=127.0.0.1"
echo "subjectAltName = DNS:localhost, IP:127.0.0.1" > names.txt
openssl x509 -req -days 365 -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile names.txt -out server.crt
for node in node0 node1 stranger; do ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f $node.key; done
"""


def with_keys(folder):
    """A SuperLink with TLS that only admits registered nodes."""
    subprocess.run(["bash", "-ec", CERTIFICATES], cwd=folder, check=True, capture_output=True)
    link = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key")
    return Deployment(folder, (*link, "--enable-supernode-auth"))


def register(deployment):
    deployment.configure(f'root-certificates = "{deployment.folder}/ca.crt"')
    for node in range(2):
        name = f"register{node}"
        deployment.start(name, "flwr", "supernode", "register", f"node{node}.key.pub", "here").wait(60)
        assert "added successfully" in deployment.log(name) or "registered" in deployment.log(name)


def is_let_in(deployment, node, options):
    start_node(deployment, node, *options)
    name = f"node{node}"
    process = deployment.processes[name]
    since = f"process {process.pid}\n"
    said = lambda: "SuperNode ID" in deployment.log(name).partition(since)[2]  # noqa: E731
    wait_until(lambda: said() or process.poll() is not None)
    return said()


@pytest.mark.slow
@pytest.mark.parametrize("has_key", [False, True], ids=["another number", "the same number"])
def test_a_node_that_comes_back(has_key, tmp_path):
    """Killed between rounds and restarted: without a registered key the node gets another number.

    The node misses the round in which Flower detects the loss. With a key the number stays, and Flower admits the node
    only after this detection: operators must retry, and rounds started in the meantime continue without the node.
    """
    with with_keys(tmp_path) if has_key else Deployment(tmp_path) as deployment, Workers(tmp_path, "fedavg"):
        register(deployment) if has_key else deployment.configure()
        options = [
            ("--root-certificates", "ca.crt", "--auth-supernode-private-key", f"node{node}.key") if has_key else ()
            for node in range(2)
        ]
        for node in range(2):
            start_node(deployment, node, *options[node])
        process = run(deployment, write_app(tmp_path), tmp_path / "run", rounds=6, limit=120.0)
        wait_until((tmp_path / "run" / "last.ckpt").exists)
        deployment.kill("node1")
        refused = 0
        while not is_let_in(deployment, 1, options[1]):
            refused += 1
            time.sleep(5)
        finish(deployment, process)
        lost = re.findall(r"Round (\d+): client 'bob' is excluded", deployment.log("run"))
        numbers = re.findall(r'Node (\d+) serves the clients \["bob"\]', deployment.log("run"))
    first = int(lost[0]) if lost else 0
    assert lost == [f"{first + index}" for index in range(len(lost))]
    assert len(lost) <= (3 if has_key else 1)  # of six rounds
    assert len(set(numbers)) == (1 if has_key else 2)
    assert (refused > 0) == has_key


@pytest.mark.slow
def test_encrypted_and_authenticated(federated_trainer, tmp_path):
    case = CASES["fedavg"]
    here, _ = in_process(federated_trainer, case.module, case.data(SIZES), case.federation(), 2)
    with with_keys(tmp_path) as deployment, Workers(tmp_path, "fedavg"):
        register(deployment)
        known = ("--root-certificates", "ca.crt")
        for node in range(2):
            start_node(deployment, node, *known, "--auth-supernode-private-key", f"node{node}.key")
        everything = f'worker="{socket_of(tmp_path, 0)}"'
        deployment.node("stranger", everything, *known, "--auth-supernode-private-key", "stranger.key")
        deployment.node("keyless", everything, *known)
        deployment.node("plain", everything, "--insecure")
        for name in ("stranger", "keyless"):
            assert deployment.processes[name].wait(60) != 0
            assert "SuperNode ID" not in deployment.log(name)
        finish(deployment, run(deployment, write_app(tmp_path), tmp_path / "run", rounds=2))
        assert "SuperNode ID" not in deployment.log("plain")
        activated = re.findall(r"Activated node_id", deployment.log("superlink"))
        assert len(activated) == 2
    compare(tmp_path / "run", here)
