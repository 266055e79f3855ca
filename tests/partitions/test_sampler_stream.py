"""Samplers under a partition: a client's epoch is the sampler's stream without other clients' examples."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fed.data import IID, ByGroup, LabelsPerClient, PartitionedData
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.errors import OptionError
from lightning_fed.partitions.base import Partition
from lightning_fed.partitions.loader_split import split_loader, split_training_data
from lightning_fed.server.schedule import Cohort, Visit
from tests import models
from tests.breadth import quick
from tests.partitions.test_partitioned import Numbered
from tests.recorders import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZE = 60


def numbers(size=SIZE):
    return TensorDataset(torch.arange(size)[:, None], torch.arange(size) % 3)


class Buckets(Sampler):
    """Batches of neighbours in random order, as in speech and text projects."""

    def __init__(self, size, batch_size):
        self.size, self.batch_size, self.epoch = size, batch_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return -(-self.size // self.batch_size)

    def __iter__(self):
        order = list(range(self.size))
        batches = [order[start : start + self.batch_size] for start in range(0, self.size, self.batch_size)]
        random.Random(self.epoch).shuffle(batches)
        yield from batches


class Reversed(SequentialSampler):
    def __iter__(self):
        return reversed(range(len(self.data_source)))


class Draws(Sampler):
    def __init__(self, draw, length=SIZE):
        self.draw, self.length = draw, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.draw())


class Caches(Draws):
    def __iter__(self):
        self.order = torch.randperm(self.length).tolist()
        return iter(self.order)


class CountsPasses(Draws):
    """Draws by a function of the number of passes, without ``set_epoch``."""

    def __init__(self, draw):
        super().__init__(draw, SIZE // 2)
        self.count = 0

    def __iter__(self):
        self.count += 1
        return iter(self.draw(self.count))


class Shared(Draws):
    """A generator under another attribute name."""

    def __init__(self):
        super().__init__(None)
        self.random = np.random.RandomState(0)

    def __iter__(self):
        self.random.rand()
        return iter(range(SIZE))


class Endless(Sampler):
    def __iter__(self):
        return itertools.count()


def passes_of(loader, partition, rounds=1, epochs=1, seed=0, clients=None, **options):
    """The training batches by round and client, as lists of numbers."""
    population = split_training_data(loader, partition, seed)
    population.local_epochs = epochs
    served = []
    for round in range(rounds):
        cohort = Cohort(tuple(Visit(client, round, 7 + round, epochs, **options) for client in population.clients))
        batches = RoundLoader(population, cohort)
        visits = {visit.client: [] for visit in cohort.visits}
        for batch in batches:
            if batch is not None:
                visits[batches.current.visit.client].append(batch[0].flatten().tolist())
        served.append(visits)
    population.close()
    return served


# --- Samplers ---------------------------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([0.5, 2.0, 0.0] * 20)
SAMPLERS = {  # the loader, and the numbers of distinct examples and of examples in a pass
    "subset": (lambda: {"sampler": SubsetRandomSampler(range(48))}, (48, 48)),
    "fewer": (lambda: {"sampler": RandomSampler(numbers(), num_samples=20)}, (20, 20)),
    "more": (lambda: {"sampler": RandomSampler(numbers(), num_samples=90)}, (60, 90)),
    "with replacement": (lambda: {"sampler": RandomSampler(numbers(), replacement=True)}, (None, 60)),
    "of another data set": (lambda: {"sampler": RandomSampler(range(30), num_samples=60)}, (30, 60)),
    "in the order of another": (lambda: {"sampler": SequentialSampler(range(12))}, (12, 12)),
    "weighted": (lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 45)}, (None, 45)),
    "weighted without replacement": (lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 40, False)}, (40, 40)),
    "replica": (lambda: {"sampler": DistributedSampler(numbers(), num_replicas=2, rank=1)}, (30, 30)),
    "subclass": (lambda: {"sampler": Reversed(numbers())}, (60, 60)),
    "with a cache": (lambda: {"sampler": Caches(None)}, (60, 60)),
    "a list": (lambda: {"sampler": [5, 3, 3, 59]}, (3, 4)),
    "numbers of numpy": (lambda: {"sampler": Draws(lambda: np.random.permutation(SIZE))}, (60, 60)),  # noqa: NPY002
    "batches": (lambda: {"batch_sampler": BatchSampler(RandomSampler(numbers()), 6, False)}, (60, 60)),
    "batches of a subset": (lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(range(9)), 4, False)}, (9, 9)),
    "buckets": (lambda: {"batch_sampler": Buckets(SIZE, 7)}, (60, 60)),
    "a list of batches": (lambda: {"batch_sampler": [[0, 1, 2], [2], [50, 7]]}, (5, 6)),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_clients_of_a_round_see_every_example_of_a_pass_once(kind):
    """Rounds have different passes of equal length, unless the order is fixed."""
    make, (different, count) = SAMPLERS[kind]
    options = make()
    loader = DataLoader(numbers(), **({"batch_size": 6} if "sampler" in options else {}), **options)
    rounds = passes_of(loader, IID(3), rounds=2)
    seen = [sorted(itertools.chain(*itertools.chain(*visits.values()))) for visits in rounds]
    assert [len(numbers) for numbers in seen] == [count, count]
    assert different in (None, len(set(seen[0])))
    indices = IID(3).split(numbers(), 0)
    for visits in rounds:
        for client, batches in visits.items():
            assert set(itertools.chain(*batches)) <= set(indices[client].tolist())
    is_random = "Random" in type(options.get("sampler", "")).__name__ or kind in ("replica", "buckets", "batches")
    assert not is_random or rounds[0] != rounds[1]


def test_batches_are_cut_within_a_client_or_are_parts_of_batches():
    order = [9, 1, 5, 0, 7, 3, 8, 2]
    groups = ByGroup([index % 2 for index in range(10)])
    cut = DataLoader(numbers(10), 2, sampler=order)
    assert passes_of(cut, groups) == [{0: [[0, 8, 2]], 1: [[9, 1], [5, 7, 3]]}]
    dropped = DataLoader(numbers(10), 2, sampler=order, drop_last=True)
    assert passes_of(dropped, groups) == [{0: [[0, 8]], 1: [[9, 1], [5, 7]]}]
    batches = DataLoader(numbers(10), batch_sampler=[[9, 1, 5], [0, 7], [3], [8, 2]])
    assert passes_of(batches, groups) == [{0: [[0], [8, 2]], 1: [[9, 1, 5], [7], [3]]}]


def test_local_epochs_are_further_passes_of_any_length():
    """With sampling weights, a client's number of examples differs between passes."""
    loader = DataLoader(numbers(), 4, sampler=WeightedRandomSampler(WEIGHTS, 45))
    population = split_loader(loader, IID(3), 0)
    population.local_epochs = 4
    cohort = Cohort(tuple(Visit(client, 1, 3, 4) for client in range(3)))
    batches, counts, ends = RoundLoader(population, cohort), dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)
    for batch in batches:
        counts[batches.current.visit.client] += len(batch[0])
        ends[batches.current.visit.client] += batches.epoch_position[1]
    assert sum(counts.values()) == 4 * 45
    assert set(ends.values()) == {4}
    for planned in batches.visits:
        assert planned.num_samples == len(population.draws.part(planned.visit.client, 1, 0, 4)[0])
        assert planned.num_batches == sum(planned.pass_batches)
        assert len(planned.pass_batches) == 4
    assert len({length for planned in batches.visits for length in planned.pass_batches}) > 1


def test_steps_go_on_into_further_passes():
    loader = DataLoader(numbers(), 4, sampler=SubsetRandomSampler(range(24)))
    (visits,) = passes_of(loader, ByGroup([index % 2 for index in range(SIZE)]), steps=8)
    for client, batches in visits.items():
        assert len(batches) == 8
        first, second = (sorted(itertools.chain(*part)) for part in (batches[:3], batches[3:6]))
        assert first == second == list(range(client, 24, 2))
        assert batches[:3] != batches[3:6]


def test_a_client_without_draws_is_left_out_by_name():
    loader = DataLoader(numbers(8), 2, sampler=SubsetRandomSampler([0, 1, 2]))
    population = split_loader(loader, ByGroup([0] * 4 + [1] * 4), 0)
    rounds = RoundLoader(population, Cohort((Visit(0, 0, 0), Visit(1, 0, 0), Visit(1, 0, 0, steps=3))))
    assert rounds.failed == {1: "the client has no examples"}


def test_passes_beside_training_see_what_the_sampler_draws():
    loader = DataLoader(numbers(), 7, sampler=SubsetRandomSampler(range(40)), drop_last=True)
    population = split_loader(loader, IID(2), 0)
    own = sorted(index for index in population.source.datasets[1].indices.tolist() if index < 40)
    aside = torch.cat([batch[0] for batch in population.one_pass(Visit(1, 3, 0), isolated=True)])
    assert sorted(aside.flatten().tolist()) == own
    assert not population.gives_all(1)
    assert split_loader(DataLoader(numbers(), 7, sampler=Reversed(numbers())), IID(2), 0).gives_all(1)


def test_a_subset_of_a_data_set_is_indexed_by_its_own_positions():
    subset = Subset(numbers(), [50, 50, 4, 7])
    (visits,) = passes_of(DataLoader(subset, 2, sampler=[3, 1, 0, 0]), ByGroup([0, 1, 1, 0]))
    assert visits == {0: [[7, 50, 50]], 1: [[50]]}


@pytest.mark.parametrize("workers", quick([0, 1], [0]))
def test_a_fit_weighs_clients_by_the_draws(workers, federated_trainer):
    recorder = Recorder()
    loader = DataLoader(
        TensorDataset(*models.vectors({"a": 40})["a"]), 4, num_workers=workers, sampler=SubsetRandomSampler(range(30))
    )
    trainer = federated_trainer(max_rounds=2, partition=IID(2), callbacks=[recorder])
    trainer.fit(models.Module(models.mlp()), loader)
    assert sum(visit.num_samples for visit in recorder.round(1)) == 30
    assert trainer.callback_metrics["fed/num_samples"] == 30


# --- Refusals ---------------------------------------------------------------------------------------------------------


class Iterates(DataLoader):
    def __iter__(self):
        for inputs, labels in super().__iter__():
            yield inputs / 255, labels


class Shorter(DataLoader):
    def __len__(self):
        return 2


class Fetches(DataLoader):
    def _get_iterator(self):
        return iter([1])


class Mixin:
    @property
    def collate_fn(self):
        return list

    @collate_fn.setter
    def collate_fn(self, value):
        pass


class Collates(Mixin, DataLoader):
    pass


class Samples(DataLoader):
    @property
    def _index_sampler(self):
        return [[0]]


def fetching():
    loader = DataLoader(numbers(), 5)
    loader._get_iterator = lambda: iter([])  # noqa: SLF001 - as users do
    return loader


class Adds(DataLoader):
    """Sets a collate function, as graph libraries do, and adds a method."""

    def __init__(self, dataset, **options):
        super().__init__(
            dataset, collate_fn=lambda samples: [torch.stack([inputs for inputs, _ in samples])], **options
        )

    def num_classes(self):
        return 3


CHANGED = {
    "__iter__": lambda: Iterates(numbers(), 5),
    "__len__": lambda: Shorter(numbers(), 5),
    "_get_iterator": lambda: Fetches(numbers(), 5),
    "collate_fn": lambda: Collates(numbers(), 5),
    "_index_sampler": lambda: Samples(numbers(), 5),
    "_get_iterator of the object": fetching,
}


@pytest.mark.parametrize("kind", CHANGED)
@pytest.mark.parametrize("several", [False, True])
def test_a_loader_that_makes_batches_in_its_own_way_is_refused(kind, several):
    loader = CHANGED[kind]()
    with pytest.raises(OptionError, match=f"`{kind.split()[0]}`, which would have no effect: .* own loader"):
        split_training_data({"a": loader} if several else loader, IID(3), 0)
    assert split_training_data(loader, IID(1), 0).loaders[0] is loader  # a single client keeps the loader


def test_a_subclass_that_sets_only_the_parts_of_a_loader_is_split():
    (visits,) = passes_of(Adds(numbers(), batch_size=5, shuffle=True), IID(3))
    assert sorted(itertools.chain(*itertools.chain(*visits.values()))) == list(range(SIZE))


def test_a_subclass_is_split_while_lightning_wraps_every_init(federated_trainer):
    class Sees(models.Module):
        def training_step(self, batch, batch_idx):
            seen.extend(batch[0].flatten().tolist())
            return self.net(batch[0].float().expand(-1, 6)).sum()

    seen = []
    trainer = federated_trainer(max_rounds=1, partition=IID(3))
    trainer.fit(Sees(models.mlp()), Adds(numbers(), batch_size=5, shuffle=True))
    assert sorted(seen) == list(range(SIZE))


def stateful():
    generator = np.random.default_rng(0)
    return Draws(lambda: generator.permutation(SIZE))


def counting():
    counter = itertools.count()
    return Draws(lambda: range(next(counter) // 2, SIZE), SIZE)


class Grows(Draws):
    """Never returns to an earlier epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = max(self.epoch, epoch)

    def __iter__(self):
        return iter(range(self.epoch, SIZE))


REFUSED = {
    "an epoch that only grows": ({"sampler": Grows(None)}, "same indices for the same seed"),
    "numpy's generator": ({"sampler": stateful()}, "same indices for the same seed, but .* `set_epoch"),
    "a counter with period 2": (
        {"sampler": CountsPasses(lambda count: range(count % 2, SIZE, 2))},
        "same indices for the same seed",
    ),
    "a counter with a late effect": (
        {"sampler": CountsPasses(lambda count: range(count > 9, SIZE, 2))},
        "same indices for the same seed",
    ),
    "a counter of batches": (
        {"batch_sampler": CountsPasses(lambda count: [range(count > 9, 30, 2)])},
        "same indices for the same seed",
    ),
    "a counter inside batches": (
        {"batch_sampler": BatchSampler(CountsPasses(lambda count: range(count > 9, SIZE, 2)), 6, False)},
        "same indices for the same seed",
    ),
    "an old generator of numpy": ({"sampler": Shared()}, "same indices for the same seed"),
    "a counter": ({"sampler": counting()}, "same indices for the same seed"),
    "endless": ({"sampler": Endless()}, "Endless to have a length"),
    "longer": ({"sampler": Draws(lambda: range(SIZE), 9)}, "at most 9 batches or indices in a pass, .* `__len__`"),
    "places": ({"sampler": Draws(lambda: ["north", "south"])}, "indices of examples, .* but got 'north'"),
    "lists": ({"sampler": Draws(lambda: [[1, 2]])}, r"indices of examples, .* but got \[1, 2\]"),
    "outside": ({"sampler": [1, 60]}, "indices from 0 to 59, but got 60"),
    "from the end": ({"sampler": [1, -1]}, "indices from 0 to 59, but got -1"),
    "batches without length": ({"batch_sampler": Endless()}, "Endless to have a length"),
    "batches of places": ({"batch_sampler": Draws(lambda: [[("a", 1)]])}, r"indices of examples"),
    "batches of some at once": (
        {"batch_size": None, "sampler": BatchSampler(SubsetRandomSampler([1, 2]), 2, False)},
        "draw all examples once per pass, but got batch_size=2 and sampler=SubsetRandomSampler",
    ),
    "no batches": ({"batch_size": None}, "DataLoader with a batch size, .*, but got batch_size=None"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_sampler_that_cannot_be_divided_is_refused(kind, federated_trainer):
    options, message = REFUSED[kind]
    module = models.Module(models.mlp())
    trainer = federated_trainer(max_rounds=1, partition=IID(2))
    with pytest.raises(OptionError, match=message):
        trainer.fit(module, DataLoader(numbers(), **options))
    assert trainer.global_step == 0


def test_held_out_data_need_a_loader_of_all_examples():
    class Weighted(Numbered):
        def train_dataloader(self):
            dataset = super().train_dataloader().dataset
            return DataLoader(dataset, 4, sampler=WeightedRandomSampler([1.0] * len(dataset), len(dataset)))

    with pytest.raises(OptionError, match=r"sampler=WeightedRandomSampler: pass the datamodule itself"):
        PartitionedData(Weighted(), IID(3)).setup("fit")


# --- Any loader -------------------------------------------------------------------------------------------------------


class Overlapping(Partition):
    def __init__(self, parts):
        self.parts = parts

    def split(self, dataset, seed):
        return {client: np.array(part, dtype=np.int64) for client, part in enumerate(self.parts)}


class Shuffles(Sampler):
    """Shuffles by a seed, a state or a generator."""

    def __init__(self, size, way):
        self.size, self.epoch, self.way = size, 0, way
        self.generator = torch.Generator() if way == "generator" else None
        self.own = np.random.default_rng(0)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        if self.way == "epoch":
            return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)))
        if self.way == "state":
            return iter(self.own.permutation(self.size).tolist())
        if self.way == "python":
            return iter(random.sample(range(self.size), self.size))
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


@st.composite
def samplers(draw, size):
    dataset = range(size)
    kind = draw(st.sampled_from(["random", "weighted", "subset", "replica", "list", "own", "sequence"]))
    if kind == "random":
        return RandomSampler(dataset, draw(st.booleans()), draw(st.none() | st.integers(1, 2 * size)))
    if kind == "weighted":
        weights = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=size, max_size=size))
        replacement = draw(st.booleans())
        return WeightedRandomSampler(weights, draw(st.integers(1, 2 * size if replacement else size)), replacement)
    if kind == "subset":
        return SubsetRandomSampler(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)))
    if kind == "replica":
        return DistributedSampler(dataset, draw(st.integers(1, 3)), 0, draw(st.booleans()))
    if kind == "list":
        return draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=2 * size))
    if kind == "own":
        return Shuffles(size, draw(st.sampled_from(["epoch", "state", "python", "generator", "global"])))
    return SequentialSampler(range(draw(st.integers(1, size))))


def has_state(loader):
    return getattr(getattr(loader.batch_sampler, "sampler", None), "way", None) == "state"


class Bare(DataLoader):
    pass


@st.composite
def loaders(draw):
    size = draw(st.integers(4, 30))
    dataset = draw(st.sampled_from([lambda: numbers(size), lambda: Subset(numbers(2 * size), range(size, 2 * size))]))()
    kind = draw(st.sampled_from([DataLoader] * 4 + [Bare, Iterates, Shorter]))
    collate = draw(st.sampled_from([None, lambda samples: [torch.stack([inputs for inputs, _ in samples]), "mine"]]))
    way = draw(st.sampled_from(["sampler", "batches", "buckets", "listed", "shuffle", "nothing"]))
    batch_size, drop_last = draw(st.integers(1, 6)), draw(st.booleans())
    options = {"collate_fn": collate}
    if way == "sampler":
        options |= {"batch_size": batch_size, "drop_last": drop_last, "sampler": draw(samplers(size))}
    elif way == "batches":
        options["batch_sampler"] = BatchSampler(draw(samplers(size)), batch_size, drop_last)
    elif way == "buckets":
        options["batch_sampler"] = Buckets(size, batch_size)
    elif way == "listed":
        batch = st.lists(st.integers(0, size - 1), min_size=1, max_size=5)
        options["batch_sampler"] = draw(st.lists(batch, min_size=1, max_size=9))
    else:
        options |= {"batch_size": batch_size, "drop_last": drop_last, "shuffle": way == "shuffle"}
    return kind(dataset, **options)


@st.composite
def partitions(draw, size):
    kind = draw(st.sampled_from(["iid", "groups", "labels", "overlapping"]))
    if kind == "iid":
        return IID(draw(st.integers(2, min(4, size))))
    if kind == "groups":
        return ByGroup(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    if kind == "labels":
        return LabelsPerClient(3, 1, min_per_label=1) if size >= 9 else IID(2)
    part = st.lists(st.integers(0, size - 1), unique=True, max_size=size)
    return Overlapping(draw(st.lists(part, min_size=2, max_size=3)))


def filtered(batches, own, batch_size, drop_last):
    """A client's part of a plain epoch, by hand, from the indices in the batches."""
    if batch_size is None:
        parts = [[index for index in batch if index in own] for batch in batches]
        return [part for part in parts if part]
    mine = [index for batch in batches for index in batch if index in own]
    cut = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]
    if drop_last:
        return [batch for batch in cut if len(batch) == batch_size]
    if len(cut) > 1 and len(cut[-1]) == 1 < batch_size:
        cut[-2:] = [cut[-2] + cut[-1]]
    return cut


def check_loader(data):
    loader = data.draw(loaders())
    partition = data.draw(partitions(len(loader.dataset)))
    epochs = data.draw(st.integers(1, 3))
    note(f"{type(loader).__name__}, {loader.sampler}, {loader.batch_sampler}, {partition}, {epochs} epochs")
    if type(loader) in (Iterates, Shorter) or has_state(loader):
        with pytest.raises(OptionError, match=r"would have no effect|same indices for the same seed"):
            passes_of(loader, partition)
        return
    rounds = passes_of(loader, partition, rounds=2, epochs=epochs)
    batches = loader.batch_sampler
    is_cut = type(batches) is BatchSampler
    sampler = batches.sampler if is_cut else batches
    size, drop_last = (batches.batch_size, batches.drop_last) if is_cut else (None, False)
    first = loader.dataset[0][0].item()
    indices = partition.split(loader.dataset, 0)
    is_whole = is_cut and type(sampler) in (RandomSampler, SequentialSampler)
    is_whole = is_whole and not getattr(sampler, "replacement", False)
    is_whole = is_whole and sorted(sampler) == list(range(len(loader.dataset)))
    for round, visits in enumerate(rounds):
        passes = [[] for _ in range(epochs)]
        for number in range(0 if is_whole else epochs):
            # Only the seeds come from the package.
            plain = plain_pass(sampler, is_cut, round, number, epochs)
            passes[number] = [[int(index) for index in batch] for batch in plain]
        for client, own in indices.items():
            got = [[index - first for index in batch] for batch in visits[client]]
            if not is_whole:
                parts = [filtered(drawn, set(own.tolist()), size, drop_last) for drawn in passes]
                has_first = any(index in own for batch in passes[0] for index in batch)
                assert got == (list(itertools.chain(*parts)) if has_first and parts[0] else [])
                continue
            per_epoch = len(got) // epochs
            for start in range(0, len(got), per_epoch or 1):
                seen = list(itertools.chain(*got[start : start + per_epoch]))
                expected = filtered([seen], set(own.tolist()), size, drop_last)
                assert got[start : start + per_epoch] == expected
                assert len(seen) == len(set(seen))
                assert drop_last or sorted(seen) == sorted(own.tolist())
                in_order = type(sampler) is SequentialSampler
                assert not in_order or seen == sorted(own.tolist())[: len(seen)]


def plain_pass(sampler, is_cut, round, number, epochs):
    """One pass over a sampler with the round's seeds."""
    from lightning_fed.numerics.seeds import derive_seed

    value = derive_seed(0, 0x5A, round, number)
    torch.manual_seed(value)
    random.seed(value)
    inner = getattr(sampler, "sampler", None)
    for owner in (sampler, inner):
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(round * epochs + number)
        if isinstance(getattr(owner, "generator", None), torch.Generator):
            owner.generator.manual_seed(value)
    drawn = list(sampler)
    return [drawn] if is_cut else drawn


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 13))])
def test_any_loader_is_divided_or_refused(number):
    """50 draws for each seed in the test's name; a failure prints the draw."""

    @seed(number)
    @settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        with torch.random.fork_rng():
            check_loader(data)

    state = random.getstate()
    check()
    random.setstate(state)
