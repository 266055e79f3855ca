"""FedMA's pass through the layers of a fully connected network, written from sections 4 to 6 of the spec.

This file does not import the package. A network is a list of layers ``[weight (O, I), bias (O,)]`` with ReLU in
between; the plain loops in :mod:`tests.references_matching` match neurons.
"""

import numpy as np
import torch
from torch.nn import functional as F

from tests.references_matching import match_reference


def forward(layers, inputs):
    for place, (weight, bias) in enumerate(layers):
        inputs = inputs @ weight.T + bias
        if place < len(layers) - 1:
            inputs = inputs.relu()
    return inputs


def train(layers, data, frozen, steps, lr, momentum):
    """Full-batch SGD steps on the layers from ``frozen`` on; earlier layers do not change."""
    inputs, targets = data
    layers = [[part.clone() for part in layer] for layer in layers]
    trained = [part.requires_grad_() for layer in layers[frozen:] for part in layer]
    speed = [torch.zeros_like(part) for part in trained]
    for _ in range(steps):
        gradients = torch.autograd.grad(F.cross_entropy(forward(layers, inputs), targets), trained)
        with torch.no_grad():
            for part, gradient, velocity in zip(trained, gradients, speed, strict=True):
                velocity.mul_(momentum).add_(gradient)
                part.sub_(lr * velocity)
    return [[part.detach() for part in layer] for layer in layers]


def fedma_pass(clients, data, steps, lr, momentum, gamma, generators, passes=5, last="class", matches=True, prior=0):
    """One pass; returns the global layers, and the positions of neurons for each client and hidden layer.

    Args:
        clients: Each client's layers before training.
        data: Each client's (inputs, targets).
        steps: Steps of each visit: first visit, then visits after each fixed layer.
        lr: Learning rate.
        momentum: Momentum, starting at zero in every visit.
        gamma: Parameter of the published score, with variances of 1 and prior means of 0.
        generators: One for each hidden layer.
        passes: Most passes over the clients.
        last: ``"class"`` or ``"size"``.
        matches: Whether neurons are matched; otherwise positions do not change.
        prior: Weight of a prior with mean 0, in clients of mean size.
    """
    sizes = [len(targets) for _, targets in data]
    prior_size = prior * sum(sizes) / len(sizes)
    settled, places = [], [[] for _ in clients]
    for n in range(len(clients[0]) - 1):
        clients = [train(layers, own, n, steps[n], lr, momentum) for layers, own in zip(clients, data, strict=True)]
        vectors = [torch.cat([weight, bias[:, None]], 1).double().numpy() for weight, bias in (c[n] for c in clients)]
        if matches:
            ones = [[1.0] * vectors[0].shape[1]] * len(vectors)
            zeros = [0.0] * vectors[0].shape[1]
            found = match_reference(vectors, generators[n], "published", gamma, ones, ones[0], zeros, passes, stop=True)
        else:
            found = [[(j, i) for j in range(len(vectors))] for i in range(len(vectors[0]))]
        # the mean of every neuron over its owners, weighted by examples
        theta = np.array(
            [
                sum(sizes[j] * vectors[j][i] for j, i in members) / (prior_size + sum(sizes[j] for j, _ in members))
                for members in found
            ]
        )
        weight, bias = torch.from_numpy(theta[:, :-1]).float(), torch.from_numpy(theta[:, -1]).float()
        settled.append([weight, bias])
        for j, layers in enumerate(clients):
            place = [next(g for g, members in enumerate(found) if (j, i) in members) for i in range(len(vectors[j]))]
            places[j].append(place)
            next_weight, next_bias = layers[n + 1]
            patched = torch.zeros(len(next_weight), len(found))
            for i, g in enumerate(place):
                patched[:, g] = next_weight[:, i]
            clients[j] = [*settled, [patched, next_bias], *layers[n + 2 :]]
    n = len(clients[0]) - 1
    clients = [train(layers, own, n, steps[n], lr, momentum) for layers, own in zip(clients, data, strict=True)]
    weight, bias = (torch.zeros_like(part).double() for part in clients[0][-1])
    for k in range(len(bias)):
        counts = [int((targets == k).sum()) for _, targets in data]
        shares = counts if last == "class" and sum(counts) else sizes
        for share, layers in zip(shares, clients, strict=True):
            weight[k] += share / sum(shares) * layers[-1][0][k].double()
            bias[k] += share / sum(shares) * layers[-1][1][k].double()
    return [*settled, [weight.float(), bias.float()]], places
