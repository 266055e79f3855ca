"""Cuts a node's connection during a download, training and an upload, on Flower's processes."""

import re
from contextlib import contextmanager

import pytest

pytest.importorskip("flwr")

from lightning_fed.messages import tensor_bytes
from tests.backends.flower.halves import ALL_CASES, SIZES, Loses, in_process
from tests.backends.flower.processes import Deployment
from tests.backends.flower.test_flower_processes import (
    Workers,
    compare,
    finish,
    run,
    sleeper,
    start_node,
    wait_until,
    write_app,
)
from tests.backends.links import Link

__all__ = ["sleeper"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
]

CASE, ROUNDS, SECONDS = ALL_CASES["wide"], 3, 8.0


@contextmanager
def two_nodes(folder):
    """A deployment, and the link to the second of two nodes."""
    with Deployment(folder) as deployment, Workers(folder, "wide"), Link(deployment.address) as link:
        deployment.configure()
        start_node(deployment, 0)
        start_node(deployment, 1, address=link.address)
        yield deployment, link


@pytest.mark.parametrize("phase", ["download", "training", "upload"])
def test_the_link_is_back_within_the_time_limit(phase, federated_trainer, tmp_path, sleeper):
    asleep = sleeper("bob", 2 * SECONDS if phase == "training" else 0)
    here, _ = in_process(federated_trainer, CASE.module, CASE.data(SIZES), CASE.federation(), ROUNDS)
    asleep.unlink(missing_ok=True)
    size = tensor_bytes(here.state_dict())
    with two_nodes(tmp_path) as (deployment, link):
        if phase != "training":  # in the middle of round 1
            link.cut_after("down" if phase == "download" else "up", int(1.5 * size), SECONDS)
        process = run(deployment, write_app(tmp_path), tmp_path / "run", "wide", rounds=ROUNDS)
        if phase == "training":
            wait_until(asleep.exists)
            link.cut(SECONDS)
        finish(deployment, process)
        assert link.cuts == 1
        assert "is excluded" not in deployment.log("run")
    compare(tmp_path / "run", here)


def test_the_link_is_back_after_the_time_limit(federated_trainer, tmp_path, sleeper):
    """The round ends without the client; the late answer is dropped with a log line; then the client joins again."""
    asleep, rounds = sleeper("bob", 1), 5
    with two_nodes(tmp_path) as (deployment, link):
        process = run(deployment, write_app(tmp_path), tmp_path / "run", "wide", rounds=rounds, limit=40.0)
        wait_until(asleep.exists)
        link.cut(50)
        finish(deployment, process)
        log = deployment.log("run")
    assert "Dropped the late answer of client 'bob' to round 2." in log
    left_out = [
        (client, int(round) - 1) for round, client in re.findall(r"Round (\d+): client '(\w+)' is excluded", log)
    ]
    assert ("bob", 1) in left_out
    losses = [Loses(client, (round,)) for client, round in left_out]
    here, _ = in_process(federated_trainer, CASE.module, CASE.data(SIZES), CASE.federation(), rounds, losses)
    compare(tmp_path / "run", here)
