"""Pytest plugin: every Trainer of Lightning's tests is federated with one client, and what became of each is noted.

The environment says how: ``DOOR`` (``plain``, ``callback`` or ``trainer``), ``NUMBERS`` (``hidden`` if nobody is to see
those of the rounds), ``RESULTS`` (a file with one line of JSON for each test, on which a run that broke off goes on)
and ``WANTED`` (a file with the tests to run, ``null`` for all).
"""

import json
import os
import sys
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_fed.callbacks.federation import Federation
from lightning_fed.data.partitions import IID
from lightning_fed.fit.round_log import RoundLog
from lightning_fed.rounds.round import Round
from lightning_fed.trainer import FederatedTrainer
from tests.lightning_suite.results import read

DOOR = os.environ.get("DOOR", "plain")
RESULTS, WANTED = (Path(os.environ.get(name, os.devnull)) for name in ("RESULTS", "WANTED"))
OPTIONS = {"optimizer_state": "keep", "batch_norm": "average"}
PACKAGE = f"{os.sep}lightning_fed{os.sep}"

rounds = 0
failure = None


class OneClientTrainer(FederatedTrainer):
    """``FederatedTrainer`` with one client, under the name of ``Trainer``."""

    def __init__(self, *args, **kwargs):
        super().__init__(**{"partition": IID(1), **OPTIONS, **kwargs})


def use_callback():
    """Adds the callback to every Trainer, after its arguments have been read."""
    plain_init = L.Trainer.__init__

    def init(self, *args, **kwargs):
        plain_init(self, *args, **kwargs)
        self.callbacks.insert(0, Federation(partition=IID(1), **OPTIONS))

    init.__wrapped__ = plain_init
    L.Trainer.__init__ = init


def use_trainer():
    """Puts ``FederatedTrainer`` in place of ``Trainer`` wherever Lightning has it."""
    plain = L.Trainer
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "lightning" and vars(module).get("Trainer") is plain:
            module.Trainer = OneClientTrainer


def count_rounds():
    """Counts the rounds that are closed."""
    close = Round.close

    def counted(self, *args, **kwargs):
        global rounds
        rounds += 1
        return close(self, *args, **kwargs)

    Round.close = counted


def leave_out_processes():
    """Skips a test when it starts processes: a federation refuses these, and what happens in them is not noted."""

    def launch(self, *args, **kwargs):
        pytest.skip("starts processes")

    _MultiProcessingLauncher.launch = launch


if DOOR == "callback":
    use_callback()
elif DOOR == "trainer":
    use_trainer()
if os.environ.get("NUMBERS") == "hidden":
    RoundLog.put = lambda *args, **kwargs: None
count_rounds()
leave_out_processes()


def write(**result):
    """Adds a line to the results."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")


def pytest_collection_modifyitems(config, items):
    """Leaves out tests that have a result, also one that ended the process, and those that nobody wants."""
    known, wanted = read(RESULTS), json.loads(WANTED.read_text() or "null")
    kept = [item for item in items if item.nodeid not in known and (wanted is None or item.nodeid in wanted)]
    left_out = [item for item in items if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_runtest_logstart(nodeid):
    """Notes a test that begins, so that one that ends the process is known."""
    global rounds, failure
    rounds, failure = 0, None
    write(test=nodeid, outcome="crashed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Notes the error of a test, and whether it is one of the package's own."""
    global failure
    report = yield
    if report.failed and failure is None:
        failure = {"error": call.excinfo.exconly()[:2000], "refused": refusal(call.excinfo.value)}
    if report.when == "call" and report.passed and failure is None:
        failure = {}
    return report


def pytest_runtest_logreport(report):
    """Notes what became of a test."""
    if report.when == "teardown":
        outcome = "skipped" if failure is None else "failed" if failure else "passed"
        write(test=report.nodeid, outcome=outcome, rounds=rounds, **(failure or {}))


def refusal(error):
    """The sentence with which the package has refused something, from the exception or those that it came from."""
    while error is not None:
        trace, file = error.__traceback__, ""
        while trace is not None:
            trace, file = trace.tb_next, trace.tb_frame.f_code.co_filename
        if PACKAGE in file and type(error).__name__ in (
            "MisconfigurationException",
            "OptionError",
            "TypeError",
            "ValueError",
        ):
            return str(error)
        error = error.__cause__ or error.__context__
    return None
