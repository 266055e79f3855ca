"""Lightning's weight averaging, against a loop written by hand, against a plain fit, and over the wire."""

import copy
import itertools
import math
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ConstantLR, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, Federation, Vectorized
from lightning_fed.algorithms import FedFusion, Median
from lightning_fed.batch_norm import measurement
from lightning_fed.bounds import MaxNorm
from lightning_fed.callbacks import ClientEvaluation, SiteMatrix
from lightning_fed.compression import TopK
from lightning_fed.privacy import CentralDP, SecureSum
from lightning_fed.rounds.client_models import Answers
from lightning_fed.steps import MaxSamples
from tests import models
from tests.backends.flower.halves import in_process, on_flower
from tests.batch_norm.test_batch_norm_decision import assert_measured, measured_reference
from tests.breadth import quick, slow
from tests.recorders import MemoryLogger, assert_same, bytes_of, state_of

callbacks = L.pytorch.callbacks
if not hasattr(callbacks, "WeightAveraging"):
    pytest.skip("Lightning 2.6 brings `WeightAveraging`", allow_module_level=True)

CLIENTS = models.vectors({"a": 40, "b": 64, "c": 33})
ROUNDS, DECAY, EPOCHS = 4, 0.6, 3
DOORS = ["trainer", "callback"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, models.CLASSES))


def module():
    return models.Module(net(), optimizer=models.momentum)


def data(clients=CLIENTS, batch_size=12):
    datasets = models.as_datasets(clients)
    return FederatedDataModule(datasets, datasets, batch_size=batch_size)


def ema(**options):
    return callbacks.EMAWeightAveraging(**{"decay": DECAY, **options})


class RoundMean(callbacks.WeightAveraging):
    """Mean over epochs, updated by Lightning after validation."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


class StepMean(callbacks.WeightAveraging):
    """Mean over the steps from the fourth step on, and over epochs."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None or step_idx >= 3


def without_average(state):
    return {name: value for name, value in state.items() if not name.startswith("weight_average.")}


class Models(FederatedCallback):
    """Records the module without the average, at the end of every round and in every validation."""

    def __init__(self):
        self.states, self.validated = [], []

    def on_server_round_end(self, trainer, pl_module, is_new):
        self.states.append(without_average(state_of(pl_module)))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0 and dataloader_idx == 0 and not trainer.sanity_checking:
            self.validated.append(without_average(state_of(pl_module)))


def assert_close(left, right):
    """Compares parameters and statistics; averages truncate batch counts to integers."""
    assert left.keys() == right.keys()
    for name, value in right.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.allclose(left[name], value, rtol=1e-4, atol=1e-6), name


def average_by_hand(rounds=ROUNDS, start=0):
    """Global models and averages after each round: full batches, new momentum in each visit, weights by examples."""
    model, average, count, results = net(), net(), 0, []
    for _ in range(rounds):
        sums = {}
        for inputs, targets in CLIENTS.values():
            local, own = copy.deepcopy(model), copy.deepcopy(average)
            optimizer, number = models.momentum(local.parameters()), count
            for _ in range(EPOCHS):
                optimizer.zero_grad()
                F.cross_entropy(local(inputs), targets).backward()
                optimizer.step()
                number += 1
                for name, value in own.state_dict().items():
                    new = local.state_dict()[name]
                    if number > start and value.is_floating_point():
                        value.copy_(new if number == start + 1 else DECAY * value + (1 - DECAY) * new)
            for kind, states in (("model", local.state_dict()), ("average", own.state_dict())):
                for name, value in states.items():
                    sums[kind, name] = sums.get((kind, name), 0) + value.double() * len(targets) / 137
        count += EPOCHS
        for kind, target in (("model", model), ("average", average)):
            target.load_state_dict({name: sums[kind, name] for name in target.state_dict()})
        results.append(
            [{f"net.{name}": x.clone() for name, x in part.state_dict().items()} for part in (model, average)]
        )
    return results


@pytest.mark.parametrize(
    ("either_trainer", "visits"),
    quick(itertools.product(DOORS, ["lightning", "fused"]), [("callback", "fused")]),
    indirect=["either_trainer"],
)
def test_each_client_averages_its_steps(visits, either_trainer):
    """The average is validated in the same round, and left in the module; clients start from the global model."""
    seen, own, average = Models(), module(), ema(update_starting_at_step=2)
    trainer = either_trainer(
        ROUNDS, callbacks=[seen, average], visits=visits, local_epochs=EPOCHS, batch_norm="average"
    )
    trainer.fit(own, datamodule=data(batch_size=64))
    by_hand = average_by_hand(start=2)
    for found, validated, (model, expected) in zip(seen.states, seen.validated, by_hand, strict=True):
        assert_close(found, model)
        assert_close(validated, expected)
    assert_close(state_of(own), by_hand[-1][1])
    assert "should_update" not in vars(average)
    assert average.should_update(step_idx=3)
    assert average.state_dict() == {"latest_update_step": ROUNDS * EPOCHS}


SWA_START, SWA_ROUNDS = 1, 5


class LateMean(RoundMean):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx >= SWA_START


class Annealed(models.Module):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        parts = [ConstantLR(optimizer, factor=1.0), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)]
        return [optimizer], [SequentialLR(optimizer, parts, milestones=[SWA_START])]


@pytest.mark.parametrize("either_trainer", quick(DOORS, ["callback"]), indirect=True)
def test_stochastic_weight_averaging_by_rounds(either_trainer):
    """A loop by hand with torch's `AveragedModel`, and the formula of the learning rate."""
    own = Annealed(net())
    trainer = either_trainer(SWA_ROUNDS, callbacks=[LateMean()], local_epochs=EPOCHS, batch_norm="average")
    trainer.fit(own, datamodule=data(batch_size=64))
    model = net()
    average = AveragedModel(model, use_buffers=True)
    for number in range(SWA_ROUNDS):
        share = min(max((number - SWA_START) / 2, 0), 1)
        rate = 0.02 + (0.1 - 0.02) * (1 + math.cos(math.pi * share)) / 2
        sums = {}
        for inputs, targets in CLIENTS.values():
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), rate)
            for _ in range(EPOCHS):
                optimizer.zero_grad()
                F.cross_entropy(local(inputs), targets).backward()
                optimizer.step()
            for name, value in local.state_dict().items():
                sums[name] = sums.get(name, 0) + value.double() * len(targets) / 137
        model.load_state_dict(sums)
        if number >= SWA_START:
            average.update_parameters(model)
    assert_close(state_of(own), {f"net.{name}": value for name, value in average.module.state_dict().items()})


def test_messages_hold_model_and_average(federated_trainer):
    logger, own = MemoryLogger(), module()
    federated_trainer(max_rounds=1, callbacks=[ema()], logger=logger, batch_norm="average").fit(own, datamodule=data())
    counts = {"steps": torch.zeros(1, dtype=torch.int64), "n_averaged": torch.zeros(1, dtype=torch.int64)}
    lines = {name: value for _, line in logger.lines for name, value in line.items()}
    assert lines["comm/up_bytes"] == 3 * bytes_of(state_of(own), state_of(own), counts)


@pytest.mark.parametrize(
    "average",
    [
        slow(ema),
        slow(lambda: ema(use_buffers=False)),
        lambda: ema(update_every_n_steps=3, update_starting_at_step=2),
        slow(lambda: ema(update_every_n_steps=0, update_starting_at_epoch=1)),
        slow(lambda: ema(update_starting_at_epoch=1)),
        RoundMean,
        StepMean,
    ],
)
def test_one_client_as_in_a_plain_fit(average, either_trainer, plain_trainer):
    """With new optimizers in each visit, which SGD without momentum does not notice; bit for bit."""
    inputs, targets = CLIENTS["a"]
    ends, validated = [], []
    for make in (either_trainer, plain_trainer):
        own, seen = models.Module(net()), Models()
        loaders = [DataLoader(TensorDataset(inputs, targets), 16) for _ in range(2)]
        if make is plain_trainer:
            make(max_epochs=ROUNDS, callbacks=[seen, average()]).fit(own, *loaders)
        else:
            trainer = make(ROUNDS, callbacks=[seen, average()], batch_norm="average", optimizer_state="reset")
            trainer.fit(own, datamodule=FederatedDataModule({"a": loaders[0]}, loaders[1]))
        ends.append(state_of(own))
        validated.append(seen.validated)
    for left, right in zip(*validated, strict=True):
        assert_same(left, right)
    assert_same(*ends)


def test_clients_are_evaluated_with_the_average(federated_trainer):
    """Without personal entries the weighted mean over the clients is the loss of the validated model."""
    logger = MemoryLogger()
    federated_trainer(max_rounds=3, callbacks=[ema()], logger=logger).fit(module(), datamodule=data())
    sizes = {name: len(targets) for name, (_, targets) in CLIENTS.items()}
    lines = {name: value for _, line in logger.lines for name, value in line.items()}
    weighted = sum(lines[f"client/{name}/val_loss"] * size for name, size in sizes.items()) / sum(sizes.values())
    assert weighted == pytest.approx(lines["val_loss"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_the_average_has_pooled_statistics_of_its_own(federated_trainer):
    """The clients measure BatchNorm a second time, with the average."""
    clients, own, seen = {"a": CLIENTS["b"]}, models.Module(models.norm_mlp(), models.momentum), Models()
    trainer = federated_trainer(max_rounds=2, callbacks=[seen, ema()], batch_norm="recalibrate", seed=3)
    trainer.fit(own, datamodule=FederatedDataModule(models.as_datasets(clients)))
    for state in (state_of(own), seen.states[-1]):
        assert_measured(state, measured_reference(state, clients, "a", 1, seed=3))
    assert not torch.equal(state_of(own)["net.1.running_var"], seen.states[-1]["net.1.running_var"])


def test_a_failed_measurement_of_the_average_leaves_no_decision(federated_trainer, monkeypatch):
    write = measurement._write_reports  # noqa: SLF001 - only an overflow in the average fails here

    def fails(fit, *arguments):
        is_average = not hasattr(fit.module, "weight_average")
        return write(fit, *arguments) or ("a test says so" if is_average else None)

    monkeypatch.setattr(measurement, "_write_reports", fails)
    own = module()
    before = state_of(own)
    trainer = federated_trainer(max_rounds=1, callbacks=[ema()])
    with pytest.raises(RuntimeError, match="no new model after 1 failed round"):
        trainer.fit(own, datamodule=data())
    state = trainer.federation.state_dict()
    assert (state["decision"], state["num_measured"], state["reports"]) == ("", 0, {})
    assert_same(state_of(own), before)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize(
    ("average", "batch_norm"), quick([(ema, "recalibrate"), (StepMean, "auto")], [(StepMean, "auto")])
)
def test_on_flower_as_in_one_process(average, batch_norm, federated_trainer, tmp_path):
    """Weights bit for bit; validation uses the average, and the site matrix also evaluates the clients' models."""
    matrices, federation = (SiteMatrix("val_loss"), SiteMatrix("val_loss")), partial(Federation, batch_norm=batch_norm)
    held_out = models.as_datasets(CLIENTS)
    local, trainer = in_process(federated_trainer, module, CLIENTS, federation(), 2, [matrices[0], average()], held_out)
    remote, fitted, *_ = on_flower(
        tmp_path, module, CLIENTS, federation, 2, lambda: [ClientEvaluation(), average()],
        held_out=held_out, server_callbacks=[matrices[1]],
    )  # fmt: skip
    assert_same(state_of(remote), state_of(local))
    values = [
        {name: float(value) for name, value in fit.callback_metrics.items() if "val_" in name}
        for fit in (trainer, fitted)
    ]
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    tables = [matrix.table.values for matrix in matrices]
    assert tables[1] == pytest.approx(tables[0], rel=1e-5)
    assert len(set(tables[0].values())) == 12


def test_a_failed_evaluation_leaves_the_global_model(federated_trainer, monkeypatch):
    def fails(federation, module, *arguments):
        if module.current_epoch == 1:
            raise RuntimeError("no evaluation")
        return Answers()

    seen, own = Models(), module()
    trainer = federated_trainer(max_rounds=3, callbacks=[seen, ema()])
    monkeypatch.setattr(Federation, "ask", fails)
    with pytest.raises(RuntimeError, match="no evaluation"):
        trainer.fit(own, datamodule=data())
    assert_close(state_of(own), seen.states[1])


class Changes(FederatedCallback):
    """Replaces an entry of the update of client b in some rounds."""

    changes_update = True

    def __init__(self, name, value, rounds):
        self.name, self.value, self.rounds = name, value, rounds

    def on_client_end(self, trainer, pl_module, client, update):
        if client == "b" and trainer.current_epoch in self.rounds:
            update.state[self.name] = torch.full_like(update.state[self.name], self.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("weight_average.model.net.0.weight", float("nan"), "has NaN or infinite values"),
        slow(("weight_average.model.net.1.running_var", -1.0, "running_var' is negative")),
        ("weight_average.n_averaged", -1, "grows by -1"),
        ("weight_average.steps", 2**40, "grows by"),
    ],
)
def test_a_client_with_a_bad_average_is_excluded(name, value, reason, federated_trainer, caplog):
    """Model and average are equal to a fit without the client."""
    ends = []
    for bad, clients in ((True, CLIENTS), (False, {name: CLIENTS[name] for name in "ac"})):
        own = module()
        extra = [Changes(name, value, (0,))] if bad else []
        trainer = federated_trainer(max_rounds=1, callbacks=[*extra, ema()], batch_norm="average")
        trainer.fit(own, datamodule=data(clients))
        ends.append(state_of(own))
    assert_same(*ends)
    assert reason in caplog.text


def test_a_failed_round_changes_nothing(federated_trainer):
    ends = []
    for rounds in ((1,), ()):
        own, seen = module(), Models()
        fails = Changes("net.0.weight", float("nan"), rounds)
        trainer = federated_trainer(max_rounds=2 if rounds else 1, callbacks=[fails, seen, ema()], seed=1)
        trainer.fit(own, datamodule=data({"b": CLIENTS["b"]}))
        ends.append(state_of(own))
    assert_same(*ends)


class StopsIn(L.Callback):
    def __init__(self, round, path, hook="on_train_batch_end"):
        self.round, self.path = round, path
        setattr(self, hook, self.stop)

    def stop(self, trainer, pl_module, outputs=None, batch=None, batch_idx=9):
        if trainer.current_epoch == self.round and batch_idx == 9 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            raise KeyError("broken off")


AVERAGES = [ema, RoundMean, StepMean, lambda: ema(update_every_n_steps=4)]
HOOKS = ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"]
CASES = [(average, hook) for average in AVERAGES for hook in HOOKS]


@pytest.mark.parametrize(("average", "hook"), quick(CASES, [CASES[4], CASES[8]]))
def test_resumed(hook, average, federated_trainer, tmp_path):
    whole, path = module(), tmp_path / "stopped.ckpt"
    federated_trainer(max_rounds=ROUNDS, callbacks=[average()], seed=1).fit(whole, datamodule=data())
    trainer = federated_trainer(max_rounds=ROUNDS, callbacks=[average(), StopsIn(2, path, hook)], seed=1)
    with pytest.raises(KeyError):
        trainer.fit(module(), datamodule=data())
    resumed = module()
    trainer = federated_trainer(max_rounds=ROUNDS, callbacks=[average()], seed=1)
    trainer.fit(resumed, datamodule=data(), ckpt_path=str(path))
    assert_same(state_of(resumed), state_of(whole))


def test_checkpoints_hold_the_average_and_the_global_model(federated_trainer, tmp_path):
    """Inside a round the checkpoint contains no client model, and no client's average."""
    path, seen, own = tmp_path / "inside.ckpt", Models(), module()
    trainer = federated_trainer(max_rounds=ROUNDS, callbacks=[seen, ema(), StopsIn(2, path)], batch_norm="average")
    with pytest.raises(KeyError):
        trainer.fit(own, datamodule=data())
    saved = torch.load(path, weights_only=True)
    assert_same(saved["current_model_state"], seen.states[1])
    assert_same(saved["state_dict"], seen.validated[1])
    assert_same(state_of(own), seen.states[1])
    module().load_state_dict(saved["state_dict"])


def test_weights_alone_hold_the_global_model(federated_trainer, tmp_path):
    path, seen = tmp_path / "weights.ckpt", Models()

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(path, weights_only=True)

    federated_trainer(max_rounds=1, callbacks=[seen, ema(), Saves()]).fit(module(), datamodule=data())
    assert_same(torch.load(path, weights_only=True)["state_dict"], seen.states[0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "fedbn"}, "personal entries stay on the clients"),
        slow(({"method": Median()}, "Median is no weighted mean")),
        slow(({"method": "fesem:num_centers=2"}, "FeSEM is no weighted mean")),
        ({"steps": [CentralDP(1.0, 1e-3, 1.0)]}, "`CentralDP` would treat the average as a second model"),
        ({"steps": [MaxSamples(64), SecureSum(clip=1.0)]}, "`SecureSum` would"),
        ({"steps": [TopK(0.5)]}, "`TopK` would"),
        slow(({"steps": [MaxNorm(1.0)]}, "`MaxNorm` would")),
    ],
)
def test_what_cannot_be_averaged(options, reason, federated_trainer):
    """The message names averages of global models, which work."""
    with pytest.raises(MisconfigurationException, match=f"{reason}.*update_every_n_steps=0"):
        federated_trainer(max_rounds=1, callbacks=[ema()], **options).fit(module(), datamodule=data())
    own, seen = module(), Models()
    after_rounds = ema(update_every_n_steps=0, update_starting_at_epoch=0)
    federated_trainer(max_rounds=2, callbacks=[seen, after_rounds], **options).fit(own, datamodule=data())
    first, second = seen.states
    assert_close(state_of(own), {name: DECAY * first[name] + (1 - DECAY) * second[name] for name in first})


def test_averages_with_a_late_start_are_found_before_training(federated_trainer):
    late = ema(update_starting_at_step=3_000_001, update_every_n_steps=50)
    with pytest.raises(MisconfigurationException, match="`MaxNorm` would treat the average as a second model"):
        federated_trainer(max_rounds=1, callbacks=[late], steps=[MaxNorm(1.0)]).fit(module(), datamodule=data())


def test_two_averages(federated_trainer):
    with pytest.raises(MisconfigurationException, match="Expected one `WeightAveraging` callback"):
        federated_trainer(max_rounds=1, callbacks=[ema(), RoundMean()]).fit(module(), datamodule=data())


def test_stacked_clients_train_one_by_one(federated_trainer, caplog):
    ends = []
    for visits in (Vectorized(3), "auto"):
        own = models.Module(models.mlp())
        federated_trainer(max_rounds=1, callbacks=[ema()], visits=visits).fit(own, datamodule=data())
        ends.append(state_of(own))
    assert_same(*ends)
    assert "`visits=Vectorized(3)` has no effect" in caplog.text


def test_a_method_that_changes_the_module(plain_trainer):
    """The average copies the module changed by the method; the wrong order of callbacks is refused."""

    def trainer(*order):
        return plain_trainer(max_epochs=2, callbacks=list(order))

    def method():
        return Federation(FedFusion("conv", at="net.1"))

    trainer(method(), ema()).fit(models.Module(models.mlp()), datamodule=data())
    with pytest.raises(MisconfigurationException, match="`EMAWeightAveraging` after `Federation`"):
        trainer(ema(), method()).fit(models.Module(models.mlp()), datamodule=data())
