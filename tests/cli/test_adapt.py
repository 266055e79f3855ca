"""`lightning-fed adapt`: a checkpoint with statistics of new data, and usage errors."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_fed.cli.main import main
from lightning_fed.datasets import Shapes
from lightning_fed.modules import recalibrate_batch_norm
from lightning_fed.tasks import ClassificationTask

# Lightning 2.6 calls a function renamed in jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

RECIPE = {
    "seed_everything": 1,
    "model": {
        "class_path": "ClassificationTask",
        "init_args": {"model": "resnet18", "num_classes": 6, "in_channels": 3},
    },
    "data": {
        "class_path": "Shapes",
        "init_args": {"num_train": 12, "num_val": 4, "image_size": 16, "batch_size": 4, "task": "classification"},
    },
    "trainer": {"max_rounds": 1},
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("JSONARGPARSE_DEBUG", raising=False)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def task(**options):
    torch.manual_seed(0)
    return ClassificationTask(**{**RECIPE["model"]["init_args"], **options})


def test_a_checkpoint_gets_the_statistics_of_the_data(capsys):
    module = task()
    torch.save({"state_dict": module.state_dict(), "epoch": 3}, "last.ckpt")
    main(["adapt", "last.ckpt", "--recipe", "recipe.yaml", "--data.num_train", "8"])
    assert "Checkpoint: last-adapted.ckpt" in capsys.readouterr().out
    found = torch.load("last-adapted.ckpt", weights_only=True)
    data = Shapes(**{**RECIPE["data"]["init_args"], "num_train": 8})
    data.setup("fit")
    recalibrate_batch_norm(module, data.train_dataloader())
    assert found["epoch"] == 3
    for name, value in module.state_dict().items():
        # The order of batches is random, so statistics behind the first layer differ slightly.
        is_deep = name.endswith(("running_mean", "running_var")) and not name.startswith("model.bn1.")
        assert torch.allclose(found["state_dict"][name], value, rtol=1e-4, atol=1e-5) or is_deep, name


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["last.ckpt"], 2, "Expected `-c RECIPE` or `--model CLASS`, but got neither"),
        (["missing.ckpt", "-c", "recipe.yaml"], 1, "missing.ckpt"),
        (["last.ckpt", "-c", "recipe.yaml", "-o", "last.ckpt"], 2, "to differ from the checkpoint"),
        (["mlp.ckpt", "-c", "mlp.yaml"], 1, "a module with BatchNorm layers"),
    ],
)
def test_mistakes(arguments, status, message, capsys):
    torch.save({"state_dict": task().state_dict()}, "last.ckpt")
    options = {"model": "mlp", "num_classes": 6, "in_channels": 3, "input_size": 16}
    torch.save({"state_dict": ClassificationTask(**options).state_dict()}, "mlp.ckpt")
    recipe = {**RECIPE, "model": {"class_path": "ClassificationTask", "init_args": options}}
    Path("mlp.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit) as error:
        main(["adapt", *arguments])
    assert error.value.code == status
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
