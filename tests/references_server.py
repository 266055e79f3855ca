"""Server optimizers and spread-out steps in plain numpy and loops, written from the papers.

This file does not import the package: tests compare the package's results with these references.
"""

import math

import numpy as np
import torch

from tests.references import average_reference


def momentum_step(memory, w, mean, lr=1.0, momentum=0.9):
    """Hsu et al. 2019: v = beta v + g; w = w - alpha v."""
    velocity = momentum * memory.get("v", 0.0) + (w - mean)
    memory["v"] = velocity
    return w - lr * velocity


def adaptive_step(memory, w, mean, kind, lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3):
    """Reddi et al. 2021, Algorithm 2."""
    delta = mean - w
    m = beta1 * memory.get("m", 0.0) + (1 - beta1) * delta
    v = memory.get("v", tau**2)
    square = delta**2
    if kind == "adagrad":
        v = v + square
    elif kind == "adam":
        v = beta2 * v + (1 - beta2) * square
    else:
        v = v - (1 - beta2) * square * np.sign(v - square)
    memory["m"], memory["v"] = m, v
    return w + lr * m / (np.sqrt(v) + tau)


class ServerReference:
    """The global state from the clients' states: average, then a step by entry, with a memory across rounds.

    Integers and running statistics are averaged as in federated averaging.
    """

    def __init__(self, step, **options):
        self.step, self.options = step, options
        self.memory = {}

    def __call__(self, start, states, sizes):
        new = average_reference(states, sizes)
        for name, old in start.items():
            if old.is_floating_point() and "running" not in name:
                memory = self.memory.setdefault(name, {})
                value = self.step(memory, old.double().numpy(), new[name].double().numpy(), **self.options)
                new[name] = torch.from_numpy(np.asarray(value)).to(old.dtype)
        return new


def rows_reference(step, table, rounds, lazy, **options):
    """A table with one number per row, held in part by the clients: every row is a separate model.

    Args:
        step: The server's step.
        table: List of numbers.
        rounds: Clients by round, each (number of examples, {row: new value}).
        lazy: Whether rows without a client do not change.
        options: Options of the step.
    """
    table, memories = list(table), [{} for _ in table]
    for clients in rounds:
        total = sum(size for size, _ in clients)
        for row, old in enumerate(table):
            holders = [(size, values[row]) for size, values in clients if row in values]
            if holders or not lazy:
                mean = old + sum(size * (value - old) for size, value in holders) / total
                table[row] = float(step(memories[row], np.float64(old), np.float64(mean), **options))
    return table


def distance_reference(u, v):
    """1 - cosine, in plain numbers."""
    lengths = math.sqrt(sum(a * a for a in u)) * math.sqrt(sum(b * b for b in v))
    return 1 - sum(a * b for a, b in zip(u, v, strict=True)) / lengths


def spreadout_margin_reference(vectors, margin):
    """Yu et al. 2020, equation 7."""
    total = 0.0
    for c, u in enumerate(vectors):
        for other, v in enumerate(vectors):
            if other != c:
                total += max(0.0, margin - distance_reference(u, v)) ** 2
    return total


def spreadout_top_k_reference(vectors, classes, k, comparison=None):
    """Yu et al. 2020, equation 8."""
    total = 0.0
    for c in classes:
        others = [y for y in (range(len(vectors)) if comparison is None else comparison) if y != c]
        distances = sorted(distance_reference(vectors[c], vectors[y]) for y in others)
        total -= sum(distance**2 for distance in distances[:k])
    return total


def gradient_reference(function, vectors, step=1e-6):
    """Central differences for a function of a list of lists."""
    gradient = []
    for c, vector in enumerate(vectors):
        row = []
        for place in range(len(vector)):
            values = []
            for sign in (1, -1):
                moved = [list(other) for other in vectors]
                moved[c][place] += sign * step
                values.append(function(moved))
            row.append((values[0] - values[1]) / (2 * step))
        gradient.append(row)
    return gradient
