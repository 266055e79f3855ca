"""The baselines of the study in plain numpy and torch loops, written from their papers.

This file does not import the package: tests compare the package's results with these references.
"""

import copy
import fnmatch
import math

import numpy as np
import torch

from tests.references import (
    average_reference,
    client_key_reference,
    cohort_reference,
    seed_reference,
    visit_batches_reference,
    visit_seed_reference,
)


def copied(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def visit_reference(net, start, batches, loss, optimizer, seed, change=None, clip=None):
    """One client's local training; `change` receives the parameters by name before every step."""
    net.load_state_dict(start)
    net.train()
    seed_reference(seed)
    stepper = optimizer(net.parameters())
    for batch in batches:
        stepper.zero_grad()
        loss(net, batch).backward()
        if change is not None:
            change(dict(net.named_parameters()))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        stepper.step()
    return copied(net)


def proximal_change(start, mu):
    """Adds mu (w - w_t) to every gradient."""

    def change(parameters):
        for name, parameter in parameters.items():
            parameter.grad += mu * (parameter.data - start[name])

    return change


def fedprox_reference(
    net, clients, loss, optimizer, mu, rounds, cohort_size, seed, batch_size=32, epochs=1, clip=None, combine=None
):
    """Li et al. 2020: FedAvg with a proximal term; returns the global states.

    `combine(start, states, sizes)` replaces the average by sizes.
    """
    history = []
    for round in range(rounds):
        start, states, sizes = copied(net), [], []
        for client in cohort_reference(seed, round, clients, cohort_size):
            visit_seed = visit_seed_reference(seed, round, client)
            batches = visit_batches_reference(clients[client], batch_size, visit_seed, epochs)
            change = proximal_change(start, mu) if mu else None
            states.append(visit_reference(net, start, batches, loss, optimizer, visit_seed, change, clip))
            sizes.append(len(clients[client][0]))
        if combine is None:
            net.load_state_dict(average_reference(states, sizes))
        else:
            net.load_state_dict(combine(start, states, sizes))
        history.append(copied(net))
    return history


def attention_reference(start, states, sizes, step_size):
    """Ji et al. 2019, tensor by tensor in numpy; integers and running statistics as in federated averaging."""
    average = average_reference(states, sizes)
    new = {}
    for name, value in start.items():
        if not value.is_floating_point() or name.endswith(("running_mean", "running_var")):
            new[name] = average[name]
            continue
        old = value.double().numpy()
        clients = [state[name].double().numpy() for state in states]
        distances = [math.sqrt(((old - client) ** 2).sum()) for client in clients]
        exponents = [math.exp(distance - max(distances)) for distance in distances]
        weights = [exponent / sum(exponents) for exponent in exponents]
        step = sum(weight * (old - client) for weight, client in zip(weights, clients, strict=True))
        new[name] = torch.from_numpy(np.asarray(old - step_size * step)).to(value.dtype)
    return new


def gradient_reference(net, tensors, loss):
    """Gradient of the mean loss over all data of a client."""
    net.eval()
    net.zero_grad()
    loss(net, tensors).backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def second_draw_reference(seed, round, clients, size):
    clients = list(clients)
    if size == len(clients):
        return clients
    places = np.random.default_rng(np.random.SeedSequence([seed, round, 4])).choice(len(clients), size, replace=False)
    return [clients[place] for place in sorted(places.tolist())]


def feddane_reference(net, clients, loss, optimizer, mu, rounds, cohort_size, seed, batch_size=32, epochs=1):
    """Li et al. 2019 ("FedDANE"), with two samples of clients in every round."""
    history = []
    for round in range(rounds):
        start, total, mean = copied(net), 0, None
        for client in second_draw_reference(seed, round, clients, cohort_size):
            size = len(clients[client][0])
            net.load_state_dict(start)
            gradient = {name: size * value for name, value in gradient_reference(net, clients[client], loss).items()}
            mean = gradient if mean is None else {name: mean[name] + gradient[name] for name in mean}
            total += size
        mean = {name: value / total for name, value in mean.items()}
        states, sizes = [], []
        for client in cohort_reference(seed, round, clients, cohort_size):
            visit_seed = visit_seed_reference(seed, round, client)
            net.load_state_dict(start)
            own = gradient_reference(net, clients[client], loss)

            def change(parameters, own=own, start=start, mean=mean):
                for name, parameter in parameters.items():
                    parameter.grad += mean[name] - own[name] + mu * (parameter.data - start[name])

            batches = visit_batches_reference(clients[client], batch_size, visit_seed, epochs)
            states.append(visit_reference(net, start, batches, loss, optimizer, visit_seed, change))
            sizes.append(len(clients[client][0]))
        net.load_state_dict(average_reference(states, sizes))
        history.append(copied(net))
    return history


def k_means_reference(points, num_centers, weights, rng, starts=10):
    """The best of several k-means runs by the weighted sum of squared distances: groups, and first centres."""
    best = None
    for _ in range(starts):
        groups, first, spread = one_k_means_reference(points, num_centers, weights, rng)
        if best is None or spread < best[2] * (1 - 1e-9):
            best = groups, first, spread
    return best[:2]


def one_k_means_reference(points, num_centers, weights, rng):
    """k-means++ (Arthur and Vassilvitskii 2007), then Lloyd's steps, in plain Python.

    Returns the group of every point, the index of each first centre, and the weighted sum of squared distances.
    """

    def square(left, right):
        return sum((a - b) ** 2 for a, b in zip(left, right, strict=True))

    first = [int(rng.integers(len(points)))]
    while len(first) < num_centers:
        masses = [
            0.0 if place in first else min(square(point, points[other]) for other in first)
            for place, point in enumerate(points)
        ]
        if not any(masses):
            masses = [float(place not in first) for place in range(len(points))]
        aim, running, place = rng.random() * sum(masses), 0.0, -1
        while running <= aim:
            place += 1
            running += masses[place]
        first.append(place)
    centers, groups = [list(points[place]) for place in first], None
    while True:
        before = groups
        groups = [min(range(num_centers), key=lambda g: square(point, centers[g])) for point in points]
        if groups == before:
            spread = sum(w * square(p, centers[g]) for w, p, g in zip(weights, points, groups, strict=True))
            return groups, first, spread
        for group in set(groups):
            mine = [(w, point) for w, point, g in zip(weights, points, groups, strict=True) if g == group]
            total = sum(w for w, _ in mine)
            centers[group] = [sum(w * point[d] for w, point in mine) / total for d in range(len(points[0]))]


class FeSEMReference:
    """Xie et al.: centres, assignments, and starting models; states are dictionaries of tensors."""

    def __init__(self, num_centers, seed=0, pattern="*", init="k-means++"):
        self.num_centers, self.seed, self.pattern, self.init = num_centers, seed, pattern, init
        self.centers, self.assigned, self.sizes, self.round = [], {}, {}, -1

    def start_of(self, client, shared):
        return self.centers[self.assigned[client]] if client in self.assigned else shared

    def compared(self, state):
        return [
            name
            for name, value in state.items()
            if value.is_floating_point() and "running" not in name and fnmatch.fnmatchcase(name, self.pattern)
        ]

    def distance(self, state, center):
        return sum(float(((state[name].double() - center[name].double()) ** 2).sum()) for name in self.compared(state))

    def first_centers(self, states, sizes):
        keys = {
            client: int(np.random.SeedSequence([self.seed, client_key_reference(client)]).generate_state(1)[0])
            for client in states
        }
        chosen = sorted(states, key=keys.get)
        if self.init == "random":
            chosen = chosen[: self.num_centers]
            self.centers = [states[client] for client in chosen]
            self.assigned = {client: place for place, client in enumerate(chosen)}
            return
        points = [
            [number for name in self.compared(states[client]) for number in states[client][name].flatten().tolist()]
            for client in chosen
        ]
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, self.round]))
        groups, first = k_means_reference(points, self.num_centers, [sizes[client] for client in chosen], rng)
        self.assigned = dict(zip(chosen, groups, strict=True))
        for place, seed_place in enumerate(first):
            mine = [client for client in chosen if self.assigned[client] == place]
            average = average_reference([states[c] for c in mine], [sizes[c] for c in mine]) if mine else None
            self.centers.append(average or states[chosen[seed_place]])

    def finish(self, states, sizes):
        """E-step, then M-step, for dictionaries by client; returns the mean of the centres."""
        self.sizes |= sizes
        self.round += 1
        if not self.centers:
            mean = average_reference(list(states.values()), list(sizes.values()))
            if self.num_centers == 1:
                self.centers, self.assigned = [mean], dict.fromkeys(states, 0)
            else:
                self.first_centers(states, sizes)
            return mean
        nearest = {
            client: min(range(len(self.centers)), key=lambda place: self.distance(states[client], self.centers[place]))
            for client in states
        }
        for place in range(len(self.centers)):
            mine = [client for client in states if nearest[client] == place]
            if mine:
                self.centers[place] = average_reference([states[c] for c in mine], [sizes[c] for c in mine])
        self.assigned |= nearest
        masses = [
            sum(self.sizes[client] for client in self.assigned if self.assigned[client] == place)
            for place in range(len(self.centers))
        ]
        used = [place for place, mass in enumerate(masses) if mass]
        return average_reference([self.centers[place] for place in used], [masses[place] for place in used])


def fesem_reference(
    net, clients, loss, optimizer, num_centers, rounds, cohort_size, seed, batch_size=32, epochs=1, pattern="*",
    init="k-means++",
):  # fmt: skip
    """Global states, centres and assignments after every round."""
    server, history = FeSEMReference(num_centers, pattern=pattern, init=init), []
    for round in range(rounds):
        shared, states, sizes = copied(net), {}, {}
        for client in cohort_reference(seed, round, clients, cohort_size):
            visit_seed = visit_seed_reference(seed, round, client)
            batches = visit_batches_reference(clients[client], batch_size, visit_seed, epochs)
            start = server.start_of(client, shared)
            states[client] = visit_reference(net, start, batches, loss, optimizer, visit_seed)
            sizes[client] = len(clients[client][0])
        net.load_state_dict(server.finish(states, sizes))
        history.append((copied(net), copy.deepcopy(server.centers), dict(server.assigned)))
    return history


def fedrep_reference(
    net, is_head, clients, loss, optimizer, head_epochs, body_epochs, rounds, cohort_size, seed, batch_size=32,
    work=None,
):  # fmt: skip
    """Collins et al. 2021: personal entries train first, then the others; returns body and heads by round.

    `work(round, client)` overrides a client's number of epochs.
    """
    heads, history = {}, []
    for round in range(rounds):
        start, states, sizes = copied(net), [], []
        for client in cohort_reference(seed, round, clients, cohort_size):
            visit_seed = visit_seed_reference(seed, round, client)
            epochs = head_epochs + body_epochs if work is None else work(round, client)
            net.load_state_dict({**start, **heads.get(client, {})})
            net.train()
            seed_reference(visit_seed)
            stepper = optimizer(net.parameters())
            every = visit_batches_reference(clients[client], batch_size, visit_seed, epochs)
            per_epoch = len(every) // epochs
            for number, batch in enumerate(every):
                trains_head = number < head_epochs * per_epoch
                stepper.zero_grad()
                loss(net, batch).backward()
                for name, parameter in net.named_parameters():
                    if is_head(name) != trains_head:
                        parameter.grad = None
                stepper.step()
            end = copied(net)
            heads[client] = {name: value for name, value in end.items() if is_head(name)}
            states.append(end)
            sizes.append(len(clients[client][0]))
        average = average_reference(states, sizes)
        net.load_state_dict({name: start[name] if is_head(name) else value for name, value in average.items()})
        history.append((copied(net), copy.deepcopy(heads)))
    return history
