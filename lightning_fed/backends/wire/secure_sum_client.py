"""Client side of a secure sum: stores the secrets of a round between messages, and masks the update."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.backends.site.owned_files import write_private
from lightning_fed.backends.wire.packets import Fault, Packet, write_fault
from lightning_fed.backends.wire.secure_sum_packets import (
    NOT_OPENED,
    OPENED,
    SumRequest,
    context_of,
    write_sum_reply,
)
from lightning_fed.backends.wire.secure_sum_protocol import (
    NO_SHARE,
    SEALED,
    Secrets,
    Share,
    SumError,
    Vector,
    add_masks,
    check_peers,
    make_secrets,
    open_share,
    share_secrets,
)
from lightning_fed.console import round_number
from lightning_fed.errors import ClientFault
from lightning_fed.messages import Client, ClientUpdate, State, file_name

_log = logging.getLogger(__name__)

NOT_MASKED = "the client's federation has a secure sum, but the server requests an unmasked update"
NOT_SUMMED = "the server has a secure sum, but the client's federation has none"


class ClientSum:
    """Client side of the secure sums in a run.

    A client has two secrets: the seed of a private mask, and a secret for the masks in common with other clients. Every
    client publishes public keys, splits both secrets into shares, and sends each other client an encrypted share of
    each secret. Then the client masks the update. Finally the client sends the server one share per client: a share
    of the seed if that client is in the sum, otherwise a share of the second secret, never both.

    A file stores the values for the next step, and each step deletes the previous file. A sum can restart with new
    keys. In one round, a client never unmasks two sums over different sets of clients, because the difference could
    reveal an update. The argument ``share`` is the fraction of clients required to unmask a sum, more than one half.
    """

    def __init__(self, folder: Path, run: str, client: Client, share: float, min_clients: int) -> None:
        self._folder, self._run = folder / run / "sums" / file_name(client), run
        self._client, self._share, self._min_clients = client, share, min_clients

    def answer(self, request: SumRequest) -> Packet:
        try:
            steps = {"keys": self._publish, "shares": self._shares, "open": self._open, "unmask": self._unmask}
            return write_sum_reply(request, steps[request.stage](request))
        except (SumError, ClientFault) as fault:
            _log.warning(
                "Round %d: client %r does not take part in the secure sum: %s.",
                round_number(request.round),
                self._client,
                fault,
            )
            return write_fault(Fault(self._client, str(fault)))

    def mask(self, update: ClientUpdate, sent: State, peers: Sequence[Client], round: int) -> None:
        numbers = dict(sorted(maskable(update, sent).items()))
        vector = torch.cat([value.reshape(-1).cpu() for value in numbers.values()]).numpy().view(np.uint32)
        self.add_masks(vector, peers, round)
        masked = torch.split(torch.from_numpy(vector.view(np.int32)), [value.numel() for value in numbers.values()])
        for (name, value), part in zip(numbers.items(), masked, strict=True):
            (update.state if name in update.state else update.extras)[name] = part.reshape(value.shape)

    def add_masks(self, vector: Vector, peers: Sequence[Client], round: int, fewest: int = 0) -> None:
        known = self._take(round, "opened")
        keys, shares, least = _keys_of(known), dict(known["shares"]), max(int(known["least"]), fewest)
        try:
            self._check_count(len(set(peers)), least)
            if self._client not in peers or not set(peers) <= shares.keys():
                raise SumError(
                    "the list of summed clients lacks this client, or has clients that sent no share (part of a secret)"
                )
            others = [keys[peer] for peer in peers if peer != self._client]
            add_masks(vector, _secrets_of(known), others, self._context(round))
        except SumError as error:
            raise ClientFault(str(error)) from error
        # Deletes the secrets: afterwards only the shares of other clients can restore them.
        self._put(round, "masked", {"least": least, "shares": [[peer, shares[peer]] for peer in peers]})

    def _publish(self, request: SumRequest) -> tuple[bytes, ...]:
        if self._folder.exists():
            for path in self._folder.glob("*-*"):  # remains of failed sums and killed processes
                path.unlink(missing_ok=True)
        secrets = make_secrets()
        self._put(request.round, "keys", {name: value.hex() for name, value in vars(secrets).items()})
        return (secrets.public,)

    def _shares(self, request: SumRequest) -> tuple[bytes, ...]:
        known = self._take(request.round, "keys")
        secrets, peers = _secrets_of(known), dict(zip(request.peers, request.rows, strict=True))
        self._check_count(len(peers), request.least)
        if request.least < self._share * len(peers) - 1e-9:
            raise SumError(
                f"the server can unmask the sum with {request.least} of {len(peers)} clients, but the client requires "
                f"at least the fraction {self._share:.3g}: use the same `SecureSum(threshold=...)` on server and client"
            )
        check_peers(peers, self._client, secrets.public, request.least)
        sealed, own = share_secrets(secrets, self._client, peers, request.least, self._context(request.round))
        keys = [[peer, public.hex()] for peer, public in peers.items()]
        self._put(request.round, "shared", {**known, "own": _hex(own), "least": request.least, "peers": keys})
        return tuple(sealed.get(peer, bytes(SEALED)) for peer in peers)

    def _open(self, request: SumRequest) -> tuple[bytes, ...]:
        known = self._take(request.round, "shared")
        keys, sealing = _keys_of(known), bytes.fromhex(known["sealing"])
        if self._client not in request.peers or not set(request.peers) <= keys.keys():
            raise SumError(
                "the server's list of shares (parts of secrets) lacks this client, or has clients that sent no keys"
            )
        self._check_count(len(request.peers), int(known["least"]))
        context, missing = self._context(request.round), _hex(Share(NO_SHARE, NO_SHARE))
        shares = {self._client: known["own"]}
        for peer, sealed in zip(request.peers, request.rows, strict=True):
            if peer == self._client:
                continue
            try:
                shares[peer] = _hex(open_share(sealing, keys[peer], keys[self._client], sealed, context))
            except SumError as error:
                number = round_number(request.round)
                _log.warning("Round %d: client %r cannot use client %r's share: %s.", number, self._client, peer, error)
                shares[peer] = missing  # the shares of other clients may suffice
        self._put(request.round, "opened", {**known, "shares": list(shares.items())})
        return tuple(NOT_OPENED if shares[peer] == missing else OPENED for peer in request.peers)

    def _unmask(self, request: SumRequest) -> tuple[bytes, ...]:
        known = self._take(request.round, "masked")
        shares = {peer: Share(*map(bytes.fromhex, share)) for peer, share in known["shares"]}
        survivors = [peer for peer, is_there in zip(request.peers, request.survivors, strict=True) if is_there]
        if list(shares) != list(request.peers):
            raise SumError(
                "the server requests shares (parts of secrets) for another list of clients than for the masked sum"
            )
        if self._client not in survivors:
            raise SumError("the client is not one of the clients in the sum to unmask")
        self._check_count(len(survivors), int(known["least"]))
        self._note_release(request.round, survivors)
        return tuple(shares[peer].seed if peer in survivors else shares[peer].pairing for peer in request.peers)

    def _context(self, round: int) -> bytes:
        return context_of(self._run, round)

    def _check_count(self, count: int, least: int) -> None:
        needed = max(least, self._min_clients)
        if count < needed:
            raise SumError(f"the sum has {count} clients, but requires at least {needed}")

    def _note_release(self, round: int, survivors: list[Client]) -> None:
        path = self._folder / "released.json"
        released = json.loads(path.read_text()) if path.exists() else {}
        clients = hashlib.sha256(json.dumps(sorted(survivors, key=repr)).encode()).hexdigest()[:32]
        if released.setdefault(str(round), clients) != clients:
            # The difference between the sums over two sets of clients would reveal an update.
            raise SumError("the server asks to unmask this round's sum again, for another set of clients")
        write_text_atomically(path, json.dumps(released))

    def _put(self, round: int, stage: str, values: dict[str, Any]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{round}-{stage}.json"
        path.unlink(missing_ok=True)
        write_private(path, json.dumps(values).encode())

    def _take(self, round: int, stage: str) -> dict[str, Any]:
        path = self._folder / f"{round}-{stage}.json"
        claimed = path.with_suffix(f".{os.getpid()}")
        try:
            path.rename(claimed)
        except FileNotFoundError as error:
            reason = f"the client has no secrets for this step of the secure sum in round {round_number(round)}"
            raise ClientFault(reason) from error
        try:
            values: dict[str, Any] = json.loads(claimed.read_text())
        finally:
            claimed.unlink()
        return values


def maskable(update: ClientUpdate, sent: State) -> State:
    """Returns the tensors in an update that the client must mask, by name. ``sent`` is the received model.

    Excludes tensors equal to the received model. Raises ``ClientFault`` if the update has metrics, or if a tensor to
    mask has a dtype other than int32.
    """
    numbers = dict(update.extras)
    for name, value in update.state.items():
        before = sent.get(name)
        if before is not None and value.dtype == before.dtype and torch.equal(value, before):
            continue
        numbers[name] = value
    bare = [name for name, value in numbers.items() if value.dtype != torch.int32]
    if bare or update.metrics:
        raise ClientFault(
            f"the client would send {(bare or sorted(update.metrics))[0]!r} without a mask, visible to the server: "
            "remove the callback or update step that adds this value"
        )
    return numbers


def _secrets_of(known: dict[str, Any]) -> Secrets:
    return Secrets(*(bytes.fromhex(known[name]) for name in ("sealing", "pairing", "seed")))


def _hex(share: Share) -> list[str]:
    return [share.pairing.hex(), share.seed.hex()]


def _keys_of(known: dict[str, Any]) -> dict[Client, bytes]:
    return {peer: bytes.fromhex(public) for peer, public in known["peers"]}
