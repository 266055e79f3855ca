"""The secret sum of several clients' vectors: keys, shares, masks, and what is left when the masks are taken off.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, Figure 4.
https://eprint.iacr.org/2017/281

Vectors are of whole numbers modulo 2^32. A client u masks its own by

    y_u = x_u + PRG(b_u) + sum over v of +-PRG(s_uv)

with a seed b_u of its own and a seed s_uv = s_vu of every pair, whose masks cancel in the sum: one of the two clients
adds its mask, the other subtracts it. Every client shares b_u, and the secret from which all its s_uv follow, among all
clients, so that any ``least`` of them can restore either. Of a client that is in the sum they restore b_u, of one that
was lost the other secret, and of no client both, for with both x_u can be read.

The primitives are those of ``cryptography`` (X25519, HKDF with SHA-256, ChaCha20-Poly1305, AES-256 in counter mode) and
``pycryptodome`` (Shamir's shares). Flower's own pseudo-random numbers are not used: they come from a generator with a
seed of 32 bits, which can be tried out.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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

from lightning_fed.messages import Client

Vector = np.ndarray[tuple[int], np.dtype[np.uint32]]

SECRET, KEY, NONCE = 16, 32, 12
PUBLIC = 3 * KEY
"""Bytes of what a client publishes: two keys, and the digest of its seed."""

NO_SHARE = bytes(SECRET)
"""A client's answer in the place of a share that was sealed so that it cannot be opened."""

_MOST_TRIES = 500
"""Subsets of the answers that are tried, where some of them do not restore a secret."""

SEALED = NONCE + 2 * SECRET + 16
"""Bytes of a pair of shares as one client sends it to another: nonce, shares, and the code of their authentication."""


class SumError(ValueError):
    """A reason why a secret sum cannot be made, in our own words.

    Args:
        text: The reason.
        dealer: The client whose shares are to blame, unless many others lie; ``None`` where there is none.

    """

    def __init__(self, text: str, dealer: Client | None = None) -> None:
        super().__init__(text)
        self.dealer = dealer


@dataclass(frozen=True)
class Secrets:
    """Secrets of a client for one round.

    Args:
        sealing: Private key with which shares travel, 32 bytes; it is not shared.
        pairing: Secret from which the private key of the masks of pairs follows, 16 bytes.
        seed: Seed of the client's own mask, 16 bytes.

    """

    sealing: bytes
    pairing: bytes
    seed: bytes

    @property
    def public(self) -> bytes:
        """The client's public keys, ``PUBLIC`` bytes."""
        keys = (_public(self.sealing), _public(_pairing_key(self.pairing)))
        return b"".join((*keys, hashlib.sha256(self.seed).digest()))


@dataclass(frozen=True)
class Share:
    """A client's shares of the two secrets of another, or of its own.

    Args:
        pairing: Share of the secret of pairs, 16 bytes.
        seed: Share of the seed, 16 bytes.

    """

    pairing: bytes
    seed: bytes


def make_secrets() -> Secrets:
    """Draws secrets, from the operating system's generator."""
    sealing = X25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    return Secrets(sealing, os.urandom(SECRET), os.urandom(SECRET))


def check_public(public: bytes) -> None:
    """Refuses published keys that no exchange can be made with.

    Raises:
        SumError: If they are none.

    """
    if len(public) != PUBLIC:
        raise SumError(f"its keys have {len(public)} bytes instead of {PUBLIC}")
    probe = os.urandom(KEY)
    for key in (public[:KEY], public[KEY : 2 * KEY]):
        _exchange(probe, key)


def check_peers(peers: Mapping[Client, bytes], client: Client, own: bytes, least: int) -> None:
    """Checks the clients among which a client is to share its secrets.

    Args:
        peers: What they have published, itself among them.
        client: The client.
        own: What it has published.
        least: Number of shares that restore a secret.

    Raises:
        SumError: If it is not among them, keys are there twice, or half of them could restore its secrets, so that one
            half could be asked for one secret, and the other for the other.

    """
    if peers.get(client) != own:
        raise SumError("its own keys are not among those of the sum")
    for part in (slice(0, KEY), slice(KEY, 2 * KEY)):
        if len({public[part] for public in peers.values()}) < len(peers):
            raise SumError("two clients of the sum have the same key")
    if not len(peers) / 2 < least <= len(peers):
        raise SumError(
            f"{least} of {len(peers)} clients would restore its secrets, and more than a half must be needed"
        )


def share_secrets(
    secrets: Secrets, client: Client, peers: Mapping[Client, bytes], least: int, context: bytes
) -> tuple[dict[Client, bytes], Share]:
    """Shares a client's secrets among clients, so that ``least`` of them restore either, and fewer none.

    Args:
        secrets: The secrets.
        client: The client.
        peers: What all clients of the sum have published, in the order that everybody has.
        least: Number of shares that restore a secret.
        context: The run and the round.

    Returns:
        The sealed shares of all others, and the client's own.

    Raises:
        SumError: If a key is none.

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
    """Opens the shares that another client has sealed.

    Args:
        sealing: The receiver's private key.
        sender: What the sender has published.
        receiver: What the receiver has published.
        sealed: The sealed shares.
        context: The run and the round.

    Raises:
        SumError: If they are not the sender's, or not for this receiver and round.

    """
    cipher = _sealing_cipher(sealing, sender[:KEY], sender[:KEY], receiver[:KEY], context)
    try:
        opened = cipher.decrypt(sealed[:NONCE], sealed[NONCE:], None)
    except InvalidTag as error:
        raise SumError("a share that it was sent cannot be opened") from error
    if len(opened) != 2 * SECRET:
        raise SumError("a share that it was sent has another length")
    return Share(opened[:SECRET], opened[SECRET:])


def add_masks(vector: Vector, secrets: Secrets, others: Iterable[bytes], context: bytes) -> None:
    """Masks a client's vector, in place.

    Args:
        vector: The vector.
        secrets: The client's secrets.
        others: What the other clients of the sum have published: those whose shares have arrived.
        context: The run and the round.

    Raises:
        SumError: If a key is none.

    """
    vector += _numbers(_derive(secrets.seed, b"own", context), len(vector))
    _add_pairs(vector, secrets.pairing, secrets.public, others, context)


def find_masks(
    size: int,
    peers: Mapping[Client, bytes],
    survivors: Sequence[Client],
    shares: Mapping[Client, Mapping[Client, bytes]],
    positions: Mapping[Client, int],
    least: int,
    context: bytes,
) -> tuple[Vector, list[Client]]:
    """Finds the masks that are in a sum of clients' masked vectors.

    Args:
        size: Length of the vectors.
        peers: What the clients have published that masked their vectors with each other.
        survivors: Those of them whose vectors are in the sum.
        shares: By the client that has answered its share of each of ``peers``: of the seed of a survivor, of the other
            secret of one that was lost.
        positions: Position of every client among those who shared their secrets, from 0 on.
        least: Number of shares that restore a secret.
        context: The run and the round.

    Returns:
        Their sum, to be subtracted; and the clients that have answered wrong shares, which were not needed.

    Raises:
        SumError: If there are too few shares, or they restore something else than was published.

    """
    if len(shares) < least:
        raise SumError(f"{len(shares)} clients have answered, and {least} must have to take the masks off")
    total, liars = np.zeros(size, np.uint32), set[Client]()
    for peer, public in peers.items():
        is_there = peer in survivors
        held = {holder: (positions[holder] + 1, rows[peer]) for holder, rows in shares.items() if holder not in liars}
        secret, wrong = _restore(peer, held, least, public, is_there)
        liars |= wrong
        if is_there:
            total += _numbers(_derive(secret, b"own", context), size)
        else:
            lost = np.zeros(size, np.uint32)
            _add_pairs(lost, secret, public, (peers[survivor] for survivor in survivors), context)
            total -= lost
    return total, [holder for holder in shares if holder in liars]


def _restore(
    dealer: Client, held: Mapping[Client, tuple[int, bytes]], least: int, public: bytes, is_seed: bool
) -> tuple[bytes, set[Client]]:
    """Restores a secret of a client from shares of which some may be wrong; returns whose are, too.

    Raises:
        SumError: If it cannot be restored.

    """

    def is_right(secret: bytes) -> bool:
        if is_seed:
            return hashlib.sha256(secret).digest() == public[2 * KEY :]
        return _public(_pairing_key(secret)) == public[KEY : 2 * KEY]

    what, opened = "mask" if is_seed else "key", {name: part for name, part in held.items() if part[1] != NO_SHARE}
    if len(opened) < least:
        raise SumError(
            f"{len(held) - len(opened)} of {len(held)} clients cannot open what client {dealer!r} has sealed for them,"
            f" and its {what} needs {least}: it is at fault, or all of these are",
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
        f"the shares of client {dealer!r} do not restore its {what}: it is at fault, or more than"
        f" {len(opened) - least} of the {len(opened)} clients that have answered with them",
        dealer,
    )


def _add_pairs(vector: Vector, pairing: bytes, public: bytes, others: Iterable[bytes], context: bytes) -> None:
    """Adds the masks of a client's pairs: of two clients the one with the larger key subtracts."""
    private, own = _pairing_key(pairing), public[KEY : 2 * KEY]
    for other in others:
        key = other[KEY : 2 * KEY]
        mask = _numbers(_derive(_exchange(private, key), b"pair", context), len(vector))
        if own < key:
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
        raise SumError("a key of the sum is none") from error


def _sealing_cipher(private: bytes, other: bytes, sender: bytes, receiver: bytes, context: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_derive(_exchange(private, other), b"seal" + sender + receiver, context))


def _derive(secret: bytes, purpose: bytes, context: bytes) -> bytes:
    info = b"lightning-fed secure sum: " + purpose + b": " + context
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=info).derive(secret)


def _numbers(key: bytes, size: int) -> Vector:
    """Pseudo-random numbers modulo 2^32: the stream of a cipher whose key is used once."""
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(4 * size))
    return np.frombuffer(stream, "<u4").astype(np.uint32, copy=False)
