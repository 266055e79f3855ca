"""Projects that import `pytorch_lightning`: its name can be Lightning's, and objects of its own are named."""

import sys

import lightning as L
import pytest
import torch

from lightning_fed import FederatedTrainer, alias_pytorch_lightning
from tests import models
from tests.conftest import QUIET

PROJECT = """
import pytorch_lightning as pl
import pytorch_lightning.callbacks.model_checkpoint as checkpoints
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.types import STEP_OUTPUT
"""


@pytest.mark.usefixtures("without_pytorch_lightning")
def test_the_other_name_gives_the_same_classes():
    names, spec = {}, L.pytorch.callbacks.__spec__
    alias_pytorch_lightning()
    alias_pytorch_lightning()  # once more does no harm
    exec(PROJECT, names)
    assert names["pl"] is L.pytorch
    assert names["LightningModule"] is L.LightningModule
    assert names["Callback"] is L.Callback
    assert names["ModelCheckpoint"] is names["checkpoints"].ModelCheckpoint is L.pytorch.callbacks.ModelCheckpoint
    assert names["seed_everything"] is L.fabric.utilities.seed.seed_everything
    assert L.pytorch.callbacks.__spec__ is spec
    with pytest.raises(ModuleNotFoundError, match="nothing_of_the_kind"):
        exec("import pytorch_lightning.nothing_of_the_kind", names)


@pytest.mark.usefixtures("without_pytorch_lightning")
def test_it_comes_before_the_first_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", L.pytorch)
    with pytest.raises(RuntimeError, match="before `pytorch_lightning` is imported, but"):
        alias_pytorch_lightning()


def foreign(name, *bases):
    """An object whose class has a base in `pytorch_lightning`, as a project's own classes have."""
    base = type(name, bases, {"__module__": f"pytorch_lightning.core.{name.lower()}"})
    return type("Users", (base,), {"__module__": "__main__"})()


@pytest.mark.parametrize(
    "fit",
    [
        lambda: FederatedTrainer(max_rounds=1, **QUIET).fit(foreign("LightningModule", torch.nn.Module)),
        lambda: FederatedTrainer(max_rounds=1, **QUIET).fit(
            models.Module(models.mlp()), datamodule=foreign("LightningDataModule")
        ),
        lambda: FederatedTrainer(max_rounds=1, callbacks=[foreign("Callback")], **QUIET),
    ],
    ids=["module", "datamodule", "callback"],
)
def test_objects_of_the_other_package_are_named(fit):
    with pytest.raises(TypeError, match=r"Users.*`pytorch_lightning`.*import lightning.pytorch as pl.*alias_pytorch"):
        fit()
