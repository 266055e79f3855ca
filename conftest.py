"""What every test and every example gets, wherever it runs: a number of threads and random numbers of its own."""

import gc
import os
from importlib.util import find_spec

import pytest

from tests.generators import OUTSIDE, SEED_VARIABLES, same_random_numbers

# The examples of a network need the network, an extra; scripts of projects need what projects need.
collect_ignore_glob = ["tests/projects/scripts/*", "tests/projects/packages/*", "tests/backends/nvflare/job/*"]
collect_ignore_glob += ["tests/backends/nvflare/admin.py"]
collect_ignore_glob += [] if find_spec("flwr") else ["lightning_fed/backends/flower/*.py", "tests/backends/flower/*.py"]
collect_ignore_glob += [] if find_spec("nvflare") else ["lightning_fed/backends/nvflare/*.py"]
collect_ignore_glob += [] if find_spec("Crypto") else ["lightning_fed/backends/wire/*.py"]  # comes with both

# One thread, or as many as the environment says: torch reads it when it is imported, here and in processes that tests
# start. No ``conftest.py`` imports torch at once: the process that only hands tests to others does without.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--accelerator", default="cpu", help="where the tests' Trainers train (default: cpu)")


@pytest.fixture(autouse=True)
def seeded_generators():
    """Every test starts from the same global generators; what ran before it does not matter, nor what runs after."""
    with same_random_numbers():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """So does every fixture that several tests share, and one that leaves a seed in the environment is an error."""
    if fixturedef.scope == "function":
        return (yield)
    with same_random_numbers():
        made = yield
        left = [name for name in SEED_VARIABLES if os.environ.get(name) != OUTSIDE.get(name)]
        assert not left, f"The fixture `{fixturedef.argname}` leaves {left} in the environment of all later tests."
    return made


def pytest_collection_finish():
    """Modules and tests stay to the end: no collection of garbage need look at them, which would take half a second.

    A fit makes many objects at once: with the usual threshold of 700 it would be interrupted some hundred times.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
