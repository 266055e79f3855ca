"""Shared by tests and examples: one thread, and fixed random numbers."""

import gc
import os
from importlib.util import find_spec

import pytest

from tests.generators import OUTSIDE, SEED_VARIABLES, same_random_numbers

# Doctests of a backend need its extra; project scripts need their packages.
collect_ignore_glob = ["tests/projects/scripts/*", "tests/projects/packages/*", "tests/backends/nvflare/job/*"]
collect_ignore_glob += ["tests/backends/nvflare/admin.py"]
collect_ignore_glob += [] if find_spec("flwr") else ["lightning_fed/backends/flower/*.py", "tests/backends/flower/*.py"]
collect_ignore_glob += [] if find_spec("nvflare") else ["lightning_fed/backends/nvflare/*.py"]
collect_ignore_glob += [] if find_spec("Crypto") else ["lightning_fed/backends/wire/*.py"]  # required by both

# One thread by default. torch reads the variable at import, here and in started processes. No ``conftest.py`` imports
# torch at module level: the process that only distributes tests does not need torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets a width of 80, at which tables wrap


def pytest_addoption(parser):
    parser.addoption("--accelerator", default="cpu", help="where the tests' Trainers train (default: cpu)")


@pytest.fixture(autouse=True)
def seeded_generators():
    """Every test starts from the same states of the global generators, independent of other tests."""
    with same_random_numbers():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Shared fixtures start from the same states too. Leaving a seed in the environment is an error."""
    if fixturedef.scope == "function":
        return (yield)
    with same_random_numbers():
        made = yield
        left = [name for name in SEED_VARIABLES if os.environ.get(name) != OUTSIDE.get(name)]
        assert not left, f"The fixture `{fixturedef.argname}` leaves {left} in the environment of all later tests."
    return made


def pytest_collection_finish():
    """Excludes modules and tests from garbage collection, which would take half a second.

    A fit creates many objects at once: the default threshold of 700 would interrupt a fit some hundred times.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
