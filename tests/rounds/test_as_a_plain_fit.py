"""Federated fits treat Trainer options and data loaders as a plain fit does."""

import copy
import itertools
import pickle
from datetime import timedelta
from functools import wraps

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.data import IID, LoaderDataModule
from tests import models
from tests.breadth import quick
from tests.recorders import Recorder, assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CONNECTOR = "lightning.pytorch.trainer.connectors.data_connector"
EXAMPLES = models.vectors({"a": 40})["a"]
KEEP = {"optimizer_state": "keep", "batch_norm": "average"}


def loader(**options):
    return DataLoader(TensorDataset(*EXAMPLES), 8, **options)


def momentum_module(**options):
    return models.Module(models.mlp(), models.momentum, **options)


class Combines(models.Module):
    def training_step(self, batch, batch_idx):
        batches = batch.values() if isinstance(batch, dict) else batch
        losses = [super(Combines, self).training_step(each, batch_idx) for each in batches if each is not None]
        return sum(losses)


# --- One client equals a plain fit ------------------------------------------------------------------------------------

PLAIN = {  # arguments of the Trainer, callbacks
    "accumulation": ({"accumulate_grad_batches": 2}, list),
    "changing accumulation": ({}, lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]),
    "validation inside": ({"val_check_interval": 0.4}, list),
    "validation by batches": ({"val_check_interval": 3, "check_val_every_n_epoch": None}, list),
    "overfitting": ({"overfit_batches": 2}, list),
    "overfitting on a share": ({"overfit_batches": 0.5}, list),
}


class Watch(L.Callback):
    def __init__(self):
        self.seen = []

    def on_validation_start(self, trainer, pl_module):
        self.seen.append((trainer.global_step, state_of(pl_module)))


@pytest.mark.parametrize("case", PLAIN)
def test_one_client_trains_as_in_a_plain_fit(case, plain_trainer):
    options, callbacks = PLAIN[case]
    ends = []
    for federation in ([], [Federation(partition=IID(1), **KEEP)]):
        own, watch = momentum_module(), Watch()
        trainer = plain_trainer(max_epochs=3, callbacks=[*federation, *callbacks(), watch], **options)
        trainer.fit(own, datamodule=LoaderDataModule(loader(), loader()))
        ends.append((trainer.global_step, [step for step, _ in watch.seen], state_of(own), watch.seen))
    assert ends[0][:2] == ends[1][:2]
    torch.testing.assert_close(ends[0][2], ends[1][2])
    for (_, ours), (_, theirs) in zip(ends[0][3], ends[1][3], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(L.__version__.startswith("2.5."), reason="new in Lightning 2.6")
def test_validation_by_time_counts_over_rounds(plain_trainer, monkeypatch):
    """Validates every 7 seconds; a batch takes one second, an epoch has five batches."""
    ends = []
    for federation in ([], [Federation(partition=IID(1), **KEEP)]):
        watch = Watch()
        interval = {"val_check_interval": timedelta(seconds=7), "check_val_every_n_epoch": None}
        trainer = plain_trainer(max_epochs=5, callbacks=[*federation, watch], **interval)
        monkeypatch.setattr("time.monotonic", lambda trainer=trainer: float(trainer.global_step))
        trainer.fit(momentum_module(), datamodule=LoaderDataModule(loader(), loader()))
        ends.append([step for step, _ in watch.seen])
    assert ends[0] == ends[1]
    assert len(ends[0]) == 3


def test_a_batch_that_is_none_is_left_out_with_lightnings_warning(plain_trainer):
    ends = []
    for federation in ([], [Federation(partition=IID(1), **KEEP)]):
        own = momentum_module()
        trainer = plain_trainer(max_epochs=2, callbacks=federation)
        with pytest.warns(UserWarning, match="train_dataloader yielded None"):
            trainer.fit(own, Gaps())
        ends.append((trainer.global_step, state_of(own)))
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])


class Silent(models.Module):
    """Returns no loss in one epoch, and in the other epochs for every third batch."""

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 or batch_idx % 3 == 0:
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_the_only_client_may_have_nothing_to_train(plain_trainer):
    ends = []
    for federation in ([], [Federation(partition=IID(1), **KEEP)]):
        own = Silent(models.mlp(), models.momentum)
        trainer = plain_trainer(max_epochs=3, callbacks=federation)
        trainer.fit(own, datamodule=LoaderDataModule(loader()))
        ends.append((trainer.global_step, state_of(own)))
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])


def test_a_second_fit_begins_with_new_optimizers(plain_trainer):
    ends = []
    for federation in ([], [Federation(partition=IID(1), **KEEP)]):
        own = momentum_module()
        trainer = plain_trainer(max_epochs=1, callbacks=federation)
        for epochs in (1, 3):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(own, datamodule=LoaderDataModule(loader()))
        ends.append(state_of(own))
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("visits", ["fused", "lightning"])
def test_a_hook_that_something_has_wrapped_is_called(visits, plain_trainer):
    called, own = [], models.Module(models.mlp())
    own.on_train_batch_end = wraps(own.on_train_batch_end)(lambda *args: called.append(args))
    trainer = plain_trainer(max_epochs=2, callbacks=[Federation(partition=IID(1), visits=visits)])
    trainer.fit(own, datamodule=LoaderDataModule(loader()))
    assert len(called) == 10


class Clears(models.Module):
    cleared = 0

    def zero_grad(self, set_to_none=True):
        self.cleared += 1
        super().zero_grad(set_to_none)


def test_a_visit_clears_gradients_without_the_modules_own_method(plain_trainer):
    counts = []
    for federation in ([], [Federation(partition=IID(1), **KEEP)]):
        own = Clears(models.mlp(), models.momentum)
        plain_trainer(max_epochs=3, callbacks=federation).fit(own, datamodule=LoaderDataModule(loader()))
        counts.append(own.cleared)
    assert counts[0] == counts[1]


class Fails(models.Module):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ArithmeticError("no number")
        return super().training_step(batch, batch_idx)


def test_an_error_of_the_only_client_comes_at_once(plain_trainer):
    steps = []
    for federation in ([], [Federation(partition=IID(1))]):
        trainer = plain_trainer(max_epochs=2, callbacks=federation)
        with pytest.raises(ArithmeticError, match="no number") as raised:
            trainer.fit(Fails(models.mlp()), datamodule=LoaderDataModule(loader()))
        assert raised.traceback[-1].name == "training_step"
        steps.append(trainer.global_step)
    assert steps == [2, 2]


class Counts(L.LightningModule):
    """Computes a running mean without an optimizer."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch, batch_idx):
        self.mean += (batch[0].mean(0) - self.mean) / (batch_idx + 1)

    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("state", ["keep", "reset"])
def test_a_module_without_an_optimizer(state, plain_trainer):
    own = Counts()
    own.automatic_optimization = False
    federation = Federation(partition=IID(2), optimizer_state=state)
    data = LoaderDataModule(DataLoader(TensorDataset(*EXAMPLES), 10))
    plain_trainer(max_epochs=1, callbacks=[federation]).fit(own, datamodule=data)
    torch.testing.assert_close(own.mean, EXAMPLES[0].mean(0), rtol=1e-4, atol=1e-4)


class NoState:
    def __init__(self, optimizer):
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self, *args):
        self.last_epoch += 1

    def state_dict(self):
        return None

    def load_state_dict(self, state):
        assert state is None


class TwoSchedulers(models.Module):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        per_step = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
        return [optimizer], [per_step, {"scheduler": NoState(optimizer)}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


def test_a_scheduler_without_state_beside_one_per_step(plain_trainer):
    trainer = plain_trainer(max_epochs=2, callbacks=[Federation(partition=IID(2))])
    trainer.fit(TwoSchedulers(models.mlp()), datamodule=LoaderDataModule(loader()))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** (2 * 3))  # 20 examples: 3 batches


def test_lbfgs_with_a_state_that_is_kept_is_refused_before_it_trains(plain_trainer):
    own = models.Module(models.mlp(), torch.optim.LBFGS)
    recorder = Recorder()
    trainer = plain_trainer(max_epochs=1, callbacks=[Federation(partition=IID(2), **KEEP), recorder])
    with pytest.raises(MisconfigurationException, match=r"LBFGS .* optimizer_state='reset'"):
        trainer.fit(own, datamodule=LoaderDataModule(loader()))
    assert not recorder.visits


# --- Several clients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 5}, {"val_check_interval": 10}])
def test_what_falls_on_the_ends_of_visits_or_rounds_is_taken(options, plain_trainer):
    """Two clients with five batches each."""
    clients = models.as_datasets(models.vectors({"a": 40, "b": 40}))
    watch = Watch()
    trainer = plain_trainer(max_epochs=2, callbacks=[Federation(), watch], **options)
    trainer.fit(models.Module(models.mlp()), datamodule=FederatedDataModule(clients, loader().dataset, batch_size=8))
    assert trainer.global_step == 2 * 10 // options.get("accumulate_grad_batches", 1)
    assert len(watch.seen) == 2


class Reads(models.Module):
    def training_step(self, batch, batch_idx):
        self.read = [*getattr(self, "read", []), *batch[0][:, 0].tolist()]
        return super().training_step(batch, batch_idx)


SIZES = {"a": 40, "b": 10, "c": 4}
SHUFFLED = {  # builds the loader of a data set, in batches of 4
    "data set": lambda data: data,
    "loader": lambda data: DataLoader(data, 4, shuffle=True),
    "weighted loader": lambda data: DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * len(data), 9)),
}


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("kind", SHUFFLED)
@pytest.mark.parametrize(("overfit", "counts"), [(2, (8, 8, 4)), (0.5, (20, 4, 4))])
def test_every_client_overfits_on_its_first_batches(kind, overfit, counts, plain_trainer):
    data = {name: TensorDataset(*part) for name, part in models.vectors(SIZES).items()}
    own = Reads(models.mlp())
    trainer = plain_trainer(max_epochs=2, overfit_batches=overfit, callbacks=[Federation(local_epochs=2)])
    clients = {name: SHUFFLED[kind](part) for name, part in data.items()}
    trainer.fit(own, datamodule=FederatedDataModule(clients, batch_size=4))
    firsts = [data[name].tensors[0][:count, 0].tolist() for name, count in zip(SIZES, counts, strict=True)]
    assert own.read == 2 * [number for first in firsts for number in 2 * first]
    assert trainer.limit_train_batches == overfit


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_every_part_of_a_split_loader_overfits(plain_trainer):
    own = Reads(models.mlp())
    trainer = plain_trainer(max_epochs=3, overfit_batches=1, callbacks=[Federation(partition=IID(4))])
    trainer.fit(own, loader(shuffle=True))
    assert len(own.read) == 3 * 4 * 8
    assert own.read[32:] == 2 * own.read[:32]


# --- The Trainer after the fit ----------------------------------------------------------------------------------------


class Holds(L.Callback):
    """Holds the Trainer, as many loggers and callbacks do."""

    def setup(self, trainer, pl_module, stage):
        self.trainer = trainer


class HalfWeighted(L.LightningDataModule):
    def train_dataloader(self):
        return loader(sampler=torch.utils.data.WeightedRandomSampler([1.0] * 20 + [2.0] * 20, 40))


@pytest.mark.parametrize("data", [lambda: LoaderDataModule(loader()), HalfWeighted])
def test_a_trainer_can_be_copied_and_pickled_afterwards(data, plain_trainer, tmp_path):
    holder, save = Holds(), ModelCheckpoint(tmp_path)
    callbacks = [holder, save, Federation(partition=IID(3))]
    trainer = plain_trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(models.Module(models.mlp()), datamodule=data())
    for again in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        assert again.trainer.current_epoch == 2
        assert again.trainer is not trainer


# --- Loaders ----------------------------------------------------------------------------------------------------------


class Looks(models.Module):
    def on_train_start(self):
        loader = self.trainer.train_dataloader
        self.seen = len(loader.dataset), loader.batch_size, type(loader.sampler), loader.num_workers


def test_the_training_loader_has_the_attributes_of_the_users(plain_trainer):
    own = Looks(models.mlp())
    plain_trainer(max_epochs=1, callbacks=[Federation(partition=IID(2))]).fit(
        own, datamodule=LoaderDataModule(loader(shuffle=True))
    )
    assert own.seen == (40, 8, RandomSampler, 0)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize(("data", "kind"), [(loader, models.Module), (lambda: {"a": loader()}, Combines)])
def test_lightning_advises_on_workers(data, kind, plain_trainer, monkeypatch):
    monkeypatch.setattr(f"{CONNECTOR}.suggested_max_num_workers", lambda devices: 8)
    trainer = plain_trainer(max_epochs=1, callbacks=[Federation(partition=IID(2))])
    with pytest.warns(UserWarning, match="'train_dataloader' does not have many workers"):
        trainer.fit(kind(models.mlp()), datamodule=LoaderDataModule(data()))


def test_a_clients_sampler_is_told_the_pass(federated_trainer):
    """Two rounds of two local epochs: four passes with different orders."""
    passes = []

    class Sampler(DistributedSampler):
        def set_epoch(self, epoch):
            passes.append(epoch)
            super().set_epoch(epoch)

    dataset = TensorDataset(*EXAMPLES)
    own = DataLoader(dataset, 8, sampler=Sampler(dataset, num_replicas=1, rank=0))
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=2, local_epochs=2, callbacks=[recorder])
    trainer.fit(models.Module(models.mlp()), {"a": own})
    assert passes == [0, 1, 2, 3]
    firsts = [visit.batches[number][0] for visit in recorder.visits for number in (0, 5)]
    assert len({tuple(batch.flatten().tolist()) for batch in firsts}) == 4


def test_a_clients_persistent_workers_end_with_the_fit(federated_trainer):
    own = loader(num_workers=1, persistent_workers=True)
    federated_trainer(max_rounds=2).fit(models.Module(models.mlp()), {"a": own})
    assert own._iterator is None  # noqa: SLF001 - torch has no public name


class InBatches(TensorDataset):
    """Only accepts the indices of a whole batch."""

    def __getitem__(self, index):
        assert isinstance(index, list)
        return super().__getitem__(index)


@pytest.mark.parametrize("num_clients", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_of_whole_batches_is_split(shuffle, num_clients, plain_trainer):
    dataset = InBatches(*EXAMPLES)
    order = RandomSampler(dataset) if shuffle else torch.utils.data.SequentialSampler(dataset)
    whole = DataLoader(dataset, batch_size=None, sampler=BatchSampler(order, 8, drop_last=False))
    recorder = Recorder()
    federation = Federation(partition=IID(num_clients))
    trainer = plain_trainer(max_epochs=1, callbacks=[federation, recorder])
    trainer.fit(models.Module(models.mlp()), datamodule=LoaderDataModule(whole))
    sizes = [[len(batch[0]) for batch in visit.batches] for visit in recorder.visits]
    assert sizes == ([[8] * 5] if num_clients == 1 else [[8, 8, 4]] * 2)
    assert trainer.callback_metrics["fed/num_samples"] == 40
    seen = torch.cat([batch[0] for visit in recorder.visits for batch in visit.batches])
    torch.testing.assert_close(seen.sum(0), EXAMPLES[0].sum(0))


# --- One client accepts all data of a plain Trainer -------------------------------------------------------------------


class Stream:
    """Batches without a length: neither a ``DataLoader`` nor a data set."""

    def __iter__(self):
        return (tuple(part[start : start + 8] for part in EXAMPLES) for start in range(0, 40, 8))


class Batches(Stream):
    def __len__(self):
        return 5


class Gaps(Batches):
    def __len__(self):
        return 7

    def __iter__(self):
        yield from (None, *super().__iter__(), None)


class Streamed(IterableDataset):
    def __iter__(self):
        return zip(*EXAMPLES, strict=True)


class Backwards(DataLoader):
    """A subclass with another order of batches."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def several(mode):
    return CombinedLoader([loader(), DataLoader(TensorDataset(*EXAMPLES), 12)], mode)


VISITS = ("fused", "lightning")
WHOLE = {  # training data, class of the module, arguments of the Trainer
    "iterable": (Batches, models.Module, {}),
    "subclass": (lambda: Backwards(TensorDataset(*EXAMPLES), 8), models.Module, {}),
    "trailing example": (lambda: Backwards(TensorDataset(*EXAMPLES), 13), models.Module, {}),
    "mapping": (lambda: {"a": loader(), "b": Batches()}, Combines, {}),
    "list": (lambda: [loader(), DataLoader(TensorDataset(*EXAMPLES), 12)], Combines, {}),
    "shortest": (lambda: several("min_size"), Combines, {}),
    "longest": (lambda: several("max_size"), Combines, {}),
    "stream, limit": (Stream, models.Module, {"limit_train_batches": 3}),
    "stream, limit behind its end": (Stream, models.Module, {"limit_train_batches": 7}),
    "stream, overfitting": (Stream, models.Module, {"overfit_batches": 3}),
    "list, overfitting": (lambda: [loader(), Batches()], Combines, {"overfit_batches": 2}),
    "stream": (Stream, models.Module, {}),
    "stream of examples": (lambda: DataLoader(Streamed(), 8), models.Module, {}),
    "stream, accumulation": (Stream, models.Module, {"accumulate_grad_batches": 3}),
    "stream, validation inside": (Stream, models.Module, {"val_check_interval": 2}),
    "stream, steps": (Stream, models.Module, {"max_steps": 7, "max_epochs": -1}),
    "streams": (lambda: {"a": Stream(), "b": loader()}, Combines, {}),
}
SIMILAR = ("shortest", "stream", "stream, limit", "stream, overfitting", "list, overfitting")  # to the other cases


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize(
    ("case", "visits"),
    quick(
        itertools.product(WHOLE, VISITS),
        [case for case in zip(WHOLE, itertools.cycle(VISITS), strict=False) if case[0] not in SIMILAR],
    ),
)
def test_one_client_takes_whatever_a_plain_trainer_takes(case, visits, plain_trainer):
    """Weights and validations are equal bit for bit, for a datamodule and for loaders passed to ``fit``."""
    data, kind, options = WHOLE[case]
    visits = "auto" if "val_check_interval" in options else visits
    ends = []
    for federation in ([], [Federation(partition=IID(1), visits=visits, **KEEP)]):
        own, watch = kind(models.mlp(), models.momentum), Watch()
        trainer = plain_trainer(**{"max_epochs": 3, "callbacks": [*federation, watch], **options})
        trainer.fit(own, data(), loader())
        ends.append((trainer.global_step, trainer.current_epoch, [step for step, _ in watch.seen], state_of(own)))
    assert ends[0][:3] == ends[1][:3]
    assert_same(ends[0][3], ends[1][3])


@pytest.mark.parametrize(("data", "options"), [(Batches, {"local_epochs": 2}), (Stream, {})])
def test_examples_are_counted_as_they_come(data, options, plain_trainer):
    trainer = plain_trainer(max_epochs=2, callbacks=[Federation(partition=IID(1), **options)])
    trainer.fit(models.Module(models.mlp()), data())
    assert trainer.callback_metrics["fed/num_samples"] == 40


@pytest.mark.parametrize("name", ["limit_train_batches", "val_check_interval", "overfit_batches"])
def test_a_stream_has_no_share(name, plain_trainer):
    trainer = plain_trainer(max_epochs=1, callbacks=[Federation(partition=IID(1))], **{name: 0.5})
    with pytest.raises(MisconfigurationException, match=f"Expected `{name}` to be 1.0 or a number of batches"):
        trainer.fit(models.Module(models.mlp()), Stream())
