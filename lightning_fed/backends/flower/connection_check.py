"""Checks a node's connection to the server step by step, up to the first fault."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import json
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from lightning_fed.backends.flower.start import flower_environment, free_port, split_address

_SECONDS = 10.0
_NODE_SECONDS = 60.0
_MOST_SKEW = 300.0
"""Maximum seconds for a slow clock on a node. Flower tolerates only 5 seconds for a fast clock."""


class Broken(Exception):
    """Raised for a fault in a node's connection to the server, with the remedy."""


def check_connection(address: str, ca: Path, key: Path | None = None) -> Iterator[str]:
    """Checks a node's connection to the Flower server at ``address``. Yields a line of text after each check."""
    name, port = split_address(address)
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)})
    except OSError as error:
        raise Broken(f"name: no address found for server {name!r} ({error.strerror}); check the spelling") from error
    yield f"name: {name} resolves to {', '.join(addresses)}"
    try:
        socket.create_connection((name, port), _SECONDS).close()
    except OSError as error:
        raise Broken(f"port: no server listens at {address} ({error}); check that the server runs") from error
    yield f"port: {port} is open"
    answer, text = _ask(name, port, ca)
    yield "certificate: valid for this name and signed by the authority"
    try:
        versions = json.loads(text)
        server_version, node_version = versions["flwr"], version("flwr")
    except (ValueError, KeyError, TypeError) as error:
        raise Broken(
            f"gateway: {address} answers (status {answer.status}), but is not a gateway from `lightning-fed flower"
            " server`. If this is a SuperLink, anyone with access can take over the federation"
        ) from error
    yield "gateway: forwards only calls from nodes"
    if server_version.split(".")[:2] != node_version.split(".")[:2]:
        raise Broken(
            f"version: the server has flwr {server_version}, but this machine has {node_version};"
            " install the same version"
        )
    yield f"version: flwr {node_version} on both sides"
    skew = _find_skew(answer.getheader("Date"))
    if not -_MOST_SKEW < skew < 5:
        raise Broken(
            f"clock: this machine's clock differs by {skew:+.0f} s from the server's clock; the server refuses the node"
        )
    yield f"clock: differs by {skew:+.0f} s from the server's clock"
    if key is not None:
        yield f"key: the server accepts the node as number {_start_supernode(address, ca, key)}"


def _ask(name: str, port: int, ca: Path) -> tuple[http.client.HTTPResponse, str]:
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise Broken(f"certificate: {str(ca)!r} cannot be read ({error}); copy `ca.crt` from the server") from error
    connection = http.client.HTTPSConnection(name, port, context=context, timeout=_SECONDS)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer, answer.read(10_000).decode(errors="replace")
    except ssl.SSLCertVerificationError as error:
        raise Broken(
            f"certificate: {error.verify_message}; check `ca.crt`, the server's name and this machine's clock"
        ) from error
    except ssl.SSLError as error:
        raise Broken(
            f"certificate: {name}:{port} does not use TLS ({error.reason}); was it started with `--insecure`?"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise Broken(f"port: {name}:{port} does not answer ({error!r})") from error
    finally:
        connection.close()


def _find_skew(date: str | None) -> float:
    if date is None:
        return 0.0
    server_time = email.utils.parsedate_to_datetime(date)
    # positive if this machine's clock is fast
    return (datetime.datetime.now(datetime.UTC) - server_time).total_seconds()


def _start_supernode(address: str, ca: Path, key: Path) -> str:
    if not key.is_file():
        raise Broken(f"key: {str(key)!r} is missing; make a key with `lightning-fed flower certificates --node`")
    command = [
        "flower-supernode", "--root-certificates", str(ca), "--auth-supernode-private-key", str(key),
        "--superlink", address, "--port", str(free_port()), "--isolation", "process", "--max-retries", "0",
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=flower_environment()) as process:
            try:
                for _ in range(int(10 * _NODE_SECONDS)):
                    log.seek(0)
                    output = log.read()
                    if "SuperNode ID: " in output:
                        return output.split("SuperNode ID: ")[1].split()[0]
                    try:
                        process.wait(0.1)
                        break
                    except subprocess.TimeoutExpired:
                        pass
            finally:
                process.terminate()
        log.seek(0)
        output = " ".join(log.read().split())[-300:]
    raise Broken(
        f"key: the server refuses the node; check that {key.name}.pub is registered on the server (`flwr supernode "
        f"register`) and that no other SuperNode uses this key. Flower's output: ...{output}"
    )
