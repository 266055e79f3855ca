"""Asynchronous rounds with clients on other machines, in rehearsed deployments: order, replay, restarts, refusals."""

import copy
import json
import os
from dataclasses import replace

import pytest
import torch

from lightning_fed import Faults, FederatedDataModule, Federation, Method
from lightning_fed.algorithms import FedAsync, FedAvg, FedBuff
from lightning_fed.backends.rehearsal.profiles import Profile, Sites
from lightning_fed.backends.rehearsal.rehearsal import Plan, rehearse
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.compression import Quantized
from tests import models
from tests.recorders import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

DATA = models.vectors({"ann": 33, "bob": 20, "cid": 12})
SECONDS = {"ann": 70.0, "bob": 10.0, "cid": 45.0}
SITES = {client: Profile(seconds_per_step=seconds, batches=1) for client, seconds in SECONDS.items()}
RESTARTS = Profile(restarts=600.0, downtime=20.0)


def clients():
    return FederatedDataModule(models.as_datasets(DATA), batch_size=16)


def deployment(method, rounds=6, server=RESTARTS, sites=SITES, module=None, deadline=None, **options):
    module = models.Module(models.dropout_mlp(), models.momentum) if module is None else module
    return Plan(
        Sites(server, sites, deadline or Deadline()),
        lambda: Federation(copy.deepcopy(method), seed=3, **options),
        rounds,
        model=lambda: copy.deepcopy(module),
        data=lambda client: clients(),
        trains=True,
    )


def last_model(outcome):
    assert not outcome.violations
    assert outcome.failure is None
    return outcome.visits[max(outcome.visits)].model


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedBuff(2), {"optimizer_state": "keep"}),
        (FedBuff(2), {"personal": ["net.3.*"], "steps": [Quantized(8)]}),
        pytest.param(FedAsync(), {"clients_per_round": 2}, marks=pytest.mark.slow),
    ],
    ids=["buffer", "personal", "each arrival"],
)
def test_a_recorded_deployment_replays_in_one_process(method, options, federated_trainer, tmp_path):
    """Bit for bit, with killed servers, stale updates, dropout and momentum, and twice."""
    module = models.Module(models.dropout_mlp(), models.momentum)
    outcome = rehearse(deployment(method, 8, module=module, **options), 1)
    expected = last_model(outcome)
    assert sum("is killed" in text for _, machine, text in outcome.log if machine == "server") > 0
    assert any(version < arrived for arrived, _, version, _ in outcome.order)
    (tmp_path / "order").write_text("".join(f"{json.dumps(line)}\n" for line in outcome.order))
    method = type(method)(replay=str(tmp_path / "order"), **({"buffer": 2} if isinstance(method, FedBuff) else {}))
    for _ in range(2):
        here = copy.deepcopy(module)
        trainer = federated_trainer(federation=Federation(method, seed=3, **options), max_rounds=8)
        trainer.fit(here, datamodule=clients())
        assert_same({name: here.state_dict()[name] for name in expected}, expected)


def test_the_order_follows_the_speeds_of_the_sites():
    """Visits of 140, 20 and 45 s in a queue by hand, for arrivals before 130 s: round, client, start version."""
    outcome = rehearse(deployment(FedBuff(1), 8, Profile()), 0)
    last_model(outcome)
    assert [line[:3] for line in outcome.order] == [
        [0, "bob", 0], [1, "bob", 1], [2, "cid", 0], [3, "bob", 2],
        [4, "bob", 4], [5, "cid", 3], [6, "bob", 5], [7, "bob", 7],
    ]  # fmt: skip


def test_a_buffer_for_all_clients_is_a_synchronous_round():
    """Bit for bit, although the answers arrive in another order."""
    buffered = rehearse(deployment(FedBuff(3, 0, "examples"), 3), 0)
    assert [client for _, client, _, _ in buffered.order] == 3 * ["bob", "cid", "ann"]
    assert_same(last_model(buffered), last_model(rehearse(deployment(FedAvg(), 3), 0)))


def test_a_client_that_dies_with_an_order_is_excluded():
    """The other clients train in the meantime. Each order of the dead client ends at the time limit."""
    sites = {**SITES, "ann": replace(SITES["ann"], memory=1e-9)}
    outcome = rehearse(deployment(FedBuff(2), 8, Profile(), sites, deadline=Deadline(100, reconnect=10.0)), 0)
    last_model(outcome)
    assert {client for client, _ in outcome.excluded} == {"ann"}
    assert {client for _, client, _, _ in outcome.order} == {"bob", "cid"}
    assert len(outcome.order) == 2 * 8


class Scheduled(models.Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": FedBuff(2, replay=os.devnull)}, "does not support `replay`"),
        ({"deadline": Deadline(60, min_clients=2)}, "does not support `min_clients` in `Deadline`"),
        ({"module": Scheduled(models.mlp(), models.momentum)}, "does not support learning-rate schedulers"),
        ({"method": Method(FedBuff(2), callbacks=[ClientEvaluation()])}, "does not support `ClientEvaluation`"),
        ({"faults": Faults(min_clients=3)}, "`min_clients` to be at most the buffer size 2"),
    ],
    ids=["replay", "quorum", "scheduler", "evaluation", "min_clients"],
)
def test_settings_without_a_meaning_on_a_network_are_refused(changes, message):
    outcome = rehearse(deployment(**{"method": FedBuff(2), **changes}), 0)
    assert message in outcome.failure
    assert not any("receives" in text for _, _, text in outcome.log)
