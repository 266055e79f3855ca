"""The passes that measure prototypes: early stop, skipped batches, and several processes."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import ClassPrototypes
from tests import models, warm_process
from tests.algorithms.fedmargin.test_class_prototypes import (
    TWO,
    assert_close,
    loaded,
    margin_of,
    measured,
    sent,
    unpacked,
)
from tests.recorders import MemoryLogger
from tests.references_margin import prototypes_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


# --- End of a step ----------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.calls = layer, {True: 0, False: 0}

    def forward(self, inputs):
        calls[self.training] += 1
        return self.layer(inputs)


calls = {True: 0, False: 0}


@pytest.mark.parametrize("manual", [False, True])
def test_what_comes_after_the_features_is_not_run(manual, federated_trainer):
    """Later layers, the loss and the error handling of the step do not run."""

    class Careful(models.ManualModule if manual else models.Module):
        def careful(self, step, batch):
            try:
                return step(batch, 0)
            except Exception:
                seen.append("caught")
                raise
            finally:
                seen.append(self.training)

        def training_step(self, batch, batch_idx):
            return self.careful(super().training_step, batch)

        def validation_step(self, batch, batch_idx):
            return self.careful(super().validation_step, batch)

    def net():
        base = models.mlp()
        return nn.Sequential(base[0], base[1], Counted(nn.Identity()), base[2])

    clients, seen = models.vectors(TWO), []
    calls.update({True: 0, False: 0})
    prototypes = ClassPrototypes(layer="net.1", num_classes=3)
    visits = sent(federated_trainer, prototypes, Careful(net()), models.as_datasets(clients))
    assert calls[False] == 0
    assert calls[True] > 0
    assert seen.count(False) == 2 * 9  # batches of 8, before and after
    assert "caught" not in seen
    for client, visit in visits.items():
        assert_close(unpacked(visit.extras)[0], measured(loaded(net(), visit.end)[:2], *clients[client])[0])


def test_all_examples_are_measured(federated_trainer):
    clients = models.vectors({"a": 46, "b": 15})
    data = FederatedDataModule(models.as_datasets(clients), batch_size=8, drop_last=True)
    visits = sent(federated_trainer, ClassPrototypes(), models.Module(models.mlp()), data)
    for client, visit in visits.items():
        assert_close(unpacked(visit.extras)[0], measured(loaded(models.mlp(), visit.end)[:2], *clients[client])[0])
        assert sum(unpacked(visit.extras)[1].values()) == len(clients[client][0])


# --- Skipped batches --------------------------------------------------------------------------------------------------


class Picky(models.Module):
    """The step returns `None` for batches starting with class 0."""

    def training_step(self, batch, batch_idx):
        return None if batch[1][0] == 0 else super().training_step(batch, batch_idx)


class PickyByHand(models.ManualModule):
    def training_step(self, batch, batch_idx):
        if batch[1][0] == 0:
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self(batch[0]), batch[1]))
        optimizer.step()


BATCHES = {  # the first class of every batch
    "first": [0, 1, 2, 1, 1, 2],
    "middle": [1, 2, 0, 0, 1, 2],
    "last": [1, 2, 1, 1, 2, 0],
}


def in_batches(firsts):
    """Batches of 8; `firsts` gives the class of each first example."""
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(8 * len(firsts), 6, generator=generator), torch.arange(8 * len(firsts)) % 3
    targets[::8] = torch.tensor(firsts)
    return inputs, targets


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("passes", ["exact", "online"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_a_step_leaves_out(name, passes, plain_trainer):
    """Skipped batches are in neither part and do not move the other batches."""
    tensors = in_batches(BATCHES[name])
    module = Picky(models.mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    prototypes = ClassPrototypes(passes=passes)
    trainer = plain_trainer(max_epochs=1, callbacks=[prototypes])
    trainer.fit(module, DataLoader(TensorDataset(*tensors), 8))
    kept = [index for index, first in enumerate(BATCHES[name]) if first]
    with torch.no_grad():
        parts = [(models.mlp()[:2](x), y) for x, y in zip(*(pair.split(8) for pair in tensors), strict=True)]

    def of(indices):
        features, targets = (torch.cat(pair) for pair in zip(*(parts[index] for index in indices), strict=True))
        return prototypes_reference(features, targets, 255, ())

    halves = [kept, kept] if passes == "exact" else [[p for p in kept if p < 3], [p for p in kept if p >= 3]]
    (before, _), (after, counts) = (of(indices) for indices in halves)
    present = prototypes.prototypes.present.nonzero()[:, 0].tolist()
    assert_close({c: prototypes.prototypes.means[c].double().numpy() for c in present}, after)
    assert {c: int(prototypes.prototypes.counts[c]) for c in present} == counts
    assert trainer.callback_metrics["prototypes/lpm"].item() == pytest.approx(margin_of(after, before), abs=1e-6)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("passes", ["exact", "online"])
def test_a_client_whose_batches_are_all_left_out(passes, federated_trainer):
    """A client without a loss is excluded, and the layer is not blamed."""
    clients = models.vectors(TWO)
    clients["b"] = clients["b"][0], torch.zeros_like(clients["b"][1])
    visits = sent(federated_trainer, ClassPrototypes(passes=passes), Picky(models.mlp()), models.as_datasets(clients))
    assert "prototypes:classes" in visits["a"].extras
    assert not visits["b"].extras


def test_online_passes_with_manual_optimization(federated_trainer):
    """Batches that do not call the named layer are skipped, unless no batch calls the layer."""
    named = {"num_classes": 3, "target": 1, "passes": "online"}
    data = FederatedDataModule(models.as_datasets({"a": in_batches([1, 1, 2, 0])}), batch_size=8, shuffle=False)
    visits = sent(federated_trainer, ClassPrototypes("net.1", **named), PickyByHand(models.mlp()), data)
    assert sum(unpacked(visits["a"].extras)[1].values()) == 8

    class Idle(PickyByHand):
        def __init__(self):
            super().__init__(models.mlp())
            self.spare = nn.Linear(8, 3)

    with pytest.raises(ValueError, match=r"but the output of 'spare' ran in 0 of 4 batches: name another `layer`"):
        sent(federated_trainer, ClassPrototypes("spare", **named), Idle(), data)
    with pytest.raises(MisconfigurationException, match=r"manual optimization .*: give `ClassPrototypes` a `layer`"):
        sent(federated_trainer, ClassPrototypes(passes="online"), PickyByHand(models.mlp()), data)


def test_a_layer_that_some_batches_run(federated_trainer):
    """Exact passes use the batches with the layer; for online passes a training batch without the layer is an error."""

    class Two(models.Module):
        def __init__(self):
            super().__init__(models.mlp())
            self.head = nn.Linear(6, 3)

        def training_step(self, batch, batch_idx):
            net = self.head if batch[1][0] == 0 else self.net
            return F.cross_entropy(net(batch[0]), batch[1])

    data = {"a": TensorDataset(*in_batches([1, 0, 2, 1]))}
    for passes in ("exact", "online"):
        prototypes = ClassPrototypes("net.1", num_classes=3, passes=passes)
        module = FederatedDataModule(data, batch_size=8, shuffle=False)
        if passes == "exact":
            visits = sent(federated_trainer, prototypes, Two(), module)
            assert 0 < sum(unpacked(visits["a"].extras)[1].values()) < 32
        else:
            with pytest.raises(ValueError, match="ran in 3 of 4"):
                sent(federated_trainer, prototypes, Two(), module)


# --- Visits with a single batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "said"), [({}, 1), ({"passes": "exact"}, 0), ({"lpm_before": "last_local"}, 0)])
def test_online_passes_of_a_single_batch_say_that_they_have_no_margin(options, said, federated_trainer, caplog):
    """The warning names the first such client once per fit; long visits and exact passes have a margin."""
    prototypes = ClassPrototypes(**{"passes": "online", **options})
    for _ in range(2):  # each fit warns
        caplog.clear()
        data = FederatedDataModule(models.as_datasets(models.vectors({"a": 40, "b": 5, "c": 7})), batch_size=8)
        trainer = federated_trainer(max_rounds=2, callbacks=[prototypes])
        trainer.fit(models.Module(models.mlp()), datamodule=data)
        assert caplog.text.count("Client 'b' trains on a single batch, so online passes cannot measure the") == said
        assert caplog.text.count("trains on a single batch") == said


# --- Plain Trainer ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two processes")
    warm_process.run("tests.algorithms.fedmargin.prototypes_script", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["exact", "online"])
def test_two_processes(passes, two_processes):
    """Prototypes and logs in both processes cover all data."""
    first, second = (torch.load(two_processes / f"{passes}-{rank}.pt", weights_only=True) for rank in range(2))
    assert first["logged"] == second["logged"]
    for first_value, second_value in zip(first["prototypes"], second["prototypes"], strict=True):
        assert torch.equal(first_value, second_value)

    def of(indices):
        batches = [seen["batches"][index] for seen in (first, second) for index in indices]
        return measured(models.mlp()[:2], *(torch.cat(pair) for pair in zip(*batches, strict=True)))

    halves = [(0, 1), (0, 1)] if passes == "exact" else [(0,), (1,)]
    (before, _), (after, counts) = (of(indices) for indices in halves)
    means, numbers = first["prototypes"]
    assert {name: number for name, number in enumerate(numbers.tolist()) if number} == counts
    assert sum(counts.values()) == 16 * len(halves[1])
    assert_close({name: means[name].double().numpy() for name in counts}, after)
    expected = margin_of(after, before)
    assert first["logged"]["prototypes/lpm"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", [dict, list])
def test_several_training_loaders(kind, plain_trainer):
    """Exact passes refuse several loaders; online passes see the training batches."""

    class Both(models.Module):
        def training_step(self, batch, batch_idx):
            pairs = list(batch.values()) if isinstance(batch, dict) else batch
            return sum(super(Both, self).training_step(pair, batch_idx) for pair in pairs)

    data = models.as_datasets(models.vectors({"a": 16, "b": 16}))
    loaders = {name: DataLoader(pair, 8) for name, pair in data.items()}
    loaders = loaders if kind is dict else list(loaders.values())

    def target(batch):
        return (batch["a"] if isinstance(batch, dict) else batch[0])[1]

    with pytest.raises(
        ValueError, match=f"one training loader for exact passes, but got a {kind.__name__} with 2 loaders: use"
    ):
        plain_trainer(max_epochs=1, callbacks=[ClassPrototypes(target=target)]).fit(Both(models.mlp()), loaders)
    logger = MemoryLogger()
    prototypes = ClassPrototypes(target=target, passes="online")
    trainer = plain_trainer(max_epochs=1, callbacks=[prototypes], logger=logger, log_every_n_steps=1)
    trainer.fit(Both(models.mlp()), loaders)
    assert len(logger.curve("prototypes/lpm")) == 1
