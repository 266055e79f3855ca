"""Invariant 4: the number of processes does not matter. `parallel_script.py` defines the runs."""

import contextlib
import itertools
import os
from importlib.util import find_spec

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch

from lightning_fed import ClientParallelStrategy, FederatedDataModule
from lightning_fed.backends.client_parallel.synchronisation import _share, deliver_values
from lightning_fed.callbacks import SiteMatrix
from lightning_fed.data.dataset_clients import count_batches
from tests import warm_process
from tests.backends.client_parallel.parallel_script import JOBS, SECONDS, SIZES, Net, clients, serve, train
from tests.breadth import quick
from tests.recorders import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]

# One process and two processes return equal results. Other tests compare merged rules, stores and secure sums.
ALIKE = ["by-batches", "nobody", "faults", "private-examples", "talkative"]
SLOW = [
    "personal-in-folder", "own-rule",
    "margins-in-memory", "centers", "skipping", "limits", "matched", "second-door", "control-variates", "own-models",
    "evaluated", "batch-norm-average", "personal-batch-norm-in-folder", "margins-in-folder", "server-momentum",
    "partition", "federated-trainer", "saved-after-validation", "fixed-batch-norm", "personal-in-memory",
    "corrected-gradients", "server-moments", "one-client", "three-clients", "switched", "counted", "spread-out",
    "evaluated-locally", "noisy", "four-rounds", "local-batch-norm-in-folder", "regularizers", "two-optimizers",
    "fused-features", "compressed-down", "averages-of-weights", "max-steps",
    "schedulers", "sampled-classes", "own-statistics",
]  # fmt: skip
OF_PROCESSES = {"clients", "batches", "models", "world"}  # differs between processes
OF_ONE = (r"_step", "so_far")  # logged per batch, or an average so far


AFTER = {f"after-{job}": job for job in ("killed", "raising", "hanging")}  # jobs that resume another job


class Pair:
    """Runs each requested job once in two processes, and stores the results.

    One serving process forks the children of all jobs, so imports run once.
    """

    def __init__(self, folder):
        self.folder = folder
        self.connection, theirs = warm_process.PROCESSES.Pipe()
        self.script = warm_process.start(serve, folder, theirs)
        theirs.close()
        self.ends = {}

    def ended(self, job):
        if job not in self.ends:
            if job in AFTER:
                self.ended(AFTER[job])
            self.connection.send(job)
            assert self.connection.poll(SECONDS + 20), f"no answer to {job}"
            self.ends[job] = self.connection.recv()
        return self.ends[job]

    def found(self, job):
        codes = [code for code, _ in self.ended(job).values()]
        assert codes == [0, 0], "\n".join(self.log(rank, job)[-4000:] for rank in range(2))
        return [torch.load(self.folder / f"{job}-{rank}.pt", weights_only=False) for rank in range(2)]

    def log(self, rank, job):
        return (self.folder / f"{job}-{rank}.log").read_text()

    def close(self):
        self.connection.close()
        self.script.join(5)
        warm_process.end(self.script)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with contextlib.closing(Pair(tmp_path_factory.mktemp("two"))) as pair:
        yield pair


def numbers(value, path=""):
    """All leaves in nested containers, by path."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: each for key, inside in pairs for name, each in numbers(inside, f"{path}/{key}").items()}
    return {path: value}


def is_of_one(path):
    return any(path.endswith(ending) for ending in OF_ONE)


def assert_alike(one, other):
    """Weights to 1e-6 of their norm, numbers to 1e-5; everything else is equal."""
    ours, theirs = (
        {path: each for path, each in numbers(found).items() if not OF_PROCESSES & set(path.split("/"))}
        for found in (one, other)
    )
    assert {path for path in ours if not is_of_one(path)} == {path for path in theirs if not is_of_one(path)}
    assert any(isinstance(value, torch.Tensor) for value in ours.values())
    for path, value in ours.items():
        if is_of_one(path):
            continue
        if isinstance(value, torch.Tensor):
            assert theirs[path].shape == value.shape, path
            assert theirs[path].dtype == value.dtype, path
            distance = (theirs[path].double() - value.double()).norm()
            assert distance <= 1e-6 * value.double().norm(), path
        elif isinstance(value, str) and _is_number(value):  # in a file
            assert float(theirs[path]) == pytest.approx(float(value), rel=1e-5, abs=1e-9, nan_ok=True), path
        elif isinstance(value, float):
            assert theirs[path] == pytest.approx(value, rel=1e-5, abs=1e-9, nan_ok=True), path
        else:
            assert theirs[path] == value, path


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_processes_inside_one_client_are_lightnings_ddp(two):
    """Weights, BatchNorm statistics and logged values of both processes bit for bit; a fit resumes inside a round."""
    for found in two.found("inside-one-client"):
        plain, federated, resumed = (found[name] for name in ("plain", "federated", "resumed"))
        assert plain["steps"] == federated["steps"] == resumed["steps"] == 6
        assert_same(federated["state"], plain["state"])
        assert federated["logged"] == plain["logged"]
        assert_same(resumed["state"], plain["state"])


def test_several_clients_refuse_ddp(two):
    for errors in two.found("ddp-refusals"):
        assert len(errors) == 4
        assert all("strategy='client_parallel'" in error and "strategy='ddp'" in error for error in errors)


@pytest.mark.parametrize("job", quick([*ALIKE, *SLOW], ALIKE))
def test_two_processes_do_what_one_does(job, two, tmp_path):
    if job == "averages-of-weights" and not hasattr(lightning_callbacks, "WeightAveraging"):
        pytest.skip("Lightning 2.6 brings `WeightAveraging`")
    if job == "private-examples" and not (find_spec("opacus") and find_spec("dp_accounting")):
        pytest.skip("opacus or dp-accounting is not installed")
    one, (first, second) = JOBS[job](str(tmp_path), {"devices": 1}), two.found(job)
    assert_alike(one, first)
    assert_same(first["state"], second["state"])
    assert [first[name] for name in ("steps", "rounds", "report")] == [
        second[name] for name in ("steps", "rounds", "report")
    ]
    logged = (numbers(found["logged"]) for found in (first, second))
    ours, theirs = ({path: value for path, value in each.items() if not is_of_one(path)} for each in logged)
    assert ours == pytest.approx(theirs, nan_ok=True)
    if "kept" in first:
        assert first["kept"].keys() == second["kept"].keys()
        for client, kept in first["kept"].items():
            assert kept.keys() == second["kept"][client].keys()
            assert all(torch.equal(value, second["kept"][client][name]) for name, value in kept.items())


def test_both_processes_train(two, tmp_path):
    """Every client trains once; shares differ by at most one visit; both processes serve equally many batches."""
    one = JOBS["by-batches"](str(tmp_path), {"devices": 1})
    first, second = two.found("by-batches")
    for round, chosen in enumerate(one["clients"]):
        shares = first["clients"][round], second["clients"][round]
        assert sorted(shares[0] + shares[1]) == sorted(chosen) == sorted(SIZES)
        work = [sum(count_batches(SIZES[client], 4) for client in share) for share in shares]
        assert abs(work[0] - work[1]) <= 1
        assert first["batches"][round] == second["batches"][round] == max(work)
    for ours, theirs in zip(first["models"], second["models"], strict=True):
        assert_same(ours, theirs)


def test_one_client_is_trained_by_one_process(two):
    counts = [[len(clients) for clients in found["clients"]] for found in two.found("one-client")]
    assert [sorted(pair) for pair in zip(*counts, strict=True)] == [[0, 1]] * 3


def test_a_visit_is_alone(two):
    """The table above has the same in one process."""
    for found in two.found("talkative"):
        assert found["worlds"] == [(1, ())]
        assert (found["world"], found["is_own"]) == (2, True)


def test_a_trainer_that_is_told_to_stop_in_one_process_stops_in_all_after_the_round(two, tmp_path):
    data = FederatedDataModule(clients(), batch_size=4)
    one = train(str(tmp_path), {"devices": 1}, Net, data, 2, personal=["net.4.*"])
    for found in two.found("stopped"):
        assert found["rounds"] == 2
        assert_alike({"state": one["state"], "steps": one["steps"]}, {name: found[name] for name in ("state", "steps")})


def test_values_of_callbacks_with_values_in_some_processes_do_not_mix(two):
    first, second = (found["shared"] for found in two.found("stopped"))
    assert first == [None, [0, None], [0, 1]]
    assert second == [[None, 1], None, [0, 1]]


def test_a_second_yield_in_share_round_is_refused():
    def flow():
        received.append((yield 1))
        yield 2

    received = []
    running = flow()
    next(running)
    with pytest.raises(RuntimeError, match="Expected `share_round` to yield once"):
        deliver_values(running, [1, 5])
    assert received == [[1, 5]]


def test_an_own_share_round_counts():
    class Own(SiteMatrix):
        def share_round(self, trainer, module):
            yield "own"

    assert next(_share(Own("val_loss"), None, None)) == "own"


def test_an_attribute_by_client_is_joined():
    matrix = SiteMatrix("val_loss")
    matrix._models = {"ann": 1}  # noqa: SLF001 - filled during a fit
    flow = _share(matrix, None, None)
    assert next(flow) == {"ann": 1}
    deliver_values(flow, [{"ann": 1}, {"bob": 2}])
    assert matrix._models == {"ann": 1, "bob": 2}  # noqa: SLF001


def test_what_callbacks_draw_for_the_aggregate_is_drawn_anew_in_every_round(two):
    """The table above compares one process with two."""
    drawn = two.found("noisy")[0]["drawn"]
    assert len(drawn) == 3
    for first, second in itertools.combinations(drawn, 2):
        assert (first.abs() > 0).all()
        assert not torch.equal(first, second)


RESUMED = {  # rounds trained by the resumed run; the slow job trains all rounds
    "resumed": None, "slow": range(4), "after-killed": (2, 3), "after-raising": (1, 2, 3), "after-hanging": (1, 2, 3),
}  # fmt: skip


@pytest.mark.parametrize("job", quick(RESUMED, ["after-killed"]))
def test_a_resumed_run_ends_as_one_that_never_was_broken_off(job, two):
    whole = two.found("four-rounds")[0]
    for found in two.found(job):
        assert_same(found["state"], whole["state"])
        assert found["steps"] == whole["steps"]
    if RESUMED[job] is not None:  # with a logger
        logged = two.found(job)[0]["lines"]
        assert list(logged) == list(RESUMED[job])
        assert numbers(logged) == pytest.approx(numbers({round: whole["lines"][round] for round in logged}), rel=1e-6)


def test_an_error_in_one_process_ends_both(two):
    ended = two.ended("raising")
    assert {rank: code for rank, (code, _) in ended.items()} == {0: 1, 1: 1}
    assert "ValueError: in the second process\nRaised in round 2, in the visit of client" in two.log(1, "raising")
    assert "Another process of this fit may have ended: see" in two.log(0, "raising")


def test_a_process_that_is_killed_ends_the_other(two):
    ended = two.ended("killed")
    assert {rank: code for rank, (code, _) in ended.items()} == {0: 1, 1: -9}
    assert "Another process of this fit may have ended: see" in two.log(0, "killed")


def test_a_process_that_hangs_is_waited_for_as_long_as_was_said(two):
    ended = two.ended("hanging")
    assert [(rank, code) for rank, (code, _) in ended.items()] == [(0, 1)]
    assert "Another process of this fit may have ended: see" in two.log(0, "hanging")


@pytest.mark.slow
def test_a_visit_that_hangs_leaves_its_client_out_in_all(two):
    found = two.found("stuck")
    assert_same(found[0]["state"], found[1]["state"])
    (client,) = {client for visits in found[1]["clients"][1:2] for client in visits[:1]}
    for one in found:
        assert one["rounds"] == 3
        assert one["report"]["failed"] == {}  # from the last round
    assert [found[0]["lines"][round]["fed/failed"] for round in range(3)] == [0, 1, 0]
    said = f"Round 2: client {client!r} is excluded: the client's visit took longer than visit_timeout=8 seconds"
    assert said in two.log(1, "stuck")


REFUSED = {
    "every_n_train_steps": "MisconfigurationException: `ModelCheckpoint` would save within a round",
    "on_server_receive": "MisconfigurationException: `Forgetful` receives updates only in the process",
    "sync_batch_norm": "MisconfigurationException: Expected plain BatchNorm layers",
    "sync_batchnorm": "MisconfigurationException: Expected plain BatchNorm layers",
    "module": "MisconfigurationException: Expected every process to build the same module",
    "lambda": "MisconfigurationException: Expected objects for other processes to be picklable",
    "on_server_aggregate": "RuntimeError: The processes have different global models",
    "store": "MisconfigurationException: `OwnStore` keeps client states in one process",
    "all_fail": "OSError: the disk is gone",
    "all_empty": "RuntimeError: There is no new model after 1 failed round (the last is round 1): 5 of 5 clients",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_in_all(case, two):
    for found in two.found("refusals"):
        assert found[case].startswith(REFUSED[case])


@pytest.mark.slow
def test_lightnings_own_launcher(two, tmp_path):
    warm_process.run("tests.backends.client_parallel.parallel_script", tmp_path, "three-clients")
    first, second = (torch.load(tmp_path / f"three-clients-{rank}.pt", weights_only=False) for rank in range(2))
    assert_same(first["state"], second["state"])
    assert_same(first["state"], two.found("three-clients")[0]["state"])


@pytest.mark.slow
def test_lightnings_own_launcher_ends_all(tmp_path):
    _, text = warm_process.run("tests.backends.client_parallel.parallel_script", tmp_path, "raising", code=1)
    assert "ValueError: in the second process" in text


@pytest.fixture
def own_process_group():
    """Destroys the process group left by Lightning."""
    before = dict(os.environ)
    yield
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist")  # Lightning warns even with one process
def test_the_strategy_in_one_process_changes_nothing(own_process_group, tmp_path):
    data = FederatedDataModule(clients(), batch_size=4)
    plain = train(str(tmp_path), {"devices": 1}, Net, data)
    one = train(str(tmp_path), {"devices": 1, "strategy": ClientParallelStrategy()}, Net, data)
    assert_same(plain["state"], one["state"])
    assert plain["lines"] == one["lines"]


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="balance"):
        ClientParallelStrategy(balance="size")
