"""One table of models, data and options: the same checks for every row, with both rules and both entry points.

A row uses each rule and each entry point once; half of the rows combine rule and entry point the other way.
"""

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import Availability, Faults, FederatedCallback, FederatedDataModule, Federation, LocalStatistics
from lightning_fed.algorithms import FedBN, FedPer
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.data import ByGroup, LazyClients
from tests import models
from tests.breadth import quick, slow
from tests.recorders import MemoryLogger, Recorder, assert_same, bytes_of, fit_fixed, state_of
from tests.references import (
    average_reference,
    batch_norm_reference,
    cohort_reference,
    recalibration_seed_reference,
    seed_reference,
    visit_batches_reference,
    visit_seed_reference,
)
from tests.references_batch_norm import normalised_by_batch

# The plain fits used for comparison only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SEED = 5
FEW = {"ann": 10, "bob": 5, "cid": 17}


@dataclass
class Row:
    """A row of the table.

    Args:
        module: Makes the module; equal in every call.
        clients: Tensors by client.
        options: Options of the federation.
        trainer: Options of the Trainer.
        rounds: Number of rounds.
        replayed: Rounds with visits repeated by a plain Trainer.
        personal: Whether an entry is personal.
        frozen: Whether an entry never changes.
        recalibrated: Whether an entry is measured after aggregation.
        plain: Makes another module for the plain Trainer.
    """

    module: Callable
    clients: dict = field(default_factory=models.vectors)
    options: dict = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)
    rounds: int = 2
    replayed: tuple = (0, 1)
    personal: Callable = lambda name: False
    frozen: Callable = lambda name: False
    recalibrated: Callable = lambda name: False
    plain: Callable | None = None


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def per_step(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}


class TwoRates(models.Module):
    """Parameter groups with separate settings, one group without a gradient."""

    def configure_optimizers(self):
        self.net.base[0].bias.requires_grad_(False)
        groups = [
            {"params": self.net.base.parameters(), "lr": 0.01, "weight_decay": 0.1},
            {"params": self.net.head.parameters(), "lr": 0.2, "momentum": 0.5},
        ]
        return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


class FrozenNorm(models.Module):
    """Reference for `batch_norm="frozen"`: BatchNorm trains with unchanged running statistics."""

    def on_train_start(self):
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()


class FrozenBias(models.Module):
    """Reference for `frozen=["net.output.bias"]`: a bias without gradient."""

    def configure_optimizers(self):
        self.net.output.bias.requires_grad_(False)
        return super().configure_optimizers()


class Compiled(models.Module):
    """A module with a compiled network (without a C++ compiler)."""

    def __init__(self):
        super().__init__(torch.compile(models.norm_mlp(), backend="eager"), models.momentum)


def is_statistic(name):
    return "running" in name or "num_batches" in name


def is_head(name):
    return name.startswith("net.head.")


TABLE = {
    "mlp": Row(lambda: models.Module(models.mlp(), models.momentum)),
    "dropout, adam, steps, three of five": Row(
        lambda: models.Module(models.dropout_mlp(), models.adam),
        options={"local_steps": 4, "clients_per_round": 3},
        rounds=3,
    ),
    "batch norm averaged, clipping": Row(
        lambda: models.Module(models.cnn(), models.momentum), models.images(), trainer={"gradient_clip_val": 0.5}
    ),
    "batch norm recalibrated": Row(
        lambda: models.Module(models.cnn(), models.momentum),
        models.images(),
        options={"batch_norm": "recalibrate", "clients_per_round": 0.6},
        recalibrated=lambda name: "running" in name,
    ),
    "batch norm personal": Row(
        lambda: models.Module(models.BaseAndHead(), models.momentum),
        options={"batch_norm": "personal"},
        personal=lambda name: name.startswith("net.base.1."),
    ),
    "batch norm local": Row(
        lambda: models.Module(models.BaseAndHead(), models.momentum),
        options={"batch_norm": LocalStatistics(), "clients_per_round": 3},
        rounds=3,
        frozen=is_statistic,
    ),
    "batch norm frozen": Row(
        lambda: models.Module(models.BaseAndHead(), models.momentum),
        options={"batch_norm": "frozen"},
        frozen=is_statistic,
        plain=lambda: FrozenNorm(models.BaseAndHead(), models.momentum),
    ),
    "personal head": Row(
        lambda: models.Module(models.BaseAndHead(), models.adam),
        options={"personal": ["net.head.*"], "clients_per_round": 3, "local_epochs": 2},
        rounds=4,
        replayed=(0, 3),
        personal=is_head,
    ),
    "personal by type": Row(
        lambda: models.Module(models.BaseAndHead(), models.sgd),
        options={"personal": [nn.BatchNorm1d, "net.head.bias"]},
        personal=lambda name: name == "net.head.bias" or name.startswith("net.base.1."),
    ),
    "tied, frozen bias": Row(
        lambda: models.Module(models.Tied(), models.momentum),
        models.sentences(),
        options={"frozen": ["net.output.bias"]},
        frozen=lambda name: name == "net.output.bias",
        plain=lambda: FrozenBias(models.Tied(), models.momentum),
    ),
    "lstm": Row(
        lambda: models.Module(models.Recurrent(), models.adam), models.sentences(), trainer={"gradient_clip_val": 1.0}
    ),
    "two optimizers": Row(models.TwoOptimizers),
    "manual with a scheduler": Row(
        lambda: models.ManualModule(models.norm_mlp(), scheduler=per_step), replayed=(0,), options={"local_epochs": 2}
    ),
    "stragglers": Row(
        lambda: models.Module(models.mlp(), models.momentum),
        options={"local_epochs": 4, "availability": Availability(stragglers=0.5)},
    ),
    "stragglers dropped": Row(
        lambda: models.Module(models.mlp(), models.momentum),
        options={"local_epochs": 4, "availability": Availability(stragglers=0.5, partial_work="drop")},
    ),
    "clients that never report": Row(
        lambda: models.Module(models.mlp(), models.momentum),
        options={"availability": Availability(client_dropout=0.4)},
        rounds=3,
    ),
    "scheduler per round": Row(lambda: models.Module(models.mlp(), models.adam, halving), replayed=(0,), rounds=3),
    "scheduler per step": Row(lambda: models.Module(models.mlp(), models.adam, per_step), replayed=(0,)),
    "optimizer state kept": Row(
        lambda: models.Module(models.mlp(), models.adam), options={"optimizer_state": "keep"}, replayed=(0,)
    ),
    "gradient accumulation": Row(
        lambda: models.Module(models.mlp(), models.momentum),
        options={"local_steps": 4},
        trainer={"accumulate_grad_batches": 2},
    ),
    "parameter groups": Row(lambda: TwoRates(models.BaseAndHead())),
    "compiled": Row(Compiled, options={"clients_per_round": 2}),
    "bf16": Row(lambda: models.Module(models.dropout_mlp(), models.momentum), trainer={"precision": "bf16-mixed"}),
    "bf16 throughout": Row(
        lambda: models.Module(models.dropout_mlp(), models.momentum), trainer={"precision": "bf16-true"}, replayed=()
    ),
    "deeplab": Row(
        lambda: models.Module(models.deeplab(), models.sgd),
        models.scenes(FEW),
        options={"clients_per_round": 2},
        replayed=(1,),
    ),
    "unet": Row(
        lambda: models.Module(models.unet(), models.sgd),
        models.scenes(FEW),
        options={"clients_per_round": 2, "personal": ["net.segmentation_head.*"], "batch_norm": "recalibrate"},
        personal=lambda name: "segmentation_head" in name,
        recalibrated=lambda name: "running" in name and "layer3" not in name and "layer4" not in name,  # unused
    ),
}
DOORS = ({"fedavg": "trainer", "fairavg": "callback"}, {"fedavg": "callback", "fairavg": "trainer"})  # alternating
# One row per check; other files compare the other rows' options with plain loops or Lightning's loop.
CHOSEN = (
    "dropout, adam, steps, three of five", "batch norm recalibrated", "batch norm frozen", "personal by type",
    "tied, frozen bias", "stragglers dropped", "clients that never report", "bf16 throughout",
)  # fmt: skip
ONCE = {"deeplab": "fedavg", "unet": "fairavg"}  # large models: only one rule


def fit(row, door, aggregator, plain_trainer, federated_trainer):
    recorder, module = Recorder(), row.module()
    options = {"batch_norm": "average", **row.options, "method": aggregator, "seed": SEED}
    trainer_options = {**row.trainer, "callbacks": [recorder]}
    validation = tuple(tensor[:7] for tensor in next(iter(row.clients.values())))
    if door == "trainer":
        trainer = federated_trainer(max_rounds=row.rounds, **options, **trainer_options)
        trainer.fit(module, models.as_datasets(row.clients), DataLoader(TensorDataset(*validation), 4))
    else:
        federation = Federation(partition=ByGroup(models.pooled(row.clients)[1]), **options)
        trainer_options["callbacks"] = [federation, recorder]
        trainer = plain_trainer(max_epochs=row.rounds, **trainer_options)
        trainer.fit(module, datamodule=models.ValidatedData(row.clients, validation))
    return recorder, module, trainer


@pytest.mark.parametrize(
    ("name", "aggregator", "door"),
    quick(
        [
            (name, aggregator, door)
            for place, name in enumerate(TABLE)
            for aggregator, door in DOORS[place % 2].items()
            if aggregator == ONCE.get(name, aggregator)
        ],
        [
            (name, aggregator, DOORS[place % 2][aggregator])
            for place, name in enumerate(TABLE)
            for aggregator in [list(DOORS[0])[place // 2 % 2]]
            if name in CHOSEN
        ],
    ),
)
def test_table(name, aggregator, door, plain_trainer, federated_trainer):
    row = TABLE[name]
    initial = state_of(row.module())
    if row.trainer.get("precision") == "bf16-true":
        initial = {entry: value.bfloat16() for entry, value in initial.items()}
    recorder, module, trainer = fit(row, door, aggregator, plain_trainer, federated_trainer)
    assert trainer.current_epoch == len(recorder.validated) == len(recorder.aggregates) == row.rounds
    assert len(recorder.objects) == 1  # parameters and optimizers are never replaced
    assert module.training
    check_cohorts(row, recorder)
    check_states(row, recorder, initial, state_of(module), aggregator)
    check_log(row, recorder, aggregator)
    for visit in recorder.visits:
        if visit.round in row.replayed:
            check_replay(row, visit, plain_trainer)


def check_cohorts(row, recorder):
    options, availability = row.options, row.options.get("availability", Availability())
    size = options.get("clients_per_round", 1.0)
    size = math.ceil(size * len(row.clients)) if isinstance(size, float) else size
    for number in range(row.rounds):
        seen, logged = recorder.round(number), recorder.logged[number]
        chosen = cohort_reference(SEED, number, row.clients, size)
        names = [visit.client for visit in seen]
        full = {}
        for visit in seen:
            seed = visit_seed_reference(SEED, number, visit.client)
            work = options.get("local_epochs", 1), options.get("local_steps")
            full[visit.client] = visit_batches_reference(row.clients[visit.client], 32, seed, *work)
            assert len(full[visit.client]) >= len(visit.batches) > 0
            for ours, theirs in zip(visit.batches, full[visit.client], strict=False):
                assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, theirs, strict=True))
        short = [visit.client for visit in seen if len(visit.batches) < len(full[visit.client])]
        if availability.stragglers:
            assert logged["fed/stragglers"] == size // 2  # half of five, rounded: three clients do all work
            kept = availability.partial_work == "keep"
            assert len(short) == (size // 2 if kept else 0)
            assert len(names) == size - (0 if kept else size // 2)
        else:
            assert not short
            assert logged["fed/stragglers"] == 0
        if availability.client_dropout:
            assert set(names) < set(chosen)
            assert logged["fed/dropped"] == size - len(names)
        elif availability.partial_work == "keep":
            assert names == chosen
        assert logged["fed/clients"] == len(names)
        assert logged["fed/failed"] == 0
        assert logged["fed/num_samples"] == sum(len(row.clients[client][0]) for client in names)


def check_states(row, recorder, initial, final, aggregator):
    """Checks messages, starts of visits, validated states, and the final module."""
    at_home = {name for name in initial if row.personal(name) or row.frozen(name)}
    shared, kept = dict(initial), {}
    for number in range(row.rounds):
        visits = recorder.round(number)
        for visit in visits:
            assert not at_home & (set(visit.broadcast) | set(visit.update))
            assert list(visit.broadcast) == list(visit.update)
            assert len({value.data_ptr() for value in visit.broadcast.values()}) == len(visit.broadcast)
            for name, value in visit.start.items():
                mine = kept.get(visit.client, initial)[name] if row.personal(name) else shared[name]
                assert torch.equal(value, initial[name] if row.frozen(name) else mine), name
            assert_same({name: visit.end[name] for name in visit.update}, visit.update)
            kept[visit.client] = visit.end
        sizes = [visit.num_samples for visit in visits]
        assert sizes == [len(row.clients[visit.client][0]) for visit in visits]
        weights = [1] * len(sizes) if aggregator == "fairavg" else sizes
        aggregate = average_reference([visit.update for visit in visits], weights)
        assert_same(aggregate, recorder.aggregates[number])
        validated = recorder.validated[number]
        for name, value in validated.items():
            if row.recalibrated(name):
                assert not torch.equal(value, aggregate[name])
            elif row.personal(name) or row.frozen(name):
                assert torch.equal(value, initial[name])
            elif name in aggregate:
                assert torch.equal(value, aggregate[name])
            else:
                assert any(torch.equal(value, other) for other in aggregate.values())  # the second name of a tied entry
        assert any(not torch.equal(value, shared[name]) for name, value in aggregate.items())
        shared = validated
    assert_same(final, shared)


def check_log(row, recorder, aggregator):
    """Compares the metrics of every round with the recorded messages."""
    names = [name for name, _ in row.module().named_parameters()]
    totals = {"up": 0, "down": 0}
    for number, logged in enumerate(recorder.logged):
        visits = recorder.round(number)
        down, up = recorder.down_bytes[number], recorder.up_bytes[number]
        if row.options.get("batch_norm") == "recalibrate":
            measured = {name: value for name, value in visits[0].update.items() if row.recalibrated(name)}
            down *= 2  # the new global model
            up += len(visits) * (bytes_of(measured) + 8 * len(measured) // 2)  # and a count for each mean and variance
        totals["up"] += up
        totals["down"] += down
        assert (logged["comm/up_bytes"], logged["comm/down_bytes"]) == (up, down)
        assert (logged["comm/total_up_bytes"], logged["comm/total_down_bytes"]) == (totals["up"], totals["down"])
        trained = [name for name in names if name in recorder.aggregates[number]]

        def distance(new, old, trained=trained):
            return math.sqrt(sum(float((new[name].double() - old[name].double()).square().sum()) for name in trained))

        norms = [distance(visit.update, visit.broadcast) for visit in visits]
        weights = [1 if aggregator == "fairavg" else visit.num_samples for visit in visits]
        mean = sum(map(math.prod, zip(weights, norms, strict=True))) / sum(weights)
        moved = distance(recorder.aggregates[number], visits[0].broadcast)
        tolerance = 2e-2 if row.trainer.get("precision") == "bf16-true" else 1e-4
        assert logged["fed/update_norm"] == pytest.approx(mean, rel=tolerance)
        assert logged["fed/global_update_norm"] == pytest.approx(moved, rel=tolerance)
        assert logged["fed/drift"] == pytest.approx(1 - moved / mean, abs=10 * tolerance)


def check_replay(row, visit, plain_trainer):
    module = (row.plain or row.module)()
    module.load_state_dict(visit.start)
    seed_reference(visit_seed_reference(SEED, visit.round, visit.client))
    fit_fixed(plain_trainer(max_epochs=1, **row.trainer), module, [copy.deepcopy(visit.batches)])
    assert_same(state_of(module), visit.end)


# --- Single options ---------------------------------------------------------------------------------------------------


def val_loader(tensors, batch_size=16):
    return DataLoader(TensorDataset(*tensors), batch_size)


@pytest.mark.parametrize("dropped", quick([False, True], [True]))
def test_recalibrated_statistics_are_those_of_all_the_clients_data(dropped, federated_trainer):
    """In float64 in one pass, from the aggregate over the cohort; personal heads do not matter."""
    clients = models.images()
    recorder, module = Recorder(), models.Module(models.cnn(), models.momentum)
    trainer = federated_trainer(
        max_rounds=2, clients_per_round=3, batch_norm="recalibrate", seed=SEED, callbacks=[recorder],
        local_epochs=2, availability=Availability(stragglers=0.4 if dropped else 0.0, partial_work="drop"),
    )  # fmt: skip
    trainer.fit(module, models.as_datasets(clients), val_loader(clients["ann"]))
    for number in range(2):
        visits = recorder.round(number)
        assert len(visits) == (2 if dropped else 3)
        net = models.cnn()
        net.load_state_dict({name.removeprefix("net."): value for name, value in recorder.aggregates[number].items()})
        batches = []
        for visit in visits:
            seed = recalibration_seed_reference(visit_seed_reference(SEED, number, visit.client))
            batches += [inputs for inputs, _ in visit_batches_reference(clients[visit.client], 32, seed)]
        measured = batch_norm_reference(net, {"1": net[1], "5": net[5]}, batches)
        for layer, (mean, variance) in measured.items():
            seen = recorder.validated[number]
            assert torch.allclose(seen[f"net.{layer}.running_mean"].double(), mean, rtol=1e-6, atol=1e-7)
            assert torch.allclose(seen[f"net.{layer}.running_var"].double(), variance, rtol=1e-6, atol=1e-7)
            assert torch.equal(
                seen[f"net.{layer}.num_batches_tracked"],
                recorder.aggregates[number][f"net.{layer}.num_batches_tracked"],
            )


def test_kept_optimizer_state_is_each_clients_own(federated_trainer):
    """Against a plain loop with one Adam per client, and a learning rate decreasing every round."""
    clients = models.vectors()
    module = models.Module(models.dropout_mlp(), models.adam, halving)
    trainer = federated_trainer(max_rounds=3, clients_per_round=3, optimizer_state="keep", seed=SEED)
    trainer.fit(module, models.as_datasets(clients))
    net, kept = models.dropout_mlp(), {}
    for number in range(3):
        start, states, sizes = copy.deepcopy(net.state_dict()), [], []
        for client in cohort_reference(SEED, number, clients, 3):
            seed = visit_seed_reference(SEED, number, client)
            net.load_state_dict(start)
            optimizer = models.adam(net.parameters())
            if client in kept:
                optimizer.load_state_dict(kept[client])
            optimizer.param_groups[0]["lr"] = 0.01 * 0.5**number
            seed_reference(seed)
            for inputs, targets in visit_batches_reference(clients[client], 32, seed):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
            kept[client] = copy.deepcopy(optimizer.state_dict())
            states.append(copy.deepcopy(net.state_dict()))
            sizes.append(len(clients[client][0]))
        net.load_state_dict(average_reference(states, sizes))
    assert len(kept) > 3
    assert_same(net.state_dict(), module.net.state_dict())


def test_learning_rates_per_round(federated_trainer):
    """An epoch scheduler steps between rounds, not within; the optimizer's state restarts."""
    recorder, logger = Recorder(), MemoryLogger()
    trainer = federated_trainer(
        max_rounds=3, callbacks=[recorder, LearningRateMonitor("epoch")], logger=logger, log_every_n_steps=1
    )
    trainer.fit(models.Module(models.mlp(), models.adam, halving), models.as_datasets(models.vectors()))
    for visit in recorder.visits:
        assert all(rates == [0.01 * 0.5**visit.round] for rates in visit.learning_rates)
    assert [value for _, value in logger.curve("lr-Adam")] == [0.01, 0.005, 0.0025]


def test_learning_rates_per_step(federated_trainer):
    """Every visit starts from the round's rate; the next round continues from the median client's rate."""
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=3, callbacks=[recorder])
    trainer.fit(models.Module(models.mlp(), models.adam, per_step), models.as_datasets(models.vectors()))
    for visit in recorder.visits:
        first = 2 * visit.round  # two batches are the median
        assert [rates[0] for rates in visit.learning_rates] == [
            pytest.approx(0.01 * 0.9 ** (first + place)) for place in range(len(visit.batches))
        ]


def test_plateaus_and_early_stopping_count_rounds(federated_trainer):
    """For a model that cannot move, the rate drops after the patience, and the fit stops."""

    def plateau(optimizer):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
        return {"scheduler": scheduler, "monitor": "val_loss"}

    clients = models.vectors()
    module = models.Module(models.mlp(), lambda parameters: torch.optim.SGD(parameters, lr=1e-30), plateau)
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=20, callbacks=[recorder, EarlyStopping("val_loss", patience=4)])
    trainer.fit(module, models.as_datasets(clients), val_loader(clients["bob"]))
    assert trainer.current_epoch == 5
    rates = [recorder.round(number)[0].learning_rates[0][0] for number in range(5)]
    assert rates == pytest.approx([1e-30, 1e-30, 1e-30, 1e-31, 1e-31])


def test_checkpoints_hold_the_validated_model_of_the_best_round(federated_trainer, tmp_path):
    clients = models.vectors()
    recorder, logger = Recorder(), MemoryLogger()
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", mode="max", save_top_k=1)
    moved = ModelCheckpoint(tmp_path / "moved", monitor="fed/update_norm", mode="max", filename="{epoch}")
    module = models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(
        max_rounds=4, callbacks=[recorder, best, moved], enable_checkpointing=True, logger=logger, seed=SEED
    )
    trainer.fit(module, models.as_datasets(clients), val_loader(clients["bob"]))
    curve = logger.curve("val_loss")
    assert [step for step, _ in curve] == [0, 1, 2, 3]
    worst = max(range(4), key=lambda number: curve[number][1])
    saved = torch.load(best.best_model_path, weights_only=True)
    assert saved["epoch"] == worst
    assert_same(recorder.validated[worst], saved["state_dict"])
    for number, validated in enumerate(recorder.validated):
        net = models.norm_mlp().eval()
        net.load_state_dict({name.removeprefix("net."): value for name, value in validated.items()})
        with torch.no_grad():
            expected = F.cross_entropy(net(clients["bob"][0]), clients["bob"][1])
        assert curve[number][1] == pytest.approx(expected.item(), rel=1e-5)
    norms = logger.curve("fed/update_norm")
    assert [step for step, _ in norms] == [0, 1, 2, 3]
    largest = max(range(4), key=lambda number: norms[number][1])
    assert_same(recorder.validated[largest], torch.load(moved.best_model_path, weights_only=True)["state_dict"])


def test_validation_every_second_round(federated_trainer):
    clients = models.vectors()
    recorder, logger = Recorder(), MemoryLogger()
    trainer = federated_trainer(max_rounds=4, check_val_every_n_epoch=2, callbacks=[recorder], logger=logger)
    trainer.fit(models.Module(models.mlp()), models.as_datasets(clients), val_loader(clients["bob"]))
    assert [step for step, _ in logger.curve("val_loss")] == [1, 3]
    assert [step for step, _ in logger.curve("fed/clients")] == [0, 1, 2, 3]
    assert_same(recorder.validated[0], recorder.aggregates[1])
    assert_same(recorder.validated[1], recorder.aggregates[3])


def test_too_few_clients_leave_the_global_model_as_it_was(federated_trainer, caplog):
    """In round 1 two of five updates are invalid, but four are required."""

    class Nonsense(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1 and client in ("ann", "dan"):
                update.state["net.0.bias"] = update.state["net.0.bias"] * float("nan")

    clients = models.vectors()
    recorder = Recorder()
    module = models.Module(models.mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=3, faults=Faults(min_clients=4), callbacks=[Nonsense(), recorder])
    trainer.fit(module, models.as_datasets(clients), val_loader(clients["bob"]))
    assert [logged["fed/clients"] for logged in recorder.logged] == [5, 3, 5]
    assert [logged["fed/failed"] for logged in recorder.logged] == [0, 2, 0]
    assert len(recorder.aggregates) == 2
    assert_same(recorder.validated[0], recorder.validated[1])
    assert_same(recorder.aggregates[1], recorder.validated[2])
    assert "client 'ann' is excluded" in caplog.text
    assert "fewer than min_clients=4" in caplog.text


@pytest.mark.parametrize("method_name", quick(["FedPer", "FedBN"], ["FedBN"]))
def test_methods_that_keep_layers_at_home(method_name, federated_trainer):
    recorder = Recorder()
    method = FedPer("net.head.*") if method_name == "FedPer" else FedBN()
    trainer = federated_trainer(max_rounds=2, method=method, local_epochs=2, callbacks=[recorder])
    trainer.fit(models.Module(models.BaseAndHead(), models.momentum), models.as_datasets(models.vectors()))
    at_home = "net.head." if method_name == "FedPer" else "net.base.1."
    names = [name for name in state_of(models.Module(models.BaseAndHead())) if not name.startswith(at_home)]
    assert all(list(visit.broadcast) == list(visit.update) == names for visit in recorder.visits)
    assert len(names) == 7 if method_name == "FedPer" else 4
    first, second = (next(v for v in recorder.round(r) if v.client == "cid") for r in (0, 1))
    for name, value in second.start.items():
        if value.is_floating_point():
            assert torch.equal(value, first.end[name]) == name.startswith(at_home)


@pytest.mark.parametrize(
    ("method_name", "store"),
    quick(product(["FedPer", "FedBN"], [None, "clients"]), [("FedPer", "clients")]),
)
def test_a_clients_own_model(method_name, store, plain_trainer, federated_trainer, tmp_path):
    """Personal entries come from the client's last visit, and a plain Trainer reproduces the logged values."""
    options = {"local_epochs": 2, "clients_per_round": 2, "seed": SEED, "store": store and tmp_path / store}
    federation = Federation(FedPer("net.head.*") if method_name == "FedPer" else FedBN(), **options)
    at_home = "net.head." if method_name == "FedPer" else "net.base.1."
    recorder, module = Recorder(), models.Module(models.BaseAndHead(), models.momentum)
    held_out = models.vectors({name: 20 + size for name, size in models.SIZES.items()})
    trainer = federated_trainer(max_rounds=2, federation=federation, callbacks=[recorder])
    trainer.fit(module, models.as_datasets(models.vectors()), models.as_datasets(held_out))
    after = state_of(module)
    last = {visit.client: visit.end for visit in recorder.visits}
    assert 2 <= len(last) < len(held_out)
    for client, tensors in held_out.items():
        state = federation.client_state(client)
        theirs = last.get(client, state_of(models.Module(models.BaseAndHead())))
        assert_same({name: (theirs if name.startswith(at_home) else after)[name] for name in after}, state)
        own = models.Module(models.BaseAndHead())
        own.load_state_dict(state)
        (found,) = plain_trainer().validate(own, val_loader(tensors, 32), verbose=False)
        for name, value in found.items():
            assert value == pytest.approx(float(trainer.callback_metrics[f"client/{client}/{name}"]), rel=1e-5)
        state["net.head.weight"].zero_()  # a copy
    assert_same(after, state_of(module))
    assert federation.client_state("ann")["net.head.weight"].any()


def test_a_clients_own_model_of_tied_entries(federated_trainer):
    recorder, module = Recorder(), models.Module(models.Tied())
    trainer = federated_trainer(max_rounds=1, personal=["net.embedding.*"], callbacks=[recorder])
    trainer.fit(module, models.as_datasets(models.sentences()))
    state = trainer.federation.client_state("bob")
    end = next(visit.end for visit in recorder.visits if visit.client == "bob")
    assert torch.equal(state["net.embedding.weight"], end["net.embedding.weight"])
    assert torch.equal(state["net.output.weight"], end["net.embedding.weight"])


def test_a_clients_own_model_at_the_wrong_time(federated_trainer):
    class Curious(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            with pytest.raises(RuntimeError, match="between rounds and after the fit"):
                trainer.federation.client_state(client)

        def on_train_epoch_end(self, trainer, module):
            assert_same(trainer.federation.client_state("ann"), state_of(module))

    trainer = federated_trainer(max_rounds=1, callbacks=[Curious()])
    with pytest.raises(RuntimeError, match="unknown until"):
        trainer.federation.client_state("ann")
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors()))
    with pytest.raises(ValueError, match="one of the federation's clients, but got 'nobody'"):
        trainer.federation.client_state("nobody")


# --- Evaluation by client ---------------------------------------------------------------------------------------------


class Scored(models.Module):
    def __init__(self):
        super().__init__(models.BaseAndHead(), models.momentum)
        kind = {"task": "multiclass", "num_classes": models.CLASSES}
        self.scores = nn.ModuleDict({"fit": torchmetrics.Accuracy(**kind)})
        self.val_scores = torchmetrics.MetricCollection({"acc": torchmetrics.Accuracy(**kind)}, prefix="val_")
        self.confusion = torchmetrics.ConfusionMatrix(**kind)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.scores["fit"](self(batch[0]), batch[1])
        self.log("train_acc", self.scores["fit"], on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.val_scores.update(outputs, batch[1])
        self.confusion.update(outputs, batch[1])
        self.log_dict(self.val_scores, on_epoch=True)
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))

    def on_validation_epoch_end(self):
        self.log("val_seen", self.confusion.compute().sum().float())
        self.confusion.reset()


def evaluated_by_hand(net, inputs, training_data, measures):
    """Outputs of a client's model; without training data BatchNorm normalises by batch."""
    if measures and training_data is None:
        return torch.cat([normalised_by_batch(net, batch) for batch in inputs.split(32)])
    norm = net.base[1]
    if measures:
        batches = [training_data[0]] * 2  # `Scored.training_step` runs the network twice
        mean, variance = batch_norm_reference(net, {"norm": norm}, batches)["norm"]
        norm.running_mean, norm.running_var = mean.float(), variance.float()
    net.eval()
    with torch.no_grad():
        return net(inputs)


@pytest.mark.parametrize("personal", [slow(((),)), ("net.head.*",), slow(((nn.BatchNorm1d,),))])
def test_every_client_is_evaluated_with_its_own_model(personal, federated_trainer):
    """Against plain numbers: 23 clients, one of them new, so that the worst tenth has three clients; three rounds.

    The clients differ: all except the new client have BatchNorm statistics from one pass with the global model, unless
    statistics are personal.
    """
    clients = models.vectors({f"c{number:02}": 3 + 7 * number % 19 for number in range(22)})
    held_out = models.vectors({f"c{number:02}": 20 + number for number in range(23)})  # unequal batches of 32
    recorder, module = Recorder(), Scored()
    trainer = federated_trainer(
        max_rounds=3, clients_per_round=6, personal=personal, callbacks=[recorder, ClientEvaluation(2)], seed=SEED
    )
    trainer.fit(module, models.as_datasets(clients), models.as_datasets(held_out))
    own = {visit.client: visit.end for visit in recorder.visits if visit.round < 2}
    assert 6 < len(own) < 22
    accuracies, losses = [], []
    for client, (inputs, targets) in held_out.items():
        state = dict(recorder.validated[1])
        kept = own.get(client, state_of(Scored()))
        at_home = [name for name in state if name not in recorder.visits[0].update]
        net = models.BaseAndHead()
        merged = state | {name: kept[name] for name in at_home}
        net.load_state_dict({name.removeprefix("net."): value for name, value in merged.items()})
        outputs = evaluated_by_hand(net, inputs, clients.get(client), nn.BatchNorm1d not in personal)
        accuracies.append(float((outputs.argmax(1) == targets).double().mean()))
        losses.append(float(F.cross_entropy(outputs.double(), targets)))
    assert bool(personal) == bool(at_home)
    second = recorder.logged[1]
    for name, values, worst_first in (("val_acc", accuracies, False), ("val_loss", losses, True)):
        worst = sorted(values, reverse=worst_first)[:3]
        mean = sum(values) / 23
        assert second[f"fed/{name}/mean"] == pytest.approx(mean, rel=1e-5)
        assert second[f"fed/{name}/worst10"] == pytest.approx(sum(worst) / 3, rel=1e-5)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / 23)
        assert second[f"fed/{name}/std"] == pytest.approx(spread, rel=1e-4)
    total = sum(len(targets) for _, targets in held_out.values())
    assert second["fed/val_seen/mean"] == pytest.approx(total / 23)
    assert not [name for name in second if name.startswith("client/")]  # 23 clients are too many for separate names
    assert_same(recorder.validated[2], state_of(module))
    assert not any(name.startswith("fed/val") for name in recorder.logged[0])
    assert second["val_seen"] == total


def test_evaluation_of_clients_leaves_the_rest_alone(federated_trainer):
    """Weights and values equal a run without client evaluation, including metric objects."""
    clients = models.vectors()
    held_out = models.vectors({"ann": 11, "bob": 40})
    runs = []
    for every in (0, 1):
        recorder, module = Recorder(), Scored()
        trainer = federated_trainer(max_rounds=2, callbacks=[recorder, ClientEvaluation(every)], seed=SEED)
        trainer.fit(module, models.as_datasets(clients), models.as_datasets(held_out))
        runs.append((recorder, module))
        assert module.training
    without, with_it = (recorder.logged for recorder, _ in runs)
    for before, after in zip(without, with_it, strict=True):
        extra = set(after) - set(before)
        assert {"fed/val_acc/mean", "client/ann/val_acc", "client/bob/val_loss"} <= extra
        assert all(name.startswith(("fed/val", "client/", "evaluation/")) for name in extra)
        assert before == {name: after[name] for name in before}
    assert_same(*(state_of(module) for _, module in runs))


class Halved(FederatedDataModule):
    """A datamodule with a hook that changes batches."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] / 2, batch[1]]


def test_clients_are_evaluated_through_the_hooks_of_the_datamodule(federated_trainer):
    """With a single client the mean over clients is the value on all data."""
    clients = models.as_datasets(models.vectors({"a": 40}))
    trainer = federated_trainer(max_rounds=1, batch_norm="recalibrate")
    trainer.fit(models.Module(models.norm_mlp()), datamodule=Halved(clients, clients))
    logged = trainer.callback_metrics
    assert logged["client/a/val_loss"] == pytest.approx(float(logged["val_loss"]), rel=1e-6)


class Counter(nn.Module):
    def __init__(self, extra):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, models.CLASSES)
        self.extra = extra

    def forward(self, inputs):
        return self.layer(inputs)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [torch.tensor([3.0]), {"steps": 3}])
def test_extra_state_stays_where_it_is(extra, federated_trainer):
    class Names(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            names.append(list(broadcast.state))

        def on_client_end(self, trainer, module, client, update):
            names.append(list(update.state))

    names, module = [], models.Module(Counter(extra))
    checkpoints = ModelCheckpoint(filename="inside", every_n_train_steps=1, save_last=True)
    trainer = federated_trainer(max_rounds=1, enable_checkpointing=True, callbacks=[Names(), checkpoints])
    trainer.fit(module, models.as_datasets(models.vectors()))
    assert names == [["net.layer.weight", "net.layer.bias"]] * 10
    assert module.net.extra is extra


class Remembering(nn.Module):
    """Two non-persistent buffers: one changed in training, one replaced by a larger tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, models.CLASSES)
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.steps += 1
        if len(self.cache) < len(inputs):
            self.cache = torch.zeros(len(inputs))
        return self.layer(inputs) * (1 + 0.01 * self.steps)


def test_buffers_that_are_in_no_message_pass_nothing_on(federated_trainer):
    """A client's update is independent of earlier clients."""
    clients = models.as_datasets(models.vectors())
    updates = []
    for names in (list(clients), list(clients)[::-1]):
        recorder, module = Recorder(), models.Module(Remembering(), models.momentum)
        federated_trainer(max_rounds=2, callbacks=[recorder]).fit(module, LazyClients(names, clients.__getitem__))
        updates.append({(visit.round, visit.client): visit.update for visit in recorder.visits})
        assert module.net.steps == 0
    for key, update in updates[0].items():
        assert list(update) == ["net.layer.weight", "net.layer.bias"]
        assert_same(update, updates[1][key])


@pytest.mark.filterwarnings("ignore:.*in eval mode")  # warning of some Lightning versions
def test_layers_that_the_user_froze_stay_frozen(federated_trainer):
    module = models.Module(models.BaseAndHead(), models.momentum)
    module.net.base[1].eval()
    federated_trainer(max_rounds=2).fit(module, models.as_datasets(models.vectors()))
    assert not module.net.base[1].training
    assert module.net.base[1].num_batches_tracked == 0


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_parameters_have_no_gradient_while_the_fit_lasts(fails, federated_trainer):
    class Watch(FederatedCallback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append({name: parameter.grad is not None for name, parameter in module.named_parameters()})
            if fails and batch_idx == 3:
                raise RuntimeError("boom")

    seen, module = [], models.Module(models.BaseAndHead(), models.momentum)
    module.net.base[0].bias.requires_grad_(False)  # set by the user before
    start = state_of(module)
    trainer = federated_trainer(max_rounds=2, frozen=["net.base.0.*"], callbacks=[Watch()])
    with pytest.raises(RuntimeError, match="boom") if fails else contextlib.nullcontext():
        trainer.fit(module, models.as_datasets(models.vectors()))
    for gradients in seen:
        assert {name for name, has_one in gradients.items() if not has_one} == {"net.base.0.weight", "net.base.0.bias"}
    assert_same(start, state_of(module), ["net.base.0.bias", "net.base.0.weight"])
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    assert frozen == ["net.base.0.bias"]


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_statistics_are_thawed_in_the_end(fails, federated_trainer):
    class Faulty(FederatedCallback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            assert not module.net.base[1].training
            if fails and batch_idx == 3:
                raise RuntimeError("boom")

    module = models.Module(models.BaseAndHead(), models.momentum)
    trainer = federated_trainer(max_rounds=2, batch_norm="frozen", callbacks=[Faulty()])
    if fails:
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit(module, models.as_datasets(models.vectors()))
    else:
        trainer.fit(module, models.as_datasets(models.vectors()))
    assert all(layer.training for layer in module.modules())
