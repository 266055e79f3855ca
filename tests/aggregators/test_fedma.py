"""FedMA: the protocol against a plain one, identities, what travels, who is left out, breaks, and grown checkpoints."""

import copy
import itertools

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.aggregators import PFNM, FedAvg, FedMA
from lightning_fed.callbacks import FederatedCallback, LayerwiseTraining
from lightning_fed.functional import class_mean
from lightning_fed.matching import PermutationGroups, Stage, find_stages, match_states
from lightning_fed.messages import ClientUpdate
from lightning_fed.schedule import client_key
from tests import models
from tests.recorders import MemoryLogger, Recorder, assert_same, state_of
from tests.references_fedma import fedma_pass

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

WIDTHS, CLASSES = (4, 7, 6, 3), 3


def mlp(widths=WIDTHS, seed=1):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def examples(client, count, inputs=4, labels=CLASSES):
    generator = torch.Generator().manual_seed(100 + client)
    y = torch.randint(0, labels, (count,), generator=generator)
    return torch.randn(count, inputs, generator=generator) + y[:, None] * torch.linspace(-1, 1, inputs), y


def parts(counts=(9, 14, 6), labels=(3, 2, 3)):
    return {f"c{c}": examples(c, count, labels=own) for c, (count, own) in enumerate(zip(counts, labels, strict=True))}


def data_of(own, batch_size=64):
    return FederatedDataModule({client: TensorDataset(*part) for client, part in own.items()}, batch_size=batch_size)


def layers_of(net):
    return [
        [layer.weight.detach().clone(), layer.bias.detach().clone()] for layer in net if isinstance(layer, nn.Linear)
    ]


def fit(trainer, module, data, *more, **arguments):
    trainer.fit(module, *more, **({"datamodule": data} if isinstance(data, L.LightningDataModule) else {}), **arguments)
    return trainer


def logged(logger, name):
    return [value for _, value in logger.curve(name)]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# --- the protocol -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "last"), [("grow", "class"), ("grow", "size"), ("none", "class")])
def test_a_pass_is_that_of_the_reference(either_trainer, mode, last):
    """Widths, neurons, biases and the output layer, after training in between with different numbers of epochs."""
    own = parts()
    rule = FedMA(
        mode, retrain_epochs=2, last_epochs=4, last_layer=last, score="published", gamma=7.0, max_width=None, seed=5
    )
    module = models.Module(mlp(), momentum)
    trainer = either_trainer(max_rounds=3, aggregator=rule, local_epochs=3)
    fit(trainer, module, data_of(own))
    clients = sorted(own, key=client_key)
    expected, _ = fedma_pass(
        [layers_of(mlp()) for _ in clients],
        [own[client] for client in clients],
        steps=[3, 2, 4],
        lr=0.1,
        momentum=0.9,
        gamma=7.0,
        generators=[np.random.default_rng([5, round]) for round in range(3)],
        last=last,
        matches=mode == "grow",
    )
    found = layers_of(module.net)
    assert [len(bias) for _, bias in found] == [len(bias) for _, bias in expected]
    assert (len(found[0][1]) > 7) == (mode == "grow")
    sizes = [sum(part.numel() for layer in layers for part in layer) for layers in (found, layers_of(mlp()))]
    assert float(trainer.callback_metrics["fedma/growth"]) == sizes[0] / sizes[1]
    assert float(trainer.callback_metrics["fedma/net.0/width"]) == len(found[0][1])
    for (weight, bias), (weight_, bias_) in zip(found, expected, strict=True):
        torch.testing.assert_close(weight, weight_, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(bias, bias_, rtol=1e-4, atol=1e-6)
    assert [layer.out_features for layer in module.net if isinstance(layer, nn.Linear)] == [len(b) for _, b in expected]


def test_the_next_pass_starts_from_each_clients_own_neurons(federated_trainer):
    """At the clients' widths, in the clients' order."""
    own, seen = parts(), {}
    rule = FedMA("grow", score="published", gamma=7.0, max_width=None)

    class Watch(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            if trainer.current_epoch == 3:
                seen[client] = layers_of(module.net)

    module = models.Module(mlp(), momentum)
    trainer = federated_trainer(max_rounds=3, aggregator=rule, callbacks=[Watch()])
    fit(trainer, module, data_of(own))
    wide = layers_of(module.net)
    clients = sorted(own, key=client_key)
    _, places = fedma_pass(
        [layers_of(mlp()) for _ in clients],
        [own[client] for client in clients],
        [1, 1, 1],
        0.1,
        0.9,
        7.0,
        [np.random.default_rng([0, round]) for round in range(3)],
    )
    trainer.fit_loop.max_epochs = 4
    fit(trainer, module, data_of(own))
    assert len(seen) == 3
    for client, (first, second) in zip(clients, places, strict=True):
        (w1, b1), (w2, b2), (w3, b3) = seen[client]
        assert torch.equal(w1, wide[0][0][first])
        assert torch.equal(b1, wide[0][1][first])
        assert torch.equal(w2, wide[1][0][second][:, first])
        assert torch.equal(b2, wide[1][1][second])
        assert torch.equal(w3, wide[2][0][:, second])
        assert torch.equal(b3, wide[2][1])


def test_what_is_settled_stays(federated_trainer):
    """To the last bit, in all later visits, with weight decay and momentum; afterwards everything trains again."""
    seen = {}

    class Watch(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            seen[trainer.current_epoch, client] = (
                state_of(module),
                {n: p.requires_grad for n, p in module.named_parameters()},
            )

    rule = FedMA("grow")
    module = models.Module(mlp(), models.momentum)
    fit(federated_trainer(max_rounds=3, aggregator=rule, callbacks=[Watch()]), module, data_of(parts()))
    for client in parts():
        for name in ("net.0.weight", "net.0.bias"):
            values = [seen[round, client][0][name] for round in (1, 2)]
            assert torch.equal(values[0], values[1])
            assert torch.equal(values[0], state_of(module)[name])
            assert [seen[round, client][1][name] for round in range(3)] == [True, False, False]
        assert torch.equal(seen[2, client][0]["net.2.weight"], state_of(module)["net.2.weight"])
        assert not torch.equal(seen[1, client][0]["net.4.weight"], seen[2, client][0]["net.4.weight"])
    assert all(parameter.requires_grad for parameter in module.parameters())


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["grow", "permute", "none"])
def test_one_client_is_freezing_layer_after_layer(either_trainer, mode):
    """Plain training that freezes one layer more in every epoch, bit for bit; nothing grows."""
    inputs, targets = examples(0, 12)
    module = models.Module(mlp(), models.momentum)
    fit(
        either_trainer(max_rounds=3, aggregator=FedMA(mode), local_epochs=2),
        module,
        data_of({"a": (inputs, targets)}, 12),
    )
    net = mlp()
    generator = list(net)
    for frozen in range(3):
        for layer in generator[: 2 * frozen]:
            layer.requires_grad_(False)
        optimizer = models.momentum(net.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    for found, expected in zip(layers_of(module.net), layers_of(net), strict=True):
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["grow", "permute"])
def test_identical_clients_are_one_client(federated_trainer, mode):
    """The width stays, and so does the model, up to the rounding of a mean."""
    part = examples(0, 12)
    alone, many = models.Module(mlp(), momentum), models.Module(mlp(), momentum)
    fit(federated_trainer(max_rounds=3, aggregator=FedMA(mode), local_epochs=2), alone, data_of({"a": part}))
    fit(
        federated_trainer(max_rounds=3, aggregator=FedMA(mode), local_epochs=2),
        many,
        data_of({"a": part, "b": part, "c": part}),
    )
    for name, value in state_of(many).items():
        torch.testing.assert_close(value, state_of(alone)[name], rtol=1e-5, atol=1e-6)


def test_without_matching_in_one_exchange_it_is_federated_averaging(federated_trainer):
    """Bit for bit, over several rounds."""
    states = []
    for rule in (FedAvg(), FedMA("none", stages=1, last_layer="size")):
        module = models.Module(mlp(), momentum)
        fit(federated_trainer(max_rounds=3, aggregator=rule, local_epochs=2), module, data_of(parts(), 4))
        states.append(state_of(module))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_permuting_that_finds_the_identity_is_averaging(federated_trainer):
    """Clients that start alike and have moved little are averaged as they are."""
    states = []
    for mode in ("permute", "none"):
        module = models.Module(mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        fit(federated_trainer(max_rounds=3, aggregator=FedMA(mode)), module, data_of(parts()))
        states.append(state_of(module))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def settle(rule, states, groups, stages, sizes=None):
    """One pass by messages alone, without training: what clients have is aligned by the messages."""
    clients = {f"c{place}": state for place, state in enumerate(states)}
    start = states[0]
    rule.prepare(groups, stages, start)
    widths = {client: {} for client in clients}
    for round in range(len(stages)):
        rule.start_round(round, start)
        for client, state in clients.items():
            message = rule.broadcast(client)
            if round:
                own = groups.resized(widths[client])
                places = {n.removeprefix("fedma:places:"): v for n, v in message.extras.items() if "places" in n}
                new = {n.removeprefix("fedma:width:"): int(v) for n, v in message.extras.items() if "width" in n}
                clients[client] = state = own.grow(state, new, places) | message.state
                widths[client] |= new
            sent = {name: state[name].clone() for name in stages[round].entries}
            assert {n: v.shape for n, v in rule.expected(message).items()} == {n: v.shape for n, v in sent.items()}
            rule.receive(ClientUpdate(client, 5, sent))
        state = rule.aggregate()
        assert (state is start) == (round < len(stages) - 1)
    return state


@pytest.mark.parametrize("mode", ["grow", "permute"])
def test_clients_that_differ_in_the_order_of_neurons_are_one_network(mode):
    """Of convolutions, a flattened map and BatchNorm."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    ).eval()
    net[1].running_mean.uniform_(-1, 1)
    images = torch.randn(4, 1, 6, 6)
    groups = PermutationGroups.of(net, images)
    stages = find_stages(groups, list(net.state_dict()))
    assert [stage.groups for stage in stages] == [("0",), ("3",), ("6",), ()]
    states = [
        groups.permute(net.state_dict(), {n: torch.randperm(s) for n, s in groups.sizes.items()}) for _ in range(3)
    ]
    merged = settle(FedMA(mode), states, groups, stages)
    expected = net(images)
    net.load_state_dict(merged)
    torch.testing.assert_close(net(images), expected, rtol=1e-4, atol=1e-5)
    plain = {name: torch.stack([s[name].double() for s in states]).mean(0).to(v) for name, v in merged.items()}
    net.load_state_dict(plain)
    assert float((net(images) - expected).detach().abs().max()) > 0.05  # the average of networks in different orders


# --- what travels -----------------------------------------------------------------------------------------------------


def test_bytes_of_a_pass(federated_trainer):
    """Every layer goes up once; down goes the model, then each settled layer with the places of the neurons."""
    logger, own = MemoryLogger(), parts()
    rule = FedMA("permute")
    trainer = federated_trainer(max_rounds=6, aggregator=rule, logger=logger)
    fit(trainer, models.Module(mlp(), momentum), data_of(own))
    layer = [4 * (a * b + b) for a, b in itertools.pairwise(WIDTHS)]
    up = logged(logger, "comm/up_bytes")
    down = logged(logger, "comm/down_bytes")
    counts = 8 * CLASSES  # of the classes, with the output layer
    assert up == 2 * [3 * layer[0], 3 * layer[1], 3 * (layer[2] + counts)]
    step = 2 * 8  # the pass and the stage, and those that the client must have
    places = [8 * (width + 1) for width in WIDTHS[1:3]]
    middle = [3 * (layer[0] + places[0] + 2 * step), 3 * (layer[1] + places[1] + 2 * step)]
    first = 3 * (sum(layer) + step)
    again = 3 * (layer[2] + 2 * step)  # it has all the rest
    assert down == [first, *middle, again, *middle]


def test_independent_clients_are_sent_nothing_at_the_start(federated_trainer):
    """Each draws its own numbers, the same in every fit; a layer that cannot is an error."""
    seen = []

    class Watch(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            seen.append((client, layers_of(module.net)))

    for _ in range(2):
        logger = MemoryLogger()
        trainer = federated_trainer(
            max_rounds=1, aggregator=FedMA(start="independent"), callbacks=[Watch()], logger=logger, seed=3
        )
        fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
        assert logged(logger, "comm/down_bytes") == [3 * 16]
    weights = {client: layers[0][0] for client, layers in seen[:3]}
    assert len(weights) == 3
    assert all(torch.equal(layers[0][0], weights[client]) for client, layers in seen[3:])
    assert len({weight.sum().item() for weight in [*weights.values(), mlp()[0].weight]}) == 4

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.shift = mlp(), nn.Parameter(torch.zeros(3))

        def forward(self, inputs):
            return self.net(inputs) + self.shift

    trainer = federated_trainer(max_rounds=1, aggregator=FedMA(start="independent"))
    with pytest.raises(ValueError, match=r"these cannot: \['net.shift'\]"):
        fit(trainer, models.Module(Bare(), momentum), data_of(parts()))


# --- who takes part ---------------------------------------------------------------------------------------------------


class Visitors(FederatedCallback):
    """Notes who trains in every round, and what they start from."""

    def __init__(self):
        self.rounds, self.widths = {}, {}

    def on_client_start(self, trainer, module, client, broadcast):
        self.rounds.setdefault(trainer.current_epoch, []).append(client)
        self.widths[trainer.current_epoch, client] = [len(bias) for _, bias in layers_of(module.net)]


def many(count=8):
    return {f"c{c}": examples(c, 8 + c) for c in range(count)}


def test_a_pass_has_the_same_clients_and_the_next_one_others(federated_trainer):
    """Those that are new start from the neurons that most clients have, at the clients' widths."""
    watch = Visitors()
    rule = FedMA("grow", score="published", gamma=7.0, max_width=None)
    module = models.Module(mlp(), momentum)
    trainer = federated_trainer(max_rounds=6, aggregator=rule, clients_per_round=3, callbacks=[watch], seed=1)
    fit(trainer, module, data_of(many()))
    assert watch.rounds[0] == watch.rounds[1] == watch.rounds[2]
    assert watch.rounds[3] == watch.rounds[4] == watch.rounds[5]
    assert set(watch.rounds[3]) - set(watch.rounds[0])
    assert all(watch.widths[3, client] == [7, 6, 3] for client in watch.rounds[3])
    assert trainer.callback_metrics["fed/clients"] == 3


def test_a_client_that_fails_is_left_out_for_the_rest_of_the_pass(federated_trainer, caplog):
    """And is back in the next one, which it starts like a newcomer."""
    watch = Visitors()

    class Broken(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1 and client == "c1":
                next(iter(update.state.values())).fill_(float("nan"))

    trainer = federated_trainer(max_rounds=4, aggregator=FedMA(), callbacks=[watch, Broken()])
    fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
    assert [sorted(watch.rounds[round]) for round in range(4)] == [
        ["c0", "c1", "c2"],
        ["c0", "c1", "c2"],
        ["c0", "c2"],
        ["c0", "c1", "c2"],
    ]
    assert "left out for the rest of the pass: c1" in caplog.text


def test_a_new_pass_begins_where_nothing_came_of_a_round(federated_trainer, caplog):
    watch = Visitors()

    class Broken(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1:
                next(iter(update.state.values())).fill_(float("nan"))

    rule = FedMA()
    module = models.Module(mlp(), momentum)
    fit(federated_trainer(max_rounds=5, aggregator=rule, callbacks=[watch, Broken()]), module, data_of(parts()))
    other = models.Module(mlp(), momentum)
    assert "a new pass begins" in caplog.text
    assert rule.unfinished is None
    assert rule.state_dict()["last"]["origin"] == 2
    assert all(watch.rounds[round] == ["c0", "c1", "c2"] for round in range(5))
    assert not all(torch.equal(value, state_of(other)[name]) for name, value in state_of(module).items())


def test_a_client_that_has_lost_its_model_is_left_out(federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=3, aggregator=FedMA(), store=None)

    class Forget(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                store = trainer.federation.store.checkpoint(1)
                kept = [place for place, client in enumerate(store["clients"]) if client != "c2"]
                trainer.federation.store.restore(
                    1, {name: [own[place] for place in kept] for name, own in store.items()}
                )

    trainer.callbacks.append(Forget())
    fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
    assert "client 'c2' is left out: it does not have its model of the stage before any more" in caplog.text
    assert trainer.callback_metrics["fed/clients"] == 2


# --- BatchNorm --------------------------------------------------------------------------------------------------------


def norm_net():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
    )


def test_statistics_of_a_settled_stage_are_measured_and_kept(federated_trainer):
    """Later layers train with them in evaluation mode; those of the complete model are measured once more."""
    own, seen, modes = parts(), {}, {}

    class Watch(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            seen[trainer.current_epoch, client] = state_of(module)
            modes[trainer.current_epoch] = [module.net[place].training for place in (1, 4)]

    module = models.Module(norm_net(), momentum)
    trainer = federated_trainer(max_rounds=3, aggregator=FedMA("permute"), callbacks=[Watch()])
    fit(trainer, module, data_of(own))
    assert modes == {0: [True, True], 1: [False, True], 2: [False, False]}
    inputs = torch.cat([part[0] for part in own.values()])
    for round, layer in ((1, 1), (2, 4)):
        for client in own:
            state = seen[round, client]
            net = norm_net()
            net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
            hidden = net[:layer].eval()(inputs)  # what goes into the layer, with earlier statistics as they are
            torch.testing.assert_close(state[f"net.{layer}.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(state[f"net.{layer}.running_var"], hidden.var(0), rtol=1e-4, atol=1e-5)
    net = module.net.eval()
    first = net[0](inputs)
    torch.testing.assert_close(net[1].running_mean, first.mean(0), rtol=1e-4, atol=1e-5)
    assert all(layer.training for layer in module.net) or not module.net.training


# --- other networks ---------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Reads a sequence: an embedding, an LSTM, the last step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.rnn, self.decoder = nn.Embedding(9, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 9)

    def forward(self, tokens):
        return self.decoder(self.rnn(self.embedding(tokens))[0][:, -1])


def texts(client, count=24):
    generator = torch.Generator().manual_seed(client)
    tokens = torch.randint(0, 9, (count, 7), generator=generator)
    return tokens, (tokens[:, -1] + 1) % 9


def test_a_recurrent_network_grows(federated_trainer):
    """The hidden units' rows in all gates and their columns go along: an LSTM with more units that runs, and learns."""
    own = {f"c{c}": texts(c) for c in range(3)}
    module = models.Module(Reader(), lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5))
    rule = FedMA("grow", score="published", gamma=7.0)
    trainer = federated_trainer(max_rounds=18, aggregator=rule, local_epochs=8)
    fit(trainer, module, data_of(own, 8))
    assert module.net.rnn.hidden_size == 7 == module.net.rnn.weight_hh_l0.shape[1]
    assert module.net.rnn.weight_hh_l0.shape[0] == 28 == len(module.net.rnn.bias_hh_l0)
    tokens, targets = texts(50, 300)
    assert float((module.eval()(tokens).argmax(1) == targets).float().mean()) > 0.8


class Residual(nn.Module):
    """Two stages with blocks whose sums tie their channels, normalised over the batch, a depthwise convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)

        def block(a, b):
            return nn.Sequential(
                nn.Conv2d(a, a, 3, padding=1, groups=a),
                nn.Conv2d(a, b, 1),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1, bias=False),
                nn.BatchNorm2d(b),
            )

        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.first, self.second, self.side = block(4, 4), block(4, 6), nn.Conv2d(4, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, images):
        features = self.stem(images)
        features = (features + self.first(features)).relu()
        features = (self.side(features) + self.second(features)).relu()
        return self.head(features.mean((2, 3)))


def pictures(client, count=24):
    generator = torch.Generator().manual_seed(client)
    targets = torch.randint(0, 3, (count,), generator=generator)
    images = torch.randn(count, 1, 6, 6, generator=generator)
    for label in range(3):
        images[targets == label, :, 2 * label : 2 * label + 2] += 1.5
    return images, targets


@pytest.mark.parametrize(("mode", "stages"), [("grow", "auto"), ("permute", 2), ("grow", 1)])
def test_a_residual_network_with_batch_norm(federated_trainer, mode, stages):
    """From models that each client drew for itself, whose plain average is at chance."""
    own = {f"c{c}": pictures(c) for c in range(3)}
    scores = {}
    images, targets = pictures(50, 300)
    for name, rule in (
        ("matched", FedMA(mode, stages, start="independent")),
        ("averaged", FedMA("none", 1, start="independent")),
    ):
        module = models.Module(Residual(), lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        rounds = 2 if name == "matched" and stages != 1 else 1
        fit(federated_trainer(max_rounds=rounds, aggregator=rule, local_epochs=12), module, data_of(own, 8))
        assert rule.unfinished is None
        assert rule.state_dict()["last"]["stage"] == rounds
        scores[name] = float((module.eval()(images).argmax(1) == targets).float().mean())
    assert scores["matched"] > max(0.5, scores["averaged"] + 0.1)


@pytest.mark.slow
def test_deeplab_grows_and_goes_on(federated_trainer):
    """Thirteen stages, or four; widths of depthwise layers, of the pyramid and of the decoder."""
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    net = smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=3, decoder_channels=16)
    module = models.Module(net, lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    masks = {f"c{c}": (torch.randn(4, 3, 64, 64), torch.randint(0, 3, (4, 64, 64))) for c in range(2)}
    rule = FedMA("grow", 4, score="published", gamma=7.0)
    trainer = federated_trainer(max_rounds=5, aggregator=rule)
    fit(trainer, module, data_of(masks, 4))
    assert net.encoder.conv1.out_channels > 64
    assert net.decoder.block2[0][0].groups == net.decoder.block2[0][0].in_channels
    assert rule.unfinished is not None
    assert trainer.callback_metrics["fed/clients"] == 2
    with torch.no_grad():
        assert bool(module.eval()(torch.randn(2, 3, 64, 64)).isfinite().all())


# --- breaks, checkpoints ----------------------------------------------------------------------------------------------


class Stop(L.Callback):
    def __init__(self, round, batch):
        self.at = round, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("store", ["memory", "folder"])
@pytest.mark.parametrize("round", [1, 3, 4])
def test_resumed_in_a_pass_it_ends_with_the_same_model(federated_trainer, tmp_path, round, store):
    """Between stages, and in a pass after the model has grown: in a new module of the original widths."""

    def make(name, *callbacks):
        return federated_trainer(
            max_rounds=6,
            aggregator=FedMA("grow", score="published", gamma=7.0, max_width=None),
            callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            store=None if store == "memory" else tmp_path / name,
        )

    whole = models.Module(norm_net(), momentum)
    fit(make("whole"), whole, data_of(parts(), 4))
    saver = ModelCheckpoint(tmp_path / "saved", save_last=True, save_on_train_epoch_end=True)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(make("broken", saver, Stop(round, 3)), models.Module(norm_net(), momentum), data_of(parts(), 4))
    resumed = models.Module(norm_net(), momentum)
    fit(make("broken", saver), resumed, data_of(parts(), 4), ckpt_path=tmp_path / "saved" / "last.ckpt")
    assert len(state_of(whole)["net.0.bias"]) > 6
    assert all(torch.equal(value, state_of(resumed)[name]) for name, value in state_of(whole).items())


def test_validation_and_checkpoints_go_on_with_a_grown_model(federated_trainer, tmp_path):
    """The same scores in the same process, from the checkpoint in a new module, and in prediction."""
    own = parts()
    validation = DataLoader(TensorDataset(*examples(9, 40)), 16)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    rule = FedMA("grow", score="published", gamma=7.0, max_width=None)
    trainer = federated_trainer(max_rounds=3, aggregator=rule, callbacks=[saver], enable_checkpointing=True)
    module = models.Module(mlp(), momentum)
    trainer.fit(module, {client: TensorDataset(*part) for client, part in own.items()}, validation)
    expected = trainer.callback_metrics["val_loss"]
    assert trainer.validate(module, validation, verbose=False)[0]["val_loss"] == pytest.approx(float(expected))
    fresh = models.Module(mlp(seed=8), momentum)
    other = federated_trainer(max_rounds=3, aggregator=FedMA(), callbacks=[saver], enable_checkpointing=True)
    found = other.validate(fresh, validation, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert found[0]["val_loss"] == pytest.approx(float(expected))
    assert fresh.net[0].out_features > 7


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "shrink"}, "mode"),
        ({"last_layer": "mean"}, "last_layer"),
        ({"start": "zero"}, "start"),
        ({"retrain_epochs": 0}, "retrain_epochs"),
        ({"max_width": 0.5}, "max_width"),
        ({"gamma": 0.0}, "gamma"),
        ({"passes": -1}, "passes"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        FedMA(**options)


def test_what_cannot_be_in_a_fit(federated_trainer):
    """Each error says what to do instead."""

    def run(rule=None, optimizer=momentum, **arguments):
        trainer = federated_trainer(max_rounds=2, aggregator=rule or FedMA(), **arguments)
        fit(trainer, models.Module(mlp(), optimizer), data_of(parts()))

    with pytest.raises(MisconfigurationException, match="optimizer_state='reset'"):
        run(optimizer_state="keep")
    with pytest.raises(MisconfigurationException, match="Adagrad"):
        run(optimizer=torch.optim.Adagrad)
    with pytest.raises(MisconfigurationException, match=r"is FedAvg\."):
        run(FedAvg(), callbacks=[LayerwiseTraining()])
    with pytest.raises(ValueError, match=r"'net\.4\.weight' matches none"):
        run(FedMA(stages=[["net.0.*"], ["net.2.*"]]))
    with pytest.raises(ValueError, match="no `local_steps`"):
        run(FedMA(retrain_epochs=2, stages=[["net.0.*"], ["*"]]), local_steps=2)


def test_counts_that_cannot_be_leave_the_client_out(federated_trainer, caplog):
    class Broken(FederatedCallback):
        def on_update(self, trainer, module, update):
            if update.client == "c1" and "fedma:counts" in update.extras:
                update.extras["fedma:counts"] -= 1000

    fit(
        federated_trainer(max_rounds=3, aggregator=FedMA(), callbacks=[Broken()]),
        models.Module(mlp(), momentum),
        data_of(parts()),
    )
    assert "client 'c1' is left out: its class counts are not" in caplog.text


def test_targets_without_classes_are_averaged_by_size(federated_trainer):
    """A regression: no counts, no failure."""
    own = {c: (part[0], part[0][:, :3].clone()) for c, part in parts().items()}
    states = []
    for last in ("class", "size"):
        module = models.Module(mlp(), momentum, loss=F.mse_loss)
        trainer = federated_trainer(max_rounds=3, aggregator=FedMA(last_layer=last))
        if last == "class":
            with pytest.warns(UserWarning, match="by numbers of examples, because the labels are torch.float32"):
                fit(trainer, module, data_of(own))
        else:
            fit(trainer, module, data_of(own))
        states.append(state_of(module))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


class NoForward(models.Module):
    """Its operations cannot be read off: there is nothing to call."""

    def forward(self, inputs):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


def test_a_module_that_cannot_be_followed_is_averaged_in_one_exchange(federated_trainer):
    """With a warning, BatchNorm among its layers."""
    states = []
    for rule in (FedMA("none", stages=1, last_layer="size"), FedMA()):
        module = NoForward(norm_net(), momentum)
        trainer = federated_trainer(max_rounds=2, aggregator=rule)
        if rule.mode == "none":
            fit(trainer, models.Module(norm_net(), momentum), data_of(parts()))
            states.append(state_of(trainer.lightning_module))
        else:
            with pytest.warns(UserWarning, match=r"cannot be read off|no neurons"):
                fit(trainer, module, data_of(parts()))
            states.append(state_of(module))
    assert_same(*states)


def test_merged_rules_are_one():
    """Updates that two processes received are those of one."""
    net = mlp()
    groups = PermutationGroups.of(net, torch.zeros(2, 4))
    stages = [
        Stage(("0",), ("0.weight", "0.bias")),
        Stage(("2",), ("2.weight", "2.bias")),
        Stage((), ("4.weight", "4.bias")),
    ]
    updates = [
        ClientUpdate(
            f"c{c}", c + 1, {name: value for name, value in mlp(seed=c).state_dict().items() if name[0] == "0"}
        )
        for c in range(4)
    ]
    rules = [FedMA(), FedMA(), FedMA()]
    for rule in rules:
        rule.prepare(groups, stages, net.state_dict())
        rule.start_round(0, net.state_dict())
    for place, update in enumerate(updates):
        rules[place % 2].receive(copy.deepcopy(update))
        rules[2].receive(copy.deepcopy(update))
    rules[0].merge(rules[1])
    for rule in (rules[0], rules[2]):
        rule.aggregate()
    one, other = (rule.state_dict()["current"]["settled"] for rule in (rules[0], rules[2]))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    with pytest.raises(TypeError, match="FedAvg"):
        rules[0].merge(FedAvg())


def test_pfnm_is_one_exchange(federated_trainer):
    """All layers of the clients' updates matched at once, from the last to the first."""
    logger, module, watch = MemoryLogger(), models.Module(mlp(), momentum), Recorder()
    rule = PFNM(last_layer="size", seed=4)
    fit(federated_trainer(max_rounds=1, aggregator=rule, logger=logger, callbacks=[watch]), module, data_of(parts()))
    model = 4 * sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
    assert logged(logger, "comm/up_bytes") == [3 * model]
    visits = sorted(watch.visits, key=lambda visit: client_key(visit.client))
    groups = PermutationGroups.of(models.Module(mlp()), torch.zeros(2, 4))
    merged = match_states(
        [visit.update for visit in visits],
        groups,
        np.random.default_rng([4, 0]),
        "pfnm",
        weights=[visit.num_samples for visit in visits],
        score="published",
        max_growth=None,
    )
    assert merged.groups.sizes["net.0"] > 7
    assert_same(merged.state, state_of(module))


def test_class_mean_of_planted_rows():
    layers = [torch.full((3, 2), float(value)) for value in (1, 2, 4)]
    counts = [torch.tensor([1, 0, 0]), torch.tensor([1, 5, 0]), torch.tensor([2, 0, 0])]
    expected = torch.tensor([[11 / 4] * 2, [2.0] * 2, [9 / 4] * 2])
    torch.testing.assert_close(class_mean(layers, counts, [2, 0.5, 1.5]), expected)
    with pytest.raises(ValueError, match="same clients"):
        class_mean(layers, counts[:2], [1, 1, 1])
    with pytest.raises(ValueError, match="a count for each class"):
        class_mean(layers, [torch.ones(4)] * 3, [1, 1, 1])
