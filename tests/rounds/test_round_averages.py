"""Lightning's weight averaging over global models, against explicit sums and against a plain fit."""

import logging

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, Federation
from lightning_fed.algorithms import FedFusion
from lightning_fed.callbacks import ClientEvaluation, SiteMatrix
from lightning_fed.rounds.client_models import Answers
from tests import models
from tests.backends.flower.halves import in_process, on_flower
from tests.breadth import quick
from tests.recorders import MemoryLogger, assert_same, state_of

callbacks = L.pytorch.callbacks
if not hasattr(callbacks, "WeightAveraging"):
    pytest.skip("Lightning 2.6 brings `WeightAveraging`", allow_module_level=True)

CLIENTS = models.vectors({"a": 40, "b": 64, "c": 33})
ROUNDS, DECAY = 4, 0.6


def module():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, models.CLASSES))
    return models.Module(net, optimizer=models.momentum)


def data(clients=CLIENTS):
    datasets = models.as_datasets(clients)
    return FederatedDataModule(datasets, datasets, batch_size=12)


def ema(**options):
    return callbacks.EMAWeightAveraging(**{"decay": DECAY, **options})


class RoundMean(callbacks.WeightAveraging):
    """Mean over epochs, updated by Lightning after validation."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


def moving_averages(states, decay=DECAY):
    """The average after each model; the first average is the first model."""
    averages = [states[0]]
    for state in states[1:]:
        before = averages[-1]
        averages.append({name: before[name] * decay + value * (1 - decay) for name, value in state.items()})
    return averages


def assert_close(left, right):
    """Compares parameters and statistics; averages truncate batch counts to integers."""
    assert left.keys() == right.keys()
    for name, value in right.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.allclose(left[name], value, rtol=1e-4, atol=1e-6), name


class GlobalModels(FederatedCallback):
    """Records the state at the end of every round, including BatchNorm statistics, and the validated state."""

    def __init__(self):
        self.states, self.validated = [], []

    def on_server_round_end(self, trainer, pl_module, is_new):
        self.states.append(state_of(pl_module))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0 and dataloader_idx == 0 and not trainer.sanity_checking:
            self.validated.append(state_of(pl_module))


@pytest.mark.parametrize("visits", ["lightning", "fused"])
def test_a_moving_average_of_the_global_models(visits, either_trainer):
    """The average is validated in the same round, saved, and left in the module; clients train without averaging."""
    seen, average, plain = GlobalModels(), ema(), GlobalModels()
    own = module()
    trainer = either_trainer(ROUNDS, callbacks=[seen, average], visits=visits, local_epochs=2)
    trainer.fit(own, datamodule=data())
    either_trainer(ROUNDS, callbacks=[plain], visits=visits, local_epochs=2).fit(module(), datamodule=data())
    for with_average, without in zip(seen.states, plain.states, strict=True):
        assert_same(with_average, without)
    expected = moving_averages(seen.states)
    assert len(seen.validated) == ROUNDS
    for validated, average in zip(seen.validated, expected, strict=True):
        assert_close(validated, average)
    assert_close(state_of(own), expected[-1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_buffers": False},
        {"update_every_n_steps": 2},
        {"update_starting_at_step": 2},
        {"update_every_n_steps": 0, "update_starting_at_epoch": 1},
        {"update_starting_at_epoch": 1},
    ],
)
def test_as_in_a_plain_fit_of_one_step_per_epoch(options, either_trainer, plain_trainer):
    """One client with one batch per visit: step, epoch and round coincide, and so do the averages."""
    clients = {"a": CLIENTS["a"]}
    own, seen, runs = module(), GlobalModels(), []
    either_trainer(ROUNDS, callbacks=[seen, ema(**options)], batch_norm="average", optimizer_state="keep").fit(
        own, datamodule=FederatedDataModule(models.as_datasets(clients), models.as_datasets(clients), batch_size=40)
    )
    runs.append((seen.validated, state_of(own)))
    plain, watching = module(), GlobalModels()
    loader = DataLoader(TensorDataset(*clients["a"]), 40)
    plain_trainer(max_epochs=ROUNDS, callbacks=[watching, ema(**options)]).fit(plain, loader, loader)
    runs.append((watching.validated, state_of(plain)))
    for left, right in zip(runs[0][0], runs[1][0], strict=True):
        assert_close(left, right)
    assert_close(runs[0][1], runs[1][1])


def test_averages_of_epochs_come_after_validation(federated_trainer):
    seen, own = GlobalModels(), module()
    federated_trainer(max_rounds=3, callbacks=[seen, RoundMean()]).fit(own, datamodule=data())
    for name, value in state_of(own).items():
        if not name.endswith("num_batches_tracked"):
            assert torch.allclose(value, torch.stack([state[name] for state in seen.states]).mean(0), atol=1e-6)
    assert_close(seen.validated[1], seen.states[0])


def test_clients_are_evaluated_with_the_average(federated_trainer):
    """Without personal entries the weighted mean over the clients is the loss of the validated model."""
    logger = MemoryLogger()
    federated_trainer(max_rounds=3, callbacks=[ema()], logger=logger).fit(module(), datamodule=data())
    sizes = {name: len(targets) for name, (_, targets) in CLIENTS.items()}
    lines = {name: value for _, line in logger.lines for name, value in line.items()}
    weighted = sum(lines[f"client/{name}/val_loss"] * size for name, size in sizes.items()) / sum(sizes.values())
    assert weighted == pytest.approx(lines["val_loss"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_on_a_server_without_data_as_in_one_process(federated_trainer, tmp_path):
    """Validation uses the average; the site matrix also evaluates the clients' models."""
    matrices = SiteMatrix("val_loss"), SiteMatrix("val_loss")
    held_out = models.as_datasets(CLIENTS)
    _, trainer = in_process(federated_trainer, module, CLIENTS, Federation(), 2, [matrices[0], ema()], held_out)
    _, remote, *_ = on_flower(
        tmp_path, module, CLIENTS, Federation, 2, lambda: [ClientEvaluation()],
        held_out=held_out, server_callbacks=[matrices[1], ema()],
    )  # fmt: skip
    values = [
        {name: float(value) for name, value in fitted.callback_metrics.items() if "val_" in name}
        for fitted in (trainer, remote)
    ]
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    tables = [matrix.table.values for matrix in matrices]
    assert tables[1] == pytest.approx(tables[0], rel=1e-5)
    assert len(set(tables[0].values())) == 12
    assert tables[0]["global", "a"] == values[0]["client/a/val_loss"]


def test_a_failed_evaluation_leaves_the_global_model(federated_trainer, monkeypatch):
    def fails(federation, module, *arguments):
        if module.current_epoch == 1:
            raise RuntimeError("no evaluation")
        return Answers()

    seen, own = GlobalModels(), module()
    trainer = federated_trainer(max_rounds=3, callbacks=[seen, ema()])
    monkeypatch.setattr(Federation, "ask", fails)
    with pytest.raises(RuntimeError, match="no evaluation"):
        trainer.fit(own, datamodule=data())
    assert_close(state_of(own), seen.states[1])


def test_a_failed_round_is_not_averaged(federated_trainer):
    class Fails(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, pl_module, client, update):
            if trainer.current_epoch == 2:
                for value in update.state.values():
                    value.fill_(float("nan")) if value.is_floating_point() else None

    seen, own = GlobalModels(), module()
    federated_trainer(max_rounds=4, callbacks=[seen, Fails(), ema()]).fit(own, datamodule=data())
    assert_close(state_of(own), moving_averages([seen.states[round] for round in (0, 1, 3)])[-1])


class StopsIn(L.Callback):
    def __init__(self, round, path, hook="on_train_batch_end"):
        self.round, self.path = round, path
        setattr(self, hook, self.stop)

    def stop(self, trainer, pl_module, outputs=None, batch=None, batch_idx=9):
        if trainer.current_epoch == self.round and batch_idx == 9 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            raise KeyError("broken off")


AVERAGES = [ema, RoundMean, lambda: ema(update_starting_at_epoch=0)]
HOOKS = ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"]


@pytest.mark.parametrize(
    ("average", "hook"),
    quick([(average, hook) for average in AVERAGES for hook in HOOKS], list(zip(AVERAGES, HOOKS, strict=True))),
)
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
    """Inside a round the checkpoint contains no client model."""
    path, seen = tmp_path / "inside.ckpt", GlobalModels()
    trainer = federated_trainer(max_rounds=ROUNDS, callbacks=[seen, ema(), StopsIn(2, path)])
    with pytest.raises(KeyError):
        trainer.fit(module(), datamodule=data())
    saved = torch.load(path, weights_only=True)
    assert_same(saved["current_model_state"], seen.states[1])
    assert_close(saved["state_dict"], moving_averages(seen.states[:2])[-1])


def test_it_is_said(federated_trainer, caplog):
    with caplog.at_level(logging.INFO, "lightning_fed"):
        federated_trainer(max_rounds=1, callbacks=[ema()]).fit(module(), datamodule=data())
    assert "`EMAWeightAveraging` averages global models" in caplog.text


def test_the_callback_is_left_as_it_was(federated_trainer):
    average = ema(update_every_n_steps=3)
    federated_trainer(max_rounds=1, callbacks=[average]).fit(module(), datamodule=data())
    assert "should_update" not in vars(average)
    assert average.should_update(step_idx=3)


def test_a_method_that_changes_the_module(plain_trainer):
    """The average copies the module changed by the method; the wrong order of callbacks is refused."""

    def trainer(*order):
        return plain_trainer(max_epochs=2, callbacks=list(order))

    def method():
        return Federation(FedFusion("conv", at="net.1"))

    trainer(method(), ema()).fit(models.Module(models.mlp()), datamodule=data())
    with pytest.raises(MisconfigurationException, match="`EMAWeightAveraging` after `Federation`"):
        trainer(ema(), method()).fit(models.Module(models.mlp()), datamodule=data())
