"""Compression of the downlink in plain numpy, written from the paper. This file does not import the package."""

import numpy as np


def largest(values, share):
    """Keeps the numbers of largest magnitude, and sets the others to zero."""
    kept = np.zeros_like(values)
    positions = np.argsort(-np.abs(values))[: int(np.ceil(share * len(values)))]
    kept[positions] = values[positions]
    return kept


def double_squeeze(model, clients, cohorts, share):
    """Tang et al. 2019, Algorithm 1, without the workers' pass: the server's mean step, compressed with its error.

    Args:
        model: Vector.
        clients: Local training by client: a function of the received model.
        cohorts: Clients by round.
        share: Share of the numbers kept in a step.

    Returns:
        The model before each round and after the last; for every round and client the number of steps since the
        client's last model, ``None`` without a model.
    """
    models, error, held, behind = [np.array(model, float)], np.zeros(len(model)), {}, []
    for number, cohort in enumerate(cohorts):
        behind.append({client: number - held[client] if client in held else None for client in cohort})
        step = np.mean([clients[client](models[-1]) for client in cohort], 0) - models[-1] + error
        sent = largest(step, share)
        error = step - sent
        models.append(models[-1] + sent)
        held |= dict.fromkeys(cohort, number)
    return models, behind
