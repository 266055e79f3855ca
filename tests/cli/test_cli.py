"""The command line: objects built from recipes, usage errors, and a run from fit to prediction."""

import importlib
import logging
import math
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from jsonargparse import _typehints
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_fed
from lightning_fed import Availability, Faults, FederatedTrainer, FixedStatistics, LocalStatistics, Vectorized
from lightning_fed.algorithms import (
    METHODS,
    FairAvg,
    FedAvg,
    MultiKrum,
    RobustAggregator,
    ServerOptimizer,
)
from lightning_fed.algorithms.robust import NearestNeighborMixing
from lightning_fed.attacks import ALIE
from lightning_fed.callbacks import HeadThenBody, ProximalTerm
from lightning_fed.cli.flower import _parser as flower_parser
from lightning_fed.cli.main import main
from lightning_fed.cli.recipes import absent_recipe
from lightning_fed.client.client_store import FolderStore
from lightning_fed.compare import MethodChoice
from lightning_fed.data import (
    IID,
    ByGroup,
    Dirichlet,
    LabelsPerClient,
    Look,
    PartialLabels,
    Partition,
    PartitionedData,
    PermutedPixels,
    Shards,
)
from lightning_fed.datasets import (
    CIFAR10,
    FEMNIST,
    MNIST,
    CamVid,
    FashionMNIST,
    Omniglot,
    Shakespeare,
    Shapes,
    Synthetic,
)
from lightning_fed.errors import OptionError
from lightning_fed.privacy import CentralDP, SecureSum
from lightning_fed.recipe import FederatedCLI, remembered_subclasses
from lightning_fed.steps import MaxNorm, UniformWeights
from lightning_fed.tasks import CharLanguageTask, ClassificationTask, SegmentationTask
from tests.breadth import quick, slow
from tests.datasets.test_datasets import write_camvid_npz, write_cifar_npz, write_femnist, write_mnist, write_omniglot
from tests.datasets.test_shakespeare import write_roles
from tests.recorders import state_of

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
OFFLINE = str(ROOT / "recipes" / "shapes_deeplab.yaml")

# Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
pytestmark = [
    pytest.mark.usefixtures("subclasses_are_remembered"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

# 3 clients with 12 scenes of 32 x 32 pixels, and a small network.
TINY = [
    *("--model.model", "Unet", "--model.encoder_name", "resnet18"),
    *("--model.model_kwargs", "{encoder_depth: 3, decoder_channels: [8, 8, 8]}"),
    *("--data.num_train", "12", "--data.num_val", "4", "--data.num_test", "4", "--data.image_size", "16"),
    *("--trainer.partition", "IID", "--trainer.partition.num_clients", "3", "--trainer.clients_per_round", "2"),
    *("--trainer.local_epochs", "1", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"),
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Writes to a temporary folder; LightningCLI warns if the process has command-line arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("JSONARGPARSE_DEBUG", raising=False)


class Built(FederatedCLI):
    """Builds the objects of `fit` without saving the configuration."""

    config_dump: ClassVar = {}

    def fit(self, **arguments):
        self.arguments = arguments


def build(*arguments):
    return Built(["fit", *arguments])


# The Trainer of `OFFLINE`, with a fast model and fast data.
LIGHT = """
model: {class_path: ClassificationTask, init_args: {model: mlp, num_classes: 6}}
data: {class_path: Shapes, init_args: {num_train: 20}}
trainer:
  clients_per_round: 4
  local_epochs: 2
  partition: {class_path: Dirichlet, init_args: {num_clients: 12, alpha: 0.3}}
"""


def federation_of(*arguments):
    Path("light.yaml").write_text(LIGHT)
    return build("-c", "light.yaml", *arguments).trainer.federation


@pytest.fixture
def few():
    """`LIGHT` with a small scene for each client."""
    text = LIGHT.replace("num_train: 20", "num_train: 160, image_size: 16").replace("0.3}", "9.0}")
    text += "  max_rounds: 1\n  num_sanity_val_steps: 0\n"
    Path("few.yaml").write_text(text)
    return "few.yaml"


# Recipes


def test_there_is_a_recipe_for_every_job():
    assert [recipe.stem for recipe in RECIPES] == [
        "camvid_deeplab_dirichlet",
        "camvid_deeplab_sequence",
        "camvid_partial_labels",
        "camvid_sites",
        "compare_camvid",
        "compare_cifar10_classes",
        "compare_cifar10_iid",
        "compare_fashion_mnist",
        "compare_fedma_cifar10",
        "compare_fedma_mnist",
        "compare_fedma_resnet",
        "compare_fedma_shakespeare",
        "compare_femnist",
        "compare_mnist_users",
        "compare_niid_cifar10",
        "compare_niid_fashion_mnist",
        "compare_permuted_mnist",
        "compare_pfl_fashion_mnist",
        "compare_shapes",
        "fashion_mnist_attacked",
        "fashion_mnist_dirichlet",
        "femnist_writers",
        "omniglot",
        "omniglot_mobilenet",
        "shakespeare",
        "shapes_deeplab",
        "shapes_looks",
        "synthetic",
    ]


def where_data_are(recipe, folder):
    """The option with the data folder of a recipe, if any."""
    name = recipe.stem
    if name in ("compare_shapes", "shakespeare", "shapes_deeplab", "shapes_looks", "synthetic"):
        return []
    is_nested = name == "camvid_sites" or (
        name.startswith("compare_")
        and not name.startswith(("compare_camvid", "compare_fedma", "compare_mnist", "compare_niid"))
    )
    return ["--data.source.data_dir" if is_nested else "--data.data_dir", str(folder)]


BUILT = [
    ("camvid_deeplab_dirichlet", SegmentationTask, CamVid, Dirichlet(12, 0.1, min_size=4, background=None), 100, 4),
    ("camvid_deeplab_sequence", SegmentationTask, CamVid, ByGroup(), 60, 1.0),
    ("camvid_partial_labels", SegmentationTask, CamVid, PartialLabels(ByGroup(), 11, 4), 100, 5),
    ("camvid_sites", SegmentationTask, CamVid, ByGroup(), 60, 1.0),
    ("compare_camvid", SegmentationTask, CamVid, Dirichlet(8, 0.1, "per_client", background=None), 10, 4),
    ("compare_cifar10_classes", ClassificationTask, CIFAR10, LabelsPerClient(5, 4, "even"), 24, 1.0),
    ("compare_cifar10_iid", ClassificationTask, CIFAR10, IID(5), 24, 1.0),
    ("compare_fashion_mnist", ClassificationTask, FashionMNIST, LabelsPerClient(50, 2), 25, 10),
    ("compare_fedma_cifar10", ClassificationTask, CIFAR10, Dirichlet(16, 0.5), 18, 1.0),
    ("compare_fedma_mnist", ClassificationTask, MNIST, Dirichlet(8, 0.5), 20, 1.0),
    ("compare_fedma_resnet", ClassificationTask, CIFAR10, Dirichlet(8, 0.5), 15, 1.0),
    ("compare_fedma_shakespeare", CharLanguageTask, Shakespeare, None, 12, 1.0),
    ("compare_femnist", ClassificationTask, FEMNIST, ByGroup(), 20, 10),
    (
        "compare_mnist_users",
        ClassificationTask,
        MNIST,
        LabelsPerClient(1000, 2, "consecutive", sigma=2.0, min_per_label=5),
        200,
        10,
    ),
    ("compare_niid_cifar10", ClassificationTask, CIFAR10, Dirichlet(10, 0.5, balance=True), 50, 1.0),
    ("compare_niid_fashion_mnist", ClassificationTask, FashionMNIST, Dirichlet(10, 0.5, balance=True), 50, 1.0),
    ("compare_permuted_mnist", ClassificationTask, MNIST, PermutedPixels(IID(3)), 30, 1.0),
    ("compare_pfl_fashion_mnist", ClassificationTask, FashionMNIST, Dirichlet(20, 0.1), 2000, 1.0),
    ("compare_shapes", SegmentationTask, Shapes, Dirichlet(10, 0.01, "per_client"), 60, 5),
    ("fashion_mnist_attacked", ClassificationTask, FashionMNIST, Dirichlet(10, 0.5), 40, 1.0),
    ("fashion_mnist_dirichlet", ClassificationTask, FashionMNIST, Dirichlet(100, 0.1), 200, 10),
    ("femnist_writers", ClassificationTask, FEMNIST, ByGroup(), 300, 10),
    ("omniglot", ClassificationTask, Omniglot, LabelsPerClient(128, 20, "even"), 300, 16),
    ("omniglot_mobilenet", ClassificationTask, Omniglot, LabelsPerClient(128, 20, "even"), 2000, 32),
    ("shakespeare", CharLanguageTask, Shakespeare, None, 10, 4),
    ("shapes_deeplab", SegmentationTask, Shapes, Dirichlet(12, 0.3), 6, 4),
    (
        "shapes_looks",
        SegmentationTask,
        Shapes,
        Look(IID(6), contrast=1.0, colour=0.5, polarity=0.5, mean=0.47, std=0.22),
        10,
        1.0,
    ),
    ("synthetic", ClassificationTask, Synthetic, None, 30, 10),
]


# Three classes of data; `test_a_recipe_trains` builds the recipes in `TRAINED`, with two other classes.
BUILT_QUICKLY = (
    "compare_mnist_users",
    "shakespeare",
    "synthetic",
)


@pytest.mark.parametrize(
    ("recipe", "task", "data", "partition", "rounds", "clients_per_round"),
    quick(BUILT, [row for row in BUILT if row[0] in BUILT_QUICKLY]),
)
def test_a_recipe_builds_what_it_says(recipe, task, data, partition, rounds, clients_per_round):
    path = ROOT / "recipes" / f"{recipe}.yaml"
    built = build("-c", str(path), *where_data_are(path, "somewhere"))
    assert type(built.model) is task
    is_partitioned = type(built.datamodule) is PartitionedData
    datamodule = built.datamodule.source if is_partitioned else built.datamodule
    assert type(datamodule) is data
    assert getattr(datamodule, "data_dir", None) == (Path("somewhere") if where_data_are(path, "") else None)
    assert built.model.num_classes == datamodule.num_classes
    assert type(built.trainer) is FederatedTrainer
    assert built.trainer.max_epochs == rounds
    federation = built.trainer.federation
    assert repr(built.datamodule.partition if is_partitioned else federation.partition) == repr(partition)
    assert type(federation.server.rule) is (MultiKrum if recipe == "fashion_mnist_attacked" else FedAvg)
    names = {"omniglot": [ServerOptimizer], "fashion_mnist_attacked": [NearestNeighborMixing, ALIE]}
    steps = names.get(recipe.removesuffix("_mobilenet"), [])
    assert [type(step) for step in federation.server.chain.steps] == steps
    assert federation.schedule.clients_per_round == clients_per_round
    assert type(federation.schedule.clients_per_round) is type(clients_per_round)
    assert federation.schedule.seed == 0
    assert built.arguments["model"] is built.model
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert f"lightning-fed fit -c recipes/{recipe}.yaml" in "\n".join(comment)


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    """Every data set in the real file format, large enough for the recipes' splits."""
    root = tmp_path_factory.mktemp("data")
    write_mnist(root, num_train=18000)
    write_mnist(root, "FashionMNIST", num_train=60000)
    write_femnist(root / "femnist", [20] * 12)
    write_omniglot(root / "omniglot", range(964))
    write_camvid_npz(root / "camvid", {"train": {"A1": 150, "B2": 250}, "val": {"B2": 9}}, plain_masks=True)
    write_roles(root / "shakespeare", (13000, 11000, 12000, 14000))
    return root


ON_REAL_DATA = ("omniglot", "shakespeare")


def trains(recipe, folder):
    """Runs the first two batches of a recipe: no client fails, and the model moves."""
    where = where_data_are(recipe, folder)
    is_small = [where[0].replace("data_dir", "image_size"), "[32,32]"] if "camvid" in recipe.stem else []
    options = ["--trainer.accelerator", "cpu", "--trainer.fast_dev_run", "2", *is_small]
    built = build("-c", str(recipe), *where, *options)
    before = state_of(built.model)
    built.trainer.fit(**built.arguments)  # LightningCLI's behaviour without an overridden `fit`
    logged = {name: float(value) for name, value in built.trainer.callback_metrics.items()}
    assert built.trainer.global_step == 2
    assert 1 <= logged["fed/clients"] <= 2
    assert logged["fed/failed"] == 0
    assert 0 < logged["fed/update_norm"] < math.inf
    assert any(not torch.equal(value, before[name]) for name, value in state_of(built.model).items())


TRAINED = ("fashion_mnist_attacked", "femnist_writers")


@pytest.mark.parametrize(
    "recipe", quick(RECIPES, [path for path in RECIPES if path.stem in TRAINED]), ids=lambda path: path.stem
)
def test_a_recipe_trains(recipe, small_data):
    if "CIFAR10" in recipe.read_text() and not (small_data / "cifar10").exists():
        write_cifar_npz(small_data / "cifar10", 7000)
    trains(recipe, small_data)


@pytest.mark.parametrize(
    "recipe",
    [
        path if path.stem in ON_REAL_DATA else pytest.param(path, marks=pytest.mark.slow)
        for path in RECIPES
        if where_data_are(path, "")
    ],
    ids=lambda path: path.stem,
)
def test_a_recipe_trains_on_real_data(recipe):
    if not DATA.is_dir():
        pytest.skip(f"no data at {DATA}")
    trains(recipe, DATA)


@pytest.mark.parametrize(
    "args",
    [
        ("fit", "-c", "recipes/synthetic.yaml"),
        ("fit", "--config=recipes/synthetic.yaml"),
        ("compare", "recipes/synthetic.yaml", "--methods", "fedavg"),
        ("flower", "new", "app", "-c", "recipes/synthetic.yaml"),
        ("nvflare", "new", "job", "-c", "recipes/synthetic.yaml"),
    ],
)
def test_a_ready_recipe_that_is_not_in_the_folder(args, tmp_path, monkeypatch, capsys):
    """The error names the command that writes the recipe, and the written recipe is found."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code
    command, instead = capsys.readouterr().err.splitlines()[-2:]
    assert command.endswith("To copy it: lightning-fed recipes synthetic > synthetic.yaml")
    assert instead == "Then use synthetic.yaml instead of recipes/synthetic.yaml."
    main(["recipes", "synthetic"])
    Path("synthetic.yaml").write_text(capsys.readouterr().out)
    assert absent_recipe([argument.replace("recipes/", "") for argument in args]) is None


def test_no_command_prints_device_lines_and_tips(monkeypatch, capsys):
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(logger, "filters", [])
    main(["recipes"])
    shown = [text for text in ("GPU available: False", "💡 Tip: install this", "`Trainer.fit` stopped")
             if logger.filter(logging.makeLogRecord({"msg": text}))]  # fmt: skip
    assert shown == ["`Trainer.fit` stopped"]


def test_a_command_line_that_is_right_gets_no_hint(tmp_path, monkeypatch, capsys):
    """An output may have the name of a ready recipe; other errors do not concern recipes."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["compare", "--help", "mine.yaml", "--out", "runs/synthetic.yaml"])
    assert not capsys.readouterr().err
    assert absent_recipe(["fit", "-c", "my.yaml", "--data.data_dir=synthetic", "synthetic.ckpt"]) is None


@pytest.mark.parametrize("network", ["flower", "nvflare"])
def test_the_next_steps_of_an_app_are_commands_that_there_are(network, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([network, "new", "hospitals", "-c", str(ROOT / "recipes" / "synthetic.yaml")])
    said = capsys.readouterr().out
    assert re.findall(r"^  (\d)\. ", said, re.MULTILINE) == ["1", "2", "3"]
    commands = [shlex.split(line) for line in re.findall(r"^ {7}(.+)$", said, re.MULTILINE)]
    assert commands
    for program, *arguments in commands:
        if program == "lightning-fed":
            flower_parser().parse_args(arguments[1:])
        else:
            assert program in ("flwr", "nvflare") or os.access(program, os.X_OK)
    guide = re.search(r"https://\S+/(guides/\w+)/", said)[1]
    assert (ROOT / "docs" / f"{guide}.md").is_file()


@pytest.mark.parametrize(("network", "written"), [("flower", "    clients={},"), slow(("nvflare", "enumerate([{}]"))])
def test_an_app_has_the_number_of_clients_that_a_natural_partition_makes(network, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_camvid_npz(tmp_path / "camvid", {"train": {"0001TP": 9, "0006R0": 5, "0016E5": 5}})
    text = (ROOT / "recipes" / "camvid_sites.yaml").read_text()
    counts = {"flower": (3, 0), "nvflare": ("'0001TP', '0006R0', '0016E5'", "")}[network]
    for folder, count in zip((".", "nowhere"), counts, strict=True):
        Path("recipe.yaml").write_text(text.replace("data_dir: data", f"data_dir: {folder}"))
        main([network, "new", f"app{count}", "-c", "recipe.yaml"])
        (server,) = Path(f"app{count}").rglob("server.py")
        assert written.format(count) in server.read_text()


# Lightning warns for every checkpoint used in another folder.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning")
@pytest.mark.parametrize("command", quick(["validate", "test"], ["test"]))
def test_a_checkpoint_that_was_saved_from_python(command, capsys):
    """The hyper-parameters do not name a class, so the recipe's model is evaluated with the weights."""
    recipe = str(ROOT / "recipes" / "synthetic.yaml")
    torch.manual_seed(3)
    task = ClassificationTask("mlp", 10, 60, 1, model_kwargs={"hidden": [64]})
    data = Synthetic(1.0, 1.0, num_clients=3, batch_size=200)
    trainer = FederatedTrainer(max_rounds=0, logger=False, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(task, datamodule=data)
    trainer.save_checkpoint("python.ckpt")
    name = {"validate": "val_loss", "test": "test_loss"}[command]
    (expected,) = getattr(trainer, command)(task, datamodule=data, verbose=False)
    options = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    options += ["--data.num_clients", "3", "--data.batch_size", "200"]
    capsys.readouterr()
    main([command, "-c", recipe, "--ckpt_path", "python.ckpt", *options])
    said = capsys.readouterr()
    assert float(re.search(rf"{name}\W+([\d.]+)", said.out)[1]) == pytest.approx(expected[name])
    assert "python.ckpt was saved from Python: the model" in said.err
    main([command, "-c", recipe, *options])
    assert "warning: No `--ckpt_path`: the model has its initial weights" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
def test_fit_validate_and_predict(tmp_path, capsys):
    main(["fit", "-c", OFFLINE, *TINY, "--trainer.max_rounds", "2"])
    run = tmp_path / "runs" / "shapes" / "version_0"
    events = EventAccumulator(str(run)).Reload()
    scores = events.Scalars("val_miou")
    assert [score.step for score in scores] == [1, 3]  # the last batch of each round, two batches per round
    assert [event.step for event in events.Scalars("fed/drift")] == [1, 3]
    assert {(event.step, event.value) for event in events.Scalars("epoch")} == {(1, 0), (3, 1)}
    assert len(events.Images("segmentation/input_truth_prediction")) == 1

    checkpoint = run / "checkpoints" / "last.ckpt"
    capsys.readouterr()
    main(["validate", "-c", OFFLINE, *TINY, "--ckpt_path", str(checkpoint)])
    said = capsys.readouterr()
    printed = re.search(r"val_miou\W+([\d.]+)", said.out)
    assert float(printed[1]) == pytest.approx(scores[-1].value)
    assert "No `--ckpt_path`" not in said.err

    main(["predict", "-c", OFFLINE, *TINY, "--ckpt_path", str(checkpoint), "--trainer.logger", "false"])
    said = capsys.readouterr().out
    assert f"Saved the predictions of 1 batches: {tmp_path / 'predictions.pt'}" in said
    (masks,) = torch.load(tmp_path / "predictions.pt", weights_only=True)
    assert masks.shape == (4, 16, 16)
    assert masks.dtype == torch.int64

    # Resumes at the last round; the configuration next to the logs is complete.
    main(["fit", "-c", str(run / "config.yaml"), "--trainer.max_rounds", "3", "--ckpt_path", str(checkpoint)])
    resumed = EventAccumulator(str(run.with_name("version_2"))).Reload()
    assert [event.step for event in resumed.Scalars("val_miou")] == [5]  # the last batch of three rounds
    before, after = (
        yaml.safe_load((folder / "config.yaml").read_text()) for folder in (run, run.with_name("version_2"))
    )
    changed = {"max_rounds": 3}
    assert after["trainer"] == before["trainer"] | changed
    assert after["model"] == before["model"]
    assert after["data"] == before["data"]


# YAML and command-line syntax


def test_methods_by_name_and_by_class():
    assert type(federation_of("--trainer.method", "scaffold").server.rule) is METHODS["scaffold"]
    assert type(federation_of("--trainer.method", "{class_path: FairAvg}").method) is FairAvg
    (fedprox,) = federation_of("--trainer.method", "{class_path: FedProx, init_args: {mu: 0.3}}").method.callbacks
    assert (type(fedprox), fedprox.mu) == (ProximalTerm, 0.3)
    nested = "{class_path: FedPer, init_args: {head: head, aggregator: {class_path: FedAvgM, init_args: {lr: 0.5}}}}"
    for text in (nested, "fedbn:aggregator=fedavgm", "{class_path: FedBN, init_args: {aggregator: fedavgm}}"):
        (step,) = federation_of("--trainer.method", text).server.chain.steps
        assert step.optimizer_kwargs["lr"] == (0.5 if text == nested else 1.0)
    robust = federation_of("--trainer.method", "trimmed_mean:num_malicious=2").server.rule
    assert isinstance(robust, RobustAggregator)


def test_update_steps_by_class():
    """In the given order, after the method's steps."""
    given = (
        "[UniformWeights, {class_path: MaxNorm, init_args: {bound: 2.0}},"
        " {class_path: ServerOptimizer, init_args: {optimizer: torch.optim.Adam}, dict_kwargs: {lr: 0.5}}]"
    )
    federation = federation_of("--trainer.method", "fedavgm", "--trainer.steps", given)
    momentum, weights, bound, step = federation.server.chain.steps
    assert (type(momentum), type(weights)) == (ServerOptimizer, UniformWeights)
    assert (type(bound), bound.bound) == (MaxNorm, 2.0)
    assert (step.optimizer, step.optimizer_kwargs) == (torch.optim.Adam, {"lr": 0.5})
    given = "[NearestNeighborMixing, {class_path: ALIE, init_args: {clients: 2}}]"
    federation = federation_of("--trainer.method", "krum", "--trainer.steps", given)
    assert [type(step) for step in federation.server.chain.steps] == [NearestNeighborMixing, ALIE]
    given = (
        "[{class_path: ServerOptimizer, init_args: {optimizer: Adam}}, {class_path: Quantized, init_args: {bits: 4}}]"
    )
    step, quantized = federation_of("--trainer.steps", given).server.chain.steps
    assert (step.optimizer, quantized.bits) == (torch.optim.Adam, 4)


def test_subclasses_are_looked_for_once_until_something_is_imported(monkeypatch, tmp_path):
    find = _typehints.get_all_subclass_paths
    name = "a_module_with_a_partition"
    (tmp_path / f"{name}.py").write_text("from lightning_fed.data import IID\n\nclass Halves(IID):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with remembered_subclasses():
        before = _typehints.get_all_subclass_paths(Partition)
        assert _typehints.get_all_subclass_paths(Partition) is before
        assert before == find(Partition)
        assert f"{name}.Halves" not in before
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
        assert f"{name}.Halves" in _typehints.get_all_subclass_paths(Partition)
        assert _typehints.get_all_subclass_paths(Partition, include_abstract=True) == find(Partition, True)
    assert _typehints.get_all_subclass_paths is find


def test_a_recipe_looks_for_few_subclasses(monkeypatch):
    calls = []
    find = _typehints.get_all_subclass_paths
    monkeypatch.setattr(
        _typehints, "get_all_subclass_paths", lambda *args, **kw: calls.append(args) or find(*args, **kw)
    )
    build("-c", OFFLINE)
    assert 1 <= len(calls) <= 20  # a hundred without `remembered_subclasses`


def test_a_protection_of_the_clients():
    given = "[{class_path: CentralDP, init_args: {clip: 1.0, delta: 0.001, noise_multiplier: 1.0}}]"
    federation = federation_of("--trainer.steps", given, "--trainer.method", "fedadam")
    assert [type(step) for step in federation.server.chain.steps] == [ServerOptimizer, CentralDP]
    compared = MethodChoice.parse("fedavgm:momentum=0.5").federation(federation)
    assert [type(step) for step in compared.server.chain.steps] == [ServerOptimizer, CentralDP]
    assert compared.server.chain.steps[0].optimizer is torch.optim.SGD
    with pytest.raises(ValueError, match="The method 'krum' cannot run: Expected "):
        MethodChoice.parse("krum").federation(federation)


def test_a_secure_sum_and_private_examples_of_a_recipe():
    dpsgd = "{class_path: DPSGD, init_args: {max_grad_norm: 1.0, noise_multiplier: 1.1, delta: 1.0e-5}}"
    given = "[UniformWeights, {class_path: SecureSum, init_args: {clip: 2.0}}]"
    weights, step = federation_of("--trainer.steps", given, "--trainer.callbacks+", dpsgd).server.chain.steps
    assert (type(weights), type(step), step.clip) == (UniformWeights, SecureSum, 2.0)


def test_another_partition_than_the_recipes():
    partition = federation_of("--trainer.partition", "Shards", "--trainer.partition.num_clients", "5").partition
    assert type(partition) is Shards
    assert partition.num_clients == 5


def test_methods_with_callbacks_and_settings():
    epochs = ("--trainer.local_epochs", "1", "--trainer.method")
    fedrep = federation_of(*epochs, "{class_path: FedRep, init_args: {body_epochs: 5}}")
    assert fedrep.schedule.local_epochs == 15
    assert [type(callback) for callback in fedrep.method.callbacks] == [HeadThenBody]
    federation = federation_of(
        *("--trainer.method", "{class_path: lightning_fed.algorithms.FedPer, init_args: {head: 'model.head.*'}}"),
        *("--trainer.clients_per_round", "3"),
    )
    assert federation.options.personal == ("model.head.*",)
    assert federation.schedule.clients_per_round == 3
    federation = federation_of("--trainer.method", "FedSS", "--trainer.method.num_negatives", "7")
    assert federation.method.callbacks[0].num_negatives == 7


OBJECTS = [  # options of one command line, and the resulting objects
    (
        {"batch_norm": "average", "faults.visit_timeout": "60"},
        {"batch_norm": "average", "faults": Faults(visit_timeout=60.0)},
    ),
    (
        {"batch_norm": "LocalStatistics", "visits": "{class_path: Vectorized, init_args: {clients: 8}}"},
        {"batch_norm": LocalStatistics(), "visits": Vectorized(8)},
    ),
    (
        {"batch_norm": "{unseen: pooled}", "availability.stragglers": "0.5"},
        {"batch_norm": LocalStatistics("pooled"), "availability": Availability(stragglers=0.5)},
    ),
    (
        {"batch_norm": "{after: 3}", "availability": "{stragglers: 0.5, partial_work: drop}"},
        {"batch_norm": FixedStatistics(3), "availability": Availability(stragglers=0.5, partial_work="drop")},
    ),
]


@pytest.mark.parametrize(("written", "made"), quick(OBJECTS, OBJECTS[1:3]))
def test_options_that_are_objects(written, made):
    given = (part for name, value in written.items() for part in (f"--trainer.{name}", value))
    options = federation_of(*given).options
    assert {name: getattr(options, name) for name in made} == made


def test_personal_entries_by_pattern_and_by_type():
    assert federation_of("--trainer.personal", "['model.head.*', torch.nn.BatchNorm2d]").options.personal == (
        "model.head.*",
        torch.nn.BatchNorm2d,
    )


SELECTORS = {
    # The options of a recipe's Trainer, and the personal entries.
    "options": ("{personal: [torch.nn.BatchNorm2d, 'head.*']}", (torch.nn.BatchNorm2d, "head.*")),
    "federation": (
        "{federation: {class_path: lightning_fed.Federation, init_args: {personal: ['a.b', torch.nn.GroupNorm]}}}",
        ("a.b", torch.nn.GroupNorm),
    ),
    "method with a type": (
        "{method: {class_path: FedPer, init_args: {head: torch.nn.Linear}}}",
        (torch.nn.Linear,),
    ),
    "method with a pattern": (
        "{method: {class_path: lightning_fed.algorithms.FedPer, init_args: {head: head.weight}}}", ("head.weight",)
    ),
    "method with both": (
        "{federation: {class_path: Federation, init_args: {method: {class_path: FedPer,"
        " init_args: {head: [torch.nn.Linear, 'head.*']}}}}}",
        (torch.nn.Linear, "head.*"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(SELECTORS, ["options", "federation", "method with both"]))
def test_selectors_in_a_recipe(name, tmp_path):
    trainer, expected = SELECTORS[name]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {class_path: ClassificationTask, init_args: {model: mlp, num_classes: 6}}\n"
        f"data: {{class_path: Shapes, init_args: {{num_train: 20}}}}\ntrainer: {trainer}\n"
    )
    assert build("-c", str(recipe)).trainer.federation.options.personal == expected


def test_a_store_by_its_folder(tmp_path):
    assert type(federation_of("--trainer.store", "clients").store) is FolderStore


def test_arguments_of_the_lightning_trainer():
    trainer = build(
        *("-c", OFFLINE, "--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val_miou"),
        *("--trainer.gradient_clip_val", "1.5", "--trainer.enable_progress_bar", "false"),
    ).trainer
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert {"Federation", "EarlyStopping", "ModelCheckpoint", "SaveConfigCallback"} <= set(names)
    assert "FederatedProgressBar" not in names
    assert trainer.gradient_clip_val == 1.5


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test_cli.py").write_text(
        "import lightning as L\n\nclass Mine(L.LightningModule):\n    def __init__(self, width: int):\n"
        "        super().__init__()\n        self.width = width\n"
    )
    seen = []
    monkeypatch.setattr(FederatedTrainer, "fit", lambda self, model, **options: seen.append(model))
    main(["fit", "-c", OFFLINE, "--model", "mine_for_test_cli.Mine", "--model.width", "3"])
    assert type(seen[0]).__name__ == "Mine"
    assert seen[0].width == 3


# Usage errors


MISTAKES = [
    (["--trainer.method", "fedag"], 2, "but got 'fedag'. Did you mean 'fedavg'?"),
    (["--trainer.partition.alpha", "-1"], 2, "Expected `alpha` to be greater than 0, but got -1"),
    (["--trainer.rounds", "3"], 2, "trainer.rounds"),
    (["--trainer.partition", "null"], 1, "Expected either a `partition` that splits the training data"),
]
MISTAKES_OF_THE_SAME_KINDS = [
    (["--trainer.personal", "[nothing.*]"], 1, "Expected every selector in `personal` to match entries of the"),
    (
        ["--data", "CamVid", "--data.data_dir", "nowhere"],
        1,
        "Expected `camvid/camvid_240x180.npz` or `camvid_240x180.npz` or `CamVid` under `data_dir`",
    ),
    (["--trainer.batch_norm", "averge"], 2, "Given value: averge"),
    (["--trainer.partition", "Dirichle"], 2, "Dirichle"),
    (["--trainer.clients_per_round", "100"], 1, "at most the number of clients (12), but got 100"),
    (
        ["--trainer.partition.num_clients", "1000"],
        1,
        "`num_clients` to be at most the number of samples (160), but",
    ),
    (["--trainer.local_epochs", "two"], 2, 'Parser key "trainer.local_epochs"'),
    (["--data.image_size", "3"], 2, "Expected `image_size` to be at least 16, but got 3"),
    (["--trainer.clients_per_round", "0"], 2, "Expected `clients_per_round` to be at least 1, but got 0"),
    (["--trainer.partition.alpha", "x"], 2, "Expected a <class 'float'>. Got value: x"),
    (["--trainer.max_epochs", "3"], 2, "Expected one of `max_rounds` and `max_epochs`"),
    (["--model.lr", "fast"], 2, "Got value: fast"),
    (["--model.optimizer", "SDG"], 2, "Expected `optimizer` to be one of"),
    (["--trainer.local_steps", "0"], 2, "Expected `local_steps` to be at least 1, but got 0"),
    (["--trainer.faults.min_clients", "0"], 2, "Expected `min_clients` to be at least 1, but got 0"),
    (["--trainer.availability.straglers", "0.5"], 2, "Option 'straglers' is not accepted"),
    (["--trainer.faults.min_clients", "5"], 1, "`min_clients` to be at most the number of clients in a round (4), but"),
]


@pytest.mark.parametrize(("arguments", "status", "message"), [*MISTAKES, *map(slow, MISTAKES_OF_THE_SAME_KINDS)])
def test_a_mistake_gets_a_short_answer(arguments, status, message, few, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "-c", few, *arguments])
    assert stopped.value.code == status
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 20


def test_tracebacks_come_back_with_the_switch(few, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(FileNotFoundError):
        main(["fit", "-c", few, "--data", "CamVid", "--data.data_dir", "nowhere"])
    with pytest.raises(OptionError):
        main(["fit", "-c", few, "--trainer.clients_per_round", "100"])


def test_errors_of_the_users_own_code_keep_their_traceback(few, tmp_path):
    (tmp_path / "broken_for_test_cli.py").write_text(
        "from lightning_fed.data import Partition\n\nclass Broken(Partition):\n    def split(self, dataset, seed):\n"
        "        raise ValueError('a bug of mine')\n"
    )
    with pytest.raises(ValueError, match="a bug of mine"):
        main(["fit", "-c", few, "--trainer.partition", "broken_for_test_cli.Broken"])


def test_a_recipe_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "-c", "nowhere.yaml"])
    assert stopped.value.code == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_a_report_of_the_clients(tmp_path, capsys):
    """For a partition, and for data with clients; without training and without further output."""
    options = ["--", "--data.num_train", "24", "--data.image_size", "16", "--trainer.partition.num_clients", "3"]
    main(["data", OFFLINE, "--out", str(tmp_path / "clients.png"), *options, "--trainer.partition.min_size", "2"])
    said = capsys.readouterr().out
    rows = [line.split()[:2] for line in said.splitlines() if re.match(r" *\d", line)][:3]
    assert [client for client, _ in rows] == ["0", "1", "2"]
    assert sum(int(examples) for _, examples in rows) == 24
    assert re.search(r"^client +background +disc", said, re.M)
    assert (tmp_path / "clients.png").stat().st_size > 1000
    looks = str(ROOT / "recipes" / "shapes_looks.yaml")
    main(["data", looks, "--", "--data.source.init_args.num_train", "30", "--data.source.init_args.image_size", "16"])
    header, _, *rows = capsys.readouterr().out.splitlines()[:8]
    end = header.index("brightness") + len("brightness")
    assert len({line[:end].split()[-1] for line in rows}) == 6


def test_a_report_without_clients(few, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["data", few, "--", "--trainer.partition", "null"])
    assert stopped.value.code == 1
    assert "Expected `data` to contain clients" in capsys.readouterr().err


# Program


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help(arguments, capsys):
    main(arguments)
    said = capsys.readouterr().out
    assert len(said.splitlines()) < 40
    for command in ("demo", "fit", "validate", "test", "predict"):
        assert re.search(rf"^  {command} ", said, re.MULTILINE)
    recipes = re.findall(r"lightning-fed recipes (\w+) >", said)
    assert recipes
    assert all((ROOT / "recipes" / f"{recipe}.yaml").is_file() for recipe in recipes)


def test_recipes_are_listed_and_printed(capsys):
    main(["recipes"])
    said = capsys.readouterr().out
    assert re.findall(r"^(\w+)$", said, re.MULTILINE) == [recipe.stem for recipe in RECIPES]
    assert "synthetic\n    Synthetic(1,1) of the FedProx paper with a small MLP: 30 clients" in said
    for recipe in RECIPES:
        main(["recipes", recipe.stem])
        assert capsys.readouterr().out == recipe.read_text()
    with pytest.raises(SystemExit) as stopped:
        main(["recipes", "shapes_deplab"])
    assert stopped.value.code == 2
    assert "but got 'shapes_deplab'. Did you mean 'shapes_deeplab'?" in capsys.readouterr().err


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"lightning-fed {lightning_fed.__version__}\n"


def test_an_unknown_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train"])
    assert stopped.value.code == 2
    known = [
        "demo",
        "compare",
        "study",
        "data",
        "methods",
        "privacy",
        "merge",
        "adapt",
        "flower",
        "nvflare",
        "audit",
        "recipes",
        "doctor",
        "rehearse",
        "replay",
        "certify",
    ]
    known += ["fit", "validate", "test", "predict"]
    assert f"{known}, but got 'train'" in capsys.readouterr().err


def test_help_of_a_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: lightning-fed fit -c RECIPE [options]\n")
    for option in ("--trainer.max_rounds", "--trainer.partition", "--trainer.precision", "--ckpt_path"):
        assert option in said


def test_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning_fed", "--version"])
    runpy.run_module("lightning_fed", run_name="__main__")
    assert capsys.readouterr().out == f"lightning-fed {lightning_fed.__version__}\n"
