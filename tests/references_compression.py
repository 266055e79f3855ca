"""Compression of what a server sends, written from the paper in plain numpy. Nothing here imports the package."""

import numpy as np


def largest(values, share):
    """The numbers of largest magnitude, and zeros."""
    kept = np.zeros_like(values)
    positions = np.argsort(-np.abs(values))[: int(np.ceil(share * len(values)))]
    kept[positions] = values[positions]
    return kept


def double_squeeze(model, clients, cohorts, share):
    """Tang et al. 2019, Algorithm 1, without the workers' pass: the server's mean step, compressed with its error.

    Args:
        model: Vector.
        clients: Client to its training: a function of the model that it is sent.
        cohorts: For every round its clients.
        share: Share of the numbers that a step keeps.

    Returns:
        The model of every round, the first one too; for every round and client the number of steps since the model that
        it holds, ``None`` where it holds none.

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
