"""Server and client of the tested federation; the environment names case and folder."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from nvflare.apis.shareable import Shareable, make_reply

from lightning_fed.backends.flower.transport import from_records, to_records
from lightning_fed.backends.nvflare import FederationController, FederationExecutor
from lightning_fed.backends.nvflare.transport import from_shareable, to_shareable
from lightning_fed.backends.wire import Deadline
from lightning_fed.backends.wire.packets import Answer, Fault, PacketError, write_fault, write_update
from lightning_fed.messages import ClientUpdate
from lightning_fed.study import SiteStudy
from tests.backends.flower.test_flower_faults import NONSENSE
from tests.backends.nvflare.federations import (
    FEDERATIONS,
    RANKS,
    STUDY,
    data_of,
    module,
    places_of,
    plain_module,
    shared_data,
    study_data,
    study_module,
)

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


def fail(reply):
    raise RuntimeError("gone")


FLARES = {
    "an object": (lambda reply: Shareable({**reply, "data": Strange(1)}), "the client did not answer within"),
    "an object for the text": (
        lambda reply: Shareable({**reply, "text": Strange(1)}),
        "the client did not answer within",
    ),
    "no text": (lambda reply: Shareable({"data": b""}), "not from lightning-fed"),
    "a number for the text": (lambda reply: Shareable({**reply, "text": 3}), "not from lightning-fed"),
    "numbers for the bytes": (lambda reply: Shareable({**reply, "data": [1]}), "not from lightning-fed"),
    "a deep list": (lambda reply: Shareable({**reply, "data": nested(400)}), "not from lightning-fed"),
    "another return code": (lambda reply: make_reply("x\ny"), "NVFLARE reports: x y"),
    "a number for the return code": (lambda reply: make_reply(7), "NVFLARE reports: 7"),
    "no answer": (lambda reply: None, "NVFLARE reports: EXECUTION_RESULT_ERROR"),
    "an exception": (fail, "NVFLARE reports: EXECUTION_RESULT_ERROR"),
}
"""Answers that only exist on NVFLARE."""


def nested(depth):
    return [nested(depth - 1)] if depth else []


def through_records(change):
    """Applies a change of Flower's records to an answer on NVFLARE."""

    def changed(reply):
        (content,) = change(to_records(from_shareable(reply)))
        return to_shareable(from_records(content))

    return changed


def is_packet(change):
    """Whether a change of Flower's records gives one packet, also on NVFLARE."""
    try:
        return len([from_records(content) for content in change(to_records(SAMPLE))]) == 1
    except PacketError:
        return False


SAMPLE = write_update(ClientUpdate("site-2", 1, {"w": torch.zeros(4, 4)}, {"x": torch.zeros(4, 2)}), Answer())
HOSTILE = {
    **FLARES,
    **{name: (through_records(change), reason) for name, (change, reason) in NONSENSE.items() if is_packet(change)},
    # Flower's fault names another client.
    "a program that failed": (
        lambda reply: to_shareable(write_fault(Fault("site-2", "gone"))), "gone",
    ),
}  # fmt: skip


def site_data(node):
    return study_data(CASE, node["site"]) if CASE in STUDY else data_of(node["site"])


def study(folder):
    return [SiteStudy(STUDY[CASE], "test_loss", FOLDER / folder)] if CASE in STUDY else []


CASE = os.environ.get("FEDJOB", "")  # missing if a test only reads the table
IS_SHARED = CASE == RANKS
MODULE = plain_module if IS_SHARED else study_module if CASE in STUDY else module


class Server(FederationController):
    def __init__(self):
        rounds = len(HOSTILE) + 1 if "FEDJOB_HOSTILE" in os.environ else 3
        super().__init__(
            FEDERATIONS[CASE](), MODULE, None, {**OPTIONS, "max_epochs": rounds},
            clients=places_of(CASE), folder=FOLDER / f"server{STUDY.get(CASE, '')}", time_limit=DEADLINE,
            patience=60, callbacks=study("study"),
        )  # fmt: skip


class Client(FederationExecutor):
    def __init__(self):
        data, devices = (shared_data, {"devices": 2, "strategy": "ddp"}) if IS_SHARED else (site_data, {})
        super().__init__(FEDERATIONS[CASE](), MODULE, data, OPTIONS | devices, callbacks=[Wait(), *study("sites")])

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        """Answers a task; a hostile site changes each answer in another way, except the last one."""
        reply = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if os.environ.get("FEDJOB_HOSTILE") != fl_ctx.get_identity_name() or task_name != "train":
            return reply
        number = json.loads(shareable["text"])["header"]["visit"]["round"]
        changes = [change for change, _ in HOSTILE.values()]
        return changes[number](reply) if number < len(changes) else reply
