"""FedMargin's equations, entropy maps and maximum mean discrepancy in plain loops, written from the spec.

This file does not import the package. Prototypes are dictionaries of vectors by class; absent classes have no key.
"""

import math

import numpy as np
import torch

from tests.references import cohort_reference, visit_batches_reference, visit_seed_reference
from tests.references_baselines import visit_reference

# ---------------------------------------------------------------------------------------------------------------------
# FedMargin: specs/fedmargin.md, sections 2 to 4, with the numbers of the equations
# ---------------------------------------------------------------------------------------------------------------------


def length(vector):
    return math.sqrt(sum(float(x) ** 2 for x in vector))


def distance(a, b):
    return length([float(x) - float(y) for x, y in zip(a, b, strict=True)])


def prototypes_reference(features, labels, ignore_index, excluded):
    """(1): means and counts per class, for features (N, d) or (N, d, h, w) and labels (N,) or (N, H, W)."""
    vectors = {}
    for feature, label in zip(np.asarray(features, np.float64), np.asarray(labels), strict=True):
        if feature.ndim == 1:
            pixels = [(int(label), feature)]
        else:
            _, h, w = feature.shape
            height, width = label.shape
            pixels = [
                (int(label[math.floor(i * height / h), math.floor(j * width / w)]), feature[:, i, j])
                for i in range(h)
                for j in range(w)
            ]
        for name, vector in pixels:
            if name != ignore_index and name not in excluded:
                vectors.setdefault(name, []).append([float(x) for x in vector])
    means = {c: [math.fsum(column) / len(v) for column in zip(*v, strict=True)] for c, v in vectors.items()}
    return means, {c: len(v) for c, v in vectors.items()}


def class_margins_reference(query, reference, margin, fallback=None):
    """Section 3.1: margins by class; undefined margins have no key."""

    def nearest(point, own, others):
        distances = [distance(point, vector) for c, vector in others.items() if c != own]
        return min(distances) if distances else None

    margins = {}
    for c in query:
        if c not in reference:
            continue
        plus = distance(query[c], reference[c])
        if margin == "semantic":
            margins[c] = plus / 2
            continue
        if margin == "gain":
            after, before = nearest(query[c], c, query), nearest(reference[c], c, reference)
            if after is not None and before is not None:
                margins[c] = after / 2 - before / 2
            continue
        minus = nearest(query[c], c, reference)
        if minus is None and fallback is not None:
            minus = nearest(query[c], c, fallback)
        if minus is None:
            continue
        if margin == "hypothesis":
            margins[c] = (minus - plus) / 2
        else:
            margins[c] = (minus - plus) / (minus + plus) if minus + plus else 0.0
    return margins


def reduce_reference(margins, counts, reduction):
    """(3), (4): one number for the client, `None` without margins."""
    if not margins:
        return None
    if reduction == "mean":
        return sum(margins.values()) / len(margins)
    if reduction == "sum":
        return sum(margins.values())
    if reduction == "count":
        return sum(counts[c] * m for c, m in margins.items()) / sum(counts[c] for c in margins)
    return max(margins.values())


def mean_margin_reference(prototypes, kind, normalize):
    """(5) and section 6.1."""
    known = sorted(prototypes)
    if len(known) < 2:
        return None
    if kind == "pairs":
        total = sum(distance(prototypes[a], prototypes[b]) / 2 for a in known for b in known if a != b)
        margin = total / (len(known) * (len(known) - 1))
    else:
        margin = sum(min(distance(prototypes[a], prototypes[b]) / 2 for b in known if b != a) for a in known)
        margin /= len(known)
    return margin / (sum(length(prototypes[c]) for c in known) / len(known)) if normalize else margin


def aggregate_reference(clients, counts, sizes, weighting):
    """(6): vectors by class."""
    known = sorted({c for client in clients for c in client})
    result = {}
    for c in known:
        total, vector = 0.0, None
        for client, count, size in zip(clients, counts, sizes or [None] * len(clients), strict=True):
            if c in client:
                weight = {"class_count": count[c], "num_samples": size, "uniform": 1}[weighting]
                scaled = [weight * float(x) for x in client[c]]
                vector = scaled if vector is None else [a + b for a, b in zip(vector, scaled, strict=True)]
                total += weight
        result[c] = [x / total for x in vector]
    return result


def memory_reference(previous, current):
    """(7): vectors by class."""
    result = dict(previous)
    for c, vector in current.items():
        if c in previous:
            result[c] = [0.1 * float(p) + 0.9 * float(q) for p, q in zip(previous[c], vector, strict=True)]
        else:
            result[c] = list(vector)
    return result


def attention_reference(values, kind):
    """(8) and the notes in section 4; `None` means missing."""
    count = len(values)
    if kind == "sum":
        values = [None if v is None else max(v, 0.0) for v in values]
    known = [v for v in values if v is not None]
    if not known:
        return [1 / count] * count
    values = [sum(known) / len(known) if v is None else v for v in values]
    if kind == "sum":
        total = sum(values)
        return [v / total if total else 1 / count for v in values]
    scale = sum(abs(v) for v in values) / count
    powers = [math.exp(v / scale if scale else 0.0) for v in values]
    return [power / sum(powers) for power in powers]


def combine_reference(local, aggregate, combine, sizes=None):
    """(9) and the notes in section 4."""
    both = list(zip(local, aggregate, strict=True))
    weights = {
        "mean": [(a + b) / 2 for a, b in both],
        "product": [a * b for a, b in both],
        "lpm": list(local),
        "apm": list(aggregate),
    }[combine]
    if sum(weights) == 0:
        weights = [1.0] * len(weights)
    if sizes is not None:
        weights = [a * n for a, n in zip(weights, sizes, strict=True)]
    return [a / sum(weights) for a in weights]


def fedmargin_reference(net, features, clients, loss, optimizer, rounds, cohort_size, seed, batch_size, epochs=1):
    """The rounds of section 4 with default options, one plain PyTorch loop per client; changes the network.

    Args:
        net: A ``torch.nn.Module`` without integer entries.
        features: The layers that compute the features.
        clients: (inputs, labels) by client.
        loss: Function of (net, batch).
        optimizer: Function of parameters, called for every visit.
        rounds: Number of rounds.
        cohort_size: Clients per round.
        seed: Seed of the schedule.
        batch_size: Examples per batch.
        epochs: Local epochs.

    Returns:
        For every round the global state and a dictionary: LPM, APM and attention by client, and AMM.
    """

    def prototypes(tensors):
        net.eval()
        with torch.no_grad():
            return prototypes_reference(features(tensors[0]), tensors[1], None, ())

    history, known = [], {}
    for round in range(rounds):
        start = {name: value.clone() for name, value in net.state_dict().items()}
        cohort = cohort_reference(seed, round, clients, cohort_size)
        states, sets, counts, lpm = [], [], [], []
        for client in cohort:
            net.load_state_dict(start)
            before, _ = prototypes(clients[client])
            visit_seed = visit_seed_reference(seed, round, client)
            batches = visit_batches_reference(clients[client], batch_size, visit_seed, epochs)
            states.append(visit_reference(net, start, batches, loss, optimizer, visit_seed))
            after, count = prototypes(clients[client])
            sets.append(after)
            counts.append(count)
            lpm.append(reduce_reference(class_margins_reference(after, before, "semantic"), count, "mean"))
        current = aggregate_reference(sets, counts, None, "class_count")
        reference = {**current, **known}
        known = memory_reference(known, current)
        apm = [
            reduce_reference(class_margins_reference(after, reference, "semantic"), count, "mean")
            for after, count in zip(sets, counts, strict=True)
        ]
        weights = combine_reference(attention_reference(lpm, "sum"), attention_reference(apm, "sum"), "mean")
        mean = {
            name: sum(weight * state[name].double() for weight, state in zip(weights, states, strict=True)).float()
            for name in start
        }
        net.load_state_dict(mean)
        report = {
            name: dict(zip(cohort, values, strict=True))
            for name, values in (("lpm", lpm), ("apm", apm), ("attention", weights))
        }
        history.append((mean, {**report, "amm": mean_margin_reference(known, "pairs", False)}))
    return history


# ---------------------------------------------------------------------------------------------------------------------
# Analysis: specs/fedmargin.md, section 6
# ---------------------------------------------------------------------------------------------------------------------


def mmd_squared_reference(x, y, sigma, estimator):
    """Gretton et al. 2012, pair by pair."""

    def kernel(a, b):
        return math.exp(-(distance(a, b) ** 2) / (2 * sigma**2))

    m, n = len(x), len(y)
    if estimator == "biased":
        own = sum(kernel(a, b) for a in x for b in x) / m**2 + sum(kernel(a, b) for a in y for b in y) / n**2
    else:
        own = sum(kernel(x[i], x[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
        own += sum(kernel(y[i], y[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    return own - 2 * sum(kernel(a, b) for a in x for b in y) / (m * n)


def median_distance_reference(samples):
    """Median over all pairs of different samples."""
    pairs = [distance(samples[i], samples[j]) for i in range(len(samples)) for j in range(i)]
    return float(np.median(pairs))


def shannon_reference(probabilities):
    return -sum(p * math.log(p) for p in probabilities if p > 0)


def softmax_reference(values):
    powers = [math.exp(v - max(values)) for v in values]
    return [power / sum(powers) for power in powers]


def feature_shares_reference(values, activation):
    """Channels of one pixel as numbers that sum to 1."""
    if activation == "softmax":
        return softmax_reference(values)
    values = [max(v, 0.0) if activation == "relu" else abs(v) for v in values]
    total = sum(values)
    return [v / total if total else 1 / len(values) for v in values]


def bilinear_reference(image, height, width):
    """Resizing with `align_corners=False`: pixel centres at halves, outside coordinates clipped to the edge."""
    rows, columns = len(image), len(image[0])
    result = np.zeros((height, width))
    for i in range(height):
        for j in range(width):
            y = min(max((i + 0.5) * rows / height - 0.5, 0.0), rows - 1)
            x = min(max((j + 0.5) * columns / width - 0.5, 0.0), columns - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            upper = image[top][left] * (1 - x + left) + image[top][right] * (x - left)
            lower = image[bottom][left] * (1 - x + left) + image[bottom][right] * (x - left)
            result[i, j] = upper * (1 - y + top) + lower * (y - top)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Example in section 8: three clients, three classes, scalar weights
# ---------------------------------------------------------------------------------------------------------------------

BEFORE = [{0: (0, 0), 1: (4, 0), 2: (0, 3)}, {0: (0, 0), 1: (1, 0)}, {2: (0, 3)}]
AFTER = [{0: (0, -1), 1: (5, 0), 2: (0, 4)}, {0: (0.5, 0), 1: (0.5, 0.5)}, {2: (0, 2)}]
COUNTS = [{0: 10, 1: 10, 2: 20}, {0: 30, 1: 10}, {2: 20}]
SIZES = [40, 40, 20]
PREVIOUS = {0: (0, 0), 1: (3, 0)}
WEIGHTS = [1.0, 2.0, 4.0]
