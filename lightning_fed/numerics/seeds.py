"""Derives random seeds, and turns client names into integers. All processes get equal values."""

from __future__ import annotations

import hashlib

import numpy as np

from lightning_fed.messages import Client


def client_key(client: Client) -> int:
    """Stable 64-bit integer for a client name. Unlike ``hash``, the integer is equal in all processes.

    Example:
        >>> client_key(7) == client_key(7), client_key(7) == client_key("7")
        (True, False)
    """
    name = f"{'s' if isinstance(client, str) else 'i'}:{client}"
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8], "big")


def derive_seed(seed: int, *keys: int) -> int:
    """Derives a 32-bit seed from ``seed`` and the integers ``keys``.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    return int(np.random.SeedSequence([seed, *keys]).generate_state(1)[0])
