"""Gateway: the one port of a server that other machines reach. It passes on what SuperNodes call, and nothing else.

Flower's SuperLink has all of its interfaces at one port. SuperNodes sign what they call (``/v1/fleet/``). Whoever
reaches ``/v1/control/`` starts and stops runs, reads their logs, and registers nodes: Flower's free edition asks for no
login. So the SuperLink listens on the loopback address, and the gateway in front of it knows SuperNodes' calls alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import version
from typing import Any

import httpx
import uvicorn

_log = logging.getLogger(__name__)

_CALL = re.compile(r"/v1/fleet/[a-z-]+")
_MOST_BYTES = 64 * 2**20  # Flower sends pieces of 5 MB
_SECONDS = 600.0  # for a piece on a slow connection
_OWN_HEADERS = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"content-length"}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class Gateway:
    """ASGI application that passes SuperNodes' calls to a SuperLink.

    To ``GET /`` it answers with the versions of Flower and lightning-fed, for ``lightning-fed doctor --flower``.

    Args:
        superlink: Address of the SuperLink, such as ``"127.0.0.1:8000"``.
        ca: File with the certificate of the authority that has signed the SuperLink's.

    """

    def __init__(self, superlink: str, ca: str) -> None:
        context = ssl.create_default_context(cafile=ca)
        self._client = httpx.AsyncClient(base_url=f"https://{superlink}", verify=context, timeout=_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
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
            await _answer(send, 403, b"the gateway of a federation passes on what SuperNodes call, and nothing else")
            return
        try:
            async with asyncio.timeout(_SECONDS):
                body = await _read(receive)
                if body is None:
                    await _answer(send, 413, b"a call is too large")
                    return
                headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _OWN_HEADERS]
                reply = await self._client.post(
                    path, content=body, headers=[*headers, (b"accept-encoding", b"identity")]
                )
        except (httpx.HTTPError, TimeoutError) as error:
            _log.warning("The SuperLink does not answer: %r.", error)
            await _answer(send, 502, b"the SuperLink does not answer")
            return
        passed = [(name, value) for name, value in reply.headers.raw if name.lower() not in _OWN_HEADERS]
        await _answer(send, reply.status_code, reply.content, passed)


async def _read(receive: Receive) -> bytes | None:
    """A request's body; ``None`` if it is too large or breaks off."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > _MOST_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(body)


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*(headers or []), length]})
    await send({"type": "http.response.body", "body": body})


def serve_gateway(superlink: str, host: str, port: int, ca: str, certificate: str, key: str) -> None:
    """Runs a gateway until the process is told to end.

    Args:
        superlink: Address of the SuperLink, of this machine.
        host: Name or address of this machine at which to listen.
        port: Port at which to listen.
        ca: File with the certificate of the authority.
        certificate: File with the server's certificate.
        key: File with its key.

    """
    uvicorn.run(
        Gateway(superlink, ca), host=host, port=port, ssl_certfile=certificate, ssl_keyfile=key, lifespan="on",
        ws="none", log_level="warning", access_log=False, limit_concurrency=1000, server_header=False,
    )  # fmt: skip


if __name__ == "__main__":  # of its own process, see `start.py`
    _superlink, _host, _port, _ca, _certificate, _key = sys.argv[1:]
    serve_gateway(_superlink, _host, int(_port), _ca, _certificate, _key)
