"""The spread-out step on the server: layer, classes and learning rate; other entries do not change."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms.fedaws import callback as spreadout
from lightning_fed.callbacks import SampledSoftmax, SpreadOut
from lightning_fed.data import LazyClients
from lightning_fed.modules import SampledSoftmaxHead
from tests import models
from tests.breadth import slow
from tests.recorders import Recorder, assert_same, state_of
from tests.references_server import gradient_reference, spreadout_margin_reference, spreadout_top_k_reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

HEAD = "net.2.weight"
CLASSES = 9


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def per_step(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}


def still(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


class TwoRates(models.Module):
    """The head comes last in name order and has a separate learning rate."""

    def configure_optimizers(self):
        body, head = self.net[0].parameters(), self.net[2].parameters()
        return torch.optim.SGD([{"params": body, "lr": 0.5}, {"params": head, "lr": 0.2}])


def wide_head():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), SampledSoftmaxHead(4, CLASSES))


def some_classes():
    """Clients with a few classes each; no client has the last two classes."""
    generator = torch.Generator().manual_seed(5)
    own = {"ann": [0, 3], "bob": [1, 3, 4], "cid": [5], "dan": [2, 6]}
    return {
        name: (torch.randn(12, 6, generator=generator), torch.tensor(classes).repeat(12)[:12])
        for name, classes in own.items()
    }


def fit(federated_trainer, module, clients, step, rounds=1, others=(), **options):
    """States before and after the step in every round, and the Trainer."""
    before, after = Recorder(), Recorder()
    options = {"batch_norm": "average", **options}
    trainer = federated_trainer(max_rounds=rounds, callbacks=[*others, before, step, after], **options)
    trainer.fit(module, models.as_datasets(clients))
    return before, after, trainer


def stepped(weight, rate, function, normalize=True):
    """Expected weight: gradients by finite differences in plain Python, rows rescaled to the old length."""
    rows = weight.double().flatten(1).tolist()
    steps = gradient_reference(function, rows)
    new = [[value - rate * slope for value, slope in zip(*pair, strict=True)] for pair in zip(rows, steps, strict=True)]
    if normalize:
        scales = [math.hypot(*old) / math.hypot(*row) for old, row in zip(rows, new, strict=True)]
        new = [[value * scale for value in row] for row, scale in zip(new, scales, strict=True)]
    return torch.tensor(new, dtype=torch.float64).view(weight.shape).to(weight.dtype)


def lengths(weight):
    return torch.linalg.vector_norm(weight.double().flatten(1), dim=1)


def assert_stepped(before, after, rate, function, name=HEAD, normalize=True):
    assert_same(*({entry: value for entry, value in state.items() if entry != name} for state in (before, after)))
    assert torch.allclose(after[name], stepped(before[name], rate, function, normalize), atol=1e-5)
    assert (after[name] - before[name]).abs().max() > 1e-3
    assert after[name].dtype == before[name].dtype


# --- Step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", ["fedavg", slow("fedmargin"), "fedavgm"])
def test_the_nearest_classes(aggregator, federated_trainer):
    module = models.Module(models.mlp())
    before, after, _ = fit(
        federated_trainer, module, models.vectors(), SpreadOut(k=1, strength=2.0), rounds=2, method=aggregator
    )
    for old, new in zip(before.aggregates, after.aggregates, strict=True):
        assert_stepped(old, new, 2.0 * 0.1, lambda rows: spreadout_top_k_reference(rows, range(3), 1))
    assert_same(after.aggregates[-1], state_of(module))
    for visit in before.round(1):
        assert_same(visit.broadcast, after.aggregates[0])


def test_margins(federated_trainer):
    step = SpreadOut("margin", strength=0.5, margin=1.2)
    before, after, _ = fit(federated_trainer, models.Module(models.mlp()), models.vectors(), step)
    assert_stepped(
        before.aggregates[0], after.aggregates[0], 0.5 * 0.1, lambda rows: spreadout_margin_reference(rows, 1.2)
    )


@pytest.mark.parametrize(
    ("module", "lr", "rates"),
    [
        (lambda: models.Module(models.mlp(), scheduler=halving), None, [0.1, 0.05]),
        (lambda: TwoRates(models.mlp()), None, [0.2, 0.2]),
        (lambda: models.Module(models.mlp(), scheduler=per_step), None, None),
        (lambda: models.Module(models.mlp(), scheduler=halving), 0.03, [0.03, 0.03]),
    ],
)
def test_the_learning_rate(module, lr, rates, federated_trainer):
    before, after, _ = fit(federated_trainer, module(), models.vectors(), SpreadOut(strength=2.0, lr=lr), rounds=2)
    for number, (old, new) in enumerate(zip(before.aggregates, after.aggregates, strict=True)):
        rate = before.round(number)[0].learning_rates[0][-1] if rates is None else rates[number]
        assert_stepped(old, new, 2.0 * rate, lambda rows: spreadout_top_k_reference(rows, range(3), 10))
    assert rates is not None or 0 < rate < 0.1


@pytest.mark.parametrize("options", [{"strength": 0.0}, {"lr": 0.0}])
def test_without_strength_nothing_is_changed(options, federated_trainer):
    before, after, _ = fit(
        federated_trainer, models.Module(models.mlp()), models.vectors(), SpreadOut(**options), rounds=2
    )
    for old, new in zip(before.aggregates, after.aggregates, strict=True):
        assert_same(old, new)


def test_the_servers_momentum_does_not_see_it(federated_trainer):
    memories, states = [], []
    for strength in (0.0, 2.0):
        module = models.Module(models.mlp())
        *_, trainer = fit(federated_trainer, module, models.vectors(), SpreadOut(strength=strength), method="fedavgm")
        (step,) = trainer.federation.server.chain.steps
        memories.append({name: memory["momentum_buffer"] for name, memory in step.state_dict()["entries"].items()})
        states.append(state_of(module))
    assert_same(*memories)
    assert not torch.equal(states[0][HEAD], states[1][HEAD])


# --- Lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_stay_what_they_were(federated_trainer):
    """Without client training, directions change; rows without a gradient do not change."""
    module = models.Module(wide_head(), still)
    start = state_of(module)[HEAD]
    clients = {name: data for name, data in some_classes().items() if name in ("ann", "cid")}  # classes 0, 3 and 5
    before, after, _ = fit(
        federated_trainer, module, clients, SpreadOut(k=1, strength=2.0, lr=0.5), rounds=5,
        others=[SampledSoftmax(0, "posonly")],
    )  # fmt: skip
    for old, new in zip(before.aggregates, after.aggregates, strict=True):
        steps = gradient_reference(lambda rows: spreadout_top_k_reference(rows, [0, 3, 5], 1), old[HEAD].tolist())
        moved = torch.tensor([any(row) for row in steps])
        assert 3 <= moved.sum() < CLASSES
        assert torch.equal(new[HEAD][~moved], old[HEAD][~moved])
        assert (torch.cosine_similarity(new[HEAD], old[HEAD])[moved] < 0.999).all()
    torch.testing.assert_close(lengths(module.net[2].weight), lengths(start), rtol=1e-6, atol=0)


def test_lengths_that_are_free_grow(federated_trainer):
    """Every step is orthogonal to the rows."""
    before, after, _ = fit(
        federated_trainer, models.Module(models.mlp()), models.vectors(), SpreadOut(k=1, strength=2.0, normalize=False)
    )
    (old,), (new,) = before.aggregates, after.aggregates
    assert_stepped(old, new, 2.0 * 0.1, lambda rows: spreadout_top_k_reference(rows, range(3), 1), normalize=False)
    assert (lengths(new[HEAD]) > lengths(old[HEAD])).all()


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_row_of_zeros_stays(lr, federated_trainer):
    module = models.Module(models.mlp(), still)
    with torch.no_grad():
        module.net[2].weight[1] = 0
    _, after, _ = fit(federated_trainer, module, models.vectors(), SpreadOut(lr=lr))
    weight = after.aggregates[0][HEAD]
    assert weight.isfinite().all()
    assert not weight[1].any()


# --- Classes ----------------------------------------------------------------------------------------------------------


class Broken(FederatedCallback):
    changes_update = True

    def on_client_end(self, trainer, module, client, update):
        if client == "ann":
            update.state["net.0.bias"] = update.state["net.0.bias"] * float("nan")


@pytest.mark.parametrize("breaks", [False, True])
def test_classes_of_the_rounds_clients(breaks, federated_trainer):
    """Two of four clients per round hold the rows of their classes; a failed client contributes no classes."""
    clients = some_classes()
    before, after, _ = fit(
        federated_trainer, models.Module(wide_head()), clients, SpreadOut(k=2, strength=2.0), rounds=4,
        others=[SampledSoftmax(0, "posonly"), *([Broken()] if breaks else [])], clients_per_round=2, seed=1,
    )  # fmt: skip
    cohorts = [[visit.client for visit in before.round(number)] for number in range(4)]
    assert any("ann" in cohort for cohort in cohorts)
    for cohort, old, new in zip(cohorts, before.aggregates, after.aggregates, strict=True):
        good = [client for client in cohort if not (breaks and client == "ann")]
        classes = sorted({int(label) for client in good for label in clients[client][1]})
        assert 0 < len(classes) < CLASSES - 2
        assert_stepped(old, new, 2.0 * 0.1, lambda rows, c=classes: spreadout_top_k_reference(rows, c, 2))


def test_a_drawn_comparison(federated_trainer, monkeypatch):
    """The comparison only depends on seed and round."""
    seen = []

    def noting(weight, classes, k, comparison):
        seen.append(comparison)
        return top_k(weight, classes, k, comparison)

    top_k = spreadout.spreadout_top_k
    monkeypatch.setattr(spreadout, "spreadout_top_k", noting)
    for seed in (0, 0, 1):
        torch.manual_seed(len(seen))
        step = SpreadOut(comparison=4)
        fit(federated_trainer, models.Module(wide_head()), some_classes(), step, rounds=6, seed=seed)
    first, again, other = seen[:6], seen[6:12], seen[12:]
    for drawn in seen:
        assert len(drawn) == 4
        assert (drawn.diff() > 0).all()
        assert 0 <= drawn.min() <= drawn.max() < CLASSES
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(first, other, strict=True))
    assert len({tuple(drawn.tolist()) for drawn in first}) > 1
    assert len(torch.cat(seen).unique()) == CLASSES
    fit(federated_trainer, models.Module(wide_head()), some_classes(), SpreadOut(comparison=CLASSES))
    assert seen[-1] is None


# --- Layer ------------------------------------------------------------------------------------------------------------


class Images(nn.Module):
    """A classifier with a convolution as last layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(1, 4, 3)
        self.logits = nn.Conv2d(4, models.CLASSES, 1)

    def forward(self, inputs):
        return self.logits(self.body(inputs).relu()).mean((2, 3))


def test_a_convolution(federated_trainer):
    before, after, _ = fit(federated_trainer, models.Module(Images()), models.images(), SpreadOut(k=1, strength=1.0))
    (old,), (new,) = before.aggregates, after.aggregates
    assert_stepped(
        old, new, 0.1, lambda rows: spreadout_top_k_reference(rows, range(3), 1), "net.logits.weight"
    )  # fmt: skip


def test_a_layer_by_name(federated_trainer):
    before, after, _ = fit(
        federated_trainer, models.Module(models.mlp()), models.vectors(), SpreadOut(k=1, entry="net.0.weight")
    )
    (old,), (new,) = before.aggregates, after.aggregates
    assert_stepped(
        old, new, 10.0 * 0.1, lambda rows: spreadout_top_k_reference(rows, range(8), 1), "net.0.weight"
    )  # fmt: skip


def test_half_precision(federated_trainer):
    module = models.Module(models.mlp())
    before, after, _ = fit(federated_trainer, module, models.vectors(), SpreadOut(), precision="bf16-true")
    (old,), (new,) = before.aggregates, after.aggregates
    assert new[HEAD].dtype == torch.bfloat16
    expected = stepped(old[HEAD], 1.0, lambda rows: spreadout_top_k_reference(rows, range(3), 10))
    assert torch.equal(new[HEAD], expected)  # rounded once


# --- Interaction with other parts -------------------------------------------------------------------------------------


def test_the_order_of_the_clients_does_not_matter(federated_trainer):
    clients, states = models.as_datasets(some_classes()), []
    for names in (list(clients), list(clients)[::-1]):
        module = models.Module(wide_head())
        callbacks = [SampledSoftmax(2), SpreadOut(k=2, comparison=5)]
        trainer = federated_trainer(max_rounds=3, method="fedavgm", callbacks=callbacks, seed=3)
        trainer.fit(module, LazyClients(names, clients.__getitem__))
        states.append(state_of(module))
    assert_same(*states)


def test_a_resumed_fit_ends_as_one_without_break(federated_trainer, tmp_path):
    """With server momentum, interrupted during a round."""

    class Break(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            if broadcast.round == 2 and client == "cid":
                raise KeyboardInterrupt

    def run(folder, *others, **options):
        module, saver = models.Module(wide_head()), ModelCheckpoint(tmp_path / folder, save_last=True)
        callbacks = [SampledSoftmax(2), SpreadOut(k=2, comparison=5), saver, *others]
        trainer = federated_trainer(max_rounds=4, method="fedavgm", callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(some_classes())), **options)
        return state_of(module)

    whole = run("whole")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run("broken", Break())
    checkpoint = tmp_path / "broken" / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["callbacks"]["Federation"]["rounds"] == 2
    assert_same(whole, run("broken", ckpt_path=checkpoint))


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "topk"}, r"`variant` to be one of \['top_k', 'margin'\], but got 'topk'"),
        ({"k": 0}, "`k` to be at least 1, but got 0"),
        ({"strength": -1.0}, "`strength` to be at least 0 and finite, but got -1.0"),
        ({"lr": float("inf")}, "`lr` to be at least 0 and finite, but got inf"),
        ({"margin": 0.0}, "`margin` to be greater than 0 and finite, but got 0.0"),
        ({"comparison": 0}, "`comparison` to be at least 1, but got 0"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        SpreadOut(**options)


class NoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(6, 3))

    def forward(self, inputs):
        return inputs @ self.w


@pytest.mark.parametrize(
    ("net", "options", "personal", "message"),
    [
        (
            models.mlp,
            {"entry": "net.head.weight"},
            (),
            "`entry` to be a weight of Module .*, but got 'net.head.weight'",
        ),
        (models.mlp, {"entry": "net.2.bias"}, (), "with one row per class, but got 'net.2.bias'"),
        (models.mlp, {}, ["net.2.*"], "`entry` to be a shared entry, but 'net.2.weight' is personal"),
        (NoLayers, {}, (), "with one row per class, but got 'net.weight'"),
    ],
)
def test_layers_that_cannot_be(net, options, personal, message, federated_trainer):
    module = models.Module(net())
    start = state_of(module)
    with pytest.raises(ValueError, match=message):
        fit(federated_trainer, module, models.vectors(), SpreadOut(**options), personal=personal)
    assert_same(start, state_of(module))
