"""Invariants (DESIGN, section 6): visits are Lightning fits, FedAvg is FedAvg, identities, only messages."""

import copy
import gc
import multiprocessing
from dataclasses import dataclass, field

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import (
    Availability,
    ClientUpdate,
    FederatedCallback,
    FederatedDataModule,
    FederatedTrainer,
    Federation,
)
from lightning_fed.algorithms import Ditto, FedAtt, FedAvgM, Method
from lightning_fed.algorithms.robust import Bucketing
from lightning_fed.data import ByGroup, LazyClients
from lightning_fed.rule import RoundInfo
from tests import models
from tests.breadth import quick
from tests.chains import chain_of, one_round, receive
from tests.recorders import Recorder, assert_same, bytes_of, fit_fixed, state_of
from tests.references import average_reference, epoch_reference, fedavg_reference, visit_seed_reference

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SEED = 7


def epochs_of(tensors, visit_seed, epochs, batch_size=32):
    """A visit's batches by epoch, in the documented order."""
    return [
        [
            [tensor[places] for tensor in tensors]
            for places in epoch_reference(len(tensors[0]), batch_size, visit_seed, e)
        ]
        for e in range(epochs)
    ]


# --- 1. A visit is a Lightning fit ------------------------------------------------------------------------------------


@dataclass
class Case:
    """A module, clients, and options for both Trainers."""

    module: object
    clients: object = models.vectors
    trainer: dict = field(default_factory=dict)
    rounds: int = 2
    max_steps_differ: bool = False


def one_cycle(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30), "interval": "step"}


def warm_up(optimizer):
    return {
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
        "interval": "step",
    }


def decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


class Clipped(models.Module):
    """Clips weights after every batch, and averages weights, in Lightning's hook."""

    def __init__(self):
        super().__init__(models.mlp(), models.momentum)
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["loss"].isfinite()
        assert len(batch) == 2
        for parameter, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
            parameter.clamp_(-0.3, 0.3)
            slow.lerp_(parameter, 0.1)


VISITS = {
    "sgd": Case(lambda: models.Module(models.mlp())),
    "momentum": Case(lambda: models.Module(models.mlp(), models.momentum)),
    "adam": Case(lambda: models.Module(models.mlp(), models.adam)),
    "adamw": Case(lambda: models.Module(models.mlp(), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))),
    "adagrad": Case(
        lambda: models.Module(models.mlp(), lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1))
    ),
    "clipping": Case(
        lambda: models.Module(models.mlp(), models.momentum),
        trainer={"gradient_clip_val": 0.3, "gradient_clip_algorithm": "norm"},
    ),
    "dropout": Case(lambda: models.Module(models.dropout_mlp(), models.adam)),
    "batch norm": Case(lambda: models.Module(models.norm_mlp(), models.momentum)),
    "cnn": Case(lambda: models.Module(models.cnn(), models.momentum), models.images),
    "lstm": Case(lambda: models.Module(models.Recurrent(), models.adam), models.sentences),
    "tied": Case(lambda: models.Module(models.Tied(), models.momentum), models.sentences),
    "one cycle": Case(lambda: models.Module(models.mlp(), models.momentum, one_cycle), rounds=1),
    "warm-up": Case(lambda: models.Module(models.mlp(), models.adam, warm_up), rounds=1),
    "manual": Case(models.TwoOptimizers),
    "manual with a scheduler": Case(lambda: models.ManualModule(models.mlp(), scheduler=decay), rounds=1),
    "weights changed in a hook": Case(Clipped),
    "bf16": Case(lambda: models.Module(models.dropout_mlp(), models.momentum), trainer={"precision": "bf16-mixed"}),
    "lbfgs": Case(lambda: models.Module(models.mlp(), lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))),
}


# Others: in the battery, which repeats visits too, and in tests/backends/test_fused_visits.py.
CHOSEN = ("clipping", "lstm", "one cycle", "manual with a scheduler", "weights changed in a hook", "lbfgs")


@pytest.mark.parametrize("name", quick(VISITS, CHOSEN))
def test_a_visit_is_a_lightning_fit(name, plain_trainer, federated_trainer):
    """Compares every visit with a new module in a new plain Trainer, from the received state."""
    case = VISITS[name]
    clients = case.clients({"ann": 65, "dan": 7, "eve": 33})  # three full and three partial batches of 32
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=case.rounds, local_epochs=2, seed=SEED, callbacks=[recorder], **case.trainer)
    trainer.fit(case.module(), models.as_datasets(clients))
    assert len(recorder.visits) == case.rounds * len(clients)
    for visit in recorder.visits:
        seed = visit_seed_reference(SEED, visit.round, visit.client)
        module = case.module()
        start = state_of(module) | visit.broadcast
        module.load_state_dict(start | {name: start[first] for name, first in tied(module).items()})
        L.seed_everything(seed, verbose=False)
        fit_fixed(plain_trainer(max_epochs=2, **case.trainer), module, epochs_of(clients[visit.client], seed, 2))
        assert_same(visit.end, state_of(module))
        assert visit.update, "an update that holds nothing compares with nothing"
        assert_same(visit.update, state_of(module), visit.update)


def tied(module):
    """The first name for every tied entry."""
    first = {}
    state = module.state_dict()
    return {name: first.setdefault(value.data_ptr(), name) for name, value in state.items()}


@pytest.mark.parametrize("net", quick([models.mlp, models.dropout_mlp], [models.dropout_mlp]))
def test_a_visit_of_a_users_own_loader(net, plain_trainer, federated_trainer):
    """A shuffling loader gives the batches of `L.seed_everything(visit_seed)` with a plain fit."""
    clients = models.vectors({"a": 41, "b": 24})

    def loaders():
        return {name: DataLoader(data, 8, shuffle=True) for name, data in models.as_datasets(clients).items()}

    recorder = Recorder()
    trainer = federated_trainer(max_rounds=2, local_epochs=3, seed=SEED, callbacks=[recorder])
    trainer.fit(models.Module(net(), models.momentum), loaders())
    assert len(recorder.visits) == 4
    for visit in recorder.visits:
        module = models.Module(net(), models.momentum)
        module.load_state_dict(visit.broadcast)
        L.seed_everything(visit_seed_reference(SEED, visit.round, visit.client), verbose=False)
        plain_trainer(max_epochs=3).fit(module, loaders()[visit.client])
        assert_same(visit.update, state_of(module), visit.update)


# --- 2. FedAvg is FedAvg ----------------------------------------------------------------------------------------------

ROUNDS, COHORT = 2, 3
OPTIONS = {"clients_per_round": COHORT, "seed": SEED, "batch_norm": "average"}


def cross_entropy_reference(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


class ModuleWithData(models.Module):
    def train_dataloader(self):
        return models.pooled(models.vectors())[0]


def by_name(clients):
    return ByGroup(models.pooled(clients)[1])


def through_mapping(clients, module, callbacks, **options):
    FederatedTrainer(callbacks=callbacks, **options).fit(module(models.Module), models.as_datasets(clients))


def through_loader(clients, module, callbacks, workers=0, **options):
    loader, groups = models.pooled(clients, num_workers=workers, persistent_workers=workers > 0)
    FederatedTrainer(partition=ByGroup(groups), callbacks=callbacks, **options).fit(module(models.Module), loader)


def through_loader_with_workers(clients, module, callbacks, **options):
    through_loader(clients, module, callbacks, workers=2, **options)


def plain(callbacks, options, **federation):
    own = {
        name: options.pop(name) for name in list(options) if name in ("method", *OPTIONS, "local_epochs", "local_steps")
    }
    return L.Trainer(
        max_epochs=options.pop("max_rounds"), callbacks=[Federation(**own, **federation), *callbacks], **options
    )


def through_callback_and_datamodule(clients, module, callbacks, **options):
    trainer = plain(callbacks, options, partition=by_name(clients))
    trainer.fit(module(models.Module), datamodule=models.PooledData(clients))


def through_callback_and_module(clients, module, callbacks, **options):
    plain(callbacks, options, partition=by_name(clients)).fit(module(ModuleWithData))


def through_callback_and_clients(clients, module, callbacks, workers=0, **options):
    data = FederatedDataModule(models.as_datasets(clients), num_workers=workers, persistent_workers=workers > 0)
    plain(callbacks, options).fit(module(models.Module), datamodule=data)


def through_callback_and_clients_with_workers(clients, module, callbacks, **options):
    through_callback_and_clients(clients, module, callbacks, workers=2, **options)


DOORS = [
    through_mapping,
    through_loader,
    through_loader_with_workers,
    through_callback_and_datamodule,
    through_callback_and_module,
    through_callback_and_clients,
    through_callback_and_clients_with_workers,
]


@pytest.mark.parametrize("door", quick(DOORS, [through_mapping, through_loader, through_callback_and_module]))
def test_fedavg_is_fedavg(door, tmp_path):
    """BatchNorm, dropout, momentum, clipping, unequal clients, three of five per round: every round bit for bit."""
    clients = models.vectors()
    expected = fedavg_reference(
        models.norm_mlp(), clients, cross_entropy_reference, models.momentum,
        rounds=ROUNDS, cohort_size=COHORT, seed=SEED, batch_size=32, epochs=2, clip=0.5,
    )  # fmt: skip
    modules = []

    def module(kind):
        modules.append(kind(models.norm_mlp(), models.momentum))
        return modules[-1]

    recorder = Recorder()
    options = {**quiet(tmp_path), **OPTIONS, "max_rounds": ROUNDS, "local_epochs": 2, "gradient_clip_val": 0.5}
    door(clients, module, [recorder], **options)
    assert len(recorder.aggregates) == ROUNDS
    for aggregate, global_state in zip(recorder.aggregates, expected, strict=True):
        assert_same(prefixed(global_state), aggregate)
    assert_same(expected[-1], modules[0].net.state_dict())
    assert not torch.equal(expected[-1]["0.weight"], expected[-2]["0.weight"])
    assert {len(recorder.round(number)) for number in range(ROUNDS)} == {COHORT}


@pytest.mark.parametrize(("aggregator", "steps"), quick([("fairavg", None), ("fedavg", 5)], [("fedavg", 5)]))
def test_both_rules_on_images(aggregator, steps, federated_trainer):
    clients = models.images()
    expected = fedavg_reference(
        models.cnn(), clients, cross_entropy_reference, models.adam,
        rounds=2, cohort_size=5, seed=0, batch_size=32, epochs=1, steps=steps, equal=aggregator == "fairavg",
    )  # fmt: skip
    module = models.Module(models.cnn(), models.adam)
    trainer = federated_trainer(max_rounds=2, method=aggregator, local_steps=steps, batch_norm="average")
    trainer.fit(module, models.as_datasets(clients))
    assert_same(expected[-1], module.net.state_dict())
    if aggregator == "fedavg":
        assert module.net[1].num_batches_tracked == 2 * steps


def test_one_step_of_gradient_descent_on_quadratics(federated_trainer):
    """With one full batch and rate 1 every client reaches its mean, and FedAvg the mean of all examples."""
    clients = {"a": (torch.tensor([[1.0, 2.0]]),), "b": (torch.tensor([[3.0, 0.0], [5.0, 2.0], [4.0, 1.0]]),)}
    results = {}
    for aggregator in ("fedavg", "fairavg"):
        module = models.Quadratic()
        federated_trainer(max_rounds=1, method=aggregator).fit(module, models.as_datasets(clients))
        results[aggregator] = module.w.tolist()
    assert results == {"fedavg": [3.25, 1.25], "fairavg": [2.5, 1.5]}


def quiet(folder):
    return {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "default_root_dir": folder,
    }  # fmt: skip


def prefixed(state, prefix="net."):
    return {prefix + name: value for name, value in state.items()}


# --- 6. Identities ----------------------------------------------------------------------------------------------------

RULES = ["fedavg", "fairavg", "fedprox", "feddane", "fesem", "fedmargin", "scaffold"]
# overshoot or stop short of the mean
STEPS = ["fedatt", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "feddyn", "qffl"]
OWN_MODELS = [Ditto(0.1), "moon", "fedala"]  # personal models
ROBUST = ["median", "trimmed_mean", "krum", "multikrum", "bulyan", "geometric_median"]


def exponential(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), "interval": "epoch"}


def cosine_per_step(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12), "interval": "step"}


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "optimizer_state", "local_epochs"),
    quick(
        [
            (models.momentum, None, "keep", 2),
            (models.adam, None, "keep", 2),
            (models.adam, exponential, "keep", 1),
            (models.momentum, cosine_per_step, "keep", 2),
            (models.momentum, one_cycle, "keep", 1),
            (models.sgd, None, "reset", 2),
            (models.sgd, exponential, "reset", 1),
            (models.sgd, cosine_per_step, "reset", 1),
        ],
        [
            (models.adam, exponential, "keep", 1),
            (models.momentum, cosine_per_step, "keep", 2),
            (models.sgd, cosine_per_step, "reset", 1),
        ],
    ),
)
def test_one_client_is_centralised_training(
    optimizer, scheduler, optimizer_state, local_epochs, plain_trainer, either_trainer
):
    """Four rounds with one client equal one plain fit over the same batches."""
    tensors = models.vectors({"only": 70})["only"]
    federated = models.Module(models.BaseAndHead(), optimizer, scheduler)
    trainer = either_trainer(
        batch_norm="average",
        max_rounds=4,
        local_epochs=local_epochs,
        optimizer_state=optimizer_state,
        seed=SEED,
        gradient_clip_val=1.0,
    )
    trainer.fit(federated, datamodule=FederatedDataModule({"only": TensorDataset(*tensors)}))
    epochs = [
        epoch
        for round in range(4)
        for epoch in epochs_of(tensors, visit_seed_reference(SEED, round, "only"), local_epochs)
    ]
    central = models.Module(models.BaseAndHead(), optimizer, scheduler)
    plain = plain_trainer(max_epochs=4 * local_epochs, gradient_clip_val=1.0)
    fit_fixed(plain, central, epochs)
    assert_same(state_of(central), state_of(federated))
    rates = [[group["lr"] for group in trainer.optimizers[0].param_groups] for trainer in (trainer, plain)]
    assert rates[0] == rates[1]
    assert trainer.global_step == plain.global_step


def test_optimizer_state_is_reset_for_every_visit(plain_trainer, federated_trainer):
    """Counterpart of the previous test: with momentum, `reset` differs from one long fit."""
    tensors = models.vectors({"only": 70})["only"]
    results = {}
    for mode in ("reset", "keep"):
        module = models.Module(models.mlp(), models.momentum)
        federated_trainer(max_rounds=2, optimizer_state=mode).fit(module, {"only": TensorDataset(*tensors)})
        results[mode] = module.net[0].weight.clone()
    assert not torch.equal(results["reset"], results["keep"])


# For most rules messages suffice: below, and in tests/algorithms/robust/test_rules.py.
IDENTICAL = [*RULES, *ROBUST, *OWN_MODELS, FedAtt(step_size=1.0), FedAvgM(momentum=0.0), "qffl:q=0"]


@pytest.mark.parametrize("aggregator", quick(IDENTICAL, ["scaffold", "fedala"]))
def test_identical_clients_are_one_of_them(aggregator, either_trainer):
    tensors = models.vectors({"x": 13})["x"]
    recorder = Recorder()
    trainer = either_trainer(max_rounds=2, method=aggregator, callbacks=[recorder])
    data = FederatedDataModule({name: TensorDataset(*tensors) for name in "abcdefg"}, batch_size=8, shuffle=False)
    trainer.fit(models.Module(models.BaseAndHead(), models.adam), datamodule=data)
    for number, aggregate in enumerate(recorder.aggregates):
        for visit in recorder.round(number):
            assert_same(visit.update, aggregate)
        assert len(recorder.round(number)) == 7


@pytest.mark.parametrize(
    "method", ["fedavg", "fairavg", "fedprox", "feddane", "fesem", "fedmargin", "fedavgm:momentum=0.0"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_copies_average_to_themselves(method, dtype):
    """For any number of copies and examples, exactly, in every dtype."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=generator) * 10 ** torch.randint(-4, 4, (1000,), generator=generator)
    state = {"w": values.to(dtype), "steps": torch.tensor(5)}
    for sizes in ([1], [3, 3, 3], [1, 10, 100, 17, 23, 91], list(range(1, 60))):
        updates = [ClientUpdate(client, size, state) for client, size in enumerate(sizes)]
        assert_same(state, one_round(chain_of(method), 0, state, updates))


IN_ANY_ORDER = [*RULES, *STEPS, *OWN_MODELS, "fednova", Method("krum", steps=[Bucketing()]), "centered_clipping"]


@pytest.mark.parametrize(
    ("aggregator", "cohort"),
    quick(
        [(rule, cohort) for rule in IN_ANY_ORDER for cohort in (1.0, 2)],
        [("fedavg", 1.0), ("scaffold", 2)],  # the order of a round's clients is the same in both runs
    ),
)
def test_the_order_of_the_clients_does_not_matter(aggregator, cohort, either_trainer):
    clients = models.as_datasets(models.vectors())
    runs = []
    for names in (list(clients), list(clients)[::-1]):
        module, recorder = models.Module(models.norm_mlp(), models.momentum), Recorder()
        trainer = either_trainer(
            max_rounds=2, clients_per_round=cohort, method=aggregator, local_epochs=2,
            availability=Availability(stragglers=0.5, client_dropout=0.2),
            seed=SEED, callbacks=[recorder],
        )  # fmt: skip
        trainer.fit(module, datamodule=FederatedDataModule({name: clients[name] for name in names}))
        runs.append((state_of(module), [(visit.client, len(visit.batches)) for visit in recorder.visits]))
    assert runs[0][1] == runs[1][1]
    assert_same(runs[0][0], runs[1][0])


def test_the_order_in_which_clients_are_visited_does_not_matter(federated_trainer):
    clients = models.as_datasets(models.vectors())
    states = []
    for names in (list(clients), sorted(clients, key=lambda name: name[-1])):
        module, recorder = models.Module(models.norm_mlp(), models.momentum), Recorder()
        trainer = federated_trainer(max_rounds=2, local_epochs=2, seed=SEED, callbacks=[recorder])
        trainer.fit(module, LazyClients(names, clients.__getitem__))
        assert [visit.client for visit in recorder.round(0)] == names
        states.append(state_of(module))
    assert_same(*states)


def test_the_rules_agree_on_equal_sizes(federated_trainer):
    clients = models.as_datasets(models.vectors(dict.fromkeys("abcd", 24)))
    states = []
    for aggregator in ("fedavg", "fairavg"):
        module = models.Module(models.norm_mlp(), models.momentum)
        federated_trainer(max_rounds=2, method=aggregator, local_epochs=2).fit(
            module, datamodule=FederatedDataModule(clients)
        )
        states.append(state_of(module))
    assert_same(*states)
    module = models.Module(models.norm_mlp(), models.momentum)
    unequal = models.as_datasets(models.vectors({"a": 24, "b": 3, "c": 24, "d": 50}))
    federated_trainer(max_rounds=2, method="fairavg", local_epochs=2).fit(
        module, datamodule=FederatedDataModule(unequal)
    )
    assert not torch.equal(states[0]["net.0.weight"], module.net[0].weight)


@pytest.mark.parametrize("method", ["fedavg", "fairavg"])
def test_parts_received_apart_and_merged_are_the_whole(method):
    generator = torch.Generator().manual_seed(0)
    updates = [
        ClientUpdate(c, size, {"w": torch.randn(50, generator=generator), "steps": torch.tensor(size // 2)})
        for c, size in enumerate([5, 80, 3, 41, 80])
    ]
    start, (whole, *parts) = updates[0].state, [chain_of(method) for _ in range(4)]
    for chain in (whole, *parts):
        chain.start(RoundInfo(0), start)
    receive(whole, start, updates)
    for place, update in enumerate(updates):
        receive(parts[place % 2], start, [update])
    parts[2].merge(parts[0].part)  # a rule without updates
    parts[2].merge(parts[1].part)
    sizes = [1 if method == "fairavg" else update.num_samples for update in updates]
    expected = average_reference([update.state for update in updates], sizes)
    assert_same(expected, whole.aggregate())
    assert_same(expected, parts[2].aggregate())


# --- 7. Only messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", quick(["fedavg", "fairavg"], ["fedavg"]))
def test_only_shared_entries_travel_and_every_byte_is_counted(aggregator, federated_trainer):
    """A tied language model with a personal mixing layer and a frozen bias."""
    recorder = Recorder()
    trainer = federated_trainer(
        max_rounds=3, clients_per_round=3, method=aggregator, personal=["net.mix.*"], frozen=["net.output.bias"],
        callbacks=[recorder],
    )  # fmt: skip
    module = models.Module(models.Tied(), models.momentum)
    trainer.fit(module, models.as_datasets(models.sentences()))
    for visit in recorder.visits:
        assert list(visit.broadcast) == list(visit.update) == ["net.embedding.weight"]  # once, despite two names
    assert recorder.up_bytes == recorder.down_bytes == [3 * 7 * 5 * 4] * 3
    for number, logged in enumerate(recorder.logged):
        assert logged["comm/up_bytes"] == recorder.up_bytes[number]
        assert logged["comm/down_bytes"] == recorder.down_bytes[number]
        assert logged["comm/total_up_bytes"] == sum(recorder.up_bytes[: number + 1])
        assert logged["comm/total_down_bytes"] == sum(recorder.down_bytes[: number + 1])
    assert module.net.output.weight is module.net.embedding.weight


def test_what_a_callback_adds_is_counted(federated_trainer):
    """Extras, and a message reduced by a callback."""

    class Method(Recorder):
        changes_update = True

        def on_server_send(self, trainer, module, client, broadcast):
            broadcast.extras["classes"] = torch.arange(3)
            super().on_server_send(trainer, module, client, broadcast)

        def on_client_end(self, trainer, module, client, update):
            update.state = {name: value.half() for name, value in update.state.items()}
            update.extras["prototypes"] = torch.zeros(2, 5)

        def on_server_receive(self, trainer, module, update):
            super().on_server_receive(trainer, module, update)
            update.state = {name: value.float() for name, value in update.state.items()}

    method = Method()
    module = models.Module(models.mlp())
    federated_trainer(max_rounds=1, callbacks=[method]).fit(module, models.as_datasets(models.vectors()))
    size = bytes_of(module.state_dict())
    assert method.logged[0]["comm/up_bytes"] == method.up_bytes[0] == 5 * (size // 2 + 40)
    assert method.logged[0]["comm/down_bytes"] == method.down_bytes[0] == 5 * (size + 24)


def held_bytes(start):
    """Bytes in all tensors reachable from an object."""
    seen, storages, todo = {id(start)}, {}, [start]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        for child in gc.get_referents(value):
            if id(child) not in seen and (isinstance(child, torch.Tensor) or not callable(child)):
                seen.add(id(child))
                todo.append(child)
    return sum(storages.values())


@pytest.mark.parametrize("method", ["fedavg", "fairavg"])
def test_an_average_holds_one_state_however_many_clients(method):
    state = {"w": torch.zeros(1000), "steps": torch.tensor(0)}
    held = {}
    for count in (1, 2, 50):
        chain = chain_of(method)
        chain.start(RoundInfo(0), state)
        for client in range(count):
            update = ClientUpdate(client, 1 + client, {"w": torch.randn(1000), "steps": torch.tensor(client)})
            chain.receive(update, state)
        held[count] = held_bytes(chain)
    assert held[1] == held[2] == held[50]
    assert 8000 <= held[1] < 8000 + 4000 + 100  # the sum in float64, and the broadcast state


def test_the_memory_of_a_round_does_not_grow_with_its_cohort(federated_trainer):
    """Live tensors at the end of every visit, for cohorts of two and six clients."""

    class Meter(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            gc.collect()
            storages = {
                value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
                for value in gc.get_objects()
                if issubclass(type(value), torch.Tensor)
            }
            peaks[-1] = max(peaks[-1], sum(storages.values()))
            counts[-1] += 1

    peaks, counts = [], []
    clients = models.as_datasets(models.vectors(dict.fromkeys("abcdef", 40)))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.Linear(4000, models.CLASSES))  # 37 000 parameters
    gc.collect()
    gc.freeze()  # existing objects are neither searched nor counted
    try:
        for size in (2, 6):
            peaks.append(0)
            counts.append(0)
            trainer = federated_trainer(max_rounds=2, clients_per_round=size, callbacks=[Meter()])
            trainer.fit(models.Module(copy.deepcopy(net)), clients)
    finally:
        gc.unfreeze()
    assert counts == [4, 12]
    assert peaks[1] <= peaks[0] + 10_000  # a state has 150 000 bytes


# --- One Trainer, one optimizer, one process --------------------------------------------------------------------------


@pytest.mark.parametrize("door", quick(["trainer", "callback"], ["trainer"]))
def test_nothing_is_built_per_client(door, tmp_path):
    recorder = Recorder()

    class Children(L.Callback):
        def on_train_batch_start(self, *args):
            assert set(multiprocessing.active_children()) <= before
            trained.append(True)

    before, trained = set(multiprocessing.active_children()), []
    trainers, optimizers = [], []
    init, configure = L.Trainer.__init__, models.Module.configure_optimizers

    class Counted(models.Module):
        def configure_optimizers(self):
            optimizers.append(self)
            return configure(self)

    def counted(self, *args, **kwargs):
        trainers.append(self)
        init(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(L.Trainer, "__init__", counted)
        open_door = {"trainer": through_mapping, "callback": through_callback_and_datamodule}[door]
        options = {**quiet(tmp_path), **OPTIONS, "max_rounds": 3}
        open_door(models.vectors(), lambda kind: Counted(models.mlp(), models.adam), [recorder, Children()], **options)
    assert len(trainers) == len(optimizers) == len(recorder.objects) == 1
    assert trained
