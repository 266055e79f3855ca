"""Fused visits equal Lightning's loop: calls with arguments, counts, logs and weights."""

import itertools
import logging
import re
import shutil
from dataclasses import dataclass, field

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

from lightning_fed import (
    Availability,
    Faults,
    FederatedCallback,
    FederatedDataModule,
    FederatedTrainer,
    Federation,
    Vectorized,
)
from lightning_fed.backends import fused
from lightning_fed.callbacks import FederatedProgressBar, progress_bar
from tests import models
from tests.breadth import quick
from tests.recorders import MemoryLogger, StepCheckpoint, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:You called `self.log"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]

SIZES = {"ann": 10, "bob": 7, "cid": 12}  # 3, 2 and 3 batches

HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start"),
    *("on_save_checkpoint", "on_client_start", "on_client_batch", "on_client_end", "on_client_visit_end"),
    *("on_server_aggregate", "on_server_round_end"),
)


def fingerprint(value):
    """Comparable hook arguments: tensors by their bits, other objects by type."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {name: fingerprint(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [fingerprint(part) for part in value]
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


class Tracer(FederatedCallback):
    """Records every hook call with all public Trainer state."""

    def __init__(self):
        self.calls = []


def _note(hook):
    def note(self, trainer, module, *arguments):
        progress = trainer.fit_loop.state_dict()
        self.calls.append(
            {
                "hook": hook,
                "arguments": fingerprint(arguments) if hook != "on_save_checkpoint" else None,
                "fx": module._current_fx_name,  # noqa: SLF001 - the hook of a logged value
                "step": trainer.global_step,
                "is_last": trainer.is_last_batch,
                "progress": repr({name: part for name, part in progress.items() if name != "state_dict"}),
                "metrics": fingerprint({**trainer.callback_metrics}),
                "logged": fingerprint({**trainer.logged_metrics}),
                "bar": fingerprint({**trainer.progress_bar_metrics}),
                "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
                "drawn": torch.get_rng_state().sum().item(),
            }
        )
        if hook == "on_client_batch":
            return arguments[-1]
        return None

    return note


for _hook in HOOKS:
    setattr(Tracer, _hook, _note(_hook))


# --- Modules ----------------------------------------------------------------------------------------------------------


class Logging(models.Module):
    """Logs per epoch, per step, both, a maximum metric, and to the progress bar."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("each", loss, prog_bar=True)
        self.log("both", 2 * loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max", prog_bar=True)
        self.log("index", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "index": batch_idx, "step": self.trainer.global_step, "last": self.trainer.is_last_batch}


class LoggingAll(models.Module):
    """Logs with every reduction and level, numbers, a metric, a dictionary, and given batch sizes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scores = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.scores.update(loss.detach())
        for on_step, on_epoch in ((True, False), (False, True), (True, True)):
            level = {"on_step": on_step, "on_epoch": on_epoch}
            for reduce_fx in ("mean", "sum", "min", torch.max):
                self.log(f"{reduce_fx}/{on_step}/{on_epoch}", loss, reduce_fx=reduce_fx, **level)
            self.log(f"metric/{on_step}/{on_epoch}", self.scores, **level)
        self.log("sized", loss, on_epoch=True, batch_size=batch_idx + 2)
        self.log("double", loss.detach().double() / 3, on_epoch=True)
        self.log_dict({"number": batch_idx / 3, "half": loss.detach().bfloat16()}, on_epoch=True, enable_graph=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("sized", outputs["loss"], on_step=False, on_epoch=True, batch_size=1 + batch_idx)


class LoggingChanged(models.Module):
    """Changes one option in a client's last batch, so Lightning refuses the call."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("changed", loss, on_step=False, on_epoch=True, prog_bar=len(batch[0]) == 3)
        return loss


class Hooked(models.Module):
    def on_before_zero_grad(self, optimizer):
        self.log("zeroed", float(len(optimizer.param_groups)), on_step=False, on_epoch=True, reduce_fx="sum")

    def on_before_backward(self, loss):
        self.noted = loss.detach()

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer):
        self.log("gradient", next(self.parameters()).grad.norm(), on_step=False, on_epoch=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("ended", outputs["loss"] + batch_idx, on_step=False, on_epoch=True)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 2 * gradient_clip_val)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, *batch[1:]]


class OwnStep(models.Module):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            next(self.parameters()).mul_(0.99)


class WithoutOptimizer(models.ManualModule):
    """Manual optimization without an optimizer."""

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        self.zero_grad()
        self.manual_backward(self.loss(self(inputs), targets))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= 0.1 * parameter.grad

    def configure_optimizers(self):
        return []


class Skipping(models.Module):
    """Returns no loss for some batches, and NaN for one client."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) == 2:
            loss = loss * float("nan")
        return None if batch_idx == 1 else loss


class Failing(models.Module):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and len(batch[0]) == 3:
            raise ValueError("this batch is not for me")
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        if loss > 2.2:
            raise RuntimeError("no way back")
        loss.backward()


class Stopping(models.Module):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 12:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class StopsAfterStep(L.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        trainer.should_stop = trainer.should_stop or trainer.global_step == 3


class Broken(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        if index == 5:
            raise OSError("disk")
        return torch.ones(6), torch.tensor(1)


class Halving(torch.optim.SGD):
    """Carries half of each gradient to the next batch."""

    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad *= 0.5


def halving(parameters):
    return Halving(parameters, lr=0.05)


class TwoSchedulers(models.Module):
    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        per_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        per_round = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": per_step, "interval": "step"}, {"scheduler": per_round}]


@dataclass
class Row:
    module: object
    options: dict = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)
    clients: object = lambda: models.as_datasets(models.vectors(SIZES))
    callbacks: tuple = ()


def scaled(**options):
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))]


TABLE = {
    "plain": Row(
        lambda: models.Module(models.dropout_mlp(), models.adam),
        {"local_epochs": 2, "availability": Availability(stragglers=0.5)},
    ),
    "logs": Row(lambda: Logging(models.mlp(), models.momentum), trainer={"log_every_n_steps": 3}),
    "all logs": Row(lambda: LoggingAll(models.mlp(), models.momentum), {"max_rounds": 1}),
    "changed log": Row(
        lambda: LoggingChanged(models.mlp(), halving), {"faults": Faults(max_failed_rounds=None)}
    ),
    "hooks": Row(
        lambda: Hooked(models.norm_mlp(), models.momentum), {"max_rounds": 1}, {"gradient_clip_val": 0.1}
    ),
    "clip by value": Row(
        lambda: models.Module(models.mlp(), models.sgd),
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "own step": Row(lambda: OwnStep(models.mlp(), models.momentum), {"optimizer_state": "keep"}),
    "manual": Row(lambda: models.ManualModule(models.norm_mlp())),
    "no optimizer": Row(lambda: WithoutOptimizer(models.mlp())),
    "two optimizers": Row(models.TwoOptimizers, {"max_rounds": 1}),
    "accumulated": Row(
        lambda: Logging(models.mlp(), models.momentum), {"local_steps": 4}, {"accumulate_grad_batches": 2}
    ),
    "two schedulers": Row(lambda: TwoSchedulers(models.mlp(), models.momentum)),
    "bf16": Row(lambda: models.Module(models.dropout_mlp(), models.momentum), trainer={"precision": "bf16-mixed"}),
    "float64": Row(lambda: models.Module(models.mlp(), models.momentum), trainer={"precision": "64-true"}),
    "loss scale": Row(
        lambda: models.Module(models.mlp(), models.momentum),
        trainer={"plugins": lambda: scaled(init_scale=2.0**40, growth_interval=3)},
    ),
    "skips": Row(
        lambda: Skipping(models.mlp(), models.momentum), {"faults": Faults(min_clients=1), "max_rounds": 1}
    ),
    "failing steps": Row(lambda: Failing(models.mlp(), models.momentum), {"faults": Faults(max_failed_rounds=None)}),
    "failing data": Row(
        lambda: models.Module(models.mlp(), models.momentum),
        {"max_rounds": 1},
        clients=lambda: {"broken": Broken(), **models.as_datasets(models.vectors(SIZES))},
    ),
    "max_steps": Row(lambda: Logging(models.mlp(), models.momentum), trainer={"max_steps": 10}),
    "stopped in a step": Row(lambda: Stopping(models.mlp(), models.momentum)),
    "stopped after a step": Row(lambda: models.Module(models.mlp(), models.momentum), callbacks=(StopsAfterStep,)),
    "min_epochs": Row(
        lambda: models.Module(models.mlp()), trainer={"min_epochs": 2}, callbacks=(StopsAfterStep,)
    ),
    "limited": Row(lambda: Logging(models.mlp(), models.momentum), trainer={"limit_train_batches": 7}),
    "barebones": Row(lambda: Logging(models.mlp(), models.momentum), {"max_rounds": 1}, {"barebones": True}),
    "nobody": Row(
        lambda: models.Module(models.mlp()),
        {"availability": Availability(client_dropout=0.9), "faults": Faults(max_failed_rounds=None)},
    ),
    "FedProx": Row(lambda: models.Module(models.mlp(), models.momentum), {"method": "fedprox:mu=0.5"}),
    "vectorized": Row(lambda: models.Module(models.mlp(), models.momentum), {"visits": Vectorized(3)}),
}  # fmt: skip


ALIKE = (
    "logs",
    "clip by value",
    "manual",
    "accumulated",
    "bf16",
    "float64",
    "loss scale",
    "failing steps",
    "max_steps",
)
ALIKE += ("stopped after a step", "min_epochs", "limited", "nobody", "vectorized", "FedProx", "no optimizer")


@pytest.fixture
def fit(tmp_path):

    def run(row, visits, *callbacks, ckpt_path=None, **options):
        own = {name: value() if callable(value) else value for name, value in row.trainer.items()}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": MemoryLogger()}
        if row.trainer.get("barebones"):
            quiet, callbacks = {}, [callback for callback in callbacks if isinstance(callback, Tracer)]
        trainer = FederatedTrainer(
            **{
                **{"max_rounds": 2, "seed": 5, "visits": visits, "accelerator": "cpu", "default_root_dir": tmp_path},
                **{"callbacks": [*callbacks, *(kind() for kind in row.callbacks)], **quiet},
                **{**row.options, **own, **options},
            }
        )
        module = row.module()
        trainer.fit(module, FederatedDataModule(row.clients(), batch_size=4), ckpt_path=ckpt_path)
        return module, trainer

    return run


def outcome(module, trainer):
    logger = trainer.logger
    return {
        "weights": fingerprint(state_of(module)),
        "progress": trainer.fit_loop.state_dict(),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": fingerprint(dict(trainer.callback_metrics)),
        "log": fingerprint(logger.lines) if logger else None,
        "scale": fingerprint(trainer.precision_plugin.state_dict()),
        "schedulers": [fingerprint(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
    }


def take_checkpoints(folder):
    found = {path.name: fingerprint(torch.load(path, weights_only=True)) for path in folder.glob("*.ckpt")}
    shutil.rmtree(folder, ignore_errors=True)
    return found


@pytest.mark.parametrize("name", quick(TABLE, [name for name in TABLE if name not in ALIKE]))
def test_the_same_as_in_lightnings_loop(name, fit, tmp_path):
    """With and without a callback for all hooks: weights, log, counts and checkpoints."""
    row, found, traced = TABLE[name], {}, {}
    for visits in ("lightning", "fused"):
        saver = StepCheckpoint(tmp_path / "saved", 3)
        left = outcome(*fit(row, visits, saver, LearningRateMonitor()))
        found[visits] = left, take_checkpoints(tmp_path / "saved")
        tracer = Tracer()
        traced[visits] = outcome(*fit(row, visits, tracer)), tracer.calls
    assert found["fused"] == found["lightning"]
    for ours, theirs in zip(traced["fused"][1], traced["lightning"][1], strict=True):
        assert ours == theirs
    assert traced["fused"][0] == traced["lightning"][0]
    assert traced["fused"][1]


@pytest.mark.parametrize("visits", ["auto", Vectorized(3)])
def test_lightning_logs_a_name_once(visits, fit, monkeypatch):
    """Later calls update the result with equal values. After the fit Lightning's method is back."""
    calls, kind = [], type(L.Trainer(logger=False).fit_loop.epoch_loop._results)  # noqa: SLF001
    original = kind.log

    def count(self, fx, name, *arguments, **options):
        calls.append(name)
        original(self, fx, name, *arguments, **options)

    monkeypatch.setattr(kind, "log", count)
    module, trainer = fit(TABLE["logs"], visits)
    assert sorted(calls) == ["both", "each", "index", "most", "train_loss"]
    assert "log" not in vars(trainer.fit_loop.epoch_loop._results)  # noqa: SLF001
    monkeypatch.setattr(fused, "KNOWN_VERSIONS", ("9.",))
    assert outcome(*fit(TABLE["logs"], visits)) == outcome(module, trainer)
    assert len(calls) > 10


def test_a_result_follows_a_value_to_another_device():
    trainer = L.Trainer(logger=False, accelerator="cpu")
    results = trainer.fit_loop.epoch_loop._results  # noqa: SLF001
    fused.shorten_log(trainer)
    for device in ("cpu", "cpu", "meta", "meta"):
        results.log("training_step", "loss", torch.ones((), device=device))
    (result,) = results.values()
    assert {result.value.device.type, result.cumulated_batch_size.device.type} == {"meta"}


def test_a_fit_goes_on_from_a_checkpoint_of_the_other_way(fit, tmp_path):
    row = TABLE["two schedulers"]
    whole = outcome(*fit(row, "lightning", max_rounds=3))
    for first, second in [("lightning", "fused"), ("fused", "lightning")]:
        fit(row, first, ModelCheckpoint(tmp_path, first))
        saver = ModelCheckpoint(tmp_path, "last")
        resumed = outcome(*fit(row, second, saver, max_rounds=3, ckpt_path=tmp_path / f"{first}.ckpt"))
        for part in ("weights", "progress", "step", "epoch", "metrics", "schedulers"):
            assert resumed[part] == whole[part]


class Bar(FederatedProgressBar):
    def __init__(self):
        super().__init__()
        self.drawn = []

    def get_metrics(self, trainer, module):
        metrics = super().get_metrics(trainer, module)
        self.drawn.append((self.train_progress_bar.n, self.train_progress_bar.total, {**metrics}))
        return metrics


def test_the_progress_bar_shows_the_same(fit, monkeypatch):
    """A fake clock advances by a tenth of a second per batch; includes the last batch of a round."""
    drawn = {}
    for visits in ("lightning", "fused"):
        clock = itertools.count()
        monkeypatch.setattr(progress_bar, "monotonic", lambda clock=clock: next(clock) / 10)
        bar = Bar()
        fit(TABLE["logs"], visits, bar, enable_progress_bar=True)
        drawn[visits] = bar.drawn
    assert drawn["fused"] == drawn["lightning"]
    assert [(n, metrics["client"], "loss" in metrics) for n, _, metrics in drawn["fused"][:3]] == [
        (1, "ann (1 of 3)", True),
        (4, "bob (2 of 3)", True),
        (7, "cid (3 of 3)", True),
    ]


def test_an_empty_bar_has_the_number_of_the_round_that_begins(fit, capsys):
    fit(TABLE["plain"], "fused", FederatedProgressBar(), max_rounds=3, enable_progress_bar=True)
    empty = re.findall(r"Round (\d)/3: +0%", capsys.readouterr().out)
    assert list(dict.fromkeys(empty)) == ["1", "2", "3"]
    assert empty == sorted(empty)
    assert empty.count("1") == empty.count("3")  # not shown again at the start of the second round


# --- Choice of the loop -----------------------------------------------------------------------------------------------


class Starting(models.Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class Counting(L.Callback):
    def __init__(self):
        self.batches = 0

    def setup(self, trainer, module, stage):
        loop = trainer.fit_loop.epoch_loop
        advance = loop.advance

        def counted(*arguments):
            self.batches += 1
            return advance(*arguments)

        loop.advance = counted


def test_lightnings_loop_sees_one_batch_of_a_round(fit):
    numbers = {}
    for visits in ("lightning", "fused", "auto"):
        counting = Counting()
        fit(TABLE["plain"], visits, counting)
        numbers[visits] = counting.batches
    assert numbers["lightning"] > 10
    assert numbers["fused"] == numbers["auto"] == 2  # from two rounds


def test_several_processes_are_no_obstacle(federated_trainer):
    """The backend's tests compare results."""
    trainer = federated_trainer(strategy="client_parallel", devices=1)
    assert fused.find_obstacle(trainer, models.Module(models.mlp()), False) is None


class OtherStrategy(SingleDeviceStrategy):
    """A user's strategy, with unknown behaviour in a step."""


OBSTACLES = {
    "`Starting.on_train_batch_start` may end the epoch": (lambda: Starting(models.mlp()), {}),
    "SimpleProfiler measures calls in Lightning's loop": (
        lambda: models.Module(models.mlp()),
        {"profiler": "simple"},
    ),
    "OtherStrategy may change how a step is performed": (
        lambda: models.Module(models.mlp()),
        {"strategy": lambda: OtherStrategy("cpu")},
    ),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_obstacles_are_named(obstacle, fit, caplog):
    make, options = OBSTACLES[obstacle]
    row = Row(make, trainer=options)
    with pytest.raises(MisconfigurationException, match=f"`visits='fused'` cannot .*, because {re.escape(obstacle)}"):
        fit(row, "fused")
    lines, left = {}, {}
    for visits in ("auto", "lightning"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning_fed"):
            left[visits] = outcome(*fit(row, visits))
        lines[visits] = [record.message for record in caplog.records if "fused" in record.message]
    line = f"Clients train in Lightning's loop, not in the faster loop (visits='fused'), because {obstacle}."
    assert lines == {"auto": [line], "lightning": []}
    assert left["auto"] == left["lightning"]


def test_an_unknown_version_of_lightning_is_left_alone(fit, monkeypatch):
    monkeypatch.setattr(fused, "KNOWN_VERSIONS", ("1.",))
    with pytest.raises(
        MisconfigurationException, match=f"because Lightning {re.escape(L.__version__)} has an unknown loop"
    ):
        fit(TABLE["plain"], "fused")
    counting = Counting()
    fit(TABLE["plain"], "auto", counting)
    assert counting.batches > 10


def test_an_option_that_there_is_not():
    with pytest.raises(
        ValueError, match=r"`visits` to be one of \['auto', .*'fastest'\] or a Vectorized object, but got 'both'"
    ):
        Federation(visits="both")
