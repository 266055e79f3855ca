"""A SuperLink and SuperNodes as real processes on the loopback address, and what runs on them."""

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
    """One SuperLink, and nodes that are started by name; everything ends with it.

    Args:
        folder: Where logs and Flower's own files are.
        tls: Arguments of the SuperLink and of everyone else beside the address, instead of ``--insecure``.

    """

    def __init__(self, folder: Path, link_options=("--insecure",), environment=None):
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.temporary = tempfile.TemporaryDirectory(prefix="fl-")  # a socket's path must be short
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
        except BaseException:  # nobody else has it yet
            self.close()
            raise

    def start_link(self) -> None:
        """Starts the SuperLink, also again, at the same address."""
        host, port = self.address.split(":")
        link = self.start(
            "superlink", "flower-superlink", *self.link_options, "--host", host, "--port", port,
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.wait_for("superlink", "Uvicorn running", 300, since=f"process {link.pid}\n")

    def start(self, name: str, *command: str) -> subprocess.Popen:
        """Starts a process; its log begins with a line with its number, which is in ``<name>.pid`` as well."""
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
        """``flwr run``, until the run is over."""
        return self.start("run", "flwr", "run", str(app), "here", "--stream", *options)

    def configure(self, lines: str = "insecure = true") -> None:
        (self.folder / "flower" / "config.toml").write_text(f'[superlink.here]\naddress = "{self.address}"\n{lines}\n')

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, name: str, text: str, seconds: float, since: str = "") -> None:
        """Waits for a text in a log, behind another one."""
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
        """The processes of the server's half, which are in a session of their own: by the SuperLink's address."""
        pattern = f"flwr-serverapp --runtime-api-address {self.address}"
        result = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
        return [int(process) for process in result.stdout.split()]

    def kill_server_app(self) -> None:
        """Kills the server's half; Flower's SuperLink stays."""
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
