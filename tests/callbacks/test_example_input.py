"""Module inputs found in a training batch."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedFusion, FedMA
from lightning_fed.algorithms.fedma import callback
from lightning_fed.callbacks import LayerwiseTraining
from lightning_fed.callbacks.example_input import forward_inputs, training_batch
from tests import models
from tests.breadth import quick
from tests.projects.scripts.graphs import GraphClassifier, Loader, Rings

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

TOKENS, MASK, LABELS = torch.arange(20).reshape(5, 4) % 7, torch.ones(5, 4), torch.arange(5) % 3
BATCH = {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS}


class ByName(nn.Module):
    def forward(self, **inputs): ...


class Named(nn.Module):
    def forward(self, input_ids, attention_mask=None): ...


class WithLabels(nn.Module):
    def forward(self, *, input_ids, labels): ...


class Plain(nn.Module):
    def forward(self, x): ...


class Graph:
    pass


def keys_and_lengths(example):
    return {name: len(value) for name, value in example.items()}


@pytest.mark.parametrize(
    ("module", "batch", "inputs", "expected"),
    [
        (ByName, BATCH, None, {"input_ids": 2, "attention_mask": 2}),
        (Named, BATCH, None, {"input_ids": 2, "attention_mask": 2}),
        (WithLabels, BATCH, None, {"input_ids": 2, "labels": 2}),
        (ByName, BATCH, "input_ids", {"input_ids": 2}),
    ],
)
def test_inputs_by_name(module, batch, inputs, expected):
    assert keys_and_lengths(forward_inputs(module(), batch, inputs)) == expected


def test_inputs_by_position():
    graph, series = Graph(), {"encoder": torch.zeros(3)}
    assert torch.equal(forward_inputs(Plain(), (TOKENS, LABELS)), TOKENS[:2])
    assert torch.equal(forward_inputs(Plain(), {"image": MASK, "x": TOKENS}), MASK[:2])
    assert torch.equal(forward_inputs(Plain(), {"y": LABELS, "tokens": TOKENS}, "tokens"), TOKENS[:2])
    assert forward_inputs(Plain(), graph) == (graph,)
    assert forward_inputs(Plain(), (series, (LABELS, None))) == (series,)


def test_no_inputs():
    with pytest.raises(ValueError, match="Expected a batch with inputs, but got NoneType: select the inputs"):
        forward_inputs(Plain(), {"tokens": TOKENS})


class Tokens(L.LightningModule):
    """Called with keyword arguments, like models in transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden, self.head = nn.Embedding(7, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, **inputs):
        features = self.embedding(inputs["input_ids"]) * inputs["attention_mask"][..., None]
        return self.head(torch.relu(self.hidden(features.mean(1))))

    def training_step(self, batch, batch_idx):
        labels = batch.pop("labels")
        return F.cross_entropy(self(**batch), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def clients():
    rows = [{name: values[index] for name, values in BATCH.items()} for index in range(5)]
    return FederatedDataModule({"a": DataLoader(rows, 3), "b": DataLoader(rows, 2)})


@pytest.mark.parametrize("either_trainer", quick(["trainer", "callback"], ["callback"]), indirect=True)
def test_fedma_follows_a_module_that_is_called_by_name(either_trainer, monkeypatch):
    """Neurons equal the neurons for an explicit example; the log announces the rounds."""
    found, said = [], []
    monkeypatch.setattr(callback, "rank_zero_info", said.append)
    for example in (None, {"input_ids": TOKENS, "attention_mask": MASK}):
        followed = LayerwiseTraining(example)
        either_trainer(max_rounds=3, method=FedMA(), callbacks=[followed]).fit(Tokens(), datamodule=clients())
        found.append({group.name: group.size for group in followed.groups})
    assert found[0] == found[1] == {"embedding": 6, "hidden": 8}
    assert "2 groups with 14 neurons in 3 stages, one round per stage, a new model every 3 rounds" in said[0]


def test_fedfusion_asks_a_training_batch(either_trainer):
    """The module stores no example, and the random generators do not change."""
    module, loader = GraphClassifier(), Loader(Rings(24), batch_size=8)
    trainer = either_trainer(max_rounds=1, method=FedFusion("multi"))
    trainer.fit(module, datamodule=FederatedDataModule({"a": loader, "b": loader}))
    assert module.example_input_array is None
    (layer,) = [layer for layer in module.modules() if type(layer).__name__ == "FusionLayer"]
    assert [parameter.numel() for parameter in layer.parameters()] == [16]


def test_a_first_batch_draws_nothing(federated_trainer):
    states = []

    class Asks(L.Callback):
        def on_fit_start(self, trainer, module):
            states.append(torch.get_rng_state())
            states.append(training_batch(trainer.federation))
            states.append(torch.get_rng_state())

    trainer = federated_trainer(max_rounds=1, callbacks=[Asks()])
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors({"a": 40})))
    assert len(states[1][0]) == 32
    assert torch.equal(states[0], states[2])
