"""Processes that train one client together, as in DDP. The client's main process starts and stops the others."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.errors import ClientFault

_log = logging.getLogger(__name__)

_GRACE = 1.0  # seconds until a killed process is known, after another process has lost the connection

Serve = Callable[[Any], Callable[[Any, Callable[[Sequence[str]], None]], Any]]
"""Function that receives a client's arguments, and returns the function to run for each task."""


def as_bytes(value: Any) -> bytes:
    """Pickles a client's arguments for other processes on the same machine.

    Raises:
        MisconfigurationException: If an argument cannot be pickled, such as a lambda.
    """
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise MisconfigurationException(
            "Expected model, data, callbacks and Trainer arguments that other processes can load, because several "
            f"devices need one process each, but got: {error}. Define functions and classes at the top of a module."
        ) from error


def current_rank() -> tuple[int, int]:
    """Returns this process's index among the processes of a client, and the number of processes."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Processes:
    """Several processes that train one client. The first call of :meth:`run` starts the processes.

    Args:
        size: Number of processes.
        arguments: Pickled arguments for ``serve``.
        serve: Function called once in each process. Returns the function that handles training tasks.
    """

    def __init__(self, size: int, arguments: bytes, serve: Serve) -> None:
        self._size, self._arguments, self._serve = size, arguments, serve
        self._running: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, order: Any, judge: Callable[[Sequence[str]], None]) -> Any:
        """Sends a training task to all processes, and returns the first process's answer.

        Before training, ``judge`` checks the names of the tensors to send. If a process fails, all are stopped, and
        ``ClientFault`` is raised.
        """
        if not self._running:
            self._start()
        try:
            content = pickle.dumps(order)
            for pipe in self._pipes:
                pipe.send_bytes(content)
            return self._collect(judge)
        except BaseException as error:
            ended = self._find_ended() if isinstance(error, ClientFault | OSError | EOFError) else None
            self.stop()
            if ended is not None:
                raise ClientFault(ended) from error
            raise

    def stop(self) -> None:
        _kill(self._running)
        for pipe in self._pipes:
            pipe.close()
        self._running, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self._serve.__module__])  # imports before the forks
        port = find_free_network_port()
        for rank in range(self._size):
            here, there = context.Pipe()
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": 0, "GROUP_RANK": 0, "RANK": rank}
            place |= {"LOCAL_RANK": rank, "WORLD_SIZE": self._size, "LOCAL_WORLD_SIZE": self._size}
            variables = {**os.environ, **{name: str(value) for name, value in place.items()}}
            process = context.Process(target=_work, args=(there, variables, self._arguments, self._serve))
            process.start()
            there.close()
            self._running.append(process)
            self._pipes.append(here)
        Finalize(self, _kill, args=(self._running,), exitpriority=1)  # before Python waits for the processes
        _log.info("Each client's local training runs in %d processes on this machine, one per device.", self._size)

    def _collect(self, judge: Callable[[Sequence[str]], None]) -> Any:
        answers: dict[Connection, Any] = {}
        while len(answers) < self._size:
            open_pipes = [pipe for pipe in self._pipes if pipe not in answers]
            ready = wait([*open_pipes, *(process.sentinel for process in self._running)])
            for pipe in [pipe for pipe in open_pipes if pipe in ready]:
                kind, value = pickle.loads(pipe.recv_bytes())
                if kind == "entries":
                    judge(value)
                    pipe.send_bytes(b"")
                elif kind == "fault":
                    raise ClientFault(value)
                else:
                    answers[pipe] = value
            if len(answers) < self._size and not all(process.is_alive() for process in self._running):
                raise EOFError
        return answers[self._pipes[0]]

    def _find_ended(self) -> str | None:
        wait([process.sentinel for process in self._running], _GRACE)
        for rank, process in enumerate(self._running):
            code = process.exitcode
            if code is not None:
                cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                return f"process {rank + 1} of its {self._size} processes ended with {cause}"
        return None


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _work(pipe: Connection, variables: dict[str, str], arguments: bytes, serve: Serve) -> None:
    os.environ.clear()  # the server of the forks has older variables
    os.environ.update(variables)
    answer = serve(pickle.loads(arguments))

    def judge(names: Sequence[str]) -> None:
        if variables["RANK"] == "0":
            pipe.send_bytes(pickle.dumps(("entries", list(names))))
            pipe.recv_bytes()

    while True:
        try:
            order = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the supervising process has ended
            return
        try:
            reply = "answer", answer(order, judge)
        except ClientFault as fault:
            reply = "fault", str(fault)
        pipe.send_bytes(pickle.dumps(reply))
