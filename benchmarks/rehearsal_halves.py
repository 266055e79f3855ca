"""Server and client program for `rehearsal_real.py`: a slow site, and recorded events.

A training step mostly sleeps, so other programs on the machine have little influence.
"""

import json
import os
import time
from pathlib import Path

import lightning as L
from network_halves import BATCH, CLIENTS, OPTIONS, SAMPLES, data_of, model

from lightning_fed import FederatedCallback, Federation
from lightning_fed.backends.wire.packets import read_train_request
from lightning_fed.backends.wire.runner import ClientRunner
from lightning_fed.backends.wire.transport import Transport

SECONDS = dict(zip(CLIENTS, (0.2, 0.8), strict=True))
"""Seconds for which a site sleeps before a training step."""
BATCHES = SAMPLES // BATCH
TIME_LIMIT = 300.0


def make_federation():
    return Federation("fedavg", local_epochs=int(os.environ["REHEARSAL_EPOCHS"]), seed=0)


class Sleep(FederatedCallback):
    """Sleeps before every training step."""

    def on_client_batch(self, trainer, module, client, batch):
        time.sleep(SECONDS[client])
        return batch


class Ends(L.Callback):
    """Records the end and the transport's byte counts."""

    def on_fit_end(self, trainer, pl_module):
        note("end", bytes=[Watched.transport.sent, Watched.transport.received])


class Watched:
    """Methods with recorded events."""

    transport: Transport
    ask, answer, fit = Transport.ask, ClientRunner.answer, ClientRunner._fit  # noqa: SLF001 - no public hook has these times

    @staticmethod
    def asking(self, kind, packets, round, again=None):
        Watched.transport = self

        def sent():
            yield from packets
            note("sent", round=round)

        note("round", round=round)
        for client, answer in Watched.ask(self, kind, sent(), round, again):
            note("used", round=round, client=client)
            yield client, answer

    @staticmethod
    def answering(self, kind, packet, node):
        if kind != "train":
            return Watched.answer(self, kind, packet, node)
        visit = read_train_request(packet, kind)[0].visit
        note("arrives", round=visit.round, client=visit.client)
        reply = Watched.answer(self, kind, packet, node)
        note("leaves", round=visit.round, client=visit.client)
        return reply

    @staticmethod
    def fitting(self, remote, run, round, datamodule):
        start = time.time()
        steps = Watched.fit(self, remote, run, round, datamodule)
        note("trained", round=round, client=remote.server.update.client, seconds=time.time() - start, steps=steps)
        return steps


def server_half(make):
    Transport.ask = Watched.asking
    trainer = {**OPTIONS, "max_epochs": int(os.environ["REHEARSAL_ROUNDS"])}
    folder = Path(os.environ["REHEARSAL_FOLDER"]) / "run"
    return make(
        make_federation(), model, None, trainer, clients=CLIENTS, folder=folder, time_limit=TIME_LIMIT,
        callbacks=[Ends()],
    )  # fmt: skip


def client_half(make):
    ClientRunner.answer, ClientRunner._fit = Watched.answering, Watched.fitting  # noqa: SLF001
    return make(make_federation(), model, data_of, OPTIONS, callbacks=[Sleep()])


def note(what, **values):
    line = json.dumps({"what": what, "time": time.time(), **values})
    with (Path(os.environ["REHEARSAL_FOLDER"]) / "events").open("a") as file:
        file.write(f"{line}\n")
