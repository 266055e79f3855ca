"""Central differential privacy in plain NumPy, written from specs/privacy.md and the papers.

This file does not import the package.
"""

import hashlib

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR


def clipped_reference(step, clip):
    length = float(np.sqrt(np.sum(np.square(step))))
    return step if length <= clip else step * clip / length


def normal_reference(keys, count):
    """Standard normal numbers from AES in counter mode, in pairs of the polar form (Box and Muller 1958)."""
    key = hashlib.sha256(b"".join(part.to_bytes(32, "big") for part in keys)).digest()
    stream, pairs, numbers = Cipher(AES(key), CTR(bytes(16))).encryptor(), min(2**14, -(-count // 2)), []
    for _ in range(-(-count // (2 * pairs)) if count else 0):
        words = np.frombuffer(stream.update(bytes(16 * pairs)), np.int32).astype(np.int64) % 2**31
        high, low = words.reshape(2, 2, pairs)
        radius, angle = (high + (low + 0.5) / 2**31) / 2**31
        numbers += [np.sqrt(-2 * np.log(radius)) * function(2 * np.pi * angle) for function in (np.cos, np.sin)]
    return np.concatenate([*numbers, []])[:count]


def noise_reference(key, round, name, shape, std):
    """A separate stream for every key, round and entry."""
    entry = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")
    return std * normal_reference([key, round, entry], int(np.prod(shape))).reshape(shape)


def private_mean_reference(steps, clip, std, cohort, key, round, shapes):
    """The server's step, entry by entry; a step is a dictionary of arrays, clipped as one vector."""
    result = {name: noise_reference(key, round, name, shape, std) for name, shape in shapes.items()}
    for step in steps:
        flat = clipped_reference(np.concatenate([step[name].reshape(-1) for name in shapes]), clip)
        start = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            result[name] = result[name] + flat[start : start + size].reshape(shape)
            start += size
    return {name: value / cohort for name, value in result.items()}


def adaptive_clip_reference(clip, is_short, cohort, noise, rate, quantile):
    """Andrew et al., section 2: shares relative to one half, so an empty round has share one half."""
    share = 0.5 + (sum(0.5 if short else -0.5 for short in is_short) + noise) / cohort
    return clip * np.exp(-rate * (share - quantile)), share


def client_key_reference(client):
    """The first 64 bits of the hash of a client's name and type."""
    name = f"{'s' if isinstance(client, str) else 'i'}:{client}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def poisson_reference(key, client, round, number, num_samples, batch_size):
    """Positions in a batch: first the count, then the positions."""
    keys = [key, 0 if client is None else client_key_reference(client), round, number, 0]
    rng = np.random.default_rng(np.random.SeedSequence(keys))
    count = rng.binomial(num_samples, min(1, batch_size / num_samples))
    return sorted(rng.choice(num_samples, count, replace=False).tolist())


def dpsgd_gradient_reference(gradients, clip, z, expected, key, client, round, number, shapes):
    """Abadi et al., Algorithm 1; ``gradients`` are dictionaries of arrays, one per example in the batch."""
    total = {name: np.zeros(shape) for name, shape in shapes.items()}
    for gradient in gradients:
        flat = clipped_reference(np.concatenate([gradient[name].reshape(-1) for name in shapes]), clip)
        start = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            total[name] = total[name] + flat[start : start + size].reshape(shape)
            start += size
    keys = [key, 0 if client is None else client_key_reference(client), round, number, 1]
    noise = normal_reference(keys, sum(value.size for value in total.values())) if z else None
    start = 0
    for name, value in total.items():
        if z:
            total[name] = value + z * clip * noise[start : start + value.size].reshape(value.shape)
        start += value.size
    return {name: value / expected for name, value in total.items()}


def encoded_reference(values, clip, clients, max_weight, uniform):
    """A weighted step in fixed-point numbers modulo 2^32, with stochastic rounding by uniform numbers."""
    scale = ((2**31 - 1) / clients - 1) / (max_weight * clip)
    return np.floor(values * scale + uniform).astype(np.int64) % 2**32, scale


def masked_sum_reference(vectors, seed):
    """The sum of vectors with pairwise masks modulo 2^32 (Bonawitz et al. 2017), and the masked vectors."""
    rng, masked = np.random.default_rng(seed), [vector.copy() for vector in vectors]
    for one in range(len(vectors)):
        for other in range(one):
            mask = rng.integers(2**32, size=vectors[0].shape)
            masked[one] = (masked[one] + mask) % 2**32
            masked[other] = (masked[other] - mask) % 2**32
    return sum(masked) % 2**32, masked
