"""Sends messages to clients as NVFLARE tasks. The result of a task contains the client's answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from lightning_fed.backends.wire.packets import Packet, PacketError, one_line, unreadable
from lightning_fed.backends.wire.transport import Answer, Deadline, Transport, put_aside
from lightning_fed.messages import Client


def to_shareable(packet: Packet) -> Shareable:
    """Converts a packet to an NVFLARE ``Shareable``."""
    return Shareable({"text": packet.text, "data": bytes(packet.data)})


def from_shareable(content: Shareable) -> Packet:
    """Converts an NVFLARE ``Shareable`` to a packet. Raises ``PacketError`` if text or data are missing."""
    text, data = content.get("text"), content.get("data")
    if not isinstance(text, str) or not isinstance(data, bytes):
        raise PacketError("the message is not from lightning-fed")
    return Packet(text, data)


class FlareTransport(Transport):
    """Sends packets as tasks from a controller.

    ``sites`` maps clients to site names. NVFLARE's certificates identify the site that sends an answer.
    """

    def __init__(
        self,
        controller: Controller,
        context: FLContext,
        abort: Signal,
        sites: Mapping[Client, str],
        deadline: Deadline | float,
        poll: float = 0.1,
        key: Ed25519PrivateKey | None = None,
    ) -> None:
        super().__init__(deadline, poll, key)
        self._controller, self._context, self._abort = controller, context, abort
        self._sites = dict(sites)
        self._tasks: dict[str, tuple[Client, Task]] = {}  # tasks without an answer
        self._answers: dict[str, Callable[[], Answer]] = {}

    def await_clients(self, expected: int | Sequence[Client], patience: float) -> Sequence[Client]:
        deadline = time.monotonic() + patience
        wanted = list(self._sites) if isinstance(expected, int) else list(expected)
        while missing := {self._sites[client] for client in wanted} - self._connected():
            self._check_abort()
            if time.monotonic() > deadline:
                raise TimeoutError(f"The sites {sorted(missing)} did not connect within {patience:.0f} s.")
            time.sleep(self._poll)
        return wanted

    def push(self, client: Client, kind: str, packet: Packet, round: int) -> str | None:
        if self.connection(client) is None:
            return None
        for old in [name for name, (other, _) in self._tasks.items() if other == client]:
            self._controller.cancel_task(self._tasks.pop(old)[1])
        task = Task(kind, to_shareable(packet), result_received_cb=self._receive)
        name: str = task.msg_root_id
        self._tasks[name] = client, task
        self._controller.send(task, self._context, targets=[self._sites[client]])
        return name

    def pull(self, name: str) -> Answer | None:
        self._check_abort()
        answer = self._answers.pop(name, None)
        return None if answer is None else answer()

    def connection(self, client: Client) -> str | None:
        site = self._sites[client]
        is_lost = self._controller.get_client_disconnect_time(site) is not None
        return None if is_lost else site

    def _receive(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        name, result = client_task.task.msg_root_id, client_task.result
        client_task.result = None  # the task would hold the result in memory until the end of the job
        self._tasks.pop(name, None)
        code = result.get_return_code()
        try:
            answer: Answer = from_shareable(result) if code == ReturnCode.OK else one_line(f"NVFLARE reports: {code}")
        except PacketError as error:
            answer = unreadable(error)
        self._answers[name] = put_aside(answer)

    def _connected(self) -> set[str]:
        return {client.name for client in self._context.get_engine().get_clients()}

    def _check_abort(self) -> None:
        if self._abort.triggered:
            raise RuntimeError("The job was aborted: submit the job again to resume from the last complete round.")
