"""Signatures of server messages, with Ed25519 keys in OpenSSH format. A site policy lists the allowed servers."""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

_SIGNATURE = re.compile(r"([1-9][0-9]{0,19}):([0-9a-f]{128})")  # exactly one valid encoding per signature

LIFETIME = 20 * 3600.0
"""Maximum lifetime of an order in seconds. A site remembers all orders for one day and refuses repeated orders."""


def read_private_key(path: str | os.PathLike[str] | None) -> Ed25519PrivateKey | None:
    """Reads a server's Ed25519 private key without passphrase, from ``ssh-keygen -t ed25519 -N ""``."""
    if path is None:
        return None
    try:
        key = load_ssh_private_key(Path(path).read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"Expected a key from `ssh-keygen -t ed25519 -N ''` in {str(path)!r}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"Expected a key from `ssh-keygen -t ed25519` in {str(path)!r}, but got another type of key.")
    return key


def read_public_key(line: str) -> Ed25519PublicKey:
    """Reads an Ed25519 public key from a line of a ``.pub`` file."""
    try:
        key = load_ssh_public_key(line.encode())
    except Exception as error:  # a malformed line can raise several exception types
        raise ValueError(f"Expected a line like 'ssh-ed25519 AAAA... name', but got {line!r}.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"Expected a key of the type ssh-ed25519, but got {line!r}.")
    return key


def sign(kind: str, text: str, data: bytes, key: Ed25519PrivateKey, seconds: float) -> str:
    """Signs a server's message. The signature expires after ``seconds``.

    Returns the text, followed by a line with expiry time (nanoseconds since 1970) and signature.
    """
    expiry = str(time.time_ns() + int(min(seconds, LIFETIME) * 1e9))
    return f"{text}\n{expiry}:{key.sign(_signed(kind, expiry, text, data)).hex()}"


def split_signature(text: str) -> tuple[str, str]:
    r"""Splits a signed message into text and signature line. The line is empty for an unsigned message."""
    text, _, signature = text.partition("\n")
    return text, signature


def is_signed(kind: str, text: str, data: bytes, signature: str, key: Ed25519PublicKey) -> bool:
    """True if the key signed this message and the signature has not expired."""
    parts = _SIGNATURE.fullmatch(signature)
    if parts is None or not 0 <= int(parts[1]) - time.time_ns() <= LIFETIME * 1e9:
        return False
    try:
        key.verify(bytes.fromhex(parts[2]), _signed(kind, parts[1], text, data))
    except InvalidSignature:
        return False
    return True


def digest_order(kind: str, text: str, data: bytes, signature: str) -> str:
    """Hashes a server's message and the expiry time. The expiry time is the first part of ``signature``."""
    return hashlib.sha256(_signed(kind, signature.partition(":")[0], text, data)).hexdigest()


def _signed(kind: str, expiry: str, text: str, data: bytes) -> bytes:
    return f"lightning-fed order\0{kind}\0{expiry}\0".encode() + hashlib.sha256(data).digest() + text.encode()
