"""One traced training step finds the classifier, the number of classes, the labels and the void label."""

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
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import Method
from lightning_fed.algorithms import FedFusion, FedRep
from lightning_fed.callbacks import ClassPrototypes, SpreadOut, training_trace
from lightning_fed.callbacks.training_trace import find_class_task
from lightning_fed.data import IID
from lightning_fed.features.isolated_pass import is_same
from lightning_fed.modules import SampledSoftmaxHead
from tests import models
from tests.recorders import MemoryLogger, assert_same, state_of

C = 3


def numbers(count=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 6, generator=generator)


def labels(count=24):
    return torch.arange(count) % C


def images(count=4, side=32):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def masks(count=4, side=32, classes=C):
    return torch.randint(classes, (count, side, side), generator=torch.Generator().manual_seed(1))


class Base(L.LightningModule):
    def __init__(self, step=None, **layers):
        super().__init__()
        self.step = step
        for name, layer in layers.items():
            setattr(self, name, layer)

    def training_step(self, batch, batch_idx):
        return self.step(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def body():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU())


def classifier(loss, width=C, **layers):
    """A body and a head; the head is not the last layer."""

    def step(self, batch):
        return loss(self.zz_head(self.body(batch[0])), batch[1])

    return Base(step, zz_head=nn.Linear(8, width), body=body(), decoy=nn.Linear(8, 5), **layers)


def gathered(scores, target):
    return -scores.log_softmax(1).gather(1, target[:, None]).mean()


def indexed(scores, target):
    return -F.log_softmax(scores, 1)[torch.arange(len(target)), target].mean()


def one_hot_product(scores, target):
    return -(F.one_hot(target, C) * scores.log_softmax(-1)).sum(1).mean()


def smoothed_by_hand(scores, target):
    soft = F.one_hot(target, C) * 0.9 + 0.1 / C
    return -(soft * scores.log_softmax(-1)).sum(1).mean()


def eye(scores, target):
    return F.binary_cross_entropy_with_logits(scores, torch.eye(C)[target])


def by_logsumexp(scores, target):
    return F.nll_loss(scores - scores.logsumexp(1, keepdim=True), target)


def mixed_up(scores, target):
    return 0.3 * F.cross_entropy(scores, target) + 0.7 * F.cross_entropy(scores, target.flip(0))


def with_temperature(scores, target):
    return F.cross_entropy(scores / 0.5 + torch.zeros(C), target)


def weighted(scores, target):
    return F.cross_entropy(scores, target, weight=torch.ones(C), label_smoothing=0.1)


def void(scores, target):
    return F.cross_entropy(scores, target.where(target != 2, 11), ignore_index=11)


LOSSES = {
    "cross entropy": F.cross_entropy,
    "weights and smoothing": weighted,
    "nll": lambda scores, target: F.nll_loss(scores.log_softmax(1), target),
    "gather": gathered,
    "index": indexed,
    "one hot": one_hot_product,
    "smoothed one hot": smoothed_by_hand,
    "eye": eye,
    "logsumexp": by_logsumexp,
    "mixup": mixed_up,
    "temperature": with_temperature,
    "dropout": lambda scores, target: F.cross_entropy(F.dropout(scores, 0.5), target),
    "dropout layer": lambda scores, target: F.cross_entropy(nn.Dropout(0.1)(scores), target),
    "dropout of channels": lambda scores, target: F.cross_entropy(F.dropout1d(scores[..., None], 0.5)[..., 0], target),
    "noise": lambda scores, target: F.cross_entropy(scores + torch.randn_like(scores), target),
    "scattered": lambda scores, target: F.binary_cross_entropy_with_logits(
        scores, torch.zeros_like(scores).scatter_(1, target[:, None], 1)
    ),
    "half labels": lambda scores, target: F.cross_entropy(scores, target.to(torch.uint8).long()),
    "focal": lambda scores, target: smp.losses.FocalLoss("multiclass")(scores[..., None], target[:, None]),
}


def task_of(federated_trainer, module, *tensors):
    """Finds the task at the fit's start; the fit continues."""
    found = []

    class Finder(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            found.append(find_class_task(trainer, pl_module, "name the layer in `layer`"))

    trainer = federated_trainer(max_rounds=1, partition=IID(2), callbacks=[Finder()])
    trainer.fit(module, DataLoader(TensorDataset(*(tensors or (numbers(), labels()))), batch_size=4))
    (task,) = found
    return task


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_classes(federated_trainer, name):
    """Neither name nor place identifies the head; the labels come from the batch."""
    task = task_of(federated_trainer, classifier(LOSSES[name]))
    assert (task.layer, task.num_classes, task.ignore_index) == ("zz_head", C, None)
    batch = [object(), labels()]
    assert task.target(batch) is batch[1]


ORDER = torch.tensor([2, 0, 1])
LOOKUPS = {
    "permutation": lambda scores, target: F.cross_entropy(scores, ORDER[target]),
    "index_select": lambda scores, target: F.cross_entropy(scores, ORDER.index_select(0, target)),
    "gather": lambda scores, target: F.cross_entropy(scores, ORDER.gather(0, target)),
    "embedding": lambda scores, target: F.cross_entropy(scores, F.embedding(target, ORDER[:, None])[:, 0]),
    "coarse classes": lambda scores, target: F.cross_entropy(scores, torch.tensor([0, 0, 1])[target]),
    "one hot": lambda scores, target: F.binary_cross_entropy_with_logits(scores, F.one_hot(ORDER[target], C).float()),
    "rows of a matrix": lambda scores, target: F.binary_cross_entropy_with_logits(scores, torch.eye(C)[ORDER][target]),
    "selected rows": lambda scores, target: F.cross_entropy(scores, torch.eye(C)[ORDER].index_select(0, target)),
    "indexed scores": lambda scores, target: indexed(scores, ORDER[target]),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_labels_from_a_table_are_not_the_labels_of_the_batch(federated_trainer, name):
    module = classifier(LOOKUPS[name])
    with pytest.raises(MisconfigurationException, match="give `ClassPrototypes` a"):
        federated_trainer(max_rounds=1, partition=IID(2), callbacks=[ClassPrototypes()]).fit(
            module, DataLoader(TensorDataset(numbers(), labels()), batch_size=4)
        )


# --- Segmentation -----------------------------------------------------------------------------------------------------


def deeplab(classes):
    return smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=classes)


def segmentation(loss, classes=C, net=deeplab):
    def step(self, batch):
        return loss(self.net(batch[0]), batch[1])

    return Base(step, net=net(classes))


def tiny(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU(), nn.Conv2d(4, classes, 1), nn.Upsample(scale_factor=4))


def with_void(void, classes=C):
    known = masks(classes=classes)
    return known.where(torch.arange(32) % 5 > 0, void)


def dice(mode, void=None):
    loss = smp.losses.DiceLoss(mode, ignore_index=void)
    return lambda scores, mask: loss(scores, mask)


def valid_pixels(scores, mask):
    """A mask excludes void pixels."""
    valid = mask != 11
    losses = F.cross_entropy(scores, mask.where(valid, 0), reduction="none")
    return (losses * valid).sum() / valid.sum()


def chosen_pixels(scores, mask):
    valid = mask != 255
    return F.cross_entropy(scores.movedim(1, -1)[valid], mask[valid])


SEGMENTATIONS = {
    "dice": (dice("multiclass"), masks, None),
    "dice with a void": (dice("multiclass", 11), lambda: with_void(11), 11),
    "jaccard": (smp.losses.JaccardLoss("multiclass"), masks, None),
    "tversky": (smp.losses.TverskyLoss("multiclass"), masks, None),
    "focal with a void": (smp.losses.FocalLoss("multiclass", ignore_index=255), lambda: with_void(255), 255),
    "cross entropy, 11": (lambda z, y: F.cross_entropy(z, y, ignore_index=11), lambda: with_void(11), 11),
    "cross entropy, 255": (lambda z, y: F.cross_entropy(z, y, ignore_index=255), lambda: with_void(255), 255),
    "cross entropy, -100": (F.cross_entropy, lambda: with_void(-100), -100),
    "by hand": (valid_pixels, lambda: with_void(11), 11),
    "chosen": (chosen_pixels, lambda: with_void(255), 255),
    "a channel": (lambda z, y: F.cross_entropy(z, y.squeeze(1)), lambda: masks()[:, None], None),
    "sum": (
        lambda z, y: F.cross_entropy(z, y, ignore_index=11) + dice("multiclass", 11)(z, y), lambda: with_void(11), 11,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEGMENTATIONS)
def test_losses_of_pixels(federated_trainer, name):
    loss, make, void = SEGMENTATIONS[name]
    task = task_of(federated_trainer, segmentation(loss, net=tiny), images(), make())
    assert (task.layer, task.num_classes, task.ignore_index) == ("net.2", C, void)
    batch = [object(), make()]
    assert task.target(batch) is batch[1]


BINARY = {
    "cross entropy": lambda z, y: F.binary_cross_entropy_with_logits(z, y[:, None].float()),
    "probabilities": lambda z, y: F.binary_cross_entropy(z.sigmoid(), y[:, None].float()),
    "squeezed": lambda z, y: F.binary_cross_entropy_with_logits(z.squeeze(1), y.float()),
    "dice": lambda z, y: smp.losses.DiceLoss("binary")(z, y[:, None].float()),
    "focal": lambda z, y: smp.losses.FocalLoss("binary")(z, y[:, None]),
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_masks_of_zeros_and_ones(federated_trainer, name, kind):
    task = task_of(federated_trainer, segmentation(BINARY[name], 1, tiny), images(), masks(classes=2).to(kind))
    assert (task.layer, task.num_classes, task.ignore_index) == ("net.2", 2, None)
    batch = [object(), masks().to(kind)]
    assert task.target(batch) is batch[1]


def test_a_real_network(federated_trainer):
    task = task_of(federated_trainer, segmentation(dice("multiclass", 2)), images(), masks())
    assert (task.layer, task.num_classes, task.ignore_index) == ("net.segmentation_head.0", C, 2)


# --- Forms of modules -------------------------------------------------------------------------------------------------


class Mapped(nn.Module):
    """Returns a loss, like models in transformers."""

    def __init__(self):
        super().__init__()
        self.score, self.encoder = nn.Linear(8, C), body()

    def forward(self, inputs, labels=None):
        logits = self.score(self.encoder(inputs))
        return {"loss": F.cross_entropy(logits.view(-1, C), labels.view(-1)), "logits": logits}


class Cosine(nn.Module):
    """Class vectors without a linear layer."""

    def __init__(self):
        super().__init__()
        self.vectors, self.scale = nn.Parameter(torch.randn(8, C)), nn.Parameter(torch.tensor(4.0))

    def forward(self, features):
        return self.scale * (F.normalize(features) @ F.normalize(self.vectors, dim=0))


class Adapted(nn.Module):
    """A frozen layer with a low-rank change."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, C).requires_grad_(False), nn.Linear(8, 2), nn.Linear(2, C)

    @property
    def weight(self):
        return self.base.weight

    out_features = C

    def forward(self, features):
        return self.base(features) + self.up(self.down(features))


def with_head(head):
    def step(self, batch):
        return F.cross_entropy(self.head(self.body(batch[0])), batch[1])

    return Base(step, head=head, body=body())


def logged_teacher(self, batch):
    with torch.no_grad():
        self.log("teacher_loss", F.cross_entropy(self.teacher(batch[0]), batch[1]))
    return F.cross_entropy(self.student(batch[0]), batch[1])


def pooled_over_mask(self, batch):
    """A masked sum over probabilities feeds a layer, and is not a loss."""
    gate = torch.sigmoid(self.gate(batch[0])) * (batch[1] > 0)[:, None].float()
    return F.cross_entropy(self.head(gate.sum(0, keepdim=True) + batch[0]), batch[1])


def compiled(self, batch):
    return F.cross_entropy(self.net(batch[0]), batch[1])


FORMS = {
    "own loss": (lambda: Base(lambda self, batch: self.net(*batch)["loss"], net=Mapped()), "net.score"),
    "class vectors": (lambda: with_head(Cosine()), "head"),
    "adapter": (lambda: with_head(Adapted()), "head"),
    "weight norm": (lambda: with_head(nn.utils.parametrizations.weight_norm(nn.Linear(8, C, bias=False))), "head"),
    "sampled softmax": (lambda: with_head(SampledSoftmaxHead(8, C)), "head"),
    "teacher": (lambda: Base(logged_teacher, student=models.mlp(), teacher=models.mlp()), "student.2"),
    "mask": (lambda: Base(pooled_over_mask, head=nn.Linear(6, C), gate=nn.Linear(6, 6)), "head"),
    "compiled": (lambda: Base(compiled, net=torch.compile(models.mlp(), backend="eager")), "net._orig_mod.2"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_modules(federated_trainer, name):
    make, layer = FORMS[name]
    task = task_of(federated_trainer, make())
    assert (task.layer, task.num_classes) == (layer, C)


def test_labels_by_name(federated_trainer):
    rows = [
        {"pixels": x, "meta": {"z": torch.tensor(9.0), "kind": y}} for x, y in zip(numbers(), labels(), strict=True)
    ]

    def step(self, batch):
        return F.cross_entropy(self.net(batch.pop("pixels")), batch.pop("meta")["kind"])

    found = []

    class Finder(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            found.append(find_class_task(trainer, pl_module, "name it"))

    federated_trainer(max_rounds=1, partition=IID(2), callbacks=[Finder()]).fit(
        Base(step, net=models.mlp()), DataLoader(rows, batch_size=4)
    )
    batch = {"meta": {"kind": labels()}}
    assert found[0].target(batch) is batch["meta"]["kind"]


# --- Changed labels ---------------------------------------------------------------------------------------------------

CHANGED = {
    "remainder": lambda z, y: F.cross_entropy(z, y % 2),
    "shifted": lambda z, y: F.cross_entropy(z, (y + 1).clamp(max=2)),
    "merged": lambda z, y: F.cross_entropy(z, y.masked_fill(y == 2, 0)),
    "merged by a mask": lambda z, y: F.cross_entropy(z, torch.where(y > 1, 0, y)),
    "of the step": lambda z, y: F.cross_entropy(z, torch.arange(len(z)) % C),
    "several at once": lambda z, y: F.binary_cross_entropy_with_logits(z, (y[:, None] > torch.arange(C)).float()),
}


def next_tokens(z, y):
    return F.cross_entropy(z[:, :-1].transpose(1, 2), y[:, 1:])


MOVED = {
    "next token": next_tokens,
    "next token, flat": lambda z, y: F.cross_entropy(z[..., :-1, :].reshape(-1, C), y[..., 1:].reshape(-1)),
    "rolled": lambda z, y: F.cross_entropy(z.transpose(1, 2), y.roll(-1, 1)),
    "flipped": lambda z, y: F.cross_entropy(z.flip(1).transpose(1, 2), y.flip(1)),
    "in another order": lambda z, y: F.cross_entropy(z.transpose(1, 2), y[:, torch.arange(4).flip(0)]),
    "tokens": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "examples": lambda z, y: F.cross_entropy(z.flip(0).transpose(1, 2), y.flip(0)),
    "chosen tokens": lambda z, y: F.cross_entropy(z[y != 2], y[y != 2]),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_labels_need_a_target(federated_trainer, name):
    """A feature of one token would meet the label of another token."""
    tokens = (torch.arange(32) ** 2 % C).reshape(8, 4)
    module = Base(
        lambda self, batch: MOVED[name](self.head(self.body(batch[0])), batch[1]), body=body(), head=nn.Linear(8, C)
    )
    task = task_of(federated_trainer, module, torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(0)), tokens)
    assert (task.layer, task.num_classes) == ("head", C)
    assert (task.target is not None) == (name in ("tokens", "examples", "chosen tokens"))


@pytest.mark.parametrize("name", CHANGED)
def test_other_labels_need_a_target(federated_trainer, name):
    assert task_of(federated_trainer, classifier(CHANGED[name])).layer == "zz_head"
    trainer = federated_trainer(max_rounds=1, partition=IID(2), callbacks=[ClassPrototypes()])
    module = classifier(CHANGED[name])
    start = state_of(module)
    with pytest.raises(MisconfigurationException, match=r"labels in the loss .* give `ClassPrototypes` a"):
        trainer.fit(module, DataLoader(TensorDataset(numbers(), labels()), batch_size=4))
    assert_same(state_of(module), start)


# --- Modules without classes, and steps that cannot be traced ---------------------------------------------------------


def vae(target):

    def step(self, batch):
        x = (batch[0] > 0).float()
        mean, spread = self.encoder(x).chunk(2, 1)
        shown = self.decoder(mean + torch.randn_like(mean) * spread.exp())
        return F.binary_cross_entropy_with_logits(shown, target(x, batch)) + mean.square().mean()

    return Base(step, encoder=nn.Linear(6, 8), decoder=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)))


def simclr(self, batch):
    views = [F.normalize(self.projector(self.body(batch[0] + shift))) for shift in (0.1, 0.2)]
    return F.cross_entropy(views[0] @ views[1].T / 0.1, torch.arange(len(batch[0])))


def moco(self, batch):
    query = self.projector(self.body(batch[0]))
    scores = torch.cat([(query * query.detach()).sum(1, keepdim=True), query @ torch.ones(4, 7)], 1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


def protonet(self, batch):
    features = self.projector(self.body(batch[0]))
    centers = torch.stack([features[batch[1] == label].sum(0) for label in range(C)])
    return F.cross_entropy(-torch.cdist(features, centers), batch[1])


def nerf(self, batch):
    colors = torch.sigmoid(self.projector(self.body(batch[0])))
    return F.mse_loss(colors.cumsum(0), batch[0][:, :4])


def regression(self, batch):
    return F.mse_loss(self.net(batch[0])[:, 0], batch[1].float())


def dqn(self, batch):
    return self.projector(self.body(batch[0])).gather(1, batch[1][:, None]).square().mean()


def gan(self, batch):
    return F.binary_cross_entropy_with_logits(self.projector(self.body(batch[0])), torch.ones(len(batch[0]), 4))


def distilled(self, batch):
    return F.kl_div(
        self.projector(self.body(batch[0])).log_softmax(1), batch[0][:, :4].softmax(1), reduction="batchmean"
    )


def two_heads(self, batch):
    features = self.body(batch[0])
    return F.cross_entropy(self.projector(features), batch[1]) + F.cross_entropy(self.other(features), batch[1] % 2)


def mixture(self, batch):
    features = self.body(batch[0])
    return F.cross_entropy(self.projector(features) + features @ torch.ones(8, 4), batch[1])


def only_logged(self, batch):
    scores = self.projector(self.body(batch[0]))
    self.log("train_loss", F.cross_entropy(scores, batch[1]))
    return F.mse_loss(scores, batch[0][:, :4])


def part_of_the_outputs(self, batch):
    return F.cross_entropy(self.projector(self.body(batch[0]))[:, :3], batch[1])


def needs_a_fit(self, batch):
    return F.cross_entropy(self.projector(self.body(batch[0])), batch[1]) / self.trainer.callback_metrics["known"]


def of_a_body(step):
    return Base(step, body=body(), projector=nn.Linear(8, 4), other=nn.Linear(8, 2))


def by_hand():
    module = Base(None, net=models.mlp())
    module.automatic_optimization = False
    return module


NONE = "but no layer does"
REFUSED = {
    "vae": (lambda: vae(lambda x, batch: x), NONE),
    "autoencoder of pairs": (lambda: vae(lambda x, batch: (batch[2] > 0).float()), NONE),
    "simclr": (lambda: of_a_body(simclr), NONE),
    "moco": (lambda: of_a_body(moco), NONE),
    "protonet": (lambda: of_a_body(protonet), NONE),
    "nerf": (lambda: of_a_body(nerf), NONE),
    "regression": (lambda: Base(regression, net=models.mlp()), NONE),
    "dqn": (lambda: of_a_body(dqn), NONE),
    "gan": (lambda: of_a_body(gan), NONE),
    "distilled": (lambda: of_a_body(distilled), NONE),
    "mixture": (lambda: of_a_body(mixture), NONE),
    "only logged": (lambda: of_a_body(only_logged), NONE),
    "outputs in parts": (lambda: of_a_body(part_of_the_outputs), NONE),
    "two heads": (lambda: of_a_body(two_heads), r"but the layers \['projector', 'other'\] do"),
    "by hand": (by_hand, "but manual optimization does not allow a trial step"),
    "fails": (lambda: of_a_body(needs_a_fit), r"a trial of the training step failed \(KeyError: 'known'\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_classifier_is_an_error(federated_trainer, name):
    make, reason = REFUSED[name]
    with pytest.raises(MisconfigurationException, match=f"{reason}.*: name the layer in `layer`"):
        task_of(federated_trainer, make(), numbers(), labels(), numbers())


class OnNetwork:
    """A federation with a remote other side."""

    is_remote = True

    def __init__(self, federation, has_server):
        self.federation, self.has_server = federation, has_server

    def __getattr__(self, name):
        return getattr(self.federation, name)


@pytest.mark.parametrize("has_server", [True, False])
def test_a_client_compares_the_layer_with_the_server(federated_trainer, monkeypatch, has_server):
    """The server has no data and assumes the last layer."""
    find = training_trace.federation_of
    monkeypatch.setattr(training_trace, "federation_of", lambda trainer: OnNetwork(find(trainer), has_server))
    task = task_of(federated_trainer, Base(compiled, net=models.mlp()))
    assert (task.layer, task.num_classes) == ("net.2", C)
    if has_server:
        assert task_of(federated_trainer, classifier(F.cross_entropy)).layer == "decoy"
        return
    message = (
        "classifier as the server, 'decoy' with 5 classes, but got 'zz_head' with 3: on both sides, name the layer"
    )
    with pytest.raises(MisconfigurationException, match=message):
        task_of(federated_trainer, classifier(F.cross_entropy))


CONSUMERS = {
    "fedmargin": ("fedmargin", "give `ClassPrototypes` a `layer`"),
    "fedper": ("fedper", "name the entries of the head"),
    "fedrep": (FedRep(head_epochs=1), "name the entries of the head"),
    "spread-out": (Method("fedavg", [SpreadOut()]), "name the `entry`"),
    "moon": ("moon", "name the feature layer in `layer`"),
    "fedfusion": (FedFusion("multi"), "name the feature layer in `at`"),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_all_that_ask_refuse_alike(federated_trainer, name):
    method, remedy = CONSUMERS[name]
    module = Base(regression, net=nn.Linear(6, 4))
    start = state_of(module)
    with pytest.raises(
        MisconfigurationException, match=f"compare the outputs of one layer with class labels.*: {remedy}"
    ):
        federated_trainer(max_rounds=1, partition=IID(2), method=method).fit(
            module, DataLoader(TensorDataset(numbers(), labels()), batch_size=4)
        )
    assert_same(state_of(module), start)


# --- Unchanged training -----------------------------------------------------------------------------------------------


class Restless(L.LightningModule):
    """Draws random numbers from all generators, counts, stores and logs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, C))
        self.noise, self.seen, self.kept = torch.Generator().manual_seed(3), 0, []
        self.shuffled, self.drawn = random.Random(4), np.random.default_rng(5)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=C)
        self.register_buffer("center", torch.zeros(6))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        self.seen += 1
        self.kept.append(float(inputs.sum()))
        self.center.lerp_(inputs.mean(0), 0.1)
        scale = 1 + 0.1 * self.shuffled.random() + 0.1 * self.drawn.random() + 0.1 * random.random() + 0.01 * self.seen
        outputs = self.net(inputs * scale + 0.1 * torch.randn(inputs.shape, generator=self.noise) - self.center)
        self.accuracy(outputs, targets)
        self.log("train_acc", self.accuracy, on_epoch=True)
        return F.cross_entropy(outputs, targets)

    def configure_optimizers(self):
        return models.momentum(self.parameters())


@pytest.mark.parametrize("federated", [True, False])
def test_the_fit_is_that_with_a_named_layer(federated_trainer, plain_trainer, federated):
    """Bit-equal, also for a loader with a generator."""
    results = []
    for options in ({}, {"layer": "net.3", "num_classes": C}):
        module, prototypes = Restless(), ClassPrototypes(**options, passes="online")
        L.seed_everything(1)
        shuffled = torch.Generator().manual_seed(7)
        data = DataLoader(TensorDataset(numbers(), labels()), batch_size=6, shuffle=True, generator=shuffled)
        logger = MemoryLogger()
        options = {"callbacks": [prototypes], "logger": logger, "log_every_n_steps": 1}
        trainer = (
            federated_trainer(max_rounds=2, partition=IID(2), seed=3, batch_norm="average", **options)
            if federated
            else plain_trainer(max_epochs=2, **options)
        )
        trainer.fit(module, data)
        draws = [module.shuffled.random(), module.drawn.random(), random.random(), torch.rand(1).item()]
        draws += [torch.rand(1, generator=generator).item() for generator in (module.noise, shuffled)]
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        results.append((state_of(module), module.seen, module.kept, draws, optimizers, logger.lines))
    assert all(is_same(one, other) for one, other in zip(*results, strict=True))


def test_a_stream_loses_no_batch(plain_trainer):
    """A loader that cannot restart is not read."""
    trainer = plain_trainer(max_epochs=1, callbacks=[ClassPrototypes()])
    batches = iter([(numbers(4), labels(4))] * 3)
    with pytest.raises(
        MisconfigurationException, match=r"the loader is an iterator.*: give `ClassPrototypes` a `layer`"
    ):
        trainer.fit(Base(compiled, net=models.mlp()), batches)
    assert len(list(batches)) == 2  # Lightning reads one ahead
