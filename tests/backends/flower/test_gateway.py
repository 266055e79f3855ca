"""The gateway, the certificates and the check of a connection, without Flower's processes."""

import json
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest

pytest.importorskip("flwr")

import uvicorn
from cryptography import x509

from lightning_fed.backends.flower.certificates import write_certificates, write_node_key
from lightning_fed.backends.flower.connection_check import Broken, check_connection
from lightning_fed.backends.flower.gateway import Gateway
from lightning_fed.backends.flower.start import GATEWAY, split_address
from lightning_fed.cli.main import main
from lightning_fed.errors import OptionError
from tests.backends.flower.processes import free_port

pytestmark = pytest.mark.timeout(120)


PATHS = (
    "/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/", "/V1/fleet/x", "/v1/fleet/a/b",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/pull-messages?x", "//v1/fleet/x",
)  # fmt: skip


@contextmanager
def served(app, folder, tls=True):
    """An ASGI application on the loopback address; yields its port."""
    port = free_port()
    files = {"ssl_certfile": folder / "server.crt", "ssl_keyfile": folder / "server.key"} if tls else {}
    options = {"lifespan": "auto", "ws": "none", "loop": "asyncio", "log_level": "critical", **files}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(20)


class SuperLink:
    """Answers every call with what it was called."""

    def __init__(self):
        self.calls = []

    async def __call__(self, scope, receive, send):
        message = await receive()
        self.calls.append((scope["method"], scope["path"], dict(scope["headers"]), message["body"]))
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-answer", b"1")]})
        await send({"type": "http.response.body", "body": b"answer"})


def post(port, ca, path, body=b"body", method="POST"):
    """A request, whose path is sent as it is; status and body."""
    context = ssl.create_default_context(cafile=ca)
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nflwr-signature: s\r\ncontent-length: {len(body)}\r\n"
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(f"{head}connection: close\r\n\r\n".encode() + body)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(reply.split()[1]), reply.split(b"\r\n\r\n", 1)[1]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    write_certificates(folder, ["localhost", "fed.example.org"])
    return folder


def test_only_the_calls_of_nodes_pass(keys):
    superlink, ca = SuperLink(), keys / "ca.crt"
    with served(superlink, keys) as inner, served(Gateway(f"127.0.0.1:{inner}", str(ca)), keys) as port:
        assert post(port, ca, "/v1/fleet/pull-messages") == (201, b"answer")
        ((method, path, headers, body),) = superlink.calls
        assert (method, path, headers[b"flwr-signature"], body) == ("POST", "/v1/fleet/pull-messages", b"s", b"body")
        for path in PATHS:
            assert post(port, ca, path)[0] in (400, 403), path
        assert post(port, ca, "/v1/fleet/pull-messages", method="GET")[0] == 403
        assert post(port, ca, "/v1/fleet/push-object", bytes(2**26 + 1))[0] == 413
        assert set(json.loads(post(port, ca, "/", method="GET")[1])) == {"flwr", "lightning-fed"}
        assert len(superlink.calls) == 1
    closed = free_port()
    with served(Gateway(f"127.0.0.1:{closed}", str(ca)), keys) as port:
        assert post(port, ca, "/v1/fleet/pull-messages")[0] == 502


def test_what_is_wrong_with_a_connection(keys, tmp_path, monkeypatch):
    write_certificates(tmp_path / "other", ["localhost"])
    write_certificates(tmp_path / "named", ["fed.example.org"])
    ca = keys / "ca.crt"

    def wrong(address, ca=ca, key=None):
        with pytest.raises(Broken) as raised:
            list(check_connection(address, ca, key))
        return str(raised.value)

    async def plain(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    assert wrong("no-such-name.invalid:9092").startswith("name: 'no-such-name.invalid' is not known")
    assert wrong(f"localhost:{free_port()}").startswith("port: nothing listens")
    with served(plain, keys) as port:
        assert wrong(f"localhost:{port}", tmp_path / "other" / "ca.crt").startswith("certificate: ")
        assert wrong(f"127.0.0.2:{port}").startswith("port: ")
        assert "everybody who reaches it can take the federation over" in wrong(f"localhost:{port}")
    with served(plain, keys, tls=False) as port:
        assert "does not speak TLS" in wrong(f"localhost:{port}")
    with served(Gateway(f"127.0.0.1:{free_port()}", str(ca)), keys) as port:
        good = list(check_connection(f"localhost:{port}", ca))
        assert [line.partition(":")[0] for line in good] == [
            "name",
            "port",
            "certificate",
            "gateway",
            "version",
            "clock",
        ]
        assert wrong(f"localhost:{port}", key=tmp_path / "none.key").startswith("key: there is no")
        for name, value, words in (
            ("version", "1.0.0", "version: "),
            ("_find_skew", -400.0, "clock: "),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(f"lightning_fed.backends.flower.connection_check.{name}", lambda _, value=value: value)
                assert wrong(f"localhost:{port}").startswith(words)


def test_keys_are_for_their_owner(keys, tmp_path):
    write_node_key(tmp_path, "a")
    for path in (keys / "ca.key", keys / "server.key", tmp_path / "a.key"):
        assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError, match="There is a certificate already"):
        write_certificates(keys, ["localhost"])
    with pytest.raises(FileExistsError, match="There is a key already"):
        write_node_key(tmp_path, "a")
    before = (keys / "ca.crt").read_bytes()
    for name in ("server.crt", "server.key"):
        (keys / name).unlink()
    assert [path.name for path in write_certificates(keys, ["localhost"])] == ["server.key", "server.crt"]
    assert (keys / "ca.crt").read_bytes() == before
    ends = [x509.load_pem_x509_certificate((keys / name).read_bytes()) for name in ("ca.crt", "server.crt")]
    assert ends[0].not_valid_after_utc - ends[1].not_valid_after_utc > timedelta(days=365), "a new one is of use"


@pytest.mark.parametrize("address", ["fed.example.org", "fed:0", "fed:x", ":9092", "fed:70000"])
def test_addresses_that_are_none(address):
    with pytest.raises(OptionError, match="Expected an address such as"):
        split_address(address)


def test_the_commands_say_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["flower", "server", "--keys", str(tmp_path), "--address", "localhost:9092"])
    assert stopped.value.code == 1
    assert "`lightning-fed flower certificates` makes it" in capsys.readouterr().err


def test_the_gateways_process_loads_no_torch():
    command = [GATEWAY[0], "-X", "importtime", *GATEWAY[1:]]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr  # it lacks its arguments
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines() if "|" in line}
    assert {"uvicorn", "httpx"} <= loaded
    assert not loaded & {"torch", "lightning_fed"}
