"""Attributes carried from visit to visit outside messages are named, on every backend."""

import gc
import itertools
import random
import threading
import types
from collections import UserDict, deque, namedtuple
from contextlib import contextmanager, nullcontext
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer, Federation
from lightning_fed.algorithms import FedFusion, FedMA
from lightning_fed.checks.carried_attributes import CarriedAttributes
from lightning_fed.data.dataset_clients import count_batches
from tests import models, warm_process
from tests.backends.flower.halves import on_flower
from tests.breadth import quick

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Center:
    """A running centre in a user's object."""

    def __init__(self):
        self.value = torch.zeros(3)


class Writing(models.Module):
    def __init__(self, write, **attributes):
        super().__init__(models.mlp(), models.momentum)
        self.write = write
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.write(self, outputs.detach())
        return nn.functional.cross_entropy(outputs, batch[1])


class Deprecated:
    """Raises when inspected, like a library's deprecated name."""

    @property
    def __class__(self):
        raise RuntimeError("deprecated")


def replace_tensor(module, outputs):
    module.kept = 0.9 * module.kept + 0.1 * outputs.mean(0)


def write_into_tensor(module, outputs):
    module.kept.data.mul_(0.9)
    module.kept.data.add_(outputs.mean(0))


def count(module, outputs):
    module.kept += len(outputs)


def add_numpy(module, outputs):
    """Turns a number into an array."""
    module.kept = module.kept + np.ones(3)


def append(module, outputs):
    module.kept.append(outputs)


def write_into_mapping(module, outputs):
    module.kept["center"]["mean"].add_(outputs.mean(0))


def write_into_object(module, outputs):
    module.kept.value += outputs.mean(0)


def write_into_array(module, outputs):
    module.kept += outputs.mean(0).numpy()


def write_into_hidden_module(module, outputs):
    module.kept[0].bias.data.add_(outputs.mean(0))


def draw(module, outputs):
    torch.rand(2, generator=module.kept)


def write_into_submodule(module, outputs):
    module.net[0].kept = float(outputs.mean()) + getattr(module.net[0], "kept", 0.0)


def create(module, outputs):
    module.kept = outputs.mean() + getattr(module, "kept", 0.0)


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0


class Table(dict):
    pass


Pair = namedtuple("Pair", ["tensor", "objects"])


def count_in_slots(module, outputs):
    module.kept.value += 1


def write_into_subclass(module, outputs):
    module.kept["mean"] = outputs.mean()


def write_deep(module, outputs):
    module.kept.objects[0].value += 1


def draw_next(module, outputs):
    next(module.kept)


def step_optimizer(module, outputs):
    (weight,) = module.kept.param_groups[0]["params"]
    weight.grad = torch.ones(1)
    module.kept.step()


def step_scheduler(module, outputs):
    module.kept.optimizer.step()
    module.kept.step()


def an_optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1, momentum=0.9)


def a_scheduler():
    return torch.optim.lr_scheduler.StepLR(an_optimizer(), 2)


class Smoothed:
    """A callable object with state, used directly, as a method or inside `partial`."""

    def __init__(self):
        self.value = 1.0

    def __call__(self, loss):
        self.value = 0.5 * self.value + 0.5 * float(loss)


def call_with_mean(module, outputs):
    module.kept(outputs.mean())


def normalise_by_metric(module, outputs):
    module.kept.update(outputs.mean())
    module.kept.compute()


def normalise_by_listed_metric(module, outputs):
    module.kept[0](outputs.mean())
    module.kept[0].compute()


KEPT = {
    "a callable object": (call_with_mean, Smoothed),
    "a callable object in a partial": (call_with_mean, lambda: partial(Smoothed())),
    "a metric": (normalise_by_metric, torchmetrics.MeanMetric),
    "a metric in a list": (normalise_by_listed_metric, lambda: [torchmetrics.MeanMetric()]),
    "a tensor that is replaced": (replace_tensor, lambda: torch.zeros(3)),
    "a tensor that is written into": (write_into_tensor, lambda: torch.zeros(3)),
    "a counter": (count, lambda: 0),
    "a NumPy counter": (count, lambda: np.float64(0.0)),
    "a NumPy number and an array": (add_numpy, lambda: np.float64(0.0)),
    "a list": (append, list),
    "a queue": (append, lambda: deque(maxlen=2)),
    "a nested mapping": (write_into_mapping, lambda: {"center": {"mean": torch.zeros(3)}}),
    "an object": (write_into_object, Center),
    "an array": (write_into_array, lambda: np.zeros(3, dtype=np.float32)),
    "a module in a list": (write_into_hidden_module, lambda: [nn.Linear(2, 3)]),
    "a generator": (draw, lambda: torch.Generator().manual_seed(0)),
    "an attribute of a submodule": (write_into_submodule, None),
    "a new attribute": (create, None),
    "an object with slots": (count_in_slots, Slots),
    "a subclass of a mapping": (write_into_subclass, Table),
    "an object deep inside": (write_deep, lambda: Pair(torch.zeros(1), [Center()])),
    "an iterator": (draw_next, lambda: iter(range(10**6))),
    "a generator function": (draw_next, lambda: (number for number in range(10**6))),
    "a scheduler": (step_scheduler, a_scheduler),
}


def carried(caplog):
    return [record.getMessage() for record in caplog.records if record.name.endswith(".carried_attributes")]


SIMILAR = {"a callable object", "a counter", "a nested mapping", "a queue", "an object"}


@pytest.mark.parametrize("kind", quick(KEPT, KEPT.keys() - SIMILAR))
def test_what_passes_from_client_to_client_is_named_once(kind, either_trainer, caplog):
    write, make = KEPT[kind]
    module = Writing(write, **({} if make is None else {"kept": make()}))
    either_trainer(3, seed=0).fit(module, datamodule=FederatedDataModule(models.as_datasets(models.vectors())))
    (message,) = carried(caplog)
    number = 2 if write in (append, write_into_subclass) else 1  # empty lists are excluded
    assert message.startswith(f"Round {number}: visits changed these attributes of Writing: `")
    name = {write_into_submodule: "net.0.kept", normalise_by_listed_metric: "kept[0]"}.get(write, "kept")
    assert f"`{name}`" in message
    is_metric = write in (normalise_by_metric, normalise_by_listed_metric)
    assert ("reset metrics" if is_metric else "`register_buffer(name, tensor)`") in message


class Evaluates(L.Callback):
    """Adds a head with an optimizer, as in tutorials on self-supervised training."""

    def on_fit_start(self, trainer, module):
        torch.manual_seed(7)
        module.probe = nn.Linear(3, 3)
        self.adam = torch.optim.Adam(module.probe.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        nn.functional.cross_entropy(module.probe(module(batch[0]).detach()), batch[1]).backward()
        self.adam.step()
        self.adam.zero_grad()


class StepsByHand(models.Module):
    """Has an optimizer in an attribute."""

    def __init__(self):
        super().__init__(models.mlp())
        self.automatic_optimization = False
        self.held = [torch.optim.Adam(self.parameters(), 0.01)]

    def training_step(self, batch, batch_idx):
        self.held[0].zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        self.held[0].step()

    def configure_optimizers(self):
        return None


class Fast(torch.optim.SGD):
    """Wraps an optimizer with a state."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.01)
        self.fast = torch.optim.Adam(self.param_groups[0]["params"], 0.01)

    def step(self, closure=None):
        return self.fast.step(closure)


HELD = {
    "callback": (lambda: models.Module(models.mlp()), lambda: [Evaluates()]),
    "module": (StepsByHand, list),
    "optimizer": (lambda: models.Module(models.mlp(), Fast), list),
}


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("kind", HELD)
def test_an_optimizer_in_an_attribute_begins_every_visit_anew(kind, federated_trainer, plain_trainer, caplog):
    """Each visit is a plain fit, and the server takes the mean."""
    make, callbacks = HELD[kind]
    datasets = models.as_datasets(models.vectors({"ann": 16, "bob": 16}))
    clients = {name: DataLoader(data, 8) for name, data in datasets.items()}
    state = {}

    class Loads(L.Callback):
        def on_train_start(self, trainer, module):
            module.load_state_dict({**module.state_dict(), **state})

    for _ in range(2):
        trained = []
        for client in clients.values():
            module = make()
            plain_trainer(max_epochs=1, callbacks=[*callbacks(), Loads()]).fit(module, client)
            trained.append(module.state_dict())
        state = {name: sum(each[name] for each in trained) / len(trained) for name in trained[0]}
    module = make()
    federated_trainer(max_rounds=2, callbacks=callbacks()).fit(module, clients)
    torch.testing.assert_close(dict(module.state_dict()), state)
    assert not carried(caplog)


def test_a_kept_optimizer_has_to_be_one_of_the_trainer(federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=2, optimizer_state="keep")
    with pytest.raises(MisconfigurationException, match=r"`Fast\.fast`, .*`optimizer_state`"):
        trainer.fit(models.Module(models.mlp(), Fast), models.as_datasets(models.vectors()))
    module = Writing(step_optimizer, kept=an_optimizer())
    federated_trainer(max_rounds=2, optimizer_state="keep").fit(module, models.as_datasets(models.vectors()))
    (message,) = carried(caplog)
    assert "`kept`" in message
    assert "`optimizer_state`" in message


def test_what_changes_only_later_is_named_in_the_round_after(federated_trainer, caplog):
    def write(module, outputs):
        if module.current_epoch >= 2:
            module.late = outputs.mean() + (module.late or 0.0)

    federated_trainer(max_rounds=5).fit(Writing(write, late=None), models.as_datasets(models.vectors()))
    (message,) = carried(caplog)
    assert message.startswith("Round 4:")


def test_of_one_visit_in_a_round_it_is_the_next_round_that_shows_it(federated_trainer, caplog):
    module = Writing(count, kept=0)
    federated_trainer(max_rounds=3, clients_per_round=1).fit(module, models.as_datasets(models.vectors()))
    (message,) = carried(caplog)
    assert message.startswith("Round 2:")


# --- Caches -----------------------------------------------------------------------------------------------------------


def cache(module, outputs):
    """Writes and reads a transform, as kornia does."""
    module.kept = {"mean": outputs.mean(0)}
    assert module.kept["mean"] is not None


def cache_in_layer(module, outputs):
    module.net[0].transform = outputs.mean(0)
    module.net[0].last = module.net[0].transform + 1


def keep_for_the_log(module, outputs):
    module.kept = float(outputs.mean())


def forget(module, outputs):
    module.kept = outputs
    del module.kept


CACHES = {"a cache": cache, "caches of a layer": cache_in_layer, "a last value": keep_for_the_log, "gone": forget}


@pytest.mark.parametrize("kind", CACHES)
def test_what_a_visit_writes_before_it_reads_is_not_named(kind, either_trainer, caplog):
    module = Writing(CACHES[kind])
    either_trainer(3, seed=0).fit(module, datamodule=FederatedDataModule(models.as_datasets(models.vectors())))
    assert not carried(caplog)
    classes = (type(module), type(module.net[0]))
    assert not any(name in vars(kind) for kind in classes for name in ("kept", "transform", "last"))


def test_a_class_has_its_own_default_again(federated_trainer, caplog):
    class Defaults(Writing):
        kept = 0

    module = Defaults(count)
    federated_trainer(max_rounds=2).fit(module, models.as_datasets(models.vectors()))
    assert "`kept`" in carried(caplog)[0]
    assert Defaults.kept == 0
    assert module.kept > 0


class Fails(Writing):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch == 1:
            raise KeyError("ends the fit")


def test_a_fit_that_fails_leaves_the_classes_alone(federated_trainer):
    module = Fails(count, kept=0)
    with pytest.raises(KeyError, match="ends the fit"):
        federated_trainer(max_rounds=3).fit(module, models.as_datasets(models.vectors({"a": 9})))
    assert "kept" not in vars(Fails)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_hooks_compute_are_no_state(norm, federated_trainer, caplog):
    """Legacy hooks compute the weight before each use, without gradients in validation."""

    class Normed(models.Module):
        def __init__(self):
            super().__init__(nn.Sequential(norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3)), models.momentum)
            self.recurrent = norm(nn.LSTM(2, 2), "weight_hh_l0")

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.recurrent(torch.ones(1, 1, 2))[0].sum()

        def validation_step(self, batch, batch_idx):
            self.recurrent(torch.ones(1, 1, 2))
            return super().validation_step(batch, batch_idx)

    clients = models.as_datasets(models.vectors())
    federated_trainer(max_rounds=3).fit(Normed(), datamodule=FederatedDataModule(clients, val=clients["ann"]))
    assert not carried(caplog)


# --- Callbacks --------------------------------------------------------------------------------------------------------


class Keeps(L.Callback):
    def __init__(self, write, kept):
        self.write, self.kept = write, kept

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.write(self, pl_module)


def follow(callback, module):
    weight = module.net[0].weight.detach()
    callback.kept = weight.clone() if callback.kept is None else 0.9 * callback.kept + 0.1 * weight


def follow_in_module(callback, module):
    callback.kept[0].weight.data.lerp_(module.net[0].weight.data, 0.1)


def count_batches_in(callback, module):
    callback.kept += 1


def write_anew(callback, module):
    callback.kept = module.net[0].weight.detach().clone()


CALLBACKS = {
    "an average": (follow, lambda: None, True),
    "a copy of a layer": (follow_in_module, lambda: [nn.Linear(6, 8)], True),
    "a number": (count_batches_in, lambda: 0, False),
    "a last value": (write_anew, lambda: None, False),
}


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_callback_with_tensors_is_named(kind, federated_trainer, caplog):
    write, make, is_named = CALLBACKS[kind]
    trainer = federated_trainer(max_rounds=2, callbacks=[Keeps(write, make())])
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors()))
    messages = carried(caplog)
    assert len(messages) == is_named
    assert not is_named or "`Keeps.kept`" in messages[0]
    assert not is_named or "`on_client_start`" in messages[0]


def follow_norm(callback, module):
    callback.kept.append(float(module.net[0].weight.grad.norm()))


def clip_to_mean_norm(callback, module):
    follow_norm(callback, module)
    nn.utils.clip_grad_norm_(module.parameters(), sum(callback.kept) / len(callback.kept))


def decay_rate(callback, module):
    callback.kept += 1
    module.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / callback.kept


def perturb(callback, module):
    callback.kept = 0.9 * callback.kept
    module.net[0].weight.data.add_(callback.kept)


def scale_gradients(callback, module):
    """Writes the number before reading."""
    callback.kept = 0.5
    for parameter in module.parameters():
        parameter.grad *= callback.kept


class ResetsMetric(FederatedCallback):
    def on_client_start(self, trainer, pl_module, client, broadcast):
        pl_module.kept.reset()


@pytest.mark.parametrize("resets", [False, True])
def test_a_metric_that_a_callback_resets_is_not_named(resets, federated_trainer, caplog):
    module = Writing(normalise_by_metric, kept=torchmetrics.MeanMetric())
    federated_trainer(max_rounds=3, callbacks=[ResetsMetric()] * resets).fit(
        module, models.as_datasets(models.vectors())
    )
    assert len(carried(caplog)) == (not resets)
    assert not {"forward", "reset"} & vars(module.kept).keys()


class Steps(Keeps):
    def on_train_batch_end(self, *args):
        pass

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.write(self, pl_module)


@pytest.mark.parametrize(
    ("write", "kept", "round"),
    [
        (follow_norm, [], None),
        (count_batches_in, 0, None),
        (scale_gradients, 0.0, None),
        (clip_to_mean_norm, [], 1),
        (decay_rate, 0, 0),
        (perturb, 1.0, 0),
    ],
)
def test_numbers_of_a_callback_that_changes_the_training_are_refused(write, kept, round, federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=3, callbacks=[Keeps(count_batches_in, 0), Steps(write, kept)])
    module, clients = models.Module(models.mlp()), models.as_datasets(models.vectors())
    if round is None:
        trainer.fit(module, clients)
    else:
        with pytest.raises(MisconfigurationException, match=r"`Steps\.kept`, .* in `on_client_start` of"):
            trainer.fit(module, clients)
        assert trainer.current_epoch == round
    assert not carried(caplog)
    assert not any(name.startswith("on_") for callback in trainer.callbacks for name in vars(callback))


class Forwards(L.Callback):
    """Calls another callback's hook with named arguments."""

    def __init__(self, inner):
        self.inner = inner

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.inner.on_train_batch_end(
            trainer=trainer, pl_module=pl_module, outputs=outputs, batch=batch, batch_idx=batch_idx
        )


def test_a_callback_may_call_a_hook_of_another_callback_with_named_arguments(federated_trainer, caplog):
    inner = Keeps(count_batches_in, 0)
    trainer = federated_trainer(max_rounds=1, callbacks=[inner, Forwards(inner)])
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors()))
    assert inner.kept == 2 * trainer.num_training_batches
    assert not carried(caplog)


def test_a_new_callback_in_the_memory_of_an_earlier_callback_may_count(federated_trainer, caplog):
    module, clients = models.Module(models.mlp()), models.as_datasets(models.vectors())
    trainer = federated_trainer(max_rounds=1, callbacks=[Steps(scale_gradients, 0.0)])
    trainer.fit(module, clients)
    address = id(trainer.callbacks.pop(next(i for i, each in enumerate(trainer.callbacks) if isinstance(each, Steps))))
    del trainer
    module.trainer = None
    gc.collect()
    others = []
    while id(counting := Steps(count_batches_in, 0)) != address and len(others) < 10_000:
        others.append(counting)
    federated_trainer(max_rounds=2, callbacks=[counting]).fit(module, clients)
    assert not carried(caplog)


# --- Optimizers and schedulers ----------------------------------------------------------------------------------------


class Momentum(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, 0.01)
        self.buffers = {}

    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            self.buffers[parameter] = 0.9 * self.buffers.get(parameter, 0.0) + parameter.grad
            parameter -= 0.01 * self.buffers[parameter]
        return loss


class Counting(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, 0.01)
        self._count = 0

    def step(self, closure=None):
        self._count += 1
        self.param_groups[0]["lr"] = 0.01 / self._count
        return super().step(closure)


class InState(torch.optim.SGD):
    """Counts in the parameter groups, with a constant and a cache."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.01, momentum=0.9)
        self.scale, self.last = 1.0, None
        self.param_groups[0]["count"] = 0

    def step(self, closure=None):
        self.param_groups[0]["count"] += self.scale
        self.last = self.param_groups[0]["count"]
        return super().step(closure)


OPTIMIZERS = {Momentum: "buffers", Counting: "_count", InState: None, torch.optim.Adam: None}


@pytest.mark.parametrize("clients_per_round", [2, 1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_attributes_of_an_optimizer_are_refused(kind, clients_per_round, federated_trainer, caplog):
    module, clients = models.Module(models.mlp(), kind), models.as_datasets(models.vectors())
    trainer = federated_trainer(max_rounds=3, clients_per_round=clients_per_round)
    if OPTIMIZERS[kind] is None:
        trainer.fit(module, clients)
        assert not carried(caplog)
        return
    with pytest.raises(MisconfigurationException, match=rf"`{kind.__name__}\.{OPTIMIZERS[kind]}`.*`self\.state\["):
        trainer.fit(module, clients)
    assert trainer.current_epoch == (clients_per_round == 1)


@pytest.mark.parametrize("kind", [Momentum, Counting])
def test_one_client_and_a_second_fit_may_have_any_optimizer(kind, federated_trainer, caplog):
    """One client trains as in a plain fit, and a second fit has another optimizer."""
    module, data = models.Module(models.mlp(), kind), models.vectors()
    federated_trainer(max_rounds=2).fit(module, {"ann": models.as_datasets(data)["ann"]})
    caplog.clear()
    for _ in range(2):
        trainer = federated_trainer(max_rounds=1, clients_per_round=1)
        trainer.fit(module, models.as_datasets(data))
    assert not carried(caplog)


class LazyConstant(torch.optim.SGD):
    """Makes a constant in the first step, as `torch.optim.LBFGS` does."""

    num_steps = 0

    def __init__(self, parameters):
        super().__init__(parameters, 0.01)
        self.numel = None

    def step(self, closure=None):
        if self.numel is None:
            self.numel = sum(each.numel() for each in self.param_groups[0]["params"])
        return super().step(closure)


def test_a_constant_from_the_first_visit_is_named_only(federated_trainer, caplog):
    module = models.Module(models.mlp(), LazyConstant)
    federated_trainer(max_rounds=3).fit(module, models.as_datasets(models.vectors()))
    (message,) = carried(caplog)
    assert "`LazyConstant.numel`" in message


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """Counts in an attribute missing in `state_dict`."""

    def __init__(self, optimizer):
        self.count = 0
        super().__init__(optimizer)

    def get_lr(self):
        self.count += 1
        return [0.001 * self.count for _ in self.base_lrs]

    def state_dict(self):
        return {name: value for name, value in super().state_dict().items() if name != "count"}


class Saved(Warmup):
    def state_dict(self):
        return {**super().state_dict(), "count": self.count}


@pytest.mark.parametrize(
    ("kind", "interval", "is_named"),
    [(Warmup, "step", True), (Warmup, "epoch", False), (Saved, "step", False)],
)
def test_attributes_that_a_scheduler_does_not_save_are_refused(kind, interval, is_named, federated_trainer, caplog):
    module = models.Module(models.mlp(), scheduler=lambda each: {"scheduler": kind(each), "interval": interval})
    is_refused = pytest.raises(MisconfigurationException, match=r"`Warmup\.count`, .*scheduler in `state_dict`")
    with is_refused if is_named else nullcontext():
        federated_trainer(max_rounds=3).fit(module, models.as_datasets(models.vectors()))
    assert not carried(caplog)


# --- classes and closures ---------------------------------------------------------------------------------------------


def _count_in_class(module, outputs):
    type(module).total += 1


def _append_to_class(module, outputs):
    type(module).total.append(len(outputs))


@pytest.mark.parametrize(("write", "total"), [(_count_in_class, 0), (_append_to_class, [1])])
def test_values_of_a_class_are_named(write, total, federated_trainer, caplog):
    class Counted(Writing):
        pass

    Counted.total = total
    federated_trainer(max_rounds=2).fit(Counted(write), models.as_datasets(models.vectors()))
    (message,) = carried(caplog)
    assert "Round 1: visits changed these attributes of Counted: `total`." in message
    assert Counted.total not in (0, [1])


_total = 0


def test_variables_in_closures_and_globals_are_named(federated_trainer, caplog):
    mean, options, seen = 0.0, {"mean": 0.0}, itertools.count()

    def make_loss():
        scale = torch.ones(1)

        def loss(outputs, targets):
            scale.mul_(0.9).add_(outputs.detach().mean() * 0.1)
            return nn.functional.cross_entropy(outputs, targets) / scale.sum()

        return loss

    class Closed(models.Module):
        def training_step(self, batch, batch_idx):
            global _total
            nonlocal mean
            _total += 1
            mean = 0.9 * mean + float(batch[0].mean())
            options["mean"] = mean
            next(seen)
            return super().training_step(batch, batch_idx)

    module = Closed(models.mlp(), loss=make_loss())
    federated_trainer(max_rounds=2).fit(module, models.as_datasets(models.vectors()))
    (message,) = carried(caplog)
    names = ["loss", *(f"training_step.{name}" for name in ("_total", "mean", "options", "seen"))]
    assert f"attributes of Closed: {', '.join(f'`{name}`' for name in names)}." in message


# --- no false alarms --------------------------------------------------------------------------------------------------

ORDINARY_OPTIMIZERS = {
    **{name: getattr(torch.optim, name) for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )},
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "foreach": partial(torch.optim.Adam, foreach=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}  # fmt: skip
schedulers = torch.optim.lr_scheduler
ORDINARY_SCHEDULERS = {
    "OneCycleLR": lambda each: schedulers.OneCycleLR(each, 0.01, total_steps=100),
    "CosineAnnealingWarmRestarts": lambda each: schedulers.CosineAnnealingWarmRestarts(each, 3),
    "CyclicLR": lambda each: schedulers.CyclicLR(each, 0.001, 0.01, cycle_momentum=False),
    "LambdaLR": lambda each: schedulers.LambdaLR(each, lambda step: 0.9**step),
    "MultiplicativeLR": lambda each: schedulers.MultiplicativeLR(each, lambda step: 0.9),
    "SequentialLR": lambda each: schedulers.SequentialLR(
        each, [schedulers.LinearLR(each), schedulers.ExponentialLR(each, 0.9)], [3]
    ),
    "ChainedScheduler": lambda each: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(each), schedulers.PolynomialLR(each)]
    ),
}


# Optimizers with different kinds of state. LBFGS, with lists of tensors, runs in the slow tests.
@pytest.mark.parametrize("kind", quick(ORDINARY_OPTIMIZERS, ["Adafactor", "Adam", "ASGD", "foreach", "momentum"]))
def test_ordinary_optimizers_are_no_state(kind, federated_trainer, caplog):
    make = partial(ORDINARY_OPTIMIZERS[kind], lr=0.001)
    federated_trainer(max_rounds=2).fit(models.Module(models.mlp(), make), models.as_datasets(models.vectors()))
    assert not carried(caplog)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize(
    "kind", quick(ORDINARY_SCHEDULERS, ["OneCycleLR", "LambdaLR", "SequentialLR", "ChainedScheduler"])
)
def test_ordinary_schedulers_are_no_state(kind, federated_trainer, caplog):
    scheduler = ORDINARY_SCHEDULERS[kind]
    module = models.Module(models.mlp(), models.sgd, lambda each: {"scheduler": scheduler(each), "interval": "step"})
    federated_trainer(max_rounds=2).fit(module, models.as_datasets(models.vectors()))
    assert not carried(caplog)


class Stops(L.pytorch.callbacks.EarlyStopping):
    """A user's subclass counts rounds without progress."""

    def __init__(self):
        super().__init__("val_loss", patience=0, min_delta=1e9, check_on_train_epoch_end=False)


class Times(L.pytorch.callbacks.Timer):
    pass


class FollowsLosses(L.Callback):
    """Plots a mean loss with an own smoothing."""

    def __init__(self):
        self.smoothed, self.losses, self.matrix = 0.0, [], torchmetrics.ConfusionMatrix("multiclass", num_classes=3)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.smoothed = 0.9 * self.smoothed + 0.1 * float(outputs["loss"])
        self.losses.append(self.smoothed)
        self.matrix.update(module(batch[0]), batch[1])


def test_ordinary_callbacks_and_metrics_are_no_state(tmp_path, caplog):
    callbacks = L.pytorch.callbacks
    measured = torchmetrics.MetricCollection(
        {
            "f1": torchmetrics.F1Score("multiclass", num_classes=3),
            "auroc": torchmetrics.AUROC("multiclass", num_classes=3),
        }
    )

    class Measured(models.Module):
        def __init__(self):
            super().__init__(models.mlp())
            self.measured, self.running = measured.clone("train_"), torchmetrics.aggregation.RunningMean(3)
            self.tracked = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)

        def on_train_epoch_start(self):
            self.tracked.increment()

        def training_step(self, batch, batch_idx):
            outputs = self(batch[0])
            self.measured.update(outputs.detach().softmax(1), batch[1])
            loss = nn.functional.cross_entropy(outputs, batch[1])
            self.running.update(loss.detach())
            self.tracked.update(loss.detach())
            self.log_dict(self.measured, on_step=False, on_epoch=True)
            return loss

    trainer = FederatedTrainer(
        max_rounds=3,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        callbacks=[
            Stops(), Times("00:01:00:00"), FollowsLosses(),
            callbacks.EarlyStopping("val_loss"), callbacks.ModelCheckpoint(tmp_path, monitor="val_loss"),
            callbacks.LearningRateMonitor("step"), callbacks.Timer("00:01:00:00"), callbacks.TQDMProgressBar(),
            callbacks.DeviceStatsMonitor(cpu_stats=True), callbacks.ModelSummary(), callbacks.LambdaCallback(),
            callbacks.EMAWeightAveraging() if hasattr(callbacks, "EMAWeightAveraging") else callbacks.Callback(),
        ],
    )  # fmt: skip
    clients = models.as_datasets(models.vectors())
    trainer.fit(Measured(), datamodule=FederatedDataModule(clients, clients["ann"]))
    assert trainer.current_epoch == 2  # by the user's subclass
    assert not carried(caplog)


def test_an_optimizer_of_the_trainer_is_none_of_the_modules(federated_trainer, caplog):
    class Holds(models.Module):
        def configure_optimizers(self):
            self.adam = torch.optim.Adam(self.parameters())
            self.schedule = torch.optim.lr_scheduler.StepLR(self.adam, 1)
            return [self.adam], [self.schedule]

        def training_step(self, batch, batch_idx):
            assert self.adam.param_groups
            assert self.schedule.get_last_lr()
            return super().training_step(batch, batch_idx)

    federated_trainer(max_rounds=3).fit(Holds(models.mlp()), models.as_datasets(models.vectors()))
    assert not carried(caplog)


@contextmanager
def in_evaluation():
    yield


class Plain(models.Module):
    """Changes many attributes in a visit, without an effect on the next visit."""

    def __init__(self):
        super().__init__(models.norm_mlp(), models.momentum)
        self.register_buffer("center", torch.zeros(3), persistent=False)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.meters = [torchmetrics.MeanMetric()]
        self.collected = []
        self.trained = list(self.net.parameters())
        self.view = self.net[0].weight.detach()[0]
        self.recurrent = nn.LSTM(2, 2)
        self.limits = {"low": 0.0, "high": float("nan")}
        self.worst = float("nan")
        prune.l1_unstructured(self.net[0], "weight", amount=0.2)
        prune.l1_unstructured(self.recurrent, "weight_hh_l0", amount=0.2)

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.center.copy_(outputs.detach().mean(0))
        self.accuracy(outputs, batch[1])
        self.meters[0].update(outputs.detach().mean())
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.last_outputs = outputs  # includes the graph, which is useless after the step
        return nn.functional.cross_entropy(outputs, batch[1])

    @torch.no_grad()
    @in_evaluation()
    def initialise(self):
        """The decorators hold a generator that never starts, as in transformers."""


def test_what_no_visit_leaves_to_the_next_is_not_named(federated_trainer, caplog):
    federated_trainer(max_rounds=2).fit(Plain(), models.as_datasets(models.vectors()))
    assert not carried(caplog)


def test_layers_of_the_package_are_not_named(federated_trainer, caplog):
    module, federation = (
        models.Module(models.cnn(), models.momentum),
        Federation(FedFusion("conv"), batch_norm="average"),
    )
    federated_trainer(federation=federation, max_rounds=1).fit(module, models.as_datasets(models.images()))
    assert not carried(caplog)


@pytest.mark.parametrize(
    "net", quick([models.cnn, models.norm_mlp], [models.norm_mlp]), ids=["convolutions", "BatchNorm"]
)
def test_widths_that_the_rule_changes_are_not_named(net, federated_trainer, caplog):
    """Widths follow the tensors in the messages."""
    module, rule = models.Module(net(), models.momentum), FedMA(score="published", gamma=7.0, initial="independent")
    data = models.images() if net is models.cnn else models.vectors()
    federated_trainer(max_rounds=3, method=rule).fit(module, models.as_datasets(data))
    assert len(next(module.parameters())) > len(next(net().parameters()))
    assert not carried(caplog)


def test_outputs_are_collected_over_the_epoch(either_trainer, caplog):
    """The idiom of Lightning 2: outputs of all visits are available at the end of the round."""

    class Collecting(models.Module):
        def on_train_epoch_start(self):
            self.collected = []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.collected.append(loss.detach())
            return loss

        def on_train_epoch_end(self):
            lengths.append(len(self.collected))
            self.log("mean_loss", torch.stack(self.collected).mean())

    lengths = []
    data = FederatedDataModule(models.as_datasets(models.vectors()), batch_size=16)
    trainer = either_trainer(2)
    trainer.fit(Collecting(models.mlp()), datamodule=data)
    assert lengths == [sum(count_batches(len(client), 16) for client in data.clients.values())] * 2
    assert "mean_loss" in trainer.callback_metrics
    assert not carried(caplog)


def test_on_flower_each_is_named_once_as_well(tmp_path, caplog):
    """On Flower a visit is a separate fit of the same module."""

    def write(module, outputs):
        module.kept += 1

    on_flower(tmp_path, lambda: Writing(write, kept=0), models.vectors({"ann": 9, "bob": 20}), Federation, rounds=2)
    messages = carried(caplog)
    assert len(messages) == 2  # one for each node
    assert all("`kept`" in message for message in messages)


@pytest.mark.slow
def test_each_of_several_processes_names_what_its_visits_leave(tmp_path):
    warm_process.run("tests.checks.carried_script", tmp_path)
    for rank in range(2):
        (message,) = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert "visits changed these attributes of Counting: `count`." in message


def changed_by(module, change):
    """Attributes with changes, after a check for none before."""
    attributes = CarriedAttributes(module, L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"))
    attributes.start_round()
    attributes.start_visit()
    before = attributes._fingerprints()  # noqa: SLF001
    assert not attributes._differences(before, attributes._fingerprints())  # noqa: SLF001
    change()
    return attributes._differences(before, attributes._fingerprints())  # noqa: SLF001


def test_generators_of_all_kinds_are_noted():
    module = L.LightningModule()
    module.generators = [
        random.Random(0),
        np.random.default_rng(0),
        np.random.RandomState(0),
        torch.Generator().manual_seed(0),
    ]
    for generator in module.generators:
        draw = (
            partial(torch.rand, 1, generator=generator) if isinstance(generator, torch.Generator) else generator.random
        )
        assert changed_by(module, draw) == ["generators"]


def test_a_generator_changes_with_the_first_value():
    def batches(batch):
        yield batch

    module = L.LightningModule()
    module.generator = batches(torch.zeros(2))
    assert changed_by(module, lambda: next(module.generator)) == ["generator"]
    module.generator = batches(torch.zeros(2))
    assert changed_by(module, lambda: None) == []
    assert changed_by(module, lambda: setattr(module, "generator", batches(torch.ones(2)))) == ["generator"]


def test_a_pruned_recurrent_layer_ends_no_fit():
    """Pruned weights are not parameters, so the layer has no widths."""
    module = L.LightningModule()
    module.recurrent = nn.LSTM(2, 3)
    prune.l1_unstructured(module.recurrent, "weight_hh_l0", amount=0.2)
    assert changed_by(module, lambda: setattr(module.recurrent, "seen", 1)) == ["recurrent.seen"]


def test_of_what_cannot_be_read_the_rest_is():
    """Attributes without values or with cycles do not end the fit or hide other attributes."""
    module = L.LightningModule()
    module.lazy = [nn.LazyLinear(2), {"seen": 0}]
    module.meta = torch.zeros(3, device="meta")
    module.cycle = [Center()]
    module.cycle.append(module.cycle)
    module.lock = threading.Lock()
    assert changed_by(module, lambda: module.lazy[1].update(seen=1)) == ["lazy"]
    assert changed_by(module, lambda: module.cycle[0].value.add_(1)) == ["cycle"]


def test_python_modules_in_attributes_are_skipped(federated_trainer, caplog):
    """A Python module in an attribute is no state, and may have names that cannot be inspected."""
    library = types.ModuleType("library")
    library.deprecated, library.count = Deprecated(), 0

    def write(module, outputs):
        library.count += 1

    module = Writing(write, library=library)
    federated_trainer(max_rounds=2, seed=0).fit(module, models.as_datasets(models.vectors()))
    assert library.count
    assert not [message for message in caplog.messages if "visits changed" in message]


def test_a_configuration_with_missing_values_is_not_read(federated_trainer):
    """As in OmegaConf, where a missing value raises an error."""

    class Configuration(UserDict):
        def values(self):
            raise KeyError("path")

    own = models.Module(models.mlp())
    own.configuration = Configuration(lr=0.1)
    trainer = federated_trainer(max_rounds=2, seed=0)
    trainer.fit(own, datamodule=FederatedDataModule(models.as_datasets(models.vectors({"a": 8, "b": 8})), batch_size=4))
    assert trainer.callback_metrics["fed/clients"] == 2
