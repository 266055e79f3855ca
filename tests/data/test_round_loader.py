"""The round loader: current client, remaining batches, and items for failed or empty clients."""

import itertools
import random

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fed.data.dataset_clients import ClientSource, DatasetClients
from lightning_fed.data.loader_clients import LoaderClients
from lightning_fed.data.population import LazyClients, VisitBatch
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.errors import describe
from lightning_fed.server.schedule import Cohort, Visit
from tests.breadth import quick

SIZES = {"ann": 9, "bob": 3, "cid": 6}
BATCHES = {"ann": 2, "bob": 1, "cid": 2}
"""In batches of 4; ann's ninth example joins the previous batch."""


class Numbers(Dataset):
    """Numbers with random draws; raises for one of them."""

    def __init__(self, size, breaks_at=None):
        self.size, self.breaks_at = size, breaks_at
        self.fetched = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.fetched.append(index)
        if index == self.breaks_at:
            raise OSError("image 7 is truncated")
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
        return torch.tensor(index), torch.tensor(drawn, dtype=torch.float64)


def population(datasets=None, **options):
    datasets = datasets or {name: Numbers(size) for name, size in SIZES.items()}
    return DatasetClients(ClientSource(datasets), 4, **{"shuffle": False, **options})


def cohort(*clients, round=0, **options):
    return Cohort(tuple(Visit(client, round, 10 + position, **options) for position, client in enumerate(clients)))


def walk(loader):
    """Client, remaining batches and numbers (if any) for every batch."""
    return [
        (loader.current.visit.client, loader.batches_left, None if batch is None else batch[0].tolist())
        for batch in loader
    ]


# --- Cursor -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_cursor_says_whose_batch_this_is_and_how_many_are_left(epochs):
    loader = RoundLoader(population(), cohort("cid", "ann", "bob", epochs=epochs))
    expected = [
        (client, left) for client in ("cid", "ann", "bob") for left in reversed(range(epochs * BATCHES[client]))
    ]
    assert [(client, left) for client, left, _ in walk(loader)] == expected
    assert len(loader) == len(expected) == 5 * epochs
    assert [planned.num_samples for planned in loader.visits] == [6, 9, 3]


def test_the_cursor_moves_with_the_batch_and_not_before():
    loader = RoundLoader(population(), cohort("bob", "cid"))
    assert (loader.current, loader.batches_left) == (None, 0)
    batches = iter(loader)
    assert loader.current is None
    next(batches)
    assert loader.current is loader.visits[0]
    next(batches)
    assert loader.current is loader.visits[1]
    assert loader.batches_left == 1
    iter(loader)  # as Lightning does at the start of an epoch
    assert loader.current is loader.visits[1]
    next(iter(loader))
    assert loader.current is loader.visits[0]


def test_a_second_iterator_is_harmless():
    """Lightning calls `iter` twice in every epoch after the first, and uses the second."""
    expected = walk(RoundLoader(population(), cohort("ann", "bob"), 1.0))
    loader = RoundLoader(population(), cohort("ann", "bob"))
    starts = []
    loader.on_start = lambda: starts.append(loader.current)
    unused = iter(loader)
    assert starts == []
    assert walk(loader) == expected
    assert starts == [None]
    del unused
    assert walk(loader) == expected  # a round can be repeated


def test_the_start_is_told_before_the_first_batch_is_fetched():
    dataset = Numbers(6)
    loader = RoundLoader(population({"cid": dataset}), cohort("cid"))
    seen = []
    loader.on_start = lambda: seen.append(list(dataset.fetched))
    next(iter(loader))
    assert seen == [[]]
    assert dataset.fetched == [0, 1, 2, 3]


def test_a_round_says_which_it_is():
    assert RoundLoader(population(), cohort("ann", round=7)).round == 7
    assert RoundLoader(population(), Cohort(())).round is None


def test_a_round_has_no_state_for_checkpoints():
    """Lightning's checkpoint then equals the checkpoint of a plain fit with a `DataLoader`."""
    assert not hasattr(RoundLoader(population(), cohort("ann")), "state_dict")


# --- Random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["data sets", "loaders"])
def test_a_visit_draws_from_its_own_seed_whoever_came_before(kind):
    """Augmentation uses the draws after `seed_everything` with the visit's seed, from the first batch."""
    clients = {"ann": Numbers(8), "cid": Numbers(4)}
    if kind == "data sets":
        loader = RoundLoader(population(clients), cohort("ann", "cid"))
    else:
        loaders = {name: DataLoader(data, 4, generator=torch.Generator()) for name, data in clients.items()}
        loader = RoundLoader(LoaderClients(loaders), cohort("ann", "cid"))
    drawn = {"ann": [], "cid": []}
    for batch in loader:
        drawn[loader.current.visit.client].append(batch[1])
    for seed, (name, batches) in enumerate(drawn.items(), 10):
        L.seed_everything(seed, verbose=False)
        expected = [dataset[0][1] for dataset in [Numbers(1)] for _ in range(len(clients[name]))]
        assert torch.equal(torch.cat(batches), torch.stack(expected))


# --- Clients without data ---------------------------------------------------------------------------------------------


class NoLength(Numbers):
    def __len__(self):
        raise OSError("index file is gone\n")


class Stream(IterableDataset):
    def __len__(self):
        return 5

    def __iter__(self):
        return iter(torch.arange(5))


class Unmeasured:
    """A loader without a length, over data with a length."""

    dataset = TensorDataset(torch.arange(5))

    def __iter__(self):
        return iter(torch.arange(6).view(3, 1, 2))


def not_there(client):
    raise FileNotFoundError(f"no folder of {client}")


WITHOUT = {
    "no examples": (lambda: population({"ann": Numbers(9), "bad": Numbers(0)}), "the client has no examples"),
    "do not fill a batch": (
        lambda: population({"ann": Numbers(9), "bad": Numbers(3)}, drop_last=True),
        "the client's 3 examples do not fill a batch, and `drop_last` is set",
    ),
    "no length": (
        lambda: population({"ann": Numbers(9), "bad": NoLength(1)}),
        "the client's data raised OSError: index file is gone",
    ),
    "not there": (
        lambda: population(LazyClients(["ann", "bad"], lambda key: Numbers(9) if key == "ann" else not_there(key))),
        "the client's data raised FileNotFoundError: no folder of bad",
    ),
    "loader without a length": (
        lambda: LoaderClients({"ann": DataLoader(Numbers(8), 4), "bad": Unmeasured()}),
        "the client's loader has no length: set `local_steps`",
    ),
}


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", WITHOUT)
def test_a_client_without_data_has_no_visit_and_a_reason(name, position):
    make, reason = WITHOUT[name]
    clients = ["ann"]
    clients.insert(position, "bad")
    loader = RoundLoader(make(), cohort(*clients))
    assert loader.failed == {"bad": reason}
    assert [planned.visit.client for planned in loader.visits] == ["ann"]
    assert {client for client, _, _ in walk(loader)} == {"ann"}
    assert len(loader) == 2


def test_where_work_is_counted_in_steps_a_loader_needs_no_length():
    loader = RoundLoader(LoaderClients({"a": Unmeasured()}), cohort("a", steps=4))
    assert loader.failed == {}
    assert [left for _, left, _ in walk(loader)] == [3, 2, 1, 0]


@pytest.mark.parametrize("members", [(), ("bad",)], ids=["nobody", "nobody with data"])
def test_a_round_without_visits_serves_one_none(members):
    loader = RoundLoader(population({"bad": Numbers(0)}), cohort(*members))
    starts = []
    loader.on_start = lambda: starts.append(1)
    assert len(loader) == 1
    assert list(loader) == [None]
    assert (loader.current, loader.batches_left) == (None, 0)
    assert starts == [1]


# --- Failures during a visit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("breaks_at", "position", "workers"),
    quick(
        itertools.product([0, 5, 11], [0, 1, 2], [0, 2]),
        [*itertools.product([0, 5, 11], [0, 1, 2], [0]), (5, 1, 2)],
    ),
)
def test_a_visit_that_fails_is_padded(breaks_at, position, workers):
    clients = {"ann": Numbers(9), "bob": Numbers(3)}
    names = list(clients)
    names.insert(position, "bad")
    served = population({**clients, "bad": Numbers(12, breaks_at)}, loader_options={"num_workers": workers})
    loader = RoundLoader(served, cohort(*names))
    seen = walk(loader)
    assert not torch.multiprocessing.active_children()  # workers end with the round, without garbage collection
    assert len(seen) == len(loader) == 6
    bad = [(left, batch) for client, left, batch in seen if client == "bad"]
    good = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]][: breaks_at // 4]
    assert bad == list(zip((2, 1, 0), [*good, None, None, None], strict=False))
    others = [(client, left, batch) for client, left, batch in seen if client != "bad"]
    assert others == [("ann", 1, [0, 1, 2, 3]), ("ann", 0, [4, 5, 6, 7, 8]), ("bob", 0, [0, 1, 2])]
    faults = {planned.visit.client: planned.fault for planned in loader.visits}
    assert faults["bad"].startswith("the client's data raised OSError: ")
    assert faults["bad"].endswith("image 7 is truncated")
    assert faults["ann"] is faults["bob"] is None


def test_a_visit_that_is_given_a_fault_from_outside_is_served_no_more():
    dataset = Numbers(9)
    loader = RoundLoader(population({"ann": dataset, "bob": Numbers(3)}), cohort("ann", "bob", epochs=2))
    seen = []
    for batch in loader:
        seen.append((loader.current.visit.client, loader.batches_left, batch is None))
        loader.visits[0].fault = "its owner left"
    assert seen == [("ann", 3, False), ("ann", 2, True), ("ann", 1, True), ("ann", 0, True), *(
        ("bob", left, False) for left in (1, 0)
    )]  # fmt: skip
    assert dataset.fetched == [0, 1, 2, 3]


class Ahead(DatasetClients):
    """Serves three items for an already failed visit, as prefetching workers do."""

    def stream(self, visits):
        yield VisitBatch(0, error=OSError("image 7 is truncated"))
        yield from [VisitBatch(0, [torch.tensor([number])]) for number in range(3)]
        yield VisitBatch(1, [torch.tensor([70])])


def test_what_workers_fetched_ahead_for_a_failed_visit_is_passed_over():
    datasets = {"bad": Numbers(12), "bob": Numbers(3)}
    loader = RoundLoader(Ahead(ClientSource(datasets), 4), cohort("bad", "bob"))
    assert walk(loader) == [("bad", 2, None), ("bad", 1, None), ("bad", 0, None), ("bob", 0, [70])]


# --- Limits -----------------------------------------------------------------------------------------------------------

LIMITS = [
    # The limit, and the remaining batches of cid, ann and bob, out of 2, 2 and 1.
    (1.0, (2, 2, 1)),
    (99, (2, 2, 1)),
    (5, (2, 2, 1)),
    (4, (2, 2, 0)),
    (3, (2, 1, 0)),
    (1, (1, 0, 0)),
    (0.9, (2, 2, 0)),
    (0.5, (2, 0, 0)),
]


@pytest.mark.parametrize(("limit", "counts"), LIMITS)
def test_a_limit_cuts_the_rounds_end(limit, counts, caplog):
    loader = RoundLoader(population(), cohort("cid", "ann", "bob"), limit)
    expected = [
        (client, left)
        for client, count in zip(("cid", "ann", "bob"), counts, strict=True)
        for left in reversed(range(count))
    ]
    assert [(client, left) for client, left, _ in walk(loader)] == expected
    assert (min(limit, len(loader)) if isinstance(limit, int) else int(limit * len(loader))) == len(expected)
    warned = [message for message in caplog.messages if "`limit_train_batches` shortens the round" in message]
    num_visits = sum(count > 0 for count in counts)
    cut = f"from 3 visits and 5 batches to {num_visits} visits and {len(expected)} batches"
    assert len(warned) == (len(expected) < 5)
    assert all(cut in message for message in warned)


def test_a_limit_leaves_the_none_of_a_round_without_visits():
    assert int(0.5 * len(RoundLoader(population(), cohort(), 0.5))) == 1


# --- Errors in one line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("gone"), "OSError: gone"),
        (ValueError(), "ValueError"),
        (ValueError("  \n"), "ValueError"),
        (RuntimeError("Caught OSError in worker.\nTraceback ...\nOSError: gone\n"), "RuntimeError: OSError: gone"),
        (KeyError("mask"), "KeyError: 'mask'"),
    ],
)
def test_an_error_in_one_line(error, text):
    assert describe(error) == text
