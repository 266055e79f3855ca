"""A message's path through the package stays short enough to read: few files handle messages."""

import sys
from pathlib import Path

import pytest

import lightning_fed
from lightning_fed import FederatedTrainer
from lightning_fed.messages import Broadcast, ClientUpdate
from tests import models
from tests.conftest import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

PACKAGE = Path(lightning_fed.__file__).parent
MOST_FILES = 8


@pytest.fixture(scope="module")
def files_that_hold(tmp_path_factory):
    """Files with functions using each kind of message during training."""
    files = {Broadcast: set(), ClientUpdate: set()}

    def note(frame, event, result):
        path = frame.f_code.co_filename
        if path.startswith(f"{PACKAGE}/") and event in ("call", "return"):
            values = [*frame.f_locals.values(), result]
            for kind, known in files.items():
                if any(type(value) is kind for value in values):
                    known.add(path.removeprefix(f"{PACKAGE}/"))

    trainer = FederatedTrainer(max_rounds=1, default_root_dir=tmp_path_factory.mktemp("fit"), **QUIET)
    data = {name: dataset for name, dataset in list(models.as_datasets(models.vectors()).items())[:2]}
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        trainer.fit(models.Module(models.mlp()), data)
    finally:
        sys.setprofile(before)
    return files


@pytest.mark.parametrize("kind", [Broadcast, ClientUpdate])
def test_few_files_hold_a_message(kind, files_that_hold):
    files = files_that_hold[kind]
    assert {"rounds/visit_flow.py", "server/server.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)
