"""NVFLARE's simulator and POC mode: weights equal one process, even after a killed server or site."""

import csv
import importlib
import json
import re
import sys

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("flwr")  # some shared helpers import flwr
pytest.importorskip("nvflare", reason="`pip install lightning-fed[nvflare]`")

from lightning_fed import Federation
from lightning_fed.algorithms import FedBuff
from lightning_fed.backends.nvflare.transport import from_shareable
from lightning_fed.backends.wire.packets import PacketError
from lightning_fed.cli.main import main
from lightning_fed.recipe import FederatedCLI
from tests import models, references_study, warm_process
from tests.backends.flower.halves import Loses, clients_of, in_process
from tests.backends.nvflare.federations import (
    FEDERATIONS,
    PLAIN_STUDY,
    RANKS,
    SECURE_STUDY,
    SIZES,
    STUDY,
    module,
    plain_module,
    vectors,
)
from tests.backends.nvflare.processes import JOB, ROOT, Poc, simulate
from tests.recorders import assert_same, state_of
from tests.study.sites import SECURED

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def weights_of(folder):
    return torch.load(folder / "server" / "last.ckpt", weights_only=False)["state_dict"]


def reference(trainer, case, callbacks=(), rounds=3):
    data = models.vectors(SIZES)
    return state_of(in_process(trainer, module, data, FEDERATIONS[case](), rounds, callbacks=callbacks)[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FEDERATIONS if case not in (RANKS, "buffer of one", *STUDY)])
def test_the_simulator_trains_as_one_process(case, federated_trainer, tmp_path):
    simulate(tmp_path, case)
    assert_same(weights_of(tmp_path), reference(federated_trainer, case))


@pytest.mark.slow
def test_asynchronous_rounds_replay_in_one_process(federated_trainer, tmp_path):
    simulate(tmp_path, "buffer of one")
    order = tmp_path / "server" / "order.jsonl"
    assert len(order.read_text().splitlines()) == 3
    federation = Federation(FedBuff(1, replay=str(order)), seed=3)
    replayed, _ = in_process(federated_trainer, module, models.vectors(SIZES), federation)
    assert_same(weights_of(tmp_path), state_of(replayed))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_study(tmp_path):
    """Two jobs, one per model. The server learns sums over cases; each site has a table."""
    for case in PLAIN_STUDY:
        simulate(tmp_path, case, seconds=500)
    answers = json.loads((tmp_path / "study" / "study.json").read_text())["answers"]
    assert answers.keys() == SIZES.keys()
    for site, answer in answers.items():
        runs = json.loads((tmp_path / "sites" / "sites" / f"{site}.json").read_text())["runs"]
        pair = [np.subtract(runs[model]["3"]["scores"], 0.5) for model in ("fedavg", "local")]
        count, *totals = answer["fedavg|local"]["3"]
        assert count == len(pair[0])
        assert totals[:2] == pytest.approx([sum(one) for one in pair], rel=1e-9)
        assert totals[-1] == pytest.approx(pair[0] @ pair[1], rel=1e-9)
        assert f"| {site} |" in (tmp_path / "sites" / "sites" / f"{site}.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_study_with_a_secure_sum(tmp_path):
    """Five clients on two sites. The server learns one gain, equal to the mean from the scores at the sites."""
    for case in SECURE_STUDY:
        simulate(tmp_path, case, seconds=500)
    study = json.loads((tmp_path / "study" / "study.json").read_text())
    assert (study["answers"], study["totals"]["fedavg"][0]) == ({}, 5)
    gains = []
    for site in SECURED:
        runs = json.loads((tmp_path / "sites" / "sites" / f"{site}.json").read_text())["runs"]
        fedavg, local = (np.array(runs[model]["3"]["scores"]) for model in ("fedavg", "local"))
        gains.append((float(np.mean(local - fedavg)), float(np.var(local - fedavg, ddof=1) / len(local))))
    mean, variance, _ = references_study.random_effects(*map(list, zip(*gains, strict=True)))
    (row,) = csv.DictReader((tmp_path / "study" / "study.csv").read_text().splitlines())
    half = stats.t.ppf(0.975, 4) * variance**0.5
    assert [float(row[name]) for name in ("gain", "low", "high")] == pytest.approx([mean, mean - half, mean + half])


@pytest.mark.slow
@pytest.mark.skipif(not warm_process.CAN_FORK, reason="needs processes that are forked")
@pytest.mark.timeout(600)
def test_sites_with_two_processes_train_as_one_process(federated_trainer, tmp_path):
    """In the first round, a killed process excludes the second site by name. New processes train in later rounds."""
    (tmp_path / "deadly").touch()
    said = simulate(tmp_path, RANKS, seconds=500)
    assert re.findall(r"Round \d+: client .* is excluded: .*", said) == [
        "Round 1: client 'site-2' is excluded: process 2 of its 2 processes ended with signal SIGKILL."
    ]
    fitted = federated_trainer(federation=FEDERATIONS[RANKS](), max_rounds=3, callbacks=[Loses("site-2", rounds=(0,))])
    expected = plain_module()
    fitted.fit(expected, datamodule=clients_of(vectors(), 8))
    weights = weights_of(tmp_path)
    for name, value in state_of(expected).items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_the_job_of_a_recipe_trains_as_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    recipe = tmp_path / "recipe.yaml"
    text = (ROOT / "recipes" / "synthetic.yaml").read_text()
    quiet = "accelerator: cpu\n  enable_progress_bar: false\n  enable_model_summary: false"
    for long, short in {
        "num_clients: 30": "num_clients: 5",  # on two sites
        "clients_per_round: 10": "clients_per_round: 3",
        "local_epochs: 5": "local_epochs: 1",
        "max_rounds: 30": f"max_rounds: 2\n  {quiet}",
    }.items():
        assert long in text
        text = text.replace(long, short)
    recipe.write_text(text)
    main(["nvflare", "new", str(tmp_path / "hospitals"), "-c", str(recipe)])
    simulate(tmp_path, "", tmp_path / "hospitals")
    here = FederatedCLI(["-c", str(recipe), "--trainer.logger", "false", "--trainer.callbacks", "null"], run=False)
    here.trainer.fit(here.model, datamodule=here.datamodule)
    state = torch.load(tmp_path / "runs" / "hospitals" / "last.ckpt", weights_only=False)["state_dict"]
    assert_same(state, state_of(here.model))


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_when_the_job_is_submitted_again(federated_trainer, tmp_path):
    """In POC mode with certificates, killed while both sites train. State stored in this round is ignored."""
    case = "scaffold, kept optimizers"
    with Poc(tmp_path, case) as poc:
        for site in SIZES:
            (tmp_path / f"{site}-waits").touch()
        poc.submit()
        for site in SIZES:
            poc.wait_for(tmp_path / f"{site}-1")
        poc.kill("server")
        for site in SIZES:
            (tmp_path / f"{site}-waits").unlink()
        poc.start("server")
        assert poc.wait(poc.submit()) == "FINISHED:COMPLETED"
    assert_same(weights_of(tmp_path), reference(federated_trainer, case))


@pytest.mark.slow
def test_a_site_that_is_killed_is_left_out(federated_trainer, tmp_path):
    """NVFLARE never restarts a job on a site, so later rounds exclude the site."""
    with Poc(tmp_path, "fedavg", min_clients=1, rest=20, reconnect=2) as poc:
        (tmp_path / "site-2-waits").touch()
        job = poc.submit()
        poc.wait_for(tmp_path / "site-2-1")
        poc.kill("site-2")
        assert poc.wait(job) == "FINISHED:COMPLETED"
    assert_same(weights_of(tmp_path), reference(federated_trainer, "fedavg", [Loses("site-2", rounds=(1, 2))]))


@pytest.mark.slow
def test_a_link_that_is_cut_while_a_site_trains(federated_trainer, tmp_path):
    """The site delivers the answer once the link is back, so no update is lost."""
    with Poc(tmp_path, "fedavg", has_link=True) as poc:
        (tmp_path / "site-2-waits").touch()
        job = poc.submit()
        poc.wait_for(tmp_path / "site-2-1")
        poc.link.cut(8)
        (tmp_path / "site-2-waits").unlink()
        assert poc.wait(job) == "FINISHED:COMPLETED"
        assert poc.link.cuts == 1
    assert_same(weights_of(tmp_path), reference(federated_trainer, "fedavg"))


@pytest.mark.slow
def test_hostile_answers_exclude_their_site(federated_trainer, tmp_path, monkeypatch):
    """Flower's table of answers and NVFLARE's own, in one job: NVFLARE would end the job after an undecodable one."""
    for name, value in {"FEDJOB_HOSTILE": "site-2", "FEDJOB_FOLDER": str(tmp_path), "FEDJOB_DEADLINE": "{}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(JOB / "app" / "custom")
    hostile = importlib.import_module("fedjob.halves").HOSTILE
    assert len(hostile) > 30
    said = simulate(tmp_path, "fedavg", seconds=600, min_clients=1, rest=20)
    reasons = dict(re.findall(r"Round (\d+): client 'site-2' is excluded: (.*)", said))
    for number, (name, (_, reason)) in enumerate(hostile.items(), 1):
        assert reason in reasons.get(str(number), ""), name
    assert len(reasons) == len(hostile)
    loses = Loses("site-2", rounds=range(len(hostile)))
    assert_same(weights_of(tmp_path), reference(federated_trainer, "fedavg", [loses], len(hostile) + 1))


@pytest.mark.parametrize("content", [{}, {"text": 3, "data": b""}, {"text": "{}", "data": [1]}])
def test_what_is_no_message(content):
    with pytest.raises(PacketError, match="not from lightning-fed"):
        from_shareable(content)
