"""Server side of a secure sum: forwards keys and shares between clients, and unmasks the sum."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from lightning_fed.backends.wire.packets import NOT_HERE, Fault, unreadable
from lightning_fed.backends.wire.secure_sum_packets import (
    OPENED,
    SUM,
    Stage,
    SumRequest,
    context_of,
    read_sum_reply,
    write_sum_request,
)
from lightning_fed.backends.wire.secure_sum_protocol import SumError, check_public, find_masks
from lightning_fed.backends.wire.transport import Transport
from lightning_fed.console import round_number
from lightning_fed.errors import describe
from lightning_fed.messages import Client
from lightning_fed.privacy.masked_sums import MaskedSum
from lightning_fed.server.server import ServerInterface

_log = logging.getLogger(__name__)


class ServerSum:
    """Server side of the secure sum for one round.

    ``distrusted`` are clients excluded from later sums (until the server restarts), because their shares were
    unreadable or wrong. ``peers`` maps the clients in the sum to public keys. After the key exchange, all messages
    must list the clients in the order of ``peers``.
    """

    def __init__(
        self, transport: Transport, server: ServerInterface, secret_sum: MaskedSum, run: str, distrusted: set[Client]
    ) -> None:
        self.distrusted = distrusted
        self._transport, self._server, self._sum, self._run = transport, server, secret_sum, run
        self.peers: dict[Client, bytes] = {}
        self._positions: dict[Client, int] = {}  # positions among clients that published keys
        self._sealed: dict[Client, dict[Client, bytes]] = {}  # sealed shares by sender and receiver

    def share_secrets(self, clients: Sequence[Client]) -> None:
        """Exchanges keys and encrypted shares between the clients, before training.

        Excludes clients without an answer or with unusable shares. After unusable shares, the other clients repeat the
        steps with new keys. If too few clients remain, all clients are excluded.
        """
        for client in [client for client in clients if client in self.distrusted]:
            self._server.fail(
                client, "the client's shares (parts of secrets) were unusable in an earlier sum of this run"
            )
        clients = [client for client in clients if client not in self.distrusted]
        while self._are_enough(clients):
            published = self._publish(clients)
            if not self._are_enough(published):
                return
            self._positions = {client: position for position, client in enumerate(published)}
            self._share(published)
            if not self._are_enough(self._sealed):
                return
            opened = self._open()
            if not self._are_enough(opened):
                return
            clients = [client for client in opened if not self._is_at_fault(client, opened)]
            if len(clients) == len(opened):
                self.peers = {client: published[client] for client in clients}
                return
            words = "Round %d: the secure sum restarts with new keys from the other %d clients."
            _log.warning(words, round_number(self._server.report.round), len(clients))

    def _publish(self, clients: Sequence[Client]) -> dict[Client, bytes]:
        published: dict[Client, bytes] = {}
        for client, (public,) in self._ask("keys", clients):
            try:
                check_public(public)
                if any(public[:32] == other[:32] or public[32:64] == other[32:64] for other in published.values()):
                    raise SumError("another client has published one of the client's keys")
            except SumError as error:
                self._server.fail(client, str(error))
                continue
            published[client] = public
        return published

    def _share(self, published: Mapping[Client, bytes]) -> None:
        peers, keys = tuple(published), tuple(published.values())
        answers = self._ask("shares", peers, lambda client: {"peers": peers, "rows": keys})
        self._sealed = {client: dict(zip(peers, rows, strict=True)) for client, rows in answers}

    def _open(self) -> dict[Client, dict[Client, bytes]]:
        peers = tuple(self._sealed)

        def fields(client: Client) -> dict[str, Any]:
            return {"peers": peers, "rows": tuple(self._sealed[peer][client] for peer in peers)}

        return {client: dict(zip(peers, rows, strict=True)) for client, rows in self._ask("open", peers, fields)}

    def _is_at_fault(self, client: Client, opened: Mapping[Client, Mapping[Client, bytes]]) -> bool:
        """Excludes a client if too few other clients could decrypt the client's shares. Returns true if excluded."""
        missing = sum(rows[client] != OPENED for rows in opened.values())
        if not missing:
            return False
        words = f"{missing} of {len(opened)} clients cannot decrypt the client's shares (parts of secrets)"
        if len(opened) - missing >= self._sum.least:
            number = round_number(self._server.report.round)
            _log.warning("Round %d, client %r: %s. The other shares suffice for the sum.", number, client, words)
            return False
        self.distrusted.add(client)
        self._server.fail(
            client,
            f"{words}. Either the shares or these reports are wrong. Later sums exclude the sender of the shares",
        )
        return True

    def unmask(self, survivors: Sequence[Client]) -> None:
        if len(survivors) < self._sum.least:
            return  # too few clients to unmask the sum
        peers, is_there = tuple(self.peers), tuple(peer in survivors for peer in self.peers)
        fields = {"peers": peers, "survivors": is_there}
        answers = self._ask("unmask", survivors, lambda client: fields, counts=False)
        shares = {client: dict(zip(peers, rows, strict=True)) for client, rows in answers}
        context = context_of(self._run, self._server.report.round)
        try:
            masks, liars = find_masks(
                self._sum.zeros(), self.peers, survivors, shares, self._positions, self._sum.least, context
            )
        except Exception as error:  # invalid shares can raise several exception types
            reason = str(error) if isinstance(error, SumError) else describe(error)
            self._sum.discard(f"the sum cannot be unmasked: {reason}")
            dealer = error.dealer if isinstance(error, SumError) else None
            if dealer is not None:
                self.distrusted.add(dealer)
                words = (
                    "Round %d: client %r is excluded from further sums of this run. The round is not repeated "
                    "without the client, because the difference between two sums could reveal an update."
                )
                _log.warning(words, round_number(self._server.report.round), dealer)
            return
        for liar in liars:
            words = "Round %d: client %r sent wrong shares; the sum was unmasked without these shares."
            _log.warning(words, round_number(self._server.report.round), liar)
        self._sum.subtract(masks)

    def _are_enough(self, clients: Collection[Client]) -> bool:
        if len(clients) >= self._sum.least:
            return True
        for client in clients:
            reason = f"a secure sum needs at least {self._sum.least} clients, but only {len(clients)} are left"
            self._server.fail(client, reason)
        return False

    def _ask(
        self,
        stage: Stage,
        clients: Sequence[Client],
        fields: Callable[[Client], Mapping[str, Any]] = lambda client: {},
        counts: bool = True,
    ) -> Iterator[tuple[Client, tuple[bytes, ...]]]:
        report = self._server.report
        requests = {
            client: SumRequest(stage, self._run, report.round, client, self._sum.least, **fields(client))
            for client in clients
        }
        packets = {client: write_sum_request(request) for client, request in requests.items()}
        report.down_bytes += sum(len(packet.data) for packet in packets.values())
        for client, reply in self._transport.ask(SUM, packets.items(), report.round):
            report.up_bytes += 0 if isinstance(reply, str) else len(reply.data)
            try:
                answer = Fault(client, reply) if isinstance(reply, str) else read_sum_reply(reply, requests[client])
            except Exception as error:  # untrusted input can raise several exception types
                answer = Fault(client, unreadable(error))
            if not isinstance(answer, Fault):
                yield client, answer
                continue
            if answer.reason == NOT_HERE:
                self._transport.forget(client)
            if counts:
                self._server.fail(client, answer.reason)
            else:
                words = "Round %d: client %r does not help to unmask the sum: %s."
                _log.warning(words, round_number(report.round), client, answer.reason)
