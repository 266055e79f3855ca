"""FedALA: element weights and models equal a plain loop; evaluation uses the mixed models."""

import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedALA
from lightning_fed.algorithms.fedala import last_parameters
from lightning_fed.callbacks import AdaptiveAggregation, FederatedCallback
from lightning_fed.model.entries import live_entries
from tests import models
from tests.breadth import slow
from tests.recorders import MemoryLogger, Recorder, SavesOnException, assert_same, bytes_of, state_of
from tests.references import recalibration_seed_reference, visit_batches_reference, visit_seed_reference
from tests.references_correction import Visits, fedala_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def kept(trainer, client, prefix):
    state = trainer.federation.store.get(client) or {}
    prefix = f"memory:{prefix}:net."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("num_layers", "share", "eta", "mixed"),
    [
        (1, 0.8, 1.0, ["2.weight", "2.bias"]),
        slow((2, 1.0, 10.0, ["0.weight", "0.bias", "2.weight", "2.bias"])),
    ],
)
def test_a_fit_against_a_plain_loop(num_layers, share, eta, mixed, federated_trainer):
    """Three of five clients per round; compares global models, client models and element weights different from 1."""
    clients, recorder = models.vectors(SIZES), Recorder()
    visits = Visits(clients, rounds=4, cohort_size=3, seed=4, batch_size=16, epochs=2)

    def pass_batches(round, client):
        seed = recalibration_seed_reference(visit_seed_reference(4, round, client))
        batches = visit_batches_reference(clients[client], 16, seed)
        return batches[: math.ceil(share * len(batches))]

    history, own, weights = fedala_reference(
        models.mlp(), visits, cross_entropy, models.momentum, mixed, pass_batches, eta
    )
    trainer = federated_trainer(
        max_rounds=4, clients_per_round=3, local_epochs=2, method=FedALA(num_layers, share, eta), seed=4,
        callbacks=[recorder],
    )  # fmt: skip
    data = FederatedDataModule(models.as_datasets(clients), batch_size=16)
    trainer.fit(models.Module(models.mlp(), models.momentum), datamodule=data)
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"], value, rtol=1e-3, atol=1e-4), name
    assert any(bool((weight != 1).any()) for state in weights.values() for weight in state.values())
    for client, state in own.items():
        for expected, prefix in ((state, "model"), (weights.get(client, {}), "ala")):
            found = kept(trainer, client, prefix)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-3), (client, name)


def test_first_visits_are_fedavg(federated_trainer):
    """With dropout and BatchNorm, bit for bit; messages have the same size."""
    states = []
    for method in ("fedavg", "fedala"):
        recorder, module = Recorder(), models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(max_rounds=1, method=method, callbacks=[recorder])
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert_same(*states)
    model = bytes_of(recorder.aggregates[0])
    assert recorder.down_bytes == recorder.up_bytes == [5 * model]
    for visit in recorder.visits:
        assert_same(visit.update, {f"net.{n}": v for n, v in kept(trainer, visit.client, "model").items()})


def test_training_draws_the_same_random_numbers(federated_trainer):
    """With frozen element weights FedALA equals FedAvg with dropout, despite the additional passes."""
    states = []
    for method in ("fedavg", FedALA(eta=1e-30)):
        module = models.Module(models.norm_mlp(), models.momentum)
        federated_trainer(max_rounds=2, method=method, batch_norm="average").fit(
            module, models.as_datasets(models.vectors(SIZES))
        )
        states.append(state_of(module))
    for name, value in states[0].items():  # last + (global - last) * 1 equals the global model up to rounding
        assert torch.allclose(states[1][name].double(), value.double(), rtol=1e-3, atol=1e-4), name


def test_clients_are_evaluated_with_their_own_models(federated_trainer):
    held_out = models.vectors({name: 20 + size for name, size in SIZES.items()})
    module = models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=2, clients_per_round=2, method="fedala", seed=1)
    trainer.fit(module, models.as_datasets(models.vectors(SIZES)), models.as_datasets(held_out))
    for client, (inputs, targets) in held_out.items():
        own = kept(trainer, client, "model")
        net = models.norm_mlp().eval()
        net.load_state_dict(own or {name.removeprefix("net."): value for name, value in state_of(module).items()})
        with torch.no_grad():
            accuracy = float((net(inputs).argmax(1) == targets).float().mean())
        assert float(trainer.callback_metrics[f"client/{client}/val_acc"]) == pytest.approx(accuracy, abs=1e-6)
    assert any(not kept(trainer, client, "model") for client in held_out)


def test_going_on(federated_trainer, tmp_path):
    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 2 and batch_idx == 3:
                raise KeyError("broken")

    def run(logger, *callbacks, **options):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(
            max_rounds=3, method="fedala", clients_per_round=3, logger=logger, personal=["net.4.*"],
            callbacks=[SavesOnException(broken), *callbacks],
        )  # fmt: skip
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)), **options)
        return state_of(module), {client: trainer.federation.store.get(client) for client in SIZES}

    broken = tmp_path / "broken.ckpt"
    expected, stores = run(MemoryLogger())
    with pytest.raises(KeyError, match="broken"):
        run(MemoryLogger(), Break())
    resumed, stores_after = run(MemoryLogger(), ckpt_path=broken)
    assert_same(expected, resumed)
    for client, state in stores.items():
        assert_same(state, stores_after[client])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedALA(0), "`num_layers` to be at least 1"),
        (lambda: FedALA(share=0.0), r"`share` to be in \(0, 1\], but got 0.0"),
        (lambda: AdaptiveAggregation(eta=0.0), "`eta` to be greater than 0 and finite"),
    ],
)
def test_options_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_modules_it_cannot_work_with(federated_trainer):
    clients = models.as_datasets(models.vectors(SIZES))
    with pytest.raises(MisconfigurationException, match=r"FedALA calls `training_step` .* use automatic optimization"):
        federated_trainer(max_rounds=1, method="fedala").fit(models.ManualModule(models.mlp()), clients)
    with pytest.raises(MisconfigurationException, match=r"shared trainable layers \(2\), but got 3"):
        federated_trainer(max_rounds=1, method="fedala:num_layers=3").fit(models.Module(models.mlp()), clients)


class Tiny(models.Quadratic):
    """Without loss scaling the gradients underflow to zero in float16."""

    def __init__(self, dtype):
        super().__init__(lr=0.0)
        self.dtype_of_loss = dtype

    def training_step(self, batch, batch_idx):
        return 1e-9 * (self.w - batch[0]).to(self.dtype_of_loss).square().sum(1).mean().float()


class Moves(FederatedCallback):
    """Moves the models of the clients apart, independently of the optimizer."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.w.data.add_(1.0 if trainer.federation.current_client == "a" else -1.0)


@pytest.mark.parametrize(("scale", "learns"), [(2.0**27, True), (1.0, False), (2.0**60, False)])
def test_a_loss_scale_is_that_of_the_weights_too(scale, learns, federated_trainer):
    """Element weights equal float32 training; overflowing or underflowing gradients leave the weights at 1."""
    weights = []
    for dtype in (torch.float16, torch.float32):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6, backoff_factor=1 - 1e-9)
        options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]} if dtype == torch.float16 else {}
        data = {name: TensorDataset(torch.full((4, 2), value)) for name, value in (("a", 3.0), ("b", -5.0))}
        trainer = federated_trainer(max_rounds=2, method=FedALA(eta=3e6), callbacks=[Moves()], **options)
        trainer.fit(Tiny(dtype), data)
        weights.append(torch.cat([trainer.federation.store.get(client)["memory:ala:w"] for client in "ab"]))
    found, expected = weights
    assert bool((expected < 0.9).all())
    assert bool((expected > 0).all())
    torch.testing.assert_close(found, expected if learns else torch.ones(4), rtol=1e-2, atol=0)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_last_layers_of_renamed_and_parametrized_entries(num_layers):
    """The layer decides, not the name of an entry."""

    class Renamed(torch.nn.Sequential):
        def state_dict(self, *args, **kwargs):
            return {name.replace(".", "|"): value for name, value in super().state_dict(*args, **kwargs).items()}

    renamed = Renamed(*models.mlp())
    register_parametrization(renamed[-1], "weight", torch.nn.Identity())
    last = last_parameters(renamed, num_layers, live_entries(renamed))
    expected = [layer for layer in renamed if isinstance(layer, torch.nn.Linear)][-num_layers:]
    assert set(last.values()) == {value for layer in expected for value in layer.parameters()}
