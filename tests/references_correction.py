"""Drift correction and personal models in plain torch loops, written from the papers.

This file does not import the package: tests compare the package's results with these references.
"""

import copy

import torch
from torch.nn import functional as F

from tests.references import (
    average_reference,
    cohort_reference,
    seed_reference,
    visit_batches_reference,
    visit_seed_reference,
)


def copied(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def is_trained(net):
    return {name for name, parameter in net.named_parameters() if parameter.requires_grad}


def steps_reference(net, batches, loss, stepper, change=None, seen=None):
    """Steps on batches; `change` receives the parameters by name before every step, `seen` every raw gradient."""
    for batch in batches:
        stepper.zero_grad()
        loss(net, batch).backward()
        parameters = dict(net.named_parameters())
        if seen is not None:
            seen.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        if change is not None:
            change(parameters)
        stepper.step()


class Visits:
    def __init__(self, clients, rounds, cohort_size, seed, batch_size=32, epochs=1, work=None):
        self.clients, self.rounds, self.cohort_size, self.seed = clients, rounds, cohort_size, seed
        self.batch_size, self.epochs, self.work = batch_size, epochs, work

    def of(self, round):
        for client in cohort_reference(self.seed, round, self.clients, self.cohort_size):
            seed = visit_seed_reference(self.seed, round, client)
            epochs = self.epochs if self.work is None else self.work(round, client)
            batches = visit_batches_reference(self.clients[client], self.batch_size, seed, epochs)
            yield client, len(self.clients[client][0]), seed, batches


def scaffold_reference(net, visits, loss, optimizer, rate=None, equal=True):
    """Karimireddy et al. 2020, Algorithm 1; with `rate`, option II in the paper's form for plain SGD.

    Returns the global states, and the server's control variate after the last round.
    """
    names, count, history = is_trained(net), len(visits.clients), []
    server = {name: torch.zeros_like(value) for name, value in net.state_dict().items() if name in names}
    own = {client: dict(server) for client in visits.clients}
    for round in range(visits.rounds):
        start, states, sizes, changes = copied(net), [], [], []
        for client, size, seed, batches in visits.of(round):
            net.load_state_dict(start)
            net.train()
            seed_reference(seed)

            def change(parameters, client=client, server=server):
                for name in names:
                    parameters[name].grad += server[name] - own[client][name]

            seen = []
            steps_reference(net, batches, loss, optimizer(net.parameters()), change, seen)
            end = copied(net)
            if rate is None:
                new = {name: sum(gradients[name] for gradients in seen) / len(seen) for name in names}
            else:
                new = {
                    name: own[client][name] - server[name] + (start[name] - end[name]) / (len(batches) * rate)
                    for name in names
                }
            changes.append({name: new[name] - own[client][name] for name in names})
            own[client] = new
            states.append(end)
            sizes.append(size)
        server = {name: server[name] + sum(change[name] for change in changes) / count for name in names}
        net.load_state_dict(average_reference(states, sizes, equal))
        history.append(copied(net))
    return history, server


def step_length_reference(steps, momentum=0.0, rate=1.0, mu=0.0):
    """Wang et al. 2020, section 4: the 1-norm of a_i in closed form."""
    if momentum:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    if mu:
        return (1 - (1 - rate * mu) ** steps) / (rate * mu)
    return float(steps)


def normalised_average_reference(start, states, sizes, lengths, names):
    """Wang et al. 2020, equation 8; lengths by client. Other entries are averaged."""
    total = sum(sizes)
    new = average_reference(states, sizes)
    effective = sum(size / total * length for size, length in zip(sizes, lengths, strict=True))
    for name in names:
        direction = sum(
            size / total * (start[name].double() - state[name].double()) / length
            for size, state, length in zip(sizes, states, lengths, strict=True)
        )
        new[name] = (start[name].double() - effective * direction).to(start[name].dtype)
    return new


def fednova_reference(net, visits, loss, optimizer, momentum=0.0, rate=1.0, mu=0.0):
    """Wang et al. 2020: global states."""
    names, history = is_trained(net), []
    for round in range(visits.rounds):
        start, states, sizes, lengths = copied(net), [], [], []
        for _, size, seed, batches in visits.of(round):
            net.load_state_dict(start)
            net.train()
            seed_reference(seed)

            def change(parameters, start=start):
                for name in names:
                    parameters[name].grad += mu * (parameters[name].data - start[name])

            steps_reference(net, batches, loss, optimizer(net.parameters()), change if mu else None)
            states.append(copied(net))
            sizes.append(size)
            lengths.append(step_length_reference(len(batches), momentum, rate, mu))
        net.load_state_dict(normalised_average_reference(start, states, sizes, lengths, names))
        history.append(copied(net))
    return history


def feddyn_reference(net, visits, loss, optimizer, alpha):
    """Acar et al. 2021, Algorithm 1: global states."""
    names, count, history = is_trained(net), len(visits.clients), []
    zeros = {name: torch.zeros_like(value) for name, value in net.state_dict().items() if name in names}
    h, own = dict(zeros), {client: dict(zeros) for client in visits.clients}
    for round in range(visits.rounds):
        start, states, sizes = copied(net), [], []
        for client, size, seed, batches in visits.of(round):
            net.load_state_dict(start)
            net.train()
            seed_reference(seed)

            def change(parameters, client=client, start=start):
                for name in names:
                    parameters[name].grad += alpha * (parameters[name].data - start[name]) - own[client][name]

            steps_reference(net, batches, loss, optimizer(net.parameters()), change)
            states.append(copied(net))
            sizes.append(size)
            own[client] = {name: own[client][name] - alpha * (states[-1][name] - start[name]) for name in names}
        new = average_reference(states, sizes, equal=True)
        for name in names:
            h[name] = h[name] - alpha / count * sum(state[name] - start[name] for state in states)
            new[name] = new[name] - h[name] / alpha
        net.load_state_dict(new)
        history.append(copied(net))
    return history


def ditto_reference(net, visits, loss, optimizer, lam, personal_epochs):
    """Li et al. 2021, Algorithm 1: global states and, after the last round, each client's personal model.

    `visits.epochs` apply to the global model; the personal model trains on the following epochs.
    """
    names, history, own = is_trained(net), [], {}
    for round in range(visits.rounds):
        start, states, sizes = copied(net), [], []
        for client, size, seed, batches in visits.of(round):
            net.load_state_dict(start)
            net.train()
            seed_reference(seed)
            steps_reference(net, batches, loss, optimizer(net.parameters()))
            states.append(copied(net))
            sizes.append(size)
            every = visit_batches_reference(
                visits.clients[client], visits.batch_size, seed, visits.epochs + personal_epochs
            )
            net.load_state_dict(own.get(client, start))

            def change(parameters, start=start):
                for name in names:
                    parameters[name].grad += lam * (parameters[name].data - start[name])

            steps_reference(net, every[len(batches) :], loss, optimizer(net.parameters()), change)
            own[client] = copied(net)
        net.load_state_dict(average_reference(states, sizes))
        history.append(copied(net))
    return history, own


def moon_reference(net, features, visits, loss, optimizer, mu, temperature=0.5):
    """Li et al. 2021, with the contrastive term in the differentiated loss; features from `features(net, inputs)`."""
    history, last = [], {}
    for round in range(visits.rounds):
        start, states, sizes = copied(net), [], []
        for client, size, seed, batches in visits.of(round):
            net.load_state_dict(start)
            net.seen = None
            of_global, of_last = copy.deepcopy(net).eval(), copy.deepcopy(net).eval()
            if client in last:
                of_last.load_state_dict(last[client])
            net.train()
            seed_reference(seed)

            def whole_loss(net, batch, client=client, of_global=of_global, of_last=of_last):
                supervised = loss(net, batch)
                if client not in last:
                    return supervised
                z = net.seen  # from the pass of the loss
                with torch.no_grad():
                    z_global, z_last = features(of_global, batch[0]), features(of_last, batch[0])
                positive = torch.exp(F.cosine_similarity(z, z_global) / temperature)
                negative = torch.exp(F.cosine_similarity(z, z_last) / temperature)
                return supervised + mu * (-torch.log(positive / (positive + negative))).mean()

            steps_reference(net, batches, whole_loss, optimizer(net.parameters()))
            last[client] = copied(net)
            states.append(copied(net))
            sizes.append(size)
        net.load_state_dict(average_reference(states, sizes))
        history.append(copied(net))
    return history


def qffl_reference(net, visits, loss, optimizer, q, lipschitz):
    """Li et al. 2020 ("q-FedAvg"), Algorithm 2, clients weighted by examples: global states."""
    names, history = is_trained(net), []
    for round in range(visits.rounds):
        start, states, sizes, losses = copied(net), [], [], []
        for client, size, seed, batches in visits.of(round):
            net.load_state_dict(start)
            net.eval()
            with torch.no_grad():
                losses.append(float(loss(net, visits.clients[client]).double()))
            net.train()
            seed_reference(seed)
            steps_reference(net, batches, loss, optimizer(net.parameters()))
            states.append(copied(net))
            sizes.append(size)
        new = average_reference(states, [size * value**q for size, value in zip(sizes, losses, strict=True)])
        changes = [
            {name: lipschitz * (start[name].double() - state[name].double()) for name in names} for state in states
        ]
        squares = [sum(float((value**2).sum()) for value in change.values()) for change in changes]
        scale = sum(
            size * (q * value ** (q - 1) * square + lipschitz * value**q)
            for size, value, square in zip(sizes, losses, squares, strict=True)
        )
        for name in names:
            step = sum(
                size * value**q * change[name] for size, value, change in zip(sizes, losses, changes, strict=True)
            )
            new[name] = (start[name].double() - step / scale).to(start[name].dtype)
        net.load_state_dict(new)
        history.append(copied(net))
    return history


def fedala_reference(net, visits, loss, optimizer, mixed, pass_batches, eta, window=10, spread=0.1, most=100):
    """Zhang et al. 2023, Algorithm 1, as in the authors' program: global states, and each client's model.

    Args:
        net: The network.
        visits: The visits.
        loss: Function of (net, batch).
        optimizer: Makes the optimizer from parameters.
        mixed: Names of the mixed parameters.
        pass_batches: Batches for a pass over the element weights, as a function of (round, client).
        eta: Learning rate of the element weights.
        window: Number of compared losses.
        spread: Largest standard deviation of converged losses.
        most: Largest number of passes.
    """
    history, last, weights = [], {}, {}
    for round in range(visits.rounds):
        start, states, sizes = copied(net), [], []
        for client, size, seed, batches in visits.of(round):
            net.load_state_dict(start)
            if client in last:
                own, is_first = last[client], client not in weights
                weight = weights.setdefault(client, {name: torch.ones_like(start[name]) for name in mixed})
                parameters = dict(net.named_parameters())
                mixture = lambda name: own[name] + (start[name] - own[name]) * weight[name]  # noqa: E731, B023
                net.eval()
                losses = []
                while len(losses) < (most if is_first else 1):
                    for batch in pass_batches(round, client):
                        for name in mixed:
                            parameters[name].data.copy_(mixture(name))
                        net.zero_grad()
                        value = loss(net, batch)
                        value.backward()
                        for name in mixed:
                            gradient = parameters[name].grad
                            weight[name] = torch.clamp(weight[name] - eta * gradient * (start[name] - own[name]), 0, 1)
                    losses.append(value.item())
                    if len(losses) > window and torch.tensor(losses[-window:]).std(correction=0) < spread:
                        break
                for name in mixed:
                    parameters[name].data.copy_(mixture(name))
            net.train()
            seed_reference(seed)
            steps_reference(net, batches, loss, optimizer(net.parameters()))
            last[client] = copied(net)
            states.append(copied(net))
            sizes.append(size)
        net.load_state_dict(average_reference(states, sizes))
        history.append(copied(net))
    return history, last, weights
