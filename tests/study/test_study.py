"""`lightning-fed study`: scores equal plain PyTorch's, statistics equal scipy's, and only sums leave a site."""

import csv
import json
import re
import shutil
import sys
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy import stats
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryF1Score
from torchmetrics.functional.classification import binary_f1_score, binary_matthews_corrcoef

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.cli.main import main
from lightning_fed.compare import MethodChoice, run
from lightning_fed.study import SiteScores, site_scores
from lightning_fed.study.answers import answer_site
from lightning_fed.study.site_scores import _identity, check_sites, score_site, single_cases
from lightning_fed.study.statistics import draw_cases
from tests import references_study as reference
from tests.conftest import QUIET
from tests.generators import same_random_numbers
from tests.recorders import assert_same
from tests.study.sites import RECIPE, SIZES, Cases, Net, Sites, cases

# Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
pytestmark = [
    pytest.mark.usefixtures("subclasses_are_remembered", "no_recipe_in_checkpoints"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

METHODS = ("--methods", "local", "central", "fedavg", "--seeds", "2")


@pytest.fixture(autouse=True)
def in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "recipe.yaml").write_text(RECIPE)


def study(*arguments):
    main(["study", "recipe.yaml", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch, same_random_numbers():
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["lightning-fed"])
        study(*METHODS, "--out", "out")
    return folder / "out"


@pytest.fixture
def out(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "out")
    return tmp_path / "out"


def models_of(run):
    """State by site: the client's own entries over the global model's."""
    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    store = checkpoint["callbacks"].get("Federation", {}).get("store", {})
    own = dict(zip(store.get("clients", []), store.get("states", []), strict=True))
    return {site: {**checkpoint["state_dict"], **own.get(site, {})} for site in SIZES}


def logits_of(run):
    states, found = models_of(run), {}
    for site, data in cases("test").items():
        found[site] = F.linear(data.x, states[site]["layer.weight"], states[site]["layer.bias"])
    return found


def right_by_seed(out, method):
    """For each site the share of seeds with a correct prediction, by case."""
    runs = [out / "runs" / f"{method}_{seed}" for seed in (0, 1)]
    by_seed = [logits_of(run) for run in runs]
    labels = {site: data.y for site, data in cases("test").items()}
    return {
        site: torch.stack([(found[site].argmax(1) == labels[site]).double() for found in by_seed]).numpy()
        for site in SIZES
    }


def read_csv(out, method, baseline):
    with (out / "study.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["site"]: row for row in rows if (row["method"], row["baseline"]) == (method, baseline)}


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "baseline", "folders"),
    [
        ("fedavg", "local", ("fedavg_0", "local_0")),
        ("fedavg", "central", ("fedavg_0", "central")),
        ("central", "local", ("central", "local_0")),
    ],
)
def test_gains_equal_the_paired_t_of_plain_predictions(method, baseline, folders, trained):
    """Every method's own model at every site, from the checkpoints, with scipy."""
    first, second = (right_by_seed(trained, folder) for folder in folders)
    rows = read_csv(trained, method, baseline)
    p_values = []
    for site in ("north", "south"):
        row, expected = rows[site], stats.ttest_rel(first[site].mean(0), second[site].mean(0))
        interval = expected.confidence_interval()
        gain = first[site].mean() - second[site].mean()
        numbers = [first[site].mean(), second[site].mean(), gain, interval.low, interval.high, expected.pvalue]
        names = ("method_score", "baseline_score", "gain", "low", "high", "p")
        assert [float(row[name]) for name in names] == pytest.approx(numbers, rel=1e-12, abs=1e-12)
        by_seed = first[site].mean(1) - second[site].mean(1)
        assert [float(row[f"gain_seed_{seed}"]) for seed in (0, 1)] == pytest.approx(by_seed, abs=1e-12)
        assert int(row["n"]) == SIZES[site]
        p_values.append(expected.pvalue)
    adjusted = [float(rows[site]["p_holm"]) for site in ("north", "south")]
    assert sorted(adjusted) == pytest.approx([min(1, 2 * min(p_values)), max(2 * min(p_values), max(p_values))])
    differences = [first[site].mean(0) - second[site].mean(0) for site in ("north", "south")]
    mean, variance, _ = reference.random_effects(
        [values.mean() for values in differences], [values.var(ddof=1) / len(values) for values in differences]
    )
    half = stats.t.ppf(0.975, 1) * np.sqrt(variance)
    found = [float(rows["all sites"][name]) for name in ("gain", "low", "high")]
    assert found == pytest.approx([mean, mean - half, mean + half], rel=1e-9)
    assert np.abs(differences[0]).max() > 0  # the models differ


def test_areas_equal_delong_over_plain_predictions(out):
    """With the same trained models, for another metric: the area under the ROC curve, over two seeds."""
    times = {path: path.stat().st_mtime_ns for path in out.rglob("last.ckpt")}
    study(*METHODS, "--out", out, "--monitor", "val_auc", "--min-support", 4)
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("last.ckpt")}
    rows = read_csv(out, "fedavg", "local")
    for site, data in cases("test").items():
        if site == "tiny":  # fewer than two cases in a class
            assert {rows[site]["low"], rows[site]["verdict"]} == {"", "too few cases"}
            continue
        scores = {
            (method, seed): logits_of(out / "runs" / f"{method}_0_{seed}")[site].softmax(1)[:, 1].double()
            for method in ("fedavg", "local")
            for seed in (0, 1)
        }
        pairs = [torch.stack([scores["fedavg", seed], scores["local", seed]], 1) for seed in (0, 1)]
        areas = [reference.delong(pair[data.y == 1].tolist(), pair[data.y == 0].tolist())[0] for pair in pairs]
        first, second = np.mean(areas, 0)
        assert float(rows[site]["method_score"]) == pytest.approx(first, rel=1e-12)
        assert float(rows[site]["gain"]) == pytest.approx(first - second, abs=1e-12)
    one = json.loads((out / "study.json").read_text())["answers"]["north"]["fedavg|local"]["0"]
    pair = torch.stack([torch.tensor(scores) for scores in _north_scores(out)], 1)
    positive = cases("test")["north"].y == 1
    _, variance = reference.delong(pair[positive].tolist(), pair[~positive].tolist())
    m, n, *_, s10, c10, r10, s01, c01, r01 = one
    assert (s10 + r10 - 2 * c10) / m + (s01 + r01 - 2 * c01) / n == pytest.approx(variance, rel=1e-12)


def _north_scores(out):
    for method in ("fedavg", "local"):
        yield logits_of(out / "runs" / f"{method}_0_0")["north"].softmax(1)[:, 1].tolist()


def scored(metric, stage="test", module=None, data=None, **options):
    """Scores by site for a module on a plain Trainer; of one site unless there are `data`."""
    scores = SiteScores(metric, stage, **options)
    trainer = L.Trainer(**QUIET, callbacks=[scores])
    run = trainer.test if stage == "test" else trainer.validate
    north = ({"north": cases(split)["north"]} for split in ("train", "val", "test"))
    data = FederatedDataModule(*north, batch_size=8) if data is None else data
    run(Net() if module is None else module, datamodule=data, verbose=False)
    return scores.scores


def test_metrics_without_a_value_for_a_case_are_bootstrapped(monkeypatch):
    """Matthews' coefficient over the drawn cases; equal draws for all models."""
    monkeypatch.setattr(site_scores, "REPLICATES", 50)
    found = scored("val_mcc", "validation", module := Net())
    data = cases("val")["north"]
    predicted = F.linear(data.x, module.layer.weight, module.layer.bias).argmax(1)
    assert found["north"]["value"] == pytest.approx(float(binary_matthews_corrcoef(predicted, data.y)))
    for replicate in (0, 1, 49):
        drawn = torch.from_numpy(draw_cases(0, replicate, "north", len(data)))
        expected = float(binary_matthews_corrcoef(predicted[drawn], data.y[drawn]))
        assert found["north"]["replicates"][replicate] == pytest.approx(expected, abs=1e-6)
    runs = {"fedavg": {0: found["north"]}, "local": {0: found["north"]}}
    kind, answer = answer_site(runs)
    assert (kind, answer["fedavg|local"]["all"][0], len(answer["fedavg|local"]["all"])) == ("replicates", 10, 9)


def test_cases_are_scored_one_by_one():
    """A loss per case, not per batch; the batches of a loader do not matter."""
    module = Net()
    found = scored("test_loss", module=module, data=Sites())
    for site, data in cases("test").items():
        logits = F.linear(data.x, module.layer.weight, module.layer.bias)
        expected = F.cross_entropy(logits, data.y, reduction="none").tolist()
        assert found[site]["scores"] == pytest.approx(expected, rel=1e-6)
    batches = {site: DataLoader(data, batch_size=5) for site, data in cases("test").items()}
    other = FederatedDataModule(cases("train"), test=batches)
    assert scored("test_loss", module=module, data=other)["north"]["cases"] == found["north"]["cases"]


class Perfect(Net):
    """A share of 1 and a curve with the area 1, and a coefficient with a value for single cases."""

    def __init__(self):
        super().__init__()
        self.f1 = BinaryF1Score()

    def evaluate(self, batch, stage):
        self.auc.update(batch["y"].float(), batch["y"])
        self.f1.update(self.layer(batch["x"]).argmax(1), batch["y"])
        self.log_dict(
            {f"{stage}_share": 1.0, f"{stage}_auc": self.auc, f"{stage}_f1": self.f1}, batch_size=len(batch["y"])
        )


def test_a_value_equal_to_another_metrics_is_not_that_metric():
    found = scored("test_share", module=Perfect())["north"]
    assert found["scores"] == [1.0] * SIZES["north"]
    assert scored("test_auc", module=Perfect())["north"].keys() == {"positives", "negatives", "cases", "patients"}


def test_metrics_other_than_means_over_cases_are_bootstrapped(monkeypatch):
    """F1 over the drawn patients, with equal draws for all models."""
    monkeypatch.setattr(site_scores, "REPLICATES", 20)
    found = scored("test_f1", module=(module := Perfect()), patient="patient")["north"]
    assert found.keys() == {"cases", "patients", "value", "replicates"}
    data = cases("test")["north"]
    predicted = F.linear(data.x, module.layer.weight, module.layer.bias).argmax(1)
    for replicate in (0, 19):
        patients = torch.from_numpy(draw_cases(0, replicate, "north", len(data) // 2))
        drawn = torch.cat([2 * patients, 2 * patients + 1])
        expected = float(binary_f1_score(predicted[drawn], data.y[drawn]))
        assert found["replicates"][replicate] == pytest.approx(expected, abs=1e-6)
    runs = {"fedavg": {0: found}, "local": {0: found}}
    assert answer_site(runs, 10)[1]["fedavg|local"]["0"][0] == 10  # patients
    assert answer_site(runs, 11) == ("replicates", {})


def test_numbers_that_differ_from_the_mean_over_cases_are_named(caplog):
    class Half(Perfect):
        def on_test_epoch_end(self):
            self.log("test_tenth", self.f1.compute() / 10)

    scored("test_acc")
    assert not caplog.records
    found = scored("test_tenth", module=Half())["north"]
    assert len(found["scores"]) == SIZES["north"]
    assert "The mean of 'test_tenth' over single cases of client 'north' is" in caplog.text


def test_a_perfect_model_is_comparable_with_other_models(monkeypatch):
    """The F1 of a perfect model equals the mean over cases, but the F1 of another model does not."""
    monkeypatch.setattr(site_scores, "REPLICATES", 20)
    other = scored("test_f1", module=Perfect())["north"]
    data = cases("test")["north"]
    labels = {tuple(row): int(y) for row, y in zip(data.x.tolist(), data.y, strict=True)}
    module = Perfect()
    module.layer.forward = lambda x: F.one_hot(torch.tensor([labels.get(tuple(r), 0) for r in x.tolist()]), 2).float()
    perfect = scored("test_f1", module=module)["north"]
    assert set(perfect["scores"]) - {0.0} >= {1.0}
    kind, answer = answer_site({"a": {0: perfect}, "b": {0: other}})
    assert (kind, answer["a|b"]["0"][1]) == ("replicates", 1.0)


def test_cases_of_a_patient_count_once():
    found = scored("test_loss", patient="patient")["north"]
    assert found["patients"] == [place // 2 for place in range(SIZES["north"])]
    zeros = {**found, "scores": [0.0] * SIZES["north"]}
    _, answer = answer_site({"a": {0: found}, "b": {0: zeros}})
    means = np.array(found["scores"]).reshape(-1, 2).mean(1)
    assert answer["a|b"]["0"][:2] == pytest.approx([10, (means - 0.5).sum()])
    assert answer_site({"a": {0: found}, "b": {0: zeros}}, min_support=11)[1] == {}


def test_patients_may_have_names():
    """A loader collects strings in a list."""
    data = [{"x": torch.zeros(2), "patient": name} for name in ("ann", "bob", "ann")]
    (batch,) = DataLoader(data, batch_size=3)
    found = list(single_cases([batch]))
    assert [case["patient"] for case in found] == [["ann"], ["bob"], ["ann"]]
    assert _identity(found, "patient")["patients"] == ["ann", "bob", "ann"]


def test_cases_without_a_value_are_excluded(caplog):
    site = {"cases": [str(place) for place in range(12)], "patients": None}
    runs = {
        "a": {0: {**site, "scores": [np.nan, *[0.25] * 11]}},
        "b": {0: {**site, "scores": [*[0.75] * 11, np.nan]}},
    }
    _, answer = answer_site(runs)
    assert answer["a|b"]["all"][:3] == pytest.approx([10, -2.5, 2.5])
    assert "2 of 12 examples have no finite score" in caplog.text


# --- Disclosure -------------------------------------------------------------------------------------------------------


def numbers_in(value):
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers_in(part)]
    return [number for part in value for number in numbers_in(part)] if isinstance(value, list) else [value]


def test_nothing_but_the_sums_leaves(trained):
    """Six sums per pair and seed for any number of cases, and nothing at all from a small site."""
    content = json.loads((trained / "study.json").read_text())
    assert content["answers"]["tiny"] == {}
    for site in ("north", "south"):
        answer = content["answers"][site]
        assert list(answer) == ["fedavg|central", "fedavg|local", "central|local"]
        assert {tuple(sums) for sums in answer.values()} == {("all", "0", "1")}
        assert {len(values) for sums in answer.values() for values in sums.values()} == {6}
        assert {type(number) for number in numbers_in(answer)} == {float}
        assert answer["fedavg|local"]["all"][0] == SIZES[site]
    written = [(trained / name).read_text() for name in ("study.json", "study.csv", "study.md")]
    identities = {name for run in trained.glob("runs/*/sites.json") for name in _fingerprints(run)}
    assert len(identities) == sum(SIZES.values())
    assert not [name for name in identities for text in written if name in text]
    line = next(line for line in written[2].splitlines() if "tiny" in line)
    assert re.sub(r"[\s|]+", " ", line).strip() == "tiny below 10 too few cases"
    tiny = read_csv(trained, "fedavg", "local")["tiny"]
    assert {name for name, value in tiny.items() if value} == {"site", "method", "baseline", "verdict"}


def _fingerprints(path):
    return [name for site in json.loads(path.read_text())["scores"].values() for name in site["cases"]]


def test_an_answer_does_not_depend_on_the_order_of_cases():
    rng = np.random.default_rng(0)
    scores, order = rng.random((2, 30)), rng.permutation(30)
    site = {"cases": [], "patients": None}
    answers = [
        answer_site(
            {name: {0: {**site, "scores": list(values[places])}} for name, values in zip("ab", scores, strict=True)}
        )
        for places in (np.arange(30), order)
    ]
    assert numbers_in(answers[0][1]) == pytest.approx(numbers_in(answers[1][1]), abs=1e-12)


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_local_is_a_federation_of_one_client(trained):
    """The weights equal a federation with one client, bit for bit, and nothing is sent."""
    result = json.loads((trained / "runs" / "local_0_0" / "result.json").read_text())
    assert [values["comm/total_up_bytes"] for values in result["rounds"]] == [0, 0, 0]
    local = models_of(trained / "runs" / "local_0_0")
    for site in ("north", "south"):
        L.seed_everything(0, verbose=False)
        module = Net()
        trainer = FederatedTrainer(max_rounds=3, local_epochs=2, seed=0, **QUIET)
        parts = [{site: cases(split)[site]} for split in ("train", "val")]
        trainer.fit(module, datamodule=FederatedDataModule(*parts, batch_size=8))
        state = {name: value for name, value in module.state_dict().items() if name.startswith("layer")}
        assert_same({name: local[site][name] for name in state}, state)


def test_local_leaves_frozen_entries_frozen():
    from lightning_fed.callbacks import Federation
    from lightning_fed.steps import MaxNorm

    recipe = Federation("fedprox", frozen=["layer.bias"], steps=[MaxNorm(1.0)], local_epochs=2)
    federation = MethodChoice.parse("local").federation(recipe)
    assert federation.method.name == "FedAvg"
    assert (federation.schedule.local_epochs, list(federation.steps)) == (2, [])
    (select,) = federation.options.personal
    assert select(Net()) == ["layer.weight"]


def test_the_same_command_keeps_everything(out, capsys):
    times = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}
    text = (out / "study.md").read_text()
    study(*METHODS, "--out", out)
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")} == times
    assert (out / "study.md").read_text() == text
    assert "6 of 6 runs: done before" in capsys.readouterr().out


def test_a_time_limit_stops_between_rounds(trained, tmp_path, capsys):
    """Each command trains at least one round; the weights equal an uninterrupted run."""
    limit = ("--out", "out", "--minutes", "1e-9")
    study("--methods", "fedavg", "local", *limit)
    shown = capsys.readouterr().out
    assert "0 of 2 runs are finished: time limit of 1e-09 minutes reached; the same command continues" in shown
    assert "No table yet" in shown
    for _ in range(2):
        main(["compare", "recipe.yaml", "--methods", "fedavg", *limit])
    shown = capsys.readouterr().out
    assert shown.count("not finished") == shown.count("0 of 1 runs are finished") == 1
    assert re.search(r"^method +val_acc", shown, re.M)
    for site, state in models_of(tmp_path / "out" / "runs" / "fedavg_0_0").items():
        assert_same(state, models_of(trained / "runs" / "fedavg_0_0")[site])


def test_no_round_begins_that_would_end_after_the_limit(monkeypatch):
    """Rounds of 2, 4 and 1 minutes: after 7 of 10 minutes another round may take 4."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(run.time, "monotonic", lambda: clock.now)
    curve = run.RoundCurve(lambda number, values: None, deadline=10.0)
    trainer = SimpleNamespace(callback_metrics={}, max_epochs=20, should_stop=False)
    stopped = []
    for minutes in (2, 4, 1):
        clock.now += minutes
        curve.on_train_epoch_end(trainer, None)
        stopped.append(trainer.should_stop)
    assert stopped == [False, False, True]
    assert curve.is_out_of_time


# --- Refusals ---------------------------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    with pytest.raises(SystemExit):
        study(*arguments)
    return capsys.readouterr().err


def test_mistakes_end_before_the_training(out, capsys, tmp_path):
    fedavg = ("--methods", "local", "fedavg", "--out", "new")
    assert "to have 'local' and a federated method" in refused(capsys, "--methods", "fedavg", "central")
    assert "to have 'local' and a federated method" in refused(capsys, "--methods", "local", "central")
    assert "Expected no options for 'local'" in refused(capsys, "--methods", "local:lr=1", "fedavg")
    no_test = ("--", "--data.has_test", "false")
    assert "Expected test data for every client" in refused(capsys, *fedavg, *no_test)
    secure = "[{class_path: MaxSamples, init_args: {most: 100}}, {class_path: SecureSum, init_args: {clip: 10.0}}]"
    assert "needs the model of each client" in refused(capsys, *fedavg, "--", f"--trainer.steps={secure}")
    (tmp_path / "recipe.yaml").write_text(
        f"{RECIPE}    - {{class_path: EarlyStopping, init_args: {{monitor: val_acc}}}}\n"
    )
    assert "equal numbers of rounds for all methods, but got `EarlyStopping`" in refused(capsys, *fedavg)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert "Expected 'fedavg' as the first" in refused(capsys, "--methods", "local", "fairavg", "fedavg", "--out", out)
    assert not list(tmp_path.glob("new/runs/*/last.ckpt"))


def test_sites_on_other_machines_or_in_other_processes_are_refused():
    federation = SimpleNamespace(is_remote=True)
    with pytest.raises(MisconfigurationException, match="all clients on this machine"):
        check_sites(SimpleNamespace(world_size=1, callbacks=[]), federation)
    with pytest.raises(MisconfigurationException, match=r"one process, as .* but got 2: set `devices=1`"):
        check_sites(SimpleNamespace(world_size=2, callbacks=[]), None)


def test_scores_that_cannot_be_compared_are_refused():
    with pytest.raises(MisconfigurationException, match="'test_f1' is not among"):
        scored("test_f1")
    with pytest.raises(MisconfigurationException, match="key 'person' for the patient"):
        scored("test_acc", patient="person")
    with pytest.raises(MisconfigurationException, match=r"one row per case.*\(3,\), \(2, 1\)"):
        list(single_cases([(torch.zeros(3), torch.zeros(2, 1))]))
    site = {"scores": [0.5] * 20, "patients": None}
    runs = {"a": {0: {**site, "cases": ["x"]}}, "b": {0: {**site, "cases": ["y"]}}}
    with pytest.raises(MisconfigurationException, match="the cases differ: fix the split"):
        answer_site(runs)
    loaders = [DataLoader(cases("test")["north"])] * 2
    with pytest.raises(MisconfigurationException, match="one test loader for client 'north', but got 2"):
        score_site(L.Trainer(**QUIET), Net(), "north", loaders, "test_loss", "test", None, 1.0)


def test_fingerprints_distinguish_cases():
    found = scored("test_acc")
    assert len(set(found["north"]["cases"])) == SIZES["north"]
    again = Cases("north", 4, SIZES["north"])
    again.x[3, 0] += 1e-3
    other = scored("test_acc", data=FederatedDataModule(cases("train"), test={"north": again}))["north"]["cases"]
    assert [place for place, name in enumerate(other) if name != found["north"]["cases"][place]] == [3]
