"""Broken links: a finished visit is not trained again."""

import pytest

pytest.importorskip("flwr")

from lightning_fed.backends.flower.transport import from_records
from lightning_fed.backends.wire.packets import Packet
from lightning_fed.backends.wire.runner import ClientRunner
from tests import models
from tests.backends.flower.halves import CASES, SIZES, on_flower

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


def last_visit(folder, name):
    """The runner and the configuration of a node, with the last request of a fit."""
    case = CASES[name]
    grids = []
    on_flower(folder, case.module, models.vectors(SIZES), case.federation, 1, grids=grids)
    node, message = [item for item in grids[0].sent if item[1].metadata.message_type == "train"][-1]
    return grids[0].apps[node].runner, from_records(message.content), grids[0].configs[node]


def test_a_finished_visit_is_handed_over_again(tmp_path, monkeypatch):
    runner, order, node = last_visit(tmp_path, "fedavg")
    first = runner.answer("train", order, node)
    monkeypatch.setattr(ClientRunner, "_fit", lambda *args: pytest.fail("it trains again"))
    again = runner.answer("train", order, node)
    assert (again.text, bytes(again.data)) == (first.text, bytes(first.data))
    with pytest.raises(pytest.fail.Exception, match="it trains again"):  # another model
        runner.answer("train", Packet(order.text, bytes([order.data[0] ^ 1]) + order.data[1:]), node)
    (path,) = [path for path in tmp_path.rglob("answers/*") if first.data in path.read_bytes()]
    path.write_bytes(b"nonsense")
    with pytest.raises(pytest.fail.Exception, match="it trains again"):
        runner.answer("train", order, node)


def test_no_answer_of_a_secure_sum_is_kept(tmp_path):
    """The masks belong to keys for a single use."""
    last_visit(tmp_path, "secure sum")
    assert list(tmp_path.rglob("answers")) == []
