"""Both entry points: inputs, refusals with messages, and cleanup."""

import copy
import inspect
import multiprocessing
import pickle
import re
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.imports import RequirementCache
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import lightning_fed
from lightning_fed import (
    Availability,
    Faults,
    FederatedCallback,
    FederatedDataModule,
    FederatedTrainer,
    Federation,
    FixedStatistics,
    LocalStatistics,
    Method,
    Vectorized,
    scheduler_steps,
)
from lightning_fed.algorithms import FairAvg, FedAvg, FedBN, FedPer
from lightning_fed.callbacks import FederatedProgressBar, FederatedRichProgressBar, progress_bar
from lightning_fed.data import IID, ByGroup, Dirichlet, LazyClients, LoaderDataModule
from lightning_fed.errors import OptionError
from lightning_fed.fit import checks
from lightning_fed.fit.checks import check_processes
from tests import models
from tests.breadth import quick
from tests.conftest import QUIET
from tests.recorders import MemoryLogger, Recorder, StepCheckpoint, assert_same, state_of

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

AVERAGES_WEIGHTS = hasattr(L.pytorch.callbacks, "WeightAveraging")  # new in Lightning 2.6

CLIENTS = models.vectors({"a": 40, "b": 64, "c": 33})
HELD_OUT = models.vectors({"a": 40})["a"]


def module(**options):
    own = models.Module(models.mlp(), **options)
    own.lr, own.batch_size = 0.1, 8  # for tuners
    return own


def datasets():
    return models.as_datasets(CLIENTS)


def loader(**options):
    return models.pooled(CLIENTS, **options)[0]


def loaders():
    return {name: DataLoader(dataset, 8) for name, dataset in datasets().items()}


def names():
    return models.pooled(CLIENTS)[1]


class OwnData(models.Module):
    def __init__(self, **options):
        super().__init__(models.mlp(), **options)

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return DataLoader(TensorDataset(*HELD_OUT), 16)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def bad_scheduler(**config):
    """Makes a module with an invalid per-step scheduler."""

    def make(optimizer):
        kind = torch.optim.lr_scheduler.ReduceLROnPlateau if "monitor" in config else torch.optim.lr_scheduler.LinearLR
        return {"scheduler": kind(optimizer), "interval": "step", **config}

    return lambda: module(scheduler=make)


class Fetching(models.Module):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def fetching():
    return Fetching(models.mlp())


REFUSED = {  # name: (Trainer arguments, federation options, makes the module, message)
    "windows over clients": (
        {"accumulate_grad_batches": 2}, {}, module, "`local_steps` to a multiple of 2. .* use a 2 times larger batch",
    ),
    "windows over local epochs": (
        {"accumulate_grad_batches": 2}, {"local_epochs": 2}, module, "would use batches from two local epochs",
    ),
    "windows over clients, local steps": (
        {"accumulate_grad_batches": 2}, {"local_steps": 3}, module, "would use batches from two clients",
    ),
    "windows over clients, stragglers": (
        {"accumulate_grad_batches": 2}, {"local_steps": 4, "availability": Availability(stragglers=0.5)}, module,
        "Without stragglers, set `local_steps`",
    ),
    "batches that the step fetches": ({}, {}, fetching, "but a client's visit must begin before its first batch: use"),
    "batch size finder": ({"callbacks": [BatchSizeFinder()]}, {}, module, "`BatchSizeFinder` does not work .* plain"),
    "rate finder": ({"callbacks": [LearningRateFinder()]}, {}, module, "`LearningRateFinder` does not work .* plain"),
    "weight averaging": (
        {"callbacks": [StochasticWeightAveraging(0.1)]}, {}, module,
        "visit creates anew, .* use `WeightAveraging` .* `SWALR`",
    ),
    "pruning": (
        {"callbacks": [ModelPruning("l1_unstructured", amount=0.2)]}, {}, module,
        "`ModelPruning` does not work .* renames .* `torch.nn.utils.prune`",
    ),
    "changing windows": (
        {"callbacks": [GradientAccumulationScheduler({0: 1, 2: 2})]}, {}, module, "batches from two clients",
    ),
    "curvature of a client": (
        {}, {"optimizer_state": "keep"}, lambda: module(optimizer=lambda own: torch.optim.LBFGS(own, max_iter=2)),
        "The state of LBFGS contains",
    ),
    "saving inside a round": (
        {"callbacks": [ModelCheckpoint(every_n_train_steps=1)], "enable_checkpointing": True}, {}, module,
        "the saved model belongs to the last complete round",
    ),
    "scheduler with a frequency": ({}, {}, bad_scheduler(frequency=2), "use frequency=1 .* or interval='epoch'"),
    "plateaus of a client": (
        {}, {}, bad_scheduler(monitor="train_loss", strict=False), "and ReduceLROnPlateau.* or interval=.epoch.",
    ),
}  # fmt: skip
if RequirementCache("lightning>=2.6"):  # earlier versions do not accept a time
    REFUSED["validation by time"] = (
        {"val_check_interval": "00:00:01:00"}, {}, module, "`val_check_interval` to be a number .* but got a duration",
    )  # fmt: skip
if AVERAGES_WEIGHTS:
    REFUSED["averages of models of changing shapes"] = (
        {"callbacks": [L.pytorch.callbacks.EMAWeightAveraging()]}, {"method": "fedma"}, module,
        "`EMAWeightAveraging` does not work with FedMA, which changes the shapes",
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize("door", ["trainer", "callback"])
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused_in_setup(case, door, plain_trainer, federated_trainer):
    arguments, options, make, message = copy.deepcopy(case)
    own = make()
    before = state_of(own)
    data = models.PooledData(CLIENTS)
    if door == "trainer":
        trainer = federated_trainer(max_rounds=1, **options, partition=IID(2), **arguments)
    else:
        callbacks = [Federation(partition=IID(2), **options), *arguments.get("callbacks", ())]
        trainer = plain_trainer(max_epochs=1, **{**arguments, "callbacks": callbacks})
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(own, datamodule=data)
    assert_same(before, state_of(own))
    assert_nothing_is_left(trainer, own, data)


ROWS = {  # name in `REFUSED`: first words of the row in the table of unsupported settings
    "windows over clients": "`accumulate_grad_batches`, `",
    "windows over local epochs": "`accumulate_grad_batches` with",
    "batches that the step fetches": "`training_step(self, dataloader_iter)`",
    "batch size finder": "`BatchSizeFinder`",
    "weight averaging": "`StochasticWeightAveraging`",
    "pruning": "`ModelPruning`",
    "changing windows": "`accumulate_grad_batches`, `",
    "curvature of a client": "`LBFGS`",
    "saving inside a round": "a `ModelCheckpoint`",
    "scheduler with a frequency": "a per-step scheduler",
    "plateaus of a client": "`ReduceLROnPlateau`",
    "validation by time": "`val_check_interval`",
    "averages of models of changing shapes": "`WeightAveraging` with FedMA",
}


@pytest.mark.filterwarnings("ignore")  # the warnings of a plain Trainer
@pytest.mark.parametrize(
    "name", quick([name for name in ROWS if name in REFUSED], (ROWS.keys() & REFUSED.keys()) - {"batch size finder"})
)
def test_the_table_of_unsupported_settings_is_true_for_one_client(name, plain_trainer):
    """An allowed setting gives the weights of a plain Trainer."""
    arguments, options, make, message = REFUSED[name]
    (row,) = [row for row in unsupported_settings() if row.startswith(f"| {ROWS[name]}")]
    ends = []
    plain = {"partition": IID(1), "optimizer_state": "reset" if "method" in options else "keep", **options}
    for federation in ([], [Federation(**plain)]):
        own, settings = make(), copy.deepcopy(arguments)
        callbacks = [*federation, *settings.pop("callbacks", ())]
        trainer = plain_trainer(max_epochs=2, callbacks=callbacks, **settings)
        try:
            trainer.fit(own, datamodule=LoaderDataModule(DataLoader(TensorDataset(*CLIENTS["a"]), 8)))
        except Exception as error:
            ends.append(str(error))
        else:
            ends.append(state_of(own))
    if "| allowed |" in row:
        assert_same(*ends)
    else:
        assert "| refused |" in row
        assert re.search(message, ends[1]), ends[1]


def test_the_table_of_unsupported_settings_has_every_refused_callback():
    rows = unsupported_settings()
    for kind in checks._REFUSED_INSIDE:  # noqa: SLF001
        (row,) = [row for row in rows if f"`{kind.__name__}`" in row.split(" | ")[0]]
        assert (row.split(" | ")[1] == "refused") == (kind in checks._REFUSED)  # noqa: SLF001


def unsupported_settings():
    text = (Path(__file__).parents[1] / "docs/concepts.md").read_text()
    return re.findall(r"^\| .*", text[text.index("## Unsupported settings") : text.index("## Differences from")], re.M)


def assert_nothing_is_left(trainer, *owners):
    assert trainer.reload_dataloaders_every_n_epochs == 0
    for owner in owners:
        assert not {"train_dataloader", "on_save_checkpoint", "on_train_batch_end"} & set(vars(owner))


def test_the_rounds_loader_has_the_data_set_that_is_split(either_trainer):
    """A module may count classes in `setup`, or read the data set during training."""

    class Counting(models.Module):
        def setup(self, stage):
            dataset = self.trainer.datamodule.train_dataloader().dataset
            self.class_counts = torch.bincount(torch.stack([target for _, target in dataset]))

        def on_train_epoch_start(self):
            lengths.append(len(self.trainer.train_dataloader.dataset))

    lengths = []
    own = Counting(models.mlp())
    either_trainer(2, partition=IID(2)).fit(own, datamodule=models.PooledData(CLIENTS))
    targets = torch.cat([targets for _, targets in CLIENTS.values()])
    assert torch.equal(own.class_counts, torch.bincount(targets))
    assert lengths == [len(targets)] * 2


def test_the_rounds_loader_has_the_users_subset(federated_trainer):
    class Looking(models.Module):
        def setup(self, stage):
            found.append(self.trainer.datamodule.train_dataloader().dataset)

    found = []
    subset = Subset(TensorDataset(*CLIENTS["a"]), range(20))
    federated_trainer(max_rounds=1, partition=IID(2)).fit(Looking(models.mlp()), DataLoader(subset, 8))
    assert found == [subset]


@pytest.mark.parametrize("make", [datasets, loaders], ids=["data sets", "loaders"])
def test_clients_with_data_of_their_own_have_no_data_set_together(make, either_trainer):
    class Looking(models.Module):
        def setup(self, stage):
            return self.trainer.datamodule.train_dataloader().dataset

    with pytest.raises(AttributeError, match="use the FederatedDataModule's `clients`"):
        either_trainer(1).fit(Looking(models.mlp()), datamodule=FederatedDataModule(make()))


def test_several_processes_are_refused(plain_trainer):
    with pytest.raises(MisconfigurationException, match="has 2 processes: use strategy='client_parallel'"):
        check_processes(plain_trainer(devices=2, strategy="ddp_fork"), is_alone=False)
    with pytest.raises(MisconfigurationException, match="has 2 processes: use strategy='client_parallel'"):
        FederatedTrainer(partition=IID(2), strategy="ddp_spawn", **{**QUIET, "devices": 2}).fit(module(), loader())


@pytest.mark.parametrize("tune", ["lr_find", "scale_batch_size"])
def test_tuners_are_refused(tune, federated_trainer):
    own, data = module(), FederatedDataModule(datasets())
    with pytest.raises(MisconfigurationException, match=r"tune with a plain `L\.Trainer` first"):
        getattr(Tuner(federated_trainer(max_rounds=1)), tune)(own, datamodule=data)


BAD_ARGUMENTS = [
    ({"method": "fedsgd"}, ValueError, r"one of 39 names, but got 'fedsgd'. Did you mean 'fed"),
    ({"method": FedAvg}, TypeError, "a name, a Method or an Aggregator object, but got <class"),
    ({"clients_per_round": 0}, ValueError, "`clients_per_round` to be at least 1, but got 0"),
    ({"clients_per_round": 0.0}, ValueError, r"in \(0, 1\], but got 0.0"),
    ({"clients_per_round": 2.0}, ValueError, r"in \(0, 1\], but got 2.0: pass an int for a number"),
    ({"clients_per_round": True}, ValueError, r"a count \(int\) or a fraction \(float\), but got True"),
    ({"clients_per_round": "all"}, ValueError, "but got 'all'"),
    ({"local_epochs": 0}, ValueError, "`local_epochs` to be at least 1, but got 0"),
    ({"local_steps": 0}, ValueError, "`local_steps` to be at least 1, but got 0"),
    ({"local_steps": 3, "local_epochs": 2}, ValueError, "got local_epochs=2 and local_steps=3"),
    ({"seed": -1}, ValueError, "`seed` to be at least 0, but got -1"),
    ({"batch_norm": "sync"}, ValueError, "`batch_norm` to be one of .*'recalibrate'.* or a Local.*, but got 'sync'"),
    ({"batch_norm": "local"}, ValueError, "or a LocalStatistics or FixedStatistics object, but got 'local'"),
    ({"visits": "vectorized"}, ValueError, "`visits` to be one of .*'fused'.* or a Vectorized object, but got 'vector"),
    ({"visits": 8}, ValueError, "or a Vectorized object, but got 8"),
    ({"availability": 0.5}, ValueError, r"`availability` to be Availability\(...\), but got 0.5"),
    ({"faults": {"min_clients": 2}}, ValueError, r"`faults` to be Faults\(...\), but got {'min_clients': 2}"),
    (
        {"faults": Faults(visit_timeout=1.0), "visits": Vectorized(2)},
        ValueError,
        "`visit_timeout` or `Vectorized`, not both",
    ),
    ({"stragglers": 0.5}, TypeError, "'stragglers'"),
    ({"optimizer_state": "share"}, ValueError, r"one of \['reset', 'keep'\], but got 'share'"),
    ({"clients_per_round": 2 + 0j}, ValueError, r"a count \(int\) or a fraction \(float\), but got \(2\+0j\)"),
    ({"local_epochs": 1.5}, ValueError, "`local_epochs` to be a whole number, but got 1.5"),
    ({"local_epochs": True}, ValueError, "`local_epochs` to be a whole number, but got True"),
    ({"local_steps": 2.5}, ValueError, "`local_steps` to be a whole number, but got 2.5"),
    ({"personal": "head.*"}, ValueError, r"`personal` to be a list, such as .*, but got 'head\.\*'"),
    ({"frozen": "head.*"}, ValueError, r"`frozen` to be a list, such as .*, but got 'head\.\*'"),
    ({"personal": torch.nn.Linear}, ValueError, "`personal` to be a list, such as .*, but got <class .*Linear'>"),
    ({"personal": torch.nn.Linear(1, 1)}, ValueError, "`personal` to be a list, such as .*, but got Linear"),
    ({"frozen": [torch.nn.Linear(1, 1)]}, ValueError, r"`frozen` to be a list of .*, but it contains Linear\("),
    ({"personal": [3]}, ValueError, "but it contains 3"),
]


BAD_OBJECTS = [
    (Availability, {"stragglers": 1.0}, r"`stragglers` to be in \[0, 1\), but got 1.0"),
    (Availability, {"stragglers": -0.1}, r"`stragglers` to be in \[0, 1\), but got -0.1"),
    (Availability, {"client_dropout": 1.0}, r"`client_dropout` to be in \[0, 1\), but got 1.0"),
    (Availability, {"client_dropout": -0.1}, r"`client_dropout` to be in \[0, 1\), but got -0.1"),
    (Availability, {"partial_work": "some"}, r"`partial_work` to be one of \['keep', 'drop'\], but got 'some'"),
    (Faults, {"min_clients": 0}, "`min_clients` to be at least 1, but got 0"),
    (Faults, {"min_clients": 1.5}, "`min_clients` to be a whole number, but got 1.5"),
    (Faults, {"max_failed_rounds": 0}, "`max_failed_rounds` to be at least 1, but got 0"),
    (Faults, {"visit_timeout": 0}, "`visit_timeout` to be a number of seconds greater than 0, but got 0"),
    (Vectorized, {"clients": 0}, "`clients` to be at least 1, but got 0"),
    (FixedStatistics, {"after": -1}, "`after` to be at least 0, but got -1"),
    (LocalStatistics, {"unseen": "nearest"}, r"`unseen` to be one of \['batch', 'data', 'pooled'\], but got 'nearest'"),
]


@pytest.mark.parametrize(("kind", "arguments", "message"), BAD_OBJECTS, ids=lambda value: str(value)[:40])
def test_bad_arguments_of_options(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize(
    ("typo", "kind", "near"),
    [
        (lambda: FederatedTrainer(max_round=3), TypeError, "max_rounds"),
        (lambda: FederatedTrainer(client_per_round=3), TypeError, "clients_per_round"),
        (lambda: FederatedTrainer("fedprox:nu=1"), ValueError, "mu"),
        (lambda: FederatedTrainer("fedprxo"), ValueError, "fedprox"),
        (lambda: lightning_fed.FederatedTainer, AttributeError, "FederatedTrainer"),
        (lambda: lightning_fed.data.Dirichelt, AttributeError, "Dirichlet"),
    ],
)
def test_a_typo_gets_a_suggestion(typo, kind, near):
    with pytest.raises(kind, match=f"(?i)did you mean '{near}'"):
        typo()


def test_rounds_are_said_once():
    with pytest.raises(ValueError, match="Expected one of `max_rounds` and `max_epochs`"):
        FederatedTrainer(max_rounds=1, max_epochs=1)


@pytest.mark.parametrize("kind", [Federation, FederatedTrainer])
@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_bad_arguments(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(**arguments, **(QUIET if kind is FederatedTrainer else {}))


def test_numbers_of_numpy():
    schedule = Federation(
        clients_per_round=np.int64(3), local_epochs=np.int32(2), faults=Faults(min_clients=np.int64(2))
    ).schedule
    assert (schedule.clients_per_round, schedule.local_epochs) == (3, 2)
    assert type(schedule.clients_per_round) is int
    assert Federation(clients_per_round=np.float32(0.5)).schedule.clients_per_round == 0.5


def test_what_is_ignored_meanwhile_is_shown_again(federated_trainer):
    """Warning filters are global: after a fit the earlier filters and the user's additions remain."""

    class Adds(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            warnings.filterwarnings("ignore", "mine")

    before = list(warnings.filters)
    clients = {**datasets(), "tiny": TensorDataset(torch.zeros(1, 6), torch.zeros(1, dtype=torch.long))}
    trainer = federated_trainer(max_rounds=1, callbacks=[Adds()], batch_norm="average")
    trainer.fit(models.Module(models.norm_mlp()), clients)
    assert trainer.callback_metrics["fed/failed"] == 1
    assert warnings.filters[1:] == before
    assert warnings.filters[0][:2] == ("ignore", re.compile("mine", re.IGNORECASE))


def test_methods_say_what_they_set():
    """A user's value is refused unless equal or empty, as recipes pass empty values."""
    with pytest.raises(ValueError, match=r"no `batch_norm` for `FedBN`, which sets this argument, but got 'average'"):
        Federation(FedBN(), batch_norm="average")
    with pytest.raises(ValueError, match=r"no `personal` for `FedPer`, which sets this argument, but got \['a'\]"):
        FederatedTrainer(FedPer("head.*"), personal=["a"], **QUIET)
    assert Federation(FedBN(), batch_norm="personal").options.batch_norm == "personal"
    assert Federation(FedPer("head.*"), personal=[]).options.personal == ("head.*",)
    assert Federation(FedBN(), personal=["head.*"], local_epochs=2).options.personal == ("head.*",)
    federation = Federation(FedPer(["head.*", torch.nn.LSTM]), batch_norm="average")
    assert federation.options.personal == ("head.*", torch.nn.LSTM)
    # settings of a method are removed with the method
    assert federation.replace(method="fedavg", seed=3).options.personal == ()
    assert federation.replace(seed=3).options.personal == ("head.*", torch.nn.LSTM)
    with pytest.raises(ValueError, match=r"settings of `FedAvg` to be among \('local_epochs', .*, but got 'seed'"):
        Federation(Method("fedavg", seed=1))


BAD_SELECTORS = [
    ({"personal": ["head.*"]}, "selector in `personal` to match entries of the model, but 'head.\\*' .*'net.0.weight'"),
    ({"frozen": [torch.nn.LSTM]}, "selector in `frozen` to match .*LSTM"),
    ({"personal": ["net.2.*"], "frozen": ["*.bias"]}, "these are both: 'net.2.bias'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_SELECTORS)
def test_selectors_that_say_nothing(options, message, federated_trainer):
    with pytest.raises(ValueError, match=message):
        federated_trainer(max_rounds=1, **options).fit(module(), datasets())


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


def sampled():
    return DataLoader(loader().dataset, 8, sampler=["north", "south"])


BAD_DATA = {  # data for FederatedTrainer.fit, options, error, message
    "no partition": (loader, {}, MisconfigurationException, "Expected either a `partition` .*, but got neither"),
    "nothing": (lambda: None, {}, MisconfigurationException, "Expected either a `partition` .*, but got neither"),
    "nothing to split": (lambda: None, {"partition": IID(2)}, MisconfigurationException, "data sets passed to `fit`"),
    "partition of clients": (
        datasets, {"partition": IID(2)}, OptionError,
        "for `partition` to split .* a dict of 3. .* omit",
    ),
    "no clients": (dict, {}, ValueError, "at least one client, but got none"),
    "no clients in a list": (list, {}, ValueError, "at least one client, but got none"),
    "a stream": (
        lambda: DataLoader(Endless()), {"partition": IID(2)}, TypeError, "map-style .* the iterable data set Endless",
    ),
    "a sampler": (sampled, {"partition": IID(2)}, ValueError, "draw indices of examples, .* got 'north'"),
    "no batches": (
        lambda: DataLoader(loader().dataset, None), {"partition": IID(2)}, ValueError, "batch size, .*batch_size=None",
    ),
    "mixed": (lambda: {"a": loader(), "b": loader().dataset}, {}, TypeError, "all loaders, but got DataLoader"),
    "streams": (lambda: [Endless()], {}, TypeError, "map-style data sets, or all loaders, but got Endless"),
    "too few": (datasets, {"clients_per_round": 4}, ValueError, r"at most the number of clients \(3\), but got 4"),
    "more than there are": (
        datasets, {"faults": Faults(min_clients=4)}, MisconfigurationException,
        r"in a round \(3\), but got 4: .* never change",
    ),
    "more than are drawn": (
        datasets, {"faults": Faults(min_clients=3), "clients_per_round": 2}, MisconfigurationException,
        r"in a round \(2\), but got 3",
    ),
    "more than do all their work": (
        datasets,
        {"faults": Faults(min_clients=3), "availability": Availability(stragglers=0.4, partial_work="drop")},
        MisconfigurationException,
        r"in a round that complete their work \(2\), but got 3",
    ),
    "too few to split": (loader, {"partition": IID(2), "clients_per_round": 3}, ValueError, "number of clients"),
}  # fmt: skip


def test_a_bare_data_set_is_split(federated_trainer):
    own, other = module(), module()
    dataset = loader().dataset
    federated_trainer(max_rounds=2, partition=IID(2), seed=1).fit(own, dataset)
    federated_trainer(max_rounds=2, partition=IID(2), seed=1).fit(other, DataLoader(dataset, 32, shuffle=True))
    assert_same(state_of(own), state_of(other))


@pytest.mark.parametrize("case", BAD_DATA.values(), ids=BAD_DATA)
def test_data_that_are_no_clients(case, federated_trainer):
    make, options, error, message = case
    trainer, own = federated_trainer(max_rounds=1, **options), module()
    with pytest.raises(error, match=message):
        trainer.fit(own, make())
    assert_nothing_is_left(trainer, own)


def test_clients_that_are_neither_a_mapping_nor_a_sequence():
    with pytest.raises(TypeError, match="a mapping or a sequence of data sets or loaders, but got Federation"):
        FederatedDataModule(Federation())
    with pytest.raises(TypeError, match="but got str"):
        FederatedDataModule("abc")


@pytest.mark.parametrize("data", [datasets, loader])
def test_loaders_and_a_datamodule(data, federated_trainer):
    trainer = federated_trainer(max_rounds=1, partition=IID(2))
    with pytest.raises(MisconfigurationException, match="You cannot pass `train_dataloader`"):
        trainer.fit(module(), data(), datamodule=models.PooledData(CLIENTS))


def split_dataset():
    return loader().dataset


@pytest.mark.parametrize(
    ("data", "kind"),
    quick(
        product([loader, split_dataset, datasets], [module, OwnData]),
        [(loader, OwnData), (split_dataset, module), (split_dataset, OwnData), (datasets, module)],
    ),
)
def test_data_handed_to_a_plain_trainer(kind, data, plain_trainer, federated_trainer):
    """Split or used as clients as with the other entry point, even if the module has loaders."""
    partition, clients, own, other = None if data is datasets else IID(3, seed=5), datasets(), kind(), kind()
    names = [*clients] if data is datasets else range(3)
    validation = dict(zip(names, clients.values(), strict=True))
    trainer = plain_trainer(max_epochs=2, callbacks=[Federation(partition=partition, seed=1)])
    trainer.fit(own, data(), validation)
    assert_nothing_is_left(trainer, own)
    assert trainer.datamodule is None
    assert "val_loss" in trainer.callback_metrics
    federated_trainer(max_rounds=2, partition=partition, seed=1).fit(other, data(), validation)
    assert_same(state_of(own), state_of(other))


def test_two_federations(plain_trainer, federated_trainer):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `Federation`"):  # Lightning's error
        plain_trainer(callbacks=[Federation(), Federation()])
    trainer = plain_trainer(max_epochs=1, callbacks=[Federation(partition=IID(2))])
    trainer.callbacks.append(Federation(partition=IID(2)))
    with pytest.raises(MisconfigurationException, match="one `Federation` callback, but the Trainer has several"):
        trainer.fit(module(), datamodule=models.PooledData(CLIENTS))
    with pytest.raises(ValueError, match="in the argument `federation`, but got one among the `callbacks`"):
        federated_trainer(callbacks=[Federation()])


# --- Inputs -----------------------------------------------------------------------------------------------------------


def test_clients_in_every_form_train_the_same(federated_trainer, plain_trainer):
    """A mapping, a list, a lazy mapping, a datamodule in either position; seeds depend on the names."""
    numbered = dict(enumerate(datasets().values()))
    lazy = LazyClients(range(3), numbered.__getitem__)
    module_of = FederatedDataModule(numbered)
    results = []
    for data in (numbered, list(numbered.values()), tuple(numbered.values()), lazy, module_of):
        own = module(optimizer=models.momentum)
        federated_trainer(max_rounds=2, clients_per_round=2).fit(own, data)
        results.append(state_of(own))
    own = module(optimizer=models.momentum)
    federated_trainer(max_rounds=2, clients_per_round=2).fit(own, datamodule=module_of)
    results.append(state_of(own))
    own = module(optimizer=models.momentum)
    plain_trainer(max_epochs=2, callbacks=[Federation(clients_per_round=2)]).fit(own, module_of)
    results.append(state_of(own))
    for result in results[1:]:
        assert_same(results[0], result)


def test_a_million_clients_are_built_when_they_are_asked_for(federated_trainer):
    built = []

    def build(client):
        built.append(client)
        return TensorDataset(*(tensor[: 3 + client % 5] for tensor in CLIENTS["b"]))

    recorder = Recorder()
    trainer = federated_trainer(max_rounds=2, clients_per_round=3, callbacks=[recorder])
    trainer.fit(module(), LazyClients(range(1_000_000), build))
    assert len(recorder.visits) == 6
    assert set(built) == {0, *(visit.client for visit in recorder.visits)}  # the first client shows the kind of data
    assert [visit.num_samples for visit in recorder.visits] == [3 + visit.client % 5 for visit in recorder.visits]


def test_loaders_that_share_a_data_set_weigh_their_own_part(federated_trainer):
    """One sampler per client over the same data set, in three forms."""
    data = loader().dataset
    parts = {"a": range(40), "b": range(40, 104), "c": range(104, 137)}
    ways = {
        "sampler": lambda part: DataLoader(data, 16, sampler=SubsetRandomSampler(part)),
        "batch sampler": lambda part: DataLoader(
            data, batch_sampler=torch.utils.data.BatchSampler(SubsetRandomSampler(part), 16, False)
        ),
        "subset": lambda part: DataLoader(torch.utils.data.Subset(data, part), 16),
    }
    for make in ways.values():
        recorder = Recorder()
        clients = {name: make(part) for name, part in parts.items()}
        federated_trainer(max_rounds=1, callbacks=[recorder]).fit(module(), clients)
        assert {visit.client: visit.num_samples for visit in recorder.visits} == {"a": 40, "b": 64, "c": 33}
        assert recorder.logged[0]["fed/num_samples"] == 137
    again = DataLoader(TensorDataset(*HELD_OUT), 16, sampler=torch.utils.data.RandomSampler(range(40), True, 1000))
    recorder = Recorder()
    federated_trainer(max_rounds=1, callbacks=[recorder]).fit(module(), {"a": again})
    assert recorder.visits[0].num_samples == 40  # repeated draws do not count again


def test_a_modules_own_validation_data_are_used(federated_trainer):
    recorder, own = Recorder(), OwnData()
    trainer = federated_trainer(max_rounds=2, callbacks=[recorder])
    trainer.fit(own, datasets())
    assert len(recorder.validated) == 2
    assert "val_loss" in trainer.callback_metrics


def test_aggregators_by_name_and_as_objects(federated_trainer):
    results = []
    for aggregator in ("fairavg", "FairAvg", FairAvg()):
        own = module(optimizer=models.momentum)
        federated_trainer(max_rounds=1, method=aggregator).fit(own, datasets())
        results.append(state_of(own))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_a_compiled_module(federated_trainer):
    own = models.Quadratic(size=6)
    federated_trainer(max_rounds=2).fit(torch.compile(own, backend="eager"), datasets())
    expected = models.Quadratic(size=6)
    federated_trainer(max_rounds=2).fit(expected, datasets())
    assert_same(state_of(expected), state_of(own))
    assert own.w.any()


# --- Validate, test and predict ---------------------------------------------------------------------------------------


class Predicting(models.Module):
    def __init__(self):
        super().__init__(models.norm_mlp(), models.momentum)

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


@pytest.mark.parametrize("door", quick(["trainer", "callback"], ["trainer"]))
def test_validate_test_and_predict(door, plain_trainer, federated_trainer):
    own, data = Predicting(), models.ValidatedData(CLIENTS, HELD_OUT)
    if door == "trainer":
        trainer = federated_trainer(max_rounds=2, partition=ByGroup(names()))
    else:
        trainer = plain_trainer(max_epochs=2, callbacks=[Federation(partition=ByGroup(names()))])
    inputs, targets = HELD_OUT
    held_out = DataLoader(TensorDataset(*HELD_OUT), batch_size=16)

    def check():
        before = state_of(own)
        results = [
            trainer.validate(own, datamodule=data, verbose=False),
            trainer.validate(own, held_out, verbose=False),
        ]
        tested = trainer.test(own, datamodule=data, verbose=False)
        predicted = torch.cat(trainer.predict(own, held_out))
        own.eval()
        with torch.no_grad():
            expected = own(inputs)
            loss = float(torch.nn.functional.cross_entropy(expected, targets))
        own.train()
        assert torch.allclose(predicted, expected, atol=1e-6)
        assert results[0] == results[1]
        assert results[0][0]["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert tested[0]["test_acc"] == pytest.approx(float((expected.argmax(1) == targets).double().mean()))
        assert set(results[0][0]) == {"val_loss", "val_acc"}
        assert_same(before, state_of(own))
        return loss

    before = check()
    trainer.fit(own, datamodule=data)
    fitted = float(trainer.callback_metrics["val_loss"])
    assert check() == pytest.approx(fitted, rel=1e-5)
    assert before != fitted


@pytest.mark.parametrize("which", quick(["val", "test"], ["test"]))
def test_clients_held_out_data_are_evaluated_as_a_whole(which, federated_trainer):
    held_out = models.vectors({"x": 40, "y": 10})
    data = FederatedDataModule(datasets(), **{which: models.as_datasets(held_out)})
    own, trainer = Predicting(), federated_trainer(max_rounds=1)
    trainer.fit(own, datamodule=data)
    run = trainer.validate if which == "val" else trainer.test
    results = run(own, datamodule=data, verbose=False)[0]
    own.eval()
    right = [own(inputs).argmax(1) == targets for inputs, targets in held_out.values()]
    assert results[f"{which}_acc"] == pytest.approx(float(torch.cat(right).double().mean()))


# --- Cleanup ----------------------------------------------------------------------------------------------------------


def test_a_second_fit_of_the_same_objects_is_the_first_again(plain_trainer):
    """Federation, datamodule and module can be reused with a new Trainer."""
    federation = Federation(
        partition=ByGroup(names()), personal=["net.2.*"], optimizer_state="keep", clients_per_round=2, seed=3
    )
    own, data = module(optimizer=models.adam), models.PooledData(CLIENTS)
    start, runs = state_of(own), []
    for _ in range(2):
        own.load_state_dict(start)
        recorder = Recorder()
        trainer = plain_trainer(max_epochs=3, callbacks=[federation, recorder])
        trainer.fit(own, datamodule=data)
        assert_nothing_is_left(trainer, own, data)
        runs.append((state_of(own), recorder.logged, [visit.client for visit in recorder.visits]))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


def test_a_trainer_that_goes_on(federated_trainer):
    """One round, then two more with a higher `max_epochs`: equals three rounds, except for new optimizers."""
    options = {"personal": ["net.2.*"], "optimizer_state": "keep", "clients_per_round": 2, "seed": 3}
    own, recorder = module(optimizer=models.sgd), Recorder()
    trainer = federated_trainer(max_rounds=1, callbacks=[recorder], **options)
    trainer.fit(own, datasets())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(own, datasets())
    at_once, expected = module(optimizer=models.sgd), Recorder()
    federated_trainer(max_rounds=3, callbacks=[expected], **options).fit(at_once, datasets())
    assert_same(state_of(at_once), state_of(own))
    assert recorder.logged == expected.logged
    assert [visit.client for visit in recorder.visits] == [visit.client for visit in expected.visits]


class OptimizerStates(FederatedCallback):
    def __init__(self):
        self.are_kept = []

    def on_client_start(self, trainer, module, client, broadcast):
        self.are_kept.append(bool(trainer.optimizers[0].state))


def test_a_trainer_that_goes_on_starts_with_new_optimizers(federated_trainer):
    """A client loads the optimizer state from an earlier round of the same fit, but not from an earlier fit."""
    own, states = module(optimizer=models.momentum), OptimizerStates()
    trainer = federated_trainer(max_rounds=2, callbacks=[states], optimizer_state="keep", seed=3)
    for max_rounds in (2, 4):
        trainer.fit_loop.max_epochs = max_rounds
        trainer.fit(own, datasets())
    assert states.are_kept == 2 * ([False] * len(CLIENTS) + [True] * len(CLIENTS))


class Kept(FederatedCallback):
    def __init__(self):
        self.seen = []

    def on_server_round_start(self, trainer, module):
        steps = trainer.federation.server.chain.state_dict()["steps"]
        self.seen.append((stored(trainer), [step.get("entries") for step in steps.values()]))


def stored(trainer):
    return {client: trainer.federation.store.get(client) for client in CLIENTS}


def test_a_trainer_that_goes_on_from_an_earlier_round(federated_trainer, tmp_path):
    """After validating an earlier checkpoint, client and server state belong to this checkpoint, as the module does."""
    own, kept = module(optimizer=models.sgd), Kept()
    save = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = federated_trainer(
        method="fedavgm", max_rounds=2, callbacks=[kept, save], enable_checkpointing=True, personal=["net.2.*"]
    )
    trainer.fit(own, datasets())
    trainer.validate(own, loader(shuffle=False), ckpt_path=tmp_path / "epoch=0.ckpt")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(own, datasets())
    assert trainer.federation.rounds == 3
    torch.testing.assert_close(kept.seen[2], kept.seen[1], rtol=0, atol=0)


def test_a_fit_goes_on_after_an_error_in_validation(federated_trainer):
    """As in a plain fit, the epoch is repeated; no state is lost."""

    def fail(trainer, module):
        if len(kept.seen) == 2:
            raise OSError("broken off")

    own, kept = module(optimizer=models.sgd), Kept()
    fails = LambdaCallback(on_validation_start=fail)
    trainer = federated_trainer(max_rounds=3, callbacks=[kept, fails], personal=["net.2.*"])
    data = FederatedDataModule(datasets(), val=loader(shuffle=False))
    with pytest.raises(OSError, match="broken off"):
        trainer.fit(own, datamodule=data)
    last = stored(trainer)
    trainer.fit(own.train(), datamodule=data)
    torch.testing.assert_close(kept.seen[2][0], last, rtol=0, atol=0)
    assert trainer.federation.rounds == 3


def test_a_plain_trainer_afterwards_is_plain(plain_trainer, federated_trainer):
    """Uses the same datamodule and module, once with a federation in between."""
    results = []
    for is_federated in (True, False):
        own, data = module(), models.PooledData(CLIENTS, shuffle=False)
        start = state_of(own)
        if is_federated:
            federated_trainer(max_rounds=1, partition=IID(3)).fit(own, datamodule=data)
            assert not torch.equal(start["net.0.weight"], own.net[0].weight)
        own.load_state_dict(start)
        trainer = plain_trainer(max_epochs=1)
        trainer.fit(own, datamodule=data)
        assert trainer.num_training_batches == 5  # 137 examples
        results.append(state_of(own))
    assert_same(*results)


def test_a_plain_trainer_pools_the_clients_of_a_federated_datamodule(plain_trainer):
    clients = datasets()
    seen = []

    class Spy(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(batch[0])

    for data, batches in (
        (FederatedDataModule(clients, batch_size=30), 5),
        (FederatedDataModule({name: DataLoader(data, 30) for name, data in clients.items()}), 2 + 3 + 2),
    ):
        seen.clear()
        plain_trainer(max_epochs=1, callbacks=[Spy()]).fit(module(), datamodule=data)
        assert len(seen) == batches
        rows = torch.cat(seen)
        expected = torch.cat([inputs for inputs, _ in CLIENTS.values()])
        assert torch.equal(rows[rows[:, 0].argsort()], expected[expected[:, 0].argsort()])


@pytest.mark.parametrize("form", ["loader", "clients"])
def test_worker_processes_end_with_the_fit(form, federated_trainer):
    """Without garbage collection, which would wait for each worker; a second fit starts a new worker."""

    class Children(L.Callback):
        def on_train_batch_end(self, *args):
            working.update(set(multiprocessing.active_children()) - before)

    before, working = set(multiprocessing.active_children()), set()
    workers = {"num_workers": 1, "persistent_workers": True}
    if form == "loader":
        data, options = loader(**workers), {"partition": ByGroup(names())}
    else:
        data, options = FederatedDataModule(datasets(), **workers), {}
    trainer = federated_trainer(max_rounds=2, callbacks=[Children()], **options)
    for fits in (1, 2):
        trainer.fit_loop.max_epochs = 2 * fits
        trainer.fit(module(), data)
        assert len(working) == fits  # the same worker in both rounds
        assert set(multiprocessing.active_children()) <= before


class Interrupted(FederatedCallback):
    """Stops the fit in the second visit of round 1."""

    def __init__(self, error):
        self.error = error
        self.globals = []

    def on_server_aggregate(self, trainer, module, state):
        self.globals.append(copy.deepcopy(state))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2:
            raise self.error


@pytest.mark.parametrize(("error", "seen"), [(RuntimeError("boom"), RuntimeError), (KeyboardInterrupt(), SystemExit)])
def test_an_interrupted_fit_leaves_the_global_model_and_nothing_else(error, seen, plain_trainer):
    own, data = module(optimizer=models.adam), models.PooledData(CLIENTS)
    interrupted = Interrupted(error)
    trainer = plain_trainer(max_epochs=3, callbacks=[Federation(partition=ByGroup(names())), interrupted])
    with pytest.raises(seen):
        trainer.fit(own, datamodule=data)
    assert len(interrupted.globals) == 1
    assert_same(interrupted.globals[0], state_of(own))
    assert_nothing_is_left(trainer, own, data)
    again = plain_trainer(max_epochs=1)
    again.fit(own, datamodule=data)
    assert again.num_training_batches == 5


def test_an_error_in_a_visit_names_the_client(federated_trainer):
    class Faulty(models.Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)

        def on_after_backward(self):
            if self.trainer.federation.current_client == "c":
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck") as caught:
        federated_trainer(max_rounds=1).fit(Faulty(models.mlp()), datasets())
    assert "in the visit of client 'c'" in caught.value.__notes__[0]


class Copying(L.Callback):
    """Copies the module, as moving averages and experiment trackers do."""

    def __init__(self):
        self.copies = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.copies.append(copy.deepcopy(module))
        self.copies.append(pickle.loads(pickle.dumps(module)))


def test_a_module_can_be_copied_during_a_fit(federated_trainer):
    copying, own = Copying(), module()
    federated_trainer(max_rounds=1, callbacks=[copying]).fit(own, {"a": datasets()["a"]})
    assert len(copying.copies) == 2 * 2
    for copied in copying.copies:
        for hook in (copied.on_save_checkpoint, copied.on_train_batch_end):
            assert hook.__self__ is copied
            assert hook.__func__ is getattr(L.LightningModule, hook.__name__)
        federated_trainer(max_rounds=1).fit(copied, datasets())
    assert_same(state_of(copying.copies[0]), state_of(copying.copies[1]))


# --- FederatedTrainer forwards to Lightning ---------------------------------------------------------------------------


def test_the_trainer_has_the_signature_of_both():
    """Programs read the signatures of class and ``__init__``; descriptions are included."""
    ours = inspect.signature(FederatedTrainer).parameters
    assert list(inspect.signature(FederatedTrainer.__init__).parameters) == ["self", *ours]
    assert list(ours)[:3] == ["method", "max_rounds", "federation"]
    for kind in (Federation, L.Trainer):
        for name, parameter in inspect.signature(kind, eval_str=True).parameters.items():
            assert ours[name].default == parameter.default, name
            assert ours[name].annotation == parameter.annotation, name
            assert f"\n    {name}: " in FederatedTrainer.__init__.__doc__
    assert "kwargs" not in ours
    for name in inspect.signature(Federation).parameters:
        assert f"\n        {name}: " in inspect.getdoc(Federation).replace("\n    ", "\n        ")

    class Mine(FederatedTrainer):
        def __init__(self, mine: int):
            super().__init__(max_rounds=mine)

    assert list(inspect.signature(Mine).parameters) == ["mine"]
    fit, base = (inspect.signature(kind.fit).parameters for kind in (FederatedTrainer, L.Trainer))
    assert list(fit)[: len(base)] == list(base)


def test_every_option_reaches_the_federation():
    aggregator, partition = FedAvg(), Dirichlet(3, alpha=1.0)
    availability = Availability(stragglers=0.5, partial_work="drop", client_dropout=0.25)
    options = {
        "method": aggregator, "partition": partition, "clients_per_round": 2, "local_epochs": 3,
        "availability": availability, "faults": Faults(min_clients=2, max_failed_rounds=7), "personal": ["a"],
        "frozen": ["b"], "batch_norm": "frozen", "optimizer_state": "keep", "seed": 11,
        "visits": Vectorized(2),
    }  # fmt: skip
    federation = FederatedTrainer(**options, **QUIET).federation
    assert type(federation.server.rule) is FedAvg
    assert federation.server.rule is not aggregator  # a federation copies the rule
    assert federation.partition is partition
    assert federation.server.min_clients == 2
    for name in ("clients_per_round", "local_epochs", "availability", "seed"):
        assert getattr(federation.schedule, name) == options[name]
    for name in ("availability", "faults", "batch_norm", "optimizer_state", "visits"):
        assert getattr(federation.options, name) == options[name]
    assert (federation.options.personal, federation.options.frozen) == (("a",), ("b",))
    assert FederatedTrainer(local_steps=9, **QUIET).federation.schedule.local_steps == 9


def test_every_argument_of_the_trainer_passes_through(monkeypatch):
    names = [name for name in inspect.signature(L.Trainer.__init__).parameters if name not in ("self", "callbacks")]
    seen = {}
    monkeypatch.setattr(L.Trainer, "__init__", lambda self, **arguments: seen.update(arguments))
    values = {name: object() for name in names} | {"enable_progress_bar": False}
    FederatedTrainer(**values)
    assert seen.pop("callbacks")[0].state_key == "Federation"
    assert seen == values
    FederatedTrainer(max_rounds=3)
    assert seen["max_epochs"] == 3


@pytest.mark.parametrize("has_rich", [False, True])
def test_callbacks_and_the_bar(has_rich, tmp_path, monkeypatch):
    monkeypatch.setattr(progress_bar, "find_spec", lambda name: name == "rich" and has_rich)
    if has_rich:
        pytest.importorskip("rich")
    own = Recorder()
    trainer = FederatedTrainer(**{**QUIET, "enable_progress_bar": True}, callbacks=own, default_root_dir=tmp_path)
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert kinds == ["Federation", "ClientEvaluation", "Recorder", f"Federated{'Rich' * has_rich}ProgressBar"]
    assert trainer.progress_bar_callback is trainer.callbacks[-1]
    mine = L.pytorch.callbacks.TQDMProgressBar()
    trainer = FederatedTrainer(**{**QUIET, "enable_progress_bar": True}, callbacks=[mine])
    assert trainer.progress_bar_callback is mine


def test_a_ready_federation():
    federation = Federation(FedPer("head.*"), local_epochs=2)
    assert FederatedTrainer(federation=federation, **QUIET).callbacks[0] is federation
    with pytest.raises(ValueError, match=r"`federation` or its arguments, but got `federation` and \['local_steps'\]"):
        FederatedTrainer(federation=federation, local_steps=3, **QUIET)


def test_rounds_are_epochs():
    assert FederatedTrainer(max_rounds=3, **QUIET).max_epochs == 3
    assert FederatedTrainer(max_epochs=4, **QUIET).max_epochs == 4
    with pytest.raises(ValueError, match="one of `max_rounds` and `max_epochs`"):
        FederatedTrainer(max_rounds=3, max_epochs=3, **QUIET)


def test_the_seed_is_lightnings_if_there_is_one():
    assert Federation().schedule.seed == 0
    L.seed_everything(41, verbose=False)
    assert Federation().schedule.seed == 41
    assert Federation(seed=5).schedule.seed == 5


# --- Lightning's limits -----------------------------------------------------------------------------------------------


class Counting(models.Module):
    def __init__(self):
        super().__init__(models.mlp())
        self.validated = SimpleNamespace(batches=0)  # a plain number in the module would be restored

    def validation_step(self, batch, batch_idx):
        self.validated.batches += 1
        super().validation_step(batch, batch_idx)


LIMITS = {  # arguments: (visits, trained batches, validated batches, rounds)
    "none": ({}, 6, 14, 2 * (4 + 4), 2),
    "fast_dev_run": ({"fast_dev_run": True}, 1, 1, 1 + 2, 1),
    "fast_dev_run, 3": ({"fast_dev_run": 3}, 2, 3, 3 + 4, 1),
    "batches": ({"limit_train_batches": 3}, 4, 6, 2 * (4 + 4), 2),
    "share of batches": ({"limit_train_batches": 0.5}, 4, 6, 2 * (4 + 4), 2),
    "no batches": ({"limit_train_batches": 0}, 0, 0, 0, 0),
    "validation batches": ({"limit_val_batches": 1}, 6, 14, 2 * (1 + 2), 2),
    "share of validation": ({"limit_val_batches": 0.5}, 6, 14, 2 * (2 + 2), 2),
    "no validation": ({"limit_val_batches": 0}, 6, 14, 0, 2),
    "steps": ({"max_steps": 7}, 3, 7, 4 + 4, 1),
    "steps inside a round": ({"max_steps": 8, "max_rounds": 5}, 6, 14, 2 * (4 + 4), 2),
}


@pytest.mark.parametrize("name", quick(LIMITS, LIMITS.keys() - {"none", "batches", "validation batches"}))
def test_limits(name, federated_trainer):
    """Three clients with 2, 3 and 2 batches, two validation clients with 2 batches each."""
    arguments, visits, trained, validated, rounds = LIMITS[name]
    recorder, own = Recorder(), Counting()
    if "limit_train_batches" not in arguments or arguments["limit_train_batches"]:
        clients = {name: DataLoader(data, 25) for name, data in datasets().items()}
    else:
        clients = datasets()
    trainer = federated_trainer(callbacks=[recorder], **{"max_rounds": 2, **arguments})
    held_out = models.as_datasets(models.vectors({"x": 40, "y": 64}))
    trainer.fit(own, clients, {name: DataLoader(data, 32) for name, data in held_out.items()})
    assert len(recorder.visits) == visits
    assert trainer.global_step == sum(len(visit.batches) for visit in recorder.visits) == trained
    assert own.validated.batches == validated
    assert trainer.current_epoch == rounds


@pytest.mark.parametrize("visits", quick(["fused", "lightning"], ["fused"]))
def test_max_steps_ends_the_fit_after_the_round(visits, federated_trainer, tmp_path, caplog):
    """Weights, logged numbers, validation and saved steps equal a fit of complete rounds.

    The Trainer keeps the user's number.
    """
    ends = []
    for options in ({"max_rounds": 2}, {"max_rounds": 5, "max_steps": 15 + 6}):
        recorder, own = Recorder(), module(optimizer=models.adam)
        clients = {name: DataLoader(data, 10) for name, data in datasets().items()}  # 4, 7 and 4 batches
        folder = tmp_path / str(options["max_rounds"])
        options |= {"callbacks": [recorder, StepCheckpoint(folder, 4)], "visits": visits, "enable_checkpointing": True}
        trainer = federated_trainer(**options)
        trainer.fit(own, clients, DataLoader(TensorDataset(*HELD_OUT), 16))
        assert [len(visit.batches) for visit in recorder.visits] == [4, 7, 4] * 2
        assert {path.name for path in folder.iterdir()} == {f"inside-step={step}.ckpt" for step in range(4, 30, 4)}
        ends.append((trainer.global_step, state_of(own), trainer.callback_metrics))
    assert ends[0][0] == ends[1][0] == 30
    assert_same(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]
    assert trainer.max_steps == 15 + 6
    assert "cut short" not in caplog.text


class Broken(FederatedCallback):
    def on_client_batch(self, trainer, module, client, batch):
        if client == "b" and trainer.global_step > 15 + 6:
            raise KeyError("broken off")
        return batch


def test_the_trainer_keeps_max_steps_after_an_exception(federated_trainer):
    clients = {name: DataLoader(data, 10) for name, data in datasets().items()}
    trainer = federated_trainer(max_rounds=5, max_steps=15 + 5, callbacks=[Broken()])
    with pytest.raises(KeyError, match="broken off"):
        trainer.fit(module(), clients)
    assert trainer.max_steps == 15 + 5


def test_barebones(tmp_path):
    """Without loggers, progress bars and checkpoints; without warnings."""
    trainer = FederatedTrainer(max_rounds=2, barebones=True, accelerator="cpu", default_root_dir=tmp_path)
    own = models.Quadratic()
    trainer.fit(own, {"a": TensorDataset(torch.ones(3, 2)), "b": TensorDataset(torch.zeros(1, 2))})
    assert own.w.tolist() == [0.75, 0.75]


class CountedData(models.ValidatedData):
    """Counts requests for loaders; every training loader has other examples."""

    def __init__(self):
        super().__init__(CLIENTS, HELD_OUT)
        self.asked = {"train": [], "val": []}

    def train_dataloader(self):
        self.asked["train"].append(self.trainer.current_epoch)
        loader = super().train_dataloader()
        inputs, targets = loader.dataset.tensors
        fresh = TensorDataset(torch.full_like(inputs, len(self.asked["train"])), targets)
        return DataLoader(fresh, loader.batch_size)

    def val_dataloader(self):
        self.asked["val"].append(self.trainer.current_epoch)
        return super().val_dataloader()


@pytest.mark.parametrize("interval", [0, 2])
def test_loaders_are_asked_for_as_in_a_plain_fit(interval, plain_trainer):
    """Validation data are requested once, unless the Trainer reloads; then training data are reloaded too."""
    asked, seen = [], []
    for federation in ([], [Federation(partition=IID(3))]):
        data, own = CountedData(), module()
        step = own.training_step
        own.training_step = lambda batch, batch_idx, step=step, own=own: (
            seen.append((own.trainer.current_epoch, batch[0].unique().tolist())) or step(batch, batch_idx)
        )
        trainer = plain_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=interval, callbacks=federation)
        seen.clear()
        trainer.fit(own, datamodule=data)
        asked.append(data.asked)
    assert asked[0] == asked[1]
    assert {round: {value for at, values in seen if at == round for value in values} for round in range(4)} == {
        round: {1 + round // interval if interval else 1} for round in range(4)
    }


@pytest.mark.parametrize("workers", quick([0, 2], [0]))
def test_the_x_axis_of_a_logger_is_the_round(workers, federated_trainer):
    logger = MemoryLogger()
    trainer = federated_trainer(max_rounds=3, partition=ByGroup(names()), logger=logger, log_every_n_steps=1)
    trainer.fit(module(), loader(num_workers=workers), DataLoader(TensorDataset(*HELD_OUT), 16))
    for name in ("fed/clients", "fed/update_norm", "comm/total_up_bytes", "val_loss", "train_loss"):
        assert [step for step, _ in logger.curve(name)] == [0, 1, 2], name


def test_the_sanity_check_changes_nothing(federated_trainer):
    runs = []
    for steps in (0, 2):
        logger, own = MemoryLogger(), module(optimizer=models.momentum)
        trainer = federated_trainer(max_rounds=2, num_sanity_val_steps=steps, logger=logger, log_every_n_steps=1)
        trainer.fit(own, datasets(), models.as_datasets(models.vectors({"a": 40, "b": 10})))
        runs.append((state_of(own), logger.lines))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert "fed/val_loss/mean" in {name for _, line in runs[0][1] for name in line}


def test_what_the_trainer_was_told_of_reloading_comes_back(plain_trainer):
    trainer = plain_trainer(
        max_epochs=2, reload_dataloaders_every_n_epochs=3, callbacks=[Federation(partition=IID(3), clients_per_round=2)]
    )
    trainer.fit(module(), datamodule=models.PooledData(CLIENTS))
    assert trainer.reload_dataloaders_every_n_epochs == 3


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_the_bar_counts_rounds(kind, federated_trainer, capfd):
    pytest.importorskip(kind)
    bar = FederatedProgressBar()
    if kind == "rich":
        bar = FederatedRichProgressBar(console_kwargs={"force_terminal": True, "width": 200})
    trainer = federated_trainer(max_rounds=2, enable_progress_bar=True, callbacks=[bar])
    trainer.fit(module(), datasets(), DataLoader(TensorDataset(*HELD_OUT), 16))
    shown = "".join(capfd.readouterr())
    assert "Round 1/2" in shown
    assert "Round 2/2" in shown
    assert "Epoch" not in shown
    assert re.search(rf"client[:=] ?{list(datasets())[-1]}\b", shown)
    assert re.search(r"loss[:=] ?\d", shown)


# --- Per-step schedules of known length -------------------------------------------------------------------------------


class OneCycle(models.Module):
    """A one-cycle schedule over the whole fit."""

    def __init__(self, length, interval="step"):
        super().__init__(models.mlp())
        self.length, self.interval, self.rates = length, interval, []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.length(self.trainer))
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]

    def on_train_epoch_end(self):
        self.rates.append(self.lr_schedulers().last_epoch)


UNEQUAL = {"a": 16, "b": 12, "c": 8}  # 4, 3 and 2 batches


@pytest.mark.parametrize(
    ("options", "steps", "last"),
    [
        # continues from the median visit of a round; in the last round the longest visit goes further
        ({}, 3 + 3 + 4, 9),
        ({"local_epochs": 2}, 6 + 6 + 8, 18),
        ({"local_steps": 5}, 5 * 3, 15),
        ({"clients_per_round": 1, "seed": 3}, None, None),
        ({"availability": Availability(stragglers=0.5), "local_epochs": 3, "seed": 1}, None, None),
    ],
)
def test_a_scheduler_makes_the_steps_that_it_is_told(options, steps, last, either_trainer):
    """`OneCycleLR` raises after more steps."""
    told, clients = [], models.as_datasets(models.vectors(UNEQUAL))

    def length(trainer):
        told.append(scheduler_steps(trainer))
        return told[-1]

    module, data = OneCycle(length), FederatedDataModule(clients, clients["a"], batch_size=4)
    either_trainer(max_rounds=3, **options).fit(module, datamodule=data)
    if steps is None:  # if the largest client straggles, other clients go further than the median
        assert module.rates[-1] <= told[0]
        assert "availability" in options or module.rates[-1] == told[0]
    else:
        assert (told, module.rates[-1]) == ([steps], last)


@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using 'interval'. 'epoch'")
def test_lightnings_estimate_is_warned_of_with_the_number_that_is_right(either_trainer, caplog):
    clients = models.as_datasets(models.vectors(UNEQUAL))
    for length, interval, warned in (
        (lambda trainer: trainer.estimated_stepping_batches, "step", True),
        (lambda trainer: trainer.estimated_stepping_batches, "epoch", False),
        (lambda trainer: 27, "step", False),
        (scheduler_steps, "step", False),
    ):
        caplog.clear()
        data = FederatedDataModule(clients, clients["a"], batch_size=4)
        either_trainer(max_rounds=3).fit(OneCycle(length, interval), datamodule=data)
        found = [message for message in caplog.messages if "estimated_stepping_batches" in message]
        assert len(found) == warned
        assert not warned or ("(27)" in found[0] and "makes 10 steps" in found[0])


def test_without_a_federation_the_steps_are_lightnings(plain_trainer):
    told = []

    def length(trainer):
        told.append((scheduler_steps(trainer), trainer.estimated_stepping_batches))
        return told[-1][0]

    (dataset,) = models.as_datasets(models.vectors({"a": 12})).values()
    loader = DataLoader(dataset, batch_size=4)
    plain_trainer(max_epochs=2).fit(OneCycle(length), loader, loader)
    assert told == [(6, 6)]


# --- BatchNorm without the requested treatment ------------------------------------------------------------------------


@pytest.mark.parametrize("has_validation", [True, False])
def test_statistics_that_cannot_be_measured_are_told_of(has_validation, federated_trainer, caplog):
    """With manual optimization and without a validation step, statistics are averaged, with a warning."""

    class Unvalidated(models.ManualModule):
        validation_step = L.LightningModule.validation_step

    kind = models.ManualModule if has_validation else Unvalidated
    clients = models.as_datasets(models.vectors({"a": 12, "b": 8}))
    val = clients["a"] if has_validation else None
    trainer = federated_trainer(max_rounds=2, limit_val_batches=int(has_validation))
    trainer.fit(kind(models.norm_mlp()), clients, val)
    found = [message for message in caplog.messages if "batch_norm='auto' cannot measure" in message]
    assert len(found) == (not has_validation)
    assert has_validation or "Unvalidated has no `validation_step`" in found[0]


def test_batch_norm_at_home_of_a_model_that_has_none(either_trainer):
    data = FederatedDataModule(models.as_datasets(models.vectors({"a": 12, "b": 8})), batch_size=4)
    trainer = either_trainer(max_rounds=1, batch_norm="personal", limit_val_batches=0)
    with pytest.raises(OptionError, match=r"BatchNorm layers for batch_norm='personal' \(FedBN\), but Module has none"):
        trainer.fit(models.Module(models.mlp()), datamodule=data)
