"""What every test and every example gets, wherever it runs: a number of threads and random numbers of its own."""

import os
import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch

# The examples of the Flower engine need Flower, an extra.
collect_ignore_glob = [] if find_spec("flwr") else ["lightning_fed/engines/flower/*.py", "tests/engines/*.py"]

# One thread, or as many as the environment says: the processes that tests start read the same variable.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# Lightning's variables would be the seed of every federation that has none of its own. They go here, before fixtures
# of modules and processes can see those from outside, and around every test, because `seed_everything` sets them.
SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def forget_seeds():
    for name in SEED_VARIABLES:
        os.environ.pop(name, None)


forget_seeds()


@pytest.fixture(autouse=True)
def own_random_numbers():
    """Every test starts from the same global generators; what ran before it does not matter, nor what runs after."""
    forget_seeds()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    forget_seeds()
