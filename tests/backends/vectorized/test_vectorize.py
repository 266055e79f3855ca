"""Vectorized clients: results equal sequential visits, or the log gives the reason for sequential visits."""

import random
from functools import partial

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import Availability, FederatedDataModule, Federation, FixedStatistics, LocalStatistics, Vectorized
from lightning_fed.backends.vectorized.stacked_model import empty_stack
from lightning_fed.callbacks import FederatedCallback, ProximalTerm
from lightning_fed.data import DatasetClients
from lightning_fed.data.dataset_clients import ClientSource
from tests import models
from tests.breadth import quick, slow
from tests.recorders import assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`"),
]
LOGGER = "lightning_fed.backends.vectorized.plan"


class Steps(L.Callback):
    """Counts Lightning's training steps without a batch hook, which would prevent vectorization."""

    def on_train_epoch_end(self, trainer, module):
        self.steps = trainer.global_step


def assert_close(left, right, tolerance=1e-5):
    """Equal up to rounding, relative to the norm of each entry."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        difference = (value.double() - right[name].double()).norm()
        assert difference <= tolerance * value.double().norm() + 1e-7, (name, float(difference))


def fit(make_trainer, module, data, size, max_rounds=2, batch_size=32, callbacks=(), **options):
    """Module state, metrics of the last round and number of steps."""
    steps = Steps()
    trainer = make_trainer(max_rounds=max_rounds, visits=Vectorized(size), callbacks=[*callbacks, steps], **options)
    loaded = data if isinstance(data, L.LightningDataModule) else FederatedDataModule(data, batch_size=batch_size)
    trainer.fit(module, loaded)
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "fed/seconds"}
    return state_of(module), numbers, steps.steps


def compare(make_trainer, make_module, data, size=3, tolerance=1e-9, precision="64-true", **options):
    """Trains sequentially and vectorized; the number of steps proves the vectorization.

    Double precision avoids different decisions in ReLU or pooling due to rounding.
    """
    options["precision"] = precision
    data = data if not isinstance(next(iter(data.values())), tuple) else models.as_datasets(data)
    callbacks = options.pop("callbacks", list)
    alone, numbers, steps = fit(make_trainer, make_module(), data, 1, callbacks=callbacks(), **options)
    together, others, fewer = fit(make_trainer, make_module(), data, size, callbacks=callbacks(), **options)
    assert fewer < 0.7 * steps
    assert_close(alone, together, tolerance)
    assert numbers.keys() == others.keys()
    for name, value in numbers.items():
        # Drift is a small difference of large vectors, so rounding is a larger share.
        absolute = 1e-5 if name == "fed/drift" else 1e-6
        assert others[name] == pytest.approx(value, rel=10 * tolerance, abs=absolute), name
    return together, others


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)


def smooth_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, models.CLASSES))


def group_norm_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(),
        nn.BatchNorm2d(8), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(32, models.CLASSES),
    )  # fmt: skip


def wrapped_in(make):
    return lambda: make(models.mlp())


def wrapped(net, **options):
    return lambda: models.Module(net(), **options)


# --- Equal to sequential visits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "data"),
    [
        slow((wrapped(models.mlp), models.vectors)),
        slow((wrapped(models.mlp, optimizer=models.momentum), models.vectors)),
        (wrapped(models.mlp, optimizer=models.adam), models.vectors),
        slow((wrapped(models.mlp, optimizer=adagrad), models.vectors)),
        slow((wrapped(models.dropout_mlp, optimizer=models.momentum), models.vectors)),
        (wrapped(group_norm_cnn, optimizer=models.momentum), models.images),
        (wrapped(models.Tied, optimizer=models.momentum), models.sentences),
    ],
    ids=["mlp", "momentum", "adam", "adagrad", "dropout", "norms", "tied"],
)
def test_results_are_those_of_one_after_another(make, data, federated_trainer):
    compare(federated_trainer, make, data(), local_epochs=2)


@pytest.mark.parametrize(
    ("options", "rooms"), [({}, len(models.vectors())), ({"clients_per_round": 2}, 2), ({"size": 2}, 2)]
)
def test_a_stack_has_room_for_the_cohort_only(options, rooms, federated_trainer, monkeypatch):
    sizes = set()

    def noted(value, size):
        sizes.add(size)
        return empty_stack(value, size)

    monkeypatch.setattr("lightning_fed.backends.vectorized.stacked_model.empty_stack", noted)
    data = models.as_datasets(models.vectors())
    fit(federated_trainer, models.Module(models.mlp()), data, **{"size": 50, **options})
    assert max(sizes) == rooms  # the preceding trial uses two


@pytest.mark.slow
def test_ten_rounds_differ_by_rounding(federated_trainer):
    options = {"max_rounds": 10, "precision": "32-true", "tolerance": 1e-5}
    compare(federated_trainer, wrapped(smooth_mlp, optimizer=models.momentum), models.vectors(), **options)


@pytest.mark.parametrize(
    "mode",
    ["average", slow("recalibrate"), "frozen", slow("personal"), LocalStatistics(), slow(FixedStatistics(1))],
    ids=str,
)
def test_batch_norm(mode, federated_trainer):
    compare(
        federated_trainer,
        wrapped(models.norm_mlp, optimizer=models.momentum),
        models.vectors(),
        batch_norm=mode,
        size=5,
    )


OPTIONS = [
    {"local_steps": 3, "clients_per_round": 4},
    {"method": "scaffold", "accumulate_grad_batches": 2, "local_steps": 4},
    {"method": "fednova:mu=0.1", "local_epochs": 2},
    {"callbacks": lambda: [ProximalTerm(1.0)], "local_epochs": 2},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"precision": "bf16-mixed", "tolerance": 0.02},
    {"frozen": ["net.0.*"]},
    {"availability": Availability(partial_work="drop", stragglers=0.4)},
]
MORE_OPTIONS = [  # the same kinds of steps and sums as above and in the tests below
    {"availability": Availability(stragglers=0.5), "local_epochs": 3},
    {"method": "fesem", "max_rounds": 3},
    {"method": "fedadam"},
    {"method": "fedprox", "local_epochs": 2},
    {"method": "scaffold", "local_epochs": 2, "max_rounds": 3},
    {"method": "feddyn:alpha=0.1", "local_epochs": 2, "max_rounds": 3},
    {"method": "qffl", "local_epochs": 2},
    {"method": "fedala", "local_epochs": 2, "max_rounds": 3, "tolerance": 1e-4},
    {"accumulate_grad_batches": 2, "local_steps": 4},
]


@pytest.mark.parametrize(
    "options",
    quick([*OPTIONS, *MORE_OPTIONS], OPTIONS),
    ids=lambda options: "-".join(options),
)
def test_options_of_a_federation(options, federated_trainer):
    compare(federated_trainer, wrapped(models.mlp, optimizer=models.momentum), models.vectors(), **options)


def test_personal_layers(federated_trainer):
    compare(federated_trainer, wrapped(models.BaseAndHead), models.vectors(), personal=["net.head.*"], max_rounds=3)


class Remembers(FederatedCallback):
    """Stores a value per visit in the client memory and sends the value in the next visit."""

    supports_vectorize = True

    def on_client_start(self, trainer, module, client, broadcast):
        self.federation = next(each for each in trainer.callbacks if isinstance(each, Federation))
        memory = self.federation.client_memory
        memory["visits"] = memory.get("visits", torch.zeros(1)) + len(client)

    def on_client_end(self, trainer, module, client, update):
        assert self.federation.current_client == client
        update.metrics["visits"] = float(self.federation.client_memory["visits"])
        update.metrics["norm"] = float(sum(value.detach().norm() for value in module.parameters()))


def test_callbacks_of_a_visit_see_their_client(federated_trainer):
    """The client's model in ``on_client_end``, and the client memory."""
    data = {"a": (torch.ones(40, 6), torch.zeros(40).long()), "bobby": (torch.zeros(40, 6), torch.ones(40).long())}
    _, numbers = compare(
        federated_trainer, wrapped(models.mlp), data, size=2, max_rounds=3, callbacks=lambda: [Remembers()]
    )
    assert numbers["clients/visits"] == 9  # three visits of each client: 3 and 15


@pytest.mark.parametrize("per_step", [True, False])
def test_schedulers(per_step, federated_trainer):
    """Per-step schedulers restart in every visit, so visits with equally many batches train together."""

    def schedule(optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"scheduler": scheduler, "interval": "step" if per_step else "epoch"}

    data = models.as_datasets(models.vectors({"a": 64, "b": 60, "c": 60, "d": 60, "e": 60}))
    clients = {name: DataLoader(each, 32 if name == "a" else 12) for name, each in data.items()}
    make = wrapped(models.mlp, optimizer=models.momentum, scheduler=schedule)
    compare(federated_trainer, make, clients, max_rounds=3, size=5)


class Shared(models.Module):
    def __init__(self):
        super().__init__(models.norm_mlp(), models.momentum)
        self.encoder = self.net[0]
        self.whole = self.net


def test_layers_with_two_names(federated_trainer):
    compare(federated_trainer, Shared, models.vectors())


class Teacher(models.Module):
    def __init__(self):
        super().__init__(models.mlp(), models.momentum)
        self.teacher = models.mlp().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.mul_(0.9).add_(0.1 * other)
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), self.teacher(batch[0]))


def test_a_teacher_that_follows(federated_trainer):
    """Even if only some non-adjacent clients of the group take part in a step."""
    data = models.vectors({"a": 41, "b": 40, "c": 41, "d": 40, "e": 41})
    compare(federated_trainer, Teacher, data, size=5)


@pytest.mark.parametrize("seed", quick([0, 1], [0]))
def test_of_clients_with_as_many_examples_the_rates_go_on_from_the_same(seed, federated_trainer):
    """Stragglers change the order of vectorized visits."""

    def schedule(optimizer):
        return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}

    make = wrapped(models.mlp, optimizer=models.momentum, scheduler=schedule)
    data = models.vectors(dict.fromkeys("abcde", 40))
    options = {"local_epochs": 3, "availability": Availability(stragglers=0.5), "max_rounds": 3, "seed": seed}
    compare(federated_trainer, make, data, size=5, **options)


class Wakes(models.Module):
    """Dropout in evaluation mode until the first round."""

    def __init__(self):
        super().__init__(models.dropout_mlp())
        self.net.eval()

    def on_train_epoch_start(self):
        self.net.train()


@pytest.mark.filterwarnings("ignore:Found .* module")
def test_dropout_that_is_off_in_the_trial(federated_trainer):
    compare(federated_trainer, Wakes, models.vectors())


class Noisy(models.Module):
    """Draws random numbers in the step, and logs in several ways."""

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = self.loss(self(inputs + 0.1 * torch.randn_like(inputs)), targets, label_smoothing=0.1)
        self.log_dict({"sum": loss, "largest": loss}, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("mine", loss.detach() * 2, on_step=False, on_epoch=True, batch_size=1)
        self.log("share", 0.5, on_step=False, on_epoch=True)
        return {"loss": loss, "more": inputs}


def test_random_numbers_and_logs_of_a_step(federated_trainer):
    compare(federated_trainer, lambda: Noisy(models.dropout_mlp()), models.vectors(), max_rounds=2)


class Augmented(torch.utils.data.Dataset):
    """Adds noise from Python's or PyTorch's generator to the examples."""

    def __init__(self, tensors, draw):
        self.tensors, self.draw = tensors, draw

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        inputs, targets = (tensor[index] for tensor in self.tensors)
        return inputs + self.draw(), targets


def named(data, name):
    """Loaders whose batches contain a text derived from the client's name."""

    def joined(client, items):
        inputs, targets = zip(*items, strict=True)
        return [torch.stack(inputs), torch.stack(targets), name(client)]

    datasets = models.as_datasets(data)
    return {each: DataLoader(datasets[each], 8, collate_fn=partial(joined, each)) for each in datasets}


class Heads(models.Module):
    """Two heads for two domains; the batch names the domain."""

    def __init__(self, net):
        super().__init__(net, models.momentum)
        self.heads = nn.ModuleDict({name: nn.Linear(models.CLASSES, models.CLASSES) for name in "ab"})

    def training_step(self, batch, batch_idx):
        inputs, targets, domain = batch
        return self.loss(self.heads[domain](self(inputs)), targets)


def test_clients_whose_losses_are_of_other_parameters(federated_trainer):
    """Momentum and weight decay would change the head without a gradient."""
    clients = named(models.vectors(), lambda client: "a" if client < "c" else "b")
    with pytest.raises(RuntimeError, match=r"depend on different parameters .*: use `visits='auto'`"):
        fit(federated_trainer, Heads(models.mlp()), clients, 5)


class Takes(models.Module):
    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])


def test_names_in_batches_keep_clients_apart(federated_trainer, caplog):
    data = models.vectors(dict.fromkeys("abc", 40))
    compare(federated_trainer, wrapped_in(Takes), named(data, str), size=3)
    assert caplog.text.count("but contain different strings, numbers or objects") == 1


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(6)], ids=["python", "torch"])
def test_augmentation_and_dropout_share_the_generators_of_a_visit(draw, federated_trainer):
    data = {name: Augmented(tensors, draw) for name, tensors in models.vectors().items()}
    compare(federated_trainer, wrapped(models.dropout_mlp), data)


def test_loaders_of_the_clients_own(federated_trainer):
    """Each loader shuffles with the visit's generator and has a separate batch size."""
    data = models.as_datasets(models.vectors({"a": 33, "b": 33, "c": 17, "d": 40}))
    clients = {name: DataLoader(each, 8 if name < "c" else 5, shuffle=True) for name, each in data.items()}
    compare(federated_trainer, wrapped(models.mlp), clients, size=4, local_epochs=2)


def test_workers_fetch_in_turns(federated_trainer):
    data = models.as_datasets(models.vectors({"a": 33, "b": 48, "c": 17}))
    states = []
    for size in (1, 3):
        loaded = FederatedDataModule(data, batch_size=8, num_workers=1)
        states.append(fit(federated_trainer, models.Module(models.dropout_mlp()), loaded, size, max_rounds=1))
    assert states[1][2] < states[0][2]
    assert_close(states[0][0], states[1][0])


# --- Failing clients --------------------------------------------------------------------------------------------------


class Breaking(TensorDataset):
    """Raises from example n on, or returns an infinite example."""

    def __init__(self, tensors, good=None, value=None):
        super().__init__(*(tensor.clone() for tensor in tensors))
        self.good = good
        if value is not None:
            self.tensors[0][-1] = value

    def __getitem__(self, index):
        if self.good is not None:
            self.good -= 1
            if self.good < 0:
                raise OSError("unplugged")
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "fault", [{"value": float("nan")}, {"good": 35}, {"good": 0}, slow({"value": float("inf")})], ids=str
)
def test_a_client_that_fails_is_left_out_and_the_others_are_not_disturbed(fault, federated_trainer, caplog):
    """The update is not finite, or the data raise at once or during the visit."""
    results = []
    for size in (1, 3):
        data = models.as_datasets(models.vectors())
        data["bob"] = Breaking(data["bob"].tensors, **fault)
        caplog.clear()
        results.append(fit(federated_trainer, models.Module(models.mlp(), models.momentum), data, size, max_rounds=1))
        assert "client 'bob' is excluded" in caplog.text
        assert "one after another" not in caplog.text
    assert_close(results[0][0], results[1][0])
    assert results[1][1]["fed/clients"] == 4
    assert results[0][1]["fed/failed"] == results[1][1]["fed/failed"] == 1


@pytest.mark.parametrize("method", quick(["scaffold", "feddyn:alpha=0.1", "fednova", "qffl"], ["scaffold", "qffl"]))
def test_methods_know_the_rows_of_the_others_where_one_fails(method, federated_trainer):
    """The first client fails before the first batch; methods with corrections must index the remaining rows."""
    states = []
    for size in (1, 3):
        data = models.as_datasets(models.vectors())
        data["cid"] = Breaking(data["cid"].tensors, good=0)
        options = {"method": method, "local_epochs": 2}
        states.append(fit(federated_trainer, models.Module(models.mlp(), models.momentum), data, size, **options)[0])
    assert_close(*states)


def test_a_single_example_on_which_batch_norm_cannot_train(federated_trainer, caplog):
    sizes = {"a": 33, "b": 1, "c": 40}
    make = wrapped(models.norm_mlp)
    states = [
        fit(federated_trainer, make(), models.as_datasets(models.vectors(sizes)), size, max_rounds=1)[0]
        for size in (1, 3)
    ]
    assert caplog.text.count("client 'b' is excluded: the client has a batch with a single example") == 2
    assert_close(*states)


@pytest.mark.parametrize("make", [models.mlp, models.norm_mlp], ids=["mlp", "norms, dropout"])
def test_a_client_whose_step_raises_is_excluded_by_name(make, federated_trainer, caplog):
    """The other clients train as without the error: weights, buffers and random numbers in all rows."""
    clients = models.vectors({"a": 40, "b": 40, "c": 33, "d": 40})
    clients["b"][1][20] = 99  # a label without a class, in the first or second batch
    compare(federated_trainer, wrapped(make), clients, size=4, batch_size=16)
    assert caplog.text.count("client 'b' is excluded: the client's training step raised ") == 4
    assert caplog.text.count("is excluded") == 4


class Branches(models.Module):
    """From round 1 the step depends on a tensor value, so `vmap` fails."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if self.current_epoch == 1 and loss.item() > 0.5 else loss


def test_a_step_without_vmap_support_runs_row_by_row(federated_trainer):
    compare(federated_trainer, lambda: Branches(models.dropout_mlp()), models.vectors(), max_rounds=3)


class Raises(models.Module):
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise ZeroDivisionError("of the module")
        return super().training_step(batch, batch_idx)


def test_a_step_that_skips_a_batch_is_told_what_to_do(federated_trainer):
    class Skips(models.Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match=r"but got None\. To skip batches, .* `visits='auto'`"):
        fit(federated_trainer, Skips(models.mlp()), models.as_datasets(models.vectors()), 3, batch_size=8)


def test_an_error_of_the_module_ends_the_fit_and_leaves_the_global_model(federated_trainer):
    data = models.as_datasets(models.vectors())
    expected, _, _ = fit(federated_trainer, models.Module(models.mlp()), data, 3, max_rounds=1, batch_size=16)
    module = Raises(models.mlp())
    before = [value for value in module.parameters()]
    with pytest.raises(ZeroDivisionError) as caught:
        fit(federated_trainer, module, data, 3, max_rounds=3, batch_size=16)
    assert "all 5 clients failed with this error" in "".join(caught.value.__notes__)
    assert_same(state_of(module), expected)
    assert all(one is other for one, other in zip(before, module.parameters(), strict=True))
    assert vars(module).get("log") is None


def test_a_checkpoint_inside_a_round_holds_the_global_model(federated_trainer, tmp_path):
    data, make = models.as_datasets(models.vectors()), wrapped(models.mlp, optimizer=models.momentum)
    whole, _, _ = fit(federated_trainer, make(), data, 3, max_rounds=2, batch_size=16)
    saved = tmp_path / "inside.ckpt"

    class Saves(L.Callback):
        supports_vectorize = True

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 1:
                trainer.save_checkpoint(saved)

    first, _, _ = fit(federated_trainer, make(), data, 3, max_rounds=1, batch_size=16)
    fit(federated_trainer, make(), data, 3, max_rounds=2, batch_size=16, callbacks=[Saves()])
    assert_same(torch.load(saved, weights_only=True)["state_dict"], first)
    trainer, module = federated_trainer(max_rounds=2, visits=Vectorized(3)), make()
    trainer.fit(module, FederatedDataModule(data, batch_size=16), ckpt_path=saved)
    assert_same(state_of(module), whole)


def test_visits_that_break_off_end(federated_trainer):
    """Callbacks restore their changes for every client in the group."""

    class Ends(FederatedCallback):
        supports_vectorize = True
        open, closed = (), ()

        def on_client_start(self, trainer, module, client, broadcast):
            self.open = (*self.open, client)

        def on_client_visit_end(self, trainer, module, client):
            self.closed = (*self.closed, client)

    ends = Ends()
    data = models.as_datasets(models.vectors())
    with pytest.raises(ZeroDivisionError):
        fit(federated_trainer, Raises(models.mlp()), data, 3, batch_size=16, callbacks=[ends])
    assert sorted(ends.open) == sorted(ends.closed)


# --- Sequential visits, with the reason -------------------------------------------------------------------------------


class Counts(models.Module):
    seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)


class Measures(models.Module):
    def __init__(self, net):
        super().__init__(net)
        self.accuracy = MulticlassAccuracy(models.CLASSES)

    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class Asks(models.Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 100 else loss * 2


class Shuffles(models.Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * random.random()


class Changes(models.Module):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]


class Clips(L.Callback):
    def on_after_backward(self, trainer, module):
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)


class Notes(FederatedCallback):
    def on_client_end(self, trainer, module, client, update):
        update.extras["note"] = torch.zeros(1)


class Listed(models.Module):
    """A small penalty on parameters in a list."""

    def __init__(self, net):
        super().__init__(net)
        self.penalised = [list(net.parameters())]

    def training_step(self, batch, batch_idx):
        penalty = sum(own.square().sum() for own in self.penalised[0])
        return super().training_step(batch, batch_idx) + 1e-4 * penalty


class Bounded(models.Module):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class Parted(models.Module):
    def __init__(self, net):
        super().__init__(net)
        self.other = nn.Linear(net[0].in_features, net[0].out_features)
        self.other.weight.data = net[0].weight.data

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.other(batch[0]).mean()


def _normalise(own):
    own.grad.div_(own.grad.norm())


class Hooked(models.Module):
    def __init__(self, net):
        super().__init__(net)
        net[0].weight.register_post_accumulate_grad_hook(_normalise)


class Shows(models.Module):
    def training_step(self, batch, batch_idx):
        self.example = batch[0][:1]
        return super().training_step(batch, batch_idx)


class Center:
    value = 0.0


class Centred(models.Module):
    def __init__(self, net):
        super().__init__(net)
        self.center = Center()

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        loss = F.cross_entropy(outputs - 1e-3 * self.center.value, batch[1])
        self.center.value = 0.9 * self.center.value + 0.1 * outputs.detach().mean(0)
        return loss


class Lars(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for own in group["params"]:
                own -= group["lr"] * own.grad * own.norm() / own.grad.norm().clamp(min=1e-6)
        return loss


REASONS = [
    (Counts, {}, "`training_step` writes the attribute 'seen'"),
    (Measures, {}, "`training_step` writes the attribute 'accuracy."),
    (Asks, {}, "in a trial step `training_step` raised RuntimeError: vmap"),
    (Listed, {}, "uses parameters or buffers that are not attributes of the module (from a list or"),
    (Bounded, {}, "writes parameters that the optimizer trains"),
    (Parted, {}, "'net.0.weight' and 'other.weight' share memory"),
    (Hooked, {}, "a hook on the parameter 'net.0.weight'"),
    slow((Shows, {}, "writes the attribute 'example'")),
    (Centred, {}, "writes the attribute 'center.value'"),
    (Shuffles, {}, "`training_step` draws from Python's or NumPy's generator"),
    (Changes, {}, "`Changes.on_before_batch_transfer` expects the batch"),
    (models.ManualModule, {}, "manual optimization"),
    (models.Module, {"callbacks": [Clips]}, "`Clips.on_after_backward` expects the batch"),
    (models.Module, {"callbacks": [Notes]}, "`Notes.on_client_end` expects the batch"),
    (models.Module, {"gradient_clip_val": 1.0}, "clipping by norm would take the norm over all clients"),
    (models.Module, {"optimizer_state": "keep"}, "`optimizer_state='keep'`"),
    (models.Module, {"limit_train_batches": 4}, "`limit_train_batches` counts batches"),
    (models.Module, {"max_steps": 9}, "`max_steps` counts steps"),
    (lambda net: models.Module(net, lambda own: Lars(own, lr=0.1)), {}, "Lars is not elementwise"),
    slow((lambda net: models.Module(net, torch.optim.LBFGS), {}, "in a trial step LBFGS raised TypeError")),
    pytest.param(
        lambda net: models.Module(net, torch.optim.Adafactor),
        {},
        "Adafactor is not elementwise",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch 2.5 brings it"),
        ],
    ),
    slow((lambda net: models.Module(models.cnn()), {}, "in a trial step `training_step` raised RuntimeError: vmap")),
]


@pytest.mark.parametrize(("make", "options", "reason"), REASONS, ids=lambda value: value if type(value) is str else "")
def test_what_falls_back(make, options, reason, federated_trainer, caplog):
    """The log has the reason once, and the fit is bit-equal to sequential visits: the trial has no effect."""
    data = models.images() if make is REASONS[-1].values[0] else models.vectors()
    callbacks = options.get("callbacks", [])
    options = {name: value for name, value in options.items() if name != "callbacks"}
    results = []
    for size in (1, 3):
        torch.manual_seed(5)
        random.seed(5)
        module = make(models.dropout_mlp())
        made = [each() for each in callbacks]
        results.append(fit(federated_trainer, module, models.as_datasets(data), size, callbacks=made, **options))
        assert getattr(module, "seen", 0) in (0, results[-1][2])
    assert_same(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert record.getMessage().startswith("`visits=Vectorized(3)` has no effect, and clients train one after another")
    assert reason in record.getMessage()


def test_a_population_that_takes_no_turns(federated_trainer, caplog):
    class Plain(DatasetClients):
        def stream(self, visits, isolated=False):
            return super().stream(visits, isolated)

    class Data(FederatedDataModule):
        def population(self):
            return Plain(ClientSource(models.as_datasets(models.vectors())), 16)

    fit(
        federated_trainer, models.Module(models.mlp()), Data({"unused": models.as_datasets(models.vectors())["ann"]}), 3
    )
    assert "one after another: `Plain.stream` has no argument `groups`" in caplog.text


def test_a_callback_may_say_that_it_supports_vectorize(federated_trainer, caplog):
    class Watches(L.Callback):
        supports_vectorize = True

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.shape = module.net[0].weight.shape

    watches = Watches()
    fit(federated_trainer, models.Module(models.mlp()), models.as_datasets(models.vectors()), 5, callbacks=[watches])
    assert watches.shape == (5, 8, 6)
    assert not caplog.records


def test_both_doors_have_it(either_trainer):
    steps = Steps()
    trainer = either_trainer(max_rounds=1, visits=Vectorized(5), callbacks=[steps])
    trainer.fit(
        models.Module(models.mlp()), datamodule=FederatedDataModule(models.as_datasets(models.vectors()), batch_size=16)
    )
    assert steps.steps == 6  # 97 examples in batches of 16; the last batch has one example
    with pytest.raises(ValueError, match="Expected `clients` to be at least 1, but got 0"):
        either_trainer(max_rounds=1, visits=Vectorized(0))


def test_the_loss_of_a_step_is_the_mean(federated_trainer):
    class Sees(L.Callback):
        supports_vectorize = True
        losses = ()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.losses = (*self.losses, float(outputs["loss"]))

    sees, data = Sees(), models.as_datasets(models.vectors({"a": 16, "b": 16, "c": 9}))
    module = models.Module(models.mlp())
    expected = [F.cross_entropy(module(each.tensors[0]), each.tensors[1]).item() for each in data.values()]
    fit(federated_trainer, module, data, 3, max_rounds=1, callbacks=[sees])
    assert sees.losses == pytest.approx([sum(expected) / 3])
