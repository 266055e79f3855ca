"""The study's `CentralDP` subclass simulates larger cohorts, and shows possible overrides."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fed.algorithms import FedAvg
from lightning_fed.privacy import Budget
from lightning_fed.privacy.central import IS_SHORT
from lightning_fed.steps import Chain
from tests import models
from tests.privacy.helpers import KEY, WireRecorder
from tests.privacy.test_central import CLIENTS, SHAPES, aggregated, moved, steps, update_of

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

_SPEC = importlib.util.spec_from_file_location(
    "simulated_privacy", Path(__file__).parents[2] / "benchmarks" / "simulated_privacy.py"
)
simulated_privacy = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(simulated_privacy)


class Simulated(simulated_privacy.SimulatedDP):
    count_noise = 0.2


def chain_of(trained, adaptive, is_silent=False):
    dp = Simulated(1.0, 1e-3, 1.0, cohort=100, population=1000, key=KEY, adaptive=adaptive)
    dp.begin(dp.plan(50, trained, None) if trained < 100 else dp.plan(1000, trained, None), KEY)
    chain = Chain(FedAvg(), [dp])
    if is_silent:
        chain.steps[0].noise = lambda name, shape, std: torch.zeros(tuple(shape), dtype=torch.float64)
    return chain


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_noise_of_a_larger_cohort(adaptive):
    """A tenth of the noise on a mean over 10 equals the noise on a mean over 100; the budget counts 100 clients."""
    extras = {IS_SHORT: torch.tensor(1.0)} if adaptive else {}
    updates = [update_of(step, str(number), extras) for number, step in enumerate(steps(8, scale=0.01))]
    few, many, silent = chain_of(10, adaptive), chain_of(100, adaptive), chain_of(10, adaptive, is_silent=True)
    assert many.steps[0].noise_std == pytest.approx(10 * few.steps[0].noise_std)
    simulated, real, plain = (moved(aggregated(chain, updates)) for chain in (few, many, silent))
    for name in SHAPES:  # 8 updates over 100 hardly move the model, so both results contain equal noise
        expected = plain[name] + real[name] - plain[name] / 10
        np.testing.assert_allclose(simulated[name], expected, atol=1e-6)
    metrics = few.metrics({})
    assert metrics["privacy/simulated_epsilon"] == Budget(1.0, 1e-3, 1000, 100).epsilon(1)
    assert "privacy/epsilon" not in metrics
    if adaptive:  # 8 short steps: (8 / 2 + noise) / 10, with a tenth of the noise for 100
        noise = many.steps[0].noise("", torch.Size([1]), 0.2)
        assert metrics["privacy/clipped_share"] == pytest.approx(0.5 - 4 / 10 - float(noise))


def test_a_fit_with_the_noise_of_a_larger_cohort(federated_trainer):
    def fit(cohort):
        dp = Simulated(0.5, 1e-3, 1.0, cohort=cohort, population=5000, key=KEY)
        recorder = WireRecorder()
        trainer = federated_trainer(max_rounds=4, clients_per_round=3, seed=1, steps=[dp], callbacks=[recorder])
        trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(CLIENTS)))
        return recorder, trainer.callback_metrics

    recorder, metrics = fit(100)
    assert float(metrics["privacy/simulated_epsilon"]) == pytest.approx(Budget(1.0, 1e-3, 5000, 100).epsilon(4))
    assert "privacy/epsilon" not in metrics
    assert float(metrics["privacy/noise_std"]) == pytest.approx(0.5 * 3 / 100)
    assert 1 <= len(recorder.visits) / 4 <= 6  # samples 3 clients on average, not 100 of 5000
    assert math.isfinite(float(metrics["privacy/delta"]))
    with pytest.raises(ValueError, match="to simulate at least 3 of 12 clients, which train, but got 1 of 5000"):
        fit(1)
