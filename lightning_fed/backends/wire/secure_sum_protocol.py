"""Secure aggregation: keys, shares, masks, and the removal of masks from the sum.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, Figure 4.
https://eprint.iacr.org/2017/281

Vectors contain integers modulo 2^32. Client u masks vector x_u by

    y_u = x_u + PRG(b_u) + sum over v of +-PRG(s_uv)

with a pseudo-random generator PRG, a private seed b_u and a pairwise seed s_uv = s_vu. Pairwise masks cancel in the
sum: one client adds the mask, the other client subtracts the mask. Every client has two secrets: b_u, and a secret from
which all s_uv derive. Each secret is split into shares, one per client. A minimum number of shares (``least``, more
than half) restores the secret. If client u is in the sum, the server restores b_u. If client u is lost, the server
restores the secret for s_uv. Restoring both would reveal x_u, and is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from numpy.typing import NDArray

from lightning_fed.messages import Client
from lightning_fed.privacy.masked_sums import BYTES, to_numbers

Vector: TypeAlias = NDArray[Any]
"""Integers modulo 2^32 (uint32), or wide numbers (object)."""

# Flower's mask generator is unsuitable, because its seed has only 32 bits and an attacker can try all seeds.
SECRET, KEY, NONCE = 16, 32, 12
PUBLIC = 3 * KEY
"""Bytes of a client's published row: two public keys, and the digest of the seed."""

NO_SHARE = bytes(SECRET)
"""Bytes sent by a client in place of an unreadable share."""

_MOST_TRIES = 500
"""Maximum number of tried subsets of shares, in the search for wrong shares."""

SEALED = NONCE + 2 * SECRET + 16
"""Bytes of a sealed pair of shares: nonce, shares, and authentication tag."""


class SumError(ValueError):
    """Raised, with a reason, if a secure sum fails. The reason contains no data received from clients.

    ``dealer`` is the client whose secret cannot be restored from shares. Either this client sent wrong shares, or many
    other clients lie.
    """

    def __init__(self, text: str, dealer: Client | None = None) -> None:
        super().__init__(text)
        self.dealer = dealer


@dataclass(frozen=True)
class Secrets:
    """Random secrets of one client for one secure sum.

    ``sealing`` is the private key (32 bytes, never sent) for messages between clients. ``pairing`` (16 bytes) is the
    secret for the masks shared with other clients. ``seed`` (16 bytes) is the seed of the private mask.
    """

    sealing: bytes
    pairing: bytes
    seed: bytes

    @property
    def public(self) -> bytes:
        """Data published by the client: two public keys, and the hash of the private mask's seed."""
        keys = (_public(self.sealing), _public(_pairing_key(self.pairing)))
        return b"".join((*keys, hashlib.sha256(self.seed).digest()))


@dataclass(frozen=True)
class Share:
    """Part of a client's :class:`Secrets` for one recipient: a share of ``pairing``, and a share of ``seed``."""

    pairing: bytes
    seed: bytes


def make_secrets() -> Secrets:
    """Draws a client's random secrets for one secure sum from the operating system's random generator."""
    sealing = X25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    return Secrets(sealing, os.urandom(SECRET), os.urandom(SECRET))


def check_public(public: bytes) -> None:
    """Raises ``SumError`` if a client's public keys contain a key unsuitable for a key exchange."""
    if len(public) != PUBLIC:
        raise SumError(f"the client's keys have {len(public)} bytes instead of {PUBLIC}")
    probe = os.urandom(KEY)
    for key in (public[:KEY], public[KEY : 2 * KEY]):
        _exchange(probe, key)


def check_peers(peers: Mapping[Client, bytes], client: Client, own: bytes, least: int) -> None:
    """Checks the public keys of all clients (``peers``) before a client shares secrets.

    ``own`` are this client's keys, and ``least`` is the number of clients needed to restore a secret. Raises
    ``SumError`` for missing or equal keys, or if ``least`` is not a majority.
    """
    if peers.get(client) != own:
        raise SumError("the client's own keys are missing from the server's list of public keys")
    for part in (slice(0, KEY), slice(KEY, 2 * KEY)):
        if len({public[part] for public in peers.values()}) < len(peers):
            raise SumError("two clients in the secure sum have the same public key")
    # Otherwise a dishonest server could restore a client's private seed with one half of the clients and the pairing
    # secret with the other half, and remove all masks from this client's update.
    if not len(peers) / 2 < least <= len(peers):
        raise SumError(
            f"the server's threshold is {least} of {len(peers)} clients, but must be more than half and at most all"
        )


def share_secrets(
    secrets: Secrets, client: Client, peers: Mapping[Client, bytes], least: int, context: bytes
) -> tuple[dict[Client, bytes], Share]:
    """Splits a client's secrets into one encrypted share per client.

    Any ``least`` clients together can restore a secret. ``peers`` contains all clients' public keys, in the same order
    on all clients. ``context`` is from :func:`context_of`. Returns the other clients' shares, encrypted, and the
    client's own share.
    """
    count = len(peers)
    pairing = [part for _, part in Shamir.split(least, count, secrets.pairing, ssss=False)]
    seed = [part for _, part in Shamir.split(least, count, secrets.seed, ssss=False)]
    shares = {peer: Share(*parts) for peer, *parts in zip(peers, pairing, seed, strict=True)}
    own = shares.pop(client)
    sealed = {}
    for peer, share in shares.items():
        nonce = os.urandom(NONCE)
        cipher = _sealing_cipher(secrets.sealing, peers[peer][:KEY], peers[client][:KEY], peers[peer][:KEY], context)
        sealed[peer] = nonce + cipher.encrypt(nonce, share.pairing + share.seed, None)
    return sealed, own


def open_share(sealing: bytes, sender: bytes, receiver: bytes, sealed: bytes, context: bytes) -> Share:
    """Decrypts a :class:`Share` with the receiver's private key ``sealing``. Raises ``SumError`` if this fails."""
    cipher = _sealing_cipher(sealing, sender[:KEY], sender[:KEY], receiver[:KEY], context)
    try:
        opened = cipher.decrypt(sealed[:NONCE], sealed[NONCE:], None)
    except InvalidTag as error:
        raise SumError(
            "a share (part of a secret) cannot be decrypted: changed, or made with other keys or for another round"
        ) from error
    if len(opened) != 2 * SECRET:
        raise SumError("a received share (part of a secret) has a wrong length")
    return Share(opened[:SECRET], opened[SECRET:])


def add_masks(vector: Vector, secrets: Secrets, others: Iterable[bytes], context: bytes) -> None:
    """Masks a client's vector in place. ``others`` are the other clients' public keys."""
    vector += _numbers(_derive(secrets.seed, b"own", context), vector)
    _add_pairs(vector, secrets.pairing, secrets.public, others, context)


def find_masks(
    zeros: Vector,
    peers: Mapping[Client, bytes],
    survivors: Sequence[Client],
    shares: Mapping[Client, Mapping[Client, bytes]],
    positions: Mapping[Client, int],
    least: int,
    context: bytes,
) -> tuple[Vector, list[Client]]:
    """Computes the total mask in a sum of masked vectors. Also returns the clients with wrong shares.

    The total consists of the survivors' private masks, and the masks shared between survivors and missing clients. The
    function restores the secrets for these masks from shares. Raises ``SumError`` if this fails.

    Args:
        zeros: Zeros with the shape and dtype of the masked vectors.
        peers: All clients' public keys, including missing clients.
        survivors: Clients with a vector in the sum.
        shares: ``shares[holder][peer]`` is the share of ``peer``'s secret sent by ``holder``.
        positions: Index of each holder's shares.
        least: Number of shares needed to restore a secret.
        context: Run and round, from :func:`context_of`.
    """
    if len(shares) < least:
        raise SumError(f"{len(shares)} clients have answered, but {least} are necessary to unmask the sum")
    total, liars = zeros.copy(), set[Client]()
    for peer, public in peers.items():
        is_there = peer in survivors
        held = {holder: (positions[holder] + 1, rows[peer]) for holder, rows in shares.items() if holder not in liars}
        secret, wrong = _restore(peer, held, least, public, is_there)
        liars |= wrong
        if is_there:
            total += _numbers(_derive(secret, b"own", context), zeros)
        else:
            lost = zeros.copy()
            _add_pairs(lost, secret, public, (peers[survivor] for survivor in survivors), context)
            total -= lost
    return total, [holder for holder in shares if holder in liars]


def _restore(
    dealer: Client, held: Mapping[Client, tuple[int, bytes]], least: int, public: bytes, is_seed: bool
) -> tuple[bytes, set[Client]]:
    """Restores a secret of client ``dealer`` from the other clients' shares, and finds clients with wrong shares."""

    def is_right(secret: bytes) -> bool:
        if is_seed:
            return hashlib.sha256(secret).digest() == public[2 * KEY :]
        return _public(_pairing_key(secret)) == public[KEY : 2 * KEY]

    secret_name, opened = (
        "mask" if is_seed else "key",
        {name: part for name, part in held.items() if part[1] != NO_SHARE},
    )
    if len(opened) < least:
        raise SumError(
            f"{len(held) - len(opened)} of {len(held)} clients cannot decrypt the shares from client {dealer!r}, so "
            f"fewer than the {least} shares (parts of secrets) needed to restore the client's {secret_name} are left. "
            "Either the shares are wrong, or the clients that cannot decrypt the shares are at fault",
            dealer,
        )
    for holders in itertools.islice(itertools.combinations(opened, least), _MOST_TRIES):
        secret = Shamir.combine([opened[holder] for holder in holders], ssss=False)
        if not is_right(secret):
            continue
        others = [opened[holder] for holder in holders[1:]]
        wrong = {
            holder for holder in opened.keys() - set(holders)
            if not is_right(Shamir.combine([opened[holder], *others], ssss=False))
        }  # fmt: skip
        return secret, wrong
    raise SumError(
        f"the shares (parts of secrets) of client {dealer!r} do not restore the client's {secret_name}: either this "
        f"client made wrong shares, or too many of {len(opened)} clients returned wrong shares",
        dealer,
    )


def _add_pairs(vector: Vector, pairing: bytes, public: bytes, others: Iterable[bytes], context: bytes) -> None:
    private, own = _pairing_key(pairing), public[KEY : 2 * KEY]
    for other in others:
        key = other[KEY : 2 * KEY]
        mask = _numbers(_derive(_exchange(private, key), b"pair", context), vector)
        if own < key:  # the client with the larger key subtracts the mask
            vector += mask
        else:
            vector -= mask


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def _pairing_key(pairing: bytes) -> bytes:
    return _derive(pairing, b"pairing key", b"")


def _exchange(private: bytes, public: bytes) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise SumError("a client's public key for the secure sum is invalid") from error


def _sealing_cipher(private: bytes, other: bytes, sender: bytes, receiver: bytes, context: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_derive(_exchange(private, other), b"seal" + sender + receiver, context))


def _derive(secret: bytes, purpose: bytes, context: bytes) -> bytes:
    info = b"lightning-fed secure sum: " + purpose + b": " + context
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=info).derive(secret)


def _numbers(key: bytes, form: Vector) -> Vector:
    is_wide = form.dtype == object
    # Each key is used once, so a constant counter is safe.
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes((BYTES if is_wide else 4) * len(form)))
    return to_numbers(stream) if is_wide else np.frombuffer(stream, "<u4").astype(np.uint32, copy=False)
