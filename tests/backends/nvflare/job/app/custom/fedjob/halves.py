"""Server and client of the tested federation; the environment names case and folder."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import lightning as L

from lightning_fed.backends.nvflare import FederationController, FederationExecutor
from lightning_fed.backends.wire import Deadline
from tests.backends.nvflare.federations import FEDERATIONS, data_of, module

FOLDER = Path(os.environ["FEDJOB_FOLDER"])
DEADLINE = Deadline(**json.loads(os.environ["FEDJOB_DEADLINE"]))
OPTIONS = {"accelerator": "cpu", "logger": False}


class Wait(L.Callback):
    """Signals the start of a visit, and prolongs the visit while a file exists."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        site = os.environ.get("FEDJOB_SITE")
        (FOLDER / f"{site}-{trainer.current_epoch}").touch()
        while (FOLDER / f"{site}-waits").exists() and trainer.current_epoch == 1:
            time.sleep(0.05)


@dataclass
class Strange:
    """An object without an NVFLARE decoder on the server."""

    value: int


class Server(FederationController):
    def __init__(self):
        super().__init__(
            FEDERATIONS[os.environ["FEDJOB"]](), module, None, {**OPTIONS, "max_epochs": 3},
            clients=["site-1", "site-2"], folder=FOLDER / "server", time_limit=DEADLINE, patience=60,
        )  # fmt: skip


class Client(FederationExecutor):
    def __init__(self):
        super().__init__(
            FEDERATIONS[os.environ["FEDJOB"]](), module, lambda node: data_of(node["site"]), OPTIONS, callbacks=[Wait()]
        )

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        """Answers a task; a hostile site answers round 1 with an object."""
        reply = super().execute(task_name, shareable, fl_ctx, abort_signal)
        is_hostile = os.environ.get("FEDJOB_HOSTILE") == fl_ctx.get_identity_name()
        if is_hostile and task_name == "train" and '"round": 1' in shareable["text"]:
            reply["data"] = Strange(1)
        return reply
