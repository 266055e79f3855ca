"""BatchNorm statistics per client, measured with the aggregated weights, and the default's choice between
treatments.
"""

import logging

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fed import Faults, FederatedCallback, FederatedDataModule, LocalStatistics, adapt
from lightning_fed.algorithms import FedAvg, FedSS
from lightning_fed.batch_norm import measurement
from lightning_fed.data import Dirichlet
from lightning_fed.modules import SampledSoftmaxHead
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import UniformWeights
from tests import models
from tests.algorithms.fedma import fits
from tests.breadth import quick, slow
from tests.privacy.helpers import KnownKey
from tests.recorders import Recorder, assert_same, fit_fixed, loading, state_of
from tests.references import (
    batch_norm_reference,
    recalibration_seed_reference,
    seed_reference,
    visit_batches_reference,
    visit_seed_reference,
)
from tests.references_batch_norm import normalised_by_batch

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SEED, ROUNDS = 5, 3
LAYERS = {"1": nn.BatchNorm1d, "5": nn.BatchNorm1d}


def unlike(sizes=models.SIZES, offset=20.0):
    """Clients with very different input means."""
    return {
        name: (inputs + offset * place, targets)
        for place, (name, (inputs, targets)) in enumerate(models.vectors(sizes).items())
    }


def measured_reference(aggregate, clients, client, round, seed=SEED):
    """Running statistics after one manual pass through the aggregate."""
    net = models.norm_mlp()
    net.load_state_dict({name.removeprefix("net."): value for name, value in aggregate.items()}, strict=False)
    pass_seed = recalibration_seed_reference(visit_seed_reference(seed, round, client))
    batches = [inputs for inputs, _ in visit_batches_reference(clients[client], 32, pass_seed)]
    measured = batch_norm_reference(net, {name: net[int(name)] for name in LAYERS}, batches)
    return {
        f"net.{layer}.{kind}": value
        for layer, values in measured.items()
        for kind, value in zip(("running_mean", "running_var"), values, strict=True)
    }


def assert_measured(state, expected):
    for name, value in expected.items():
        assert torch.allclose(state[name].double(), value, rtol=1e-6, atol=1e-6), name


def fit(federated_trainer, clients, caplog=None, module=None, val=None, **options):
    recorder, module = Recorder(), module or models.Module(models.norm_mlp(), models.momentum)
    callbacks = [recorder, *options.pop("callbacks", [])]
    options = {"max_rounds": ROUNDS, "seed": SEED, **options}
    trainer = federated_trainer(callbacks=callbacks, **options)
    trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(clients), val))
    return trainer, module, recorder


def decisions(caplog):
    return [message for message in caplog.messages if message.startswith("BatchNorm: ")]


OWN = ("auto", LocalStatistics(), LocalStatistics("pooled"))

# --- Statistics of a client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_norm", "cohort"),
    quick(
        [(mode, cohort) for mode in OWN for cohort in (1.0, 3)],
        [(OWN[0], 3), (OWN[2], 3)],
    ),
)
def test_statistics_are_one_pass_through_the_averaged_weights(batch_norm, cohort, federated_trainer):
    """For every client after the fit, including clients outside the last round."""
    clients = unlike()
    trainer, module, recorder = fit(federated_trainer, clients, batch_norm=batch_norm, clients_per_round=cohort)
    for client in clients:
        state = trainer.federation.client_state(client)
        assert_measured(state, measured_reference(recorder.aggregates[-1], clients, client, ROUNDS - 1))
        assert torch.equal(state["net.0.weight"], module.net[0].weight)


@pytest.mark.slow
def test_known_clients_are_evaluated_with_their_statistics(federated_trainer):
    """In validation after every round; a client without training data is normalised by batch."""
    clients = unlike()
    data = {**clients, "new": models.vectors({"new": 20})["new"]}
    val = {client: DataLoader(TensorDataset(*tensors), len(tensors[0])) for client, tensors in data.items()}
    trainer, _, recorder = fit(federated_trainer, clients, val=val, clients_per_round=3)
    for client, (inputs, targets) in data.items():
        own = models.Module(models.norm_mlp()).eval()
        own.load_state_dict(recorder.aggregates[-1])
        if client in clients:
            own.load_state_dict(trainer.federation.client_state(client))
            outputs = own(inputs)
        else:
            for layer in (own.net[1], own.net[5]):
                layer.train()
            outputs = own(inputs)
        expected = F.cross_entropy(outputs, targets).item()
        assert trainer.callback_metrics[f"client/{client}/val_loss"].item() == pytest.approx(expected, rel=1e-5)


# --- Decision ---------------------------------------------------------------------------------------------------------


class Decisions(FederatedCallback):
    def __init__(self):
        self.clients, self.decisions = [], []

    def on_client_end(self, trainer, module, client, update):
        self.clients.append(client)

    def on_server_round_end(self, trainer, module, is_new):
        self.decisions.append(trainer.federation.batch_norm_decision)


@pytest.mark.parametrize(("offset", "decision"), [(0.0, "pooled"), (20.0, "own")])
def test_the_default_decides_once(offset, decision, federated_trainer, caplog):
    """Weights and pooled statistics equal "recalibrate" bit for bit."""
    clients = unlike(offset=offset)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer, module, _ = fit(federated_trainer, clients, max_rounds=2)
    (line,) = decisions(caplog)
    assert ("separate statistics" in line) == (decision == "own")
    assert ("pooled statistics" in line) == (decision == "pooled")
    assert not [record for record in caplog.records if record.levelno > logging.INFO and "batch_norm" in record.name]
    assert trainer.federation.has_own_statistics == (decision == "own")
    _, pooled, _ = fit(federated_trainer, clients, max_rounds=2, batch_norm="recalibrate")
    compared = [name for name in state_of(module) if decision == "pooled" or not name.endswith(("_mean", "_var"))]
    assert_same(*({name: state_of(each)[name] for name in compared} for each in (pooled, module)))
    if decision == "pooled":
        for client in clients:
            assert_same(state_of(module), trainer.federation.client_state(client))


def test_a_decision_survives_similar_clients(federated_trainer, caplog):
    """Own statistics are permanent, and a preset decision needs no reports."""
    clients = unlike(offset=0.0)
    module = models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=1, seed=SEED)
    trainer.federation.preset_decision("own")
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(clients)))
    assert not decisions(caplog)
    assert trainer.federation.batch_norm_decision == "own"
    states = [trainer.federation.client_state(client) for client in clients]
    assert not torch.equal(states[0]["net.1.running_mean"], states[1]["net.1.running_mean"])


def test_one_client_equals_plain_lightning(federated_trainer, plain_trainer, caplog):
    clients = models.vectors({"ann": 40})
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer, module, _ = fit(federated_trainer, clients, max_rounds=2)
    assert not decisions(caplog)
    assert not trainer.federation.has_own_statistics
    plain = models.Module(models.norm_mlp(), models.momentum)
    for round in range(2):
        visit_seed = visit_seed_reference(SEED, round, "ann")
        seed_reference(visit_seed)
        fit_fixed(plain_trainer(max_epochs=1), plain, [visit_batches_reference(clients["ann"], 32, visit_seed)])
    assert_same(state_of(plain), state_of(module))


def group_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, models.CLASSES))


class FrozenNorms(models.Module):
    def on_train_start(self):
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()


@pytest.mark.parametrize(
    "module",
    [
        lambda: models.Module(models.mlp(), models.momentum),
        lambda: models.Module(group_norm(), models.momentum),
        lambda: FrozenNorms(models.norm_mlp(), models.momentum),
    ],
    ids=["no norm", "group norm", "frozen layers"],
)
def test_models_without_batch_norm_in_training_get_no_message(module, federated_trainer, caplog):
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer, _, recorder = fit(federated_trainer, unlike(), module=module(), max_rounds=1)
    assert not decisions(caplog)
    assert not [record for record in caplog.records if record.levelno > logging.INFO and "batch_norm" in record.name]
    assert "fed/batch_norm_shift" not in recorder.logged[-1]
    assert not trainer.federation.has_own_statistics


def test_frozen_statistics_are_not_measured(federated_trainer):
    """Layer 1 alone has different inputs, and would decide for own statistics."""
    initial = models.norm_mlp()[1]
    trainer, module, _ = fit(federated_trainer, unlike(), frozen=["net.1.*"])
    assert trainer.federation.state_dict()["norm_layers"] == ["net.5"]
    own = trainer.federation.client_model("bob")
    for layer in (module.net[1], own.net[1]):
        assert_same(layer.state_dict(), initial.state_dict())
    assert not torch.equal(module.net[5].running_mean, initial.running_mean[:1])


class Gratings(Dataset):
    """Stripes with a direction per class, and a brightness per group of classes."""

    def __init__(self, is_bright, count=240, side=12):
        generator = torch.Generator().manual_seed(3)
        self.targets = torch.arange(count) % 4
        angles = self.targets * torch.pi / 4
        phases = 6.3 * torch.rand(count, 1, 1, generator=generator)
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        waves = torch.cos(angles)[:, None, None] * rows + torch.sin(angles)[:, None, None] * columns
        noise = 0.7 * torch.randn(count, 1, side, side, generator=generator)
        self.images = (
            torch.sin(1.2 * waves + phases)[:, None] + noise + 3 * is_bright * (self.targets > 1)[:, None, None, None]
        )

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


@pytest.mark.parametrize("is_bright", [False, True])
def test_a_skew_of_labels_is_no_shift_of_looks(is_bright, federated_trainer):
    """Dirichlet 0.1 with one appearance stays pooled; brightness that follows the classes does not."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    trainer = federated_trainer(max_rounds=2, seed=SEED, partition=Dirichlet(5, 0.1))
    trainer.fit(models.Module(net), DataLoader(Gratings(is_bright), batch_size=12))
    assert trainer.federation.batch_norm_decision == ("own" if is_bright else "pooled")


def gaussian_clients(count, size):
    """Equal clients."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(size) % models.CLASSES
    return {f"{place}": (torch.randn(size, 6, generator=generator), targets) for place in range(count)}


class Product(nn.Module):
    """The second BatchNorm layer, registered first, sees the product of two normalised inputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, models.CLASSES))
        self.body = nn.BatchNorm1d(2)

    def forward(self, inputs):
        return self.head(self.body(inputs[:, :2]).prod(1, keepdim=True))


@pytest.mark.parametrize(("offset", "sign", "decision"), [(0.0, -1.0, "pooled"), (0.7, 1.0, "own")])
def test_the_first_layer_in_the_order_of_execution_decides(offset, sign, decision, federated_trainer):
    """The other layer differs too: by far more in the first case, in which each input has equal moments."""
    clients = gaussian_clients(4, 80)
    for name in ("1", "3"):
        inputs, targets = clients[name]
        clients[name] = torch.cat([inputs[:, :1] + offset, sign * inputs[:, :1] + offset], dim=1), targets
    for name in ("0", "2"):
        inputs, targets = clients[name]
        clients[name] = inputs[:, :1].repeat(1, 2), targets
    trainer, _, recorder = fit(federated_trainer, clients, module=models.Module(Product()))
    assert (recorder.logged[0]["fed/batch_norm_shift"] > 0.2) == (decision == "pooled")
    assert trainer.federation.batch_norm_decision == decision


def test_few_examples_per_client_are_no_shift(federated_trainer):
    """Eight equal clients with four examples each differ by chance, by more than the limit without examples."""
    clients = gaussian_clients(8, 4)
    trainer, _, recorder = fit(federated_trainer, clients, max_rounds=1)
    assert recorder.logged[0]["fed/batch_norm_shift"] > 2 * measurement.LARGE_SHIFT
    assert trainer.federation.batch_norm_decision == "pooled"


def secure_sum():
    return [UniformWeights(), SecureSum(10.0)]


def central_privacy():
    pytest.importorskip("dp_accounting")
    return [KnownKey(1.0, 1e-3, noise_multiplier=0.5)]


@pytest.mark.parametrize("make_steps", [secure_sum, central_privacy])
def test_hidden_updates_have_own_statistics_without_reports(make_steps, federated_trainer, caplog):
    clients, steps = unlike(offset=0.0), make_steps()
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer, _, recorder = fit(federated_trainer, clients, max_rounds=2, steps=steps)
    (line,) = decisions(caplog)
    assert "must not receive statistics of single clients" in line
    assert "fed/batch_norm_shift" not in recorder.logged[-1]
    assert not [name for name in recorder.visits[0].update if "running" in name]
    state = trainer.federation.client_state("bob")
    assert_measured(state, measured_reference(recorder.aggregates[-1], clients, "bob", 1))


def test_clients_with_some_rows_of_an_entry_have_own_statistics(federated_trainer, caplog):
    """No client receives the whole table for measuring."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), SampledSoftmaxHead(8, 30))
    clients = {client: (inputs, targets % 10) for client, (inputs, targets) in unlike().items()}
    module = models.Module(net, models.momentum)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer, _, recorder = fit(
            federated_trainer, clients, module=module, max_rounds=1, method=FedSS(num_negatives=3)
        )
    (line,) = decisions(caplog)
    assert "the whole model" in line
    assert recorder.logged[-1]["comm/down_bytes"] == recorder.down_bytes[-1]
    states = [trainer.federation.client_state(client) for client in clients]
    assert not torch.equal(states[0]["net.1.running_mean"], states[1]["net.1.running_mean"])


class Fails:
    def __init__(self, monkeypatch, clients, rounds=range(ROUNDS)):
        measure = measurement.client_statistics

        def failing(trainer, module, population, visit, *arguments):
            if visit.client in clients and visit.round in rounds:
                raise ValueError("no measurement")
            return measure(trainer, module, population, visit, *arguments)

        monkeypatch.setattr(measurement, "client_statistics", failing)


def test_a_client_that_cannot_measure_is_served_by_its_batch(federated_trainer, monkeypatch, caplog):
    clients = unlike()
    Fails(monkeypatch, ["bob"])
    val = {client: DataLoader(TensorDataset(*tensors), len(tensors[0])) for client, tensors in clients.items()}
    trainer, _, recorder = fit(federated_trainer, clients, val=val, max_rounds=1)
    own = models.Module(models.norm_mlp()).eval()
    own.load_state_dict(recorder.aggregates[-1])
    expected = F.cross_entropy(normalised_by_batch(own.net, clients["bob"][0]), clients["bob"][1]).item()
    assert trainer.callback_metrics["client/bob/val_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert sum("BatchNorm statistics of client 'bob' are excluded" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("failing", "rounds", "min_clients", "decided"),
    [
        (1, ROUNDS, 1, [True, True]),
        slow((3, 1, 1, [False, True])),  # fewer than half of five
        (3, ROUNDS, 1, [False, True]),  # round 1 decides even with few reports
        (4, ROUNDS, 1, [False, False]),  # one report shows no difference
        (1, ROUNDS, 5, [False, False]),
    ],
)
def test_rounds_that_decide(failing, rounds, min_clients, decided, federated_trainer, monkeypatch, caplog):
    """The log states once that the decision is open."""
    clients, seen = unlike(), Decisions()
    Fails(monkeypatch, list(clients)[:failing], range(rounds))
    faults = Faults(min_clients=min_clients)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        fit(federated_trainer, clients, max_rounds=2, faults=faults, callbacks=[seen])
    assert seen.decisions == ["own" if is_decided else "" for is_decided in decided]
    assert sum("have reported BatchNorm statistics. To choose" in message for message in caplog.messages) == (
        not decided[0]
    )


@pytest.mark.parametrize(("method", "decision"), [("fedavg", "own"), ("trimmed_mean:num_malicious=1", "pooled")])
def test_clients_that_a_robust_rule_trims_do_not_decide(method, decision, federated_trainer):
    """One of five clients looks different."""
    clients = models.vectors()
    clients["eve"] = (clients["eve"][0] + 50.0, clients["eve"][1])
    trainer, *_ = fit(federated_trainer, clients, max_rounds=1, method=method)
    assert trainer.federation.batch_norm_decision == decision


@pytest.mark.parametrize(
    ("offset", "decision", "method"),
    [
        slow((0.0, "pooled", "median")),
        (0.0, "pooled", "trimmed_mean"),
        slow((0.0, "pooled", "geometric_median")),
        (20.0, "own", "median"),
        slow((20.0, "own", "trimmed_mean")),
        (20.0, "own", "geometric_median"),
    ],
)
def test_robust_rules_decide_with_an_unknown_number_of_malicious_clients(method, offset, decision, federated_trainer):
    trainer, *_ = fit(federated_trainer, unlike(offset=offset), max_rounds=1, method=method)
    assert trainer.federation.batch_norm_decision == decision


@pytest.mark.parametrize(("offset", "decision"), [slow((0.0, "pooled")), (20.0, "own")])
def test_rounds_with_one_client_decide_once_two_have_reported(offset, decision, federated_trainer, caplog, tmp_path):
    """Also in a resumed fit."""
    clients, seen = unlike(offset=offset), Decisions()
    options = {"clients_per_round": 1, "seed": 0}
    with caplog.at_level(logging.INFO, "lightning_fed"):
        _, whole, _ = fit(federated_trainer, clients, callbacks=[seen], **options)
    second = next(number for number, client in enumerate(seen.clients) if client != seen.clients[0])
    assert second < ROUNDS - 1
    assert seen.decisions == [""] * second + [decision] * (ROUNDS - second)
    assert sum(message.startswith("1 clients have reported BatchNorm") for message in caplog.messages) == 1
    assert len(decisions(caplog)) == 1
    first, *_ = fit(federated_trainer, clients, max_rounds=second, **options)
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed, again = models.Module(models.norm_mlp(), models.momentum), Decisions()
    trainer = federated_trainer(max_rounds=ROUNDS, callbacks=[again], **options)
    data = FederatedDataModule(models.as_datasets(clients))
    trainer.fit(resumed, datamodule=data, ckpt_path=tmp_path / "first.ckpt", **loading(True))
    assert again.decisions == seen.decisions[second:]
    assert_same(state_of(whole), state_of(resumed))


def test_the_treatment_of_a_method_replaces_the_default(federated_trainer, caplog):
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer, *_ = fit(federated_trainer, unlike(), max_rounds=1, method="silobn")
    assert trainer.federation.options.batch_norm == LocalStatistics(measured="visit")
    assert trainer.federation.batch_norm_decision == ""
    assert not decisions(caplog)


@pytest.mark.parametrize(("is_far", "decision"), [(False, "pooled"), (True, "own")])
def test_each_model_of_a_clustered_rule_is_compared_within_its_clients(is_far, decision, federated_trainer):
    """Two different groups, one per model; then a mixed cluster."""

    class Clusters(FedAvg):
        has_clusters = True

        def aggregate(self):
            state = super().aggregate()
            self.models = [{name: value.clone() for name, value in state.items()} for _ in range(2)]
            return state

        def model_of(self, client):
            return self.models[client in ("ann", "bob") or (is_far and client == "eve")] if self.models else None

        models = ()

    clients = {
        client: (inputs + 50.0 * (client in ("ann", "bob")), targets)
        for client, (inputs, targets) in models.vectors().items()
    }
    trainer, *_ = fit(federated_trainer, clients, max_rounds=1, method=Clusters())
    assert trainer.federation.batch_norm_decision == decision


def test_fedma_decides_after_its_last_stage(federated_trainer):
    clients = {
        name: (inputs + 20.0 * place, targets) for place, (name, (inputs, targets)) in enumerate(fits.parts().items())
    }
    seen = Decisions()
    module = models.Module(fits.norm_net(), models.momentum)
    trainer = federated_trainer(max_rounds=3, method="fedma", callbacks=[seen], seed=SEED)
    trainer.fit(module, datamodule=fits.data_of(clients))
    assert seen.decisions == ["", "", "own"]
    states = [trainer.federation.client_state(client) for client in clients]
    assert states[0]["net.1.running_mean"].shape == module.net[1].running_mean.shape
    assert not torch.equal(states[0]["net.1.running_mean"], states[1]["net.1.running_mean"])


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", quick([None, "folder"], ["folder"]))
def test_resumed_fits_have_the_same_statistics(store, federated_trainer, tmp_path):
    clients = unlike()
    val = {client: DataLoader(TensorDataset(*tensors), len(tensors[0])) for client, tensors in clients.items()}
    options = {"clients_per_round": 3, "val": val}
    whole, module, _ = fit(federated_trainer, clients, **options)
    options["store"] = store and tmp_path / store
    first, *_ = fit(federated_trainer, clients, max_rounds=2, **options)
    first.save_checkpoint(tmp_path / "two.ckpt")
    resumed = models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=ROUNDS, seed=SEED, clients_per_round=3, store=options["store"])
    data = FederatedDataModule(models.as_datasets(clients), val)
    trainer.fit(resumed, datamodule=data, ckpt_path=tmp_path / "two.ckpt", **loading(True))
    assert trainer.federation.batch_norm_decision == "own"
    assert_same(state_of(module), state_of(resumed))
    for client in clients:
        assert_same(whole.federation.client_state(client), trainer.federation.client_state(client))
    for name, value in whole.callback_metrics.items():
        if name.startswith("client/"):
            assert torch.equal(trainer.callback_metrics[name], value)


def test_a_resume_with_another_choice_is_refused(federated_trainer, tmp_path):
    trainer, *_ = fit(federated_trainer, unlike(), max_rounds=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = federated_trainer(max_rounds=2, seed=SEED, batch_norm="recalibrate")
    with pytest.raises(ValueError, match="Expected `batch_norm` to be 'auto', as in the checkpoint, but got 'recali"):
        again.fit(
            models.Module(models.norm_mlp(), models.momentum),
            datamodule=FederatedDataModule(models.as_datasets(unlike())),
            ckpt_path=tmp_path / "one.ckpt",
            **loading(True),
        )


# --- Metrics and new clients ------------------------------------------------------------------------------------------


def loaders(clients, batch_size=8):
    return {client: DataLoader(TensorDataset(*tensors), batch_size) for client, tensors in clients.items()}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("unseen", quick(["batch", "data"], ["data"]))
def test_a_checkpoint_reproduces_the_monitored_values(unseen, federated_trainer, tmp_path):
    """In a new Trainer without training data, for known clients and for a client without statistics."""
    clients = unlike()
    val = loaders({**clients, "new": models.vectors({"new": 20})["new"]})
    saver = ModelCheckpoint(tmp_path, monitor="fed/val_loss/mean")
    batch_norm = "auto" if unseen == "batch" else LocalStatistics(unseen)
    fit(federated_trainer, clients, val=val, callbacks=[saver], enable_checkpointing=True, batch_norm=batch_norm)
    module, data = (
        models.Module(models.norm_mlp(), models.momentum),
        FederatedDataModule(models.as_datasets({"other": clients["ann"]}), val),
    )
    again = federated_trainer(max_rounds=1, batch_norm=batch_norm)
    again.validate(module, datamodule=data, ckpt_path=saver.best_model_path, verbose=False, **loading(True))
    assert again.callback_metrics["fed/val_loss/mean"] == saver.best_model_score
    content = torch.load(saver.best_model_path, weights_only=True)["callbacks"]["Federation"]
    assert content["statistics"] == {"fed/val_loss/mean": "own"}
    assert len(content["store"]["clients"]) == len(clients)


@pytest.mark.parametrize("unseen", ["batch", "data", "pooled"])
def test_statistics_of_data_without_a_client(unseen, federated_trainer):
    """Against a manual pass over batches with different means."""
    inputs, targets = models.vectors({"new": 24})["new"]
    inputs = inputs + torch.arange(24)[:, None] // 8 * 3.0
    trainer, module, _ = fit(federated_trainer, unlike(), batch_norm=LocalStatistics(unseen), max_rounds=1)
    loader = DataLoader(TensorDataset(inputs, targets), 8)
    found = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    net = models.norm_mlp()
    net.load_state_dict({name.removeprefix("net."): value for name, value in module.state_dict().items()})
    if unseen == "data":
        net.eval()
        report = batch_norm_reference(net, {"1": net[1], "5": net[5]}, [images for images, _ in loader])
        for layer, (mean, variance) in report.items():
            net[int(layer)].running_mean.copy_(mean)
            net[int(layer)].running_var.copy_(variance * 23 / 24)  # biased, as in a batch
        net.eval()
    with torch.no_grad():
        outputs = [normalised_by_batch(net, x) if unseen == "batch" else net.eval()(x) for x, _ in loader]
    expected = F.cross_entropy(torch.cat(outputs), targets).item()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_a_measured_loader_with_persistent_workers_is_evaluated_whole(federated_trainer):
    """With one loader, and with the loaders of two clients."""
    clients = unlike()
    trainer, module, _ = fit(federated_trainer, clients, batch_norm=LocalStatistics("data"), max_rounds=1)
    data = TensorDataset(*models.vectors({"new": 24})["new"])

    def scores(**options):
        loader = DataLoader(data, 8, **options)
        by_client = FederatedDataModule(models.as_datasets(clients), {"new": loader, "other": loader})
        (alone,) = trainer.validate(module, loader, verbose=False)
        (joint,) = trainer.validate(module, datamodule=by_client, verbose=False)
        return alone, joint

    assert scores(num_workers=1, persistent_workers=True) == scores()


def test_monitoring_the_global_model_is_warned_of_once(federated_trainer, tmp_path, caplog):
    saver = ModelCheckpoint(tmp_path, monitor="val_loss")
    with caplog.at_level(logging.WARNING, "lightning_fed"):
        fit(federated_trainer, unlike(), val=loaders(unlike()), callbacks=[saver], enable_checkpointing=True)
    (warned,) = [message for message in caplog.messages if "is a value of the global model" in message]
    assert "monitor 'fed/val_loss/mean'" in warned


def test_a_clients_model_is_a_plain_module(federated_trainer):
    clients = unlike()
    trainer, module, _ = fit(federated_trainer, clients)
    inputs = clients["bob"][0][:6]
    before = module.eval()(inputs)
    copied = trainer.federation.client_model("bob")
    with trainer.federation.own_models(module) as load:
        load("bob")
    assert torch.equal(module(inputs), before)
    fresh = models.Module(models.norm_mlp()).eval()
    fresh.load_state_dict(copied.state_dict())
    assert torch.equal(copied(inputs), fresh(inputs))
    assert type(copied) is models.Module
    assert not copied.training
    assert_same(state_of(copied), trainer.federation.client_state("bob"))
    assert copied.net[0].weight.data_ptr() != module.net[0].weight.data_ptr()
    assert not [value for value in vars(copied).values() if type(value).__module__.startswith("lightning_fed")]


class OnlySteps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = models.norm_mlp()

    def validation_step(self, batch):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize("make", [models.norm_mlp, lambda: models.Module(models.norm_mlp()), OnlySteps])
def test_a_module_is_adapted_to_unlabelled_data(make, federated_trainer):
    inputs, targets = models.vectors({"new": 24})["new"]
    module = make().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    adapted = adapt(module, DataLoader(TensorDataset(inputs + 5, targets), 8))
    assert type(adapted) is type(module)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    net = models.norm_mlp()
    expected = batch_norm_reference(net, {"1": net[1], "5": net[5]}, (inputs + 5).split(8))
    layers = getattr(adapted, "net", adapted)
    for layer, (mean, variance) in expected.items():
        assert torch.allclose(layers[int(layer)].running_mean.double(), mean, rtol=1e-5)
        assert torch.allclose(layers[int(layer)].running_var.double(), variance, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "batches", "message"),
    [
        (models.mlp, [torch.zeros(4, 6)], "a module with BatchNorm layers"),
        (models.norm_mlp, [], "at least one batch, but got none"),
        (models.norm_mlp, [torch.zeros(1, 6)], "at least two examples, but got a single example"),
    ],
)
def test_refused_adaptations(module, batches, message):
    with pytest.raises(ValueError, match=message):
        adapt(module(), batches)
