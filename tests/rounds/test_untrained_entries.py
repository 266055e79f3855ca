"""Untrained entries are not sent, and weights equal a fit with all entries sent."""

import logging
import math

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lightning_fed import FederatedCallback, FederatedDataModule, Federation
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import CommunicationReport, find_federation
from lightning_fed.privacy import CentralDP, SecureSum
from lightning_fed.rounds import round as round_module
from tests import models
from tests.breadth import quick, slow
from tests.recorders import Recorder, assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Found .* module"),
]

SIZES = {"a": 24, "b": 16, "c": 24, "d": 16}
DATA = models.as_datasets(models.vectors(SIZES))


class Adapted(models.Module):
    """A frozen layer with a low-rank adapter, a frozen BatchNorm layer, and a head."""

    def __init__(self, optimizer=models.momentum):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 3), optimizer)
        self.base = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False).eval()
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs):
        return self.net(torch.relu(self.base(inputs) + self.up(self.down(inputs))))


class Following(Adapted):
    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.base[0].weight[:3].lerp_(self.net.weight, 0.1)


class Switched(Adapted):
    def on_train_epoch_start(self):
        self.base[0].requires_grad_(self.current_epoch in (2, 3))


def bytes_of(module, *names):
    entries = module.state_dict()
    return sum(value.numel() * value.element_size() for name, value in entries.items() if name.startswith(names))


ADAPTERS = ("net.", "down.", "up.")


@pytest.fixture
def fit(federated_trainer):
    def run(module, rounds=3, data=DATA, ckpt_path=None, **options):
        recorder = Recorder()
        callbacks = [recorder, *options.pop("callbacks", ())]
        trainer = federated_trainer(max_rounds=rounds, callbacks=callbacks, **options)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return recorder, trainer

    return run


def logged(recorder, name):
    return [values[f"comm/{name}_bytes"] for values in recorder.logged]


def test_adapters_alone_travel(fit):
    report = CommunicationReport()
    recorder, trainer = fit(module := Adapted(), clients_per_round=3, callbacks=[report])
    expected = [3 * bytes_of(module, *ADAPTERS)] * 3
    assert logged(recorder, "up") == logged(recorder, "down") == expected == recorder.up_bytes == recorder.down_bytes
    assert sum(row.up_bytes for row in report.rows) == sum(expected)
    assert {row.part for row in report.rows} == {"net", "down", "up"}
    assert trainer.callback_metrics["comm/up_share"] == bytes_of(module, *ADAPTERS) / bytes_of(module, "")


METHODS = [
    "fedavg", "fedprox", "fedadam", "scaffold", "feddyn", "fednova", "fedatt", "qffl", "fairavg", "feddane", "moon",
    "ditto", "fedala", "fesem:num_centers=2", "median", "krum", "fedavgm",
]  # fmt: skip

MODULES = [Adapted, Following, Switched]


@pytest.mark.parametrize(
    ("make_module", "method"),
    quick(
        [(make_module, method) for make_module in MODULES for method in METHODS],
        [
            (MODULES[place % 3], method)
            for place, method in enumerate(METHODS)
            if method in ("fedavg", "feddyn", "fedala")
        ],
    ),
)
def test_weights_are_those_of_a_fit_in_which_everything_travels(make_module, method, fit, monkeypatch):
    rounds = 5 if make_module is Switched else 3
    options = {"method": method, "clients_per_round": 3, "rounds": rounds}
    seen, _ = fit(module := make_module(), **options)
    monkeypatch.setattr(round_module, "untrained_entries", lambda module: frozenset())
    plain, _ = fit(expected := make_module(), **options)
    assert_same(state_of(module), state_of(expected))
    assert not torch.equal(state_of(module)["up.weight"], state_of(make_module())["up.weight"])
    assert sum(logged(seen, "up")) < sum(logged(plain, "up"))
    for visit, alike in zip(seen.visits, plain.visits, strict=True):
        assert_same(visit.broadcast, alike.broadcast)
        assert_same(visit.update, alike.update)


def test_what_a_module_writes_into_travels(fit):
    """Up in every round; down from round 1, once the value has changed."""
    recorder, _ = fit(module := Following(), clients_per_round=4)
    adapters, written = bytes_of(module, *ADAPTERS), bytes_of(module, "base.0.weight")
    assert logged(recorder, "up") == [4 * (adapters + written)] * 3
    assert logged(recorder, "down") == [4 * adapters, *[4 * (adapters + written)] * 2]


def simulated_bytes(recorder, adapters, base, trains):
    """Expected bytes down: tracks each client's version of the base."""
    version, held, down = 0, {}, []
    rounds = max(visit.round for visit in recorder.visits) + 1
    for number in range(rounds):
        total = 0
        for visit in recorder.round(number):
            needs = trains(number) or held.get(visit.client, 0) != version
            held[visit.client] = version
            total += adapters + (base if needs else 0)
        version += trains(number)
        down.append(total)
    return down


def test_entries_that_train_for_some_rounds(fit):
    """A client absent at the end of training receives the entries once."""
    recorder, _ = fit(module := Switched(), rounds=9, clients_per_round=2, seed=3)
    adapters, base = bytes_of(module, *ADAPTERS), bytes_of(module, "base.0.")
    assert logged(recorder, "up") == [2 * (adapters + (base if number in (2, 3) else 0)) for number in range(9)]
    expected = simulated_bytes(recorder, adapters, base, lambda number: number in (2, 3))
    assert logged(recorder, "down") == expected == recorder.down_bytes
    assert len({*expected[4:]}) > 1, "some clients have them in a round, and some do not"


@pytest.mark.parametrize(
    ("make_module", "stop"), [slow((Switched, 1)), (Switched, 3), slow((Switched, 5)), slow((Following, 2))]
)
def test_resuming(make_module, stop, fit, tmp_path):
    options = {"clients_per_round": 2, "seed": 3, "method": "fedadam"}
    whole, _ = fit(expected := make_module(models.adam), rounds=9, **options)
    _, trainer = fit(make_module(models.adam), rounds=stop, **options)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    torch.load(tmp_path / "last.ckpt", weights_only=True)
    rest, _ = fit(module := make_module(models.adam), rounds=9, ckpt_path=tmp_path / "last.ckpt", **options)
    assert_same(state_of(module), state_of(expected))
    assert rest.logged == whole.logged[stop:]


def test_going_on_in_the_same_trainer(fit):
    """With a higher `max_epochs` clients still hold the earlier entries."""
    whole, _ = fit(expected := Switched(), rounds=9, clients_per_round=2, seed=3)
    recorder, trainer = fit(module := Switched(), rounds=5, clients_per_round=2, seed=3)
    trainer.fit_loop.max_epochs = 9
    trainer.fit(module, DATA)
    assert_same(state_of(module), state_of(expected))
    assert logged(recorder, "down") == logged(whole, "down")


def test_another_fit_begins_with_its_own_model(fit):
    """All clients hold the model at the start of the fit."""
    federation = Federation(clients_per_round=2, seed=3)
    first, _ = fit(module := Switched(), rounds=5, federation=federation)
    second, _ = fit(module, rounds=2, federation=federation)
    assert logged(second, "down") == [2 * bytes_of(module, *ADAPTERS)] * 2
    assert logged(first, "down")[4] > logged(second, "down")[0]


class WithBackbone(models.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 3), models.momentum)
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.ReLU())

    def forward(self, inputs):
        return self.net(self.backbone(inputs))

    def configure_optimizers(self):
        return self.make_optimizer(filter(lambda parameter: parameter.requires_grad, self.parameters()))


def test_backbone_finetuning(fit):
    """Lightning's callback unfreezes the backbone at the start of round 2."""
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)
    recorder, _ = fit(module := WithBackbone(), rounds=4, callbacks=[finetuning])
    head, whole = (len(SIZES) * bytes_of(module, name) for name in ("net.", ""))
    assert logged(recorder, "up") == logged(recorder, "down") == [head, head, whole, whole]
    assert not torch.equal(module.backbone[0].weight, WithBackbone().backbone[0].weight)


class Writes(L.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            with torch.no_grad():
                module.base[0].bias.add_(1)


def test_what_the_server_writes_is_sent_once(fit):
    recorder, _ = fit(module := Adapted(), rounds=3, callbacks=[Writes()])
    adapters, written = 4 * bytes_of(module, *ADAPTERS), 4 * bytes_of(module, "base.0.bias")
    assert logged(recorder, "down") == [adapters, adapters + written, adapters]
    assert logged(recorder, "up") == [adapters] * 3


def test_a_client_that_fails_has_not_got_it(fit):
    class Breaks(Switched):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 4 and len(batch[0]) == 16:
                raise ValueError("no")
            return super().training_step(batch, batch_idx)

    data = models.as_datasets(models.vectors({"a": 24, "b": 16}))
    recorder, _ = fit(module := Breaks(), rounds=6, data=data)
    adapters, base = bytes_of(module, *ADAPTERS), bytes_of(module, "base.0.")
    assert logged(recorder, "down")[4:] == [2 * (adapters + base), 2 * adapters + base]


@pytest.mark.parametrize("outside", [[], [SecureSum()]], ids=["central", "secure"])
def test_differential_privacy_adds_no_noise_to_what_does_not_train(outside, fit):
    """Values written into such entries by the module do not leave the client either."""
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    privacy = CentralDP(clip=0.5, delta=1e-3, noise_multiplier=1.0, sampling="fixed")
    module = Following()
    recorder, trainer = fit(module, steps=[privacy, *outside], clients_per_round=3, batch_norm="frozen")
    report = find_federation(trainer).server.report
    assert (len(report.received), report.failed) == (3, {})
    clip, ring = 8, 12 if outside else 0  # a count of int32 and a scale of float64
    assert recorder.up_bytes == [3 * bytes_of(module, *ADAPTERS)] * 3
    assert recorder.down_bytes == [3 * (bytes_of(module, *ADAPTERS) + clip + ring)] * 3
    start = state_of(Following())
    for name, value in state_of(module).items():
        assert torch.equal(value, start[name]) == name.startswith("base."), name


class OneClient(FedAvg):
    def start(self, info, state):
        super().start(info, state)
        self.chosen = None

    def receive(self, update):
        self.chosen = self.chosen or update.state

    def aggregate(self):
        return self.chosen


class WritesIntoTheAggregate(FederatedCallback):
    def on_server_aggregate(self, trainer, module, state):
        state["base.0.bias"].add_(1)


def test_a_callback_may_write_into_an_aggregate_that_is_one_clients_update(fit):
    """Writes go to copies: the server compares later messages with the unchanged tensors."""
    recorder, _ = fit(module := Adapted(), method=OneClient(), callbacks=[WritesIntoTheAggregate()])
    adapters, written = 4 * bytes_of(module, *ADAPTERS), 4 * bytes_of(module, "base.0.bias")
    assert logged(recorder, "down") == [adapters, adapters + written, adapters + written]
    assert torch.equal(state_of(module)["base.0.bias"], state_of(Adapted())["base.0.bias"] + 1 + 1 + 1)


class SumsInPlace(OneClient):
    def receive(self, update):
        super().receive(update)
        for name, value in update.state.items():
            if value.is_floating_point() and self.chosen is not update.state:
                self.chosen[name].add_(value)


def test_a_rule_that_writes_into_what_messages_share_is_refused(fit):
    """Every later client in the round would receive other weights."""
    with pytest.raises(
        MisconfigurationException,
        match=r"stay unchanged, but SumsInPlace or a callback has written into 'base.0.weight'",
    ):
        fit(Adapted(), method=SumsInPlace())


def test_double_precision_does_not_drift(fit):
    """A weighted mean of equal numbers can differ in the last bit and would be sent again."""
    module = Adapted().double()
    module.base[0].weight.data /= 3  # to use all bits
    start = state_of(module)
    data = models.as_datasets({name: (x.double(), y) for name, (x, y) in models.vectors({"a": 23, "b": 26}).items()})
    recorder, _ = fit(module, rounds=4, data=data)
    assert_same(state_of(module), start, [name for name in start if name.startswith("base.")])
    assert logged(recorder, "down") == [2 * bytes_of(module, *ADAPTERS)] * 4


def test_recalibration_sends_adapters_too(fit):
    """The base is not sent again; BatchNorm in training mode is measured and sent."""

    class Normed(Adapted):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    recorder, _ = fit(module := Normed(), rounds=2, batch_norm="recalibrate")
    shared, measured = 4 * bytes_of(module, *ADAPTERS), 4 * 4 * (6 + 6) + 4 * 8
    assert logged(recorder, "down") == [2 * shared] * 2
    assert logged(recorder, "up") == [shared + measured] * 2


class WithThreshold(models.Module):
    """A threshold set in validation, and a mask with infinities."""

    def __init__(self):
        super().__init__(models.mlp(), models.momentum)
        self.register_buffer("threshold", torch.tensor(torch.nan))
        self.register_buffer("mask", torch.zeros(6).fill_(-torch.inf))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.threshold.item())
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.threshold.fill_(self.current_epoch + 0.5)


@pytest.mark.parametrize("either_trainer", quick(["trainer", "callback"], ["callback"]), indirect=True)
def test_buffers_that_are_not_finite_stay(either_trainer, caplog):
    """The server keeps the values from validation; everything else equals a fit without these buffers."""
    data = FederatedDataModule(DATA, val=DATA["a"], batch_size=8)
    plain, module, recorder = models.Module(models.mlp(), models.momentum), WithThreshold(), Recorder()
    either_trainer(max_rounds=3).fit(plain, datamodule=data)
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer = either_trainer(max_rounds=3, callbacks=[recorder])
        trainer.fit(module, datamodule=data)
    assert "2 buffers with NaN or infinite initial values are not sent ('mask', 'threshold')" in caplog.text
    assert "write into" not in caplog.text
    assert_same(state_of(plain), state_of(module), state_of(plain))
    assert {name for visit in recorder.visits for name in visit.update} == set(state_of(plain))
    assert torch.equal(module.mask, torch.full((6,), -torch.inf))
    assert module.threshold == 2.5
    per_round = len(module.seen) // 3
    assert all(math.isnan(value) for value in module.seen[:per_round])
    assert module.seen[per_round:] == [0.5] * per_round + [1.5] * per_round


class FillsThreshold(WithThreshold):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.threshold.fill_(batch[0].sum())
        return loss


def test_buffers_that_were_not_finite_stay_in_a_resumed_fit(fit, tmp_path):
    """Validation has set the values before the resume."""
    data = FederatedDataModule(DATA, val=DATA["a"], batch_size=8)
    whole, _ = fit(expected := FillsThreshold(), rounds=4, data=data)
    _, trainer = fit(FillsThreshold(), rounds=2, data=data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    rest, _ = fit(module := FillsThreshold(), rounds=4, data=data, ckpt_path=tmp_path / "last.ckpt")
    assert_same(state_of(module), state_of(expected), state_of(expected).keys() - {"mask"})
    assert logged(rest, "up") == logged(whole, "up")[2:]
    assert module.seen == expected.seen[len(expected.seen) // 2 :]
    trainer.fit_loop.max_epochs = 4
    trainer.fit(trainer.lightning_module, datamodule=data)
    assert_same(state_of(trainer.lightning_module), state_of(expected), state_of(expected).keys() - {"mask"})
    assert trainer.callback_metrics["comm/up_bytes"] == logged(whole, "up")[-1]


@pytest.mark.parametrize("option", [{}, {"frozen": ["threshold"]}, {"personal": ["threshold"]}], ids=str)
def test_what_visits_write_into_a_buffer_that_does_not_travel_is_said(option, fit, caplog):
    """Unless an option declares the intention."""
    with caplog.at_level(logging.WARNING, "lightning_fed"):
        fit(FillsThreshold(), **option)
    said = [text for text in caplog.messages if "Visits write into 1 buffers" in text]
    assert len(said) == (not option)
    assert all("('threshold')" in text and "values are lost" in text for text in said)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True)], ids=str)
def test_faulty_statistics_are_no_constants(layer, fit):
    layer.running_mean.fill_(torch.nan)
    module = models.Module(nn.Sequential(layer, nn.Linear(6, 3)), models.momentum)
    with pytest.raises(MisconfigurationException, match=r"no client can train: entry 'net.0.running_mean' has NaN"):
        fit(module)
