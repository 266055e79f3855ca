"""Pytest plugin: federates every Trainer in Lightning's tests with one client, and records the results.

The environment contains ``DOOR`` (``plain``, ``callback`` or ``trainer``), ``NUMBERS`` (``hidden`` to hide the rounds'
metrics), ``RESULTS`` (a file with one JSON line per test, also read to resume) and ``WANTED`` (a file with the tests to
run, ``null`` for all).
"""

import json
import os
import sys
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_fed.callbacks.federation import Federation
from lightning_fed.fit.round_log import RoundLog
from lightning_fed.partitions.basic import IID
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
    """``FederatedTrainer`` with one client, named ``Trainer``."""

    def __init__(self, *args, **kwargs):
        super().__init__(**{"partition": IID(1), **OPTIONS, **kwargs})


def use_callback():
    """Adds the callback to every Trainer, after the Trainer has processed the arguments."""
    plain_init = L.Trainer.__init__

    def init(self, *args, **kwargs):
        plain_init(self, *args, **kwargs)
        self.callbacks.insert(0, Federation(partition=IID(1), **OPTIONS))

    init.__wrapped__ = plain_init
    L.Trainer.__init__ = init


def use_trainer():
    """Replaces ``Trainer`` by ``FederatedTrainer`` in all of Lightning's modules."""
    plain = L.Trainer
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "lightning" and vars(module).get("Trainer") is plain:
            module.Trainer = OneClientTrainer


def count_rounds():
    close = Round.close

    def counted(self, *args, **kwargs):
        global rounds
        rounds += 1
        return close(self, *args, **kwargs)

    Round.close = counted


def leave_out_processes():
    """Skips tests that start processes: a federation refuses these tests, and results in processes are not recorded."""

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
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")


def pytest_collection_modifyitems(config, items):
    """Deselects tests with a result, including tests that crashed the process, and unwanted tests."""
    known, wanted = read(RESULTS), json.loads(WANTED.read_text() or "null")
    kept = [item for item in items if item.nodeid not in known and (wanted is None or item.nodeid in wanted)]
    left_out = [item for item in items if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_runtest_logstart(nodeid):
    global rounds, failure
    rounds, failure = 0, None
    write(test=nodeid, outcome="crashed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Records the error of a test, and whether the package raised the error."""
    global failure
    report = yield
    if report.failed and failure is None:
        failure = {"error": call.excinfo.exconly()[:2000], "refused": refusal(call.excinfo.value)}
    if report.when == "call" and report.passed and failure is None:
        failure = {}
    return report


def pytest_runtest_logreport(report):
    if report.when == "teardown":
        outcome = "skipped" if failure is None else "failed" if failure else "passed"
        write(test=report.nodeid, outcome=outcome, rounds=rounds, **(failure or {}))


def refusal(error):
    """The package's error message for a refusal, from the exception or from a cause."""
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
