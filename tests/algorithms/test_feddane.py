"""FedDANE: the paper's numbers, a plain loop, and state unaffected by the gradient pass."""

import itertools

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fed import Availability, FederatedDataModule
from lightning_fed.algorithms import FedAvg, FedDANE
from lightning_fed.callbacks import FederatedCallback, GradientCorrection
from lightning_fed.server.schedule import Schedule
from tests import models
from tests.algorithms.test_fedavg import aggregated, equal, updates
from tests.breadth import quick
from tests.fit.test_round_start import Watch
from tests.recorders import MemoryLogger, Recorder, SavesOnException, assert_same, bytes_of, state_of
from tests.references_baselines import feddane_reference, second_draw_reference
from tests.test_invariants import held_bytes

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


class Keep(FederatedCallback):
    def __init__(self):
        self.corrections = []
        self.extras = []

    def on_client_start(self, trainer, module, client, broadcast):
        correction = next(callback for callback in trainer.callbacks if isinstance(callback, GradientCorrection))
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.corrections.append({names[p]: value.clone() for p, value in correction.tensors.items()})
        self.extras.append(dict(broadcast.extras))


# --- Equation ---------------------------------------------------------------------------------------------------------


def test_messages_are_averaged_by_sizes():
    received = updates(6)
    assert equal(aggregated(FedDANE(), received), aggregated(FedAvg(), received))


def test_the_example_of_the_paper(federated_trainer):
    """Optima 0 and 3, equal weights, start at 1: g = -0.5; with lr=0.1 and mu=1 the second client moves to 1.05 and
    1.09.
    """
    values = []

    class Steps(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            values.append(module.w.item())

    clients = {name: TensorDataset(torch.full((1, 1), value)) for name, value in {"a": 0.0, "b": 3.0}.items()}
    module, keep, recorder = models.Quadratic(size=1, lr=0.1), Keep(), Recorder()
    module.w.data.fill_(1.0)
    callbacks = [keep, recorder, Steps()]
    federated_trainer(max_rounds=1, local_steps=2, method=FedDANE(mu=1.0), callbacks=callbacks).fit(module, clients)
    assert [extras["gradient:w"].item() for extras in keep.extras] == [-0.5, -0.5]
    assert [correction["w"].item() for correction in keep.corrections] == [-1.5, 1.5]
    assert values == pytest.approx([1.0, 1.05, 1.0, 1.05])
    assert recorder.visits[1].update["w"].item() == pytest.approx(1.09)


def test_gradients_are_weighted_by_examples(federated_trainer):
    clients = {"a": TensorDataset(torch.zeros(1, 1)), "b": TensorDataset(torch.full((3, 1), 3.0))}
    module, keep = models.Quadratic(size=1, lr=0.1), Keep()
    module.w.data.fill_(1.0)
    federated_trainer(max_rounds=1, method="feddane", callbacks=[keep]).fit(module, clients)
    assert keep.extras[0]["gradient:w"].item() == (1 * 1 + 3 * -2) / 4


@pytest.mark.parametrize(("batch_size", "mu"), quick(itertools.product([8, 32], [0.0, 0.3]), [(8, 0.3), (32, 0.0)]))
def test_a_fit_against_a_plain_loop(mu, batch_size, federated_trainer):
    """Unequal clients with a short last batch, momentum, and two samples of three clients."""
    clients, recorder = models.vectors(SIZES), Recorder()
    history = feddane_reference(
        models.mlp(), clients, cross_entropy, models.momentum, mu, rounds=2, cohort_size=3, seed=4,
        batch_size=batch_size, epochs=2,
    )  # fmt: skip
    trainer = federated_trainer(
        max_rounds=2, clients_per_round=3, local_epochs=2, method=FedDANE(mu), seed=4, callbacks=[recorder]
    )
    data = FederatedDataModule(models.as_datasets(clients), batch_size=batch_size)
    trainer.fit(models.Module(models.mlp(), models.momentum), datamodule=data)
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("count", [1, 4])
def test_clients_that_are_alike_need_no_correction(count, federated_trainer):
    data, states = models.vectors({"x": 19})["x"], []
    for aggregator in ("fedavg", "feddane"):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(max_rounds=2, local_epochs=2, method=aggregator)
        clients = {name: TensorDataset(*data) for name in "abcd"[:count]}
        trainer.fit(module, datamodule=FederatedDataModule(clients, batch_size=8, shuffle=False))
        states.append(state_of(module))
    for name, value in states[0].items():
        assert torch.allclose(states[1][name], value, rtol=1e-5, atol=1e-6), name
    if count == 1:
        assert_same(*states)


def test_the_samples_are_drawn_apart():
    """The second sample depends only on seed and round, has the same size and skips unavailable clients."""
    clients = [f"client-{index}" for index in range(30)]
    schedule = Schedule(7, clients_per_round=10)
    draws = [schedule.second_draw(number, clients) for number in range(20)]
    cohorts = [[visit.client for visit in schedule.cohort(number, clients).visits] for number in range(20)]
    assert draws == [second_draw_reference(7, number, clients, 10) for number in range(20)]
    assert all(draw != cohort for draw, cohort in zip(draws, cohorts, strict=True))
    common = sum(len(set(draw) & set(cohort)) for draw, cohort in zip(draws, cohorts, strict=True)) / 20
    assert common == pytest.approx(10 / 3, abs=1.2)  # expected overlap of independent samples
    assert (
        Schedule(7, clients_per_round=10, availability=Availability(stragglers=0.5)).second_draw(3, clients) == draws[3]
    )
    assert Schedule(8, clients_per_round=10).second_draw(0, clients) != draws[0]
    everyone = Schedule(7, availability=Availability(client_dropout=0.4))
    assert everyone.second_draw(2, clients) == [visit.client for visit in everyone.cohort(2, clients).visits]
    assert len(Schedule(0, clients_per_round=3).second_draw(0, range(10**9))) == 3


# --- Messages ---------------------------------------------------------------------------------------------------------


def test_every_byte_is_counted(federated_trainer):
    """Model and gradients travel both ways for two samples of three clients; running statistics have no gradient."""
    recorder, module = Recorder(), models.Module(models.norm_mlp())
    trainer = federated_trainer(
        max_rounds=2, clients_per_round=3, method="feddane", batch_norm="average", callbacks=[recorder]
    )
    trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
    model, gradients = bytes_of(state_of(module)), bytes_of(dict(module.named_parameters()))
    assert recorder.down_bytes == [3 * (model + gradients)] * 2
    for logged in recorder.logged:
        assert logged["comm/down_bytes"] == 3 * model + 3 * (model + gradients)
        assert logged["comm/up_bytes"] == 3 * gradients + 3 * model


def test_only_shared_parameters_are_corrected(federated_trainer):
    """A tied language model with a personal mixing layer and a frozen bias."""
    keep = Keep()
    trainer = federated_trainer(
        max_rounds=2, method=FedDANE(), personal=["net.mix.*"], frozen=["net.output.bias"], callbacks=[keep]
    )
    trainer.fit(models.Module(models.Tied(), models.momentum), models.as_datasets(models.sentences()))
    assert all(set(extras) == {"gradient:net.embedding.weight"} for extras in keep.extras)
    assert all(set(correction) == {"net.embedding.weight"} for correction in keep.corrections)


def test_gradients_are_of_each_clients_own_model(federated_trainer):
    """Each client computes the second round's gradient with its personal parameters."""

    class Product(models.Quadratic):
        def __init__(self):
            super().__init__(size=1, lr=0.1)
            self.scale = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch, batch_idx):
            return 0.5 * (self.w * self.scale - batch[0]).square().mean()

    module, keep, recorder = Product(), Keep(), Recorder()
    module.w.data.fill_(1.0)
    trainer = federated_trainer(
        max_rounds=2, local_steps=1, method="feddane", personal=["scale"], callbacks=[keep, recorder]
    )
    data = {"a": 0.0, "b": 3.0}
    trainer.fit(module, {name: TensorDataset(torch.full((1, 1), value)) for name, value in data.items()})
    for number in (0, 1):
        expected = []
        for visit in recorder.round(number):
            w, scale = visit.broadcast["w"].item(), visit.start["scale"].item()
            expected.append(scale * (w * scale - data[visit.client]))
        extras = keep.extras[2 * number :][:2]
        assert [gradient["gradient:w"].item() for gradient in extras] == pytest.approx([sum(expected) / 2] * 2)
    assert recorder.round(1)[0].start["scale"].item() != recorder.round(1)[1].start["scale"].item()


# --- Unaffected state -------------------------------------------------------------------------------------------------


class Uncorrected(FederatedCallback):
    """Drops the corrections after the gradients have been computed."""

    def on_client_start(self, trainer, module, client, broadcast):
        correction = next(callback for callback in trainer.callbacks if isinstance(callback, GradientCorrection))
        counts.append(len(correction.tensors))
        correction.tensors.clear()


counts = []


class Noisy(Dataset):
    """Adds random numbers from the global generator, as data augmentation does."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return self.tensors[0][index] + 0.1 * torch.randn(6), self.tensors[1][index]


KINDS = ["datasets", "workers", "loaders", "loaders with generators", "steps"]


@pytest.mark.parametrize("kind", quick(KINDS, ["loaders with generators"]))
def test_training_draws_the_same_random_numbers(kind, federated_trainer):
    """Dropout, BatchNorm and augmentation: without corrections, weights and logs equal FedAvg bit for bit."""
    runs, counts[:] = [], []
    for aggregator in ("fedavg", "feddane"):
        clients = {name: Noisy(tensors) for name, tensors in models.vectors(SIZES).items()}
        if kind.startswith("loaders"):
            generators = {name: torch.Generator().manual_seed(3) if "gen" in kind else None for name in clients}
            loaders = {
                name: DataLoader(dataset, 16, shuffle=True, drop_last=len(dataset) > 16, generator=generators[name])
                for name, dataset in clients.items()
            }
            data = FederatedDataModule(loaders)
        else:
            workers = int(kind == "workers")
            data = FederatedDataModule(clients, batch_size=16, num_workers=workers, persistent_workers=workers > 0)
        recorder, module = Recorder(), models.Module(models.norm_mlp(), models.momentum)
        work = {"local_steps": 3} if kind == "steps" else {"local_epochs": 2}
        trainer = federated_trainer(
            max_rounds=2, clients_per_round=3, method=aggregator, seed=2, **work,
            callbacks=[recorder] if aggregator == "fedavg" else [Uncorrected(), recorder],
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
        runs.append((state_of(module), recorder))
    assert counts == [10] * 6
    assert_same(runs[0][0], runs[1][0])
    for ours, expected in zip(runs[1][1].visits, runs[0][1].visits, strict=True):
        assert_same(expected.start, ours.start)
        assert_same(expected.end, ours.end)
    for ours, expected in zip(runs[1][1].logged, runs[0][1].logged, strict=True):
        assert {n: v for n, v in ours.items() if "comm" not in n} == {
            n: v for n, v in expected.items() if "comm" not in n
        }


def test_the_gradient_is_of_all_the_data_without_dropout(federated_trainer):
    """Independent of the number of local steps, and reproducible."""
    clients, keeps = models.vectors(SIZES), []
    for steps in (1, 2):
        keeps.append(Keep())
        trainer = federated_trainer(
            max_rounds=1, local_steps=steps, method="feddane", callbacks=[keeps[-1]], batch_norm="average"
        )
        trainer.fit(models.Module(models.dropout_mlp()), models.as_datasets(clients))
    assert_same(keeps[0].extras[0], keeps[1].extras[0])
    net = models.dropout_mlp().eval()
    pooled = [torch.cat(parts) for parts in zip(*clients.values(), strict=True)]
    cross_entropy(net, pooled).backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(keeps[0].extras[0][f"gradient:net.{name}"], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_round_starts_with_the_global_model(federated_trainer):
    """Callbacks see the global model even if sampled clients have personal parameters."""
    watch, clients = Watch(), models.as_datasets(models.vectors(SIZES))
    trainer = federated_trainer(max_rounds=2, method="feddane", personal=["net.head.*"], callbacks=[watch])
    trainer.fit(models.Module(models.BaseAndHead(), models.momentum), clients)
    assert_same(watch.ends[0], watch.models[1])


def test_nothing_is_held_after_a_fit(federated_trainer):
    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("broken")

    clients, correction = models.as_datasets(models.vectors(SIZES)), GradientCorrection()
    federated_trainer(max_rounds=1, method="feddane", callbacks=[correction]).fit(models.Module(models.mlp()), clients)
    assert held_bytes(correction) == 0
    with pytest.raises(KeyError, match="broken"):
        federated_trainer(max_rounds=1, method="feddane", callbacks=[correction, Break()]).fit(
            models.Module(models.mlp()), clients
        )
    assert held_bytes(correction) == 0


# --- Failures ---------------------------------------------------------------------------------------------------------


class Lost(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise OSError("lost")


def test_clients_that_cannot_answer_are_left_out(federated_trainer, caplog):
    """A sampled client is dropped with a warning, a cohort client by name; remaining clients define the correction."""
    vectors = models.vectors({"a": 20, "b": 31})
    nan = tuple(tensor.clone() for tensor in vectors["a"])
    nan[0].fill_(float("nan"))
    clients = models.as_datasets(vectors) | {"lost": Lost(), "nan": TensorDataset(*nan)}
    keep, alone = Keep(), Keep()
    trainer = federated_trainer(max_rounds=1, method="feddane", callbacks=[keep])
    trainer.fit(models.Module(models.mlp()), clients)
    assert "client 'lost''s gradient is excluded: the client's data raised OSError: lost" in caplog.text.replace(
        '"', "'"
    )
    assert "client 'nan''s gradient is excluded: entry 'gradient:net.0.weight' has NaN" in caplog.text.replace('"', "'")
    assert set(trainer.federation.server.report.received) == {"a", "b"}
    assert set(trainer.federation.server.report.failed) == {"lost", "nan"}
    federated_trainer(max_rounds=1, method="feddane", callbacks=[alone]).fit(
        models.Module(models.mlp()), models.as_datasets(vectors)
    )
    assert_same(alone.extras[0], keep.extras[0])


def test_a_cohort_whose_own_gradients_fail(federated_trainer):
    """Training succeeds, but the data break in the second pass of the round."""

    class Once(Dataset):
        def __init__(self, tensors):
            self.tensors, self.served = tensors, 0

        def __len__(self):
            return len(self.tensors[0])

        def __getitem__(self, index):
            self.served += 1
            if self.served > 2 * len(self):  # the sample's pass, and the first batch of the visit
                raise OSError("gone")
            return self.tensors[0][index], self.tensors[1][index]

    vectors = models.vectors({"a": 20, "b": 20})
    clients = {"a": TensorDataset(*vectors["a"]), "b": Once(vectors["b"])}
    trainer = federated_trainer(max_rounds=1, method="feddane")
    trainer.fit(models.Module(models.mlp()), clients)
    assert set(trainer.federation.server.report.received) == {"a"}
    assert trainer.federation.server.report.failed == {"b": "the client's data raised OSError: gone"}


def test_a_client_with_a_single_example(federated_trainer):
    """BatchNorm cannot train on a single example; the recorded reason equals FedAvg's."""
    failed = []
    for aggregator in ("fedavg", "feddane"):
        trainer = federated_trainer(max_rounds=1, method=aggregator)
        clients = models.as_datasets(models.vectors({"a": 20, "b": 1}))
        trainer.fit(models.Module(models.norm_mlp()), clients)
        failed.append(trainer.federation.server.report.failed)
    assert failed[0] == failed[1]
    assert set(failed[0]) == {"b"}


def test_nothing_comes_of_a_round_without_any_gradient(federated_trainer):
    """All clients in the round fail by name; the next round trains again."""

    class Late(Dataset):
        def __init__(self, tensors):
            self.tensors, self.broken = tensors, False

        def __len__(self):
            return len(self.tensors[0])

        def __getitem__(self, index):
            if not self.broken:
                self.broken = True
                raise OSError("not yet")
            return self.tensors[0][index], self.tensors[1][index]

    class Reasons(FederatedCallback):
        def on_train_epoch_end(self, trainer, module):
            failed.append(dict(trainer.federation.server.report.failed))
            states.append(state_of(module))

    module, failed = models.Module(models.mlp()), []
    states = [state_of(module)]
    trainer = federated_trainer(max_rounds=2, method="feddane", callbacks=[Reasons()])
    trainer.fit(module, {name: Late(tensors) for name, tensors in models.vectors({"a": 20, "b": 12}).items()})
    assert failed == [dict.fromkeys("ab", "no client in the gradient sample sent a gradient"), {}]
    assert_same(states[0], states[1])
    assert not torch.equal(states[1]["net.0.weight"], states[2]["net.0.weight"])


@pytest.mark.parametrize("index", ["in the gradient of", "in the visit of"])
def test_what_fails_in_the_module_for_all_clients_ends_the_fit(index, federated_trainer):
    """In the sample's pass and in the cohort's pass."""

    class Unready(models.Module):
        passes = 0

        def training_step(self, batch, batch_idx):
            if not self.training:
                self.passes += 1  # reset after every pass
                if index == "in the gradient of" or keep.asked:
                    raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    class Asked(FederatedCallback):
        def __init__(self):
            self.asked = []

        def on_server_send(self, trainer, module, client, broadcast):
            self.asked.append(client)

    module, keep = Unready(models.mlp()), Asked()
    with pytest.raises(ZeroDivisionError) as caught:
        federated_trainer(max_rounds=1, method="feddane", callbacks=[keep]).fit(
            module, models.as_datasets(models.vectors({"a": 20, "b": 12}))
        )
    assert any("all 2 clients failed with this error" in note for note in caught.value.__notes__)
    assert module.training


def test_recurrent_layers(federated_trainer):
    """cuDNN differentiates recurrent layers only in training mode; dropout is off, so the gradient is exact."""

    class Watched(models.Module):
        def training_step(self, batch, batch_idx):
            modes.add((self.training, self.net.lstm.training, self.net.lstm.dropout))
            return super().training_step(batch, batch_idx)

    clients, keep, modes = models.sentences({"a": 20, "b": 31}), Keep(), set()
    module = Watched(models.Recurrent())
    federated_trainer(max_rounds=1, method="feddane", callbacks=[keep]).fit(module, models.as_datasets(clients))
    assert modes == {(False, True, 0.0), (True, True, 0.3)}
    net = models.Recurrent().eval()
    pooled = [torch.cat(parts) for parts in zip(*clients.values(), strict=True)]
    cross_entropy(net, pooled).backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(keep.extras[0][f"gradient:net.{name}"], parameter.grad, rtol=1e-4, atol=1e-6)


class Following(models.Module):
    """The training step writes to a buffer, to a frozen parameter and to an attribute."""

    def __init__(self):
        super().__init__(models.norm_mlp(), models.momentum)
        self.register_buffer("centre", torch.zeros(6))
        self.teacher = torch.nn.Parameter(torch.zeros(6), requires_grad=False)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        self.centre.lerp_(inputs.mean(0), 0.1)
        self.teacher.lerp_(self.centre, 0.1)
        self.steps += 1
        return self.loss(self(inputs - self.centre - self.teacher), targets) / self.steps


def test_what_a_step_writes_is_taken_back(federated_trainer):
    states, counts[:] = [], []
    for aggregator, callbacks in (("fedavg", []), ("feddane", [Uncorrected()])):
        module = Following()
        trainer = federated_trainer(max_rounds=2, method=aggregator, callbacks=callbacks, batch_norm="average")
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert len(counts) == 10
    assert_same(*states)


def test_manual_optimization_is_refused(federated_trainer):
    with pytest.raises(MisconfigurationException, match=r"FedDANE .* use automatic optimization"):
        federated_trainer(max_rounds=1, method="feddane").fit(
            models.ManualModule(models.mlp()), models.as_datasets(models.vectors(SIZES))
        )


@pytest.mark.parametrize("mu", [-1.0, float("inf")])
def test_strengths_that_cannot_be(mu):
    with pytest.raises(ValueError, match="`mu` to be at least 0 and finite, but got"):
        FedDANE(mu)


def test_resuming(federated_trainer, tmp_path):

    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 3:
                raise KeyError("broken")

    def run(logger, *callbacks, **options):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(
            max_rounds=2, clients_per_round=3, local_epochs=2, method=FedDANE(0.1), logger=logger,
            callbacks=[SavesOnException(broken), *callbacks],
        )  # fmt: skip
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)), **options)
        return state_of(module)

    broken = tmp_path / "broken.ckpt"
    whole, parts = MemoryLogger(), [MemoryLogger(), MemoryLogger()]
    expected = run(whole)
    with pytest.raises(KeyError, match="broken"):
        run(parts[0], Break())
    torch.load(broken, weights_only=True)  # only tensors and primitives
    resumed = run(parts[1], ckpt_path=broken)
    assert_same(expected, resumed)
    for name in ("train_loss", "fed/update_norm", "comm/total_up_bytes", "comm/total_down_bytes"):
        both = dict(parts[0].curve(name)) | dict(parts[1].curve(name))
        assert sorted(both.items()) == whole.curve(name)
