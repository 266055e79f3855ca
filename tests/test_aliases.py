"""Projects with `pytorch_lightning`: both names refer to one Lightning; objects of another Lightning cause an error."""

import subprocess
import sys

import pytest
import torch

from lightning_fed import FederatedTrainer, lazy_names
from tests import models
from tests.breadth import slow
from tests.conftest import QUIET

FIT = f"""
import torch
from lightning_fabric.utilities.seed import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
import lightning as L
import pytorch_lightning.callbacks.model_checkpoint as checkpoints
from lightning_fed.data import IID

assert pl.Trainer is L.Trainer and pl.LightningModule is L.LightningModule
assert checkpoints.ModelCheckpoint is ModelCheckpoint and seed_everything is L.seed_everything
assert pl.callbacks.__spec__.name == pl.callbacks.__name__

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        return (self.weight - batch).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = torch.utils.data.DataLoader(torch.arange(24.0).reshape(12, 2), 4)
by_callback, by_trainer = Line(), Line()
quiet = {QUIET!r}
pl.Trainer(max_epochs=2, callbacks=[lightning_fed.Federation(partition=IID(2))], **quiet).fit(by_callback, loader)
lightning_fed.FederatedTrainer(max_rounds=2, partition=IID(2), **quiet).fit(by_trainer, loader)
assert torch.equal(by_callback.weight, by_trainer.weight) and by_callback.weight.abs().sum() > 0
print(pl.Trainer.__module__)
"""


def run(source):
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "package"),
    [
        slow(("import lightning_fed; import pytorch_lightning as pl", "lightning")),
        ("import pytorch_lightning as pl; import lightning_fed", "pytorch_lightning"),
    ],
)
def test_the_name_that_comes_first_is_lightning(imports, package):
    assert run(imports + FIT).stdout.split()[-1] == f"{package}{'.pytorch' * (package == 'lightning')}.trainer.trainer"


@pytest.mark.slow
def test_two_lightnings_are_named_before_the_trainer_refuses():
    source = (
        "import lightning, pytorch_lightning, lightning_fed; lightning_fed.Federation(); lightning_fed.Federation()"
    )
    assert run(source).stderr.count("Import only one of the packages, or import `lightning_fed` before the second") == 1


def test_different_versions_stay_apart(monkeypatch):
    monkeypatch.setattr(lazy_names, "version", {"lightning": "2.6.6", "pytorch-lightning": "1.9.0"}.__getitem__)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = [*sys.meta_path]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", object())
    lazy_names.unite_names()
    assert sys.meta_path == before
    with pytest.raises(TypeError, match=r"Install the same version of both packages: .* 'pytorch-lightning': '1.9.0'"):
        FederatedTrainer(callbacks=[foreign("Callback")], **QUIET)


def test_a_module_that_neither_has():
    with pytest.raises(ModuleNotFoundError, match="nothing_of_the_kind"):
        exec("import pytorch_lightning.nothing_of_the_kind")


def foreign(name, *bases):
    """An object with a base class from `pytorch_lightning`."""
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
def test_objects_of_the_other_package_are_named(fit, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", object())
    with pytest.raises(TypeError, match=r"Users.*package `pytorch_lightning`. Import only one of the packages"):
        fit()
