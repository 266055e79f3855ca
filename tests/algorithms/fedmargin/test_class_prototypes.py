"""Class prototypes by client and by epoch equal plain loops and leave training unchanged."""

import copy
import itertools
import math
import operator
import random

import lightning as L
import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, Federation, FolderStore
from lightning_fed.callbacks import ClassPrototypes
from lightning_fed.data import ByGroup
from tests import models
from tests.breadth import quick
from tests.recorders import MemoryLogger, Recorder, assert_same, bytes_of, state_of
from tests.references import seed_reference, visit_seed_reference
from tests.references_margin import (
    class_margins_reference,
    mean_margin_reference,
    prototypes_reference,
    reduce_reference,
)

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SEED = 5
LPM = "prototypes:lpm:semantic:mean"


class Mail(Recorder):
    def on_server_receive(self, trainer, module, update):
        super().on_server_receive(trainer, module, update)
        self.visits[-1].extras = {name: value.clone() for name, value in update.extras.items()}
        self.visits[-1].metrics = dict(update.metrics)


def unpacked(extras):
    classes = extras["prototypes:classes"].tolist()
    means = dict(zip(classes, extras["prototypes:means"].double().numpy(), strict=True))
    return means, dict(zip(classes, extras["prototypes:counts"].tolist(), strict=True))


def assert_close(means, expected, tolerance=1e-6):
    assert means.keys() == expected.keys()
    for name, vector in expected.items():
        np.testing.assert_allclose(means[name], vector, rtol=tolerance, atol=tolerance)


def margin_of(after, before, kind="semantic", reduction="mean", counts=None, fallback=None):
    return reduce_reference(class_margins_reference(after, before, kind, fallback), counts, reduction)


def loaded(net, state):
    net.load_state_dict({name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")})
    return net.eval()


@torch.no_grad()
def measured(features, inputs, targets, ignored=255, excluded=()):
    """Prototypes and counts over a client's data, from one forward pass through `features`."""
    return prototypes_reference(features(inputs), targets, ignored, excluded)


# --- Exact passes -----------------------------------------------------------------------------------------------------


def voids(sizes, scale=1):
    """Scenes with void pixels; some clients lack some classes."""
    clients = {}
    for index, (name, (inputs, targets)) in enumerate(models.scenes(sizes).items()):
        targets[:, 20:, :] = 255
        if index:
            targets[targets == index] = 0
        clients[name] = tuple(
            tensor.repeat_interleave(scale, -1).repeat_interleave(scale, -2) for tensor in (inputs, targets)
        )
    return clients


def ignoring(outputs, targets):
    return F.cross_entropy(outputs, targets, ignore_index=255)


def encoder(net):
    return lambda inputs: net.encoder(inputs)[-1]


def smp_net(name, encoder_name):
    def build():
        torch.manual_seed(0)
        return getattr(smp, name)(encoder_name, encoder_weights=None, classes=models.CLASSES)

    return build


FEW = {"ann": 6, "bob": 5, "cid": 3}
SIZES = {"ann": 33, "bob": 24, "cid": 40, "dan": 7}
NETS = {
    "mlp": (models.mlp, lambda: models.vectors(SIZES), lambda net: net[:2]),
    "batch norm and dropout": (models.norm_mlp, lambda: models.vectors(SIZES), lambda net: net[:7]),
    "cnn": (models.cnn, lambda: models.images(SIZES), lambda net: net[:9]),
    "deeplab": (models.deeplab, lambda: voids(FEW), encoder),
    "unet": (models.unet, lambda: voids(FEW), encoder),
    "fpn": (smp_net("FPN", "tu-mobilenetv3_small_050"), lambda: voids(FEW, 2), encoder),
    "segformer": (smp_net("Segformer", "mit_b0"), lambda: voids(FEW, 2), encoder),
}


@pytest.mark.parametrize("name", quick(NETS, ["batch norm and dropout", "cnn"]))
def test_exact_prototypes(name, federated_trainer):
    """Before and after training, over all of a client's data, without void pixels."""
    build, data, features = NETS[name]
    clients, mail = data(), Mail()
    rounds = 1 if features is encoder else 2
    trainer = federated_trainer(
        max_rounds=rounds, local_epochs=rounds, callbacks=[ClassPrototypes(), mail], seed=SEED, batch_norm="average"
    )
    trainer.fit(models.Module(build(), models.momentum, loss=ignoring), models.as_datasets(clients))
    assert len(mail.visits) == rounds * len(clients)
    known = set()
    for visit in mail.visits:
        before, (after, counts) = (
            measured(features(loaded(build(), state)), *clients[visit.client]) for state in (visit.start, visit.end)
        )
        means, numbers = unpacked(visit.extras)
        assert_close(means, after)
        assert numbers == counts
        margin = margin_of(after, before[0])
        assert margin > 0
        assert visit.extras[LPM].item() == pytest.approx(margin, rel=1e-4)
        assert visit.metrics["lpm"] == visit.extras[LPM].item()
        known.add(frozenset(counts))
    if features is encoder:
        assert len(known) > 1  # classes missing at the client
    logged = mail.logged[0]["clients/lpm"]
    assert logged == pytest.approx(sum(visit.metrics["lpm"] for visit in mail.round(0)) / len(clients))


def test_what_travels(federated_trainer):
    """The present classes with mean and count each, and one margin."""
    clients, mail = voids({"ann": 2, "bob": 2}), Mail()
    module = models.Module(models.unet(), loss=ignoring)
    width, models_down, models_up, extra = module.net.encoder.out_channels[-1], 0, 0, 0
    trainer = federated_trainer(max_rounds=1, callbacks=[ClassPrototypes(), mail], batch_norm="average")
    trainer.fit(module, models.as_datasets(clients))
    for visit in mail.visits:
        classes = visit.extras["prototypes:classes"]
        assert classes.tolist() == sorted(set(clients[visit.client][1][:, ::8, ::8].unique().tolist()) - {255})
        assert visit.extras.keys() == {
            *(f"prototypes:{name}" for name in ("classes", "means", "counts")), LPM
        }  # fmt: skip
        assert bytes_of(visit.extras) == len(classes) * (4 * width + 8 + 8) + 8
        extra += bytes_of(visit.extras)
        models_down, models_up = models_down + bytes_of(visit.broadcast), models_up + bytes_of(visit.update)
    assert mail.logged[0]["comm/up_bytes"] == models_up + extra
    assert mail.logged[0]["comm/down_bytes"] == models_down


# --- Unchanged training -----------------------------------------------------------------------------------------------


class Augmented(Dataset):
    """Noise and flips from all three global generators."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.rand(6) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class Scored(models.Module):
    """Logs a loss and a metric; the step updates a running centre, a teacher, and normalised weights."""

    def __init__(self):
        super().__init__(models.norm_mlp(), models.momentum)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=models.CLASSES)
        self.register_buffer("centre", torch.zeros(models.CLASSES))
        self.teacher = copy.deepcopy(self.net[7]).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        with torch.no_grad():
            self.net[7].weight.div_(self.net[7].weight.norm(dim=1, keepdim=True))
            for teacher_parameter, parameter in zip(self.teacher.parameters(), self.net[7].parameters(), strict=True):
                teacher_parameter.lerp_(parameter, 0.1)
        features = self.net[:7](inputs)
        logits = self.net[7](features)
        self.centre.lerp_(logits.detach().mean(0), 0.1)
        loss = self.loss(logits - self.centre, targets) + 0.1 * F.mse_loss(logits, self.teacher(features))
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.accuracy(logits, targets)
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
        return loss


def data_sets():
    return {name: Augmented(*tensors) for name, tensors in models.vectors(SIZES).items()}


def loaders(workers=0, has_generator=True, **options):
    return {
        name: DataLoader(
            data,
            8,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(len(name)) if has_generator else None,
            **options,
        )
        for name, data in list(data_sets().items())[1:3]
    }


class Pooled(L.LightningDataModule):
    """The clients' data in one loader, split by a partition."""

    def __init__(self, workers):
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        data = torch.utils.data.ConcatDataset(list(data_sets().values()))
        return DataLoader(data, 16, shuffle=True, num_workers=self.workers, persistent_workers=self.workers > 0)


GROUPS = [name for name, size in SIZES.items() for _ in range(size)]
SOURCES = {
    "data sets": lambda: FederatedDataModule(data_sets(), batch_size=16),
    "data sets, a worker": lambda: FederatedDataModule(
        data_sets(), batch_size=16, num_workers=1, persistent_workers=True
    ),
    "loaders": lambda: FederatedDataModule(loaders()),
    "loaders without a generator": lambda: FederatedDataModule(loaders(has_generator=False)),
    "loaders, a worker": lambda: FederatedDataModule(loaders(workers=1)),
    "partition": lambda: Pooled(0),
    "partition, a worker": lambda: Pooled(1),
}


ALL_DOORS = [(source, "callback") for source in SOURCES] + [("data sets", "trainer"), ("loaders, a worker", "trainer")]


@pytest.mark.parametrize(
    ("source", "door", "passes"),
    quick(
        [(*case, passes) for case in ALL_DOORS for passes in ("exact", "online")],
        [(*ALL_DOORS[0], "exact")],
    ),
)
def test_the_training_is_the_same(source, passes, door, federated_trainer, plain_trainer):
    """Dropout, BatchNorm, shuffling, augmentation, workers, logs and buffers: bit for bit as without the callback."""
    runs = []
    for callbacks in ([], [ClassPrototypes(passes=passes)]):
        recorder, module, data = Recorder(), Scored(), SOURCES[source]()
        options = {"local_epochs": 1 if "worker" in source else 2, "seed": SEED, "batch_norm": "average"}
        if isinstance(data, Pooled):
            options["partition"] = ByGroup(GROUPS)
        if door == "trainer":
            trainer = federated_trainer(max_rounds=2, callbacks=[recorder, *callbacks], **options)
        else:
            trainer = plain_trainer(max_epochs=2, callbacks=[*callbacks, Federation(**options), recorder])
        trainer.fit(module, datamodule=data)
        runs.append((recorder, state_of(module)))
    (plain, plain_state), (with_prototypes, state) = runs
    assert_same(plain_state, state)
    assert len(plain.visits) == len(with_prototypes.visits) > 2
    for plain_visit, visit in zip(plain.visits, with_prototypes.visits, strict=True):
        assert_same(plain_visit.update, visit.update)
    for plain_logged, logged in zip(plain.logged, with_prototypes.logged, strict=True):
        assert logged.pop("clients/lpm") > 0
        assert {name: value for name, value in plain_logged.items() if not name.startswith("comm/")} == {
            name: value for name, value in logged.items() if not name.startswith("comm/")
        }


# --- Online passes ----------------------------------------------------------------------------------------------------


POSITIONS = ["before the federation", "after it"]
WORK = [{"local_epochs": 1}, {"local_epochs": 3}, {"local_steps": 5}, {"local_steps": 1}]


@pytest.mark.parametrize(
    ("work", "position"),
    quick(
        itertools.product(WORK, POSITIONS),
        [(work, POSITIONS[place % 2]) for place, work in enumerate(WORK) if work != WORK[0]],
    ),
)
def test_online_prototypes(work, position, plain_trainer):
    """Features of the first and last batches of a visit, as seen by a plain training loop."""
    clients, mail, prototypes = models.vectors(SIZES), Mail(), ClassPrototypes(passes="online")
    federation = Federation(seed=SEED, **work)
    callbacks = [prototypes, federation] if position == "before the federation" else [federation, prototypes]
    trainer = plain_trainer(max_epochs=2, callbacks=[*callbacks, mail])
    module = models.Module(models.dropout_mlp(), models.momentum)
    trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(clients), batch_size=16))
    seen = set()
    for visit in mail.visits:
        net = loaded(models.dropout_mlp(), visit.start).train()
        optimizer = models.momentum(net.parameters())
        seed_reference(visit_seed_reference(SEED, visit.round, visit.client))
        features = []
        for inputs, targets in visit.batches:
            hidden = net[:3](inputs)
            features.append((hidden.detach(), targets))
            optimizer.zero_grad()
            F.cross_entropy(net[3](hidden), targets).backward()
            optimizer.step()
        count = len(visit.batches)
        per_epoch = {"ann": 2, "bob": 2, "cid": 3, "dan": 1}[visit.client]
        length = min(per_epoch, count // 2)
        after = together(features[-max(1, length) :])
        assert_close(unpacked(visit.extras)[0], after[0])
        assert unpacked(visit.extras)[1] == after[1]
        if length:
            expected = margin_of(after[0], together(features[:length])[0])
            assert visit.extras[LPM].item() == pytest.approx(expected, rel=1e-4)
        else:
            assert LPM not in visit.extras
        seen.add((count, length))
    assert (
        seen
        == {
            "{'local_epochs': 1}": {(2, 1), (3, 1), (1, 0)},
            "{'local_epochs': 3}": {(6, 2), (9, 3), (3, 1)},
            "{'local_steps': 5}": {(5, 2), (5, 1)},
            "{'local_steps': 1}": {(1, 0)},
        }[str(work)]
    )


def together(batches):
    features, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return prototypes_reference(features, targets, 255, ())


def test_online_takes_the_first_forward_pass_of_a_batch(federated_trainer):
    """For an optimizer with several forward passes per batch, and for a step with two forward passes."""

    class Twice(models.Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + 0 * self(2 * batch[0]).sum()

    def search(parameters):
        return torch.optim.LBFGS(parameters, lr=0.01, max_iter=4)

    clients = models.vectors({"a": 8, "b": 16})
    for module in (Twice(models.mlp()), models.Module(models.mlp(), search)):
        mail = Mail()
        trainer = federated_trainer(max_rounds=1, local_steps=2, callbacks=[ClassPrototypes(passes="online"), mail])
        trainer.fit(module, FederatedDataModule(models.as_datasets(clients), batch_size=8))
        for visit in mail.visits:
            net = loaded(models.mlp(), visit.start)
            assert sum(unpacked(visit.extras)[1].values()) == 8
            first = measured(net[:2], *visit.batches[0])[0]
            assert visit.extras[LPM].item() != 0
            after, _ = unpacked(visit.extras)
            assert visit.extras[LPM].item() == pytest.approx(margin_of(after, first), rel=1e-4)


# --- Plain Trainer ----------------------------------------------------------------------------------------------------


def plain_fit(make, prototypes, loader, epochs=2, val=True, **options):
    module = Scored()
    trainer = make(max_epochs=epochs, callbacks=prototypes, **options)
    validation = DataLoader(TensorDataset(*models.vectors()["bob"]), 16) if val else None
    seed_reference(SEED)
    trainer.fit(module, loader, validation)
    return module, trainer


IN_A_PLAIN_TRAINER = list(itertools.product((0, 1), (True, False), ("exact", "online")))


@pytest.mark.parametrize(
    ("workers", "has_generator", "passes"),
    quick(IN_A_PLAIN_TRAINER, [(0, True, "exact"), (0, False, "online")]),
)
def test_a_plain_trainer_trains_the_same(passes, has_generator, workers, plain_trainer):
    """With shuffling, augmentation and validation; margins are logged per epoch."""
    runs = []
    for callbacks in ([], [ClassPrototypes(passes=passes)]):
        logger = MemoryLogger()
        loader = loaders(workers, has_generator)["bob"]
        module, trainer = plain_fit(plain_trainer, callbacks, loader, logger=logger, log_every_n_steps=1)
        runs.append((state_of(module), {key: logger.curve(key) for key in ("train_loss", "train_acc", "val_acc")}))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    for name in ("prototypes/lpm", "prototypes/amm"):
        assert len(logger.curve(name)) == 2
        assert all(value > 0 for _, value in logger.curve(name))
        assert name in trainer.callback_metrics


class Epochs(L.Callback):
    def __init__(self):
        self.starts, self.ends, self.logged = [], [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.starts.append(state_of(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.ends.append(state_of(pl_module))
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_exact_margins_of_an_epoch(plain_trainer):
    tensors = models.vectors({"x": 50})["x"]
    module, epochs = models.Module(models.norm_mlp(), models.momentum), Epochs()
    trainer = plain_trainer(max_epochs=3, callbacks=[ClassPrototypes(), epochs])
    trainer.fit(module, DataLoader(TensorDataset(*tensors), 8, shuffle=True))
    for start, end, logged in zip(epochs.starts, epochs.ends, epochs.logged, strict=True):
        before, after = (measured(loaded(models.norm_mlp(), state)[:7], *tensors)[0] for state in (start, end))
        assert logged["prototypes/lpm"] == pytest.approx(margin_of(after, before), rel=1e-4)
        assert logged["prototypes/amm"] == pytest.approx(mean_margin_reference(after, "pairs", False), rel=1e-4)


def test_online_margins_of_an_epoch(plain_trainer):
    """From the first and second half of an epoch, without the middle batch and without validation."""
    tensors = models.vectors({"x": 40})["x"]
    module, epochs = models.Module(models.mlp(), models.sgd), Epochs()
    trainer = plain_trainer(
        max_epochs=2, callbacks=[ClassPrototypes(passes="online"), epochs], val_check_interval=0.6
    )  # fmt: skip
    loader = DataLoader(TensorDataset(*tensors), 8)
    trainer.fit(module, loader, DataLoader(TensorDataset(*models.vectors({"y": 8})["y"]), 8))
    for start, logged in zip(epochs.starts, epochs.logged, strict=True):
        net = loaded(models.mlp(), start)
        optimizer, features = models.sgd(net.parameters()), []
        for inputs, targets in loader:
            features.append((net[:2](inputs).detach(), targets))
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
        before, after = together(features[:2])[0], together(features[3:])[0]
        assert logged["prototypes/lpm"] == pytest.approx(margin_of(after, before), rel=1e-4)
        assert logged["prototypes/amm"] == pytest.approx(mean_margin_reference(after, "pairs", False), rel=1e-4)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("passes", ["exact", "online"])
def test_an_epoch_that_is_resumed_in_its_middle(passes, plain_trainer, tmp_path):
    """The start of the epoch is missing, so no margin is logged; the next epoch is measured."""

    class Save(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    prototypes = ClassPrototypes(passes=passes)  # the callback of the first fit
    loader = DataLoader(TensorDataset(*models.vectors()["bob"]), 8)
    plain_trainer(max_epochs=1, callbacks=[prototypes, Save()]).fit(models.Module(models.mlp()), loader)
    logger = MemoryLogger()
    trainer = plain_trainer(max_epochs=2, callbacks=[prototypes], logger=logger)
    trainer.fit(models.Module(models.mlp()), loader, ckpt_path=tmp_path / "middle.ckpt")
    assert trainer.current_epoch == 2
    assert len(logger.curve("prototypes/lpm")) == 1


def test_both_ends_of_an_epoch_see_the_same_examples(plain_trainer):
    """With a learning rate of 0 the margin is 0 for any sampling and any number of batches."""
    module = models.Module(models.mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    loader = DataLoader(Augmented(*models.vectors()["ann"]), 8, shuffle=True)
    trainer = plain_trainer(max_epochs=2, callbacks=[ClassPrototypes(max_batches=2)], limit_train_batches=5)
    trainer.fit(module, loader)
    assert trainer.callback_metrics["prototypes/lpm"] == 0
    assert trainer.callback_metrics["prototypes/amm"] > 0


class Endless(IterableDataset):
    def __iter__(self):
        inputs, targets = models.vectors()["bob"]
        return iter(zip(inputs, targets, strict=True))


def test_an_epoch_without_a_length(plain_trainer):
    loader = DataLoader(Endless(), 8)
    trainer = plain_trainer(max_epochs=1, callbacks=[ClassPrototypes()])
    trainer.fit(models.Module(models.mlp()), loader)
    assert trainer.callback_metrics["prototypes/lpm"] > 0
    trainer = plain_trainer(max_epochs=1, callbacks=[ClassPrototypes(passes="online")])
    with pytest.raises(ValueError, match=r"set `limit_train_batches`, or use passes='exact'"):
        trainer.fit(models.Module(models.mlp()), loader)
    trainer = plain_trainer(max_epochs=1, limit_train_batches=4, callbacks=[ClassPrototypes(passes="online")])
    trainer.fit(models.Module(models.mlp()), loader)
    assert trainer.callback_metrics["prototypes/lpm"] > 0


@pytest.mark.filterwarnings("ignore:.*persistent_workers")
def test_persistent_workers_of_a_plain_trainer(plain_trainer):
    loader = loaders(1, persistent_workers=True)["bob"]
    message = r"without persistent workers .*: set `persistent_workers=False`, .*'online'"
    for options, error in (({"layer": "net.0", "num_classes": 3}, ValueError), ({}, MisconfigurationException)):
        with pytest.raises(error, match=message):
            plain_trainer(max_epochs=1, callbacks=[ClassPrototypes(**options)]).fit(
                models.Module(models.norm_mlp()), loader
            )
    prototypes = ClassPrototypes("net.0", num_classes=3, passes="online")
    trainer = plain_trainer(max_epochs=1, callbacks=[prototypes])
    trainer.fit(models.Module(models.norm_mlp()), loader)
    assert trainer.callback_metrics["prototypes/lpm"] > 0


# --- Options ----------------------------------------------------------------------------------------------------------


def sent(make, prototypes, module, clients, **options):
    """Extras of the first round and final models, by client."""
    mail = Mail()
    trainer = make(max_rounds=1, callbacks=[prototypes, mail], seed=SEED, batch_norm="average", **options)
    data = clients if isinstance(clients, L.LightningDataModule) else FederatedDataModule(clients, batch_size=8)
    trainer.fit(module, datamodule=data)
    return {visit.client: visit for visit in mail.visits}


TWO = {"a": 40, "b": 33}


def test_left_out_classes(federated_trainer):
    clients = models.vectors(TWO)
    prototypes = ClassPrototypes(exclude_classes=[1])
    visits = sent(federated_trainer, prototypes, models.Module(models.mlp()), models.as_datasets(clients))
    for client, visit in visits.items():
        net = loaded(models.mlp(), visit.end)
        means, numbers = measured(net[:2], *clients[client], excluded=(1,))
        assert_close(unpacked(visit.extras)[0], means)
        assert unpacked(visit.extras)[1] == numbers
        assert set(numbers) == {0, 2}


@pytest.mark.parametrize(
    ("precision", "passes"),
    quick(
        itertools.product(["bf16-mixed", "bf16-true", "64-true"], ["exact", "online"]),
        [("bf16-mixed", "exact"), ("bf16-true", "online")],
    ),
)
def test_precision(precision, passes, federated_trainer):
    """Prototypes are float32 means of features in the Trainer's precision."""
    clients = models.vectors(TWO)
    expected = sent(
        federated_trainer, ClassPrototypes(passes=passes), models.Module(models.mlp()), models.as_datasets(clients)
    )
    visits = sent(
        federated_trainer, ClassPrototypes(passes=passes), models.Module(models.mlp()), models.as_datasets(clients),
        precision=precision,
    )  # fmt: skip
    for client, visit in visits.items():
        assert visit.extras["prototypes:means"].dtype == torch.float32
        tolerance = 1e-5 if precision == "64-true" else 0.05
        assert_close(unpacked(visit.extras)[0], unpacked(expected[client].extras)[0], tolerance)


def test_void_labels(federated_trainer):
    """With another `ignore_index`, 255 is an error."""

    def void(clients, label):
        return models.as_datasets(
            {name: (x, y.where(torch.arange(len(y)) % 3 > 0, label)) for name, (x, y) in clients.items()}
        )

    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets.where(targets < 3, -100))

    clients, module = models.vectors(TWO), models.Module(models.mlp(), loss=loss)
    visits = sent(federated_trainer, ClassPrototypes(ignore_index=-100), module, void(clients, -100))
    for client, visit in visits.items():
        inputs, targets = (tensor[torch.arange(len(tensor)) % 3 > 0] for tensor in clients[client])
        expected = measured(loaded(models.mlp(), visit.end)[:2], inputs, targets)
        assert_close(unpacked(visit.extras)[0], expected[0])
        assert unpacked(visit.extras)[1] == expected[1]
    for index in (-100, None):
        with pytest.raises(ValueError, match=r"`labels` to be in 0 to 2 or `ignore_index` .*, but got 255"):
            sent(federated_trainer, ClassPrototypes(ignore_index=index), module, void(clients, 255))


def test_a_client_without_any_of_the_classes(federated_trainer):
    """No prototypes and no margin are sent."""
    clients = models.vectors(TWO)
    clients["b"] = clients["b"][0], torch.full_like(clients["b"][1], 2)
    visits = sent(
        federated_trainer,
        ClassPrototypes(exclude_classes=[2]),
        models.Module(models.mlp()),
        models.as_datasets(clients),
    )
    assert len(visits["a"].extras["prototypes:classes"]) == 2
    assert visits["b"].extras["prototypes:means"].shape == (0, 8)
    assert LPM not in visits["b"].extras


def test_few_batches(federated_trainer):
    clients = models.as_datasets(models.vectors(TWO))
    frozen = models.Module(models.mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    visits = sent(federated_trainer, ClassPrototypes(max_batches=2), frozen, clients)
    for visit in visits.values():
        assert sum(unpacked(visit.extras)[1].values()) == 16
        assert visit.extras[LPM] == 0


class Keyed(models.Module):
    def training_step(self, batch):
        return self.loss(self(batch["x"]), batch[self.key])


class KeyedData(Dataset):
    def __init__(self, tensors, key, label=lambda label: label):
        self.tensors, self.key, self.label = tensors, key, label

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return {"x": self.tensors[0][index], self.key: self.label(self.tensors[1][index]), "age": torch.tensor(1.5)}


TRUTH = operator.itemgetter("truth")


@pytest.mark.parametrize(
    ("key", "target"),
    quick(
        [("label", None), ("y", None), ("mask", None), ("truth", "truth"), ("truth", TRUTH)],
        [("mask", None), ("truth", "truth"), ("truth", TRUTH)],
    ),
)
def test_where_the_labels_are(key, target, federated_trainer):
    clients = models.vectors(TWO)
    module = Keyed(models.mlp())
    module.key = key
    data = {client: KeyedData(tensors, key) for client, tensors in clients.items()}
    visits = sent(federated_trainer, ClassPrototypes(target=target), module, data)
    for client, visit in visits.items():
        assert_close(unpacked(visit.extras)[0], measured(loaded(models.mlp(), visit.end)[:2], *clients[client])[0])


@pytest.mark.parametrize("target", [2, None])
def test_labels_at_another_place_of_a_tuple(target, federated_trainer):
    """The loss shows the position of the labels."""

    class Last(models.Module):
        def training_step(self, batch, batch_idx):
            return self.loss(self(batch[0]), batch[2])

    clients = models.vectors(TWO)
    data = {client: TensorDataset(x, torch.rand(len(x)), y) for client, (x, y) in clients.items()}
    visits = sent(federated_trainer, ClassPrototypes(target=target), Last(models.mlp()), data)
    for client, visit in visits.items():
        assert_close(unpacked(visit.extras)[0], measured(loaded(models.mlp(), visit.end)[:2], *clients[client])[0])
    with pytest.raises(ValueError, match="Expected integer class labels, but got fractions") as caught:
        sent(federated_trainer, ClassPrototypes(target=1), Last(models.mlp()), data)
    assert any("all 2 clients failed with this error" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="a batch with labels, but got float"):
        sent(federated_trainer, ClassPrototypes(target=lambda batch: 1.0), Last(models.mlp()), data)


def dice(outputs, targets):
    return F.binary_cross_entropy_with_logits(outputs, targets)


@pytest.mark.parametrize("passes", ["exact", "online"])
def test_masks_of_floats_with_a_channel(passes, federated_trainer):
    """Binary segmentation: one logit, masks (N, 1, H, W) with values 0.0 and 1.0."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.Upsample(scale_factor=8))

    clients = {name: (x, (y > 0).float()[:, None]) for name, (x, y) in models.scenes({"ann": 4, "bob": 3}).items()}
    data = models.as_datasets(clients)
    prototypes = ClassPrototypes(layer="net.1", passes=passes)
    visits = sent(federated_trainer, prototypes, models.Module(net(), loss=dice), data)
    for client, visit in visits.items():
        inputs, targets = clients[client]
        means, counts = unpacked(visit.extras)
        if passes == "exact":
            expected = measured(loaded(net(), visit.end)[:2], inputs, targets[:, 0].long())
            assert_close(means, expected[0])
            assert counts == expected[1]
        assert sum(counts.values()) == len(inputs) * 16
        assert set(counts) == {0, 1}


def test_labels_with_a_channel(federated_trainer):
    """(N, 1) labels for vectors."""

    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets[:, 0])

    clients = {name: (x, y[:, None]) for name, (x, y) in models.vectors(TWO).items()}
    visits = sent(
        federated_trainer, ClassPrototypes(), models.Module(models.mlp(), loss=loss), models.as_datasets(clients)
    )
    for client, visit in visits.items():
        inputs, targets = clients[client]
        expected = measured(loaded(models.mlp(), visit.end)[:2], inputs, targets[:, 0])
        assert_close(unpacked(visit.extras)[0], expected[0])


def test_a_convolution_by_its_name(federated_trainer):
    """One label per map: the mean over all positions."""
    clients = models.images(TWO)
    prototypes = ClassPrototypes(layer="net.4", num_classes=3)
    visits = sent(federated_trainer, prototypes, models.Module(models.cnn()), models.as_datasets(clients))
    for client, visit in visits.items():
        net = loaded(models.cnn(), visit.end)
        expected = measured(lambda x, net=net: net[:5](x).mean((2, 3)), *clients[client])
        assert_close(unpacked(visit.extras)[0], expected[0])


def test_sequences(federated_trainer):
    clients = models.sentences(TWO)
    visits = sent(federated_trainer, ClassPrototypes(), models.Module(models.Tied()), models.as_datasets(clients))
    for client, visit in visits.items():
        net = loaded(models.Tied(), visit.end)
        tokens, targets = clients[client]
        with torch.no_grad():
            features = torch.tanh(net.mix(net.embedding(tokens)).cumsum(1))
        means, counts = prototypes_reference(features.flatten(0, 1), targets.flatten(), 255, ())
        assert_close(unpacked(visit.extras)[0], means)
        assert unpacked(visit.extras)[1] == counts


MARGINS, REDUCTIONS = ("semantic", "hypothesis", "relative", "gain"), ("mean", "sum", "count", "max")


@pytest.mark.parametrize(
    ("margin", "reduction"),
    quick(itertools.product(MARGINS, REDUCTIONS), zip(MARGINS, REDUCTIONS, strict=True)),
)
def test_kinds_of_margins(margin, reduction, federated_trainer):
    clients = models.vectors(TWO)
    prototypes = ClassPrototypes(margin=margin, class_reduction=reduction)
    visits = sent(federated_trainer, prototypes, models.Module(models.mlp()), models.as_datasets(clients))
    for client, visit in visits.items():
        before, after = (
            measured(loaded(models.mlp(), state)[:2], *clients[client])[0] for state in (visit.start, visit.end)
        )
        _, counts = unpacked(visit.extras)
        expected = margin_of(after, before, margin, reduction, counts)
        assert visit.extras[f"prototypes:lpm:{margin}:{reduction}"].item() == pytest.approx(expected, rel=1e-3)


def test_a_single_class_is_compared_with_those_that_the_server_sends(federated_trainer):
    """For margins between classes, from the second round: in round 0 the server has no prototypes."""
    clients = {"a": models.vectors(TWO)["a"], "b": models.vectors(TWO)["b"]}
    clients["b"] = clients["b"][0], torch.zeros_like(clients["b"][1])
    mail, sending = Mail(), Sending()
    prototypes = ClassPrototypes(margin="hypothesis")
    trainer = federated_trainer(max_rounds=2, callbacks=[sending, prototypes, mail], seed=SEED)
    trainer.fit(models.Module(models.mlp()), models.as_datasets(clients))
    name = "prototypes:lpm:hypothesis:mean"
    first, second = (next(visit for visit in mail.round(r) if visit.client == "b") for r in (0, 1))
    assert name not in first.extras
    before, after = (
        measured(loaded(models.mlp(), state)[:2], *clients["b"])[0] for state in (second.start, second.end)
    )
    assert set(after) == {0}
    expected = margin_of(after, before, "hypothesis", fallback={1: [0.5] * 8})
    assert second.extras[name].item() == pytest.approx(expected, rel=1e-4)


class Sending(FederatedCallback):
    def on_server_send(self, trainer, module, client, broadcast):
        if broadcast.round:
            broadcast.extras["prototypes:classes"] = torch.tensor([1])
            broadcast.extras["prototypes:means"] = torch.full((1, 8), 0.5)
            broadcast.extras["prototypes:counts"] = torch.tensor([3])


# --- Comparison with stored prototypes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "passes"),
    quick(itertools.product(["memory", "folder"], ["exact", "online"]), [("folder", "online")]),
)
def test_margins_against_the_last_visit(store, passes, federated_trainer, tmp_path):
    """A client compares with the prototypes sent in its previous visit; a first visit has no margin."""
    clients, mail = models.vectors(SIZES), Mail()
    prototypes = ClassPrototypes(lpm_before="last_local", passes=passes)
    trainer = federated_trainer(
        max_rounds=5, clients_per_round=2, callbacks=[prototypes, mail], seed=SEED,
        store=FolderStore(tmp_path) if store == "folder" else None,
    )  # fmt: skip
    trainer.fit(models.Module(models.norm_mlp(), models.momentum), models.as_datasets(clients))
    kept, again = {}, 0
    for visit in mail.visits:
        after, _ = unpacked(visit.extras)
        assert (LPM in visit.extras) == (visit.client in kept)
        if visit.client in kept:
            assert visit.extras[LPM].item() == pytest.approx(margin_of(after, kept[visit.client]), rel=1e-4)
            again += 1
        kept[visit.client] = after
    assert again >= 4


def test_what_a_client_kept_is_of_its_last_good_visit(federated_trainer):
    class Nonsense(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1:
                update.state["net.0.bias"] = update.state["net.0.bias"] * math.nan

    mail = Mail()
    prototypes = ClassPrototypes(lpm_before="last_local")
    trainer = federated_trainer(max_rounds=3, callbacks=[prototypes, Nonsense(), mail], seed=SEED)
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors({"a": 40})))
    first, second, third = mail.visits
    assert first.update["net.0.bias"].isfinite().all()
    assert second.extras[LPM] > 0
    expected = margin_of(unpacked(third.extras)[0], unpacked(first.extras)[0])
    assert third.extras[LPM].item() == pytest.approx(expected, rel=1e-4)


# --- Failures ---------------------------------------------------------------------------------------------------------


class Fragile(TensorDataset):
    broken = False

    def __getitem__(self, index):
        if self.broken:
            raise OSError("the disk is gone")
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Break(FederatedCallback):
    def __init__(self, data, broken, hooks):
        self.data, self.broken, self.hooks = data, broken, hooks

    def on_client_start(self, trainer, module, client, broadcast):
        if "start" in self.hooks:
            self.data.broken = self.broken

    def on_client_end(self, trainer, module, client, update):
        if "end" in self.hooks:
            self.data.broken = self.broken


@pytest.mark.parametrize("hooks", [("start",), ("end",), ("start", "end")])
def test_data_that_fail_beside_the_training(hooks, federated_trainer, caplog):
    """The client sends no prototypes, with a warning; the update counts."""
    clients = models.vectors({"a": 24, "b": 24, "c": 24})
    data = models.as_datasets(clients)
    data["b"] = Fragile(*clients["b"])
    mail = Mail()
    callbacks = [Break(data["b"], True, hooks), ClassPrototypes(), Break(data["b"], False, hooks), mail]
    trainer = federated_trainer(max_rounds=1, callbacks=callbacks)
    trainer.fit(models.Module(models.mlp()), FederatedDataModule(data, batch_size=8))
    extras = {visit.client: visit.extras for visit in mail.visits}
    assert LPM in extras["a"]
    assert LPM in extras["c"]
    assert LPM not in extras["b"]
    assert ("prototypes:means" in extras["b"]) == ("end" not in hooks)
    assert "The prototypes of client 'b' are excluded: OSError: the disk is gone." in caplog.text
    assert trainer.callback_metrics["fed/clients"] == 3
    assert trainer.callback_metrics["fed/failed"] == 0


@pytest.mark.slow
def test_persistent_workers_of_a_clients_loader(federated_trainer, caplog):
    clients = loaders(workers=1)
    clients["dan"] = loaders(workers=1, persistent_workers=True)["bob"]
    visits = sent(federated_trainer, ClassPrototypes(), models.Module(models.norm_mlp()), FederatedDataModule(clients))
    assert {client: LPM in visit.extras for client, visit in visits.items()} == {"bob": True, "cid": True, "dan": False}
    assert "The prototypes of client 'dan' are excluded: ValueError: Expected a loader without persistent workers" in (
        caplog.text
    )
    assert "set `persistent_workers=False`" in caplog.text


def test_what_fails_in_the_module_ends_the_fit(federated_trainer):
    class Unready(models.Module):
        def training_step(self, batch, batch_idx):
            if not self.training:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    module = Unready(models.mlp())
    with pytest.raises(ZeroDivisionError) as caught:
        sent(federated_trainer, ClassPrototypes(), module, models.as_datasets(models.vectors(TWO)))
    assert any("all 2 clients failed with this error" in note for note in caught.value.__notes__)
    assert not module.net[2]._forward_hooks  # noqa: SLF001 - the hooks are removed
    assert module.training


def test_a_client_that_fails_leaves_nothing_for_the_next_one(federated_trainer):
    """BatchNorm refuses the single example before features exist."""
    clients = models.as_datasets(models.vectors({"a": 1, "b": 24}))
    mail = Mail()
    trainer = federated_trainer(
        max_rounds=2, callbacks=[ClassPrototypes(passes="online"), mail], batch_norm="average"
    )  # fmt: skip
    trainer.fit(models.Module(models.norm_mlp()), FederatedDataModule(clients, batch_size=8))
    assert trainer.callback_metrics["fed/failed"] == 1
    assert [LPM in visit.extras for visit in mail.visits if visit.client == "b"] == [True, True]


def test_features_that_are_not_used(federated_trainer):
    class Idle(models.Module):
        def __init__(self):
            super().__init__(models.mlp())
            self.spare = nn.Linear(8, 3)

    data = models.as_datasets(models.vectors(TWO))
    for passes, reason in {"exact": "did not run", "online": "ran in 0 of 5 batches"}.items():
        with pytest.raises(ValueError, match=f"but the output of 'spare' {reason}: name another `layer`"):
            sent(federated_trainer, ClassPrototypes("spare", passes=passes), Idle(), data)


def test_manual_optimization(federated_trainer):
    """The validation step replaces the training step; without a validation step, an error names the remedy."""

    class Bare(models.TwoOptimizers):
        validation_step = L.LightningModule.validation_step

    data = {name: TensorDataset(x, y) for name, (x, y) in models.vectors(TWO).items()}
    with pytest.raises(ValueError, match="a `validation_step` for exact passes with manual optimization"):
        sent(federated_trainer, ClassPrototypes("judge", num_classes=3), Bare(), data)
    module = models.ManualModule(models.mlp())
    with pytest.raises(MisconfigurationException, match=r"manual optimization.*: give `ClassPrototypes` a `layer`"):
        sent(federated_trainer, ClassPrototypes(num_classes=3), module, data)
    visits = sent(federated_trainer, ClassPrototypes("net.1", num_classes=3), module, data)
    for client, visit in visits.items():
        expected = measured(loaded(models.mlp(), visit.end)[:2], *models.vectors(TWO)[client])
        assert_close(unpacked(visit.extras)[0], expected[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passes": "twice"}, r"`passes` .* but got 'twice'"),
        ({"lpm_before": "never"}, r"`lpm_before` .* but got 'never'"),
        ({"margin": "large"}, r"`margin` .* but got 'large'"),
        ({"class_reduction": "median"}, r"`class_reduction` .* but got 'median'"),
        ({"max_batches": 0}, "`max_batches` to be at least 1, but got 0"),
        ({"num_classes": "4"}, "`num_classes` to be a whole number, but got '4'"),
    ],
)
def test_options_that_are_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        ClassPrototypes(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": "net.9"}, r"`layer` .* but got 'net.9': 'net' contains \['net.0', 'net.1', 'net.2'\]"),
        ({"num_classes": 0}, "`num_classes` to be at least 1, but got 0"),
        ({"ignore_index": 2}, "`ignore_index` outside the classes"),
        ({"num_classes": 300, "ignore_index": 255}, "pass `ignore_index=None`"),
        ({"exclude_classes": [3]}, "`exclude_classes` to be in 0 to 2, but got 3"),
        ({"target": "z"}, "`target` to be an index or key in the batch, but got 'z' for a batch with positions 0 to 1"),
        ({"target": 5}, "`target` to be an index or key in the batch, but got 5 for a batch with positions 0 to 1"),
        ({"num_classes": 2}, r"`labels` to be in 0 to 1 or `ignore_index` \(255\), but got 2"),
    ],
)
def test_options_that_do_not_fit_the_model(options, message, federated_trainer, plain_trainer):
    data = models.vectors(TWO)
    with pytest.raises(ValueError, match=message):
        sent(federated_trainer, ClassPrototypes(**options), models.Module(models.mlp()), models.as_datasets(data))
    with pytest.raises(ValueError, match=message):
        plain_trainer(max_epochs=1, callbacks=[ClassPrototypes(**options)]).fit(
            models.Module(models.mlp()), DataLoader(TensorDataset(*data["a"]), 8)
        )


def test_the_number_of_classes(federated_trainer):
    """From the logits in the loss, or from an argument."""
    data = models.as_datasets(models.vectors(TWO))
    with pytest.raises(ValueError, match=r"`labels` to be in 0 to 1"):
        sent(federated_trainer, ClassPrototypes(num_classes=2), models.Module(models.mlp()), data)
    for given, expected in (("auto", 3), (7, 7), (1000, 1000)):
        prototypes = ClassPrototypes(num_classes=given)
        sent(federated_trainer, prototypes, models.Module(models.mlp()), data)
        assert prototypes.classes_found == expected
    with pytest.raises(MisconfigurationException, match="but no layer does: give `ClassPrototypes` a `layer`"):
        sent(federated_trainer, ClassPrototypes(layer="w"), models.Quadratic(6), data)


# --- Compiled models --------------------------------------------------------------------------------------------------


def compiled(optimizer=models.momentum):
    return models.Module(torch.compile(models.mlp(), backend="eager"), optimizer)


@pytest.fixture
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    ("passes", "is_ready"),
    quick(itertools.product(["exact", "online"], [False, True]), [("exact", True), ("online", True)]),
)
def test_compiled_models(passes, is_ready, federated_trainer):
    """Equal to the uncompiled model; online passes on a model compiled before the fit raise an error."""
    if passes == "exact" and not hasattr(torch.compiler, "set_stance"):
        pytest.skip("torch 2.6 brings what puts compiled code aside")
    clients = models.as_datasets(models.vectors(TWO))
    module = compiled()
    if is_ready:  # for training and for evaluation
        module(torch.randn(8, 6))
        with torch.no_grad():
            module.eval()(torch.randn(8, 6))
        module.train()
    if passes == "online" and is_ready:
        with pytest.raises(
            ValueError, match=r"in every batch, but .*orig_mod.2' ran in . of . batches: name .* passes='exact'"
        ):
            sent(federated_trainer, ClassPrototypes(passes=passes), module, clients)
        return
    visits = sent(federated_trainer, ClassPrototypes(passes=passes), module, clients)
    expected = sent(
        federated_trainer, ClassPrototypes(passes=passes), models.Module(models.mlp(), models.momentum), clients
    )
    for client, visit in visits.items():
        assert_same(expected[client].extras, visit.extras)


# --- Repeated fits ----------------------------------------------------------------------------------------------------


def test_repeated_fits(federated_trainer, plain_trainer):
    prototypes = ClassPrototypes(passes="online")
    clients = models.as_datasets(models.vectors(TWO))
    results = []
    for _ in range(2):
        module = models.Module(models.mlp())
        results.append(sent(federated_trainer, prototypes, module, clients)["a"].extras)
        plain_trainer(max_epochs=1, callbacks=[prototypes]).fit(module, DataLoader(clients["b"], 8))
        assert not module.net[2]._forward_hooks  # noqa: SLF001
    assert_same(results[0], results[1])
