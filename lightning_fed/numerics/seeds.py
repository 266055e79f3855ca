"""Keys and seeds that are the same in every process, whatever was drawn before."""

from __future__ import annotations

import hashlib

import numpy as np

from lightning_fed.messages import Client


def client_key(client: Client) -> int:
    """A stable 64-bit key of a client's name: the same in every process, unlike ``hash``.

    Example:
        >>> client_key(7) == client_key(7), client_key(7) == client_key("7")
        (True, False)

    """
    name = f"{'s' if isinstance(client, str) else 'i'}:{client}"
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8], "big")


def derive_seed(seed: int, *keys: int) -> int:
    """A 32-bit seed that depends on ``seed`` and every key.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)

    """
    return int(np.random.SeedSequence([seed, *keys]).generate_state(1)[0])
