"""MAP@R, confusion of a client's classes, and FedSS's message sizes in plain loops, written from the spec.

This file does not import the package.
"""

import math

import numpy as np


def average_precision_reference(relevant, r):
    """Equation 9 for one query: the sum over i of rel_i times the share of relevant images among the first i, over
    R.
    """
    total = 0.0
    for i in range(1, r + 1):
        if i <= len(relevant) and relevant[i - 1]:
            total += sum(relevant[:i]) / i
    return total / r


def ranking_reference(query, label, gallery, labels, metric):
    """rel_1, rel_2, ...: whether each image has the query's class. Nearest first; irrelevant images win ties."""
    order = []
    for image, other in zip(gallery, labels, strict=True):
        if metric == "cosine":
            pair = [[float(x) / (math.hypot(*vector) or 1.0) for x in vector] for vector in (query, image)]
        else:
            pair = [[float(x) for x in vector] for vector in (query, image)]
        distance = math.dist(*pair)
        order.append((round(distance, 9), int(other == label)))
    return [relevant for _, relevant in sorted(order)]


def map_reference(embeddings, labels, r, metric):
    """The mean over queries; with "relevant" over queries with another image of their class."""
    embeddings, labels = np.asarray(embeddings, np.float64), np.asarray(labels)
    values = []
    for number, (query, label) in enumerate(zip(embeddings, labels, strict=True)):
        images, classes = np.delete(embeddings, number, 0), np.delete(labels, number)
        relevant = ranking_reference(query, label, images, classes, metric)
        depth = sum(relevant) if r == "relevant" else r
        if depth:
            values.append(average_precision_reference(relevant, depth))
    return sum(values) / len(values) if values else math.nan


def own_confusion_reference(logits, targets):
    """Rows: a client's classes in order; columns: the client's class with the largest logit."""
    logits, targets = np.asarray(logits, np.float64), [int(target) for target in targets]
    own = sorted(set(targets))
    counts = [[0] * len(own) for _ in own]
    for row, target in zip(logits, targets, strict=True):
        best = max(own, key=lambda label: (row[label], -label))
        counts[own.index(target)][own.index(best)] += 1
    return own, counts


def sent_parameters_reference(num_others, width, num_rows, has_bias=False):
    """Section 4: parameters received and sent by a client: the rest of the model plus the requested rows."""
    return num_others + num_rows * (width + (1 if has_bias else 0))
