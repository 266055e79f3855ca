"""Secure sum over the clients' answers to a question from a server callback.

The question is a dictionary. The key ``"sum"`` requests a secure sum, and its value is the sum's name. Each client
answers with one tensor of large integers (``privacy/masked_sums.py``), and the server learns only the sum. A client
refuses to unmask two sums with the same name over different sets of clients, because the difference could reveal an
answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_fed.backends.wire.packets import TrainRequest
from lightning_fed.backends.wire.secure_sum_client import NOT_MASKED, ClientSum
from lightning_fed.backends.wire.secure_sum_server import ServerSum
from lightning_fed.backends.wire.transport import Transport
from lightning_fed.errors import ClientFault
from lightning_fed.messages import Client, ClientUpdate
from lightning_fed.privacy.masked_sums import FEWEST, WORDS, Numbers, to_numbers, to_words
from lightning_fed.privacy.secure_sum import SecureSum
from lightning_fed.server.schedule import Visit
from lightning_fed.server.server import ServerInterface

Replies: TypeAlias = Iterator[tuple[Client, ClientUpdate | str]]

_SUM = "sum"
_ROUND = 0  # of all sums over answers: the server must not get another sum with another round


def ask_sum(
    transport: Transport,
    server: ServerInterface,
    question: Mapping[str, Any],
    visits: Sequence[Visit],
    ask: Callable[[Sequence[Visit], list[Client]], Replies],
) -> Replies:
    """Asks clients a question, and computes a secure sum over the answers.

    ``visits`` name the clients to ask. After the key exchange, ``ask(visits, clients)`` sends the question to the
    clients with valid keys, and yields the masked answers. :func:`ask_sum` yields (client, reason) for each missing
    client, and finally ``("sum", update)`` if the sum succeeds. ``update.members`` lists the summed clients.
    """
    step = next(step for step in server.chain.steps if isinstance(step, SecureSum))
    server.report.round, server.report.failed = _ROUND, {}  # overwrites the last round's report
    total = _Total(max(FEWEST, step.least_clients(len(visits))))
    secure_sum = ServerSum(transport, server, total, _run_of(question), set())
    secure_sum.share_secrets([visit.client for visit in visits])
    yield from list(server.report.failed.items())
    for client, answer in ask([visit for visit in visits if visit.client in secure_sum.peers], list(secure_sum.peers)):
        fault = answer if isinstance(answer, str) else total.add(answer)
        if fault:
            yield client, fault
    secure_sum.unmask(total.clients)
    if len(total.clients) < total.least:
        total.discard(f"the secure sum requires at least {total.least} clients, but got {len(total.clients)}")
    if total.fault:
        yield from ((client, total.fault) for client in total.clients)
    else:
        extras = {_SUM: to_words(total.numbers)}
        yield _SUM, ClientUpdate(_SUM, 1, {}, extras, members=tuple(total.clients))


def mask_answer(answer: ClientUpdate, train_request: TrainRequest, sum_of: Callable[[str], ClientSum]) -> None:
    """Masks a client's answer to a server callback's question in place, if the question requests a secure sum.

    ``sum_of`` returns the object with the client's keys and masks for a sum, by name. Raises ``ClientFault`` if the
    answer also has metrics or tensors in ``state``, or if the server requests an answer without masks.
    """
    peers = train_request.peers
    if answer.metrics or answer.state or (answer.extras and peers is None):
        raise ClientFault(NOT_MASKED)
    if peers is None:
        return
    ((name, words),) = answer.extras.items()
    numbers = to_numbers(words)
    sum_of(_run_of(train_request.question or {})).add_masks(numbers, peers, _ROUND, FEWEST)
    answer.extras[name] = to_words(numbers)


class _Total:
    def __init__(self, least: int) -> None:
        self.least, self.fault = least, ""
        self.clients: list[Client] = []
        self.numbers: Numbers = np.zeros(0, dtype=object)

    def add(self, update: ClientUpdate) -> str:
        words = next(iter(update.extras.values()), torch.zeros(0))
        if not self.clients:
            self.numbers = np.array([0] * (words.numel() // WORDS), dtype=object)
        if words.shape != (len(self.numbers), WORDS) or words.dtype != torch.int32 or len(update.extras) > 1:
            return "the client's answer is not a list of masked numbers"
        self.numbers += to_numbers(words)
        self.clients.append(update.client)
        return ""

    def zeros(self) -> Numbers:
        return self.numbers * 0

    def subtract(self, masks: Numbers) -> None:
        self.numbers -= masks

    def discard(self, reason: str) -> None:
        self.fault = self.fault or reason


def _run_of(question: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{question.get('callback')}: {question.get('sum')}".encode()).hexdigest()[:32]
