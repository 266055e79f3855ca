"""The same module, seeds and clients on every backend: prints a table with a digest of each global model.

``python -m tests.backends.equal_weights [WAY...]``. For another version of Flower or NVFLARE, prepend the version to
``PYTHONPATH``. Flower and NVFLARE run as separate processes on the loopback address.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from lightning_fed import FederatedTrainer
from lightning_fed.messages import digest
from tests.backends.flower.halves import ALL_CASES, QUIET, clients_of
from tests.backends.flower.processes import ROOT

NAME, ROUNDS = "two sites", 3
CASE = ALL_CASES[NAME]


def in_one_process(folder, **processes):
    module = CASE.module()
    trainer = FederatedTrainer(federation=CASE.federation(), max_rounds=ROUNDS, **QUIET, **processes)
    trainer.fit(module, datamodule=clients_of(CASE.data(None)))
    torch.save({"state_dict": module.state_dict()}, folder / "last.ckpt")
    return folder / "last.ckpt"


def in_two_processes(folder):
    command = [sys.executable, "-m", __spec__.name, "--of-two", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "last.ckpt"


def on_flower(folder):
    from tests.backends.flower.processes import Deployment
    from tests.backends.flower.test_flower_processes import Workers, finish, run, start_nodes, write_app

    with Deployment(folder) as deployment, Workers(folder, NAME):
        deployment.configure()
        start_nodes(deployment)
        finish(deployment, run(deployment, write_app(folder), folder / "run", NAME, ROUNDS))
    return folder / "run" / "last.ckpt"


def in_nvflare_simulator(folder):
    from tests.backends.nvflare.processes import simulate

    simulate(folder, "fedavg")
    return folder / "server" / "last.ckpt"


def on_nvflare_poc(folder):
    from tests.backends.nvflare.processes import Poc

    with Poc(folder, "fedavg") as poc:
        assert poc.wait(poc.submit()) == "FINISHED:COMPLETED"
    return folder / "server" / "last.ckpt"


WAYS = {
    "one process": (in_one_process, "lightning"),
    "two processes": (in_two_processes, "lightning"),
    "Flower, a SuperLink and two SuperNodes": (on_flower, "flwr"),
    "NVFLARE's simulator": (in_nvflare_simulator, "nvflare"),
    "NVFLARE's POC mode": (on_nvflare_poc, "nvflare"),
}


def main(*names):
    sys.stdout.write("| way | version | digest of the global model |\n|---|---|---|\n")
    for name in names or WAYS:
        train, package = WAYS[name]
        with tempfile.TemporaryDirectory() as folder:
            state = torch.load(train(Path(folder)), weights_only=False)["state_dict"]
        sys.stdout.write(f"| {name} | {package} {version(package)} | `{digest(state)}` |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of-two"]:
        in_one_process(Path(sys.argv[2]), strategy="client_parallel", devices=2)
    else:
        main(*sys.argv[1:])
