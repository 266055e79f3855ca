"""Clients with loaders: batches as loaded, correct counts, and repeated passes in a visit."""

import itertools

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_fed import Federation, FixedStatistics, LocalStatistics
from lightning_fed.data.federated import FederatedDataModule, LoaderDataModule
from lightning_fed.data.loader_clients import LoaderClients
from lightning_fed.data.population import LazyClients, PlannedVisit
from lightning_fed.errors import OptionError
from lightning_fed.partitions.basic import IID, ByGroup
from lightning_fed.partitions.loader_split import split_training_data
from lightning_fed.server.schedule import Visit, count_visit_batches
from tests import models
from tests.breadth import quick
from tests.recorders import Recorder, assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

DATASET = TensorDataset(torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


class Measured(Stream):
    def __len__(self):
        return 5


class Windows(Sampler):
    """Samples positions in a large picture, unrelated to the number of files."""

    def __init__(self, length, batch_size=None):
        self.length, self.batch_size = length, batch_size

    def __len__(self):
        return self.length

    def __iter__(self):
        for number in range(self.length):
            place = number % len(DATASET)
            yield place if self.batch_size is None else [place] * self.batch_size


class Promising:
    """A loader with more or fewer batches than its length."""

    def __init__(self, length, num_given):
        self.dataset, self.length, self.num_given = DATASET, length, num_given

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([torch.tensor([number]) for number in range(self.num_given)])


class Breaking(Promising):
    """Raises after the last batch."""

    def __iter__(self):
        yield from super().__iter__()
        raise OSError("image 7 is truncated")


def numbers(batch):
    return None if batch is None else (batch[0] if isinstance(batch, list) else batch).tolist()


def served(loaders, *visits, num_batches=None):
    """Position and numbers of every batch, or the error instead of the numbers."""
    population = LoaderClients(loaders)
    planned = [
        PlannedVisit(visit, 1, num_batches or count_visit_batches(visit, population.batches_per_epoch(visit.client)))
        for visit in visits
    ]
    return [(item.position, item.error or numbers(item.batch)) for item in population.stream(planned)]


# --- Counts -----------------------------------------------------------------------------------------------------------

LOADERS = {
    # Loader, number of examples and number of batches.
    "loader": (DataLoader(DATASET, 4), 10, 3),
    "drop_last": (DataLoader(DATASET, 4, drop_last=True), 10, 2),
    "part of a shared data set": (DataLoader(DATASET, 4, sampler=SubsetRandomSampler(range(3, 8))), 5, 2),
    "batch sampler over a part": (
        DataLoader(DATASET, batch_sampler=BatchSampler(SubsetRandomSampler(range(3)), 2, False)), 3, 2
    ),
    "drawn again and again": (DataLoader(DATASET, 4, sampler=RandomSampler(DATASET, True, 100)), 10, 25),
    "drawn places": (DataLoader(DATASET, 4, sampler=Windows(100)), 100, 25),
    "drawn batches of places": (DataLoader(DATASET, batch_sampler=Windows(25, batch_size=4)), 100, 25),
    "without batches": (DataLoader(DATASET, batch_size=None), 10, 10),
    "stream with a length": (DataLoader(Measured(), 2), 5, 3),
    "list of batches": ([torch.zeros(3, 2), torch.zeros(2, 2)], 5, 2),
    "list of labelled batches": ([(torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(1, 2), torch.zeros(1))], 4, 2),
    "no batches": ([], 0, 0),
    "loader that promises too much": (Promising(9, 2), 10, 9),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_examples_and_batches_are_counted(name):
    loader, num_samples, num_batches = LOADERS[name]
    population = LoaderClients({"a": loader})
    assert population.num_samples("a") == num_samples
    assert population.batches_per_epoch("a") == num_batches


@pytest.mark.parametrize(
    "loader", [DataLoader(Stream(), 2), (torch.zeros(2) for _ in range(3))], ids=["stream", "generator"]
)
def test_examples_that_cannot_be_counted(loader):
    population = LoaderClients({"a": loader})
    assert population.batches_per_epoch("a") is None
    with pytest.raises(ValueError, match="Expected the loader of client 'a' to have a data set with a length"):
        population.num_samples("a")


def test_a_stream_counts_as_the_examples_of_a_visit():
    population = LoaderClients({"a": DataLoader(Stream(), 2), "b": DataLoader(Stream(), batch_size=None)})
    population.local_steps = 7
    assert population.num_samples("a") == 14
    with pytest.raises(ValueError, match=r"'b' to have .* Or set `local_steps` and the loader's `batch_size`"):
        population.num_samples("b")


class Endless(IterableDataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        for index in itertools.count():
            yield tuple(tensor[index % len(tensor)] for tensor in self.tensors)


class Cycle:
    """Endless batches without a data set or a length, as in gluonts."""

    batch_size = 8

    def __init__(self, dataset):
        self.batches = DataLoader(dataset, self.batch_size)

    def __iter__(self):
        return itertools.cycle(self.batches)


class Episodes:
    """Draws batches for few-shot learning, without a length."""

    def __iter__(self):
        for _ in range(2):
            yield torch.randperm(24)[:6].tolist()


LENGTHLESS = {
    "endless batches": Cycle,
    "episodes": lambda dataset: DataLoader(dataset, batch_sampler=Episodes()),
}


@pytest.mark.parametrize("name", LENGTHLESS)
def test_loaders_without_a_length_need_local_steps(name, either_trainer):
    """The federation's visits equal plain steps over the same batches."""
    clients = models.as_datasets(models.vectors({"a": 24, "b": 24}))
    loaders = FederatedDataModule({client: LENGTHLESS[name](dataset) for client, dataset in clients.items()})
    with pytest.raises(Exception, match="set `local_steps`"):
        either_trainer(1).fit(models.Module(models.mlp()), datamodule=loaders)
    own, recorder = models.Module(models.mlp(), models.momentum), Recorder()
    trainer = either_trainer(1, local_steps=5, callbacks=[recorder])
    trainer.fit(own, datamodule=loaders)
    sums = {}
    for visit in recorder.visits:
        assert len(visit.batches) == 5
        plain = models.Module(models.mlp(), models.momentum)
        optimizer = plain.configure_optimizers()
        for inputs, targets in visit.batches:
            optimizer.zero_grad()
            plain.loss(plain(inputs), targets).backward()
            optimizer.step()
        for entry, value in plain.state_dict().items():
            sums[entry] = sums.get(entry, 0) + value.double() / 2
    for entry, value in state_of(own).items():
        torch.testing.assert_close(value.double(), sums[entry], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("either_trainer", "rule"),
    quick(itertools.product(["trainer", "callback"], ["fedavg", "scaffold"]), [("callback", "fedavg")]),
    indirect=["either_trainer"],
)
def test_streams_without_a_length_train_as_their_first_batches(rule, either_trainer):
    """Each visit restarts the stream and trains on the given number of batches; BatchNorm is measured on a part."""
    clients = models.vectors({"a": 24, "b": 24})
    results = []
    for make in (Endless, TensorDataset):
        module = models.Module(models.norm_mlp(), models.momentum)
        loaders = {name: DataLoader(make(*tensors), 8) for name, tensors in clients.items()}
        trainer = either_trainer(max_rounds=2, method=rule, local_steps=3, batch_norm="average")
        trainer.fit(module, datamodule=FederatedDataModule(loaders))
        results.append(state_of(module))
    assert_same(*results)


@pytest.mark.parametrize("mode", ["recalibrate", LocalStatistics(), "personal", FixedStatistics(1)], ids=str)
def test_streams_with_batch_norm(mode, either_trainer):
    clients = {name: DataLoader(Endless(*tensors), 8) for name, tensors in models.vectors({"a": 20, "b": 30}).items()}
    module, recorder = models.Module(models.norm_mlp()), Recorder()
    trainer = either_trainer(max_rounds=2, local_steps=3, batch_norm=mode, callbacks=[recorder])
    trainer.fit(module, datamodule=FederatedDataModule(clients))
    assert [visit.num_samples for visit in recorder.visits] == [24] * 4
    assert all(torch.isfinite(value).all() for value in state_of(module).values())


def test_loaders_are_built_when_they_are_asked_for():
    built = []

    def build(client):
        built.append(client)
        return DataLoader(TensorDataset(torch.arange(3) + 10 * client), 2)

    loaders = LazyClients(range(10**9), build)
    assert len(LoaderClients(loaders).clients) == 10**9
    assert built == []
    assert served(loaders, Visit(10**8, 0, 0)) == [(0, [10**9, 10**9 + 1]), (0, [10**9 + 2])]
    assert set(built) == {10**8}


# --- Batches ----------------------------------------------------------------------------------------------------------


def test_loaders_are_chained_in_the_order_of_the_visits():
    loaders = {"a": DataLoader(DATASET, 4), "b": [torch.tensor([70, 71])]}
    a = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert served(loaders, Visit("b", 0, 1), Visit("a", 0, 2, epochs=2), Visit("b", 0, 3, epochs=2)) == [
        (0, [70, 71]), *((1, batch) for batch in a + a), (2, [70, 71]), (2, [70, 71])
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 3, 4, 8])
def test_steps_go_on_into_further_passes(steps):
    expected = [(0, batch) for batch in 3 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    assert served({"a": DataLoader(DATASET, 4)}, Visit("a", 0, 0, steps=steps)) == expected[:steps]


def test_steps_need_no_length():
    batches = served({"a": DataLoader(Stream(), 2)}, Visit("a", 0, 0, steps=4), num_batches=4)
    assert batches == [(0, [0, 1]), (0, [2, 3]), (0, [4]), (0, [0, 1])]


def test_a_loader_shuffles_from_the_generators_of_the_visit():
    def shuffled(seed):
        torch.manual_seed(seed)
        return [batch[0].tolist() for batch in DataLoader(DATASET, 4, shuffle=True)]

    loaders = {"a": DataLoader(DATASET, 4, shuffle=True)}
    for seed in (1, 2):
        expected = [(0, batch) for batch in shuffled(seed)]
        torch.manual_seed(seed)
        assert served(loaders, Visit("a", 0, 0)) == expected


def test_a_loader_with_a_generator_of_its_own_shuffles_by_the_visit():
    """Earlier passes, which a resumed fit skips, do not matter; every epoch has another order."""
    loaders = {"a": DataLoader(DATASET, 4, shuffle=True, generator=torch.Generator())}
    first, second = (served(loaders, Visit("a", 0, seed, epochs=2)) for seed in (1, 2))
    assert first[:3] != first[3:]
    assert first != second
    assert served(loaders, Visit("a", 0, 1, epochs=2)) == first
    plain = LoaderClients(loaders, is_plain=True)
    planned = PlannedVisit(Visit("a", 0, 1), 10, 3, 3)
    passes = [torch.cat([item.batch[0] for item in plain.stream([planned])]).tolist() for _ in range(2)]
    assert passes[0] != passes[1]


def test_a_loader_that_gives_less_than_it_promised_is_padded():
    loaders = {"short": Promising(4, 3), "next": Promising(1, 1)}
    assert served(loaders, Visit("short", 0, 0), Visit("next", 0, 0)) == [
        (0, [0]), (0, [1]), (0, [2]), (0, None), (1, [0])
    ]  # fmt: skip


def test_of_a_loader_that_gives_more_than_it_promised_the_rest_is_left():
    assert served({"long": Promising(2, 5)}, Visit("long", 0, 0, epochs=1)) == [(0, [0]), (0, [1])]


def test_an_error_ends_its_visit_and_no_other():
    first, second, error, after = served(
        {"bad": Breaking(4, 2), "good": Promising(1, 1)}, Visit("bad", 0, 0), Visit("good", 0, 0)
    )
    assert [first, second, after] == [(0, [0]), (0, [1]), (1, [0])]
    assert error[0] == 0
    assert isinstance(error[1], OSError)
    assert error[1].__traceback__ is None  # its frames would keep the loader's workers alive


def test_a_loader_without_a_batch_is_an_error():
    ((position, error),) = served({"empty": Promising(2, 0)}, Visit("empty", 0, 0, steps=5))
    assert position == 0
    assert isinstance(error, ValueError)
    assert str(error) == "the client's loader returned no batch"


def test_a_loader_without_a_data_set_is_counted_once():
    class Batches:
        passes = 0

        def __len__(self):
            return 2

        def __iter__(self):
            self.passes += 1
            return iter([torch.zeros(3), torch.zeros(2)])

    batches = Batches()
    population = LoaderClients({"ann": batches})
    assert [population.num_samples("ann") for _ in range(3)] == [5, 5, 5]
    assert batches.passes == 1


def several(mode):
    """Labelled and unlabelled examples: 10 in batches of 5, and 12 in batches of 2."""
    labelled = DataLoader(DATASET, 5)
    unlabelled = DataLoader(TensorDataset(torch.arange(100, 112)), 2)
    loaders = {"labelled": labelled, "unlabelled": unlabelled}
    return loaders if mode == "mapping" else CombinedLoader(loaders, mode)


@pytest.mark.parametrize(
    ("mode", "num_samples", "num_batches"),
    [("mapping", 12, 6), ("max_size_cycle", 12, 6), ("max_size", 12, 6), ("min_size", 10, 2)],
)
def test_several_loaders_for_one_client(mode, num_samples, num_batches):
    """Batches equal Lightning's `CombinedLoader` in a visit with two epochs; counts equal a single loader."""
    population = FederatedDataModule({"a": several(mode), "b": DataLoader(DATASET, 2)}).population()
    assert population.num_samples("a") == num_samples
    assert population.batches_per_epoch("a") == num_batches
    assert population.gives_all("a") == (mode != "min_size")
    visit = PlannedVisit(Visit("a", 0, 0, epochs=2), num_samples, 2 * num_batches)
    batches = [item.batch for item in population.stream([visit])]
    combined = CombinedLoader(several("mapping"), "max_size_cycle" if mode == "mapping" else mode)
    expected = [batch for batch, _, _ in combined] * 2
    assert len(batches) == len(expected) == 2 * num_batches
    for batch, other in zip(batches, expected, strict=True):
        torch.testing.assert_close(batch, other, rtol=0, atol=0)


def test_loaders_one_after_another_are_refused_as_in_a_plain_fit(plain_trainer):
    module, loaders = models.Module(models.mlp()), several("sequential")
    for federation, data in (([], LoaderDataModule(loaders)), ([Federation()], FederatedDataModule({"a": loaders}))):
        with pytest.raises(ValueError, match=r"FitLoop` does not support the `CombinedLoader\(mode=\"sequential\"\)`"):
            plain_trainer(max_epochs=1, callbacks=federation).fit(module, datamodule=data)


def test_a_sampler_of_whole_batches_may_drop_some_and_shuffle_by_the_pass():
    passes = []

    class Shuffled(RandomSampler):
        def set_epoch(self, epoch):
            passes.append(epoch)

    draws = BatchSampler(Shuffled(DATASET), 4, drop_last=True)
    population = LoaderClients({"a": DataLoader(DATASET, batch_size=None, sampler=draws)})
    assert (population.batches_per_epoch("a"), population.gives_all("a")) == (2, False)
    list(population.stream([PlannedVisit(Visit("a", 1, 0, epochs=2), 10, 4, epoch_batches=2)]))
    assert passes == [2, 3]


def test_validation_data_without_a_length_are_no_clients():
    assert not LoaderDataModule(DataLoader(DATASET, 2), DataLoader(Stream(), 2)).has_clients("validation")


def test_a_sequence_of_loaders_gives_a_list_of_batches():
    population = LoaderClients({"a": [DataLoader(DATASET, 5), DataLoader(DATASET, 2)]})
    visit = PlannedVisit(Visit("a", 0, 0), 10, 5)
    first = next(population.stream([visit])).batch
    assert [part[0].tolist() for part in first] == [[0, 1, 2, 3, 4], [0, 1]]


def test_an_isolated_pass_over_several_loaders_leaves_their_generators_alone():
    def shuffled(seed):
        return DataLoader(DATASET, 2, shuffle=True, generator=torch.Generator().manual_seed(seed))

    loaders = [shuffled(1), shuffled(2)]
    population = LoaderClients({"a": loaders})
    states = [loader.generator.get_state() for loader in loaders]
    passes = [
        [item.batch for item in population.stream([PlannedVisit(Visit("a", 0, 7), 10, 5)], isolated=True)]
        for _ in range(2)
    ]
    torch.testing.assert_close(*passes, rtol=0, atol=0)
    assert all(torch.equal(loader.generator.get_state(), state) for loader, state in zip(loaders, states, strict=True))


@pytest.mark.parametrize("kind", [dict, list])
def test_several_data_sets_for_one_client_are_refused(kind):
    data = {"one": DATASET, "other": DATASET}
    data = data if kind is dict else list(data.values())
    message = rf"but got data sets in a {kind.__name__}: put each .*`torch\.utils\.data\.StackDataset`"
    with pytest.raises(TypeError, match=message):
        FederatedDataModule({"a": data, "b": data})
    with pytest.raises(TypeError, match=message):
        LoaderClients(LazyClients(["a"], lambda client: data)).num_samples("a")


X, Y = torch.rand(8, 3), torch.arange(8)
ARRAYS = {
    "inputs and labels": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "a list": lambda: [X, Y],
    "inputs": lambda: X,
    "an array": lambda: X.numpy(),
    "equal tensors": lambda: (X, X),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_in_the_place_of_data_sets_are_refused_with_the_form_to_use(kind):
    data = ARRAYS[kind]()
    with pytest.raises(TypeError, match=r"data set or a loader, but got .*TensorDataset\(x, y\)"):
        FederatedDataModule({"a": data})
    with pytest.raises(TypeError, match=r"TensorDataset\(x, y\)"):
        LoaderClients(LazyClients(["a"], lambda client: data)).num_samples("a")
    with pytest.raises(TypeError, match=r"TensorDataset\(x, y\)"):
        FederatedDataModule({"a": DATASET}, val={"a": data}).val_clients()["a"]


def test_a_list_of_batches_is_a_loader():
    assert LoaderClients({"a": [torch.rand(4, 3), torch.rand(2, 3)]}).num_samples("a") == 6


TIME_FIRST = {  # 7 time steps, 4 sequences
    "sequences and labels": (torch.rand(7, 4, 2), torch.zeros(4)),
    "a mapping": {"tokens": torch.rand(7, 4), "length": torch.zeros(4)},
    "nested": [torch.rand(7, 4, 2), {"state": (torch.rand(4, 5),)}],
}


@pytest.mark.parametrize("kind", TIME_FIRST)
def test_batches_with_the_time_first_are_refused_where_they_are_counted(kind):
    batch = TIME_FIRST[kind]
    with pytest.raises(ValueError, match=r"first dimension of all tensors, .* but got lengths \[4, 7\]: put the batch"):
        LoaderClients({"a": [batch]}).num_samples("a")
    counted = DataLoader(DATASET, 4, collate_fn=lambda samples: batch)
    assert LoaderClients({"a": counted}).num_samples("a") == len(DATASET)


def test_a_table_as_a_client_is_refused():
    """Iterating the table would give single samples."""

    class Table(list):
        column_names = ("x",)

    with pytest.raises(TypeError, match=r"but got the table Table: put the table in a `DataLoader`"):
        FederatedDataModule({"a": Table([{"x": 1}])})


@pytest.mark.parametrize(("mode", "num_samples"), [("mapping", 14), ("min_size", 10)])
def test_a_stream_without_a_length_among_several_loaders(mode, num_samples):
    """The endless loader is the longest and ends a pass, except in `min_size`."""
    loaders = {"labelled": DataLoader(DATASET, 5), "unlabelled": DataLoader(Endless(torch.arange(3)), 2)}
    population = LoaderClients({"a": loaders if mode == "mapping" else CombinedLoader(loaders, mode)})
    population.local_steps = 7
    assert population.num_samples("a") == num_samples
    assert population.batches_per_epoch("a") == (2 if mode == "min_size" else None)
    visit = PlannedVisit(Visit("a", 0, 0, steps=7), num_samples, 7)
    batches = [item.batch for item in population.stream([visit])]
    if mode == "mapping":
        assert [batch["labelled"][0][0].item() for batch in batches] == [0, 5, 0, 5, 0, 5, 0]
        assert [batch["unlabelled"][0].tolist() for batch in batches[:3]] == [[0, 1], [2, 0], [1, 2]]
    assert len(batches) == 7


def test_nested_loaders_are_several_loaders():
    loaders = {"labelled": [DataLoader(DATASET, 5)], "unlabelled": {"all": DataLoader(DATASET, 2)}}
    population = LoaderClients({"a": loaders})
    assert (population.num_samples("a"), population.batches_per_epoch("a")) == (10, 5)
    batches = [item.batch for item in population.stream([PlannedVisit(Visit("a", 0, 0), 10, 5)])]
    expected = [batch for batch, _, _ in CombinedLoader(loaders, "max_size_cycle")]
    torch.testing.assert_close(batches, expected, rtol=0, atol=0)


class Consistent(models.Module):
    def __init__(self):
        super().__init__(models.mlp(), models.momentum)

    def training_step(self, batch, batch_idx):
        (others,) = batch["unlabelled"]
        return super().training_step(batch["labelled"], batch_idx) + self.net(others).square().mean()


class Joined(Sampler):
    """Batches in random order; a single left-over example joins the previous batch."""

    def __init__(self, dataset, size):
        self.dataset, self.size = dataset, size

    def __len__(self):
        return -(-len(self.dataset) // self.size) - (len(self.dataset) % self.size == 1)

    def __iter__(self):
        order = list(RandomSampler(self.dataset))
        batches = [order[start : start + self.size] for start in range(0, len(order), self.size)]
        if len(batches[-1]) == 1:
            batches[-2:] = [batches[-2] + batches[-1]]
        yield from batches


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize("mode", ["mapping", "min_size"])
def test_several_loaders_are_split(mode, either_trainer):
    """Splits each data set separately; a client trains as with loaders over its parts."""
    (inputs, labels), (others, _) = models.vectors({"a": 37, "b": 58}).values()
    data = {"labelled": TensorDataset(inputs, labels), "unlabelled": TensorDataset(others)}
    sizes = {"labelled": 9, "unlabelled": 4}  # one client has 9 + 10 examples, all have 6 * 4 + 5

    def combined(loaders):
        return loaders if mode == "mapping" else CombinedLoader(loaders, mode)

    train = combined({name: DataLoader(data[name], sizes[name], shuffle=True) for name in data})
    recorder = Recorder()
    trainer = either_trainer(max_rounds=2, partition=IID(2), seed=3, callbacks=[recorder])
    trainer.fit(module := Consistent(), datamodule=LoaderDataModule(train))

    parts = {name: IID(2).split(data[name], 3) for name in data}
    own = {
        client: {name: [data[name][index] for index in parts[name][client].tolist()] for name in data}
        for client in (0, 1)
    }
    clients = {
        client: combined({
            name: DataLoader(part, batch_sampler=Joined(part, sizes[name])) for name, part in mine.items()
        })
        for client, mine in own.items()
    }  # fmt: skip
    either_trainer(max_rounds=2, seed=3).fit(expected := Consistent(), datamodule=FederatedDataModule(clients))
    assert_same(state_of(module), state_of(expected))
    leading = "unlabelled" if mode == "mapping" else "labelled"
    assert [visit.num_samples for visit in recorder.round(0)] == [len(own[client][leading]) for client in (0, 1)]
    assert {len(visit.batches) for visit in recorder.round(0)} == ({7} if mode == "mapping" else {2})


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
def test_a_combined_loader_is_split_without_a_datamodule(federated_trainer):
    loaders = {"labelled": DataLoader(DATASET, 5), "unlabelled": DataLoader(DATASET, 2)}
    trainer = federated_trainer(max_rounds=1, partition=IID(2))
    with pytest.raises(OptionError, match="put the loaders into a `CombinedLoader` for `partition` to split"):
        trainer.fit(Consistent(), loaders)
    (inputs, labels), _ = models.vectors({"a": 20, "b": 4}).values()
    loader = CombinedLoader({
        "labelled": DataLoader(TensorDataset(inputs, labels), 5), "unlabelled": DataLoader(TensorDataset(inputs), 5)
    })  # fmt: skip
    trainer.fit(Consistent(), loader)
    assert trainer.callback_metrics["fed/clients"] == 2


def test_loaders_that_are_not_split_into_the_same_clients():
    loaders = [DataLoader(DATASET, 5), DataLoader(TensorDataset(torch.arange(3)), 2)]
    with pytest.raises(ValueError, match="data sets of all loaders into the same clients, but got 10 and 3 clients"):
        split_training_data(loaders, ByGroup(lambda sample: int(sample[0])), 0)
