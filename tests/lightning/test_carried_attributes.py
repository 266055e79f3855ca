"""Attributes that pass from visit to visit beside the messages are named, wherever the visits are."""

import random
from collections import deque

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.utils import prune

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.algorithms import FedFusion, FedMA
from lightning_fed.data.dataset_clients import count_batches
from lightning_fed.lightning.carried_attributes import changed_attributes, note_attributes, warn_of_carried
from tests import models, warm_process
from tests.backends.flower.halves import on_flower

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Center:
    """A running centre in an object of the user's."""

    def __init__(self):
        self.value = torch.zeros(3)


class Writing(models.Module):
    """Calls a function with itself and the outputs in every step."""

    def __init__(self, write, **attributes):
        super().__init__(models.mlp(), models.momentum)
        self.write = write
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.write(self, outputs.detach())
        return nn.functional.cross_entropy(outputs, batch[1])


def replace_tensor(module, outputs):
    module.kept = 0.9 * module.kept + 0.1 * outputs.mean(0)


def write_into_tensor(module, outputs):
    module.kept.data.mul_(0.9)
    module.kept.data.add_(outputs.mean(0))


def count(module, outputs):
    module.kept += len(outputs)


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
    module.net[0].kept = float(outputs.mean())


def create(module, outputs):
    module.kept = outputs


KEPT = {
    "a tensor that is replaced": (replace_tensor, lambda: torch.zeros(3)),
    "a tensor that is written into": (write_into_tensor, lambda: torch.zeros(3)),
    "a counter": (count, lambda: 0),
    "a list": (append, list),
    "a queue": (append, lambda: deque(maxlen=2)),
    "a nested mapping": (write_into_mapping, lambda: {"center": {"mean": torch.zeros(3)}}),
    "an object": (write_into_object, Center),
    "an array": (write_into_array, lambda: np.zeros(3, dtype=np.float32)),
    "a module in a list": (write_into_hidden_module, lambda: [nn.Linear(2, 3)]),
    "a generator": (draw, lambda: torch.Generator().manual_seed(0)),
    "an attribute of a submodule": (write_into_submodule, None),
    "a new attribute": (create, None),
}


def carried(caplog):
    """The messages that name attributes."""
    return [record.getMessage() for record in caplog.records if record.name.endswith(".carried_attributes")]


@pytest.mark.parametrize("kind", KEPT)
def test_what_passes_from_client_to_client_is_named_once(kind, either_trainer, caplog):
    write, make = KEPT[kind]
    module = Writing(write, **({} if make is None else {"kept": make()}))
    either_trainer(3, seed=0).fit(module, datamodule=FederatedDataModule(models.as_datasets(models.vectors())))
    (message,) = carried(caplog)
    number = 2 if write is append else 1  # what is empty when a round begins may be emptied each time
    assert message.startswith(f"Round {number}: these attributes of Writing changed in the visits: `")
    assert ("`net.0.kept`" if write is write_into_submodule else "`kept`") in message
    assert "`register_buffer(name, tensor)`" in message


def test_what_changes_only_later_is_named_then(federated_trainer, caplog):
    def write(module, outputs):
        if module.current_epoch == 2:
            module.late = outputs

    federated_trainer(max_rounds=4).fit(Writing(write, late=None), models.as_datasets(models.vectors()))
    (message,) = carried(caplog)
    assert message.startswith("Round 3:")


class Plain(models.Module):
    """Has all that may change in a visit and carries nothing to the next."""

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
        self.last_outputs = outputs  # with its history: of no use after the step
        return nn.functional.cross_entropy(outputs, batch[1])


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


@pytest.mark.parametrize("net", [models.cnn, models.norm_mlp], ids=["convolutions", "BatchNorm"])
def test_widths_that_the_rule_changes_are_not_named(net, federated_trainer, caplog):
    """They follow the tensors, which the messages hold."""
    module, rule = models.Module(net(), models.momentum), FedMA(score="published", gamma=7.0, initial="independent")
    data = models.images() if net is models.cnn else models.vectors()
    federated_trainer(max_rounds=3, method=rule).fit(module, models.as_datasets(data))
    assert len(next(module.parameters())) > len(next(net().parameters()))
    assert not carried(caplog)


def test_outputs_are_collected_over_the_epoch(either_trainer, caplog):
    """The idiom of Lightning 2 works: what the visits of a round have collected is there at its end."""

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
    """A visit is a fit of its own there, of a module that stays."""

    def write(module, outputs):
        module.kept += 1

    on_flower(tmp_path, lambda: Writing(write, kept=0), models.vectors({"ann": 9, "bob": 20}), Federation, rounds=2)
    messages = carried(caplog)
    assert len(messages) == 2  # one for each of the two nodes
    assert all("`kept`" in message for message in messages)


@pytest.mark.slow
def test_each_of_several_processes_names_what_its_visits_leave(tmp_path):
    warm_process.run("tests.lightning.carried_script", tmp_path)
    for rank in range(2):
        (message,) = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert "these attributes of Counting changed in the visits: `count`." in message


def test_generators_of_all_kinds_are_noted():
    module = L.LightningModule()
    module.generators = [random.Random(0), np.random.default_rng(0), torch.Generator().manual_seed(0)]
    for generator in module.generators:
        before = note_attributes(module)
        assert not changed_attributes(before, note_attributes(module))
        generator.random() if not isinstance(generator, torch.Generator) else torch.rand(1, generator=generator)
        assert changed_attributes(before, note_attributes(module)) == ["generators"]


def test_a_pruned_recurrent_layer_ends_no_fit(caplog):
    """Its weights are no parameters any more, from which its widths could be told."""
    module = L.LightningModule()
    module.recurrent = nn.LSTM(2, 3)
    prune.l1_unstructured(module.recurrent, "weight_hh_l0", amount=0.2)
    before = note_attributes(module)
    module.recurrent.seen = 1
    warn_of_carried(module, before, 0)
    assert "`recurrent.seen`" in carried(caplog)[0]


def test_what_cannot_be_read_is_passed_over():
    """Attributes without values, or that hold themselves, neither end the fit nor are named."""
    module = L.LightningModule()
    module.lazy = [nn.LazyLinear(2)]
    module.meta = torch.zeros(3, device="meta")
    module.cycle = []
    module.cycle.append(module.cycle)
    module.seen = 0
    before = note_attributes(module)
    assert not changed_attributes(before, note_attributes(module))
    module.seen = 1
    assert changed_attributes(before, note_attributes(module)) == ["seen"]
