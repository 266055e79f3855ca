"""Ditto: global models equal plain FedAvg, personal models equal a plain loop, and evaluation uses personal models."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from lightning_fed import Availability, FederatedDataModule, Federation
from lightning_fed.algorithms import Ditto
from lightning_fed.callbacks import FederatedCallback, PersonalModel
from lightning_fed.method import build_method
from tests import models
from tests.breadth import quick
from tests.recorders import MemoryLogger, Recorder, SavesOnException, assert_same, bytes_of, state_of
from tests.references_correction import Visits, ditto_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def own_model(trainer, client):
    """A client's personal model, keyed by the names of the network."""
    kept = trainer.federation.store.get(client) or {}
    prefix = "memory:model:net."
    return {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}


WORK = [(0.5, None), (0.5, 1), (0.0, 1)]


@pytest.mark.parametrize(
    ("lam", "personal_epochs", "optimizer"),
    quick(
        [(*pair, optimizer) for pair in WORK for optimizer in (models.momentum, models.adam)],
        [(0.5, None, models.adam), (0.5, 1, models.momentum)],
    ),
)
def test_a_fit_against_a_plain_loop(lam, personal_epochs, optimizer, federated_trainer):
    clients, recorder = models.vectors(SIZES), Recorder()
    visits = Visits(clients, rounds=2, cohort_size=3, seed=4, epochs=2)
    history, own = ditto_reference(models.norm_mlp(), visits, cross_entropy, optimizer, lam, personal_epochs or 2)
    trainer = federated_trainer(
        max_rounds=2, clients_per_round=3, method=Ditto(lam, 2, personal_epochs), seed=4, batch_norm="average",
        callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(models.Module(models.norm_mlp(), optimizer), models.as_datasets(clients))
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        assert_same({f"net.{name}": value for name, value in expected.items()}, aggregate)
    for client in clients:
        kept = own_model(trainer, client)
        assert bool(kept) == (client in own)
        if kept:
            for name, value in own[client].items():
                assert torch.allclose(kept[name].double(), value.double(), rtol=1e-5, atol=1e-6), name


def per_step(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}


OPTIONS = [
    {"batch_norm": "recalibrate"},
    {"batch_norm": "frozen"},
    {"batch_norm": "personal"},
    {"optimizer_state": "keep", "batch_norm": "average"},
    {"personal": ["net.7.*"]},
    {"frozen": ["net.0.*"]},
]


@pytest.mark.parametrize(
    "options",
    quick(OPTIONS, [OPTIONS[0], *OPTIONS[3:5]]),
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_its_global_model_is_fedavgs(options, either_trainer):
    """Compares weights, message sizes and the remaining client state."""
    runs = []
    for method, epochs in (("fedavg", {"local_epochs": 2}), (Ditto(0.1, local_epochs=2, personal_epochs=1), {})):
        recorder, module = Recorder(), models.Module(models.norm_mlp(), models.momentum, per_step)
        trainer = either_trainer(
            max_rounds=2, clients_per_round=3, method=method, seed=2, callbacks=[recorder], **options, **epochs
        )
        trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(models.vectors(SIZES))))
        federation = next(callback for callback in trainer.callbacks if isinstance(callback, Federation))
        kept = {client: federation.store.get(client) or {} for client in SIZES}
        beside = {
            client: {name: value for name, value in state.items() if not name.startswith("memory:model:")}
            for client, state in kept.items()
        }
        runs.append((state_of(module), recorder, beside, [group["lr"] for group in trainer.optimizers[0].param_groups]))
    (state, recorder, kept, rates), (expected, plain, kept_before, rates_before) = runs[1], runs[0]
    assert_same(expected, state)
    assert rates == rates_before
    assert recorder.down_bytes == plain.down_bytes
    assert recorder.up_bytes == plain.up_bytes
    for visit, before in zip(recorder.visits, plain.visits, strict=True):
        assert_same(before.update, visit.update)
        assert_same(before.end, visit.end)
    for client, before in kept_before.items():
        assert before.keys() == kept[client].keys()
        if before:
            assert_same(before, kept[client])


def per_round(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}


class BothSchedules(models.Module):
    def configure_optimizers(self):
        optimizer = models.momentum(self.parameters())
        return [optimizer], [per_step(optimizer), per_round(optimizer)]


MAKES = [lambda: models.Module(models.mlp(), models.momentum, per_round), lambda: BothSchedules(models.mlp())]
WHO = [{"a": 40}, SIZES]


@pytest.mark.parametrize(
    ("make", "sizes"),
    quick([(make, sizes) for make in MAKES for sizes in WHO], [(MAKES[0], WHO[1]), (MAKES[1], WHO[0])]),
)
def test_rates_that_change_with_the_rounds(make, sizes, federated_trainer):
    """The last batch of a round steps the schedulers before the personal models are swapped back."""
    runs = []
    for method, epochs in (("fedavg", {"local_epochs": 1}), (Ditto(0.1), {})):
        module, rates = make(), Rates()
        trainer = federated_trainer(max_rounds=3, method=method, callbacks=[rates], **epochs)
        trainer.fit(module, models.as_datasets(models.vectors(sizes)))
        runs.append((state_of(module), rates.at_start))
    assert runs[0][1] == runs[1][1]
    assert len(set(runs[0][1])) == 3
    assert_same(runs[0][0], runs[1][0])


RULES = ["scaffold", "fednova", "feddyn:alpha=0.1", "fedprox:mu=1.0", "feddane:mu=0.1"]


@pytest.mark.parametrize("rule", quick(RULES, ["scaffold", "fedprox:mu=1.0"]))
def test_corrections_of_the_rule_are_not_of_the_clients_own_models(rule, federated_trainer):
    """Global models equal the rule's bit for bit; personal models after round 0 equal Ditto's with FedAvg."""
    states, own = [], []
    for method in (rule, Ditto(0.1, aggregator=build_method(rule))):
        module = models.Module(models.mlp(), models.momentum)
        trainer = federated_trainer(max_rounds=2, method=method)
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert_same(*states)
    for aggregator in ("fedavg", build_method(rule)):
        trainer = federated_trainer(max_rounds=1, method=Ditto(0.1, aggregator=aggregator))
        trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(models.vectors(SIZES)))
        own.append(own_model(trainer, next(iter(SIZES))))
    assert_same(*own)


class Rates(FederatedCallback):
    def __init__(self):
        self.at_start = []

    def on_server_round_start(self, trainer, module):
        self.at_start.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_clients_are_evaluated_with_their_own_models(federated_trainer):
    held_out = models.vectors({name: 20 + size for name, size in SIZES.items()})
    module = models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=1, clients_per_round=3, method=Ditto(0.0, 1, 3), seed=1)
    trainer.fit(module, models.as_datasets(models.vectors(SIZES)), models.as_datasets(held_out))
    seen = set()
    for client, (inputs, targets) in held_out.items():
        state = trainer.federation.client_state(client)
        kept = own_model(trainer, client)
        seen.add(bool(kept))
        expected = {f"net.{name}": value for name, value in kept.items()} if kept else state_of(module)
        assert_same(expected, state)
        net = models.norm_mlp().eval()
        net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
        with torch.no_grad():
            accuracy = float((net(inputs).argmax(1) == targets).float().mean())
        assert float(trainer.callback_metrics[f"client/{client}/val_acc"]) == pytest.approx(accuracy, abs=1e-6)
    assert seen == {True, False}


def test_clients_are_evaluated_from_a_checkpoint(federated_trainer, tmp_path):
    """A new Trainer that only evaluates reports the same models as the fit."""
    held_out = models.vectors({name: 20 + size for name, size in SIZES.items()})
    data = FederatedDataModule(models.as_datasets(models.vectors(SIZES)), models.as_datasets(held_out))
    trainer = federated_trainer(max_rounds=2, clients_per_round=3, method="ditto", seed=1)
    trainer.fit(models.Module(models.norm_mlp(), models.momentum), datamodule=data)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    later = federated_trainer(method="ditto")
    later.validate(models.Module(models.norm_mlp()), datamodule=data, ckpt_path=tmp_path / "own.ckpt", verbose=False)
    names = [f"client/{client}/val_acc" for client in held_out]
    assert [later.callback_metrics[name] for name in names] == [trainer.callback_metrics[name] for name in names]
    for client in held_out:
        assert_same(trainer.federation.client_state(client), later.federation.client_state(client))


def test_clients_go_on_from_a_checkpoint(federated_trainer, tmp_path):
    """Interrupts the training of a personal model; compares weights, personal models and logs."""

    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 5:
                raise KeyError("broken")

    def run(logger, *callbacks, **options):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(
            max_rounds=2, method=Ditto(0.5), clients_per_round=3, logger=logger,
            callbacks=[SavesOnException(broken), *callbacks],
        )  # fmt: skip
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)), **options)
        return state_of(module), {client: own_model(trainer, client) for client in SIZES}

    broken = tmp_path / "broken.ckpt"
    whole, parts = MemoryLogger(), [MemoryLogger(), MemoryLogger()]
    expected, models_before = run(whole)
    with pytest.raises(KeyError, match="broken"):
        run(parts[0], Break())
    torch.load(broken, weights_only=True)  # only tensors and primitives
    resumed, models_after = run(parts[1], ckpt_path=broken)
    assert_same(expected, resumed)
    for client, model in models_before.items():
        assert model.keys() == models_after[client].keys()
        if model:
            assert_same(model, models_after[client])
    both = dict(parts[0].curve("train_loss")) | dict(parts[1].curve("train_loss"))
    assert sorted(both.items()) == whole.curve("train_loss")


class SpoilsOwn(FederatedCallback):
    """Fills the personal model of one client, or the update of this client, with NaN in round 1."""

    changes_update = True

    def __init__(self, own):
        self.own = own

    def on_before_optimizer_step(self, trainer, module, optimizer):
        federation = trainer.federation
        trains_own = federation.open_visit.trains_second_model
        if self.own and trainer.current_epoch == 1 and federation.current_client == "b" and trains_own:
            module.net[0].bias.grad.fill_(float("nan"))

    def on_client_end(self, trainer, module, client, update):
        if trainer.current_epoch == 1 and client == "b" and not self.own:
            update.state["net.0.bias"].fill_(float("nan"))


def test_a_clients_own_model_that_is_not_finite(federated_trainer, caplog):
    """The client is excluded as for a non-finite update, and resumes from the personal model of the last good visit."""
    runs = []
    for own in (True, False):
        models_of_b, module, recorder = [], models.Module(models.mlp(), models.momentum), Recorder()

        class Keeps(FederatedCallback):
            def on_server_round_end(self, trainer, module, is_new, kept=models_of_b):
                kept.append((own_model(trainer, "b"), trainer.federation.server.report.failed))

        trainer = federated_trainer(
            max_rounds=3, method=Ditto(0.5, 1, 1), callbacks=[SpoilsOwn(own), Keeps(), recorder], seed=3
        )
        trainer.fit(module, models.as_datasets(models.vectors({"a": 20, "b": 24, "c": 30})))
        runs.append((state_of(module), {client: own_model(trainer, client) for client in "abc"}))
        assert [list(failed) for _, failed in models_of_b] == [[], ["b"], []]
        assert_same(models_of_b[0][0], models_of_b[1][0])
        assert any(not torch.equal(value, models_of_b[0][0][name]) for name, value in models_of_b[2][0].items())
        assert [log["fed/failed"] for log in recorder.logged] == [0, 1, 0]
    (state, kept), (expected, expected_kept) = runs
    assert_same(expected, state)
    for client in "abc":
        assert_same(expected_kept[client], kept[client])
    assert (
        "client 'b' is excluded: in the client's personal model, entry 'net.0.bias' has NaN or infinite values"
        in caplog.text
    )


def test_two_optimizers_by_hand(federated_trainer):
    states = []
    for method, epochs in (("fedavg", 2), (Ditto(0.1, 2), None)):
        module = models.TwoOptimizers()
        trainer = federated_trainer(max_rounds=2, method=method, **({"local_epochs": epochs} if epochs else {}))
        trainer.fit(module, models.as_datasets(models.vectors({"a": 20, "b": 40})))
        states.append(state_of(module))
    assert_same(*states)
    state = trainer.federation.client_state("a")
    assert all(not torch.equal(state[name], value) for name, value in states[1].items())


def test_stragglers_that_do_not_get_that_far_keep_their_models(federated_trainer):
    recorder = Recorder()
    trainer = federated_trainer(
        max_rounds=1, method=Ditto(0.1, 1), availability=Availability(stragglers=0.5), callbacks=[recorder], seed=3
    )
    clients = models.vectors({"a": 20, "b": 20, "c": 20, "d": 20})
    trainer.fit(models.Module(models.mlp()), models.as_datasets(clients))
    trained = {visit.client: len(visit.batches) for visit in recorder.visits}
    assert set(trained.values()) == {1, 2}
    for client, batches in trained.items():
        assert bool(own_model(trainer, client)) == (batches == 2)


def test_what_it_costs(federated_trainer):
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=1, method="ditto", callbacks=[recorder])
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(SIZES)))
    model = bytes_of(recorder.aggregates[0])
    assert recorder.down_bytes == recorder.up_bytes == [5 * model]
    assert all(bytes_of(trainer.federation.store.get(client)) == model for client in SIZES)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Ditto(-1.0), ValueError, "`lam` to be at least 0 and finite"),
        (lambda: Ditto(0.1, 0), ValueError, "`local_epochs` to be at least 1, but got 0"),
        (lambda: Ditto(0.1, 1, 0), ValueError, "`personal_epochs` to be at least 1, but got 0"),
        (lambda: PersonalModel(0.1, 0), ValueError, "`global_epochs` to be at least 1, but got 0"),
        (
            lambda: Federation("ditto", local_epochs=4),
            ValueError,
            "no `local_epochs` for `Ditto`, which sets",
        ),
    ],
)
def test_options_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("options", [{"local_epochs": 1}, {"local_steps": 9}])
def test_federations_that_it_cannot_work_in(options, federated_trainer):
    trainer = federated_trainer(max_rounds=1, callbacks=[PersonalModel(0.1)], **options)
    with pytest.raises(MisconfigurationException, match=r"for the personal model .* set a larger `local_epochs`"):
        trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(SIZES)))
