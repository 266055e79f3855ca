"""The generated clients as a datamodule: the split of each client, and a fit."""

import numpy as np
import pytest
import torch

from lightning_fed.datasets import Synthetic, synthetic_clients
from lightning_fed.tasks import ClassificationTask


def parts(data, client):
    return [part[client].tensors for part in (data.clients, data.val, data.test)]


@pytest.mark.parametrize("fractions", [{}, {"val_fraction": 0.25, "test_fraction": 0.5}])
def test_every_client_is_cut_into_three(fractions):
    data = Synthetic(0.5, 2.0, num_clients=6, seed=3, **fractions)
    drawn = synthetic_clients(0.5, 2.0, 6, 3)
    assert data.population().clients == sorted(data.val) == sorted(data.test) == list(range(6))
    for client, (inputs, labels) in enumerate(drawn):
        train, val, test = parts(data, client)
        for index, expected in enumerate((inputs, labels)):
            joined = np.concatenate([part[index].numpy() for part in (train, val, test)])
            assert np.array_equal(joined, expected)
        num_test = int(fractions.get("test_fraction", 0.1) * len(labels))
        assert len(test[1]) == num_test >= 5
        assert len(val[1]) == int(fractions.get("val_fraction", 0.1) * (len(labels) - num_test)) >= 4


def test_no_part_is_empty():
    data = Synthetic(num_clients=3, val_fraction=0.001, test_fraction=0.001)
    assert all(len(part[1]) >= 1 for client in range(3) for part in parts(data, client))


def test_the_seed_decides():
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other_seed = (
        Synthetic(num_clients=2, seed=1),
        Synthetic(num_clients=2, seed=1),
        Synthetic(num_clients=2),
    )
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    for client in range(2):
        for part, same in zip(parts(first, client), parts(again, client), strict=True):
            assert all(torch.equal(left, right) for left, right in zip(part, same, strict=True))
    assert not torch.equal(first.clients[0].tensors[0][:9], other_seed.clients[0].tensors[0][:9])


def test_federated_and_pooled(federated_trainer, plain_trainer):
    data = Synthetic(num_clients=3, batch_size=16)
    task = ClassificationTask("mlp", data.num_classes, in_channels=data.num_features, input_size=1, lr=0.05)
    trainer = federated_trainer(max_rounds=2, clients_per_round=2)
    trainer.fit(task, datamodule=data)
    assert trainer.federation.rounds == 2
    scores = [float(trainer.callback_metrics[f"client/{client}/val_acc"]) for client in range(3)]
    assert float(trainer.callback_metrics["fed/val_acc/mean"]) == pytest.approx(np.mean(scores))
    (tested,) = trainer.test(task, datamodule=data, verbose=False)
    inputs, labels = (torch.cat([parts(data, client)[2][index] for client in range(3)]) for index in (0, 1))
    assert tested["test_acc"] == pytest.approx(float((task(inputs).argmax(1) == labels).float().mean()))
    plain = plain_trainer(max_epochs=1)
    plain.fit(task, datamodule=data)
    assert plain.num_training_batches == -(-sum(len(data.clients[client]) for client in range(3)) // 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": -1}, "`alpha` to be at least 0 and finite, but got -1"),
        ({"num_clients": 0}, "`num_clients` to be at least 1"),
        ({"val_fraction": 0}, r"`val_fraction` to be in \(0, 1\), but got 0"),
        ({"test_fraction": 1}, r"`test_fraction` to be in \(0, 1\), but got 1"),
        ({"batch_size": 0}, "`batch_size` to be at least 1, but got 0"),
        ({"seed": -1}, "`seed` to be at least 0"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        Synthetic(**arguments)
