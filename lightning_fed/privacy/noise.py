"""Normal random numbers from a cryptographic generator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST_PAIRS = 2**14  # torch uses one thread for so few numbers: the last bits do not depend on the number of threads


class NormalStream:
    """Independent standard normal numbers from a cryptographic generator.

    The generator is AES-256 in counter mode. The Box-Muller transform converts the random bits to normal numbers, with
    absolute values up to 9.3 (Box & Muller, Annals of Mathematical Statistics 1958).

    Args:
        keys: Secret key: non-negative integers below 2**256.
        count: Expected total of numbers to draw, for the buffer size.
        dtype: ``torch.float32`` or ``torch.float64``.

    Example:
        >>> numbers = NormalStream([7, 0], 1000).draw(torch.Size([20, 50]))
        >>> round(numbers.std().item(), 1)
        1.0
    """

    def __init__(self, keys: Sequence[int], count: int, dtype: torch.dtype = torch.float32) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher  # from the extra `privacy`
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        key = hashlib.sha256(b"".join(part.to_bytes(32, "big") for part in keys)).digest()
        self._cipher = Cipher(AES(key), CTR(bytes(16))).encryptor()
        pairs, self._dtype = min(_MOST_PAIRS, (count + 1) // 2), dtype
        self._zeros = bytes(16 * pairs)
        self._data = bytearray(16 * pairs + 15)  # the cipher asks for an incomplete block more
        self._words = torch.frombuffer(self._data, dtype=torch.int32, count=4 * pairs).view(2, 2, pairs)
        self._numbers = torch.empty(2 * pairs, dtype=dtype)
        self._used = 2 * pairs

    def draw(self, shape: torch.Size) -> Tensor:
        drawn = torch.empty(shape.numel(), dtype=self._dtype)
        start = 0
        while start < len(drawn):
            if self._used == len(self._numbers):
                self._fill()
            part = self._numbers[self._used : self._used + len(drawn) - start]
            drawn[start : start + len(part)] = part
            self._used, start = self._used + len(part), start + len(part)
        return drawn.view(shape)

    def _fill(self) -> None:
        self._cipher.update_into(self._zeros, self._data)
        high, low = self._words.bitwise_and_(2**31 - 1).to(self._dtype)
        # Uniform in (0, 2**31], with full precision near 0. Multiplying by 2**-31 is exact.
        uniform, angle = high.add_(low.add_(0.5), alpha=2.0**-31)
        cosines_sines = self._numbers.view(2, -1)
        torch.cos(angle.mul_(2 * math.pi * 2.0**-31), out=cosines_sines[0])
        torch.sin(angle, out=cosines_sines[1])
        cosines_sines *= uniform.mul_(2.0**-31).log_().mul_(-2).sqrt_()
        self._used = 0
