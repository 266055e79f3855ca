"""Random numbers under vmap equal separate draws per example, bit for bit."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from lightning_fed.backends.vectorized.client_random import PerClientRandom
from lightning_fed.backends.vectorized.group_loader import ClientGenerators

SEEDS = (3, 4, 5)
INPUTS = torch.linspace(-1, 1, 3 * 4 * 5 * 6).reshape(3, 4, 5, 6)


def together(function, inputs=INPUTS):
    numbers = ClientGenerators(SEEDS)

    def one(index, own):
        with PerClientRandom(numbers.switch_to, range(len(SEEDS)), index):
            return function(own)

    return vmap(one)(torch.arange(len(SEEDS)), inputs)


def alone(function, inputs=INPUTS):
    rows = []
    for seed, own in zip(SEEDS, inputs, strict=True):
        torch.manual_seed(seed)
        rows.append(function(own))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "function",
    [
        lambda own: nn.Dropout(0.5)(nn.Dropout(0.2)(own)),
        nn.Dropout(0.5, inplace=True),
        lambda own: nn.Dropout2d(0.5)(own[None]),
        nn.Dropout(0.5).eval(),
        lambda own: F.dropout(own, training=False) + torch.rand(5, 1),
        lambda own: own + torch.randn_like(own) * torch.rand(()),
        lambda own: torch.empty_like(own).uniform_(0, 2) + torch.zeros_like(own).normal_(),
        lambda own: own[..., torch.randperm(6)],
        lambda own: torch.bernoulli(own.sigmoid()),
        lambda own: own.flatten()[torch.randint(0, 120, (7,))],
        lambda own: torch.normal(own, 0.5),
    ],
    ids=["dropout", "inplace", "2d", "eval", "off", "like", "writers", "order", "by value", "indices", "normal"],
)
def test_draws_are_those_of_each_alone(function):
    results = together(function, INPUTS.clone()), alone(function, INPUTS.clone())
    assert torch.equal(*results)


def test_gradients_go_through_dropout():
    inputs = INPUTS.clone().requires_grad_()
    grads = [torch.autograd.grad(run(nn.Dropout(0.3), inputs).square().sum(), inputs)[0] for run in (together, alone)]
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    "function", [nn.AlphaDropout(0.5), F.gumbel_softmax, nn.RReLU()], ids=["alpha", "gumbel", "rrelu"]
)
def test_what_is_not_known_is_an_error(function):
    with pytest.raises(RuntimeError, match=r"vmap: (called random|we do not yet support)"):
        together(function)


def test_a_generator_of_the_users_own_is_an_error():
    with pytest.raises(RuntimeError, match="random"):
        together(lambda own: own + torch.rand(6, generator=torch.Generator()))
