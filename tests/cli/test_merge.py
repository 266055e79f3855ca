"""`lightning-fed merge`: checkpoints of runs, with and without a recipe; usage errors."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import lightning as L
import pytest
import torch
import yaml
from torch import nn

from lightning_fed.cli.main import main
from lightning_fed.cli.merge import build_parser
from lightning_fed.datasets import Shapes, Synthetic
from lightning_fed.matching import MatchedAverage, PermutationGroups, load_matched
from lightning_fed.modules import recalibrate_batch_norm
from lightning_fed.tasks import CharLanguageTask, ClassificationTask
from tests import models
from tests.recorders import loading

ROOT = Path(__file__).resolve().parents[2]

# Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

VERSION = {"pytorch-lightning_version": L.__version__, "epoch": 3, "global_step": 7}
RECIPE = {
    "seed_everything": 1,
    "model": {
        "class_path": "ClassificationTask",
        "init_args": {"model": "lenet", "num_classes": 6, "in_channels": 3, "input_size": 16,
                      "model_kwargs": {"channels": [4, 6], "hidden": 8}},
    },
    "data": {"class_path": "Shapes", "init_args": {"num_train": 24, "num_val": 8, "image_size": 16, "batch_size": 8,
                                                   "task": "classification"}},
    "trainer": {
        "max_rounds": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "num_sanity_val_steps": 0,
        "enable_model_summary": False, "default_root_dir": "run",
        "partition": {"class_path": "IID", "init_args": {"num_clients": 2}},
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"filename": "a", "dirpath": "run"}}],
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("JSONARGPARSE_DEBUG", raising=False)


def task(**options):
    return ClassificationTask("mlp", num_classes=5, input_size=4, model_kwargs={"hidden": [12]}, **options)


def save(module, path):
    """Saves a part of a Trainer's checkpoint."""
    torch.save({**VERSION, "state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, path)


def permuted(module, example, seed):
    groups, generator = PermutationGroups.of(module, example), torch.Generator().manual_seed(seed)
    orders = {group.name: torch.randperm(group.size, generator=generator) for group in groups}
    return groups.permute(module.state_dict(), orders)


def fails(capsys, status, *arguments):
    with pytest.raises(SystemExit) as error:
        main(["merge", *arguments])
    assert error.value.code == status
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_fit_merge_and_test(capsys):
    """Checkpoints of `fit` name their class, so no option is needed. The recipe tests the result."""
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    main(["fit", "-c", "recipe.yaml"])
    checkpoint = torch.load("run/a.ckpt", weights_only=True)
    example = torch.zeros(2, 3, 16, 16)
    module = ClassificationTask.load_from_checkpoint("run/a.ckpt", **loading(weights_only=True))
    torch.save({**checkpoint, "state_dict": permuted(module, example, 0)}, "b.ckpt")
    capsys.readouterr()
    main(["merge", "run/a.ckpt", "b.ckpt", "-o", "out/c.ckpt", "--mode", "permute"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["neurons", "of", "before", "after", "matched", "agreement", "seconds"]
    assert [line.split()[:5] for line in said[1:4]] == [
        ["model.features.0", "4", "4", "100%", "100%"], ["model.features.3", "6", "6", "100%", "100%"],
        ["model.classifier.1", "8", "8", "100%", "100%"],
    ]  # fmt: skip
    assert said[4:] == ["Merged checkpoint: out/c.ckpt"]
    merged = torch.load("out/c.ckpt", weights_only=True)
    assert merged["hyper_parameters"] == checkpoint["hyper_parameters"]
    assert checkpoint.keys() - merged.keys() == {"callbacks", "loops", "lr_schedulers", "optimizer_states"}
    again = ClassificationTask.load_from_checkpoint("out/c.ckpt", **loading(weights_only=True))
    images = torch.randn(5, 3, 16, 16)
    torch.testing.assert_close(again.eval()(images), module.eval()(images))
    main(["validate", "-c", "recipe.yaml", "--ckpt_path", "out/c.ckpt"])
    assert "val_acc" in capsys.readouterr().out


def test_grown_checkpoints(capsys):
    """The class comes from an option, hyper-parameters from the file; the result is wider."""
    nets = []
    for seed in range(3):
        torch.manual_seed(seed)
        nets.append(task(lr=0.3))
        save(nets[-1], f"{seed}.ckpt")
    options = ("--model", "ClassificationTask", "--weights", "[3,1,1]")
    main(["merge", "-o", "out.ckpt", *options, "0.ckpt", "1.ckpt", "2.ckpt", "--score=published"])
    said = capsys.readouterr().out
    assert "other widths than the model's layers: load the checkpoint with `load_matched`." in said
    again = load_matched(task(), "out.ckpt")
    assert again.model.features[1].out_features > 12
    bias = [net.model.classifier[-1].bias for net in nets]
    torch.testing.assert_close(again.model.classifier[-1].bias, (3 * bias[0] + bias[1] + bias[2]) / 5)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ClassificationTask.load_from_checkpoint("out.ckpt", **loading(weights_only=True))
    assert torch.load("out.ckpt", weights_only=True)["hyper_parameters"]["lr"] == 0.3


def test_fedmas_recipe_evaluates_a_grown_checkpoint(capsys):
    options = {"num_classes": 10, "in_channels": 60, "input_size": 1, "model_kwargs": {"hidden": [12]}}
    recipe = {
        "model": {"class_path": "ClassificationTask", "init_args": {"model": "mlp", **options}},
        "data": {"class_path": "Synthetic", "init_args": {"num_clients": 2}},
        "trainer": {"method": "fedma", "accelerator": "cpu", "logger": False, "enable_progress_bar": False},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    for seed in range(2):
        torch.manual_seed(seed)
        module = ClassificationTask("mlp", **options)
        torch.save({**VERSION, "state_dict": module.state_dict()}, f"{seed}.ckpt")
    main(["merge", "0.ckpt", "1.ckpt", "-o", "out.ckpt", "-c", "recipe.yaml", "--score", "published"])
    assert "load the checkpoint with `load_matched`" in capsys.readouterr().out
    main(["test", "-c", "recipe.yaml", "--ckpt_path", "out.ckpt"])
    said = capsys.readouterr().out
    again = load_matched(module, "out.ckpt")
    data = Synthetic(num_clients=2)
    inputs, labels = (torch.cat([data.test[client].tensors[index] for client in range(2)]) for index in (0, 1))
    expected = float((again.eval()(inputs).argmax(1) == labels).float().mean())
    assert float(re.search(r"test_acc\W+([\d.]+)", said)[1]) == pytest.approx(expected)


NORMED = """
import lightning as L
from torch import nn

class Normed(L.LightningModule):
    def __init__(self, width: int = 3):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(196 * width, 2)
        )

    def forward(self, x):
        return self.net(x)
"""


def test_batch_norm_is_measured_with_the_recipes_data(capsys, monkeypatch):
    """Equals `recalibrate_batch_norm` on the same batches. Plain states and a user's class work too."""
    Path("normed.py").write_text(NORMED)
    monkeypatch.setitem(RECIPE, "model", {"class_path": "normed.Normed", "init_args": {"width": 5}})
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.syspath_prepend(".")
    module = importlib.import_module("normed").Normed(5)
    torch.save(module.state_dict(), "a.pt")
    torch.save(permuted(module, torch.zeros(2, 3, 16, 16), 0), "b.pt")
    model_options = ("--model", "normed.Normed", "--model.width", "5", "--data", str(RECIPE["data"]))
    said = fails(capsys, 1, "a.pt", "b.pt", "-o", "c.pt", *model_options[:4])
    assert "error: Expected data to measure BatchNorm's running statistics, but got none: pass `-c RECIPE`" in said
    data = Shapes(**RECIPE["data"]["init_args"])
    data.setup("fit")
    recalibrate_batch_norm(module, data.train_dataloader())
    for number, options in enumerate((("-c", "recipe.yaml"), model_options, (*model_options, "--num_batches", "2"))):
        main(["merge", "a.pt", "b.pt", "-o", "c.pt", *options, "--mode", "permute"])
        merged = torch.load("c.pt", weights_only=True)
        assert merged.keys() == module.state_dict().keys()
        torch.testing.assert_close(merged["net.4.weight"], module.net[4].weight)
        for name in ("running_mean", "running_var"):
            assert torch.allclose(merged[f"net.1.{name}"], module.net[1].get_buffer(name)) == (number < 2)
    before = torch.load("a.pt", weights_only=True)
    example = ("--data", str(RECIPE["data"]), "--batch_norm", "average")
    main(["merge", "a.pt", "b.pt", "-o", "d.pt", *model_options[:4], *example])
    assert torch.equal(torch.load("d.pt", weights_only=True)["net.1.running_mean"], before["net.1.running_mean"])
    monkeypatch.delitem(sys.modules, "normed")


def test_text(capsys):
    for seed in range(2):
        torch.manual_seed(seed)
        save(CharLanguageTask(hidden_size=6), f"{seed}.ckpt")
    main(["merge", "0.ckpt", "1.ckpt", "-o", "out.ckpt", "--model=CharLanguageTask", "--mode=none"])
    assert capsys.readouterr().out == "Merged checkpoint: out.ckpt\n"
    a, b, c = (torch.load(name, weights_only=True)["state_dict"] for name in ("0.ckpt", "1.ckpt", "out.ckpt"))
    assert all(torch.allclose(value, (a[name] + b[name]) / 2) for name, value in c.items())


def test_what_is_wrong_is_one_line(capsys):
    module = task()
    save(module, "a.ckpt")
    save(ClassificationTask("mlp", num_classes=5, input_size=4, model_kwargs={"hidden": [12, 7]}), "deeper.ckpt")
    save(ClassificationTask("mlp", num_classes=5, input_size=4, model_kwargs={"hidden": [13]}), "wider.ckpt")
    torch.save({"state_dict": {}}, "empty.ckpt")
    Path("text.ckpt").write_text("hello")
    Path("folder").mkdir()
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": {"model": nn.ReLU()}}, "unsafe.ckpt")
    named = ("--model", "ClassificationTask")
    for arguments, status, words in (
        (["a.ckpt", "-o", "b.ckpt"], 2, "Expected `-c RECIPE` or `--model CLASS`, but got neither"),
        (["a.ckpt", "-o", "a.ckpt", *named], 2, "`--out` to differ"),
        (["a.ckpt", *named], 2, "are required: -o/--out"),
        (["-o", "b.ckpt"], 2, "are required: CHECKPOINT"),
        (["a.ckpt", "a.ckpt", "-o", "folder", *named], 2, "`--out` to be a file, but got the folder folder"),
        (["a.ckpt", "a.ckpt", "-o", "new/", *named], 2, "`--out` to be a file, but got the folder new/"),
        (
            ["a.ckpt", "a.ckpt", "-o", "text.ckpt/b.ckpt", *named],
            1,
            "in a writable folder, but got text.ckpt/b",
        ),
        (["a.ckpt", "a.ckpt", "-o", "b.ckpt", *named, "--weights", "[1]"], 2, "per checkpoint (2), but got 1 `--we"),
        (
            ["a.ckpt", "text.ckpt", "-o", "b.ckpt", *named],
            1,
            "text.ckpt to be a checkpoint with tensors and primitives only",
        ),
        (
            ["text.ckpt", "a.ckpt", "-o", "b.ckpt", *named],
            1,
            "text.ckpt to be a checkpoint with tensors and primitives only",
        ),
        (["a.ckpt", "folder", "-o", "b.ckpt", *named], 1, "folder to be a checkpoint, but got a folder"),
        (["folder", "a.ckpt", "-o", "b.ckpt", *named], 1, "folder to be a checkpoint, but got a folder"),
        (["a.ckpt", "none.ckpt", "-o", "b.ckpt", *named], 1, "none.ckpt"),
        (["none.ckpt", "a.ckpt", "-o", "b.ckpt", *named], 1, "none.ckpt"),
        (
            ["a.ckpt", "deeper.ckpt", "-o", "b.ckpt", *named],
            1,
            "deeper.ckpt to have the module's entries, but it contains",
        ),
        (["a.ckpt", "empty.ckpt", "-o", "b.ckpt", *named], 1, "empty.ckpt to have the module's entries, but it lacks"),
        (["a.ckpt", "wider.ckpt", "-o", "b.ckpt", *named], 1, "wider.ckpt to have the architecture of the first"),
        (
            ["a.ckpt", "unsafe.ckpt", "-o", "b.ckpt", *named],
            1,
            "unsafe.ckpt to be a checkpoint with tensors and primitives only",
        ),
        (
            ["unsafe.ckpt", "a.ckpt", "-o", "b.ckpt", *named],
            1,
            "unsafe.ckpt to be a checkpoint with tensors and primitives only",
        ),
        (
            ["a.ckpt", "a.ckpt", "-o", "b.ckpt", "--model", "no.such.Model"],
            2,
            "importable class for the model, but got 'no.such.M",
        ),
        (["a.ckpt", "a.ckpt", "-o", "b.ckpt", *named, "--mode", "shrink"], 2, "grow"),
        (["a.ckpt", "a.ckpt", "-o", "b.ckpt", *named, "--sweeps", "-1"], 1, "`sweeps` to be at least 0"),
        (["a.ckpt", "a.ckpt", "-o", "b.ckpt", *named, "--model.num_classes", "1"], 1, "`num_classes` to be at least 2"),
    ):
        assert words in fails(capsys, status, *arguments), arguments
        assert not Path("b.ckpt").exists()


def test_a_module_of_ones_own(capsys, monkeypatch):
    """Imported from the current folder, with the module's example input."""
    Path("mine.py").write_text(
        "import lightning as L, torch\nfrom torch import nn\n"
        "class Mine(L.LightningModule):\n"
        "    def __init__(self, width: int = 3):\n"
        "        super().__init__()\n"
        "        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))\n"
        "        self.example_input_array = torch.zeros(2, 4)\n"
        "    def forward(self, x):\n"
        "        return self.net(x)\n"
    )
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    module = models.Module(net)
    torch.save({"state_dict": module.state_dict()}, "a.ckpt")
    torch.save({"state_dict": permuted(module, torch.zeros(2, 4), 0)}, "b.ckpt")
    main(["merge", "a.ckpt", "b.ckpt", "-o", "c.ckpt", "--model", "mine.Mine", "--model.width", "5"])
    said = capsys.readouterr().out
    assert "net.0       5      5     100%" in said
    merged = torch.load("c.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(merged["net.2.weight"], net[2].weight)
    monkeypatch.delitem(sys.modules, "mine")


def test_options_equal_the_arguments_of_matched_average():
    """The parser repeats names, defaults and choices, because the class imports torch."""
    parser = build_parser()
    options, usage = vars(parser.parse_args(["a.ckpt", "-o", "b.ckpt"])), parser.format_help()
    hints = get_type_hints(MatchedAverage.__init__)
    for name, argument in inspect.signature(MatchedAverage).parameters.items():
        if name == "inputs":
            continue
        assert options[name] == argument.default
        if get_origin(hints[name]) is Literal:
            assert f"--{name} {{{','.join(get_args(hints[name]))}}}" in usage
