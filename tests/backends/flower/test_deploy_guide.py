"""The commands in the deployment guide, then an attacker with the server's `ca.crt`."""

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("flwr")

from flwr.supercore.runtime import runtime_http_client

from tests.backends.flower.processes import ROOT, free_port
from tests.recorders import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]

PAGE = ROOT / "docs" / "guides" / "deploy.md"
RECIPE = """
seed_everything: 0
model:
  class_path: ClassificationTask
  init_args: {model: mlp, in_channels: 60, input_size: 1, model_kwargs: {hidden: [8]}, num_classes: 10, lr: 0.05}
data: {class_path: Synthetic, init_args: {num_clients: 6, batch_size: 20}}
trainer:
  max_rounds: ROUNDS
  method: fedavg
  accelerator: cpu
  logger: false
  callbacks:
    - {class_path: ModelCheckpoint, init_args: {dirpath: checkpoints, save_last: true}}
"""
SERVER = "fed.example.org:9092"
HERE = "localhost:9092"


def read_commands():
    """Command lines of the section, in order."""
    page = PAGE.read_text()
    (new,) = re.findall(r"^    (lightning-fed flower new .*)$", page, re.M)
    section = page.split("## Several machines")[1].split("\n### Open ports")[0]
    return [new, *(line.strip().replace(SERVER, HERE) for line in section.splitlines() if line.startswith("    "))]


class Shell:
    """Runs command lines in a shell with a separate home folder."""

    def __init__(self, folder):
        self.folder, self.background = folder, []
        self.environment = {
            **os.environ, "HOME": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }  # fmt: skip
        self.environment.pop("FLWR_HOME", None)

    def run(self, line, seconds=600):
        result = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
        return result.returncode, result.stdout + result.stderr

    def start(self, line, ready):
        log = self.folder / f"{len(self.background)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=self.folder, env=self.environment, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        self.background.append(process)
        wait_for(lambda: ready in log.read_text() or process.poll() is not None, 900)
        assert ready in log.read_text(), log.read_text()[-3000:]
        return process

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.background):
            process.terminate()
        for process in self.background:
            process.wait(60)


def wait_for(happens, seconds=300):
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def skip_if_taken(*ports):
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                pytest.skip(f"Port {port}, which the page names, is taken on this machine.")


def follow(shell):
    """Runs the commands of the page; returns the started run."""
    for line in read_commands():
        if line.startswith("export "):
            name, value = line.removeprefix("export ").split("=")
            shell.environment[name] = value
        elif "start_server.sh" in line:
            shell.start(line, "Nodes connect to the server at")
        elif "start_node.sh" in line:
            shell.start(line, "Waiting for messages at")
        elif line.startswith("flwr run"):
            return line
        else:
            status, said = shell.run(line)
            assert status == 0, f"{line}\n{said}"
            if line.startswith("lightning-fed doctor"):
                assert [part.partition(":")[0] for part in said.splitlines()][-6:] == [
                    "name", "port", "certificate", "gateway", "version", "clock", "key",
                ][-6:]  # fmt: skip
    raise AssertionError("the page does not start a run")


def test_the_guide_and_a_stranger(tmp_path):
    skip_if_taken(9092, 8000)
    (tmp_path / "synthetic.yaml").write_text(RECIPE.replace("ROUNDS", "3"))
    status, said = Shell(tmp_path).run("lightning-fed fit -c synthetic.yaml")
    assert status == 0, said
    (tmp_path / "checkpoints").rename(tmp_path / "one-process")
    with Shell(tmp_path) as shell:
        run = follow(shell)
        running = shell.start(run, "SuperLink")
        flood = exhaust(tmp_path / "hospitals" / "keys" / "ca.crt")
        wait_for(lambda: (tmp_path / "runs" / "hospitals" / "last.ckpt").exists(), 600)
        for action, refusal in be_a_stranger(shell, tmp_path):
            assert refusal, f"the stranger can {action}"
        running.wait(600)
        for connection in flood:
            connection.close()
        assert len(shell.run("flwr supernode list here --format json")[1].split('"node-id"')) == 1 + 3
        runs = shell.run("flwr list here --format json")[1]
        assert len(re.findall('"run-id"', runs)) == 1
        assert "finished:completed" in runs
    there, here = (
        torch.load(tmp_path / folder / "last.ckpt", weights_only=True)["state_dict"]
        for folder in ("runs/hospitals", "one-process")
    )
    assert_same(there, here)


def exhaust(ca):
    """Opens 1,005 silent connections and 20 endless bodies of 64 MiB while three nodes train.

    The attacker has another address than the nodes.
    """
    name, port = HERE.split(":")
    there = {"address": ("127.0.0.1", int(port)), "source_address": ("127.0.0.2", 0)}
    connections = [socket.create_connection(**there) for _ in range(1005)]
    context = ssl.create_default_context(cafile=ca)
    for _ in range(20):
        connection = context.wrap_socket(socket.create_connection(**there), server_hostname=name)
        connection.sendall(b"POST /v1/fleet/push-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 67108864\r\n\r\n")
        connections.append(connection)
    return connections


def be_a_stranger(shell, folder):
    """Attacks that once succeeded despite TLS and registered keys; yields each attack and whether it failed."""
    stranger = Shell(folder / "stranger")
    stranger.folder.mkdir()
    stranger.environment["HOME"] = str(stranger.folder)
    ca = folder / "hospitals" / "keys" / "ca.crt"
    (stranger.folder / ".flwr").mkdir()
    (stranger.folder / ".flwr" / "config.toml").write_text(
        f'[superlink.there]\naddress = "{HERE}"\nroot-certificates = "{ca}"\n'
    )
    stranger.run("lightning-fed flower certificates keys --node stranger")
    run = re.findall(r'"run-id": "?(\d+)', shell.run("flwr list here --format json")[1])[0]
    node = re.findall(r'"node-id": "?(\d+)', shell.run("flwr supernode list here --format json")[1])[0]
    for action, line in {
        "list the nodes": "flwr supernode list there",
        "list the runs": "flwr list there",
        "register a key": "flwr supernode register keys/stranger.key.pub there",
        "read the log": f"flwr log {run} there",
        "run code on the server and all clients": f"flwr run {folder / 'hospitals'} there",
        "stop the fit": f"flwr stop {run} there",
        "remove a node": f"flwr supernode unregister {node} there",
    }.items():
        status, said = stranger.run(line, 120)
        yield action, "403" in said and status != 0
    status, said = stranger.run(
        "timeout 120 flower-supernode --max-retries 0 --port 19094 --auth-supernode-private-key keys/stranger.key"
        f" --root-certificates {ca} --superlink {HERE}"
    )
    # A refused SuperNode of Flower 1.42 ends with status 0. The test of the guide counts the nodes afterwards.
    yield "join as a node", status != 124 and "SuperNode ID" not in said
    body = {"content": b"", "headers": {"content-type": "application/protobuf"}}
    with httpx.Client(verify=ssl.create_default_context(cafile=ca)) as client:
        calls = [client.post(f"https://{HERE}{path}", **body) for path in (
            "/v1/runtime/acquire-task", "/v1/runtime/push-logs", "/v1/fleet/../runtime/acquire-task",
            "//v1/runtime/acquire-task", "/v1/control/list-runs?x", "/v1/fleet/x/../../control/list-runs",
        )]  # fmt: skip
        yield "take a task of the server's", all(call.status_code in (403, 404) for call in calls)
        unsigned = client.post(f"https://{HERE}/v1/fleet/pull-messages", **body)
        yield "pull messages without a key", unsigned.status_code == 401
        # A user on the server machine without the secret.
        local = client.post("https://127.0.0.1:8000/v1/runtime/acquire-task", **body)
        yield "take a task at the SuperLink itself", local.status_code == 401


@pytest.mark.skipif(os.geteuid() != 0, reason="only the administrator can be another user")
def test_another_user_of_the_machines():
    """All app calls at the ports of SuperLink and SuperNode without the start's secret; and all files."""
    server, link = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="fl-") as name, Shell(Path(name)) as shell:
        folder = Path(name)
        folder.chmod(0o755)  # as a home folder may be
        (folder / "recipe.yaml").write_text(RECIPE.replace("ROUNDS", "1"))
        for line in (
            "lightning-fed flower new app -c recipe.yaml",
            "lightning-fed flower certificates app/keys --name localhost --node ann",
        ):
            assert shell.run(line)[0] == 0
        start = (
            f"from lightning_fed.backends.flower.start import *; start_server(Path('app/keys'), 'localhost:{server}'"
        )
        shell.start(f'python -c "{start}, port={link})"', "Nodes connect to the server at")
        (folder / ".flwr" / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{link}"\nroot-certificates = "{folder}/app/keys/ca.crt"\n'
        )
        assert shell.run("flwr supernode register app/keys/ann.key.pub here")[0] == 0
        shell.start(
            f"lightning-fed flower node app --keys app/keys --address localhost:{server} --client ann"
            " --node-config 'partition-id=0 num-partitions=1'", "Waiting for messages at",
        )  # fmt: skip
        wait_for(lambda: "SuperNode ID" in (folder / "1.log").read_text())
        commands = read_command_lines(folder)
        node = re.search(
            r"--host 127\.0\.0\.1 --port (\d+)", next(line for line in commands if "flower-supernode" in line)
        )
        paths = re.findall(r'path="(/v1/runtime/[^"]+)"', Path(runtime_http_client.__file__).read_text())
        assert len(paths) > 10
        ca = folder / "app" / "keys" / "ca.crt"
        with httpx.Client(verify=ssl.create_default_context(cafile=ca)) as client:
            for base in (f"https://127.0.0.1:{link}", f"http://127.0.0.1:{node[1]}"):
                for path in paths:
                    for headers in ({}, {"authorization": "Bearer 00"}):
                        headers = {"content-type": "application/protobuf", **headers}
                        assert client.post(f"{base}{path}", content=b"", headers=headers).status_code == 401, path
        secrets = list((folder / ".flwr").rglob("secret"))
        assert len(secrets) == 2
        assert not [line for line in commands for secret in secrets if secret.read_text() in line]
        own = [*secrets, *(folder / ".flwr").rglob("worker"), *(folder / ".flwr").rglob("*.db"),
               folder / "app" / "keys" / "ann.key", folder / "app" / "keys" / "ca.key"]  # fmt: skip
        assert len(own) == 6
        for path in own:
            result = subprocess.run(
                ["cat", str(path)],
                user=65534,
                group=65534,
                extra_groups=[],
                capture_output=True,
                text=True,
                check=False,
            )
            assert "Permission denied" in result.stderr, path


def read_command_lines(folder):
    """Command lines of the processes with this home folder."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"HOME={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                lines.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return lines
