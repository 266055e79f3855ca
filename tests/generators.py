"""The global generators of Python, NumPy and PyTorch in tests: the same for each, whatever was drawn before it."""

import os
import random
from contextlib import contextmanager

SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")  # what `seed_everything` leaves in the environment
OUTSIDE = {name: os.environ[name] for name in SEED_VARIABLES if name in os.environ}  # as a user's shell has set it


def forget_seeds():
    """Takes the seeds of `seed_everything` out of the environment; those from outside stay."""
    for name in SEED_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(OUTSIDE)


@contextmanager
def same_random_numbers():
    """Inside, the global generators start from the same states, without Lightning's seeds; all is put back."""
    import numpy as np
    import torch

    before = {name: os.environ[name] for name in SEED_VARIABLES if name in os.environ}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    forget_seeds()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        forget_seeds()
        os.environ.update(before)
