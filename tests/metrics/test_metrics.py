"""Properties of every metric: two processes, reset, forward, copies, Lightning."""

import copy
import pickle
import warnings

import lightning as L
import pytest
import torch
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection

from lightning_fed.metrics import AggregateMeanMargin, MaximumMeanDiscrepancy, MeanEntropy
from tests.metrics.cases import CASES, filled, vectors, work
from tests.warm_process import PROCESSES


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    start_processes(work, (folder,), nprocs=2, start_method=PROCESSES.get_start_method())
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def same(result, expected):
    """Equal up to another order of sums."""
    assert result.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name, results):
    make, *parts = CASES[name]
    expected = filled(make(), *parts).compute()
    assert expected.isfinite()
    assert any(
        not part or abs(expected - filled(make(), part).compute()) > 1e-5 or filled(make(), part).compute().isnan()
        for part in parts
    )
    for rank, result in enumerate(results):
        same(result[name]["together"], expected)
        same(result[name]["again"], expected)
        alone = filled(make(), parts[rank])  # `compute` restores the states of the process
        for state, value in result[name]["states"].items():
            torch.testing.assert_close(value, getattr(alone, state))


@pytest.mark.parametrize("name", CASES)
def test_order_and_batches_do_not_matter(name):
    make, *parts = CASES[name]
    expected = filled(make(), *parts).compute()
    same(filled(make(), *[part[::-1] for part in parts[::-1]]).compute(), expected)
    batches = [batch for part in parts for batch in part]
    if "half" not in name:
        pooled = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
        same(filled(make(), [pooled]).compute(), expected)


@pytest.mark.parametrize("name", CASES)
def test_forward_is_the_batch_and_adds_it(name):
    make, *parts = CASES[name]
    metric = make()
    for part in parts:
        for batch in part:
            if batch[0].shape[0] > 1:
                same(metric(*batch), filled(make(), [batch]).compute())
            else:
                metric.update(*batch)
    same(metric.compute(), filled(make(), *parts).compute())


@pytest.mark.parametrize("name", CASES)
def test_reset_forgets(name):
    make, *parts = CASES[name]
    batches = [batch for part in parts for batch in part]
    metric = filled(make(), batches)
    metric.compute()
    metric.reset()
    same(filled(metric, batches[:1]).compute(), filled(make(), batches[:1]).compute())


@pytest.mark.parametrize("name", CASES)
def test_copies_go_on_alone(name):
    make, *parts = CASES[name]
    first, *rest = [batch for part in parts for batch in part]
    metric = filled(make(), [first])
    before = metric.compute()
    for duplicate in (copy.deepcopy(metric), metric.clone(), pickle.loads(pickle.dumps(metric))):
        same(filled(duplicate, rest).compute(), filled(make(), [first, *rest]).compute())
        same(metric.compute(), before)


@pytest.mark.parametrize("name", CASES)
def test_casting_the_model_leaves_the_sums(name):
    """As with ``precision="16-true"``."""
    make, *parts = CASES[name]
    metric = make()
    torch.nn.ModuleDict({"metric": metric}).half()
    filled(metric, *parts)
    torch.nn.ModuleDict({"metric": metric}).bfloat16()
    same(metric.compute(), filled(make(), *parts).compute())


@pytest.mark.parametrize("name", CASES)
def test_updating_keeps_no_graph(name):
    make, *parts = CASES[name]
    metric = make()
    for part in parts:
        for batch in part:
            metric.update(*(value.clone().requires_grad_() if value.is_floating_point() else value for value in batch))
    assert not metric.compute().requires_grad
    for state in metric.metric_state:
        value = getattr(metric, state)
        assert not any(tensor.requires_grad for tensor in (value if isinstance(value, list) else [value]))


@pytest.mark.parametrize("name", CASES)
def test_nothing_gives_nan(name):
    make, *_ = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns about `compute` before `update`
        assert make().compute().isnan()


class Logged(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(3, 5), torch.nn.Linear(5, 4)
        self.margin = AggregateMeanMargin(num_classes=4, num_features=5)
        self.entropies = torch.nn.ModuleDict({"softmax": MeanEntropy(), "feature": MeanEntropy("feature")})
        self.discrepancy = MaximumMeanDiscrepancy()

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        features = self.encoder(inputs)
        self.margin.update(features, labels)
        self.entropies["softmax"].update(self.head(features))
        self.entropies["feature"].update(features)
        self.discrepancy.update(features, 2 * features)
        self.log_dict({"margin": self.margin, "discrepancy": self.discrepancy, **self.entropies})


def test_lightning_logs_the_value_of_all_batches(plain_trainer):
    module = Logged()
    (data,) = vectors([21])
    trainer = plain_trainer()
    for _ in range(2):  # reset in between
        trainer.validate(module, DataLoader(TensorDataset(*data), 5), verbose=False)
        with torch.no_grad():
            features = module.encoder(data[0])
            expected = {
                "margin": filled(AggregateMeanMargin(4, 5), [(features, data[1])]),
                "softmax": filled(MeanEntropy(), [(module.head(features),)]),
                "feature": filled(MeanEntropy("feature"), [(features,)]),
                "discrepancy": filled(MaximumMeanDiscrepancy(), [(features, 2 * features)]),
            }
        assert trainer.callback_metrics.keys() == expected.keys()
        for name, metric in expected.items():
            same(trainer.callback_metrics[name], metric.compute())


def test_in_a_collection():
    """Compute groups must not merge metrics with equal states."""
    collection = MetricCollection(
        {"pairs": AggregateMeanMargin(4, 3), "nearest": AggregateMeanMargin(4, 3, kind="nearest")}
    )
    batches = vectors([5, 8])
    for batch in batches:
        collection.update(*batch)
    for name, value in collection.compute().items():
        same(value, filled(AggregateMeanMargin(4, 3, kind=name), batches).compute())
