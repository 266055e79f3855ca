"""`visits="fastest"`: a fixed choice by model, cohort and device."""

import logging

import lightning as L
import pytest
from torch import nn

from lightning_fed import Faults, FederatedDataModule, Federation, Vectorized
from lightning_fed.backends.vectorized import plan
from lightning_fed.backends.vectorized.plan import _ON_CPU, _ON_GPU, choose_clients
from lightning_fed.callbacks.federation import _LEAST_AT_ONCE
from tests import models
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
LOGGER = "lightning_fed.backends.vectorized.plan"
CLIENTS = {name: 20 for name in "abcdef"}


@pytest.mark.parametrize(
    ("make", "cohort", "device", "clients"),
    [
        (lambda: nn.Linear(784, 100), 30, "cpu", 30),
        (lambda: nn.Linear(784, 100), 1000, "cpu", 50),
        (lambda: nn.Linear(784, 100), 4, "cpu", 1),
        (lambda: nn.Linear(784, 1000), 1000, "cpu", 1),
        (lambda: nn.Conv2d(3, 16, 3), 1000, "cpu", 25),
        (lambda: nn.Conv2d(3, 16, 3), 9, "cpu", 1),
        (lambda: nn.ConvTranspose2d(100, 120, 3), 1000, "cpu", 1),
        (lambda: nn.ConvTranspose2d(100, 120, 3), 1000, "cuda", 64),
        (lambda: nn.Linear(2000, 1000), 1000, "cuda", 1),
    ],
)
def test_the_choice_depends_on_model_cohort_and_device(make, cohort, device, clients):
    assert choose_clients(make(), cohort, device)[0] == clients
    assert (choose_clients(make(), cohort, device)[1] > 1) == (clients > 1)


def make_mlp():
    return models.Module(models.mlp())


def fit(make_trainer, module, visits, **options):
    trainer = make_trainer(visits=visits, **{"max_rounds": 2, **options})
    trainer.fit(module, FederatedDataModule(models.as_datasets(models.vectors(CLIENTS)), batch_size=10))
    return trainer.global_step, state_of(module)


def test_small_dense_models_train_at_once_also_after_a_resume(federated_trainer, caplog, tmp_path):
    caplog.set_level(logging.INFO, LOGGER)
    steps, state = fit(federated_trainer, make_mlp(), "fastest")
    assert steps == 2 * 2  # groups' steps
    assert "`visits='fastest'`: Vectorized(6), about 1.8 times as fast" in caplog.text
    assert_same(state, fit(federated_trainer, make_mlp(), Vectorized(6))[1])
    alone = fit(federated_trainer, make_mlp(), "auto")[1]
    for name, value in alone.items():
        assert (value - state[name]).norm() <= 2e-6 * value.norm()
    trainer, module = federated_trainer(visits="fastest", max_rounds=1), make_mlp()
    trainer.fit(module, FederatedDataModule(models.as_datasets(models.vectors(CLIENTS)), batch_size=10))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer, module = federated_trainer(visits="fastest", max_rounds=2), make_mlp()
    data = FederatedDataModule(models.as_datasets(models.vectors(CLIENTS)), batch_size=10)
    trainer.fit(module, data, ckpt_path=tmp_path / "last.ckpt")
    assert_same(state, state_of(module))


def test_a_resumed_fit_repeats_the_choice_on_another_device(federated_trainer, caplog, tmp_path, monkeypatch):
    data = FederatedDataModule(models.as_datasets(models.vectors(CLIENTS)), batch_size=10)
    whole = fit(federated_trainer, make_mlp(), Vectorized(6))[1]
    trainer = federated_trainer(visits="fastest", max_rounds=1)
    trainer.fit(make_mlp(), data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    monkeypatch.setattr(plan, "choose_clients", lambda module, cohort, device: (3, 5.0))  # other rows in the table
    caplog.set_level(logging.INFO, "lightning_fed")
    trainer, module = federated_trainer(visits="fastest", max_rounds=2), make_mlp()
    trainer.fit(module, data, ckpt_path=tmp_path / "last.ckpt")
    assert "`visits='fastest'`: Vectorized(6), about 1.8 times as fast" in caplog.text
    assert "6 of 6 clients per round, up to 6 at once." in caplog.text
    assert_same(whole, state_of(module))


HINT = "`visits='fastest'` would use Vectorized(6), about 1.8 times as fast"


class ReadsGradients(L.Callback):
    def on_after_backward(self, trainer, pl_module):
        pass


@pytest.mark.parametrize(
    ("options", "hints"),
    [
        ({}, 1),
        ({"visits": "fused"}, 0),
        ({"visits": "lightning"}, 0),
        ({"clients_per_round": 4}, 0),
        ({"optimizer_state": "keep"}, 0),
        ({"callbacks": [ReadsGradients()]}, 0),
        ({"faults": Faults(visit_timeout=600)}, 0),
    ],
)
def test_the_default_names_the_faster_mode_once_if_possible(options, hints, federated_trainer, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    fit(federated_trainer, make_mlp(), options.pop("visits", "auto"), **options)
    assert caplog.text.count(HINT) == hints
    assert caplog.text.count("fastest") == hints


def test_other_models_train_one_after_another(federated_trainer, caplog):
    caplog.set_level(logging.INFO, LOGGER)

    def make():
        module = make_mlp()
        module.unused = nn.Conv1d(400, 300, 1)
        return module

    steps, state = fit(federated_trainer, make(), "fastest")
    assert steps == 2 * 2 * len(CLIENTS)
    assert "`visits='fastest'`: one client after another" in caplog.text
    assert_same(state, fit(federated_trainer, make(), "auto")[1])


def test_a_site_trains_its_only_client_as_by_default():
    """The server sends this option to other machines with one client each."""
    federation = Federation(visits="fastest")
    assert federation.options.visits_at_once is not None
    assert federation.options.visits_one_by_one == "auto"
    assert Federation(visits="lightning").options.visits_one_by_one == "lightning"


def test_the_federation_asks_for_every_cohort_in_the_measurements():
    """The constant is in the kernel, so smaller fits do not import the measurements."""
    assert min(row.least_cohort for row in (*_ON_CPU, *_ON_GPU)) == _LEAST_AT_ONCE
