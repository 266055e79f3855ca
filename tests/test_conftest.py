"""What `conftest.py` holds: fixtures that several tests share start alike, and leave no seed behind."""

import os

import pytest

from tests import warm_process
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


@pytest.mark.parametrize("seed", [None, "7"])
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
