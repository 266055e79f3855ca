"""Trust between server and clients: limits of orders, error texts, client identity, and implausible numbers."""

import json

import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from torch.utils.data import Dataset

from lightning_fed.steps import MaxMedianNorm, MaxNorm, MaxSamples, UniformWeights

pytest.importorskip("flwr")

from lightning_fed import Federation
from lightning_fed.backends.flower.certificates import write_node_key
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.server import server_app
from lightning_fed.backends.flower.transport import FlowerTransport, from_records
from lightning_fed.backends.wire.bounds import OrderBounds
from lightning_fed.backends.wire.packets import TrainRequest
from lightning_fed.backends.wire.server import run_server
from lightning_fed.backends.wire.server_for_client import HalvesMismatch, find_public_reason
from lightning_fed.server.schedule import Visit
from tests import models
from tests.backends.flower.grids import FakeGrid
from tests.backends.flower.halves import OPTIONS, SIZES, in_process, is_lost, on_flower, warm_up
from tests.backends.flower.test_flower_faults import make_module, table
from tests.breadth import quick
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


# --- Implausible numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([MaxSamples(30), MaxMedianNorm(0.9)], id="median"),
        pytest.param([UniformWeights(), MaxNorm(0.05)], id="fixed", marks=pytest.mark.slow),
    ],
)
def test_limits_are_those_of_one_process(steps, federated_trainer, tmp_path):
    """Includes BatchNorm statistics, and the schedule, which follows the client with the largest weight."""

    def module():
        return models.Module(models.norm_mlp(), models.adam, warm_up)

    data = models.vectors(SIZES)
    here, trainer = in_process(federated_trainer, module, data, Federation(seed=1, steps=steps), 2)
    there, fitted, _, _ = on_flower(tmp_path, module, data, lambda: Federation(seed=1, steps=steps), 2)
    assert_same(state_of(there), state_of(here))
    assert fitted.callback_metrics["fed/shortened"] == trainer.callback_metrics["fed/shortened"] > 0
    free, _ = in_process(federated_trainer, module, data, Federation(seed=1), 2)
    assert not torch.equal(state_of(free)["net.0.weight"], state_of(here)["net.0.weight"])


SCHEDULES = {
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        ],
        [3],
    ),
    "chain": lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]
    ),
}


@pytest.mark.parametrize("schedule", quick(SCHEDULES, ["sequence"]))
def test_schedules_that_the_server_steps_itself(schedule, federated_trainer, tmp_path):
    """From the reported number of steps, bit for bit as in one process."""

    def module():
        make = lambda optimizer: {"scheduler": SCHEDULES[schedule](optimizer), "interval": "step"}  # noqa: E731
        return models.Module(models.mlp(), models.momentum, make)

    data = models.vectors(SIZES)
    here, _ = in_process(federated_trainer, module, data, Federation(seed=1))
    there, _, _, _ = on_flower(tmp_path, module, data, lambda: Federation(seed=1))
    assert_same(state_of(there), state_of(here))


def test_a_schedule_that_ends_does_not_end_the_run(tmp_path, caplog):
    """A client reports more steps than the schedule has: the schedule does not follow this client."""

    def change(said, data):
        said["header"]["after"]["steps"] = [20]
        return json.dumps(said), data

    def module():
        one_cycle = lambda optimizer: {  # noqa: E731
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
            "interval": "step",
        }
        return models.Module(models.mlp(), models.momentum, one_cycle)

    def on_the_way(node, message, content):
        is_it = message.metadata.message_type == "train" and is_lost(message, content)
        return table(change)(content) if is_it else [content]

    _, trainer, _, _ = on_flower(tmp_path, module, models.vectors(SIZES), Federation, change=on_the_way)
    assert "Round 2: the server cannot repeat the scheduler steps reported by client 'bob', [20]" in caplog.text
    assert trainer.current_epoch == 3


@pytest.mark.parametrize("steps", quick([[], [MaxSamples(30)]], [[]]), ids=["by examples", "at most 30"])
def test_one_client_does_not_set_the_learning_rate(steps, tmp_path):
    """Without limits, a claim of 10^12 examples and 10^6 steps set the learning rate to 4.9e-322 permanently."""

    def boast(said, data):
        said["header"].update(num_samples=10**12, steps=10**6)
        said["header"]["after"]["steps"] = [10**6]
        return json.dumps(said), data

    def module():
        make = lambda optimizer: {  # noqa: E731
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "interval": "step",
        }
        return models.Module(models.mlp(), models.momentum, make)

    def on_the_way(node, message, content):
        return table(boast)(content) if message.metadata.message_type == "train" else [content]

    def fit(folder, change):
        data = models.vectors({"ann": 20, "bob": 20, "cid": 20})
        _, trainer, _, _ = on_flower(
            folder, module, data, lambda: Federation(seed=1, steps=steps), 2,
            change=lambda node, message, content: change(node, message, content)
            if is_lost(message, content) else [content],
        )  # fmt: skip
        return trainer

    honest = fit(tmp_path / "honest", lambda node, message, content: [content])
    boasted = fit(tmp_path / "boasted", on_the_way)
    assert boasted.optimizers[0].param_groups[0]["lr"] == honest.optimizers[0].param_groups[0]["lr"]
    assert boasted.global_step <= 101 * honest.global_step


def huge_mean(said, data):
    assert said["tensors"]["extras"][0][0].endswith(":mean")
    count = said["tensors"]["extras"][0][2][0]
    return json.dumps(said), torch.full((count,), 3e38).numpy().tobytes() + data[4 * count :]


def test_one_clients_statistics_do_not_brick_the_federation(tmp_path, caplog):
    """Without checks, a mean of 3e38 made the pooled variance infinite, in the checkpoint and all later rounds."""

    def on_the_way(node, message, content):
        is_it = message.metadata.message_type == "evaluate" and is_lost(message, content)
        return table(huge_mean)(content) if is_it else [content]

    module, trainer, _, _ = on_flower(
        tmp_path, lambda: models.Module(models.norm_mlp(), models.adam), models.vectors(SIZES), Federation,
        change=on_the_way,
    )  # fmt: skip
    assert (
        "The BatchNorm statistics of client 'bob' are excluded: entry 'batch_norm:net.1:mean' has values too large"
        in caplog.text
    )
    assert all(value.isfinite().all() for value in state_of(module).values())
    assert trainer.callbacks[0].round_log.state_dict()["last"]["fed/failed"] == 0


# --- Error texts ------------------------------------------------------------------------------------------------------

SECRET = "/data/anna-schmidt-1961-04-02.dcm"


class Truncated(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        raise OSError(f"{SECRET} is truncated")


class Uncounted(Truncated):
    def __len__(self):
        raise OSError(f"{SECRET} is no index")


class Telltale(models.Module):
    def training_step(self, batch, batch_idx):
        raise ValueError(f"{SECRET} has 4 channels")


class TelltaleSetup(models.Module):
    def configure_optimizers(self):
        raise ValueError(f"{SECRET} has 4 channels")


def telltale_data(node):
    raise OSError(f"{SECRET} is not mounted")


TELLTALES = {
    "its data": (make_module, lambda: {"bob": Truncated()}, "the client's data raised OSError"),
    "its length": (make_module, lambda: {"bob": Uncounted()}, "the client's data raised OSError"),
    "its step": (
        lambda: Telltale(models.dropout_mlp(), models.momentum),
        lambda: {"bob": models.as_datasets(models.vectors(SIZES))["bob"]},
        "the client's training step raised ValueError",
    ),
    "its program": (
        lambda: TelltaleSetup(models.mlp()),
        lambda: {"bob": models.as_datasets(models.vectors(SIZES))["bob"]},
        "the client's program raised ValueError; see the client's log",
    ),
}


@pytest.mark.parametrize(("module", "data", "reason"), TELLTALES.values(), ids=TELLTALES)
def test_the_text_of_an_exception_stays_with_the_client(module, data, reason, tmp_path, caplog):
    """The server only gets our text and the class of the exception; the client's log has the full text."""
    sent = []

    def listen(node, message, content):
        packet = from_records(content)
        sent.append(packet.text.encode() + packet.data)
        return [content]

    good = {"ann": models.as_datasets(models.vectors(SIZES))["ann"]}
    apps = {
        11: client_app(Federation(), make_module, good, OPTIONS, store=tmp_path / "a"),
        12: client_app(Federation(), module, data(), OPTIONS, store=tmp_path / "b"),
    }
    grid = FakeGrid(apps, None, listen)
    transport = FlowerTransport(grid, 5, 0.01)
    trainer = run_server(
        Federation(),
        make_module,
        None,
        {**OPTIONS, "max_epochs": 1},
        transport,
        transport.await_clients(2, 1),
        tmp_path / "s",
    )
    report = trainer.callbacks[0].server.report
    assert list(report.received) == ["ann"]
    assert report.failed == {"bob": reason}
    assert not [text for text in sent if b"anna" in text]
    assert SECRET in caplog.text  # the client's log, in this process


def test_data_that_cannot_be_read_tell_nothing(tmp_path, caplog):
    app = client_app(Federation(), make_module, telltale_data, OPTIONS, store=tmp_path)
    grid = FakeGrid({11: app})
    list(FlowerTransport(grid, 1).ask("query", [], 0))
    (error,) = grid.errors
    assert str(error) == "the client's program raised OSError; see the client's log"
    assert error.__cause__ is None
    assert error.__suppress_context__
    (warning,) = (text for text in caplog.messages if "sent no valid list of clients" in text)
    assert SECRET not in warning
    assert SECRET in caplog.text  # the client's log, in this process


# --- Limits of orders -------------------------------------------------------------------------------------------------


def order(epochs=1, steps=None, lr=0.1, **more):
    numbers = {"groups": [[{"lr": lr, "momentum": 0.9}]], **more}
    return TrainRequest("0a", Visit("ann", 0, 7, epochs, steps), -1, 0, 0, "", numbers)


@pytest.mark.parametrize(
    ("bounds", "train_request", "excess"),
    [
        ({}, order(10**6, lr=1e5), None),
        ({"max_epochs": 3}, order(3), None),
        ({"max_epochs": 3}, order(4), "the server asks for 4 epochs, but this client allows 3"),
        ({"max_epochs": 3}, order(steps=31), "the server asks for 4 passes, but this client allows 3"),
        ({"max_epochs": 3}, order(steps=30), None),
        ({"max_batches": 20}, order(2), None),
        ({"max_batches": 20}, order(3), "the server asks for 30 batches, but this client allows 20"),
        ({"max_batches": 20}, order(steps=21), "the server asks for 21 batches, but this client allows 20"),
        ({"min_batches": 5}, order(steps=4), "the server asks for 4 batches, but this client requires at least 5"),
        ({"min_batches": 5}, order(steps=5), None),
        ({"max_lr": 0.5}, order(lr=0.5), None),
        ({"max_lr": 0.5}, order(lr=0.6), "the server's learning rate 'lr' is 0.6, but this client allows 0.5"),
        (
            {"max_lr": 0.5},
            order(schedulers=[{"_schedulers": [{"base_lrs": [0.1, 9.0]}]}]),
            "the server's learning rate 'base_lrs' is 9.0, but this client allows 0.5",
        ),
    ],
)
def test_bounds(bounds, train_request, excess):
    assert OrderBounds(**bounds).find_excess(train_request, batches_per_epoch=10) == excess


def test_bounds_where_data_have_no_length():
    assert OrderBounds(max_epochs=1, max_batches=9).find_excess(order(steps=9), None) is None
    assert "10 batches" in OrderBounds(max_batches=9).find_excess(order(steps=10), None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_epochs": 0}, "Expected `max_epochs` to be at least 1"),
        ({"min_batches": 0}, "Expected `min_batches` to be at least 1"),
        ({"max_lr": float("inf")}, "Expected `max_lr` to be greater than 0 and finite"),
        ({"max_batches": 2, "min_batches": 3}, "Expected `min_batches` to be at most max_batches=2, but got 3"),
    ],
)
def test_bounds_that_make_no_sense(arguments, text):
    with pytest.raises(ValueError, match=text):
        OrderBounds(**arguments)


def test_a_client_does_no_more_than_it_allows(tmp_path, caplog):
    """The client logs and reports the refusal; clients without limits train."""
    data = models.as_datasets(models.vectors(SIZES))
    apps = {
        11: client_app(Federation(local_epochs=9), make_module, {"ann": data["ann"]}, OPTIONS, store=tmp_path / "a"),
        12: client_app(
            Federation(local_epochs=9), make_module, {"bob": data["bob"]}, OPTIONS, store=tmp_path / "b",
            bounds=OrderBounds(max_epochs=8),
        ),
    }  # fmt: skip
    transport = FlowerTransport(FakeGrid(apps), 5, 0.01)
    trainer = run_server(
        Federation(local_epochs=9), make_module, None, {**OPTIONS, "max_epochs": 1}, transport,
        transport.await_clients(2, 1), tmp_path / "s",
    )  # fmt: skip
    report = trainer.callbacks[0].server.report
    assert report.failed == {"bob": "the server asks for 9 epochs, but this client allows 8"}
    assert list(report.received) == ["ann"]
    assert "Round 1: client 'bob' does not train" in caplog.text


# --- Identity ---------------------------------------------------------------------------------------------------------


def test_a_name_is_bound_to_its_node(tmp_path, caplog):
    """Claiming a name first does not suffice; claims beyond the bound names are ignored."""

    def app(node, *names):
        data = {name: models.as_datasets(models.vectors(SIZES))["ann"] for name in names}
        return client_app(Federation(), make_module, data, OPTIONS, store=tmp_path / f"{node}")

    grid = FakeGrid({11: app(11, "ann", "bob", *map(str, range(20))), 12: app(12, "bob"), 13: app(13, "cid")})
    transport = FlowerTransport(grid, 5, 0.01, bound={"ann": 11, "bob": 12})
    assert sorted(transport.await_clients(["ann", "bob"], 1)) == ["ann", "bob"]
    asked = transport.ask("train", [], 0)
    assert list(asked) == []
    assert "but these clients are bound to other nodes" in caplog.text
    assert 13 not in [node for node, _ in grid.sent]  # receives no message
    with pytest.raises(TimeoutError, match=r"missing clients are \{'bob'\}"):
        FlowerTransport(FakeGrid({11: app(11, "ann", "bob")}), 5, 0.01, bound={"ann": 11, "bob": 12}).await_clients(
            ["ann", "bob"], 0
        )


def test_a_name_is_bound_to_a_key(tmp_path):
    """For any node number: a SuperLink without memory of its nodes assigns another number."""
    app = client_app(Federation(), make_module, {"ann": models.as_datasets(models.vectors(SIZES))["ann"]}, OPTIONS)
    _, public = write_node_key(tmp_path, "ann")
    key = load_ssh_public_key(public.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    grid = FakeGrid({11: app, 12: app})
    grid.keys = {12: key}
    transport = FlowerTransport(grid, 5, 0.01, bound={"ann": public.read_text()})
    assert list(transport.await_clients(["ann"], 1)) == ["ann"]
    grid.apps[13] = grid.apps.pop(12)
    grid.keys = {13: key}
    list(transport.ask("train", [], 0))
    transport.await_clients(["ann"], 1)
    assert {node for node, _ in grid.sent} == {12, 13}


def test_nodes_are_numbers(tmp_path):
    for node, words in (("no key", "a node's public key"), (0.5, "`a client's node` to be a whole number")):
        with pytest.raises(ValueError, match=f"Expected {words}"):
            server_app(Federation(), make_module, trainer={"max_epochs": 1}, clients={"ann": node}, folder=tmp_path)


def test_our_own_words_may_be_read():
    assert find_public_reason(OSError(SECRET)) == "the client's program raised OSError; see the client's log"
    assert find_public_reason(HalvesMismatch("both need the same model")) == "both need the same model"
