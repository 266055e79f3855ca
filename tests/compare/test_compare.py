"""`lightning-fed compare`: equal rounds for all methods, files independent of interruptions, correct tables.

The recipes come from `compare_script.py`.
"""

import copy
import csv
import json
import math
import re
import shutil
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from lightning_fed import Availability, Faults, FederatedDataModule, FixedStatistics, LocalStatistics
from lightning_fed.algorithms import METHODS as ALL_METHODS
from lightning_fed.algorithms import RobustAggregator
from lightning_fed.callbacks import ClassPrototypes, Federation
from lightning_fed.cli.main import main
from lightning_fed.compare import (
    CENTRAL,
    MethodChoice,
    Plan,
    Progress,
    load_results,
    markdown,
    method_choices,
    report,
    run_comparison,
    summarize,
    write_report,
)
from lightning_fed.compare.central import central_trainer
from lightning_fed.datasets import Synthetic
from lightning_fed.recipe import FederatedCLI
from lightning_fed.report.terminal import draw_tables
from lightning_fed.tasks import ClassificationTask
from tests import models, warm_process
from tests.breadth import quick, slow
from tests.compare.compare_script import CLIENTS, OWN, Interruption, Notes
from tests.conftest import QUIET
from tests.generators import same_random_numbers

ROOT = Path(__file__).resolve().parents[2]
MANY_CLASSES = ("fedaws", "fedss")  # need a special head
ALIKE_HERE = [  # robust rules are covered by one rule
    name for name, rule in ALL_METHODS.items() if issubclass(rule, RobustAggregator) and name != "trimmedmean"
]
WITH_OPTIONS = ("fixbn",)  # options without a default
OF_EACH_MECHANISM = ("fedavg", "ditto", "fedfusion", "fedma", "fesem")
ASYNCHRONOUS = ("fedasync", "fedbuff")  # refuse `availability`
LEFT_OUT = (CENTRAL, *MANY_CLASSES, *WITH_OPTIONS, *ALIKE_HERE, *ASYNCHRONOUS)
METHODS = [name for name in method_choices() if name not in LEFT_OUT]

# Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
pytestmark = [
    pytest.mark.usefixtures("subclasses_are_remembered", "no_recipe_in_checkpoints"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Skips a report's picture, which takes as long as a run, unless a test uses the fixture ``pictures``."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(report, "draw", lambda *args: None)


@pytest.fixture(scope="module")
def pictures():
    pass


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("JSONARGPARSE_DEBUG", raising=False)
    monkeypatch.setattr(Notes, "fits", [])
    monkeypatch.setattr(Notes, "place", None)
    for name, text in (("own.yaml", OWN), ("clients.yaml", CLIENTS)):
        (tmp_path / name).write_text(text)


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collection():
    """Runs of a comparison end without a garbage collection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fed.compare.plan.gc", SimpleNamespace(collect=lambda: 0))
        yield


def compare(*arguments):
    main(["compare", *map(str, arguments)])


@contextmanager
def shared_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    for name, text in (("own.yaml", OWN), ("clients.yaml", CLIENTS)):
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch, same_random_numbers():
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["lightning-fed"])
        patch.setattr(Notes, "fits", [])
        patch.setattr(Notes, "place", None)
        patch.setattr(report, "draw", lambda *args: None)
        yield folder


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def rows(path):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in read_csv(path)]


def files(out):
    table = (out / "summary.md").read_text()
    return {
        "names": sorted(str(path.relative_to(out)) for path in out.rglob("*") if "events.out" not in path.name),
        "rounds": rows(out / "rounds.csv"),
        "summary": rows(out / "summary.csv"),
        "table": re.sub(r"[\d.]+ \| [\d.]+ \|$", "", table, flags=re.M),
    }, {path.parent.name: weights(path) for path in out.glob("runs/*/last.ckpt")}


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def result(out, run):
    return json.loads((out / "runs" / run / "result.json").read_text())


TWO_ROUNDS = ("--", "--trainer.max_rounds", "2")

# --- Equal rounds -----------------------------------------------------------------------------------------------------


def same_rounds(fit, other):
    """Whether two fits have the same visits (client, epochs, seed, stragglers), amounts of work and partition."""
    assert fit["visits"] == other["visits"]
    assert fit["clients"].keys() == other["clients"].keys() != set()
    return all(np.array_equal(indices, other["clients"][client]) for client, indices in fit["clients"].items())


@pytest.mark.parametrize("methods", quick([OF_EACH_MECHANISM, METHODS], [OF_EACH_MECHANISM]), ids=len)
def test_all_methods_see_the_same(methods):
    """Compares initial weights, partition, cohorts, stragglers, seeds and amounts of work."""
    compare("own.yaml", "--methods", *methods, "--stragglers", "0.7", "--out", "out", *TWO_ROUNDS)
    fits = dict(zip(methods, Notes.fits, strict=True))
    first = fits["fedavg"]
    assert len(fits) > 4
    assert len(first["visits"]) > 4
    for method, other in fits.items():
        own = {name for name in other["state"] if name.startswith("feature_fusion.")}  # FedFusion's operator
        assert_same({name: other["state"][name] for name in other["state"].keys() - own}, first["state"])
        if method in ("fedma", "pfnm"):  # a pass through the layers has constant clients
            continue
        if method == "ditto":  # visits repeat all epochs for the personal models
            assert [(visit.round, visit.client) for visit, *_ in other["visits"]] == [
                (visit.round, visit.client) for visit, *_ in first["visits"]
            ]
            continue
        assert same_rounds(other, first), method


def test_what_seeds_and_stragglers_change(tmp_path):
    compare("own.yaml", "--methods", "fedavg", "--seeds", 2, "--stragglers", "0,0.7", "--out", "out", *TWO_ROUNDS)
    names = {run.name for run in (tmp_path / "out" / "runs").iterdir()}
    assert names == {f"fedavg_{part}_{seed}" for part in ("0", "0.7") for seed in (0, 1)}
    fits = {(seed, part): Notes.fits.pop(0) for seed in (0, 1) for part in (0.0, 0.7)}
    cohorts = {key: [(visit.round, visit.client) for visit, *_ in fit["visits"]] for key, fit in fits.items()}
    assert cohorts[0, 0.0] == cohorts[0, 0.7] != cohorts[1, 0.0] == cohorts[1, 0.7]
    assert_same(fits[0, 0.0]["state"], fits[0, 0.7]["state"])
    assert not torch.equal(fits[0, 0.0]["state"]["head.weight"], fits[1, 0.0]["state"]["head.weight"])
    split, another = fits[0, 0.0]["clients"], fits[1, 0.0]["clients"]
    assert any(not np.array_equal(indices, another.get(client)) for client, indices in split.items())
    stragglers = {key: sum(visit.is_straggler for visit, *_ in fit["visits"]) for key, fit in fits.items()}
    assert stragglers[0, 0.0] == stragglers[1, 0.0] == 0
    assert min(stragglers[0, 0.7], stragglers[1, 0.7]) >= 3  # 2 of 3 in each of 2 rounds, except for a dropout


@pytest.mark.parametrize("stragglers", quick(["", "    stragglers: 0.5\n"], ["    stragglers: 0.5\n"]))
def test_fedavg_is_the_recipe_itself(stragglers, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(OWN.replace("    client_dropout", f"{stragglers}    client_dropout"))
    main(["fit", "-c", "own.yaml", "--trainer.enable_progress_bar", "false", "--trainer.logger", "false"])
    compare("own.yaml", "--methods", "fedavg", "--out", "out")
    fit, compared = Notes.fits
    assert_same(compared["state"], fit["state"])
    (run,) = (tmp_path / "out" / "runs").iterdir()
    assert run.name == ("fedavg_0.5_0" if stragglers else "fedavg_0_0")
    assert_same(weights(run / "last.ckpt"), weights(tmp_path / "checkpoints" / "epoch=2.ckpt"))
    assert compared["logged"] == fit["logged"]
    logged = [{name: value for name, value in values.items() if name != "step"} for values in fit["logged"]]
    rounds = result(tmp_path / "out", run.name)["rounds"]
    assert [{name: v for name, v in values.items() if "seconds" not in name} for values in rounds] == logged


@pytest.mark.slow
def test_the_recipes_other_options_are_every_methods():
    """Even if one client per round (1) equals all clients (1.0), the default."""
    arguments = [
        "--trainer.clients_per_round",
        "1",
        "--trainer.optimizer_state",
        "keep",
        "--trainer.availability.client_dropout",
        "0",
    ]
    refuse = ("fedma", "pfnm", "fednova")  # refuse stored optimizer state; FedNova refuses stored momentum
    methods = [name for name in METHODS if name not in refuse]
    compare("own.yaml", "--methods", *methods, "--out", "out", "--", *arguments, "--trainer.max_rounds", "2")
    assert [len(fit["visits"]) for fit in Notes.fits] == [2] * len(methods)


WORK = {  # one round of `OWN`, in passes over the pooled data
    1: ("--trainer.local_epochs", 2, "--trainer.clients_per_round", 3),
    1 / 3: ("--trainer.local_epochs", 1, "--trainer.clients_per_round", 0.3),
    3: ("--trainer.local_epochs", 6, "--trainer.clients_per_round", 3),
    1.5: ("--trainer.local_epochs", 3, "--trainer.clients_per_round", 3),
}
ALIKE = ("--trainer.partition", "IID", "--trainer.partition.num_clients", 6, "--trainer.availability.client_dropout", 0)


@pytest.mark.parametrize("passes", quick(WORK, [1.5]))
def test_a_round_of_central_is_as_long_as_a_round(passes, tmp_path):
    """Counts examples: each example comes once per pass, in a new order; frozen entries do not change."""
    frozen = ("--trainer.frozen", "['body.0.*']")
    compare("own.yaml", "--methods", "central,fedavg", "--out", "out", "--", *WORK[passes], *ALIKE, *frozen)
    central, fedavg = Notes.fits
    assert len(central["seen"]) == len(fedavg["seen"]) == 3 * 60 * passes
    whole = [central["seen"][start : start + 60] for start in range(0, len(central["seen"]) - 59, 60)]
    assert all(sorted(seen) == sorted(whole[0]) for seen in whole)
    assert len(set(map(tuple, whole))) == len(whole)
    assert len(set(central["seen"])) == 60
    assert not central["visits"]
    assert_same(central["state"], fedavg["state"])
    curve = result(tmp_path / "out", "central_0")["rounds"]
    assert len(curve) == 3
    assert len({values["val_loss"] for values in curve}) == 3
    for run in ("central_0", "fedavg_0_0"):
        state = weights(tmp_path / "out" / "runs" / run / "last.ckpt")
        changed = {name for name, value in central["state"].items() if not torch.equal(value, state[name])}
        assert not {"body.0.weight", "body.0.bias"} & changed
        assert "head.weight" in changed


SCHEDULE = """
model:
  init_args: {scheduler: CosineAnnealingLR, scheduler_kwargs: {T_max: 4}}
trainer:
  max_rounds: 3
  callbacks+:
    - class_path: EarlyStopping
      init_args: {monitor: fed/val_acc/mean, mode: max, patience: 100, check_on_train_epoch_end: false}
"""


@pytest.mark.parametrize(("epochs", "share"), quick([(3, 1.0), (3, 0.5), (1, 0.25)], [(1, 0.25)]))
def test_schedulers_of_central_count_rounds(epochs, share, tmp_path):
    """Numbers of rounds are equal, and all rounds have the monitored values."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    work = ("--trainer.local_epochs", epochs, "--trainer.clients_per_round", share)
    methods = ("--methods", "central,fedavg", "--out", "out")
    compare("clients.yaml", *methods, "--", "--config", "schedule.yaml", *work)
    central, fedavg = Notes.fits
    cosine = [0.05 * (1 + np.cos(np.pi * round / 4)) / 2 for round in range(3)]
    assert central["rates"] == fedavg["rates"] == pytest.approx(cosine)
    assert len(result(tmp_path / "out", "central_0")["rounds"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("partitioned", [False, True])
def test_data_that_ask_for_their_trainer(partitioned, tmp_path):
    partition = "{class_path: IID, init_args: {num_clients: 6}}"
    source = "tests.compare.compare_script.Attached"
    data = (
        f"{{class_path: PartitionedData, init_args: {{source: {source}, partition: {partition}}}}}"
        if partitioned
        else source
    )
    recipe = re.sub(r"  partition.*\n", "" if partitioned else f"  partition: {partition}\n", OWN)
    (tmp_path / "own.yaml").write_text(recipe.replace("tests.resume_script.Data", data))
    compare("own.yaml", "--methods", "central,fedavg", "--out", "out")
    assert len(result(tmp_path / "out", "central_0")["rounds"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1 / 3, 1.5])
def test_central_goes_on_in_the_middle_of_a_pass(passes, tmp_path):
    arguments = ("--", *WORK[passes], *ALIKE)
    compare("own.yaml", "--methods", "central", "--out", "whole", *arguments)
    Notes.place = [2, "on_train_batch_start", 1, 3]
    with pytest.raises(Interruption):
        compare("own.yaml", "--methods", "central", "--out", "out", *arguments)
    compare("own.yaml", "--methods", "central", "--out", "out", *arguments)
    whole, _, rest = Notes.fits
    assert rest["seen"] == whole["seen"][-len(rest["seen"]) :]
    assert len(rest["seen"]) == 2 * 60 * passes
    runs = [tmp_path / out / "runs" / "central_0" / "last.ckpt" for out in ("out", "whole")]
    assert_same(*map(weights, runs))


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_central_gives_back_what_it_took(ends):
    """Restores the datamodule's loader and `requires_grad` of frozen parameters."""

    class Stops(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            raise ZeroDivisionError

    cli = FederatedCLI(
        ["--config", "own.yaml", "--trainer.frozen", "['body.0.*']", "--trainer.max_rounds", "1"], run=False
    )
    before = cli.datamodule.train_dataloader
    trainer = central_trainer(cli)
    if ends == "badly":
        trainer.callbacks.append(Stops())
    with pytest.raises(ZeroDivisionError) if ends == "badly" else nullcontext():
        trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.datamodule.train_dataloader == before
    assert all(parameter.requires_grad for parameter in cli.model.parameters())


# --- Interruptions ----------------------------------------------------------------------------------------------------

ALL = ("own.yaml", "--methods", "central,fedmargin", "--stragglers", "0.5", "--out")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with shared_folder(tmp_path_factory) as folder:
        compare(*ALL, "out")
    return files(folder / "out")


@pytest.fixture
def begun(begun_once, tmp_path):
    """A comparison interrupted in the second round of the second run."""
    shutil.copytree(begun_once, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture(scope="module")
def begun_once(tmp_path_factory):
    with shared_folder(tmp_path_factory) as folder:
        Notes.place = [2, "on_train_batch_start", 1, 0]
        with pytest.raises(Interruption):
            compare("own.yaml", "--methods", "fedavg,fairavg", "--out", "out")
    return folder / "out"


PLACES = {  # fit, hook, round, batch; and the remaining rounds
    "in the first round": ([2, "on_train_batch_start", 0, 3], 3),
    "in a later round": ([2, "on_train_batch_start", 2, 3], 1),
    "of central": ([1, "on_train_batch_start", 1, 3], 2),
    "in validation": ([2, "on_validation_batch_end", 1, 0], 2),
    "at the end": ([2, "on_train_end", 3, 0], 0),
}


def assert_alike(out, whole):
    expected, expected_weights = whole
    found, found_weights = files(out)
    assert found["names"] == expected["names"]
    assert found == expected
    assert found_weights.keys() == expected_weights.keys()
    for run, state in found_weights.items():
        assert_same(state, expected_weights[run])


@pytest.mark.parametrize("where", quick(PLACES, ["in validation"]))
def test_interrupted_and_started_again(where, whole, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(FederatedCLI, "config_dump")  # with copies of the recipe in the checkpoints
    out = tmp_path / "out"
    Notes.place, left = PLACES[where]
    number = Notes.place[0]
    with pytest.raises(Interruption):
        compare(*ALL, out)
    assert "interrupted\n" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    assert len(before) == number - 1
    compare(*ALL, out)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(Notes.fits) == 2 + (left > 0)
    assert left == 0 or len(Notes.fits[number]["logged"]) == left
    assert f"{number - 1} of 2 runs: done before\n" in capsys.readouterr().out or number == 1
    assert_alike(out, whole)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.json")}
    compare(*ALL, out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.json")} == times
    assert_alike(out, whole)


@pytest.mark.slow
def test_killed_and_started_again(whole, tmp_path):
    place, left = PLACES["in a later round"]
    command = ["tests.compare.compare_script", json.dumps(place), "compare", *ALL, "out"]
    with warm_process.started(*command, cwd=tmp_path) as script:
        end = time.monotonic() + 200
        while not (tmp_path / "reached").exists() and script.process.is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        assert (tmp_path / "reached").exists(), script.errors
        assert script.process.is_alive()
    assert len(list(tmp_path.glob("out/runs/*/result.json"))) == place[0] - 1
    compare(*ALL, "out")
    assert [len(fit["logged"]) for fit in Notes.fits] == [left]
    assert_alike(tmp_path / "out", whole)


@pytest.mark.usefixtures("begun")
def test_another_recipe_in_the_same_folder(tmp_path, capsys):
    def refused(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            compare("own.yaml", "--methods", *arguments)
        assert stopped.value.code == 1
        return capsys.readouterr().err

    overrides = ("--out", "out", "--", "--trainer.max_rounds", "4")
    assert "fedavg_0_0 to contain a run of the same recipe" in refused("fedavg", *overrides)
    assert "but its run has different overrides" in refused("fairavg", *overrides)  # only the beginning exists
    (tmp_path / "own.yaml").write_text(OWN.replace("max_rounds: 3", "max_rounds: 2"))
    assert "but its run has different recipe: choose another `--out`" in refused("fedprox,fedavg", "--out", "out")
    assert not Notes.fits


# --- Output -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("own.yaml", 2, "the following arguments are required: --methods"),
        ("nowhere.yaml --methods fedavg", 2, "nowhere.yaml"),
        ("own.yaml --methods fedag", 2, "got 'fedag'. Did you mean 'fedavg'?"),
        (
            "own.yaml --methods fedavg,fedavg",
            2,
            "Expected `methods` to have at least one value and no duplicates, but got",
        ),
        ("own.yaml --methods ,", 2, "Expected `methods` to have at least one value and no duplicates, but got []"),
        ("own.yaml --methods fedavg,fedfusion:levels=[2,-1]:n=1", 2, "Expected `option of fedfusion` to be one of ['o"),
        ("own.yaml --methods fedper:head=tail.*", 1, "'tail.*' matches none of"),
        ("own.yaml --methods fedrep:body_epochs=2", 1, "Expected `head_epochs` (at least 1) and `body_epochs` to add"),
        ("own.yaml --methods fedavg --seeds 0", 2, "Expected `seeds` to have at least one value"),
        ("own.yaml --methods fedavg --stragglers 1", 2, "Expected `stragglers` to be in [0, 1), but got [1.0]"),
        ("own.yaml --methods fedavg --stragglers some", 2, "Expected numbers separated by commas, but got 'some'"),
        (
            "own.yaml --methods fedavg --target 0",
            2,
            "Expected `--last` to be at least 1 and `--target` to be in (0, 1]",
        ),
        ("own.yaml --methods fedavg --last 0", 2, "Expected `--last` to be at least 1 and `--target` to be in (0, 1]"),
        ("own.yaml --methods fedavg --mode best", 2, "argument --mode: invalid choice: 'best'"),
        ("own.yaml --methods fedavg -- --trainer.rounds 3", 2, "trainer.rounds"),
        ("own.yaml --methods fedavg -- --trainer.partition null", 1, "Expected a `partition` of the training data"),
        slow(
            ("own.yaml --methods central -- --trainer.partition null", 1, "Expected a `partition` of the training data")
        ),
        ("own.yaml --methods central -- --trainer.local_epochs 1 --trainer.local_steps 4", 1, "with `local_epochs`"),
        ("own.yaml --methods fedper -- --trainer.personal ['head.*']", 1, "Expected no `personal` for `FedPer`"),
        ("layer.yaml --methods fedavg,fedmargin:layer=head", 1, "Expected a recipe without `ClassPrototypes`, because"),
        slow(
            (
                "layer.yaml --methods fedbn:aggregator=fedmargin",
                1,
                "Expected a recipe without `ClassPrototypes`, because",
            )
        ),
        (
            "fedrep.yaml --methods fedavg",
            1,
            "Expected a recipe whose `method` sets no other options, but FedRep sets",
        ),
        (
            "plain.yaml --methods fedavg",
            1,
            "Expected `monitor`, because no ModelCheckpoint in the recipe monitors a metric",
        ),
    ],
)
def test_a_mistake_gets_a_short_answer(arguments, status, message, tmp_path, capsys):
    fedrep = "  max_rounds: 1\n  method: {class_path: FedRep, init_args: {body_epochs: 2}}\n  accelerator"
    (tmp_path / "fedrep.yaml").write_text(re.sub(r"  max_rounds(.*\n)*?  accelerator", fedrep, OWN))
    (tmp_path / "layer.yaml").write_text(OWN + "    - class_path: ClassPrototypes\n")
    (tmp_path / "plain.yaml").write_text(re.sub(r"    - class_path: ModelCheckpoint\n.*\n", "", OWN))
    with pytest.raises(SystemExit) as stopped:
        compare(*arguments.split())
    said = capsys.readouterr()
    assert message in said.err
    assert stopped.value.code == status
    assert "Traceback" not in said.err
    assert len(said.err.splitlines()) < 20
    assert not said.out  # no run has started


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedprox:nu=1", "Did you mean 'mu'?"),
        ("fedprox:mu", "Expected options as `option=value`, but got 'mu' in 'fedprox:mu'"),
        ("fedprox:mu=", "Expected options as `option=value`, but got 'mu='"),
        ("fedprox:mu=1:mu=2", "Expected each option only once, but got 'mu' again"),
        ("fedprox:mu=-1", "'fedprox:mu=-1' cannot run: Expected `mu` to be at least 0 "),
        ("fedprox:mu=much", "The method 'fedprox:mu=much' cannot run: "),
        ("fedmargin:combine=lpn", "Expected `combine` to be one of"),
        ("fedavg:availability.stragglers=0.5", "Expected `option of fedavg` to be one of"),
        ("fedavg:faults.min_clients=0", "Expected `min_clients` to be at least 1, but got 0"),
        ("central:mu=1", "Expected no options for 'central', but got ['mu']"),
        ("fedmargin:lair=body", "but got 'lair'. Did you mean 'layer'?"),
        ("fedfusion:operator=sum", "'fedfusion:operator=sum' cannot run: Expected `operator"),
        ("fedmargin:passes=some", "'fedmargin:passes=some' cannot run: Expected `passes`"),
    ],
)
def test_a_method_with_a_mistake(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MethodChoice.parse(text)


def test_a_metric_that_is_not_logged(tmp_path, capsys):
    """The first run finds the mistake before other runs start, and no result is lost."""
    both = ("own.yaml", "--methods", "fedavg,fairavg", "--out", "out", "--monitor")
    with pytest.raises(SystemExit):
        compare(*both, "val_acc", *ONE_ROUND)
    said = capsys.readouterr()
    assert "1/2 fedavg, seed 0: no val_acc, " in said.out
    assert "but 'val_acc' is not one of ['comm/down_bytes'" in said.err
    with pytest.raises(SystemExit):
        compare(*both, "fed/val_loss/mean", *ONE_ROUND)
    assert "needs validation data for every client" in capsys.readouterr().err
    assert len(Notes.fits) == 1
    compare(*both, "train_loss", "--mode", "min", *ONE_ROUND)
    assert len(Notes.fits) == 2
    assert "| method | train_loss | train_loss | MB | wall s | CPU s |" in (tmp_path / "out" / "summary.md").read_text()


@pytest.mark.slow
def test_the_terminal(tmp_path):
    """One line per run, the table, and no output from Lightning; the package's warnings remain."""
    command = ["lightning_fed", "compare", "clients.yaml", "--methods", "central,fedper", "--test"]
    output, errors = warm_process.run(*command, cwd=tmp_path)
    runs, table, note, where = re.split(r"\n\n", output.strip())
    assert re.fullmatch(
        r"1/2 central, seed 0: val_acc 0\.\d{4}, \d+ s\n2/2 fedper, seed 0: val_acc 0\.\d{4}, \d+ s",
        runs,
    )
    lines = table.splitlines()
    assert lines[0].split("  ")[0] == "method"
    assert lines[0].split()[1:] == ["val_acc", "test", "#R@80%", "train_loss", "MB", "wall", "s", "CPU", "s"]
    assert [line.split()[0] for line in lines[2:]] == ["central", "fedper"]
    assert "clients of `fedper` have personal models: use `--monitor fed/val_acc/mean`" in note
    assert where.splitlines()[0] == "Tables, curves, checkpoints and logs: runs/compare"
    assert {line[:29] for line in errors.splitlines()} == {"2 entries stay on the clients"}
    folder = tmp_path / "runs" / "compare"
    assert draw_tables((folder / "summary.md").read_text()) == f"{table}\n\n{note}\n"
    assert {path.name for path in (folder / "tensorboard").iterdir()} == {"central_0", "fedper_0_0"}


class Terminal:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_progress_on_a_terminal(tmp_path):
    terminal = Terminal()
    plan = Plan(Path("own.yaml"), [MethodChoice.parse("fedavg")], out=tmp_path / "out", overrides=[*TWO_ROUNDS[1:]])
    (run,) = run_comparison(plan, Progress(terminal))
    values = [f"val_loss {values['val_loss']:.4f}" for values in run["rounds"]]
    name, again = "1/1 fedavg, seed 0", "\r\x1b[K"
    expected = [name, *(f"{name}: round {number}/2, {value}" for number, value in enumerate(values, start=1))]
    *shown, end = terminal.text.split(again)
    assert shown == expected
    assert re.fullmatch(rf"{re.escape(name)}: {values[-1]}, \d+ s\n", end)


# --- Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_arguments_after_the_dashes(tmp_path):
    compare("own.yaml", "--methods", "fedavg", "--out", "out", "--", "--trainer.max_rounds", "1")
    assert len(result(tmp_path / "out", "fedavg_0_0")["rounds"]) == 1


@pytest.fixture(scope="module")
def with_options(tmp_path_factory):
    methods = "fedprox:mu=0,fedavg,fedprox:mu=1e1,FedAvg:batch_norm=frozen,fedper:head=head?*"
    methods += ",fedmargin:layer=body:passes=online,fedmargin:layer=body.0"
    with shared_folder(tmp_path_factory) as folder:
        compare("own.yaml", "--methods", methods, "--out", "out", *POOLED)
    return folder / "out", methods.replace("FedAvg", "fedavg").split(",")


def last_weights(out, method):
    return weights(out / "runs" / f"{re.sub('[:?*]', '_', method)}_0_0" / "last.ckpt")


def learnt(state):
    """Without running statistics: after a decision for own statistics, the global model's are unused."""
    return {name: value for name, value in state.items() if ".running_" not in name}


ONE_ROUND = ("--", "--trainer.max_rounds", "1")
POOLED = (*ONE_ROUND, "--trainer.batch_norm", "recalibrate")  # the first run needs no decision about BatchNorm


def test_options_of_methods(with_options):
    """Each method has a separate label, with the effect of the options."""
    out, methods = with_options
    fedavg = last_weights(out, "fedavg")
    assert_same(learnt(last_weights(out, "fedprox:mu=0")), learnt(fedavg))
    for other in ("fedprox:mu=1e1", "fedavg:batch_norm=frozen"):
        assert any(not torch.equal(value, fedavg[name]) for name, value in last_weights(out, other).items())
    assert [row["method"] for row in rows(out / "summary.csv")] == methods
    assert len(list(out.glob("runs/*"))) == len(methods)


def test_all_methods_have_one_treatment_of_batch_norm(tmp_path):
    """Later runs use the first decision."""
    compare("own.yaml", "--methods", "fedavg", "--out", "out", *ONE_ROUND)
    path = tmp_path / "out" / "runs" / "fedavg_0_0" / "result.json"
    found = json.loads(path.read_text())
    assert found["batch_norm_decision"] in ("own", "pooled")
    other = "own" if found["batch_norm_decision"] == "pooled" else "pooled"
    path.write_text(json.dumps(found | {"batch_norm_decision": other}))
    compare("own.yaml", "--methods", "fedavg,fairavg", "--out", "out", *ONE_ROUND)
    assert result(tmp_path / "out", "fairavg_0_0")["batch_norm_decision"] == other


def test_a_method_without_reports_decides_for_all_methods(tmp_path, capsys):
    """FedSS always has own statistics, and FedAvg without FedSS would pool."""
    (tmp_path / "own.yaml").write_text(OWN.replace("schedulers: true", "num_classes: 3"))
    methods = "fedavg,fedss:num_negatives=1"
    compare("own.yaml", "--methods", "fedavg", "--out", "alone", *ONE_ROUND)
    assert result(tmp_path / "alone", "fedavg_0_0")["batch_norm_decision"] == "pooled"
    with pytest.raises(SystemExit):
        compare("own.yaml", "--methods", methods, "--out", "alone", *ONE_ROUND)
    words = "'fedss:num_negatives=1' needs separate statistics, but finished runs have pooled statistics"
    assert words in capsys.readouterr().err
    compare("own.yaml", "--methods", methods, "--out", "both", *ONE_ROUND)
    assert result(tmp_path / "both", "fedavg_0_0")["batch_norm_decision"] == "own"


@pytest.mark.parametrize("batch_norm", quick(["auto", LocalStatistics(), FixedStatistics(1)], ["auto"]), ids=str)
def test_local_equals_a_fit_on_one_clients_data(batch_norm):
    """With BatchNorm, bit for bit, for every treatment in the recipe."""
    data, held_out = models.images({"a": 16, "b": 24}), models.images({"a": 8, "b": 8})

    def fit(federation, clients):
        torch.manual_seed(0)
        module = models.Module(models.cnn())
        trainer = L.Trainer(max_epochs=2, callbacks=[federation], **QUIET)
        parts = [{name: models.as_datasets(part)[name] for name in clients} for part in (data, held_out)]
        trainer.fit(module, datamodule=FederatedDataModule(*parts, batch_size=8))
        return federation.client_state("a")

    recipe = Federation("fedprox", local_epochs=2, seed=3, batch_norm=batch_norm)
    local = fit(MethodChoice.parse("local").federation(recipe), "ab")
    assert_same(local, fit(Federation("fedavg", local_epochs=2, seed=3, personal=["*"]), "a"))
    single = fit(Federation("fedavg", local_epochs=2, seed=3, batch_norm="average"), "a")
    assert_same({name: local[name] for name in single}, single)


def test_labels_that_look_alike_as_folders(with_options, capsys):
    with pytest.raises(SystemExit):
        compare("own.yaml", "--methods", "fedper:head=head*?", "--out", with_options[0], *POOLED)
    assert "but its run has different method" in capsys.readouterr().err


def test_values_of_options():
    choice = MethodChoice.parse("fedmargin:server_lr=5e-1:combine=lpm:size_weighting=true:faults.min_clients=2")
    assert choice.options == {"server_lr": 0.5, "combine": "lpm", "size_weighting": True, "faults.min_clients": 2}
    recipe = Federation(faults=Faults(max_failed_rounds=None), availability=Availability(stragglers=0.5))
    assert choice.federation(recipe).options.faults == Faults(min_clients=2, max_failed_rounds=None)
    dropping = MethodChoice.parse("fedavg:availability.partial_work=drop").federation(recipe)
    assert dropping.schedule.availability == Availability(stragglers=0.5, partial_work="drop")
    federation = MethodChoice.parse("fedper:head=[head.*,body.1.*]").federation(Federation())
    assert federation.options.personal == ("head.*", "body.1.*")


def test_options_of_the_callbacks_that_a_method_brings(with_options):
    """Each method has a separate callback; other methods have no callback and send no prototypes."""
    first = {row["method"]: row for row in rows(with_options[0] / "rounds.csv")}
    methods = ["fedavg", *(method for method in first if "fedmargin" in method)]
    lpm = [first[method]["clients/lpm"] for method in methods]
    assert [bool(value) for value in lpm] == [False, True, True]
    assert len(set(lpm)) == 3
    fedavg, *others = (float(first[method]["comm/up_bytes"]) for method in methods)
    assert fedavg < min(others)
    recipe = Federation(local_epochs=2)
    federation = MethodChoice.parse("fedmargin:margin=relative:layer=body:max_batches=3").federation(recipe)
    (callback,) = federation.method.callbacks
    assert isinstance(callback, ClassPrototypes)
    assert (callback.margin, callback.layer, callback.max_batches, callback.passes) == ("relative", "body", 3, "exact")
    assert not recipe.method.callbacks


def test_a_rules_callback_in_the_recipe(with_options, tmp_path):
    """A method without options uses the recipe's callback."""
    callback = "    - class_path: ClassPrototypes\n      init_args: {layer: body.0}\n"
    (tmp_path / "layer.yaml").write_text(OWN + callback)
    compare("layer.yaml", "--methods", "fedmargin", "--out", "out", *POOLED)
    expected = "fedmargin:layer=body.0"
    assert_same(learnt(last_weights(tmp_path / "out", "fedmargin")), learnt(last_weights(with_options[0], expected)))
    lpm = {row["method"]: row["clients/lpm"] for row in rows(with_options[0] / "rounds.csv")}
    assert rows(tmp_path / "out" / "rounds.csv")[0]["clients/lpm"] == lpm[expected]


def test_seeds_of_methods_are_those_of_their_runs(tmp_path):
    plan = Plan(Path("own.yaml"), [MethodChoice.parse("fesem"), MethodChoice.parse("fesem:seed=7")], seeds=[0, 3])
    for seed in plan.seeds:
        recipe = plan.build(seed).trainer.federation
        found = [method.federation(recipe).server.rule.seed for method in plan.methods]
        assert found == [seed, 7]


@pytest.mark.parametrize(
    ("text", "epochs"),
    [("fedrep", (4, 1)), ("fedrep:body_epochs=2", (3, 2)), ("fedrep:head_epochs=3", (3, 2))],
)
def test_fedrep_divides_the_recipes_epochs(text, epochs):
    federation = MethodChoice.parse(text).federation(Federation(local_epochs=5, clients_per_round=2))
    assert federation.schedule.local_epochs == 5
    assert federation.schedule.clients_per_round == 2
    assert federation.method.callbacks[0].head_epochs == epochs[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    said = []
    with shared_folder(tmp_path_factory) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "write", said.append)
        compare("clients.yaml", "--methods", "central,fedavg,fedper,fesem", "--out", "out")
    return folder / "out", "".join(said)


def test_clients_with_models_of_their_own(trained, tmp_path, capsys):
    """With validation data per client, all methods are compared by the mean over clients, even the central method."""
    methods, (out, said) = "central,fedavg,fedper,fesem", trained
    assert "clients of `fedper`, `fesem` have personal models" in said
    shutil.copytree(out, "out")
    compare("clients.yaml", "--methods", methods, "--out", "out", "--monitor", "fed/val_acc/mean")
    said = capsys.readouterr().out
    assert re.match(r"4 of 4 runs: done before\n\nmethod +fed/val_acc/mean +#R@80%", said)
    assert "personal models" not in said
    assert not Notes.fits
    found = {row["method"]: float(row["fed/val_acc/mean"]) for row in rows(tmp_path / "out" / "summary.csv")}
    assert list(found) == methods.split(",")
    runs = {"central": "central_0", "fedavg": "fedavg_0_0", "fedper": "fedper_0_0"}
    for method, run in runs.items():
        expected = scores(tmp_path / "out" / "runs" / run, Synthetic(num_clients=4, seed=10).val)
        assert found[method] == pytest.approx(expected[1])


def scores(run, clients):
    """Accuracy on some data per client: the global model's on all data, and the mean over personal models."""
    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    store = checkpoint["callbacks"].get("Federation", {}).get("store", {})
    own = dict(zip(store.get("clients", []), store.get("states", []), strict=True))
    means, right = [], []
    for client, part in clients.items():
        task = ClassificationTask("mlp", 10, 60, 1, model_kwargs={"hidden": [8]})
        task.load_state_dict(checkpoint["state_dict"])
        right += (task(part.tensors[0]).argmax(1) == part.tensors[1]).tolist()
        task.load_state_dict({**checkpoint["state_dict"], **own.get(client, {})})
        means.append(float((task(part.tensors[0]).argmax(1) == part.tensors[1]).float().mean()))
    return np.mean(right), np.mean(means)


def test_data_that_are_drawn_for_every_seed():
    """An override with the run's seed; without the override all seeds share the data."""
    plan = Plan(Path("clients.yaml"), [MethodChoice.parse("fedavg")], overrides=["--data.seed", "{seed}"])
    for seed in (10, 11):
        expected = Synthetic(num_clients=4, seed=seed).clients[0]
        assert torch.equal(plan.build(seed).datamodule.clients[0][0][0], expected[0][0])


def test_test_data_are_asked_for_afterwards(trained, tmp_path):
    """Finished models are evaluated without training, including personal models."""
    methods, out = "central,fedavg,fedper", tmp_path / "out"
    shutil.copytree(trained[0], out)
    assert not result(out, "fedavg_0_0")["test"]
    compare("clients.yaml", "--methods", methods, "--out", "out", "--test")
    first = {row["method"]: float(row["test"]) for row in rows(out / "summary.csv")}
    compare("clients.yaml", "--methods", methods, "--out", "out", "--monitor", "fed/val_acc/mean")
    second = {row["method"]: float(row["test"]) for row in rows(out / "summary.csv")}
    assert not Notes.fits
    for method, run in (("central", "central_0"), ("fedavg", "fedavg_0_0"), ("fedper", "fedper_0_0")):
        expected = scores(out / "runs" / run, Synthetic(num_clients=4, seed=10).test)
        assert [first[method], second[method]] == pytest.approx(expected)
        assert result(out, run)["test"]["test_acc"] == first[method]
    assert first["fedper"] != second["fedper"]


@pytest.mark.slow
def test_models_of_groups_on_the_test_data(tmp_path):
    """All centres on all test data, weighted by the examples of their clients."""
    arguments = ("clients.yaml", "--methods", "fesem:num_centers=2", "--out", "out", "--test")
    compare(*arguments, "--monitor", "fesem/val_acc")
    (row,) = rows(tmp_path / "out" / "summary.csv")
    (run,) = (tmp_path / "out" / "runs").iterdir()
    rule = torch.load(run / "last.ckpt", weights_only=True)["callbacks"]["Federation"]["chain"]["rule"]
    for name, parts in (("fesem/val_acc", "val"), ("test", "test")):
        clients = getattr(Synthetic(num_clients=4, seed=10), parts).values()
        inputs, labels = (torch.cat([part.tensors[place] for part in clients]) for place in (0, 1))
        expected = 0.0
        for place, center in enumerate(rule["centers"]):
            size = sum(n for n, at in zip(rule["num_samples"], rule["assignments"], strict=True) if at == place)
            task = ClassificationTask("mlp", 10, 60, 1, model_kwargs={"hidden": [8]})
            task.load_state_dict(center)
            right = (task(inputs).argmax(1) == labels).float().mean()
            expected += float(right) * size / sum(rule["num_samples"])
        assert float(row[name]) == pytest.approx(expected)


def test_results_that_are_there(begun, tmp_path):
    plan = Plan(Path("own.yaml"), [MethodChoice.parse(name) for name in ("fedavg", "fairavg")], out=begun)
    assert load_results(replace(plan, out=tmp_path / "none")) == []
    (found,) = load_results(plan)
    assert (found["method"], found["monitor"], found["mode"]) == ("fedavg", "val_loss", "min")
    assert load_results(replace(plan, monitor="train_loss"))[0]["mode"] == "min"  # by the name


# --- Report -----------------------------------------------------------------------------------------------------------


OF_CLIENTS = ("client/a/acc", "fedmargin/lpm/a", "fedmargin/apm/b/c", "fedmargin/attention/a")
OF_MODELS = ("val/seg/iou", "fesem/clients/0", "fed/acc/mean", "fedmargin/amm")


def made_up(mode="max", seeds=3):
    rng = np.random.default_rng(0)
    results = []
    for seed in range(seeds):
        for method in ("central", "fedavg", "fedmargin"):
            for part in (None,) if method == "central" else (0.0, 0.5):
                rounds = []
                for number in range(1, 7):
                    score = 1 - np.exp(-number / 3) + 0.05 * rng.normal() + (0.3 if method == "central" else 0)
                    up, down = (int(value) for value in rng.integers(1, 10**6, 2))
                    values = {"acc": score if mode == "max" else 1 / score, "train_loss": float(rng.random())}
                    values |= {"cpu_seconds": float(rng.random()), "seconds": float(rng.random())}
                    if method != "central":
                        before = rounds[-1] if rounds else {"comm/total_up_bytes": 0.0, "comm/total_down_bytes": 0.0}
                        values |= {"comm/up_bytes": up, "comm/down_bytes": down}
                        values |= {name: float(rng.random()) for name in (*OF_CLIENTS, *OF_MODELS)}
                        values["comm/total_up_bytes"] = before["comm/total_up_bytes"] + up
                        values["comm/total_down_bytes"] = before["comm/total_down_bytes"] + down
                    rounds.append(values)
                results.append(
                    {"method": method, "seed": seed, "stragglers": part, "monitor": "acc", "mode": mode}
                    | {"rounds": rounds, "test": {}, "has_own_models": False}
                )
    return results


@pytest.mark.usefixtures("pictures")
def test_the_numbers_in_the_curves(monkeypatch, tmp_path):
    """With all runs; without a central run; with more methods than colours; with rounds without the value."""
    figures = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: figures.append(figure))
    report.draw(made_up(), tmp_path / "all.png", 0.8, 3)
    for axes, part in zip(figures.pop().axes, (0.0, 0.5), strict=True):
        *curves, central, goal = axes.lines
        for line, band, method in zip(curves, axes.collections, ("fedavg", "fedmargin"), strict=True):
            runs = [run for run in made_up() if (run["method"], run["stragglers"]) == (method, part)]
            scores = np.array([[values["acc"] for values in run["rounds"]] for run in runs])
            assert list(line.get_xdata()) == [1, 2, 3, 4, 5, 6]
            assert line.get_ydata() == pytest.approx(scores.mean(0))
            corners = {(round(x), y) for x, y in band.get_paths()[0].vertices.tolist()}
            assert corners == set(zip([*range(1, 7)] * 2, [*scores.min(0), *scores.max(0)], strict=True))
        ends = [[values["acc"] for values in run["rounds"]][-3:] for run in made_up() if run["method"] == "central"]
        assert central.get_ydata() == pytest.approx([np.mean(ends)] * 2)
        assert goal.get_ydata() == pytest.approx([0.8 * np.mean(ends)] * 2)
    federated = [run for run in made_up() if run["method"] != "central"]
    report.draw(federated, tmp_path / "a.png", 0.8, 3)
    many = [{**run, "method": f"{run['method']} {copy}"} for run in federated for copy in range(12)]
    report.draw(many, tmp_path / "b.png", 0.8, 3)
    for run in federated:
        del run["rounds"][2]["acc"]
    report.draw(federated, tmp_path / "c.png", 0.8, 3)
    without, with_many, with_gaps = ([line for line in figure.axes[0].lines] for figure in figures)
    assert [line.get_label() for line in without] == ["fedavg", "fedmargin"]
    looks = [(line.get_color(), line.get_linestyle()) for line in with_many if line.get_label().startswith("fed")]
    assert len(set(looks)) == 24  # no two curves look the same
    assert [int(math.isnan(value)) for value in with_gaps[0].get_ydata()] == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("last", [1, 3])
def test_the_numbers_of_the_summary(mode, last, tmp_path):
    results = made_up(mode)
    write_report(results, tmp_path, 0.7, last)
    table = {(row["method"], row["stragglers"]): row for row in read_csv(tmp_path / "summary.csv")}
    keys = [("central", ""), ("fedavg", "0.0"), ("fedavg", "0.5"), ("fedmargin", "0.0"), ("fedmargin", "0.5")]
    assert list(table) == keys
    central = {
        run["seed"]: np.mean([values["acc"] for values in run["rounds"]][-last:])
        for run in results
        if run["method"] == "central"
    }
    for (method, part), row in table.items():
        part = float(part) if part else None
        runs = [run for run in results if (run["method"], run["stragglers"]) == (method, part)]
        curves = np.array([[values["acc"] for values in run["rounds"]] for run in runs])
        scores = curves[:, -last:].mean(1)
        losses = [run["rounds"][-1]["train_loss"] for run in runs]
        wall, cpu = (
            [sum(values[name] for values in run["rounds"]) for run in runs] for name in ("seconds", "cpu_seconds")
        )
        for name, numbers in (("acc", scores), ("train_loss", losses), ("seconds", wall), ("cpu_seconds", cpu)):
            assert float(row[name]) == pytest.approx(np.mean(numbers))
            assert float(row[f"{name}_std"]) == pytest.approx(np.std(numbers, ddof=1))
        assert row["seeds"] == "3"
        if method == "central":
            assert row["megabytes"] == row["rounds_to_70%"] == row["seeds_that_reach_it"] == ""
            continue
        sent = [sum(values["comm/up_bytes"] + values["comm/down_bytes"] for values in run["rounds"]) for run in runs]
        assert float(row["megabytes"]) == pytest.approx(np.mean(sent) / 1e6)
        goals = np.array([central[run["seed"]] for run in runs])[:, None]
        reached = curves >= 0.7 * goals if mode == "max" else curves <= goals / 0.7
        first = [1 + int(np.argmax(line)) for line in reached if line.any()]
        assert row["seeds_that_reach_it"] == str(len(first))
        if first:
            assert float(row["rounds_to_70%"]) == pytest.approx(np.mean(first))


def test_the_files_of_a_report(pictures, tmp_path):
    out = tmp_path / "out"
    text = write_report(made_up(), out)
    rounds = read_csv(out / "rounds.csv")
    assert len(rounds) == 3 * (1 + 2 * 2) * 6
    assert all(len(row) == len(rounds[0]) and None not in row.values() for row in rounds)
    assert not set(OF_CLIENTS) & set(rounds[0])
    assert set(OF_MODELS) < set(rounds[0])
    expected = {
        (run["method"], run["stragglers"], run["seed"], number): values["acc"]
        for run in made_up()
        for number, values in enumerate(run["rounds"], start=1)
    }
    for row in rounds:
        part = float(row["stragglers"]) if row["stragglers"] else None
        assert float(row["acc"]) == expected[row["method"], part, int(row["seed"]), int(row["round"])]
        assert all((row[name] == "") == (row["method"] == "central") for name in OF_MODELS)
    assert "| MB | wall s | CPU s |" in text
    wall = [sum(values["seconds"] for values in run["rounds"]) for run in made_up() if run["method"] == "central"]
    shown = rf"{np.mean(wall):.1f} ± {np.std(wall, ddof=1):.1f}"
    assert re.search(rf"^\| `central` .* {shown} \| [\d.]+ ± [\d.]+ \|$", text, re.M)
    assert (out / "summary.md").read_text() == f"{text}\n"
    with Image.open(out / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    assert sorted(path.name for path in out.iterdir()) == ["curves.png", "rounds.csv", "summary.csv", "summary.md"]


def shown(numbers, digits):
    return f"{np.mean(numbers):.{digits}f} ± {np.std(numbers, ddof=1):.{digits}f}"


def test_the_table():
    """Computes every cell independently: over seeds, or over the fractions of stragglers."""
    results = made_up()
    cells = summarize(results, 0.7)
    for cell, rounds in ((("fedavg", 0.5), [2, None, None]), (("fedmargin", 0.0), [2, 4, 4])):
        for run, reached in zip(
            [run for run in results if (run["method"], run["stragglers"]) == cell], rounds, strict=True
        ):
            (central,) = [each for each in results if (each["method"], each["seed"]) == ("central", run["seed"])]
            for number, values in enumerate(run["rounds"], start=1):
                values["acc"] = central["rounds"][-1]["acc"] * (0.75 if reached and number >= reached else 0.5)
    for run in results:
        if (run["method"], run["stragglers"]) == ("fedavg", 0.0):
            for values in run["rounds"]:
                values["acc"] = 0.0
        if run["method"] == "fedmargin":  # equal for all seeds
            run["rounds"][-1] |= {"comm/total_up_bytes": 10**6, "comm/total_down_bytes": 2 * 10**6 + run["seed"]}
    cells = summarize(results, 0.7)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(results, 0.7).splitlines()[:5]]
    header = ["method", "acc, 0% stragglers", "#R@70%, 0% stragglers", "acc, 50% stragglers", "#R@70%, 50% stragglers"]
    header += ["acc over stragglers", "#R@70% over stragglers", "train_loss", "MB", "wall s", "CPU s"]
    assert lines[0] == header
    table = {line[0]: dict(zip(header, line, strict=True)) for line in lines[2:]}
    fedavg, fedmargin, central = (table[f"`{method}`"] for method in ("fedavg", "fedmargin", "central"))
    assert (fedavg["#R@70%, 0% stragglers"], fedavg["#R@70%, 50% stragglers"]) == ("never", "2.0 (1 of 3)")
    assert fedavg["#R@70% over stragglers"] == "2.0 (1 of 6)"
    assert fedmargin["#R@70%, 0% stragglers"] == shown([2, 4, 4], 1)
    late = cells["fedmargin", 0.5].rounds_to_target
    assert None not in late
    assert fedmargin["#R@70% over stragglers"] == shown([10 / 3, np.mean(late)], 1)
    assert central["#R@70%, 0% stragglers"] == central["#R@70% over stragglers"] == central["acc over stragglers"] == ""
    for method, row in (("fedavg", fedavg), ("fedmargin", fedmargin)):
        none, half = cells[method, 0.0], cells[method, 0.5]
        assert row["acc, 50% stragglers"] == shown(half.score, 3)
        assert row["acc over stragglers"] == shown([np.mean(none.score), np.mean(half.score)], 3)
        assert row["train_loss"] == shown(np.mean([none.loss, half.loss], 0), 3)
        assert row["wall s"] == shown(np.mean([none.seconds, half.seconds], 0), 1)
        assert row["CPU s"] == shown(np.mean([none.cpu_seconds, half.cpu_seconds], 0), 1)
    assert fedavg["MB"] == shown(np.mean([cells["fedavg", part].megabytes for part in (0.0, 0.5)], 0), 1)
    assert (fedmargin["MB"], central["MB"]) == ("3.0", "")
    assert central["train_loss"] == shown(cells["central", None].loss, 3)


def test_the_table_of_one_seed():
    """Deviations only exist over the fractions of stragglers; with one fraction the column is missing."""
    both, one = made_up(seeds=1), [run for run in made_up(seeds=1) if run["stragglers"] != 0.5]
    assert all(line.count("±") == 2 for line in markdown(both, 0.5).splitlines()[3:5])
    assert "±" not in markdown(one, 0.5).split("\n\n")[0]
    assert "over stragglers" not in markdown(one, 0.5)
    assert "Standard error" not in markdown(one, 0.5)


def test_the_standard_error_over_cases_stands_below_the_table():
    one = [run for run in made_up(seeds=1) if run["stragglers"] != 0.5]
    for place, run in enumerate(one):
        run["rounds"][-1][f"{run['monitor']}_se"] = 0.01 * place
    assert f"over the clients' cases: at most {0.01 * (len(one) - 1):.3f}." in markdown(one, 0.5)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_differences_are_told_with_their_paired_interval(mode):
    """Equals scipy's paired test; a method with a constant shift differs, noise does not."""
    results = [run for run in made_up(mode, seeds=5) if run["method"] != "central"]
    shifted = copy.deepcopy([run for run in results if run["method"] == "fedavg"])
    for number, run in enumerate(shifted):
        run["method"] = "fedprox"
        run["rounds"][-1]["acc"] += 0.5 + 0.001 * (number % 3)
    text = markdown(results + shifted)
    scores = {key: cell.score for key, cell in summarize(results + shifted).items()}
    for part in (0.0, 0.5):
        said = text.split(f"Compared with `fedavg` with {part:.0%} stragglers: ")[1].split("Compared")[0]
        for method, verdict in (("fedprox", "better" if mode == "max" else "worse"), ("fedmargin", "no difference")):
            ours, theirs = scores[method, part], scores["fedavg", part]
            low, high = stats.ttest_rel(ours, theirs).confidence_interval()
            mean = np.mean(ours) - np.mean(theirs)
            assert f"- `{method}`: {mean:+.3f} ({low:+.3f} to {high:+.3f}), {verdict}" in said
    shifted[0]["rounds"][-1]["acc"] = math.nan  # for one seed and part: a diverged method
    assert markdown(results + shifted[:-1]).count("`fedprox`: +nan (+nan to +nan), no difference shown") == 1
    assert "Compared" not in markdown([run for run in results if run["method"] == "fedavg"])
    assert "One seed cannot distinguish" in markdown(made_up(mode, seeds=1))
    two = made_up(mode, seeds=2)
    cells = summarize(two)
    for part in (0.0, 0.5):
        both = [
            f"{a - b:+.3f}" for a, b in zip(cells["fedmargin", part].score, cells["fedavg", part].score, strict=True)
        ]
        assert f"- `fedmargin`: {both[0]} and {both[1]}; two seeds cannot show a difference" in markdown(two)


def test_a_loss_that_is_no_number_for_one_seed(tmp_path):
    results = made_up()
    for run, loss in zip(results, [np.nan, 1e9, np.inf] * 5, strict=True):
        run["rounds"][-1]["train_loss"] = loss
    text = write_report(results, tmp_path)
    assert len(re.findall(r"\| (?:nan|inf|[\d.]+e\+08) ± nan \|", text)) == 3


@pytest.mark.parametrize(("loss", "shown"), [(999_999.0, "999999.000"), (9.853e32, "9.9e+32"), (np.nan, "nan")])
def test_the_loss_of_what_diverges(loss, shown, tmp_path):
    results = made_up(seeds=1)
    for run in results:
        run["rounds"][-1]["train_loss"] = loss
    number = r"\| [\d.]+ "
    assert re.search(rf"^\| `fedavg` .* \| {re.escape(shown)} {3 * number}\|$", markdown(results), re.M)


def test_without_matplotlib(pictures, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_report(made_up(), tmp_path / "out")
    assert caplog.messages == ["The curves are not drawn: install matplotlib with `pip install lightning-fed[demo]`."]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rounds.csv", "summary.csv", "summary.md"]


@pytest.mark.slow
def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_fed.compare.run.find_spec", lambda name: None)
    compare("own.yaml", "--methods", "fedavg", "--out", "out", "--", "--trainer.max_rounds", "1")
    assert not (tmp_path / "out" / "tensorboard").exists()


def test_presets_for_very_many_classes():
    federation = MethodChoice.parse("fedss:num_negatives=7:server_momentum=0.5").federation(Federation(local_epochs=3))
    assert federation.method.callbacks[0].num_negatives == 7
    assert federation.server.chain.steps[0].optimizer_kwargs["momentum"] == 0.5
    assert federation.schedule.local_epochs == 3
    assert MethodChoice.parse("fedaws:strength=2.5").federation(Federation()).method.callbacks[1].strength == 2.5
    with pytest.raises(ValueError, match=r"'fedss' cannot run: .*'num_negatives'"):
        MethodChoice.parse("fedss")
