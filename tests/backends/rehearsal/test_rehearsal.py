"""A deployment in virtual time: exact times and bytes, equal logs for equal seeds, and invariants that find bugs."""

import copy
import functools
import gc
import json
import math
import signal
import weakref
from dataclasses import replace

import pytest
import torch

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.backends.rehearsal.profiles import Profile, Sites, read_sites
from lightning_fed.backends.rehearsal.rehearsal import Outcome, Plan, rehearse
from lightning_fed.backends.rehearsal.summary import find_quantile, rank_outcomes, suggest_deadline, write_log
from lightning_fed.backends.site.gate import SiteGate
from lightning_fed.backends.wire import transport
from lightning_fed.backends.wire.answer_file import AnswerFile
from lightning_fed.backends.wire.packets import Packet
from lightning_fed.backends.wire.remote_client_store import RemoteClientStore
from lightning_fed.backends.wire.secure_sum_client import ClientSum
from lightning_fed.backends.wire.server import ServerRunner
from lightning_fed.backends.wire.transport import Deadline, Transport
from lightning_fed.client.client_store import FolderStore
from lightning_fed.errors import ClientFault
from tests import models
from tests.backends.rehearsal.plans import build_plans, build_sites
from tests.breadth import quick
from tests.recorders import assert_same

PLANS = build_plans()
SEEDS = [
    *((name, 1) for name in PLANS),
    ("restarts", 486),  # a late order of a killed server replaced the newer state
    ("restarts", 681),  # polling misses a connection of a quarter of a second
    ("asynchronous", 3343),  # each kill after the write of a state left one more file
    ("subset", 739),  # the server's process deleted the bytes lost by a site
]


@functools.cache
def rehearse_once(name, seed):
    return rehearse(PLANS[name], seed)


@pytest.mark.parametrize(("name", "seed"), quick(SEEDS, [case for case in SEEDS if case != ("restarts", 1)]))
def test_all_invariants_hold(name, seed):
    outcome = rehearse_once(name, seed)
    assert not outcome.violations
    assert outcome.failure is None
    assert outcome.rounds == PLANS[name].rounds


def test_killed_servers_leave_no_object_and_no_signal_handler(monkeypatch):
    servers, handler = [], signal.getsignal(signal.SIGTERM)

    def keep_reference(server, *arguments, **options):
        servers.append(weakref.ref(server))
        return run(server, *arguments, **options)

    run = ServerRunner.run
    monkeypatch.setattr(ServerRunner, "run", keep_reference)
    rehearse(replace(PLANS["restarts"], rounds=2), 1)
    assert len(servers) > 1
    assert signal.getsignal(signal.SIGTERM) is handler
    gc.collect()
    assert not any(server() for server in servers)


def test_equal_seeds_have_equal_logs():
    first, second = rehearse(PLANS["rough"], 1), rehearse_once("rough", 1)
    assert first.log == second.log
    assert write_log(first) == write_log(second)
    assert first.log != rehearse_once("rough", 2).log
    assert torch.equal(first.visits[3].model["weight"], second.visits[3].model["weight"])


def test_times_and_bytes_are_exact():
    """Without faults: 4 rounds of 20 batches in the slower client, and a message of 1 MB each way at 8 Mbit/s."""
    profile = Profile(seconds_per_step=3.0, batches=10, bandwidth=8.0, latency=0.5)
    sites = Sites(Profile(), {"a": profile, "b": Profile(seconds_per_step=1.0, batches=10, bandwidth=8.0, latency=0.5)})
    outcome = rehearse(Plan(sites, lambda: Federation(local_epochs=2, seed=0), 4, model_bytes=1e6), 0)
    assert outcome.megabytes == pytest.approx(4 * 2 * 2 * 1.0)
    per_round = 20 * 3.0 + 2 * (1.0 + 0.5)
    assert outcome.hours * 3600 == pytest.approx(4 * per_round, rel=0.03)
    assert sorted(round(seconds) for seconds in outcome.answer_seconds) == 4 * [23] + 4 * [63]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_training_equals_a_fit_in_one_process(federated_trainer):
    data = models.vectors({"ann": 33, "bob": 20})
    module = models.Module(models.mlp(), models.momentum)
    here = copy.deepcopy(module)
    fitted = federated_trainer(federation=Federation(seed=3), max_rounds=2)
    fitted.fit(here, datamodule=FederatedDataModule(models.as_datasets(data), batch_size=16))
    plan = Plan(
        Sites(Profile(), {client: Profile() for client in data}),
        lambda: Federation(seed=3),
        2,
        model=lambda: copy.deepcopy(module),
        data=lambda client: FederatedDataModule(models.as_datasets(data), batch_size=16),
        trains=True,
    )
    outcome = rehearse(plan, 0)
    assert not outcome.violations
    assert_same(outcome.visits[1].model, here.state_dict())


def read_any_answer(self):
    """Reads the last answer, also for another order."""
    if not self._path.exists():
        return None
    _, text, data = self._path.read_bytes().split(b"\n", 2)
    return Packet(text.decode(), data)


def read_secrets(self, round, stage):
    """Reads a step's secrets without deleting the file."""
    path = self._folder / f"{round}-{stage}.json"
    if not path.exists():
        raise ClientFault("it has no secrets")
    return json.loads(path.read_text())


def need_newest(self, client):
    return self._checkpoints[-1].get(client, -1) + 1


BUGS = {
    "the kept state is forgotten": ("rough", RemoteClientStore, "kept", lambda self, client: -1),
    "an old answer is sent again": ("rough", AnswerFile, "read", read_any_answer),
    "a lost connection is not noticed": ("rough", Transport, "_miss", lambda self, *args: None),
    "a state is not deleted": ("rough", FolderStore, "prune", lambda self, client, round: None),
    "answers wait in memory": ("quorum", transport, "put_aside", lambda answer: lambda: answer),
    "a failed round is not undone": ("quorum", RemoteClientStore, "commit", lambda self, *args: None),
    "keys are used twice": ("secure sum", ClientSum, "_take", read_secrets),
    "the earlier checkpoint's states are deleted": ("write cache", RemoteClientStore, "needed", need_newest),
    "answers are not recorded": ("policy", SiteGate, "_append", lambda self, *args: None),
}


@pytest.mark.parametrize("name", BUGS)
def test_bugs_break_invariants(name, monkeypatch):
    plan, owner, method, bug = BUGS[name]
    monkeypatch.setattr(owner, method, bug)
    violations = (text for seed in (3, *range(6)) for text in rehearse(PLANS[plan], seed).violations)
    assert next(violations, "").startswith("seed ")


def test_too_little_memory_excludes_a_client():
    sites = build_sites(Profile(), count=2)
    sites = Sites(Profile(), {**sites.sites, "small": Profile(memory=1.0)}, Deadline(600, reconnect=10.0))
    outcome = rehearse(Plan(sites, lambda: Federation(seed=0), 3, model_bytes=0.5e9), 0)
    assert {client for client, _ in outcome.excluded} == {"small"}
    assert any(text == "needs more memory than the machine has" for _, _, text in outcome.log)
    assert not outcome.violations


def test_too_little_memory_of_the_server_ends_the_run():
    sites = {"a": Profile()}
    outcome = rehearse(Plan(Sites(Profile(memory=3.2), sites), Federation, 1, model_bytes=0.5e9), 0)
    assert (outcome.rounds, outcome.failure) == (0, "the server needs 3.25 GB of memory, more than the machine has")
    enough = rehearse(Plan(Sites(Profile(memory=3.3), sites), Federation, 1, model_bytes=0.5e9), 0)
    assert (enough.rounds, enough.failure) == (1, None)


def test_the_suggested_deadline_includes_all_clients():
    sites = build_sites(Profile(batches=100), deadline=Deadline(250))
    plan = Plan(sites, lambda: Federation(seed=0), 3)
    outcomes = [rehearse(plan, 0)]
    assert {client for client, _ in outcomes[0].excluded} == {"site-3"}
    longer = Plan(sites, plan.federation, 3, Deadline(600))
    outcomes = [rehearse(longer, 0)]
    assert suggest_deadline(longer, outcomes).startswith("Suggested: Deadline(481, min_clients=4, rest=301)")
    assert not rehearse(Plan(sites, plan.federation, 3, Deadline(481, min_clients=4, rest=301)), 0).excluded


def test_quantiles_and_ranks():
    assert [find_quantile([5.0, 1.0, 3.0], share) for share in (0.0, 0.34, 0.67, 1.0)] == [1.0, 3.0, 5.0, 5.0]
    outcomes = [Outcome(0, rounds=5), Outcome(1, rounds=4), Outcome(2, rounds=5, violations=["lost"])]
    assert [outcome.seed for outcome in rank_outcomes(outcomes)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one site"),
        ("[sites.a]\n[network]\n", "network"),
        ("[sites.a]\nspeed = 3\n", "table `sites.a`.*'speed'"),
        ("[sites.a]\nbatches = 2.5\n", "`batches`.*2.5"),
        ("[sites.a]\nloss = 1.0\n", r"`loss` to be in \[0, 1\), but got 1.0"),
        ("[sites.a]\navailability = 0.0\n", r"`availability` in \(0, 1\]"),
        ("[sites.a]\nrestarts = -1\n", "`restarts` to be at least 0"),
    ],
)
def test_wrong_profiles_are_refused(text, message, tmp_path):
    (tmp_path / "sites.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_sites(tmp_path / "sites.toml")


def test_profiles_take_defaults_from_the_table(tmp_path):
    (tmp_path / "sites.toml").write_text(
        "patience = 5\n[deadline]\nseconds = 9\n[server]\nrestarts = 1\n"
        "[sites.defaults]\nbatches = 3\nlatency = 1\n[sites.a]\n[sites.b]\nbatches = 4\n"
    )
    sites = read_sites(tmp_path / "sites.toml")
    assert sites.sites == {"a": Profile(batches=3, latency=1), "b": Profile(batches=4, latency=1)}
    assert (sites.server.restarts, sites.deadline, sites.patience) == (1, Deadline(9), 5.0)
    assert sites.sites["a"].memory == math.inf
