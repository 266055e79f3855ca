"""All methods with every treatment of a model: no client fails, and both entry points give the same bits."""

import itertools

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fed import Availability, FederatedDataModule, Federation, Vectorized
from lightning_fed.algorithms import MOON, FedDyn
from lightning_fed.algorithms.channels import ChannelCallback
from lightning_fed.callbacks import FederatedCallback, SampledSoftmax
from lightning_fed.tasks import ClassificationTask
from tests import models
from tests.breadth import quick
from tests.recorders import Recorder, assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

METHODS = {
    "scaffold": "scaffold",
    "fednova": "fednova",
    "feddyn": FedDyn(0.1),
    "ditto": "ditto",
    "moon": MOON(5.0),
    "qffl": "qffl",
    "fedala": "fedala",
}


def per_step(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}


def norms(scheduler=None):
    return models.Module(models.BaseAndHead(), models.momentum, scheduler)


ROWS = {
    "averaged norms, personal head, scheduler by step": (
        lambda: norms(per_step),
        {"personal": ["net.head.*"], "batch_norm": "average"},
    ),
    "recalibrated norms, stragglers": (
        norms,
        {"batch_norm": "recalibrate", "availability": Availability(stragglers=0.5, client_dropout=0.2)},
    ),
    "personal norms, clipping": (norms, {"batch_norm": "personal", "gradient_clip_val": 0.1}),
    "frozen norms, frozen layer, kept optimizers": (
        norms,
        {"batch_norm": "frozen", "frozen": ["net.base.0.*"], "optimizer_state": "keep"},
    ),
    "half precision": (lambda: models.Module(models.mlp(), models.momentum), {"precision": "bf16-true"}),
    "by hand": (lambda: models.ManualModule(models.norm_mlp()), {}),
}
SIZES = {"ann": 12, "bob": 6, "cid": 20}
QUICK_ROWS = {
    "scaffold": "averaged",
    "fednova": ("personal", "by hand"),
    "feddyn": "half",
    "ditto": "frozen",
    "moon": ("personal", "by hand"),
    "qffl": "recalibrated",
    "fedala": "frozen",
}
NEED_AUTOMATIC_OPTIMIZATION = ("qffl", "fedala", "moon")


@pytest.mark.parametrize("method", METHODS)
def test_clients_that_hold_some_rows_are_refused(method, federated_trainer):
    """Client state for other rows would not fit the rows of the next visit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12))
    task = ClassificationTask(net, num_classes=12, head="sampled_softmax", lr=0.05)
    trainer = federated_trainer(max_rounds=1, method=METHODS[method], callbacks=[SampledSoftmax(num_negatives=2)])
    with pytest.raises(MisconfigurationException, match=r"rows of .*use 'fedavg', for instance"):
        trainer.fit(task, models.as_datasets(models.vectors(SIZES)))


@pytest.mark.parametrize(
    ("method", "row"),
    quick(
        itertools.product(METHODS, ROWS),
        [case for case in itertools.product(METHODS, ROWS) if case[1].startswith(QUICK_ROWS[case[0]])],
    ),
)
def test_table(method, row, federated_trainer, plain_trainer):
    """In the second of two rounds clients use the state stored in the first."""
    make, options = ROWS[row]
    if row == "by hand" and method in NEED_AUTOMATIC_OPTIMIZATION:
        with pytest.raises(MisconfigurationException, match=r"automatic optimization|manual optimization"):
            federated_trainer(max_rounds=1, method=METHODS[method]).fit(make(), models.as_datasets(models.vectors()))
        return
    if method == "fednova" and "optimizer_state" in options:
        with pytest.raises(MisconfigurationException, match="momentum adds gradients from earlier visits"):
            federated_trainer(max_rounds=1, method=METHODS[method], **options).fit(
                make(), models.as_datasets(models.vectors())
            )
        return
    data = FederatedDataModule(models.as_datasets(models.vectors(SIZES)), batch_size=8)
    of_trainer = {name: options[name] for name in ("precision", "gradient_clip_val") if name in options}
    of_federation = {name: value for name, value in options.items() if name not in of_trainer} | {"seed": 3}
    runs = []
    number = list(METHODS).index(method)
    doors = ("trainer", "callback")
    # the first method shows that both entry points agree
    for door in doors if number == 0 else doors[number % 2 :][:1]:
        recorder, module = Recorder(), make()
        federation = Federation(METHODS[method], **of_federation)
        if door == "trainer":
            trainer = federated_trainer(max_rounds=2, federation=federation, callbacks=[recorder], **of_trainer)
        else:
            trainer = plain_trainer(max_epochs=2, callbacks=[federation, recorder], **of_trainer)
        start = state_of(module)
        trainer.fit(module, datamodule=data)
        assert federation.server.report.failed == {}
        assert len(recorder.aggregates) == 2
        runs.append((state_of(module), {client: federation.store.get(client) or {} for client in SIZES}))
    state, kept = runs[0]
    for other_state, other_kept in runs[1:]:
        assert_same(state, other_state)
        for client, values in kept.items():
            assert values.keys() == other_kept[client].keys()
            if values:
                assert_same(values, other_kept[client])
    assert any(not torch.equal(value, start[name].to(value.dtype)) for name, value in state.items())
    assert all(value.isfinite().all() for value in state.values())


@pytest.mark.parametrize("method", [*METHODS, "fedavg"])
def test_weights_do_not_grow_with_the_rounds(method, federated_trainer):
    """All clients join every round, so the weights have a constant sum."""

    class Totals(FederatedCallback):
        def on_server_aggregate(self, trainer, module, state):
            rule = trainer.federation.server.rule
            totals.append((rule.running.total, rule.running.count))

    totals = []
    rule = "qffl:q=0" if method == "qffl" else METHODS.get(method, method)  # with q > 0 the losses change the weights
    trainer = federated_trainer(max_rounds=2, method=rule, callbacks=[Totals()])
    trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(models.vectors(SIZES)))
    equal = method in ("scaffold", "feddyn")
    assert totals == [(3.0 if equal else float(sum(SIZES.values())), 3)] * 2


class Broken(FederatedCallback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1:
            raise RuntimeError("in the middle of a visit")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("method", ["scaffold", "feddyn:alpha=0.1"])
def test_a_fit_that_breaks_off_leaves_nothing_of_a_visit(method, size, federated_trainer):
    """Tensors of a visit are as large as the model, and a callback may be reused for another fit."""
    trainer = federated_trainer(max_rounds=2, method=method, visits=Vectorized(size), callbacks=[Broken()])
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(SIZES)))
    (callback,) = [callback for callback in trainer.callbacks if isinstance(callback, ChannelCallback)]
    assert not any(map(kept, vars(callback).values()))


def kept(value):
    """Whether a container is non-empty; numbers are not containers."""
    return hasattr(value, "__len__") and len(value) > 0
