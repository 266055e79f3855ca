"""`conftest.py`: shared fixtures start from equal random states and leave no seed behind."""

import os
from types import SimpleNamespace

import pytest

from tests import warm_process
from tests.breadth import quick
from tests.conftest import pytest_collection_modifyitems
from tests.generators import SEED_VARIABLES

FILE = """
import os, lightning as L, pytest, torch

torch.rand(1)

@pytest.fixture(scope="module")
def drawn():
    return torch.rand(1)

@pytest.fixture(scope="module")
def leaking():
    L.seed_everything(1, verbose=False)

def test_drawn(drawn):
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(0)))

def test_leaking(leaking):
    pass

def test_after():
    assert os.environ.get("PL_GLOBAL_SEED") in (None, "7")
"""


@pytest.mark.parametrize("seed", quick([None, "7"], [None]))
def test_a_shared_fixture_that_leaves_a_seed_behind_is_an_error(seed, monkeypatch, tmp_path):
    (tmp_path / "test_it.py").write_text(FILE)
    for name in SEED_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    environment = {} if seed is None else {"PL_GLOBAL_SEED": seed}
    text, _ = warm_process.run(
        "pytest", "-q", "-n0", "-p", "conftest", "-c", os.devnull, tmp_path, code=1, **environment
    )
    assert "2 passed" in text, text
    assert "1 error" in text
    assert "The fixture `leaking` leaves ['PL_GLOBAL_SEED'" in text


class Case:
    originalname, path = "test_it", "test_it.py"

    def __init__(self, door, **params):
        self.callspec = SimpleNamespace(params={**params, "either_trainer": door})
        self.name, self.is_slow = f"{door}-{params}", False

    def get_closest_marker(self, name):
        return self.is_slow

    def add_marker(self, mark):
        self.is_slow = mark.name == "slow"


@pytest.mark.parametrize("count", [1, 2, 3, 19])
def test_each_case_goes_through_one_door_and_a_table_through_both(count):
    cases = [Case(door, rule=rule) for rule in map(str, range(count)) for door in ("trainer", "callback")]
    slow = [Case(door, rule="slow") for door in ("trainer", "callback")]
    for case in slow:
        case.is_slow = True
    pytest_collection_modifyitems([*cases, *slow])
    quick = [case.callspec.params for case in cases if not case.is_slow]
    assert sorted(case["rule"] for case in quick) == sorted(map(str, range(count)) if count > 1 else ["0", "0"])
    assert {case["either_trainer"] for case in quick} == {"trainer", "callback"}
