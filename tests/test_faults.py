"""Invariant 8: bad input gives a clear error, and no state is lost.

One table: a client with any fault is named, excluded, counted and logged with the reason, and the round continues as
without this client.
"""

import re
import signal
import time
import traceback
from itertools import product
from threading import Thread

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fed import (
    Availability,
    ClientFault,
    ClientUpdate,
    Faults,
    FederatedCallback,
    FederatedDataModule,
    FederatedTrainer,
    Federation,
)
from lightning_fed.algorithms import AveragingAggregator, FedAvg
from lightning_fed.callbacks import find_federation
from lightning_fed.data import LazyClients
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.errors import VisitTimeout
from lightning_fed.fit.failed_rounds import FailedRounds
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import RoundReport, Server
from lightning_fed.steps.chain import Chain
from tests.breadth import quick

ROUNDS = 3
BATCH = 4

# ---------------------------------------------------------------------------------------------------------------------
# Modules, data and helpers
# ---------------------------------------------------------------------------------------------------------------------


class Net(L.LightningModule):
    """BatchNorm, dropout, momentum, schedulers per round and per batch: state sensitive to failed visits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(5, 1)
        self.validated = []

    def loss(self, batch):
        return nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_validation_start(self):
        self.validated.append({name: value.clone() for name, value in self.state_dict().items()})

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        per_round = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        per_batch = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        return [optimizer], [per_round, {"scheduler": per_batch, "interval": "step"}]


class Rows(Logger):
    name = version = "rows"

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(metrics["epoch"], {}).update(metrics)

    def log_hyperparams(self, *arguments, **options):
        pass


def examples(count, seed=0, value=None):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    return TensorDataset(inputs if value is None else torch.full_like(inputs, value), targets)


class Breaks(Dataset):
    def __init__(self, at, count=3 * BATCH):
        self.at = at
        self.inner = examples(count)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        if index == self.at:
            raise OSError("image 7 is truncated")
        return self.inner[index]


class HasNoLength(Dataset):
    def __len__(self):
        raise OSError("index file is gone")

    def __getitem__(self, index):
        raise AssertionError("not reached")


class Endless(IterableDataset):
    def __iter__(self):
        yield from iter(examples(BATCH))


class Loader:
    """A user's loader: an iterable with a data set and a length that may be too large."""

    def __init__(self, count, length=None, breaks_at=None, raises=OSError):
        self.dataset = examples(max(count, length or 0) * BATCH)
        self.count = count
        self.length = count if length is None else length
        self.breaks_at = breaks_at
        self.raises = raises

    def __len__(self):
        if self.length < 0:
            raise OSError("index file is gone")
        return self.length

    def __iter__(self):
        for number in range(self.count):
            if number == self.breaks_at:
                raise self.raises("image 7 is truncated")
            start = number * BATCH
            yield [tensor[start : start + BATCH] for tensor in self.dataset.tensors]


class Ends(Breaks):
    def __getitem__(self, index):
        if index == self.at:
            raise StopIteration
        return self.inner[index]


class Hangs(Breaks):
    """Waits forever, like a lost network drive."""

    def __getitem__(self, index):
        if index == self.at:
            hang()
        return self.inner[index]


class HangsInItsLength(Breaks):
    def __len__(self):
        hang()


def hang():
    """Waits forever; in the process of the fit the visit's alarm is raised at once, for a fast test."""
    if torch.utils.data.get_worker_info() is None and callable(signal.getsignal(signal.SIGALRM)):
        signal.raise_signal(signal.SIGALRM)
    time.sleep(600)


class Astronomical(Breaks):
    def __len__(self):
        return 10**18


def raise_on_build(client):
    raise OSError("its disk is not mounted")


# If the first client fails, schedulers step before any optimizer: Lightning steps schedulers at every batch, even for
# `None`. These steps are undone.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

# ---------------------------------------------------------------------------------------------------------------------
# Table
# ---------------------------------------------------------------------------------------------------------------------

TRUNCATED = "the client's data raised OSError: (OSError: )?image 7 is truncated"

DATA = {
    # The client's data set, the logged reason, and options of the datamodule.
    "no examples": (lambda: examples(0), "the client has no examples"),
    "do not fill a batch": (
        lambda: examples(BATCH - 1),
        "the client's 3 examples do not fill a batch, and `drop_last` is set",
    ),
    "a single example": (
        lambda: examples(1),
        "the client has a batch with a single example, on which BatchNorm cannot train",
    ),
    "length raises": (HasNoLength, "the client's data raised OSError: index file is gone"),
    "first batch raises": (lambda: Breaks(0), TRUNCATED),
    "batch in the middle raises": (lambda: Breaks(BATCH + 1), TRUNCATED),
    "last batch raises": (lambda: Breaks(3 * BATCH - 1), TRUNCATED),
    "cannot be built": (raise_on_build, "the client's data raised OSError: its disk is not mounted"),
    "NaN in the data": (lambda: examples(2 * BATCH, value=float("nan")), "entry 'body.*' has NaN or infinite values"),
    "another number of features": (
        lambda: TensorDataset(torch.ones(2 * BATCH, 4), torch.ones(2 * BATCH, 1)),
        "the client's training step raised RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "StopIteration": (
        lambda: Ends(BATCH),
        "the client's data raised RuntimeError: a data set or `collate_fn` raised StopIteration",
    ),
    "10**18 examples": (lambda: Astronomical(0), "the client reports 1000000000000000000 examples"),
}

LOADERS = {
    # The client's loader and the reason.
    "loader cannot be built": (raise_on_build, "the client's data raised OSError: its disk is not mounted"),
    "loader without a batch": (
        lambda: Loader(0, length=2),
        "the client's data raised ValueError: the client's loader returned no batch",
    ),
    "loader of an empty data set": (lambda: DataLoader(examples(0), batch_size=4), "the client has no examples"),
    "loader raises at the first batch": (lambda: Loader(3, breaks_at=0), TRUNCATED),
    "loader raises in the middle": (lambda: Loader(3, breaks_at=1), TRUNCATED),
    "loader raises at the last batch": (lambda: Loader(3, breaks_at=2), TRUNCATED),
    "loader raises in the second epoch": (
        lambda: EveryOther(3),
        "the client's data raised RuntimeError: it can be walked once",
    ),
    "length of the loader raises": (
        lambda: Loader(2, length=-1),
        "the client's data raised OSError: index file is gone",
    ),
    "loader without a length": (
        lambda: DataLoader(Endless()),
        "the client's data raised ValueError: Expected the loader of cli",
    ),
    "loader of batches that are not counted": (
        lambda: (batch for batch in ()),
        "the client's data raised ValueError: Expected",
    ),
    "loader with workers raises": (lambda: DataLoader(Breaks(BATCH), batch_size=BATCH, num_workers=1), TRUNCATED),
}


class EveryOther(Loader):
    """A stream: a second pass is not possible."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        if self.walks % 2 == 0:
            raise RuntimeError("it can be walked once")
        return super().__iter__()


def set_entry(name, change):
    def sabotage(update):
        update.state[name] = change(update.state[name])

    return sabotage


def drop_entry(update):
    del update.state["head.bias"]


def add_entry(update):
    update.state["tail.bias"] = torch.zeros(1)


def set_samples(count):
    def sabotage(update):
        update.num_samples = count

    return sabotage


def add_extras(update):
    update.extras["prototypes"] = torch.tensor([1.0, float("nan")])


def fill(value, place=(0,)):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[place] = value
        return tensor

    return change


MESSAGES = {
    # The change to the client's update, and the reason.
    "NaN": (set_entry("head.weight", fill(float("nan"))), "entry 'head.weight' has NaN or infinite values"),
    "infinite": (set_entry("body.0.bias", fill(float("inf"), 2)), "entry 'body.0.bias' has NaN or infinite values"),
    "minus infinite": (
        set_entry("body.1.running_var", fill(float("-inf"))),
        "entry 'body.1.running_var' has NaN or infinite values",
    ),
    "missing entry": (drop_entry, "missing entries: 'head.bias'"),
    "unexpected entry": (add_entry, "unexpected entries: 'tail.bias'"),
    "wrong shape": (
        set_entry("head.weight", lambda value: value.T),
        "entry 'head.weight' has shape (5, 1) instead of (1, 5)",
    ),
    "wrong dtype": (
        set_entry("head.bias", lambda value: value.double()),
        "entry 'head.bias' has dtype torch.float64 instead of torch.float32",
    ),
    "integer entry as a float": (
        set_entry("body.1.num_batches_tracked", lambda value: value.float()),
        "entry 'body.1.num_batches_tracked' has dtype torch.float32 instead of torch.int64",
    ),
    "NaN in extras": (add_extras, "entry 'prototypes' has NaN or infinite values"),
    "no samples": (set_samples(0), "the client reports 0 examples"),
    "negative samples": (set_samples(-5), "the client reports -5 examples"),
}


class Sabotages(FederatedCallback):
    changes_update = True

    def __init__(self, client, sabotage):
        self.client = client
        self.sabotage = sabotage

    def on_client_end(self, trainer, module, client, update):
        if client == self.client:
            self.sabotage(update)


def good_clients():
    return {"good": examples(3 * BATCH, 1), "better": examples(2 * BATCH, 2), "best": examples(4 * BATCH, 3)}


def with_bad(clients, place, bad):
    """The clients with a bad client at a position, built on request."""
    names = list(clients)
    names.insert(place, "bad")
    return LazyClients(names, Build(clients, bad))


class Build:
    """Makes a client's data; a class can be sent to worker processes."""

    def __init__(self, clients, bad):
        self.clients = clients
        self.bad = bad

    def __call__(self, client):
        if client != "bad":
            return self.clients[client]
        return self.bad(client) if self.bad is raise_on_build else self.bad()


def train(clients, callbacks=(), data_options=None, module=None, door="trainer", **options):
    data = FederatedDataModule(
        clients,
        DataLoader(examples(6, 9), batch_size=3),
        **{"batch_size": BATCH, "shuffle": False, **(data_options or {})},
    )
    module, rows = module or Net(), Rows()
    options = {"local_epochs": 2, "batch_norm": "average", **options}
    if door == "trainer":
        make, callbacks, own = FederatedTrainer, list(callbacks), options
    else:
        make, callbacks, own = L.Trainer, [Federation(**options), *callbacks], {}
    trainer = make(
        max_epochs=ROUNDS,
        callbacks=callbacks,
        logger=rows,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **own,
    )
    trainer.fit(module, datamodule=data)
    return module, rows.rows


def assert_left_out(caplog, reason, rounds=range(ROUNDS)):
    left_out = [record.getMessage() for record in caplog.records if "is excluded" in record.getMessage()]
    assert len(left_out) == len(rounds)
    for round, message in zip(rounds, left_out, strict=True):
        assert message.startswith(f"Round {round + 1}: client 'bad' is excluded: ")
        assert re.search(reason, message), message


def assert_as_if_it_were_not_there(run, expected, same_bytes=()):
    module, rows = run
    expected_module, expected_rows = expected
    assert_same(module.state_dict(), expected_module.state_dict())
    assert len(module.validated) == ROUNDS
    for state, expected_state in zip(module.validated, expected_module.validated, strict=True):
        assert_same(state, expected_state)
    assert set(rows) == set(range(ROUNDS))
    for round, row in rows.items():
        assert row["fed/clients"] == 3
        assert row["fed/failed"] == 1
        for name in ("val_loss", "fed/num_samples", "fed/global_update_norm", *same_bytes):
            assert row[name] == expected_rows[round][name], name
    assert all(row["fed/failed"] == 0 for row in expected_rows.values())


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(value, state[name]), name


@pytest.fixture(scope="module")
def without():
    """The run without the bad client, by kind of data."""
    done = {}

    def get(kind, batch_norm="average"):
        if (kind, batch_norm) not in done:
            clients = with_loaders(good_clients()) if kind == "loaders" else good_clients()
            done[kind, batch_norm] = train(clients, batch_norm=batch_norm)
        return done[kind, batch_norm]

    return get


def with_loaders(clients):
    return {name: DataLoader(data, batch_size=BATCH) for name, data in clients.items()}


PLACES = (0, 1, 3)  # first, in the middle, last


def at_places(table, faults):
    """Every fault at every position; quick cases use these faults, one position per fault in turn."""
    chosen = [(fault, PLACES[number % len(PLACES)]) for number, fault in enumerate(table) if fault in faults]
    return quick([(fault, place) for fault in table for place in PLACES], chosen)


# Other reasons: in the table of the callback below, and with all clients.
FAULTS_OF_DATA = ("do not fill a batch", "length raises", "last batch raises", "StopIteration", "10**18 examples")


@pytest.mark.parametrize(("fault", "place"), at_places(DATA, FAULTS_OF_DATA))
def test_data(fault, place, without, caplog):
    bad, reason = DATA[fault]
    options = {"drop_last": True} if fault == "do not fill a batch" else {}
    run = train(with_bad(good_clients(), place, bad), data_options=options, batch_norm="recalibrate")
    assert_left_out(caplog, reason)
    assert_as_if_it_were_not_there(run, without("data sets", "recalibrate"))


IN_WORKERS = [("batch in the middle raises", 0), ("first batch raises", 1), ("cannot be built", 3)]


@pytest.mark.parametrize(("fault", "place"), quick(IN_WORKERS, IN_WORKERS[:1]))
def test_data_in_workers(fault, place, without, caplog):
    bad, reason = DATA[fault]
    run = train(with_bad(good_clients(), place, bad), data_options={"num_workers": 1, "persistent_workers": True})
    assert_left_out(caplog, reason)
    assert_as_if_it_were_not_there(run, without("data sets"))


LATE = "the client's visit took longer than visit_timeout=500 seconds"


@pytest.mark.parametrize(
    ("place", "bad"),
    [
        (0, lambda: Hangs(0)),
        (1, lambda: Hangs(BATCH + 1)),
        (3, lambda: Hangs(BATCH)),
        (1, lambda: HangsInItsLength(0)),
    ],
    ids=["first", "in the middle", "last", "its length"],
)
def test_data_that_hang(place, bad, without, caplog):
    before = signal.getsignal(signal.SIGALRM)
    run = train(with_bad(good_clients(), place, bad), faults=Faults(visit_timeout=500))
    assert_left_out(caplog, LATE)
    assert_as_if_it_were_not_there(run, without("data sets"))
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.slow  # waits half a minute per round, longer than any valid client's visit
@pytest.mark.timeout(600)
def test_a_worker_that_hangs_is_replaced(without, caplog):
    hangs = with_bad(good_clients(), 1, lambda: Hangs(0))
    run = train(hangs, data_options={"num_workers": 1}, faults=Faults(visit_timeout=30))
    assert_left_out(caplog, LATE.replace("500", "30"))
    assert_as_if_it_were_not_there(run, without("data sets"))


def test_a_loader_and_a_step_that_hang(without, caplog):
    class Slow(Net):
        def training_step(self, batch, batch_idx):
            if find_federation(self.trainer).current_client == "bad":
                hang()
            return super().training_step(batch, batch_idx)

    run = train(with_bad(good_clients(), 1, lambda: examples(BATCH)), module=Slow(), faults=Faults(visit_timeout=500))
    assert_left_out(caplog, LATE)
    assert_as_if_it_were_not_there(run, without("data sets"))
    caplog.clear()
    clients = with_loaders(good_clients())
    run = train(with_bad(clients, 1, lambda: DataLoader(Hangs(0), batch_size=BATCH)), faults=Faults(visit_timeout=500))
    assert_left_out(caplog, LATE)
    assert_as_if_it_were_not_there(run, without("loaders"))


def test_the_time_of_a_visit():
    for seconds in (0, -1, float("nan"), "1"):
        with pytest.raises(ValueError, match="Expected `visit_timeout` to be a number"):
            Faults(visit_timeout=seconds)


def test_an_alarm_of_somebody_else_is_put_back():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with VisitClock(30.0).visit():
            pass
        while not rung:  # fails by the suite's time limit
            time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_clock_rings_only_where_it_may():
    clock = VisitClock(0.01)
    clock.start()
    try:
        while not clock.is_up:
            time.sleep(0.01)
        with pytest.raises(VisitTimeout), clock.interrupting():
            pytest.fail("it was not interrupted")
    finally:
        clock.stop()
    with clock.interrupting():  # the next visit's alarm
        pass


# Others: the first batches in the table of the callback below; an empty data set, and workers, as with data sets.
FAULTS_OF_LOADERS = (
    "loader cannot be built", "loader without a batch", "loader raises in the second epoch",
    "length of the loader raises", "loader without a length", "loader of batches that are not counted",
)  # fmt: skip


@pytest.mark.parametrize(("fault", "place"), at_places(LOADERS, FAULTS_OF_LOADERS))
def test_loaders(fault, place, without, caplog):
    bad, reason = LOADERS[fault]
    run = train(with_bad(with_loaders(good_clients()), place, bad))
    assert_left_out(caplog, reason)
    assert_as_if_it_were_not_there(run, without("loaders"))


# Every message: in the test of the server by itself.
@pytest.mark.parametrize(("fault", "place"), at_places(MESSAGES, ["wrong dtype"]))
def test_messages(fault, place, without, caplog):
    sabotage, reason = MESSAGES[fault]
    run = train(with_bad(good_clients(), place, lambda: examples(2 * BATCH)), [Sabotages("bad", sabotage)])
    assert_left_out(caplog, re.escape(reason))
    assert_as_if_it_were_not_there(run, without("data sets"))
    bytes_ = {name: [row[f"comm/{name}_bytes"] for row in run[1].values()] for name in ("up", "down")}
    size = sum(value.numel() * value.element_size() for value in run[0].state_dict().values())
    assert bytes_["down"] == [4 * size] * ROUNDS
    assert all(sent > 3 * size for sent in bytes_["up"])  # invalid messages are sent too


@pytest.mark.parametrize(
    ("table", "fault", "place"),
    [
        (DATA, "batch in the middle raises", 0),
        (DATA, "a single example", 1),
        (DATA, "cannot be built", 3),
        (LOADERS, "loader raises in the middle", 1),
        (MESSAGES, "NaN", 3),
        (MESSAGES, "wrong shape", 0),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_a_plain_trainer_with_the_callback(table, fault, place, without, caplog):
    what, reason = table[fault]
    clients = with_loaders(good_clients()) if table is LOADERS else good_clients()
    callbacks = [Sabotages("bad", what)] if table is MESSAGES else []
    bad = (lambda: examples(2 * BATCH)) if table is MESSAGES else what
    run = train(with_bad(clients, place, bad), callbacks, door="callback")
    assert_left_out(caplog, re.escape(reason) if table is MESSAGES else reason)
    assert_as_if_it_were_not_there(run, without("loaders" if table is LOADERS else "data sets"))


class Transferring(Net):
    """Batch hooks that only accept batches."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0], batch[1]]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [tensor.to(device) for tensor in batch]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 1, batch[1]]


@pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule`")
@pytest.mark.parametrize("place", quick([0, 3], [0]))
def test_hooks_on_batches_see_no_failed_visit(place, without, caplog):
    """Lightning would call the hooks with `None`, which most hooks cannot handle."""
    run = train(with_bad(good_clients(), place, lambda: Breaks(BATCH)), module=Transferring())
    assert_left_out(caplog, TRUNCATED)
    assert_as_if_it_were_not_there(run, without("data sets"))


# ---------------------------------------------------------------------------------------------------------------------
# Rounds with too few valid clients
# ---------------------------------------------------------------------------------------------------------------------

NAN = set_entry("head.weight", fill(float("nan")))


def assert_nothing_changed(module, rows, expected_module=None):
    """The global model is bit-equal to the initial model in every round, and every round was validated."""
    start = Net().state_dict()
    assert_same(module.state_dict(), start)
    assert len(module.validated) == ROUNDS
    for state in module.validated:
        assert_same(state, start)
    assert set(rows) == set(range(ROUNDS))
    assert all("val_loss" in row for row in rows.values())


def test_fewer_than_min_clients(caplog):
    clients = with_bad(good_clients(), 1, lambda: examples(2 * BATCH))
    faults = Faults(min_clients=4, max_failed_rounds=None)
    module, rows = train(clients, [Sabotages("bad", NAN)], faults=faults, batch_norm="recalibrate")
    assert_nothing_changed(module, rows)
    assert_left_out(caplog, "NaN")
    for round, row in rows.items():
        assert (row["fed/clients"], row["fed/failed"], row["fed/global_update_norm"]) == (3, 1, 0)
        message = f"Round {round + 1}: 3 valid updates, fewer than min_clients=4, so the global model does not change."
        assert message in caplog.messages


def test_just_enough_for_min_clients(without, caplog):
    clients = with_bad(good_clients(), 1, lambda: examples(2 * BATCH))
    run = train(clients, [Sabotages("bad", NAN)], faults=Faults(min_clients=3))
    assert_as_if_it_were_not_there(run, without("data sets"))


@pytest.mark.parametrize(
    ("kind", "door"),
    quick(
        product(["messages", "data", "data from the second batch on", "loaders"], ["trainer", "callback"]),
        [("messages", "callback"), ("data from the second batch on", "callback"), ("loaders", "trainer")],
    ),
)
def test_all_clients_fail(kind, door, caplog):
    bad = {
        "messages": lambda: examples(2 * BATCH),
        "data": lambda: examples(0),
        "data from the second batch on": lambda: Breaks(BATCH),
        "loaders": lambda: Loader(2, breaks_at=0),
    }[kind]
    clients = LazyClients(range(3), AllBad(bad))
    callbacks = [Sabotages(client, NAN_BODY) for client in range(3)] if kind == "messages" else []
    options = {"batch_norm": "recalibrate", "personal": ["head.*"], "faults": Faults(max_failed_rounds=None)}
    module, rows = train(clients, callbacks, door=door, **options)
    assert_nothing_changed(module, rows)
    for row in rows.values():
        assert (row["fed/clients"], row["fed/failed"], row["fed/num_samples"]) == (0, 3, 0)
    left_out = [message for message in caplog.messages if "is excluded" in message]
    assert [message.split(" is excluded")[0] for message in left_out] == [
        f"Round {round + 1}: client {client}" for round in range(ROUNDS) for client in range(3)
    ]


@pytest.mark.parametrize("kind", ["data", "length", "loaders", "a worker"])
def test_a_fault_of_the_data_set_does_not_look_like_bad_clients(kind, caplog):
    """The log shows the first traceback once, and the common error of all clients in every round."""
    bad = {
        "data": lambda: Breaks(BATCH),
        "length": HasNoLength,
        "loaders": lambda: Loader(2, breaks_at=0),
        "a worker": lambda: Breaks(BATCH),
    }[kind]
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "a worker" else {}
    train(LazyClients(range(3), AllBad(bad)), data_options=workers, faults=Faults(max_failed_rounds=None))
    (shown,) = [record for record in caplog.records if "Traceback" in record.getMessage()]
    assert shown.levelname == "WARNING"
    assert shown.getMessage().startswith(
        "The data of client 0 raised an exception (logged only for the first client):\n"
    )
    assert f", in __{'len' if kind == 'length' else 'iter' if kind == 'loaders' else 'getitem'}__" in shown.getMessage()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [message.split(" raised")[0] for message in errors] == [
        f"Round {round + 1} failed: the data of all 3 clients" for round in range(ROUNDS)
    ]
    assert all("(for 3 clients) is OSError: " in message for message in errors)


def test_one_good_client_is_not_all(caplog):
    train({"bad": Breaks(0), "good": examples(2 * BATCH), "empty": examples(0)})
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert sum("Traceback" in message for message in caplog.messages) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Fits without any training
# ---------------------------------------------------------------------------------------------------------------------


class Misfit(FederatedCallback):
    """Excludes all clients from a round on."""

    def __init__(self, first_round=0):
        self.first_round = first_round

    def on_client_batch(self, trainer, module, client, batch):
        if trainer.current_epoch >= self.first_round:
            raise ClientFault(f"{client} has 4 channels")
        return batch


@pytest.mark.parametrize("door", ["trainer", "callback"])
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (lambda: Breaks(0), OSError, "in __getitem__"),
        (HasNoLength, OSError, "in __len__"),
        (lambda: Loader(2, breaks_at=0), OSError, "in __iter__"),
        (lambda: DataLoader(Endless(), batch_size=BATCH), ValueError, "a data set with a length"),
        (lambda: Unmeasured(2), MisconfigurationException, "has no length: set `local_steps`"),
        (lambda: {"a": examples(4), "b": examples(4)}, TypeError, "data sets in a dict"),
    ],
    ids=["data", "length", "loaders", "streams", "loaders without a length", "nested"],
)
def test_an_error_of_all_clients_ends_the_fit(bad, error, text, door):
    """At once, with the first client's traceback; the module does not change."""
    module = Net()
    with pytest.raises(error) as caught:
        train(LazyClients(range(3), AllBad(bad)), module=module, door=door)
    assert text in "".join(traceback.format_exception(caught.value))
    assert_same(module.state_dict(), Net().state_dict())
    assert not module.validated


def test_a_fault_of_all_clients_ends_the_fit_with_where_it_was_raised():
    with pytest.raises(ClientFault, match="best has 4 channels") as caught:
        train(good_clients(), [Misfit()])
    assert "in on_client_batch" in "".join(traceback.format_exception(caught.value))


def test_the_only_client_of_a_round_among_others_may_fail():
    """One of several clients is excluded, even as a whole cohort; the only client of a federation ends the fit."""
    mixed = {"bad": Breaks(0), "good": examples(2 * BATCH)}
    _, rows = train(mixed, clients_per_round=1, seed=1)
    assert {row["fed/failed"] for row in rows.values()} == {0, 1}
    with pytest.raises(OSError, match="truncated"):
        train({"bad": Breaks(0)})


@pytest.mark.parametrize(("limit", "rounds"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_failed_rounds_in_a_row_end_the_fit(limit, rounds, caplog):
    """Clients without data raise no error, but a fit without any successful round still fails."""
    with pytest.raises(RuntimeError, match=rf"\(the last is round {rounds}\): 3 of 3 clients failed, .*no examples"):
        train(LazyClients(range(3), AllBad(lambda: examples(0))), faults=Faults(max_failed_rounds=limit))
    assert sum("0 valid updates" in message for message in caplog.messages) == rounds


def test_a_round_that_succeeds_begins_the_count_anew():
    class Watch(FederatedCallback):
        changes_update = True

        def on_server_receive(self, trainer, module, update):
            if trainer.current_epoch % 2 == 0:
                NAN_BODY(update)

    _, rows = train(good_clients(), [Watch()], faults=Faults(max_failed_rounds=2))
    assert [row["fed/clients"] for row in rows.values()] == [0, 3, 0]


def test_too_few_good_clients_and_too_few_at_all():
    """A round below `min_clients` counts as failed if it would have had enough clients without failures."""
    clients = with_bad(good_clients(), 1, lambda: examples(2 * BATCH))
    with pytest.raises(RuntimeError, match=r"\(the last is round 2\): 1 of 4 clients failed, for example client 'bad'"):
        train(clients, [Sabotages("bad", NAN)], faults=Faults(min_clients=4, max_failed_rounds=2))
    failed = FailedRounds()
    failed.count(RoundReport(0, {"a": 1}, {"b": "the client has no examples"}), limit=1, min_clients=3)
    assert failed.in_a_row == 0


def test_an_aggregate_that_is_never_finite_ends_the_fit():
    with pytest.raises(RuntimeError, match="the aggregate was discarded"):
        train(good_clients(), method=Exploding())


class SaveSecond(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_failed_rounds_are_counted_on_after_resuming(tmp_path, federated_trainer):
    """The count continues as in an uninterrupted fit."""
    path, clients = tmp_path / "second.ckpt", good_clients()
    for resumed in (None, path):
        callbacks = [SaveSecond(path), *(Sabotages(client, NAN_BODY) for client in clients)]
        trainer = federated_trainer(max_rounds=9, callbacks=callbacks, faults=Faults(max_failed_rounds=3))
        with pytest.raises(RuntimeError, match=r"3 consecutive failed rounds \(the last is round 3\): .*NaN"):
            trainer.fit(Net(), clients, ckpt_path=resumed)


class AllBad:
    def __init__(self, bad):
        self.bad = bad

    def __call__(self, client):
        return self.bad()


def test_all_clients_drop_out(caplog):
    module, rows = train(good_clients(), availability=Availability(client_dropout=0.999999))
    assert_nothing_changed(module, rows)
    for row in rows.values():
        assert (row["fed/clients"], row["fed/failed"], row["fed/dropped"]) == (0, 0, 3)
        assert row["comm/up_bytes"] == row["comm/down_bytes"] == 0
    assert sum("0 valid updates" in message for message in caplog.messages) == ROUNDS


def test_learning_rates_after_rounds_without_visits():
    """The epoch scheduler steps once per round; missing batches do not count."""
    rates = {}
    for dropout in (0.0, 0.999999):
        trainer_rates = []

        class Watch(L.Callback):
            changes_update = True

            def on_train_epoch_end(self, trainer, pl_module, rates=trainer_rates):
                rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        train({"one": examples(BATCH)}, [Watch()], availability=Availability(client_dropout=dropout), local_epochs=1)
        rates[dropout] = trainer_rates
    assert rates[0.0] == pytest.approx([0.05 * (0.8 * 0.95) ** round for round in (1, 2, 3)])
    assert rates[0.999999] == pytest.approx([0.05 * 0.8**round for round in (1, 2, 3)])


class Exploding(AveragingAggregator):
    def weight(self, update):
        return 1.0

    def aggregate(self):
        return {name: value / 0 if value.is_floating_point() else value for name, value in super().aggregate().items()}


def test_an_aggregate_that_is_not_finite(caplog):
    options = {"batch_norm": "recalibrate", "faults": Faults(max_failed_rounds=None)}
    module, rows = train(good_clients(), method=Exploding(), **options)
    assert_nothing_changed(module, rows)
    assert (
        sum("the aggregate is discarded: entry 'body.0.weight' has NaN" in message for message in caplog.messages) == 3
    )


def test_a_client_that_failed_comes_back(without):
    """The fault only affects one round, and the client state is from the previous visits."""
    seen = []

    class Watch(FederatedCallback):
        changes_update = True

        def on_client_start(self, trainer, module, client, broadcast):
            if client == "good":
                seen.append(module.head.weight.clone())

        def on_client_end(self, trainer, module, client, update):
            if client == "good":
                seen.append(module.head.weight.clone())
            if (client, trainer.current_epoch) == ("good", 1):
                NAN_BODY(update)

    _, rows = train(good_clients(), [Watch()], personal=["head.*"], optimizer_state="keep")
    assert [row["fed/failed"] for row in rows.values()] == [0, 1, 0]
    assert [row["fed/clients"] for row in rows.values()] == [3, 2, 3]
    assert torch.equal(seen[2], seen[1])  # the head from the client's last good visit
    assert torch.equal(seen[4], seen[1])  # not the head from the failed round


NAN_BODY = set_entry("body.0.weight", fill(float("nan")))


class Spoils(Net):
    """One client damages an entry in the last step of round 1; another entry is infinite by design."""

    def __init__(self, change):
        super().__init__()
        self.register_buffer("bank", torch.tensor([0.0, float("-inf")]))
        self.change = change

    def on_train_batch_end(self, outputs, batch, batch_idx):
        client = find_federation(self.trainer).current_client
        if client == "good" and self.trainer.current_epoch == 1 and batch_idx == 2:
            self.change(self)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda module: module.head.weight.data[0].fill_(float("inf")), "'head.weight' has NaN or infinite values"),
        (lambda module: setattr(module, "bank", module.bank.repeat(2)), r"'bank' has shape \(4,\) instead of \(2,\)"),
    ],
)
def test_personal_entries_that_cannot_be_kept(change, reason, caplog):
    """The client resumes from the earlier personal entries."""
    _, rows = train(good_clients(), module=Spoils(change), personal=["head.*", "bank"], local_epochs=1)
    assert [row["fed/failed"] for row in rows.values()] == [0, 1, 0]
    assert re.search(
        f"Round 2: client 'good' is excluded: in the client's personal entries, entry {reason}", caplog.text
    )


# ---------------------------------------------------------------------------------------------------------------------
# Not a fault
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 3], ids=["first", "last"])
def test_a_loader_shorter_than_its_length(place, caplog):
    clients = with_loaders(good_clients())
    short = train(with_bad(clients, place, lambda: Loader(2, length=3)), local_epochs=1)
    exact = train(with_bad(clients, place, Exact), local_epochs=1)
    assert_same(short[0].state_dict(), exact[0].state_dict())
    assert [row["fed/failed"] for row in short[1].values()] == [0] * ROUNDS
    assert "is excluded" not in caplog.text


class Exact(Loader):
    """Two batches, on a data set for three."""

    def __init__(self):
        super().__init__(3)
        self.count = self.length = 2


def test_a_loader_longer_than_its_length():
    clients = with_loaders(good_clients())
    long = train(with_bad(clients, 1, lambda: Loader(3, length=2)), local_epochs=1)
    exact = train(with_bad(clients, 1, Exact), local_epochs=1)
    assert_same(long[0].state_dict(), exact[0].state_dict())


class Streamed(IterableDataset):
    """A stream with a known number of examples."""

    def __len__(self):
        return 2 * BATCH

    def __iter__(self):
        yield from iter([examples(2 * BATCH)[index] for index in range(2 * BATCH)])


class Unmeasured(Loader):
    """A loader without a length on data with a length."""

    def __len__(self):
        raise TypeError("object has no len()")


def test_a_loader_without_a_length(caplog):
    """A fault for visits counted in epochs, but not for visits counted in batches."""
    clients = {"good": DataLoader(examples(2 * BATCH), batch_size=BATCH), "bad": Unmeasured(2)}
    _, rows = train(clients)
    assert [row["fed/failed"] for row in rows.values()] == [1] * ROUNDS
    assert_left_out(caplog, "the client's loader has no length: set `local_steps`")
    _, rows = train(clients, local_epochs=1, local_steps=3)
    assert [row["fed/failed"] for row in rows.values()] == [0] * ROUNDS
    clients["stream"] = DataLoader(Streamed(), batch_size=BATCH)
    _, rows = train(clients, local_epochs=1, local_steps=5)
    assert [row["fed/clients"] for row in rows.values()] == [3] * ROUNDS


# ---------------------------------------------------------------------------------------------------------------------
# Program errors that end the fit
# ---------------------------------------------------------------------------------------------------------------------


def test_an_error_in_a_visit_names_the_client():
    class Watch(L.Callback):
        changes_update = True

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 9:  # after the 8 batches of "best"
                raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        train(good_clients(), [Watch()])
    assert caught.value.__notes__ == ["Raised in round 2, in the visit of client 'better'."]


def test_ctrl_c_in_a_data_set_is_not_a_fault_of_the_client():
    class Interrupted(Breaks):
        def __getitem__(self, index):
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        train({"good": examples(BATCH), "bad": Interrupted(0)})


# ---------------------------------------------------------------------------------------------------------------------
# Faults in the training step
# ---------------------------------------------------------------------------------------------------------------------


class BreaksDown(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def is_bad(module):
    return find_federation(module.trainer).current_client == "bad"


class LargeBatches(Net):
    def training_step(self, batch, batch_idx):
        if is_bad(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self.loss(batch)


class LargeGradients(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return BreaksDown.apply(loss) if is_bad(self) else loss


class NeverTrains(Net):
    def training_step(self, batch, batch_idx):
        return None if is_bad(self) else self.loss(batch)


class Classes(Net):
    def loss(self, batch):
        labels = torch.zeros(len(batch[0]), dtype=torch.long)
        if is_bad(self):
            labels[0] = 3
        return super().loss(batch) + 0 * nn.functional.cross_entropy(batch[0], labels)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().loss(batch))


STEPS = {
    "out of memory": (LargeBatches, "the client's training step raised OutOfMemoryError: CUDA out of memory"),
    "out of memory in the backward pass": (
        LargeGradients,
        "the client's training step raised OutOfMemoryError: CUDA out of m",
    ),
    "no loss": (NeverTrains, "the client's training step returned no loss in 4 batches"),
    "a label out of range": (Classes, "the client's training step raised IndexError: Target 3 is out of bounds"),
}


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(("fault", "place"), at_places(STEPS, ["out of memory in the backward pass", "no loss"]))
def test_steps(fault, place, without, caplog):
    make_module, reason = STEPS[fault]
    run = train(with_bad(good_clients(), place, lambda: examples(2 * BATCH)), module=make_module())
    assert_left_out(caplog, reason)
    assert_as_if_it_were_not_there(run, without("data sets"))
    shown = [message for message in caplog.messages if "Traceback" in message]
    assert len(shown) == (fault != "no loss")
    assert all("in training_step" in message or "in backward" in message for message in shown)


@pytest.mark.parametrize("make_module", [LargeBatches, LargeGradients, Classes])
def test_an_error_in_the_steps_of_all_clients_ends_the_fit(make_module, monkeypatch):
    monkeypatch.setitem(globals(), "is_bad", lambda module: True)
    module = make_module()
    with pytest.raises((torch.OutOfMemoryError, IndexError)) as caught:
        train(good_clients(), module=module)
    assert "in round 1 all 3 clients failed" in "\n".join(caught.value.__notes__).lower()
    assert_same(module.state_dict(), Net().state_dict())


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_without_a_loss_of_all_clients_end_the_fit(monkeypatch):
    monkeypatch.setitem(globals(), "is_bad", lambda module: True)
    with pytest.raises(RuntimeError, match=r"3 consecutive failed rounds.*the client's training step returned no loss"):
        train(good_clients(), module=NeverTrains())


def test_a_gpu_that_is_lost_ends_the_fit():
    """Later GPU operations in this process cannot succeed."""

    class Lost(Net):
        def training_step(self, batch, batch_idx):
            if is_bad(self):
                raise RuntimeError("CUDA error: device-side assert triggered")
            return self.loss(batch)

    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        train(with_bad(good_clients(), 1, lambda: examples(2 * BATCH)), module=Lost())
    assert "The usual cause is labels out of range" in "\n".join(caught.value.__notes__)


def test_a_single_example_from_a_users_loader(caplog):
    clients = with_loaders(good_clients())
    _, rows = train(with_bad(clients, 1, lambda: DataLoader(examples(2 * BATCH + 1), batch_size=BATCH)))
    assert_left_out(
        caplog, "the client's loader returned a batch with a single example, on which BatchNorm.*`drop_last=True`"
    )
    assert [row["fed/clients"] for row in rows.values()] == [3] * ROUNDS


class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ByTwo(ByHand):
    """Manual optimization with two optimizers; each toggles the other's parameters off."""

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.body, self.head)]


@pytest.mark.parametrize(
    ("make_module", "place"),
    quick(product([ByHand, ByTwo], [0, 1, 3]), [(ByHand, 0), (ByTwo, 1), (ByHand, 3)]),  # 3: the last
)
def test_a_step_by_hand_that_breaks_off(make_module, place, caplog):
    """For any unfinished toggling, the others train as without this client."""
    expected = train(good_clients(), module=make_module())
    run = train(with_bad(good_clients(), place, lambda: examples(1)), module=make_module())
    assert_left_out(caplog, "the client has a batch with a single example, on which BatchNorm cannot train")
    assert_as_if_it_were_not_there(run, expected)


class Watching(Net):
    """A step without index, and a hook that reads outputs."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch):
        return self.loss(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


@pytest.mark.parametrize("name", ["first", "tiny"])  # before and after "good"
def test_the_modules_hook_sees_no_batch_that_failed(name):
    module, rows = train({"good": examples(BATCH), name: examples(1)}, module=Watching())
    assert len(module.losses) == 2 * ROUNDS
    assert [(row["fed/clients"], row["fed/failed"]) for row in rows.values()] == [(1, 1)] * ROUNDS


@pytest.mark.filterwarnings("ignore:.*in eval mode")  # warning of some Lightning versions
def test_a_single_example_without_batch_norm_in_training():
    module = Net()
    module.body[1].eval()
    _, rows = train({"good": examples(BATCH), "tiny": examples(1)}, module=module)
    assert [row["fed/clients"] for row in rows.values()] == [2] * ROUNDS


@pytest.mark.parametrize("drop_last", [False, True])
def test_no_single_example_where_we_cut_the_batches(drop_last):
    """For any size from two: also in recalibration, and in both epochs."""
    clients = {f"client-{count}": examples(count) for count in range(2, 2 * BATCH + 2)}
    _, rows = train(clients, data_options={"drop_last": drop_last, "shuffle": True}, batch_norm="recalibrate")
    failed = 2 if drop_last else 0  # clients with less than one batch
    assert [row["fed/failed"] for row in rows.values()] == [failed] * ROUNDS


# ---------------------------------------------------------------------------------------------------------------------
# Server without a fit
# ---------------------------------------------------------------------------------------------------------------------


def test_the_server_by_itself(caplog):
    """Every row in the table of messages, and remote faults: missing and repeated updates."""
    state = {name: value for name, value in Net().state_dict().items()}
    server = Server(Chain(FedAvg()))
    server.start_round(RoundInfo(4), state)
    names = ["good", *MESSAGES, "silent", "better"]
    for client in names:
        assert server.prepare(client).round == 4
    answers = {client: 2 if client == "good" else 6 for client in names}
    for client in names:
        if client == "silent":
            continue
        moved = {
            name: value + (1 if client == "good" else 3) if value.is_floating_point() else value
            for name, value in state.items()
        }
        update = ClientUpdate(client, answers[client], moved)
        if client in MESSAGES:
            MESSAGES[client][0](update)
        assert (server.count(update) and server.accept(update)) == (client in ("good", "better"))
    twice = ClientUpdate("good", 2, {name: value + 50 for name, value in state.items()})
    assert not server.count(twice)
    assert not server.count(ClientUpdate("stranger", 2, dict(state)))
    aggregate = server.finish_round()
    for name, value in aggregate.items():
        expected = state[name].double() + 2.5 if value.is_floating_point() else state[name]
        torch.testing.assert_close(value.double(), expected.double(), rtol=1e-6, atol=1e-6)
    reasons = {client: reason for client, (_, reason) in MESSAGES.items()}
    reasons |= dict.fromkeys(["good", "stranger"], "the client sent an update that was not requested")
    assert server.report.failed == reasons | {"silent": "the client never answered"}
    for client, reason in server.report.failed.items():
        assert f"Round 5: client {client!r} is excluded: {reason}." in caplog.messages
    assert server.report.received == {"good": 2, "better": 6}


def test_two_fits_in_threads_are_refused():
    """Parallel fits would share the global generators; consecutive fits in threads are allowed."""
    refused = []

    class Starts(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            thread = Thread(target=other)
            thread.start()
            thread.join()

    def other():
        try:
            train(good_clients())
        except MisconfigurationException as error:
            refused.append(str(error))

    train(good_clients(), callbacks=[Starts()])
    assert [text.partition(",")[0] for text in refused] == [
        "Expected one federated fit at a time in a process"
    ] * ROUNDS
    thread = Thread(target=other)
    thread.start()
    thread.join()
    assert len(refused) == ROUNDS
