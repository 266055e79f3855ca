"""Partitioners of `flwr-datasets` split any data set like Flower's tables."""

import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lightning_fed.data import FlowerPartition
from lightning_fed.errors import OptionError
from tests import models
from tests.recorders import Recorder

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning"),  # datasets 4.8 with pyarrow 25
]

LABELS = np.random.default_rng(0).integers(0, 4, 120)
WRITERS = [f"writer {number}" for number in np.random.default_rng(1).integers(0, 5, 120)]


class Refusing:
    def is_dataset_assigned(self):
        return True

    def load_partition(self, number):
        raise AssertionError("not reached")


def test_what_is_no_partitioner():
    with pytest.raises(TypeError, match=r"an object from `flwr_datasets.partitioner`, .* but got 'IidPartitioner'"):
        FlowerPartition("IidPartitioner")


def test_a_partitioner_with_a_data_set():
    with pytest.raises(OptionError, match=r"partitioner without a data set, .* Refusing already has one"):
        FlowerPartition(Refusing()).split([1, 2], 0)


def test_without_the_package(monkeypatch):
    class Fresh(Refusing):
        def is_dataset_assigned(self):
            return False

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="`datasets`: pip install flwr-datasets"):
        FlowerPartition(Fresh()).split([1, 2], 0)


@pytest.fixture(scope="module")
def flower():
    pytest.importorskip("flwr_datasets", reason="`flwr-datasets` is not installed (make test-projects)")
    return pytest.importorskip("flwr_datasets.partitioner")


@pytest.fixture(scope="module")
def table(flower):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict(
        {"row": list(range(120)), "label": LABELS.tolist(), "writer": WRITERS, "value": (LABELS / 7).tolist()}
    )


MAKERS = {  # name of the partitioner: arguments, and required columns
    "IidPartitioner": ({"num_partitions": 7}, []),
    "LinearPartitioner": ({"num_partitions": 4}, []),
    "DirichletPartitioner": (
        {"num_partitions": 4, "partition_by": "label", "alpha": 0.5, "min_partition_size": 3}, ["label"]
    ),
    "PathologicalPartitioner": (
        {"num_partitions": 4, "partition_by": "label", "num_classes_per_partition": 2}, ["label"]
    ),
    "ShardPartitioner": ({"num_partitions": 4, "partition_by": "label", "num_shards_per_partition": 2}, ["label"]),
    "NaturalIdPartitioner": ({"partition_by": "writer"}, ["writer"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", ["table", "tensors", "subset"])
def test_rows_are_those_of_the_partitioner(name, kind, flower, table):
    """Compares with the partitioner applied to the table."""
    arguments, columns = MAKERS[name]
    make = getattr(flower, name)
    own = make(**arguments)
    own.dataset = table
    expected = [sorted(own.load_partition(number)["row"]) for number in range(own.num_partitions)]
    dataset = table
    if kind != "table":
        dataset = TensorDataset(torch.rand(120, 2), torch.from_numpy(LABELS))
        dataset.writer = WRITERS
    if kind == "subset":
        dataset = Subset(dataset, range(120))
    partition = FlowerPartition(make(**arguments), columns)
    for _ in range(2):  # repeatedly
        split = partition.split(dataset, 3)
        assert [indices.tolist() for indices in split.values()] == expected
    names = sorted(set(WRITERS)) if name == "NaturalIdPartitioner" else list(range(len(expected)))
    assert list(split) == names


def test_values_can_be_handed_over(flower, table):
    own = flower.ContinuousPartitioner(3, partition_by="value", strictness=0.5)
    own.dataset = table
    expected = [sorted(own.load_partition(number)["row"]) for number in range(3)]
    partition = FlowerPartition(
        flower.ContinuousPartitioner(3, partition_by="value", strictness=0.5), {"value": table["value"]}
    )
    assert [indices.tolist() for indices in partition.split(list(range(120)), 0).values()] == expected


def test_a_fit(flower, either_trainer):
    clients = models.vectors({"a": 60, "b": 50})
    loader, names = models.pooled(clients, batch_size=8)
    loader.dataset.hospital = names

    class Module(models.Module):
        def train_dataloader(self):
            return loader

    recorder = Recorder()
    partition = FlowerPartition(flower.NaturalIdPartitioner(partition_by="hospital"), ["hospital"])
    either_trainer(max_rounds=1, partition=partition, callbacks=[recorder]).fit(Module(models.mlp()))
    assert {visit.client: visit.num_samples for visit in recorder.visits} == {"a": 60, "b": 50}
    for visit in recorder.visits:
        seen = torch.cat([batch[0] for batch in visit.batches])
        assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, clients[visit.client][0].tolist()))


def test_a_column_that_is_not_there(flower):
    partition = FlowerPartition(flower.NaturalIdPartitioner(partition_by="writer"), ["writer"])
    with pytest.raises(ValueError, match="an attribute or column `writer`"):
        partition.split(TensorDataset(torch.rand(3, 2)), 0)
