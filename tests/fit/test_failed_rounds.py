"""Failed rounds, and the end after several failures; `tests/test_faults.py` has complete fits."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.fit.failed_rounds import FailedRounds
from lightning_fed.server.server import RoundReport
from tests.census_script import Regression

CAUSE = "the client has no examples"


@pytest.mark.parametrize(("min_clients", "received"), [(1, {}), (3, {}), (3, {"ann": 5})])
def test_failures_end_the_fit_also_where_fewer_clients_came_than_are_needed(min_clients, received):
    """Two failing clients fail the round, even if three clients are required."""
    failed = FailedRounds()
    reports = [RoundReport(round, received=received, failed={"bob": CAUSE, "cid": CAUSE}) for round in range(2)]
    failed.count(reports[0], 2, min_clients, num_clients=4)
    with pytest.raises(RuntimeError, match=f"2 consecutive failed rounds .*for example client 'bob': {CAUSE}"):
        failed.count(reports[1], 2, min_clients, num_clients=4)


def test_dropouts_alone_never_count():
    failed = FailedRounds()
    for round in range(5):
        failed.count(RoundReport(round, received={"ann": 5}), 1, min_clients=3, num_clients=4)
        failed.count(RoundReport(round), 1, min_clients=3, num_clients=4)
    assert failed == FailedRounds()


def test_one_error_of_all_clients_is_raised_at_once():
    """A single failing client does not blame the program; all of at least two clients do."""
    failed = FailedRounds()
    errors = {"ann": KeyError("x"), "bob": KeyError("y")}
    of_bob = {"bob": errors["bob"]}
    failed.count(RoundReport(0, failed={"bob": CAUSE}), 4, num_clients=4, errors=of_bob)
    with pytest.raises(KeyError, match="x") as raised:
        failed.count(RoundReport(1, failed=dict.fromkeys(errors, CAUSE)), 4, num_clients=4, errors=errors)
    assert "In round 2 all 2 clients failed with this error" in raised.value.__notes__[0]
    mixed = {**errors, "bob": ValueError("y")}
    failed.count(RoundReport(2, failed=dict.fromkeys(mixed, CAUSE)), 4, num_clients=4, errors=mixed)
    assert failed.in_a_row == 3


def test_a_limit_of_none_lets_the_fit_go_on():
    failed = FailedRounds()
    for round in range(9):
        failed.count(RoundReport(round, failed={"bob": CAUSE}), None)
    assert failed == FailedRounds(in_a_row=9)


@pytest.mark.parametrize("trained_rounds", [0, 1])
def test_a_fit_that_ends_after_failures_alone_raises(trained_rounds, federated_trainer):
    class FailLater(FederatedCallback):
        def on_server_receive(self, trainer, module, update):
            if trainer.current_epoch >= trained_rounds:
                update.num_samples = 0

    trainer = federated_trainer(max_rounds=2, callbacks=[FailLater()])
    data = FederatedDataModule({client: TensorDataset(torch.ones(4, 2)) for client in ("ann", "bob", "cid")})
    expected = nullcontext() if trained_rounds else pytest.raises(RuntimeError, match="after 2 consecutive failed")
    with expected:
        trainer.fit(Regression(), datamodule=data)
