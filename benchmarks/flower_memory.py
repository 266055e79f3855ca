"""Round time and peak memory per process for a large model over Flower, with a SuperLink and two SuperNodes.

A first fit with a small model gives each process's base memory. The table shows the increase for the large model, in
units of the model size. A plain fit on one client's data runs in a separate process for comparison.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from common import machine, parser, prepare, table, write_section
from network_latency import run_flower, write_flower_app

WIDTH, ROUNDS = 4096, 3
KINDS = {
    "server's half": "flwr-serverapp",
    "SuperLink": "flower-superlink",
    "SuperNode": "flower-supernode",
    "worker": "flower worker",
    "process of a message": "flwr-clientapp",
}
"""Process to text in the command line."""

COMMON = """
import json, os, time
import lightning as L
import torch
torch.set_num_threads(1)
from torch import nn
from torch.utils.data import TensorDataset
from lightning_fed import FederatedDataModule, Federation
from lightning_fed.tasks import ClassificationTask

WIDTH, LAYERS = int(os.environ["FLOWER_WIDTH"]), int(os.environ["FLOWER_LAYERS"])

def data():
    generator = torch.Generator().manual_seed(0)
    return {place: TensorDataset(torch.randn(8, WIDTH, generator=generator), torch.arange(8)) for place in range(2)}

def model():
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return ClassificationTask(nn.Sequential(*layers), num_classes=WIDTH, lr=1e-3)

def federation():
    return Federation("fedavg", local_epochs=1, seed=0)

OPTIONS = {"accelerator": "cpu", "logger": False}

class Clock(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        with open(os.environ["FLOWER_CLOCK"], "a") as file:
            file.write(f"{time.time()}\\n")
"""

SERVER = """
from flowermemory.common import *
from lightning_fed.backends.flower import server_app

app = server_app(
    federation(), model, None, {**OPTIONS, "max_epochs": int(os.environ["FLOWER_ROUNDS"])}, callbacks=[Clock()],
    clients=2, folder=os.environ["FLOWER_FOLDER"], time_limit=600,
)
"""

CLIENTS = """
from flowermemory.common import *
from lightning_fed.backends.flower import client_app

app = client_app(federation(), model, FederatedDataModule(data(), batch_size=4), OPTIONS)
"""

PLAIN = """
from flowermemory.common import *
from torch.utils.data import DataLoader
trainer = L.Trainer(**OPTIONS, max_epochs=2, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(model(), DataLoader(data()[0], batch_size=4))
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


class Peaks:
    """Polls the peak memory in bytes, by kind of process, for processes with the folder in the environment."""

    def __init__(self, folder: Path) -> None:
        self._marks = f"FLWR_HOME={folder / 'flower'}".encode(), threading.Event()
        self.bytes: dict[str, int] = {}

    def __enter__(self) -> Peaks:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._marks[1].set()
        self._thread.join()

    def _look(self) -> None:
        mark, is_over = self._marks
        while not is_over.wait(0.05):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    kind = next((kind for kind, words in KINDS.items() if words in command), None)
                    if kind is None or mark not in (process / "environ").read_bytes().split(b"\0"):
                        continue
                    found = re.search(r"VmHWM:\s+(\d+)", (process / "status").read_text())
                    if found is not None:
                        self.bytes[kind] = max(self.bytes.get(kind, 0), int(found[1]) * 1024)


def run(width: int, layers: int) -> tuple[dict[str, int], float]:
    """Peak bytes by kind of process, and seconds per round without the first round."""
    folder = Path(tempfile.mkdtemp(prefix="flower-"))
    environment = {
        "FLOWER_WIDTH": str(width), "FLOWER_LAYERS": str(layers), "FLOWER_CLOCK": str(folder / "clock"),
        "FLOWER_ROUNDS": str(ROUNDS), "FLOWER_FOLDER": str(folder / "run"),
    }  # fmt: skip
    try:
        app = write_flower_app(folder, "flowermemory", common=COMMON, server=SERVER, clients=CLIENTS)
        with Peaks(folder) as peaks:
            run_flower(folder, app, has_workers=True, seconds=1500, environment=environment)
        times = [float(line) for line in (folder / "clock").read_text().split()]
        plain = subprocess.run(
            [sys.executable, "-c", PLAIN], cwd=app, env={**os.environ, **environment}, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return {**peaks.bytes, "plain fit": 1024 * int(plain.stdout.split()[-1])}, (times[-1] - times[0]) / (ROUNDS - 1)
    except FileNotFoundError as error:
        raise SystemExit(f"{error}\n{(folder / 'run.log').read_text()[-3000:]}") from error
    finally:
        shutil.rmtree(folder)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--layers", type=int, nargs="+", default=[4], help=f"layers of {WIDTH} x {WIDTH} weights")
    arguments = made.parse_args()
    prepare(arguments)
    small, _ = run(16, 1)
    rows = []
    for layers in [1] if arguments.quick else arguments.layers:
        width = 256 if arguments.quick else WIDTH
        size = 4 * layers * (width + 1) * width
        peaks, seconds = run(width, layers)
        print(size, seconds, peaks, small, flush=True)
        above = [(peaks[kind] - small[kind]) / size for kind in ("plain fit", *KINDS)]
        rows.append([f"{size / 1e6:.0f} MB", f"{seconds:.1f}", *(f"{models:.1f}" for models in above)])
    text = (
        f"`python benchmarks/flower_memory.py --out benchmarks/results/performance.md`. {machine(1)}. Load average"
        f" {os.getloadavg()[1]:.1f}. {ROUNDS} rounds of FedAvg with SGD, two SuperNodes with a worker and a client of 8"
        " examples each, on the loopback address. Memory is a process' peak above that with a model of 1 kB, in models;"
        " the plain fit has weights and gradients. Seconds of a round are those after the first.\n\n"
    )
    header = ["model", "seconds a round", "plain fit", *KINDS]
    write_section(arguments.out, "flower-memory", f"{text}{table(header, rows)}")


if __name__ == "__main__":
    main()
