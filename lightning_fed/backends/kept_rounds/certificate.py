"""Writes and verifies certificates: signed texts about a run's rounds and file digests. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

RECORD = "round.json"
"""File name of a round's record."""


def write_certificate(folder: Path, key: Ed25519PrivateKey) -> str:
    """Returns a certificate: signed JSON text about all rounds stored in ``folder``.

    - ``participants``: for each client, the number of rounds with a valid update, and with an exclusion.
    - ``rounds``: for each round, the clients, exclusions, method, package versions, metrics, and digests of models and
      updates.
    - ``files``: digest of each file.
    """
    rounds = [json.loads(path.read_text()) for path in sorted(folder.glob(f"round-*/{RECORD}"))]
    used = Counter(client for one in rounds for client in one["received"])
    excluded = Counter(client for one in rounds for client, _ in one["failed"])
    certificate = {
        "participants": [[client, used[client], excluded[client]] for client in used | excluded],
        "rounds": rounds,
        "files": digest_files(folder),
    }
    return write_json(certificate | {"signature": key.sign(write_json(certificate).encode()).hex()})


def find_changes(folder: Path, text: str, key: Ed25519PublicKey) -> list[str]:
    """Compares a run's folder with a certificate (a digest for each file). Returns the names of changed files."""
    try:
        certificate = json.loads(text)
        signature = bytes.fromhex(certificate.pop("signature"))
        key.verify(signature, write_json(certificate).encode())
        if write_json(certificate | {"signature": signature.hex()}) != text:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, InvalidSignature):
        return ["the certificate itself"]
    recorded, found = certificate["files"], digest_files(folder)
    return [name for name in sorted(recorded.keys() | found.keys()) if recorded.get(name) != found.get(name)]


def digest_files(folder: Path) -> dict[str, str]:
    """Maps all stored files to SHA-256 digests."""
    files = sorted(file for file in folder.glob("round-*/*"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def write_json(content: dict[str, Any]) -> str:
    """Returns canonical JSON text: sorted keys, one space of indent."""
    return json.dumps(content, sort_keys=True, indent=1) + "\n"
