"""Fits with copies of the package, each without one feature below the kernel line.

`python tests/deletion_script.py FOLDER FEATURE...` copies the package into FOLDER once for each feature, deletes the
feature, and fits a custom rule with both entry points. The output is one line (JSON): error by feature, empty for
success. Each fit runs in a fork: forks share the import of Lightning, but not the import of the package.
"""

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:] = [path for path in sys.path if path not in (str(ROOT), str(Path(__file__).parent))]

import lightning as L  # noqa: E402 - `tests/lightning` would hide the package
import pytest  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def delete(package, feature):
    """Deletes a folder or a file from a package; `callbacks` stands for all callbacks outside the kernel."""
    path = package / feature
    if feature == "callbacks":
        kernel = {"__init__.py", "federation.py", "progress_bar.py"}
        for file in path.iterdir():
            if file.suffix == ".py" and file.name not in kernel:
                file.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.with_suffix(".py").unlink()


def fit_through_both_doors(folder):
    sys.path.insert(0, str(folder))
    import lightning_fed
    import lightning_fed.callbacks
    import lightning_fed.data
    import lightning_fed.steps
    from lightning_fed.rule import AveragingAggregator

    assert Path(lightning_fed.__file__).is_relative_to(folder), lightning_fed.__file__

    class Halfway(AveragingAggregator):
        def weight(self, update):
            return 1.0

    data = {name: TensorDataset(torch.full((8, 2), size)) for name, size in (("a", 1.0), ("b", 2.0))}
    found = []
    for fit in (
        lambda rule: lightning_fed.FederatedTrainer(rule, max_rounds=2, **QUIET),
        lambda rule: L.Trainer(max_epochs=2, callbacks=[lightning_fed.Federation(rule)], **QUIET),
    ):
        module = Regression()
        fit(Halfway()).fit(module, datamodule=lightning_fed.FederatedDataModule(data, batch_size=4))
        found.append(module.layer.weight.detach())
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.ones(1, 2))


def check_errors(feature):
    """Each name without its module gives an error with the deleted feature; other names load."""
    import lightning_fed

    missing = f"lightning_fed.{feature.replace('/', '.')}"
    broken = []
    for door in (lightning_fed, lightning_fed.callbacks, lightning_fed.data, lightning_fed.steps):
        for name in door.__all__:
            try:
                getattr(door, name)
            except ModuleNotFoundError as error:
                broken.append(str(error))
    assert [text for text in broken if f"Expected the feature `{missing}" not in text] == []
    assert broken or feature in ("cli", "recipe"), "The feature can be deleted without an error."
    if feature == "algorithms":
        with pytest.raises(ModuleNotFoundError, match=missing):
            lightning_fed.Federation("fedavg")
    if feature == "backends":
        with pytest.raises(ModuleNotFoundError, match=missing):
            L.Trainer(strategy="client_parallel", devices=1, **QUIET)


def main(folder, *features):
    errors = {}
    for feature in features:
        copy = Path(folder) / feature.replace("/", "-")
        shutil.copytree(ROOT / "lightning_fed", copy / "lightning_fed", ignore=shutil.ignore_patterns("__pycache__"))
        delete(copy / "lightning_fed", feature)
        child = os.fork()
        if not child:
            try:
                fit_through_both_doors(copy)
                check_errors(feature)
                error = ""
            except BaseException:
                error = traceback.format_exc()
            (copy / "error").write_text(error)
            os._exit(0)
        os.waitpid(child, 0)
        errors[feature] = (copy / "error").read_text()
    print(json.dumps(errors))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
