"""A federation on Flower gives the same model as one process with the same seeds."""

import pytest

pytest.importorskip("flwr")

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import Federation
from lightning_fed.callbacks import CommunicationReport, SpreadOut
from tests import models
from tests.backends.flower.halves import ALL_CASES, CASES, LOST, ROUND, SIZES, in_process, is_lost, on_flower, replay
from tests.breadth import quick
from tests.callbacks.test_training_trace import Distilled
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def numbers_of(book):
    """Values logged in the last round, without times."""
    return {name: value for name, value in book.state_dict()["last"].items() if not name.endswith("seconds")}


# Rules with equal messages are slow tests: other tests compare each rule with the paper in one process.
ALIKE = ("fedadam", "fairavg", "fedatt", "feddyn", "moon", "fedala", "krum", "deeplab", "silobn, pooled", "fedbn")
ALIKE += ("fedavgm", "qffl", "a schedule of rounds", "frozen", "last local prototypes", "fedprox", "kept optimizers")
ALIKE += ("sleeping", "dropout", "kept heads", "overfitting")
ALIKE += ("fednova", "two optimizers", "fedfusion", "fixbn", "attacked")
# Other tests of this folder compare the first three models with one process, the loss of "silobn", and the bytes of
# "fedss".
ALIKE += ("fedavg", "secure sum", "fedper", "silobn", "fedss", "bf16")
SAME_COHORTS = ("ditto", "fesem", "fedmargin", "recalibrate", "a schedule of steps", "bf16")  # of the fast cases


@pytest.mark.parametrize("name", quick(CASES, [name for name in CASES if name not in ALIKE]))
def test_methods(name, federated_trainer, tmp_path):
    """Compares global models, bytes and the round log."""
    case = CASES[name]
    rounds = 2 if name in SAME_COHORTS else 3  # a client can miss a round; one round for each layer of "fedma"
    data = case.data(SIZES)
    here, trainer = in_process(
        federated_trainer, case.module, data, case.federation(), rounds, case.callbacks(), options=case.options
    )
    there, server, transport, _ = on_flower(
        tmp_path, case.module, data, case.federation, rounds, case.callbacks, options=case.options
    )
    assert_same(state_of(there), state_of(here))
    server_log, trainer_log = (fitted.callbacks[0].round_log for fitted in (server, trainer))
    numbers, expected = numbers_of(server_log), numbers_of(trainer_log)
    if case.has_more_messages:
        for name in [name for name in expected if name.startswith("comm/")]:
            assert numbers.pop(name) > expected.pop(name)
    assert numbers == expected
    assert (server_log.total_up_bytes, server_log.total_down_bytes) == (transport.received, transport.sent)
    assert server.global_step == trainer.global_step


def test_a_server_without_data_spreads_out_the_students_class_vectors(federated_trainer, tmp_path):
    """The server cannot trace a training step, and the teacher's parameters require gradients."""

    def module():
        torch.manual_seed(0)
        return Distilled("no_grad")

    def callbacks():
        return [SpreadOut(strength=10.0, lr=1.0)]

    data = models.vectors(SIZES)
    here, _ = in_process(federated_trainer, module, data, Federation(seed=1), 1, callbacks())
    there, *_ = on_flower(tmp_path, module, data, lambda: Federation(seed=1), 1, callbacks)
    assert_same(state_of(there), state_of(here))


@pytest.mark.parametrize("unseen", quick(["batch", "pooled"], ["pooled"]))
def test_a_global_model_without_statistics_is_validated_as_in_one_process(unseen, federated_trainer, tmp_path):
    data, val = models.vectors(SIZES), DataLoader(TensorDataset(*models.vectors({"new": 30})["new"]), 30)
    case = CASES["silobn"]

    def federation():
        return Federation(f"silobn:unseen={unseen}")

    _, trainer = in_process(federated_trainer, case.module, data, federation(), 1, val=val)
    _, server, _, _ = on_flower(tmp_path, case.module, data, federation, 1, val=val)
    expected = float(trainer.callback_metrics["val_loss"])
    assert float(server.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["fedss", "frozen"])
def test_the_traffic_by_part_is_that_of_one_process(name, federated_trainer, tmp_path):
    """Includes requests, and entries not sent again."""
    case, data = CASES[name], models.vectors(SIZES)
    here, there = CommunicationReport(), CommunicationReport()
    _, trainer = in_process(federated_trainer, case.module, data, case.federation(), 2, [here])
    _, server, *_ = on_flower(tmp_path, case.module, data, case.federation, 2, server_callbacks=[there])
    assert {row for row in there.rows if row.up_bytes} >= {row for row in here.rows if row.part == "(request)"}
    assert sorted(there.rows) == sorted(here.rows)
    assert there.table() == here.table()
    for share in ("comm/down_share", "comm/up_share"):
        assert 0 < server.callback_metrics[share] == trainer.callback_metrics[share]


def test_a_client_whose_answer_is_lost_was_sent_its_model(tmp_path):
    case, report = CASES["fedavg"], CommunicationReport()
    change = lambda node, message, content: [] if is_lost(message, content) else [content]  # noqa: E731
    _, server, *_ = on_flower(
        tmp_path, case.module, models.vectors(SIZES), case.federation, 2, server_callbacks=[report], limit=0.5,
        change=change,
    )  # fmt: skip
    assert server.callback_metrics["fed/failed"] == 1
    lost = [row for row in report.rows if (row.round, row.client) == (ROUND, LOST)]
    assert lost
    assert all(row.down_bytes > 0 == row.up_bytes for row in lost)
    assert server.callback_metrics["comm/down_share"] == 1


def test_asynchronous_rounds_replay_in_one_process(federated_trainer, tmp_path):
    case, rounds, grids = ALL_CASES["buffered"], 8, []

    def delay(node, message, content):
        grids[0].late[12] = 5  # bob's node answers after five requests
        return [content]

    there, server, transport, _ = on_flower(
        tmp_path, case.module, case.data(SIZES), case.federation, rounds, grids=grids, limit=60, change=delay
    )
    for _ in range(2):
        here, order = replay(federated_trainer, tmp_path / "server", case, rounds)
        assert_same(state_of(there), state_of(here))
    assert order[0][1] != "bob"
    assert any(version < arrived for arrived, _, version, _ in order)
    assert server.callback_metrics["fed/version"] == rounds
    log = server.callbacks[0].round_log
    assert (log.total_up_bytes, log.total_down_bytes) == (transport.received, transport.sent)
