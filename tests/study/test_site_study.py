"""`SiteStudy`: sites on other machines answer with sums, and the sums equal the scores of plain PyTorch."""

import csv
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping
from scipy import stats
from torch.nn import functional as F

pytest.importorskip("flwr")

from lightning_fed import FederatedDataModule, FederatedTrainer, Federation
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.transport import FlowerTransport, from_records
from lightning_fed.backends.wire.server import run_server
from lightning_fed.errors import BadUpdate, ClientFault
from lightning_fed.messages import ClientUpdate
from lightning_fed.privacy import SecureSum
from lightning_fed.privacy.masked_sums import decode
from lightning_fed.steps import MaxSamples
from lightning_fed.study import SiteStudy, site_study
from lightning_fed.study.site_study import _check_sum, _name_sum, _read_sums
from tests import references_study as reference
from tests.backends.flower.grids import FakeGrid
from tests.backends.flower.halves import OPTIONS
from tests.backends.site.test_policy import answers_in, write_policy
from tests.conftest import QUIET
from tests.generators import same_random_numbers
from tests.study.sites import SECURED, SIZES, ManySites, Net, Sites, cases

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

ROUNDS = 2
MODELS = ("fedavg", "local")


def federation(model, seed=3, steps=()):
    return Federation("fedavg", personal=["*"] if model == "local" else (), seed=seed, steps=list(steps))


def on_flower(folder, model, metric="test_loss", stores="", min_support=10, sites=Sites, rounds=ROUNDS, **options):
    """Fits with two nodes: north is on the first, south on the second. Returns the server's module and the answers."""
    sent = []

    def record(node, message, content):
        if message.metadata.message_type == "evaluate.question":
            sent.append(json.loads(from_records(content).text) | {"data": from_records(content).data})
        return [content]

    def half(place):
        return [SiteStudy(model, metric, folder / place, min_support=min_support)]

    apps = {
        node: client_app(
            federation(model, **options), Net, sites(), OPTIONS, callbacks=half("sites"),
            store=folder / f"{stores}{node}",
        )
        for node in (11, 12)
    }  # fmt: skip
    grid = FakeGrid(
        apps, {node: {"partition-id": index, "num-partitions": 2} for index, node in enumerate(apps)}, record
    )
    transport = FlowerTransport(grid, 5.0, poll=0.01)
    run = f"{model}{options.get('seed', 3)}"
    trainer = run_server(
        federation(model, **options), Net, None, {**OPTIONS, "max_epochs": rounds}, transport,
        transport.await_clients(len(sites.sizes), 1), folder / run, half("server"),
    )  # fmt: skip
    return trainer.lightning_module, sent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    fits = {}
    with same_random_numbers():
        for model, seed in itertools.product(MODELS, (3, 4)):
            fits[model, seed] = on_flower(folder, model, seed=seed, stores=f"{model}{seed}-")
    return folder, fits


def losses(module, site):
    data = cases("test")[site]
    with torch.no_grad():
        return F.cross_entropy(module.layer(data.x), data.y, reduction="none").double().numpy()


def test_sums_are_those_of_the_global_and_the_sites_models(trained):
    folder, fits = trained
    study = json.loads((folder / "server" / "study.json").read_text())
    assert (study["models"], study["seeds"], study["higher_is_better"]) == (["fedavg", "local"], [3, 4], False)
    for site in ("north", "south"):
        runs = json.loads((folder / "sites" / "sites" / f"{site}.json").read_text())["runs"]
        for seed in (3, 4):
            assert runs["fedavg"][f"{seed}"]["scores"] == pytest.approx(losses(fits["fedavg", seed][0], site), rel=1e-5)
        pair = [np.mean([runs[model][f"{seed}"]["scores"] for seed in (3, 4)], 0) for model in MODELS]
        n, a, b, a_squared, b_squared, product = study["answers"][site]["fedavg|local"]["all"]
        expected = stats.ttest_rel(*pair)
        variance = (a_squared + b_squared - 2 * product - (a - b) ** 2 / n) / (n * (n - 1))
        assert n == SIZES[site]
        assert (a - b) / n / variance**0.5 == pytest.approx(expected.statistic, rel=1e-9)
    assert study["megabytes"]["local"] == 0 < study["megabytes"]["fedavg"]


def test_local_scores_are_those_of_training_alone(trained):
    """A federation with only one site, in one process, has the site's local model."""
    runs = json.loads((trained[0] / "sites" / "sites" / "south.json").read_text())["runs"]["local"]
    L.seed_everything(3, verbose=False)
    module = Net()
    alone = FederatedTrainer(federation=Federation(seed=3), max_rounds=ROUNDS, **QUIET)
    alone.fit(module, datamodule=FederatedDataModule({"south": cases("train")["south"]}, batch_size=8))
    assert runs["3"]["scores"] == pytest.approx(losses(module, "south"), rel=1e-5)


def test_the_network_gives_the_sums_of_one_process(trained, tmp_path):
    for model in MODELS:
        trainer = FederatedTrainer(
            federation=federation(model),
            max_rounds=ROUNDS,
            callbacks=[SiteStudy(model, "test_loss", tmp_path)],
            **QUIET,
        )
        L.seed_everything(3, verbose=False)
        trainer.fit(Net(), datamodule=Sites())
    found = json.loads((tmp_path / "study.json").read_text())["answers"]
    expected = json.loads((trained[0] / "server" / "study.json").read_text())["answers"]
    assert found["tiny"] == expected["tiny"] == {}
    for site in ("north", "south"):
        remote = expected[site]["fedavg|local"]
        assert found[site]["fedavg|local"]["3"] == pytest.approx(remote["3"], rel=1e-5)
        assert remote["3"] != pytest.approx(remote["4"], rel=1e-3)


def test_nothing_but_the_sums_leaves(trained):
    folder, fits = trained
    first, last = fits["fedavg", 3][1], fits["local", 4][1]
    assert {len(answer["data"]) for answer in first} == {0}
    names = {f"study/scores/fedavg|local/{part}" for part in ("all", "3", "4")}
    by_client = {answer["header"]["client"]: answer for answer in last}
    assert by_client.keys() == SIZES.keys()
    for client, answer in by_client.items():
        rows = answer["tensors"]["extras"]
        assert {row[0] for row in rows} == (set() if client == "tiny" else names)
        assert len(answer["data"]) == 8 * 6 * len(rows)
        header = answer["header"]
        assert (header["num_samples"], header["metrics"], answer["tensors"]["state"]) == (1, {}, [])
    table = (folder / "server" / "study.md").read_text()
    assert "| tiny | below 10 |" in table
    assert "| tiny | 4 |" in (folder / "sites" / "sites" / "tiny.md").read_text()  # for the site's own eyes
    assert "north" not in (folder / "sites" / "sites" / "tiny.md").read_text()


def test_a_policy_names_the_sums(tmp_path, caplog):
    """Node 11 refuses and node 12 sends the sums. The site at node 11 still has the table for local use."""
    for node, metrics in ((11, ["val_acc"]), (12, ["study/scores/*"])):
        write_policy(
            tmp_path / f"{node}", answers=["update", "evaluation"], entries=["layer.*"], metrics=metrics, faults="text"
        )
    for model in MODELS:
        on_flower(tmp_path, model, rounds=1)
    assert "does not allow 'study/scores/fedavg|local/" in caplog.text
    assert list(json.loads((tmp_path / "server" / "study.json").read_text())["answers"]) == ["south", "tiny"]
    assert (tmp_path / "sites" / "sites" / "north.md").exists()
    allowed = [line for line in answers_in(tmp_path / "12") if line["answer"] == "evaluation"]
    assert allowed[-1]["rule"]["metrics"] == ["study/scores/*"]
    last = [line for line in answers_in(tmp_path / "11") if line["client"] == "north"][-1]
    assert (last["answer"], last["rule"]) == ("evaluation", {"refused": "metrics"})


STEPS = (MaxSamples(40), SecureSum(5.0))


def secure(folder, model, **options):
    return on_flower(folder, model, steps=STEPS, sites=ManySites, rounds=1, **options)[1]


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    folder, fits = tmp_path_factory.mktemp("secured"), {}
    with same_random_numbers():
        for model, seed in itertools.product(MODELS, (3, 4)):
            fits[model, seed] = secure(folder, model, seed=seed)
            if (model, seed) == ("fedavg", 3):
                shutil.copytree(folder, folder.with_name(f"{folder.name}_first"))
            if (model, seed) == ("local", 3):
                shutil.copy(folder / "server" / "study.json", folder / "one_seed.json")
    return folder, fits


def gains_of(folder):
    """Gain with variance, and both scores, by site, from the scores in the sites' files."""
    pairs = []
    for site in SECURED:
        runs = json.loads((folder / f"{site}.json").read_text())["runs"]
        scores = np.array([[runs[model][f"{seed}"]["scores"] for seed in (3, 4)] for model in MODELS])
        difference = (scores[0] - scores[1]).mean(0)
        pairs.append((difference.mean(), difference.var(ddof=1) / len(difference), scores.mean((1, 2))))
    return zip(*pairs, strict=True)


def test_a_secure_sum_gives_the_mean_over_sites(secured):
    """The mean equals the mean from the sites' own files. The site with few cases is not in the sum."""
    folder, _ = secured
    study = json.loads((folder / "server" / "study.json").read_text())
    values, variances, scores = gains_of(folder / "sites" / "sites")
    mean, variance, _ = reference.random_effects([float(-one) for one in values], [float(one) for one in variances])
    sites, *totals = study["totals"]["fedavg"]
    assert (study["answers"], sites) == ({}, 5)
    assert totals[4:] == pytest.approx(np.mean(scores, 0), rel=1e-12)
    (row,) = csv.DictReader((folder / "server" / "study.csv").read_text().splitlines())
    half = stats.t.ppf(0.975, 4) * variance**0.5
    assert [float(row[name]) for name in ("gain", "low", "high")] == pytest.approx([mean, mean - half, mean + half])
    table = (folder / "server" / "study.md").read_text()
    assert "| all sites | 5 sites |" in table
    assert "The secure sum hides the gains of single sites" in table
    assert "`fedavg` against `local`" in (folder / "sites" / "sites" / "tiny.md").read_text()
    used = json.loads((folder / "sites" / "sites" / "north.json").read_text())["tau_squared"]
    assert used[_name_sum({"metric": "test_loss", "seeds": [3, 4]})]["fedavg"] > 0


def test_the_server_sees_masked_numbers_only(secured):
    """Answers that could be decoded without the masks would be small numbers."""
    folder, fits = secured
    own = dict(zip(SECURED, next(gains_of(folder / "sites" / "sites")), strict=True))
    asked = fits["local", 4]
    masked = [answer for answer in asked if len(answer["data"])]
    assert len(asked) > len(masked)
    assert {answer["header"]["client"] for answer in masked} == {*SECURED}
    assert len(masked) == 2 * 5  # for the variance between sites, and for the mean
    for answer in masked:
        assert [row[0] for row in answer["tensors"]["extras"]] == ["study/sum"]
        assert answer["tensors"]["state"] == []
        assert answer["header"]["metrics"] == {}
        words = torch.frombuffer(bytearray(answer["data"]), dtype=torch.int32).reshape(-1, 8)
        assert min(map(abs, decode(words))) > 1e30
        assert own[answer["header"]["client"]] not in decode(words)
    first, second = (answer["data"] for answer in masked if answer["header"]["client"] == "north")
    assert first[:32] != second[:32]
    for model, seed in (("fedavg", 3), ("fedavg", 4)):
        assert {len(answer["data"]) for answer in fits[model, seed]} == {0}


def test_one_process_gives_the_sums_of_the_network(secured, tmp_path):
    for model in MODELS:
        trainer = FederatedTrainer(
            federation=federation(model, steps=STEPS),
            max_rounds=1,
            callbacks=[SiteStudy(model, "test_loss", tmp_path)],
            **QUIET,
        )
        L.seed_everything(3, verbose=False)
        trainer.fit(Net(), datamodule=ManySites())
    assert totals_in(tmp_path / "study.json")["fedavg"] == pytest.approx(
        totals_in(secured[0] / "one_seed.json")["fedavg"], rel=1e-5
    )


def totals_in(path):
    return json.loads(path.read_text())["totals"]


def test_a_sum_is_released_for_one_set_of_sites(secured, tmp_path, caplog):
    """With another method: the difference between sums with and without a site would give this site's scores."""
    shutil.copytree(secured[0], tmp_path / "again")
    before = totals_in(tmp_path / "again" / "server" / "study.json")
    secure(tmp_path / "again", "fedprox", min_support=4)
    assert "unmask this round's sum again, for another set of clients" in caplog.text
    assert (
        "no secure sum of the sites' gains (score minus the local model's score): 0 sites answered, but at least 5"
        in caplog.text
    )
    assert totals_in(tmp_path / "again" / "server" / "study.json") == before
    shutil.rmtree(tmp_path / "again" / "fedprox3")  # the server's checkpoints
    secure(tmp_path / "again", "fedprox")
    found, expected = (totals_in(tmp_path / "again" / name) for name in ("server/study.json", "one_seed.json"))
    assert found["fedavg"] == expected["fedavg"]
    assert found["fedprox"] == pytest.approx(found["fedavg"], rel=1e-6)  # the test's fit is one with FedAvg


def test_a_fit_without_the_secure_sum_is_excluded(secured, tmp_path, caplog):
    """Otherwise a last fit without the step would get the sums of single sites."""
    folder = shutil.copytree(secured[0].with_name(f"{secured[0].name}_first"), tmp_path / "first")
    assert {len(answer["data"]) for answer in on_flower(folder, "local", sites=ManySites, rounds=1)[1]} == {0}
    assert "the client's earlier fits in this `folder` had another metric, stage, patient key or" in caplog.text
    assert not (folder / "server" / "study.md").exists()


def test_a_site_answers_for_one_variance_between_sites():
    """Sums for several variances determine all terms: the sum of 1 / (v + t) is a rational function of t."""
    content, plan = {}, {"metric": "test_loss", "models": list(MODELS), "seeds": [3]}

    def ask(*tau_squared, **changes):
        asked = plan | changes
        _check_sum(content, asked | {"sum": _name_sum(asked), "tau_squared": list(tau_squared)})

    for tau_squared in (0.0, 0.25, 0.25, 0.0):  # a repeated fit asks again
        ask(tau_squared)
    for tau_squared in (0.5, -0.25, math.nan):
        with pytest.raises(ClientFault, match=r"could compute this site's gain .*: repeat the fits with another seed"):
            ask(tau_squared)
    with pytest.raises(ClientFault, match="another variance between sites"):
        ask(-0.5, seeds=[4])
    for changes in ({"seeds": [3, 3]}, {"seeds": [4, 3]}, {"models": MODELS[::-1]}):  # other names of the same terms
        with pytest.raises(ClientFault, match="the request must list each model once"):
            ask(0.5, **changes)
    ask(0.5, seeds=[3, 4])
    ask(0.25, 0.5, models=["fedavg", "fedprox", "local"])  # another method joins the study
    with pytest.raises(ClientFault, match="another variance between sites"):
        ask(0.5, 0.5, models=["fedavg", "fedprox", "local"])
    with pytest.raises(ClientFault, match="the sum is over another metric or other seeds"):
        _check_sum(content, plan | {"sum": "t", "tau_squared": [0.0]})


# --- Refusals ---------------------------------------------------------------------------------------------------------


def fit(folder, model="fedavg", rounds=ROUNDS, metric="test_loss", callbacks=()):
    trainer = FederatedTrainer(
        federation=federation(model),
        max_rounds=rounds,
        callbacks=[SiteStudy(model, metric, folder), *callbacks],
        **QUIET,
    )
    trainer.fit(Net(), datamodule=Sites())


@pytest.fixture(scope="module")
def one_fit(tmp_path_factory):
    """The files after one fit."""
    folder = tmp_path_factory.mktemp("one")
    with same_random_numbers():
        fit(folder)
    return folder


def test_unequal_fits_are_refused_before_training(one_fit, tmp_path):
    shutil.copytree(one_fit, tmp_path, dirs_exist_ok=True)
    with pytest.raises(MisconfigurationException, match="Expected equal rounds in all fits"):
        fit(tmp_path, "local", rounds=ROUNDS + 1)
    with pytest.raises(MisconfigurationException, match="Expected equal metric in all fits"):
        fit(tmp_path, "local", metric="test_acc")
    with pytest.raises(MisconfigurationException, match="got `EarlyStopping`"):
        fit(tmp_path, "local", callbacks=[EarlyStopping("val_loss")])
    with pytest.raises(ValueError, match="Expected `model` to have letters"):
        SiteStudy("a|b", "test_acc", tmp_path)
    assert list(json.loads((tmp_path / "runs.json").read_text())["models"]) == ["fedavg"]


def test_a_site_without_earlier_scores_is_excluded(one_fit, tmp_path, caplog):
    shutil.copytree(one_fit, tmp_path, dirs_exist_ok=True)
    (tmp_path / "sites" / "south.json").unlink()
    path = tmp_path / "sites" / "tiny.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"settings": ["test_loss", "test", "patient"]}))
    fit(tmp_path, "local")
    assert "Client 'south' does not answer: the client has no scores from an earlier fit" in caplog.text
    assert "Client 'tiny' does not answer: the client's earlier fits in this `folder` had another metric" in caplog.text
    assert list(json.loads((tmp_path / "study.json").read_text())["answers"]) == ["north"]


def test_a_secure_sum_needs_five_sites(tmp_path):
    """From the sums over four sites, the server could compute each site's gain."""
    trainer = FederatedTrainer(
        federation=federation("fedavg", steps=STEPS),
        max_rounds=1,
        callbacks=[SiteStudy("fedavg", "test_loss", tmp_path)],
        **QUIET,
    )
    with pytest.raises(MisconfigurationException, match="at least 5 sites in a study with a secure sum, but got 3"):
        trainer.fit(Net(), datamodule=Sites())
    assert not (tmp_path / "runs.json").exists()


def test_an_interrupted_fit_is_not_compared(tmp_path):
    class StopsEarly(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = True

    fit(tmp_path, callbacks=[StopsEarly()])
    assert json.loads((tmp_path / "runs.json").read_text())["models"] == {"fedavg": {}}
    assert not (tmp_path / "sites").exists()


def update(**changes):
    extras = {f"study/scores/fedavg|local/{part}": torch.ones(6, dtype=torch.float64) for part in ("all", "3")}
    return ClientUpdate("ann", 1, {}, extras | changes)


def test_invalid_answers_are_excluded():
    models, name = ["fedavg", "local"], "study/scores/fedavg|local/3"
    kind, answer = _read_sums(update(), models, [3])
    assert (kind, answer["fedavg|local"]["3"]) == ("scores", [1.0] * 6)
    assert _read_sums(ClientUpdate("ann", 1, {}), models, [3]) == ("scores", {})
    nan = torch.full((6,), float("nan"), dtype=torch.float64)
    for changes, reason in (
        ({"study/scores/fedavg|central/3": nan}, "the site's answer has other names than expected"),
        ({"other": nan}, "the site's answer has other names than expected"),
        ({name: nan}, "a float64 tensor with 6 numbers"),
        ({name: torch.ones(5, dtype=torch.float64)}, "a float64 tensor with 6 numbers"),
        ({name: torch.ones(6)}, "a float64 tensor with 6 numbers"),
    ):
        with pytest.raises(BadUpdate, match=reason):
            _read_sums(update(**changes), models, [3])
    unknown = {name.replace("scores", "cases"): value for name, value in update().extras.items()}
    with pytest.raises(BadUpdate):
        _read_sums(ClientUpdate("ann", 1, {}, unknown), models, [3])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metric": "test_acc"}, "has the metric 'test_loss'"),
        ({"models": None}, "lacks the lists `models` and `seeds`"),
        ({"models": ["../fedavg"]}, "invalid model name"),
        ({"model": 3}, "invalid model name"),
        ({"seeds": ["3"]}, "invalid seed"),
        ({"seed": True}, "invalid seed"),
    ],
)
def test_invalid_questions_are_refused(changes, reason, tmp_path):
    question = {"metric": "test_loss", "model": "fedavg", "seed": 3, "models": ["fedavg"], "seeds": [3]}
    with pytest.raises(ClientFault, match=reason):
        SiteStudy("fedavg", "test_loss", tmp_path).on_client_question(None, None, "north", question | changes)


@pytest.mark.parametrize("changes", [{"model": "local"}, {"seed": 4}])
def test_a_site_scores_only_the_model_of_its_program(changes, tmp_path, monkeypatch):
    """Otherwise a server could have one model scored under several names, and compute sites' gains from the sums."""
    federation = SimpleNamespace(schedule=SimpleNamespace(seed=3))
    monkeypatch.setattr(site_study, "find_federation", lambda trainer: federation)
    question = {"metric": "test_loss", "model": "fedavg", "seed": 3, "models": ["fedavg"], "seeds": [3]}
    with pytest.raises(ClientFault, match="for another model or seed than the client's program"):
        SiteStudy("fedavg", "test_loss", tmp_path).on_client_question(None, None, "north", question | changes)
