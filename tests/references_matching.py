"""Neuron matching in plain loops, written from the equations in the spec.

This file does not import the package. A global neuron is a list of members (client, neuron); sum and precision are
computed again at every use.
"""

import math

import numpy as np
from scipy.optimize import linear_sum_assignment

# ---------------------------------------------------------------------------------------------------------------------
# Section 2 (and 10.1): scores of one client against global neurons without members from this client
# ---------------------------------------------------------------------------------------------------------------------


def sum_and_precision(members, clients, precision, prior_precision, prior_mean, d):
    """A_id and P_id."""
    total, weight = prior_mean[d] * prior_precision[d], prior_precision[d]
    for client, neuron in members:
        total += precision[client][d] * clients[client][neuron][d]
        weight += precision[client][d]
    return total, weight


def existing_score(j, neuron, members, clients, precision, prior_precision, prior_mean, score):
    value = 0.0
    for d in range(len(prior_mean)):
        a, p = sum_and_precision(members, clients, precision, prior_precision, prior_mean, d)
        u = precision[j][d] * clients[j][neuron][d]
        value += (a + u) ** 2 / (p + precision[j][d]) - a**2 / p
        if score == "marginal":
            value += math.log(p / (p + precision[j][d]))
    n = len(members)
    if score == "published":
        n = min(n, 10)
    return value + (1 if score == "published" else 2) * math.log(n / (len(clients) - n))


def new_score(j, neuron, k, clients, precision, prior_precision, prior_mean, score, gamma):
    value = -2 * math.log(k) + 2 * math.log(gamma / len(clients))
    for d in range(len(prior_mean)):
        m = prior_mean[d] * prior_precision[d]
        u = precision[j][d] * clients[j][neuron][d]
        value += (m + u) ** 2 / (prior_precision[d] + precision[j][d]) - m**2 / prior_precision[d]
        if score == "marginal":
            value += math.log(prior_precision[d] / (prior_precision[d] + precision[j][d]))
    return value


def score_table(j, globals_, clients, precision, prior_precision, prior_mean, score, gamma, max_width=None):
    """All scores of client j: its neurons as rows, global neurons and new neurons as columns."""
    size, width = len(clients[j]), len(globals_)
    room = size
    if score == "published":
        room = max(min(size, max(700 - width, 1)), size - width)
    if max_width is not None:
        room = min(room, max_width - width)
    shared = (clients, precision, prior_precision, prior_mean, score)
    return np.array(
        [
            [existing_score(j, neuron, members, *shared) for members in globals_]
            + [new_score(j, neuron, k + 1, *shared, gamma) for k in range(room)]
            for neuron in range(size)
        ]
    )


# ---------------------------------------------------------------------------------------------------------------------
# The order in section 2, by default without early stop
# ---------------------------------------------------------------------------------------------------------------------


def match_reference(
    clients, generator, score, gamma, variance, prior_variance, prior_mean, passes, max_width=None, stop=False
):
    """Global neurons, each a list of members in joining order."""
    precision = [[1 / value for value in row] for row in variance]
    prior_precision = [1 / value for value in prior_variance]
    globals_ = []

    def match(j):
        width = len(globals_)
        table = score_table(
            j, globals_, clients, precision, prior_precision, prior_mean, score, gamma, max_width=max_width
        )
        for neuron, column in zip(*linear_sum_assignment(-table), strict=True):
            if column < width:
                globals_[column].append((j, int(neuron)))
            else:
                globals_.append([(j, int(neuron))])

    def remove(j):
        for members in globals_:
            members[:] = [member for member in members if member[0] != j]
        globals_[:] = [members for members in globals_ if members]

    for j in sorted(range(len(clients)), key=lambda j: -len(clients[j])):
        match(j)
    for _ in range(passes):
        before = {frozenset(members) for members in globals_}
        for j in generator.permutation(len(clients)):
            remove(int(j))
            match(int(j))
        if stop and before == {frozenset(members) for members in globals_}:
            break
    return globals_


def estimate_reference(globals_, clients, variance, prior_variance, prior_mean):
    """Theta in section 2: A / P."""
    precision = [[1 / value for value in row] for row in variance]
    prior_precision = [1 / value for value in prior_variance]
    pairs = [
        [sum_and_precision(members, clients, precision, prior_precision, prior_mean, d) for d in range(len(prior_mean))]
        for members in globals_
    ]
    return np.array([[a / p for a, p in row] for row in pairs])


def means_reference(globals_, clients):
    return np.array([np.mean([clients[j][neuron] for j, neuron in members], axis=0) for members in globals_])


# ---------------------------------------------------------------------------------------------------------------------
# Section 10.1: variances from the data, one per client and block (section 2 has sigma_j), and the prior's variance
# ---------------------------------------------------------------------------------------------------------------------


def variances_reference(globals_, clients, blocks, noise, prior):
    """sigma_j^2 and sigma_0^2 for every block by expectation maximisation, for a prior mean of 0.

    For each number theta in a global neuron: precision P = 1 / s0 + sum 1 / s_j and mean m = sum (w_j / s_j) / P over
    the owners; then s_j is the mean of (w_j - m)^2 + 1 / P over the client's numbers, and s0 the mean of m^2 + 1 / P.
    """
    noise, prior, start = [list(row) for row in noise], list(prior), 0
    for block, size in enumerate(blocks):
        numbers = [
            [(j, clients[j][neuron][d]) for j, neuron in members]
            for members in globals_
            for d in range(start, start + size)
        ]
        flat = [value**2 for number in numbers for _, value in number]
        least = 1e-6 * sum(flat) / len(flat)
        for _ in range(200):
            of_clients, of_prior = [[] for _ in clients], []
            for number in numbers:
                precision = 1 / prior[block] + sum(1 / noise[block][j] for j, _ in number)
                mean = sum(value / noise[block][j] for j, value in number) / precision
                of_prior.append(mean**2 + 1 / precision)
                for j, value in number:
                    of_clients[j].append((value - mean) ** 2 + 1 / precision)
            before = [*noise[block], prior[block]]
            noise[block] = [max(float(np.mean(values)), least) for values in of_clients]
            prior[block] = max(float(np.mean(of_prior)), least)
            after = [*noise[block], prior[block]]
            if all(abs(new / old - 1) < 1e-4 for new, old in zip(after, before, strict=True)):
                break
        start += size
    return noise, prior


def estimated_reference(clients, generator, gamma, blocks, passes):
    """Matching with estimated variances: at most four times, until convergence; one row per client and block."""
    values = np.concatenate(clients)
    prior = [float(np.var(block)) / 2 for block in np.split(values, np.cumsum(blocks)[:-1], axis=1)]
    noise = [[value] * len(clients) for value in prior]
    before = None
    for _ in range(4):
        used = noise, prior
        globals_ = match_reference(
            clients,
            generator,
            "marginal",
            gamma,
            np.repeat(np.array(noise).T, blocks, axis=1),
            np.repeat(prior, blocks),
            [0.0] * values.shape[1],
            passes,
            stop=True,
        )
        now = {frozenset(members) for members in globals_}
        if now == before:
            break
        before = now
        noise, prior = variances_reference(globals_, clients, blocks, noise, prior)
    return globals_, *used


# ---------------------------------------------------------------------------------------------------------------------
# Section 13: the mean over the owners of a neuron
# ---------------------------------------------------------------------------------------------------------------------


def matched_layer_reference(layers, rows, columns, num_rows, num_columns, weights):
    """Embeds matrices into a wide matrix by row and column positions: sums of the entries, divided by the rows'
    owners.
    """
    total, owned = np.zeros((num_rows, num_columns)), np.zeros(num_rows)
    for layer, row_places, column_places, weight in zip(layers, rows, columns, weights, strict=True):
        for row, row_place in enumerate(row_places):
            owned[row_place] += weight
            for column, column_place in enumerate(column_places):
                total[row_place, column_place] += weight * layer[row, column]
    return total / owned[:, None]
