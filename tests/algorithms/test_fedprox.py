"""FedProx as a method: an average by sizes with a proximal term."""

import pytest
import torch

from lightning_fed import Availability
from lightning_fed.algorithms import FedAvg, FedDANE, FedProx, FeSEM
from lightning_fed.messages import ClientUpdate
from tests import models
from tests.algorithms.test_fedavg import aggregated, equal, updates
from tests.chains import chain_of, one_round
from tests.recorders import Recorder, assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def test_messages_are_averaged_by_sizes():
    received = [ClientUpdate(1, 1, {"w": torch.tensor(0.0)}), ClientUpdate(2, 3, {"w": torch.tensor(3.0)})]
    assert one_round(chain_of(FedProx(mu=5.0)), 0, {"w": torch.tensor(1.0)}, received)["w"].item() == 2.25
    received = updates(6)
    assert equal(aggregated(FedProx(), received), aggregated(FedAvg(), received))


def test_it_brings_its_term_unless_there_is_one(federated_trainer):
    """A callback passed by the user replaces the method's callback and may have another strength."""
    from lightning_fed.callbacks import ProximalTerm

    clients = models.as_datasets(models.vectors({"a": 9, "b": 5}))
    own = ProximalTerm(0.5)
    for callbacks, strength in (([], 0.1), ([own], 0.5)):
        trainer = federated_trainer(max_rounds=1, method=FedProx(mu=0.1), callbacks=callbacks)
        trainer.fit(models.Module(models.mlp()), clients)
        (found,) = [callback for callback in trainer.callbacks if isinstance(callback, ProximalTerm)]
        assert found.mu == strength


def test_a_new_strength_has_an_effect(federated_trainer):
    from lightning_fed.callbacks import ProximalTerm

    states = []
    for strength in (0.5, 2.0):
        term = ProximalTerm(strength)
        term.mu = 0.5
        module = models.Module(models.mlp())
        federated_trainer(max_rounds=1, callbacks=[term]).fit(module, models.as_datasets(models.vectors({"a": 20})))
        states.append(module.state_dict())
    assert equal(*states)


@pytest.mark.parametrize("mu", [-0.1, float("inf"), float("nan")])
def test_strengths_that_cannot_be(mu):
    with pytest.raises(ValueError, match="`mu` to be at least 0 and finite, but got"):
        FedProx(mu)


def test_the_same_clients_straggle_for_every_method(federated_trainer):
    """Stragglers train equally many batches, and no straggler is dropped."""
    seen, clients = [], models.as_datasets(models.vectors(dict.fromkeys("abcdef", 16)))
    for rule in ("fedavg", FedProx(mu=0.3), "fedatt", FeSEM(num_centers=2), FedDANE(mu=0.1), "fedmargin", "fairavg"):
        recorder = Recorder()
        trainer = federated_trainer(
            max_rounds=1, clients_per_round=4, local_epochs=5, seed=11, method=rule,
            availability=Availability(stragglers=0.5),
            callbacks=[recorder],
        )  # fmt: skip
        trainer.fit(models.Module(models.mlp()), clients)
        seen.append([(visit.round, visit.client, len(visit.batches)) for visit in recorder.visits])
        assert sum(batches < 5 for _, _, batches in seen[-1]) == 2
        assert all((logged["fed/stragglers"], logged["fed/clients"]) == (2, 4) for logged in recorder.logged)
        assert seen[-1] == seen[0], rule


def test_without_pull_it_is_fedavg_bit_for_bit(federated_trainer):
    states = []
    for aggregator in ("fedavg", FedProx(mu=0.0)):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(
            max_rounds=3, clients_per_round=3, local_epochs=3, method=aggregator,
            availability=Availability(stragglers=0.4),
            gradient_clip_val=0.5,
        )  # fmt: skip
        trainer.fit(module, models.as_datasets(models.vectors()))
        states.append(state_of(module))
    assert_same(*states)
