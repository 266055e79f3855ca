"""Flower's grid without Flower's processes: serialised messages go to client apps in the same process."""

import time
from collections.abc import Callable, Iterable
from itertools import count
from types import SimpleNamespace

from flwr.app import Context, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity


class FakeGrid:
    """Nodes with client apps. Answers are computed on request, and dropped once the message has expired.

    As in Flower, exceptions in an app come back as errors, and invalid objects raise at the receiver.

    Args:
        apps: Client app by node.
        configs: Node configuration by node.
        change: Called with (node, message, answer's content) before delivery; returns the contents to deliver in turn.

    Attributes:
        sent: All (node, message) so far.
        gone: Disconnected nodes.
        silent: Nodes that never answer.
        errors: Exceptions raised in apps.
        late: Number of polls without an answer, by node.
        keys: Public key by node, as Flower stores keys.
    """

    def __init__(self, apps: dict, configs: dict | None = None, change: Callable | None = None):
        self.apps, self.configs = apps, configs or {}
        self.change = change or (lambda node, message, content: [content])
        self.sent, self.gone, self.silent = [], set(), set()
        self.late, self.errors, self.keys = {}, [], {}
        self._waiting, self._names = {}, count()
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as set by Flower's processes

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.apps if node not in self.gone]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            assert message.metadata.ttl > 0
            name = f"message-{next(self._names)}"
            vars(message.metadata)["_message_id"] = name
            self.sent.append((message.metadata.dst_node_id, message))
            self._waiting[name] = message
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        answers = []
        for name in message_ids:
            message = self._waiting.get(name)
            node = None if message is None else message.metadata.dst_node_id
            if message is None or node in self.gone or node in self.silent:
                continue
            if self.late.get(node, 0) > 0:
                self.late[node] -= 1
                continue
            del self._waiting[name]
            # after expiry a SuperLink keeps neither
            if message.metadata.created_at + message.metadata.ttl <= time.time():
                answers.append(_error(name, "the message has expired"))
                continue
            context = Context(1, node, self.configs.get(node, {}), RecordDict(), {})
            copy = Message(_copied(message.content), node, message.metadata.message_type)
            vars(copy.metadata)["_message_id"] = name
            try:
                content = self.apps[node](copy, context).content
            except Exception as error:
                self.errors.append(error)
                answers.append(_error(name, f"{type(error)}:<'{error}'>"))
                continue
            for changed in self.change(node, message, content):
                answers.append(_answer(_copied(changed), name))
        return answers


def _answer(content: RecordDict, name: str):
    return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=name), content=content, has_error=lambda: False)


def _error(name: str, reason: str):
    error = SimpleNamespace(reason=reason, code=0)
    return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=name), error=error, has_error=lambda: True)


def _copied(content: RecordDict) -> RecordDict:
    return recorddict_from_proto(
        type(recorddict_to_proto(content)).FromString(recorddict_to_proto(content).SerializeToString())
    )
