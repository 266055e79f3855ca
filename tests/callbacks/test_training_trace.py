"""Methods find the trained network, in modules with a teacher and in modules without ``forward``."""

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from lightning_fed.algorithms import FedFusion, FedMA
from lightning_fed.callbacks import ClassPrototypes, LayerwiseTraining, SpreadOut
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.data import IID
from lightning_fed.errors import OptionError
from lightning_fed.modules import find_classifier
from tests import models
from tests.breadth import quick
from tests.recorders import assert_same, state_of


def data():
    return models.pooled(models.vectors({"a": 12, "b": 12}), batch_size=4)[0]


class NoForward(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = models.mlp()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithForward(NoForward):
    def forward(self, inputs):
        return self.net(inputs)


class Distilled(L.LightningModule):
    """A student, then a teacher; ``kind`` selects why the teacher does not train."""

    def __init__(self, kind):
        super().__init__()
        self.student = models.mlp()
        self.teacher = models.mlp()
        self.teacher.requires_grad_(kind != "frozen")
        self.kind = kind

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        with torch.set_grad_enabled(self.kind != "no_grad"):
            taught = self.teacher(inputs)
        outputs = self.student(inputs)
        taught = taught if self.kind == "not optimized" else taught.detach()
        return F.cross_entropy(outputs, targets) + F.mse_loss(outputs, taught)

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


class FixedHead(NoForward):
    """Only the body trains, as in FedBABU."""

    def __init__(self):
        super().__init__()
        self.net, self.head = models.mlp(), nn.Linear(models.CLASSES, 4).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.net(batch[0])), batch[1])


KINDS = ["frozen", "no_grad", "detached", "not optimized"]


@pytest.mark.parametrize("kind", quick(KINDS, ["detached", "not optimized"]))
def test_prototypes_are_those_of_the_student(federated_trainer, kind):
    prototypes = ClassPrototypes()
    trainer = federated_trainer(max_rounds=1, partition=IID(2), callbacks=[prototypes])
    trainer.fit(Distilled(kind), data())
    assert prototypes.state_dict()["layer"] == "the input of 'student.2'"


@pytest.mark.parametrize("kind", KINDS)
def test_the_student_is_fused(federated_trainer, kind):
    module = Distilled(kind)
    trainer = federated_trainer(max_rounds=1, partition=IID(2), method=FedFusion("multi"))
    trainer.fit(module, data())
    assert trainer.federation.method.callbacks[0].fusion.network is module.student


@pytest.mark.parametrize("kind", quick(KINDS, ["frozen", "no_grad"]))
def test_the_students_class_vectors_are_spread_out(federated_trainer, kind):
    module = Distilled(kind)
    teacher = state_of(module.teacher)
    spread = SpreadOut(strength=10.0, lr=1.0)
    plain = Distilled(kind)
    plain.load_state_dict(module.state_dict())
    for own, callbacks in ((module, [spread]), (plain, [])):
        federated_trainer(max_rounds=1, partition=IID(2), callbacks=callbacks, seed=0).fit(own, data())
    assert_same(state_of(module.teacher), teacher)
    assert not torch.equal(module.student[2].weight, plain.student[2].weight)


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_a_head_that_trains_is_personal(federated_trainer, method):
    trainer = federated_trainer(max_rounds=1, partition=IID(2), method=method)
    trainer.fit(Distilled("frozen"), data())
    personal = [name for name, policy in find_federation(trainer).policies.items() if policy == "personal"]
    assert personal == ["student.2.weight", "student.2.bias"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_teachers_head_is_an_error(federated_trainer, kind):
    """Personal entries must be known without data, so the method does not search further."""
    trainer = federated_trainer(max_rounds=1, partition=IID(2), method="fedper")
    with pytest.raises(OptionError, match=r"'teacher.2', is not the layer whose .* head='student.2.\*'"):
        trainer.fit(Distilled(kind), data())


def test_a_fused_teacher_is_an_error(federated_trainer):
    """Only the optimizers reveal an untrained teacher, and are created after the fusion."""
    trainer = federated_trainer(max_rounds=1, partition=IID(2), method=FedFusion("multi", at="teacher.1"))
    with pytest.raises(MisconfigurationException, match=r"'teacher.1', but no optimizer has a parameter of these"):
        trainer.fit(Distilled("not optimized"), data())


def test_a_fixed_head_is_the_classifier(federated_trainer):
    prototypes = ClassPrototypes()
    federated_trainer(max_rounds=1, partition=IID(2), callbacks=[prototypes]).fit(FixedHead(), data())
    assert (prototypes.state_dict()["layer"], prototypes.classes_found) == ("the input of 'head'", 4)


def test_a_head_with_adapters_is_the_classifier():
    """The head has a frozen weight, after a linear adapter."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    model[1].requires_grad_(False)
    assert find_classifier(nn.ModuleDict({"model": model})) == "model.1"


@pytest.mark.parametrize("method", [FedMA, lambda: FedFusion("multi")])
def test_without_forward_as_with_it(federated_trainer, method):
    states = []
    for module in (NoForward(), WithForward()):
        federated_trainer(max_rounds=2, partition=IID(2), method=method(), seed=0).fit(module, data())
        states.append(state_of(module))
        assert "forward" not in vars(module)
    assert_same(*states)


class TwoNetworks(NoForward):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Sequential(nn.Linear(models.CLASSES, 7), nn.Tanh(), nn.Linear(7, 2))
        self.accuracy = torchmetrics.Accuracy("binary")
        self.scores = torchmetrics.MetricCollection([torchmetrics.Accuracy("multiclass", num_classes=2)])

    def training_step(self, batch, batch_idx):
        scores = self.head(self.net(batch[0]).relu())
        self.log("train_acc", self.accuracy(scores.argmax(1), batch[1] % 2))
        self.log_dict(self.scores(scores, batch[1] % 2))
        return F.cross_entropy(scores, batch[1] % 2)


class TwoWithForward(TwoNetworks):
    def forward(self, inputs):
        return self.head(self.net(inputs).relu())


def test_several_networks_without_forward_as_with_it(federated_trainer):
    """Groups of neurons are equal, including layers in both networks."""
    found = []
    for module in (TwoNetworks(), TwoWithForward()):
        layers = LayerwiseTraining(target=lambda batch: batch[1] % 2)
        trainer = federated_trainer(max_rounds=4, partition=IID(2), method=FedMA(), seed=0, callbacks=[layers])
        trainer.fit(module, data())
        found.append((layers.groups.sizes, state_of(module)))
        assert "forward" not in vars(module)
    assert found[0][0] == found[1][0] == {"net.0": 8, "net.2": models.CLASSES, "head.0": 7}
    assert_same(found[0][1], found[1][1])


class NoNetwork(NoForward):
    def training_step(self, batch, batch_idx):
        return self.net[0].weight.square().mean()


class OneLayer(WithForward):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, models.CLASSES)


@pytest.mark.parametrize(
    ("module", "method", "message"),
    [
        (NoNetwork, FedMA, "`training_step` calls no trained submodule: write a `forward`"),
        (OneLayer, FedMA, r"Expected permutable neurons for FedMA, but found none in OneLayer"),
    ],
)
def test_nothing_to_do_is_an_error(federated_trainer, module, method, message):
    with pytest.raises(MisconfigurationException, match=message):
        federated_trainer(max_rounds=2, partition=IID(2), method=method()).fit(module(), data())
