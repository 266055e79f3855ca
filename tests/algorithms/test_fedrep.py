"""FedRep: personal heads train before the body; automatic heads of FedPer and FedRep."""

import itertools

import lightning as L
import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import Availability, FederatedDataModule, Federation
from lightning_fed.algorithms import FedPer, FedRep
from lightning_fed.callbacks import FederatedCallback, HeadThenBody
from lightning_fed.server.schedule import Schedule
from lightning_fed.tasks import ClassificationTask, SegmentationTask
from tests import models
from tests.breadth import quick
from tests.recorders import MemoryLogger, Recorder, SavesOnException, assert_same, state_of
from tests.references_baselines import fedrep_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def is_head(name):
    return name.startswith("head.")


def fit(federated_trainer, module=None, clients=None, rounds=3, callbacks=(), head="*head*", trainer=(), **options):
    module = models.Module(models.BaseAndHead(), models.momentum) if module is None else module
    options = {"head_epochs": 2, "body_epochs": 1, "batch_norm": "average", **options}
    method = FedRep(head, options.pop("head_epochs"), options.pop("body_epochs"))
    made = federated_trainer(method=method, max_rounds=rounds, callbacks=list(callbacks), **dict(trainer), **options)
    made.fit(module, models.as_datasets(models.vectors(SIZES) if clients is None else clients))
    return made, module


# --- Method -----------------------------------------------------------------------------------------------------------


EPOCHS = [(2, 1), (1, 3), (2, 0)]


@pytest.mark.parametrize(
    ("head_epochs", "body_epochs", "optimizer"),
    quick(
        [(*epochs, optimizer) for epochs in EPOCHS for optimizer in (models.momentum, models.adam)],
        [(*EPOCHS[0], models.momentum), (*EPOCHS[2], models.momentum)],
    ),
)
def test_a_fit_against_a_plain_loop(head_epochs, body_epochs, optimizer, federated_trainer):
    """Unequal clients, three of five per round, BatchNorm in the body, momentum and weight decay: bit for bit."""
    clients, recorder = models.vectors(SIZES), Recorder()
    history = fedrep_reference(
        models.BaseAndHead(), is_head, clients, cross_entropy, optimizer, head_epochs, body_epochs, rounds=3,
        cohort_size=3, seed=4,
    )  # fmt: skip
    trainer, module = fit(
        federated_trainer, models.Module(models.BaseAndHead(), optimizer), clients, callbacks=[recorder],
        head_epochs=head_epochs, body_epochs=body_epochs, clients_per_round=3, seed=4,
    )  # fmt: skip
    for (state, _), aggregate in zip(history, recorder.aggregates, strict=True):
        assert_same({f"net.{name}": value for name, value in state.items() if not is_head(name)}, aggregate)
    for client, head in history[-1][1].items():
        kept = trainer.federation.store.get(client)
        assert_same({f"net.{name}": value for name, value in head.items()}, kept)
    assert all(parameter.requires_grad for parameter in module.parameters())
    if not body_epochs:
        start = models.BaseAndHead().state_dict()
        assert all(torch.equal(module.net.base[0].weight, value) for value in [start["base.0.weight"]])


class Phases(FederatedCallback):
    def __init__(self):
        self.visits = []

    def on_client_start(self, trainer, module, client, broadcast):
        self.visits.append("")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.before = {name: value.detach().clone() for name, value in module.named_parameters()}
        assert {parameter.requires_grad for parameter in module.net.head.parameters()} != {
            parameter.requires_grad for parameter in module.net.base.parameters()
        }

    def on_train_epoch_end(self, trainer, module):
        assert all(parameter.requires_grad for parameter in module.parameters())

    def on_client_end(self, trainer, module, client, update):  # before the end of the last batch replaces the model
        self._note(module)

    def on_train_batch_end(self, trainer, module, *args):
        self._note(module)

    def _note(self, module):
        if self.before is not None:
            moved = {name for name, value in module.named_parameters() if not torch.equal(value, self.before[name])}
            parts = {"H" if ".head." in name else "B" for name in moved}
            self.visits[-1] += "".join(sorted(parts))
            self.before = None


@pytest.mark.parametrize(("body_epochs", "expected"), [(1, "HHHHHHBBB"), (0, "HHHHHH")])
def test_head_epochs_come_first(body_epochs, expected, federated_trainer):
    """Three batches per epoch: two head epochs, then one body epoch or none."""
    phases, clients = Phases(), models.vectors({"a": 70, "b": 96})
    fit(federated_trainer, clients=clients, rounds=2, callbacks=[phases], body_epochs=body_epochs)
    assert phases.visits == [expected] * 4


@pytest.mark.parametrize("before", [True, False])
def test_the_order_of_the_callbacks_does_not_matter(before, plain_trainer):
    """In a plain Trainer the callback may precede the federation."""
    clients = models.as_datasets(models.vectors(SIZES))
    federation = Federation(personal=["*head*"], local_epochs=3, batch_norm="average", clients_per_round=3, seed=4)
    callbacks = [HeadThenBody(2), federation] if before else [federation, HeadThenBody(2)]
    module = models.Module(models.BaseAndHead(), models.momentum)
    plain_trainer(max_epochs=2, callbacks=callbacks).fit(module, datamodule=FederatedDataModule(clients))
    history = fedrep_reference(
        models.BaseAndHead(), is_head, models.vectors(SIZES), cross_entropy, models.momentum, 2, 1, rounds=2,
        cohort_size=3, seed=4,
    )  # fmt: skip
    assert_same(history[-1][0], module.net.state_dict())


def test_stragglers_keep_the_order(federated_trainer):
    """Stragglers without body epochs send an unchanged body and still count."""
    clients, recorder, phases = models.vectors({"a": 60, "b": 64, "c": 50, "d": 40}), Recorder(), Phases()
    schedule = Schedule(4, local_epochs=6, availability=Availability(stragglers=0.5))
    work = {
        (round, visit.client): visit.epochs
        for round in range(3)
        for visit in schedule.cohort(round, sorted(clients)).visits
    }
    assert {1, 5} & set(work.values())
    history = fedrep_reference(
        models.BaseAndHead(), is_head, clients, cross_entropy, models.sgd, 3, 3, rounds=3, cohort_size=4, seed=4,
        work=lambda round, client: work[round, client],
    )  # fmt: skip
    fit(
        federated_trainer, models.Module(models.BaseAndHead(), models.sgd), clients, rounds=3, head_epochs=3,
        body_epochs=3, availability=Availability(stragglers=0.5), seed=4, callbacks=[recorder, phases],
    )  # fmt: skip
    for (state, _), aggregate in zip(history, recorder.aggregates, strict=True):
        assert_same({f"net.{name}": value for name, value in state.items() if not is_head(name)}, aggregate)
    for visit, seen in zip(recorder.visits, phases.visits, strict=True):
        epochs = work[visit.round, visit.client]
        assert seen == "H" * (2 * min(epochs, 3)) + "B" * (2 * max(epochs - 3, 0))
        unmoved = torch.equal(visit.update["net.base.0.weight"], visit.broadcast["net.base.0.weight"])
        assert unmoved == (epochs <= 3)


def test_straggling_is_that_of_other_methods(federated_trainer):
    seen = []
    for federation in (
        Federation(local_epochs=4, availability=Availability(stragglers=0.5), clients_per_round=4, seed=9),
        Federation(FedRep("*head*", 2, 2), availability=Availability(stragglers=0.5), clients_per_round=4, seed=9),
        Federation(
            FedPer("*head*"), local_epochs=4, availability=Availability(stragglers=0.5), clients_per_round=4, seed=9
        ),
    ):
        recorder = Recorder()
        trainer = federated_trainer(max_rounds=1, federation=federation, callbacks=[recorder])
        trainer.fit(models.Module(models.BaseAndHead()), models.as_datasets(models.vectors(SIZES)))
        seen.append([(visit.round, visit.client, len(visit.batches)) for visit in recorder.visits])
    assert seen[0] == seen[1] == seen[2]


def test_frozen_parameters_stay_frozen(federated_trainer):
    """Frozen parameters stay frozen; parameters frozen during one phase become trainable again."""
    module = models.Module(models.BaseAndHead(), models.sgd)
    module.net.base[0].bias.requires_grad_(False)
    bias = module.net.base[0].bias.clone()
    fit(federated_trainer, module, rounds=1, frozen=["net.base.1.*"])
    assert torch.equal(module.net.base[0].bias, bias)
    assert {name for name, value in module.named_parameters() if not value.requires_grad} == {"net.base.0.bias"}


def test_gradients_come_back_however_a_fit_ends(federated_trainer):
    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 3:
                raise KeyError("broken")

    class Stop(FederatedCallback):
        def on_train_batch_end(self, trainer, module, *args):
            trainer.should_stop = True

    module = models.Module(models.BaseAndHead(), models.momentum)
    with pytest.raises(KeyError, match="broken"):
        fit(federated_trainer, module, callbacks=[Break()])
    assert all(parameter.requires_grad for parameter in module.parameters())
    fit(federated_trainer, module, callbacks=[Stop()])
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_client_whose_data_break_does_not_disturb_the_next(federated_trainer):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            raise OSError("lost")

    class Untouched(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            pass

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            heads.append(module.net.head.weight.requires_grad)

    heads = []
    clients = {"a": Broken(), "b": TensorDataset(*models.vectors({"b": 32})["b"])}
    trainer = federated_trainer(max_rounds=1, method=FedRep("*head*", 2, 1), callbacks=[Untouched()])
    trainer.fit(models.Module(models.BaseAndHead()), clients)
    assert heads == [True, True, False]
    assert set(trainer.federation.server.report.failed) == {"a"}


class Manual(models.Module):
    """Manual optimization with zero gradients instead of `None`."""

    def __init__(self):
        super().__init__(models.BaseAndHead(), models.momentum)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.loss(self(batch[0]), batch[1]))
        optimizer.step()


def test_manual_optimization(federated_trainer):
    phases = Phases()
    _, module = fit(federated_trainer, Manual(), models.vectors({"a": 64}), rounds=1, callbacks=[phases])
    assert phases.visits[0].startswith("H")
    history = fedrep_reference(
        models.BaseAndHead(), is_head, models.vectors({"a": 64}), cross_entropy, models.momentum, 2, 1, rounds=1,
        cohort_size=1, seed=0,
    )  # fmt: skip
    assert_same(history[-1][0], module.net.state_dict())


def test_resuming(federated_trainer, tmp_path):

    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 5:
                raise KeyError("broken")

    def run(logger, *callbacks, **options):
        module = models.Module(models.BaseAndHead(), models.momentum)
        trainer = federated_trainer(
            max_rounds=3, method=FedRep("*head*", 2, 1), clients_per_round=3, logger=logger,
            availability=Availability(stragglers=0.4),
            callbacks=[SavesOnException(broken), *callbacks],
        )  # fmt: skip
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)), **options)
        return module, {client: trainer.federation.store.get(client) or {} for client in SIZES}

    broken = tmp_path / "broken.ckpt"
    whole, parts = MemoryLogger(), [MemoryLogger(), MemoryLogger()]
    expected, heads = run(whole)
    with pytest.raises(KeyError, match="broken"):
        run(parts[0], Break())
    torch.load(broken, weights_only=True)  # only tensors and primitives
    module, resumed = run(parts[1], ckpt_path=broken)
    assert_same(state_of(expected), state_of(module))
    for client, head in heads.items():
        assert_same(head, resumed[client])
    for name in ("train_loss", "fed/update_norm", "fed/stragglers"):
        both = dict(parts[0].curve(name)) | dict(parts[1].curve(name))
        assert sorted(both.items()) == whole.curve(name)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the second fit saves no checkpoints
def test_the_last_head_epochs_are_one_more_round(federated_trainer, tmp_path):
    """The recipe in the docstring: train every head on the final body, without changing the body."""
    clients = models.as_datasets(models.vectors(SIZES))
    saver = ModelCheckpoint(tmp_path, save_last=True)
    first = federated_trainer(
        max_rounds=2,
        method=FedRep("*head*", 2, 1),
        clients_per_round=2,
        callbacks=[saver],
        enable_checkpointing=True,
    )
    module = models.Module(models.BaseAndHead(), models.momentum)
    first.fit(module, clients)
    body = {name: value for name, value in state_of(module).items() if "running" not in name and "batches" not in name}
    heads = {client: first.federation.store.get(client) for client in SIZES}
    recorder = Recorder()
    last = federated_trainer(max_rounds=3, method=FedRep("*head*", head_epochs=2, body_epochs=0), callbacks=[recorder])
    last.fit(module, clients, ckpt_path=saver.last_model_path)
    assert {visit.client for visit in recorder.visits} == set(SIZES)
    after = state_of(module)
    assert_same(body, {name: after[name] for name in body})
    for visit in recorder.visits:
        kept = last.federation.store.get(visit.client)
        assert not torch.equal(kept["net.head.weight"], visit.start["net.head.weight"])
        if heads[visit.client] is not None:
            assert torch.equal(visit.start["net.head.weight"], heads[visit.client]["net.head.weight"])


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HeadThenBody(0), ValueError, "`head_epochs` to be at least 1, but got 0"),
        (lambda: FedRep("*head*", 0), ValueError, "`head_epochs` to be at least 1, but got 0"),
        (lambda: FedRep("*head*", 1, -1), ValueError, "`body_epochs` to be at least 0, but got -1"),
        (
            lambda: FedRep(head_epochs=2, body_epochs=2, local_epochs=3),
            ValueError,
            "up to `local_epochs`, 3, but got 2",
        ),
        (lambda: FedRep(local_epochs=1), ValueError, "up to `local_epochs`, 1, but got 0 and 1"),
        (
            lambda: Federation("fedrep", local_epochs=3),
            ValueError,
            "no `local_epochs` for `FedRep`, which sets",
        ),
        (
            lambda: Federation("fedrep", local_steps=3),
            ValueError,
            "no `local_steps` for `FedRep`, which sets",
        ),
        (
            lambda: Federation("fedrep", personal=["x"]),
            ValueError,
            "no `personal` for `FedRep`, which sets",
        ),
        (
            lambda: Federation("fedper", personal=["x"]),
            ValueError,
            "no `personal` for `FedPer`, which sets",
        ),
    ],
)
def test_options_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_epochs": 1, "personal": ["*head*"]}, "got local_epochs=1 and local_steps=None"),
        ({"local_steps": 9, "personal": ["*head*"]}, "got local_epochs=1 and local_steps=9"),
        ({"local_epochs": 3}, "but got 0 personal and 6 shared"),
        ({"local_epochs": 3, "personal": ["*"]}, "but got 6 personal and 0 shared"),
    ],
)
def test_federations_that_it_cannot_work_in(options, message, federated_trainer):
    trainer = federated_trainer(max_rounds=1, callbacks=[HeadThenBody(2)], **options)
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(models.Module(models.BaseAndHead()), models.as_datasets(models.vectors(SIZES)))


# --- Automatic head ---------------------------------------------------------------------------------------------------


class Wrapped(L.LightningModule):
    """A model inside a module, next to other parts with parameters."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


HEADS = {
    "mlp": (lambda: ClassificationTask("mlp", num_classes=4, input_size=8), {"model.classifier.0"}),
    "mcmahan_cnn": (lambda: ClassificationTask("mcmahan_cnn", num_classes=4), {"model.classifier.3"}),
    "vgg9": (lambda: ClassificationTask("vgg9", num_classes=4, in_channels=3, input_size=32), {"model.classifier.7"}),
    "timm resnet": (lambda: Wrapped(timm.create_model("resnet18", num_classes=4)), {"model.fc"}),
    "timm mobilenet": (lambda: Wrapped(timm.create_model("mobilenetv3_small_050")), {"model.classifier"}),
    "timm vit": (lambda: Wrapped(timm.create_model("vit_tiny_patch16_224", num_classes=4)), {"model.head"}),
    "convolution": (
        lambda: Wrapped(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))),
        {"model.2"},
    ),
    "deeplab": (lambda: Wrapped(models.deeplab()), {"model.segmentation_head.0"}),
    "unet": (lambda: Wrapped(models.unet()), {"model.segmentation_head.0"}),
    "unet with a classifier": (
        lambda: Wrapped(smp.Unet("resnet18", encoder_weights=None, classes=3, aux_params={"classes": 2})),
        {"model.segmentation_head.0"},
    ),
    "segmentation task": (
        lambda: SegmentationTask("Unet", num_classes=3, encoder_name="resnet18", encoder_weights=None),
        {"model.segmentation_head.0"},
    ),
}
SAME_HEADS = {"vgg9", "timm resnet", "unet", "segmentation task"}  # found by the same rule for both methods


@pytest.mark.parametrize(
    ("name", "method"),
    quick(
        itertools.product(HEADS, [FedPer, FedRep]),
        [("mlp", FedRep), *((name, FedPer) for name in HEADS if name not in SAME_HEADS)],
    ),
)
def test_automatic_heads(name, method):
    """The layer that computes the logits, with weight and bias."""
    from lightning_fed.model.entries import entry_policies

    make, expected = HEADS[name]
    policies = entry_policies(make(), Federation(method()).options.personal)
    chosen = {entry for entry, policy in policies.items() if policy == "personal"}
    assert {entry.rpartition(".")[0] for entry in chosen} == expected
    assert {entry.rpartition(".")[2] for entry in chosen} <= {"weight", "bias"}


def test_the_chosen_head_is_logged(federated_trainer, caplog):
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=1, method=FedPer(), clients_per_round=2, callbacks=[recorder])
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        trainer.fit(models.Module(models.BaseAndHead()), models.as_datasets(models.vectors(SIZES)))
    assert "The personal head of each client is 'net.head'" in caplog.text
    assert all(not any("head" in name for name in visit.update) for visit in recorder.visits)
    assert all(any("base" in name for name in visit.update) for visit in recorder.visits)


def test_models_without_a_head(federated_trainer):
    trainer = federated_trainer(max_rounds=1, method=FedPer())
    with pytest.raises(MisconfigurationException, match=r"but no layer does: name the entries of the head"):
        trainer.fit(models.Quadratic(6), {"a": TensorDataset(torch.zeros(4, 6))})


def test_heads_that_are_named(federated_trainer):
    """By a pattern, a type, a list and a function."""
    for head in ("net.head.*", nn.BatchNorm1d, ["net.head.weight", "net.head.bias"], lambda module: ["net.head.bias"]):
        trainer = federated_trainer(max_rounds=1, method=FedPer(head))
        trainer.fit(models.Module(models.BaseAndHead()), models.as_datasets(models.vectors({"a": 9, "b": 8})))
        kept = set(trainer.federation.store.get("a"))
        if head is nn.BatchNorm1d:
            assert {name.rpartition(".")[0] for name in kept} == {"net.base.1"}
        else:
            assert kept == ({"net.head.bias"} if callable(head) else {"net.head.weight", "net.head.bias"})


def test_client_evaluation_uses_each_clients_head(federated_trainer):
    clients = models.as_datasets(models.vectors(SIZES))
    module = models.Module(models.BaseAndHead(), models.momentum)
    trainer = federated_trainer(max_rounds=2, method=FedRep(head_epochs=2, body_epochs=1))
    trainer.fit(module, clients, clients)
    for name, (inputs, targets) in models.vectors(SIZES).items():
        net = models.BaseAndHead().eval()
        state = trainer.federation.client_state(name)
        net.load_state_dict({entry.removeprefix("net."): value for entry, value in state.items()})
        accuracy = (net(inputs).argmax(1) == targets).float().mean().item()
        assert trainer.callback_metrics[f"client/{name}/val_acc"].item() == pytest.approx(accuracy)
