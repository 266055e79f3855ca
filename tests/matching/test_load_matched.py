"""Checkpoints of grown models in modules of the original widths, also in a new process."""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fed.matching import PermutationGroups, load_matched, resize_module
from tests import models, warm_process
from tests.breadth import quick
from tests.generators import same_random_numbers
from tests.matching import load_script
from tests.matching.load_script import CASES, Letters, Normed


def grown(make, example, seed=0):
    """A module with more neurons in every growable group, and random numbers everywhere."""
    torch.manual_seed(seed)
    module = make().eval()
    groups = PermutationGroups.of(module, example)
    assert any(group.is_growable for group in groups)
    sizes = {group.name: group.size + 1 + index for index, group in enumerate(groups) if group.is_growable}
    resize_module(module, {name: torch.rand(value.shape) + 0.1 if value.is_floating_point() else value
                           for name, value in groups.grow(module.state_dict(), sizes).items()})  # fmt: skip
    with torch.no_grad():
        return module, module(example)


@pytest.mark.parametrize(
    "load",
    quick(
        [load_script.main, lambda folder: warm_process.run("tests.matching.load_script", folder)], [load_script.main]
    ),
    ids=["here", "in another process"],
)
def test_modules_of_the_original_widths(load, tmp_path):
    expected = {}
    for name, (make, draw) in CASES.items():
        example = draw()
        module, output = grown(make, example)
        assert repr(module) != repr(make())
        torch.save({"state_dict": module.state_dict(), "epoch": 3}, tmp_path / f"{name}.ckpt")
        torch.save(example, tmp_path / f"{name}.input")
        expected[name] = (output, repr(module))
    load(tmp_path)
    for name, (output, text) in expected.items():
        result = torch.load(tmp_path / f"{name}.output", weights_only=True)
        torch.testing.assert_close(result["output"], output, msg=name)
        assert result["text"] == text
        assert result["is_tied"] == (name == "tied")


@pytest.fixture(scope="module")
def letters():
    """An example, a grown module, and the module's output."""
    with same_random_numbers():
        example = torch.randint(20, (2, 7))
        return example, *grown(Letters, example)


@pytest.mark.parametrize("kind", ["file", "path", "content", "state"])
def test_every_kind_of_checkpoint(kind, letters, tmp_path):
    example, wide, output = letters
    content = {"state_dict": wide.state_dict()}
    torch.save(content, tmp_path / "a.ckpt")
    checkpoint = {
        "file": str(tmp_path / "a.ckpt"), "path": tmp_path / "a.ckpt", "content": content, "state": wide.state_dict()
    }[kind]  # fmt: skip
    module = Letters().eval()
    parameters = list(module.parameters())
    assert load_matched(module, checkpoint) is module
    assert all(parameter is before for parameter, before in zip(module.parameters(), parameters, strict=True))
    assert torch.equal(module(example), output)
    module.decoder.weight.data.zero_()
    assert wide.decoder.weight.abs().sum() > 0  # no storage is shared


def test_equal_widths_are_load_state_dict():
    torch.manual_seed(0)
    one, donor = Normed(), Normed()
    load_matched(one, donor.state_dict())
    assert all(torch.equal(value, donor.state_dict()[name]) for name, value in one.state_dict().items())


def test_a_lightning_modules_hook_is_called(tmp_path):
    class Renamed(models.Module):
        def on_load_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            for name in [name for name in state if name.startswith("old.")]:
                state["net." + name[4:]] = state.pop(name)
            self.noted = checkpoint["note"]

    wide = Renamed(nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2)))
    content = {"note": 7, "state_dict": {"old" + name[3:]: value for name, value in wide.state_dict().items()}}
    before = copy.deepcopy(content)
    module = load_matched(Renamed(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))), content)
    assert (module.noted, module.net[0].out_features) == (7, 9)
    assert torch.equal(module.net[2].weight, wide.net[2].weight)
    assert content["state_dict"].keys() == before["state_dict"].keys()  # the user's content does not change


class Harmful:
    """Code that unpickling would run."""

    def __reduce__(self):
        return (os.mkdir, ("harmed",))


def test_what_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        load_matched(Letters(), "none.ckpt")
    torch.save({"state_dict": Letters().state_dict(), "hyper_parameters": {"net": Harmful()}}, "a.ckpt")
    Path("b.ckpt").write_bytes(b"not a checkpoint")
    Path("c.ckpt").write_bytes(Path("a.ckpt").read_bytes()[:2000])
    Path("d.ckpt").write_bytes(b"")
    Path("f.ckpt").write_text("hello\n")  # read as pickle instructions
    Path("g.ckpt").write_text("{}")
    for name in "abcdfg":
        with pytest.raises(
            ValueError, match=rf"Expected {name}\.ckpt to be a checkpoint with tensors and primitives only"
        ):
            load_matched(Letters(), f"{name}.ckpt")
    assert not Path("harmed").exists()
    torch.save([1], "e.ckpt")
    with pytest.raises(ValueError, match=r"Expected e\.ckpt to be a checkpoint, but got list"):
        load_matched(Letters(), "e.ckpt")
    with pytest.raises(ValueError, match=r"to be a checkpoint, but got a folder\."):
        load_matched(Letters(), tmp_path)
    torch.save({"state_dict": None}, "h.ckpt")
    with pytest.raises(ValueError, match=r"the `state_dict` of h\.ckpt to have entries by name, but got NoneType"):
        load_matched(Letters(), "h.ckpt")


@pytest.mark.parametrize(
    ("make", "shapes", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)),
            {"0_weight": (5, 2), "0_bias": (5,), "2_weight": (1, 4)},
            "3 for 0 and 3 for 2, but got 5 and 4",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 3)), {"0_weight": (5, 2)}, "3 for 0.weight and 3 for 0.bias"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)),
            {"1_bias": (5,)},
            "4 for 1.weight and 4 for 1.bias",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)),
            {"0_weight": (5, 1, 3, 3), "0_bias": (5,), "4_weight": (2, 40)},
            "4 for 0 and 36 for 4, but got 5 and 40",
        ),
        (lambda: nn.LSTM(2, 3, 2), {"weight_ih_l0": (16, 2)}, "12 for weight_ih_l0 and 12 for weight_hh_l0"),
    ],
)
def test_layers_that_do_not_fit_each_other(make, shapes, message):
    module = make()
    text, before = repr(module), copy.deepcopy(module.state_dict())
    shapes = {name if "_ih" in name else name.replace("_", "."): shape for name, shape in shapes.items()}
    broken = {**before, **{name: torch.zeros(shape) for name, shape in shapes.items()}}
    with pytest.raises(ValueError, match=f"Expected compatible widths, such as {message}"):
        load_matched(module, broken)
    assert repr(module) == text
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_layers_that_read_another_axis_need_not_fit():
    """A linear layer over the length instead of the channels."""
    make = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Linear(4, 2)), nn.Sequential(nn.Conv1d(1, 5, 3), nn.Linear(4, 2))
    assert load_matched(make[0], make[1].state_dict())(torch.zeros(1, 1, 6)).shape == (1, 5, 2)


@pytest.mark.parametrize("door", ["argument", "module", "by name"])
def test_an_example_shows_what_does_not_fit(door):
    class Gated(models.Module):
        def forward(self, inputs, scale=1.0):
            return self.net["head"](torch.relu(self.net["stem"](inputs)) * scale)

    def make(width, read):
        return Gated(nn.ModuleDict({"stem": nn.Linear(2, width), "head": nn.Linear(read, 3)})).train()

    module, example = make(4, 4), torch.zeros(2, 2)
    before = copy.deepcopy(module.state_dict())
    if door == "module":
        module.example_input_array = example
    given = {"argument": example, "module": None, "by name": {"inputs": example, "scale": torch.ones(())}}[door]
    with pytest.raises(ValueError, match=r"checkpoint's layer widths .* the example input raised Runt"):
        load_matched(module, make(6, 5).state_dict(), given)
    assert module.training
    assert (module.net["stem"].out_features, module.net["head"].in_features) == (4, 4)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert load_matched(module, make(6, 6).state_dict(), given).net["stem"].out_features == 6
    with pytest.raises(ValueError, match=r"'net\.head\.bias' of the checkpoint to be a tensor, but got float"):
        load_matched(module, {**before, "net.head.bias": 0.0})


def test_names_must_be_the_modules(letters):
    module = Letters()
    before = copy.deepcopy(module.state_dict())
    wide = letters[1].state_dict()
    lacking = {name: value for name, value in wide.items() if name != "decoder.bias"}
    with pytest.raises(ValueError, match=r"the module's entries, but it lacks 'decoder\.bias'\."):
        load_matched(module, lacking)
    with pytest.raises(ValueError, match=r"it contains unexpected 'more'\."):
        load_matched(module, {**wide, "more": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"it lacks '.*' and 5 more and contains unexpected 'a'\."):
        load_matched(module, {"a": torch.zeros(1), "decoder.bias": torch.zeros(9)})
    with pytest.raises(ValueError, match=r"'decoder\.bias' to have 1 axes, but got the shape \(3, 1\)"):
        load_matched(module, {**wide, "decoder.bias": torch.zeros(3, 1)})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
