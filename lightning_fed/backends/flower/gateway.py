"""Gateway: the server's only port for other machines. Forwards calls from registered SuperNodes, and no other calls.

Flower's SuperLink serves all APIs on one port, and does not check who starts and stops runs or registers nodes.
Therefore the SuperLink listens on the loopback address, behind the gateway. A new connection has ten seconds to make a
call signed by a registered node. The number of connections without such a call is limited.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import json
import logging
import math
import re
import socket
import sqlite3
import ssl
import sys
import time
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import httpx
import uvicorn
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

_log = logging.getLogger(__name__)

_CALL = re.compile(r"/v1/fleet/[a-z-]+")
_MOST_BYTES = 16 * 2**20  # bytes in a body; Flower sends pieces of 5 MB
_SECONDS = 600.0  # seconds for a piece on a slow connection
_STRANGER_SECONDS = 10.0  # seconds for TLS and the headers of a signed call
_STRANGERS, _STRANGERS_PER_NETWORK = 500, 50  # maximum number of connections without a signed call
_BURST = 32  # connections accepted per turn of the event loop
_CALLS_PER_NODE = 64  # at once
_OLDEST = 600.0  # maximum age of a signature in seconds; the SuperLink's limit is lower
_FRESH = 5.0  # seconds for which a key is cached as registered
_STALE = 60.0  # cache time while the database cannot be read
_OWN_HEADERS = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"content-length"}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class Registry:
    """Public keys of registered nodes, read from the SuperLink's SQLite database."""

    def __init__(self, database: str) -> None:
        self._uri = f"{Path(database).resolve().as_uri()}?mode=ro"
        self._known: dict[bytes, float] = {}

    async def find_node(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Returns the public key of the registered node that signed a call, or ``None``."""
        try:
            key = b64decode(headers[b"flwr-public-key"], validate=True)
            signature, signed = b64decode(headers[b"flwr-signature"], validate=True), headers[b"flwr-timestamp"]
            age = datetime.now(UTC) - datetime.fromisoformat(signed.decode("ascii")).astimezone(UTC)
            if abs(age.total_seconds()) > _OLDEST or not await self._is_registered(key):
                return None
            public = load_pem_public_key(key)
            if not isinstance(public, EllipticCurvePublicKey):
                return None
            public.verify(signature, signed, ECDSA(SHA256()))
        except (KeyError, ValueError, OverflowError, binascii.Error, InvalidSignature, UnsupportedAlgorithm):
            return None
        return key

    async def _is_registered(self, key: bytes) -> bool:
        now = time.monotonic()
        last = self._known.get(key, -math.inf)
        if last > now - _FRESH:
            return True
        try:
            is_there = await asyncio.to_thread(self._look_up, key)  # a locked database must not block other calls
        except sqlite3.Error as error:
            _log.error("The SuperLink's database cannot be read: %s.", error)
            if last > now - _STALE:
                return True
            raise
        if is_there:
            self._known[key] = now
        else:
            self._known.pop(key, None)
        return is_there

    def _look_up(self, key: bytes) -> bool:
        with contextlib.closing(sqlite3.connect(self._uri, uri=True, timeout=2)) as connection:
            query = "SELECT 1 FROM node WHERE public_key = ? AND status != 'unregistered'"
            return connection.execute(query, (key,)).fetchone() is not None


class Connection(socket.socket):
    """Connection from another machine, with the remote address and IP network (IPv4 address or IPv6 /64 prefix)."""

    peer: tuple[Any, ...]  # address and port
    network: bytes  # an IPv4 address, or the first 64 bits of an IPv6 address: a network may have 2^64 addresses

    def close(self) -> None:
        if Listener.strangers.get(self.peer) is self:
            del Listener.strangers[self.peer]
        super().close()


class Listener(socket.socket):
    """Listening socket with a limited number of unauthenticated connections (*strangers*).

    A connection is a stranger, except during a call signed by a registered node. At the limit, a new connection
    replaces an old stranger. ``strangers`` maps remote addresses to connections.
    """

    strangers: ClassVar[dict[tuple[Any, ...], Connection]] = {}

    def __init__(self, family: int, address: tuple[Any, ...]) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.bind(address)
        self._burst = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self._burst == 0:
            asyncio.get_running_loop().call_soon(self._end_burst)
        if self._burst >= _BURST:  # lets other tasks run: every connection needs memory for TLS
            raise BlockingIOError
        self._burst += 1
        accepted, address = super().accept()
        connection = Connection(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        connection.peer = address[:2]
        connection.network = socket.inet_pton(self.family, address[0].partition("%")[0])[:8]
        counts = Counter(other.network for other in self.strangers.values())
        crowded = connection.network if counts[connection.network] >= _STRANGERS_PER_NETWORK else None
        if crowded is None and len(self.strangers) >= _STRANGERS:
            crowded = counts.most_common(1)[0][0]
        if crowded is not None:
            _end(next(other for other in self.strangers.values() if other.network == crowded))
        watch(connection)
        return connection, address

    def _end_burst(self) -> None:
        self._burst = 0


def watch(connection: Connection) -> None:
    """Registers an unauthenticated connection. Closes the connection if still unauthenticated after ten seconds."""
    Listener.strangers[connection.peer] = connection
    asyncio.get_running_loop().call_later(_STRANGER_SECONDS, _end, connection)


def _end(connection: Connection) -> None:
    if Listener.strangers.get(connection.peer) is connection:
        del Listener.strangers[connection.peer]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class Gateway:
    """ASGI application that forwards SuperNodes' calls to a SuperLink.

    ``GET /`` returns the versions of Flower and lightning-fed, for ``lightning-fed doctor --flower``.
    """

    def __init__(self, superlink: str, ca: str, registry: Registry) -> None:
        context = ssl.create_default_context(cafile=ca)
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(
            base_url=f"https://{superlink}", verify=context, timeout=_SECONDS, limits=limits
        )
        self._registry = registry
        self._calls = Counter[bytes]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                if event == "shutdown":
                    await self._client.aclose()
                await send({"type": f"lifespan.{event}.complete"})
            return
        method, path = scope["method"], scope["raw_path"].decode("latin-1")
        if (method, path) == ("GET", "/"):
            versions = {name: version(name) for name in ("flwr", "lightning-fed")}
            await _answer(send, 200, json.dumps(versions).encode())
            return
        if method != "POST" or not _CALL.fullmatch(path) or scope["query_string"]:
            await _answer(send, 403, b"the gateway only forwards calls from SuperNodes")
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            node = await self._registry.find_node(headers)
        except sqlite3.Error:  # a SuperNode exits after 401 and retries after 503
            await _answer(send, 503, b"the gateway cannot read the registered keys at the moment")
            return
        if node is None:
            await _answer(send, 401, b"the gateway only forwards signed calls from registered SuperNodes")
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > _MOST_BYTES:
            await _answer(send, 413, b"the call is too large")
            return
        if self._calls[node] >= _CALLS_PER_NODE:
            await _answer(send, 503, b"this SuperNode has too many concurrent calls")
            return
        trusted = Listener.strangers.pop(tuple(scope["client"]), None)
        self._calls[node] += 1
        try:
            await self._forward(path, scope, receive, send)
        finally:
            self._calls[node] -= 1
            if trusted is not None and trusted.fileno() >= 0:
                watch(trusted)

    async def _forward(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _OWN_HEADERS]
        headers += [(name, value) for name, value in scope["headers"] if name.lower() == b"content-length"]
        headers.append((b"accept-encoding", b"identity"))
        has_begun = False
        try:
            async with (
                asyncio.timeout(_SECONDS),
                self._client.stream("POST", path, content=_read(receive), headers=headers) as reply,
            ):
                passed = [(name, value) for name, value in reply.headers.raw if name.lower() not in _OWN_HEADERS]
                passed += [(name, value) for name, value in reply.headers.raw if name.lower() == b"content-length"]
                await send({"type": "http.response.start", "status": reply.status_code, "headers": passed})
                has_begun = True
                async for part in reply.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except _TooLargeError:
            await _answer(send, 413, b"the call is too large")
        except (httpx.HTTPError, TimeoutError) as error:
            _log.warning("The SuperLink does not answer: %r.", error)
            if has_begun:
                raise
            await _answer(send, 502, b"the SuperLink does not answer")


class _TooLargeError(Exception): ...


async def _read(receive: Receive) -> AsyncIterator[bytes]:
    size, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            raise _TooLargeError
        body, has_more = message.get("body", b""), message.get("more_body", False)
        size += len(body)
        if size > _MOST_BYTES:
            raise _TooLargeError
        if body:
            yield body


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if status >= 400 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve_gateway(superlink: str, host: str, port: int, ca: str, certificate: str, key: str, database: str) -> None:
    """Forwards nodes' calls to the SuperLink until stopped. ``database``: SQLite file with the nodes' public keys."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners = [Listener(family, address) for family, address in {(info[0], info[4]): None for info in infos}]
    config = uvicorn.Config(
        Gateway(superlink, ca, Registry(database)), ssl_certfile=certificate, ssl_keyfile=key,
        lifespan="on", ws="none", loop="asyncio", log_level="warning", access_log=False, server_header=False,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=list(listeners))


if __name__ == "__main__":  # runs in a separate process, see `start.py`
    _superlink, _host, _port, _ca, _certificate, _key, _database = sys.argv[1:]
    serve_gateway(_superlink, _host, int(_port), _ca, _certificate, _key, _database)
