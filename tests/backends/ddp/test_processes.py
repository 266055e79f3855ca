"""The processes' supervisor: one answer, the first process's questions, errors, deaths and orphans."""

import os
import signal
import time
from multiprocessing import forkserver

import pytest

pytest.importorskip("flwr")

from lightning_fed.backends.ddp.processes import Processes, as_bytes, current_rank
from lightning_fed.errors import ClientFault
from tests import warm_process

pytestmark = [
    pytest.mark.skipif(not warm_process.CAN_FORK, reason="needs processes that are forked"),
    pytest.mark.timeout(120),
]


def serve(name):
    return answer


def answer(order, judge):
    rank, size = current_rank()
    judge([f"entry {rank}"])
    if order == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "raise" and rank == 1:
        raise ClientFault("the client has no memory")
    if rank == 0 and order in ("die", "raise"):
        time.sleep(60)  # as in an exchange with the second process
    return os.getpid() if order == "pid" else (order, rank, size)


@pytest.fixture
def processes():
    warm_process.start_server()
    group = Processes(2, as_bytes("a client"), serve)
    yield group
    group.stop()


def ignore(names):
    pass


def test_the_first_process_answers_and_asks(processes):
    asked = []
    assert processes.run("first", asked.append) == ("first", 0, 2)
    assert processes.run("second", asked.append) == ("second", 0, 2)
    assert asked == [["entry 0"], ["entry 0"]]


def test_processes_stay_until_an_error(processes, monkeypatch):
    """After an error or a kill, no process is left, and new processes answer."""
    first = processes.run("pid", ignore)
    assert processes.run("pid", ignore) == first
    for order, reason in [
        ("die", "process 2 of its 2 processes ended with signal SIGKILL"),
        ("raise", "the client has no memory"),
    ]:
        pid, start = processes.run("pid", ignore), time.monotonic()
        with pytest.raises(ClientFault, match=reason):
            processes.run(order, ignore)
        assert time.monotonic() - start < 50  # less than the sleep of the first process
        assert not is_alive(pid)
        assert processes.run("pid", ignore) != pid
        monkeypatch.setattr("lightning_fed.backends.ddp.processes._GRACE", 0.3)  # the other errors kill no process

    def refuse(names):
        raise ClientFault("the policy forbids entry 0")

    pid = processes.run("pid", ignore)
    with pytest.raises(ClientFault, match="the policy forbids entry 0"):
        processes.run("pid", refuse)
    assert not is_alive(pid)


def supervise(path):
    forkserver._forkserver.ensure_running = lambda: None  # noqa: SLF001 - the forked process's own server
    group = Processes(2, as_bytes("a client"), serve)
    path.write_text(str(group.run("pid", ignore)))
    time.sleep(60)


def test_processes_end_with_a_killed_supervisor(tmp_path):
    path = tmp_path / "pid"
    supervisor = warm_process.start(supervise, path)
    try:
        wait_until(lambda: path.exists() and path.read_text())
        pid = int(path.read_text())
        assert is_alive(pid)
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
    finally:
        warm_process.end(supervisor)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
