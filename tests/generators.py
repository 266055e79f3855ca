"""Resets the global generators of Python, NumPy and PyTorch for each test."""

import os
import random
from contextlib import contextmanager

SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")  # environment variables set by `seed_everything`
OUTSIDE = {name: os.environ[name] for name in SEED_VARIABLES if name in os.environ}  # as set in the user's shell


def forget_seeds():
    """Removes the seeds of `seed_everything` from the environment, except seeds set outside."""
    for name in SEED_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(OUTSIDE)


@contextmanager
def same_random_numbers():
    """Starts the global generators from fixed states, without Lightning's seeds; restores everything afterwards."""
    import numpy as np
    import torch

    before = {name: os.environ[name] for name in SEED_VARIABLES if name in os.environ}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    forget_seeds()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    # `torch.manual_seed` also formats a stack for every absent device: half a millisecond per test.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        forget_seeds()
        os.environ.update(before)
