"""The gateway, the certificates and the connection check, without Flower's processes."""

import asyncio
import json
import socket
import sqlite3
import ssl
import subprocess
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import httpx
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.federation import NoOpFederationManager
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from lightning_fed.backends.flower.certificates import write_certificates, write_node_key
from lightning_fed.backends.flower.connection_check import Broken, check_connection
from lightning_fed.backends.flower.gateway import Gateway, Listener, Registry
from lightning_fed.backends.flower.start import GATEWAY, split_address
from lightning_fed.cli.main import main
from lightning_fed.errors import OptionError
from tests.backends.flower.processes import free_port
from tests.breadth import quick

pytestmark = pytest.mark.timeout(120)


PATHS = (
    "/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/", "/V1/fleet/x", "/v1/fleet/a/b",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/pull-messages?x", "//v1/fleet/x",
)  # fmt: skip


@contextmanager
def served(app, folder, tls=True, listeners=None):
    """Serves an ASGI application on the loopback address; yields the port."""
    port = free_port() if listeners is None else listeners[0].getsockname()[1]
    files = {"ssl_certfile": folder / "server.crt", "ssl_keyfile": folder / "server.key"} if tls else {}
    options = {"lifespan": "auto", "ws": "none", "loop": "asyncio", "log_level": "critical", **files}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, **options))
    thread = threading.Thread(target=server.run, args=(listeners,), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(20)


class SuperLink:
    """Answers every call with the received call."""

    def __init__(self):
        self.calls = []

    async def __call__(self, scope, receive, send):
        message = await receive()
        self.calls.append((scope["method"], scope["path"], dict(scope["headers"]), message["body"]))
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"6")]})
        await send({"type": "http.response.body", "body": b"answer"})


KEY, GONE = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())


def signed(key=KEY, age=0.0):
    """Headers of a SuperNode's call, created by Flower's client."""

    with pytest.MonkeyPatch.context() as patched:
        later = datetime.now(UTC) - timedelta(seconds=age)
        patched.setattr("flwr.supernode.node_auth_http_interceptor.now", lambda: later)
        request = httpx.Request("POST", "https://x")
        NodeAuthHttpInterceptor(key, key.public_key()).intercept(SimpleNamespace(request=request), lambda _: None)
    return {name: value for name, value in request.headers.items() if name.startswith("flwr-")}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Flower's database with this key registered, and another key registered and removed before."""
    path = str(tmp_path_factory.mktemp("superlink") / "superlink.db")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flower's migrations warn
        state = LinkStateFactory(path, NoOpFederationManager(), ObjectStoreFactory()).state()
    state.create_node("owner", "owner", public_key_to_bytes(KEY.public_key()), 30)
    gone = state.create_node("owner", "owner", public_key_to_bytes(GONE.public_key()), 30)
    state.delete_node("owner", gone)
    return path


@pytest.fixture(scope="module")
def registry(database):
    return Registry(database)


def post(port, ca, path, body=b"body", method="POST", headers=None, length=None):
    """Sends a request with an unnormalised path; returns status and body."""
    context = ssl.create_default_context(cafile=ca)
    lines = "".join(f"{name}: {value}\r\n" for name, value in (signed() if headers is None else headers).items())
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {length or len(body)}\r\n"
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


@pytest.fixture(scope="module")
def gateway(keys, registry):
    """A fake SuperLink behind a gateway: the SuperLink and the gateway's port."""
    superlink, ca = SuperLink(), str(keys / "ca.crt")
    with served(superlink, keys) as inner, served(Gateway(f"127.0.0.1:{inner}", ca, registry), keys) as port:
        yield superlink, port


def test_only_the_calls_of_nodes_pass(keys, gateway, registry):
    (superlink, port), ca, headers = gateway, keys / "ca.crt", signed()
    superlink.calls.clear()
    assert post(port, ca, "/v1/fleet/pull-messages", headers=headers) == (201, b"answer")
    ((method, path, passed, body),) = superlink.calls
    assert (method, path, body) == ("POST", "/v1/fleet/pull-messages", b"body")
    assert {name: passed[name.encode()].decode() for name in headers} == headers
    for path in PATHS:
        assert post(port, ca, path)[0] in (400, 403), path
    assert post(port, ca, "/v1/fleet/pull-messages", method="GET")[0] == 403
    assert post(port, ca, "/v1/fleet/push-object", length=2**24 + 1)[0] == 413
    assert set(json.loads(post(port, ca, "/", method="GET")[1])) == {"flwr", "lightning-fed"}
    assert len(superlink.calls) == 1
    closed = free_port()
    with served(Gateway(f"127.0.0.1:{closed}", str(ca), registry), keys) as port:
        assert post(port, ca, "/v1/fleet/pull-messages")[0] == 502


STRANGERS = {
    "no key": dict,
    "another key": lambda: signed(ec.generate_private_key(ec.SECP384R1())),
    "a key that was removed": lambda: signed(GONE),
    "a registered key with another signature": lambda: {
        **signed(), "flwr-signature": signed(ec.generate_private_key(ec.SECP384R1()))["flwr-signature"]
    },
    "an old signature": lambda: signed(age=3600),
    "a year before the first": lambda: {**signed(), "flwr-timestamp": "0001-01-01T00:00:00+14:00"},
    "no text": lambda: dict.fromkeys(signed(), "%"),
}  # fmt: skip


@pytest.mark.parametrize("who", STRANGERS)
def test_no_call_of_a_stranger_passes(who, keys, gateway):
    superlink, port = gateway
    superlink.calls.clear()
    assert post(port, keys / "ca.crt", "/v1/fleet/pull-messages", headers=STRANGERS[who]())[0] == 401
    assert superlink.calls == []


def test_a_database_that_cannot_be_read_ends_no_node(keys, database, monkeypatch):
    """A SuperNode ends on 401. A recently found key is accepted, and every other call can be repeated."""

    def locked(*args, **kwargs):
        raise sqlite3.OperationalError("database is locked")

    with served(SuperLink(), keys) as inner:
        gateway = Gateway(f"127.0.0.1:{inner}", str(keys / "ca.crt"), Registry(database))
        with served(gateway, keys) as port, monkeypatch.context() as patched:
            patched.setattr(sqlite3, "connect", locked)
            assert post(port, keys / "ca.crt", "/v1/fleet/pull-messages")[0] == 503
            patched.undo()
            assert post(port, keys / "ca.crt", "/v1/fleet/pull-messages")[0] == 201
            patched.setattr(sqlite3, "connect", locked)
            patched.setattr("lightning_fed.backends.flower.gateway._FRESH", 0.0)
            assert post(port, keys / "ca.crt", "/v1/fleet/pull-messages")[0] == 201
            patched.setattr("lightning_fed.backends.flower.gateway._STALE", 0.0)
            assert post(port, keys / "ca.crt", "/v1/fleet/pull-messages")[0] == 503


def test_too_many_calls_of_a_node_can_be_repeated(keys, registry, monkeypatch):
    monkeypatch.setattr("lightning_fed.backends.flower.gateway._CALLS_PER_NODE", 0)
    with served(Gateway("127.0.0.1:1", str(keys / "ca.crt"), registry), keys) as port:
        assert post(port, keys / "ca.crt", "/v1/fleet/pull-messages")[0] == 503


@contextmanager
def guarded(keys, registry):
    """A gateway with listener in front of a fake SuperLink; yields port and listener."""
    with Listener(socket.AF_INET, ("127.0.0.1", 0)) as listener, served(SuperLink(), keys) as inner:
        gateway = Gateway(f"127.0.0.1:{inner}", str(keys / "ca.crt"), registry)
        with served(gateway, keys, listeners=[listener]) as port:
            yield port, listener


def open_connections(port, count, ca=None, start=b""):
    """Connections of an unknown client; with `ca`, after the TLS handshake."""
    connections = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        if ca is not None:
            connection = ssl.create_default_context(cafile=ca).wrap_socket(connection, server_hostname="localhost")
        connection.sendall(start)
        connections.append(connection)
    return connections


SLOW = {
    "plain": {},
    "half a greeting": {"start": b"\x16\x03"},
    "no headers": {"with_tls": True},
    "half of the headers": {"with_tls": True, "start": b"POST /v1/fleet/push-messages HTTP/1.1\r\nhost: x\r\n"},
    "no body": {
        "with_tls": True,
        "start": b"POST /v1/fleet/push-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n",
    },
}


@pytest.mark.parametrize("kind", quick(SLOW, ["half a greeting", "no body"]))
def test_slow_strangers_take_no_place_from_nodes(kind, keys, registry, monkeypatch):
    """With more connections than one address may have, a node's call from the same address passes at once."""
    monkeypatch.setattr("lightning_fed.backends.flower.gateway._STRANGERS_PER_NETWORK", 8)
    monkeypatch.setattr("lightning_fed.backends.flower.gateway._STRANGER_SECONDS", 0.5)
    ca, options = keys / "ca.crt", dict(SLOW[kind])
    options["ca"] = ca if options.pop("with_tls", False) else None
    with guarded(keys, registry) as (port, listener):
        connections = open_connections(port, 40, **options)
        assert len(listener.strangers) <= 8
        assert post(port, ca, "/v1/fleet/pull-messages") == (201, b"answer")
        deadline = time.monotonic() + 10
        while listener.strangers and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not listener.strangers
        for connection in connections:
            connection.settimeout(5)
            with suppress(OSError):
                while connection.recv(4096):
                    pass
            connection.close()


def test_an_ipv6_network_counts_as_one_address(monkeypatch):
    """A customer's line has 2^64 IPv6 addresses, so the limit holds for the first 64 bits."""
    near, far = [f"2001:db8::{number:x}" for number in range(1, 60)], ["2001:db8:0:1::1", "fe80::1%lo"]
    accepted, ends, addresses = [], [], iter([*near, *far, "2001:db8::f00"])

    def accept(_):
        ends.append(socket.socketpair())
        return ends[-1][0], (next(addresses), len(ends), 0, 0)

    async def accept_all(listener):
        for _ in range(len(near) + len(far) + 1):
            accepted.append(listener.accept()[0])
            await asyncio.sleep(0)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with Listener(socket.AF_INET6, ("::1", 0)) as listener:
        asyncio.run(accept_all(listener))
        places = [place for place, _ in listener.strangers]
        for connection in [*accepted, *(there for _, there in ends)]:
            connection.close()
    assert places == [*near[-49:], *far, "2001:db8::f00"]


def test_a_body_without_a_signature_is_not_read(keys, registry):
    head = b"POST /v1/fleet/push-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 67108864\r\n\r\n"
    with guarded(keys, registry) as (port, _):
        for connection in open_connections(port, 20, keys / "ca.crt", head):
            connection.settimeout(5)
            assert connection.recv(4096).startswith(b"HTTP/1.1 401")
            connection.close()


def test_a_slow_call_of_a_node_is_not_ended_with_the_strangers(keys, registry, monkeypatch):
    monkeypatch.setattr("lightning_fed.backends.flower.gateway._STRANGER_SECONDS", 0.3)
    head = "".join(f"{name}: {value}\r\n" for name, value in {**signed(), "host": "x", "content-length": "4"}.items())
    start = f"POST /v1/fleet/push-messages HTTP/1.1\r\n{head}\r\nbo".encode()
    with guarded(keys, registry) as (port, _):
        (connection,) = open_connections(port, 1, keys / "ca.crt", start)
        time.sleep(0.5)
        connection.sendall(b"dy")
        connection.settimeout(5)
        assert connection.recv(4096).startswith(b"HTTP/1.1 201")
        connection.close()


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

    assert wrong("no-such-name.invalid:9092").startswith("name: no address found for server 'no-such-name.invalid'")
    assert wrong(f"localhost:{free_port()}").startswith("port: no server listens")
    with served(plain, keys) as port:
        assert wrong(f"localhost:{port}", tmp_path / "other" / "ca.crt").startswith("certificate: ")
        assert wrong(f"127.0.0.2:{port}").startswith("port: ")
        assert "anyone with access can take over the federation" in wrong(f"localhost:{port}")
    with served(plain, keys, tls=False) as port:
        assert "does not use TLS" in wrong(f"localhost:{port}")
    with served(Gateway(f"127.0.0.1:{free_port()}", str(ca), Registry("none.db")), keys) as port:
        good = list(check_connection(f"localhost:{port}", ca))
        assert [line.partition(":")[0] for line in good] == [
            "name",
            "port",
            "certificate",
            "gateway",
            "version",
            "clock",
        ]
        assert wrong(f"localhost:{port}", key=tmp_path / "none.key").endswith(
            "none.key' is missing; make a key with `lightning-fed flower certificates --node`"
        )
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
    with pytest.raises(FileExistsError, match=r"The certificate .* exists"):
        write_certificates(keys, ["localhost"])
    with pytest.raises(FileExistsError, match=r"The key .* exists"):
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
    assert "create it with `lightning-fed flower certificates`" in capsys.readouterr().err


def test_the_gateways_process_loads_no_torch():
    command = [GATEWAY[0], "-X", "importtime", *GATEWAY[1:]]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr  # lacks arguments
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines() if "|" in line}
    assert {"uvicorn", "httpx"} <= loaded
    assert "torch" not in loaded
