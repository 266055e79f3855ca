"""DP-SGD: visits and fits against a plain implementation, accounts, exhausted budgets, resume, an audit, refusals."""

import copy
import logging
import math
import sys
from itertools import product

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_fed import FederatedCallback, FederatedDataModule, Vectorized
from lightning_fed.algorithms import FedAvgM
from lightning_fed.callbacks import ClassPrototypes
from lightning_fed.data import IID
from lightning_fed.modules import to_group_norm
from lightning_fed.privacy import DPSGD, Budget, CentralDP, calibrate, empirical_epsilon
from lightning_fed.privacy.gradients import _opacus
from lightning_fed.tasks import SegmentationTask
from tests import models
from tests.breadth import quick, slow
from tests.privacy.test_accounting import VECTORS
from tests.recorders import Recorder, assert_same, loading, state_of
from tests.references_privacy import dpsgd_gradient_reference, poisson_reference

pytest.importorskip("opacus", reason="opacus is not installed")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]
KEY = 0x0123456789ABCDEF0123456789ABCDEF
SIZES = {"a": 20, "b": 33, "c": 5}
BATCH = 6


class Notes(Recorder):
    keeps_privacy = True


def dpsgd(clip=0.5, z=0.8, delta=1e-3, **options):
    return DPSGD(clip, z, delta, key_for_tests=KEY, **options)


def clients_of(kind="datasets", sizes=SIZES):
    datasets = models.as_datasets(models.vectors(sizes))
    if kind == "datasets":
        return FederatedDataModule(datasets, batch_size=BATCH)
    return {name: DataLoader(dataset, BATCH, shuffle=True) for name, dataset in datasets.items()}


def federated(trainer, callback, rounds=2, method="fedavg", data="datasets", module=None, callbacks=(), **options):
    recorder = Notes()
    module = models.Module(models.mlp(), models.momentum) if module is None else module
    fitted = trainer(
        method=method, max_rounds=rounds, seed=1, callbacks=[callback, *callbacks, recorder], **options
    )  # fmt: skip
    data = clients_of(data) if isinstance(data, str) else data
    fitted.fit(module, data)
    return recorder, module, fitted


def plain(trainer, callback, epochs=2, module=None, size=30, **options):
    module = models.Module(models.mlp(), models.momentum) if module is None else module
    data = models.PooledData(models.vectors({"a": size}), batch_size=BATCH)
    fitted = trainer(max_epochs=epochs, callbacks=[callback], **options)
    fitted.fit(module, datamodule=data)
    return module, fitted


def step_reference(module, optimizer, tensors, clip, z, client, round, number, pull=None):
    """One step in plain PyTorch: a loop over the sampled examples, with clip and noise in NumPy."""
    count = len(tensors[0])
    rows = poisson_reference(KEY, client, round, number, count, BATCH)
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    gradients = []
    for row in rows:
        module.zero_grad()
        F.cross_entropy(module(tensors[0][row : row + 1]), tensors[1][row : row + 1]).backward()
        gradients.append({name: value.grad.numpy().copy() for name, value in module.named_parameters()})
    expected = min(BATCH, count)
    total = dpsgd_gradient_reference(gradients, clip, z, expected, KEY, client, round, number, shapes)
    for name, value in module.named_parameters():
        value.grad = torch.from_numpy(np.asarray(total[name])).reshape(value.shape)
        if pull is not None:
            value.grad += pull[0] * (value.detach() - pull[1][name])
    optimizer.step()
    return len(rows)


# --- Plain implementation ---------------------------------------------------------------------------------------------


PRIVATE, PLAIN = (0.5, 0.8), (math.inf, 0.0)


@pytest.mark.parametrize(
    ("clip", "z", "data", "mu"),
    quick(
        [(*noise, data, mu) for noise in (PRIVATE, PLAIN) for data in ("datasets", "loaders") for mu in (0.0, 0.3)],
        [(*PRIVATE, "datasets", 0.3), (*PLAIN, "loaders", 0.3)],
    ),
)
def test_visits_against_a_plain_implementation(clip, z, data, mu, federated_trainer):
    """Without noise and clip: plain training on Poisson batches. FedProx adds its term after the noise."""
    method = f"fedprox:mu={mu}" if mu else "fedavg"
    module = models.Module(models.mlp(), models.momentum)
    recorder, _, _ = federated(federated_trainer, dpsgd(clip, z), 2, method, data, module, precision="64-true")
    assert {(visit.client, visit.round) for visit in recorder.visits} == {(name, r) for name in SIZES for r in range(2)}
    tensors, counts = models.vectors(SIZES), set()
    for visit in recorder.visits:
        net = models.mlp().double()
        net.load_state_dict({name.removeprefix("net."): value for name, value in visit.start.items()})
        inputs, targets = tensors[visit.client]
        optimizer = models.momentum(net.parameters())
        start = {name: value.detach().clone() for name, value in net.named_parameters()}
        steps = len(visit.batches)
        assert steps == len(range(0, len(inputs) - (len(inputs) % BATCH == 1), BATCH))
        for number in range(steps):
            counts.add(
                step_reference(
                    net, optimizer, (inputs.double(), targets), clip, z, visit.client, visit.round, number, (mu, start)
                )
            )
        for name, value in net.named_parameters():
            torch.testing.assert_close(visit.end[f"net.{name}"], value.detach(), rtol=1e-9, atol=1e-12)
    assert len(counts) > 5


@pytest.mark.parametrize(("clip", "z"), [(0.5, 0.8), (math.inf, 0.0)])
def test_a_plain_trainer_against_a_plain_implementation(clip, z, plain_trainer):
    module = models.Module(models.mlp(), models.momentum)
    reference = copy.deepcopy(module.net).double()
    plain(plain_trainer, dpsgd(clip, z), 3, module, precision="64-true")
    inputs, targets = models.vectors({"a": 30})["a"]
    optimizer = models.momentum(reference.parameters())
    for number in range(3 * 5):
        step_reference(reference, optimizer, (inputs.double(), targets), clip, z, None, 0, number)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(module.net.get_parameter(name).detach(), value.detach(), rtol=1e-9, atol=1e-12)


def test_a_batch_of_nobody_is_a_step_of_noise(federated_trainer):
    """With a low sampling rate most batches are empty, and the optimizer still steps."""
    clients = FederatedDataModule({"a": TensorDataset(torch.ones(40, 6), torch.zeros(40).long())}, batch_size=1)
    module = models.Module(models.mlp())
    recorder, _, trainer = federated(federated_trainer, dpsgd(1e-4, 0.5), 1, data=clients, module=module)
    (visit,) = recorder.visits
    drawn = [len(poisson_reference(KEY, "a", 0, number, 40, 1)) for number in range(40)]
    assert drawn.count(0) > 5
    assert [len(batch[0]) for batch in visit.batches] == [max(count, 1) for count in drawn]
    assert trainer.global_step == 40
    moved = torch.cat([(visit.end[name] - value).flatten() for name, value in visit.start.items()])
    assert 0 < moved.abs().max() < 1e-3  # noise at the scale of the clip, and no unclipped gradient


def test_the_noise_of_a_step():
    """Standard deviation and kurtosis for steps without a gradient; independent steps."""
    callback = dpsgd(0.7, 1.3)
    draws = []
    for number in range(400):
        callback._key = KEY  # noqa: SLF001
        visit = type("Visit", (), {"client": "a", "round": 3, "number": number, "trained": {"": torch.zeros(20)}})
        draws.append(callback._noise(visit).draw(torch.Size([20])).numpy())  # noqa: SLF001
    draws = np.array(draws, dtype=np.float64)
    assert np.abs(draws.mean(0)).max() < 5 / math.sqrt(400)
    assert np.abs(draws.std(0) - 1).max() < 5 / math.sqrt(800)
    assert np.abs((draws[1:] * draws[:-1]).mean(0)).max() < 5 / math.sqrt(400)
    assert abs(((draws / draws.std()) ** 4).mean() - 3) < 5 * math.sqrt(24 / draws.size)


def test_every_fit_has_a_key_of_its_own_and_leaves_nothing_in_the_module(federated_trainer, plain_trainer):
    states = []
    for _ in range(2):
        module = models.Module(models.mlp())
        known = {name: set(vars(layer)) for name, layer in module.named_modules()}
        secret = DPSGD(0.5, 0.8, 1e-3)
        federated(federated_trainer, secret, 1, module=module)
        states.append(state_of(module))
        assert int(secret.state_dict()["key"], 16) > 2**100
        added = {name: set(vars(layer)) - known[name] for name, layer in module.named_modules()}
        assert {name for names in added.values() for name in names} <= {"_hparams"}
        assert not [key for value in module.parameters() for key in vars(value)]
    assert all(not torch.equal(value, states[1][name]) for name, value in states[0].items())
    module, trainer = plain(plain_trainer, DPSGD(0.5, 0.8, 1e-3))
    assert "train_dataloader" not in vars(trainer.datamodule)
    assert not [key for value in module.parameters() for key in vars(value)]


# --- Accounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "accountant"),
    quick(
        product(VECTORS, ["rdp", "pld"]), [*product(list(VECTORS)[1:2], ["rdp"]), *product(list(VECTORS)[:1], ["pld"])]
    ),
)
def test_the_numbers_of_the_spec(setting, accountant):
    batch, examples, steps, delta = setting
    for z, expected in VECTORS[setting].items():
        callback = DPSGD(1.0, z, delta, accountant=accountant)
        accounts = {"a": [examples, batch, steps, steps], "b": [2 * examples, batch, steps // 2, 1]}
        callback.load_state_dict({"key": "", "noise_multiplier": z, "accounts": accounts})
        assert callback.epsilon("a") == pytest.approx(expected[accountant == "pld"], abs=1e-3)
        assert callback.epsilon() == callback.epsilon("a") > callback.epsilon("b")
        assert callback.epsilon("c") == 0


def test_every_client_has_its_own_account(federated_trainer):
    """From the numbers of examples and steps, over the rounds with this client."""
    callback = dpsgd()
    recorder, _, trainer = federated(federated_trainer, callback, 5, clients_per_round=2)
    epsilons = {}
    for name, size in SIZES.items():
        steps = sum(len(visit.batches) for visit in recorder.visits if visit.client == name)
        epsilons[name] = Budget(0.8, 1e-3, size, min(BATCH, size)).epsilon(steps)
        assert callback.epsilon(name) == pytest.approx(epsilons[name])
    assert len(set(epsilons.values())) == 3
    assert trainer.callback_metrics["dp/epsilon"] == pytest.approx(max(epsilons.values()))
    assert trainer.callback_metrics["dp/delta"] == pytest.approx(1e-3)
    logged = [metrics["dp/epsilon"] for metrics in recorder.logged]
    assert logged == sorted(logged)


def test_a_failed_visit_is_paid_for(federated_trainer):
    """For a non-finite update, and for data that raise after two batches."""

    class Breaks(torch.utils.data.Dataset):
        def __len__(self):
            return 30

        def __getitem__(self, index):
            self.served = getattr(self, "served", 0) + 1
            if self.served > 20:
                raise RuntimeError("the disk is gone")
            return torch.randn(6), 1

    class SendsNaN(FederatedCallback):
        changes_update = True

        keeps_privacy = True

        def on_client_end(self, trainer, module, client, update):
            if client == "b":
                update.state["net.0.bias"].fill_(math.nan)

    callback = dpsgd()
    clients = {**models.as_datasets(models.vectors(SIZES)), "d": Breaks()}
    data = FederatedDataModule(clients, batch_size=BATCH)
    recorder, _, _ = federated(federated_trainer, callback, 1, data=data, callbacks=[SendsNaN()])
    steps = {visit.client: len(visit.batches) for visit in recorder.visits}
    assert 0 < steps["d"] < 5
    accounts = callback.state_dict()["accounts"]
    assert {client: account[2] for client, account in accounts.items()} == steps
    assert accounts["b"][2] == 6


def test_the_fit_ends_within_the_budget(federated_trainer, caplog):
    """After the last round in which every client, if sampled next, stays within the budget."""
    caplog.set_level(logging.WARNING, "lightning_fed")
    most = Budget(0.8, 1e-3, 5, 5).epsilon(3) * 1.0001  # for the smallest client, with one step per visit
    callback = dpsgd(max_epsilon=most)
    _, _, trainer = federated(federated_trainer, callback, 9)
    assert callback.state_dict()["accounts"]["c"][2] == 3
    assert trainer.callback_metrics["dp/epsilon"] <= most
    assert trainer.current_epoch == 3
    assert "The fit ends after 3 epochs" in caplog.text


@pytest.mark.parametrize(
    ("kind", "epochs", "options"),
    [
        ("federated", 2, {}),
        slow(("plain", 2, {})),
        slow(("plain", 2, {"max_steps": 7})),
        slow(("plain", -1, {"max_steps": 7})),
    ],
)
def test_a_fit_that_ends_as_planned_is_no_warning(kind, epochs, options, federated_trainer, plain_trainer, caplog):
    """The noise is calibrated for these epochs or steps, so Lightning ends the fit."""
    caplog.set_level(logging.WARNING, "lightning_fed")
    callback = dpsgd(z=None, epsilon=3.0)
    if kind == "federated":
        options = {**options, "data": clients_of(sizes={"a": 20})}
    fit = (federated, federated_trainer) if kind == "federated" else (plain, plain_trainer)
    trainer = fit[0](fit[1], callback, epochs, **options)[-1]
    assert trainer.global_step == options.get("max_steps", trainer.global_step)
    assert callback.epsilon() == pytest.approx(3.0, rel=0.01)
    assert "The fit ends" not in caplog.text


def test_a_client_whose_first_visit_would_exceed_the_budget_is_left_out(federated_trainer, caplog):
    most = Budget(0.8, 1e-3, 5, 5).epsilon(1) * 0.999
    callback = dpsgd(max_epsilon=most)
    recorder, _, trainer = federated(federated_trainer, callback, 1, local_steps=1)
    assert {visit.client for visit in recorder.visits} == {"a", "b"}
    assert trainer.callback_metrics["fed/failed"] == 1
    assert "the client's visit of 1 steps would raise epsilon from 0 to" in caplog.text


@pytest.mark.parametrize(("epochs", "accountant"), quick(product([9, 3], ["rdp", "pld"]), [(9, "rdp"), (3, "rdp")]))
def test_a_plain_fit_ends_at_the_step(plain_trainer, accountant, epochs, caplog):
    caplog.set_level(logging.WARNING, "lightning_fed")
    budget = Budget(1.5, 1e-3, 30, BATCH, accountant=accountant)
    callback = dpsgd(0.5, 1.5, max_epsilon=budget.epsilon(13) * 1.0001, accountant=accountant)
    module, trainer = plain(plain_trainer, callback, epochs)
    assert trainer.global_step == 13
    assert "The fit ends after 2 epochs and 13 steps" in caplog.text
    assert callback.epsilon() == pytest.approx(budget.epsilon(13))
    before = state_of(module)
    trainer.fit_loop.max_epochs = 12
    trainer.fit(module, datamodule=trainer.datamodule)
    assert trainer.global_step == 13
    assert_same(before, state_of(module))


def test_a_delta_that_says_little(plain_trainer, caplog):
    plain(plain_trainer, dpsgd(delta=0.1), 1)
    assert "delta=0.1 is not below one over the number of examples (30)" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps"),
    [({"local_epochs": 2}, {"a": 8, "b": 12, "c": 2}), slow(({"local_steps": 5}, 5))],
)
def test_the_noise_of_an_epsilon_is_that_of_the_client_who_needs_most(options, steps, federated_trainer):
    callback = DPSGD(0.5, None, 1e-3, epsilon=6.0, key_for_tests=KEY)
    federated(federated_trainer, callback, 3, **options)
    steps = steps if isinstance(steps, dict) else dict.fromkeys(SIZES, steps)
    expected = max(
        calibrate(6.0, 1e-3, size, min(BATCH, size), 3 * steps[name]).noise_multiplier for name, size in SIZES.items()
    )
    assert callback.noise_multiplier == pytest.approx(expected, rel=1e-3)
    assert {name: account[2] for name, account in callback.state_dict()["accounts"].items()} == {
        name: 3 * count for name, count in steps.items()
    }
    assert 0.99 * 6 < callback.epsilon() <= 6


@pytest.mark.parametrize(("options", "steps"), [slow(({}, 10)), ({"max_steps": 7}, 7)])
def test_the_noise_of_an_epsilon_of_a_plain_fit(options, steps, plain_trainer):
    callback = DPSGD(0.5, None, 1e-3, epsilon=3.0, key_for_tests=KEY)
    module, trainer = plain(plain_trainer, callback, 2, **options)
    assert trainer.global_step == steps
    assert callback.noise_multiplier == calibrate(3.0, 1e-3, 30, BATCH, steps).noise_multiplier
    same, _ = plain(plain_trainer, dpsgd(z=callback.noise_multiplier), 2, **options)
    assert_same(state_of(same), state_of(module))
    assert 0.99 * 3 < callback.epsilon() <= 3


def test_a_fit_with_more_rounds_has_the_noise_that_it_began_with(federated_trainer, tmp_path):
    path, callbacks = tmp_path / "last.ckpt", [DPSGD(0.5, None, 1e-3, epsilon=6.0) for _ in range(2)]
    clients = clients_of(sizes={"a": 20})
    _, _, trainer = federated(federated_trainer, callbacks[0], 2, data=clients)
    trainer.save_checkpoint(path)
    again = federated_trainer(max_rounds=4, seed=1, callbacks=[callbacks[1]])
    again.fit(models.Module(models.mlp(), models.momentum), clients, ckpt_path=path, **loading(weights_only=True))
    assert again.current_epoch == 2
    assert callbacks[1].noise_multiplier == callbacks[0].noise_multiplier
    assert callbacks[1].epsilon() == callbacks[0].epsilon() <= 6


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")  # Lightning's warning
@pytest.mark.parametrize(
    ("first", "second"),
    [([(0.5, 1.0, 1e-3)], []), ([], [(0.5, 1.0, 1e-3)]), ([(0.5, 1.0, 1e-3)], [(50.0, 1.0, 1e-3)])],
)
def test_a_fit_does_not_resume_with_other_privacy(first, second, federated_trainer, tmp_path):
    """Otherwise the model would move without noise, and the log would repeat an old epsilon."""
    path, module, data = tmp_path / "last.ckpt", models.Module(models.mlp()), clients_of()
    trainer = federated_trainer(max_rounds=1, callbacks=[DPSGD(*options) for options in first])
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    again = federated_trainer(max_rounds=2, callbacks=[DPSGD(*options) for options in second])
    with pytest.raises(ValueError, match=r"Expected the update steps of the checkpoint, .*, but got"):
        again.fit(module, data, ckpt_path=path, **loading(weights_only=True))


def test_the_noise_of_an_epsilon_needs_a_number_of_epochs(federated_trainer, plain_trainer):
    callback = DPSGD(0.5, None, 1e-3, epsilon=6.0)
    with pytest.raises(ValueError, match=r"a number of epochs .* to compute the noise for an epsilon, but got"):
        federated(federated_trainer, callback, -1)
    with pytest.raises(ValueError, match=r"a number of epochs .* to compute the noise for an epsilon, but got None"):
        plain(plain_trainer, callback, -1)


# --- Resume -----------------------------------------------------------------------------------------------------------


def test_a_resumed_federation_has_the_same_noise_and_pays_once(federated_trainer, tmp_path):
    path = tmp_path / "two.ckpt"

    class Saves(FederatedCallback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    first = DPSGD(0.5, 0.8, 1e-3)
    _, module, trainer = federated(federated_trainer, first, 4, FedAvgM(), clients_per_round=2, callbacks=[Saves()])
    again, resumed = DPSGD(0.5, 0.8, 1e-3), models.Module(models.mlp(), models.momentum)
    second = federated_trainer(method=FedAvgM(), max_rounds=4, seed=1, clients_per_round=2, callbacks=[again])
    second.fit(resumed, clients_of(), ckpt_path=path, **loading(weights_only=True))
    assert_same(state_of(module), state_of(resumed))
    assert first.state_dict() == again.state_dict()
    assert trainer.callback_metrics["dp/epsilon"] == second.callback_metrics["dp/epsilon"]
    other = federated_trainer(method=FedAvgM(), max_rounds=4, seed=1, clients_per_round=2, callbacks=[dpsgd(z=1.0)])
    with pytest.raises(ValueError, match=r"Expected noise_multiplier=0.8, as before the checkpoint, but got 1.0"):
        other.fit(resumed, clients_of(), ckpt_path=path, **loading(weights_only=True))


def test_a_round_that_breaks_off_is_done_again_with_the_same_noise(federated_trainer, tmp_path):
    path = tmp_path / "before.ckpt"

    class Breaks(FederatedCallback):
        keeps_privacy = True

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 4:
                trainer.save_checkpoint(path)  # during a visit, in the state at the start of the round
                raise KeyboardInterrupt

    whole = DPSGD(0.5, 0.8, 1e-3, key_for_tests=KEY)
    _, module, _ = federated(federated_trainer, whole, 2)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        federated(federated_trainer, DPSGD(0.5, 0.8, 1e-3, key_for_tests=KEY), 2, callbacks=[Breaks()])
    again, resumed = DPSGD(0.5, 0.8, 1e-3), models.Module(models.mlp(), models.momentum)
    federated_trainer(max_rounds=2, seed=1, callbacks=[again]).fit(
        resumed, clients_of(), ckpt_path=path, **loading(weights_only=True)
    )
    assert_same(state_of(module), state_of(resumed))
    assert whole.state_dict() == again.state_dict()


@pytest.mark.parametrize("step", [5, 7])
def test_a_resumed_plain_fit_has_the_same_noise(plain_trainer, tmp_path, step):
    """Also from the middle of an epoch."""
    path = tmp_path / "some.ckpt"

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == step:
                trainer.save_checkpoint(path)

    first = DPSGD(0.5, 0.8, 1e-3)
    data = models.PooledData(models.vectors({"a": 30}), batch_size=BATCH)
    modules = [models.Module(models.mlp(), models.momentum) for _ in range(2)]
    plain_trainer(max_epochs=3, callbacks=[first, Saves()]).fit(modules[0], datamodule=data)
    again = DPSGD(0.5, 0.8, 1e-3)
    second = plain_trainer(max_epochs=3, callbacks=[again])
    second.fit(modules[1], datamodule=data, ckpt_path=path, **loading(weights_only=True))
    assert_same(state_of(modules[0]), state_of(modules[1]))
    assert first.state_dict() == again.state_dict()
    assert again.epsilon() == pytest.approx(Budget(0.8, 1e-3, 30, BATCH).epsilon(15))
    fewer = models.PooledData(models.vectors({"a": 29}), batch_size=BATCH)
    with pytest.raises(ValueError, match="Expected 30 examples in batches of 6, as in earlier steps"):
        plain_trainer(max_epochs=9, callbacks=[DPSGD(0.5, 0.8, 1e-3)]).fit(
            modules[1], datamodule=fewer, ckpt_path=path, **loading(weights_only=True)
        )


# --- Audit ------------------------------------------------------------------------------------------------------------


class Canaries(L.LightningModule):
    """The gradient of each example is a separate direction with the length of the clip."""

    def __init__(self, count):
        super().__init__()
        self.layer = nn.Linear(count, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("share", [slow(0.0), 0.2, 1.0])
def test_an_audit_with_canaries(share, plain_trainer, monkeypatch):
    """A coin decides about the presence of every example. Less noise than claimed is detected."""
    count, z, delta, steps = 1000, 4.0, 1e-5, 4
    coins = np.random.default_rng(0).random(count) < 0.5
    there = torch.eye(count)[torch.from_numpy(coins)]
    made = DPSGD._noise  # noqa: SLF001

    class Less:
        def __init__(self, generator):
            self.generator = generator

        def draw(self, shape):
            return share * self.generator.draw(shape)

    if share < 1:
        monkeypatch.setattr(DPSGD, "_noise", lambda callback, visit: Less(made(callback, visit)))
    module, callback = Canaries(count), DPSGD(1.0, z, delta, key_for_tests=KEY)
    trainer = plain_trainer(max_epochs=steps, callbacks=[callback])
    trainer.fit(module, datamodule=models.PooledData({"a": (there,)}, batch_size=len(there)))
    assert trainer.global_step == steps
    scores = -module.layer.weight[0].detach().numpy()
    order = np.argsort(-scores)
    correct = int(coins[order[:100]].sum() + (~coins[order[-100:]]).sum())
    found = empirical_epsilon(count, 200, correct, delta)
    assert callback.epsilon() < 3.5
    assert (found > callback.epsilon()) == (share < 1)


# --- Segmentation, precision, several processes -----------------------------------------------------------------------


def shapes_of(ignored):
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(3, (8, 32, 32), generator=generator)
    if ignored:
        for row in range(8):
            masks[row, : 3 * row] = 255
    return TensorDataset(torch.randn(8, 3, 32, 32, generator=generator), masks)


def tiny_segmenter():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(True), nn.Conv2d(64, 3, 3, padding=1)
    )


def segmentation(federated_trainer, ignored, loss="ce", model=None, **options):
    torch.manual_seed(0)
    task = SegmentationTask(model or tiny_segmenter(), 3, norm="group", loss=loss, **options)
    data = FederatedDataModule({name: shapes_of(ignored) for name in "ab"}, batch_size=4)
    return federated(federated_trainer, dpsgd(1.0, 0.5), 1, data=data, module=task)


@pytest.mark.parametrize(
    ("ignored", "loss", "model"),
    quick(
        [(False, "ce", None), (True, "ce", "DeepLabV3Plus"), (True, "ce+dice", None)],
        [(False, "ce", None), (True, "ce+dice", None)],
    ),
)
def test_an_example_is_an_image(ignored, loss, model, federated_trainer):
    recorder, _, trainer = segmentation(federated_trainer, ignored, loss, model, per_image=ignored)
    assert trainer.callback_metrics["dp/epsilon"] == pytest.approx(Budget(0.5, 1e-3, 8, 4).epsilon(2))
    for visit in recorder.visits:
        moved = torch.cat([(visit.end[name] - value).flatten().float() for name, value in visit.start.items()])
        # Two steps with rate 0.01: bounded by the noise of all parameters plus clipped gradients of at most 8 images.
        noise = math.sqrt(2 * len(moved)) * 0.5 / 4
        assert 0.01 * (noise * 0.9 - 4) < moved.norm() < 0.01 * (noise * 1.1 + 4)


def test_ignored_pixels_mix_images(federated_trainer):
    with pytest.raises(MisconfigurationException, match=r"SegmentationTask\(per_image=True\)"):
        segmentation(federated_trainer, ignored=True)


def test_ignored_pixels_of_a_later_image_mix_them_too(plain_trainer):
    """The first two images in the batch have no ignored pixels."""

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            images, masks = shapes_of(ignored=False).tensors
            masks[2:, :20] = 255
            return DataLoader(TensorDataset(images, masks), 8)

    task = SegmentationTask(tiny_segmenter(), 3, norm="group")
    with pytest.raises(MisconfigurationException, match=r"SegmentationTask\(per_image=True\)"):
        plain_trainer(max_epochs=1, callbacks=[dpsgd()]).fit(task, datamodule=Data())


def test_the_loss_image_by_image():
    masks = shapes_of(ignored=True).tensors[1]
    together, apart = (SegmentationTask("Unet", 3, loss="ce+dice", per_image=value) for value in (False, True))
    logits = torch.randn(8, 3, 32, 32)
    each = [together.compute_loss(logits[row : row + 1], masks[row : row + 1]) for row in range(8)]
    torch.testing.assert_close(apart.compute_loss(logits, masks), sum(each) / 8)
    assert not torch.isclose(apart.compute_loss(logits, masks), together.compute_loss(logits, masks), rtol=1e-3)


def test_bfloat16(federated_trainer):
    states = []
    for precision in ("32-true", "bf16-mixed"):
        module = models.Module(models.mlp())
        recorder, _, _ = federated(federated_trainer, dpsgd(0.5, 0.1), 1, module=module, precision=precision)
        states.append([visit.end for visit in recorder.visits])
    for exact, rough in zip(*states, strict=True):
        for name, value in exact.items():
            assert rough[name].dtype == torch.float32
            torch.testing.assert_close(rough[name], value, atol=0.02, rtol=0.02)
            assert not torch.equal(rough[name], value)


# --- Refusals ---------------------------------------------------------------------------------------------------------


class WritesBuffer(models.Module):
    def __init__(self):
        super().__init__(models.mlp())
        self.register_buffer("centre", torch.zeros(6))

    def training_step(self, batch, batch_idx):
        self.centre += batch[0].mean(0)
        return super().training_step(batch, batch_idx)


class Skips(models.Module):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class Frequent(models.Module):
    """The optimizer has a parameter used outside its layer."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.net[0].bias.square().sum()


class WritesUnsaved(models.Module):
    """The written attribute is not sent, but the next step uses the attribute."""

    def __init__(self):
        super().__init__(models.mlp())
        self.register_buffer("centre", torch.zeros(6), persistent=False)

    def training_step(self, batch, batch_idx):
        if self.training:
            self.centre += batch[0].mean(0)
        return super().training_step((batch[0] - self.centre, batch[1]), batch_idx)


class TrainsOthers(models.Module):
    """A parameter in a list does not belong to the module."""

    def __init__(self):
        super().__init__(models.mlp())
        self.hidden = [nn.Parameter(torch.zeros(6))]

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] + self.hidden[0], batch[1]), batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.hidden], lr=0.1)


class Spreads(models.Module):
    """A single example has no standard deviation."""

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        return F.cross_entropy(logits, batch[1]) - logits.std(0).mean()


class AsksTwice(torch.optim.SGD):
    """Evaluates the loss twice at different weights, as sharpness-aware minimization does."""

    def step(self, closure=None):
        closure()
        loss = closure()
        super().step()
        return loss


def asks_twice(parameters):
    return AsksTwice(parameters, lr=0.1)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters)


REFUSED = [
    (lambda: models.Module(models.norm_mlp()), r"'net.1' \(BatchNorm1d\), 'net.5' \(BatchNorm1d\)"),
    (lambda: models.ManualModule(models.mlp()), "needs automatic optimization"),
    (lambda: models.Module(models.mlp(), lbfgs), "one loss per step, unlike LBFGS"),
    (lambda: models.Module(models.mlp(), asks_twice), "but got a second loss in one batch"),
    (TrainsOthers, "optimizers with only parameters of the module, because other parameters"),
    (WritesUnsaved, "The entry 'centre' of the module has changed in training"),
    (lambda: Spreads(models.mlp()), "depends on other examples"),
    (WritesBuffer, "The entry 'centre' of the module has changed in training"),
    (lambda: models.Quadratic(6), r"Quadratic has parameters outside any layer \('w'\)"),
    (lambda: Skips(models.mlp()), "returned no loss for a batch"),
    (lambda: models.Module(torch.compile(models.mlp(), backend="eager")), "an uncompiled module"),
    (lambda: Frequent(models.mlp()), "depends on other examples|from outside its layer"),
]


@pytest.mark.parametrize(
    ("make", "words", "kind"),
    quick(
        [(*refused, kind) for refused in REFUSED for kind in ("federated", "plain")],
        [(*refused, ("federated", "plain")[place % 2]) for place, refused in enumerate(REFUSED)],
    ),
)
@pytest.mark.filterwarnings("ignore:std():UserWarning")
def test_modules_that_are_refused(make, words, kind, federated_trainer, plain_trainer):
    fit, trainer = (plain, plain_trainer) if kind == "plain" else (federated, federated_trainer)
    with pytest.raises(MisconfigurationException, match=words):
        fit(trainer, dpsgd(), 1, module=make())


def test_tied_weights_are_refused(plain_trainer):
    net = models.mlp()
    net.append(net[0])
    with pytest.raises(MisconfigurationException, match=r"no parameters in several layers, but got \['net.3.bias'\]"):
        plain(plain_trainer, dpsgd(), 1, models.Module(net))


class LooksIn(FederatedCallback):
    def on_client_receive(self, trainer, module, client, broadcast):
        self.broadcast = broadcast


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_clip_val": 1.0}, "no `gradient_clip_val`, but got 1.0: `max_grad_norm` clips"),
        ({"accumulate_grad_batches": 2, "local_steps": 2}, "accumulate_grad_batches=1, but got 2"),
        (
            {"callbacks": [GradientAccumulationScheduler({1: 1})], "local_steps": 2},
            "accumulate_grad_batches=1, but got 1 or a schedule",
        ),
        ({"precision": "bf16-true"}, r"a precision from \['32-true', '64-true', 'bf16-mixed'\], but got 'bf16-true'"),
        ({"visits": Vectorized(2)}, "clients to train one after another, but got visits=Vectorized\\(clients=2\\)"),
        ({"steps": [CentralDP(1.0, 1e-3, noise_multiplier=1.0)]}, "Expected only one of `DPSGD` and `CentralDP`"),
        ({"method": "qffl"}, "may send values computed from a client's examples, .*, without noise"),
        ({"method": "moon"}, "may send values computed from a client's examples, .*, without noise"),
        ({"method": "ditto"}, "may send values computed from a client's examples, .*, without noise"),
        ({"method": "fedala"}, "may send values computed from a client's examples, .*, without noise"),
        ({"callbacks": [ClassPrototypes()]}, "`ClassPrototypes.on_client_start` may send"),
        ({"callbacks": [LooksIn()]}, "`LooksIn.on_client_receive` may send"),
    ],
)
def test_fits_that_are_refused(options, words, federated_trainer):
    options = {"method": "fedavg", "callbacks": [], **options}
    callbacks = [dpsgd(), *options.pop("callbacks")]
    trainer = federated_trainer(max_rounds=1, callbacks=callbacks, **options)
    with pytest.raises(MisconfigurationException, match=words):
        trainer.fit(models.Module(models.mlp()), clients_of())


@pytest.mark.parametrize(
    "method", quick(["fedavgm", "scaffold", "fednova", "feddyn:alpha=0.1", "median", "fedper"], ["scaffold", "fedper"])
)
def test_methods_that_go_with_it(method, federated_trainer):
    """Noisy gradients come from equal draws."""
    callback = dpsgd()
    recorder, _, _ = federated(federated_trainer, callback, 2, method, module=models.Module(models.mlp()))
    first, _, _ = federated(federated_trainer, dpsgd(), 1, module=models.Module(models.mlp()))
    if not method.startswith("feddyn"):
        for visit, other in zip(recorder.round(0), first.visits, strict=True):
            for name, value in other.end.items():
                torch.testing.assert_close(visit.end[name], value)
    assert callback.state_dict()["accounts"]["a"][2] == 8


def test_loaders_that_are_refused(plain_trainer, federated_trainer):
    module, dataset = models.Module(models.mlp()), models.as_datasets(models.vectors({"a": 12}))["a"]
    trainer = plain_trainer(max_epochs=1, callbacks=[dpsgd()])
    with pytest.raises(MisconfigurationException, match="but got a loader in"):
        trainer.fit(module, DataLoader(dataset, 4))
    sampler = WeightedRandomSampler(torch.ones(12), 12)
    loaders = {"a": DataLoader(dataset, 4, sampler=sampler)}
    with pytest.raises(ValueError, match="without a custom sampler, because examples are drawn independently"):
        federated(federated_trainer, dpsgd(), 1, data=FederatedDataModule(loaders))
    with pytest.raises(ValueError, match="without a custom sampler, because examples are drawn independently"):
        federated_trainer(max_rounds=1, callbacks=[dpsgd()], partition=IID(2)).fit(module, loaders["a"])
    trainer = plain_trainer(max_epochs=1, min_epochs=1, callbacks=[dpsgd(max_epsilon=3.0)])
    data = models.PooledData(models.vectors({"a": 12}), batch_size=4)
    with pytest.raises(MisconfigurationException, match="no `min_epochs` and `min_steps` with `max_epsilon`"):
        trainer.fit(module, datamodule=data)


def test_rows_that_are_no_examples(plain_trainer):
    """Every example in the data set becomes two rows in the batch."""

    def twice(samples):
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs * 2), torch.stack(targets * 2)

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(*models.vectors({"a": 30})["a"]), BATCH, collate_fn=twice)

    trainer = plain_trainer(max_epochs=1, callbacks=[dpsgd()])
    with pytest.raises(MisconfigurationException, match=r"receives \d+ rows in a batch of \d+ examples"):
        trainer.fit(models.Module(models.mlp()), datamodule=Data())


def test_a_batch_that_cannot_be_divided_is_refused(plain_trainer):
    """The first tensor describes the batch, so a loss that mixes examples cannot be detected."""

    def scaled(samples):
        inputs, targets = zip(*samples, strict=True)
        return torch.ones(1), torch.stack(inputs), torch.stack(targets)

    class Mixes(models.Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[1:], batch_idx) * self.net(batch[1]).mean()

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(*models.vectors({"a": 30})["a"]), BATCH, collate_fn=scaled)

    trainer = plain_trainer(max_epochs=1, callbacks=[dpsgd()])
    with pytest.raises(MisconfigurationException, match="with one row per example in the first tensor"):
        trainer.fit(Mixes(models.mlp()), datamodule=Data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 0.0}, "`max_grad_norm` to be greater than 0, but got 0.0"),
        ({"noise_multiplier": -1.0}, "`noise_multiplier` to be at least 0 and finite, but got -1.0"),
        ({"max_grad_norm": math.inf}, "`max_grad_norm` to be finite with noise"),
        ({"delta": 1.0}, r"`delta` to be in \(0, 1\), but got 1.0"),
        ({"noise_multiplier": 0.0, "max_epsilon": 1.0}, "greater than 0, but got 1.0 and"),
        ({"epsilon": 1.0}, "one of `noise_multiplier` and `epsilon`, but got noise_multiplier=1.0 and"),
        ({"noise_multiplier": None}, "one of `noise_multiplier` and `epsilon`, but got noise_multiplier=None and"),
        ({"noise_multiplier": None, "epsilon": 0.0}, "`epsilon` to be greater than 0 and finite, but got 0.0"),
        ({"accountant": "gdp"}, r"`accountant` to be one of \['rdp', 'pld'\]"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        DPSGD(**{"max_grad_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, **options})


def test_a_group_norm_network_trains(federated_trainer):
    """The remedy in the error about BatchNorm."""
    module = models.Module(to_group_norm(models.cnn()))
    data = FederatedDataModule(models.as_datasets(models.images({"a": 20})), batch_size=BATCH)
    _, _, trainer = federated(federated_trainer, dpsgd(), 1, data=data, module=module)
    assert trainer.callback_metrics["dp/epsilon"] > 0


def test_opacus_does_not_set_up_logging(monkeypatch):
    """Opacus configures logging during the import of a module, which is imported again here."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.delitem(sys.modules, "opacus.utils.module_utils", raising=False)
    _opacus("opacus.utils.module_utils")
    assert logging.root.handlers == []
