"""A SuperLink and SuperNodes as real processes on the loopback address."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Deployment:
    """One SuperLink, and nodes started by name; exiting stops all processes.

    Args:
        folder: Logs and Flower's files.
        tls: TLS arguments for the SuperLink and all clients, instead of ``--insecure``.
    """

    def __init__(self, folder: Path, link_options=("--insecure",), environment=None):
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.temporary = tempfile.TemporaryDirectory(prefix="fl-")  # socket paths must be short
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "FLWR_HOME": str(folder / "flower"),
            "TMPDIR": self.temporary.name,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            **(environment or {}),
        }
        self.processes: dict[str, subprocess.Popen] = {}
        (folder / "flower").mkdir(parents=True, exist_ok=True)
        self.link_options = link_options
        try:
            self.start_link()
        except BaseException:  # no caller has the object yet
            self.close()
            raise

    def start_link(self) -> None:
        """Starts or restarts the SuperLink at the same address."""
        host, port = self.address.split(":")
        link = self.start(
            "superlink", "flower-superlink", *self.link_options, "--host", host, "--port", port,
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.wait_for("superlink", "Uvicorn running", 300, since=f"process {link.pid}\n")

    def start(self, name: str, *command: str) -> subprocess.Popen:
        """Starts a process; the process id is in the first line of the log and in ``<name>.pid``."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
            log.write(f"process {self.processes[name].pid}\n".encode())
        (self.folder / f"{name}.pid").write_text(f"{self.processes[name].pid}")
        return self.processes[name]

    def node(self, name: str, config: str, *options: str, address: str = "") -> None:
        self.start(
            name, "flower-supernode", *(options or ("--insecure",)), "--superlink", address or self.address,
            "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def run(self, app: Path, *options: str) -> subprocess.Popen:
        return self.start("run", "flwr", "run", str(app), "here", "--stream", *options)

    def configure(self, lines: str = "insecure = true") -> None:
        (self.folder / "flower" / "config.toml").write_text(f'[superlink.here]\naddress = "{self.address}"\n{lines}\n')

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, name: str, text: str, seconds: float, since: str = "") -> None:
        """Waits for a text in a log after the text `since`."""
        deadline = time.monotonic() + seconds
        while text not in self.log(name)[self.log(name).find(since) :]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text!r} is not in the log of {name}:\n{self.log(name)[-3000:]}")
            time.sleep(0.1)

    def kill(self, name: str, how=signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        process.wait(timeout=20)

    def server_apps(self) -> list[int]:
        """Ids of the server app processes, which run in a separate session: found by the SuperLink's address."""
        pattern = f"flwr-serverapp --runtime-api-address {self.address}"
        result = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
        return [int(process) for process in result.stdout.split()]

    def kill_server_app(self) -> None:
        for process in self.server_apps():
            os.kill(process, signal.SIGKILL)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        self.kill_server_app()
        self.temporary.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
