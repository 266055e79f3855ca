"""BatchNorm statistics from clients, measured with the new model; some reports are false."""

import itertools

import numpy as np
import pytest
import torch

from lightning_fed import LocalStatistics
from lightning_fed.algorithms import FedAdam, Krum, Median, TrimmedMean
from lightning_fed.attacks import ALIE
from lightning_fed.batch_norm import measurement
from lightning_fed.batch_norm.pooling import pool_statistics
from tests import models
from tests.breadth import quick
from tests.references_robust import trimmed_mean_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 9, "bob": 14, "cid": 8, "dee": 11, "eve": 10}
LIAR = "dee"


def report(data):
    """Reported statistics for layer inputs of shape (positions, channels)."""
    return {
        "batch_norm:0:mean": torch.tensor(data.mean(0)).float(),
        "batch_norm:0:var": torch.tensor(data.var(0)).float(),
        "batch_norm:0:count": torch.tensor(float(len(data)), dtype=torch.float64),
    }


def lie(kind, number):
    """False statistics, valid for the checks on a single message."""
    value = {"huge": 1e17, "far": 50.0 * (-1) ** number, "small": 0.0}[kind]
    return {
        "batch_norm:0:mean": torch.full((3,), value),
        "batch_norm:0:var": torch.full((3,), abs(value)),
        "batch_norm:0:count": torch.tensor(1e12, dtype=torch.float64),
    }


def pooled_reference(reports, layer, num_malicious):
    means, variances, counts = (
        np.stack([one[f"batch_norm:{layer}:{name}"].double().numpy() for one in reports])
        for name in ("mean", "var", "count")
    )
    mean = trimmed_mean_reference(means, num_malicious)
    total = len(counts) * sorted(counts)[(len(counts) - 1) // 2]
    return mean, trimmed_mean_reference(variances + (means - mean) ** 2, num_malicious) * total / (total - 1)


@pytest.mark.parametrize("num_malicious", [1, 2, 3])
@pytest.mark.parametrize("kind", ["huge", "far", "small"])
def test_what_liars_report_stays_inside_the_honest_clients_range(kind, num_malicious):
    generator = np.random.default_rng(num_malicious)
    data = [generator.normal(client / 3, 1 + client / 5, (20 + client, 3)) for client in range(num_malicious + 1)]
    honest = [report(values) for values in data]
    reports = [lie(kind, number) for number in range(num_malicious)] + honest
    mean, variance = pool_statistics(reports, "0", num_malicious)
    for value, expected in zip((mean, variance), pooled_reference(reports, "0", num_malicious), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12)
    means = np.stack([one["batch_norm:0:mean"].numpy() for one in honest])
    assert (means.min(0) <= mean.numpy()).all()
    assert (mean.numpy() <= means.max(0)).all()
    spread = np.stack([one["batch_norm:0:var"].numpy() for one in honest]) + (means - mean.numpy()) ** 2
    correction = 1 + 1 / 20
    assert (spread.min(0) <= variance.numpy()).all()
    assert (variance.numpy() <= correction * spread.max(0)).all()
    backwards = pool_statistics(reports[::-1], "0", num_malicious)
    np.testing.assert_allclose(torch.stack(backwards), torch.stack([mean, variance]), rtol=1e-12)


def test_without_liars_in_equal_parts_it_is_the_statistics_of_all_data():
    """Values are symmetric about the median, so trimming does not change the mean."""
    generator = np.random.default_rng(0)
    base = generator.normal(size=(40, 3))
    base -= base.mean(0)
    data = [base + shift for shift in (-1.0, -1.0, 1.0, 1.0)]
    everything = np.concatenate(data)
    mean, variance = pool_statistics([report(values) for values in data], "0", 1)
    np.testing.assert_allclose(mean, everything.mean(0), atol=1e-6)
    np.testing.assert_allclose(variance, everything.var(0, ddof=1), rtol=1e-6)


RULES = {
    "median": lambda: Median(1),
    "krum": lambda: Krum(1),
    "after an optimizer of the server": lambda: FedAdam(aggregator=TrimmedMean(1)),
    "as many as it stands": TrimmedMean,
}


@pytest.mark.parametrize(
    ("name", "mode"),
    quick(
        itertools.product([*RULES, "fedavg"], ["recalibrate", "local"]),
        [(name, ("recalibrate", "local")[place % 2]) for place, name in enumerate([*RULES, "fedavg"])],
    ),
)
def test_one_liar_in_a_fit(name, mode, federated_trainer, monkeypatch):
    measured = {}
    measure = measurement.client_statistics

    def lying(trainer, module, population, visit, *arguments):
        extras = measure(trainer, module, population, visit, *arguments)
        if visit.client == LIAR:
            for key, value in extras.items():
                value.fill_(1e12 if key.endswith("count") else 1e6)
        measured[visit.client] = {key: value.clone() for key, value in extras.items()}
        return extras

    monkeypatch.setattr(measurement, "client_statistics", lying)
    treatment = mode if mode == "recalibrate" else LocalStatistics("pooled")
    steps = [ALIE([LIAR])] if name == "as many as it stands" else []
    trainer = federated_trainer(
        max_rounds=2, method=RULES.get(name, lambda: name)(), batch_norm=treatment, seed=1, steps=steps
    )
    module = models.Module(models.norm_mlp(), models.momentum)
    trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
    layers = {key.split(":")[1] for key in measured[LIAR]}
    assert layers
    for layer in layers:
        running = module.get_submodule(layer)
        if name == "fedavg":
            assert running.running_mean.min() > 1e5
            continue
        num_malicious = 2 if name == "as many as it stands" else 1
        expected = pooled_reference(list(measured.values()), layer, num_malicious)
        np.testing.assert_allclose(running.running_mean, expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(running.running_var, expected[1], rtol=1e-5, atol=1e-6)
        assert running.running_mean.abs().max() < 100
