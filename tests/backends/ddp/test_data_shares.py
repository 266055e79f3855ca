"""Processes divide each batch, like torch's distributed sampler."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler

from lightning_fed import FederatedDataModule
from lightning_fed.backends.ddp.data_shares import deal, share_population
from lightning_fed.data.population import PlannedVisit
from lightning_fed.errors import OptionError
from lightning_fed.server.schedule import Visit


def batches(population, count=100, seed=5):
    visit = Visit("a", 0, seed)
    per_epoch = population.batches_per_epoch("a")
    planned = PlannedVisit(visit, population.num_samples("a"), per_epoch, epoch_batches=per_epoch)
    return [item.batch[0].tolist() for item in population.stream([planned])]


def population(data, **options):
    return FederatedDataModule({"a": data}, **options).population()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [24, 25, 26, 29])
def test_processes_share_the_batches_of_one_process(size, count):
    """Shuffled: n processes together train on the batches of one process with an n times larger size."""
    data = TensorDataset(torch.arange(count))
    whole = batches(population(data, batch_size=4 * size))
    shares = []
    for rank in range(size):
        share = share_population(population(data, batch_size=4), rank, size, seed=0)
        assert share_population(share, rank, size, seed=0) is share
        assert share.num_samples("a") == count
        shares.append(batches(share))
    assert len({tuple(map(len, share)) for share in shares}) == 1
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert {item for part in parts for item in part} == set(batch)
        assert min(map(len, parts)) >= 2  # BatchNorm
        if len(batch) == 4 * size:
            assert sorted(item for part in parts for item in part) == sorted(batch)


@pytest.mark.parametrize("count", [1, 5, 12])
def test_deal_is_torchs_distributed_sampler(count):
    for rank in range(4):
        sampler = DistributedSampler(range(count), 4, rank, shuffle=False)
        assert deal(np.arange(count), rank, 4).tolist() == list(sampler)


@pytest.mark.parametrize("shuffle", [True, False])
def test_loaders_of_clients_are_divided(shuffle):
    """A visit's seed gives the order; the number of examples excludes repeats."""
    data = TensorDataset(torch.arange(21))

    def drawn(seed):
        shares = [share_population(population(DataLoader(data, 4, shuffle=shuffle)), rank, 2, seed) for rank in (0, 1)]
        assert [share.num_samples("a") for share in shares] == [21, 21]
        return [batches(share) for share in shares]

    first, second = drawn(1)
    assert len(first) == len(second) == 3
    items = [item for batch in (*first, *second) for item in batch]
    assert set(items) == set(range(21))
    assert len(items) == 22
    assert drawn(1) == [first, second]
    assert (drawn(2) == [first, second]) == (not shuffle)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(torch.arange(8)), 2, sampler=WeightedRandomSampler([1.0] * 8, 8)),
        [torch.zeros(2, 1), torch.zeros(2, 1)],
    ],
)
def test_other_loaders_are_refused(loader):
    share = share_population(population(loader), 0, 2, seed=0)
    with pytest.raises(OptionError, match="client 'a' to be a DataLoader over a map-style data set"):
        share.batches_per_epoch("a")


@pytest.mark.parametrize("options", [{"replacement": True}, {"num_samples": 5}])
def test_a_sampler_that_does_not_draw_every_example_once_is_refused(options):
    data = TensorDataset(torch.arange(8))
    share = share_population(population(DataLoader(data, 2, sampler=RandomSampler(data, **options))), 0, 2, seed=0)
    with pytest.raises(OptionError, match="draw every example once, but got replacement"):
        share.batches_per_epoch("a")
