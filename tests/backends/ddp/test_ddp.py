"""Several processes per client: a visit equals one process with larger batches, and plain Lightning DDP."""

import logging
import os
from multiprocessing import forkserver

import pytest

pytest.importorskip("flwr")

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import TensorDataset

from lightning_fed import Faults, Federation
from lightning_fed.backends.ddp.processes import Processes
from lightning_fed.backends.ddp.runner import DistributedRunner, build_runner
from lightning_fed.backends.wire.runner import ClientRunner
from lightning_fed.callbacks import ClassPrototypes
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxSamples
from tests import models, warm_process
from tests.backends.ddp import sites
from tests.backends.ddp.sites import SIZES, fit, module
from tests.backends.flower.halves import Loses, clients_of
from tests.breadth import quick
from tests.recorders import assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked"),
    pytest.mark.timeout(280),
]


@pytest.fixture
def own_server(monkeypatch):
    """The package starts its own process for imports, as in use, instead of the tests' process."""
    server = forkserver.ForkServer()
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    yield server
    server._stop()  # noqa: SLF001 - for tests


@pytest.fixture(autouse=True)
def no_process_left(request, monkeypatch):
    """Ends the processes of all sites after a test."""
    if "own_server" in request.fixturenames:
        request.getfixturevalue("own_server")  # stopped after the processes
    else:
        warm_process.start_server()
    groups, start = [], Processes._start  # noqa: SLF001 - the public door hides the processes
    monkeypatch.setattr(Processes, "_start", lambda self: [groups.append(self), start(self)])
    yield groups
    for group in groups:
        group.stop()


def one_process(trainer, federation, rounds, make=module, callbacks=()):
    """The same federation in one process, with batches as large as those of two processes together."""
    fitted, model = trainer(federation=federation, max_rounds=rounds, callbacks=list(callbacks)), make()
    fitted.fit(model, datamodule=clients_of(models.vectors(SIZES), 8))
    return fitted, model


def assert_close(model, other):
    for name, value in state_of(other).items():
        torch.testing.assert_close(state_of(model)[name], value, rtol=0, atol=1e-6)


def test_two_sites_of_two_processes_train_as_one_process_and_resume(federated_trainer, tmp_path, no_process_left):
    """Shuffled, two epochs, kept momentum; the second half resumes with new processes, bit for bit."""

    def federation():
        return Federation(local_epochs=2, optimizer_state="keep", seed=3)

    whole, server = fit(tmp_path / "whole", 2, federation)
    assert [len(group._pipes) for group in no_process_left] == [2, 2]  # noqa: SLF001
    assert server.callback_metrics["fed/num_samples"] == sum(SIZES.values())
    fitted, expected = one_process(federated_trainer, federation(), 2)
    assert_close(whole, expected)
    steps = sum(2 * size // 8 for size in SIZES.values()) * 2
    assert server.global_step == fitted.global_step == steps
    fit(tmp_path / "halves", 1, federation)
    resumed, _ = fit(tmp_path / "halves", 2, federation)
    assert_same(state_of(resumed), state_of(whole))


@pytest.mark.parametrize("make", quick([module, sites.normed], [sites.normed]))
def test_a_visit_is_lightnings_ddp(make, tmp_path):
    """One round of one site, bit for bit, also with BatchNorm and Adam."""
    data, federation = {"ann": models.vectors(SIZES)["ann"]}, Federation(local_epochs=2, batch_norm="average", seed=1)
    trained, _ = fit(tmp_path, 1, lambda: federation, make=make, data=data)
    (visit,) = federation.schedule.cohort(0, ["ann"]).visits
    codes = sites.run_ranks(sites.plain_ddp, tmp_path / "plain.pt", make, "ann", visit.seed, 2)
    assert codes == [0, 0]
    assert_same(state_of(trained), torch.load(tmp_path / "plain.pt"))


@pytest.mark.slow
def test_a_process_for_imports_is_started_by_the_package(own_server, federated_trainer, tmp_path):
    trained, _ = fit(tmp_path, 1, lambda: Federation(seed=3))
    assert own_server._forkserver_pid is not None  # noqa: SLF001
    _, expected = one_process(federated_trainer, Federation(seed=3), 1)
    assert_close(trained, expected)


@pytest.mark.slow
def test_synchronised_batch_norm_has_the_statistics_of_joint_batches(federated_trainer, tmp_path):
    def federation():
        return Federation(local_epochs=2, batch_norm="average", seed=3)

    trained, _ = fit(tmp_path, 2, federation, make=sites.synchronised)
    _, expected = one_process(federated_trainer, federation(), 2, make=sites.unsynchronised)
    assert_close(trained, expected)
    assert int(trained.net[1].num_batches_tracked) == 2 * 2 * SIZES["ann"] // 8


BREAKS = [
    ("kill", 1, "process 2 of its 2 processes ended with signal SIGKILL"),
    ("kill", 0, "process 1 of its 2 processes ended with signal SIGKILL"),
    ("raise", 1, "the client's program raised RuntimeError; see the client's log"),
    ("sleep", 0, "the client's visit took longer than visit_timeout=20 seconds"),
]


@pytest.mark.parametrize(("action", "rank", "reason"), quick(BREAKS, BREAKS[:1]))
def test_a_broken_process_excludes_the_client_by_name(
    action, rank, reason, federated_trainer, tmp_path, caplog, monkeypatch
):
    """No hang, and the next round trains with new processes."""

    def federation():
        return Federation(faults=Faults(visit_timeout=20 if action == "sleep" else None))

    (tmp_path / "token").touch()
    monkeypatch.setenv("FRAGILE", f"{action}:{rank}:{tmp_path / 'token'}")
    with caplog.at_level(logging.WARNING, "lightning_fed"):
        trained, _ = fit(tmp_path, 2, federation)
    assert f"client 'ann' is excluded: {reason}" in caplog.text
    assert not (tmp_path / "token").exists()
    monkeypatch.delenv("FRAGILE")
    _, expected = one_process(federated_trainer, federation(), 2, callbacks=[Loses("ann", rounds=(0,))])
    assert_close(trained, expected)


def test_a_secure_sum_has_each_site_once(federated_trainer, tmp_path):
    """The masks cancel only if each site sends one masked update."""

    def federation():
        return Federation(steps=[MaxSamples(40), SecureSum(5.0)], seed=3)

    trained, server = fit(tmp_path, 1, federation)
    assert server.callback_metrics["fed/failed"] == 0
    _, expected = one_process(federated_trainer, federation(), 1)
    for name, value in state_of(expected).items():
        torch.testing.assert_close(state_of(trained)[name], value, rtol=0, atol=1e-4)  # stochastic rounding


@pytest.mark.parametrize(
    ("trainer", "callbacks", "text"),
    [
        ({"num_nodes": 2, "strategy": "ddp"}, [], "num_nodes=1, because the processes of a client run on one machine"),
        ({"strategy": "ddp", "plugins": []}, [lambda: None], "Define functions and classes at the top"),
        ({"strategy": "ddp_spawn"}, [], "Expected strategy='ddp' for .* but got strategy='ddp_spawn'"),
        ({"strategy": "fsdp", "accelerator": "cpu"}, [], "."),
        ({}, [ClassPrototypes()], "`ClassPrototypes` runs in a client's training"),
        ({"strategy": "ddp", "sync_batchnorm": True}, [], "Expected sync_batchnorm=False on CPUs"),
    ],
)
def test_refusals_before_training(trainer, callbacks, text, tmp_path):
    with pytest.raises(Exception, match=text) as raised:
        build_runner(
            Federation(), module, {}, {"accelerator": "cpu", "devices": 2, **trainer}, callbacks=callbacks,
            store=tmp_path,
        )  # fmt: skip
    assert text == "." or isinstance(raised.value, MisconfigurationException)


@pytest.mark.parametrize(
    ("trainer", "kind", "devices"),
    [
        ({"accelerator": "gpu", "devices": [2, 3]}, DistributedRunner, [2]),
        ({"accelerator": "gpu", "devices": [2]}, ClientRunner, [2]),
        ({"accelerator": "cpu", "devices": "auto"}, ClientRunner, "auto"),
    ],
)
def test_the_answering_process_has_the_first_selected_device(trainer, kind, devices, tmp_path, monkeypatch):
    """Sites with different numbers of GPUs may have equal arguments. The machine of the test needs no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    trainer = {**trainer, "strategy": "ddp"}
    runner = build_runner(Federation(), module, clients_of(models.vectors(SIZES), 4), trainer, store=tmp_path)
    assert type(runner) is kind
    assert runner._options["devices"] == devices  # noqa: SLF001 - a fit would need the GPU
    assert "strategy" not in runner._options  # noqa: SLF001


ERRORS = [
    ("", sites.Broken, {"faults": Faults(max_failed_rounds=None)}, "OSError('unreadable')"),
    ("raise", TensorDataset, {"faults": Faults(max_failed_rounds=None)}, "RuntimeError('a broken process')"),
    ("sleep", TensorDataset, {"faults": Faults(visit_timeout=3)}, "VisitTimeout"),
]


@pytest.mark.parametrize(("action", "data", "options", "error"), quick(ERRORS, ERRORS[:1]))
def test_an_error_in_one_process_ends_all_processes_of_a_plain_fit(action, data, options, error, tmp_path):
    """The other process does not wait for the gradients of the batch, also if failed rounds are allowed."""
    (tmp_path / "token").touch()
    fragile = f"{action}:1:{tmp_path / 'token'}"
    codes = sites.run_ranks(sites.one_client, tmp_path / "error", data, options, FRAGILE=fragile)
    assert None not in codes
    assert 0 not in codes
    assert error in (tmp_path / "error-1").read_text()
