"""FedMA: a plain reference of the protocol, identities, PFNM, and aggregation by messages."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fed.algorithms import PFNM, FedAvg, FedMA
from lightning_fed.algorithms.fedma import class_mean
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.matching import PermutationGroups, Stage, find_stages, match_states
from lightning_fed.messages import ClientUpdate, Request
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import RoundInfo
from lightning_fed.steps import UniformWeights
from tests import models
from tests.algorithms.fedma.fits import WIDTHS, data_of, examples, fit, layers_of, logged, mlp, momentum, parts
from tests.breadth import slow
from tests.recorders import MemoryLogger, Recorder, assert_same, state_of
from tests.references_fedma import fedma_pass

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


# --- Protocol ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "last", "prior"),
    [slow(("grow", "class", 0)), ("grow", "size", 0), ("none", "class", 0), ("grow", "size", 1)],
)
def test_a_pass_is_that_of_the_reference(either_trainer, mode, last, prior):
    """Compares widths, neurons, biases and the output layer, with training between stages."""
    clients_data = parts()
    rule = FedMA(mode, last_layer=last, score="published", gamma=7.0, max_width=None, prior_weight=prior, seed=5)
    module, logger = models.Module(mlp(), momentum), MemoryLogger()
    trainer = either_trainer(max_rounds=3, method=rule, local_epochs=3, logger=logger)
    fit(trainer, module, data_of(clients_data))
    clients = sorted(clients_data, key=client_key)
    expected, _ = fedma_pass(
        [layers_of(mlp()) for _ in clients],
        [clients_data[client] for client in clients],
        steps=[3, 3, 3],
        lr=0.1,
        momentum=0.9,
        gamma=7.0,
        generators=[np.random.default_rng([5, round]) for round in range(3)],
        last=last,
        matches=mode == "grow",
        prior=prior,
    )
    layers_after = layers_of(module.net)
    assert [len(bias) for _, bias in layers_after] == [len(bias) for _, bias in expected]
    assert (len(layers_after[0][1]) > 7) == (mode == "grow")
    sizes = [sum(part.numel() for layer in layers for part in layer) for layers in (layers_after, layers_of(mlp()))]
    assert float(trainer.callback_metrics["fedma/growth"]) == sizes[0] / sizes[1]
    assert logged(logger, "fedma/net.0/width") == [len(layers_after[0][1])]
    (agreement,) = logged(logger, "fedma/net.0/agreement")
    assert (agreement < 0.5) if prior else (0.5 < agreement < 1.0)  # a prior shortens the means
    for (weight, bias), (weight_, bias_) in zip(layers_after, expected, strict=True):
        torch.testing.assert_close(weight, weight_, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(bias, bias_, rtol=1e-4, atol=1e-6)
    assert [layer.out_features for layer in module.net if isinstance(layer, nn.Linear)] == [len(b) for _, b in expected]


def test_the_next_pass_starts_from_each_clients_own_neurons(federated_trainer):
    """Clients keep width and neuron order."""
    clients_data, seen = parts(), {}
    rule = FedMA("grow", score="published", gamma=7.0, max_width=None)

    class Watch(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            if trainer.current_epoch == 3:
                seen[client] = layers_of(module.net)

    module = models.Module(mlp(), momentum)
    trainer = federated_trainer(max_rounds=3, method=rule, callbacks=[Watch()])
    fit(trainer, module, data_of(clients_data))
    wide = layers_of(module.net)
    clients = sorted(clients_data, key=client_key)
    _, assignments = fedma_pass(
        [layers_of(mlp()) for _ in clients],
        [clients_data[client] for client in clients],
        [1, 1, 1],
        0.1,
        0.9,
        7.0,
        [np.random.default_rng([0, round]) for round in range(3)],
    )
    trainer.fit_loop.max_epochs = 4
    fit(trainer, module, data_of(clients_data))
    assert len(seen) == 3
    for client, (first, second) in zip(clients, assignments, strict=True):
        (w1, b1), (w2, b2), (w3, b3) = seen[client]
        assert torch.equal(w1, wide[0][0][first])
        assert torch.equal(b1, wide[0][1][first])
        assert torch.equal(w2, wide[1][0][second][:, first])
        assert torch.equal(b2, wide[1][1][second])
        assert torch.equal(w3, wide[2][0][:, second])
        assert torch.equal(b3, wide[2][1])


def test_matched_layers_stay(federated_trainer):
    """Bit for bit in later visits, despite weight decay and momentum; afterwards all layers train again."""
    seen = {}

    class Watch(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            seen[trainer.current_epoch, client] = (
                state_of(module),
                {n: p.requires_grad for n, p in module.named_parameters()},
            )

    rule = FedMA("grow")
    module = models.Module(mlp(), models.momentum)
    fit(federated_trainer(max_rounds=3, method=rule, callbacks=[Watch()]), module, data_of(parts()))
    for client in parts():
        for name in ("net.0.weight", "net.0.bias"):
            values = [seen[round, client][0][name] for round in (1, 2)]
            assert torch.equal(values[0], values[1])
            assert torch.equal(values[0], state_of(module)[name])
            assert [seen[round, client][1][name] for round in range(3)] == [True, False, False]
        assert torch.equal(seen[2, client][0]["net.2.weight"], state_of(module)["net.2.weight"])
        assert not torch.equal(seen[1, client][0]["net.4.weight"], seen[2, client][0]["net.4.weight"])
    assert all(parameter.requires_grad for parameter in module.parameters())


# --- Identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["grow", slow("permute"), "none"])
def test_one_client_is_freezing_layer_after_layer(either_trainer, mode):
    """Equals plain training that freezes one more layer per epoch, bit for bit; no layer grows."""
    inputs, targets = examples(0, 12)
    module = models.Module(mlp(), models.momentum)
    fit(
        either_trainer(max_rounds=3, method=FedMA(mode), local_epochs=2),
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
    for layer, expected in zip(layers_of(module.net), layers_of(net), strict=True):
        for value, expected_value in zip(layer, expected, strict=True):
            torch.testing.assert_close(value, expected_value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["grow", slow("permute")])
def test_identical_clients_are_one_client(federated_trainer, mode):
    """The width is constant; models agree up to the rounding of a mean."""
    part = examples(0, 12)
    alone, many = models.Module(mlp(), momentum), models.Module(mlp(), momentum)
    fit(federated_trainer(max_rounds=3, method=FedMA(mode), local_epochs=2), alone, data_of({"a": part}))
    fit(
        federated_trainer(max_rounds=3, method=FedMA(mode), local_epochs=2),
        many,
        data_of({"a": part, "b": part, "c": part}),
    )
    for name, value in state_of(many).items():
        torch.testing.assert_close(value, state_of(alone)[name], rtol=1e-5, atol=1e-6)


def test_without_matching_in_one_exchange_it_is_federated_averaging(federated_trainer):
    """Bit for bit over several rounds."""
    states = []
    for rule in (FedAvg(), FedMA("none", stages=1, last_layer="size")):
        module = models.Module(mlp(), momentum)
        fit(federated_trainer(max_rounds=2, method=rule, local_epochs=2), module, data_of(parts(), 4))
        states.append(state_of(module))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_permuting_that_finds_the_identity_is_averaging(federated_trainer):
    """Clients with the same start that have moved little keep their order."""
    states = []
    for mode in ("permute", "none"):
        module = models.Module(mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        fit(federated_trainer(max_rounds=3, method=FedMA(mode)), module, data_of(parts()))
        states.append(state_of(module))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def match_by_messages(rule, states, groups, stages, sizes=None):
    """One pass by messages without training; clients align layers by the received messages."""
    clients = {f"c{index}": state for index, state in enumerate(states)}
    start = states[0]
    rule.prepare(groups, stages, start)
    widths = {client: {} for client in clients}
    for round in range(len(stages)):
        rule.start(RoundInfo(round), start)
        for client, state in clients.items():
            message = rule.broadcast(Request(client))
            if round:
                client_groups = groups.resized(widths[client])
                assignment = {
                    n.removeprefix("fedma:assignment:"): v for n, v in message.extras.items() if "assignment" in n
                }
                new = {n.removeprefix("fedma:width:"): int(v) for n, v in message.extras.items() if "width" in n}
                clients[client] = state = client_groups.grow(state, new, assignment) | message.state
                widths[client] |= new
            sent = {name: state[name].clone() for name in stages[round].entries}
            assert {n: v.shape for n, v in rule.expected(message).items()} == {n: v.shape for n, v in sent.items()}
            rule.receive(ClientUpdate(client, 5, sent))
        state = rule.aggregate()
        assert (state is None) == (round < len(stages) - 1)
    return state


@pytest.mark.parametrize("mode", [slow("grow"), "permute"])
def test_clients_that_differ_in_the_order_of_neurons_are_one_network(mode):
    """Includes convolutions, a flattened map and BatchNorm."""
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
    merged = match_by_messages(FedMA(mode), states, groups, stages)
    expected = net(images)
    net.load_state_dict(merged)
    torch.testing.assert_close(net(images), expected, rtol=1e-4, atol=1e-5)
    plain = {name: torch.stack([s[name].double() for s in states]).mean(0).to(v) for name, v in merged.items()}
    net.load_state_dict(plain)
    assert float((net(images) - expected).detach().abs().max()) > 0.05  # the average of unaligned networks


# --- Rule -------------------------------------------------------------------------------------------------------------


def test_merged_rules_are_one():
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
        rule.start(RoundInfo(0), net.state_dict())
    for index, update in enumerate(updates):
        rules[index % 2].receive(copy.deepcopy(update))
        rules[2].receive(copy.deepcopy(update))
    rules[0].merge(rules[1])
    for rule in (rules[0], rules[2]):
        rule.aggregate()
    one, expected = (rule.state_dict()["current"]["matched_state"] for rule in (rules[0], rules[2]))
    assert all(torch.equal(value, expected[name]) for name, value in one.items())


@pytest.mark.parametrize("steps", [[], [UniformWeights()]])
def test_pfnm_is_one_exchange(federated_trainer, steps):
    """Matches all layers at once from last to first, with or without weighting by owners."""
    logger, module, watch = MemoryLogger(), models.Module(mlp(), momentum), Recorder()
    rule = PFNM(last_layer="size", seed=4)
    trainer = federated_trainer(max_rounds=1, method=rule, logger=logger, callbacks=[watch], steps=steps)
    fit(trainer, module, data_of(parts()))
    model = 4 * sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
    assert logged(logger, "comm/up_bytes") == [3 * model]
    visits = sorted(watch.visits, key=lambda visit: client_key(visit.client))
    groups = PermutationGroups.of(models.Module(mlp()), torch.zeros(2, 4))
    merged = match_states(
        [visit.update for visit in visits],
        groups,
        np.random.default_rng([4, 0]),
        "pfnm",
        weights=None if steps else [visit.num_samples for visit in visits],
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
    with pytest.raises(ValueError, match="one element per client, at least one, but got 3, 2 and 3"):
        class_mean(layers, counts[:2], [1, 1, 1])
    with pytest.raises(ValueError, match="a count for each class"):
        class_mean(layers, [torch.ones(4)] * 3, [1, 1, 1])
