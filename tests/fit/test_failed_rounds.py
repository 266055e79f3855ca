"""Failed rounds, and the end after several failures; `tests/test_faults.py` has complete fits."""

import pytest

from lightning_fed.fit.failed_rounds import FailedRounds
from lightning_fed.server.server import RoundReport

CAUSE = "it has no examples"


@pytest.mark.parametrize(("min_clients", "received"), [(1, {}), (3, {}), (3, {"ann": 5})])
def test_failures_end_the_fit_also_where_fewer_clients_came_than_are_needed(min_clients, received):
    """Two failing clients fail the round, even if three clients are required."""
    failed = FailedRounds(limit=2)
    reports = [RoundReport(round, received=received, failed={"bob": CAUSE, "cid": CAUSE}) for round in range(2)]
    failed.end_round(reports[0], has_aggregate=False, min_clients=min_clients, num_clients=4)
    with pytest.raises(RuntimeError, match=f"2 consecutive failed rounds .*for example client 'bob': {CAUSE}"):
        failed.end_round(reports[1], has_aggregate=False, min_clients=min_clients, num_clients=4)


def test_dropouts_alone_never_count():
    failed = FailedRounds(limit=1)
    for round in range(5):
        failed.end_round(RoundReport(round, received={"ann": 5}), has_aggregate=False, min_clients=3, num_clients=4)
        failed.end_round(RoundReport(round), has_aggregate=False, min_clients=3, num_clients=4)
    assert failed.in_a_row == 0
    failed.end_fit()


def test_a_success_starts_the_count_anew():
    failed = FailedRounds(limit=2)
    for round in range(6):
        failed.end_round(RoundReport(round, failed={"bob": CAUSE}), has_aggregate=bool(round % 2), num_clients=4)
    assert (failed.in_a_row, failed.has_trained) == (0, True)


def test_one_error_of_all_clients_is_raised_at_once():
    """A single failing client does not blame the program; all of at least two clients do."""
    failed = FailedRounds(limit=3)
    errors = {"ann": KeyError("x"), "bob": KeyError("y")}
    of_bob = {"bob": errors["bob"]}
    failed.end_round(RoundReport(0, failed={"bob": CAUSE}), has_aggregate=False, num_clients=4, errors=of_bob)
    with pytest.raises(KeyError, match="x") as raised:
        failed.end_round(RoundReport(1, failed=dict.fromkeys(errors, CAUSE)), False, num_clients=4, errors=errors)
    assert "In round 2 all 2 clients failed with this error" in raised.value.__notes__[0]
    failed.end_round(RoundReport(2, received={"ann": 5}), has_aggregate=True)
    mixed = {**errors, "bob": ValueError("y")}
    failed.end_round(
        RoundReport(3, failed=dict.fromkeys(mixed, CAUSE)), has_aggregate=False, num_clients=4, errors=mixed
    )
    assert failed.in_a_row == 1


def test_a_limit_of_none_lets_the_fit_go_on():
    failed = FailedRounds(limit=None)
    for round in range(9):
        failed.end_round(RoundReport(round, failed={"bob": CAUSE}), has_aggregate=False)
    failed.end_fit()


def test_a_fit_that_ends_after_failures_alone_raises():
    failed = FailedRounds(limit=3)
    failed.end_round(RoundReport(0, failed={"bob": CAUSE}), has_aggregate=False, num_clients=4)
    resumed = FailedRounds(limit=3)
    resumed.load_state_dict(failed.state_dict())
    resumed.end_round(RoundReport(1, failed={"bob": CAUSE}), has_aggregate=False, num_clients=4)
    assert resumed.in_a_row == 2
    with pytest.raises(RuntimeError, match="There is no new model after 2 consecutive failed rounds"):
        resumed.end_fit()
