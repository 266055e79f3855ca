"""MOON: gradients equal a loss in the training step; equality with FedAvg; messages and client state."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import MOON
from lightning_fed.algorithms.moon import contrastive_loss
from lightning_fed.callbacks import ContrastiveTerm, FederatedCallback
from tests import models
from tests.breadth import slow
from tests.recorders import MemoryLogger, Recorder, SavesOnException, assert_same, bytes_of, state_of
from tests.references_correction import Visits, moon_reference
from tests.test_invariants import held_bytes

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


class Seen(models.BaseAndHead):
    def forward(self, inputs):
        self.seen = self.base(inputs)
        return self.head(self.seen)


def base_features(net, inputs):
    return net.base(inputs)


class SeenMaps(nn.Module):
    """Convolutions with pooled features before the classifier."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maps = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, models.CLASSES)

    def forward(self, inputs):
        maps = self.maps(inputs)
        self.seen = maps.flatten(2).mean(2)
        return self.head(self.pool(maps).flatten(1))


def pooled_features(net, inputs):
    return net.maps(inputs).flatten(2).mean(2)


class SeenTokens(nn.Module):
    """A linear layer on tokens of shape (N, tokens, channels), averaged before the classifier."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Linear(2, 8)
        self.head = nn.Linear(8, models.CLASSES)

    def forward(self, inputs):
        tokens = self.token(inputs.unflatten(1, (-1, 2)))
        self.seen = tokens.mean(1)
        return self.head(tokens.relu().mean(1))


def averaged_tokens(net, inputs):
    return net.token(inputs.unflatten(1, (-1, 2))).mean(1)


@pytest.mark.parametrize(
    ("net", "features", "data", "layer"),
    [
        (Seen, base_features, models.vectors, "auto"),
        (SeenMaps, pooled_features, models.images, "auto"),
        slow((SeenTokens, averaged_tokens, models.vectors, "net.token")),
    ],
    ids=["a base", "maps", "tokens"],
)
def test_a_fit_against_a_plain_loop(net, features, data, layer, either_trainer):
    """Three of five clients per round, BatchNorm, momentum; the term is non-zero from a client's second visit."""
    clients, recorder = data(SIZES), Recorder()
    visits = Visits(clients, rounds=3, cohort_size=3, seed=4, batch_size=16, epochs=2)
    history = moon_reference(net(), features, visits, cross_entropy, models.momentum, mu=5.0)
    trainer = either_trainer(
        max_rounds=3, clients_per_round=3, local_epochs=2, method=MOON(mu=5.0, layer=layer), seed=4,
        batch_norm="average", callbacks=[recorder],
    )  # fmt: skip
    datamodule = FederatedDataModule(models.as_datasets(clients), batch_size=16)
    trainer.fit(models.Module(net(), models.momentum), datamodule=datamodule)
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for name, value in expected.items():
            assert torch.allclose(aggregate[f"net.{name}"].double(), value.double(), rtol=1e-3, atol=1e-5), name
    without = moon_reference(net(), features, visits, cross_entropy, models.momentum, mu=0.0)
    differ = [not torch.allclose(a["head.weight"], b["head.weight"]) for a, b in zip(history, without, strict=True)]
    assert differ[-1]
    assert not differ[0]


@pytest.mark.parametrize("options", [{"mu": 0.0}, {}], ids=["without strength", "first visits"])
def test_it_is_fedavg(options, federated_trainer):
    """Without a term, with dropout and BatchNorm: bit for bit."""
    states = []
    for method in ("fedavg", MOON(**options)):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(max_rounds=2 if options else 1, method=method, batch_norm="recalibrate")
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        states.append(state_of(module))
    assert_same(*states)
    if options:
        assert all(trainer.federation.store.get(client) is None for client in SIZES)


class Halves(models.Module):
    """Manual optimization with one step per half batch."""

    def __init__(self, net):
        super().__init__(net, models.sgd)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self(batch[0]), batch[1]))
        optimizer.step()


def test_by_hand_and_accumulated(federated_trainer):
    """Manual optimization gives equal weights; with accumulation in pairs the term is halved, as the loss is."""
    clients, states = models.as_datasets(models.vectors({"a": 32, "b": 64})), []
    for module, options in (
        (models.Module(models.BaseAndHead(), models.sgd), {}),
        (Halves(models.BaseAndHead()), {}),
        (models.Module(models.BaseAndHead(), models.sgd), {"accumulate_grad_batches": 2}),
    ):
        data = FederatedDataModule(clients, batch_size=16 if options else 32, shuffle=False)
        steps = 2 if options else 1
        federated_trainer(
            max_rounds=3, local_steps=steps, method=MOON(5.0), batch_norm="frozen", seed=1, **options
        ).fit(module, datamodule=data)
        states.append(state_of(module))
    assert_same(states[0], states[1])
    for name, value in states[0].items():
        assert torch.allclose(states[2][name].double(), value.double(), rtol=1e-4, atol=1e-6), name


def test_what_stays_and_what_travels(federated_trainer):
    """A client stores the sent network; messages only contain the model."""
    recorder, module = Recorder(), models.Module(models.BaseAndHead(), models.momentum)
    trainer = federated_trainer(
        max_rounds=2, method="moon", personal=["net.head.*"], batch_norm="average", callbacks=[recorder]
    )
    trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
    model = 5 * bytes_of(recorder.aggregates[0])
    assert recorder.down_bytes == recorder.up_bytes == [model, model]
    for visit in recorder.round(1):
        kept = trainer.federation.store.get(visit.client)
        # The network is only the base, with the name of the base.
        prefix = "memory:previous:"
        last = {f"net.base.{name.removeprefix(prefix)}": kept[name] for name in kept if name.startswith(prefix)}
        assert_same(visit.update, last)


def test_the_loss():
    generator = torch.Generator().manual_seed(0)
    z, g, p = torch.randn(3, 5, 4, generator=generator)
    for tau in (0.5, 2.0):
        expected = 0.0
        for row in range(5):
            near, far = (
                float(torch.exp(z[row] @ other[row] / (z[row].norm() * other[row].norm()) / tau)) for other in (g, p)
            )
            expected -= torch.log(torch.tensor(near / (near + far))).item() / 5
        assert contrastive_loss(z, g, p, tau).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_segmentation_models(federated_trainer):
    """On the last feature map of the encoder; the result differs from FedAvg."""
    states = []
    for method in ("fedavg", MOON(10.0)):
        module = models.Module(models.unet(), models.sgd)
        trainer = federated_trainer(max_rounds=2, method=method, batch_norm="average")
        trainer.fit(module, models.as_datasets(models.scenes({"a": 2, "b": 3})))
        states.append(state_of(module))
    first = "net.encoder.conv1.weight"
    assert not torch.equal(states[0][first], states[1][first])
    assert all(value.isfinite().all() for value in states[1].values())


def test_nothing_is_left_on_the_module(federated_trainer):
    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 1:
                raise KeyError("broken")

    clients, callback = models.as_datasets(models.vectors(SIZES)), ContrastiveTerm()
    for callbacks in ([callback], [callback, Break()]):
        module = models.Module(models.BaseAndHead())
        trainer = federated_trainer(max_rounds=2, callbacks=callbacks)
        if len(callbacks) == 2:
            with pytest.raises(KeyError, match="broken"):
                trainer.fit(module, clients)
        else:
            trainer.fit(module, clients)
        hooks = [layer._forward_pre_hooks or layer._forward_hooks for layer in module.modules()]  # noqa: SLF001
        assert not any(hooks)
        assert held_bytes(callback) == 0


def test_going_on(federated_trainer, tmp_path):

    class Break(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 2 and batch_idx == 3:
                raise KeyError("broken")

    def run(logger, *callbacks, **options):
        module = models.Module(models.BaseAndHead(), models.momentum)
        trainer = federated_trainer(
            max_rounds=4, method=MOON(5.0), clients_per_round=3, logger=logger,
            callbacks=[SavesOnException(broken), *callbacks],
        )  # fmt: skip
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)), **options)
        return state_of(module)

    broken = tmp_path / "broken.ckpt"
    expected = run(MemoryLogger())
    with pytest.raises(KeyError, match="broken"):
        run(MemoryLogger(), Break())
    assert_same(expected, run(MemoryLogger(), ckpt_path=broken))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mu": -1.0}, "`mu` to be at least 0 and finite"),
        ({"temperature": 0.0}, "`temperature` to be greater than 0 and finite"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        MOON(**options)


def test_compiled_networks_are_refused(federated_trainer):
    module = models.Module(torch.compile(models.mlp(), backend="eager"))
    with pytest.raises(MisconfigurationException, match=r"train without `torch\.compile`"):
        federated_trainer(max_rounds=1, method="moon").fit(module, models.as_datasets(models.vectors(SIZES)))


def test_features_that_are_not_made(federated_trainer):
    class Aside(models.BaseAndHead):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)

    with pytest.raises(MisconfigurationException, match="where MOON compares features, but this layer ran in no batch"):
        federated_trainer(max_rounds=2, method=MOON(layer="net.unused")).fit(
            models.Module(Aside()), models.as_datasets(models.vectors(SIZES))
        )
