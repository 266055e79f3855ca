"""Signatures of a server's messages: a site's policy names the keys whose orders it answers, on any network.

Keys are Ed25519 keys in OpenSSH's form (``ssh-keygen -t ed25519``), signatures those of ``cryptography``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key


def read_private_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """Reads the private key of a server.

    Args:
        path: File of ``ssh-keygen -t ed25519 -N ""``.

    Raises:
        ValueError: If it has no such key.

    """
    try:
        key = load_ssh_private_key(Path(path).read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"Expected a key of `ssh-keygen -t ed25519 -N ''` in {str(path)!r}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"Expected a key of `ssh-keygen -t ed25519` in {str(path)!r}, but it is of another type.")
    return key


def read_public_key(line: str) -> Ed25519PublicKey:
    """Reads a public key: the line of a ``.pub`` file.

    Raises:
        ValueError: If it is none.

    """
    try:
        key = load_ssh_public_key(line.encode())
    except Exception as error:  # of a line that is none, whatever comes
        raise ValueError(f"Expected a line like 'ssh-ed25519 AAAA... name', but got {line!r}.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"Expected a key of the type ssh-ed25519, but got {line!r}.")
    return key


def sign(text: str, data: bytes, key: Ed25519PrivateKey) -> str:
    """Returns a message's text with the signature of text and data as its second line."""
    return f"{text}\n{key.sign(_signed(text, data)).hex()}"


def split_signature(text: str) -> tuple[str, str]:
    r"""Returns a message's text, and its signature in hexadecimal; it is empty where there is none.

    Example:
        >>> split_signature('{"version": 4}\n0f')
        ('{"version": 4}', '0f')

    """
    text, _, signature = text.partition("\n")
    return text, signature


def is_signed(text: str, data: bytes, signature: str, key: Ed25519PublicKey) -> bool:
    """True if the signature is the key's, of this text and these data."""
    try:
        key.verify(bytes.fromhex(signature), _signed(text, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(text: str, data: bytes) -> bytes:
    return b"lightning-fed order\0" + hashlib.sha256(data).digest() + text.encode()
