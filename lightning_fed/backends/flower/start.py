"""Starts the processes of a Flower server or node."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from lightning_fed.backends.site.owned_files import write_private
from lightning_fed.errors import OptionError

_log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
SERVER_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": f"{4 * 2**20}"}
"""Makes the allocator return the memory of large messages (Flower's chunks have 5 MiB). Slows down training, so only
the server's processes use the setting."""
GATEWAY = (sys.executable, "-P", "-m", "lightning_fed.backends.flower.gateway")
"""Command for the gateway."""

_START_SECONDS = 300.0
_GRACE_SECONDS = 10.0


def start_server(keys: Path, address: str, host: str | None = None, port: int = 8000) -> None:
    """Runs SuperLink, SuperExec and gateway until one of these processes ends.

    The SuperLink listens on the loopback address at ``port``. The gateway listens on ``host``, by default the host in
    ``address``. :func:`write_certificates` creates the folder ``keys``.
    """
    name, gateway_port = split_address(address)
    ca, certificate, key = (str((keys / file).resolve()) for file in ("ca.crt", "server.crt", "server.key"))
    _check_files(ca, certificate, key)
    folder, superlink = _state(flower_home() / "server"), f"127.0.0.1:{port}"
    secret = _write_secret(folder)
    listens = name if host is None else host
    _check_free("127.0.0.1", port, "set another `--control-port`")
    _check_free(listens, gateway_port, "set `--host` to an address of this machine, or another port in `--address`")
    tls = ("--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key)
    _run_together(
        [
            ("flower-superlink", *tls, "--enable-supernode-auth", "--disable-runtime-dependency-installation",
             "--host", "127.0.0.1", "--port", str(port), "--database", str(folder / "superlink.db"),
             "--isolation", "process", "--superexec-auth-secret-file", secret),
            ("flower-superexec", "--root-certificates", ca, "--runtime-api-address", superlink,
             "--superexec-auth-secret-file", secret, "--parent-pid", str(os.getpid())),
            (*GATEWAY, superlink, listens, str(gateway_port), ca, certificate, key, str(folder / "superlink.db")),
        ],
        listening=[("127.0.0.1", port), None, (listens, gateway_port)],
        ready=f"Nodes connect to the server at {address}; `flwr` on this machine connects to {superlink}.",
        environment=SERVER_ENVIRONMENT,
    )  # fmt: skip


def start_node(app: Path, keys: Path, address: str, client: str, config: str = "") -> None:
    """Runs a client's worker (training process), SuperNode and SuperExec until one of these processes ends.

    The SuperNode listens on the loopback address. The file ``node-<client>/secret`` in the folder ``~/.flwr`` (or
    ``FLWR_HOME``) prevents other users of the machine from answering for the client.
    """
    split_address(address)
    ca, key = (str((keys / file).resolve()) for file in ("ca.crt", f"{client}.key"))
    _check_files(ca, key)
    folder = _state(flower_home() / f"node-{client}")
    secret, worker, port = _write_secret(folder), folder / "worker", free_port()
    runtime = f"127.0.0.1:{port}"
    _run_together(
        [
            (sys.executable, "-m", "lightning_fed", "flower", "worker", str(app), "--socket", str(worker)),
            ("flower-supernode", "--root-certificates", ca, "--auth-supernode-private-key", key,
             "--superlink", address, "--host", "127.0.0.1", "--port", str(port), "--isolation", "process",
             "--superexec-auth-secret-file", secret,
             "--node-config", f'client="{client}" worker="{worker}" {config}'.strip()),
            ("flower-superexec", "--insecure", "--runtime-api-address", runtime,
             "--superexec-auth-secret-file", secret, "--parent-pid", str(os.getpid())),
        ],
        listening=[None, ("127.0.0.1", port), None],
        ready=f"The node of client {client!r} connects to the server at {address}.",
    )  # fmt: skip


def split_address(address: str) -> tuple[str, int]:
    """Splits an address into host name and port."""
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 2**16:
        raise OptionError(f"Expected an address such as 'fed.example.org:9092', but got {address!r}.")
    return name.strip("[]"), int(port)


def flower_home() -> Path:
    """Returns Flower's folder: ``FLWR_HOME`` or ``~/.flwr``."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def flower_environment() -> dict[str, str]:
    """Environment variables for Flower's programs: no telemetry, and this Python environment first in ``PATH``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**_ENVIRONMENT, **os.environ, "PATH": path}


def _state(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder.resolve()


def _write_secret(folder: Path) -> str:
    path = folder / "secret"
    path.unlink(missing_ok=True)
    write_private(path, secrets.token_hex(32).encode())
    return str(path)


def _check_files(*files: str) -> None:
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"Expected the file {file!r}: create it with `lightning-fed flower certificates`.")


def _check_free(host: str, port: int, remedy: str) -> None:
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise OptionError(
                    f"Expected to listen at {host}:{port}, but got {error.strerror!r}: {remedy}."
                ) from error


def free_port() -> int:
    """Finds an unused port on the loopback address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _run_together(
    commands: Sequence[Sequence[str]],
    listening: Sequence[tuple[str, int] | None],
    ready: str,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Starts one process per command and waits until one process ends.

    ``listening`` contains each process's address, or ``None``. The next process starts when this address accepts
    connections. When all processes run, logs ``ready``. If one exits, ends the others and raises ``SystemExit``.
    """
    environment = {**flower_environment(), **(environment or {})}
    processes: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        for command, address in zip(commands, listening, strict=True):
            processes.append(subprocess.Popen(command, env=environment))
            if address is not None:  # the next process connects to this address
                _await_listener(address, processes[-1])
        _log.info("%s", ready)
        while all(process.poll() is None for process in processes):
            time.sleep(0.2)
        ended = next(process for process in processes if process.poll() is not None)
        _log.error("%s exited with status %s.", Path(str(ended.args[0])).name, ended.returncode)  # type: ignore[index]
        raise SystemExit(ended.returncode or 1)
    except KeyboardInterrupt:
        _log.info("Ending.")
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_listener(address: tuple[str, int], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address, 1):
            return
        time.sleep(0.1)
