"""NVFLARE's processes on the loopback address: the simulator, and a server with sites in POC mode."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.backends.flower.processes import ROOT, free_port
from tests.backends.links import Link

poc = pytest.importorskip("nvflare.tool.poc.poc_commands", reason="`pip install lightning-fed[nvflare]`")

JOB = Path(__file__).parent / "job"
MAIN = "nvflare.private.fed.app"


def environment(folder, case, **deadline):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HOME": str(folder),
        "FEDJOB": case,
        "FEDJOB_FOLDER": str(folder),
        "FEDJOB_DEADLINE": json.dumps({"seconds": 120, **deadline}),
        # wait for dead sites at the end of the job; the default is 15 minutes
        "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5",
    }


def simulate(folder, case, job=JOB, seconds=240, **deadline):
    command = [sys.executable, "-m", f"{MAIN}.simulator.simulator", str(job), "-w", str(folder / "simulator")]
    done = subprocess.run(
        [*command, "-c", "site-1,site-2", "-t", "2"],
        env=environment(folder, case, **deadline), cwd=folder, timeout=seconds, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-5000:]
    return done.stdout + done.stderr


class Poc:
    """A server and two sites with certificates, as processes; exiting stops all of them.

    Args:
        folder: Working folder.
        case: The federation.
        has_link: Whether the second site connects through a link that can be cut.
        deadline: Options for the rounds' deadline.

    Attributes:
        link: The link.
    """

    def __init__(self, folder, case, has_link=False, **deadline):
        self.folder, self.environment, self.processes = folder, environment(folder, case, **deadline), {}
        home, os.environ["HOME"] = os.environ.get("HOME", ""), str(folder)
        try:
            poc.prepare_poc_provision(
                clients=["site-1", "site-2"], number_of_clients=2, workspace=str(folder / "poc"), docker_image=None,
                use_he=False, project_conf_path="", examples_dir=None,
            )  # fmt: skip
        finally:
            os.environ["HOME"] = home
        self.kits = folder / "poc" / "example_project" / "prod_00"
        port = free_port()
        self.link = Link(f"localhost:{port}") if has_link else None
        for path in self.kits.glob("*/startup/fed_*.json"):
            address = f"localhost:{port}"
            if self.link is not None and "site-2" in path.parts:
                address = self.link.address.replace("127.0.0.1", "localhost")
            text = path.read_text().replace("server:8002", address).replace("localhost:8002", address)
            content = json.loads(text)
            if "admin" in content:
                content["admin"]["port"] = port
            for server in content.get("servers", []):
                server |= {"admin_server": "localhost", "admin_port": port} if "admin_port" in server else {}
            path.write_text(json.dumps(content))
        for name in ("server", "site-1", "site-2"):
            self.start(name)

    def start(self, name):
        module = f"{MAIN}.server.server_train" if name == "server" else f"{MAIN}.client.client_train"
        file = "fed_server.json" if name == "server" else "fed_client.json"
        options = [
            "secure_train=true",
            "org=nvidia",
            "config_folder=config",
            *([] if name == "server" else [f"uid={name}"]),
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-u", "-m", module, "-m", str(self.kits / name), "-s", file, "--set", *options],
                stdout=log, stderr=subprocess.STDOUT, cwd=self.folder, start_new_session=True,
                env={**self.environment, "FEDJOB_SITE": name},
            )  # fmt: skip

    def kill(self, name):
        process = psutil.Process(self.processes[name].pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.processes[name].wait()

    def ask(self, sites, command, job, seconds=100):
        """Runs an administrator command after this number of sites has connected."""
        admin = [sys.executable, "-m", "tests.backends.nvflare.admin", str(self.kits / "admin@nvidia.com"), f"{sites}"]
        done = subprocess.run(
            [*admin, command, job], env=self.environment, cwd=self.folder, timeout=seconds, text=True,
            capture_output=True, check=True,
        )  # fmt: skip
        return done.stdout.rpartition("answer ")[2].strip()

    def submit(self, job=JOB):
        """Submits a copy of the job, because NVFLARE writes signatures into the folder."""
        job = shutil.copytree(job, self.folder / "job", dirs_exist_ok=True)
        return self.ask(2, "submit", str(job))

    def wait(self, job, seconds=180):
        deadline = time.monotonic() + seconds
        while not (status := self.ask(1, "status", job)).startswith("FINISHED"):
            assert time.monotonic() < deadline, status
            time.sleep(1)
        return status

    def wait_for(self, path, seconds=120):
        deadline = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < deadline, path
            time.sleep(0.1)

    def close(self):
        for name in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.kill(name)
        if self.link is not None:
            self.link.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
