"""The character language model against explicit plain PyTorch."""

import copy

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.text import Perplexity

from lightning_fed.algorithms import FedMA
from lightning_fed.datasets import Shakespeare
from lightning_fed.matching import PermutationGroups, load_matched
from lightning_fed.tasks import CharLanguageTask, CharLSTM
from tests.recorders import loading
from tests.tasks.test_tasks import assert_same_weights, fit, loader, trainer


def windows(count, length=9, every_step=False, classes=80, seed=0):
    text = torch.randint(classes, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:] if every_step else text[:, -1]


class Plain(nn.Module):
    """The same network with the layers of one `nn.LSTM`."""

    def __init__(self, network):
        super().__init__()
        layers = network.lstm
        self.embedding, self.decoder = copy.deepcopy(network.embedding), copy.deepcopy(network.decoder)
        self.lstm = nn.LSTM(layers[0].input_size, layers[0].hidden_size, len(layers), batch_first=True)
        for number, layer in enumerate(layers):
            for name, value in layer.named_parameters():
                self.lstm.get_parameter(name.replace("l0", f"l{number}")).data = value.detach().clone()

    def forward(self, text):
        return self.decoder(self.lstm(self.embedding(text))[0])


@pytest.mark.parametrize("layers", [1, 3])
def test_the_network_is_one_lstm(layers):
    network = CharLSTM(20, 5, 7, layers)
    steps = CharLSTM(20, 5, 7, layers, every_step=True)
    steps.load_state_dict(network.state_dict())
    text, _ = windows(4, classes=20)
    expected = Plain(network)(text)
    torch.testing.assert_close(network(text), expected[:, -1])
    torch.testing.assert_close(steps(text), expected.transpose(1, 2))


def test_dropout_is_between_layers():
    network = CharLSTM(20, 5, 64, 2, dropout=0.5)
    text, _ = windows(2, classes=20)
    assert torch.equal(network.eval()(text), network(text))
    network.train()
    assert not torch.equal(network(text), network(text))
    single = CharLSTM(20, 5, 64, 1, dropout=0.5).train()
    assert torch.equal(single(text), single(text))


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize("as_dict", [False, True])
def test_steps_equal_plain_pytorch(every_step, as_dict):
    task = CharLanguageTask(hidden_size=6, num_layers=2, every_step=every_step, lr=0.3, momentum=0.9)
    plain = copy.deepcopy(task.model)
    batches = [windows(count, every_step=every_step, seed=count) for count in (6, 3)]
    run = fit(task, [{"text": x, "target": y} for x, y in batches] if as_dict else batches)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9), []
    for text, target in batches:
        loss = F.cross_entropy(plain(text), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same_weights(task.model, plain)
    assert run.callback_metrics["train_loss"].item() == pytest.approx((6 * losses[0] + 3 * losses[1]) / 9, rel=1e-6)
    assert set(run.callback_metrics) == {"train_loss", "val_loss", "val_acc", "val_perplexity"}


@pytest.mark.parametrize("every_step", [False, True])
def test_evaluation_is_over_all_characters(every_step):
    """Accuracy by numpy, perplexity by torchmetrics, over batches of different sizes."""
    task = CharLanguageTask(hidden_size=6, num_classes=20, every_step=every_step)
    with torch.no_grad():
        task.model.decoder.weight.mul_(9)  # gives characters different probabilities
    batches = [windows(count, every_step=every_step, classes=20, seed=count) for count in (7, 2)]
    (tested,) = trainer().test(task, loader(batches), verbose=False)
    perplexity, hits = Perplexity(), []
    with torch.no_grad():
        for text, target in batches:
            logits = task(text)
            hits += [(logits.numpy().argmax(1) == target.numpy()).reshape(-1)]
            last = (logits.transpose(1, 2), target) if every_step else (logits[:, None], target[:, None])
            perplexity.update(*last)
    assert tested["test_acc"] == pytest.approx(np.concatenate(hits).mean())
    assert tested["test_perplexity"] == pytest.approx(float(perplexity.compute()), rel=1e-6)
    assert tested["test_perplexity"] != pytest.approx(20, rel=0.01)
    losses = [F.cross_entropy(task(text), target).item() for text, target in batches]
    assert tested["test_loss"] == pytest.approx((7 * losses[0] + 2 * losses[1]) / 9, rel=1e-6)


def test_prediction_is_probabilities():
    task = CharLanguageTask(hidden_size=6)
    text, target = windows(3)
    for batch in (text, (text, target), {"text": text}):
        (predicted,) = trainer().predict(task, loader([batch]))
        torch.testing.assert_close(predicted, task(text).softmax(1))


def test_a_checkpoint_has_its_options(tmp_path):
    task = CharLanguageTask(hidden_size=6, num_layers=2, every_step=True)
    run = fit(task, [windows(4, every_step=True)])
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = CharLanguageTask.load_from_checkpoint(tmp_path / "a.ckpt", **loading(weights_only=True))
    assert_same_weights(again.model, task.model)
    text, _ = windows(2)
    assert torch.equal(again.eval()(text), task.eval()(text))
    task = CharLanguageTask(nn.Sequential(nn.Embedding(80, 5), nn.Flatten(), nn.Linear(45, 80)))
    assert "model" not in task.hparams
    assert task(text).shape == (2, 80)


def test_every_layer_can_grow():
    task = CharLanguageTask(hidden_size=6, num_layers=2)
    groups = PermutationGroups.of(task, windows(2)[0])
    assert groups.sizes == {"model.embedding": 8, "model.lstm.0": 6, "model.lstm.1": 6}
    assert all(group.is_growable for group in groups)


@pytest.mark.slow
def test_fedma_on_generated_roles(federated_trainer, tmp_path):
    """A pass has one round for the embedding, one for each layer, and one for the decoder."""
    data = Shakespeare(max_clients=2, stride=80, every_step=True, batch_size=8)
    options = {"hidden_size": 16, "num_layers": 2, "every_step": True, "lr": 1.0, "momentum": 0.9}
    task = CharLanguageTask(**options)
    seen = []

    class Scores(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics["val_perplexity"]))

    trainer = federated_trainer(max_rounds=4, local_epochs=5, method=FedMA(), callbacks=[Scores()])
    trainer.fit(task, datamodule=data)
    assert seen[:3] == [seen[0]] * 3
    assert seen[3] < 30 < seen[0]
    widths = trainer.federation.server.rule.widths
    assert widths.keys() == {"model.embedding", "model.lstm.0", "model.lstm.1"}
    assert task.model.decoder.weight.shape == (80, widths["model.lstm.1"])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = load_matched(CharLanguageTask(**options), tmp_path / "a.ckpt")
    assert_same_weights(again, task)
    text = data.val["generated/ROLE 1"].inputs[:5]
    assert torch.equal(again.eval()(text), task.eval()(text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "gru"}, r"`model` to be one of \['lstm'\], but got 'gru'"),
        ({"num_classes": 1}, "`num_classes` to be at least 2"),
        ({"hidden_size": 0}, "`hidden_size` to be at least 1"),
        ({"num_layers": 0}, "`num_layers` to be at least 1"),
        ({"embedding_dim": 0}, "`embedding_dim` to be at least 1"),
        ({"dropout": 1.0}, r"`dropout` to be in \[0, 1\), but got 1.0"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        CharLanguageTask(**arguments)
    with pytest.raises(TypeError, match="a dict with keys 'text' and 'target', but got a tuple with 3 elements"):
        CharLanguageTask(hidden_size=4).split_batch((1, 2, 3))


@pytest.mark.parametrize("every_step", [False, True])
def test_targets_of_the_other_kind_are_refused(every_step):
    task = CharLanguageTask(hidden_size=6, every_step=every_step)
    text, target = windows(3, every_step=not every_step)
    with pytest.raises(
        ValueError, match=r"Expected targets of shape \(3,.*set the same `every_step` on the task and the data"
    ):
        task.compute_loss(task(text), target)
