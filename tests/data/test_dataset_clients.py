"""Clients with data sets: examples, order and client of each batch; workers do not change batches.

The expected batches come from torch's `BatchSampler` and NumPy's generator.
"""

import random
import weakref

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset

from lightning_fed.data.dataset_clients import ClientSource, DatasetClients, client_subsets, cut_batches
from lightning_fed.data.population import LazyClients, PlannedVisit
from lightning_fed.datasets.arrays import ArrayDataset
from lightning_fed.server.schedule import Visit, count_visit_batches

SIZES = {"ann": 9, "bob": 4, "cid": 1, "dan": 11}


def numbered(sizes=SIZES):
    """Numbers as data, by client: 100 and 101 for ann's first examples, 200 for bob's first."""
    return {
        name: TensorDataset(torch.arange(size) + 100 * position)
        for position, (name, size) in enumerate(sizes.items(), 1)
    }


def separate_datasets(batch_size=4, datasets=None, collate=None, **options):
    return DatasetClients(ClientSource(datasets or numbered(), collate), batch_size, **options)


def parts(batch_size=4, transform=None, **options):
    """The same clients as index sets of one data set, with mixed examples."""
    datasets = numbered()
    numbers = torch.cat([dataset.tensors[0] for dataset in datasets.values()])
    numbers = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))]
    indices = {
        name: np.array([numbers.tolist().index(number) for number in dataset.tensors[0].tolist()])
        for name, dataset in datasets.items()
    }
    return DatasetClients(
        ClientSource(client_subsets(TensorDataset(numbers), indices, transform)), batch_size, **options
    )


def plan(population, *visits):
    return [
        PlannedVisit(
            visit,
            population.num_samples(visit.client),
            count_visit_batches(visit, population.batches_per_epoch(visit.client)),
        )
        for visit in visits
    ]


def served(population, *visits):
    try:
        return [(item.position, item.batch[0].tolist()) for item in population.stream(plan(population, *visits))]
    finally:
        population.close()


def by_hand(client, seed, epochs=1, batch_size=4, shuffle=True):
    first, size = 100 * (1 + list(SIZES).index(client)), SIZES[client]
    batches = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(size) if shuffle else np.arange(size)
        cut = list(BatchSampler((first + order).tolist(), batch_size, drop_last=False))
        if len(cut) > 1 and len(cut[-1]) == 1 < batch_size:
            cut[-2:] = [cut[-2] + cut[-1]]
        batches += cut
    return batches


# --- Cutting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7])
def test_batches_are_torchs_but_for_a_single_example_at_the_end(batch_size):
    for num_samples in range(16):
        expected = list(BatchSampler(range(num_samples), batch_size, drop_last=False))
        if num_samples > 1 and batch_size > 1 and num_samples % batch_size == 1:
            last = expected.pop()
            expected[-1] += last
        cut = [list(range(start, end)) for start, end in cut_batches(num_samples, batch_size)]
        assert cut == expected
        if num_samples > 1 and batch_size > 1:
            assert min(map(len, cut)) > 1

        full = [list(range(start, end)) for start, end in cut_batches(num_samples, batch_size, drop_last=True)]
        assert full == list(BatchSampler(range(num_samples), batch_size, drop_last=True))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_client_has_as_many_batches_as_are_cut(drop_last):
    population = separate_datasets(drop_last=drop_last)
    assert {name: population.num_samples(name) for name in SIZES} == SIZES
    expected = {"ann": 2, "bob": 1, "cid": 0, "dan": 2} if drop_last else {"ann": 2, "bob": 1, "cid": 1, "dan": 3}
    assert {name: population.batches_per_epoch(name) for name in SIZES} == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_aside_leaves_nothing_out(workers):
    """Even for a client too small for training; the current stream continues unchanged."""
    visits = Visit("dan", 0, 11), Visit("ann", 0, 12)
    expected = served(separate_datasets(drop_last=True), *visits)
    population = separate_datasets(drop_last=True, loader_options={"num_workers": workers})
    training = population.stream(plan(population, *visits))
    first = next(training)
    for client, size in SIZES.items():
        visit = Visit(client, 0, 13)
        count = count_visit_batches(visit, population.batches_per_epoch(client, isolated=True))
        (*batches,) = population.stream([PlannedVisit(visit, size, count)], isolated=True)
        assert [item.batch[0].tolist() for item in batches] == by_hand(client, 13)
    assert [(item.position, item.batch[0].tolist()) for item in (first, *training)] == expected
    population.close()


# --- Order of examples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [separate_datasets, parts], ids=["data sets of their own", "parts of one data set"])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_the_batches_of_a_round_are_those_cut_by_hand(make, shuffle):
    visits = Visit("dan", 0, 11, epochs=2), Visit("cid", 0, 12), Visit("ann", 0, 13, epochs=3)
    expected = [
        (position, batch)
        for position, visit in enumerate(visits)
        for batch in by_hand(visit.client, visit.seed, visit.epochs, shuffle=shuffle)
    ]
    assert served(make(shuffle=shuffle), *visits) == expected


@pytest.mark.parametrize("make", [separate_datasets, parts], ids=["data sets of their own", "parts of one data set"])
def test_a_batch_is_of_one_client_and_an_epoch_has_every_example_once(make):
    visits = [Visit(name, 0, position, epochs=2) for position, name in enumerate(SIZES)]
    batches = served(make(batch_size=3), *visits)
    for position, batch in batches:
        assert {number // 100 for number in batch} == {position + 1}
    for position, size in enumerate(SIZES.values()):
        seen = [number for where, batch in batches if where == position for number in batch]
        everything = [100 * (position + 1) + number for number in range(size)]
        assert sorted(seen[:size]) == sorted(seen[size:]) == everything


def test_the_order_depends_on_the_visits_seed_alone():
    expected = by_hand("ann", 5)
    for state, before in [(0, ()), (1, ()), (0, (Visit("dan", 0, 8),)), (0, (Visit("ann", 0, 9),))]:
        L.seed_everything(state, verbose=False)
        visits = *before, Visit("ann", 3, 5)
        assert [
            batch for position, batch in served(separate_datasets(), *visits) if position == len(before)
        ] == expected
    assert [batch for _, batch in served(separate_datasets(), Visit("ann", 3, 6))] != expected


def test_fetching_moves_no_global_generator():
    L.seed_everything(1, verbose=False)
    expected = random.random(), np.random.rand(), torch.rand(2).tolist()  # noqa: NPY002
    L.seed_everything(1, verbose=False)
    served(separate_datasets(), Visit("ann", 0, 5))
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == expected  # noqa: NPY002


def test_steps_go_on_into_further_epochs():
    endless = by_hand("ann", 5, epochs=4)
    for steps in (1, 2, 5, 7):
        batches = [batch for _, batch in served(separate_datasets(), Visit("ann", 0, 5, steps=steps))]
        assert batches == endless[:steps]


def test_what_is_not_full_is_left_out_of_every_epoch():
    batches = [batch for _, batch in served(separate_datasets(drop_last=True), Visit("dan", 0, 5, epochs=2))]
    orders = [300 + 100 + np.random.default_rng([5, epoch]).permutation(11) for epoch in range(2)]
    assert batches == [order[start : start + 4].tolist() for order in orders for start in (0, 4)]


def test_every_round_is_served_anew():
    population = separate_datasets()
    expected = [(0, batch) for batch in by_hand("ann", 5)]
    half = population.stream(plan(population, Visit("dan", 0, 1)))
    next(half)  # an interrupted round
    for _ in range(2):
        assert served(population, Visit("ann", 1, 5)) == expected


# --- Workers ----------------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    """Numbers with draws from the three generators at each access."""

    def __init__(self, start=0, size=9):
        self.start, self.size = start, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
        return self.start + index, torch.tensor(drawn, dtype=torch.float64)


def augmented(num_workers):
    options = {"num_workers": num_workers, "persistent_workers": True} if num_workers else {}
    return separate_datasets(datasets={"ann": Augmented(100), "dan": Augmented(400, 11)}, loader_options=options)


def fetch_augmented(num_workers, *visits):
    population = augmented(num_workers)
    try:
        return [(item.position, item.batch) for item in population.stream(plan(population, *visits))]
    finally:
        population.close()


def test_workers_serve_the_same_examples_and_their_number_does_not_matter():
    visits = Visit("dan", 0, 11, epochs=2), Visit("ann", 0, 13)
    runs = {workers: fetch_augmented(workers, *visits) for workers in (0, 1, 2)}
    for workers in (1, 2):
        assert [(position, batch[0].tolist()) for position, batch in runs[workers]] == [
            (position, batch[0].tolist()) for position, batch in runs[0]
        ]
    for (_, left_batch), (_, two) in zip(runs[1], runs[2], strict=True):
        assert torch.equal(left_batch[1], two[1])


def test_augmentation_in_a_worker_is_drawn_from_the_visits_seed_and_the_number_of_the_batch():
    for number, (_, batch) in enumerate(fetch_augmented(1, Visit("dan", 0, 11, epochs=2))):
        L.seed_everything(int(np.random.SeedSequence([11, number]).generate_state(1)[0]), verbose=False)
        dataset = Augmented()
        assert torch.equal(batch[1], torch.stack([dataset[0][1] for _ in batch[0]]))


def test_augmentation_in_the_main_process_is_drawn_from_the_global_generators_in_order():
    L.seed_everything(3, verbose=False)
    batches = fetch_augmented(0, Visit("ann", 0, 13))
    L.seed_everything(3, verbose=False)
    dataset = Augmented()
    expected = torch.stack([dataset[0][1] for _ in range(9)])
    assert torch.equal(torch.cat([batch[1] for _, batch in batches]), expected)


def test_workers_live_on_until_the_population_is_closed():
    population = augmented(1)
    visit = plan(population, Visit("ann", 0, 13))
    workers = set()
    for _ in range(2):
        assert len(list(population.stream(visit))) == 2
        workers |= {process.pid for process in torch.multiprocessing.active_children()}
    assert len(workers) == 1
    population.close()
    assert not torch.multiprocessing.active_children()


# --- Contents of a batch ----------------------------------------------------------------------------------------------


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Batched(TensorDataset):
    """A user's data set, with a method named like one in the package."""

    def get_batch(self, size):
        return [tensor[:3] for tensor in self.tensors]


class AtOnce(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise AssertionError("not requested")

    def __getitems__(self, indices):
        return [{"x": torch.tensor([float(index)]), "y": index} for index in indices]


def tensors(size=10):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, generator=generator), torch.randint(5, (size,), generator=generator)


FETCHED = {
    "tensors": lambda: TensorDataset(*tensors()),
    "one tensor": lambda: TensorDataset(tensors()[0]),
    "a subclass of tensors": lambda: Doubled(*tensors()),
    "a `get_batch` of one's own": lambda: Batched(*tensors()),
    "arrays": lambda: ArrayDataset(
        (tensors()[0].abs() * 50).to(torch.uint8)[:, :, None, None], tensors()[1], mean=0.5, std=0.2
    ),
    "a subset": lambda: Subset(TensorDataset(*tensors(15)), [3, 1, 4, 1, 5, 9, 2, 6, 14, 0]),
    "a subset of a subset": lambda: Subset(Subset(TensorDataset(*tensors(15)), range(14, 0, -1)), range(3, 13)),
    "a subset of a subclass": lambda: Subset(Doubled(*tensors(15)), range(10)),
    "several at a time": AtOnce,
    "a list": lambda: [(torch.tensor([float(number)]), number, str(number)) for number in range(10)],
}


def assert_same_batch(left_batch, right_batch):
    assert type(left_batch) is type(right_batch)
    if isinstance(left_batch, torch.Tensor):
        assert left_batch.dtype == right_batch.dtype
        assert left_batch.stride() == right_batch.stride()
        assert torch.equal(left_batch, right_batch)
    elif isinstance(left_batch, dict):
        assert list(left_batch) == list(right_batch)
        assert_same_batch(list(left_batch.values()), list(right_batch.values()))
    elif isinstance(left_batch, list | tuple):
        for left, right in zip(left_batch, right_batch, strict=True):
            assert_same_batch(left, right)
    else:
        assert left_batch == right_batch


@pytest.mark.parametrize("shared", [False, True], ids=["data sets of their own", "parts of one data set"])
@pytest.mark.parametrize("name", FETCHED)
def test_batches_are_those_of_torchs_own_loader(name, shared):
    dataset = FETCHED[name]()
    source = ClientSource(client_subsets(dataset, {"a": np.arange(10)})) if shared else ClientSource({"a": dataset})
    population = DatasetClients(source, 4)
    batches = [item.batch for item in population.stream(plan(population, Visit("a", 0, 3)))]
    order = np.random.default_rng([3, 0]).permutation(10).tolist()
    expected = DataLoader(dataset, batch_sampler=[order[:4], order[4:8], order[8:]])
    assert_same_batch(batches, list(expected))


def test_batches_share_no_memory_with_the_data_set():
    population = separate_datasets()
    visit = Visit("bob", 0, 0)
    for item in population.stream(plan(population, visit)):
        item.batch[0].zero_()
    assert served(population, visit) == [(0, by_hand("bob", 0)[0])]


def test_clients_of_a_subset_are_indexed_below_it():
    dataset = TensorDataset(torch.arange(20))
    view = Subset(Subset(dataset, range(19, -1, -1)), [0, 2, 4, 6, 8])  # 19, 17, 15, 13, 11
    source = ClientSource(client_subsets(view, {"a": np.array([4, 0]), "b": np.array([1, 2, 3])}))
    population = DatasetClients(source, 4, shuffle=False)
    assert served(population, Visit("a", 0, 0), Visit("b", 0, 0)) == [(0, [11, 19]), (1, [17, 15, 13])]
    assert [population.num_samples(client) for client in population.clients] == [2, 3]
    assert source.datasets["a"].dataset is dataset  # no view is left between


class Shifted(Subset):
    def __getitem__(self, index):
        return (super().__getitem__(index)[0] + 1000,)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_a_subclass_of_subset_keeps_its_own_ways():
    view = Shifted(TensorDataset(torch.arange(20)), [19, 17, 15])
    population = DatasetClients(ClientSource(client_subsets(view, {"a": np.array([2, 0])})), 4, shuffle=False)
    assert served(population, Visit("a", 0, 0)) == [(0, [1015, 1019])]


def test_a_transform_belongs_to_its_client():
    def transform(client):
        return None if client == "bob" else lambda sample: (sample[0] + 10_000 * len(client),)

    visits = Visit("ann", 0, 1), Visit("bob", 0, 2), Visit("dan", 0, 3)
    batches = served(parts(transform=transform), *visits)
    expected = [
        (position, [number + 30_000 * (visit.client != "bob") for number in batch])
        for position, visit in enumerate(visits)
        for batch in by_hand(visit.client, visit.seed)
    ]
    assert batches == expected


def test_a_collation_of_ones_own():
    population = separate_datasets(collate=lambda samples: [torch.stack([sample[0] for sample in samples]) + 0.5])
    batches = [batch for _, batch in served(population, Visit("ann", 0, 1))]
    assert batches == [[number + 0.5 for number in batch] for batch in by_hand("ann", 1)]


# --- Data built on request --------------------------------------------------------------------------------------------


class Heavy(TensorDataset):
    pass


class Builder:
    """Builds data sets, records the clients, and counts live data sets."""

    def __init__(self):
        self.built = []
        self.references = []
        self.most_alive = 0

    def __call__(self, client):
        dataset = Heavy(torch.arange(6) + 100 * client)
        self.built.append(client)
        self.references.append(weakref.ref(dataset))
        self.most_alive = max(self.most_alive, sum(reference() is not None for reference in self.references))
        return dataset


def test_a_clients_data_are_built_once_per_visit_and_let_go():
    build = Builder()
    population = separate_datasets(datasets=LazyClients(range(10**9), build))
    assert build.built == []
    for position, client in enumerate([7, 10**8, 3, 7]):
        assert {batch[0] // 100 for _, batch in served(population, Visit(client, 0, position))} == {client}
    assert build.built == [7, 10**8, 3, 7]
    assert build.most_alive <= 3  # two cached data sets, and a third in construction


def test_a_clients_data_are_known_by_its_key_alone():
    population = separate_datasets(datasets=LazyClients([3, 1], Builder()))
    assert list(population.clients) == [3, 1]
    assert served(population, Visit(1, 0, 0))[0][1][0] // 100 == 1


# --- Faults -----------------------------------------------------------------------------------------------------------


class Breaks(Dataset):
    def __init__(self, at, size=8):
        self.at, self.size = at, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.at:
            raise OSError("image 5 is truncated")
        return (torch.tensor(index),)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_stands_for_its_batch(workers):
    datasets = {"good": Breaks(-1), "bad": Breaks(5), "better": Breaks(-1, 4)}
    population = separate_datasets(2, datasets, shuffle=False, loader_options={"num_workers": workers})
    visits = plan(population, *(Visit(name, 0, 0) for name in datasets))
    items = list(population.stream(visits))
    population.close()
    positions = [item.position for item in items]
    assert positions == [0] * 4 + [1] * 4 + [2] * 2
    faults = [number for number, item in enumerate(items) if item.error is not None]
    assert faults == [6]
    assert "image 5 is truncated" in str(items[6].error)
    assert items[6].batch is None
    assert items[7].batch[0].tolist() == [6, 7]


def test_nothing_more_is_fetched_for_a_visit_with_a_fault():
    population = separate_datasets(2, {"bad": Breaks(0), "good": Breaks(-1, 4)}, shuffle=False)
    visits = plan(population, Visit("bad", 0, 0), Visit("good", 0, 0))
    seen = []
    for item in population.stream(visits):
        seen.append((item.position, item.error is not None))
        if item.error is not None:
            visits[item.position].fault = "image 5 is truncated"
    assert seen == [(0, True), (1, False), (1, False)]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_batches_of_nothing(batch_size):
    with pytest.raises(ValueError, match=f"Expected `batch_size` to be at least 1, but got {batch_size}"):
        separate_datasets(batch_size)
