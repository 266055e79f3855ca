"""Random draws belong to the schedule: fits neither depend on the global generators nor change them."""

import random
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import (
    ClientParallelStrategy,
    FederatedDataModule,
    FederatedTrainer,
    Federation,
    MemoryStore,
    algorithms,
    callbacks,
    datasets,
    metrics,
)
from lightning_fed import data as data_package
from lightning_fed.algorithms.fedfusion.model_surgery import fuse, unwrap
from lightning_fed.data import IID, Dirichlet, LabelsPerClient, QuantitySkew, Shards
from lightning_fed.datasets import Shapes, Synthetic
from lightning_fed.features.extraction import extract_features
from tests import draws_script, warm_process
from tests.breadth import quick
from tests.conftest import QUIET
from tests.draws_script import JOBS, Net, examples, fit
from tests.recorders import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist"),
]


def states():
    return random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()  # noqa: NPY002


def draw(seed):
    """Moves the global generators to seed-specific states."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


# --- Fits -------------------------------------------------------------------------------------------------------------


# Draws on the server and in clients, per round and per batch; test_draws_in_sources.py reads all sources.
THAT_DRAW = ["fedatt with noise", "bucketing", "secure sum", "fedss by batch", "stragglers"]


@pytest.mark.parametrize("job", quick(JOBS, [*THAT_DRAW, *({"private"} & JOBS.keys())]))
def test_a_fit_does_not_depend_on_what_was_drawn_before_it(job, monkeypatch):
    """Independent of the training loop: fused visits of every method equal Lightning's loop."""
    draw(1)
    first = JOBS[job]({"devices": 1})
    draw(2)
    second = JOBS[job]({"devices": 1})
    L.seed_everything(5, verbose=False)  # the federation has a separate seed

    def in_lightnings_loop(federation, *rest, **options):
        return fit(federation.replace(visits="lightning"), *rest, **options)

    monkeypatch.setattr(draws_script, "fit", in_lightnings_loop)
    third = JOBS[job]({"devices": 1})
    for other in (second, third):
        assert first.keys() == other.keys()
        assert_same(first, other, sorted(first))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_fit_does_not_depend_on_the_number_of_processes(size, tmp_path):
    """Independent of earlier draws in each process and of the strategy's seed, up to rounding of sums."""
    warm_process.run("tests.draws_script", tmp_path, size, *JOBS)
    for job in JOBS:
        one = JOBS[job]({"devices": 1})
        one["drawn"] = torch.zeros(())  # every process validates other batches
        found = [torch.load(tmp_path / f"{job}-{rank}.pt") for rank in range(size)]
        for other in found[1:]:
            assert_same(found[0], other, sorted(found[0]))
        for name, value in one.items():
            distance = (found[0][name].double() - value.double()).norm()
            assert distance <= 1e-5 * value.double().norm(), (job, name)


def test_a_fit_leaves_the_global_generators_as_it_found_them():
    """Otherwise modules created after fits with equal seeds would all be equal."""
    draw(1)
    Net()  # the fit creates a network, with random initialisation
    expected = states()
    draw(1)
    JOBS["noise of the server"]({"devices": 1})
    assert states() == expected


class Broken(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        raise RuntimeError("in the middle of a visit")


def test_a_fit_that_raises_leaves_them_too():
    draw(1)
    module = Net()
    before = states()
    trainer = FederatedTrainer(max_rounds=1, callbacks=[Broken()], **QUIET)
    data = FederatedDataModule({"ann": examples(8, 0)}, DataLoader(examples(8, 9), 4), batch_size=4)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(module, datamodule=data)
    assert states() == before


# --- Objects ----------------------------------------------------------------------------------------------------------

NEEDED = {
    "AdaptiveOptimizer": lambda cls: cls([nn.Parameter(torch.zeros(1))]),
    "AggregateMeanMargin": lambda cls: cls(3, 4),
    "ArrayDataset": lambda cls: cls(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64)),
    "ChannelVisit": lambda cls: cls(*[None] * 8),
    "Dirichlet": lambda cls: cls(3, 0.5),
    "FederatedDataModule": lambda cls: cls({"ann": examples(4, 0)}),
    "FedSS": lambda cls: cls(2),
    "FixBN": lambda cls: cls(2),
    "FlowerPartition": lambda cls: cls(SimpleNamespace(load_partition=None)),
    "FLTrust": lambda cls: cls("server"),
    "HeadThenBody": lambda cls: cls(1),
    "LabelsPerClient": lambda cls: cls(3, 2),
    "Look": lambda cls: cls(IID(3)),
    "SiteMatrix": lambda cls: cls("val_acc"),
    "PermutedPixels": lambda cls: cls(IID(3)),
    "PartialLabels": lambda cls: cls(IID(3), 5, 2),
    "SegmentationScores": lambda cls: cls(3),
    "LoaderDataModule": lambda cls: cls(DataLoader(examples(4, 0), 2)),
    "LazyClients": lambda cls: cls(range(3), lambda client: examples(4, 0)),
    "PersonalModel": lambda cls: cls(0.1),
    "PartitionedData": lambda cls: cls(Synthetic(num_clients=2), IID(2)),
    "ProximalTerm": lambda cls: cls(0.1),
    "SampledSoftmax": lambda cls: cls(2),
    "ServerOptimizer": lambda cls: cls(torch.optim.SGD),
    "ShapesDataset": lambda cls: cls(4),
    **{name: lambda cls: cls(3) for name in ("IID", "QuantitySkew", "Shards")},
    **{name: lambda cls: cls("nowhere") for name in ("CIFAR10", "FEMNIST", "MNIST", "CamVid")},
    **{name: lambda cls: cls("nowhere") for name in ("FashionMNIST", "Omniglot")},
}  # fmt: skip
NO_OBJECTS = {  # messages, tables, functions, abstract classes
    "Aggregator",
    "AsynchronousRule",
    "AveragingAggregator",
    "ClientReport",
    "ClientSummary",
    "RobustAggregator",
    "METHODS",
    "report_clients",
    "report_partition",
    "build_method",
    "method_names",
    "register",
    "MarginReport",
    "Confusion",
    "PartTraffic",
    "Traffic",
    "find_federation",
    "segmentation_grid",
    "Partition",
    "PlannedVisit",
    "Population",
    "VisitBatch",
    "DatasetClients",
    "LoaderClients",
    "synthetic_clients",
}
MADE = {
    name: getattr(package, name)
    for package in (algorithms, callbacks, data_package, datasets, metrics)
    for name in package.__all__
    if name not in NO_OBJECTS
}


@pytest.mark.filterwarnings("ignore:Metric `MaximumMeanDiscrepancy` will save")
@pytest.mark.parametrize("name", MADE)
def test_making_an_object_draws_nothing(name):
    before = states()
    made = NEEDED.get(name, lambda cls: cls())(MADE[name])
    assert made is not None
    assert states() == before


@pytest.mark.parametrize("operator", ["conv", "multi", "single", "none"])
def test_a_model_is_the_same_with_a_fusion_before_it(operator):
    draw(1)
    plain = nn.Linear(4, 3)
    draw(1)
    callbacks.FeatureFusion(operator=operator)
    algorithms.FedFusion(operator)
    Federation("fedmargin")
    FederatedTrainer(max_rounds=1, **QUIET)
    ClientParallelStrategy()
    MemoryStore()
    assert_same(plain.state_dict(), nn.Linear(4, 3).state_dict(), ["bias", "weight"])


PARTITIONS = {
    "iid": lambda data: IID(3).split(data, seed=1),
    "dirichlet": lambda data: Dirichlet(3, 0.5, min_size=1).split(data, seed=1),
    "labels": lambda data: LabelsPerClient(3, 2).split(data, seed=1),
    "quantity": lambda data: QuantitySkew(3, 1.0).split(data, seed=1),
    "shards": lambda data: Shards(3).split(data, seed=1),
}


def features(seed):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.1)
    draw(seed)
    batches = [(torch.linspace(0, 1, 128).view(2, 1, 8, 8), torch.zeros(2, 6, 6))] * 3
    return extract_features(net, batches, max_samples=10, seed=1)


def shapes(seed):
    module = Shapes(num_train=4, num_val=2, num_test=2)
    draw(seed)
    module.setup("fit")
    return module.train_dataset[0]


def synthetic(seed):
    draw(seed)
    module = Synthetic(num_clients=2)
    return [tuple(module.clients[client][0]) for client in range(2)]


RESULTS = {
    "features": features,
    "shapes": shapes,
    "synthetic": synthetic,
    **{
        f"partition {name}": lambda seed, split=split: draw(seed) or split(TensorDataset(*examples(60, 4).tensors))
        for name, split in PARTITIONS.items()
    },
}


def flat(value):
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        return [part for one in value for part in flat(one)]
    return [torch.as_tensor(value).tolist() if not isinstance(value, str) else value]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_neither_depends_on_the_global_generators_nor_moves_them(name):
    first = RESULTS[name](1)
    after = states()
    draw(1)
    assert after == states()
    assert flat(first) == flat(RESULTS[name](2))


def test_unwrapping_draws_nothing():
    module = Net()
    fuse(module, "conv", "net.1")
    before = states()
    unwrap(module)
    assert states() == before
    assert module(torch.zeros(2, 4)).isfinite().all()
