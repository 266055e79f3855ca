"""Clients with a few of very many classes: a round written in plain PyTorch, and identities."""

import itertools
import math

import lightning as L
import numpy as np
import pytest
import timm
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedAvg, FedMargin
from lightning_fed.callbacks import ClassPrototypes, GradientCorrection, ProximalTerm, SampledSoftmax
from lightning_fed.modules import SampledSoftmaxHead, to_group_norm
from tests import models
from tests.breadth import quick, slow
from tests.recorders import Recorder, StepCheckpoint, assert_same, bytes_of, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

CLASSES, SIZE, WIDTH = 30, 6, 4
WEIGHT = "net.1.weight"


def net(bias=False, normalize=True):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(SIZE, WIDTH), SampledSoftmaxHead(WIDTH, CLASSES, normalize=normalize, bias=bias))


def clients(sizes=(12, 20, 7, 16), seed=0):
    """About four classes per client; no client has the last five."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for number, size in enumerate(sizes):
        classes_of_client = torch.randperm(CLASSES - 5, generator=generator)[:4]
        labels = classes_of_client[torch.randint(len(classes_of_client), (size,), generator=generator)]
        data[f"c{number}"] = TensorDataset(torch.randn(size, SIZE, generator=generator), labels)
    return data


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


# --- Round in plain PyTorch -------------------------------------------------------------------------------------------


def written_loss(objective, logits, target, positives, num_classes):
    """Equations 2 and 5 to 8 by example; columns are held classes, positives first."""
    negatives = logits.shape[1] - positives
    losses = []
    for row, label in zip(logits, target.tolist(), strict=True):
        shift = math.log((num_classes - positives) / negatives) if negatives else 0.0
        corrected = [row[index] + (shift if index >= positives else 0.0) for index in range(len(row))]
        competitors = {
            "fedss": [index for index in range(len(row)) if index != label],
            "negonly": list(range(positives, len(row))),
            "posonly": [index for index in range(positives) if index != label],
        }[objective]
        losses.append(torch.log(1 + sum(torch.exp(corrected[index] - row[label]) for index in competitors)))
    return torch.stack(losses).mean()


def written_round(state, visits, objective):
    """Algorithm 1 with server momentum 0 and step 1: returns the new state."""
    total = sum(visit["size"] for visit in visits)
    new = {name: value.double().clone() for name, value in state.items()}
    for visit in visits:
        # Uses another order of the held classes than the package: the client's classes first.
        order = [*visit["own"], *[row for row in visit["rows"] if row not in visit["own"]]]
        local = {name: value.double().clone().requires_grad_() for name, value in state.items()}
        local[WEIGHT] = state[WEIGHT][order].double().requires_grad_()
        for inputs, labels in visit["batches"]:
            features = F.linear(inputs.double(), local["net.0.weight"], local["net.0.bias"])
            directions = features / features.norm(dim=1, keepdim=True)
            rows = local[WEIGHT] / local[WEIGHT].norm(dim=1, keepdim=True)
            target = torch.tensor([order.index(label) for label in labels.tolist()])
            loss = written_loss(objective, 20 * directions @ rows.T, target, len(visit["own"]), CLASSES)
            names = list(local)
            gradients = torch.autograd.grad(loss, [local[name] for name in names], allow_unused=True)
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    local[name] = (local[name] - 0.3 * gradient).detach().requires_grad_()
        for name, value in local.items():
            share = visit["size"] / total
            if name == WEIGHT:
                for index, row in enumerate(order):
                    new[name][row] += share * (value[index].detach() - state[name][row].double())
            else:
                new[name] += share * (value.detach() - state[name].double())
    return new


class Notes(FederatedCallback):
    def __init__(self, data):
        self.data, self.visits = data, []

    def on_client_start(self, trainer, module, client, broadcast):
        positives = self.data[client].tensors[1].unique().tolist()
        rows = broadcast.rows.get(WEIGHT, torch.arange(CLASSES)).tolist()
        visit = {"client": client, "own": positives, "rows": rows, "batches": [], "size": len(self.data[client])}
        self.visits.append(visit)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.visits[-1]["batches"].append([value.clone() for value in batch])


@pytest.mark.parametrize("objective", ["fedss", "negonly", "posonly"])
def test_a_round_is_the_papers(objective, federated_trainer):
    data = clients()
    module = models.Module(net(), plain_sgd)
    before, notes = state_of(module), Notes(data)
    callbacks = [SampledSoftmax(5, objective), notes]
    federated_trainer(max_rounds=1, callbacks=callbacks, local_epochs=2, seed=1).fit(
        module, FederatedDataModule(data, batch_size=8)
    )
    new = written_round(before, notes.visits, objective)
    for name, value in state_of(module).items():
        # The change exceeds 1e-2; the tolerance covers float32 versus float64 over two epochs.
        torch.testing.assert_close(value.double(), new[name], rtol=1e-4, atol=2e-5)
    for visit in notes.visits:
        assert len(visit["rows"]) == len(visit["own"]) + (0 if objective == "posonly" else 5)
    assert float((state_of(module)[WEIGHT] - before[WEIGHT]).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("optimizer", "bias"),
    [(plain_sgd, False), (plain_sgd, True), (models.adam, False), slow((models.adam, True))],
)
def test_all_classes_are_the_full_softmax(optimizer, bias, federated_trainer):
    """Bit for bit: `fedss` with all classes drawn, `full`, and a federation without a sampled head."""
    states = []
    for callbacks in ([SampledSoftmax(CLASSES)], [SampledSoftmax(3, "full")], []):
        module = models.Module(net(bias), optimizer)
        federated_trainer(max_rounds=3, clients_per_round=2, callbacks=callbacks).fit(module, clients())
        states.append(state_of(module))
    assert_same(states[0], states[2])
    assert_same(states[1], states[2])


@pytest.mark.parametrize("bias", [False, True])
def test_the_bytes_are_those_of_the_held_classes(bias, federated_trainer):
    data = clients()
    module, recorder = models.Module(net(bias), plain_sgd), Recorder()
    trainer = federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(7), recorder])
    trainer.fit(module, data)
    extractor = WIDTH * SIZE + WIDTH
    held = [len(dataset.tensors[1].unique()) + 7 for dataset in data.values()]
    for visit, count in zip(recorder.visits, held, strict=True):
        assert bytes_of(visit.broadcast) == bytes_of(visit.update) == 4 * (extractor + (WIDTH + bias) * count)
    assert trainer.callback_metrics["comm/down_bytes"] == sum(bytes_of(visit.broadcast) for visit in recorder.visits)
    asked = 8 * sum(held)  # one list for weight and bias
    assert trainer.callback_metrics["comm/up_bytes"] == trainer.callback_metrics["comm/down_bytes"] + asked
    assert trainer.callback_metrics["clients/sampled_classes"] == sum(held) / len(held)


def test_a_step_may_call_the_heads_loss(federated_trainer):

    class Own(models.Module):
        def training_step(self, batch, batch_idx):
            inputs, targets = batch
            return self.net[1].loss(self.net[0](inputs), targets)

    for objective in ("fedss", "negonly", "posonly"):
        plain, overriding = models.Module(net(), plain_sgd), Own(net(), plain_sgd)
        for module in (plain, overriding):
            federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5, objective)]).fit(module, clients())
        assert_same(state_of(overriding), state_of(plain))


class Draws(FederatedCallback):
    def __init__(self):
        self.rows = {}

    def on_client_start(self, trainer, module, client, broadcast):
        self.rows[broadcast.round, client] = tuple(broadcast.rows[WEIGHT].tolist())


def test_negatives_are_the_clients_own(federated_trainer):
    """New in every round, reproducible, and independent of other clients."""
    data, draws = clients(), Draws()
    federated_trainer(max_rounds=3, callbacks=[SampledSoftmax(6), draws], seed=4).fit(
        models.Module(net(), plain_sgd), data
    )
    again = Draws()
    few = {client: data[client] for client in ("c1", "c3")}
    federated_trainer(max_rounds=3, callbacks=[SampledSoftmax(6), again], seed=4).fit(
        models.Module(net(), models.adam), few
    )
    for (round, client), rows in again.rows.items():
        assert rows == draws.rows[round, client]
        assert list(rows) == sorted(set(rows))
        assert set(data[client].tensors[1].tolist()) < set(rows)
    assert len({draws.rows[round, "c1"] for round in range(3)}) == 3
    second = Draws()
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(6), second], seed=5).fit(
        models.Module(net(), plain_sgd), data
    )
    assert second.rows[0, "c1"] != draws.rows[0, "c1"]


def test_negatives_of_every_batch(federated_trainer):
    """Each batch uses the client's classes and as many negatives; all rows are requested at once."""
    shapes, data, draws = [], clients(), Draws()

    class Own(models.Module):
        def training_step(self, batch, batch_idx):
            logits = self(batch[0])
            if self.net[1].held is None:  # the trial step
                return F.cross_entropy(logits, batch[1])
            shapes.append(tuple(logits.shape[1:]))
            self.columns.append(tuple(self.net[1].relabel(torch.tensor([-1])).shape))
            return F.cross_entropy(logits, batch[1])

    module = Own(net(), plain_sgd)
    module.columns = []
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(3, resample="batch"), draws]).fit(
        module, FederatedDataModule(data, batch_size=4)
    )
    num_positives = {client: len(dataset.tensors[1].unique()) for client, dataset in data.items()}
    batches = {client: math.ceil(len(dataset) / 4) for client, dataset in data.items()}
    expected = [(num_positives[client] + 3,) for client in data for _ in range(batches[client])]
    assert shapes == expected
    for (_, client), rows in draws.rows.items():
        assert num_positives[client] + 3 < len(rows) <= num_positives[client] + 3 * batches[client]


def test_all_classes_in_every_batch(federated_trainer):
    one, second = models.Module(net(), plain_sgd), models.Module(net(), plain_sgd)
    federated_trainer(max_rounds=2, callbacks=[SampledSoftmax(CLASSES, resample="batch")]).fit(one, clients())
    federated_trainer(max_rounds=2).fit(second, clients())
    assert_same(state_of(one), state_of(second))


def test_a_client_with_one_class_learns_nothing_among_its_own(federated_trainer):
    data = {"only": TensorDataset(torch.randn(8, SIZE), torch.full((8,), 3))}
    module = models.Module(net(), plain_sgd)
    before = state_of(module)
    federated_trainer(max_rounds=2, callbacks=[SampledSoftmax(5, "posonly")]).fit(module, data)
    assert_same(state_of(module), before)
    federated_trainer(max_rounds=2, callbacks=[SampledSoftmax(5)]).fit(module, data)
    assert not torch.equal(module.net[1].weight[3], before[WEIGHT][3])


def test_training_does_not_notice_the_search_for_labels(federated_trainer):
    """Dropout and data order are the same for given classes and for searched classes."""
    data, asked = clients(), []

    def known(client):
        asked.append(client)
        return data[client].tensors[1].tolist()

    states = []
    for classes in (None, known, {client: known(client) for client in data}):
        torch.manual_seed(0)
        module = models.Module(nn.Sequential(nn.Dropout(0.3), *net()), plain_sgd)
        federated_trainer(max_rounds=2, callbacks=[SampledSoftmax(5, classes=classes)]).fit(module, data)
        states.append(state_of(module))
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])
    assert asked == [*data, *data]  # once for the mapping, and once in the first round


class Counting(Dataset):
    def __init__(self, dataset):
        self.dataset, self.reads = dataset, 0

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        self.reads += 1
        return self.dataset[index]


def test_labels_are_looked_for_once(federated_trainer):
    data = {client: Counting(dataset) for client, dataset in clients().items()}
    callback = SampledSoftmax(5, target=1)  # without a trial step
    federated_trainer(max_rounds=3, callbacks=[callback]).fit(models.Module(net(), plain_sgd), data)
    assert {dataset.reads / len(dataset) for dataset in data.values()} == {4.0}


class Raising(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 7:
            raise OSError("no such file")
        return torch.zeros(SIZE), 1


def test_data_that_raise_leave_the_client_out(federated_trainer):
    data = {**clients(), "bad": Raising()}
    module = models.Module(net(), plain_sgd)
    draws = Draws()
    trainer = federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5), draws])
    trainer.fit(module, FederatedDataModule(data, batch_size=2))
    assert [client for _, client in draws.rows] == list(clients())  # sent no message
    sent = [WIDTH * SIZE + WIDTH + WIDTH * len(rows) for rows in draws.rows.values()]
    assert trainer.callback_metrics["comm/down_bytes"] == 4 * sum(sent)
    assert trainer.callback_metrics["fed/failed"] == 1
    assert trainer.callback_metrics["fed/clients"] == 4
    without = models.Module(net(), plain_sgd)
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(
        without, FederatedDataModule(clients(), batch_size=2)
    )
    assert_same(state_of(module), state_of(without))


def test_a_label_that_is_not_its_own_leaves_the_client_out(federated_trainer, caplog):
    data = clients()

    def known(client):
        labels = data[client].tensors[1].unique().tolist()
        return labels[1:] if client == "c2" else labels

    module, without = models.Module(net(), plain_sgd), models.Module(net(), plain_sgd)
    trainer = federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5, classes=known)])
    trainer.fit(module, data)
    assert trainer.callback_metrics["fed/failed"] == 1
    missing = data["c2"].tensors[1].unique().tolist()[:1]
    assert "client 'c2' is excluded: the client has an unknown class" in caplog.text
    assert f"the client's classes, but got {missing}" in caplog.text
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(
        without, {client: dataset for client, dataset in data.items() if client != "c2"}
    )
    assert_same(state_of(module), state_of(without))


@pytest.mark.parametrize("labels", [[], [CLASSES], [-100, 0, CLASSES + 3]])
def test_labels_that_the_head_does_not_have(labels, federated_trainer, caplog):
    data = {**clients(), "x": TensorDataset(torch.randn(6, SIZE), torch.tensor((labels or [-100]) * 6)[:6])}
    trainer = federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)])
    trainer.fit(models.Module(net(), plain_sgd), data)
    assert trainer.callback_metrics["fed/failed"] == 1
    assert (
        "'x' is excluded: the client has no labels" if not labels else f"but the head has {CLASSES} classes"
    ) in caplog.text


def test_loaders_that_leave_examples_out(federated_trainer):
    """A pass over the loader does not show all examples, so classes must be given."""
    data = clients()
    loaders = {client: DataLoader(dataset, batch_size=5, drop_last=True) for client, dataset in data.items()}
    with pytest.raises(ValueError, match="The loader of client 'c0' may skip examples in a pass"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(models.Module(net(), plain_sgd), loaders)
    drawn = {
        client: DataLoader(dataset, sampler=WeightedRandomSampler(torch.ones(len(dataset)), 9), batch_size=4)
        for client, dataset in data.items()
    }
    classes = {client: dataset.tensors[1].tolist() for client, dataset in data.items()}
    for given in (loaders, drawn):
        trainer = federated_trainer(max_rounds=3, callbacks=[SampledSoftmax(5, classes=classes)])
        trainer.fit(models.Module(net(), plain_sgd), given)
        assert trainer.callback_metrics["fed/failed"] == 0


def test_clients_that_drop_a_last_batch_show_all_their_classes(federated_trainer):
    data = {"a": TensorDataset(torch.randn(7, SIZE), torch.arange(7))}
    callback = SampledSoftmax(3)
    trainer = federated_trainer(max_rounds=6, callbacks=[callback])
    trainer.fit(models.Module(net(), plain_sgd), FederatedDataModule(data, batch_size=3, drop_last=True))
    assert trainer.callback_metrics["clients/sampled_classes"] == 10


def test_labels_that_are_not_in_the_batch(federated_trainer):
    """A function that creates a new tensor cannot mark the labels to replace, so the fit is refused."""
    data = {
        name: TensorDataset(inputs, labels[:, None])
        for name, (inputs, labels) in ((name, dataset.tensors) for name, dataset in clients().items())
    }
    with pytest.raises(ValueError, match="Expected `target` to return a tensor from the batch"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5, target=lambda batch: batch[1].squeeze(1))]).fit(
            models.Module(net(), plain_sgd), data
        )

    class Squeezing(models.Module):
        def training_step(self, batch, batch_idx):
            return super().training_step([batch[0], batch[1].squeeze(1)], batch_idx)

    column, row = Squeezing(net(), plain_sgd), models.Module(net(), plain_sgd)
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(column, data)
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(row, clients())
    assert_same(state_of(column), state_of(row))


def test_numbers_that_are_floats_are_labels(federated_trainer):
    class Long(models.Module):
        def training_step(self, batch, batch_idx):
            assert batch[1].is_floating_point()
            return super().training_step([batch[0], batch[1].long()], batch_idx)

    floats, row = Long(net(), plain_sgd), models.Module(net(), plain_sgd)
    data = {name: TensorDataset(dataset.tensors[0], dataset.tensors[1].float()) for name, dataset in clients().items()}
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(floats, data)
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(row, clients())
    assert_same(state_of(floats), state_of(row))


@pytest.mark.parametrize("soft", [torch.full((4,), 0.5), F.one_hot(torch.tensor([1, 2, 3, 1]), CLASSES).float()])
def test_soft_labels(soft, federated_trainer):
    data = {"a": TensorDataset(torch.randn(4, SIZE), soft)}
    with pytest.raises(ValueError, match=r"Expected labels to be class numbers, but got torch\.float32 of shape"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5, target=1)]).fit(
            models.Module(net(), plain_sgd), data
        )


def test_a_weight_that_is_shared(federated_trainer):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(CLASSES, WIDTH)
            self.head = SampledSoftmaxHead(WIDTH, CLASSES)
            self.head.weight = self.words.weight

        def forward(self, inputs):
            return self.head(self.words(inputs))

    data = {"a": TensorDataset(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]))}
    with pytest.raises(MisconfigurationException, match=r"shares its weight with 'net.words'"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(models.Module(Tied(), plain_sgd), data)


def test_a_head_in_evaluation_mode(federated_trainer):
    class Frozen(models.Module):
        def on_train_epoch_start(self):
            self.net.eval()

    with pytest.raises(MisconfigurationException, match="The head is in evaluation mode while the module trains"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(Frozen(net(), plain_sgd), clients())


def test_two_of_them(federated_trainer):
    with pytest.raises(MisconfigurationException, match="Expected one `SampledSoftmax`"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5), SampledSoftmax(5)]).fit(
            models.Module(net(), plain_sgd), clients()
        )


def test_rules_that_need_whole_entries(federated_trainer):
    for options in ({"method": "feddane"}, {"callbacks": [GradientCorrection()]}):
        callbacks = [SampledSoftmax(5), *options.pop("callbacks", [])]
        with pytest.raises(MisconfigurationException, match=r"whole entries"):
            federated_trainer(max_rounds=1, callbacks=callbacks, **options).fit(
                models.Module(net(), plain_sgd), clients()
            )


def test_resuming_inside_a_round(federated_trainer, tmp_path):
    data = clients()
    options = {"max_rounds": 2, "enable_checkpointing": True}
    whole = models.Module(net(), models.adam)
    federated_trainer(callbacks=[SampledSoftmax(5)], **options).fit(whole, data)
    saving = StepCheckpoint(tmp_path, 1)
    federated_trainer(callbacks=[SampledSoftmax(5), saving], **options).fit(models.Module(net(), models.adam), data)
    paths = sorted(tmp_path.glob("*.ckpt"))
    for path in (paths[1], paths[-2]):
        assert torch.load(path, weights_only=True)["state_dict"][WEIGHT].shape == (CLASSES, WIDTH)
        resumed = models.Module(net(), models.adam)
        federated_trainer(callbacks=[SampledSoftmax(5)], **options).fit(resumed, data, ckpt_path=str(path))
        assert_same(state_of(resumed), state_of(whole))


def test_all_classes_are_validated(federated_trainer):
    shapes = []

    class Looking(models.Module):
        def validation_step(self, batch, batch_idx):
            logits = self(batch[0])
            shapes.append(tuple(logits.shape[1:]))
            cosines = F.linear(*(F.normalize(rows) for rows in (self.net[0](batch[0]), self.net[1].weight)))
            torch.testing.assert_close(logits, 20 * cosines)  # the head may multiply by the scale at another step
            super().validation_step(batch, batch_idx)

    data, module = clients(), Looking(net(), plain_sgd)
    trainer = federated_trainer(max_rounds=2, callbacks=[SampledSoftmax(5, "negonly")])
    trainer.fit(module, FederatedDataModule(data, val=data))
    trainer.validate(module, FederatedDataModule(data, val=data))
    assert set(shapes) == {(CLASSES,)}
    assert module.net[1].held is None


def test_an_exception_gives_the_head_back(federated_trainer):
    class Failing(models.Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.net[1].held is not None:
                raise RuntimeError("no more")
            return loss

    module = Failing(net(), plain_sgd)
    before = state_of(module)
    with pytest.raises(RuntimeError, match="no more"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(module, clients())
    assert module.net[1].held is None
    assert_same(state_of(module), before)


def test_with_prototypes_and_a_proximal_term(federated_trainer):
    """Prototypes use global class numbers, for any order of callbacks; together they equal the full softmax."""
    states = []
    for number, sampled in enumerate(([SampledSoftmax(CLASSES)], [SampledSoftmax(CLASSES)], [])):
        prototypes = [ClassPrototypes(layer="net.0", num_classes=CLASSES, ignore_index=None), ProximalTerm(0.1)]
        module = models.Module(net(), plain_sgd)
        trainer = federated_trainer(
            method=FedMargin(),
            max_rounds=2,
            callbacks=[*prototypes, *sampled] if number else [*sampled, *prototypes],
        )
        trainer.fit(module, clients())
        states.append(state_of(module))
    assert_same(states[0], states[2])
    assert_same(states[1], states[2])
    module = models.Module(net(), plain_sgd)
    prototypes = [ClassPrototypes(layer="net.0", num_classes=CLASSES, ignore_index=None), ProximalTerm(0.1)]
    federated_trainer(method=FedMargin(), max_rounds=2, callbacks=[*prototypes, SampledSoftmax(5)]).fit(
        module, clients()
    )
    assert not torch.equal(module.net[1].weight, states[2][WEIGHT])


@pytest.mark.parametrize("kind", ["dictionary", "function"])
def test_where_the_labels_are(kind, federated_trainer):
    """In a dictionary, or found by a function; other integer tensors do not change."""

    class Named(Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            inputs, label = self.dataset[index]
            return {"x": inputs, "label": label, "place": label}

    class Own(models.Module):
        def training_step(self, batch, batch_idx):
            assert self.net[1].held is None or not torch.equal(batch["place"], batch["label"])
            return F.cross_entropy(self(batch["x"]), batch["label"])

    target = None if kind == "dictionary" else lambda batch: batch["label"]
    module, plain = Own(net(), plain_sgd), models.Module(net(), plain_sgd)
    data = clients()
    named = {client: Named(dataset) for client, dataset in data.items()}
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5, target=target)]).fit(module, named)
    federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(plain, data)
    assert_same(state_of(module), state_of(plain))


class ThirdTensor(models.Module):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[2])


class LossOfHead(models.Module):
    def training_step(self, batch, batch_idx):
        return self.net[1].loss(self.net[0](batch[0]), batch[2])


@pytest.mark.parametrize(
    ("kind", "margin"),
    quick(itertools.product([ThirdTensor, LossOfHead], [0.0, 0.3]), [(ThirdTensor, 0.0), (LossOfHead, 0.3)]),
)
def test_labels_are_those_in_the_loss(kind, margin, federated_trainer):
    """The second tensor is a copy of the labels in the first batches, and other numbers later."""

    def trained(used, data):
        torch.manual_seed(2)
        network = nn.Sequential(nn.Linear(SIZE, WIDTH), SampledSoftmaxHead(WIDTH, CLASSES, margin=margin))
        module = used(network, plain_sgd)
        federated_trainer(max_rounds=2, callbacks=[SampledSoftmax(5)]).fit(
            module, FederatedDataModule(data, batch_size=4)
        )
        assert network[1].margin == margin
        return state_of(module)

    data = {client: dataset.tensors for client, dataset in clients().items()}
    triples = {client: TensorDataset(x, y if client == "c0" else -y - 1, y) for client, (x, y) in data.items()}
    assert_same(trained(kind, triples), trained(models.Module, clients()))


CHANGED_LABELS = {
    "shifted": (lambda z, y: F.cross_entropy(z, (y + 1) % CLASSES), r"labels in the loss .* a `target`"),
    "reversed": (lambda z, y: F.cross_entropy(z, CLASSES - 1 - y), r"labels in the loss .* a `target`"),
    "void": (
        lambda z, y: F.cross_entropy(z, y, ignore_index=11),
        r"a negative or no `ignore_index`, .*`ignore_index=11`",
    ),
    "no labels": (lambda z, y: z.square().mean(), "give `SampledSoftmax` a `target`"),
}


@pytest.mark.parametrize("name", CHANGED_LABELS)
def test_labels_that_are_not_logit_columns(name, federated_trainer):
    loss, message = CHANGED_LABELS[name]
    with pytest.raises(MisconfigurationException, match=message):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(
            models.Module(net(), plain_sgd, loss=loss), clients()
        )


def test_clients_with_loaders(federated_trainer):
    loaders = {client: DataLoader(dataset, batch_size=4) for client, dataset in clients().items()}
    module = models.Module(net(), plain_sgd)
    trainer = federated_trainer(max_rounds=2, callbacks=[SampledSoftmax(5)])
    trainer.fit(module, loaders)
    assert trainer.callback_metrics["fed/clients"] == 4


def test_a_mobile_net_of_timm(federated_trainer):
    """The paper's network with GroupNorm: the head is the last layer."""
    torch.manual_seed(0)
    body = to_group_norm(timm.create_model("mobilenetv3_small_050", num_classes=0, in_chans=1))
    network = nn.Sequential(body, SampledSoftmaxHead(body.num_features, CLASSES))
    with torch.no_grad():
        network[1] = SampledSoftmaxHead(body(torch.zeros(2, 1, 32, 32)).shape[1], CLASSES)
    generator = torch.Generator().manual_seed(0)
    data = {
        name: TensorDataset(torch.randn(8, 1, 32, 32, generator=generator), torch.tensor([index, index + 9] * 4))
        for index, name in enumerate("ab")
    }
    module = models.Module(network, plain_sgd)
    before = state_of(module)
    trainer = federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(4)])
    trainer.fit(module, data)
    moved = (module.net[1].weight != before[WEIGHT]).any(1)
    assert trainer.callback_metrics["clients/sampled_classes"] == 6
    assert 4 <= int(moved.sum()) <= 12
    assert all(value.isfinite().all() for value in state_of(module).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_negatives": -1}, "Expected `num_negatives` to be at least 0"),
        ({"num_negatives": 2.5}, "Expected `num_negatives` to be a whole number"),
        ({"num_negatives": 1, "objective": "both"}, "Expected `objective` to be one of"),
        ({"num_negatives": 1, "resample": "epoch"}, "Expected `resample` to be one of"),
    ],
)
def test_options_that_cannot_be_right(arguments, message):
    with pytest.raises(ValueError, match=message):
        SampledSoftmax(**arguments)


def test_a_head_that_is_none(federated_trainer):
    plain = models.Module(nn.Linear(SIZE, CLASSES), plain_sgd)
    with pytest.raises(ValueError, match="to have one SampledSoftmaxHead, but got none"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5)]).fit(plain, clients())
    with pytest.raises(ValueError, match=r"Expected `head` to name a SampledSoftmaxHead, but 'net.0' is a Linear"):
        federated_trainer(max_rounds=1, callbacks=[SampledSoftmax(5, head="net.0")]).fit(
            models.Module(net(), plain_sgd), clients()
        )


def test_a_trainer_without_federation():
    data = DataLoader(TensorDataset(torch.randn(8, SIZE), torch.randint(CLASSES, (8,))))
    with pytest.raises(MisconfigurationException, match="with a `Federation` callback, but got none"):
        L.Trainer(max_epochs=1, callbacks=[SampledSoftmax(5)], logger=False, enable_checkpointing=False).fit(
            models.Module(net(), plain_sgd), data
        )


def test_rows_that_few_hold(federated_trainer):
    """The rule's `row_weighting` decides how far rare rows move."""
    moved = {}
    for weighting in ("global", "per_row"):
        module = models.Module(net(), plain_sgd)
        before = state_of(module)
        federated_trainer(method=FedAvg(weighting), max_rounds=1, callbacks=[SampledSoftmax(2)]).fit(module, clients())
        moved[weighting] = (module.net[1].weight - before[WEIGHT]).norm(dim=1).detach().numpy()
    held = moved["global"] > 0
    assert (moved["per_row"][held] >= moved["global"][held] * (1 - 1e-5)).all()
    assert np.median(moved["per_row"][held] / moved["global"][held]) > 1.5
